"""Names of fields, which options and the first line of a file can hold."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

# RecBole's own, those that relations are made of, and names it makes of others
_RESERVED = re.compile(r"label|item_length|time|position|.*_list")
LONGEST = 200  # bytes of a name, so that there is room for what files add to it
_NAME = re.compile(r"\w[\w.-]*")


def field_name(column: str, taken: Iterable[str]) -> str:
    """A name of letters, digits and _ for a column; another if it is taken or has a meaning."""
    plain = "".join(
        c for c in unicodedata.normalize("NFKD", column) if not unicodedata.combining(c)
    )
    name = re.sub(r"\W+", "_", plain).strip("_") or "column"
    if _RESERVED.fullmatch(name.lower()) or name[0].isdigit():
        name = f"column_{name}"
    taken, number, free = set(taken), 2, name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def is_dataset_name(name: str) -> bool:
    """Whether a folder and files can be called so, and -d takes it."""
    return bool(_NAME.fullmatch(name)) and len(name.encode()) <= LONGEST
