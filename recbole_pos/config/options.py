"""THE table of options: what each may be. Defaults, and the sentence on each, stand in yaml.

From a row come the checks and their messages (``checks.py``), what a search may vary, what starting
from another run must not change, and what ``run --help`` lists. The type of an option is that of
its default or, where that is empty, of the row's example. An option within a mapping is written
with a dot; what is said of a list holds for what is in it. A test holds that every option of the
plugin, and every number of RecBole's, has a row.
"""

from __future__ import annotations

import math
import os

from recbole_pos.config.effects import (
    custom,
    either,
    embedded,
    files,
    histories,
    labelled,
    never,
    of_fields,
    of_numbers,
    of_tables,
    sequential,
    several_targets,
    tables,
    trained,
    under,
    unused_by,
)
from recbole_pos.config.option import (
    DATA,
    IGNORED,
    SCHEDULE,
    TRAINING,
    Option,
)
from recbole_pos.values import SECONDS


def cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_ABOVE_0, _BELOW_1, _ABOVE_1 = (math.nextafter(a, b) for a, b in ((0, 1), (1, 0), (1, 2)))
_SIZE = 65_536  # of vectors: beyond any published model, and its square fits in memory
_LENGTH = 16_384  # of histories, of which attention holds pairs
_WEIGHT = 1e6  # of a part of a loss or a sum
_UNITS = tuple(SECONDS)
_FACTORS = ("toeplitz", "full", "identity")
_PICKLES = "data are not cached as pickle files here, which would be loaded unchecked; remove it"
_EVALUATION = {
    **dict.fromkeys(("split", "order", "group_by", "mode")),
    "target": "all",
    "cold_items": "keep",
    "ties": "file",
}
_NEGATIVES = {
    **{"distribution": "uniform", "sample_num": 1, "alpha": 1.0, "dynamic": False},
    "candidate_num": 0,
}
# Conditions that several options share.
_WINDOWS = (under("augmentation", "all_positions"),)
_TRAINED = (trained,)
_NEGATIVE = (trained, under("train_neg_sample_args.distribution", "uniform", "popularity"))
_NOT_FEAREC = (unused_by("FEARec"),)
_NO_GRAPH = (custom("knowledge graphs are not read"),)
_CLIPPING = {"max_norm": 1.0, "norm_type": 2.0, "error_if_nonfinite": False}

