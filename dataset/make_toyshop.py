"""Writes the sample dataset ``toyshop``: 200 users, 120 items, 4,000 events, in atomic files.

    python dataset/make_toyshop.py            # into toyshop/ beside this file
    python dataset/make_toyshop.py FOLDER     # somewhere else

The same bytes every time: the seed is fixed and ``RandomState`` keeps its stream across versions of
numpy. Nothing here describes a real shop.

What there is to learn: every item has three companions that tend to follow it, at once or one event
later, and every category tends to be followed by the next one. Popularity alone explains little.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

NAME = "toyshop"
SEED = 2024
USERS, ITEMS, EVENTS = 200, 120, 4000
SHORT_LENGTHS = [1] * 4 + [2] * 4 + [3] * 4  # users with nothing, nothing, only a test target
LONGEST = 60
FIRST_SECOND, SECONDS = 1_704_067_200, 300 * 86_400  # 2024-01-01 00:00:00 UTC, 300 days

CATEGORIES = ["Blocks", "Vehicles", "Puzzles", "Games", "Crafts", "Books", "Outdoor", "Plush"]
PARENTS = ["Building", "Building", "Thinking", "Thinking", "Making", "Making", "Playing", "Playing"]
ADJECTIVES = ["Little", "Wooden", "Giant", "Magic", "Rainbow", "Flying", "Classic", "Junior"]
NOUNS = {
    "Blocks": ["Castle", "Bridge", "Tower", "Marble Run", "Farm"],
    "Vehicles": ["Train", "Fire Truck", "Racer", "Crane", "Tractor"],
    "Puzzles": ["Jigsaw", "Maze", "Cube", "Tangram", "Map"],
    "Games": ["Domino", "Memory", "Chess", "Card Set", "Dice Box"],
    "Crafts": ["Paint Box", "Beads", "Clay", "Loom", "Stamps"],
    "Books": ["Atlas", "Tales", "Alphabet", "Riddles", "Songs"],
    "Outdoor": ["Kite", "Ball", "Sand Set", "Hoop", "Scooter"],
    "Plush": ["Bear", "Rabbit", "Whale", "Dragon", "Owl"],
}
BRANDS = ["Alba", "Brix", "Corvo", "Dalia", "Ember", "Fjord", "Gecko", "Hazel", "Iris", "Juno"]
COUNTRIES = ["DE", "FR", "NL", "PL", "PT", "SE"]


def make_items(rng: np.random.RandomState) -> tuple[pd.DataFrame, np.ndarray]:
    """The item table in the order of its ids, and [items] the category of each."""
    category = rng.permutation(np.arange(ITEMS) % len(CATEGORIES))
    center = rng.normal(size=(len(CATEGORIES), 4))
    rows = []
    for item, c in enumerate(category):
        noun = NOUNS[CATEGORIES[c]][rng.randint(5)]
        price = f"{4 + rng.randint(60) + 0.49 + 0.5 * rng.randint(2):.2f}"
        vector = center[c] + 0.4 * rng.normal(size=4)
        rows.append(
            {
                "item_id:token": f"i{item + 1:03d}",
                "title:token_seq": f"{ADJECTIVES[rng.randint(8)]} {noun}",
                "category:token_seq": f"{PARENTS[c]} {CATEGORIES[c]}",
                "price:float": "" if rng.random_sample() < 0.12 else price,
                "brand:token": BRANDS[(c + rng.randint(4)) % len(BRANDS)],
                "embedding:float_seq": " ".join(f"{value:.3f}" for value in vector),
            }
        )
    return pd.DataFrame(rows), category


def make_users(rng: np.random.RandomState) -> pd.DataFrame:
    """The user table in the order of its ids."""
    return pd.DataFrame(
        {
            "user_id:token": [f"u{user + 1:03d}" for user in range(USERS)],
            "age:float": rng.randint(18, 76, size=USERS),
            "country:token": [COUNTRIES[i] for i in rng.randint(len(COUNTRIES), size=USERS)],
        }
    )


def make_lengths(rng: np.random.RandomState) -> np.ndarray:
    """[users] number of events: the short ones, one of ``LONGEST``, the rest between, skewed."""
    rest = USERS - len(SHORT_LENGTHS) - 1
    drawn = 4 + (56 * rng.random_sample(rest) ** 2.4).astype(int)
    lengths = np.concatenate([SHORT_LENGTHS, [LONGEST], drawn])
    while lengths.sum() != EVENTS:  # even out, one event at a time
        step = 1 if lengths.sum() < EVENTS else -1
        user = len(SHORT_LENGTHS) + 1 + rng.randint(rest)
        if 4 <= lengths[user] + step <= LONGEST:
            lengths[user] += step
    return rng.permutation(lengths)


def make_sequence(
    rng: np.random.RandomState, length: int, category: np.ndarray, companions: np.ndarray
) -> list[int]:
    """One user's items in time order; ``companions`` is [items, 3]."""
    popularity = 1 / (10 + np.arange(ITEMS))
    popularity /= popularity.sum()
    items = [rng.choice(ITEMS, p=popularity)]
    while len(items) < length:
        draw = rng.random_sample()
        if draw < 0.45:
            items.append(companions[items[-1], rng.choice(3, p=[0.6, 0.25, 0.15])])
        elif draw < 0.65:  # a companion of the item before the last
            items.append(companions[items[-2:][0], rng.choice(3, p=[0.6, 0.25, 0.15])])
        elif draw < 0.85:
            follows = category == (category[items[-1]] + 1) % len(CATEGORIES)
            items.append(rng.choice(ITEMS, p=popularity * follows / popularity[follows].sum()))
        else:
            items.append(rng.choice(ITEMS, p=popularity))
    return items


