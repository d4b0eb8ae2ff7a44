"""THE table of options: what each may be. Defaults, and the sentence on each, stand in yaml.

From a row come the checks and their messages (``option.py``, ``checks.py``), what a search may
vary, what starting from another run must not change, and what ``run --help`` lists. An option has
the type of its default or, where that is empty, of the row's example. An option within a mapping is
written with a dot; the row of a list is for its elements. A test checks that every option of the
plugin, and every number of RecBole's, has a row.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from recbole_pos.config import effects, option
from recbole_pos.config.effects import if_any, if_model_is_custom, if_model_is_trained
from recbole_pos.config.option import (
    ABOVE_0,
    ABOVE_1,
    BELOW_1,
    DATA,
    IGNORED,
    MODEL,
    SCHEDULE,
    TRAINING,
    Option,
)
from recbole_pos.data.location import SIDE_FEATURES
from recbole_pos.values import SECONDS


def count_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _rows(names: str, *allowed: Any, only: Any = (), **attributes: Any) -> list[Option]:
    """Return a row for each name in a text; the rows are otherwise equal."""
    # ``allowed``: the choices with spaces between them, or the smallest and the largest number
    if len(allowed) == 1:
        attributes["choices"] = tuple(allowed[0].split())
        allowed = ()
    attributes["only"] = effects.make_conditions(only)
    return [Option(name, *allowed, **attributes) for name in names.split()]


def _group(*groups: list[Option], role: str = MODEL, only: Any = ()) -> list[Option]:
    """Return the rows of groups, all with this role, and with these conditions before their own."""
    conditions = effects.make_conditions(only)
    rows = [row for group in groups for row in group]
    return [replace(row, role=role, only=(*conditions, *row.only)) for row in rows]


_SIZE = 65_536  # of vectors: beyond any published model, and its square fits in memory
_LENGTH = 16_384  # interactions of a history, of which attention holds pairs
_WEIGHT = 1e6  # of a part of a loss or a sum
_EVALUATION = {
    **dict.fromkeys(("split", "order", "group_by", "mode")),
    **{"target": "all", "cold_items": "keep", "ties": "file"},
}
_NEGATIVES = {"distribution": "uniform", "sample_num": 1, "alpha": 1.0, "dynamic": False}
_CLIPPING = {"max_norm": 1.0, "norm_type": 2.0, "error_if_nonfinite": False}
_NOT_FEAREC = effects.if_model_is_not("FEARec")
_NO_LABEL = "items are ranked, and no label is read"
_KEEP = "val_interval: {{rating: '[4,inf)'}} keeps only what is rated so"
_WITH_NEGATIVES = "train_neg_sample_args.distribution: uniform popularity"

_TABLE: list[Option] = [
    # the data: how files are written and fields are called, what is read, and what of it is left
    *_group(
        _rows("model data_path encoding field_separator seq_separator"),
        _rows("USER_ID_FIELD ITEM_ID_FIELD TIME_FIELD"),
        _rows("dataset"),
        _rows("plugins", example=["my_models"], allows_single=True),
        _rows("column_types", example={"user_id": "token"}),
        _rows("RATING_FIELD POSITION_FIELD", only=if_model_is_custom()),
        _rows("LABEL_FIELD", only=if_model_is_custom(_NO_LABEL)),
        _rows("ITEM_LIST_LENGTH_FIELD LIST_SUFFIX", only=effects.if_model_is_sequential),
        _rows(
            "load_col unload_col unused_col",
            allows_empty=True,
            only=effects.if_named_tables_are_loaded,
            check=option.check_columns,
        ),
        _rows("threshold", example={"rating": 4}, only=if_model_is_custom(f"{_NO_LABEL}; {_KEEP}")),
        _rows("timestamp_unit", " ".join(SECONDS)),
        _rows("normalize_all", example=True, only=effects.if_numbers_are_read),
        _rows(
            "discretization", only=effects.if_fields_are_embedded, check=option.check_discretization
        ),
        _rows("numerical_features", example=["price"], only=effects.if_fields_are_embedded),
        _rows("benchmark_filename", example=["train", "valid", "test"]),
        _rows("rm_copies"),
        _rows("session_filter", check=option.make_check("data.splits:read_session_filter")),
        _rows(
            "train_fraction",
            only=effects.if_sessions_are_split,
            check=option.make_check("data.splits:read_fraction"),
        ),
        _rows("rm_dup_inter", "first last", example="first"),
        _rows("val_interval", example={"rating": "[3,inf)"}, check=option.check_interval),
        _rows(
            "user_inter_num_interval item_inter_num_interval",
            example="[3,inf)",
            allows_empty=True,
            check=option.check_interval,
        ),
        _rows(
            "target_events",
            only=effects.if_not_refused("target_events"),
            check=option.check_target_events,
        ),
        _rows("filter_inter_by_user_or_item", only=effects.if_tables_are_loaded),
        _rows("init_from update_from", example="saved/ml-100k/PosSASRec/20260101-120000"),
        _rows("request_time", "none target", only=effects.if_request_is_read),
        _rows(
            "alias_of_item_id",
            example=["name"],
            only=(effects.if_histories_are_not_cut, effects.if_fields_are_read),
        ),
        role=DATA,
    ),
    *_group(
        _rows("seq_len", 1, 10**6, example={"tags": 10}),
        _rows("alias_of_user_id", example=["name"]),
        _rows("normalize_field", example=["price"]),
        role=DATA,
        only=effects.if_fields_are_read,
    ),
    *_group(_rows("NEG_PREFIX repeatable"), role=DATA, only=(if_model_is_trained, _WITH_NEGATIVES)),
    # evaluation
    *_group(
        _rows("eval_args", inner=_EVALUATION, allows_empty=True),
        _rows("metrics", allows_single=True),
        _rows("topk", 1, 10**6, allows_single=True),
        _rows("valid_metric"),
        _rows("metric_decimal_place", 1, 15),
        _rows("mask_history", example=True),
        role=DATA,
    ),
    *_rows("repeated_targets", "miss candidate", role=DATA, only=effects.if_seen_are_excluded),
    *_rows("eval_args.target", "all last first random", only=effects.if_users_have_several_targets),
    *_rows("eval_args.cold_items", "keep drop"),
    *_rows("eval_args.ties"),
    *_rows("eval_batch_size", 1, 10**7, role=TRAINING),
    # how long and where a run trains
    *_group(
        _rows("epochs", 1, 10**6, only=effects.if_epochs_repeat),
        _rows("eval_step", 0, 10**9, only=effects.if_epochs_repeat),
        _rows("stopping_step", 0, 10**9, only=(if_model_is_trained, "eval_step")),
        _rows("gpu_id", check=option.check_gpus),
        _rows("compile show_progress tensorboard cache"),
        _rows("logger", "csv tensorboard mlflow wandb", example=["mlflow"], allows_single=True),
        _rows("data_on_device", "auto always never"),
        _rows("memory_limit", check=option.make_check("tables.limits:read_limit")),
        role=SCHEDULE,
    ),
    *_rows("seed", 0, 2**32 - 1),
    *_rows("require_pow", example=True, only=if_model_is_custom()),
    *_rows("wandb_project", only=if_any("log_wandb", "logger: wandb")),
    *_rows("worker", 0, 2 * count_cores(), reason="here, twice the cores"),
    # what an example is
    *_rows(
        "MAX_ITEM_LIST_LENGTH",
        1,
        _LENGTH,
        only=(effects.if_model_reads_histories, effects.if_model_is_sequential),
    ),
    *_group(
        _rows("train_windows", "last chunk sliding prefix"),
        _rows("window_stride", 1, _LENGTH, example=25, only="train_windows: sliding"),
        _rows("target_window", 1, 1000, only=effects.if_model_takes_target_window),
        _rows("length_pool", 1, 10**6),
        _rows("train_batch_events", 1, 10**9, example=16384),
        role=TRAINING,
        only="augmentation: all_positions",
    ),
    # training by gradients
    *_group(
        _rows("augmentation", "prefix none all_positions", only=effects.if_model_is_sequential),
        _rows("precision", "auto fp32 tf32 bf16 fp16"),
        _rows("train_batch_size", 1, 10**7),
        _rows("train_neg_sample_args", inner={**_NEGATIVES, "candidate_num": 0}, allows_empty=True),
        role=TRAINING,
        only=if_model_is_trained,
    ),
    *_rows("train_neg_sample_args.distribution", "none uniform popularity"),
    *_rows("train_neg_sample_args.sample_num", 1, 10**4),
    *_rows("train_neg_sample_args.candidate_num", 0, 10**4, only="train_neg_sample_args.dynamic"),
    *_rows(
        "train_neg_sample_args.alpha",
        -100,
        100,
        only="train_neg_sample_args.distribution: popularity",
    ),
    *_rows("train_neg_sample_args.dynamic", only="train_neg_sample_args.candidate_num"),
    *_group(
        _rows("shuffle"),
        _rows("learner", "adam adamw sgd adagrad rmsprop"),
        _rows("learning_rate", ABOVE_0, 1e12),
        _rows("adam_betas", 0, BELOW_1, is_pair=True, only="learner: adam adamw"),
        _rows("weight_decay", 0, _WEIGHT),
        _rows("lr_scheduler", "none step cosine linear", only=effects.if_rate_decays),
        _rows("warmup_steps", 0, 10**9),
        _rows("ema_decay", 0, BELOW_1),
        _rows("lr_decay_step", 0, 10**9, only="lr_scheduler: none step"),
        _rows("lr_decay_rate", ABOVE_0, 1, only=("lr_scheduler: none step", "lr_decay_step")),
        _rows("clip_grad_norm", example={"max_norm": 1.0}, inner=_CLIPPING),
        only=if_model_is_trained,
    ),
    *_rows("clip_grad_norm.max_norm", ABOVE_0, 1e12),
    *_rows("clip_grad_norm.norm_type", 0, math.inf),
    # starting from another run
    *_rows("train_only", example=["kernel"]),
    *_rows("new_items", example="category"),
    # content vectors of items
    *_rows("item_vectors", only=effects.if_model_takes_vectors, check=option.check_vectors),
    *_group(
        _rows("item_vectors_use", "init add replace"),
        _rows("item_vectors_train", example=True),
        _rows("item_vectors_whiten"),
        only="item_vectors",
    ),
    # sizes
    *_rows("hidden_size embedding_size positional_rank relation_size", 1, _SIZE),
    *_rows("inner_size", 1, _SIZE, only="block: transformer ligr"),
    *_rows("n_layers num_layers graph_layers block_num step readout_steps kernel_size", 1, 1000),
    *_rows("dilations", 1, 1000, nonempty=True),
    *_rows("n_heads", 1, 1024, only=_NOT_FEAREC),
    *_rows("relation_heads", 1, 1024),
    *_rows("nh nv interest_size k_interests prototype_size", 1, 10**4),
    *_rows("order_len short_item_length top_k", 1, _LENGTH),
    *_rows("k", 1, 10**6),
    *_rows("hops", 1, 10),
    # layers
    *_rows("block", "transformer hstu ligr"),
    *_group(
        _rows("norm", "pre post"),
        _rows("hidden_act", "gelu relu swish tanh sigmoid"),
        only="block: transformer",
    ),
    *_rows("layer_norm_eps", ABOVE_0, 1),
    *_rows("hidden_dropout_prob", 0, BELOW_1, role=TRAINING),
    *_rows("attn_dropout_prob", 0, BELOW_1, role=TRAINING, only=_NOT_FEAREC),
    *_rows("dropout_prob item_dropout sess_dropout", 0, BELOW_1),
    *_rows("dropout_probs", 0, BELOW_1, is_pair=True),
    *_rows("attention_bias attention_output embedding_scale learn_scales chunking relations"),
    *_rows("initializer_range", 0, 1000, role=TRAINING, only=effects.if_model_is_not("CORE")),
    *_rows("pooling_mode", "mean max sum"),
    *_rows("pooling_type", "average max"),
    *_rows("dnn_type", "trm ave"),
    # fields beside the vectors of items
    *(
        Option(
            name,
            example=["brand"],
            allows_single=True,
            only=(effects.if_model_takes_side_fields, effects.if_not_refused(name)),
        )
        for name in SIDE_FEATURES
    ),
    *_group(
        _rows("feature_fusion", "sum concat_mlp"),
        _rows("numeric_embedding", "periodic binned"),
        _rows("numeric_bins", 2, 10**5, only="numeric_embedding: binned"),
        only=if_any(*SIDE_FEATURES),
    ),
    # losses
    *_group(
        _rows("loss_type", allows_empty=True),
        _rows("negatives", 1, _SIZE),
        _rows("negative_sampler", "uniform popularity in_batch"),
        _rows("logq_correction", "refined standard none", only=effects.if_logits_are_corrected),
        _rows("gbce_t", 0, 1),
        _rows("prior_weight future_weights", 0, _WEIGHT),  # 0 is what SCE asks for
        role=TRAINING,
    ),
    *_rows("n_buckets", 1, 10**4, example=100),
    *_rows("bucket_size_x", 1, 10**6, example=100),
    *_rows("bucket_size_y", 1, 10**6),
    *_rows("mix_x"),
    *_rows("reg_weight", 0, _WEIGHT, is_pair=True),
    *_rows("reg_loss_ratio", 0, _WEIGHT, only=effects.if_model_is_not("SINE")),
    *_rows("lmd lmd_sem", 0, _WEIGHT, only=_NOT_FEAREC),
    *_rows("lambda_0 lambda_1 lambda_2", -_WEIGHT, _WEIGHT),
    *_rows("temperature tau_ratio", ABOVE_0, _WEIGHT),
    *_rows("mask_ratio", ABOVE_0, 1),
    *_rows("ft_ratio weight", 0, 1),
    *_rows("fredom fredom_type std", only=_NOT_FEAREC),
    *_rows("alpha", 0, 100),
    *_rows("shrink", 0, 1e9),
    *_rows("global_ratio", ABOVE_0, 1, example=0.5),
    *_rows("spatial_ratio", 0, 1, example=0.5, only="dual_domain"),
    *_rows("topk_factor", ABOVE_0, _WEIGHT, example=0.5),
    # position schemes
    *_rows(
        "position", allows_single=True, nonempty=True, role=TRAINING, check=option.check_schemes
    ),
    *_rows("position_from", "newest oldest"),
    *_rows("positional_mask", "before_softmax after_softmax"),
    *_rows("kernel_u kernel_l", "toeplitz full identity"),
    *_rows("kernel_u_shared", only="kernel_u: toeplitz full"),
    *_rows("kernel_l_shared", only="kernel_l: toeplitz full"),
    *_rows(
        "kernel_band",
        1,
        _LENGTH,
        example=20,
        only=if_any("kernel_u: toeplitz", "kernel_l: toeplitz"),
    ),
    *_rows("t5_buckets", 2, 10**5),
    *_rows("t5_max_distance", 1, 10**6),
    *_rows("kerple_kind", "log power"),
    *_rows("cape_positions", 1, _LENGTH, example=50),
    *_rows("difsr_fields", example=["brand"], allows_single=True),
    *_rows("difsr_size", 1, _SIZE, only="difsr_fields"),
    # time
    *_rows("time_unit", " ".join(SECONDS)),
    *_rows("time_from", "first previous"),
    *_rows("time_buckets hstu_time_buckets tisas_intervals", 1, 10**5),
    *_rows("decay_kind", "exponential_power power"),
    *_rows("decay_shortest decay_longest", 1e-09, 1e12),
    *_rows("calendar_parts", "hour day week month year decade", nonempty=True),
    *_rows("rote_bases rope_base", ABOVE_1, 1e12),
    *_rows("rote_weights", 0, _WEIGHT),
    *_rows("channel_share", 0, 0.5),
    *_rows("fuxi_position_size", 2, _SIZE),
    *_rows("rope_scale", 1e-12, 1e12),
    *_rows("time_base", ABOVE_1, 1e12, example=10000.0),
    *_rows("time_scale", 1e-12, 1e12, only="time_base"),
    *_rows("time_min_period time_max_period", 1e-09, 1e12, only="not time_base"),
    *_rows("learn_frequencies", "fixed ladder free"),
    *_rows("fusion", "early split_dim split_head split_layer effective"),
    *_rows("time_ratio", 0, 1, only="fusion: split_dim split_head split_layer"),
    *_rows("gate", "fixed sigmoid hard", only="fusion: early"),
    *_rows("gate_scope", "global plane head", only=("fusion: early", "gate: sigmoid hard")),
    *_rows("gate_value", 0, 1, only="fusion: early effective"),
    # session graphs
    *_rows("anchors"),
    *_group(
        _rows("anchor_overlap", "distance edge sum"),
        _rows("anchor_self_weight", 0, _WEIGHT),
        only="anchors",
    ),
    *_rows("messages", "sum mean"),
    # relations
    *_rows("cross_sequence", "random_order time_respecting none"),
    *_rows("inference_relations", "batch training_bank own none", role=TRAINING),
    *_rows("bank_size", 1, 10**6, role=TRAINING, only="inference_relations: training_bank"),
    *_rows("user_layers", "odd even all none"),
    *_rows("user_update", "gated replace", only="user_layers: odd even all"),
    # without effect here
    *_group(
        _rows(
            "save_dataset dataset_save_path save_dataloaders dataloaders_save_path",
            reason="data are not cached as pickle files here, which would be loaded unchecked; "
            "remove it",
        ),
        _rows(
            "HEAD_ENTITY_ID_FIELD TAIL_ENTITY_ID_FIELD RELATION_ID_FIELD ENTITY_ID_FIELD "
            "kg_reverse_r alias_of_entity_id alias_of_relation_id entity_kg_num_interval "
            "relation_kg_num_interval",
            reason="knowledge graphs are not read; leave it out",
        ),
        _rows(
            "preload_weight additional_feat_suffix",
            reason="vectors of items are given as a file or frame; use item_vectors",
        ),
        _rows(
            "checkpoint_dir", reason="a run writes into its own folder; choose it with --run_dir"
        ),
        _rows(
            "transform",
            reason="histories are changed by models that do so themselves alone, such as BERT4Rec",
        ),
        _rows("state", reason="levels of logging are set in Python (logging.basicConfig)"),
        _rows("loss_decimal_place", reason="losses are written in full"),
        _rows("valid_metric_bigger", reason="it follows from valid_metric"),
        role=IGNORED,
    ),
]
OPTIONS = {option.name: option for option in _TABLE}
# Options, and the names that other libraries and papers have for them.
_SYNONYMS = {
    "learning_rate": "lr",
    "train_batch_size": "batch_size bs",
    "epochs": "max_epochs num_train_epochs",
    "stopping_step": "patience early_stop early_stopping",
    "learner": "optimizer optim",
    "weight_decay": "wd l2 l2_emb l2_reg",
    "MAX_ITEM_LIST_LENGTH": "maxlen max_len max_length max_seq_len max_seq_length "
    "session_max_len max_sequence_length",
    "hidden_size embedding_size": "hidden hidden_dim hidden_units d_model dim n_factors emb_dim "
    "embed_dim embedding_dim",
    "n_layers num_layers": "layers blocks n_blocks num_blocks num_hidden_layers",
    "n_heads": "heads num_attention_heads",
    "hidden_dropout_prob attn_dropout_prob dropout_prob": "dropout dropout_rate drop_rate",
    "use_gpu gpu_id": "device gpu gpus cuda accelerator",
    "worker": "workers num_workers n_workers",
    "seed": "random_seed random_state manual_seed",
    "topk": "top_k ks",
}


def find_option(name: str) -> Option:
    """Return the row of an option; for a custom option one without bounds or conditions."""
    return OPTIONS.get(name) or Option(name)


def list_by_role(*roles: str) -> set[str]:
    """Return the names of the options with one of the roles."""
    return {option.name for option in _TABLE if option.role in roles}


def find_synonyms(name: str) -> list[str]:
    """Return the options of the same meaning as a name, which may be that of another library."""
    name = name.lower().replace("-", "_")
    pairs = _SYNONYMS.items()
    groups = [options for options, names in pairs if name in f"{options} {names}".split()]
    return " ".join(groups).split()
