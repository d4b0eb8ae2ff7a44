"""Writes a log whose histories are in random order: how much is order worth there at all?

    python studies/positions/shuffle.py ml-100k FOLDER         # FOLDER/ml-100k-shuffled
    python studies/positions/shuffle.py toyshop FOLDER --data_path dataset

Of each user the last two interactions, which leave-one-out holds out, stay; the items of those
before them change places. So targets, users, popularity and times are the same, and order has no
information. With ``--times`` (FOLDER/ml-100k-times) items stay in order, and each user has the
times of another one: of the next longer history, its newest. Then times have no information.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import read_dataset

HELD_OUT = 2
SEED = 2024


def main() -> None:
    """Read the log as a run does, shuffle, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data_path", default="dataset/")
    parser.add_argument("--times", action="store_true", help="exchange times instead")
    given = parser.parse_args()
    dataset = read_dataset(PosConfig("Pop", given.dataset, None, {"data_path": given.data_path}))
    log = dataset.log  # sorted by user and time; events of one second stay as in the file
    users, items, times = log.users.numpy(), log.items.numpy(), log.times.numpy()
    if given.times:
        times = exchange_times(users, times)
    else:
        items = shuffle_items(users, items)

    columns = {
        "user_id:token": dataset.field2id_token["user_id"][users],
        "item_id:token": dataset.field2id_token["item_id"][items],
        "timestamp:float": times,
    }
    name = f"{given.dataset}-{'times' if given.times else 'shuffled'}"
    file = given.folder / name / f"{name}.inter"
    file.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(columns).to_csv(file, sep="\t", index=False)
    print(file)


def shuffle_items(users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Return [interactions] items of which those of each user, but for the newest, change places.

    Args:
        users: [interactions] users, in order.
        items: [interactions] items, each user's from the oldest to the newest.
    """
    newer = pd.Series(users).groupby(users).cumcount(ascending=False)  # interactions of the user
    free = np.flatnonzero(newer >= HELD_OUT)
    key = np.random.default_rng(SEED).random(len(free))
    shuffled = items.copy()
    shuffled[free] = items[free][np.lexsort((key, users[free]))]  # random within each user
    return shuffled


def exchange_times(users: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return [interactions] the newest times of the next longer history; the longest keeps its.

    Args:
        users: [interactions] users, in order.
        times: [interactions] times, each user's from the oldest to the newest.
    """
    begins = np.flatnonzero(np.diff(users, prepend=-1))
    sizes = np.diff(begins, append=len(users))
    order, given = np.argsort(sizes, kind="stable"), times.copy()
    for user, other in zip(order[:-1], order[1:], strict=True):
        begin, end, size = begins[user], begins[other] + sizes[other], sizes[user]
        given[begin : begin + size] = times[end - size : end]
    return given


if __name__ == "__main__":
    main()
