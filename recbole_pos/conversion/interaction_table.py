"""The interactions of a source: which columns are user, item and time, and which rows are kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion.cells import Cells, encode, read_ids, read_numbers
from recbole_pos.conversion.reading import Source
from recbole_pos.conversion.text_files import EMPTY_LINE
from recbole_pos.conversion.times import ROW_ORDER, Times, read_times
from recbole_pos.data.location import UNWRITABLE
from recbole_pos.errors import UsageError
from recbole_pos.values import listed, shown, suggest

# Usual names by role, without _id at their end: a name of an earlier group wins over later ones.
NAMES = {
    "user": (
        "user u user_token",
        "customer client visitor member buyer shopper account reviewer person viewer listener "
        "reader",
        "session s",
    ),
    "item": (
        "item i item_token",
        "product asin parent_asin sku movie song track article book isbn business listing video "
        "game goods news recipe",
        "items item_ids item_list item_id_list sequence_item_ids",
    ),
    "time": (
        "timestamp time datetime date ts event_time",
        "bought_at purchased_at created_at ordered_at rated_at viewed_at clicked_at played_at "
        "occurred_at order_date purchase_date invoice_date invoicedate unixreviewtime review_time "
        "event_timestamp timestamp_ms unix_time epoch t_dat eventdate",
        "times timestamps time_list timestamp_list sequence_timestamps",
    ),
}
_SAMPLE = 1000  # values by which a column of times is known
_ORDER_NOTE = "order of the rows of each user, no time"


def find_roles(source: Source, args: ConvertArguments) -> dict[str, str]:
    """Return role (user, item, time) -> column; refuse to guess if none or several may have a role.

    The time is ``row_order``, which is no column, if the user says that there is none.
    """
    table, columns = source.table, source.columns
    roles: dict[str, str] = {}
    for role in NAMES:
        if (name := getattr(args, role)) is not None:
            if not (role == "time" and name == ROW_ORDER):
                require_column(str(name), columns, role)
            if str(name) in roles.values():
                raise UsageError(f"{role}: column {shown(name)} is taken twice")
            roles[role] = str(name)
    for role in [role for role in NAMES if role not in roles]:
        free = [name for name in columns if name not in roles.values()]
        names = find_by_name(role, free)
        if role == "time" and len(names) != 1:
            names = [n for n in names or free if _holds_times(table[n], n, args.date_format)]
        if len(names) != 1:
            found = f"{' and '.join(names)[:100]} may both be" if names else "no column is known as"
            option = f"--{role}=COLUMN"
            if role == "time":
                option += f", or --time={ROW_ORDER} if rows are in order"
            examples = listed(f"{name[:40]} ({_quote_example(table[name])})" for name in columns)
            raise UsageError(
                f"{found} the {role}: name it with {option}. The columns are {examples}; if these "
                "are no names, name them with --columns=user,item,..."
            )
        roles[role] = names[0]
    return roles


def require_column(name: str, columns: Iterable[str], option: str) -> None:
    """Raise a UsageError that names the ``option`` if no column has its name."""
    if name not in columns:
        raise UsageError(
            f"{option}: found no column {shown(name)}{suggest(name, columns)}; there are "
            f"{listed(columns)}"
        )


def find_by_name(role: str, names: Iterable[str]) -> list[str]:
    """Return the columns whose names are usual for a role, in the surest group that has any.

    Of ``movie`` and ``movie_id``, which are one name, it is the id.
    """
    plain = {name: _to_snake_case(name) for name in names}
    for group in NAMES[role]:
        ids = [name for name, word in plain.items() if re.sub("_?id$", "", word) in group.split()]
        if ids:
            return [name for name in ids if plain[name].endswith("id")] or ids
    return []


def _to_snake_case(name: str) -> str:
    """Return a name in lower case with _ between words: bought_at for boughtAt and Bought At."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"\W+", "_", words).strip("_").lower()


def _holds_times(column: pa.ChunkedArray, name: str, date_format: str | None) -> bool:
    """Return whether most of the first values of a column are times."""
    values = column.slice(0, _SAMPLE).drop_null()
    try:
        times = read_times(values, name, date_format)
    except UsageError:
        return False
    return 2 * times.forms.total() > len(values)


def _quote_example(column: pa.ChunkedArray) -> str:
    """Return the first value of a column for a message."""
    known = column.slice(0, _SAMPLE).drop_null()
    return repr(str(known[0].as_py())[:30]) if len(known) else "empty"


