"""THE table of options: what each may be. Defaults, and the sentence on each, stand in yaml.

From a row come the checks and their messages (``option.py``, ``checks.py``), what a search may
vary, what starting from another run must not change, and what ``run --help`` lists. The type of an
option is that of its default or, where that is empty, of the row's example. An option within a
mapping is written with a dot; the row of a list is for its elements. A test holds that
every option of the plugin, and every number of RecBole's, has a row.
"""

from __future__ import annotations

import math
import os
from typing import Any

from recbole_pos.config import effects, option
from recbole_pos.config.effects import (
    if_model_is_custom,
    if_model_is_not,
    if_model_is_trained,
    if_option,
    never,
)
from recbole_pos.config.option import DATA, IGNORED, SCHEDULE, TRAINING, Option
from recbole_pos.data.location import SIDE_FEATURES
from recbole_pos.values import SECONDS


def cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _rows(names: str, *bounds: Any, **attributes: Any) -> list[Option]:
    """Return a row for each of the names, split at spaces, with the same bounds and attributes."""
    return [Option(name, *bounds, **attributes) for name in names.split()]


def _choice(name: str, choices: str, **attributes: Any) -> Option:
    """Return the row of an option whose values are names; ``choices`` are split at spaces."""
    return Option(name, choices=tuple(choices.split()), **attributes)


_ABOVE_0, _BELOW_1, _ABOVE_1 = (math.nextafter(a, b) for a, b in ((0, 1), (1, 0), (1, 2)))
_SIZE = 65_536  # of vectors: beyond any published model, and its square fits in memory
_LENGTH = 16_384  # of histories, of which attention holds pairs
_WEIGHT = 1e6  # of a part of a loss or a sum
_RUN = "saved/ml-100k/PosSASRec/20260101-120000"
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
_CLIPPING = {"max_norm": 1.0, "norm_type": 2.0, "error_if_nonfinite": False}
# Conditions that several options share.
_WINDOWS = (if_option("augmentation", "all_positions"),)
_TRAINED = (if_model_is_trained,)
_NEGATIVE = (
    if_model_is_trained,
    if_option("train_neg_sample_args.distribution", "uniform", "popularity"),
)
_NOT_FEAREC = (if_model_is_not("FEARec"),)
_NO_GRAPH = (if_model_is_custom("knowledge graphs are not read"),)
_OF_GRAPHS: dict[str, Any] = {"role": DATA, "only": _NO_GRAPH}
_OF_FIELDS: dict[str, Any] = {"role": DATA, "only": (effects.if_fields_are_read,)}
_TRANSFORMER = (if_option("block", "transformer"),)
_WITH_FEATURES = effects.if_any(*map(if_option, SIDE_FEATURES))
_VECTORS = (effects.if_any(if_option("preload_weight"), if_option("item_vectors")),)

