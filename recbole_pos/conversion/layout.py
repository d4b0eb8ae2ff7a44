"""What the rows of a file are, before it is asked which column is which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.events import ROW_ORDER
from recbole_pos.conversion.json_lines import read_lists
from recbole_pos.conversion.roles import SAMPLE, by_name, snake, tells_time
from recbole_pos.conversion.source import Source
from recbole_pos.data.kinds import MISSING

_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}\b|.*\d\d:\d\d|[\[(].*[\])]$", re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d[\d.,' ]*(?:[eE][+-]?\d+)?$")
_LONG = re.compile(r"-|\d+\.\d|\d{8}")  # how no name of a column begins
_MOST = 0.9
_BRACKETS = r"(?s)^\s*[\[(].*[\])]\s*$"
_LIST_WORDS = re.compile(r"^(?:sequence|seq|list|history)_|_(?:sequence|seq|list|history)$")


def has_header(first: list[str], rows: Mapping[int, list[str]]) -> bool:
    """Return whether the first line of a file names its columns.

    Args:
        first: the cells of it.
        rows: some cells below each, by their place.
    """
    if first == [""]:
        return True
    named = alike = False
    for place, cell in enumerate(first):
        below = [text for text in rows.get(place, ()) if text not in MISSING]
        kind = _kind(cell)
        same = [_kind(text) == kind for text in below]
        if kind and sum(same) >= _MOST * len(same) and (kind == "date" or _LONG.match(cell)):
            return False
        if not below or cell in MISSING:
            continue
        digits = sum(any(c.isdigit() for c in text) for text in below)
        if not any(c.isdigit() for c in cell) and any(c.isalpha() for c in cell):
            named |= digits >= _MOST * len(below)
            alike |= cell in below
        else:
            shape = _shape(cell)
            alike |= sum(_shape(text) == shape for text in below) >= _MOST * len(below)
    named |= all(by_name(role, first) for role in ("user", "item"))
    return named or not alike


def _kind(cell: str) -> str:
    return "date" if _DATE.match(cell) else "number" if _NUMBER.match(cell) else ""


def _shape(cell: str) -> str:
    """A cell without its digits: u12 and u7 are alike."""
    return "9" if _NUMBER.match(cell) else re.sub(r"\d+", "9", cell)


def name_columns(columns: Mapping[int, pa.ChunkedArray], number: int) -> tuple[list[str], bool]:
    """Return names for the columns of a file that has none, and whether one tells the time."""
    times = (place for place, column in columns.items() if _tells_time(column))
    when = next(times, None)
    names = iter(["user", "item", *(f"column_{place}" for place in range(4, number + 4))])
    return ["time" if place == when else next(names) for place in range(number)], when is not None


def _tells_time(column: pa.ChunkedArray) -> bool:
    if tells_time(column, "", None):
        return True
    lists = _split(column.slice(0, SAMPLE), None) if _is_listed(column) else None
    return lists is not None and tells_time(pa.chunked_array([lists.flatten()]), "", None)


def explode(source: Source, given: Mapping[str, str | None]) -> tuple[Source, dict[str, str]]:
    """Return a row for each interaction where a file has a row for each user, with lists.

    Args:
        source: of the interactions.
        given: columns of user, item and time that the user names.

    Returns:
        the source, with rows of lists of different lengths rejected; and the columns of item and
        time, if they were lists.
    """
    columns = source.columns
    lists = [name for name, column in columns.items() if _is_listed(column)]
    item, time = given["item"], given["time"]
    scalars = [name for name in columns if name not in lists]
    if not lists or (item not in lists if item else by_name("item", scalars)):
        return source, {}
    marks = {name: None if _is_bracketed(columns[name]) else "," for name in lists}
    plain = {name for name in lists if marks[name] is None}
    if time is None:
        heads = {name: _split(columns[name].slice(0, SAMPLE), marks[name]) for name in lists}
        found = [
            name
            for name, head in heads.items()
            if name != item and tells_time(pa.chunked_array([head.flatten()]), name, None)
        ]
        named = [name for name in found if by_name("time", [_scalar(name)])]
        time = (named if len(named) == 1 else found)[0] if found else None
    if time not in lists:
        if time != ROW_ORDER and item not in plain:
            return source, {}
        lists = [name for name in lists if name in plain]  # text with commas may be anything
    others = [name for name in lists if name != time]
    if item is None:
        named = [name for name in others if by_name("item", [_scalar(name)])]
        if len(named) == 1 or len(others) == 1:
            item = (named if len(named) == 1 else others)[0]
    roles = {"item": item, "time": time}
    found_roles = {role: name for role, name in roles.items() if name in lists}
    if not found_roles:
        return source, {}
    split = {name: _split(columns[name], marks[name]) for name in lists}
    length = {
        name: pc.list_value_length(one).fill_null(0).to_numpy() for name, one in split.items()
    }
    first = length[next(iter(found_roles.values()))]
    several = first > 1
    for name in others:  # what has a value for each interaction, too
        same = (length[name] == first)[several]
        if name not in found_roles.values() and 2 * same.sum() <= len(same):
            del split[name], length[name]
    right = np.all([each == first for each in length.values()], axis=0)
    empty = right & (first == 0)
    repeat = np.where(right & ~empty, first, 1)
    origin = np.repeat(np.arange(len(first)), repeat)
    inside = (right & ~empty)[origin]
    place = pa.array(np.cumsum(inside) - 1, mask=~inside)
    taken = {
        name: pa.chunked_array([split[name].filter(pa.array(right)).flatten().take(place)])
        if name in split
        else column.take(pa.array(origin))
        for name, column in columns.items()
    }
    rejected = {
        f"lists of different lengths ({', '.join(split)})": np.flatnonzero(~right[origin]),
        "lists without anything": np.flatnonzero(empty[origin]),
    }
    return replace(
        source,
        columns=taken,
        form=f"{source.form}, a row for each user with lists ({', '.join(split)})",
        origin=origin,
        rejected=rejected,
    ), found_roles


def _scalar(name: str) -> str:
    """What one of a list is called: item_id of sequence_item_ids."""
    name = _LIST_WORDS.sub("", snake(name))
    return name.removesuffix("s")


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _head(column: pa.ChunkedArray) -> pa.Array:
    return column.slice(0, SAMPLE).drop_null().cast(pa.string()).combine_chunks()


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)


def _is_bracketed(column: pa.ChunkedArray) -> bool:
    if _is_list(column.type):
        return True
    if not _is_text(column.type):
        return False
    return bool(pc.all(pc.match_substring_regex(_head(column), _BRACKETS)).as_py())


def _is_listed(column: pa.ChunkedArray) -> bool:
    """Whether the first cells of a column are lists, or text with commas."""
    if _is_bracketed(column):
        return True
    return _is_text(column.type) and bool(pc.any(pc.match_substring(_head(column), ",")).as_py())


def _split(column: pa.ChunkedArray, mark: str | None) -> pa.ListArray:
    """The lists of a column: of Arrow, in brackets, or between commas."""
    if _is_list(column.type):
        one = column.combine_chunks()
        return one.cast(pa.large_list(column.type.value_type))
    text = column.cast(pa.string()).combine_chunks()
    if mark is None and _is_bracketed(column):
        if (lists := read_lists(text)) is not None:
            return lists.cast(pa.large_list(lists.type.value_type))
        text = pc.replace_substring_regex(text, r"^\s*[\[(]\s*|[\s,]*[\])]\s*$", "")
        mark = "," if pc.any(pc.match_substring(text, ",")).as_py() else " "
    text = pc.if_else(pc.equal(text, ""), None, text)
    lists = pc.split_pattern_regex(text, rf"\s*{mark or ','}\s*").cast(pa.large_list(pa.string()))
    words = pc.replace_substring_regex(lists.values, r"^\s*[\"']?|[\"']?\s*$", "")
    return pa.LargeListArray.from_arrays(lists.offsets, words, mask=lists.is_null())
