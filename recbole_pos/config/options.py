"""What values an option may have: ranges, choices, and of what kind those are that are empty.

Types come from the defaults in the yaml files. An option within a mapping is written with a dot;
what is said of a list holds for what is in it.
"""

from __future__ import annotations

import math
from typing import Any

from recbole_pos.data.targets import COLD_ITEMS, TARGETS
from recbole_pos.data.windows import TRAIN_WINDOWS
from recbole_pos.distributed import cores
from recbole_pos.layers.attention import ACTIVATIONS, NORMS
from recbole_pos.layers.graph import MESSAGES, OVERLAPS
from recbole_pos.model.attrformer import USER_LAYERS, USER_UPDATES
from recbole_pos.model.sasrec import BLOCKS
from recbole_pos.position.additive import POSITION_FROM
from recbole_pos.position.bias import KERPLE_KINDS
from recbole_pos.position.frequencies import LEARN
from recbole_pos.position.kernel import FACTORS
from recbole_pos.position.positional_attention import POSITIONAL_MASKS
from recbole_pos.position.time_buckets import TIME_FROM
from recbole_pos.position.time_rotary import FUSIONS, GATES, SCOPES
from recbole_pos.relations.lookup import CROSS_SEQUENCE, INFERENCE
from recbole_pos.values import SECONDS

_ABOVE_0 = math.nextafter(0, 1)
_SIZE = 65_536  # of vectors: beyond any published model, and its square fits in memory
_LENGTH = 16_384  # of histories, of which attention holds pairs
_WEIGHT = 1e6  # of a part of a loss or a sum


