"""Checks of values that users give, and the words in which messages show values and names."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Protocol, TypeGuard

from recbole_pos.errors import UsageError

_MAX_NAMES = 12  # that a message lists
_MAX_LENGTH = 200  # characters of a value in a message
_NUMBER = re.compile(r"[+-]\d[\d.,]*")  # begins like a spreadsheet's formula, and is none
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
    """Return whether a value is a finite number, of Python or numpy, and not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int, one of numpy included, and not a boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a UsageError if the value of an option is not one of its choices.

    Args:
        key: name of the option, with which the message begins.
        value: its value.
        choices: values that it may have. The message proposes the most similar one.
    """
    if value not in choices:
        hint = suggest(str(value), choices)
        raise UsageError(f"{key}: {shown(value)} is not one of {', '.join(choices)}{hint}")


def shown(value: Any) -> str:
    """Return a value as a message shows it: its ``repr``, in one line, cut off if it is long."""
    return short(" ".join(repr(to_python(value)).splitlines()))


def to_python(value: Any) -> Any:
    """Return a scalar of numpy or torch as a number or text of Python; other values as they are."""
    return value.item() if getattr(value, "shape", None) == () else value


def to_plain(value: Any) -> Any:
    """Return a value as yaml can hold it: a number, text, None, or a list or mapping of such.

    Numbers of numpy and torch become Python's, within lists, tuples and mappings, too.

    Raises:
        TypeError: if the value is, or holds, anything else.
    """
    plain = to_python(value)
    if isinstance(plain, dict):
        return {to_plain(key): to_plain(item) for key, item in plain.items()}
    if isinstance(plain, (list, tuple)):
        return type(plain)(to_plain(item) for item in plain)
    if plain is None or isinstance(plain, (bool, int, float, str)):
        return plain
    raise TypeError(f"a {type(value).__name__} is no plain value")


def short(text: str) -> str:
    """Return a text as a message shows it; of a long one only the beginning, and its length."""
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[: _MAX_LENGTH // 2]} ... ({len(text):,} characters)"


def escape_formula(value: Any) -> Any:
    """Return a cell for a csv file, changed if a spreadsheet would run it as a formula.

    Names in a dataset come from strangers, and a formula can send data away. A text that begins
    like one (``=``, ``+``, ``-``, ``@``) gets a ``'`` before it, except a signed number such as
    ``-3.5``. Other values are returned as they are.
    """
    if not isinstance(value, str) or not value.startswith(tuple("=+-@\t\r")):
        return value
    # _NUMBER matches a text that is a signed number as a whole
    return value if _NUMBER.fullmatch(value) else f"'{value}"


def listed(names: Iterable[Any]) -> str:
    """Return names as a message lists them, such as ``a, b, c`` or ``a, b, ... (5,000 in all)``.

    At most 12 names are listed, and a name of more than 60 characters is cut off.

    Args:
        names: names of items, users, columns and so on; other values are shown as their text.
    """
    names = [str(name) for name in names]
    first = [name if len(name) <= 60 else f"{name[:59]}…" for name in names[:_MAX_NAMES]]
    if len(names) > _MAX_NAMES:
        first.append(f"... ({len(names):,} in all)")
    return ", ".join(first)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word, as a question with similar known words.

    Similar are up to 3 words that are spelt like it or else, if it has 3 characters or more,
    contain it. Upper and lower case do not count.

    Args:
        word: what the user wrote.
        known: the words that exist.

    Returns:
        `` (did you mean a or b?)``, the most similar first; nothing if no known word is similar.
    """
    # lower case -> the word as it is known
    by_lower = {str(name).lower(): str(name) for name in known}
    word = word[:100].lower()  # cut off, since comparing long words takes long
    similar = difflib.get_close_matches(word, by_lower, n=3, cutoff=0.75)
    if not similar and len(word) > 2:
        similar = [name for name in by_lower if word in name][:3]
    return f" (did you mean {' or '.join(by_lower[name] for name in similar)}?)" if similar else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: similar words or, if few, all known ones.

    Args:
        word: what the user wrote.
        known: the words that exist.

    Returns:
        `` (did you mean a or b?)``. If none is similar, all words if they are few (``; known are a,
        b``), and else nothing.
    """
    known = list(known)
    hint = suggest(word, known)
    if hint or len(known) > _MAX_NAMES:
        return hint
    return f"; known are {', '.join(map(str, known))}"


def read_names(names: Any, key: str) -> list[str]:
    """Return names (of users, items or columns) that are given in any usual form, as texts.

    A name may be text, a whole number, or a float such as 3.0, which pandas makes of whole numbers
    in a column that has empty cells. ``7`` and ``[7]`` both become ``["7"]``. Numbers of numpy and
    torch count as Python's (``to_python``).

    Args:
        names: one name, or an iterable of names such as a list, an array or a pandas Series.
        key: name of the option or argument, for messages.

    Raises:
        UsageError: for anything else, such as a dict, a table or bytes.
    """
    names = to_python(names)

    # A dict or a table could be iterated over, but its keys or columns are no names: it is taken
    # for one name, which is refused below. So is a value that is one name, or none at all.
    is_one = isinstance(names, (str, Mapping)) or not isinstance(names, Iterable)
    if is_one or hasattr(names, "columns"):
        names = [names]

    found = []
    for name in names:
        if type(name) is str:  # the usual case, made fast since a request may name all items
            found.append(name)
            continue
        plain = to_python(name)
        if isinstance(plain, float) and plain.is_integer():
            plain = int(plain)
        if not isinstance(plain, (str, int)):
            raise UsageError(f"{key}: expected names: text or whole numbers, found {shown(plain)}")
        found.append(str(plain))
    return found
