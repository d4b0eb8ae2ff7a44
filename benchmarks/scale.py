"""``make bench-scale``: how cost grows with events, length and items, model by model.

CPU-seconds and peak memory of a start, an epoch (some steps, taken for all), a checkpoint and an
evaluation (some users), along one axis at a time. Every cell is a process of its own on one thread,
with 12 GiB and 150 CPU-seconds at most; one that does not fit is written as such. Writes
``results/scale.md`` and ``scale.png``. ARGS="--quick" has short steps, "--full" 20 million events
for every model, "--most 5000000" none, "--found FILE" keeps cells there and resumes from them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import resource
import sys
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
from page import RESULTS, machine, replace_section, table  # noqa: E402
from reading import write_log  # noqa: E402

import recbole_pos  # noqa: E402, F401  (RecBole needs its fixes to start at all on this numpy)
from recbole_pos.config.posconfig import PosConfig  # noqa: E402
from recbole_pos.data.loaders import TargetLoader  # noqa: E402
from recbole_pos.experiment import checkpoint  # noqa: E402
from recbole_pos.experiment.build import Experiment, prepare  # noqa: E402
from recbole_pos.experiment.folder import peak_rss_mb  # noqa: E402
from recbole_pos.experiment.loss_watch import LossWatch  # noqa: E402
from recbole_pos.experiment.memory import keep_freed_memory  # noqa: E402
from recbole_pos.experiment.state import capture  # noqa: E402

MEMORY = 12 << 30  # bytes of address space
CPU = 150  # seconds of a cell, all phases together
USERS = 512  # who are evaluated
PRODUCTS = 2e8  # logits of a step at most: a second, and not minutes, where there are many items
FIRST = "first start"  # a side that reads the text, and leaves what others start from


@dataclass(frozen=True)
class Cell:
    """A model and the sizes that it is measured at.

    Attributes:
        side: the model, and a loss that is not its own after a comma; or FIRST.
        axis: the size that is varied.
        events, items, length: sizes; ``each`` is the mean number of events of a user.
    """

    side: str
    axis: str
    events: int
    items: int
    length: int
    each: int

    @property
    def size(self) -> int:
        """On its axis."""
        return int(getattr(self, self.axis))

    @property
    def log(self) -> str:
        """The name of its log's folder."""
        return f"{self.events}-{self.items}-{self.each}"

    @property
    def batch(self) -> int:
        """Windows of a step."""
        return int(min(max(PRODUCTS / (self.items * self.length), 1), 128))


class Some(TargetLoader):
    """The first batches."""

    most = 1

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), self.most)


