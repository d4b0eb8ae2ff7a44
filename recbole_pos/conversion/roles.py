"""Which column is the user, the item and the time, by name and by what it holds.

Rows of users with lists of interactions, as HSTU has them, become a row for each interaction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.cells import parse_lists
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.times import ROW_ORDER, AmbiguousDate, read_times
from recbole_pos.errors import UsageError
from recbole_pos.values import listed, shown, suggest

# Names by role, the surest first: a name of an earlier group wins over those of later ones.
NAMES = {
    "user": (
        "user_id userid uid user_token",
        "user customer customer_id customerid client client_id visitor visitor_id visitorid "
        "member member_id buyer buyer_id shopper account account_id reviewer reviewer_id "
        "reviewerid person person_id viewer listener reader",
        "session session_id sessionid sid",
    ),
    "item": (
        "item_id itemid iid item_token",
        "item product product_id productid asin parent_asin sku movie movie_id movieid song "
        "song_id track track_id article article_id book book_id isbn business_id listing "
        "listing_id video video_id game game_id goods goods_id news_id recipe_id",
    ),
    "time": (
        "timestamp time datetime date ts event_time",
        "bought_at purchased_at created_at ordered_at rated_at viewed_at clicked_at played_at "
        "occurred_at order_date purchase_date invoice_date invoicedate unixreviewtime review_time "
        "event_timestamp timestamp_ms unix_time epoch t_dat eventdate",
    ),
}
_NO_HEADER = (
    "there is no header; name them with --columns=user,item,... (a frame: read its file with "
    "header=None)"
)
_TIME_LIKE = re.compile(r"_at$|time|date")
_SAMPLE = 1000  # values by which the use of a column is guessed
_BRACKETS = r"^\s*[\[(]"
_SPACES = r"\s+"
_SEPARATORS = (r"\s*,\s*", r"\s*\|\s*", _SPACES)  # between entries of a list, the surest first
_NUMBERS = r"^[\d\s.]*$"
_WORDS = re.compile(r"^(sequence|seq|list|history)_|_(sequence|seq|list|history)$")


def _to_snake_case(name: str) -> str:
    """Return a name in lower case with _ between words: bought_at for boughtAt and Bought At."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"\W+", "_", words).strip("_").lower()


def find_roles(
    columns: Mapping[str, pa.ChunkedArray],
    given_names: Mapping[str, str | None],
    date_format: str | None,
) -> dict[str, str]:
    """Return role (user, item, time) -> column; refuse to guess if none or several may have a role.

    ``given_names`` is role -> column that the user names; None to guess it.
    """
    roles: dict[str, str] = {}
    for role, name in given_names.items():
        if name is not None:
            if not (role == "time" and name == ROW_ORDER):
                require_column(name, columns, role)
            if name in roles.values():
                raise UsageError(f"{role}: column {shown(name)} is taken twice")
            roles[role] = name
    for role in NAMES:
        if role not in roles:
            free = {name: c for name, c in columns.items() if name not in roles.values()}
            names = _guess(role, free, date_format)
            if len(names) != 1:
                raise _make_guess_error(role, names, columns, has_header=bool(roles))
            roles[role] = names[0]
    return roles


def require_header(
    columns: Mapping[str, pa.ChunkedArray], roles: Mapping[str, str], date_format: str | None
) -> None:
    """Refuse columns that are called as a row of data is: a file without a header.

    The name of the column of times then is a time; without times, those of users and items are both
    values of their columns. No file without a header begins with usual names of both users and
    items, whatever the cells below them are. Columns called 0, 1, 2 are those of pandas.
    """
    has_usual_names = all(find_by_name(role, [roles[role]]) for role in ("user", "item"))
    if has_usual_names or list(columns) == list(map(str, range(len(columns)))):
        return
    if roles["time"] in columns:
        name = roles["time"]
        is_row = _holds_times(pa.chunked_array([[name]]), name, date_format)
    else:
        names = (roles["user"], roles["item"])
        is_row = all(pc.any(pc.equal(columns[n].cast(pa.string()), n)).as_py() for n in names)
    if is_row:
        raise UsageError(
            f"the columns are called {listed(columns)}, as a row of data: {_NO_HEADER}"
        )


def _make_guess_error(
    role: str, names: list[str], columns: Mapping[str, Any], has_header: bool
) -> UsageError:
    """Return the error about a role that no column, or several (``names``), may have."""
    examples = listed(f"{name[:40]} ({_quote_example(column)})" for name, column in columns.items())
    problem = f"{' and '.join(names)[:100]} may both be"
    if not names:
        problem = "no column is known to be"
    advice = "" if names or has_header else f"; if these are no names, {_NO_HEADER}"
    option = f"--{role}=COLUMN"
    if role == "time":
        option += f", or --time={ROW_ORDER} if none exists and the rows of a user are in order"
    return UsageError(
        f"{problem} the {role}: name it with {option}. The columns are {examples}{advice}"
    )


