"""A generated log of sessions, and which part each session belongs to."""

from __future__ import annotations

import numpy as np
import pandas as pd

CUT = {"eval_args": {"split": {"ST": [80, 100]}}}


def session_log() -> pd.DataFrame:
    """120 sessions of 1 to 9 events that overlap in time and in the file, with ties everywhere."""
    rng = np.random.default_rng(4)
    rows = []
    for session in range(120):
        begin, length = rng.integers(0, 400), rng.integers(1, 10)
        times = np.sort(begin + rng.integers(0, 40, length)) // 10
        items = rng.integers(0, 30, length)
        for item, time in zip(items, times, strict=True):
            rows.append((f"s{session}", f"e{item}", float(time)))
    frame = pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])
    order = np.argsort(rng.random(len(frame)), kind="stable")
    return frame.iloc[order].reset_index(drop=True)


def file_phases(frame: pd.DataFrame) -> dict[str, str]:
    """The part of each session under ``CUT``, sessions in their order."""
    ends: dict[str, float] = {}
    for session, time in zip(frame.user_id, frame.timestamp, strict=True):
        ends[session] = max(ends.get(session, time), time)
    order = sorted(ends, key=ends.get)  # stable: ties keep the order of the file
    for bound in CUT["eval_args"]["split"]["ST"]:
        assert ends[order[bound - 1]] == ends[order[bound]], "no tie at a boundary"
    names = np.repeat(["train", "valid", "test"], [80, 20, len(order) - 100])
    return dict(zip(order, names.tolist(), strict=True))
