"""Seconds of training until a model is as good as its peers': PosSASRec, RecTools and RePlay.

``make bench-quality``. The sides, data and settings of ``peers.py``; after every epoch each user's
next item is ranked among all, by the same code for all sides, outside the timed part. A side ends
after some epochs without improvement. The level is one that every comparable side reaches with
every seed. Writes ``results/quality_peers.md``.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import page
from data import next_events, training_events
from peer_workers.common import Job
from peers import CASES, OURS, PEERS, Case, Runs, Side, describe, make_job, run_worker, show_range

SHARE = 0.98  # of what the worst run ends with: the level that all of them reach
COMPARABLE = 0.8  # of the best side: one that ends lower sets no level
HEADS = (
    *("side", "s of training to the level: median (all)", "times ours", "epochs to it"),
    *("an epoch, s", "best NDCG@10: median (all)", "epochs to that"),
)


def best_scores(runs: Runs) -> list[float]:
    """Return the NDCG@10 of the best epoch of every run.

    Args:
        runs: of each run, ``points``: seconds of training so far and NDCG@10, after each epoch.
    """
    return [max(value for _, value in run["points"]) for run in runs]


def find_level(sides: dict[str, Runs]) -> tuple[float, list[str]]:
    """Return the NDCG@10 that all comparable sides reach with every seed, and their names.

    A side is comparable if its median run is not much worse than the best side's; ours always is.

    Args:
        sides: name of a side -> its runs, ours first.
    """
    ends = {title: statistics.median(best_scores(runs)) for title, runs in sides.items()}
    ours = next(iter(ends.values()))
    least = min(COMPARABLE * max(ends.values()), ours)
    comparable = [title for title in ends if ends[title] >= least]
    return SHARE * min(min(best_scores(sides[title])) for title in comparable), comparable


def reach(runs: Runs, level: float) -> tuple[list[float], list[int]]:
    """Return when every run first reaches a level of NDCG@10, which all of them must reach.

    Args:
        runs: of each run, ``points``: seconds of training so far and NDCG@10, after each epoch.
        level: the NDCG@10.

    Returns:
        Seconds of training, and number of epochs, of each run.
    """
    reached_seconds, reached_epochs = [], []
    for run in runs:
        scores = [score for _, score in run["points"]]
        index = next(index for index, score in enumerate(scores) if score >= level)
        reached_seconds.append(run["points"][index][0])
        reached_epochs.append(index + 1)
    return reached_seconds, reached_epochs


def show_all(values: list[float], form: str = "{:.1f}") -> str:
    """Return the median, and the range of all."""
    return f"{form.format(statistics.median(values))} {show_range(values, form)}"


def table(sides: dict[str, Runs]) -> str:
    """Return a table in markdown with a row for each side, and above it what the level is.

    Args:
        sides: name of a side -> its runs, ours first. Times are compared between runs with the same
            seed.
    """
    level, comparable = find_level(sides)
    own_seconds, _ = reach(next(iter(sides.values())), level)
    rows = []
    for title, runs in sides.items():
        reached = ["not reached", "", ""]
        if title in comparable:
            seconds, epochs = reach(runs, level)
            ratios = [peer / own for peer, own in zip(seconds, own_seconds, strict=True)]
            reached = [show_all(seconds), show_all(ratios), ", ".join(map(str, epochs))]

        # Seconds of an epoch, the best score, and the epoch that has it.
        epoch = statistics.median(run["points"][-1][0] / len(run["points"]) for run in runs)
        best = best_scores(runs)
        best_epochs = [reach([run], score)[1][0] for run, score in zip(runs, best, strict=True)]
        ends = show_all(best, "{:.4f}"), ", ".join(map(str, best_epochs))
        rows.append([title, *reached, f"{epoch:.2f}", *ends])

    words = (
        f"Level: NDCG@10 of {level:.4f}, {SHARE:.0%} of what the worst run ends with, among sides "
        f"that end at {COMPARABLE:.0%} of the best or above."
    )
    return f"{words}\n\n{page.table(HEADS, rows)}"


def run_case(case: Case, args: Any) -> tuple[Job, dict[Side, Runs]]:
    """Run all sides on a dataset, one seed after the other; sides take turns.

    Args:
        case: the dataset and the length of windows.
        args: options of the command line.

    Returns:
        The job of the first seed, and each side with its runs, one for each seed.
    """
    with tempfile.TemporaryDirectory() as folder:
        held_out = str(Path(folder) / "next.csv")
        job = replace(make_job(case, args, Path(folder)), held_out=held_out)
        events = training_events(case.table(), case.length)
        next_events(case.table(), events).to_csv(held_out, index=False)

        sides: dict[Side, Runs] = {side: [] for side in (OURS, *(PEERS[x] for x in args.peers))}
        for seed in range(args.seeds):
            seeded = replace(job, seed=job.seed + seed)
            measure = partial(run_worker, job=seeded, folder=Path(folder))
            for side, runs in page.in_turns(sides, 1, measure).items():
                sides[side] += runs
                print(f"{case.title}, {side.title}: {best_scores(runs)}", flush=True)
    return job, sides


def main() -> None:
    """Measure every case, with peers that have our loss, and write the page."""
    peers = ["rectools-flat", "replay-bucket-8"]
    options = {"seeds": 3, "patience": 20, "max_seconds": 600.0, "threads": 1}
    args = page.parse_options(__doc__, cases=["ml-100k-50"], peers=peers, **options)
    parts = []
    for case in (CASES[name] for name in args.cases):
        job, sides = run_case(case, args)
        named = {side.title: runs for side, runs in sides.items()}
        parts.append(f"## {case.title}\n\n{table(named)}")
    ends = (
        f"{args.seeds} seeds; a side ends after a patience of {args.patience} epochs or "
        f"{args.max_seconds:g} s."
    )
    text = "\n\n".join((*parts, ends, describe(job, sides.items(), "GELU (RePlay: ReLU)")))
    page.replace_section(page.RESULTS / "quality_peers.md", "quality", text)


if __name__ == "__main__":
    main()
