"""``recbole-pos inspect encoding``: pictures of encodings, Figures 7 to 12 of the PosRec paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import make_folder
from recbole_pos.inspect.periods import format_spans
from recbole_pos.inspect.pictures import new_figure, set_title, set_whole_ticks, write
from recbole_pos.inspect.trained import open_run
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.additive import PositionEncoding
from recbole_pos.position.awareness import backward_columns, encodings, forward_columns, is_unique
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.values import suggest

OF_THE_PAPER = ("spe", "dpe")  # the fixed encodings of Figures 7 to 10
SIZE_OF_THE_PAPER = 100  # d
MANY = 4  # most lengths in one picture
LONG = 1000  # most events of a session
WIDE = 4096  # most columns of an encoding


@dataclass(frozen=True)
class EncodingReport:
    """What one encoding encodes in sessions of up to the longest length, and its picture.

    Attributes:
        name: name of the scheme.
        forward, backward: columns that make it forward- and backward-aware; empty if it is not.
        unique: whether events of a session all have different vectors.
        file: the picture.
    """

    name: str
    forward: list[int]
    backward: list[int]
    unique: bool
    file: Path


def inspect_encoding(
    schemes: Sequence[str] = (),
    lengths: Sequence[int] = (10, 20),
    trained: str | Path | None = None,
    hidden_size: int | None = None,
    out: str | Path | None = None,
    data_path: str | Path | None = None,
) -> list[EncodingReport]:
    """Draw the position encodings of a trained model, or fixed encodings, and report on each.

    Writes encoding_<scheme>.png for each.

    Args:
        schemes: names of encodings; by default all of the trained model, else ``spe`` and ``dpe``.
        lengths: lengths of the sessions to draw.
        trained: a run folder, or a checkpoint in one.
        hidden_size: d of fixed encodings, the paper's 100 by default.
        out: folder to write to; by default the run's, or else the current one.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Raises:
        UsageError: if there is nothing to draw, or options do not go together.
    """
    lengths = sorted(set(lengths))
    if not 2 <= lengths[0] <= lengths[-1] <= LONG or len(lengths) > MANY:
        expected = f"expected 1 to {MANY} lengths, at most {LONG} and at least 2"
        raise UsageError(f"--length: {expected}, found {' '.join(map(str, lengths))}")
    if trained is None:
        if data_path is not None:
            raise UsageError("--data_path: goes with --checkpoint; nothing else has a dataset")
        folder, where = Path("."), ""
        drawn = fixed_encodings(schemes or OF_THE_PAPER, lengths[-1], hidden_size)
    else:
        if hidden_size is not None:
            raise UsageError("--hidden_size: a trained model has its own")
        run, experiment = open_run(trained, data_path)
        config = experiment.config
        folder, where = run.path, f"; {config['model']} on {config['dataset']}"
        drawn = learned_encodings(experiment.model, schemes)
    short = [name for name, scheme in drawn.items() if scheme.max_length < lengths[-1]]
    if short:
        longest = drawn[short[0]].max_length
        raise UsageError(f"--length: {short[0]} of this model ends at {longest} events")
    folder = folder if out is None else Path(out)
    make_folder(folder)
    reports = []
    for name, scheme in drawn.items():
        vectors = {length: session_vectors(scheme, length) for length in lengths}
        file = draw_encoding(
            vectors, _describe(name, scheme) + where, folder / f"encoding_{name}.png"
        )
        longest = lengths[-1]
        forward, backward = forward_columns(scheme, longest), backward_columns(scheme, longest)
        reports.append(EncodingReport(name, forward, backward, is_unique(scheme, longest), file))
    return reports


def fixed_encodings(
    names: Sequence[str], max_length: int, hidden_size: int | None
) -> dict[str, PositionEncoding]:
    """Build fixed encodings by name.

    Args:
        names: names of schemes.
        max_length: longest session.
        hidden_size: d; that of the paper if None.

    Raises:
        UsageError: for a name that is not an encoding, or is learned; for a bad size.
    """
    d = SIZE_OF_THE_PAPER if hidden_size is None else hidden_size
    if not 1 <= d <= WIDE:
        raise UsageError(f"--hidden_size: {d} is {'below 1' if d < 1 else f'above {WIDE}'}")
    sizes = Dimensions(max_length=max_length, hidden_size=d, n_heads=1, initializer_range=0.0)
    # reading a scheme imports it: of other packages' schemes only those that are named
    schemes = [name for name in SCHEMES if name in SCHEMES.places or name in names]
    allowed = [name for name in schemes if issubclass(SCHEMES[name], PositionEncoding)]
    fresh = {}
    for name in names:
        if name not in allowed:
            raise UsageError(
                f"{name} is not an encoding of positions: {', '.join(allowed)}"
                f"{suggest(name, allowed)}"
            )
        previous_type = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # slow sines are equal by rounding alone in float32
        try:
            scheme = SCHEMES[name](sizes, **SCHEMES.defaults(name))
        finally:
            torch.set_default_dtype(previous_type)
        if list(scheme.parameters()):
            raise UsageError(f"{name} is learned: give a trained model with --checkpoint RUN_DIR")
        fresh[name] = scheme
    return fresh


def _describe(name: str, scheme: PositionEncoding) -> str:
    """Return the title of an encoding: its name, number of columns and summary."""
    summary = (type(scheme).__doc__ or "").splitlines()[0].rstrip(".")
    columns = encodings(scheme, torch.tensor([0]), torch.tensor([1])).shape[-1]
    return f"{name}, {columns} columns: {summary}"


def encodings_in(model: nn.Module) -> dict[str, PositionEncoding]:
    """Return the position encodings of a model by name of the scheme, one of each kind."""
    own: dict[str, PositionEncoding] = {}
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            own.setdefault(SCHEMES.registered_name(type(module)) or type(module).__name__, module)
    return own


def agreement(vectors: np.ndarray) -> np.ndarray:
    """Return exp(p_i . p_j / sqrt(d)) for j up to i, every row divided by its largest, [t, t].

    These are the weights of attention to positions only (Luo et al., FPARec, Figure 1 and appendix
    A), up to the sum of a row.

    Args:
        vectors: [t, d] encodings of a session, the oldest event first.
    """
    logits = vectors @ vectors.T / np.sqrt(vectors.shape[1])
    logits = np.where(np.tri(len(logits), dtype=bool), logits, -np.inf)
    return np.exp(logits - logits.max(-1, keepdims=True))


def learned_encodings(model: nn.Module, names: Sequence[str]) -> dict[str, PositionEncoding]:
    """Return the encodings of a model by name, all or only those in ``names``.

    Raises:
        UsageError: if the model has none, or lacks one of the names.
    """
    encodings_by_name = encodings_in(model)
    missing = [name for name in names if name not in encodings_by_name]
    if missing or not encodings_by_name:
        has = (
            f"has {', '.join(encodings_by_name)}"
            if encodings_by_name
            else "adds no encoding of positions to its input"
        )
        raise UsageError(f"{', '.join(missing) or 'nothing to draw'}: this model {has}")
    chosen = names or list(encodings_by_name)
    return {name: scheme for name, scheme in encodings_by_name.items() if name in chosen}


def session_vectors(scheme: PositionEncoding, length: int) -> np.ndarray:
    """Return the vectors of a session's events, [length, d], the oldest event first."""
    position = torch.arange(length)
    return encodings(scheme, position, torch.full_like(position, length)).numpy()


