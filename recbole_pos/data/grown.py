"""Data that have grown since a run: those it was trained on, and what came later."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from recbole.data.interaction import Interaction
from torch import Tensor

from recbole_pos.data.events import PART, EventLog
from recbole_pos.data.known import Known
from recbole_pos.data.naming import spelled_out
from recbole_pos.data.splits import TEST
from recbole_pos.values import Options


@dataclass(frozen=True)
class Growth:
    """What the data have beyond what the model was trained on: new users, new interactions of known
    items, unknown items (``update`` learns them), and interactions of these, skipped.
    """

    users: int = 0
    events: int = 0
    items: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class HeldOut:
    """What a file has beyond the events that were known.

    Attributes:
        events: rows of it whose items are known, with names as they stand in the file.
        users: names of users that are new, by first appearance.
        lonely: those of new users who have events of unknown items alone.
        skipped: number of events of unknown items.
        items: number of unknown items.
    """

    events: pd.DataFrame
    users: np.ndarray
    lonely: np.ndarray
    skipped: int
    items: int

    @property
    def growth(self) -> Growth:
        """Its numbers."""
        users = len(self.users) + len(self.lonely)
        return Growth(users, len(self.events), self.items, self.skipped)


def divide(
    table: pd.DataFrame, known: Known, user: str, item: str, time: str
) -> tuple[pd.DataFrame, HeldOut]:
    """Divide the interactions (names as in the file) into those that were known, and later ones."""
    of_known_items = table[item].isin(known.tokens[item][1:])
    skipped = table[~of_known_items]
    table = table[of_known_items]
    then = known.oldest(table[user], table[time], user)
    later = spelled_out(table[~then])
    names = later.loc[~later[user].isin(known.tokens[user]), user].unique()
    others = pd.Series(skipped[user].astype(str).unique(), dtype=object)
    lonely = others[~others.isin([*known.tokens[user], *names])].to_numpy()
    beyond = HeldOut(later, names, lonely, len(skipped), skipped[item].nunique())
    return table.take(np.flatnonzero(then)), beyond


def known_lines(table: pd.DataFrame, key: str, known: Known) -> pd.DataFrame:
    """Return the lines of known users or items; tokens that were not known are missing in them."""
    table = table[table[key].isin(known.tokens[key])].copy()
    for field in set(table) & set(known.tokens) - {key}:
        names = known.tokens[field][1:]
        column = table[field]
        if column.dtype == object:  # lists of tokens
            table[field] = column.map(lambda cell, names=names: cell[np.isin(cell, names)])
        else:
            table[field] = column.where(column.isin(names))
    return table


def extended(dataset: Any, later: HeldOut, new_users: bool) -> Any:
    """Return a copy of the known data, after ``build``, whose log goes on with later interactions.

    They are history: nothing is trained on them. Attributes of new users and of later interactions,
    other than names that were known, are missing. ``new_users``: whether to add these, too.
    """
    other = copy.copy(dataset)
    other.identity = dataset.identity  # weights learned from the known data fit
    log, user_field = dataset.log, dataset.uid_field
    events = later.events
    if not new_users:
        events = events[events[user_field].isin(dataset.field2id_token[user_field])]
    names = np.append(dataset.field2id_token[user_field], later.users if new_users else [])
    ids = {**dataset.field2token_id, user_field: {name: i for i, name in enumerate(names)}}
    other.field2id_token = {**dataset.field2id_token, user_field: names}
    other.field2token_id = ids
    added = {
        field: _column(events, field, column, ids.get(field), dataset.config)
        for field, column in log.fields.items()
    }
    fields = {field: torch.cat((column, added[field])) for field, column in log.fields.items()}
    place = f"{user_field} place"  # of every event before it is sorted
    fields[place] = torch.arange(len(log) + len(events))
    split = dataset.split
    parts = np.append(split.part, np.full(len(events), TEST, split.part.dtype))
    fields[PART] = torch.from_numpy(parts)
    whole = EventLog.build(fields, len(names), user_field, log.item_field, log.time_field)
    order, parts = whole.fields.pop(place).numpy(), whole.fields.pop(PART).numpy()
    is_new = np.arange(len(whole)) >= len(log)
    other.split = replace(
        split,
        log=whole,
        part=parts,
        is_target=np.append(split.is_target, np.zeros(len(events), dtype=bool))[order],
    )
    more = len(names) - dataset.user_num
    other.missing = {
        field: np.append(mask, np.zeros(len(events), dtype=bool))[order]
        if field in log.fields
        else np.append(mask, np.ones(more if _is_user_field(dataset, field) else 0, dtype=bool))
        for field, mask in dataset.missing.items()
    }
    for field in added:
        if field != log.time_field and log.fields[field].dtype.is_floating_point:
            mask = other.missing.get(field, np.zeros(len(whole), dtype=bool))
            other.missing[field] = mask | (
                is_new[order] & ~np.isfinite(whole.fields[field].numpy())
            )
            whole.fields[field].nan_to_num_(0.0)
    if more and dataset.user_feat is not None:
        other.user_feat = Interaction(
            {
                field: torch.cat((column, column.new_zeros((more, *column.shape[1:]))))
                for field, column in dataset.user_feat.interaction.items()
            }
        )
        other.user_feat.interaction[user_field] = torch.arange(len(names))
    return other


def _is_user_field(dataset: Any, field: str) -> bool:
    return dataset.user_feat is not None and field in dataset.user_feat


def _column(
    events: pd.DataFrame, field: str, like: Tensor, ids: dict[str, int] | None, config: Options
) -> Tensor:
    """A field of later events as a column like that of the log; 0 or NaN where that cannot be."""
    empty = like.new_zeros((len(events), *like.shape[1:]))
    if field not in events or like.dim() > 1:
        return empty
    if ids is not None:
        return torch.from_numpy(events[field].map(ids).fillna(0).to_numpy(dtype=np.int64))
    # the scale of those that were known is not kept
    scaled = config["normalize_all"] or field in (config["normalize_field"] or ())
    scaled = scaled or field in (config["discretization"] or ())
    if scaled and field != config["TIME_FIELD"]:
        return empty.fill_(torch.nan) if like.dtype.is_floating_point else empty
    return torch.from_numpy(events[field].to_numpy(dtype=np.float64, copy=True)).to(like.dtype)