def options(cell: Cell, folder: Path) -> tuple[str, dict[str, Any]]:
    """Model and options: defaults but for the sizes."""
    model, _, loss = cell.side.partition(", ")
    model = "PosSASRec" if model == FIRST else model
    found: dict[str, Any] = {
        "data_path": str(folder / cell.log),
        "load_col": {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id"]},
        "MAX_ITEM_LIST_LENGTH": cell.length,
        "show_progress": False,
    }
    if model != "PosRec":  # whose batch is of prefixes, one target each
        found["train_batch_size"] = 128 if loss else cell.batch
    return model, found | ({"loss_type": loss} if loss else {})


def train(made: Experiment, seconds: float) -> tuple[float, int]:
    """CPU-seconds of an epoch, by the targets of the steps that were made, and their number."""
    trainer, loader = made.trainer, made.trainer.training_loader(made.loaders["train"])
    watch = LossWatch(functools.partial(trainer._refuse, 0))
    loss, targets, begun = trainer.adapter.loss(loader.packed), 0, 0.0
    trainer.loader = loader  # as ``fit`` sets it; a checkpoint has its state
    trainer.model.train()
    loader.set_epoch(0)
    number = -1
    with trainer.precision.steps(), trainer.steps_in_rows():
        for number, batch in enumerate(loader.batches_on(trainer.device, "never")):
            if number == 1:  # the first makes the optimiser's state
                targets, begun = 0, time.process_time()
            trainer._step(loss, batch, watch, number)
            targets += len(batch)
            if number and time.process_time() - begun > seconds:
                break
        watch.compute_mean()
    return (time.process_time() - begun) / targets * loader.targets, number


def evaluate(made: Experiment) -> float:
    """CPU-seconds of a thousand users."""
    loader: Any = made.loaders["valid"]
    loader.__class__ = Some
    loader.most = -(-USERS // made.config["eval_batch_size"])
    begun = time.process_time()
    made.trainer.evaluate(loader, load_best_model=False)
    users = min(loader.most * made.config["eval_batch_size"], len(loader.rows))
    return (time.process_time() - begun) / users * 1000


def measure(cell: Cell, folder: Path, seconds: float, tell: Callable[..., None]) -> None:
    """Print every phase as soon as it is over: its figures, and the peak of memory so far in MB."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU, spent + CPU + 5))
    keep_freed_memory()
    model, given = options(cell, folder)
    with tempfile.TemporaryDirectory() as kept:
        config = PosConfig(model, "generated", None, given)
        tell(before_mb=peak_rss_mb())
        begun = time.process_time()
        made = prepare(config)
        tell(start=time.process_time() - begun, start_mb=peak_rss_mb())
        if cell.side == FIRST:
            return
        epoch, steps = train(made, seconds)
        tell(epoch=epoch, steps=steps, epoch_mb=peak_rss_mb())
        begun = time.process_time()
        checkpoint.save(Path(kept, "checkpoint.pt"), capture(made.trainer))
        size = Path(kept, "checkpoint.pt").stat().st_size / 1e6
        tell(checkpoint=time.process_time() - begun, checkpoint_size=size)
        tell(evaluation=evaluate(made), peak_mb=peak_rss_mb())


MODELS = ("PosSASRec", "FPARec", "KernelAttention", "TORoPE", "AttrFormer", "PosRec")
SCE = "PosSASRec, SCE"
CENTRE = Cell("", "events", 1_000_000, 27_000, 200, 143)
EVENTS = (1_000_000, 5_000_000, 20_000_000)
LENGTHS = (50, 300, 2_000)
ITEMS = (10_000, 27_000, 100_000, 1_000_000)
LONG = 2_500  # events of a user on the axis of lengths, so that every window is full


def cells(full: bool) -> Iterator[Cell]:
    """The grid, axis by axis; the largest log for one model unless all are asked for."""
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


def key(cell: Cell) -> str:
    """What is measured, on whichever axis: the centre is measured once."""
    return f"{cell.side} {cell.log} {cell.length}"


def make_log(cell: Cell, folder: Path) -> None:
    """Its log and catalogue, read once by others than the first start."""
    if (folder / cell.log).exists():
        return
    events = write_log(folder / cell.log, cell.events, cell.each, cell.items)
    names = "".join(f"i{item}\n" for item in range(cell.items))
    events.with_suffix(".item").write_text(f"item_id:token\n{names}")  # those without events too
    if cell.side != FIRST:  # in a grid that goes on
        run(replace(cell, side=FIRST), folder, 0)


def child(cell: Cell, folder: Path, seconds: float, pipe: Connection) -> None:
    """In a process of its own."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        measure(cell, folder, seconds, lambda **figures: pipe.send(figures))
    except BaseException as error:
        memory = isinstance(error, MemoryError) or any(w in str(error) for w in ("memory", "GiB"))
        wrong = "memory" if memory else f"{type(error).__name__}: {error}".splitlines()[0]
        pipe.send({"wrong": wrong})
    pipe.close()
    os._exit(0)


def run(cell: Cell, folder: Path, seconds: float) -> dict[str, Any]:
    """The output of a cell, and what ended it."""
    make_log(cell, folder)
    context = multiprocessing.get_context("fork")  # with everything imported
    mine, other = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(cell, folder, seconds, other))
    process.start()
    other.close()
    found: dict[str, Any] = {}
    while True:
        try:
            found |= mine.recv()
        except EOFError:
            break
    process.join()
    if process.exitcode:  # the kernel ends one that is over its limit
        found["wrong"] = f"over {CPU} CPU-seconds" if process.exitcode in (-24, -9) else "failed"
    return found


Found = list[tuple[Cell, dict[str, Any]]]
AXES = {"items": "items", "length": "window length L", "events": "events"}
FIGURES = {
    "start": "start, s",
    "epoch": "epoch, s",
    "evaluation": "1,000 users, s",
    "checkpoint": "checkpoint, s",
    "peak_mb": "peak, MB",
}
SHOWN = {"epoch": "CPU-seconds of an epoch", "peak_mb": "peak memory, MB"}
PAPER = 100_000_000  # events that are distinguished from the fits
GROWS = ("start", "epoch", "peak_mb")  # with events; what of the others seems to is noise


def on_axis(found: Found, axis: str) -> Iterator[tuple[str, list[tuple[int, dict[str, Any]]]]]:
    """Each side with its cells on an axis, by size."""
    sides: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for cell, figures in found:
        if cell.axis == axis:
            if cell.side == FIRST and "start_mb" in figures:  # its last phase
                figures = {**figures, "peak_mb": figures["start_mb"]}
            sides[cell.side].append((cell.size, figures))
    yield from sides.items()


def points(cells: list[tuple[int, dict[str, Any]]], figure: str) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and values of a figure, where it was reached."""
    there = [(size, figures[figure]) for size, figures in cells if figure in figures]
    return np.array([size for size, _ in there]), np.array([value for _, value in there])


def slope(sizes: np.ndarray, values: np.ndarray) -> float:
    """Of the logarithms, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def line_at(sizes: np.ndarray, values: np.ndarray, size: float) -> float:
    """What a constant and a part for each event, neither below 0, come to.

    Of relative errors, so that the small sizes count too.
    """
    from scipy.optimize import nnls

    columns = np.stack([np.ones(len(sizes)), sizes / size], 1) / values[:, None]
    constant, part = nnls(columns, np.ones(len(sizes)))[0]
    return float(constant + part)


def number(value: float) -> str:
    """Three figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def values(found: Found, axis: str) -> str:
    """All figures of an axis."""
    rows = []
    for side, cells in on_axis(found, axis):
        for size, figures in cells:
            row = [number(figures[f]) if f in figures else "" for f in FIGURES]
            missing = f" (stopped: {figures['wrong']})" if "wrong" in figures else ""
            rows.append([side, f"{size:,}{missing}", *row])
    return table(["", AXES[axis], *FIGURES.values()], rows)


def slopes(found: Found, axis: str) -> str:
    """Of every side's figures: over all sizes, and between the two largest."""
    rows = []
    for side, cells in on_axis(found, axis):
        row, fitted = [], []
        for figure in FIGURES:
            x, y = points(
                cells, figure if side != FIRST else {"peak_mb": "start_mb"}.get(figure, figure)
            )
            if len(x) < 2:
                row.append("")
                continue
            fitted = list(x)
            end = f" ({slope(x[-2:], y[-2:]):.2f})" if len(x) > 2 else ""
            row.append(f"{slope(x, y):.2f}{end}")
        if fitted:
            sizes = f"{fitted[0]:,} to {fitted[-1]:,}"
            rows.append([side, *row, sizes])
    heads = [name.rpartition(", ")[0] for name in FIGURES.values()]
    return table(["", *heads, "fitted on"], rows)


def on_paper(found: Found) -> str:
    """Return the extrapolation to a dataset that was not made."""
    rows = []
    for side, cells in on_axis(found, "events"):
        row = []
        for figure in GROWS:
            x, y = points(cells, figure)
            row.append(number(line_at(x, y, PAPER)) if len(x) > 1 else "")
        rows.append([side, *row, f"{cells[-1][0]:,}"])
    return table(["", *(FIGURES[figure] for figure in GROWS), "fitted up to"], rows)


def measured(found: Found) -> str:
    """Return all figures, as a page of their own."""
    parts = [f"## By {name}\n\n{values(found, axis)}" for axis, name in AXES.items()]
    return "\n\n".join(("# How cost grows: all cells", *parts)) + "\n"


def tables(found: Found) -> str:
    """Return the exponents, and what follows from them."""
    parts = ["![An epoch and the peak of memory, by items, length and interactions](scale.png)"]
    for axis, name in AXES.items():
        parts += [f"## By {name}", slopes(found, axis)]
    parts += ["## 100 million interactions, on paper", on_paper(found)]
    return "\n\n".join(parts)


def draw(found: Found, file: Path) -> None:
    """Epoch and memory over each axis, both logarithmic."""
    figure, panels = plt.subplots(
        len(SHOWN), len(AXES), figsize=(12, 7), sharey="row", layout="constrained"
    )
    for row, (name, title) in zip(panels, SHOWN.items(), strict=True):
        for panel, (axis, label) in zip(row, AXES.items(), strict=True):
            for side, cells in on_axis(found, axis):
                x, y = points(cells, name)
                if side != FIRST and len(x):
                    color = "black" if "SCE" in side else None
                    panel.plot(x, y, "o-", label=side, color=color, markersize=4)
            panel.set(xscale="log", yscale="log", xlabel=label)
            sizes = sorted({cell.size for cell, _ in found if cell.axis == axis})
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
    """Every cell that is not there yet; the page after each axis."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3, help="CPU-seconds of steps of a cell")
    parser.add_argument(
        "--quick", action="store_true", help="two CPU-seconds, 5M interactions at most"
    )
    parser.add_argument(
        "--most", type=int, default=EVENTS[-1], help="interactions of the largest log"
    )
    parser.add_argument(
        "--full", action="store_true", help="20 million interactions for every model"
    )
    parser.add_argument("--found", type=Path, help="file of cells that were measured")
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.md")
    given = parser.parse_args()
    sys.argv = sys.argv[:1]  # which RecBole's Config reads
    torch.set_num_threads(1)
    seconds = min(given.seconds, 2) if given.quick else given.seconds
    kept = given.found and given.found.exists()
    done: dict[str, dict[str, Any]] = json.loads(given.found.read_text()) if kept else {}
    most = min(given.most, EVENTS[1]) if given.quick else given.most
    grid = [cell for cell in cells(given.full) if cell.events <= most]
    with tempfile.TemporaryDirectory() as folder:
        for number, cell in enumerate(grid):
            if key(cell) in done:
                continue
            done[key(cell)] = run(cell, Path(folder), seconds)
            shown = {
                k: round(v, 2) if isinstance(v, float) else v for k, v in done[key(cell)].items()
            }
            print(f"{number + 1}/{len(grid)}", asdict(cell), shown, flush=True)
            if given.found:
                given.found.write_text(json.dumps(done))
    print(f"{sum(os.times()[:4]):,.0f} CPU-seconds")
    found = [(cell, done[key(cell)]) for cell in grid]
    draw(found, given.out.with_suffix(".png"))
    conditions = f"{machine()}; {seconds:g} CPU-seconds of steps a cell, one turn."
    replace_section(given.out, "scale", f"{conditions}\n\n{tables(found)}")
    (given.out.parent / "tables").mkdir(exist_ok=True)
    (given.out.parent / "tables" / given.out.name).write_text(measured(found), encoding="utf-8")


if __name__ == "__main__":
    main()
