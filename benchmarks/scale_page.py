"""Tables, slopes and the picture of ``scale.py``."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from page import table
from scale_cell import FIRST, Cell

os.environ.setdefault("MPLBACKEND", "agg")
import matplotlib.pyplot as plt  # noqa: E402

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
            sizes = f"{fitted[0]:,} to {fitted[-1]:,}, {len(fitted)} sizes"
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
    parts = ["![An epoch and the peak of memory, by items, length and events](scale.png)"]
    for axis, name in AXES.items():
        parts += [f"## By {name}", slopes(found, axis)]
    parts += ["## 100 million events, on paper", on_paper(found)]
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
