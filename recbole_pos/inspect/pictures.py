"""Shared parts of all pictures: sizes, colours, titles that fit, heat maps over events, files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from recbole_pos.errors import UsageError

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, VERMILION, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GRAY = "#666666"
DPI = 120
TITLE, SMALL = 11, 8  # points
LONGEST = 32  # characters of a name
ABREAST = 4  # heat maps in a row


def new_figure(width: float, height: float, square: bool = False) -> Figure:
    """Return an empty figure in inches whose layout cuts nothing off; panels may be ``square``."""
    layout: Literal["compressed", "constrained"] = "compressed" if square else "constrained"
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def set_title(figure: Figure, *lines: str) -> None:
    """Set the title of a whole figure; lines that are too wide are broken.

    Text is not parsed: a dollar in a name starts no formula.
    """
    title = figure.suptitle("", fontsize=TITLE, parse_math=False)
    parts = [part for line in lines if line for part in _break_line(line, figure, title)]
    title.set_text("\n".join(parts))


def _break_line(line: str, figure: Figure, title: Text) -> list[str]:
    """Break a line so that it fits the figure as text of ``title``, at 8 characters at least."""
    canvas: Any = figure.canvas  # FigureCanvasAgg, which has a renderer
    renderer, room = canvas.get_renderer(), 0.97 * figure.bbox.width
    width = len(line)
    while True:
        parts = textwrap.wrap(line, width)
        title.set_text("\n".join(parts))
        needed = title.get_window_extent(renderer).width
        if needed <= room or width <= 8:
            return parts
        width = max(8, min(width - 1, int(width * room / needed)))


def shorten(name: str, limit: int = LONGEST) -> str:
    """Return a name of at most ``limit`` characters, its middle replaced by an ellipsis."""
    if len(name) <= limit:
        return name
    head = limit // 2
    return f"{name[:head]}…{name[len(name) - (limit - head - 1) :]}"


def set_whole_ticks(axis: Any, most: int | Literal["auto"] = "auto") -> None:
    """Put the ticks of an axis on whole numbers only, at most ``most`` steps."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def write(figure: Figure, file: str | Path, *titles: str) -> Path:
    """Save a figure with lines of a title, and return its file.

    Raises:
        UsageError: if the file cannot be written.
    """
    if titles:
        set_title(figure, *titles)
    try:
        figure.savefig(file, dpi=DPI)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error
    return Path(file)


def color_scale(matrices: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the colour map of matrices: from zero up, or diverging if a value is below zero."""
    top = max(float(np.abs(matrix).max()) for matrix in matrices) or 1.0
    if min(float(matrix.min()) for matrix in matrices) < 0:
        return {"cmap": "RdBu_r", "vmin": -top, "vmax": top}
    return {"cmap": "Blues", "vmin": 0.0, "vmax": top}


def draw_maps(
    panels: Sequence[tuple[str, np.ndarray]],
    titles: Sequence[str],
    axes: tuple[str, str],
    label: str,
    file: Path,
    columns: int | None = None,
    style: dict[str, Any] | None = None,
) -> Path:
    """Draw square matrices over events, a panel each, on one scale; the last row is the newest.

    Args:
        panels: title and [n, n] matrix of each panel; ticks count from 0, the newest event.
        titles, file: of the picture.
        axes: labels of columns and of rows, shown at outer panels only.
        label: label of the colours.
        columns: number of panels in a row.
        style: colour map; :func:`color_scale` by default.
    """
    columns = columns or min(len(panels), ABREAST)
    rows = math.ceil(len(panels) / columns)
    side = min(3.2, max(1.5, 12 / max(columns, rows)))
    width, height = max(side * columns + 1.8, 5.5), side * rows + 0.7 + 0.25 * len(titles)
    figure = new_figure(width, height, square=True)
    grid = figure.subplots(rows, columns, squeeze=False)
    style = style or color_scale([matrix for _, matrix in panels])
    size = 10 if side > 2.2 else 8
    image: Any = None
    for panel in grid.flat[len(panels) :]:
        panel.set_visible(False)
    for place, (panel, (name, matrix)) in enumerate(zip(grid.flat, panels, strict=False)):
        n = len(matrix)
        extent = (0.5 - n, 0.5, 0.5, 0.5 - n)
        image = panel.imshow(matrix, extent=extent, interpolation="nearest", **style)
        panel.set_title(name, fontsize=size)
        first, last = place % columns == 0, place + columns >= len(panels)
        panel.tick_params(labelsize=size, labelleft=first, labelbottom=last)
        panel.set_xlabel(axes[0] if last else "", fontsize=size)
        panel.set_ylabel(axes[1] if first else "", fontsize=size)
        for axis in (panel.xaxis, panel.yaxis):
            set_whole_ticks(axis, max(2, int(2 * side)))
    figure.colorbar(image, ax=grid, shrink=0.8, label=label, aspect=20 * min(rows, 3))
    return write(figure, file, *titles)


def draw_triangles(
    matrices: dict[str, np.ndarray], titles: Sequence[str], label: str, file: Path
) -> Path:
    """Draw the values of events with the events before them, a panel for each matrix.

    ``matrices`` are [t, t] by name, with values up to 1; above the diagonal nothing is drawn.
    """
    lower = {
        name: np.where(np.tri(len(matrix), dtype=bool), matrix, np.nan)
        for name, matrix in matrices.items()
    }
    # colours from the smallest value up: trained vectors may be short, and differ by little
    low = min(float(np.nanmin(matrix)) for matrix in lower.values())
    style = {"cmap": "Blues", "vmin": min(low, 1.0 - 1e-6), "vmax": 1.0}  # never an empty range
    axes = ("interaction before (0: newest)", "interaction (0: newest)")
    return draw_maps(list(lower.items()), titles, axes, label, file, style=style)
