"""What an option may be: a row of the table in ``options.py``, and checks of a value by it.

Checks get a value and its source, ``location``, with which the message of a ``UsageError`` begins.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.values import Options, check_choice, is_whole, shown

# What changing an option changes.
MODEL = "model"  # the function that is learned
TRAINING = "training"  # how it is learned or asked
SCHEDULE = "schedule"  # how long a run trains, and where; in a search the scheduler's
DATA = "data"  # interactions, split and metrics: the same in all trials of a search
IGNORED = "ignored"  # nothing here; ``reason`` says why

Condition = Callable[[Options, Any], str | None]  # (configuration, value) -> problem, None if read
Check = Callable[[str, Any], None]  # (location, value)

# Bounds that leave 0 and 1 out; the first is the smallest that float32 holds with all its digits.
ABOVE_0, BELOW_1, ABOVE_1 = 2.0**-126, math.nextafter(1, 0), math.nextafter(1, 2)
_OPEN = {ABOVE_0: "above 0", BELOW_1: "below 1", ABOVE_1: "above 1"}
_LONGEST = 10_000  # characters of a value: a path has 4,096 at most


@dataclass(frozen=True)
class Option:
    """One row of the option table: what values an option may have, and where it is read.

    Attributes:
        name: name of the option.
        low, high: smallest and largest number allowed; sizes are also checked against the memory of
            the machine, see ``experiment/memory.py``.
        choices: the names it may have.
        example: a valid value, where the default is empty or of another kind.
        inner: an example of each value of a mapping whose keys are known.
        role: what changing it changes.
        allows_single: whether a single value may stand for a list of one.
        allows_empty: whether it may be empty although its default is not.
        nonempty: whether it must not be empty.
        is_pair: whether a list of it has two numbers.
        only: conditions under which it is read, see ``effects.py``: each returns what is wrong, as
            it follows the name of the option in a message, and None if the option is read.
        reason: why the option has no effect, or its bound.
        check: raises for a wrong value; with an example for a wrong text in it, and without one in
            place of all other checks of the row.
    """

    name: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    example: Any = None
    inner: dict[str, Any] | None = None
    role: str = MODEL
    allows_single: bool = False
    allows_empty: bool = False
    nonempty: bool = False
    is_pair: bool = False
    only: tuple[Condition, ...] = ()
    reason: str = ""
    check: Check | None = None

    @property
    def allowed(self) -> str:
        """The names or numbers that it may have, in a few characters; empty for any."""
        if self.low is None or self.high is None:
            return ", ".join(self.choices)
        return f"{_describe_bound(self.low)} to {_describe_bound(self.high)}"


def _describe_bound(number: float) -> str:
    return _OPEN.get(number) or (f"{number:,}" if isinstance(number, int) else f"{number:g}")


def check_plain(location: str, value: Any) -> None:
    """Refuse a value that a yaml file and a configuration cannot hold, or that has such a part."""
    may_be_infinite = location.endswith(": clip_grad_norm")  # norm_type: .inf is the maximum norm
    try:
        text = json.dumps(value, allow_nan=may_be_infinite, default=lambda scalar: scalar.item())
    except (TypeError, ValueError, AttributeError, RuntimeError):  # RecursionError is one
        kind = type(value).__name__
        raise UsageError(
            f"{location}: expected text, finite numbers, lists or mappings, found {shown(value)} "
            f"({kind})"
        ) from None
    if len(text) > _LONGEST:
        raise UsageError(f"{location}: {len(text):,} characters; {_LONGEST:,} are the most")
    if "\\u0000" in text:
        raise UsageError(f"{location}: text cannot hold a zero byte, found {shown(value)}")


def check_kind(location: str, option: Option, value: Any, example: Any) -> None:
    """Check the type of a value, and the choices, bounds and lengths of its option.

    Args:
        location: source and name of the option, with which messages begin.
        option: row of the table; its choices and bounds hold for every text and number inside.
        value: the value; a UsageError is about its first fault.
        example: a valid value, whose type is expected; its first element or inner value is the
            example of all elements of a list, or inner values of a mapping.
    """
    if option.choices and not isinstance(example, (list, tuple)):
        check_choice(location, value, option.choices)
        return
    is_single = value is not None and not isinstance(value, (list, tuple, dict))
    if isinstance(example, list) and option.allows_single and is_single:
        if isinstance(value, str) and not isinstance(example[0], str):  # 5,10 in a shell
            raise UsageError(f"{location}: expected a list as in '[5, 10]', found {shown(value)}")
        value = [value]
    _check_type(location, value, example)
    if isinstance(value, (list, tuple)):
        _check_length(location, option, value)
    if isinstance(example, (list, tuple)) and example and not isinstance(example[0], dict):
        for element in value:
            check_kind(location, option, element, example[0])
    elif isinstance(example, dict) and example:
        for key, element in value.items():
            check_kind(f"{location}.{key}", option, element, next(iter(example.values())))
    elif isinstance(value, (int, float)) and option.low is not None and option.high is not None:
        if not option.low <= value <= option.high:
            reason = f" ({option.reason})" if option.reason else ""
            raise UsageError(f"{location}: expected {option.allowed}{reason}, found {shown(value)}")
    elif option.check is not None:
        option.check(location, value)


def _check_length(location: str, option: Option, elements: list | tuple) -> None:
    if option.nonempty and not elements:
        raise UsageError(f"{location}: expected at least one, found {shown(elements)}")
    if option.is_pair and len(elements) != 2:
        raise UsageError(f"{location}: expected two numbers, found {shown(elements)}")


# Type of the example, whether a value has it, and how a message calls it.
_TYPES: tuple[tuple[type | tuple[type, ...], Callable[[Any], bool], str], ...] = (
    (bool, lambda value: isinstance(value, bool), "true or false"),
    (int, is_whole, "a whole number"),
    (float, lambda value: is_whole(value) or isinstance(value, float), "a number"),
    (dict, lambda value: isinstance(value, dict), "a mapping such as {a: b}"),
    ((list, tuple), lambda value: isinstance(value, (list, tuple)), "a list"),
    (str, lambda value: isinstance(value, str) and value != "", "text"),
)


def _check_type(location: str, value: Any, example: Any) -> None:
    """Check that a value has the type of an example; an example of another type allows any."""
    for example_type, has_type, name in _TYPES:
        if isinstance(example, example_type):
            if not has_type(value):
                raise UsageError(
                    f"{location}: expected {name} (such as {shown(example)}), "
                    f"found {shown(value)} ({type(value).__name__})"
                )
            return


# --- checks of some options ---


def check_interval(location: str, value: str) -> None:
    """Check a text such as "[0,1);[3,inf)", of which RecBole silently skips what it cannot read."""
    for part in value.split(";"):
        interval = part.strip()
        try:
            low, high = map(float, interval[1:-1].split(","))
        except ValueError:
            low, high = 1, 0  # no interval: refused below
        if not (low <= high and interval[0] in "[(" and interval[-1] in "])"):
            raise UsageError(
                f"{location}: expected an interval such as '[3,inf)', found {shown(value)}"
            )


def check_discretization(location: str, value: Any) -> None:
    """Check a mapping of fields to ways of making buckets of their numbers, by ED or LD."""
    _check_type(location, value, {"price": {"method": "LD"}})
    for field, method in value.items():
        bucket = method.get("bucket") if isinstance(method, dict) else None
        has_bucket = is_whole(bucket) and 1 <= bucket <= 10**6
        expected = {"method": "ED", "bucket": bucket} if has_bucket else {"method": "LD"}
        if method != expected:
            raise UsageError(
                f"{location}.{field}: expected {{method: ED, bucket: 10}} (equal distances) or "
                f"{{method: LD}} (logarithms), found {shown(method)}"
            )


def check_columns(location: str, value: Any) -> None:
    """Check a mapping of tables to lists of fields; RecBole would read a text as its letters."""
    _check_type(location, value, {"inter": ["rating"]})
    for table, fields in value.items():
        is_all = fields == "*" and location.endswith(": load_col")
        is_list = isinstance(fields, (list, tuple)) and all(
            isinstance(name, str) for name in fields
        )
        if not (is_all or is_list):
            raise UsageError(
                f"{location}: {table}: expected a list of fields (or, of load_col, '*' for all), "
                f"found {shown(fields)}"
            )


def check_target_events(location: str, value: Any) -> None:
    """Check a mapping of fields to the values of targets, which may not occur in the data."""
    _check_type(location, value, {"event_type": ["buy"]})
    for field, values in value.items():
        if values in (None, "", [], {}):
            raise UsageError(f"{location}.{field}: expected values such as [buy], found none")


def make_check(reader: str) -> Check:
    """Return a check that calls ``module:function``, which raises a UsageError for a wrong value.

    The module is imported late: ``--help`` needs no pandas.
    """
    module, _, function = reader.partition(":")

    def check(location: str, value: Any) -> None:
        getattr(importlib.import_module(f"recbole_pos.{module}"), function)(value)

    return check


def check_gpus(location: str, value: Any) -> None:
    """Check the numbers of GPUs: a text such as "0,1", or one whole number."""
    if not (isinstance(value, str) or is_whole(value)):
        raise UsageError(
            f"{location}: expected numbers of GPUs such as '0,1', found {shown(value)}"
        )


def check_schemes(location: str, value: Any) -> None:
    """Check that ``position`` names something; unknown schemes are refused where they are built."""
    if value in (None, []):
        raise UsageError(f"{location} is empty; [nope] stands for no position")
    schemes = value if isinstance(value, (list, tuple, dict)) else [value]
    _check_type(location, schemes, ["rope"])


def check_vectors(location: str, value: Any) -> None:
    """Check the files of content vectors: one path, or a mapping of names to paths."""
    if value == {}:
        raise UsageError(f"{location}: expected at least one file")
    files = value.items() if isinstance(value, dict) else [("", value)]
    for name, path in files:
        _check_type(f"{location}.{name}" if name else location, path, "vectors.parquet")