def require_column(name: str, columns: Iterable[str], option: str) -> None:
    """Raise a UsageError that names the ``option`` if no column has its name."""
    if name not in columns:
        raise UsageError(
            f"{option}: found no column {shown(name)}{suggest(name, columns)}; there are "
            f"{listed(columns)}"
        )


def find_by_name(role: str, names: Iterable[str]) -> list[str]:
    """Return the columns whose names are usual for a role, in the surest group that has any."""
    for group in NAMES[role]:
        if matching := [name for name in names if _to_snake_case(name) in group.split()]:
            return matching
    return []


def _holds_times(column: pa.ChunkedArray, name: str, date_format: str | None) -> bool:
    """Return whether most of the first values of a column are times; ambiguous dates are, too."""
    values = column.slice(0, _SAMPLE).drop_null()
    if not len(values):
        return False
    try:
        times = read_times(values, name, date_format)
    except UsageError as error:
        return isinstance(error, AmbiguousDate)
    return 2 * times.forms.total() > len(values)


def _guess(role: str, free: dict[str, pa.ChunkedArray], date_format: str | None) -> list[str]:
    """Return the columns among ``free`` ones that may have a role, by name; times also by value."""
    if role != "time":
        return [name for name in find_by_name(role, free) if _can_be_id(free[name].type)]
    time_like = [name for name in free if _TIME_LIKE.search(_to_snake_case(name))]
    for names in (find_by_name(role, free), time_like, list(free)):
        if times := [name for name in names if _holds_times(free[name], name, date_format)]:
            return times
    return (find_by_name(role, free) or time_like) if date_format else []  # it is what is wrong


def _can_be_id(dtype: pa.DataType) -> bool:
    """Return whether values of an Arrow type can be ids."""
    types = pa.types
    return not (types.is_nested(dtype) or types.is_timestamp(dtype) or types.is_boolean(dtype))


def _quote_example(column: pa.ChunkedArray) -> str:
    """Return the first value of a column for a message."""
    known = column.slice(0, _SAMPLE).drop_null()
    return repr(str(known[0].as_py())[:30]) if len(known) else "empty"


def explode_lists(source: Source, given_names: Mapping[str, str | None]) -> Source:
    """Return a source with a row for each interaction if it has lists of items, else as it is.

    Lists as long as those of items are split into rows; other columns are repeated. An empty list
    becomes one row in which the split columns are null. A split column
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
    num_rows = np.maximum(num_items, 1)  # an empty list is a row without an item, which is reported
    origin = np.repeat(np.arange(len(num_items)), num_rows)
    rows = pa.array(origin)
    has_item = np.repeat(num_items > 0, num_rows)
    entries = pa.array(np.cumsum(has_item) - 1, mask=~has_item)
    split = [name for name in lists if np.array_equal(lengths[name], num_items)]
    columns = {}
    for name, column in source.columns.items():
        if name in split:
            columns[new_names[name]] = pa.chunked_array([lists[name].flatten().take(entries)])
        else:
            columns[name] = column.take(rows)
    form = f"{source.form}, a row for each user with lists ({', '.join(split)})"
    return replace(source, columns=columns, form=form, origin=origin)


def _find_singular(name: str) -> str:
    """Return item_id for a column sequence_item_ids, and so on; other names as they are."""
    singular = _WORDS.sub("", _to_snake_case(name)).removesuffix("s")
    is_usual = any(find_by_name(role, [name]) for role in NAMES)
    has_usual_entry = any(find_by_name(role, [singular]) for role in NAMES)
    return singular if has_usual_entry and not is_usual else name


def _read_lists(column: pa.ChunkedArray, is_called_list: bool) -> pa.LargeListArray | None:
    """Return the lists of a column, given as such or as text; None if it has none.

    Text is a list in brackets or, in a column that is called a list, one with separators.
    """
    if pa.types.is_large_list(column.type):
        return column.combine_chunks()
    if not pa.types.is_string(column.type) and not pa.types.is_dictionary(column.type):
        return None
    first = column.slice(0, _SAMPLE).cast(pa.string()).drop_null()
    has_brackets = len(first) and pc.all(pc.match_substring_regex(first, _BRACKETS)).as_py()
    separator = None
    if is_called_list:
        occurs = (s for s in _SEPARATORS if pc.any(pc.match_substring_regex(first, s)).as_py())
        separator = next(occurs, None)
    if not has_brackets and separator is None:
        return None
    text = column.cast(pa.string()).combine_chunks()
    if has_brackets:
        if lists := parse_lists(text.fill_null("[]")):
            texts = [[None if value is None else str(value) for value in row] for row in lists]
            return pa.array(texts, pa.large_list(pa.string()))
        text = pc.utf8_trim(text, "[]() \n")  # as NumPy prints an array
        text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    are_numbers = pc.match_substring_regex(text, _NUMBERS)
    if separator is None or (separator == _SPACES and not pc.all(are_numbers).as_py()):
        return None  # names have spaces, too
    return pc.split_pattern_regex(text, separator).cast(pa.large_list(pa.string()))
