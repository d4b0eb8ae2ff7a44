"""Training speed against other libraries: real targets per second of PosSASRec and of its peers.

``make bench-peers``, which makes a virtual environment for each peer.
Every run is a process of its own; the sides alternate, so that a slow spell of the machine meets
all of them. Each side trains on the same interactions, and a worker (``peer_workers/``) stops if
its epoch does not hold exactly the targets, items to predict, that were counted here. Writes
``results/speed_peers.md``, with the peer of the least ratio for each dataset and loss, and all
peers into ``results/tables/``.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from data import count_targets, long_histories, ml_100k, short_histories, training_events
from page import RESULTS, in_turns, machine, replace_section, run_worker, table
from peer_workers.common import Job


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
        settings: changes of the job, for our side, too.
    """

    title: str
    module: str
    venv: str = ""
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
    Side(TRIMMED, *REPLAY, RELU),
    *(
        Side(f"{TRIMMED}, buckets of {size}", *REPLAY, (*RELU, ("bucket", size)))
        for size in (8, 32, 64)
    ),
    Side("RecTools FlatSASRecNet, 256 negatives", *FLAT, SAMPLED),
    Side(f"{TRIMMED}, 256 negatives", *REPLAY, RELU + SAMPLED),
)


def make_job(case: Case, folder: Path) -> Job:
    """Write the training interactions of a case to a file, and return the job that workers get.

    Args:
        case: the dataset and the length of windows.
        folder: folder for the file.
    """
    events, file = training_events(case.table(), case.length), folder / "events.csv"
    events.to_csv(file, index=False)
    targets = count_targets(events, case.length)
    return Job(str(file), case.length, targets, items=events["item_id"].nunique())


def measure(side: Side, job: Job) -> float:
    """Train one side in a process of its own, and return its targets a second."""
    return float(run_worker(side.venv, side.module, job).splitlines()[-1])


def describe(job: Job) -> str:
    """Return the settings of all sides, the machine and what is timed, as text of a page."""
    return (
        f"Settings: d = {job.hidden_size}, {job.n_layers} layers, {job.n_heads} heads, "
        f"feed-forward {job.inner_size}, dropout {job.dropout:g}, on attention weights "
        f"{job.attention_dropout:g}, cross-entropy over all items where no negatives are named, "
        f"the peer's activation, {job.batch_size} sequences a batch, Adam with learning rate "
        f"{job.learning_rate:g}, float32, cpu, {machine(1)}. Peers have the versions of "
        "`benchmarks/requirements-peers-*.txt`. Not timed: the steps of the first "
        f"{job.warmup_seconds:g} s. Timed: those of the next {job.timed_seconds:g} s."
    )


HEADS = ("data", "items", "targets an epoch", "peer", "ours, targets/s: best (least to most)")
HEADS = (*HEADS, "theirs", "ratio: of the best (of single turns)", "goal")


def show_best(values: list[float], form: str) -> str:
    """Return ``2 (1 to 2)``: the largest value, and the range, written by ``form.format``."""
    least, most = form.format(min(values)), form.format(max(values))
    return f"{most} ({least} to {most})"


def compare(
    case: Case, side: Side, job: Job, ours: list[float], theirs: list[float]
) -> tuple[float, list[str]]:
    """Return the ratio of our speed to a peer's, and the peer's row of the table.

    The ratio is that of the best runs, which are the least disturbed.

    Args:
        case: the dataset.
        side: the peer.
        job: the job, for the numbers of items and targets.
        ours: targets a second of our runs with the peer's settings.
        theirs: those of the peer's runs, in the same turns.
    """
    ratio = max(ours) / max(theirs)
    turns = [own / peer for own, peer in zip(ours, theirs, strict=True)]
    return ratio, [
        *(case.title, f"{job.items:,}", f"{job.targets:,}", side.title),
        *(show_best(speeds, "{:,.0f}") for speeds in (ours, theirs)),
        f"{ratio:.2f} ({min(turns):.2f} to {max(turns):.2f})",
        f"{case.goal:g}: {'met' if ratio >= case.goal else '**not met**'}",
    ]


def main() -> None:
    """Measure every case with every peer, and write the page.

    Of each dataset and loss, the page has the peer with the smallest ratio, and the table of all
    peers has a row for each.
    """
    rows, strongest = [], {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            data = make_job(case, Path(folder))
            for peer in PEERS:
                job = replace(data, **dict(peer.settings))
                runs = in_turns((OURS, peer), REPEATS, partial(measure, job=job))
                found = compare(case, peer, job, runs[OURS], runs[peer])  # ratio and row
                rows.append(found[1])
                print(rows[-1], flush=True)
                key = case.title, job.negatives
                strongest[key] = min(strongest.get(key, found), found)

    text = f"{table(HEADS, [row for _, row in strongest.values()])}\n\n{describe(job)}"
    replace_section(RESULTS / "speed_peers.md", "speed", text)
    page = f"# Training speed against other libraries: all peers\n\n{table(HEADS, rows)}\n"
    (RESULTS / "tables" / "speed_peers.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
