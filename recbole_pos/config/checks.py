"""Options against the tables of options.py: a wrong one is a message, no failure deep inside."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from typing import Any

from recbole.evaluator import metric_types
from recbole.utils import EvaluatorType, InputType

from recbole_pos.config.options import (
    AT_MOST,
    DIVIDES,
    HEADS_OF_FULL_SIZE,
    LEAST,
    OPTIONS,
    cores,
    rule,
)
from recbole_pos.data.splits import read_fraction, read_session_filter
from recbole_pos.data.targets import check_given, read_ties
from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.values import check_choice, is_number, is_whole, nearest, shown

_DEEPEST = 8  # mappings and lists within each other
_LONGEST = 4096  # characters, as of a path
_LONGEST_NAME = 200
_TINIEST = 2.0**-126  # the smallest number that float32 holds with all its digits


def check_value(where: str, key: str, value: Any, default: Any) -> None:
    """One option on its own: type, range, choices, inner keys.

    Raises:
        UsageError: naming file, key, what was expected and what was found.
    """
    check_plain(f"{where}: {key}", value)
    option = rule(key)
    example = default if option.example is None else option.example
    if key == "position" and value in (None, []):
        raise UsageError(f"{where}: position is empty; [nope] stands for no position")
    if value is None and (default is None or option.empty):
        return
    if key == "train_fraction":
        read_fraction(value)
    elif key == "session_filter":
        read_session_filter(value)
    elif key == "discretization":
        _check_type(where, key, key, value, example)
        _check_discretization(where, value)
    elif option.inner is not None:
        _check_mapping(where, key, value, option.inner)
    else:
        _check_kind(where, key, key, value, example)


def check_read(where: str, key: str, value: Any, default: Any, config: Mapping[str, Any]) -> None:
    """Whether an option is read, by the conditions of the table.

    Args:
        where: it was given.
        key: its name.
        value: its value.
        default: which may be given where it is not read.
        config: all options of the run.

    Raises:
        UnknownKey: naming the option, and the condition that does not hold.
    """
    usual = rule(key).inner
    if usual is not None and isinstance(value, Mapping):
        usual = {**usual, **(default or {})}
        value, default = {**usual, **value}, default and usual
    if value is None or value == default:
        return
    for condition in rule(key).only:
        if wrong := condition(config, value):
            advice = "leave it out"
            if where != "configuration":
                advice += ", or put it under `for` with the models that read it"
            raise UnknownKey(f"{where}: {key} {wrong}; {advice}", key.partition(".")[0])
    for name, usually in (usual or {}).items():
        check_read(where, f"{key}.{name}", value[name], usually, config)


def check_own(where: str, key: str, value: Any, default: Any) -> None:
    """An option of a model or scheme that is not the plugin's has the type of its default."""
    check_plain(f"{where}: {key}", value)
    if default is not None and value != default:
        _check_kind(where, "", key, value, default)


