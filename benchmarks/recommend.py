"""Recommendations for all users: `Recommender` against RecBole's `full_sort_topk`, one by one.

    python benchmarks/recommend.py [--histories 20000]

Generated data of 5,000 users with 60 interactions over 10,000 items; FPARec as its defaults are
(d = 64), L = 50, trained for one epoch, two threads. Sides take turns: all histories by the one,
some hundred users by the other. Then a million items in a process of its own, for its memory.
Writes results/recommend.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
from data import make_log, write_atomic  # noqa: E402
from page import (  # noqa: E402
    RESULTS,
    in_turns,
    machine,
    replace_section,
    run_alone,
    table,
    time_call,
)
from recbole.utils.case_study import full_sort_topk  # noqa: E402
from serve import make_run  # noqa: E402

import recbole_pos  # noqa: E402

ITEMS, USERS, EVENTS, LENGTH, K = 10_000, 5_000, 60, 50, 20
MILLION, SOME = 1_000_000, 4_096
ONE_BY_ONE = 200  # users of a turn of RecBole's


def draw_histories(rng: np.random.Generator, rows: int, names: np.ndarray) -> list[list[str]]:
    """Return random histories of full length."""
    return rng.choice(names, (rows, LENGTH)).tolist()


def train(folder: Path) -> Path:
    """Train a model, and return the folder of its run."""
    chosen = np.random.default_rng(0).integers(0, ITEMS, USERS * EVENTS)
    write_atomic(make_log(np.full(USERS, EVENTS), chosen), folder, "people")
    options = {"data_path": str(folder), "epochs": 1, "MAX_ITEM_LIST_LENGTH": LENGTH}
    options |= {"train_windows": "last", "show_progress": False}
    recbole_pos.run("FPARec", "people", None, options, run_dir=folder / "run", verbose=False)
    return folder / "run"


def compare(run_dir: Path, rows: int, rounds: int) -> str:
    """Return a table of the users a second of each side, and the ratio."""
    recommender = recbole_pos.Recommender.load(run_dir)
    histories = draw_histories(np.random.default_rng(1), rows, recommender.items)
    columns = pa.table({"id": np.arange(rows).astype(str), "items": histories})
    experiment = recbole_pos.load(run_dir)
    test, model = experiment.loaders["test"], experiment.model.eval()
    names = [str(user) for user in range(1, ONE_BY_ONE + 1)]
    users = experiment.dataset.token2id("user_id", names)

    def one_by_one() -> None:
        for user in users:
            full_sort_topk(np.array([user]), model, test, K)

    def recommend(asked: Any = None) -> None:
        recommender.recommend(histories=asked, k=K, exclude_seen=True)

    sides: dict[str, tuple[int, Callable[[], Any]]] = {
        "`full_sort_topk`, user by user": (ONE_BY_ONE, one_by_one),
        "`recommend(histories=)`, columns": (rows, lambda: recommend(columns)),
        "`recommend(histories=)`, lists": (rows, lambda: recommend(histories)),
        "`recommend()`, all users of the data": (USERS, recommend),
    }
    runs = in_turns(sides, rounds + 1, lambda name: sides[name][0] / time_call(sides[name][1]))
    rates = {name: of_side[1:] for name, of_side in runs.items()}  # the first warms up
    baseline = np.median(next(iter(rates.values())))
    lines = []
    for name, of_side in rates.items():
        figures = (f"{summary(of_side):,.0f}" for summary in (np.median, min, max))
        lines.append([name, *figures, f"{np.median(of_side) / baseline:.1f}"])
    heads = ("side", "users a second: median", "least", "most", "times `full_sort_topk`")
    return table(heads, lines)


def measure_memory() -> tuple[float, int, int]:
    """Return users a second over a million items, and MB before and at the peak of it."""
    with tempfile.TemporaryDirectory() as folder:
        recommender = recbole_pos.Recommender.load(make_run(Path(folder), MILLION))
        histories = draw_histories(np.random.default_rng(1), SOME, recommender.items)
        recommender.recommend(histories=histories[:8], k=K)
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        before = _read_status("VmRSS")
        seconds = time_call(
            lambda: recommender.recommend(histories=histories, k=K, exclude_seen=True)
        )
        return SOME / seconds, before, _read_status("VmHWM")


def _read_status(name: str) -> int:
    """Return a figure of this process in MB; its peak where the system has no such figure."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        speeds = compare(train(Path(folder)), given.histories, given.rounds)
    rate, before, peak = run_alone(measure_memory)
    parts = (
        speeds,
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
