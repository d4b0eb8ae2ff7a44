"""Interaction tables for benchmarks: ml-100k, generated short histories, atomic files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

COLUMNS = ["user_id", "item_id", "timestamp"]


def ml_100k() -> pd.DataFrame:
    """MovieLens 100k as RecBole's wheel ships it: no download, the same bytes everywhere."""
    import recbole

    file = Path(recbole.__file__).parent / "dataset_example" / "ml-100k" / "ml-100k.inter"
    table = pd.read_csv(file, sep="\t").rename(columns=lambda name: name.split(":")[0])
    return table[COLUMNS]


def make_log(
    lengths: np.ndarray, items: np.ndarray, order: np.ndarray | None = None
) -> pd.DataFrame:
    """Users 1, 2, ... with so many events each, a minute apart, in ``order`` if not as they are."""
    order = np.arange(len(items)) if order is None else order
    return pd.DataFrame(
        {
            "user_id": np.repeat(np.arange(1, len(lengths) + 1), lengths),
            "item_id": items,
            "timestamp": 1_600_000_000 + 60 * order,
        }
    )


def short_histories(
    seed: int, users: int = 20_000, items: int = 12_000, exponent: float = 1.0
) -> pd.DataFrame:
    """3 to 20 events a user over a catalogue whose popularity falls as rank ** -exponent.

    Most real logs look like this: far shorter than the window, over a catalogue larger than
    ml-100k's. Work spent on padding shows here.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 21, users)
    popularity = np.arange(1, items + 1, dtype=float) ** -exponent
    ids = rng.permutation(items) + 1  # an item's id must not tell its popularity
    events = int(lengths.sum())
    chosen = ids[rng.choice(items, events, p=popularity / popularity.sum())]
    return make_log(lengths, chosen, rng.permutation(events))


def long_histories(seed: int, users: int = 1_000, items: int = 6_000) -> pd.DataFrame:
    """As many events a user as in ml-20m: 20 at least, 144 on average, a few with thousands."""
    rng = np.random.default_rng(seed)
    lengths = (20 + rng.lognormal(4.1, 1.1, users)).astype(int).clip(max=3_000)
    popularity = np.arange(1, items + 1, dtype=float) ** -0.8
    events = int(lengths.sum())
    chosen = 1 + rng.choice(items, events, p=popularity / popularity.sum())
    return make_log(lengths, chosen, rng.permutation(events))


def training_events(table: pd.DataFrame, length: int, held_out: int = 2) -> pd.DataFrame:
    """Up to ``length`` + 1 events before each user's last ``held_out``, if two or more.

    The cut is made here, not in a library, because the events that are left also decide which items
    there are. Times become ranks: with equal times, each library would pick an order of its own.
    """
    table = table.sort_values(["user_id", "timestamp"], kind="stable", ignore_index=True)
    from_end = table.groupby("user_id").cumcount(ascending=False)
    table = table[(from_end >= held_out) & (from_end <= held_out + length)]
    table = table[table.groupby("user_id")["item_id"].transform("size") >= 2]
    table = table.reset_index(drop=True)
    return table.assign(timestamp=table.groupby("user_id").cumcount())


def next_events(table: pd.DataFrame, events: pd.DataFrame, held_out: int = 2) -> pd.DataFrame:
    """The first held-out event of each user of :func:`training_events`."""
    table = table.sort_values(["user_id", "timestamp"], kind="stable", ignore_index=True)
    first = table.groupby("user_id").cumcount(ascending=False) == held_out - 1
    return table[first & table["user_id"].isin(events["user_id"])]


def count_targets(table: pd.DataFrame, length: int) -> int:
    """Real targets of an epoch in which each user gives one sequence of up to ``length`` inputs."""
    return int((table.groupby("user_id").size().clip(upper=length + 1) - 1).sum())


def write_atomic(df: pd.DataFrame, folder: str | Path, name: str) -> Path:
    """Write ``folder/name/name.inter`` as RecBole reads it; returns the file."""
    file = Path(folder) / name / f"{name}.inter"
    file.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "user_id": "user_id:token",
        "item_id": "item_id:token",
        "timestamp": "timestamp:float",
    }
    df[COLUMNS].rename(columns=header).to_csv(file, sep="\t", index=False)
    return file
