"""What values options may have, numbers and names, and what to say of a misspelt one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

from recbole_pos.errors import UsageError


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; yaml's true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Whether a value is an int; yaml's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that an option does not have.

    Raises:
        UsageError: naming option, value and choices.
    """
    if value not in choices:
        hint = suggest(str(value), choices)
        raise UsageError(f"{key}: {value!r} is not one of {', '.join(choices)}{hint}")


def nearest(word: str, known: Iterable[str]) -> str:
    """``nearest known: a, b, c``, however far."""
    lower = {str(name).lower(): str(name) for name in known}
    near = difflib.get_close_matches(word.lower(), lower, n=3, cutoff=0)
    return f"nearest known: {', '.join(lower[name] for name in near)}"


def suggest(word: str, known: Iterable[str], limit: int = 3) -> str:
    """`` (did you mean a or b?)`` with the known words nearest to a misspelt one, or nothing."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lower, n=limit, cutoff=0.6)
    near = near or [name for name in lower if len(word) > 2 and word.lower() in name][:limit]
    return f" (did you mean {' or '.join(lower[name] for name in near)}?)" if near else ""
