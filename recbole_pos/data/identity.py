"""Which data a model was trained on, and what has changed or come since.

With names and counts of a run, a longer file is read with the same ids, and the data of the run are
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
from recbole.data.interaction import Interaction
from torch import Tensor

from recbole_pos.data.attributes import loaded_fields
from recbole_pos.data.interactions import GIVEN_PART, EventLog
from recbole_pos.data.loading import spell_out
from recbole_pos.data.protocols import Dataset
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


def compute_identity(dataset: Dataset) -> dict[str, Any]:
    """Return digests of a dataset after ``build``.

    ``data`` is that of items, sequences and split, followed by that of times; ``fields`` those of
    values and names of every other loaded field.
    """
    log = dataset.log
    ids = {log.user_field, log.item_field, log.time_field}
    sequences = _digest(dataset, log.item_field, log.items.numpy(), log.offsets, dataset.part)
    feats = (log.fields, dataset.user_feat, dataset.item_feat)
    columns = {f: feat[f].numpy() for feat in feats if feat is not None for f in feat}
    return {
        "data": sequences + _digest(dataset, "", log.times.numpy()),
        "fields": {
            field: _digest(dataset, field, columns[field], dataset.missing.get(field, np.empty(0)))
            for field in sorted(columns.keys() - ids)
        },
    }


def _digest(dataset: Dataset, field: str, *columns: np.ndarray) -> str:
    """Return the digest of the tokens of a field and of the bytes of arrays, in hexadecimal."""
    tokens = "\n".join(map(str, dataset.field2id_token.get(field, ())))
    digest = hashlib.blake2b(tokens.encode(), digest_size=16)
    for column in columns:
        digest.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def describe_changes(then: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return in words what has changed between two identities; None if nothing has."""
    if not now["data"].startswith(then.get("data") or ""):
        return "items, interactions, their times or what is held out"
    changed = find_changed_fields(then, now)
    return f"the values of {', '.join(changed)}, or the order of their lines," if changed else None