_TABLE: list[Option] = [
    # what is run, and how files are written
    *_rows("model data_path USER_ID_FIELD ITEM_ID_FIELD TIME_FIELD", role=DATA),
    Option("dataset", role=DATA, check=option.check_nothing),
    Option("plugins", example=["my_models"], alone=True, role=DATA),
    *_rows(
        "encoding field_separator seq_separator",
        role=DATA,
        only=(effects.if_data_files_are("text"),),
    ),
    Option(
        "column_types",
        example={"user_id": "token"},
        role=DATA,
        only=(effects.if_data_files_are("parquet"),),
    ),
    *_rows("RATING_FIELD POSITION_FIELD", role=DATA, only=(if_model_is_custom(),)),
    Option(
        "LABEL_FIELD",
        role=DATA,
        only=(if_model_is_custom("here items are ranked, and no label is read"),),
    ),
    Option("NEG_PREFIX", role=DATA, only=_NEGATIVE),
    *_rows("ITEM_LIST_LENGTH_FIELD LIST_SUFFIX", role=DATA, only=(effects.if_model_is_sequential,)),
    *_rows(
        "HEAD_ENTITY_ID_FIELD TAIL_ENTITY_ID_FIELD RELATION_ID_FIELD ENTITY_ID_FIELD", **_OF_GRAPHS
    ),
    Option("kg_reverse_r", example=True, **_OF_GRAPHS),
    *_rows("alias_of_entity_id alias_of_relation_id", example=["a"], **_OF_GRAPHS),
    # what of it is read
    *_rows(
        "load_col unload_col unused_col",
        empty=True,
        role=DATA,
        only=(effects.if_named_tables_are_loaded,),
        check=option.check_columns,
    ),
    Option(
        "additional_feat_suffix",
        example=["ent"],
        alone=True,
        role=DATA,
        only=(effects.if_model_takes_vectors, if_option("preload_weight")),
    ),
    Option("seq_len", 1, 10**6, example={"tags": 10}, unit="tokens", **_OF_FIELDS),
    Option("threshold", example={"rating": 4}, role=DATA, only=(effects.if_labels_are_read,)),
    Option("timestamp_unit", choices=tuple(SECONDS), role=DATA),
    Option(
        "preload_weight",
        example={"ent_id": "ent_emb"},
        role=DATA,
        only=(effects.if_model_takes_vectors,),
    ),
    *_rows("alias_of_user_id alias_of_item_id", example=["name"], **_OF_FIELDS),
    Option("normalize_field", example=["price"], **_OF_FIELDS),
    Option("normalize_all", example=True, role=DATA, only=(effects.if_numbers_are_read,)),
    Option(
        "discretization",
        role=DATA,
        only=(effects.if_fields_are_embedded,),
        check=option.check_discretization,
    ),
    Option(
        "numerical_features", example=["price"], role=DATA, only=(effects.if_fields_are_embedded,)
    ),
    Option("benchmark_filename", example=["train", "valid", "test"], role=DATA),
    # what of it is left
    Option("rm_copies", role=DATA),
    Option("session_filter", role=DATA, check=option.check_session_filter),
    Option("train_fraction", role=DATA, check=option.check_fraction),
    _choice("rm_dup_inter", "first last", example="first", role=DATA),
    Option("val_interval", example={"rating": "[3,inf)"}, role=DATA, each=option.check_interval),
    Option(
        "target_events",
        role=DATA,
        only=(effects.if_not_refused("target_events"),),
        check=option.check_target_events,
    ),
    Option("filter_inter_by_user_or_item", role=DATA, only=(effects.if_tables_are_loaded,)),
    *_rows(
        "user_inter_num_interval item_inter_num_interval",
        example="[0,inf)",
        empty=True,
        role=DATA,
        each=option.check_interval,
    ),
    *_rows(
        "entity_kg_num_interval relation_kg_num_interval",
        example="[0,inf)",
        only=_NO_GRAPH,
        each=option.check_interval,
    ),
    # evaluation
    Option("eval_args", inner=_EVALUATION, empty=True, role=DATA),
    _choice(
        "eval_args.target", "all last first random", only=(effects.if_users_have_several_targets,)
    ),
    _choice("eval_args.cold_items", "keep drop"),
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
    Option("require_pow", example=True, only=(if_model_is_custom(),)),
    Option("wandb_project", only=(effects.if_wandb_is_used,)),
    Option("epochs", 1, 10**6, role=SCHEDULE, unit="epochs", only=(effects.if_epochs_repeat,)),
    Option("eval_step", 0, 10**9, role=SCHEDULE, unit="epochs", only=(effects.if_epochs_repeat,)),
    Option(
        "stopping_step",
        0,
        10**9,
        role=SCHEDULE,
        unit="validations",
        only=(if_model_is_trained, if_option("eval_step")),
    ),
    Option("gpu_id", role=SCHEDULE, check=option.check_gpus),
    *_rows("compile show_progress tensorboard cache", role=SCHEDULE),
    _choice("logger", "tensorboard mlflow wandb csv", example=["csv"], alone=True, role=SCHEDULE),
    _choice("data_on_device", "auto always never", role=SCHEDULE),
    _choice("precision", "auto fp32 tf32 bf16 fp16", role=TRAINING, only=_TRAINED),
    Option("memory_limit", role=SCHEDULE, check=option.check_memory_limit),
    Option("worker", 0, 2 * cores(), unit="processes", why="here, twice the cores"),
    # what an example is
    Option(
        "MAX_ITEM_LIST_LENGTH", 1, _LENGTH, unit="events", only=(effects.if_model_reads_histories,)
    ),
    _choice(
        "augmentation",
        "prefix none all_positions",
        role=TRAINING,
        only=(effects.if_model_is_sequential, if_model_is_trained),
    ),
    _choice("train_windows", "last chunk sliding prefix", role=TRAINING, only=_WINDOWS),
    Option(
        "window_stride",
        1,
        _LENGTH,
        example=25,
        role=TRAINING,
        unit="events",
        only=(*_WINDOWS, if_option("train_windows", "sliding")),
    ),
    Option(
        "target_window",
        1,
        1000,
        role=TRAINING,
        unit="events",
        only=(*_WINDOWS, effects.if_model_takes_target_window),
    ),
    Option("length_pool", 1, 10**6, role=TRAINING, unit="batches", only=_WINDOWS),
    Option("train_batch_size", 1, 10**7, role=TRAINING, only=_TRAINED),
    Option(
        "train_batch_events", 1, 10**9, example=16384, role=TRAINING, unit="events", only=_WINDOWS
    ),
    Option("train_neg_sample_args", inner=_NEGATIVES, empty=True, role=TRAINING, only=_TRAINED),
    _choice("train_neg_sample_args.distribution", "none uniform popularity"),
    Option("train_neg_sample_args.sample_num", 1, 10**4),
    Option(
        "train_neg_sample_args.candidate_num",
        0,
        10**4,
        only=(if_option("train_neg_sample_args.dynamic"),),
    ),
    Option(
        "train_neg_sample_args.alpha",
        -100,
        100,
        only=(if_option("train_neg_sample_args.distribution", "popularity"),),
    ),
    Option(
        "train_neg_sample_args.dynamic", only=(if_option("train_neg_sample_args.candidate_num"),)
    ),
    # the optimiser
    _choice("learner", "adam adamw sgd adagrad rmsprop", only=_TRAINED),
    Option("learning_rate", _ABOVE_0, 1e12, only=_TRAINED),
    Option(
        "adam_betas",
        0,
        _BELOW_1,
        pair=True,
        only=(if_model_is_trained, if_option("learner", "adam", "adamw")),
    ),
    Option("weight_decay", 0, _WEIGHT, only=_TRAINED),
    _choice(
        "lr_scheduler",
        "none step cosine linear",
        only=(if_model_is_trained, effects.if_rate_decays),
    ),
    Option("warmup_steps", 0, 10**9, unit="steps", only=_TRAINED),
    Option("ema_decay", 0, _BELOW_1, only=_TRAINED),
    Option(
        "lr_decay_step",
        0,
        10**9,
        unit="epochs",
        only=(if_model_is_trained, if_option("lr_scheduler", "none", "step")),
    ),
    Option("lr_decay_rate", _ABOVE_0, 1, only=(if_model_is_trained, if_option("lr_decay_step"))),
    Option("clip_grad_norm", example={"max_norm": 1.0}, inner=_CLIPPING, only=_TRAINED),
    Option("clip_grad_norm.max_norm", _ABOVE_0, 1e12),
    Option("clip_grad_norm.norm_type", 0, math.inf),
    # starting from another run
    *_rows("init_from update_from", example=_RUN, role=DATA),
    Option("train_only", example=["kernel"]),
    Option("new_items", example="category"),
    # content vectors of items
    Option(
        "item_vectors",
        example="vectors.parquet",
        only=(effects.if_model_takes_vectors,),
        check=option.check_vectors,
    ),
    _choice("item_vectors_use", "init add replace late", only=_VECTORS),
    Option("item_vectors_train", example=True, only=_VECTORS),
    Option("item_vectors_whiten", only=_VECTORS),
    Option(
        "item_vectors_weight",
        0,
        _WEIGHT,
        example=1.0,
        only=(*_VECTORS, if_option("item_vectors_use", "late")),
    ),
    # sizes
    *_rows("hidden_size embedding_size positional_rank siren_width relation_size", 1, _SIZE),
    Option("inner_size", 1, _SIZE, only=(if_option("block", "transformer", "ligr"),)),
    *_rows("n_layers num_layers graph_layers block_num step readout_steps kernel_size", 1, 1000),
    Option("dilations", 1, 1000, filled=True),
    Option("n_heads", 1, 1024, only=_NOT_FEAREC),
    Option("relation_heads", 1, 1024),
    *_rows("nh nv interest_size k_interests prototype_size", 1, 10**4),
    *_rows("order_len short_item_length", 1, _LENGTH, unit="events"),
    Option("top_k", 1, _LENGTH),
    Option("k", 1, 10**6),
    # layers
    _choice("block", "transformer hstu ligr"),
    _choice("norm", "pre post", only=_TRANSFORMER),
    _choice("hidden_act", "gelu relu swish tanh sigmoid", only=_TRANSFORMER),
    Option("layer_norm_eps", _ABOVE_0, 1),
    Option("hidden_dropout_prob", 0, _BELOW_1, role=TRAINING),
    Option("attn_dropout_prob", 0, _BELOW_1, role=TRAINING, only=_NOT_FEAREC),
    *_rows("dropout_prob item_dropout sess_dropout", 0, _BELOW_1),
    Option("dropout_probs", 0, _BELOW_1, pair=True),
    *_rows("attention_bias attention_output embedding_scale learn_scales chunking relations"),
    Option("initializer_range", 0, 1000, role=TRAINING, only=(if_model_is_not("CORE"),)),
    _choice("pooling_mode", "mean max sum"),
    _choice("pooling_type", "average max"),
    _choice("dnn_type", "trm ave"),
    # fields beside the vectors of items
    *(
        Option(
            name,
            example=["brand"],
            alone=True,
            only=(effects.if_model_takes_side_fields, effects.if_not_refused(name)),
        )
        for name in SIDE_FEATURES
    ),
    _choice("feature_fusion", "sum concat_mlp", only=(_WITH_FEATURES,)),
    _choice("numeric_embedding", "periodic binned", only=(_WITH_FEATURES,)),
    Option(
        "numeric_bins", 2, 10**5, only=(_WITH_FEATURES, if_option("numeric_embedding", "binned"))
    ),
    # losses
    Option("loss_type", empty=True, role=TRAINING),
    Option("n_buckets", 1, 10**4, example=100),
    Option("bucket_size_x", 1, 10**6, example=100),
    Option("bucket_size_y", 1, 10**6),
    Option("mix_x"),
    Option("negatives", 1, _SIZE, role=TRAINING),
    _choice("negative_sampler", "uniform popularity in_batch", role=TRAINING),
    _choice(
        "logq_correction",
        "refined standard none",
        role=TRAINING,
        only=(effects.if_logits_are_corrected,),
    ),
    Option("gbce_t", 0, 1, role=TRAINING),
    Option("reg_weight", 0, _WEIGHT, pair=True),
    Option("reg_loss_ratio", 0, _WEIGHT),
    *_rows("prior_weight future_weights", 0, _WEIGHT, role=TRAINING),  # 0 is what SCE asks for
    *_rows("lmd lmd_sem", 0, _WEIGHT, only=_NOT_FEAREC),
    *_rows("lambda_0 lambda_1 lambda_2", -_WEIGHT, _WEIGHT),
    *_rows("temperature tau_ratio", _ABOVE_0, _WEIGHT),
    Option("mask_ratio", _ABOVE_0, 1),
    *_rows("ft_ratio weight", 0, 1),
    *_rows("fredom fredom_type std", only=_NOT_FEAREC),
    Option("alpha", 0, 100),
    Option("shrink", 0, 1e9),
    Option("global_ratio", _ABOVE_0, 1, example=0.5),
    Option("spatial_ratio", 0, 1, example=0.5, only=(if_option("dual_domain"),)),
    Option("topk_factor", _ABOVE_0, _WEIGHT, example=0.5),
    # position schemes
    Option("position", alone=True, filled=True, role=TRAINING, check=option.check_schemes),
    _choice("position_from", "newest oldest"),
    _choice("positional_mask", "before_softmax after_softmax"),
    _choice("kernel_u", "toeplitz full identity"),
    _choice("kernel_l", "toeplitz full identity"),
    Option("kernel_u_shared", only=(if_option("kernel_u", "toeplitz", "full"),)),
    Option("kernel_l_shared", only=(if_option("kernel_l", "toeplitz", "full"),)),
    Option(
        "kernel_band",
        1,
        _LENGTH,
        example=20,
        unit="lags",
        only=(
            effects.if_any(if_option("kernel_u", "toeplitz"), if_option("kernel_l", "toeplitz")),
        ),
    ),
    Option("t5_buckets", 2, 10**5),
    Option("t5_max_distance", 1, 10**6, unit="events"),
    _choice("kerple_kind", "log power"),
    *_rows("semi_local_window semi_local_prefix", 0, _LENGTH, unit="events"),
    Option("cape_positions", 1, _LENGTH, example=50, unit="events"),
    Option("difsr_fields", example=["brand"], alone=True),
    Option("difsr_size", 1, _SIZE, only=(if_option("difsr_fields"),)),
    # time
    _choice("request_time", "none target", role=DATA),
    Option("time_unit", choices=tuple(SECONDS)),
    _choice("time_from", "first previous"),
    *_rows("time_buckets hstu_time_buckets tisas_intervals", 1, 10**5),
    _choice("decay_kind", "exponential_power power"),
    *_rows("decay_shortest decay_longest", 1e-09, 1e12),
    _choice("calendar_parts", "hour day week month year decade", filled=True),
    Option("rote_bases", _ABOVE_1, 1e12),
    Option("rote_weights", 0, _WEIGHT),
    Option("siren_omega", 1e-06, 1e6),
    Option("channel_share", 0, 0.5),
    Option("fuxi_position_size", 2, _SIZE),
    Option("rope_base", _ABOVE_1, 1e12),
    Option("rope_scale", 1e-12, 1e12),
    Option("time_base", _ABOVE_1, 1e12, example=10000.0),
    Option("time_scale", 1e-12, 1e12, only=(if_option("time_base"),)),
    *_rows(
        "time_min_period time_max_period", 1e-09, 1e12, only=(if_option("time_base", without=True),)
    ),
    _choice("learn_frequencies", "fixed ladder free"),
    _choice("fusion", "early split_dim split_head split_layer effective"),
    Option(
        "time_ratio", 0, 1, only=(if_option("fusion", "split_dim", "split_head", "split_layer"),)
    ),
    _choice("gate", "fixed sigmoid hard", only=(if_option("fusion", "early"),)),
    _choice(
        "gate_scope",
        "global plane head",
        only=(if_option("fusion", "early"), if_option("gate", "sigmoid", "hard")),
    ),
    Option("gate_value", 0, 1, only=(if_option("fusion", "early", "effective"),)),
    # session graphs
    Option("anchors"),
    _choice("anchor_overlap", "distance edge sum", only=(if_option("anchors"),)),
    Option("anchor_self_weight", 0, _WEIGHT, only=(if_option("anchors"),)),
    _choice("messages", "sum mean"),
    # relations
    _choice("cross_sequence", "random_order time_respecting none"),
    _choice("inference_relations", "batch training_bank own none", role=TRAINING),
    Option(
        "bank_size",
        1,
        10**6,
        role=TRAINING,
        unit="users",
        only=(if_option("inference_relations", "training_bank"),),
    ),
    _choice("user_layers", "odd even all none"),
    _choice("user_update", "gated replace", only=(if_option("user_layers", "odd", "even", "all"),)),
    # without effect here
    *_rows(
        "save_dataset dataset_save_path save_dataloaders dataloaders_save_path",
        role=IGNORED,
        why="data are not cached as pickle files here, which would be loaded unchecked; remove it",
    ),
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
]
OPTIONS = {option.name: option for option in _TABLE}

# Pairs of options of which the first must divide the second ...
DIVIDES = (("n_heads", "hidden_size"), ("n_heads", "embedding_size"), ("n_heads", "difsr_size"))
HEADS_OF_FULL_SIZE = ("FGNN",)  # models of which each head has the size of all
# ... or must not be larger than the second.
AT_MOST = (
    ("order_len", "MAX_ITEM_LIST_LENGTH"),
    ("short_item_length", "MAX_ITEM_LIST_LENGTH"),
    ("interest_size", "prototype_size"),
)
# What RecBole's models need at least: FEARec divides by one layer less, Caser squeezes vectors.
LEAST = {("FEARec", "n_layers"): 2, ("Caser", "embedding_size"): 2}


def find_option(name: str) -> Option:
    """Return the row of an option; one without bounds or conditions for a custom option."""
    return OPTIONS.get(name) or Option(name)


def list_by_role(*roles: str) -> set[str]:
    """Return the names of the options with one of the roles."""
    return {option.name for option in _TABLE if option.role in roles}
