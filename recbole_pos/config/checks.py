"""Check options against the table of ``options.py``, and against each other.

Every check raises a ``UsageError`` that names the option.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from typing import Any

from recbole.evaluator import metric_types
from recbole.utils import EvaluatorType, InputType, ModelType

from recbole_pos.config.defaults import starts_from_runs
from recbole_pos.config.option import Option, check_kind, check_plain
from recbole_pos.config.options import find_option
from recbole_pos.data.targets import check_given_parts, read_ties
from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.model.models import LOSSES, is_on_our_base
from recbole_pos.values import is_whole, nearest, shown

# Pairs of options of which the first must divide the second ...
_DIVIDES = (("n_heads", "hidden_size"), ("n_heads", "embedding_size"), ("n_heads", "difsr_size"))
_HEADS_OF_FULL_SIZE = ("FGNN",)  # models of which each head has the size of all
# ... or must not be larger than the second.
_AT_MOST = (
    ("order_len", "MAX_ITEM_LIST_LENGTH"),
    ("short_item_length", "MAX_ITEM_LIST_LENGTH"),
    ("interest_size", "prototype_size"),
)
# What RecBole's models need at least: FEARec divides by one layer less, Caser squeezes vectors.
_MINIMUM = {"FEARec": ("n_layers", 2), "Caser": ("embedding_size", 2)}


def check_value(location: str, key: str, value: Any, default: Any, is_free: bool = False) -> None:
    """Check the type, range, choices and inner keys of an option's value.

    ``location`` is the file that gave it, or "configuration"; the default is an example of its
    type, which is all that is checked of an option that only a custom model or scheme has
    (``is_free``).
    """
    option = Option("") if is_free else find_option(key)
    name = f"{location}: {key}"
    check_plain(name, value)
    if is_free and (default is None or value == default):
        return
    may_be_empty = (default is None or option.allows_empty) and not option.nonempty
    if value is None and may_be_empty:
        return
    if option.check is not None and option.example is None:
        option.check(name, value)
    elif option.inner is None:
        check_kind(name, option, value, default if option.example is None else option.example)
    else:
        _check_mapping(location, key, value, option.inner)


def _check_mapping(location: str, key: str, value: Any, examples: Mapping[str, Any]) -> None:
    """Check the keys of a mapping, and each value by the row of ``key.inner_key``."""
    check_kind(f"{location}: {key}", Option(""), value, {})
    for inner_key, inner_value in value.items():
        if inner_key not in examples:
            hint = nearest(str(inner_key), examples)
            raise UsageError(f"{location}: unknown key {shown(inner_key)} in {key}{hint}")
        if examples[inner_key] is not None:
            name = f"{key}.{inner_key}"
            check_kind(f"{location}: {name}", find_option(name), inner_value, examples[inner_key])
    if key == "clip_grad_norm" and "max_norm" not in value:
        raise UsageError(f"{location}: {key} needs max_norm, as in {{max_norm: 1.0}}")


def check_read(
    location: str, key: str, value: Any, default: Any, config: Mapping[str, Any]
) -> None:
    """Refuse an option that changes nothing, by the conditions of the option table.

    ``config`` has all options of the run; the default may be given even where nothing reads it.
    """
    option = find_option(key)
    inner_defaults: dict[str, Any] = {}
    if option.inner is not None and isinstance(value, Mapping):
        inner_defaults = {**option.inner, **(default or {})}
        value = {**inner_defaults, **value}
        if default:
            default = inner_defaults
    if value is None or value == default:
        return
    for condition in option.only:
        if problem := condition(config, value):
            advice = "leave it out"
            if location != "configuration":
                advice += ", or put it under `for` with the models that read it"
            raise UnknownKey(f"{location}: {key} {problem}; {advice}", key.partition(".")[0])
    for inner_key, inner_default in inner_defaults.items():
        check_read(location, f"{key}.{inner_key}", value[inner_key], inner_default, config)


def check_together(config: dict[str, Any], model: str) -> None:
    """Check what several options must agree on: metrics, sizes, evaluation, starting weights.

    ``config`` has all options of a run of the model.
    """
    _check_metrics(config)
    check_sizes(config, model)
    loss = config.get("loss_type", "CE")
    is_ours = is_on_our_base(model)
    losses = LOSSES if is_ours else ("CE", "BPR")
    sampled = "sampled_softmax and negatives" if is_ours else "BPR"
    is_sequential = config["MODEL_TYPE"] == ModelType.SEQUENTIAL
    sampling = config["train_neg_sample_args"]
    mode = config["eval_args"]["mode"]
    modes = mode.values() if isinstance(mode, dict) else [mode]
    start_keys = ("init_from", "train_only", "update_from")
    given_starts = [key for key in start_keys if config[key] is not None]
    for is_wrong, message in (
        (
            config["log_wandb"] and importlib.util.find_spec("wandb") is None,
            "log_wandb: wandb is not installed: pip install it, or log_wandb: False",
        ),
        (
            given_starts and not starts_from_runs(model),
            f"{', '.join(given_starts)}: only the plugin's models can start from another run",
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
            any(mode != "full" for mode in modes),
            f"eval_args.mode: only full (rank all items) is supported, found {shown(mode)}",
        ),
        (
            loss not in losses,
            f"loss_type: {shown(loss)} is not one of {', '.join(losses)} for this model",
        ),
        (
            config.get("loss_type") == "CE" and is_sequential and sampling is not None,
            f"train_neg_sample_args: found {shown(sampling)}, expected none: loss_type CE compares "
            f"with all items; leave it out, or to sample items set loss_type: {sampled}",
        ),
    ):
        if is_wrong:
            raise UsageError(message)
    if config["benchmark_filename"] is not None:
        check_given_parts(config["benchmark_filename"], config["eval_args"]["split"])
    read_ties(config["eval_args"]["ties"])


def check_sizes(config: Mapping[str, Any], model: str) -> None:
    """Check sizes that must divide another size, stay below it, or have a minimum."""
    pairs = () if model in _HEADS_OF_FULL_SIZE else _DIVIDES
    for divisor, size in pairs:
        if config.get(divisor) and config.get(size) and config[size] % config[divisor]:
            raise UsageError(
                f"{size} {config[size]} is not a multiple of {divisor} {config[divisor]}"
            )
    if model in _MINIMUM:
        key, minimum = _MINIMUM[model]
        if config[key] < minimum:
            raise UsageError(f"{key}: {model} needs at least {minimum}, found {config[key]}")
    for key, limit in _AT_MOST:
        if config.get(key) and config.get(limit) and config[key] > config[limit]:
            raise UsageError(f"{key}: {config[key]} is more than {limit}, {config[limit]}")
    _check_rounded_counts(config, model)


def _check_rounded_counts(config: Mapping[str, Any], model: str) -> None:
    """Refuse counts of interactions or delays that RecBole rounds down to none."""
    length = config.get("MAX_ITEM_LIST_LENGTH", 1)
    if model == "BERT4Rec" and config["mask_ratio"] * length < 1:
        raise UsageError(
            f"mask_ratio: {config['mask_ratio']} of MAX_ITEM_LIST_LENGTH {length} is not one "
            "interaction to mask; raise one of them"
        )
    if model == "FEARec" and config["dual_domain"] and length % 2:
        raise UsageError("dual_domain: FEARec needs an even MAX_ITEM_LIST_LENGTH for it")
    if model == "FEARec" and not 1 <= int(config["topk_factor"] * math.log(length)) <= length:
        raise UsageError(
            f"topk_factor: FEARec takes topk_factor * log(MAX_ITEM_LIST_LENGTH) delays, from 1 to "
            f"{length}; found {config['topk_factor']} * log({length})"
        )


def check_negatives(config: dict[str, Any], model: str) -> None:
    """Check that a pairwise loss has negatives, and that a sampled loss is not given any.

    The configuration must have ``MODEL_INPUT_TYPE``, which RecBole derives.
    """
    has_negatives = config["train_neg_sample_args"]["distribution"] != "none"
    loss = config.get("loss_type")
    is_pairwise = config.get("MODEL_INPUT_TYPE") == InputType.PAIRWISE
    if loss in LOSSES[1:] and has_negatives:  # CE, the first: check_together
        how = "; negatives says how many" if "negatives" in config else ""
        raise UsageError(f"train_neg_sample_args: {loss} chooses items itself{how}; leave it out")
    if is_pairwise and not has_negatives and loss not in LOSSES:
        raise UsageError(
            f"train_neg_sample_args: {model} compares targets with negatives and needs them, for "
            "example {distribution: uniform, sample_num: 1}"
        )


def _check_metrics(config: dict[str, Any]) -> None:
    """Check that metrics rank items, cutoffs are numbers, and ``valid_metric`` is computed."""
    metrics, topk = as_list(config["metrics"]), as_list(config["topk"])
    if not metrics:
        raise UsageError("metrics: expected at least one, for example [Hit, NDCG]")
    ranking = [name for name, kind in metric_types.items() if kind == EvaluatorType.RANKING]
    for metric in metrics:
        name = str(metric).lower()
        if name not in ranking:
            hint = nearest(name, ranking) or f"; known are {', '.join(ranking)}"
            problem = f"unknown {shown(metric)}"
            if "@" in name:
                hint = "; a metric stands without its cutoff, which is topk"
            if name in metric_types:
                problem = f"{metric} needs labels, and here items are ranked"
            raise UsageError(f"metrics: {problem}{hint}")
    if not topk or not all(is_whole(k) and k >= 1 for k in topk):
        raise UsageError(
            f"topk: expected whole numbers of at least 1, found {shown(config['topk'])}"
        )
    computed = list_metrics(config)
    if str(config["valid_metric"]).lower() not in [name.lower() for name in computed]:
        raise UsageError(
            f"valid_metric: {shown(config['valid_metric'])} is not computed; metrics and topk give "
            f"{', '.join(computed)}; set it to one of these"
        )


def list_metrics(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics that a run computes, such as NDCG@10, in their order."""
    names: list[str] = []
    for metric in as_list(config["metrics"]):
        has_cutoff = str(metric).lower() != "gauc"
        names += [f"{metric}@{k}" for k in as_list(config["topk"])] if has_cutoff else [str(metric)]
    return names


def as_list(value: Any) -> list[Any]:
    """Return several values as a list, and a single one as the only one of a list."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
