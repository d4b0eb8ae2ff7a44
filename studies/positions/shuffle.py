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
    parser.add_argument("--data_path")
    parser.add_argument("--times", action="store_true", help="exchange times instead")
    given = parser.parse_args()
    options = {} if given.data_path is None else {"data_path": given.data_path}
    dataset = read_dataset(PosConfig("Pop", given.dataset, None, options))
    log = dataset.log  # sorted by user and time; events of one second stay as in the file
    columns = {"user_id": log.users, "item_id": log.items, "timestamp": log.times}
    frame = pd.DataFrame({field: column.numpy() for field, column in columns.items()})
    items = frame["item_id"].to_numpy(copy=True)
    if given.times:
        frame["timestamp"] = _exchange_times(frame)
    else:
        newer = frame.groupby("user_id").cumcount(ascending=False)
        free = np.flatnonzero(newer >= HELD_OUT)
        key = np.random.default_rng(SEED).random(len(free))
        within = np.lexsort((key, frame["user_id"].to_numpy()[free]))
        items[free] = items[free][within]
    for field, codes in (("user_id", frame["user_id"]), ("item_id", items)):
        frame[field] = dataset.field2id_token[field][codes]
    name = f"{given.dataset}-{'times' if given.times else 'shuffled'}"
    file = given.folder / name / f"{name}.inter"
    file.parent.mkdir(parents=True, exist_ok=True)
    types = {"user_id": "token", "item_id": "token", "timestamp": "float"}
    frame = frame.rename(columns={field: f"{field}:{kind}" for field, kind in types.items()})
    frame.to_csv(file, sep="\t", index=False)
    print(file)


def _exchange_times(frame: pd.DataFrame) -> np.ndarray:
    """Return [interactions] the newest times of the next longer history; the longest keeps its."""
    users, times = frame["user_id"].to_numpy(), frame["timestamp"].to_numpy()
    begins = np.flatnonzero(np.diff(users, prepend=-1))
    sizes = np.diff(begins, append=len(users))
    order, given = np.argsort(sizes, kind="stable"), times.copy()
    for user, other in zip(order[:-1], order[1:], strict=True):
        begin, end, size = begins[user], begins[other] + sizes[other], sizes[user]
        given[begin : begin + size] = times[end - size : end]
    return given


if __name__ == "__main__":
    main()