def find_changed_fields(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the fields that both identities have (of 0.2.0 fewer), with different values."""
    before, after = then.get("fields") or {}, now["fields"]
    return [field for field in before if field in after and before[field] != after[field]]


@dataclass(frozen=True)
class Vocabulary:
    """Names and counts of a dataset after ``build``.

    Attributes:
        tokens: field of type token -> [ids] names of the field, padding first.
        events: [users] int64 events of each user before the split left any out, by id.
        popularity: [items] int64 training events of each item, by id; None where an earlier version
            did not count them.
    """

    tokens: dict[str, np.ndarray]
    events: np.ndarray
    popularity: np.ndarray | None = None

    @classmethod
    def from_dataset(cls, dataset: Any) -> Vocabulary:
        """Return the names and counts of a dataset after ``build``."""
        loaded = loaded_fields(dataset)
        tokens = {f: names for f, names in dataset.field2id_token.items() if f in loaded}
        return cls(tokens, dataset.events_of_users, dataset.popularity)

    @property
    def digest(self) -> str:
        """Digest of names and counts in the order of ids; a checkpoint is checked against it."""
        digest = hashlib.blake2b(digest_size=16)
        for field, names in sorted(self.tokens.items()):
            if len(names) > 1:  # ``to_table`` has no row for a field with padding only
                digest.update("\0".join([field, *names[1:]]).encode())
        for count in (self.events, self.popularity):
            digest.update(b"" if count is None else count.astype(np.int64).tobytes())
        return digest.hexdigest()

    def to_table(self, user_field: str, item_field: str) -> pd.DataFrame:
        """Return a row per name, in the order of ids, to store for :meth:`from_table`.

        Its columns are ``field``, ``token`` and ``events`` (-1 for other than users and items).
        """
        counts, parts = {user_field: self.events, item_field: self.popularity}, []
        for field, names in self.tokens.items():
            count = counts.get(field)
            events = np.full(len(names) - 1, -1) if count is None else count[1:]
            part = {"field": field, "token": names[1:].astype(str), "events": events}
            parts.append(pd.DataFrame(part))
        return pd.concat(parts, ignore_index=True).astype({"field": "category"})

    @classmethod
    def from_table(cls, table: pd.DataFrame, user_field: str, item_field: str) -> Vocabulary:
        """Read a table of :meth:`to_table`.

        Raises:
            ValueError: if it is not such a table.
        """
        if tuple(table) != _COLUMNS or not {user_field, item_field} <= set(table["field"]):
            raise ValueError(
                f"expected columns {', '.join(_COLUMNS)} and names of {shown(user_field)} and "
                f"{shown(item_field)}"
            )
        is_text = pd.api.types.infer_dtype(table["token"], skipna=False) == "string"
        if not is_text or table.duplicated(["field", "token"]).any():
            raise ValueError("token: expected text, each name of a field once")
        parts = dict(list(table.groupby("field", observed=True, sort=False)))
        events, popularity = (
            np.append(0, parts[field]["events"].to_numpy(dtype=np.int64))
            for field in (user_field, item_field)
        )
        if table["events"].dtype.kind != "i" or events.min() < 0:
            raise ValueError("events: expected whole numbers, at least 0 of each user")
        tokens = {str(field): np.array(["[PAD]", *part["token"]]) for field, part in parts.items()}
        return cls(tokens, events, None if popularity.min() < 0 else popularity)

    def find_oldest(self, users: pd.Series, times: pd.Series, user_field: str) -> np.ndarray:
        """Return [events] bool: the oldest of each known user, as many as it had.

        ``users`` and ``times`` are [events] names and times in the order of the file.
        """
        user = pd.Index(self.tokens[user_field]).get_indexer(users)
        order = np.lexsort((times.to_numpy(), user))  # stable: file order breaks ties
        ordered = user[order]
        begin = np.searchsorted(ordered, ordered)  # first place of each event's user
        is_known = np.zeros(len(user), dtype=bool)
        is_known[order] = (ordered > 0) & (np.arange(len(user)) - begin < self.events[ordered])
        return is_known


@dataclass(frozen=True)
class Growth:
    """Numbers of later data, which the model was not trained on.

    Attributes:
        users: new users.
        events: new interactions of known items.
        items: unknown items, which ``update`` learns.
        skipped: interactions of unknown items.
    """

    users: int = 0
    events: int = 0
    items: int = 0
    skipped: int = 0


class HeldOut(NamedTuple):
    """Later interactions of a file, beyond the data of a run.

    Attributes:
        events: later interactions of known items, with names as they stand in the file.
        users: names of new users with such interactions, by first appearance.
        lonely: names of new users whose interactions are all of unknown items.
    """

    events: pd.DataFrame
    users: np.ndarray
    lonely: np.ndarray
    growth: Growth


def divide(
    table: pd.DataFrame, known: Vocabulary, user: str, item: str, time: str
) -> tuple[pd.DataFrame, HeldOut]:
    """Divide interactions, with names as in the file, into the data of a run and later ones."""
    has_known_item = table[item].isin(known.tokens[item][1:])
    skipped = table[~has_known_item]
    table = table[has_known_item]
    is_old = known.find_oldest(table[user], table[time], user)
    later = spell_out(table[~is_old])
    names = later.loc[~later[user].isin(known.tokens[user]), user].unique()
    candidates = pd.Series(skipped[user].astype(str).unique(), dtype=object)
    lonely = candidates[~candidates.isin([*known.tokens[user], *names])].to_numpy()
    counts = len(names) + len(lonely), len(later), skipped[item].nunique(), len(skipped)
    return table.take(np.flatnonzero(is_old)), HeldOut(later, names, lonely, Growth(*counts))


def keep_known_lines(table: pd.DataFrame, key: str, known: Vocabulary) -> pd.DataFrame:
    """Return the lines of users or items, named in ``key``, that a run knew.

    Tokens it did not know become missing.
    """
    table = table[table[key].isin(known.tokens[key])].copy()
    for field in set(table) & set(known.tokens) - {key}:
        names, column = known.tokens[field][1:], table[field]
        if column.dtype == object:  # lists of tokens
            table[field] = column.map(lambda cell, names=names: cell[np.isin(cell, names)])
        else:
            table[field] = column.where(column.isin(names))
    return table


def extend_log(dataset: Any, later: HeldOut, new_users: bool) -> Any:
    """Return a copy of a dataset, after ``build``, whose log includes later interactions.

    These are history only. With ``new_users`` unknown users are added, without attributes.
    """
    other = copy.copy(dataset)
    other.identity = dataset.identity  # weights learned from the known data fit
    log, user_field, events = dataset.log, dataset.uid_field, later.events
    if not new_users:
        events = events[events[user_field].isin(dataset.field2id_token[user_field])]
    names = np.append(dataset.field2id_token[user_field], later.users if new_users else [])
    ids = {**dataset.field2token_id, user_field: {name: i for i, name in enumerate(names)}}
    other.field2id_token = {**dataset.field2id_token, user_field: names}
    other.field2token_id = ids
    fields = {
        field: torch.cat((column, _column(events, field, column, ids.get(field), dataset.config)))
        for field, column in log.fields.items()
    }
    place = f"{user_field} place"  # column of the place of every event before sorting
    fields[place] = torch.arange(len(log) + len(events))
    split, nothing = dataset.split, np.zeros(len(events), dtype=bool)
    parts = np.append(split.part, np.full(len(events), TEST, split.part.dtype))
    fields[GIVEN_PART] = torch.from_numpy(parts)
    whole = EventLog.build(fields, len(names), user_field, log.item_field, log.time_field)
    order, parts = whole.fields.pop(place).numpy(), whole.fields.pop(GIVEN_PART).numpy()
    is_target = np.append(split.is_target, nothing)[order]
    other.split = replace(split, log=whole, part=parts, is_target=is_target)
    added = len(names) - dataset.user_num
    users = dataset.user_feat
    other.missing = {}
    for field, mask in dataset.missing.items():
        if field in log.fields:
            other.missing[field] = np.append(mask, nothing)[order]
        else:
            is_of_users = users is not None and field in users
            other.missing[field] = np.append(mask, np.ones(added * is_of_users, dtype=bool))
    for field, column in whole.fields.items():
        if field != log.time_field and column.dtype.is_floating_point:
            no_number = (order >= len(log)) & ~np.isfinite(column.numpy())
            other.missing[field] = no_number | other.missing.get(field, False)
            column.nan_to_num_(0.0)
    if added and users is not None:
        columns = {
            field: torch.cat((column, column.new_zeros((added, *column.shape[1:]))))
            for field, column in users.interaction.items()
        }
        other.user_feat = Interaction({**columns, user_field: torch.arange(len(names))})
    return other


def _column(
    events: pd.DataFrame, field: str, like: Tensor, ids: dict[str, int] | None, config: Options
) -> Tensor:
    """Return a field of later events as a column ``like`` the log's; ``ids`` are those of names.

    Its cells are 0 or NaN where a value is not there or its scale is unknown.
    """
    empty = like.new_zeros((len(events), *like.shape[1:]))
    if field not in events or like.dim() > 1:
        return empty
    if ids is not None:
        return torch.from_numpy(events[field].map(ids).fillna(0).to_numpy(dtype=np.int64))
    # the run does not keep the scale of its values, so later ones cannot be scaled alike
    is_scaled = config["normalize_all"] or field in (config["normalize_field"] or ())
    is_scaled = is_scaled or field in (config["discretization"] or ())
    if is_scaled and field != config["TIME_FIELD"]:
        return empty.fill_(torch.nan) if like.dtype.is_floating_point else empty
    return torch.from_numpy(events[field].to_numpy(dtype=np.float64, copy=True)).to(like.dtype)


def count_interactions(dataset: Any) -> dict[str, int]:
    """Return the numbers of users, items and events of a dataset after ``build``."""
    users, items = dataset.user_num - 1, dataset.item_num - 1
    return {"users": users, "items": items, "events": len(dataset.log)}


def require_counts(name: str, expected: Mapping[str, int], dataset: Any) -> None:
    """Refuse data with other counts than those of the public dataset of the name."""
    actual = count_interactions(dataset)
    for unit, count in expected.items():
        if actual[unit] != count:
            raise UsageError(
                f"dataset {name}: {actual[unit]:,} {unit}; the public log of this name has "
                f"{count:,} {unit}. `recbole-pos data {name}` tells how it is made; other data "
                "need another name (of folder and files)"
            )
