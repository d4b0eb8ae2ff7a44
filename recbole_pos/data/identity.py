"""Which data a model was trained on, and what has changed or come since.

With the vocabulary of a run, a longer file is read with the same ids, and the data of the run are
found in it: of each known user the oldest interactions, as many as there were.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from recbole_pos.data.dataset import Dataset, NameIds
from recbole_pos.data.interactions import counts_time, sort_interactions
from recbole_pos.data.loading import spell_out
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, shown

# Options that decide which interactions are counted; under others expected counts mean nothing.
FILTERS = (
    *("user_inter_num_interval", "item_inter_num_interval", "val_interval", "session_filter"),
    *("train_fraction", "rm_dup_inter", "rm_copies", "filter_inter_by_user_or_item"),
    "benchmark_filename",
)
_COLUMNS = ("field", "token", "events")
_COUNTS_TIME = "counts_time"


def describe_changes(then: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return in words what differs between two identities; None if nothing does."""
    if then["data"] not in (None, now["data"]):  # None: the data of the training had no identity
        return "items, interactions, their times or what is held out"
    changed = find_changed_fields(then, now)
    return f"the values of {', '.join(changed)}, or the order of their lines," if changed else None


def find_changed_fields(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the fields of both identities whose digests differ."""
    before, after = then["fields"], now["fields"]
    return [field for field in before if field in after and before[field] != after[field]]


@dataclass(frozen=True)
class Vocabulary:
    """Names and counts of a dataset.

    Attributes:
        tokens: field of type token -> [ids] names of the field, padding first.
        user_counts: [users] int64 interactions of each user before the split left any out, by id.
        popularity: [items] int64 training interactions of each item, by id.
        counts_time: see :func:`~recbole_pos.data.interactions.counts_time`.
    """

    tokens: dict[str, np.ndarray]
    user_counts: np.ndarray
    popularity: np.ndarray
    counts_time: bool | None = None

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> Vocabulary:
        """Return the names and counts of a dataset."""
        is_dated = counts_time(dataset.log.times.numpy(), dataset.config["timestamp_unit"])
        return cls(dataset.field2id_token, dataset.user_counts, dataset.popularity, is_dated)

    @property
    def digest(self) -> str:
        """Digest of names and counts in the order of ids; a checkpoint is checked against it."""
        digest = hashlib.blake2b(digest_size=16)
        for field, names in sorted(self.tokens.items()):
            if len(names) > 1:  # ``to_table`` has no row for a field with padding only
                digest.update("\0".join([field, *names[1:]]).encode())
        for counts in (self.user_counts, self.popularity):
            digest.update(counts.astype(np.int64).tobytes())
        return digest.hexdigest()

    def count_by_name(self, user_field: str, item_field: str) -> list[dict[str, int]]:
        """Return interactions by user and training interactions by item, whatever their ids."""
        counts = ((user_field, self.user_counts), (item_field, self.popularity))
        return [
            dict(zip(self.tokens[field], column.tolist(), strict=True)) for field, column in counts
        ]

    def to_table(self, user_field: str, item_field: str) -> pd.DataFrame:
        """Return a row per name, in the order of ids, to store for :meth:`from_table`.

        Its columns are ``field``, ``token`` and ``events`` (-1 for other than users and items);
        ``attrs``, which parquet keeps, has ``counts_time``.
        """
        counts_by_field = {user_field: self.user_counts, item_field: self.popularity}
        tables = []
        for field, names in self.tokens.items():
            counts = counts_by_field.get(field)
            events = np.full(len(names) - 1, -1) if counts is None else counts[1:]
            columns = {"field": field, "token": names[1:].astype(str), "events": events}
            tables.append(pd.DataFrame(columns))
        table = pd.concat(tables, ignore_index=True).astype({"field": "category"})
        table.attrs = {_COUNTS_TIME: self.counts_time}
        return table

    @classmethod
    def from_table(cls, table: pd.DataFrame, user_field: str, item_field: str) -> Vocabulary:
        """Return the vocabulary in a table that :meth:`to_table` made.

        Raises:
            ValueError: if it is not such a table.
        """
        is_dated = table.attrs.get(_COUNTS_TIME)
        has_columns = tuple(table) == _COLUMNS and item_field in set(table["field"])
        if not has_columns or table.duplicated(["field", "token"]).any():
            raise ValueError(
                f"expected columns {', '.join(_COLUMNS)}, each name of a field once, and names of "
                f"{shown(item_field)}"
            )
        rows_by_field = dict(list(table.groupby("field", observed=True, sort=False)))
        user_counts, popularity = (
            np.append(0, rows_by_field.get(field, table[:0])["events"].to_numpy(dtype=np.int64))
            for field in (user_field, item_field)
        )
        tokens = {user_field: np.array(["[PAD]"])} | {
            str(field): np.array(["[PAD]", *rows["token"]]) for field, rows in rows_by_field.items()
        }
        return cls(tokens, user_counts, popularity, is_dated)

    def find_oldest(self, users: pd.Series, times: pd.Series, user_field: str) -> np.ndarray:
        """Return [interactions] bool: whether each is one of the interactions counted here.

        These are the ``user_counts`` oldest ones of each known user. ``users`` and ``times`` are
        [interactions] names and times in the order of the file. For example, of a user who had two
        interactions and now has them at the times [5, 1, 3], these are the last two.
        """
        user_ids = pd.Index(self.tokens[user_field]).get_indexer(users)
        order = np.lexsort((times.to_numpy(), user_ids))  # stable: file order breaks ties
        sorted_ids = user_ids[order]
        rank = np.arange(len(order)) - np.searchsorted(sorted_ids, sorted_ids)  # 0: user's oldest
        is_oldest = np.zeros(len(order), dtype=bool)
        is_oldest[order] = (sorted_ids > 0) & (rank < self.user_counts[sorted_ids])
        return is_oldest


@dataclass(frozen=True)
class Growth:
    """Counts of later data, which the model was not trained on.

    Attributes:
        users: number of new users.
        events: number of new interactions with known items.
        items: number of unknown items, which ``update`` learns.
        skipped: number of interactions with unknown items.
    """

    users: int = 0
    events: int = 0
    items: int = 0
    skipped: int = 0


class HeldOut(NamedTuple):
    """Later interactions of a file, beyond the data of a run.

    Attributes:
        interactions: those of known items, with names as they stand in the file.
        users: names of new users among them, by first appearance.
        users_without_items: names of new users whose interactions are all of unknown items.
    """

    interactions: pd.DataFrame
    users: np.ndarray
    users_without_items: np.ndarray
    growth: Growth


def divide_interactions(
    table: pd.DataFrame, known: Vocabulary, user_field: str, item_field: str, time_field: str
) -> tuple[pd.DataFrame, HeldOut]:
    """Divide interactions, with names as in the file, into the data of a run and later ones.

    ``known`` is the vocabulary of the run. Interactions with an item that it lacks are left out;
    the others that it lacks are held out. Both are counted as growth.
    """
    has_known_item = table[item_field].isin(known.tokens[item_field][1:])
    skipped, table = table[~has_known_item], table[has_known_item]
    is_known = known.find_oldest(table[user_field], table[time_field], user_field)
    later = spell_out(table[~is_known])
    known_users = known.tokens[user_field]
    new_users = later.loc[~later[user_field].isin(known_users), user_field].unique()
    skipped_users = pd.Series(skipped[user_field].astype(str).unique(), dtype=object)
    is_only_skipped = ~skipped_users.isin([*known_users, *new_users])
    without_items = skipped_users[is_only_skipped].to_numpy()
    growth = Growth(
        users=len(new_users) + len(without_items),
        events=len(later),
        items=skipped[item_field].nunique(),
        skipped=len(skipped),
    )
    held_out = HeldOut(later, new_users, without_items, growth)
    return table.take(np.flatnonzero(is_known)), held_out


def keep_known_rows(table: pd.DataFrame, key: str, known: Vocabulary) -> pd.DataFrame:
    """Return the rows of the users or items that a run knew; ``key`` is the column of their names.

    Tokens that the run did not know become missing.
    """
    table = table[table[key].isin(known.tokens[key])].copy()
    for field in set(table) & set(known.tokens) - {key}:
        names, column = known.tokens[field][1:], table[field]
        if column.dtype == object:  # lists of tokens
            name_set = set(names.tolist())
            table[field] = [
                np.array([name for name in cell.tolist() if name in name_set], cell.dtype)
                for cell in column
            ]
        else:
            table[field] = column.where(column.isin(names))
    return table


def extend_log(dataset: Dataset, later: HeldOut, has_new_users: bool) -> Dataset:
    """Return a copy of a dataset whose log includes later interactions.

    These are history only. With ``has_new_users`` new users are added, without attributes.
    """
    user_field, interactions = dataset.uid_field, later.interactions
    names = dataset.field2id_token[user_field]
    if has_new_users:
        names = np.append(names, later.users)
    else:
        interactions = interactions[interactions[user_field].isin(names)]
    num_new = len(names) - dataset.user_num

    extended = copy.copy(dataset)
    extended.identity = dataset.identity  # weights learned from the known data fit
    extended.field2id_token = {**dataset.field2id_token, user_field: names}
    extended.field2token_id = {**dataset.field2token_id, user_field: NameIds(names)}
    extended.missing = dict(dataset.missing)
    if num_new and dataset.user_feat is not None:
        extended.user_feat = {
            field: torch.cat((column, column.new_zeros((num_new, *column.shape[1:]))))
            for field, column in dataset.user_feat.items()
        }
        extended.user_feat[user_field] = torch.arange(len(names))
        for field in dataset.missing.keys() & extended.user_feat.keys():
            none_there = np.ones(num_new, dtype=bool)
            extended.missing[field] = np.append(dataset.missing[field], none_there)
    _add_later(extended, interactions)
    return extended


def _add_later(dataset: Dataset, interactions: pd.DataFrame) -> None:
    """Add later interactions, none of which is a target, to the log of a copied dataset."""
    log, split, num_later = dataset.log, dataset.split, len(interactions)
    columns = {}
    for field, column in log.fields.items():
        ids = dataset.field2token_id.get(field)
        cells = _read_later(interactions, field, column, ids, dataset.config)
        if cells.is_floating_point() and cells.dim() == 1 and field != log.time_field:
            is_missing = ~torch.isfinite(cells)
            cells[is_missing] = 0.0
            mask = dataset.missing.get(field, np.zeros(len(log), dtype=bool))
            dataset.missing[field] = np.append(mask, is_missing.numpy())
        columns[field] = torch.cat((column, cells))

    part = np.append(split.part, np.full(num_later, TEST, np.int8))
    is_target = np.append(split.is_target, np.zeros(num_later, dtype=bool))
    names = log.user_field, log.item_field, log.time_field
    extended, order = sort_interactions(columns, dataset.user_num, *names, given_part=part)
    for field in dataset.missing.keys() & extended.fields.keys():
        dataset.missing[field] = dataset.missing[field][order]
    dataset.split = replace(split, log=extended, part=part[order], is_target=is_target[order])


def _read_later(
    interactions: pd.DataFrame,
    field: str,
    column: Tensor,
    ids: Mapping[str, int] | None,
    config: Options,
) -> Tensor:
    """Return a field of later interactions, to be appended to its ``column`` of the log.

    Cells are 0 or NaN where their value or scale is unknown. ``ids`` are the ids of names.
    """
    empty = column.new_zeros((len(interactions), *column.shape[1:]))
    if field not in interactions or column.dim() > 1:
        return empty
    if ids is not None:
        return torch.from_numpy(interactions[field].map(ids).fillna(0).to_numpy(dtype=np.int64))
    # the run does not keep the scale of its values, so later ones cannot be scaled alike
    is_scaled = config["normalize_all"] or field in (config["normalize_field"] or ())
    if is_scaled and field != config["TIME_FIELD"]:
        return empty.fill_(torch.nan) if column.is_floating_point() else empty
    numbers = interactions[field].to_numpy(dtype=np.float64, copy=True)
    return torch.from_numpy(numbers).to(column.dtype)


def count_dataset(dataset: Dataset) -> dict[str, int]:
    """Return the numbers of users, items and interactions of a dataset."""
    users, items = dataset.user_num - 1, dataset.item_num - 1
    return {"users": users, "items": items, "events": len(dataset.log)}


def require_counts(name: str, expected: Mapping[str, int], dataset: Dataset) -> None:
    """Refuse a dataset whose counts differ from those of the public dataset of its name."""
    actual = count_dataset(dataset)
    for unit, count in expected.items():
        if actual[unit] != count:
            raise UsageError(
                f"dataset {name}: {actual[unit]:,} {unit}; the public log of this name has "
                f"{count:,} {unit}. `recbole-pos data {name}` tells how it is made; other data "
                "need another name (of folder and files)"
            )
