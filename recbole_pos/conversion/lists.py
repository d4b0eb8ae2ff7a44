"""Rows of users with lists of interactions, HSTU's format, become a row for each interaction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.cells import parse_lists
from recbole_pos.conversion.roles import NAMES, SAMPLE, find_by_name, to_snake_case
from recbole_pos.conversion.source import Part, Source, is_list
from recbole_pos.errors import UsageError

_BRACKETS = r"^\s*[\[(]"
_WORDS = re.compile(r"^(sequence|seq|list|history)_|_(sequence|seq|list|history)$")


def explode_lists(source: Source, given_names: Mapping[str, str | None]) -> Source:
    """Return a source with a row for each interaction if it has lists of items, else as it is.

    Lists as long as those of items are split into rows; other columns are repeated. A split column
    gets the name of its entries, such as item_id for sequence_item_ids, unless it is one of
    ``given_names`` (role -> column that the user names).

    Raises:
        UsageError: for a row whose lists of items and times have different lengths.
    """
    lists = {}
    for name, column in source.columns.items():
        cells = _read_lists(column, is_called_list=name != _find_singular(name))
        if cells is not None:
            lists[name] = cells
    new_names = {
        name: name if name in given_names.values() else _find_singular(name) for name in lists
    }
    items = [n for n in lists if n == given_names["item"] or find_by_name("item", [new_names[n]])]
    scalars = [name for name in source.columns if name not in lists]
    has_single_items = not given_names["item"] and find_by_name("item", scalars)
    if len(items) != 1 or source.cuts or has_single_items:
        return source
    lengths = {n: cells.value_lengths().fill_null(0).to_numpy() for n, cells in lists.items()}
    num_items = lengths[items[0]]
    for name in lists:
        is_time = name == given_names["time"] or find_by_name("time", [new_names[name]])
        wrong = np.flatnonzero(lengths[name] != num_items)
        if is_time and len(wrong):
            raise UsageError(
                f"{source.locate_rows(wrong[:1])[0]}: {items[0]} has {num_items[wrong[0]]} entries "
                f"and {name} {lengths[name][wrong[0]]}; expected lists of one length"
            )
    rows = pa.array(np.repeat(np.arange(len(num_items)), num_items))
    split = [name for name in lists if np.array_equal(lengths[name], num_items)]
    columns = {}
    for name, column in source.columns.items():
        if name in split:
            columns[new_names[name]] = pa.chunked_array([lists[name].flatten()])
        else:
            columns[name] = column.take(rows)
    form = f"{source.form}, a row for each user with lists ({', '.join(split)})"
    part = Part(source.path, columns, len(rows))
    return replace(source, parts=[part], columns=columns, form=form)


def _find_singular(name: str) -> str:
    """Return item_id for a column sequence_item_ids, and so on; other names as they are."""
    singular = _WORDS.sub("", to_snake_case(name)).removesuffix("s")
    is_usual = any(find_by_name(role, [name]) for role in NAMES)
    has_usual_entry = any(find_by_name(role, [singular]) for role in NAMES)
    return singular if has_usual_entry and not is_usual else name


def _read_lists(column: pa.ChunkedArray, is_called_list: bool) -> pa.LargeListArray | None:
    """Return lists, text in brackets or, if called a list, with commas as lists; else None."""
    if is_list(column.type):
        return column.combine_chunks().cast(pa.large_list(column.type.value_type))
    if not pa.types.is_string(column.type) and not pa.types.is_dictionary(column.type):
        return None
    first = column.slice(0, SAMPLE).cast(pa.string()).drop_null()
    has_brackets = len(first) and pc.all(pc.match_substring_regex(first, _BRACKETS)).as_py()
    has_commas = is_called_list and pc.any(pc.match_substring(first, ",")).as_py()
    if not has_brackets and not has_commas:
        return None
    text = column.cast(pa.string()).combine_chunks()
    if not has_brackets:
        return pc.split_pattern_regex(text, r"\s*,\s*").cast(pa.large_list(pa.string()))
    lists = parse_lists(text.fill_null("[]"))
    if not lists:
        return None
    texts = [[None if value is None else str(value) for value in values] for values in lists]
    return pa.array(texts, pa.large_list(pa.string()))
