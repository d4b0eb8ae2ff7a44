"""Public datasets: what is known of each, and the functions that read their raw files.

What is known, such as the source and the number of users, stands under ``public`` in
``dataset/<name>/<name>.yaml``, beside the options of runs on it. A recipe is a function that reads
the raw files, each in their own format. All return :class:`Tables`, pandas frames of interactions
and, where the dataset has them, of items and users with their attributes.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import DATASETS, read_yaml

_USER_ITEM_TIME = ["user_id", "item_id", "timestamp"]  # columns of interactions
_SESSION_ITEM_TIME = ["session_id", "item_id", "timestamp"]  # where sessions stand for users
ZVUK_USERS = 5_000  # with most plays, which are kept
# Lists of related products in Amazon's files.
_RELATED_LISTS = ("also_bought", "also_viewed", "bought_together", "buy_after_viewing")


@dataclass(frozen=True)
class PublicDataset:
    """A public dataset, as its yaml file describes it.

    Attributes:
        name: its name here, which is that of its folder.
        title: its full name.
        papers: papers that report metrics on it.
        source: address of the page to download it from.
        licence: conditions of its use.
        files: names of the raw files, as the source has them.
        recipe: name in ``RECIPES`` of the function that reads the files.
        counts: known numbers of users, items and interactions after the filters of its yaml.
        note: what else to know of it.
    """

    name: str
    title: str
    papers: list[str]
    source: str
    licence: str
    files: list[str]
    recipe: str
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def yaml(self) -> Path:
        """Path of the yaml file with the description and with the options of runs on it."""
        return DATASETS / self.name / f"{self.name}.yaml"


def read_public_datasets() -> dict[str, PublicDataset]:
    """Return name -> description of each public dataset that the package can build.

    They are the yaml files in the package's folder ``dataset/`` (``DATASETS``), one a dataset and
    named as it, that have a key ``public``.
    """
    datasets = {}
    for file in sorted(DATASETS.glob("*/*.yaml")):
        description: dict[str, Any] | None = read_yaml(file).get("public")
        if description:
            datasets[file.stem] = PublicDataset(file.stem, **description)
    return datasets


def find_public_dataset(name: str) -> PublicDataset:
    """Return the description of a public dataset: its source, its raw files, its counts and so on.

    Args:
        name: name of the dataset here, such as ``ml-1m``.

    Raises:
        UsageError: if there is none; the message suggests similar names, and lists all.
    """
    datasets = read_public_datasets()
    if name not in datasets:
        raise UsageError(
            f"data: no public log {shown(name)}{suggest(name, datasets)}; there are "
            f"{', '.join(datasets)}"
        )
    return datasets[name]


class Tables(NamedTuple):
    """Tables that a recipe reads from raw files.

    Attributes:
        interactions: its first three columns are user, item and time in seconds since 1970;
            attributes such as a rating may follow.
        items: items with their attributes, the id first; None if there are none.
        users: users with their attributes, the id first; None if there are none.
        kinds: name of an attribute -> RecBole's type of its field, such as ``token_seq``.
    """

    interactions: pd.DataFrame
    items: pd.DataFrame | None = None
    users: pd.DataFrame | None = None
    kinds: Mapping[str, str] = MappingProxyType({})


def read_movielens(file: Path) -> Tables:
    """Read the zip archive of MovieLens-1M or a later edition.

    Later editions have csv files with a header; MovieLens-1M has ``.dat`` files with ``::`` between
    cells, without a header, and a table of users.

    Args:
        file: path of the archive.

    Returns:
        Ratings as interactions; movies with title, year and genres; users in MovieLens-1M.
    """
    columns = {
        "ratings": ["user_id", "item_id", "rating", "timestamp"],
        "movies": ["item_id", "title", "genres"],
        "users": ["user_id", "gender", "age", "occupation", "zip_code"],
    }
    frames: dict[str, pd.DataFrame] = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            stem, suffix = Path(name).stem, Path(name).suffix
            # ``_read_cells`` reads text as a frame of strings, here with our names of the columns
            if stem in columns and suffix == ".csv":
                with archive.open(name) as member:
                    frames[stem] = _read_cells(member, names=columns[stem], header=0)
            elif stem in columns and suffix == ".dat":
                # A separator of several characters would need pandas' slow parser.
                text = io.StringIO(archive.read(name).decode("latin-1").replace("::", "\t"))
                plain = {"sep": "\t", "quoting": csv.QUOTE_NONE}
                frames[stem] = _read_cells(text, names=columns[stem], **plain)
    ratings, items, users = frames["ratings"], frames["movies"], frames.get("users")

    # "Toy Story (1995)" becomes the title "Toy Story" and the year "1995".
    title_and_year = items["title"].str.extract(r"^(?P<title>.*?)\s*\((?P<year>\d{4})\)\s*$")
    items = items.assign(
        title=title_and_year["title"].fillna(items["title"]),
        release_year=title_and_year["year"],
        genre=items["genres"].replace("(no genres listed)", "").str.split("|"),
    ).drop(columns="genres")

    # RecBole's types of the fields: a token, several tokens, or a number
    kinds = dict.fromkeys(["title", "release_year", *columns["users"][1:]], "token")
    kinds |= {"genre": "token_seq", "rating": "float"}
    return Tables(ratings[[*_USER_ITEM_TIME, "rating"]], items, users, kinds)


def read_amazon(reviews: Path, products: Path) -> Tables:
    """Read reviews and products of one category of Amazon's 2014 edition (McAuley et al. 2015).

    Products without a review are left out, and so are unreviewed products in lists of related ones.

    Args:
        reviews: file with a json object per line; a review is an interaction.
        products: file with a Python dict per line: brand, price, categories, related products.

    Returns:
        Interactions (user, item, time) and items with their attributes; there are none of users.
    """
    fields = ("reviewerID", "asin", "unixReviewTime")
    interactions = pd.DataFrame(_read_json_fields(reviews, fields), columns=_USER_ITEM_TIME)
    reviewed = set(interactions["item_id"])

    items = []
    for line in _read_lines(products):
        # Most products have no review, and finding the id (``asin``) alone is much faster than
        # reading all.
        asin = re.search(r"['\"]asin['\"]: ?['\"](\w+)['\"]", line)
        if asin is None or asin[1] not in reviewed:
            continue
        entry = ast.literal_eval(line)  # the source writes Python's dicts
        related = entry.get("related") or {}
        categories = [name for path in entry.get("categories") or [] for name in path]
        item = {
            "item_id": entry["asin"],
            "brand": entry.get("brand") or None,
            "price": entry.get("price"),
            "categories": list(dict.fromkeys(categories)),
        }
        # such as also_bought, each a list of other products
        for name in _RELATED_LISTS:
            item[name] = [asin for asin in related.get(name) or [] if asin in reviewed]
        items.append(item)

    # RecBole's types of the fields: a token, a number, or several tokens
    kinds = {"brand": "token", "price": "float"}
    kinds |= dict.fromkeys(("categories", *_RELATED_LISTS), "token_seq")
    return Tables(interactions, pd.DataFrame(items), kinds=kinds)


def read_yelp(reviews: Path) -> Tables:
    """Read the reviews of the Yelp open dataset, a json object per line, as interactions.

    The businesses are the items. Times have no zone, and are taken as UTC.

    Args:
        reviews: path of the file.
    """
    fields = ("user_id", "business_id", "date")
    interactions = pd.DataFrame(_read_json_fields(reviews, fields), columns=_USER_ITEM_TIME)
    return Tables(interactions.assign(timestamp=_to_seconds(interactions["timestamp"])))


def read_diginetica(views: Path) -> Tables:
    """Read the product views of Diginetica's sessions, a csv file with ``;`` between cells.

    Sessions stand for users. A row has a date, and a ``timeframe`` in milliseconds, which is added
    to it to get the time of the view.

    Args:
        views: path of the file.
    """
    raw = _read_cells(views, sep=";", usecols=["sessionId", "itemId", "timeframe", "eventdate"])
    seconds = _to_seconds(raw["eventdate"]) + raw["timeframe"].astype(float) / 1000
    # only session, item and time are kept (``_SESSION_ITEM_TIME``)
    names = {"sessionId": "session_id", "itemId": "item_id"}
    return Tables(raw.rename(columns=names).assign(timestamp=seconds)[_SESSION_ITEM_TIME])


def read_yoochoose(clicks: Path) -> Tables:
    """Read clicks of Yoochoose: session, time, item, category, without a header.

    Sessions stand for users; the category is left out (``_SESSION_ITEM_TIME`` names the columns).
    """
    raw = _read_cells(clicks, names=["session_id", "time", "item_id", "category"])
    return Tables(raw.assign(timestamp=_to_seconds(raw["time"]))[_SESSION_ITEM_TIME])


def read_gowalla(checkins: Path) -> Tables:
    """Read the check-ins of Gowalla: user, time, latitude, longitude, place, without a header.

    Places are the items; their coordinates are attributes, from the first check-in of each.

    Args:
        checkins: path of the file, with tabs between cells.
    """
    names = ["user_id", "time", "latitude", "longitude", "item_id"]
    raw = _read_cells(checkins, names=names, sep="\t", quoting=csv.QUOTE_NONE)
    # the columns of interactions are user, item and time (``_USER_ITEM_TIME``)
    places = raw.drop_duplicates("item_id")[["item_id", "latitude", "longitude"]]
    interactions = raw.assign(timestamp=_to_seconds(raw["time"]))[_USER_ITEM_TIME]
    return Tables(interactions, places, kinds={"latitude": "float", "longitude": "float"})


def read_foursquare(checkins: Path) -> Tables:
    """Read the check-ins of Foursquare in one city (Yang et al. 2015), a file without a header.

    Venues are the items; their category is an attribute, from the first check-in of each. The times
    returned are those of the city's clocks: the file has UTC, and the minutes by which they differ.

    Args:
        checkins: path of the file, with tabs between cells.
    """
    names = ["user_id", "item_id", "category_id", "category", "latitude", "longitude"]
    names += ["offset_minutes", "utc_time"]
    # Quotation marks mean nothing in this file. Times are such as "Tue Apr 03 18:00:09 +0000 2012".
    options = {"sep": "\t", "quoting": csv.QUOTE_NONE, "encoding": "latin-1"}
    raw = _read_cells(checkins, names=names, **options)
    utc = pd.to_datetime(raw["utc_time"], format="%a %b %d %H:%M:%S %z %Y", utc=True)
    local_seconds = utc.dt.as_unit("s").astype("int64") + 60 * raw["offset_minutes"].astype(int)
    venues = raw.drop_duplicates("item_id")[["item_id", "category"]]
    interactions = raw.assign(timestamp=local_seconds)[_USER_ITEM_TIME]
    return Tables(interactions, venues, kinds={"category": "token"})


def read_yambda(interactions: Path) -> Tables:
    """Read Yambda's interactions of one kind, such as likes; day 0 of their seconds is unknown."""
    raw = pd.read_parquet(interactions, columns=["uid", "item_id", "timestamp"])
    return Tables(raw.rename(columns={"uid": "user_id"}))