def check_plain(where: str, value: Any, depth: int = 0) -> None:
    """Whether a value could stand in a yaml file, with numbers that float32 and int64 can hold.

    Raises:
        UsageError: naming what cannot.
    """
    if hasattr(value, "item"):  # numpy's
        value = value.item() if getattr(value, "size", 1) == 1 else value
    if depth > _DEEPEST:
        raise UsageError(f"{where}: more than {_DEEPEST} lists and mappings within each other")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise UsageError(f"{where}: names must be text, found {shown(name)}")
            if len(name) > _LONGEST_NAME:
                raise UsageError(f"{where}: a name is longer than any: {shown(name)}")
            check_plain(f"{where}.{name}", inner, depth + 1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            check_plain(where, inner, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        if where.endswith("clip_grad_norm.norm_type") and value > 0:
            return  # the largest gradient
        raise UsageError(f"{where} must be finite, found {shown(value)}")
    elif isinstance(value, float) and 0 < abs(value) < _TINIEST:
        raise UsageError(f"{where}: {shown(value)} is too small to be told from 0")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UsageError(f"{where}: {shown(value)} is no number of 64 bits")
    elif isinstance(value, str) and len(value) > _LONGEST:
        raise UsageError(f"{where}: {len(value):,} characters; {_LONGEST:,} are the most")
    elif isinstance(value, str) and "\0" in value:
        raise UsageError(f"{where}: text cannot hold a zero byte, found {shown(value)}")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise UsageError(
            f"{where}: expected text, numbers, lists or mappings, found {shown(value)} "
            f"({type(value).__name__})"
        )


def _check_kind(where: str, key: str, name: str, value: Any, example: Any) -> None:
    """A value against an example; ``key`` is where its range stands, ``name`` what to call it."""
    option = rule(key)
    if option.choices and not isinstance(example, (list, tuple)):
        check_choice(f"{where}: {name}", value, option.choices)
        return
    if isinstance(example, list) and (value is not None and option.alone):
        value = value if isinstance(value, (list, tuple, dict)) else [value]
    _check_type(where, key, name, value, example)
    if key in ("dilations", "calendar_parts") and not value:
        raise UsageError(f"{where}: {key}: expected at least one")
    if isinstance(example, (list, tuple)) and example and not isinstance(example[0], dict):
        for inner in value:
            _check_kind(where, key, name, inner, example[0])
    elif isinstance(example, dict) and key not in _COLUMNS:
        for inner in value:
            _check_kind(where, key, f"{key}.{inner}", value[inner], next(iter(example.values())))
    elif option.interval:
        _check_interval(f"{where}: {name}", value)
    elif is_number(value):
        _check_range(where, key, name, value)


_COLUMNS = ("load_col", "unload_col", "unused_col")  # have checks of their own


def _check_interval(where: str, value: str) -> None:
    """RecBole leaves out what it cannot read of a text such as "[0,1);[3,inf)"."""
    for part in value.split(";"):
        ends = part.strip()[1:-1].split(",")
        try:
            low, high = map(float, ends)
        except ValueError:
            low, high = 1, 0
        if not (low <= high and part.strip()[0] in "[(" and part.strip()[-1] in "])"):
            raise UsageError(
                f"{where}: expected an interval such as '[3,inf)', found {shown(value)}"
            )


def _check_discretization(where: str, value: dict[str, Any]) -> None:
    for field, how in value.items():
        known = isinstance(how, dict) and set(how) <= {"method", "bucket"}
        if not known or how.get("method") not in ("ED", "LD"):
            raise UsageError(
                f"{where}: discretization.{field}: expected {{method: ED, bucket: 10}} (equal "
                f"distances) or {{method: LD}} (logarithms), found {shown(how)}"
            )
        if how["method"] == "ED" or how.get("bucket") is not None:
            _check_kind(
                where, "discretization", f"discretization.{field}.bucket", how.get("bucket"), 10
            )


def _check_range(where: str, key: str, name: str, value: float) -> None:
    option = rule(key)
    low = -math.inf if option.low is None else option.low
    high = math.inf if option.high is None else option.high
    if low <= value <= high:
        return
    bound = f"from {_number(low)} to {_number(high)}"
    if value < low and high > 1:
        bound = f"at least {_number(low)}"
        if 0 < low < 1e-300 or key in ("rope_base", "time_base"):
            bound = f"above {round(low)}"
    elif value > high and high > 1:
        bound = f"at most {_number(high)}"
        if key == "worker":
            bound += f" here, twice the {cores()} cores"
    elif high < 1:
        bound = f"in [{_number(low)}, 1)"
    elif low > 0:
        bound = "above 0, and at most 1"
    raise UsageError(f"{where}: {name} must be {bound}, found {shown(value)}")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _check_mapping(where: str, key: str, value: Any, known: dict[str, Any]) -> None:
    _check_type(where, key, key, value, known)
    for inner in value:
        if inner not in known:
            raise UsageError(f"{where}: unknown key {shown(inner)} in {key}{nearest(inner, known)}")
        if known[inner] is not None:
            name = f"{key}.{inner}"
            _check_kind(where, name, name, value[inner], known[inner])
    if key == "clip_grad_norm" and "max_norm" not in value:
        raise UsageError(f"{where}: clip_grad_norm needs max_norm, as in {{max_norm: 1.0}}")


def _check_type(where: str, key: str, name: str, value: Any, example: Any) -> None:
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
        allowed, wanted = isinstance(value, (list, tuple)), "a list"
    elif key == "gpu_id":
        allowed, wanted = isinstance(value, str) or is_whole(value), "numbers of GPUs"
    elif isinstance(example, str) and key != "dataset":
        allowed, wanted = isinstance(value, str) and value != "", "text"
    else:
        return
    if not allowed:
        raise UsageError(
            f"{where}: {name}: expected {wanted} (such as {shown(example)}), "
            f"found {shown(value)} ({type(value).__name__})"
        )


def check_together(
    config: dict[str, Any], model: str, plugin_model: bool, losses: tuple[str, ...]
) -> None:
    """What several options must agree on: metrics, evaluation, and those ``losses`` there are.

    Raises:
        UsageError: if they do not.
    """
    _check_metrics(config)
    _check_columns(config)
    check_sizes(config, model)
    if config["log_wandb"] and importlib.util.find_spec("wandb") is None:
        raise UsageError("log_wandb: wandb is not installed: pip install it, or log_wandb: False")
    for key in ("init_from", "train_only", "update_from"):
        if config[key] is not None and not plugin_model:
            raise UsageError(f"{key}: only the plugin's models can start from another run")
    if config["train_only"] is not None and not (config["train_only"] and config["init_from"]):
        raise UsageError("train_only: names schemes to train on top of the run in init_from")
    if config["update_from"] and config["init_from"]:
        raise UsageError("init_from and update_from: weights come from one run; leave one out")
    if config["new_items"] and not config["update_from"]:
        raise UsageError("new_items: is about items that are new since update_from; set that too")
    for key in (option.name for option in OPTIONS.values() if option.pair):
        if isinstance(config.get(key), (list, tuple)) and len(config[key]) != 2:
            raise UsageError(f"{key}: expected two numbers, found {shown(config[key])}")
    if config["benchmark_filename"] is not None:
        check_given(config["benchmark_filename"], config["eval_args"]["split"])
    read_ties(config["eval_args"]["ties"])
    mode = config["eval_args"]["mode"]
    if any(m != "full" for m in (mode.values() if isinstance(mode, dict) else [mode])):
        raise UsageError(
            f"eval_args.mode: only full (rank all items) is supported, found {shown(mode)}"
        )
    if config.get("loss_type", "CE") not in losses:
        raise UsageError(
            f"loss_type: {shown(config['loss_type'])} is not one of {', '.join(losses)} for "
            f"this model"
        )


def check_sizes(config: Mapping[str, Any], model: str) -> None:
    """What must divide another option, or not be more than it.

    Raises:
        UsageError: naming both, and what they are.
    """
    for part, whole in () if model in HEADS_OF_FULL_SIZE else DIVIDES:
        if config.get(part) and config.get(whole) and config[whole] % config[part]:
            raise UsageError(f"{whole} {config[whole]} is not a multiple of {part} {config[part]}")
    for (name, key), least in LEAST.items():
        if name == model and config[key] < least:
            raise UsageError(f"{key}: {model} needs at least {least}, found {config[key]}")
    if model in ("FEARec", "BERT4Rec"):
        _check_counts(config, model)
    for part, whole in AT_MOST:
        if config.get(part) and config.get(whole) and config[part] > config[whole]:
            raise UsageError(
                f"{part}: {config[part]} is more than {whole}, which is {config[whole]}"
            )


def _check_counts(config: Mapping[str, Any], model: str) -> None:
    """What RecBole rounds down to a number of things must leave one."""
    n = config["MAX_ITEM_LIST_LENGTH"]
    if model == "BERT4Rec" and config["mask_ratio"] * n < 1:
        raise UsageError(
            f"mask_ratio: {config['mask_ratio']} of MAX_ITEM_LIST_LENGTH {n} is not one event to "
            "mask; raise one of them"
        )
    if model == "FEARec" and config["dual_domain"] and n % 2:
        raise UsageError("dual_domain: FEARec needs an even MAX_ITEM_LIST_LENGTH for it")
    if model == "FEARec" and not 1 <= int(config["topk_factor"] * math.log(n)) <= n:
        raise UsageError(
            f"topk_factor: FEARec takes topk_factor * log(MAX_ITEM_LIST_LENGTH) delays, from 1 to "
            f"{n}; found {config['topk_factor']} * log({n})"
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
                raise UsageError(f"{key}: {table}: expected {what}; found {shown(fields)}")


def _check_metrics(config: dict[str, Any]) -> None:
    metrics, topk = _as_list(config["metrics"]), _as_list(config["topk"])
    if not metrics:
        raise UsageError("metrics: expected at least one, for example [Hit, NDCG]")
    ranking = [name for name, kind in metric_types.items() if kind == EvaluatorType.RANKING]
    for metric in metrics:
        if str(metric).lower() in ranking:
            continue
        hint = nearest(str(metric), ranking) or f"; known are {', '.join(ranking)}"
        if str(metric).lower() in metric_types:
            raise UsageError(f"metrics: {metric} needs labels, and here items are ranked{hint}")
        raise UsageError(f"metrics: unknown {shown(metric)}{hint}")
    whole = [is_whole(k) and k >= 1 for k in topk]
    if not topk or not all(whole):
        raise UsageError(
            f"topk: expected whole numbers of at least 1, found {shown(config['topk'])}"
        )
    computed = [
        name
        for metric in metrics
        for name in ([metric] if str(metric).lower() == "gauc" else [f"{metric}@{k}" for k in topk])
    ]
    if str(config["valid_metric"]).lower() not in [name.lower() for name in computed]:
        raise UsageError(
            f"valid_metric: {shown(config['valid_metric'])} is not computed; metrics and topk give "
            f"{', '.join(computed)}"
        )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
