"""Training speed against other libraries: real targets per second of PosSASRec and of its peers.

``make bench-peers``, which makes a virtual environment for each peer.
Every run is a process of its own; the sides alternate, so that a slow spell of the machine meets
all of them. Each side trains on the same interactions, and a worker (``peer_workers/``) stops if
its epoch does not hold exactly the targets, items to predict, that were counted here. Writes
``results/speed_peers.md``, with the peer of the least ratio for each dataset and loss, and all
peers into ``results/tables/``.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from data import count_targets, long_histories, ml_100k, short_histories, training_events
from page import RESULTS, in_turns, machine, replace_section, run_worker, table
from peer_workers.common import Job

Runs = list[dict[str, Any]]  # what a worker prints, of each run of a side


@dataclass(frozen=True)
class Case:
    """A dataset, with the length of windows.

    Attributes:
        title: what tables call it.
        table: makes its interactions.
        length: longest window of a history.
        goal: ratio of speeds that we want at least.
    """

    title: str
    table: Callable[[], pd.DataFrame]
    length: int
    goal: float


@dataclass(frozen=True)
class Side:
    """A library that trains.

    Attributes:
        title: what tables call it.
        module: module in ``peer_workers`` that runs it.
        venv: name of its virtual environment; empty for the one of this process.
        flags: arguments of the module.
        settings: changes of the job, which our side then has, too.
    """

    title: str
    module: str
    venv: str = ""
    flags: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


CASES = (
    Case("ml-100k, L=50", ml_100k, 50, 2.0),
    Case("ml-100k, L=200", ml_100k, 200, 2.0),
    Case("short histories, L=50", short_histories, 50, 3.0),
    Case("long histories, L=200", long_histories, 200, 2.0),
)
REPEATS = 3  # turns of each side
OURS = Side("PosSASRec", "ours_worker")
SAMPLED = (("negatives", 256),)
RELU = (("activation", "relu"),)  # what the side has
REPLAY, FLAT = ("replay_worker", "replay"), ("rectools_flat_worker", "rectools")
TRIMMED = "RePlay SasRec, trimmed"
PEERS = (
    Side("RecTools FlatSASRecNet", *FLAT),
    Side(TRIMMED, *REPLAY, settings=RELU),
    *(
        Side(f"{TRIMMED}, buckets of {size}", *REPLAY, ("--bucket", str(size)), settings=RELU)
        for size in (8, 32, 64)
    ),
    Side("RecTools FlatSASRecNet, 256 negatives", *FLAT, settings=SAMPLED),
    Side(f"{TRIMMED}, 256 negatives", *REPLAY, settings=RELU + SAMPLED),
)


def make_job(case: Case, folder: Path) -> Job:
    """Write the training interactions of a case to a file, and return the job that workers get.

    Args:
        case: the dataset and the length of windows.
        folder: folder for the file.
    """
    events, file = training_events(case.table(), case.length), folder / "events.csv"
    events.to_csv(file, index=False)
    return Job(str(file), case.length, targets=count_targets(events, case.length))


def measure(side: Side, job: Job) -> dict[str, Any]:
    """Train one side in a process of its own, and return what it has measured."""
    printed = run_worker(side.venv, side.module, job, *side.flags)
    return json.loads(printed.splitlines()[-1])


def describe(job: Job, sides: Iterable[tuple[Side, Runs]]) -> str:
    """Return settings of all sides, machine and versions, as text of a page.

    Args:
        job: the settings.
        sides: the libraries with their runs, which tell versions.
    """
    settings = (
        f"Settings: d = {job.hidden_size}, {job.n_layers} layers, {job.n_heads} heads, "
        f"feed-forward {job.inner_size}, dropout {job.dropout:g}, on attention weights "
        f"{job.attention_dropout:g}, cross-entropy over all items where no negatives are named, "
        f"the peer's activation, {job.batch_size} sequences a batch, Adam with learning rate "
        f"{job.learning_rate:g}, float32, cpu, {machine(1)}."
    )
    versions = {  # without settings, each once
        side.title.partition(",")[0]: ", ".join(map(" ".join, runs[0]["versions"].items()))
        for side, runs in sides
    }
    lines = "\n".join(f"- {title}: {numbers}" for title, numbers in versions.items())
    return f"{settings}\n\n{lines}"


HEADS = ("data", "items", "targets an epoch", "peer", "ours, targets/s: best (least to most)")
HEADS = (*HEADS, "theirs", "ratio: of the best (of single turns)", "goal")


def speeds(runs: Runs) -> list[float]:
    """Return the targets a second of every run."""
    return [run["targets_per_second"] for run in runs]


def show_range(values: list[float], form: str) -> str:
    """Return ``(1 to 2)``: the smallest and largest value, written by ``form.format``."""
    return f"({form.format(min(values))} to {form.format(max(values))})"


def compare(case: Case, side: Side, job: Job, ours: Runs, peers: Runs) -> tuple[float, list[str]]:
    """Return the ratio of our speed to a peer's, and the peer's row of the table.

    The ratio is that of the best runs, which are the least disturbed.

    Args:
        case: the dataset.
        side: the peer.
        job: the job, for the number of targets.
        ours: our runs with the peer's settings.
        peers: the peer's runs, in the same turns.
    """
    # With another number of items, the loss over all of them would be another amount of work.
    if ours[0]["items"] != peers[0]["items"]:
        sys.exit(f"{ours[0]['items']} items here, {peers[0]['items']} in {side.title}")
    ratio = max(speeds(ours)) / max(speeds(peers))
    turns = [own / peer for own, peer in zip(speeds(ours), speeds(peers), strict=True)]
    rates = [f"{max(x):,.0f} {show_range(x, '{:,.0f}')}" for x in map(speeds, (ours, peers))]
    return ratio, [
        *(case.title, f"{ours[0]['items']:,}", f"{job.targets:,}", side.title, *rates),
        f"{ratio:.2f} {show_range(turns, '{:.2f}')}",
        f"{case.goal:g}: {'met' if ratio >= case.goal else '**not met**'}",
    ]


def main() -> None:
    """Measure every case with every peer, and write the page.

    Peers with the same settings share one set of our runs. Of each dataset and loss, the page has
    the peer with the smallest ratio, and the table of all peers has a row for each.
    """
    rows, fastest, measured = [], {}, {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            job = make_job(case, Path(folder))

            for settings in dict.fromkeys(peer.settings for peer in PEERS):
                alike = [peer for peer in PEERS if peer.settings == settings]
                own_job = replace(job, **dict(settings))
                runs = in_turns((OURS, *alike), REPEATS, partial(measure, job=own_job))
                measured |= runs

                for peer in alike:
                    found = compare(case, peer, job, runs[OURS], runs[peer])  # ratio and row
                    rows.append(found[1])
                    print(rows[-1], flush=True)
                    key = case.title, own_job.negatives
                    fastest[key] = min(fastest.get(key, found), found)

    settings = describe(job, measured.items())
    timed = (
        f"Not timed: the first epoch or its first {job.warmup_seconds:g} s. Timed: at least "
        f"{job.min_seconds:g} s, at most {job.max_seconds:g} s."
    )
    text = f"{table(HEADS, [row for _, row in fastest.values()])}\n\n{settings}\n\n{timed}"
    replace_section(RESULTS / "speed_peers.md", "speed", text)
    page = f"# Training speed against other libraries: all peers\n\n{table(HEADS, rows)}\n"
    (RESULTS / "tables" / "speed_peers.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
