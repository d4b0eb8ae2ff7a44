"""``make bench-reading``: a log until its first batches, beside a bare read of the same text.

CPU-seconds and peak memory of generated data: parsed, filtered and numbered, sorted and split, cut
into windows for training and rows for evaluation; once from text, once from what the first start
kept. Beside it, the least that is needed: pyarrow reads the text, names become codes, interactions
are sorted by user and time. Sides take turns, every turn in a process of its own on one thread and
with limited memory; each figure is the best turn of its side. Writes ``results/reading.md``.
ARGS="--events 20000000".
"""

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from data import GENERATED, write_log
from page import RESULTS, in_turns, machine, parse_options, replace_section, run_alone, table
from pyarrow import csv

from recbole_pos.experiment.folder import peak_rss_mb

# A bare read of the text; a run's start that reads the text; one that reads the cache of the first.
SIDES = ("bare", "first start", "second start")
READ = "parse, filter, number"
PHASES = (READ, "sort and split", "loaders")
LIMIT = 12 << 30  # bytes of address space: a failure, and not a machine that stands still


class Phases:
    """CPU-seconds of phases that follow each other, and the peak of memory after each.

    Attributes:
        figures: name -> seconds and MB; "all" has their sum and the last peak.
    """

    def __init__(self) -> None:
        self.figures: dict[str, tuple[float, float]] = {}
        self.first = self.last = time.process_time()

    def end(self, name: str) -> None:
        """Note the end of a phase, which began with the end of the former one."""
        now, peak = time.process_time(), peak_rss_mb()
        self.figures |= {name: (now - self.last, peak), "all": (now - self.first, peak)}
        self.last = now


def read_bare(path: Path, phases: Phases) -> None:
    """Do the least that is needed: read the text, number users and items, sort by user and time.

    Args:
        path: file of interactions.
        phases: gets the time and memory of each phase.
    """
    names = pa.dictionary(pa.int32(), pa.string())
    types = {"user_id:token": names, "item_id:token": names, "timestamp:float": pa.float64()}
    table = csv.read_csv(
        path,
        csv.ReadOptions(use_threads=False),
        csv.ParseOptions(delimiter="\t"),
        csv.ConvertOptions(column_types=types),
    )
    table = table.unify_dictionaries()
    users = table[0].combine_chunks().indices.to_numpy()
    phases.end(READ)
    np.lexsort((table[2].to_numpy(), users))
    phases.end("sort and split")


def start_run(path: Path, memory_limit: str, phases: Phases) -> None:
    """Do what a run does before it makes its model, and take the first batch of each loader.

    Args:
        path: file of interactions.
        memory_limit: value of the option of this name.
        phases: gets the time and memory of each phase.
    """
    from recbole_pos.config.posconfig import PosConfig
    from recbole_pos.data import preparation
    from recbole_pos.data.loaders import (
        BatchRequirements,
        make_held_out_loaders,
        make_training_loader,
    )
    from recbole_pos.data.recbole_view import make_views
    from recbole_pos.experiment.build import read_dataset

    options = {"data_path": str(path.parent.parent), "memory_limit": memory_limit}
    config = PosConfig("PosSASRec", GENERATED, None, options)
    sort = preparation.sort_interactions

    def end_reading_and_sort(*args: Any, **keywords: Any) -> Any:
        """Sort as the package does, and note that reading has ended."""
        phases.end(READ)
        return sort(*args, **keywords)

    # A start that finds a cache does not sort; its reading ends with the whole.
    preparation.sort_interactions = end_reading_and_sort
    dataset = read_dataset(config)
    if READ not in phases.figures:
        phases.end(READ)
    assert dataset.identity
    phases.end("sort and split")
    views = make_views(dataset)
    loaders = make_held_out_loaders(config, views)
    train = make_training_loader(config, views["train"], BatchRequirements(windows=True))
    for loader in (train, *loaders.values()):
        next(iter(loader))
    phases.end("loaders")


def measure(side: str, path: Path, memory_limit: str) -> dict[str, tuple[float, float]]:
    """Return seconds and MB of each phase of a side, measured in this process with limited memory.

    Args:
        side: one of SIDES. The first and the second start differ only in what is cached.
        path: file of interactions.
        memory_limit: value of the option of this name.
    """
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    phases = Phases()
    read_bare(path, phases) if side == "bare" else start_run(path, memory_limit, phases)
    return phases.figures


def tabulate_phases(best: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Return a table with a row for each phase and a column for each side.

    Args:
        best: side -> name of a phase -> CPU-seconds and MB.
    """
    rows = []
    for phase in (*PHASES, "all"):
        found = (best[side].get(phase) for side in SIDES)
        rows.append([phase, *(f"{x[0]:.1f} ({x[1] / 1000:.2f})" if x else "" for x in found)])
    return table(("CPU-seconds (peak so far, GB)", *SIDES), rows)


def main() -> None:
    """Measure every side in turn, and write the page."""
    args = parse_options(__doc__, events=5_000_000, memory_limit="auto", rounds=2)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that measure
    with tempfile.TemporaryDirectory() as folder:
        path = write_log(Path(folder), args.events)
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        time.sleep(2)  # files younger than that are not cached
        size = f"{args.events:,} interactions, {path.stat().st_size / 1e6:,.0f} MB of text"

        def run_side(side: str) -> dict[str, tuple[float, float]]:
            # A new round begins with the bare read; the first start must find nothing in the cache.
            if side == SIDES[0]:
                shutil.rmtree(Path(folder) / "cache", ignore_errors=True)
            return run_alone(measure, side, path, args.memory_limit)

        runs = in_turns(SIDES, args.rounds, run_side)
    best = {side: min(of_side, key=lambda run: run["all"]) for side, of_side in runs.items()}
    floor, first, second = (best[side]["all"][0] for side in SIDES)
    words = (
        f"{size}; best of {args.rounds} turns, {machine(1)}. The first start takes "
        f"{first / floor:.2f} times the bare read, the second {second:.1f} s."
    )
    title = f"{args.events} interactions"
    if args.memory_limit != "auto":
        title += f", memory_limit {args.memory_limit}"
    replace_section(RESULTS / "reading.md", title, f"{words}\n\n{tabulate_phases(best)}")


if __name__ == "__main__":
    main()
