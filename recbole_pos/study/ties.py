"""What the order of events at one time decides: which item is a user's last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from recbole_pos.study.plan import Ties


@dataclass(frozen=True)
class TieCount:
    """How many held-out items of leave-one-out depend on the order of events at one time.

    Attributes:
        users: that have a test item.
        test: of these, whose test item another order would change.
        valid: whose validation item it would.
        expected: how many test items a random order changes on average.
    """

    users: int
    test: int
    valid: int
    expected: float

    @property
    def share(self) -> float:
        """Return the share of test items that another order would change."""
        return self.test / self.users if self.users else 0.0

    def sentence(self, dataset: str, ties: Ties | None = None) -> str:
        """Return a note for every table of the dataset.

        Args:
            dataset: its name.
            ties: the order that the study has taken.
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
    """Count test and validation items that hang on the order of equal times.

    The test item is a user's last event, the validation item the one before it. Events of the same
    user, time and item are no tie: either order gives the same item.

    Args:
        user, time, item: [events], in the order of the file.

    Returns:
        The counts, over users of three events or more, who are the ones with a training event.
    """
    frame = pd.DataFrame({"user": user, "time": time, "item": item})
    frame = frame[frame.groupby("user")["user"].transform("size") >= 3]
    frame = frame.sort_values(["user", "time"], kind="stable", ignore_index=True)
    if frame.empty:
        return TieCount(0, 0, 0, 0.0)
    groups = frame.groupby(["user", "time"], sort=True)["item"]
    found = groups.agg(["size", "nunique"]).reset_index()
    place = found.groupby("user").cumcount(ascending=False)
    last = found[place == 0].set_index("user")
    before = found[place == 1].set_index("user").reindex(last.index)
    test = last["nunique"] > 1
    # the validation item is of the last time, too, or else of the time before
    valid = test | ((last["size"] == 1) & (before["nunique"] > 1))
    same = frame.groupby(["user", "time", "item"]).size().rename("same").reset_index()
    chosen = frame.groupby("user").last().reset_index()  # the last in the order of the file
    kept = chosen.merge(same, on=["user", "time", "item"])["same"].to_numpy()
    changed = 1 - kept / last["size"].to_numpy()
    return TieCount(len(last), int(test.sum()), int(valid.sum()), float(changed.sum()))
