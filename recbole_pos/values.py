"""What values options may have, numbers and names, and hints for a misspelt one."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable
from typing import Any, Protocol, TypeGuard

from recbole_pos.errors import UsageError

_FEW = 12  # names that a message can list
_NUMBER = re.compile(r"[+-]\d[\d.,]*")
_SHOWN = 200  # characters of a value in a message
_NODES = 100  # parts of it
# Units of time that options may name.
SECONDS = {
    **{"nanoseconds": 1e-9, "microseconds": 1e-6, "milliseconds": 1e-3},
    **{"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0},
}


class Options(Protocol):
    """Options by their names: a configuration of RecBole or of the plugin, or a dict."""

    def __getitem__(self, key: str, /) -> Any:
        """Return the value; a configuration has None for a name that it does not know."""

    def __contains__(self, key: Any, /) -> bool:
        """Return whether there is an option of that name."""


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number of at most 64 bits, and not a boolean."""
    try:
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        return plain and math.isfinite(value)
    except OverflowError:  # Python's whole numbers have no end
        return False


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that an option does not have.

    Raises:
        UsageError: naming option, value and choices.
    """
    if value not in choices:
        hint = suggest(str(value), choices)
        raise UsageError(f"{key}: {shown(value)} is not one of {', '.join(choices)}{hint}")


def shown(value: Any) -> str:
    """Return a value as a message has it: whole, unless it would fill the screen.

    Of a large one only the beginning is looked at, however often its parts stand in each other.
    """
    text = _brief(value, [_NODES])
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ..."


def _brief(value: Any, left: list[int]) -> str:
    """Return the repr of at most ``left`` parts; numbers and text of numpy as plain ones."""
    left[0] -= 1
    if left[0] < 0:
        return "..."
    if getattr(value, "shape", None) == ():  # of numpy or torch
        value = value.item()
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[: _SHOWN // 2]!r} ... ({len(value):,} characters)"
    if type(value) in (list, tuple, dict):
        ends = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        parts = list(itertools.islice(value, _SHOWN))
        if isinstance(value, dict):
            texts = [f"{_brief(part, left)}: {_brief(value[part], left)}" for part in parts]
        else:
            texts = [_brief(part, left) for part in parts]
        if isinstance(value, tuple) and len(value) == 1:
            return f"({texts[0]},)"
        return f"{ends[0]}{', '.join(texts)}{ends[1]}"
    try:
        return repr(value)
    except ValueError:  # Python does not write out numbers of more than 4,300 digits
        return f"a number of {value.bit_length()} bits" if is_whole(value) else "a longer number"


def short(text: str) -> str:
    """Return a text as a message has it: whole, unless it would fill the screen."""
    return text if len(text) <= 200 else f"{text[:100]} ... ({len(text):,} characters)"


def escape_formula(value: Any) -> Any:
    """Return a cell of a csv file with a ``'`` before what a spreadsheet takes for a formula."""
    if not (isinstance(value, str) and value[:1] in tuple("=+-@\t\r")):
        return value
    return value if _NUMBER.fullmatch(value) else f"'{value}"


def listed(names: Iterable[Any]) -> str:
    """Return names as a message has them: the first of them, long ones cut off."""
    names = list(map(str, names))
    short = (name if len(name) <= 60 else f"{name[:59]}…" for name in names[:_FEW])
    return ", ".join(short) + (f", ... ({len(names):,} in all)" if len(names) > _FEW else "")


def find_similar(word: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return the known words nearest to a misspelt one, or that it is a part of; nearest first."""
    lower = {str(name).lower(): str(name) for name in known}
    word = word[:100].lower()
    matches = difflib.get_close_matches(word, lower, n=limit, cutoff=0.75)
    matches = matches or [name for name in lower if len(word) > 2 and word in name][:limit]
    return [lower[name] for name in matches]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; nearest known: a, b``, or all known words if they are few, or nothing."""
    known = list(known)
    if close := find_similar(word, known):
        return f"; nearest known: {', '.join(close)}"
    return f"; known are {', '.join(map(str, known))}" if len(known) <= _FEW else ""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean a or b?)`` with the nearest known words, or nothing."""
    close = find_similar(word, known)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
