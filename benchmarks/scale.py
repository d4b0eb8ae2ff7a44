"""``make bench-scale``: how cost grows with interactions, length and items, model by model.

CPU-seconds and peak memory of a start, an epoch (some steps, extrapolated), a checkpoint and an
evaluation (some users), along one axis at a time. Every cell is a process of its own on one thread,
with 12 GiB and 150 CPU-seconds at most; one that does not fit is written as such. Writes the
conditions into ``results/scale.md`` and all cells into ``results/tables/scale.md``.
"""

import resource
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from data import GENERATED, write_log
from page import RESULTS, machine, replace_section, run_alone, table, time_call
from training import build, extrapolate_epoch

from recbole_pos.experiment.checkpoint import capture_state, save
from recbole_pos.experiment.folder import peak_rss_mb

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
        events: number of interactions.
        items: number of items.
        length: longest window of a history.
        each: mean number of interactions of a user.
    """

    side: str
    events: int = 1_000_000
    items: int = 27_000
    length: int = 200
    each: int = 143

    @property
    def log(self) -> str:
        """Name of the folder of its dataset."""
        return f"{self.events}-{self.items}-{self.each}"


# An axis is the attribute of a cell that is varied. A longer window reads the same dataset.
AXES = {"items": "items", "length": "window length L", "events": "interactions"}
SIZES = {
    "items": (10_000, 27_000, 100_000, 1_000_000),
    "length": (50, 300, 2_000),
    "events": (1_000_000, 5_000_000, 20_000_000),
}
SIDES = {"items": (FIRST, *MODELS, SCE), "length": MODELS, "events": (FIRST, *MODELS)}
LARGEST = max(SIZES["events"])  # has one model
LONG = 2_500  # interactions of a user on the axis of lengths, so that every window is full


def list_cells(axis: str) -> list[Cell]:
    """Return the cells of an axis, side by side; the largest log has one model only.

    Args:
        axis: name in AXES.
    """
    same = {"each": LONG} if axis == "length" else {}
    cells = [Cell(side, **{axis: size}, **same) for side in SIDES[axis] for size in SIZES[axis]]
    return [cell for cell in cells if cell.events < LARGEST or cell.side in (FIRST, MODELS[0])]


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
        "load_col": None,  # all columns, the items of the file of items, too
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
        trainer, valid, clock = experiment.trainer, experiment.loaders["valid"], time.process_time
        # the first step makes the optimiser's state
        figures["epoch"] = extrapolate_epoch(trainer, experiment.loaders["train"], SECONDS, warm=1)
        file = folder / "checkpoint.pt"
        figures["checkpoint"] = time_call(lambda: save(file, capture_state(trainer)), clock)
        seconds = time_call(lambda: trainer.evaluate(valid, load_best_model=False), clock)
        figures["evaluation"] = 1000 * seconds / valid.num_targets
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


def tabulate(axis: str, figures: dict[Cell, dict[str, float]]) -> str:
    """Return the table of an axis: each side's figures by size, then how fast they grow.

    Args:
        axis: name in AXES.
        figures: cell -> its figures, none of a cell that was stopped.
    """
    rows = []
    for side in SIDES[axis]:
        cells = [cell for cell in list_cells(axis) if cell.side == side]
        sizes = pd.Series([getattr(cell, axis) for cell in cells])
        measured = pd.DataFrame([figures[cell] for cell in cells], columns=[*FIGURES], dtype=float)
        for size, line in zip(sizes, measured.to_numpy(), strict=True):
            problem = " (stopped at its limit)" if np.isnan(line).all() else ""
            rows.append([side, f"{size:,}{problem}", *map(show_number, line)])
        rows.append([side, "exponent", *(show_slope(sizes, measured[name]) for name in FIGURES)])
    return table(["", AXES[axis], *FIGURES.values()], rows)


def main() -> None:
    """Measure every cell, and write the page."""
    figures: dict[Cell, dict[str, float]] = {}  # the centre, which is on two axes, once
    with tempfile.TemporaryDirectory() as folder:
        for axis in AXES:
            for cell in list_cells(axis):
                if cell not in figures:
                    figures[cell] = run(cell, Path(folder))
    conditions = f"{machine(1)}; {SECONDS:g} CPU-seconds of steps a cell, one turn."
    replace_section(RESULTS / "scale.md", "scale", conditions)
    parts = ["# How cost grows: all cells"]
    for axis, name in AXES.items():
        parts += [f"## By {name}", tabulate(axis, figures)]
    (RESULTS / "tables" / "scale.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
