"""Pictures of what ``recbole-pos inspect`` finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

from recbole_pos.inspect.distance import Measured
from recbole_pos.inspect.found import RelationUse
from recbole_pos.inspect.heatmaps import scale
from recbole_pos.inspect.periods import HOURS, MARKED, Periods, near
from recbole_pos.inspect.pictures import (
    BLUE,
    GRAY,
    GREEN,
    PINK,
    SMALL,
    VERMILION,
    new_figure,
    set_title,
    shorten,
    whole_numbers,
    write,
)

AXES = ("attention distance (events)", "attention entropy (nats)", "attention distance (hours)")
COLORS = {"all queries": BLUE, "last query": VERMILION}
LAYERS = (BLUE, VERMILION, GREEN, PINK)


def draw_measures(measured: Measured, title: str, file: Path) -> Path:
    """A panel per measure over the layers: thin lines are heads, thick ones their mean."""
    uniform = measured.uniform
    heads = max(values.shape[-1] for values in measured.layers)
    # [layers, 2, measures, heads]; a layer whose heads are all the same may have one
    values = np.stack([np.broadcast_to(v, (*v.shape[:-1], heads)) for v in measured.layers])
    count, measures = len(values), uniform.shape[1]
    figure = new_figure(4.4 * measures, 4.4)
    layout: Any = figure.get_layout_engine()  # constrained
    layout.set(w_pad=0.12)
    panels = figure.subplots(1, measures, squeeze=False)[0]
    x = np.arange(1, count + 1)
    for number, panel in enumerate(panels):
        for which, (queries, color) in enumerate(COLORS.items()):
            if heads > 1:
                _heads(panel, x, values[:, which, number], color)
            mean = values[:, which, number].mean(-1)
            panel.plot(x, mean, "-o", color=color, linewidth=2.5, markersize=8, label=queries)
            label = f"{queries}, equal weights"
            panel.axhline(uniform[which, number], color=color, linestyle=":", label=label)
        top = max(values[:, :, number].max(), uniform[:, number].max())
        panel.set(xlabel="layer", ylabel=AXES[number], ylim=(0, 1.07 * top or 1))
        panel.set(xlim=(0.5, count + 0.5), xticks=x[:: -(-count // 16)])
        panel.grid(axis="y", alpha=0.3)
    set_title(figure, title, "small marks: heads; large ones: their mean" if heads > 1 else "")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return write(figure, file)


def _heads(panel: Any, x: np.ndarray, values: np.ndarray, color: str) -> None:
    """[layers, heads] as thin lines; beside the mean where there is one layer and so no line."""
    style: dict[str, Any] = {"color": color, "alpha": 0.5, "markersize": 4}
    if len(x) > 1:
        panel.plot(x, values, "-o", linewidth=0.8, **style)
    else:
        step = min(0.06, 0.4 / values.shape[1])
        panel.plot(1 + step * np.arange(1, values.shape[1] + 1), values[0], "o", **style)


def draw_periods(periods: list[Periods], title: str, file: Path) -> Path:
    """A row of marks per layer, or per group of equal heads, on a logarithmic axis.

    Args:
        found: as of :func:`learned_periods`; those without any period have no row.
        title: of the picture.
        file: to write.
    """
    periods = [group for group in periods if group.hours]
    figure = new_figure(9.5, 2.3 + 0.4 * len(periods))
    panel = figure.subplots()
    several = len({group.scheme for group in periods}) > 1
    rows = range(len(periods), 0, -1)
    for row, group in zip(rows, periods, strict=True):
        if group.learned:
            style: dict[str, Any] = {"color": "black", "markersize": 9, "alpha": 0.4}
            panel.plot(group.started, [row] * len(group.started), "|", **style)
        for marked, shape, color in ((False, "o", GRAY), (True, "D", VERMILION)):
            hours = [hour for hour in group.hours if bool(near(hour)) == marked]
            panel.plot(hours, [row] * len(hours), shape, color=color, alpha=0.75, markersize=7)
        if group.still:
            text = f"{group.still} of {group.still + len(group.hours)} planes without time"
            _note(
                panel,
                text,
                (1, row),
                ("axes fraction", "data"),
                (6, 0),
                va="center",
                fontsize=SMALL,
            )
    for name, period in HOURS.items():
        panel.axvline(period, color=BLUE, alpha=0.5, linewidth=1, zorder=0)
        _note(panel, name, (period, 1), ("data", "axes fraction"), (0, 4), ha="center",
              color=BLUE)  # fmt: skip
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda hours, _: f"{hours:,g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    names = [f"{group.scheme}, {group.label}" if several else group.label for group in periods]
    panel.set_yticks(rows, names)
    panel.set(ylim=(0.4, len(periods) + 0.6))
    learned = any(group.learned for group in periods)
    origin = "learned; strokes: before training" if learned else "fixed by the configuration"
    near_what = f"diamonds: within 15% of {', '.join(f'a {name}' for name in MARKED)}"
    panel.set_xlabel("period (hours)")
    panel.grid(axis="x", alpha=0.2)
    set_title(figure, f"{title}: periods after which time angles repeat", f"{origin}; {near_what}")
    return write(figure, file)


def draw_encoding(vectors: dict[int, np.ndarray], title: str, file: Path) -> Path:
    """Vectors of sessions, and below them their dot products, in one session and between two.

    Args:
        vectors: [length, d] by length, the oldest event first.
        title: of the picture.
        file: to write.
    """
    vectors = {length: rows.astype(np.float64) for length, rows in vectors.items()}
    lengths = list(vectors)
    pairs = [(a, a) for a in lengths] + list(combinations(lengths, 2))
    products = {(a, b): vectors[a] @ vectors[b].T for a, b in pairs}
    columns = min(len(pairs), 4)
    rows = -(-len(pairs) // columns)
    figure = new_figure(max(4.6 * len(lengths), 3.5 * columns) + 0.8, 3.4 + 3.6 * rows)
    halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.25 * rows))
    upper, lower = halves
    panels = upper.subplots(1, len(lengths), squeeze=False)[0]
    top = max(np.abs(rows).max() for rows in vectors.values())
    for panel, (length, values) in zip(panels, vectors.items(), strict=True):
        style = {"cmap": "RdBu_r", "vmin": -top, "vmax": top, "aspect": "auto"}
        image = panel.imshow(values, interpolation="nearest", **style)
        panel.set(xlabel="column of the encoding", ylabel="event (0: oldest)")
        panel.set_title(f"{length} events", fontsize=10)
        whole_numbers(panel.xaxis)
        whole_numbers(panel.yaxis)
    upper.colorbar(image, ax=panels, label="value")
    panels = lower.subplots(rows, columns, squeeze=False)
    for panel in panels.flat[len(pairs) :]:
        panel.set_visible(False)
    low, high = (pick(p for m in products.values() for p in m.flat) for pick in (min, max))
    for panel, ((a, b), product) in zip(panels.flat, products.items(), strict=False):
        style = {"cmap": "viridis", "vmin": low, "vmax": high, "aspect": "auto"}
        image = panel.imshow(product, interpolation="nearest", **style)
        panel.set(xlabel=f"event of {b}", ylabel=f"event of {a}")
        panel.set_title("within one history" if a == b else "between two", fontsize=10)
        whole_numbers(panel.xaxis)
        whole_numbers(panel.yaxis)
    lower.colorbar(image, ax=panels, label="dot product")
    set_title(figure, title)
    return write(figure, file)


def draw_relations(uses: Sequence[RelationUse], title: str, file: Path) -> Path:
    """What relations add, layer by layer, and beside it W^R of every layer.

    Args:
        uses: of ``inspect/relations.py``.
        title: of the picture.
        file: to write.
    """
    names = [shorten(use.field) + "\n(users; state = 1)" * (use.source == "user") for use in uses]
    heads = [use for use in uses if use.heads]
    layers = len(uses[0].adds)
    maps = layers if heads else 0
    widths = [3.4 + 0.09 * max(map(len, names))]
    widths += [max(1.2, 0.6 + 0.14 * len(w)) for use in heads[:1] for w in use.heads]
    figure = new_figure(sum(widths) + 1.2, 2.2 + 0.22 * (layers + 1) * len(uses))
    panels = figure.subplots(1, 1 + maps, squeeze=False, width_ratios=widths)[0]
    place = np.arange(len(uses))
    for layer in range(layers):
        adds = [use.adds[layer] for use in uses]
        shift = 0.8 * ((layer + 0.5) / layers - 0.5)
        color, light = LAYERS[layer % len(LAYERS)], 0.6 ** (layer // len(LAYERS))
        style = {"color": color, "alpha": light, "label": f"layer {layer + 1}"}
        panels[0].barh(place + shift, adds, 0.8 / layers, **style)
    panels[0].set(
        yticks=place,
        ylim=(len(uses) - 0.5, -0.5),
        xlim=(0, None),
        xlabel="adds (self-attention = 1)",
    )
    panels[0].set_yticklabels(names, parse_math=False)
    panels[0].grid(axis="x", alpha=0.3)
    if layers > 1:
        figure.legend(loc="outside lower center", ncols=min(layers, 8), frameon=False)
    weights = [np.array([use.heads[layer] for use in heads]) for layer in range(maps)]
    style = {**scale(weights), "aspect": "auto"} if maps else {}
    for layer, (panel, weight) in enumerate(zip(panels[1:], weights, strict=True), 1):
        image = panel.imshow(weight, interpolation="nearest", **style)
        panel.set_facecolor("0.92")  # of users, who have none
        ticks = np.arange(weight.shape[1])
        panel.set(xticks=ticks, xticklabels=ticks + 1, xlabel="head")
        panel.set_title(f"$W^R$, layer {layer}", fontsize=10)
        panel.set(ylim=(len(uses) - 0.5, -0.5), yticks=[])
    if maps:
        figure.colorbar(image, ax=list(panels[1:]), label="weight")
    set_title(figure, title, "what each relation adds" + ", and its weights by head" * bool(maps))
    return write(figure, file)


def _note(panel: Any, text: str, at: tuple, frame: tuple, shift: tuple, **style: Any) -> None:
    panel.annotate(text, at, shift, xycoords=frame, textcoords="offset points", **style)