def read_zvuk(plays: Path) -> Tables:
    """Read the plays of the music service Zvuk, of the 5,000 users with most plays.

    Nabiev and Frolov's experiments are on these users. Among users with equally many plays, smaller
    ids come first.

    Args:
        plays: path of a parquet file, with a row for each play: user_id, track_id, datetime.
    """
    # Find these users, the first ``ZVUK_USERS`` (5,000) by plays. The second sort is stable, and so
    # keeps the order of ids among equals.
    counts = pd.read_parquet(plays, columns=["user_id"])["user_id"].value_counts(sort=False)
    counts = counts.sort_index().sort_values(ascending=False, kind="stable")
    users = set(counts.index[:ZVUK_USERS])

    # Read only their rows of the file.
    columns = ["user_id", "track_id", "datetime"]
    raw = pd.read_parquet(plays, columns=columns, filters=[("user_id", "in", users)])
    interactions = raw.rename(columns={"track_id": "item_id"})
    return Tables(interactions.assign(timestamp=_to_seconds(raw["datetime"]))[_USER_ITEM_TIME])


# Name in the yaml of a dataset -> function that reads its files.
RECIPES: dict[str, Callable[..., Tables]] = {
    "movielens": read_movielens,
    "amazon": read_amazon,
    "yelp": read_yelp,
    "diginetica": read_diginetica,
    "yoochoose": read_yoochoose,
    "gowalla": read_gowalla,
    "foursquare": read_foursquare,
    "yambda": read_yambda,
    "zvuk": read_zvuk,
}


