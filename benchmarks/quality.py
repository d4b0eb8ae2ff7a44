"""Seconds of training until a model is as good as its peers': PosSASRec, RecTools and RePlay.

``make bench-quality``. The sides, data and settings of ``peers.py``; after every epoch each user's
next item is ranked among all, by the same code for all sides, outside the timed part. A side ends
after some epochs without improvement. The level is one that every comparable side reaches with
every seed. Writes ``results/quality_peers.md``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import page
from data import next_events, training_events
from peer_workers.common import Job
from peers import (
    CASES,
    OURS,
    PEERS,
    Case,
    Runs,
    Side,
    conditions,
    find_pythons,
    make_job,
    make_parser,
    run_worker,
)

SHARE = 0.98  # of what the worst run ends with: the level that all of them reach
COMPARABLE = 0.8  # of the best side: one that ends lower sets no level


def best_scores(runs: Runs) -> list[float]:
    """Return the NDCG@10 of the best epoch of every run."""
    return [max(value for _, value in run["points"]) for run in runs]


def find_level(sides: dict[str, Runs]) -> tuple[float, list[str]]:
    """Return the NDCG@10 that all runs of comparable sides reach, and these sides; ours is one."""
    ends = {title: statistics.median(best_scores(runs)) for title, runs in sides.items()}
    least = min(COMPARABLE * max(ends.values()), next(iter(ends.values())))
    comparable = [title for title in ends if ends[title] >= least]
    return SHARE * min(min(best_scores(sides[title])) for title in comparable), comparable


def reach(runs: Runs, level: float) -> tuple[list[float], list[int]]:
    """Return seconds and epochs of every run until its NDCG@10 first has a level."""
    seconds, epochs = [], []
    for run in runs:
        values = [value for _, value in run["points"]]
        epochs.append(next(n for n, value in enumerate(values, 1) if value >= level))
        seconds.append(run["points"][epochs[-1] - 1][0])
    return seconds, epochs


def show_range(values: list[float], form: str = "{:.1f}") -> str:
    """Return the median, and the range of all."""
    middle, low, high = map(form.format, (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def table(sides: dict[str, Runs]) -> str:
    """Return a row for each side, ours first; ratios are of runs with the same seed."""
    level, comparable = find_level(sides)
    own_seconds, rows = reach(next(iter(sides.values())), level)[0], []
    for title, runs in sides.items():
        reached = ["not reached", "", ""]
        if title in comparable:
            seconds, epochs = reach(runs, level)
            ratios = [peer / own for peer, own in zip(seconds, own_seconds, strict=True)]
            reached = [show_range(seconds), show_range(ratios), ", ".join(map(str, epochs))]
        epoch = statistics.median(run["points"][-1][0] / len(run["points"]) for run in runs)
        curves = [[value for _, value in run["points"]] for run in runs]
        best_epochs = [1 + curve.index(max(curve)) for curve in curves]
        rows.append(
            [
                *(title, *reached, f"{epoch:.2f}"),
                *(show_range(best_scores(runs), "{:.4f}"), ", ".join(map(str, best_epochs))),
            ]
        )
    heads = ("side", "s of training to the level: median (all)", "times ours", "epochs to it")
    heads += ("an epoch, s", "best NDCG@10: median (all)", "epochs to that")
    words = (
        f"Level: NDCG@10 of {level:.4f}, {SHARE:.0%} of what the worst run ends with, among sides "
        f"that end at {COMPARABLE:.0%} of the best or above."
    )
    return f"{words}\n\n{page.table(heads, rows)}"


def run_case(case: Case, given: Any, pythons: dict[str, Path]) -> tuple[Job, dict[Side, Runs]]:
    """Return all runs of all sides in turns, a seed after the other."""
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(case, given, Path(folder), held_out=str(Path(folder) / "next.csv"))
        events = training_events(case.table(), case.length)
        next_events(case.table(), events).to_csv(job.held_out, index=False)
        sides: dict[Side, Runs] = {side: [] for side in (OURS, *(PEERS[x] for x in given.peers))}
        for seed in range(given.seeds):
            seeded = replace(job, seed=job.seed + seed)
            measure = partial(run_worker, job=seeded, folder=Path(folder), pythons=pythons)
            for side, runs in page.in_turns(sides, 1, measure).items():
                sides[side] += runs
                at, value = max(runs[0]["points"], key=lambda point: point[1])
                print(f"{case.title}, {side.title}: {value:.4f} after {at:.1f} s", flush=True)
    return job, sides


def main() -> None:
    """Measure every case, and write the page."""
    parser = make_parser(__doc__, ["ml-100k-50"], ["rectools-flat", "replay-bucket-8"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--patience", type=int, default=20, help="epochs without improvement")
    parser.add_argument("--max-seconds", type=float, default=600.0, help="of training, a run")
    given, load, parts = parser.parse_args(), os.getloadavg()[0], []
    if any("loss" in dict(PEERS[name].settings) for name in given.peers):
        parser.error("--peers: only those with our loss, cross-entropy over all items")
    pythons = find_pythons(given)
    for case in (CASES[name] for name in given.cases):
        job, sides = run_case(case, given, pythons)
        named = {side.title: runs for side, runs in sides.items()}
        parts.append(f"## {case.title}\n\n{table(named)}")
    ends = (
        f"{given.seeds} seeds; a side ends after a patience of {given.patience} epochs or "
        f"{given.max_seconds:g} s."
    )
    first = {side: runs[0] for side, runs in sides.items()}
    text = "\n\n".join((*parts, ends, conditions(job, load, first, "GELU (RePlay: ReLU)")))
    page.replace_section(page.RESULTS / "quality_peers.md", "quality", text)


if __name__ == "__main__":
    main()