def draw_encoding(vectors: dict[int, np.ndarray], title: str, file: Path) -> Path:
    """Draw the vectors of sessions, and below them dot products within and between sessions.

    Args:
        vectors: [length, d] by length of the session, the oldest event first.
        title: title of the picture.
        file: to write.
    """
    vectors = {length: rows.astype(np.float64) for length, rows in vectors.items()}
    lengths = list(vectors)
    pairs = [(a, a) for a in lengths] + list(combinations(lengths, 2))
    products = [vectors[a] @ vectors[b].T for a, b in pairs]
    columns = min(len(pairs), 4)
    rows = math.ceil(len(pairs) / columns)
    figure = new_figure(max(4.6 * len(lengths), 3.5 * columns) + 0.8, 3.4 + 3.6 * rows)
    halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.25 * rows))

    def draw(half: int, shape: tuple, images: list, axes: list, label: str, **style: Any) -> None:
        """Draw images, with labels of x, y and the title in ``axes``, into half of the figure."""
        panels = halves[half].subplots(*shape, squeeze=False)
        for panel in panels.flat[len(images) :]:
            panel.set_visible(False)
        for panel, image, (x, y, name) in zip(panels.flat, images, axes, strict=False):
            image_artist = panel.imshow(image, interpolation="nearest", aspect="auto", **style)
            panel.set(xlabel=x, ylabel=y)
            panel.set_title(name, fontsize=10)
            set_whole_ticks(panel.xaxis)
            set_whole_ticks(panel.yaxis)
        halves[half].colorbar(image_artist, ax=panels, label=label)

    top = max(np.abs(rows).max() for rows in vectors.values())
    axes = [("column of the encoding", "event (0: oldest)", f"{n} events") for n in lengths]
    shape, style = (1, len(lengths)), {"cmap": "RdBu_r", "vmin": -top, "vmax": top}
    draw(0, shape, list(vectors.values()), axes, "value", **style)
    low = min(matrix.min() for matrix in products)
    high = max(matrix.max() for matrix in products)
    axes = [
        (f"event of {b}", f"event of {a}", "within one history" if a == b else "between two")
        for a, b in pairs
    ]
    draw(1, (rows, columns), products, axes, "dot product", cmap="viridis", vmin=low, vmax=high)
    set_title(figure, title)
    return write(figure, file)


def show(reports: list[EncodingReport], longest: int, console: Console) -> None:
    """Print the table of encodings and the pictures' files."""
    columns = ("encoding", "forward-aware", "backward-aware", "unique in a session")
    caption = f"columns, in sessions of up to {longest} events"
    table = Table(*columns, caption=caption, caption_justify="left")
    for report in reports:
        sets = (report.forward, report.backward)
        aware = (format_spans(tuple(columns)) if columns else "no" for columns in sets)
        table.add_row(report.name, *aware, "yes" if report.unique else "no")
    console.print(table)
    for report in reports:
        console.print(str(report.file), soft_wrap=True, markup=False)