def _to_seconds(times: pd.Series) -> pd.Series:
    """Return times as float64 seconds since 1970, NaN where there is none.

    Args:
        times: ISO text such as ``2014-04-07T10:51:09.277Z``, or times; without a zone they are in
            UTC.
    """
    utc = pd.to_datetime(times, format="ISO8601", utc=True)
    return (utc.dt.as_unit("ns").astype("int64") / 1e9).where(utc.notna())


def _read_cells(source: Any, **options: Any) -> pd.DataFrame:
    """Return separated text as a frame of strings, where only empty cells are missing.

    Args:
        source: path, or open file.
        options: arguments of ``pandas.read_csv``.
    """
    return pd.read_csv(source, dtype=str, keep_default_na=False, na_values=[""], **options)


def _read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file, which may be gzipped."""
    open_text = gzip.open if file.suffix == ".gz" else open
    with open_text(file, "rt", encoding="utf-8") as lines:
        yield from lines


def _read_json_fields(file: Path, fields: tuple[str, ...]) -> Iterator[list[Any]]:
    """Yield some values of each line of a file that has a json object per line.

    Args:
        file: the file, which may be gzipped.
        fields: keys of the values, in the order to yield them.
    """
    for line in _read_lines(file):
        values = json.loads(line)
        yield [values[name] for name in fields]
