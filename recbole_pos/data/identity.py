"""Which data a model was trained on, and what has changed or come since.

A run keeps a vocabulary: its names and how many interactions each had. With it, a file that has
grown is read with the same ids, and the data of the run are found in it: the oldest interactions of
each user, as many as there were. An identity (mapping) has digests of the data that were split
(``data``) and of the values of each field (``fields``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from recbole_pos.data.dataset import Columns, Dataset, NameIds
from recbole_pos.data.interactions import counts_time, sort_interactions
from recbole_pos.data.loading import spell_out
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError

# Options that decide which interactions are counted; under others expected counts mean nothing.
FILTERS = (
    *("user_inter_num_interval", "item_inter_num_interval", "val_interval", "session_filter"),
    *("train_fraction", "rm_dup_inter", "rm_copies", "filter_inter_by_user_or_item"),
    "benchmark_filename",
)
# Key in the metadata of a vocabulary's file: whether the times of interactions are dates.
_DATES_KEY = "counts_time"


def describe_changes(then: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe what differs between the data of a training and those of now; None if nothing does.

    Args:
        then: identity of the data of the training: digests (short hashes) of what was split
            (``data``) and of the values of each field (``fields``).
        now: identity of the data as they are.

    Returns:
        What a message puts before "have changed since", such as "the values of genre, or the order
        of their lines,".
    """
    had_identity = then["data"] is not None
    if had_identity and then["data"] != now["data"]:
        return "items, interactions, their times or what is held out"
    changed = find_changed_fields(then, now)
    if changed:
        return f"the values of {', '.join(changed)}, or the order of their lines,"
    return None


