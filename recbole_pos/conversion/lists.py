"""Rows of users with lists of interactions, as a row for each interaction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.cells import parse_lists
from recbole_pos.conversion.roles import SAMPLE, by_name, is_time, snake
from recbole_pos.conversion.source import Columns, Source, is_list
from recbole_pos.conversion.times import ROW_ORDER

_BRACKETS = r"(?s)^\s*[\[(].*[\])]\s*$"
_LIST_WORDS = re.compile(r"^(?:sequence|seq|list|history)_|_(?:sequence|seq|list|history)$")


def explode(source: Source, given: Mapping[str, str | None]) -> tuple[Source, dict[str, str]]:
    """Turn rows of users with lists of interactions into a row for each interaction.

    Args:
        source: source of the interactions.
        given: columns of user, item and time that the user names; None to find one.

    Returns:
        the source, with rows of lists of different lengths rejected; and the columns of item and
        time, if they were lists.
    """
    lists = {name: column for name, column in source.columns.items() if _is_listed(column)}
    item = given["item"]
    scalars = [name for name in source.columns if name not in lists]
    if not lists or (item not in lists if item else by_name("item", scalars)):
        return source, {}
    time = given["time"] or _find_one(
        "time", [name for name in lists if name != item and _has_times(lists[name])]
    )
    if time not in lists:  # text with commas may be anything
        lists = {name: column for name, column in lists.items() if _is_bracketed(column)}
        if time != ROW_ORDER and item not in lists:
            return source, {}
    item = item or _find_one("item", [name for name in lists if name != time])
    roles = {role: name for role, name in {"item": item, "time": time}.items() if name in lists}
    if not roles:
        return source, {}
    split = {name: _split(column) for name, column in lists.items()}
    length = {name: one.value_lengths().fill_null(0).to_numpy() for name, one in split.items()}
    first = length[next(iter(roles.values()))]
    for name in lists:  # others are lists of the user, unless they are as long as those of items
        same = (length[name] == first)[first > 1]
        if name not in roles.values() and 2 * same.sum() <= len(same):
            del split[name], length[name]
    right = np.all([each == first for each in length.values()], axis=0) & (first > 0)
    origin = np.repeat(np.arange(len(first)), np.where(right, first, 1))
    place = pa.array(np.cumsum(right[origin]) - 1, mask=~right[origin])
    exploded: Columns = {}
    for name, column in source.columns.items():
        if name in split:
            values = split[name].filter(pa.array(right)).flatten()
            exploded[name] = pa.chunked_array([values.take(place)])
        else:
            exploded[name] = column.take(pa.array(origin))
    names = ", ".join(split)
    rejected = {f"lists empty or of different lengths ({names})": np.flatnonzero(~right[origin])}
    form = f"{source.form}, a row for each user with lists ({names})"
    return replace(source, columns=exploded, form=form, origin=origin, rejected=rejected), roles


def _has_times(column: pa.ChunkedArray) -> bool:
    inside = _split(column.slice(0, SAMPLE)).flatten()
    return is_time(pa.chunked_array([inside]), "", None)


def _find_one(role: str, lists: list[str]) -> str | None:
    """Return the one list that is named like a role: sequence_item_ids is one of item_id."""
    singular = {name: _LIST_WORDS.sub("", snake(name)).removesuffix("s") for name in lists}
    found = [name for name in lists if by_name(role, [singular[name]])] or lists
    return found[0] if len(found) == 1 else None


def _head(column: pa.ChunkedArray) -> pa.Array:
    """Return the first cells of a column as text; none of a column of numbers."""
    if not (pa.types.is_string(column.type) or pa.types.is_dictionary(column.type)):
        return pa.array([], pa.string())
    return column.slice(0, SAMPLE).drop_null().cast(pa.string()).combine_chunks()


def _is_bracketed(column: pa.ChunkedArray) -> bool:
    head = pc.match_substring_regex(_head(column), _BRACKETS)
    return is_list(column.type) or len(head) > 0 and pc.all(head).as_py()


def _is_listed(column: pa.ChunkedArray) -> bool:
    """Return whether the first cells of a column are lists, or text with commas."""
    return _is_bracketed(column) or bool(pc.any(pc.match_substring(_head(column), ",")).as_py())


def _split(column: pa.ChunkedArray) -> pa.LargeListArray:
    """Return a column as lists: its own, or text in brackets or with commas, which is split."""
    if is_list(column.type):
        return column.combine_chunks().cast(pa.large_list(column.type.value_type))
    text, mark = column.cast(pa.string()).combine_chunks(), ","
    if _is_bracketed(column):
        if (lists := parse_lists(text.fill_null("[]"))) is not None:
            texts = [[None if part is None else str(part) for part in one] for one in lists]
            return pa.array(texts, pa.large_list(pa.string()))
        text = pc.replace_substring_regex(text, r"^\s*[\[(]\s*|[\s,]*[\])]\s*$", "")
        mark = "," if pc.any(pc.match_substring(text, ",")).as_py() else " "
    text = pc.if_else(pc.equal(text, ""), None, text)
    lists = pc.split_pattern_regex(text, rf"\s*{mark}\s*").cast(pa.large_list(pa.string()))
    words = pc.replace_substring_regex(lists.values, r"^\s*[\"']?|[\"']?\s*$", "")
    return pa.LargeListArray.from_arrays(lists.offsets, words, mask=lists.is_null())
