"""Raw files of public logs, as their sources have them, as tables of events, items and users."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pandas as pd
import pyarrow.parquet as pq

from recbole_pos.errors import UsageError

EVENTS = ["user_id", "item_id", "timestamp"]
SESSIONS = ["session_id", "item_id", "timestamp"]


@dataclass(frozen=True)
class Tables:
    """Tables that a recipe makes of raw files.

    Attributes:
        events: in the order of the raw file; the first three columns are user, item and time, in
            seconds since 1970.
        items: attributes of items, or None; lists are sequences.
        users: attributes of users, or None.
        kinds: kinds of attribute columns by name: token, token_seq, float.
    """

    events: pd.DataFrame
    items: pd.DataFrame | None = None
    users: pd.DataFrame | None = None
    kinds: dict[str, str] | None = None


def movielens(file: Path) -> Tables:
    """Read the zip archive of a MovieLens dataset from 1M on: ``.dat`` with ``::``, or csv.

    Raises:
        UsageError: if the archive cannot be read, or has no ratings and movies.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = {Path(name).name: name for name in archive.namelist()}

            def read_member(stem: str, columns: list[str]) -> pd.DataFrame | None:
                if f"{stem}.dat" in members:
                    text = archive.read(members[f"{stem}.dat"]).decode("latin-1")
                    return _cells(text.replace("::", "\t"), columns, "\t", None)
                if f"{stem}.csv" in members:
                    with archive.open(members[f"{stem}.csv"]) as raw:
                        return _cells(raw, columns, ",", 0)
                return None

            events = read_member("ratings", ["user_id", "item_id", "rating", "timestamp"])
            films = read_member("movies", ["item_id", "title", "genres"])
            people = read_member("users", ["user_id", "gender", "age", "occupation", "zip_code"])
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise UsageError(f"{file} cannot be read as a zip archive: {error}") from error
    if events is None or films is None:
        raise UsageError(f"{file}: no ratings and movies in it (.dat or .csv); found {[*members]}")
    parts = films["title"].str.extract(r"^(?P<title>.*?)\s*\((?P<year>\d{4})\)\s*$")
    films = films.assign(
        title=parts["title"].fillna(films["title"]),
        release_year=parts["year"],
        genre=films["genres"].replace("(no genres listed)", "").str.split("|"),
    ).drop(columns="genres")
    kinds = {"title": "token", "release_year": "token", "genre": "token_seq"}
    kinds |= {"gender": "token", "age": "token", "occupation": "token", "zip_code": "token"}
    return Tables(events[[*EVENTS, "rating"]], films, people, {**kinds, "rating": "float"})


def amazon(reviews: Path, meta: Path) -> Tables:
    """Read reviews and products of Amazon's 2014 edition (McAuley et al. 2015), a dict per line.

    Products without a review are left out, and so are unreviewed products in lists of related ones.
    """
    rows = ((r["reviewerID"], r["asin"], r["unixReviewTime"]) for r in _json_lines(reviews))
    events = pd.DataFrame(rows, columns=EVENTS)
    wanted, products = set(events["item_id"]), []
    for line in _lines(meta):
        asin = re.search(r"['\"]asin['\"]: ?['\"](\w+)['\"]", line)  # most products have no review
        if asin is None or asin[1] not in wanted:
            continue
        product = _parse_product(line, meta)
        related = product.get("related") or {}
        categories = [name for path in product.get("categories") or [] for name in path]
        products.append(
            {
                "item_id": product["asin"],
                "brand": product.get("brand") or None,
                "price": product.get("price"),
                "categories": list(dict.fromkeys(categories)),
                **{
                    field: [item for item in related.get(field) or [] if item in wanted]
                    for field in _RELATED
                },
            }
        )
    kinds = {"brand": "token", "price": "float", "categories": "token_seq"}
    return Tables(
        events, pd.DataFrame(products), None, {**kinds, **dict.fromkeys(_RELATED, "token_seq")}
    )


_RELATED = ("also_bought", "also_viewed", "bought_together", "buy_after_viewing")


def yelp(reviews: Path) -> Tables:
    """Read reviews of the Yelp open dataset, a json object per line; times are taken as UTC."""
    rows = ((r["user_id"], r["business_id"], r["date"]) for r in _json_lines(reviews))
    events = pd.DataFrame(rows, columns=EVENTS)
    return Tables(events.assign(timestamp=_seconds(events["timestamp"])))


def diginetica(views: Path) -> Tables:
    """Read product views of Diginetica; ``timeframe`` is milliseconds, added to the event date."""
    raw = _read(views, ";", None, 0, ["sessionId", "itemId", "timeframe", "eventdate"])
    seconds = _seconds(raw["eventdate"]) + raw["timeframe"].astype(float) / 1000
    names = {"sessionId": "session_id", "itemId": "item_id"}
    return Tables(raw.rename(columns=names).assign(timestamp=seconds)[SESSIONS])


