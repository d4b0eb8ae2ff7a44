"""``make bench-reading``: a log until its first batches, beside a bare read of the same text.

CPU-seconds and peak memory of generated data: parsed, filtered and numbered, sorted and split, cut
into windows for training and rows for evaluation; once from text, once from what the first start
kept. Beside it, the least that is needed: pyarrow reads the text, names become codes, interactions
are sorted by user and time. Sides take turns, every turn in a process of its own on one thread and
with limited memory; each figure is the best turn of its side. Writes ``results/reading.md``.
ARGS="--events 20000000".
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from data import GENERATED, write_log
from page import RESULTS, in_turns, replace_section, run_alone, table
from pyarrow import csv

from recbole_pos.experiment.folder import peak_rss_mb

SIDES = ("bare", "first start", "second start")
TRAINED = {"PosSASRec, SCE": {"loss_type": "SCE"}, "FPARec": {}}
LIMIT = 12 << 30  # bytes of address space: a failure, and not a machine that stands still


class Phases:
    """CPU-seconds of phases that follow each other, and the peak of memory after each.

    Attributes:
        figures: name -> seconds, and MB under ``name mb``.
    """

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.last = time.process_time()

    def end(self, name: str) -> None:
        """Note that a phase has ended."""
        now = time.process_time()
        self.figures |= {name: now - self.last, f"{name} mb": peak_rss_mb()}
        self.last = now

    def end_after(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a method whose end is the end of a phase."""

        def timed(*args: Any, **named: Any) -> Any:
            result = method(*args, **named)
            self.end(name)
            return result

        return timed


def read_bare(path: Path) -> dict[str, float]:
    """Time the least that is needed: read, number, sort."""
    phases, names = Phases(), pa.dictionary(pa.int32(), pa.string())
    types = {"user_id:token": names, "item_id:token": names, "timestamp:float": pa.float64()}
    table = csv.read_csv(
        path,
        csv.ReadOptions(use_threads=False),
        csv.ParseOptions(delimiter="\t"),
        csv.ConvertOptions(column_types=types),
    )
    phases.end("parse")
    table = table.unify_dictionaries()
    users = table[0].combine_chunks().indices.to_numpy()
    phases.end("filter and number")
    np.lexsort((table[2].to_numpy(), users))
    phases.end("sort and split")
    return phases.figures


def start_run(path: Path, memory_limit: str) -> dict[str, float]:
    """Time what a run does before it makes its model."""
    from recbole_pos.config.posconfig import PosConfig
    from recbole_pos.data.dataset import PosSequentialDataset
    from recbole_pos.data.loaders import (
        BatchRequirements,
        make_held_out_loaders,
        make_training_loader,
    )
    from recbole_pos.data.splits import PHASES
    from recbole_pos.experiment.build import read_dataset

    given = {"data_path": str(path.parent.parent), "memory_limit": memory_limit}
    config = PosConfig("PosSASRec", GENERATED, None, given)
    phases = Phases()
    for method, name in (("_load_data", "parse"), ("_data_processing", "filter and number")):
        timed = phases.end_after(getattr(PosSequentialDataset, method), name)
        setattr(PosSequentialDataset, method, timed)
    dataset = read_dataset(config)
    parts = dict(zip(PHASES, dataset.build(), strict=True))
    assert dataset.identity
    phases.end("sort and split")
    loaders = make_held_out_loaders(config, parts)
    train = make_training_loader(config, parts["train"], BatchRequirements(windows=True))
    for loader in (train, *loaders.values()):
        next(iter(loader))
    phases.end("loaders")
    return phases.figures


def train_steps(side: str, path: Path, memory_limit: str, steps: int) -> dict[str, float]:
    """Return memory, own and of mapped files, after a tenth of the steps and all, and targets."""
    from training import build, train_epoch

    from recbole_pos.experiment.memory import keep_freed_memory

    keep_freed_memory()
    options = {"data_path": str(path.parent.parent), "memory_limit": memory_limit}
    options |= {"train_batch_size": 8, **TRAINED[side]}
    experiment = build(side.partition(",")[0], GENERATED, **options)
    trainer = experiment.trainer
    batches = train_epoch(trainer, trainer.training_loader(experiment.loaders["train"]))
    figures, targets = {}, 0
    for number, batch in enumerate(islice(batches, steps), 1):
        targets += len(batch)
        if number in (steps // 10, steps):
            memory = psutil.Process().memory_info()
            figures[f"own memory, MB, step {number}"] = (memory.rss - memory.shared) / 1e6
            figures[f"mapped, MB, step {number}"] = memory.shared / 1e6
    return {**figures, "targets": targets}


def measure(side: str, path: Path, memory_limit: str) -> dict[str, float]:
    """Return the figures of one side in this process."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    before = peak_rss_mb()
    figures = read_bare(path) if side == "bare" else start_run(path, memory_limit)
    seconds = sum(value for name, value in figures.items() if not name.endswith(" mb"))
    return {**figures, "all": seconds, "all mb": peak_rss_mb(), "before": before}


def tabulate_phases(best: dict[str, dict[str, float]]) -> str:
    """Return the figures of each side as a table."""
    phases = ("parse", "filter and number", "sort and split", "loaders", "all")

    def cell(figures: dict[str, float], phase: str) -> str:
        if phase not in figures:
            return ""
        return f"{figures[phase]:.1f} ({figures[f'{phase} mb'] / 1000:.2f})"

    rows = ([phase, *(cell(best[side], phase) for side in SIDES)] for phase in phases)
    return table(("CPU-seconds (peak so far, GB)", *SIDES), rows)


def tabulate_training(trained: dict[str, dict[str, float]]) -> str:
    """Return the figures of :func:`train_steps` as a table; a short epoch has fewer of them."""
    heads = next(iter(trained.values()))
    rows = ([side, *(f"{x:,.0f}" for x in figures.values())] for side, figures in trained.items())
    return table(("training", *heads), rows)


def main() -> None:
    """Measure every side in turn, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--memory_limit", default="auto")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="steps of training, then")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that measure
    with tempfile.TemporaryDirectory() as folder:
        path = write_log(Path(folder), given.events)
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        time.sleep(2)  # files younger than that are not cached
        size = f"{given.events:,} interactions, {path.stat().st_size / 1e6:,.0f} MB of text"

        def run_side(side: str) -> dict[str, float]:
            if side == SIDES[0]:  # a new round: the first start finds nothing
                shutil.rmtree(Path(folder) / "cache", ignore_errors=True)
            return run_alone(measure, side, path, given.memory_limit)

        runs = in_turns(SIDES, given.rounds, run_side)
        trained = {}
        if given.steps:
            arguments = path, given.memory_limit, given.steps
            trained = {side: run_alone(train_steps, side, *arguments) for side in TRAINED}
    best = {side: min(of_side, key=lambda run: run["all"]) for side, of_side in runs.items()}
    first, second, floor = (best[side]["all"] for side in ("first start", "second start", "bare"))
    words = (
        f"{size}; best of {given.rounds} turns, {platform.machine()}, one thread. The first start "
        f"takes {first / floor:.2f} times the bare read, the second {second:.1f} s."
    )
    parts = [words, tabulate_phases(best)]
    if trained:
        parts.append(tabulate_training(trained))
    title = f"{given.events} interactions"
    if given.memory_limit != "auto":
        title += f", memory_limit {given.memory_limit}"
    replace_section(RESULTS / "reading.md", title, "\n\n".join(parts))


if __name__ == "__main__":
    main()
