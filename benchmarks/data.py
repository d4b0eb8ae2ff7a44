"""Datasets of benchmarks: ml-100k, generated histories, atomic files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

COLUMNS = ["user_id", "item_id", "timestamp"]


def ml_100k() -> pd.DataFrame:
    """Return MovieLens 100k, which RecBole's wheel brings."""
    import recbole

    file = Path(recbole.__file__).parent / "dataset_example" / "ml-100k" / "ml-100k.inter"
    table = pd.read_csv(file, sep="\t").rename(columns=lambda name: name.split(":")[0])
    return table[COLUMNS]


def make_log(
    lengths: np.ndarray, items: np.ndarray, order: np.ndarray | None = None
) -> pd.DataFrame:
    """Return users 1, 2, ... with ``lengths`` interactions each, a minute apart, in any order."""
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
    """Return 3 to 20 interactions a user; the popularity of items falls as rank ** -exponent.

    Most real data look like this: far shorter than the window, with more items than ml-100k. Work
    spent on padding shows here.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 21, users)
    popularity = np.arange(1, items + 1, dtype=float) ** -exponent
    ids = rng.permutation(items) + 1  # the popularity of an item must not follow from its id
    events = int(lengths.sum())
    chosen = ids[rng.choice(items, events, p=popularity / popularity.sum())]
    return make_log(lengths, chosen, rng.permutation(events))


def long_histories(seed: int, users: int = 1_000, items: int = 6_000) -> pd.DataFrame:
    """Return as many interactions a user as in ml-20m: 20 at least, 144 on average."""
    rng = np.random.default_rng(seed)
    lengths = (20 + rng.lognormal(4.1, 1.1, users)).astype(int).clip(max=3_000)
    popularity = np.arange(1, items + 1, dtype=float) ** -0.8
    events = int(lengths.sum())
    chosen = 1 + rng.choice(items, events, p=popularity / popularity.sum())
    return make_log(lengths, chosen, rng.permutation(events))


def training_events(table: pd.DataFrame, length: int, held_out: int = 2) -> pd.DataFrame:
    """Return up to ``length`` + 1 interactions before the last ``held_out`` of users with two.

    The cut is made here, not in a library, since the remaining interactions also decide which items
    there are. Times become ranks: with equal times, each library would choose an order of its own.
    """
    table = table.sort_values(["user_id", "timestamp"], kind="stable", ignore_index=True)
    from_end = table.groupby("user_id").cumcount(ascending=False)
    table = table[(from_end >= held_out) & (from_end <= held_out + length)]
    table = table[table.groupby("user_id")["item_id"].transform("size") >= 2]
    table = table.reset_index(drop=True)
    return table.assign(timestamp=table.groupby("user_id").cumcount())


def next_events(table: pd.DataFrame, events: pd.DataFrame, held_out: int = 2) -> pd.DataFrame:
    """Return the first held-out interaction of each user of :func:`training_events`."""
    table = table.sort_values(["user_id", "timestamp"], kind="stable", ignore_index=True)
    first = table.groupby("user_id").cumcount(ascending=False) == held_out - 1
    return table[first & table["user_id"].isin(events["user_id"])]


def count_targets(table: pd.DataFrame, length: int) -> int:
    """Return the targets of an epoch of one sequence of up to ``length`` inputs a user."""
    return int((table.groupby("user_id").size().clip(upper=length + 1) - 1).sum())


def write_atomic(df: pd.DataFrame, folder: str | Path, name: str) -> Path:
    """Write ``folder/name/name.inter`` as RecBole reads it; return the file."""
    file = Path(folder) / name / f"{name}.inter"
    file.parent.mkdir(parents=True, exist_ok=True)
    types = {"user_id": "token", "item_id": "token", "timestamp": "float"}
    header = [f"{column}:{types[column]}" for column in COLUMNS]
    df[COLUMNS].to_csv(file, sep="\t", index=False, header=header)
    return file
