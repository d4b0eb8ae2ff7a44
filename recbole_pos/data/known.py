"""What a run knew: names by id and how many interactions each user had.

With it a reader gives the same names the same ids in a longer file, and takes the training data out
of it: of each known user as many interactions as there were, the oldest ones. The rest is later.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.values import shown

_COLUMNS = ("field", "token", "events")


@dataclass(frozen=True)
class Known:
    """Of a dataset after ``build``.

    Attributes:
        tokens: field of type token -> [ids] its names, padding first.
        events: [users] int64 events of each user before the split left any out, by id.
        popularity: [items] int64 training events of each item, by id; None where an earlier version
            did not count them.
    """

    tokens: dict[str, np.ndarray]
    events: np.ndarray
    popularity: np.ndarray | None = None

    @classmethod
    def of(cls, dataset: Any) -> Known:
        """Return what a dataset knows."""
        tables = (dataset.log.fields, dataset.user_feat, dataset.item_feat)
        loaded = {field for feat in tables if feat is not None for field in feat}
        tokens = {f: names for f, names in dataset.field2id_token.items() if f in loaded}
        return cls(tokens, dataset.events_of_users, dataset.popularity)

    @property
    def digest(self) -> str:
        """Of names and counts in the order of ids, by which a checkpoint knows its own."""
        digest = hashlib.blake2b(digest_size=16)
        for field, names in sorted(self.tokens.items()):
            if len(names) > 1:  # a table has no row of others
                digest.update("\0".join([field, *names[1:]]).encode())
        for count in (self.events, self.popularity):
            digest.update(b"" if count is None else count.astype(np.int64).tobytes())
        return digest.hexdigest()

    def to_table(self, user_field: str, item_field: str) -> pd.DataFrame:
        """Return a row a name, in the order of ids; ``events`` for users and items only."""
        counts = {user_field: self.events, item_field: self.popularity}
        parts = []
        for field, names in self.tokens.items():
            count = counts.get(field)
            events = None if count is None else count[1:]
            column = pd.array(np.full(len(names) - 1, -1) if events is None else events)
            part = {"field": field, "token": names[1:].astype(str), "events": column}
            parts.append(pd.DataFrame(part))
        table = pd.concat(parts, ignore_index=True)
        return table.astype({"field": "category"})

    @classmethod
    def from_table(cls, table: pd.DataFrame, user_field: str, item_field: str) -> Known:
        """Read the inverse of :meth:`to_table`; ValueError if it is no such table."""
        if tuple(table) != _COLUMNS or not {user_field, item_field} <= set(table["field"]):
            raise ValueError(
                f"expected columns {', '.join(_COLUMNS)} and names of {shown(user_field)} and "
                f"{shown(item_field)}"
            )
        if not pd.api.types.is_integer_dtype(table["events"]):
            raise ValueError(f"events: expected whole numbers, found {table['events'].dtype}")
        text = pd.api.types.infer_dtype(table["token"], skipna=False) == "string"
        if not text or table.duplicated(["field", "token"]).any():
            raise ValueError("token: expected text, each name of a field once")
        parts = dict(list(table.groupby("field", observed=True, sort=False)))
        tokens = {str(field): np.array(["[PAD]", *part["token"]]) for field, part in parts.items()}
        events, popularity = (
            np.append(0, parts[field]["events"].to_numpy(dtype=np.int64))
            for field in (user_field, item_field)
        )
        if events.min() < 0:
            raise ValueError("events: expected at least 0 of each user")
        return cls(tokens, events, None if popularity.min() < 0 else popularity)

    def oldest(self, users: pd.Series, times: pd.Series, user_field: str) -> np.ndarray:
        """Return [events] bool, which interactions, in the order of their file, were known."""
        user = pd.Index(self.tokens[user_field]).get_indexer(users)
        order = np.lexsort((times.to_numpy(), user))  # stable: file order breaks ties
        ordered = user[order]
        begin = np.searchsorted(ordered, ordered)  # of each event's user
        known = np.zeros(len(user), dtype=bool)
        known[order] = (ordered > 0) & (np.arange(len(user)) - begin < self.events[ordered])
        return known
