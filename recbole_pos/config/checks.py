"""Check each option by its row of the table of options, and several options against each other.

The table is ``properties/options.yaml``. Every check raises a ``UsageError`` that names the option.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import Field, Strict, TypeAdapter, ValidationError
from recbole.evaluator import metric_types
from recbole.utils import EvaluatorType, InputType

from recbole_pos.config.metrics import has_cutoff
from recbole_pos.config.options import Option, find_inner
from recbole_pos.data.targets import check_given_parts, read_tie_seed
from recbole_pos.errors import UsageError
from recbole_pos.model.models import LOSSES, PARTIAL_LOSSES, is_on_our_base
from recbole_pos.values import check_choice, nearest, shown, to_plain

_NUMBER = r"\s*[-+]?(inf|[\d.]+(e[-+]?\d+)?)\s*"
_INTERVAL = rf"\s*[\[(]{_NUMBER},{_NUMBER}[\])]\s*"  # "[3,inf)"
# Types as the table of options names them -> what pydantic checks. Numbers, lists and mappings have
# bounds, and so are made by :func:`_make_type`.
_TYPES: dict[str, Any] = {
    "any": Any,
    "none": None,
    "columns": list[str] | Literal["*"],
    "bool": Annotated[bool, Strict()],
    "str": Annotated[str, Strict(), Field(min_length=1)],
    # The form is checked here, since RecBole would skip an interval that it cannot read.
    "interval": Annotated[str, Strict(), Field(pattern=rf"^({_INTERVAL}(;{_INTERVAL})*)$")],
}
_SIZE_OPTIONS = ("hidden_size", "embedding_size", "difsr_size")  # which n_heads must divide
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
    # Type, bounds and length, by pydantic. ``to_plain`` turns numpy's numbers into Python's.
    try:
        checked = _make_adapter(option).validate_python(to_plain(value))
    except (ValidationError, TypeError):
        raise UsageError(f"{name}: expected {option.expected}, found {shown(value)}") from None

    # The choices, which hold for a single value and for each element of a list.
    if option.choices and checked is not None:
        for choice in checked if isinstance(checked, list) else [checked]:
            check_choice(name, choice, option.choices)

    # The keys of a mapping, if they have rows of their own: ``find_inner`` gives key -> its row.
    rows = find_inner(option.name)
    mapping = checked if rows and checked else {}
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

    With Int for the annotation of a whole number between the bounds of the option:

        int                Int
        int or none        Union[Int, None]
        list of int        Annotated[list[Int], Field(min_length=..., max_length=...)]
        mapping of int     Annotated[dict[str, Int], Field(min_length=..., max_length=...)]

    Args:
        text: the type, as the table of options writes it.
        option: the row of the option in that table. Its bounds hold for every number in the type,
            and its length for every list.
    """
    if " or " in text:
        alternatives = tuple(_make_type(each, option) for each in text.split(" or "))
        return Union[alternatives]  # noqa: UP007

    # A list has exactly ``option.length`` elements or, if that is None, any number; but at least
    # one with ``nonempty``.
    container, _, element = text.partition(" of ")
    if container in ("list", "mapping"):
        key: Any = _TYPES["str"]
        value: Any = _make_type(element, option)
        several: Any = list[value] if container == "list" else dict[key, value]
        shortest = option.length or (1 if option.nonempty else 0)
        return Annotated[several, Field(min_length=shortest, max_length=option.length)]

    if text in ("int", "float"):
        return _make_number(text, option)
    return _TYPES[text]  # the annotation of a type without bounds, such as "bool"


def _make_number(text: str, option: Option) -> Any:
    """Return the annotation of a number between the bounds of an option, for pydantic to check.

    A whole number from 1 to 8 is ``Annotated[int, Strict(), Field(ge=1, le=8)]``. ``Strict`` has
    pydantic refuse True as a whole number, and text as a number.

    Args:
        text: int or float.
        option: the row of the option. Its ``range`` has the smallest and the largest number, or is
            ``()`` for a number without bounds. A number may be infinite only if a bound is.
    """
    bounds = _make_bounds(*option.range) if option.range else {}
    if text == "int":
        return Annotated[int, Strict(), Field(**bounds)]
    may_be_infinite = float("inf") in option.range
    return Annotated[float, Strict(), Field(allow_inf_nan=may_be_infinite, **bounds)]


def _make_bounds(smallest: float | str, largest: float | str) -> dict[str, Any]:
    """Return the bounds of a number as arguments of pydantic's ``Field``.

    The range 1 to 8 gives ``{"ge": 1, "le": 8}``: greater or equal, less or equal. "above 1" and
    "below 8" give ``{"gt": 1.0, "lt": 8.0}``: greater, less.

    Args:
        smallest, largest: the bounds, as the table of options writes them.
    """
    # A bound that is a text has two words, of which the second is the number.
    lower = ("gt", float(smallest.split()[1])) if isinstance(smallest, str) else ("ge", smallest)
    upper = ("lt", float(largest.split()[1])) if isinstance(largest, str) else ("le", largest)
    return dict([lower, upper])


