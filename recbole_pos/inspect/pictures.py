"""What all pictures of the package share: sizes, colours, titles that fit, files."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, Literal

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


def new_figure(width: float, height: float, square: bool = False) -> Figure:
    """An empty figure, in inches, in which nothing is cut; ``square`` for panels that keep 1 : 1.

    Its text is taken as it is: a dollar in a name of the user's starts no formula.
    """
    layout: Literal["compressed", "constrained"] = "compressed" if square else "constrained"
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def set_title(figure: Figure, *lines: str) -> None:
    """A title over the whole figure, each line broken where it would leave the figure."""
    title = figure.suptitle("", fontsize=TITLE, parse_math=False)
    parts = [part for line in lines if line for part in _broken(line, figure, title)]
    title.set_text("\n".join(parts))


def _broken(line: str, figure: Figure, title: Text) -> list[str]:
    canvas: Any = figure.canvas  # of Agg
    renderer, room = canvas.get_renderer(), 0.97 * figure.bbox.width
    width = len(line)
    while True:
        parts = textwrap.wrap(line, width)
        title.set_text("\n".join(parts))
        taken = title.get_window_extent(renderer).width
        if taken <= room or width <= 8:
            return parts
        width = max(8, min(width - 1, int(width * room / taken)))


def shorten(name: str, limit: int = LONGEST) -> str:
    """A name of the user's that is too long for a picture, without its middle."""
    if len(name) <= limit:
        return name
    head = limit // 2
    return f"{name[:head]}…{name[len(name) - (limit - head - 1) :]}"


def whole_numbers(axis: Any, most: int | Literal["auto"] = "auto") -> None:
    """No ticks between whole numbers, and not more than fit."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def write(figure: Figure, file: Path) -> Path:
    """Save a figure.

    Raises:
        UsageError: if the file cannot be written.
    """
    try:
        figure.savefig(file, dpi=DPI)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error
    return file
