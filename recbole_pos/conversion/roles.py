"""Which column is the user, the item and the time, by name and by what it holds."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa

from recbole_pos.conversion.events import ROW_ORDER
from recbole_pos.conversion.times import read_times
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
_AT = re.compile(r"_at$|time|date")
SAMPLE = 1000


def snake(name: str) -> str:
    """A name in lower case with _ between its words: boughtAt, bought-at and Bought At are one."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"\W+", "_", words).strip("_").lower()


def find_roles(
    columns: Mapping[str, pa.ChunkedArray], given: Mapping[str, str | None], date_format: str | None
) -> tuple[dict[str, str], list[str]]:
    """The columns of user, item and time.

    Args:
        columns: of the events.
        given: names that somebody says, by role; None where it is to be guessed.
        date_format: of the time.

    Returns:
        names by role, and which of them were guessed.

    Raises:
        UsageError: if a name is none of the columns, or one cannot be guessed: what was found.
    """
    roles: dict[str, str] = {}
    guessed = []
    for role, name in given.items():
        if name is not None:
            if not (role == "time" and name == ROW_ORDER):
                require_column(name, columns, role)
            if name in roles.values():
                raise UsageError(f"{role}: column {shown(name)} is taken twice")
            roles[role] = name
    for role in NAMES:
        if role in roles:
            continue
        free = {name: c for name, c in columns.items() if name not in roles.values()}
        roles[role] = _guess(role, free, date_format, columns)
        guessed.append(role)
    return roles, guessed


def require_column(name: str, columns: Mapping[str, pa.ChunkedArray], option: str) -> None:
    """Refuse a name that no column has."""
    if name not in columns:
        raise UsageError(
            f"{option}: there is no column {shown(name)}{suggest(name, columns)}; there are "
            f"{listed(columns)}"
        )


def by_name(role: str, names: list[str]) -> list[str]:
    """The columns that the first group of names has any of."""
    for group in NAMES[role]:
        if found := [name for name in names if snake(name) in group.split()]:
            return found
    return []


def _guess(
    role: str,
    free: dict[str, pa.ChunkedArray],
    date_format: str | None,
    columns: Mapping[str, pa.ChunkedArray],
) -> str:
    found = by_name(role, list(free))
    if role == "time":
        found = [name for name in found if tells_time(free[name], name, date_format)]
        if not found:
            named = [name for name in free if _AT.search(snake(name))]
            for names in (named, list(free)):
                found = [name for name in names if tells_time(free[name], name, date_format)]
                if found:
                    break
    else:
        found = [name for name in found if not _is_no_name(free[name])]
    if len(found) == 1:
        return found[0]
    seen = listed(f"{name[:40]} ({example(column)})" for name, column in columns.items())
    why = f"{' and '.join(found)[:100]} may both be" if found else "no column is known to be"
    order = f", or --time {ROW_ORDER} if there is none and the rows of a user are in order"
    raise UsageError(
        f"{why} the {role}: say it with --{role} COLUMN{order if role == 'time' else ''}. The "
        f"columns are {seen}"
    )


def example(column: pa.ChunkedArray) -> str:
    """One value of a column, for messages."""
    known = column.slice(0, SAMPLE).drop_null()
    return repr(str(known[0].as_py())[:30]) if len(known) else "empty"


def tells_time(column: pa.ChunkedArray, name: str, date_format: str | None) -> bool:
    """Whether the first values of a column read as times; if only it is doubtful how, they do."""
    known = column.slice(0, SAMPLE).drop_null()
    if not len(known):
        return False
    try:
        times = read_times(known, name, date_format)
    except UsageError as error:
        return "may begin with the day" in str(error)
    return 2 * int((times.seconds == times.seconds).sum()) > len(known)


def _is_no_name(column: pa.ChunkedArray) -> bool:
    kind = column.type
    return pa.types.is_nested(kind) or pa.types.is_timestamp(kind) or pa.types.is_boolean(kind)
