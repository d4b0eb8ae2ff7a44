"""Names and counts of the data of a run: names by id, and how many interactions each user had.

With them a reader of a longer file gives the same names the same ids and finds the data of the run
in it: of each known user the oldest interactions, as many as there were. The others are later.
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
    def from_dataset(cls, dataset: Any) -> Known:
        """Return the names and counts of a dataset after ``build``."""
        tables = (dataset.log.fields, dataset.user_feat, dataset.item_feat)
        loaded = {field for feat in tables if feat is not None for field in feat}
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
        """Return a table to store, which :meth:`from_table` reads.

        Returns:
            a row per name, in the order of ids, with columns ``field``, ``token`` and ``events``
            (-1 for names other than users and items).
        """
        counts = {user_field: self.events, item_field: self.popularity}
        parts = []
        for field, names in self.tokens.items():
            count = counts.get(field)
            events = None if count is None else count[1:]
            counted = pd.array(np.full(len(names) - 1, -1) if events is None else events)
            part = {"field": field, "token": names[1:].astype(str), "events": counted}
            parts.append(pd.DataFrame(part))
        table = pd.concat(parts, ignore_index=True)
        return table.astype({"field": "category"})

    @classmethod
    def from_table(cls, table: pd.DataFrame, user_field: str, item_field: str) -> Known:
        """Read a table of :meth:`to_table`.

        Raises:
            ValueError: if it is not such a table.
        """
        if tuple(table) != _COLUMNS or not {user_field, item_field} <= set(table["field"]):
            raise ValueError(
                f"expected columns {', '.join(_COLUMNS)} and names of {shown(user_field)} and "
                f"{shown(item_field)}"
            )
        if not pd.api.types.is_integer_dtype(table["events"]):
            raise ValueError(f"events: expected whole numbers, found {table['events'].dtype}")
        is_text = pd.api.types.infer_dtype(table["token"], skipna=False) == "string"
        if not is_text or table.duplicated(["field", "token"]).any():
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

    def find_oldest(self, users: pd.Series, times: pd.Series, user_field: str) -> np.ndarray:
        """Find the interactions of the run: the oldest of each known user, as many as it had.

        Args:
            users, times: [events] name and time of each interaction, in the order of the file.
            user_field: field of users.

        Returns:
            [events] bool.
        """
        user = pd.Index(self.tokens[user_field]).get_indexer(users)
        order = np.lexsort((times.to_numpy(), user))  # stable: file order breaks ties
        ordered = user[order]
        begin = np.searchsorted(ordered, ordered)  # first place of each event's user
        is_known = np.zeros(len(user), dtype=bool)
        is_known[order] = (ordered > 0) & (np.arange(len(user)) - begin < self.events[ordered])
        return is_known
