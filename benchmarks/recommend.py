"""Recommendations for all users: `Recommender` against RecBole's `full_sort_topk`, one by one.

    python benchmarks/recommend.py [--histories 20000]

A generated log of 5,000 users with 60 events over 10,000 items; FPARec as its defaults are
(d = 64), L = 50, trained for one epoch, two threads. Sides take turns: all histories by the one,
some hundred users by the other. Then a million items in a process of its own, for its memory.
Writes results/recommend.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
from data import make_log, write_atomic  # noqa: E402
from page import RESULTS, in_a_process, in_turns, machine, replace_section, table  # noqa: E402
from recbole.utils.case_study import full_sort_topk  # noqa: E402
from serve import make_run  # noqa: E402

import recbole_pos  # noqa: E402

ITEMS, USERS, EVENTS, LENGTH, K = 10_000, 5_000, 60, 50, 20
MILLION, SOME = 1_000_000, 4_096
ONE_BY_ONE = 200  # users of a turn of RecBole's


def histories(rng: np.random.Generator, rows: int, names: np.ndarray) -> list[list[str]]:
    """Of full length."""
    return rng.choice(names, (rows, LENGTH)).tolist()


def trained(folder: Path) -> Path:
    """The folder of a run."""
    chosen = np.random.default_rng(0).integers(0, ITEMS, USERS * EVENTS)
    write_atomic(make_log(np.full(USERS, EVENTS), chosen), folder, "people")
    options = {"data_path": str(folder), "epochs": 1, "MAX_ITEM_LIST_LENGTH": LENGTH}
    options |= {"train_windows": "last", "show_progress": False}
    recbole_pos.run("FPARec", "people", None, options, run_dir=folder / "run", verbose=False)
    return folder / "run"


def seconds(work: Callable[[], Any]) -> float:
    """Return the wall time of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def table_of(run_dir: Path, rows: int, rounds: int) -> str:
    """Users a second of each side, and the ratio."""
    rng = np.random.default_rng(1)
    recommender = recbole_pos.Recommender.load(run_dir)
    asked = histories(rng, rows, recommender.items)
    columns = pa.table({"id": np.arange(rows).astype(str), "items": asked})
    made = recbole_pos.load(run_dir)
    test, model = made.loaders["test"], made.model.eval()
    users = made.dataset.token2id("user_id", [str(user) for user in range(1, ONE_BY_ONE + 1)])

    def one_by_one() -> None:
        for user in users:
            full_sort_topk(np.array([user]), model, test, K)

    sides: dict[str, tuple[int, Callable[[], Any]]] = {
        "`full_sort_topk`, user by user": (ONE_BY_ONE, one_by_one),
        "`recommend(histories=)`, columns": (
            rows,
            lambda: recommender.recommend(histories=columns, k=K, exclude_seen=True),
        ),
        "`recommend(histories=)`, lists": (
            rows,
            lambda: recommender.recommend(histories=asked, k=K, exclude_seen=True),
        ),
        "`recommend()`, all users of the data": (
            USERS,
            lambda: recommender.recommend(k=K, exclude_seen=True),
        ),
    }
    runs = in_turns(sides, rounds + 1, lambda name: sides[name][0] / seconds(sides[name][1]))
    took = {name: rates[1:] for name, rates in runs.items()}  # the first warms up
    first = np.median(next(iter(took.values())))
    lines = []
    for name, rates in took.items():
        figures = (f"{of(rates):,.0f}" for of in (np.median, min, max))
        lines.append([name, *figures, f"{np.median(rates) / first:.1f}"])
    heads = ("side", "users a second: median", "least", "most", "times `full_sort_topk`")
    return table(heads, lines)


def memory() -> None:
    """In a process of its own: what recommending from a million items takes beyond the model."""
    with tempfile.TemporaryDirectory() as folder:
        recommender = recbole_pos.Recommender.load(make_run(Path(folder), MILLION))
        asked = histories(np.random.default_rng(1), SOME, recommender.items)
        recommender.recommend(histories=asked[:8], k=K)
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        before = _resident("VmRSS")
        took = seconds(lambda: recommender.recommend(histories=asked, k=K, exclude_seen=True))
        print(json.dumps([SOME / took, before, _resident("VmHWM")]))


def _resident(which: str) -> int:
    """Megabytes; of the whole life of the process where the system measures no more."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.argv = sys.argv[:1]  # RecBole's own configuration reads it
    if given.memory:
        memory()
        return
    with tempfile.TemporaryDirectory() as folder:
        found = table_of(trained(Path(folder)), given.histories, given.rounds)
    rate, before, peak = in_a_process("recommend.py", "--memory")
    parts = (
        found,
        f"{given.histories:,} histories of {LENGTH} items, {ITEMS:,} items, the {K} best of which "
        f"the history has none, names in and out; {given.rounds} rounds, sides in turns; "
        f"{machine()}, load of the machine {os.getloadavg()[0]:.1f}.",
        f"**A million items**, {SOME:,} histories: {rate:,.0f} users a second; the process has "
        f"{before:,} MB before and {peak:,} MB at its peak. Scores of all histories and items "
        f"would be {SOME * MILLION * 4 / 1e6:,.0f} MB.",
    )
    replace_section(RESULTS / "recommend.md", "speed", "\n\n".join(parts))


if __name__ == "__main__":
    main()
