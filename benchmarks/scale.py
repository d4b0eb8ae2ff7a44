"""``make bench-scale``: how cost grows with events, length and items, model by model.

CPU-seconds and peak memory of a start, an epoch (some steps, taken for all), a checkpoint and an
evaluation (some users), along one axis at a time. Every cell is a process of its own on one thread,
with 12 GiB and 150 CPU-seconds at most; one that does not fit is written as such. Writes
``results/scale.md`` and ``scale.png``. ARGS="--quick" has short steps, "--full" 20 million events
for every model, "--most 5000000" none, "--found FILE" keeps cells there and resumes from them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from page import RESULTS, machine, replace_section  # noqa: E402
from reading import write_log  # noqa: E402
from scale_cell import CPU, FIRST, Cell, measure  # noqa: E402
from scale_page import draw, measured, tables  # noqa: E402

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


def main() -> None:
    """Every cell that is not there yet; the page after each axis."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3, help="CPU-seconds of steps of a cell")
    parser.add_argument("--quick", action="store_true", help="two CPU-seconds, 5M events at most")
    parser.add_argument("--most", type=int, default=EVENTS[-1], help="events of the largest log")
    parser.add_argument("--full", action="store_true", help="20 million events for every model")
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
