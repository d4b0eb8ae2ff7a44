"""Data that have grown since a run: the data it was trained on, and later data."""

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
from recbole_pos.data.naming import spell_out
from recbole_pos.data.splits import TEST
from recbole_pos.values import Options


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


@dataclass(frozen=True)
class HeldOut:
    """Later interactions of a file, beyond the data of a run.

    Attributes:
        events: later interactions of known items, with names as they stand in the file.
        users: names of new users with such interactions, by first appearance.
        lonely: names of new users whose interactions are all of unknown items.
        skipped: number of interactions of unknown items.
        items: number of unknown items.
    """

    events: pd.DataFrame
    users: np.ndarray
    lonely: np.ndarray
    skipped: int
    items: int

    @property
    def growth(self) -> Growth:
        """Numbers of users, events and items held out."""
        users = len(self.users) + len(self.lonely)
        return Growth(users, len(self.events), self.items, self.skipped)


def divide(
    table: pd.DataFrame, known: Known, user: str, item: str, time: str
) -> tuple[pd.DataFrame, HeldOut]:
    """Divide interactions into the data of a run and later ones.

    Args:
        table: the interactions, with names as in the file.
        known: names and counts of the run.
        user, item, time: names of these columns.
    """
    has_known_item = table[item].isin(known.tokens[item][1:])
    skipped = table[~has_known_item]
    table = table[has_known_item]
    is_old = known.find_oldest(table[user], table[time], user)
    later = spell_out(table[~is_old])
    names = later.loc[~later[user].isin(known.tokens[user]), user].unique()
    candidates = pd.Series(skipped[user].astype(str).unique(), dtype=object)
    lonely = candidates[~candidates.isin([*known.tokens[user], *names])].to_numpy()
    held_out = HeldOut(later, names, lonely, len(skipped), skipped[item].nunique())
    return table.take(np.flatnonzero(is_old)), held_out


def keep_known_lines(table: pd.DataFrame, key: str, known: Known) -> pd.DataFrame:
    """Return the lines of users or items that a run knew; tokens it did not know become missing.

    Args:
        table: the users or items.
        key: field of their names.
        known: names of the run.
    """
    table = table[table[key].isin(known.tokens[key])].copy()
    for field in set(table) & set(known.tokens) - {key}:
        names = known.tokens[field][1:]
        column = table[field]
        if column.dtype == object:  # lists of tokens
            table[field] = column.map(lambda cell, names=names: cell[np.isin(cell, names)])
        else:
            table[field] = column.where(column.isin(names))
    return table


def extend_log(dataset: Any, later: HeldOut, new_users: bool) -> Any:
    """Return a copy of a dataset, after ``build``, whose log includes later interactions.

    These are history only: nothing is trained on them. Attributes of new users, and of later
    interactions except known names, are missing.

    Args:
        dataset: the data of a run.
        later: the later interactions.
        new_users: whether to add users that the run did not know.
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
    place = f"{user_field} place"  # column of the place of every event before sorting
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
    added_users = len(names) - dataset.user_num
    other.missing = {
        field: np.append(mask, np.zeros(len(events), dtype=bool))[order]
        if field in log.fields
        else np.append(
            mask, np.ones(added_users if _is_user_field(dataset, field) else 0, dtype=bool)
        )
        for field, mask in dataset.missing.items()
    }
    for field in added:
        if field != log.time_field and log.fields[field].dtype.is_floating_point:
            mask = other.missing.get(field, np.zeros(len(whole), dtype=bool))
            other.missing[field] = mask | (
                is_new[order] & ~np.isfinite(whole.fields[field].numpy())
            )
            whole.fields[field].nan_to_num_(0.0)
    if added_users and dataset.user_feat is not None:
        other.user_feat = Interaction(
            {
                field: torch.cat((column, column.new_zeros((added_users, *column.shape[1:]))))
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
    """Return a field of later events as a column like the log's.

    Args:
        events: the later events, with names.
        field: name of the field.
        like: the log's column.
        ids: ids of names, for a token field.
        config: options that scale fields.

    Returns:
        [events] or [events, s]; 0 or NaN where the value is not there or its scale is unknown.
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
