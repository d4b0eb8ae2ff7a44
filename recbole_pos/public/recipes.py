"""Read the raw files of public datasets as tables of interactions, items and users."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

EVENTS = ["user_id", "item_id", "timestamp"]
SESSIONS = ["session_id", "item_id", "timestamp"]
ZVUK_USERS = 5_000
_RELATED = ("also_bought", "also_viewed", "bought_together", "buy_after_viewing")


class Tables(NamedTuple):
    """Tables that a recipe reads from raw files, and the types of their attributes by name.

    The first three columns of ``events`` are user, item and time, in seconds since 1970.
    """

    events: pd.DataFrame
    items: pd.DataFrame | None = None
    users: pd.DataFrame | None = None
    kinds: Mapping[str, str] = MappingProxyType({})


def movielens(file: Path) -> Tables:
    """Read the zip archive of a MovieLens dataset from 1M on: ``.dat`` with ``::``, or csv."""
    with zipfile.ZipFile(file) as archive:
        members = {Path(name).name: name for name in archive.namelist()}

        def read_member(stem: str, columns: list[str]) -> pd.DataFrame:
            if f"{stem}.csv" in members:
                return _read_cells(archive.open(members[f"{stem}.csv"]), names=columns, header=0)
            text = archive.read(members[f"{stem}.dat"]).decode("latin-1").replace("::", "\t")
            return _read_cells(io.StringIO(text), names=columns, sep="\t", quoting=csv.QUOTE_NONE)

        events = read_member("ratings", ["user_id", "item_id", "rating", "timestamp"])
        items = read_member("movies", ["item_id", "title", "genres"])
        users = None
        if "users.dat" in members:
            users = read_member("users", ["user_id", "gender", "age", "occupation", "zip_code"])
    titles = items["title"].str.extract(r"^(?P<title>.*?)\s*\((?P<year>\d{4})\)\s*$")
    items = items.assign(
        title=titles["title"].fillna(items["title"]),
        release_year=titles["year"],
        genre=items["genres"].replace("(no genres listed)", "").str.split("|"),
    ).drop(columns="genres")
    kinds = dict.fromkeys(("title", "release_year", "gender", "age", "occupation"), "token")
    kinds |= {"zip_code": "token", "genre": "token_seq", "rating": "float"}
    return Tables(events[[*EVENTS, "rating"]], items, users, kinds)


def amazon(reviews: Path, meta: Path) -> Tables:
    """Read reviews and products of Amazon's 2014 edition (McAuley et al. 2015), a dict per line.

    Products without a review are left out, and so are unreviewed products in lists of related ones.
    """
    fields = ("reviewerID", "asin", "unixReviewTime")
    events = pd.DataFrame(_read_json_fields(reviews, fields), columns=EVENTS)
    reviewed, products = set(events["item_id"]), []
    for line in _read_lines(meta):
        asin = re.search(r"['\"]asin['\"]: ?['\"](\w+)['\"]", line)  # most products have no review
        if asin is None or asin[1] not in reviewed:
            continue
        entry = ast.literal_eval(line)  # the source writes Python's dicts
        related = entry.get("related") or {}
        categories = [name for path in entry.get("categories") or [] for name in path]
        product = {
            "item_id": entry["asin"],
            "brand": entry.get("brand") or None,
            "price": entry.get("price"),
            "categories": list(dict.fromkeys(categories)),
        }
        for name in _RELATED:
            product[name] = [item for item in related.get(name) or [] if item in reviewed]
        products.append(product)
    kinds = {"brand": "token", "price": "float"}
    kinds |= dict.fromkeys(("categories", *_RELATED), "token_seq")
    return Tables(events, pd.DataFrame(products), None, kinds)


def yelp(reviews: Path) -> Tables:
    """Read reviews of the Yelp open dataset, a json object per line; times are taken as UTC."""
    fields = ("user_id", "business_id", "date")
    events = pd.DataFrame(_read_json_fields(reviews, fields), columns=EVENTS)
    return Tables(events.assign(timestamp=_to_seconds(events["timestamp"])))


def diginetica(views: Path) -> Tables:
    """Read product views of Diginetica; ``timeframe`` is milliseconds, added to the event date."""
    raw = _read_cells(views, sep=";", usecols=["sessionId", "itemId", "timeframe", "eventdate"])
    seconds = _to_seconds(raw["eventdate"]) + raw["timeframe"].astype(float) / 1000
    names = {"sessionId": "session_id", "itemId": "item_id"}
    return Tables(raw.rename(columns=names).assign(timestamp=seconds)[SESSIONS])


def yoochoose(clicks: Path) -> Tables:
    """Read clicks of Yoochoose: session, time, item, category, without a header."""
    raw = _read_cells(clicks, names=["session_id", "time", "item_id", "category"])
    return Tables(raw.assign(timestamp=_to_seconds(raw["time"]))[SESSIONS])


def gowalla(checkins: Path) -> Tables:
    """Read check-ins of Gowalla: user, time, latitude, longitude, place, without a header.

    Coordinates become attributes of places, from the first check-in of each.
    """
    names = ["user_id", "time", "latitude", "longitude", "item_id"]
    raw = _read_cells(checkins, names=names, sep="\t", quoting=csv.QUOTE_NONE)
    places = raw.drop_duplicates("item_id")[["item_id", "latitude", "longitude"]]
    events = raw.assign(timestamp=_to_seconds(raw["time"]))[EVENTS]
    return Tables(events, places, None, {"latitude": "float", "longitude": "float"})


def yambda(events: Path) -> Tables:
    """Read Yambda's events of one kind, such as likes; times are seconds from an unknown day."""
    raw = pd.read_parquet(events, columns=["uid", "item_id", "timestamp"])
    return Tables(raw.rename(columns={"uid": "user_id"}))