def make_times(rng: np.random.RandomState, length: int) -> np.ndarray:
    """[length] whole seconds since 1970, never falling: sittings of a few events, some ties."""
    gaps = rng.randint(15, 900, size=length)
    new_sitting = rng.random_sample(length) < 0.25
    gaps[new_sitting] += rng.randint(3_600, 6 * 86_400, size=new_sitting.sum())
    gaps[rng.random_sample(length) < 0.04] = 0  # put into the basket together
    return FIRST_SECOND + rng.randint(SECONDS // 2) + np.cumsum(gaps)


def make_events(rng: np.random.RandomState, category: np.ndarray) -> pd.DataFrame:
    """The event table as a shop would log it: by time, events of one second in their order."""
    companions = np.stack([rng.permutation(ITEMS) for _ in range(3)], axis=1)
    tables = []
    for user, length in enumerate(make_lengths(rng)):
        taste = rng.randint(3, 5)
        tables.append(
            pd.DataFrame(
                {
                    "user_id:token": f"u{user + 1:03d}",
                    "item_id:token": [
                        f"i{item + 1:03d}"
                        for item in make_sequence(rng, length, category, companions)
                    ],
                    "timestamp:float": make_times(rng, length),
                    "rating:float": np.clip(taste + rng.randint(-2, 3, size=length), 1, 5),
                }
            )
        )
    return pd.concat(tables).sort_values("timestamp:float", kind="stable")


def write(folder: Path) -> None:
    """Write ``toyshop.inter``, ``toyshop.user`` and ``toyshop.item`` into a folder."""
    rng = np.random.RandomState(SEED)
    items, category = make_items(rng)
    tables = {"item": items, "user": make_users(rng), "inter": make_events(rng, category)}
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, table in tables.items():
        table.to_csv(folder / f"{NAME}.{suffix}", sep="\t", index=False, lineterminator="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the sample dataset toyshop.")
    beside = Path(__file__).resolve().parent / NAME
    parser.add_argument("folder", nargs="?", type=Path, default=beside, help="default: %(default)s")
    write(parser.parse_args().folder)
