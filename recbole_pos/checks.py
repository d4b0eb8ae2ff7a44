"""What values an option may have, so that a wrong one is a message and not a failure deep inside.

Types come from the defaults in the yaml files; this module adds ranges, choices, and the types of
options that are empty by default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from recbole.evaluator import metric_types
from recbole.utils import EvaluatorType, InputType

from recbole_pos.data.sessions import read_fraction
from recbole_pos.data.targets import COLD_ITEMS, TARGETS
from recbole_pos.data.windows import TRAIN_WINDOWS
from recbole_pos.errors import UsageError
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
from recbole_pos.units import SECONDS
from recbole_pos.values import check_choice, is_number, is_whole, nearest

# smallest and largest value allowed; an open end is math.inf
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("epochs", "train_batch_size", "eval_batch_size", "length_pool"), (1, math.inf)
    ),
    **dict.fromkeys(("MAX_ITEM_LIST_LENGTH", "metric_decimal_place"), (1, math.inf)),
    **dict.fromkeys(("hidden_size", "inner_size", "embedding_size"), (1, math.inf)),
    **dict.fromkeys(("n_layers", "n_heads", "num_layers", "graph_layers"), (1, math.inf)),
    **dict.fromkeys(("step", "readout_steps"), (1, math.inf)),
    "weight": (0, 1),
    "anchor_self_weight": (0, math.inf),
    **dict.fromkeys(("relation_heads", "relation_size", "top_k", "bank_size"), (1, math.inf)),
    "prior_weight": (0, math.inf),
    **dict.fromkeys(("positional_rank", "window_stride"), (1, math.inf)),
    **dict.fromkeys(("cape_positions", "kernel_band", "t5_max_distance"), (1, math.inf)),
    "t5_buckets": (2, math.inf),
    **dict.fromkeys(("time_buckets", "hstu_time_buckets"), (1, math.inf)),
    **dict.fromkeys(("n_buckets", "bucket_size_x", "bucket_size_y"), (1, math.inf)),
    **dict.fromkeys(("tisas_intervals", "difsr_size"), (1, math.inf)),
    "k": (1, math.inf),
    "shrink": (0, math.inf),
    **dict.fromkeys(("stopping_step", "eval_step", "weight_decay", "worker"), (0, math.inf)),
    **dict.fromkeys(("initializer_range", "layer_norm_eps"), (0, math.inf)),
    "learning_rate": (math.nextafter(0, 1), math.inf),
    "lr_decay_step": (0, math.inf),
    "lr_decay_rate": (math.nextafter(0, 1), 1),
    **dict.fromkeys(("rope_scale", "time_scale"), (math.nextafter(0, 1), math.inf)),
    **dict.fromkeys(("time_min_period", "time_max_period"), (1e-9, 1e12)),
    "time_base": (math.nextafter(1, 2), math.inf),
    **dict.fromkeys(("time_ratio", "gate_value"), (0, 1)),
    "rope_base": (math.nextafter(1, 2), math.inf),
    "seed": (0, 2**32 - 1),
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
}
# an example value of options whose default is empty
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
    "unused_col": {"inter": ["rating"]},
    "threshold": {"rating": 4},
    "val_interval": {"rating": "[3,inf)"},
    "normalize_all": True,
    "normalize_field": ["price"],
}
NESTED_KEYS = {
    "eval_args": ("split", "order", "group_by", "mode", "target", "cold_items"),
    "train_neg_sample_args": ("distribution", "sample_num", "alpha", "dynamic", "candidate_num"),
    "clip_grad_norm": ("max_norm", "norm_type", "error_if_nonfinite"),
}
NESTED_CHOICES = {"eval_args": {"target": TARGETS, "cold_items": COLD_ITEMS}}


def check_value(where: str, key: str, value: Any, default: Any) -> None:
    """One option on its own: type, range, choices, inner keys.

    Raises:
        UsageError: naming file, key, what was expected and what was found.
    """
    example = EXAMPLES.get(key) if default is None else default
    if key == "position" and value is None:
        raise UsageError(f"{where}: position is empty; [nope] stands for no position")
    if value is None and (default is None or not isinstance(default, (bool, int, float))):
        return
    _check_type(where, key, value, example)
    if key == "train_fraction":
        read_fraction(value)
    if key in CHOICES:
        check_choice(f"{where}: {key}", value, CHOICES[key])
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: {key} must be finite, found {value!r}")
    low, high = RANGES.get(key, (-math.inf, math.inf))
    if key.endswith("dropout_prob"):
        low, high = 0, math.nextafter(1, 0)
    if is_number(value) and not low <= value <= high:
        bound = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        if 0 < low < 1e-300 or key in ("rope_base", "time_base"):
            bound = f"above {round(low)}"
        elif key.endswith("dropout_prob"):
            bound = "in [0, 1)"
        raise UsageError(f"{where}: {key} must be {bound}, found {value!r}")
    for inner in value if key in NESTED_KEYS and isinstance(value, dict) else ():
        if inner not in NESTED_KEYS[key]:
            raise UsageError(
                f"{where}: unknown key {inner!r} in {key}; {nearest(str(inner), NESTED_KEYS[key])}"
            )
        known = NESTED_CHOICES.get(key, {}).get(inner)
        if known:
            check_choice(f"{where}: {key}.{inner}", value[inner], known)


def _check_type(where: str, key: str, value: Any, example: Any) -> None:
    if isinstance(example, bool):
        allowed, wanted = isinstance(value, bool), "true or false"
    elif isinstance(example, int):
        allowed, wanted = is_whole(value), "a whole number"
    elif isinstance(example, float):
        allowed = isinstance(value, (int, float)) and not isinstance(value, bool)
        wanted = "a number"
    elif isinstance(example, dict):
        allowed, wanted = isinstance(value, dict), "a mapping such as {a: b}"
    elif isinstance(example, list):
        allowed, wanted = not isinstance(value, dict), "a list"
    elif isinstance(example, str) and key not in ("gpu_id", "dataset"):
        allowed, wanted = isinstance(value, str), "text"
    else:
        return
    if not allowed:
        raise UsageError(
            f"{where}: {key}: expected {wanted} (such as {example!r}), "
            f"found {value!r} ({type(value).__name__})"
        )


def check_together(config: dict[str, Any], plugin_model: bool, losses: tuple[str, ...]) -> None:
    """What several options must agree on: metrics, evaluation, and those ``losses`` there are.

    Raises:
        UsageError: if they do not.
    """
    _check_metrics(config)
    _check_columns(config)
    for key in ("init_from", "train_only"):
        if config[key] is not None and not plugin_model:
            raise UsageError(f"{key}: only the plugin's models can start from another run")
    if config["train_only"] is not None and not (config["train_only"] and config["init_from"]):
        raise UsageError("train_only: names schemes to train on top of the run in init_from")
    betas = config["adam_betas"]
    if not (isinstance(betas, list) and len(betas) == 2 and all(_is_rate(b) for b in betas)):
        raise UsageError(f"adam_betas: expected two numbers in [0, 1), found {betas!r}")
    mode = config["eval_args"]["mode"]
    if any(m != "full" for m in (mode.values() if isinstance(mode, dict) else [mode])):
        raise UsageError(f"eval_args.mode: only full (rank all items) is supported, found {mode!r}")
    if config.get("loss_type", "CE") not in losses:
        raise UsageError(
            f"loss_type: {config['loss_type']!r} is not one of {', '.join(losses)} for this model"
        )


def check_negatives(config: dict[str, Any], model: str) -> None:
    """A pairwise loss needs negatives (read after RecBole has derived the input type)."""
    without = config["train_neg_sample_args"]["distribution"] == "none"
    if config.get("loss_type") == "SCE":  # RecBole says it of CE
        if not without:
            raise UsageError("train_neg_sample_args: SCE chooses items itself; leave it out")
        return
    pairwise = config["MODEL_INPUT_TYPE"] == InputType.PAIRWISE
    if pairwise and without and config.get("loss_type") != "CE":
        raise UsageError(
            f"train_neg_sample_args: {model} compares targets with negatives and needs them, for "
            "example {distribution: uniform, sample_num: 1}"
        )


def _check_columns(config: dict[str, Any]) -> None:
    """RecBole takes the letters of a text for names, and fails on nothing at all."""
    for key in ("load_col", "unload_col", "unused_col"):
        for table, fields in (config.get(key) or {}).items():
            every = fields == "*" and key == "load_col"
            named = isinstance(fields, (list, tuple)) and all(isinstance(f, str) for f in fields)
            if not (every or named):
                what = "a list of fields" + (", or '*' for all" if key == "load_col" else "")
                raise UsageError(f"{key}: {table}: expected {what}; found {fields!r}")


def _check_metrics(config: dict[str, Any]) -> None:
    metrics, topk = _as_list(config["metrics"]), _as_list(config["topk"])
    if not metrics:
        raise UsageError("metrics: expected at least one, for example [Hit, NDCG]")
    ranking = [name for name, kind in metric_types.items() if kind == EvaluatorType.RANKING]
    for metric in metrics:
        if str(metric).lower() in ranking:
            continue
        hint = nearest(str(metric), ranking)
        if str(metric).lower() in metric_types:
            raise UsageError(f"metrics: {metric} needs labels, and here items are ranked; {hint}")
        raise UsageError(f"metrics: unknown {metric!r}; {hint}")
    whole = [is_whole(k) and k >= 1 for k in topk]
    if not topk or not all(whole):
        raise UsageError(f"topk: expected whole numbers of at least 1, found {config['topk']!r}")
    computed = [
        name
        for metric in metrics
        for name in ([metric] if str(metric).lower() == "gauc" else [f"{metric}@{k}" for k in topk])
    ]
    if str(config["valid_metric"]).lower() not in [name.lower() for name in computed]:
        raise UsageError(
            f"valid_metric: {config['valid_metric']!r} is not computed; metrics and topk give "
            f"{', '.join(computed)}"
        )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _is_rate(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1
