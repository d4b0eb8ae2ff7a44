"""EventLog: every interaction once, in flat arrays sorted by user and time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class EventLog:
    """Interactions sorted by user, then time, then their order in the file.

    Attributes:
        fields: name -> [events] or [events, s] tensor, one entry per interaction field.
        offsets: [users + 1] int64; the events of user u are offsets[u] : offsets[u + 1].
        user_field, item_field, time_field: which of the fields is which.
    """

    fields: dict[str, Tensor]
    offsets: np.ndarray
    user_field: str
    item_field: str
    time_field: str

    @classmethod
    def build(
        cls,
        fields: dict[str, Tensor],
        users: int,
        user_field: str,
        item_field: str,
        time_field: str,
    ) -> EventLog:
        """Sort the columns of an interaction table.

        Args:
            fields: columns in file order; the time column must be exact (float64 or int64).
            users: number of user ids, padding included.
            user_field, item_field, time_field: names of the three columns that matter here.

        Raises:
            TypeError: if times are float32, whose step is 64-128 s for seconds since 1970.
        """
        user, time = fields[user_field].numpy(), fields[time_field].numpy()
        if time.dtype not in (np.float64, np.int64):
            raise TypeError(f"{time_field} must be float64 or int64, found {time.dtype}")
        order = torch.from_numpy(np.lexsort((time, user)))  # stable: file order breaks ties
        counts = np.bincount(user, minlength=users)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return cls(
            {name: column[order] for name, column in fields.items()},
            offsets,
            user_field,
            item_field,
            time_field,
        )

    def keep(self, mask: np.ndarray) -> EventLog:
        """The log of the events where ``mask`` ([events] bool) is true; users keep their ids."""
        events = torch.from_numpy(np.flatnonzero(mask))
        before = np.concatenate(([0], np.cumsum(mask)))
        fields = {name: column[events] for name, column in self.fields.items()}
        return replace(self, fields=fields, offsets=before[self.offsets])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def users(self) -> Tensor:
        """[events] int64 user of each event."""
        return self.fields[self.user_field]

    @property
    def items(self) -> Tensor:
        """[events] int64 item of each event."""
        return self.fields[self.item_field]

    @property
    def times(self) -> Tensor:
        """[events] float64 time of each event, exact."""
        return self.fields[self.time_field]

    @property
    def lengths(self) -> np.ndarray:
        """[users] int64 number of events of each user."""
        return np.diff(self.offsets)

    @property
    def starts(self) -> np.ndarray:
        """[events] int64 index of the first event of each event's user."""
        return np.repeat(self.offsets[:-1], self.lengths)

    @property
    def ranks(self) -> np.ndarray:
        """[events] int64 0 for the oldest event of a user, 1 for the next, ..."""
        return np.arange(len(self)) - self.starts