def zvuk(plays: Path) -> Tables:
    """Read Zvuk's plays of the 5,000 users with most plays, as in Nabiev and Frolov's experiments.

    Among users with equally many plays, smaller ids come first.
    """
    counts = pd.read_parquet(plays, columns=["user_id"])["user_id"].value_counts(sort=False)
    counts = counts.sort_index().sort_values(ascending=False, kind="stable")
    users, columns = set(counts.index[:ZVUK_USERS]), ["user_id", "track_id", "datetime"]
    raw = pd.read_parquet(plays, columns=columns, filters=[("user_id", "in", users)])
    events = raw.rename(columns={"track_id": "item_id"})
    return Tables(events.assign(timestamp=_to_seconds(events["datetime"]))[EVENTS])


RECIPES: dict[str, Callable[..., Tables]] = {
    recipe.__name__: recipe
    for recipe in (movielens, amazon, yelp, diginetica, yoochoose, gowalla, yambda, zvuk)
}


def _to_seconds(times: pd.Series) -> pd.Series:
    """Return seconds since 1970 [n] float64 of ISO text or of times, in UTC without a zone."""
    utc = pd.to_datetime(times, format="ISO8601", utc=True)
    return utc.dt.as_unit("ns").astype("int64") / 1e9


def _read_cells(source: Any, **options: Any) -> pd.DataFrame:
    """Read separated text as strings, by options of pandas; only empty cells are missing."""
    return pd.read_csv(source, dtype=str, keep_default_na=False, na_values=[""], **options)


def _read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file, which may be gzipped."""
    open_text = gzip.open if file.suffix == ".gz" else open
    with open_text(file, "rt", encoding="utf-8") as lines:
        yield from lines


def _read_json_fields(file: Path, fields: tuple[str, ...]) -> Iterator[list[Any]]:
    """Yield some fields of the json object of each line."""
    for line in _read_lines(file):
        values = json.loads(line)
        yield [values[name] for name in fields]
