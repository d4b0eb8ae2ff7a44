"""``make bench-scale``: how cost grows with interactions, length and items, model by model.

CPU-seconds and peak memory of a start, an epoch (some steps, extrapolated), a checkpoint and an
evaluation (some users), along one axis at a time. Every cell is a process of its own on one thread,
with 12 GiB and 150 CPU-seconds at most; one that does not fit is written as such. Writes the
conditions into ``results/scale.md`` and all cells into ``results/tables/scale.md``.
ARGS="--most 5000000" has no larger dataset; "--found FILE" keeps cells there and resumes.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["BENCH_THREADS"] = "1"

import numpy as np  # noqa: E402
from data import GENERATED, write_log  # noqa: E402
from page import RESULTS, machine, parse_options, replace_section, run_alone, table, time_call  # noqa: E402
from training import build, time_steps  # noqa: E402

from recbole_pos.data.loaders import TargetLoader  # noqa: E402
from recbole_pos.experiment import checkpoint  # noqa: E402
from recbole_pos.experiment.build import Experiment  # noqa: E402
from recbole_pos.experiment.checkpoint import capture_state  # noqa: E402
from recbole_pos.experiment.folder import peak_rss_mb  # noqa: E402

MEMORY = 12 << 30  # bytes of address space of a process
CPU = 150  # seconds of a cell, all phases together
USERS = 512  # users that are evaluated
PRODUCTS = 2e8  # logits of a step at most: a second, and not minutes, where there are many items
FIRST = "first start"  # a side that reads the text, and leaves the cache that others start from
MODELS = ("PosSASRec", "FPARec", "KernelAttention", "TORoPE", "AttrFormer", "PosRec")
SCE = "PosSASRec, SCE"


@dataclass(frozen=True)
class Cell:
    """A cell of the tables: a model, and the sizes that it is measured at.

    Attributes:
        side: the model, and a loss that is not its own after a comma; or FIRST.
        axis: the size that is varied.
        events: number of interactions.
        items: number of items.
        length: longest window of a history.
        each: mean number of interactions of a user.
    """

    side: str = ""
    axis: str = "events"
    events: int = 1_000_000
    items: int = 27_000
    length: int = 200
    each: int = 143

    @property
    def size(self) -> int:
        """Value of the size that is varied."""
        return int(getattr(self, self.axis))

    @property
    def log(self) -> str:
        """Name of the folder of its dataset."""
        return f"{self.events}-{self.items}-{self.each}"

    @property
    def key(self) -> str:
        """Name of the measurement, on whichever axis: the centre is measured once."""
        return f"{self.side} {self.log} {self.length}"


AXES = {"items": "items", "length": "window length L", "events": "interactions"}
SIZES = {
    "items": (10_000, 27_000, 100_000, 1_000_000),
    "length": (50, 300, 2_000),
    "events": (1_000_000, 5_000_000, 20_000_000),
}
# side by side on an axis; a longer window reads the same dataset
SIDES = {"items": (FIRST, *MODELS, SCE), "length": MODELS, "events": (FIRST, *MODELS)}
LARGEST = max(SIZES["events"])  # has one model
LONG = 2_500  # interactions of a user on the axis of lengths, so that every window is full


def list_cells(most: int) -> list[Cell]:
    """Return the cells to measure, axis by axis.

    The largest log is measured with one model only.

    Args:
        most: most interactions of a cell; larger ones are left out.
    """
    cells = []
    for axis, sizes in SIZES.items():
        for size, side in itertools.product(sizes, SIDES[axis]):
            cell = replace(Cell(side, axis), **{axis: size})
            cells.append(replace(cell, each=LONG) if axis == "length" else cell)
    only_one = {FIRST, MODELS[0]}
    return [x for x in cells if x.events <= most and (x.events < LARGEST or x.side in only_one)]


# --- one cell, in a process of its own ---


class FirstBatches(TargetLoader):
    """The first batches of a loader."""

    num_batches = 1

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), self.num_batches)


def make_options(cell: Cell, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of a cell's model and the options of its run: defaults, except for sizes.

    Where there are many items, batches are smaller, so that a step takes about a second.

    Args:
        cell: the cell.
        folder: folder that holds the datasets.
    """
    model, _, loss = cell.side.partition(", ")
    model = "PosSASRec" if model == FIRST else model
    options: dict[str, Any] = {
        "data_path": str(folder / cell.log),
        "load_col": {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id"]},
        "MAX_ITEM_LIST_LENGTH": cell.length,
    }
    if loss:
        options |= {"loss_type": loss, "train_batch_size": 128}
    elif model != "PosRec":  # a batch of PosRec has few targets in any case, one a row
        windows = PRODUCTS / (cell.items * cell.length)
        options["train_batch_size"] = int(min(max(windows, 1), 128))
    return model, options


def evaluate(experiment: Experiment) -> float:
    """Return the CPU-seconds of evaluating a thousand users, measured on USERS of them.

    Args:
        experiment: the model with its data; its loader of validation is cut to its first batches.
    """
    loader: Any = experiment.loaders["valid"]
    batch_size = experiment.config["eval_batch_size"]
    loader.__class__ = FirstBatches
    loader.num_batches = -(-USERS // batch_size)
    users = min(loader.num_batches * batch_size, len(loader.rows))
    ranked = partial(experiment.trainer.evaluate, loader, load_best_model=False)
    return time_call(ranked, time.process_time) / users * 1000


def measure(cell: Cell, folder: Path, seconds: float) -> dict[str, float]:
    """Return the figures of a cell, measured in this process with limited memory and time.

    Args:
        cell: the cell.
        folder: folder that holds the datasets.
        seconds: CPU-seconds of training steps, from which an epoch is extrapolated.

    Returns:
        CPU-seconds of ``start``, ``epoch``, ``checkpoint`` and ``evaluation`` (of 1,000 users), and
        ``peak_mb`` of memory; only the first and the last for a first start.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
    began = time.process_time()
    model, options = make_options(cell, folder)
    experiment = build(model, GENERATED, **options)
    figures = {"start": time.process_time() - began}
    if cell.side != FIRST:
        trainer = experiment.trainer
        loader = trainer.training_loader(experiment.loaders["train"])
        # the first step makes the optimiser's state
        timed = time_steps(trainer, loader, seconds, warm=1, clock=time.process_time)
        figures["epoch"] = timed.seconds / timed.targets * loader.num_targets
        save = partial(checkpoint.save, folder / "checkpoint.pt")
        figures["checkpoint"] = time_call(lambda: save(capture_state(trainer)), time.process_time)
        figures["evaluation"] = evaluate(experiment)
    return {**figures, "peak_mb": peak_rss_mb()}


def run(cell: Cell, folder: Path, seconds: float) -> dict[str, float]:
    """Return the figures of a cell from a new process; empty if it was stopped at its limit.

    Its dataset is generated if it is not there yet.

    Args:
        cell: the cell.
        folder: folder of the datasets.
        seconds: CPU-seconds of training steps.
    """
    if not (folder / cell.log).exists():
        interactions = write_log(folder / cell.log, cell.events, cell.each, cell.items)
        # Items without an interaction are in a file of items, so that there are as many as wanted.
        names = "".join(f"i{item}\n" for item in range(cell.items))
        interactions.with_suffix(".item").write_text(f"item_id:token\n{names}")
        # With results of an earlier call, no first start is measured here to fill the cache.
        if cell.side != FIRST:
            run(replace(cell, side=FIRST), folder, 0)
    try:
        return run_alone(measure, cell, folder, seconds)
    except (MemoryError, RuntimeError) as error:  # a process that was ended is a RuntimeError
        print(cell, error, flush=True)
        return {}


# --- tables ---

Results = list[tuple[Cell, dict[str, float]]]
FIGURES = {
    "start": "start, s",
    "epoch": "epoch, s",
    "evaluation": "1,000 users, s",
    "checkpoint": "checkpoint, s",
    "peak_mb": "peak, MB",
}


def points(results: Results, axis: str, side: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the measured values of one figure, by size.

    Args:
        results: cells with their figures.
        axis: the size that is varied.
        side: the model.
        name: the figure, such as ``epoch``.

    Returns:
        [n] sizes and [n] values, of the cells where it was measured.
    """
    measured = [
        (cell.size, figures[name])
        for cell, figures in results
        if (cell.axis, cell.side) == (axis, side) and name in figures
    ]
    return np.array([size for size, _ in measured]), np.array([value for _, value in measured])


def show_slope(sizes: np.ndarray, values: np.ndarray) -> str:
    """Return the exponent with which a figure grows, as text; empty for a single size.

    It is the slope of log(values) over log(sizes) by least squares: 1.00 for linear growth.
    """
    if len(sizes) < 2:
        return ""
    return f"{np.polyfit(np.log(sizes), np.log(values), 1)[0]:.2f}"


def show_number(value: float | None) -> str:
    """Return a number as text with three digits, ``1.23`` or ``1,234``; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tabulate(results: Results, axis: str) -> str:
    """Return the table of an axis: each side's figures by size, then how fast they grow.

    Args:
        results: cells with their figures.
        axis: the size that is varied.
    """
    rows = []
    for side in SIDES[axis]:
        for cell, figures in results:
            if (cell.axis, cell.side) == (axis, side):
                problem = "" if figures else " (stopped at its limit)"
                values = (show_number(figures.get(name)) for name in FIGURES)
                rows.append([side, f"{cell.size:,}{problem}", *values])
        slopes = [show_slope(*points(results, axis, side, name)) for name in FIGURES]
        rows.append([side, "exponent", *slopes])
    return table(["", AXES[axis], *FIGURES.values()], rows)


def main() -> None:
    """Measure every cell that is missing, and write the page.

    Results are kept in a file after each cell, so that the next call goes on from there.
    """
    args = parse_options(__doc__, seconds=3.0, most=LARGEST, found=Path("saved/scale.json"))
    args.found.parent.mkdir(parents=True, exist_ok=True)
    done = json.loads(args.found.read_text()) if args.found.exists() else {}
    cells = list_cells(args.most)
    with tempfile.TemporaryDirectory() as folder:
        for cell in cells:
            if cell.key not in done:
                done[cell.key] = run(cell, Path(folder), args.seconds)
                args.found.write_text(json.dumps(done))
    results = [(cell, done[cell.key]) for cell in cells]
    conditions = f"{machine(1)}; {args.seconds:g} CPU-seconds of steps a cell, one turn."
    replace_section(RESULTS / "scale.md", "scale", conditions)
    parts = ["# How cost grows: all cells"]
    for axis, name in AXES.items():
        parts += [f"## By {name}", tabulate(results, axis)]
    (RESULTS / "tables" / "scale.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