def yoochoose(clicks: Path) -> Tables:
    """Read clicks of Yoochoose: session, time, item, category, without a line of names."""
    raw = _read(clicks, ",", ["session_id", "time", "item_id", "category"], None, None)
    return Tables(raw.assign(timestamp=_seconds(raw["time"]))[SESSIONS])


def gowalla(checkins: Path) -> Tables:
    """Read check-ins of Gowalla: user, time, latitude, longitude, place, without a line of names.

    Coordinates become attributes of places, from the first check-in of each.
    """
    names = ["user_id", "time", "latitude", "longitude", "item_id"]
    raw = _read(checkins, "\t", names, None, None)
    places = raw.drop_duplicates("item_id")[["item_id", "latitude", "longitude"]]
    events = raw.assign(timestamp=_seconds(raw["time"]))[EVENTS]
    return Tables(events, places, None, {"latitude": "float", "longitude": "float"})


def yambda(events: Path) -> Tables:
    """Read Yambda's events of one kind, such as likes; times are seconds from an unknown day."""
    raw = _parquet(events, ["uid", "item_id", "timestamp"])
    return Tables(raw.rename(columns={"uid": "user_id"}))


def zvuk(plays: Path) -> Tables:
    """Read Zvuk's plays of the 5,000 users with most plays, as in Nabiev and Frolov's experiments.

    Among users with equally many plays, smaller ids come first.
    """
    users = _parquet(plays, ["user_id"])["user_id"].value_counts(sort=False).sort_index()
    kept = users.sort_values(ascending=False, kind="stable").index[:ZVUK_USERS]
    columns = ["user_id", "track_id", "datetime"]
    raw = _parquet(plays, columns, [("user_id", "in", set(kept))])
    events = raw.rename(columns={"track_id": "item_id"})
    return Tables(events.assign(timestamp=_seconds(events["datetime"]))[EVENTS])


ZVUK_USERS = 5_000

RECIPES: dict[str, Callable[..., Tables]] = {
    recipe.__name__: recipe
    for recipe in (movielens, amazon, yelp, diginetica, yoochoose, gowalla, yambda, zvuk)
}


def _seconds(times: pd.Series) -> pd.Series:
    """Return [n] float64 seconds since 1970 of ISO text or of times, without a zone in UTC."""
    utc = pd.to_datetime(times, format="ISO8601", utc=True)
    return utc.dt.as_unit("ns").astype("int64") / 1e9


def _parquet(file: Path, columns: list[str], filters: list | None = None) -> pd.DataFrame:
    """Read columns of a parquet file, of the rows that pass pandas' filters.

    Raises:
        UsageError: if the file cannot be read, or a column is missing.
    """
    try:
        names = pq.read_schema(file).names
        if missing := [name for name in columns if name not in names]:
            raise UsageError(f"{file}: no column {', '.join(missing)}; found {', '.join(names)}")
        return pd.read_parquet(file, columns=columns, filters=filters)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _read(
    file: Path, separator: str, names: list[str] | None, header: int | None, need: list[str] | None
) -> pd.DataFrame:
    """Read a text file as ``_cells`` does, and require the columns ``need``.

    Raises:
        UsageError: if the file cannot be read, or a column is missing.
    """
    try:
        table = _cells(file, names, separator, header)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if missing := [name for name in need or () if name not in table]:
        raise UsageError(f"{file}: no column {', '.join(missing)}; found {', '.join(table)}")
    return table


def _cells(
    source: Any, names: list[str] | None, separator: str, header: int | None
) -> pd.DataFrame:
    """Read separated text as strings; only empty cells are missing.

    Args:
        source: the text, a path or an open file.
        names: names of the columns; None if the line ``header`` has them.
        separator: separator of cells; text with tabs has no quotes.
        header: number of the line of names, from 0; None without one.
    """
    if isinstance(source, str):
        source = io.StringIO(source)
    options: dict[str, Any] = {"names": names, "header": header, "sep": separator, "dtype": str}
    quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    return pd.read_csv(source, keep_default_na=False, na_values=[""], quoting=quoting, **options)


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file, unpacked if gzipped; UsageError if it cannot be read."""

    def open_text() -> IO[str]:
        if file.suffix == ".gz":
            return gzip.open(file, "rt", encoding="utf-8")
        return file.open(encoding="utf-8")

    try:
        with open_text() as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(file), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise UsageError(f"{file}, line {number}: no json object: {error}") from error


def _parse_product(line: str, file: Path) -> dict[str, Any]:
    """Parse a product, which the source writes as a Python dict of plain values.

    Raises:
        UsageError: if the line is not such a dict.
    """
    try:
        product = ast.literal_eval(line)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise UsageError(f"{file}: no product: {line[:60]}: {error}") from error
    if not isinstance(product, dict):
        raise UsageError(f"{file}: no product: {line[:60]}: expected a dict")
    return product
