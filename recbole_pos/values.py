"""Checks of values that users give, and how messages show them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Protocol, TypeGuard
from uuid import UUID

from recbole_pos.errors import UsageError

_MAX_NAMES = 12  # that a message lists
_MAX_LENGTH = 200  # characters of a value in a message
_NUMBER = re.compile(r"[+-]\d[\d.,]*")
# Units of time that options may name -> seconds.
SECONDS = {
    **{"nanoseconds": 1e-9, "microseconds": 1e-6, "milliseconds": 1e-3},
    **{"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0},
}


class Options(Protocol):
    """Options by name: a dict, or a configuration, which has None for a name it does not know."""

    def __getitem__(self, key: str, /) -> Any: ...

    def __contains__(self, key: Any, /) -> bool: ...


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, one of numpy included, and not a boolean."""
    try:
        is_numeric = isinstance(value, Real) and not isinstance(value, bool)
        return is_numeric and math.isfinite(value)
    except OverflowError:  # an int of more than 1024 bits
        return False


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int, one of numpy included, and not a boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a UsageError if the value of option ``key`` is not one of its choices."""
    if value not in choices:
        hint = suggest(str(value), choices)
        raise UsageError(f"{key}: {shown(value)} is not one of {', '.join(choices)}{hint}")


def shown(value: Any) -> str:
    """Return the repr of a value for a message, in one line; of a large value the beginning."""
    return short(" ".join(repr(_to_python(value)).splitlines()))


def _to_python(value: Any) -> Any:
    """Return a scalar of numpy or torch as a number or text of Python, other values as they are."""
    return value.item() if getattr(value, "shape", None) == () else value


def short(text: str) -> str:
    """Return a text for a message; of a long one, the beginning and the number of characters."""
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[: _MAX_LENGTH // 2]} ... ({len(text):,} characters)"


def escape_formula(value: Any) -> Any:
    """Return a cell of a csv file, with a ``'`` before what a spreadsheet takes for a formula."""
    if not isinstance(value, str) or not value.startswith(tuple("=+-@\t\r")):
        return value
    return value if _NUMBER.fullmatch(value) else f"'{value}"


def listed(names: Iterable[Any]) -> str:
    """Return names for a message: the first 12, cut off where long, and the number of all."""
    names = list(map(str, names))
    first = (name if len(name) <= 60 else f"{name[:59]}…" for name in names[:_MAX_NAMES])
    more = f", ... ({len(names):,} in all)" if len(names) > _MAX_NAMES else ""
    return ", ".join(first) + more


def _find_similar(word: str, choices: Iterable[str]) -> list[str]:
    """Return up to 3 choices, nearest first: similar ones, else those that contain the word."""
    by_lower = {str(choice).lower(): str(choice) for choice in choices}
    word = word[:100].lower()
    matches = difflib.get_close_matches(word, by_lower, n=3, cutoff=0.75)
    if not matches and len(word) > 2:
        matches = [name for name in by_lower if word in name][:3]
    return [by_lower[name] for name in matches]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; nearest known: a, b`` or, if none is near, all known words if they are few."""
    known = list(known)
    if similar := _find_similar(word, known):
        return f"; nearest known: {', '.join(similar)}"
    return f"; known are {', '.join(map(str, known))}" if len(known) <= _MAX_NAMES else ""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean a or b?)`` to end a message; empty if no known word is near."""
    similar = _find_similar(word, known)
    return f" (did you mean {' or '.join(similar)}?)" if similar else ""


def read_names(names: Any, key: str) -> list[str]:
    """Return names, which are text or whole numbers, as text; a single one as a list.

    Raises:
        UsageError: naming the option ``key``, for anything else.
    """
    names = _to_python(names)
    names = [names] if isinstance(names, (str, int)) else names
    is_table = isinstance(names, (bytes, Mapping)) or hasattr(names, "columns")
    found = []
    for name in [names] if is_table or not isinstance(names, Iterable) else names:
        if type(name) is str:  # first, since requests may name all items
            found.append(name)
            continue
        plain = _to_python(name)
        if isinstance(plain, UUID):
            plain = str(plain)
        if isinstance(plain, float) and plain.is_integer():  # a column that has empty cells, too
            plain = int(plain)
        if not isinstance(plain, (str, int)):
            raise UsageError(f"{key}: expected names: text or whole numbers, found {shown(plain)}")
        found.append(str(plain))
    return found