# Smallest and largest value allowed. Sizes are also checked against the memory of the machine, see
# allocation.py; a test holds that every option with a number stands here.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "worker": (0, 2 * cores()),
    "epochs": (1, 10**6),
    **dict.fromkeys(("stopping_step", "eval_step", "lr_decay_step"), (0, 10**9)),
    **dict.fromkeys(("train_batch_size", "eval_batch_size"), (1, 10**7)),
    "length_pool": (1, 10**6),
    **dict.fromkeys(("metric_decimal_place", "loss_decimal_place"), (1, 15)),
    "topk": (1, 10**6),
    # sizes
    **dict.fromkeys(("hidden_size", "inner_size", "embedding_size"), (1, _SIZE)),
    **dict.fromkeys(("relation_size", "difsr_size", "positional_rank"), (1, _SIZE)),
    **dict.fromkeys(("n_layers", "num_layers", "graph_layers", "block_num"), (1, 1000)),
    **dict.fromkeys(("step", "readout_steps"), (1, 1000)),
    **dict.fromkeys(("n_heads", "relation_heads"), (1, 1024)),
    **dict.fromkeys(("nh", "nv", "interest_size", "k_interests", "prototype_size"), (1, 10**4)),
    **dict.fromkeys(("kernel_size", "dilations"), (1, 1000)),
    **dict.fromkeys(("bank_size", "k"), (1, 10**6)),
    # places in a history
    **dict.fromkeys(("MAX_ITEM_LIST_LENGTH", "window_stride", "top_k"), (1, _LENGTH)),
    **dict.fromkeys(("cape_positions", "kernel_band"), (1, _LENGTH)),
    **dict.fromkeys(("order_len", "short_item_length"), (1, _LENGTH)),
    "seq_len": (1, 10**6),
    "discretization": (1, 10**6),
    # buckets
    "t5_buckets": (2, 10**5),
    **dict.fromkeys(("time_buckets", "hstu_time_buckets", "tisas_intervals"), (1, 10**5)),
    **dict.fromkeys(("bucket_size_x", "bucket_size_y"), (1, 10**6)),
    "n_buckets": (1, 10**4),
    "t5_max_distance": (1, 10**6),
    # training
    **dict.fromkeys(("learning_rate", "clip_grad_norm.max_norm"), (_ABOVE_0, 1e12)),
    "clip_grad_norm.norm_type": (0, math.inf),
    "lr_decay_rate": (_ABOVE_0, 1),
    "weight_decay": (0, _WEIGHT),
    "adam_betas": (0, math.nextafter(1, 0)),
    "initializer_range": (0, 1000),
    "layer_norm_eps": (_ABOVE_0, 1),
    **dict.fromkeys(("train_neg_sample_args.sample_num",), (1, 10**4)),
    **dict.fromkeys(("train_neg_sample_args.candidate_num",), (0, 10**4)),
    "train_neg_sample_args.alpha": (-100, 100),
    # weights and shares
    **dict.fromkeys(("prior_weight", "future_weights", "anchor_self_weight"), (0, _WEIGHT)),
    **dict.fromkeys(("reg_weight", "reg_loss_ratio", "lmd", "lmd_sem"), (0, _WEIGHT)),
    **dict.fromkeys(("lambda_0", "lambda_1", "lambda_2"), (-_WEIGHT, _WEIGHT)),
    **dict.fromkeys(("weight", "time_ratio", "gate_value", "ft_ratio"), (0, 1)),
    **dict.fromkeys(("mask_ratio", "global_ratio"), (_ABOVE_0, 1)),
    "spatial_ratio": (0, 1),
    **dict.fromkeys(("temperature", "tau_ratio", "topk_factor"), (_ABOVE_0, _WEIGHT)),
    "alpha": (0, 100),
    "shrink": (0, 1e9),
    # frequencies
    **dict.fromkeys(("rope_scale", "time_scale"), (1e-12, 1e12)),
    **dict.fromkeys(("time_min_period", "time_max_period"), (1e-9, 1e12)),
    **dict.fromkeys(("time_base", "rope_base"), (math.nextafter(1, 2), 1e12)),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "train_windows": TRAIN_WINDOWS,
    "augmentation": ("prefix", "none", "all_positions"),
    "learner": ("adam", "adamw", "sgd", "adagrad", "rmsprop"),
    "rm_dup_inter": ("first", "last"),
    "position_from": POSITION_FROM,
    "time_from": TIME_FROM,
    "block": tuple(BLOCKS),
    "norm": NORMS,
    "hidden_act": tuple(ACTIVATIONS),
    "kerple_kind": KERPLE_KINDS,
    "positional_mask": POSITIONAL_MASKS,
    "cross_sequence": CROSS_SEQUENCE,
    "inference_relations": INFERENCE,
    "user_layers": USER_LAYERS,
    "user_update": USER_UPDATES,
    "anchor_overlap": OVERLAPS,
    "messages": MESSAGES,
    "timestamp_unit": tuple(SECONDS),
    "time_unit": tuple(SECONDS),
    "learn_frequencies": LEARN,
    "fusion": FUSIONS,
    "gate": GATES,
    "gate_scope": SCOPES,
    **dict.fromkeys(("kernel_u", "kernel_l"), FACTORS),
    "pooling_mode": ("mean", "max", "sum"),
    "pooling_type": ("average", "max"),
    "dnn_type": ("trm", "ave"),
    "eval_args.target": TARGETS,
    "eval_args.cold_items": COLD_ITEMS,
    "train_neg_sample_args.distribution": ("none", "uniform", "popularity"),
}
# Text that says which numbers are kept, as RecBole writes it.
INTERVALS = (
    *("user_inter_num_interval", "item_inter_num_interval", "val_interval"),
    *("entity_kg_num_interval", "relation_kg_num_interval"),
)
# An example of what is expected, where the default is empty or of another kind.
EXAMPLES: dict[str, Any] = {
    "mask_history": True,
    "window_stride": 25,
    "init_from": "saved/ml-100k/PosSASRec/20260101-120000",
    "train_only": ["kernel"],
    "cape_positions": 50,
    "time_base": 10000.0,
    "kernel_band": 20,
    **dict.fromkeys(("n_buckets", "bucket_size_x"), 100),
    "clip_grad_norm": {"max_norm": 1.0},
    "rm_dup_inter": "first",
    "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
    "unused_col": {"inter": ["rating"]},
    "unload_col": {"inter": ["rating"]},
    "threshold": {"rating": 4},
    **dict.fromkeys(INTERVALS, "[0,inf)"),
    "val_interval": {"rating": "[3,inf)"},
    "seq_len": {"tags": 10},
    "preload_weight": {"ent_id": "ent_emb"},
    "discretization": {"price": {"method": "LD"}},
    "normalize_all": True,
    "normalize_field": ["price"],
    "numerical_features": ["price"],
    "difsr_fields": ["brand"],
    "additional_feat_suffix": ["ent"],
    **{f"alias_of_{kind}_id": ["name"] for kind in ("user", "item", "entity", "relation")},
    # whole by default, but RecBole reads shares
    **dict.fromkeys(("global_ratio", "spatial_ratio", "topk_factor"), 0.5),
}
# Mappings whose keys are known, with an example of each value; None: checked where it is read.
NESTED: dict[str, dict[str, Any]] = {
    "eval_args": {
        **dict.fromkeys(("split", "order", "group_by", "mode")),
        **{"target": "all", "cold_items": "keep"},
    },
    "train_neg_sample_args": {
        **{"distribution": "uniform", "sample_num": 1, "alpha": 1.0, "dynamic": False},
        "candidate_num": 0,
    },
    "clip_grad_norm": {"max_norm": 1.0, "norm_type": 2.0, "error_if_nonfinite": False},
}
# Lists that may also be given as the one thing in them.
ALONE = ("metrics", "topk", "position", "difsr_fields", "additional_feat_suffix")
# What may be None although its default is not, or is told so by check_together (loss_type).
EMPTY = (
    *("loss_type", "load_col", "train_neg_sample_args", "eval_args"),
    *("user_inter_num_interval", "item_inter_num_interval"),
)
# Lists of two.
PAIRS = ("adam_betas", "dropout_probs", "reg_weight")
# The first is a part of the second: it must divide it, or must not be more.
DIVIDES = (("n_heads", "hidden_size"), ("n_heads", "embedding_size"), ("n_heads", "difsr_size"))
HEADS_OF_FULL_SIZE = ("FGNN",)  # models of which each head has the size of all
# What RecBole's models need at least: FEARec divides by one layer less, Caser squeezes vectors.
LEAST = {("FEARec", "n_layers"): 2, ("Caser", "embedding_size"): 2}
AT_MOST = (
    ("order_len", "MAX_ITEM_LIST_LENGTH"),
    ("short_item_length", "MAX_ITEM_LIST_LENGTH"),
    ("interest_size", "prototype_size"),
)
