"""Check each option by its row of the table of options, and several options against each other.

The table is ``properties/options.yaml``. Every check raises a ``UsageError`` that names the option.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import Field, Strict, TypeAdapter, ValidationError
from recbole.evaluator import metric_types
from recbole.utils import EvaluatorType, InputType, ModelType

from recbole_pos.config.metrics import has_cutoff
from recbole_pos.config.options import Option, find_inner
from recbole_pos.config.sources import starts_from_runs
from recbole_pos.data.targets import check_given_parts, read_ties
from recbole_pos.errors import UsageError
from recbole_pos.model.models import LOSSES, PARTIAL_LOSSES, is_on_our_base
from recbole_pos.plain import to_plain
from recbole_pos.values import check_choice, nearest, shown

_NUMBER = r"\s*[-+]?(inf|[\d.]+(e[-+]?\d+)?)\s*"
_INTERVAL = rf"\s*[\[(]{_NUMBER},{_NUMBER}[\])]\s*"  # "[3,inf)"
# Types as the table of options names them -> what pydantic checks; int, float, list and mapping,
# which have bounds, are made by :func:`_make_type`.
_TYPES: dict[str, Any] = {
    "any": Any,
    "none": None,
    "columns": list[str] | Literal["*"],
    "bool": Annotated[bool, Strict()],
    "str": Annotated[str, Strict(), Field(min_length=1)],
    # The form is checked here, since RecBole would skip an interval that it cannot read.
    "interval": Annotated[str, Strict(), Field(pattern=rf"^({_INTERVAL}(;{_INTERVAL})*)$")],
}
_SIZES = ("hidden_size", "embedding_size", "difsr_size")  # which n_heads must divide
_HEADS_OF_FULL_SIZE = ("FGNN",)  # models of which each head has the size of all


# --- each by its row ---


def check_value(location: str, option: Option, value: Any) -> Any:
    """Check the value of an option by its row of the table of options, and return it in its type.

    The table (``options.yaml``) has a row for each option, with the type, bounds and choices of its
    values. numpy's numbers are returned as Python's, and a whole number as a float where the type
    is float. The keys of a mapping such as ``eval_args`` have rows of their own, by which their
    values are checked.

    Args:
        location: the file that gave the value, or "configuration"; messages begin with it.
        option: the row of the option.
        value: the value that the user gave.

    Raises:
        UsageError: if its type, bounds, length or choices do not allow the value, or a key is
            unknown.
    """
    name = f"{location}: {option.name}"
    try:
        # Type, bounds and length, by pydantic.
        checked = _make_adapter(option).validate_python(to_plain(value))
    except (ValidationError, TypeError):
        raise UsageError(f"{name}: expected {option.expected}, found {shown(value)}") from None

    if option.choices and checked is not None:
        for choice in checked if isinstance(checked, list) else [checked]:
            check_choice(name, choice, option.choices)

    rows = find_inner(option.name)
    mapping = checked if rows and checked else {}  # a mapping whose keys have rows, too
    for key, inner_value in mapping.items():
        if key not in rows:
            hint = nearest(key, rows)
            raise UsageError(f"{location}: unknown key {shown(key)} in {option.name}{hint}")
        check_value(location, rows[key], inner_value)
    return checked


@functools.cache
def _make_adapter(option: Option) -> TypeAdapter[Any]:
    """Return a pydantic validator of the type, bounds and length that an option may have."""
    return TypeAdapter(_make_type(option.type, option))


def _make_type(text: str, option: Option) -> Any:
    """Turn a type in words, such as ``list of int``, into an annotation that pydantic can check.

    ``int or list of int`` with the range [1, 8] becomes a union of an int from 1 to 8 and a list of
    such ints. ``Strict`` has pydantic refuse True as a whole number, and text as a number.

    Args:
        text: the type, as the table of options writes it.
        option: the row of the option in that table; its bounds and length hold for every number
            and list in the type.
    """
    # "A or B" is a union, and "list of A" and "mapping of A" contain the type A.
    alternatives = text.split(" or ")
    if len(alternatives) > 1:
        return Union[tuple(_make_type(each, option) for each in alternatives)]  # noqa: UP007

    container, _, element = text.partition(" of ")
    shortest = option.length or int(option.nonempty)
    if container == "list":
        length = Field(min_length=shortest, max_length=option.length)
        return Annotated[list[_make_type(element, option)], length]  # type: ignore[misc]
    if container == "mapping":
        mapping = dict[_TYPES["str"], _make_type(element, option)]  # type: ignore[misc, valid-type]
        return Annotated[mapping, Field(min_length=shortest)]

    if text == "int":
        return Annotated[int, Strict(), Field(**_name_bounds(option))]
    if text == "float":
        is_bounded = float("inf") not in option.range
        return Annotated[
            float, Strict(), Field(allow_inf_nan=not is_bounded, **_name_bounds(option))
        ]
    return _TYPES[text]


def _name_bounds(option: Option) -> dict[str, Any]:
    """Return the smallest and largest value of an option as keyword arguments of pydantic's Field.

    The range ``("above 0", 1)`` gives ``{"gt": 0, "le": 1}`` (greater than, less or equal), since
    "above" excludes the bound itself. An empty range gives ``{}``.
    """
    bounds: dict[str, Any] = {}
    for bound, inclusive, exclusive in zip(option.range, ("ge", "le"), ("gt", "lt"), strict=False):
        if isinstance(bound, str):  # above 0
            bounds[exclusive] = float(bound.split()[-1])
        else:
            bounds[inclusive] = bound
    return bounds


# --- several together ---


def check_together(config: dict[str, Any], model: str) -> None:
    """Raise a UsageError if options of a run contradict each other.

    Each option is valid by itself here; what is checked are combinations, such as a loss that the
    model lacks, or ``lr_scheduler: step`` without ``lr_decay_step``.

    Args:
        config: all options of the run.
        model: name of its model.
    """
    # Checks that other functions make, too.
    _check_metrics(config)
    check_sizes(config, model)

    # The losses that this model may have, and whether negatives (items to contrast with the
    # target) are sampled for it.
    loss = config.get("loss_type", "CE")
    is_ours = is_on_our_base(model)  # a model of the plugin, or a custom one that extends its base
    losses = LOSSES if is_ours else ("CE", "BPR")
    sampled = "sampled_softmax and negatives" if is_ours else "BPR"
    is_sequential = config["MODEL_TYPE"] == ModelType.SEQUENTIAL
    sampling = config["train_neg_sample_args"]
    mode = config["eval_args"]["mode"]
    modes = mode.values() if isinstance(mode, dict) else [mode]

    # Options by which training starts from the weights of a former run.
    start_keys = ("init_from", "train_only", "update_from")
    given_starts = [key for key in start_keys if config[key] is not None]
    histories = f"{config['ITEM_ID_FIELD']}{config['LIST_SUFFIX']}"

    # Pairs of a condition that must not hold, and what to say if it does.
    for is_wrong, message in (
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
        (
            config["lr_scheduler"] == "step" and not config["lr_decay_step"],
            "lr_scheduler: step needs lr_decay_step, the epochs between two steps",
        ),
        (
            histories in (config["alias_of_item_id"] or ()),
            f"alias_of_item_id: names {shown(histories)}, and examples that were cut elsewhere are "
            "not read: give the files an interaction a row (user, item and time), and the split by "
            "eval_args, or a file of interactions for each part by benchmark_filename",
        ),
    ):
        if is_wrong:
            raise UsageError(message)

    if config["benchmark_filename"] is not None:
        check_given_parts(config["benchmark_filename"], config["eval_args"]["split"])
    read_ties(config["eval_args"]["ties"])


def check_sizes(config: Mapping[str, Any], model: str) -> None:
    """Raise a UsageError if attention heads cannot have equal parts of the hidden size.

    A hidden size of 64 suits 2 heads of size 32, but not 3.

    Args:
        config: option -> value; a size that is missing is not checked.
        model: name of the model; some give every head the whole size, and are not checked.
    """
    heads = config.get("n_heads")
    for size in _SIZES:
        heads_share_size = heads and config.get(size) and model not in _HEADS_OF_FULL_SIZE
        if heads_share_size and config[size] % heads:
            raise UsageError(f"{size} {config[size]} is not a multiple of n_heads {heads}")


def check_negatives(config: dict[str, Any], model: str) -> None:
    """Raise a UsageError if negative sampling does not suit the loss.

    Negatives are items that the user did not choose, with which the target is compared. RecBole
    samples them if ``train_neg_sample_args`` says so. A pairwise loss such as BPR needs them; a
    loss of this package that draws its own must not get RecBole's.

    Args:
        config: all options of the run, with ``MODEL_INPUT_TYPE`` (pairwise or pointwise), which
            RecBole derives from model and loss.
        model: name of the model, for messages.
    """
    has_negatives = config["train_neg_sample_args"]["distribution"] != "none"
    loss = config.get("loss_type")
    is_pairwise = config.get("MODEL_INPUT_TYPE") == InputType.PAIRWISE
    # CE takes no negatives either; check_together has refused them.
    if loss in PARTIAL_LOSSES and has_negatives:
        how = "; negatives says how many" if "negatives" in config else ""
        raise UsageError(f"train_neg_sample_args: {loss} chooses items itself{how}; leave it out")
    if is_pairwise and not has_negatives and loss not in LOSSES:
        raise UsageError(
            f"train_neg_sample_args: {model} compares targets with negatives and needs them, for "
            "example {distribution: uniform, sample_num: 1}"
        )


def _check_metrics(config: dict[str, Any]) -> None:
    """Raise a UsageError if ``metrics`` or ``valid_metric`` has a metric that cannot be computed.

    ``metrics: [NDCG]`` and ``topk: [5, 10]`` give NDCG@5 and NDCG@10. ``valid_metric``, by which
    early stopping decides, must be one of these; and all must be metrics of rankings, since labels
    (click or no click), which some others need, do not exist here.

    Args:
        config: all options of the run.
    """
    ranking = [name for name, kind in metric_types.items() if kind == EvaluatorType.RANKING]
    for metric in as_list(config["metrics"]):
        name = metric.lower()
        if name not in ranking:
            hint = nearest(name, ranking) or f"; known are {', '.join(ranking)}"
            if "@" in name:
                hint = "; a metric stands without its cutoff, which is topk"
            if name in metric_types:
                hint = ", which needs labels; here items are ranked"
            raise UsageError(f"metrics: unknown {shown(metric)}{hint}")

    # Names are compared in lower case, as RecBole does.

    computed = list_metrics(config)
    if config["valid_metric"].lower() not in [name.lower() for name in computed]:
        raise UsageError(
            f"valid_metric: {shown(config['valid_metric'])} is not computed; metrics and topk give "
            f"{', '.join(computed)}; set it to one of these"
        )


def list_metrics(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics that a run computes, such as NDCG@10, in their order.

    Args:
        config: options with ``metrics`` and ``topk``, each a single value or several.
    """
    names: list[str] = []
    for metric in as_list(config["metrics"]):
        cutoffs = as_list(config["topk"]) if has_cutoff(str(metric)) else []
        names += [f"{metric}@{k}" for k in cutoffs] or [str(metric)]
    return names


def as_list(value: Any) -> list[Any]:
    """Return several values as a list, and a single one as the only one of a list."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