def find_changed_fields(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the fields that both identities have and whose digests (short hashes) differ.

    Args:
        then, now: identities of data; ``fields`` maps each field to a digest of its values.
    """
    before, after = then["fields"], now["fields"]
    return [field for field in before if field in after and before[field] != after[field]]


@dataclass(frozen=True)
class Vocabulary:
    """Names and counts of a dataset.

    Attributes:
        tokens: field of type token -> [ids] names of the field, padding first.
        user_counts: [users] int64 interactions of each user before the split left any out, by id.
        popularity: [items] int64 training interactions of each item, by id.
        has_dates: whether the times of interactions are dates, and not, say, running numbers;
            None if not known.
    """

    tokens: dict[str, np.ndarray]
    user_counts: np.ndarray
    popularity: np.ndarray
    has_dates: bool | None = None

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> Vocabulary:
        """Return the names and counts of a dataset, and whether its times are dates."""
        has_dates = counts_time(dataset.log.times.numpy(), dataset.config["timestamp_unit"])
        return cls(dataset.field2id_token, dataset.user_counts, dataset.popularity, has_dates)

    def to_table(self, user_field: str, item_field: str) -> pd.DataFrame:
        """Return names and counts as a table to store, from which :meth:`from_table` reads them.

        Args:
            user_field, item_field: names of the fields of users and items.

        Returns:
            A row for each name but padding, by field and then in the order of ids, with the columns
            ``field``, ``token`` (the name) and ``events`` (its number of interactions; -1 for names
            of other fields). Its ``attrs``, which parquet keeps, have ``has_dates`` under the key
            ``_DATES_KEY``.
        """
        counts_by_field = {user_field: self.user_counts, item_field: self.popularity}
        tables = []
        for field, names in self.tokens.items():
            counts = counts_by_field.get(field, np.full(len(names), -1))
            # From 1 on: 0 is the id of padding.
            columns = {"field": field, "token": names[1:].astype(str), "events": counts[1:]}
            tables.append(pd.DataFrame(columns))
        table = pd.concat(tables, ignore_index=True).astype({"field": "category"})
        # Whether the times of interactions are dates: True or False, or None if not known.
        table.attrs = {_DATES_KEY: self.has_dates}
        return table

    @classmethod
    def from_table(cls, table: pd.DataFrame, user_field: str, item_field: str) -> Vocabulary:
        """Return the vocabulary (names and counts) in a table that :meth:`to_table` made.

        Args:
            table: a row for each name, with columns ``field``, ``token`` and ``events``.
            user_field, item_field: names of the fields of users and items.
        """
        # The rows of a field are in the order of ids from 1 on; padding, id 0, is put before them.
        # Users and items are there even if the table has no rows of them (a run may have left out
        # all users): they have only padding then.
        tokens: dict[str, np.ndarray] = {}
        counts: dict[str, np.ndarray] = {}
        for field in dict.fromkeys([user_field, item_field, *table["field"].unique()]):
            rows = table[table["field"] == field]
            tokens[field] = np.array(["[PAD]", *rows["token"]])
            counts[field] = np.append(0, rows["events"].to_numpy(dtype=np.int64))
        has_dates = table.attrs.get(_DATES_KEY)  # whether times are dates; None if not known
        return cls(tokens, counts[user_field], counts[item_field], has_dates)

    def find_oldest(self, users: pd.Series, times: pd.Series, user_field: str) -> np.ndarray:
        """Find the interactions that an earlier run had, in a file that may have grown since.

        These are the oldest of each user whom the run knew, as many as ``user_counts`` says. For
        example, of a user who had two interactions and now has some at the times [5, 1, 3], these
        are the second and the third: [False, True, True].

        Args:
            users: [interactions] names of the users, in the order of the file.
            times: [interactions] times.
            user_field: name of the field of users.

        Returns:
            [interactions] bool.
        """
        # How many interactions the run had of the user of each row; 0 of a user whom it did not
        # know, whose id is -1 here.
        user_ids = pd.Index(self.tokens[user_field]).get_indexer(users)
        num_in_run = np.where(user_ids > 0, self.user_counts[user_ids], 0)

        # How many older interactions the user of each row has: in the order of time, ``cumcount``
        # counts the rows before with the same id. Equal times stay in the order of the file. In the
        # example these are [2, 0, 1].
        order = np.argsort(times.to_numpy(), kind="stable")
        ids = user_ids[order]
        num_older = np.empty(len(order), dtype=np.int64)
        num_older[order] = pd.Series(ids).groupby(ids).cumcount()
        return num_older < num_in_run


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
    """Later interactions of a file, which are no part of the data that a run was trained on.

    Attributes:
        interactions: those of known items, with names as they stand in the file.
        users: names of new users among them, by first appearance.
        users_of_unknown_items: names of new users whose interactions are all of unknown items, so
            that none of these is held out.
        growth: counts of all that is new.
    """

    interactions: pd.DataFrame
    users: np.ndarray
    users_of_unknown_items: np.ndarray
    growth: Growth


def divide_interactions(
    table: pd.DataFrame, known: Vocabulary, user_field: str, item_field: str, time_field: str
) -> tuple[pd.DataFrame, HeldOut]:
    """Divide the interactions of a file into those that a model was trained on and later ones.

    After the run that trained the model, the file has grown. A later interaction is held out, to be
    added to histories. If the run did not know its item, it is only counted, since the model has no
    weights for that item.

    Args:
        table: a row per interaction, with names as in the file.
        known: names of users and items in the run, and how many interactions each user had.
        user_field, item_field, time_field: names of the columns.

    Returns:
        of_run: the rows of ``table`` that the run had (training, validation and test).
        held_out: the later rows of known items, the names of new users, and counts of what is new.
    """
    # Set interactions of unknown items apart.
    has_known_item = table[item_field].isin(known.tokens[item_field][1:])  # without padding
    unknown, table = table[~has_known_item], table[has_known_item]

    # Of the others, each user's oldest are those of the run, as many as it had; the rest is later.
    # ``spell_out`` makes columns of text of the columns of categories.
    is_of_run = known.find_oldest(table[user_field], table[time_field], user_field)
    of_run, later = table.take(np.flatnonzero(is_of_run)), spell_out(table[~is_of_run])

    # New users, whom the run did not know, are of two kinds: those with a later interaction of a
    # known item, and those with interactions of unknown items only.
    known_users = known.tokens[user_field]
    new_users = pd.Index(later[user_field].unique()).difference(known_users, sort=False)
    users_of_unknown = pd.Index(unknown[user_field].astype(str).unique())
    only_of_unknown = users_of_unknown.difference([*known_users, *new_users], sort=False)

    growth = Growth(
        users=len(new_users) + len(only_of_unknown),
        events=len(later),
        items=unknown[item_field].nunique(),
        skipped=len(unknown),
    )
    return of_run, HeldOut(later, new_users.to_numpy(), only_of_unknown.to_numpy(), growth)


def keep_known_rows(table: pd.DataFrame, key: str, known: Vocabulary) -> pd.DataFrame:
    """Return the rows of the users or items that an earlier run was trained with.

    In their other columns, tokens (such as a new genre) that the run did not know become missing,
    or leave the lists that they are in, since its model has no weights for them.

    Args:
        table: a row for each user or item, read from a file that may have grown since.
        key: the column of their names.
        known: names that the run had, for each field of tokens.

    Returns:
        A new table; the given one stays as it is.
    """
    table = table[table[key].isin(known.tokens[key])].copy()
    for field in set(table) & set(known.tokens) - {key}:
        names, column = known.tokens[field][1:], table[field]  # without padding, the first name
        if column.dtype == object:  # an array of tokens in each cell, of which known ones are kept
            known_names = set(names.tolist())
            table[field] = [
                cell[[name in known_names for name in cell.tolist()]] for cell in column
            ]
        else:
            table[field] = column.where(column.isin(names))
    return table


def extend_log(dataset: Dataset, later: HeldOut, has_new_users: bool) -> Dataset:
    """Return a copy of a dataset whose log also has the later interactions.

    A model that was trained on the old data then recommends from histories that reach up to now.
    The later interactions are part of histories only; none of them is a target to evaluate.

    Args:
        dataset: the data that the model was trained on.
        later: the interactions that came since.
        has_new_users: whether to add the users who are new in them, without attributes; if false,
            their interactions are left out.

    Returns:
        The copy; arrays that do not change are shared with ``dataset``.
    """
    # The names of all users, new ones last, and the interactions of these users.
    user_field, interactions = dataset.uid_field, later.interactions
    names = dataset.field2id_token[user_field]
    if has_new_users:
        names = np.append(names, later.users)
    else:
        interactions = interactions[interactions[user_field].isin(names)]
    num_new = len(names) - dataset.user_num

    # The copy keeps the identity (digests of the data that were trained on), by which the weights
    # of the model are accepted for it.
    extended = copy.copy(dataset)
    extended.identity = dataset.identity
    extended.field2id_token = {**dataset.field2id_token, user_field: names}
    extended.field2token_id = {**dataset.field2token_id, user_field: NameIds(names)}
    extended.missing = dict(dataset.missing)

    # Attributes of new users are 0, and marked as missing.
    if num_new and dataset.user_feat is not None:
        extended.user_feat = {
            field: torch.cat((column, column.new_zeros((num_new, *column.shape[1:]))))
            for field, column in dataset.user_feat.items()
        }
        extended.user_feat[user_field] = torch.arange(len(names))
        for field in dataset.missing.keys() & extended.user_feat.keys():
            are_missing = np.ones(num_new, dtype=bool)
            extended.missing[field] = np.append(dataset.missing[field], are_missing)
    # Add the interactions to the log of the copy, which is replaced, not changed.
    _add_later(extended, interactions)
    return extended


def _add_later(dataset: Dataset, interactions: pd.DataFrame) -> None:
    """Add later interactions to the log of a dataset, in place; none of them becomes a target.

    Args:
        dataset: a copy of the data of a run. Its attribute ``split`` is replaced, and so are the
            masks of missing numbers of interactions in its dict ``missing``.
        interactions: the later ones, with names as in the file.
    """
    # Append the later interactions to the columns and masks of the log, at the end of each. Their
    # part is test, which is not trained on.
    log, split, num_later = dataset.log, dataset.split, len(interactions)
    columns, missing = _append_later(dataset, interactions)
    part = np.append(split.part, np.full(num_later, TEST, np.int8))
    is_target = np.append(split.is_target, np.zeros(num_later, dtype=bool))

    # Sort the columns by user, then by part (training, validation, test), then by time. order[i] is
    # where row i of the sorted log was before; the masks are put in the same order.
    fields = log.user_field, log.item_field, log.time_field
    extended, order = sort_interactions(columns, dataset.user_num, *fields, given_part=part)
    for field, mask in missing.items():
        dataset.missing[field] = mask[order]
    dataset.split = replace(split, log=extended, part=part[order], is_target=is_target[order])


def _append_later(dataset: Dataset, later: pd.DataFrame) -> tuple[Columns, dict[str, np.ndarray]]:
    """Return the columns of a log with later interactions below its own, and their missing numbers.

    Args:
        dataset: the data of a run; its ``log`` has the columns of its own interactions.
        later: the later interactions, with names as in the file.

    Returns:
        columns: field -> [rows] or [rows, s] its column, with ids for names, and 0 for a missing
            number.
        missing: field of numbers -> [rows] bool, in which rows it is missing.
    """
    log, columns, missing = dataset.log, {}, {}
    for field, column in log.fields.items():
        # A column of numbers, except the time, has a mask of missing ones, which the later rows
        # extend. Columns of ids and of lists have none.
        cells = _read_later(later, field, dataset)
        if cells.is_floating_point() and cells.dim() == 1 and field != log.time_field:
            is_missing = ~torch.isfinite(cells)
            cells[is_missing] = 0.0
            mask = dataset.missing.get(field, np.zeros(len(log), dtype=bool))
            missing[field] = np.append(mask, is_missing.numpy())
        columns[field] = torch.cat((column, cells))
    return columns, missing


def _read_later(interactions: pd.DataFrame, field: str, dataset: Dataset) -> Tensor:
    """Return the cells of later interactions in one field, to be appended to those of the run.

    Args:
        interactions: the later ones, with names as in the file.
        field: name of the field.
        dataset: the data of the run, whose column [n] or [n, s] of this field gives the type.

    Returns:
        [later] or [later, s]; 0 for unknown names and lists; NaN for numbers that cannot be scaled.
    """
    # Lists, which have several cells per interaction, are not read: they get 0.
    config, column, num_later = dataset.config, dataset.log.fields[field], len(interactions)
    if column.dim() > 1:
        return column.new_zeros((num_later, *column.shape[1:]))
    if field in dataset.field2token_id:  # a field of names
        ids = interactions[field].map(dataset.field2token_id[field])
        return torch.from_numpy(ids.fillna(0).to_numpy(dtype=np.int64))

    # Numbers. A run does not keep the least and largest value by which it scaled a field, so later
    # numbers cannot be scaled in the same way: they are missing (NaN). Times are never scaled.
    normalizes = config["normalize_all"] or field in (config["normalize_field"] or ())
    if normalizes and field != config["TIME_FIELD"]:
        return column.new_full((num_later,), torch.nan)
    numbers = interactions[field].to_numpy(dtype=np.float64, copy=True)
    return torch.from_numpy(numbers).to(column.dtype)


def count_dataset(dataset: Dataset) -> dict[str, int]:
    """Return the numbers of users, items and interactions of a dataset."""
    users, items = dataset.user_num - 1, dataset.item_num - 1
    return {"users": users, "items": items, "events": len(dataset.log)}


def require_counts(name: str, expected: Mapping[str, int], dataset: Dataset) -> None:
    """Refuse a dataset whose counts differ from those of the public dataset of its name.

    Otherwise results on other data would stand under the name of a public dataset.

    Args:
        name: name of the dataset.
        expected: numbers of ``users``, ``items`` and ``events`` (interactions) of the public one.
        dataset: the data that were read.
    """
    actual = count_dataset(dataset)
    for unit, count in expected.items():
        if actual[unit] != count:
            raise UsageError(
                f"dataset {name}: {actual[unit]:,} {unit}, but the public dataset has {count:,}. "
                f"`recbole-pos data {name}` tells how it is made; give other data another name"
            )
