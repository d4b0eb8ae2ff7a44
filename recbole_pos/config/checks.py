"""Options against the table of options.py, and against each other: a wrong one is a message, no
failure deep inside."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from typing import Any

from recbole.evaluator import metric_types
from recbole.utils import EvaluatorType, InputType

from recbole_pos.config.option import Option, check_kind, check_plain
from recbole_pos.config.options import AT_MOST, DIVIDES, HEADS_OF_FULL_SIZE, LEAST, rule
from recbole_pos.data.targets import check_given, read_ties
from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.model.models import LOSSES
from recbole_pos.values import is_whole, nearest, shown


def check_value(where: str, key: str, value: Any, default: Any) -> None:
    """Check one option: type, range, choices, inner keys.

    Raises:
        UsageError: naming file, key, what was expected and what was found.
    """
    option, name = rule(key), f"{where}: {key}"
    check_plain(name, value)
    if value is None and (default is None or option.empty) and not option.filled:
        return
    if option.check is not None:
        option.check(name, value)
        return
    if option.inner is None:
        check_kind(name, option, value, default if option.example is None else option.example)
        return
    check_kind(name, Option(""), value, {})
    for inner in value:
        if inner not in option.inner:
            hint = nearest(inner, option.inner)
            raise UsageError(f"{where}: unknown key {shown(inner)} in {key}{hint}")
        if option.inner[inner] is not None:
            row = rule(f"{key}.{inner}")
            check_kind(f"{name}.{inner}", row, value[inner], option.inner[inner])
    if key == "clip_grad_norm" and "max_norm" not in value:
        raise UsageError(f"{name} needs max_norm, as in {{max_norm: 1.0}}")


def check_own(where: str, key: str, value: Any, default: Any) -> None:
    """Check an option of a model or scheme that is not the plugin's: it has its default's type."""
    check_plain(f"{where}: {key}", value)
    if default is not None and value != default:
        check_kind(f"{where}: {key}", Option(""), value, default)


def check_read(where: str, key: str, value: Any, default: Any, config: Mapping[str, Any]) -> None:
    """Check that an option is read, by the conditions of the table.

    Args:
        where: it was given.
        key: its name.
        value: its value.
        default: which may be given where it is not read.
        config: all options of the run.

    Raises:
        UnknownKey: naming the option, and the condition that is not met.
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


def check_together(
    config: dict[str, Any], model: str, plugin_model: bool, losses: tuple[str, ...]
) -> None:
    """Check what several options must agree on: metrics, evaluation, and those ``losses`` there
    are.

    Raises:
        UsageError: if they do not.
    """
    _check_metrics(config)
    check_sizes(config, model)
    loss, mode = config.get("loss_type", "CE"), config["eval_args"]["mode"]
    starts = [key for key in ("init_from", "train_only", "update_from") if config[key] is not None]
    for wrong, message in (
        (
            config["log_wandb"] and importlib.util.find_spec("wandb") is None,
            "log_wandb: wandb is not installed: pip install it, or log_wandb: False",
        ),
        (
            starts and not plugin_model,
            f"{', '.join(starts)}: only the plugin's models can start from another run",
        ),
        (
            config["train_only"] is not None and not (config["train_only"] and config["init_from"]),
            "train_only: names schemes to train on top of the run in init_from",
        ),
        (
            config["update_from"] and config["init_from"],
            "init_from and update_from: weights come from one run; leave one out",
        ),
        (
            config["new_items"] and not config["update_from"],
            "new_items: is about items that are new since update_from; set that too",
        ),
        (
            any(m != "full" for m in (mode.values() if isinstance(mode, dict) else [mode])),
            f"eval_args.mode: only full (rank all items) is supported, found {shown(mode)}",
        ),
        (
            loss not in losses,
            f"loss_type: {shown(loss)} is not one of {', '.join(losses)} for this model",
        ),
    ):
        if wrong:
            raise UsageError(message)
    if config["benchmark_filename"] is not None:
        check_given(config["benchmark_filename"], config["eval_args"]["split"])
    read_ties(config["eval_args"]["ties"])


def check_sizes(config: Mapping[str, Any], model: str) -> None:
    """Check what must divide another option, or not be more than it.

    Raises:
        UsageError: naming both, and what they are.
    """
    for part, whole in () if model in HEADS_OF_FULL_SIZE else DIVIDES:
        if config.get(part) and config.get(whole) and config[whole] % config[part]:
            raise UsageError(f"{whole} {config[whole]} is not a multiple of {part} {config[part]}")
    for (name, key), least in LEAST.items():
        if name == model and config[key] < least:
            raise UsageError(f"{key}: {model} needs at least {least}, found {config[key]}")
    for part, whole in AT_MOST:
        if config.get(part) and config.get(whole) and config[part] > config[whole]:
            raise UsageError(
                f"{part}: {config[part]} is more than {whole}, which is {config[whole]}"
            )
    # what RecBole rounds down to a number of things must leave one
    n = config.get("MAX_ITEM_LIST_LENGTH", 1)
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
    """Check that a pairwise loss has negatives (after RecBole has derived the input type)."""
    without = config["train_neg_sample_args"]["distribution"] == "none"
    loss, pairwise = config.get("loss_type"), config.get("MODEL_INPUT_TYPE") == InputType.PAIRWISE
    if loss in LOSSES[1:] and not without:  # RecBole says it of CE
        how = "; negatives says how many" if "negatives" in config else ""
        raise UsageError(f"train_neg_sample_args: {loss} chooses items itself{how}; leave it out")
    if pairwise and without and loss not in LOSSES:
        raise UsageError(
            f"train_neg_sample_args: {model} compares targets with negatives and needs them, for "
            "example {distribution: uniform, sample_num: 1}"
        )


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
    if not topk or not all(is_whole(k) and k >= 1 for k in topk):
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
