"""Pictures of square matrices over events: attention weights and positional kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recbole_pos.inspect.pictures import new_figure, set_title, whole_numbers, write

ABREAST = 4  # panels of one kind in a row


def draw_attention(
    weights: Sequence[np.ndarray], titles: Sequence[str], label: str, file: Path
) -> Path:
    """A panel per layer and head; the last row is the newest event.

    Args:
        weights: [h, t, t] of each layer, rows are queries.
        titles: lines of the title.
        label: what the colours are.
        file: to write.
    """
    heads = max(len(layer) for layer in weights)
    panels = [
        (f"layer {number}" + (f", head {head + 1}" if heads > 1 else ""), layer[head])
        for head in range(heads)
        for number, layer in enumerate(weights, 1)
    ]
    columns = len(weights) if heads > 1 else min(len(weights), ABREAST)
    axes = ("key event (0: newest)", "query event (0: newest)")
    return _draw(panels, columns, titles, axes, label, file)


def draw_triangles(
    matrices: dict[str, np.ndarray], titles: Sequence[str], label: str, file: Path
) -> Path:
    """What events are to those before them, a panel each; the last row is the newest event.

    Args:
        matrices: [t, t] of at most 1 by name; what is above the diagonal is not shown.
        titles: lines of the title.
        label: what the colours are.
        file: to write.
    """
    axes = ("event before (0: newest)", "event (0: newest)")
    before = {name: np.where(np.tri(len(m), dtype=bool), m, np.nan) for name, m in matrices.items()}
    # from the smallest up: trained vectors may be short, and differ by little
    low = min(float(np.nanmin(matrix)) for matrix in before.values())
    style = {"cmap": "Blues", "vmin": min(low, 1.0 - 1e-6), "vmax": 1.0}
    columns = min(len(before), ABREAST)
    return _draw(list(before.items()), columns, titles, axes, label, file, style)


def draw_kernel(factors: dict[str, np.ndarray], title: str, file: Path) -> Path:
    """What is left of the factors of a kernel without the identity, which they begin as.

    Args:
        factors: [n, n] by name, see ``kernel_factors`` in ``inspect/kernel.py``.
        title: which model and data.
        file: to write.
    """
    panels = [
        (name.replace(",", " - I,", 1), matrix - np.eye(len(matrix)))
        for name, matrix in factors.items()
    ]
    lines = [f"{title}: positional kernel"]
    names = " and ".join(dict.fromkeys(name.split(",")[0] for name in factors))
    lines.append(f"{names} without the identity that they begin as")
    axes = ("column: event (0: newest)", "row: event (0: newest)")
    return _draw(panels, min(len(panels), ABREAST), lines, axes, "weight - identity", file)


def _draw(
    panels: Sequence[tuple[str, np.ndarray]],
    columns: int,
    titles: Sequence[str],
    axes: tuple[str, str],
    label: str,
    file: Path,
    style: dict[str, Any] | None = None,
) -> Path:
    """Matrices with titles in rows of some columns, on one scale; only outer panels have ticks."""
    rows = -(-len(panels) // columns)
    side = min(3.2, max(1.5, 12 / max(columns, rows)))
    width, height = max(side * columns + 1.8, 5.5), side * rows + 0.7 + 0.25 * len(titles)
    figure = new_figure(width, height, square=True)
    grid = figure.subplots(rows, columns, squeeze=False)
    style = style or scale([matrix for _, matrix in panels])
    size = 10 if side > 2.2 else 8
    image: Any = None
    for place, panel in enumerate(grid.flat):
        if place >= len(panels):
            panel.set_visible(False)
            continue
        name, matrix = panels[place]
        n = len(matrix)
        extent = (0.5 - n, 0.5, 0.5, 0.5 - n)
        image = panel.imshow(matrix, extent=extent, interpolation="nearest", **style)
        panel.set_title(name, fontsize=size)
        first, last = place % columns == 0, place + columns >= len(panels)
        panel.tick_params(labelsize=size, labelleft=first, labelbottom=last)
        panel.set_xlabel(axes[0] if last else "", fontsize=size)
        panel.set_ylabel(axes[1] if first else "", fontsize=size)
        whole_numbers(panel.xaxis, max(2, int(2 * side)))
        whole_numbers(panel.yaxis, max(2, int(2 * side)))
    figure.colorbar(image, ax=grid, shrink=0.8, label=label, aspect=20 * min(rows, 3))
    set_title(figure, *titles)
    return write(figure, file)


def scale(matrices: Sequence[np.ndarray]) -> dict[str, Any]:
    """Colours from zero up; to both sides of zero where something is below it."""
    top = max(float(np.abs(matrix).max()) for matrix in matrices) or 1.0
    if min(float(matrix.min()) for matrix in matrices) < 0:
        return {"cmap": "RdBu_r", "vmin": -top, "vmax": top}
    return {"cmap": "Blues", "vmin": 0.0, "vmax": top}