_TABLE = (
    # names of a run
    Option("model", role=DATA),
    Option("dataset", role=DATA),
    Option("plugins", example=["my_models"], alone=True, role=DATA),
    # what is read
    Option("data_path", role=DATA),
    Option("encoding", role=DATA, only=(files(parquet=False),)),
    Option("field_separator", role=DATA, only=(files(parquet=False),)),
    Option("seq_separator", role=DATA, only=(files(parquet=False),)),
    Option("column_types", example={"user_id": "token"}, role=DATA, only=(files(parquet=True),)),
    Option("USER_ID_FIELD", role=DATA),
    Option("ITEM_ID_FIELD", role=DATA),
    Option("RATING_FIELD", role=DATA, only=(custom(),)),
    Option("TIME_FIELD", role=DATA),
    Option("LABEL_FIELD", role=DATA, only=(custom("here items are ranked, and no label is read"),)),
    Option("NEG_PREFIX", role=DATA, only=_NEGATIVE),
    Option("ITEM_LIST_LENGTH_FIELD", role=DATA, only=(sequential,)),
    Option("LIST_SUFFIX", role=DATA, only=(sequential,)),
    Option("POSITION_FIELD", role=DATA, only=(custom(),)),
    Option("HEAD_ENTITY_ID_FIELD", role=DATA, only=_NO_GRAPH),
    Option("TAIL_ENTITY_ID_FIELD", role=DATA, only=_NO_GRAPH),
    Option("RELATION_ID_FIELD", role=DATA, only=_NO_GRAPH),
    Option("ENTITY_ID_FIELD", role=DATA, only=_NO_GRAPH),
    Option(
        "load_col",
        example={"inter": ["user_id", "item_id", "timestamp"]},
        empty=True,
        role=DATA,
        only=(of_tables,),
    ),
    Option("unload_col", example={"inter": ["rating"]}, role=DATA, only=(of_tables,)),
    Option("unused_col", example={"inter": ["rating"]}, role=DATA, only=(of_tables,)),
    Option(
        "additional_feat_suffix",
        example=["ent"],
        alone=True,
        role=DATA,
        only=(custom("attributes of items belong into the item table"),),
    ),
    Option("seq_len", 1, 10**6, example={"tags": 10}, role=DATA, unit="tokens", only=(of_fields,)),
    Option("threshold", example={"rating": 4}, role=DATA, only=(labelled,)),
    Option("timestamp_unit", choices=_UNITS, role=DATA),
    Option(
        "preload_weight",
        example={"ent_id": "ent_emb"},
        role=DATA,
        only=(custom("give vectors of items as float fields of the item table"),),
    ),
    Option("alias_of_user_id", example=["name"], role=DATA, only=(of_fields,)),
    Option("alias_of_item_id", example=["name"], role=DATA, only=(of_fields,)),
    Option("alias_of_entity_id", example=["name"], role=DATA, only=_NO_GRAPH),
    Option("alias_of_relation_id", example=["name"], role=DATA, only=_NO_GRAPH),
    Option("normalize_field", example=["price"], role=DATA, only=(of_fields,)),
    Option("normalize_all", example=True, role=DATA, only=(of_numbers,)),
    Option(
        "discretization", 1, 10**6, example={"price": {"method": "LD"}}, role=DATA, only=(embedded,)
    ),
    Option("numerical_features", example=["price"], role=DATA, only=(embedded,)),
    Option("kg_reverse_r", example=True, role=DATA, only=_NO_GRAPH),
    Option("benchmark_filename", example=["train", "valid", "test"], role=DATA),
    # what of it is left
    Option("rm_copies", role=DATA),
    Option("session_filter", role=DATA),
    Option("train_fraction", role=DATA),
    Option("rm_dup_inter", choices=("first", "last"), example="first", role=DATA),
    Option("val_interval", example={"rating": "[3,inf)"}, interval=True, role=DATA),
    Option("filter_inter_by_user_or_item", role=DATA, only=(tables,)),
    Option("user_inter_num_interval", example="[0,inf)", empty=True, interval=True, role=DATA),
    Option("item_inter_num_interval", example="[0,inf)", empty=True, interval=True, role=DATA),
    Option("entity_kg_num_interval", example="[0,inf)", interval=True, only=_NO_GRAPH),
    Option("relation_kg_num_interval", example="[0,inf)", interval=True, only=_NO_GRAPH),
    # evaluation
    Option("eval_args", inner=_EVALUATION, empty=True, role=DATA),
    Option("eval_args.target", choices=("all", "last", "first", "random"), only=(several_targets,)),
    Option("eval_args.cold_items", choices=("keep", "drop")),
    Option("eval_args.ties"),
    Option("metrics", alone=True, role=DATA),
    Option("topk", 1, 10**6, alone=True, role=DATA),
    Option("valid_metric", role=DATA),
    Option("valid_metric_bigger", role=DATA, only=(never("follows from valid_metric"),)),
    Option("metric_decimal_place", 1, 15, role=DATA),
    Option("mask_history", example=True, role=DATA),
    Option("repeatable", role=DATA, only=_NEGATIVE),
    Option("eval_batch_size", 1, 10**7, role=TRAINING),
    # how long and where a run trains
    Option("seed", 0, 2**32 - 1),
    Option("shuffle", only=_TRAINED),
    Option("require_pow", example=True, only=(custom(),)),
    Option("wandb_project", only=(under("log_wandb"),)),
    Option("epochs", 1, 10**6, role=SCHEDULE, unit="epochs"),
    Option("eval_step", 0, 10**9, role=SCHEDULE, unit="epochs"),
    Option(
        "stopping_step", 0, 10**9, role=SCHEDULE, unit="validations", only=(under("eval_step"),)
    ),
    Option("gpu_id", role=SCHEDULE),
    Option("compile", role=SCHEDULE),
    Option("batch_shapes", choices=("auto", "exact", "fixed"), role=TRAINING, only=_WINDOWS),
    Option("data_on_device", choices=("auto", "always", "never"), role=SCHEDULE),
    Option(
        "precision", choices=("auto", "fp32", "tf32", "bf16", "fp16"), role=TRAINING, only=_TRAINED
    ),
    Option("worker", 0, 2 * cores(), unit="processes"),
    Option("show_progress", role=SCHEDULE),
    Option("tensorboard", role=SCHEDULE),
    Option("cache", role=SCHEDULE),
    # what an example is
    Option("MAX_ITEM_LIST_LENGTH", 1, _LENGTH, unit="events", only=(histories,)),
    Option(
        "augmentation",
        choices=("prefix", "none", "all_positions"),
        role=TRAINING,
        only=(sequential, trained),
    ),
    Option(
        "train_windows",
        choices=("last", "chunk", "sliding", "prefix"),
        role=TRAINING,
        only=_WINDOWS,
    ),
    Option(
        "window_stride",
        1,
        _LENGTH,
        example=25,
        role=TRAINING,
        unit="events",
        only=(*_WINDOWS, under("train_windows", "sliding")),
    ),
    Option("length_pool", 1, 10**6, role=TRAINING, unit="batches", only=_WINDOWS),
    Option("train_batch_size", 1, 10**7, role=TRAINING),
    Option(
        "train_batch_events", 1, 10**9, example=16384, role=TRAINING, unit="events", only=_WINDOWS
    ),
    Option("train_neg_sample_args", inner=_NEGATIVES, empty=True, role=TRAINING, only=_TRAINED),
    Option("train_neg_sample_args.distribution", choices=("none", "uniform", "popularity")),
    Option("train_neg_sample_args.sample_num", 1, 10**4),
    Option(
        "train_neg_sample_args.candidate_num",
        0,
        10**4,
        only=(under("train_neg_sample_args.dynamic"),),
    ),
    Option(
        "train_neg_sample_args.alpha",
        -100,
        100,
        only=(under("train_neg_sample_args.distribution", "popularity"),),
    ),
    Option("train_neg_sample_args.dynamic", only=(under("train_neg_sample_args.candidate_num"),)),
    # the optimiser
    Option("learner", choices=("adam", "adamw", "sgd", "adagrad", "rmsprop"), only=_TRAINED),
    Option("learning_rate", _ABOVE_0, 1e12, only=_TRAINED),
    Option("adam_betas", 0, _BELOW_1, pair=True, only=(trained, under("learner", "adam", "adamw"))),
    Option("weight_decay", 0, _WEIGHT, only=_TRAINED),
    Option("lr_decay_step", 0, 10**9, unit="epochs", only=_TRAINED),
    Option("lr_decay_rate", _ABOVE_0, 1, only=(trained, under("lr_decay_step"))),
    Option("clip_grad_norm", example={"max_norm": 1.0}, inner=_CLIPPING, only=_TRAINED),
    Option("clip_grad_norm.max_norm", _ABOVE_0, 1e12),
    Option("clip_grad_norm.norm_type", 0, math.inf),
    # starting from another run
    Option("init_from", example="saved/ml-100k/PosSASRec/20260101-120000", role=DATA),
    Option("train_only", example=["kernel"]),
    Option("update_from", example="saved/ml-100k/PosSASRec/20260101-120000", role=DATA),
    Option("new_items", example="category"),
    # sizes
    Option("hidden_size", 1, _SIZE),
    Option("inner_size", 1, _SIZE, only=(under("block", "transformer", "ligr"),)),
    Option("embedding_size", 1, _SIZE),
    Option("n_layers", 1, 1000),
    Option("num_layers", 1, 1000),
    Option("n_heads", 1, 1024, only=_NOT_FEAREC),
    Option("graph_layers", 1, 1000),
    Option("block_num", 1, 1000),
    Option("step", 1, 1000),
    Option("readout_steps", 1, 1000),
    Option("nh", 1, 10**4),
    Option("nv", 1, 10**4),
    Option("interest_size", 1, 10**4),
    Option("k_interests", 1, 10**4),
    Option("prototype_size", 1, 10**4),
    Option("kernel_size", 1, 1000),
    Option("dilations", 1, 1000),
    Option("k", 1, 10**6),
    Option("order_len", 1, _LENGTH, unit="events"),
    Option("short_item_length", 1, _LENGTH, unit="events"),
    # layers
    Option("block", choices=("transformer", "hstu", "ligr")),
    Option("norm", choices=("pre", "post"), only=(under("block", "transformer"),)),
    Option(
        "hidden_act",
        choices=("gelu", "relu", "swish", "tanh", "sigmoid"),
        only=(under("block", "transformer"),),
    ),
    Option("layer_norm_eps", _ABOVE_0, 1),
    Option("hidden_dropout_prob", 0, _BELOW_1, role=TRAINING),
    Option("attn_dropout_prob", 0, _BELOW_1, role=TRAINING, only=_NOT_FEAREC),
    Option("dropout_prob", 0, _BELOW_1),
    Option("dropout_probs", 0, _BELOW_1, pair=True),
    Option("item_dropout", 0, _BELOW_1),
    Option("sess_dropout", 0, _BELOW_1),
    Option("attention_bias"),
    Option("attention_output"),
    Option("embedding_scale"),
    Option("initializer_range", 0, 1000, role=TRAINING, only=(unused_by("CORE"),)),
    Option("pooling_mode", choices=("mean", "max", "sum")),
    Option("pooling_type", choices=("average", "max")),
    Option("dnn_type", choices=("trm", "ave")),
    # losses
    Option("loss_type", empty=True, role=TRAINING),
    Option("n_buckets", 1, 10**4, example=100),
    Option("bucket_size_x", 1, 10**6, example=100),
    Option("bucket_size_y", 1, 10**6),
    Option("mix_x"),
    Option("reg_weight", 0, _WEIGHT, pair=True),
    Option("reg_loss_ratio", 0, _WEIGHT),
    Option("lmd", 0, _WEIGHT, only=_NOT_FEAREC),
    Option("lmd_sem", 0, _WEIGHT, only=_NOT_FEAREC),
    Option("lambda_0", -_WEIGHT, _WEIGHT),
    Option("lambda_1", -_WEIGHT, _WEIGHT),
    Option("lambda_2", -_WEIGHT, _WEIGHT),
    Option("temperature", _ABOVE_0, _WEIGHT),
    Option("tau_ratio", _ABOVE_0, _WEIGHT),
    Option("mask_ratio", _ABOVE_0, 1),
    Option("ft_ratio", 0, 1),
    Option("fredom", only=_NOT_FEAREC),
    Option("fredom_type", only=_NOT_FEAREC),
    Option("std", only=_NOT_FEAREC),
    Option("alpha", 0, 100),
    Option("shrink", 0, 1e9),
    Option("weight", 0, 1),
    Option("global_ratio", _ABOVE_0, 1, example=0.5),
    Option("spatial_ratio", 0, 1, example=0.5, only=(under("dual_domain"),)),
    Option("topk_factor", _ABOVE_0, _WEIGHT, example=0.5),
    # position schemes
    Option("position", alone=True, role=TRAINING),
    Option("position_from", choices=("newest", "oldest")),
    Option("positional_rank", 1, _SIZE),
    Option("positional_mask", choices=("before_softmax", "after_softmax")),
    Option("kernel_u", choices=_FACTORS),
    Option("kernel_l", choices=_FACTORS),
    Option("kernel_u_shared", only=(under("kernel_u", "toeplitz", "full"),)),
    Option("kernel_l_shared", only=(under("kernel_l", "toeplitz", "full"),)),
    Option(
        "kernel_band",
        1,
        _LENGTH,
        example=20,
        unit="lags",
        only=(either(under("kernel_u", "toeplitz"), under("kernel_l", "toeplitz")),),
    ),
    Option("t5_buckets", 2, 10**5),
    Option("t5_max_distance", 1, 10**6, unit="events"),
    Option("kerple_kind", choices=("log", "power")),
    Option("cape_positions", 1, _LENGTH, example=50, unit="events"),
    Option("difsr_fields", example=["brand"], alone=True),
    Option("difsr_size", 1, _SIZE, only=(under("difsr_fields"),)),
    # time
    Option("request_time", choices=("none", "target"), role=DATA),
    Option("time_unit", choices=_UNITS),
    Option("time_from", choices=("first", "previous")),
    Option("time_buckets", 1, 10**5),
    Option("hstu_time_buckets", 1, 10**5),
    Option("decay_kind", choices=("exponential_power", "power")),
    Option("decay_shortest", 1e-09, 1e12),
    Option("decay_longest", 1e-09, 1e12),
    Option("calendar_parts", choices=("hour", "day", "week", "month", "year", "decade")),
    Option("siren_width", 1, _SIZE),
    Option("siren_omega", 1e-06, 1e6),
    Option("channel_share", 0, 0.5),
    Option("tisas_intervals", 1, 10**5),
    Option("rope_base", _ABOVE_1, 1e12),
    Option("rope_scale", 1e-12, 1e12),
    Option("time_base", _ABOVE_1, 1e12, example=10000.0),
    Option("time_scale", 1e-12, 1e12, only=(under("time_base"),)),
    Option("time_min_period", 1e-09, 1e12, only=(under("time_base", without=True),)),
    Option("time_max_period", 1e-09, 1e12, only=(under("time_base", without=True),)),
    Option("learn_frequencies", choices=("fixed", "ladder", "free")),
    Option("learn_scales"),
    Option("fusion", choices=("early", "split_dim", "split_head", "split_layer", "effective")),
    Option("time_ratio", 0, 1, only=(under("fusion", "split_dim", "split_head", "split_layer"),)),
    Option("gate", choices=("fixed", "sigmoid", "hard"), only=(under("fusion", "early"),)),
    Option(
        "gate_scope",
        choices=("global", "plane", "head"),
        only=(under("fusion", "early"), under("gate", "sigmoid", "hard")),
    ),
    Option("gate_value", 0, 1, only=(under("fusion", "early", "effective"),)),
    # session graphs
    Option("anchors"),
    Option("anchor_overlap", choices=("distance", "edge", "sum"), only=(under("anchors"),)),
    Option("anchor_self_weight", 0, _WEIGHT, only=(under("anchors"),)),
    Option("messages", choices=("sum", "mean")),
    # relations
    Option("relations"),
    Option("relation_heads", 1, 1024),
    Option("relation_size", 1, _SIZE),
    Option("top_k", 1, _LENGTH),
    Option("cross_sequence", choices=("random_order", "time_respecting", "none")),
    Option("inference_relations", choices=("batch", "training_bank", "own", "none"), role=TRAINING),
    Option(
        "bank_size",
        1,
        10**6,
        role=TRAINING,
        unit="users",
        only=(under("inference_relations", "training_bank"),),
    ),
    Option("user_layers", choices=("odd", "even", "all", "none")),
    Option(
        "user_update",
        choices=("gated", "replace"),
        only=(under("user_layers", "odd", "even", "all"),),
    ),
    Option("chunking"),
    Option("prior_weight", 0, _WEIGHT, role=TRAINING),  # 0 is what SCE asks for
    Option("future_weights", 0, _WEIGHT, role=TRAINING),
    # without effect here
    Option("save_dataset", role=IGNORED, why=_PICKLES),
    Option("dataset_save_path", role=IGNORED, why=_PICKLES),
    Option("save_dataloaders", role=IGNORED, why=_PICKLES),
    Option("dataloaders_save_path", role=IGNORED, why=_PICKLES),
    Option(
        "checkpoint_dir",
        role=IGNORED,
        why="a run writes into its own folder; choose it with --run_dir",
    ),
    Option(
        "transform",
        role=IGNORED,
        why="histories are changed by models that do so themselves alone, such as BERT4Rec",
    ),
    Option("state", role=IGNORED, why="levels of logging are set in Python (logging.basicConfig)"),
    Option("loss_decimal_place", role=IGNORED, why="losses are written in full"),
)
OPTIONS = {option.name: option for option in _TABLE}

# What options need of each other. The first is a part of the second: it must divide it ...
DIVIDES = (("n_heads", "hidden_size"), ("n_heads", "embedding_size"), ("n_heads", "difsr_size"))
HEADS_OF_FULL_SIZE = ("FGNN",)  # models of which each head has the size of all
# ... or must not be more.
AT_MOST = (
    ("order_len", "MAX_ITEM_LIST_LENGTH"),
    ("short_item_length", "MAX_ITEM_LIST_LENGTH"),
    ("interest_size", "prototype_size"),
)
# What RecBole's models need at least: FEARec divides by one layer less, Caser squeezes vectors.
LEAST = {("FEARec", "n_layers"): 2, ("Caser", "embedding_size"): 2}


def rule(name: str) -> Option:
    """What is known of an option; nothing of one that another package brought."""
    return OPTIONS.get(name) or Option(name)


def of_role(*roles: str) -> set[str]:
    """The options with one of the roles."""
    return {option.name for option in _TABLE if option.role in roles}
