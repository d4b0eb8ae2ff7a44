"""Writes two logs that timestamps predict and order does not, ``weekly`` and ``bursts``.

    python studies/to_rope/make_rhythm.py FOLDER

Both are generated with a fixed seed, as ``FOLDER/weekly/weekly.inter`` and the same for ``bursts``;
``rhythm-weekly.yaml`` and ``rhythm-bursts.yaml`` compare models on them.

``weekly``: a user's week has 28 slots of six hours, each with an item of its own. The user shows up
in a slot with probability 0.7 and takes its item, so the next item is most likely what was taken
one week before the coming slot: 6 days and 18 hours ago, an unknown number of events back.

``bursts``: a session lasts four hours, each of 12 slots of five minutes. Every session draws an
item for each slot again; the user shows up with probability 0.7 and takes its item, so after the
first hour the next item is most likely what was taken one hour before the coming slot, in this
session: 55 minutes ago. Days to weeks pass between sessions.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

HOUR, DAY = 3600, 86400
START = 1_600_000_000
SLOTS, SHOWS_UP = 28, 0.7


def weekly(seed: int, users: int = 1000, items: int = 400, weeks: int = 4) -> pd.DataFrame:
    """Users with a habit per slot of the week; about 78 events each."""
    rng = np.random.default_rng(seed)
    habit = rng.integers(1, items + 1, (users, SLOTS))
    phase = rng.integers(0, SLOTS, users)  # weeks start at different slots, and lengths differ
    user, when = np.nonzero(rng.random((users, weeks * SLOTS)) < SHOWS_UP)
    time = START + when * 6 * HOUR + rng.integers(0, HOUR, len(when))
    item = habit[user, (when + phase[user]) % SLOTS]
    return pd.DataFrame({"user_id:token": user + 1, "item_id:token": item, "timestamp:float": time})


def bursts(seed: int, users: int = 1000, items: int = 400, sessions: int = 3) -> pd.DataFrame:
    """Users with sessions whose hours repeat; about 100 events each."""
    rng = np.random.default_rng(seed)
    slots, hours = 12, 4
    habit = rng.integers(1, items + 1, (users, sessions, slots))
    gaps = rng.uniform(1, 20, (users, sessions)) * DAY
    begin = START + np.cumsum(gaps, axis=1).astype(np.int64)
    shape = (users, sessions, hours * slots)
    user, session, when = np.nonzero(rng.random(shape) < SHOWS_UP)
    time = begin[user, session] + when * 300 + rng.integers(0, 50, len(when))
    item = habit[user, session, when % slots]
    return pd.DataFrame({"user_id:token": user + 1, "item_id:token": item, "timestamp:float": time})


def main() -> None:
    """Write both logs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the folders of the logs are made")
    given = parser.parse_args()
    for name, generate in (("weekly", weekly), ("bursts", bursts)):
        file = given.folder / name / f"{name}.inter"
        file.parent.mkdir(parents=True, exist_ok=True)
        generate(0).to_csv(file, sep="\t", index=False)
        print(file)


if __name__ == "__main__":
    main()
