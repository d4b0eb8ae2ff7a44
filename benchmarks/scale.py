"""``make bench-scale``: how cost grows with interactions, length and items, model by model.

CPU-seconds and peak memory of a start, an epoch (some steps, extrapolated), a checkpoint and an
evaluation (some users), along one axis at a time. Every cell is a process of its own on one thread,
with 12 GiB and 150 CPU-seconds at most; one that does not fit is written as such. Writes the
conditions into ``results/scale.md`` and all cells into ``results/tables/scale.md``.
"""

import itertools
import os
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["BENCH_THREADS"] = "1"

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from data import GENERATED, write_log  # noqa: E402
from page import RESULTS, machine, replace_section, run_alone, table, time_call  # noqa: E402
from training import build, extrapolate_epoch  # noqa: E402

from recbole_pos.experiment.checkpoint import capture_state, save  # noqa: E402
from recbole_pos.experiment.folder import peak_rss_mb  # noqa: E402

MEMORY = 12 << 30  # bytes of address space of a process
CPU = 150  # seconds of a cell, all phases together
SECONDS = 3.0  # CPU-seconds of training steps, from which an epoch is extrapolated
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


def list_cells() -> list[Cell]:
    """Return the cells to measure, axis by axis; the largest log has one model only."""
    cells = []
    for axis, sizes in SIZES.items():
        for size, side in itertools.product(sizes, SIDES[axis]):
            cell = replace(Cell(side, axis), **{axis: size})
            cells.append(replace(cell, each=LONG) if axis == "length" else cell)
    only_one = {FIRST, MODELS[0]}
    return [cell for cell in cells if cell.events < LARGEST or cell.side in only_one]


# --- one cell, in a process of its own ---


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
        "valid_users": USERS,
    }
    if loss:
        options |= {"loss_type": loss, "train_batch_size": 128}
    elif model != "PosRec":  # a batch of PosRec has few targets in any case, one a row
        windows = PRODUCTS / (cell.items * cell.length)
        options["train_batch_size"] = int(min(max(windows, 1), 128))
    return model, options


def measure(cell: Cell, folder: Path) -> dict[str, float]:
    """Return the figures of a cell, measured in this process with limited memory and time.

    Args:
        cell: the cell.
        folder: folder that holds the datasets.

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
        # the first step makes the optimiser's state
        figures["epoch"] = extrapolate_epoch(trainer, experiment.loaders["train"], SECONDS, warm=1)
        write = lambda: save(folder / "checkpoint.pt", capture_state(trainer))  # noqa: E731
        figures["checkpoint"] = time_call(write, time.process_time)
        loader = experiment.loaders["valid"]
        ranked = partial(trainer.evaluate, loader, load_best_model=False)
        seconds = time_call(ranked, time.process_time)
        figures["evaluation"] = seconds / loader.num_targets * 1000
    return {**figures, "peak_mb": peak_rss_mb()}


def run(cell: Cell, folder: Path) -> dict[str, float]:
    """Return the figures of a cell from a new process; empty if it was stopped at its limit.

    Its dataset is generated if it is not there yet.

    Args:
        cell: the cell.
        folder: folder of the datasets.
    """
    if not (folder / cell.log).exists():
        interactions = write_log(folder / cell.log, cell.events, cell.each, cell.items)
        # Items without an interaction are in a file of items, so that there are as many as wanted.
        names = "".join(f"i{item}\n" for item in range(cell.items))
        interactions.with_suffix(".item").write_text(f"item_id:token\n{names}")
        if cell.side != FIRST:  # fill the cache, from which others start
            run(replace(cell, side=FIRST), folder)
    try:
        return run_alone(measure, cell, folder)
    except (MemoryError, RuntimeError) as error:  # a process that was ended is a RuntimeError
        print(cell, error, flush=True)
        return {}


# --- tables ---

FIGURES = {"start": "start, s", "epoch": "epoch, s", "evaluation": "1,000 users, s"}
FIGURES |= {"checkpoint": "checkpoint, s", "peak_mb": "peak, MB"}


def show_slope(sizes: pd.Series, values: pd.Series) -> str:
    """Return the exponent with which a figure grows, as text; empty if it has a single size.

    It is the slope of log(values) over log(sizes) by least squares: 1.00 for linear growth.

    Args:
        sizes: [n] sizes.
        values: [n] values of the figure, NaN where it was not measured.
    """
    is_measured = values.notna()
    if is_measured.sum() < 2:
        return ""
    slope, _ = np.polyfit(np.log(sizes[is_measured]), np.log(values[is_measured]), 1)
    return f"{slope:.2f}"


def show_number(value: float) -> str:
    """Return a number as text with three digits, ``1.23`` or ``1,234``; empty for NaN."""
    if np.isnan(value):
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tabulate(results: list[tuple[Cell, dict[str, float]]], axis: str) -> str:
    """Return the table of an axis: each side's figures by size, then how fast they grow.

    Args:
        results: cells with their figures, none of a cell that was stopped.
        axis: the size that is varied.
    """
    lines = [
        {"side": cell.side, "size": cell.size, **figures}
        for cell, figures in results
        if cell.axis == axis
    ]
    measured = pd.DataFrame(lines, columns=["side", "size", *FIGURES], dtype=object)
    rows = []
    for side, cells in measured.groupby("side", sort=False):
        figures = cells[[*FIGURES]].astype(float)
        for size, line in zip(cells["size"], figures.to_numpy(), strict=True):
            problem = " (stopped at its limit)" if np.isnan(line).all() else ""
            rows.append([side, f"{size:,}{problem}", *map(show_number, line)])
        sizes = cells["size"].astype(float)
        rows.append([side, "exponent", *(show_slope(sizes, figures[name]) for name in FIGURES)])
    return table(["", AXES[axis], *FIGURES.values()], rows)


def main() -> None:
    """Measure every cell, and write the page."""
    cells = list_cells()
    with tempfile.TemporaryDirectory() as folder:
        figures = {}  # key of a cell -> its figures
        for cell in cells:
            if cell.key not in figures:
                figures[cell.key] = run(cell, Path(folder))
    results = [(cell, figures[cell.key]) for cell in cells]
    conditions = f"{machine(1)}; {SECONDS:g} CPU-seconds of steps a cell, one turn."
    replace_section(RESULTS / "scale.md", "scale", conditions)
    parts = ["# How cost grows: all cells"]
    for axis, name in AXES.items():
        parts += [f"## By {name}", tabulate(results, axis)]
    (RESULTS / "tables" / "scale.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
