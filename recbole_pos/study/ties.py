"""Ties of times: how many held-out items depend on the order of interactions at one time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from recbole_pos.study.plan import Ties


@dataclass(frozen=True)
class TieCount:
    """How many held-out items of leave-one-out depend on the order of events at one time.

    Attributes:
        users: users with a test item.
        test: users whose test item another order would change.
        valid: users whose validation item another order would change.
        expected: number of test items that a random order changes on average.
    """

    users: int
    test: int
    valid: int
    expected: float

    @property
    def share(self) -> float:
        """Share of test items that another order would change."""
        return self.test / self.users if self.users else 0.0

    def sentence(self, dataset: str, ties: Ties | None = None) -> str:
        """Return a note for every table of the dataset.

        Args:
            dataset: name of the dataset.
            ties: the order that the study takes; that of the file if None.
        """
        ties = ties or Ties()
        if not self.test:
            return f"No test item of {dataset} depends on the order of equal times."
        taken = {
            "file": "it is that of the file",
            "random": f"it is random, seed {ties.seed}",
            "drop": "these users are excluded",
        }[ties.order]
        return (
            f"On {dataset}, {self.test:,} of {self.users:,} test items ({self.share:.0%}) depend "
            f"on the order of interactions with equal times; here {taken}."
        )


def count_ties(user: np.ndarray, time: np.ndarray, item: np.ndarray) -> TieCount:
    """Count test and validation items that depend on the order of equal times.

    The test item is a user's last event, the validation item the one before it. Events of the same
    user, time and item are no tie: either order gives the same item.

    Args:
        user, time, item: [events] columns, in the order of the file.

    Returns:
        The counts over users with three events or more; the others have no training event.
    """
    frame = pd.DataFrame({"user": user, "time": time, "item": item})
    frame = frame[frame.groupby("user")["user"].transform("size") >= 3]
    frame = frame.sort_values(["user", "time"], kind="stable", ignore_index=True)
    if frame.empty:
        return TieCount(0, 0, 0, 0.0)
    groups = frame.groupby(["user", "time"], sort=True)["item"]
    times = groups.agg(["size", "nunique"]).reset_index()
    place = times.groupby("user").cumcount(ascending=False)
    last = times[place == 0].set_index("user")
    before = times[place == 1].set_index("user").reindex(last.index)
    test = last["nunique"] > 1
    # the validation item has the last time, too, or else the time before
    valid = test | ((last["size"] == 1) & (before["nunique"] > 1))
    same = frame.groupby(["user", "time", "item"]).size().rename("same").reset_index()
    chosen = frame.groupby("user").last().reset_index()  # the last in the order of the file
    kept = chosen.merge(same, on=["user", "time", "item"])["same"].to_numpy()
    changed = 1 - kept / last["size"].to_numpy()
    return TieCount(len(last), int(test.sum()), int(valid.sum()), float(changed.sum()))