def explode_lists(source: Source, roles: Mapping[str, str]) -> Source:
    """Return a source with a row for each interaction if its items are lists, else as it is.

    Lists as long as those of items are split into rows, and other columns are repeated: a row
    (user 1, items [a, b], times [5, 6]) becomes (1, a, 5) and (1, b, 6). An empty list becomes one
    row in which the split columns are empty.

    Raises:
        UsageError: for a row whose lists of items and times have different lengths.
    """
    table, item, time = source.table, roles["item"], roles["time"]
    is_list = {field.name: pa.types.is_large_list(field.type) for field in table.schema}
    if not is_list[item]:
        return source
    num_items = _count_entries(table[item])
    num_rows = np.maximum(num_items, 1)
    origin = np.repeat(np.arange(table.num_rows), num_rows)
    has_item = np.repeat(num_items > 0, num_rows)
    entries = pa.array(np.cumsum(has_item) - 1, mask=~has_item)
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        differs = _count_entries(column) != num_items if is_list[name] else np.ones(1, bool)
        if name == time and is_list[name] and differs.any():
            place = source.locate_rows(np.flatnonzero(differs)[:1])[0]
            raise UsageError(f"{place}: expected lists of one length in {item} and {name}")
        if differs.any():
            columns[name] = column.take(pa.array(origin))
        else:
            columns[name] = pa.chunked_array([column.combine_chunks().flatten().take(entries)])
    cuts = {part: int(np.searchsorted(origin, row)) for part, row in source.cuts.items()}
    form = f"{source.form}, a row for each user with lists"
    return replace(source, table=pa.table(columns), form=form, cuts=cuts)


def _count_entries(lists: pa.ChunkedArray) -> np.ndarray:
    """Return the length of each list, 0 where it is missing."""
    return pc.list_value_length(lists).fill_null(0).to_numpy()


@dataclass
class InteractionTable:
    """Interactions in the order in which they are written.

    Attributes:
        rows: [interactions] int64 row of each in the source.
        user, item: [interactions] names of the user and the item of each.
        seconds: [interactions] float64 time of each in seconds since 1970.
        forms: form of times -> number of rows.
        dropped: reason -> rows of the source that cannot be used.
    """

    rows: np.ndarray
    user: Cells
    item: Cells
    seconds: np.ndarray
    forms: Counter[str]
    dropped: dict[str, np.ndarray]


def read_interactions(
    source: Source, roles: Mapping[str, str], args: ConvertArguments
) -> InteractionTable:
    """Read the interactions of a source; drop rows that are none, and refuse to drop all."""
    table = source.table
    user, item = (
        read_ids(encode(table[roles[role]], roles[role], args.missing)) for role in ("user", "item")
    )
    if roles["time"] in source.columns:
        time_column = table[roles["time"]]
        times = read_times(time_column, roles["time"], args.date_format, args.timezone)
    else:  # the number of each row among those of its user serves as time
        ranks = pd.Series(user.codes).groupby(user.codes).cumcount().to_numpy(np.float64)
        times = Times(ranks, Counter({_ORDER_NOTE: len(ranks)}))
        time_column = pa.chunked_array([pa.array(ranks)])
    is_kept = np.ones(table.num_rows, dtype=bool)
    dropped = {}
    for reason, is_faulty in _find_faults(user, item, times.seconds, time_column, roles):
        if (is_kept & is_faulty).any():
            dropped[reason] = np.flatnonzero(is_kept & is_faulty)
            is_kept &= ~is_faulty
    rows = np.flatnonzero(is_kept)
    if not len(rows):
        reasons = ", ".join(f"{reason}: {len(rows):,} rows" for reason, rows in dropped.items())
        raise UsageError(
            f"{source.path}: no row is an interaction ({reasons}); {roles['time']} is written as "
            f"{_quote_example(time_column)}. See --user, --item, --time and --date_format"
        )
    if args.then is not None:
        require_column(args.then, source.columns, "then")
        ties = encode(table[args.then], args.then, args.missing)
        rows = rows[_order_by_time(times.seconds[rows], ties[rows])]
    return InteractionTable(rows, user[rows], item[rows], times.seconds[rows], times.forms, dropped)


def _find_faults(
    user: Cells,
    item: Cells,
    seconds: np.ndarray,
    time_column: pa.ChunkedArray,
    roles: Mapping[str, str],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield reasons for which a row is no interaction, and [rows] bool: where each holds."""
    has_no_time = time_column.is_null().to_numpy()
    yield EMPTY_LINE, has_no_time & (user.codes == 0) & (item.codes == 0)
    yield f"no user ({roles['user']})", user.codes == 0
    yield f"no item ({roles['item']})", item.codes == 0
    yield f"no time ({roles['time']})", has_no_time
    yield f"time cannot be read ({roles['time']})", np.isnan(seconds)
    yield "user with a line break, or called [PAD]", _find_unwritable(user)
    yield "item with a line break, or called [PAD]", _find_unwritable(item)


def _find_unwritable(names: Cells) -> np.ndarray:
    """Return [rows] bool, true where a name cannot stand in a file of interactions."""
    matches = pc.match_substring_regex(names.values, UNWRITABLE)
    return matches.to_numpy(zero_copy_only=False)[names.codes]


def _order_by_time(seconds: np.ndarray, ties: Cells) -> np.ndarray:
    """Return the order of [n] interactions by time, and by ``ties`` where times are the same.

    Ties are ordered as numbers if all are, else as text; empty cells come first.
    """
    texts = ties.values[1:]
    numbers = read_numbers(texts, decimal=".")
    order = (
        np.argsort(numbers) if not np.isnan(numbers).any() else pc.sort_indices(texts).to_numpy()
    )
    ranks = np.zeros(len(texts) + 1, np.int64)
    ranks[1:][order] = np.arange(1, len(ranks))
    return np.lexsort((ranks[ties.codes], seconds))
