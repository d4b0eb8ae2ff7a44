"""Datasets of the benchmarks: ml-100k, generated histories and logs, and their files.

Most functions return a frame of interactions, with user, item and time (``COLUMNS``).
"""

from pathlib import Path

import numpy as np
import pandas as pd

COLUMNS = ["user_id", "item_id", "timestamp"]
HELD_OUT = 2  # of each user: the newest interactions, one for validation and one for the test
GENERATED = "generated"  # dataset of :func:`write_log`


def ml_100k() -> pd.DataFrame:
    """Return the interactions of MovieLens 100k, a file that RecBole's wheel contains."""
    import recbole

    file = Path(recbole.__file__).parent / "dataset_example" / "ml-100k" / "ml-100k.inter"
    table = pd.read_csv(file, sep="\t").rename(columns=lambda name: name.split(":")[0])
    return table[COLUMNS]


def make_log(
    lengths: np.ndarray, items: np.ndarray, order: np.ndarray | None = None
) -> pd.DataFrame:
    """Return interactions of users 1, 2, ... as a frame.

    With lengths = [2, 1] and items = [7, 8, 9], user 1 has items 7 and 8, and user 2 has item 9.

    Args:
        lengths: [users] number of interactions of each user.
        items: [sum of lengths] items, user by user.
        order: [sum of lengths] minute of each interaction, from 0; by default they come in order.
    """
    order = np.arange(len(items)) if order is None else order
    return pd.DataFrame(
        {
            "user_id": np.repeat(np.arange(1, len(lengths) + 1), lengths),
            "item_id": items,
            "timestamp": 1_600_000_000 + 60 * order,
        }
    )


def sample_items(rng: np.random.Generator, items: int, count: int, exponent: float) -> np.ndarray:
    """Return random items from 0 on, of which the first are the most popular (Zipf's law).

    Args:
        rng: source of randomness.
        items: number of items to choose from.
        count: number of choices.
        exponent: item n is chosen with a probability proportional to (n + 1) ** -exponent.

    Returns:
        [count] int64 items, each below ``items``.
    """
    popularity = np.arange(1, items + 1, dtype=float) ** -exponent
    return rng.choice(items, count, p=popularity / popularity.sum())


def short_histories() -> pd.DataFrame:
    """Return 3 to 20 interactions of 20,000 users with 12,000 items.

    Most real data look like this: far shorter than the window, with more items than ml-100k. Work
    spent on padding shows here.
    """
    rng, items = np.random.default_rng(0), 12_000
    lengths = rng.integers(3, 21, 20_000)
    ids = rng.permutation(items) + 1  # the popularity of an item must not follow from its id
    chosen = ids[sample_items(rng, items, lengths.sum(), 1.0)]
    return make_log(lengths, chosen, rng.permutation(len(chosen)))


def long_histories() -> pd.DataFrame:
    """Return 1,000 users with as long histories as in ml-20m: 20 or more, 144 on average."""
    rng = np.random.default_rng(0)
    lengths = (20 + rng.lognormal(4.1, 1.1, 1_000)).astype(int).clip(max=3_000)
    chosen = 1 + sample_items(rng, 6_000, lengths.sum(), 0.8)
    return make_log(lengths, chosen, rng.permutation(len(chosen)))


def training_events(table: pd.DataFrame, length: int) -> pd.DataFrame:
    """Return the interactions that all libraries train on: those before the held-out ones.

    Of each user with two or more of them, the last ``length`` + 1 are kept. The cut is made here,
    not in a library, since the remaining interactions also decide which items there are. Times
    become ranks: with equal times, each library would choose an order of its own.

    Args:
        table: all interactions.
        length: inputs of the longest sequence; each is followed by one more as its target.
    """
    table = table.sort_values(["user_id", "timestamp"], kind="stable", ignore_index=True)
    from_end = table.groupby("user_id").cumcount(ascending=False)
    table = table[from_end.between(HELD_OUT, HELD_OUT + length)]
    table = table[table.groupby("user_id")["item_id"].transform("size") >= 2]
    table = table.reset_index(drop=True)
    return table.assign(timestamp=table.groupby("user_id").cumcount())


def count_targets(table: pd.DataFrame, length: int) -> int:
    """Return how many items are predicted in an epoch with one sequence of each user.

    Args:
        table: interactions to train on.
        length: most inputs of a sequence; each input has the item after it as its target.
    """
    return int((table.groupby("user_id").size().clip(upper=length + 1) - 1).sum())


def write_atomic(df: pd.DataFrame, folder: str | Path, name: str) -> Path:
    """Write interactions as a RecBole dataset, and return the file ``folder/name/name.inter``.

    Args:
        df: the interactions; columns besides user, item and time are left out.
        folder: folder in which the dataset gets its folder.
        name: name of the dataset.
    """
    file = Path(folder) / name / f"{name}.inter"
    file.parent.mkdir(parents=True, exist_ok=True)
    types = {"user_id": "token", "item_id": "token", "timestamp": "float"}
    header = [f"{column}:{types[column]}" for column in COLUMNS]
    df[COLUMNS].to_csv(file, sep="\t", index=False, header=header)
    return file


def write_log(folder: Path, events: int, each: int = 143, items: int | None = None) -> Path:
    """Write a generated RecBole dataset of any size, a million interactions at a time.

    Interactions are in the order of time. Few users and items have many of them.

    Args:
        folder: folder in which the dataset gets its folder.
        events: number of interactions.
        each: mean number of interactions of a user.
        items: most items there can be; by default one for 100 interactions, up to 27,000.

    Returns:
        The file of interactions.
    """
    rng, now, batch = np.random.default_rng(0), 1_000_000_000, 1_000_000
    users, items = max(events // each, 2), items or min(max(events // 100, 2), 27_000)
    path = folder / GENERATED / f"{GENERATED}.inter"
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        file.write("user_id:token\titem_id:token\ttimestamp:float\n")
        for start in range(0, events, batch):
            n = min(batch, events - start)
            user = (users * rng.random(n) ** 1.5).astype(np.int64).tolist()
            item = (items * rng.random(n) ** 2).astype(np.int64).tolist()
            times = now + np.sort(rng.integers(0, max(n // 3, 1), n))
            now = int(times[-1])
            lines = zip(user, item, times.tolist(), strict=True)
            file.write("".join(f"u{u}\ti{i}\t{t}\n" for u, i, t in lines))
    return path
