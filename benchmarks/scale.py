"""``make bench-scale``: how cost grows with interactions, length and items, model by model.

CPU-seconds and peak memory of a start, an epoch (some steps, extrapolated), a checkpoint and an
evaluation (some users), along one axis at a time. Every cell is a process of its own on one thread,
with 12 GiB and 150 CPU-seconds at most; one that does not fit is written as such. Writes
``results/scale.md`` and ``scale.png``. ARGS="--quick" has short steps, "--full" 20 million
interactions for every model, "--most 5000000" none, "--found FILE" keeps cells there and resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from data import GENERATED, write_log  # noqa: E402
from page import RESULTS, machine, replace_section, table  # noqa: E402
from training import build, time_steps  # noqa: E402

from recbole_pos.data.loaders import TargetLoader  # noqa: E402
from recbole_pos.experiment import checkpoint  # noqa: E402
from recbole_pos.experiment.build import Experiment  # noqa: E402
from recbole_pos.experiment.folder import peak_rss_mb  # noqa: E402
from recbole_pos.experiment.memory import keep_freed_memory  # noqa: E402
from recbole_pos.experiment.state import capture  # noqa: E402

MEMORY = 12 << 30  # bytes of address space
CPU = 150  # seconds of a cell, all phases together
USERS = 512  # that are evaluated
PRODUCTS = 2e8  # logits of a step at most: a second, and not minutes, where there are many items
FIRST = "first start"  # a side that reads the text, and leaves the cache that others start from


@dataclass(frozen=True)
class Cell:
    """A model and the sizes that it is measured at.

    Attributes:
        side: the model, and a loss that is not its own after a comma; or FIRST.
        axis: the size that is varied.
        events, items, length: sizes; ``each`` is the mean number of interactions of a user.
    """

    side: str
    axis: str
    events: int
    items: int
    length: int
    each: int

    @property
    def size(self) -> int:
        """The size on its axis."""
        return int(getattr(self, self.axis))

    @property
    def log(self) -> str:
        """Name of the folder of its dataset."""
        return f"{self.events}-{self.items}-{self.each}"

    @property
    def key(self) -> str:
        """Name of the measurement, on whichever axis: the centre is measured once."""
        return f"{self.side} {self.log} {self.length}"

    @property
    def batch(self) -> int:
        """Windows of a step."""
        return int(min(max(PRODUCTS / (self.items * self.length), 1), 128))


class FirstBatches(TargetLoader):
    """The first batches of a loader."""

    num_batches = 1

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), self.num_batches)


def make_options(cell: Cell, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return model and options: defaults but for the sizes."""
    model, _, loss = cell.side.partition(", ")
    model = "PosSASRec" if model == FIRST else model
    options: dict[str, Any] = {
        "data_path": str(folder / cell.log),
        "load_col": {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id"]},
        "MAX_ITEM_LIST_LENGTH": cell.length,
    }
    if model != "PosRec":  # whose batch is of prefixes, one target each
        options["train_batch_size"] = 128 if loss else cell.batch
    return model, options | ({"loss_type": loss} if loss else {})


def train(experiment: Experiment, seconds: float) -> tuple[float, int]:
    """Return CPU-seconds of an epoch, extrapolated from some steps, and their number."""
    trainer = experiment.trainer
    loader = trainer.training_loader(experiment.loaders["train"])
    # the first step makes the optimiser's state
    timed = time_steps(trainer, loader, seconds, warm=1, clock=time.process_time)
    return timed.seconds / timed.targets * loader.num_targets, timed.steps


def evaluate(experiment: Experiment) -> float:
    """Return CPU-seconds of a thousand users."""
    loader: Any = experiment.loaders["valid"]
    batch_size = experiment.config["eval_batch_size"]
    loader.__class__ = FirstBatches
    loader.num_batches = -(-USERS // batch_size)
    began = time.process_time()
    experiment.trainer.evaluate(loader, load_best_model=False)
    users = min(loader.num_batches * batch_size, len(loader.rows))
    return (time.process_time() - began) / users * 1000


def measure(cell: Cell, folder: Path, seconds: float, send: Callable[..., None]) -> None:
    """Send the figures of every phase when it ends, and the peak of memory so far in MB."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU, spent + CPU + 5))
    keep_freed_memory()
    model, options = make_options(cell, folder)
    with tempfile.TemporaryDirectory() as run_dir:
        send(before_mb=peak_rss_mb())
        began = time.process_time()
        experiment = build(model, GENERATED, **options)
        send(start=time.process_time() - began, start_mb=peak_rss_mb())
        if cell.side == FIRST:
            return
        epoch, steps = train(experiment, seconds)
        send(epoch=epoch, steps=steps, epoch_mb=peak_rss_mb())
        file, began = Path(run_dir, "checkpoint.pt"), time.process_time()
        checkpoint.save(file, capture(experiment.trainer))
        size = file.stat().st_size / 1e6
        send(checkpoint=time.process_time() - began, checkpoint_size=size)
        send(evaluation=evaluate(experiment), peak_mb=peak_rss_mb())


MODELS = ("PosSASRec", "FPARec", "KernelAttention", "TORoPE", "AttrFormer", "PosRec")
SCE = "PosSASRec, SCE"
CENTRE = Cell("", "events", 1_000_000, 27_000, 200, 143)
EVENTS = (1_000_000, 5_000_000, 20_000_000)
LENGTHS = (50, 300, 2_000)
ITEMS = (10_000, 27_000, 100_000, 1_000_000)
LONG = 2_500  # interactions of a user on the axis of lengths, so that every window is full


def make_cells(full: bool) -> Iterator[Cell]:
    """Yield the cells, axis by axis; the largest dataset has one model unless ``full``."""
    for items in ITEMS:
        cell = replace(CENTRE, axis="items", items=items)
        yield from (replace(cell, side=side) for side in (FIRST, *MODELS, SCE))
    for length in LENGTHS:
        cell = replace(CENTRE, axis="length", length=length, each=LONG)
        sides = (FIRST,) * (length == LENGTHS[0]) + MODELS
        yield from (replace(cell, side=side) for side in sides)
    for events in EVENTS:
        cell = replace(CENTRE, events=events)
        sides = MODELS if full or events < EVENTS[-1] else MODELS[:1]
        yield from (replace(cell, side=side) for side in (FIRST, *sides))


def write_dataset(cell: Cell, folder: Path) -> None:
    """Write interactions and items of a cell; sides but the first start need the cache, too."""
    if (folder / cell.log).exists():
        return
    interactions = write_log(folder / cell.log, cell.events, cell.each, cell.items)
    names = "".join(f"i{item}\n" for item in range(cell.items))  # also those without interactions
    interactions.with_suffix(".item").write_text(f"item_id:token\n{names}")
    if cell.side != FIRST:  # its first start was measured in an earlier call
        run(replace(cell, side=FIRST), folder, 0)


def measure_quietly(cell: Cell, folder: Path, seconds: float, pipe: Connection) -> None:
    """Measure a cell in a process of its own, and send its figures, or what went wrong."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    try:
        measure(cell, folder, seconds, lambda **figures: pipe.send(figures))
    except BaseException as error:
        is_memory = any(word in str(error) for word in ("memory", "GiB"))
        is_memory = is_memory or isinstance(error, MemoryError)
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        pipe.send({"wrong": "memory" if is_memory else problem})
    pipe.close()
    os._exit(0)


def run(cell: Cell, folder: Path, seconds: float) -> dict[str, Any]:
    """Return the figures of a cell, and what ended it early."""
    write_dataset(cell, folder)
    context = multiprocessing.get_context("fork")  # with everything imported
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure_quietly, args=(cell, folder, seconds, sender))
    process.start()
    sender.close()
    figures: dict[str, Any] = {}
    while True:
        try:
            figures |= receiver.recv()
        except EOFError:
            break
    process.join()
    if process.exitcode:  # the kernel ends one that is over its limit
        figures["wrong"] = f"over {CPU} CPU-seconds" if process.exitcode in (-24, -9) else "failed"
    return figures


Results = list[tuple[Cell, dict[str, Any]]]
AXES = {"items": "items", "length": "window length L", "events": "interactions"}
FIGURES = {
    "start": "start, s",
    "epoch": "epoch, s",
    "evaluation": "1,000 users, s",
    "checkpoint": "checkpoint, s",
    "peak_mb": "peak, MB",
}
SHOWN = {"epoch": "CPU-seconds of an epoch", "peak_mb": "peak memory, MB"}
PAPER = 100_000_000  # interactions, of which the fits are extrapolated
GROWS = ("start", "epoch", "peak_mb")  # figures that grow with interactions


def on_axis(results: Results, axis: str) -> Iterator[tuple[str, list[tuple[int, dict[str, Any]]]]]:
    """Yield each side with its sizes on an axis, and the figures of each size."""
    sides: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for cell, figures in results:
        if cell.axis == axis:
            if cell.side == FIRST and "start_mb" in figures:  # its last phase
                figures = {**figures, "peak_mb": figures["start_mb"]}
            sides[cell.side].append((cell.size, figures))
    yield from sides.items()


def points(cells: list[tuple[int, dict[str, Any]]], figure: str) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes and values of a figure, where it was measured."""
    measured = [(size, figures[figure]) for size, figures in cells if figure in figures]
    return np.array([size for size, _ in measured]), np.array([value for _, value in measured])


def slope(sizes: np.ndarray, values: np.ndarray) -> float:
    """Return the slope of the logarithms, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def extrapolate(sizes: np.ndarray, values: np.ndarray, size: float) -> float:
    """Return a constant and a part proportional to the size, fitted and neither below 0.

    Relative errors are fitted, so that the small sizes count too.
    """
    from scipy.optimize import nnls

    columns = np.stack([np.ones(len(sizes)), sizes / size], 1) / values[:, None]
    constant, part = nnls(columns, np.ones(len(sizes)))[0]
    return float(constant + part)


def show_number(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def make_values(results: Results, axis: str) -> str:
    """Return the table of all figures of an axis."""
    rows = []
    for side, cells in on_axis(results, axis):
        for size, figures in cells:
            row = [show_number(figures[name]) if name in figures else "" for name in FIGURES]
            problem = f" (stopped: {figures['wrong']})" if "wrong" in figures else ""
            rows.append([side, f"{size:,}{problem}", *row])
    return table(["", AXES[axis], *FIGURES.values()], rows)


def make_slopes(results: Results, axis: str) -> str:
    """Return the table of exponents: over all sizes, and between the two largest."""
    rows = []
    for side, cells in on_axis(results, axis):
        row, fitted = [], []
        for figure in FIGURES:
            sizes, values = points(cells, figure)
            if len(sizes) < 2:
                row.append("")
                continue
            fitted = list(sizes)
            end = f" ({slope(sizes[-2:], values[-2:]):.2f})" if len(sizes) > 2 else ""
            row.append(f"{slope(sizes, values):.2f}{end}")
        if fitted:
            rows.append([side, *row, f"{fitted[0]:,} to {fitted[-1]:,}"])
    heads = [name.rpartition(", ")[0] for name in FIGURES.values()]
    return table(["", *heads, "fitted on"], rows)


def make_extrapolation(results: Results) -> str:
    """Return the table of an extrapolation to a dataset that was not generated.

    A start and a peak grow so little that two sizes do not show it.
    """
    rows = []
    for side, cells in on_axis(results, "events"):
        row = []
        for figure in GROWS:
            sizes, values = points(cells, figure)
            is_fitted = len(sizes) > (1 if figure == "epoch" else 2)
            row.append(show_number(extrapolate(sizes, values, PAPER)) if is_fitted else "")
        rows.append([side, *row, f"{cells[-1][0]:,}"])
    return table(["", *(FIGURES[figure] for figure in GROWS), "fitted up to"], rows)


def make_cells_page(results: Results) -> str:
    """Return all exponents and figures, as a page of their own."""
    parts = ["# How cost grows: all cells"]
    for axis, name in AXES.items():
        parts += [f"## By {name}", make_slopes(results, axis), make_values(results, axis)]
    return "\n\n".join(parts) + "\n"


def make_section(results: Results) -> str:
    """Return the picture, and the extrapolation."""
    picture = "![An epoch and the peak of memory, by items, length and interactions](scale.png)"
    heading = "## 100 million interactions, on paper"
    return "\n\n".join((picture, heading, make_extrapolation(results)))


def draw(results: Results, file: Path) -> None:
    """Draw epoch and memory over each axis, both logarithmic."""
    figure, panels = plt.subplots(
        len(SHOWN), len(AXES), figsize=(12, 7), sharey="row", layout="constrained"
    )
    for row, (name, title) in zip(panels, SHOWN.items(), strict=True):
        for panel, (axis, label) in zip(row, AXES.items(), strict=True):
            for side, cells in on_axis(results, axis):
                sizes, values = points(cells, name)
                if side != FIRST and len(sizes):
                    color = "black" if "SCE" in side else None
                    panel.plot(sizes, values, "o-", label=side, color=color, markersize=4)
            panel.set(xscale="log", yscale="log", xlabel=label)
            sizes = sorted({cell.size for cell, _ in results if cell.axis == axis})
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
            panel.minorticks_off()
            panel.grid(True, which="major", alpha=0.3)
        row[0].set_ylabel(title)
        row[0].yaxis.set_major_formatter("{x:,.0f}")
        if name == "peak_mb":
            row[0].set_yticks([500 * 2**step for step in range(5)])
    lines, names = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure every cell that is missing, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3, help="CPU-seconds of steps of a cell")
    parser.add_argument(
        "--quick", action="store_true", help="two CPU-seconds, 5M interactions at most"
    )
    parser.add_argument(
        "--most", type=int, default=EVENTS[-1], help="interactions of the largest dataset"
    )
    parser.add_argument(
        "--full", action="store_true", help="20 million interactions for every model"
    )
    parser.add_argument("--found", type=Path, help="file of cells that were measured")
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds = min(given.seconds, 2) if given.quick else given.seconds
    most = min(given.most, EVENTS[1]) if given.quick else given.most
    done: dict[str, dict[str, Any]] = {}
    if given.found and given.found.exists():
        done = json.loads(given.found.read_text())
    cells = [cell for cell in make_cells(given.full) if cell.events <= most]
    with tempfile.TemporaryDirectory() as folder:
        for number, cell in enumerate(cells, 1):
            if cell.key in done:
                continue
            done[cell.key] = run(cell, Path(folder), seconds)
            figures = done[cell.key].items()
            shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in figures}
            print(f"{number}/{len(cells)}", asdict(cell), shown, flush=True)
            if given.found:
                given.found.write_text(json.dumps(done))
    print(f"{sum(os.times()[:4]):,.0f} CPU-seconds")
    results = [(cell, done[cell.key]) for cell in cells]
    draw(results, given.out.with_suffix(".png"))
    conditions = f"{machine()}; {seconds:g} CPU-seconds of steps a cell, one turn."
    replace_section(given.out, "scale", f"{conditions}\n\n{make_section(results)}")
    tables = given.out.parent / "tables"
    tables.mkdir(exist_ok=True)
    (tables / given.out.name).write_text(make_cells_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
