"""``make bench-positions``: the cost of position schemes, as epochs against PosSASRec's.

Sides take turns, every turn in a process of its own; each figure is the best epoch of its side.
Writes the tables of order and time (or the one named) into ``results/speed_positions.md``.
"""

import sys
import tempfile
from typing import Any

import numpy as np
from data import make_log, write_atomic
from page import RESULTS, in_turns, machine, mark, replace_section, run_alone, table
from training import SIZES, build, time_epochs

ROUNDS, EPOCHS = 3, 5
SCHEMES = "learned nope sinusoidal rope alibi t5 kerple cape kernel".split()
ORDER: dict[str, dict[str, Any]] = {name: {"position": [name], "n_heads": 1} for name in SCHEMES}
LEARNED = {"gate": "sigmoid", "learn_frequencies": "ladder", "learn_scales": True}
# two heads, since a split needs them
TIME: dict[str, dict[str, Any]] = {
    "learned, 2 heads": {"position": ["learned"]},
    "time_rope": {"position": ["time_rope"]},
    **{
        f"to_rope, {fusion}": {"position": ["to_rope"], "fusion": fusion}
        for fusion in ("early", "split_dim", "split_head")
    },
    "to_rope, early, all learned": {"position": ["to_rope"], "fusion": "early", **LEARNED},
    "hstu": {"position": ["hstu"]},
    "learned + time_learned": {"position": ["learned", "time_learned"]},
}
TIME = {name: {**options, "n_heads": 2} for name, options in TIME.items()}
# which rows, of which lengths; ratios are to the first row
GROUPS = {"order": (ORDER, (200, 1000)), "time": (TIME, (200,))}
DATA = {200: "ml-100k, L=200", 1000: "generated, L=1000"}
GOALS = {
    ("kernel", 200): 1.25,
    ("kernel", 1000): 1.35,
    **{("rope", length): 1.15 for length in (200, 1000)},
    **{(name, 200): 1.2 for name in TIME if name.startswith("to_rope")},
}


def time_scheme(scheme: str, length: int) -> list[float]:
    """Return the seconds of epochs of PosSASRec with one position scheme, in this process.

    Args:
        scheme: name of a row in ORDER or TIME.
        length: longest window; 200 on ml-100k, 1000 on generated histories of two windows.
    """
    options = {**SIZES, "attn_dropout_prob": 0.0, "MAX_ITEM_LIST_LENGTH": length}
    options |= {**ORDER, **TIME}[scheme]
    if length == 200:
        return time_epochs(build("PosSASRec", "ml-100k", train_batch_size=32, **options), EPOCHS)
    with tempfile.TemporaryDirectory() as folder:
        users, events = 24, 2002  # two windows of 1,000 inputs and the held-out interactions
        chosen = np.random.default_rng(0).integers(1, 2001, users * events)
        write_atomic(make_log(np.full(users, events), chosen), folder, "long")
        options |= {"train_batch_size": 16, "data_path": folder}
        return time_epochs(build("PosSASRec", "long", **options), EPOCHS)


def measure(group: str) -> str:
    """Return the table of a group: the best epoch of each scheme, and its ratio to the first one.

    Args:
        group: name in GROUPS.
    """
    schemes, lengths = GROUPS[group]
    sides = [(scheme, length) for length in lengths for scheme in schemes]
    runs = in_turns(sides, ROUNDS, lambda side: run_alone(time_scheme, *side))
    best = {side: min(map(min, of_side)) for side, of_side in runs.items()}
    heads = ["scheme", *(head for length in lengths for head in (DATA[length], "ratio", "goal"))]
    rows, first = [], next(iter(schemes))
    for name in schemes:
        cells = [name]
        for length in lengths:
            ratio, goal = best[name, length] / best[first, length], GOALS.get((name, length))
            met = "" if goal is None else f"<= {goal}: {mark(ratio <= goal)}"
            cells += [f"{best[name, length]:.2f} s", f"{ratio:.2f}", met]
        rows.append(cells)
    return f"{machine()}.\n\n{table(heads, rows)}"


if __name__ == "__main__":
    for group in sys.argv[1:] or GROUPS:
        replace_section(RESULTS / "speed_positions.md", group, measure(group))