# --- several together ---


def check_together(config: dict[str, Any], model: str) -> None:
    """Raise a UsageError if options of a run contradict each other.

    Each option is valid by itself here. What is checked are combinations, such as a loss that the
    model lacks, or ``lr_scheduler: step`` without ``lr_decay_step``.

    Args:
        config: option -> value, of all options of the run.
        model: name of its model.
    """
    _check_metrics(config)
    check_sizes(config, model)
    _check_data(config)

    # Models on the base class of this package, custom ones too, take each of its losses (LOSSES).
    losses = LOSSES if is_on_our_base(model) else ("CE", "BPR")
    check_choice("loss_type", config.get("loss_type", "CE"), losses)

    if config["lr_scheduler"] == "step" and not config["lr_decay_step"]:
        raise UsageError("lr_scheduler: step needs lr_decay_step, the epochs between two steps")
    if config["update_from"] and config["init_from"]:
        raise UsageError("init_from and update_from: weights come from one run; leave one out")


def _check_data(config: dict[str, Any]) -> None:
    """Check the options that say how data are read, split and ranked.

    Args:
        config: option -> value, of all options of the run.

    Raises:
        UsageError: for a wrong value, or options that contradict each other.
    """
    eval_args = config["eval_args"]

    # The split. ``benchmark_filename`` names files of parts that the user has split already;
    # check_given_parts raises if ``eval_args.split`` is given as well. read_tie_seed raises for a
    # wrong value of ``ties``.
    if config["benchmark_filename"] is not None:
        check_given_parts(config["benchmark_filename"], eval_args["split"])
    read_tie_seed(eval_args["ties"])

    # The ranking. RecBole's ``mode`` says which items are ranked in validation and test. It is one
    # value for both, such as "full", or a mapping with one for each.
    mode = eval_args["mode"]
    modes = set(mode.values()) if isinstance(mode, dict) else {mode}
    if modes != {"full"}:
        raise UsageError(
            f"eval_args.mode: only full (rank all items) is supported, found {shown(mode)}"
        )


def check_sizes(config: Mapping[str, Any], model: str) -> None:
    """Raise a UsageError if attention heads cannot have equal parts of the hidden size.

    A hidden size of 64 suits 2 heads of size 32, but not 3.

    Args:
        config: option -> value; a size that is missing is not checked.
        model: name of the model; some give every head the whole size, and are not checked.
    """
    # _HEADS_OF_FULL_SIZE names those models.
    heads = config.get("n_heads")
    if not heads or model in _HEADS_OF_FULL_SIZE:
        return
    for size in _SIZE_OPTIONS:  # options that are sizes, such as hidden_size
        if config.get(size) and config[size] % heads:
            raise UsageError(f"{size} {config[size]} is not a multiple of n_heads {heads}")


def check_negatives(config: dict[str, Any], model: str) -> None:
    """Raise a UsageError if the option ``train_neg_sample_args`` does not suit the loss.

    By this option RecBole samples negatives: items that the user did not choose, with which the
    target is compared. A loss that compares pairs of items, such as RecBole's BPR, needs them. A
    loss in PARTIAL_LOSSES, such as this package's ``SCE``, chooses the items to compare with
    itself, and must not be given RecBole's, which it would not use.

    Args:
        config: option -> value, of all options of the run. ``MODEL_INPUT_TYPE``, which RecBole
            derives from model and loss, says whether the model compares pairs.
        model: name of the model, for messages.
    """
    are_sampled = config["train_neg_sample_args"]["distribution"] != "none"
    loss = config.get("loss_type")
    if loss in PARTIAL_LOSSES and are_sampled:
        how_many = "; negatives says how many" if "negatives" in config else ""
        raise UsageError(
            f"train_neg_sample_args: {loss} chooses items itself{how_many}; leave it out"
        )
    # CE compares with all items, also in RecBole's models that compare pairs under another loss.
    is_pairwise = config.get("MODEL_INPUT_TYPE") == InputType.PAIRWISE and loss != "CE"
    if is_pairwise and not are_sampled:
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
        config: option -> value, of all options of the run.
    """
    # RecBole's table ``metric_types`` has the kind of each metric, by its name in lower case.
    ranking = [name for name, kind in metric_types.items() if kind == EvaluatorType.RANKING]
    for metric in as_list(config["metrics"]):
        if metric.lower() not in ranking:  # RecBole's names are in lower case
            hint = nearest(metric.lower(), ranking) or f"; known are {', '.join(ranking)}"
            raise UsageError(f"metrics: unknown {shown(metric)}{hint}")

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
    # A metric without cutoffs, such as GAUC (``has_cutoff``), has its own name only.
    names: list[str] = []
    for metric in as_list(config["metrics"]):
        cutoffs = as_list(config["topk"]) if has_cutoff(str(metric)) else []
        names += [f"{metric}@{k}" for k in cutoffs] or [str(metric)]
    return names


def as_list(value: Any) -> list[Any]:
    """Return several values as a list, and a single one as the only one of a list."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
