"""Layout of a file: whether its first line names columns, and whether its rows hold lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.json_lines import read_lists
from recbole_pos.conversion.roles import SAMPLE, by_name, is_time, snake
from recbole_pos.conversion.source import Columns, Source, is_list
from recbole_pos.conversion.times import ROW_ORDER
from recbole_pos.data.location import MISSING

_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}\b|.*\d\d:\d\d|[\[(].*[\])]$", re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d[\d.,' ]*(?:[eE][+-]?\d+)?$")
_LONG = re.compile(r"-|\d+\.\d|\d{8}")  # how no name of a column begins
_MOST = 0.9
_BRACKETS = r"(?s)^\s*[\[(].*[\])]\s*$"
_LIST_WORDS = re.compile(r"^(?:sequence|seq|list|history)_|_(?:sequence|seq|list|history)$")


def has_header(first: list[str], rows: Mapping[int, list[str]]) -> bool:
    """Return whether the first line of a file names its columns.

    It does not if a cell looks like the cells below it: a date, a long number, or the same shape.

    Args:
        first: cells of the first line.
        rows: some cells below each of them, by column.
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
    """Return a cell without its digits: u12 and u7 are alike."""
    return "9" if _NUMBER.match(cell) else re.sub(r"\d+", "9", cell)


def is_user_with_items(cells: list[str]) -> bool:
    """Return whether the cells of a line may be a user followed by items."""
    return len(cells) > 3 and len({_shape(cell) for cell in cells[1:]}) == 1


def name_columns(columns: Mapping[int, pa.ChunkedArray], number: int) -> tuple[list[str], bool]:
    """Name the columns of a file that names none, and return whether one tells the time."""
    when = next((place for place, column in columns.items() if _has_times(column)), None)
    names = iter(["user", "item", *(f"column_{place}" for place in range(4, number + 4))])
    return ["time" if place == when else next(names) for place in range(number)], when is not None


def _has_times(column: pa.ChunkedArray) -> bool:
    if is_time(column, "", None):
        return True
    head = column.slice(0, SAMPLE)
    return _is_listed(column) and is_time(pa.chunked_array([_split(head).flatten()]), "", None)


def explode(source: Source, given: Mapping[str, str | None]) -> tuple[Source, dict[str, str]]:
    """Turn rows of users with lists of interactions into a row for each interaction.

    Args:
        source: source of the interactions.
        given: columns of user, item and time that the user names; None to find one.

    Returns:
        the source, with rows of lists of different lengths rejected; and the columns of item and
        time, if they were lists.
    """
    columns = source.columns
    lists = [name for name, column in columns.items() if _is_listed(column)]
    item = given["item"]
    scalars = [name for name in columns if name not in lists]
    if not lists or (item not in lists if item else by_name("item", scalars)):
        return source, {}
    bracketed = [name for name in lists if _is_bracketed(columns[name])]
    time = given["time"] or _find_times(columns, [name for name in lists if name != item])
    if time not in lists:
        if time != ROW_ORDER and item not in bracketed:
            return source, {}
        lists = bracketed  # text with commas may be anything
    item = item or _by_singular("item", [name for name in lists if name != time])
    roles = {role: name for role, name in {"item": item, "time": time}.items() if name in lists}
    if not roles:
        return source, {}
    split = {name: _split(columns[name]) for name in lists}
    length = {name: one.value_lengths().fill_null(0).to_numpy() for name, one in split.items()}
    first = length[next(iter(roles.values()))]
    several = first > 1
    for name in lists:  # what has a value for each interaction, too
        same = (length[name] == first)[several]
        if name not in roles.values() and 2 * same.sum() <= len(same):
            del split[name], length[name]
    right = np.all([each == first for each in length.values()], axis=0)
    empty = right & (first == 0)
    origin = np.repeat(np.arange(len(first)), np.where(right & ~empty, first, 1))
    inside = (right & ~empty)[origin]
    place = pa.array(np.cumsum(inside) - 1, mask=~inside)
    exploded = {
        name: pa.chunked_array([split[name].filter(pa.array(right)).flatten().take(place)])
        if name in split
        else column.take(pa.array(origin))
        for name, column in columns.items()
    }
    names = ", ".join(split)
    rejected = {
        f"lists of different lengths ({names})": np.flatnonzero(~right[origin]),
        "lists without anything": np.flatnonzero(empty[origin]),
    }
    form = f"{source.form}, a row for each user with lists ({names})"
    return replace(source, columns=exploded, form=form, origin=origin, rejected=rejected), roles


def _find_times(columns: Columns, lists: list[str]) -> str | None:
    """Return the column whose lists hold times, by its name if there are several."""
    heads = {name: _split(columns[name].slice(0, SAMPLE)).flatten() for name in lists}
    found = [name for name, head in heads.items() if is_time(pa.chunked_array([head]), name, None)]
    return _by_singular("time", found) or (found[0] if found else None)


def _by_singular(role: str, lists: list[str]) -> str | None:
    """Return the one list that is named like a role: sequence_item_ids is one of item_id."""
    singular = {name: _LIST_WORDS.sub("", snake(name)).removesuffix("s") for name in lists}
    named = [name for name in lists if by_name(role, [singular[name]])]
    only = named if len(named) == 1 else lists
    return only[0] if len(only) == 1 else None


def _head(column: pa.ChunkedArray) -> pa.Array:
    return column.slice(0, SAMPLE).drop_null().cast(pa.string()).combine_chunks()


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)


def _is_bracketed(column: pa.ChunkedArray) -> bool:
    if not _is_text(column.type):
        return is_list(column.type)
    return bool(pc.all(pc.match_substring_regex(_head(column), _BRACKETS)).as_py())


def _is_listed(column: pa.ChunkedArray) -> bool:
    """Return whether the first cells of a column are lists, or text with commas."""
    if _is_bracketed(column):
        return True
    return _is_text(column.type) and bool(pc.any(pc.match_substring(_head(column), ",")).as_py())


def _split(column: pa.ChunkedArray) -> pa.LargeListArray:
    """Return a column as lists: its own, or text in brackets or with commas, which is split."""
    if is_list(column.type):
        return column.combine_chunks().cast(pa.large_list(column.type.value_type))
    text, mark = column.cast(pa.string()).combine_chunks(), ","
    if _is_bracketed(column):
        if (lists := read_lists(text)) is not None:
            return lists.cast(pa.large_list(lists.type.value_type))
        text = pc.replace_substring_regex(text, r"^\s*[\[(]\s*|[\s,]*[\])]\s*$", "")
        mark = "," if pc.any(pc.match_substring(text, ",")).as_py() else " "
    text = pc.if_else(pc.equal(text, ""), None, text)
    lists = pc.split_pattern_regex(text, rf"\s*{mark}\s*").cast(pa.large_list(pa.string()))
    words = pc.replace_substring_regex(lists.values, r"^\s*[\"']?|[\"']?\s*$", "")
    return pa.LargeListArray.from_arrays(lists.offsets, words, mask=lists.is_null())
