"""What an option may be: a row of the table in ``options.py``, and the checks of a value by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.values import Options, check_choice, is_number, is_whole, shown

# What changing an option changes.
MODEL = "model"  # the function that is learned
TRAINING = "training"  # how it is learned or asked
SCHEDULE = "schedule"  # how long a run trains, and where; in a search the scheduler's
DATA = "data"  # events, split and metrics: the same in all trials of a search
IGNORED = "ignored"  # nothing here; ``why`` says why

Condition = Callable[[Options, Any], str | None]  # (configuration, value) -> problem, None if read
Check = Callable[[str, Any], None]  # (place, value), where the place is for messages; raises

_DEEPEST = 8  # mappings and lists within each other
_LONGEST = 4096  # characters, as of a path
_LONGEST_NAME = 200
_TINIEST = 2.0**-126  # the smallest number that float32 holds with all its digits


@dataclass(frozen=True)
class Option:
    """One row of the option table: what values an option may have, and where it is read.

    Attributes:
        name: name of the option.
        low, high: smallest and largest number allowed; sizes are also checked against the memory of
            the machine, see ``experiment/memory.py``.
        choices: the names it may have.
        unit: what its number counts, where the name does not tell.
        example: a valid value, where the default is empty or of another kind.
        inner: an example of each value of a mapping whose keys are known.
        role: what changing it changes.
        alone: whether a single value may stand for a list of one.
        empty: whether it may be empty although its default is not.
        filled: whether it must not be empty.
        pair: whether a list of it has two numbers.
        only: conditions under which it is read, see ``effects.py``: each returns what is wrong, as
            it follows the name of the option in a message, and None if the option is read.
        why: reason of an option without effect, or of a bound.
        check: raises for a wrong value, in place of all other checks of the row.
        each: raises for a wrong value within a mapping or list.
    """

    name: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""
    example: Any = None
    inner: dict[str, Any] | None = None
    role: str = MODEL
    alone: bool = False
    empty: bool = False
    filled: bool = False
    pair: bool = False
    only: tuple[Condition, ...] = ()
    why: str = ""
    check: Check | None = None
    each: Check | None = None


def check_plain(where: str, value: Any, depth: int = 0) -> None:
    """Check that a value could stand in a yaml file, with numbers that float32 and int64 can hold.

    Args:
        where: place of the value, for messages.
        value: value to check, with all that lists and mappings in it hold.
        depth: number of lists and mappings around the value.

    Raises:
        UsageError: naming the value that cannot.
    """
    if hasattr(value, "item"):  # a number of numpy or torch
        value = value.item() if getattr(value, "size", 1) == 1 else value
    wrong = ""
    if depth > _DEEPEST:
        wrong = f"more than {_DEEPEST} lists and mappings within each other"
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str) or len(name) > _LONGEST_NAME:
                raise UsageError(
                    f"{where}: names must be text of at most {_LONGEST_NAME} characters, found "
                    f"{shown(name)}"
                )
            check_plain(f"{where}.{name}", inner, depth + 1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            check_plain(where, inner, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        if not (where.endswith("clip_grad_norm.norm_type") and value > 0):  # the largest gradient
            wrong = f"must be finite, found {shown(value)}"
    elif isinstance(value, float) and 0 < abs(value) < _TINIEST:
        wrong = f"{shown(value)} is too small: float32 holds it as 0"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        wrong = f"{shown(value)} does not fit into 64 bits"
    elif isinstance(value, str) and len(value) > _LONGEST:
        wrong = f"{len(value):,} characters; {_LONGEST:,} are the most"
    elif isinstance(value, str) and "\0" in value:
        wrong = f"text cannot hold a zero byte, found {shown(value)}"
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        wrong = f"expected text, numbers, lists or mappings, found {shown(value)} "
        wrong += f"({type(value).__name__})"
    if wrong:
        raise UsageError(f"{where}: {wrong}")


def check_kind(where: str, option: Option, value: Any, example: Any) -> None:
    """Check a value by an example of its kind, and by the choices and bounds of an option.

    Args:
        where: place and name of the value, for messages.
        option: row with bounds for every number, and choices for every text, in the value.
        value: value to check.
        example: a valid value.

    Raises:
        UsageError: naming what was expected, and what was found.
    """
    if option.choices and not isinstance(example, (list, tuple)):
        check_choice(where, value, option.choices)
        return
    if isinstance(example, list) and option.alone and not isinstance(value, (list, tuple, dict)):
        value = value if value is None else [value]
    _check_type(where, value, example)
    if option.filled and isinstance(value, (list, tuple)) and not value:
        raise UsageError(f"{where}: expected at least one, found {shown(value)}")
    if option.pair and isinstance(value, (list, tuple)) and len(value) != 2:
        raise UsageError(f"{where}: expected two numbers, found {shown(value)}")
    if isinstance(example, (list, tuple)) and example and not isinstance(example[0], dict):
        for inner in value:
            check_kind(where, option, inner, example[0])
    elif isinstance(example, dict) and example:
        for name, inner in value.items():
            check_kind(f"{where}.{name}", option, inner, next(iter(example.values())))
    elif option.each is not None:
        option.each(where, value)
    elif is_number(value):
        _check_range(where, option, value)


def _check_type(where: str, value: Any, example: Any) -> None:
    """Check that a value has the type of an example; an example of another type allows any.

    Raises:
        UsageError: naming the place, the type that was expected and the value.
    """
    kinds: tuple[tuple[type, bool, str], ...] = (
        (bool, isinstance(value, bool), "true or false"),
        (int, is_whole(value), "a whole number"),
        (float, isinstance(value, (int, float)) and not isinstance(value, bool), "a number"),
        (dict, isinstance(value, dict), "a mapping such as {a: b}"),
        (list, isinstance(value, (list, tuple)), "a list"),
        (str, isinstance(value, str) and value != "", "text"),
    )
    for kind, allowed, wanted in kinds:
        if isinstance(example, kind):
            if not allowed:
                raise UsageError(
                    f"{where}: expected {wanted} (such as {shown(example)}), "
                    f"found {shown(value)} ({type(value).__name__})"
                )
            return


def _check_range(where: str, option: Option, value: float) -> None:
    """Check that a number is within the bounds of an option.

    Raises:
        UsageError: naming the bound. One that is the float next to a whole number is open.
    """
    for limit, is_beyond, open_word, closed_word in (
        (option.low, lambda low: value < low, "above", "at least"),
        (option.high, lambda high: value > high, "below", "at most"),
    ):
        if limit is not None and is_beyond(limit):
            is_open = limit != round(limit) and math.isclose(limit, round(limit), abs_tol=1e-300)
            bound = f"{open_word} {round(limit)}" if is_open else f"{closed_word} {_plain(limit)}"
            why = f" ({option.why})" if option.why else ""
            raise UsageError(f"{where} must be {bound}{why}, found {shown(value)}")


def _plain(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


# --- checks of some options ---


def check_interval(where: str, value: str) -> None:
    """Check a text such as "[0,1);[3,inf)", of which RecBole silently skips what it cannot read.

    Raises:
        UsageError: naming the place and the text.
    """
    for part in value.split(";"):
        ends = part.strip()[1:-1].split(",")
        try:
            low, high = map(float, ends)
        except ValueError:
            low, high = 1, 0  # no interval: refused below
        if not (low <= high and part.strip()[0] in "[(" and part.strip()[-1] in "])"):
            raise UsageError(
                f"{where}: expected an interval such as '[3,inf)', found {shown(value)}"
            )


def check_discretization(where: str, value: Any) -> None:
    """Check a mapping of fields to how their numbers become buckets.

    Raises:
        UsageError: naming the field.
    """
    _check_type(where, value, {"price": {"method": "LD"}})
    for field, how in value.items():
        is_known = isinstance(how, dict) and set(how) <= {"method", "bucket"}
        if not is_known or how.get("method") not in ("ED", "LD"):
            raise UsageError(
                f"{where}.{field}: expected {{method: ED, bucket: 10}} (equal distances) or "
                f"{{method: LD}} (logarithms), found {shown(how)}"
            )
        if how["method"] == "ED" or how.get("bucket") is not None:
            bucket = Option("bucket", 1, 10**6)
            check_kind(f"{where}.{field}.bucket", bucket, how.get("bucket"), 10)


def check_columns(where: str, value: Any) -> None:
    """Check a mapping of tables to lists of fields; RecBole would read a text as its letters.

    Raises:
        UsageError: naming the table.
    """
    _check_type(where, value, {"inter": ["rating"]})
    for table, fields in value.items():
        is_all = fields == "*" and where.endswith(": load_col")
        is_list = isinstance(fields, (list, tuple)) and all(isinstance(f, str) for f in fields)
        if not (is_all or is_list):
            raise UsageError(
                f"{where}: {table}: expected a list of fields (or, of load_col, '*' for all), "
                f"found {shown(fields)}"
            )


def check_target_events(where: str, value: Any) -> None:
    """Check a mapping of interaction fields to the values that targets have.

    Raises:
        UsageError: naming the field.
    """
    _check_type(where, value, {"event_type": ["buy"]})
    for field, entry in value.items():
        values = entry if isinstance(entry, (list, tuple)) else [entry]
        plain = [isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in values]
        if not (values and all(plain)):
            raise UsageError(
                f"{where}.{field}: expected values of targets such as [buy], found {shown(entry)}"
            )


def check_fraction(where: str, value: Any) -> None:
    """Check a fraction of the training sessions, such as "1/4"."""
    from recbole_pos.data.splits import read_fraction  # late: --help does without pandas

    read_fraction(value)


def check_session_filter(where: str, value: Any) -> None:
    """Check minimum numbers of events of users and items."""
    from recbole_pos.data.splits import read_session_filter

    read_session_filter(value)


def check_memory_limit(where: str, value: Any) -> None:
    """Check a limit of memory: auto, or a size."""
    from recbole_pos.data.scratch import read_limit

    read_limit(value)


def check_gpus(where: str, value: Any) -> None:
    """Check the numbers of GPUs: a text such as "0,1", or one whole number."""
    if not (isinstance(value, str) or is_whole(value)):
        raise UsageError(f"{where}: expected numbers of GPUs such as '0,1', found {shown(value)}")


def check_schemes(where: str, value: Any) -> None:
    """Check that ``position`` names something; unknown schemes are refused where they are built."""
    if value in (None, []):
        raise UsageError(f"{where} is empty; [nope] stands for no position")
    value = value if isinstance(value, (list, tuple, dict)) else [value]
    _check_type(where, value, ["rope"])


def check_vectors(where: str, value: Any) -> None:
    """Check the files of content vectors: one path, or a mapping of names to paths."""
    for name, path in value.items() if isinstance(value, dict) else [("", value)]:
        _check_type(f"{where}.{name}" if name else where, path, "vectors.parquet")
    if value == {}:
        raise UsageError(f"{where}: expected at least one file")


def check_nothing(where: str, value: Any) -> None:
    """Accept any value: it is checked where it is read."""
