"""``make bench-reading``: a log until its first batches, beside a bare read of the same text.

CPU-seconds and peak memory of generated data: parsed, filtered and numbered, sorted and split, cut
into windows for training and rows for evaluation; once from text, once from what the first start
kept. Beside it, the least that is needed: pyarrow reads the text, names become codes, interactions
are sorted by user and time. Sides take turns, every turn in a process of its own on one thread and
with limited memory; the figures are those of its fastest turn. Writes ``results/reading.md``.
ARGS="--events 20000000".
"""

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from data import GENERATED, write_log
from page import RESULTS, machine, parse_options, replace_section, run_alone, table
from pyarrow import csv

from recbole_pos.experiment.folder import peak_rss_mb

# A bare read of the text; a run's start that reads the text; one that reads the cache of the first.
SIDES = ("bare", "first start", "second start")
LIMIT = 12 << 30  # bytes of address space: a failure, and not a machine that stands still


def read_bare(path: Path) -> None:
    """Do the least that is needed: read the text, number users and items, sort by user and time.

    Args:
        path: file of interactions.
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
    np.lexsort((table[2].to_numpy(), users))


def start_run(path: Path, memory_limit: str) -> None:
    """Do what a run does before it makes its model, and take the first batch of each loader.

    Args:
        path: file of interactions.
        memory_limit: value of the option of this name.
    """
    from recbole_pos.config.posconfig import PosConfig
    from recbole_pos.data.loaders import (
        BatchRequirements,
        make_held_out_loaders,
        make_training_loader,
    )
    from recbole_pos.data.recbole_view import make_views
    from recbole_pos.experiment.build import read_dataset

    options = {"data_path": str(path.parent.parent), "memory_limit": memory_limit}
    config = PosConfig("PosSASRec", GENERATED, None, options)
    dataset = read_dataset(config)
    assert dataset.identity
    views = make_views(dataset)
    loaders = make_held_out_loaders(config, views)
    train = make_training_loader(config, views["train"], BatchRequirements(windows=True))
    for loader in (train, *loaders.values()):
        next(iter(loader))


def measure(side: str, path: Path, memory_limit: str) -> tuple[float, float]:
    """Return CPU-seconds and peak MB of a side, measured in this process with limited memory.

    Args:
        side: one of SIDES. The first and the second start differ only in what is cached.
        path: file of interactions.
        memory_limit: value of the option of this name.
    """
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    began = time.process_time()
    if side == "bare":
        read_bare(path)
    else:
        start_run(path, memory_limit)
    return time.process_time() - began, peak_rss_mb()


def main() -> None:
    """Measure every side in turn, and write the page."""
    args = parse_options(__doc__, events=5_000_000, memory_limit="auto", rounds=2)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that measure
    turns = []  # of each round, the figures of all sides
    with tempfile.TemporaryDirectory() as folder:
        path, cache = write_log(Path(folder), args.events), Path(folder) / "cache"
        os.environ["XDG_CACHE_HOME"] = str(cache)
        time.sleep(2)  # files younger than that are not cached
        for _ in range(args.rounds):
            shutil.rmtree(cache, ignore_errors=True)  # for the first start
            turns.append([run_alone(measure, side, path, args.memory_limit) for side in SIDES])
        megabytes = path.stat().st_size / 1e6

    best = [min(of_side) for of_side in zip(*turns, strict=True)]
    seconds = [figures[0] for figures in best]
    rows = [
        ["CPU-seconds", *(f"{x:.1f}" for x in seconds)],
        ["peak memory, GB", *(f"{peak / 1000:.2f}" for _, peak in best)],
    ]
    words = (
        f"{args.events:,} interactions, {megabytes:,.0f} MB of text; best of {args.rounds} turns, "
        f"{machine(1)}. The first start takes {seconds[1] / seconds[0]:.2f} times the bare read, "
        f"the second {seconds[2]:.1f} s."
    )
    title = f"{args.events} interactions"
    if args.memory_limit != "auto":
        title += f", memory_limit {args.memory_limit}"
    replace_section(RESULTS / "reading.md", title, f"{words}\n\n{table(('', *SIDES), rows)}")


if __name__ == "__main__":
    main()
