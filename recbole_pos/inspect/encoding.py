"""``recbole-pos inspect encoding``: pictures of encodings, Figures 7 to 12 of the PosRec paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import make_folder
from recbole_pos.inspect.pictures import new_figure, set_whole_ticks, write
from recbole_pos.inspect.trained import Report, format_spans, open_run
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position import awareness
from recbole_pos.position.additive import PositionEncoding
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.values import suggest

PAPER_SCHEMES = ("spe", "dpe")  # the fixed encodings of Figures 7 to 10
PAPER_SIZE = 100  # d
MAX_LENGTHS = 4  # number of session lengths in one picture
MAX_LENGTH = 1000  # interactions of a session
MAX_COLUMNS = 4096  # d of an encoding


def inspect_encoding(
    schemes: Sequence[str] = (),
    lengths: Sequence[int] = (10, 20),
    trained: str | Path | None = None,
    hidden_size: int | None = None,
    out: str | Path | None = None,
    data_path: str | Path | None = None,
) -> Report:
    """Draw position encodings of a trained model or fixed ones, each as encoding_<scheme>.png.

    Args:
        schemes: names of encodings; by default all of the trained model, else ``spe`` and ``dpe``.
        lengths: lengths of the sessions to draw.
        trained: a run folder, or a checkpoint in one.
        hidden_size: d of fixed encodings, the paper's 100 by default.
        out: folder to write to; by default the run folder, else the current one.
        data_path: see :func:`open_run`.

    Raises:
        UsageError: if there is nothing to draw, or options do not go together.
    """
    lengths = sorted(set(lengths))
    longest = lengths[-1]
    if not 2 <= lengths[0] <= longest <= MAX_LENGTH or len(lengths) > MAX_LENGTHS:
        expected = f"expected 1 to {MAX_LENGTHS} lengths, at most {MAX_LENGTH} and at least 2"
        raise UsageError(f"--length: {expected}, found {' '.join(map(str, lengths))}")
    if trained is None:
        if data_path is not None:
            raise UsageError("--data_path: goes with --checkpoint; nothing else has a dataset")
        folder, suffix = Path("."), ""
        encodings_by_name = build_encodings(schemes or PAPER_SCHEMES, longest, hidden_size)
    else:
        if hidden_size is not None:
            raise UsageError("--hidden_size: a trained model has its own")
        run, experiment = open_run(trained, data_path)
        config = experiment.config
        folder, suffix = run.path, f"; {config['model']} on {config['dataset']}"
        encodings_by_name = select_encodings(experiment.model, schemes)
    for name, scheme in encodings_by_name.items():
        if scheme.max_length < longest:
            raise UsageError(
                f"--length: {name} of this model ends at {scheme.max_length} interactions"
            )
    folder = folder if out is None else Path(out)
    make_folder(folder)
    files: list[Path] = []
    rows: list[list[str]] = []
    for name, scheme in encodings_by_name.items():
        vectors = {length: compute_session_vectors(scheme, length) for length in lengths}
        summary = (type(scheme).__doc__ or "").partition("\n")[0].rstrip(".")
        title = f"{name}, {vectors[longest].shape[1]} columns: {summary}{suffix}"
        files.append(draw_encoding(vectors, title, folder / f"encoding_{name}.png"))
        forward = awareness.find_forward_columns(scheme, longest)
        backward = awareness.find_backward_columns(scheme, longest)
        spans = [format_spans(columns) if columns else "no" for columns in (forward, backward)]
        rows.append([name, *spans, "yes" if awareness.is_unique(scheme, longest) else "no"])
    names = ["encoding", "forward-aware", "backward-aware", "unique in a session"]
    headline = f"columns, in sessions of up to {longest} interactions"
    return Report(headline, [pd.DataFrame(rows, columns=names)], files, {})


def build_encodings(
    names: Sequence[str], max_length: int, hidden_size: int | None
) -> dict[str, PositionEncoding]:
    """Return fixed encodings in float64 by name, for sessions of at most ``max_length``.

    Raises:
        UsageError: for a name that is not a fixed encoding, or a bad size.
    """
    d = PAPER_SIZE if hidden_size is None else hidden_size
    if not 1 <= d <= MAX_COLUMNS:
        raise UsageError(f"--hidden_size: {d} is {'below 1' if d < 1 else f'above {MAX_COLUMNS}'}")
    sizes = Dimensions(max_length=max_length, hidden_size=d, n_heads=1, initializer_range=0.0)
    # looking a scheme up imports it, so schemes of other packages only if named
    schemes = [name for name in SCHEMES if name in SCHEMES.paths or name in names]
    allowed = [name for name in schemes if issubclass(SCHEMES[name], PositionEncoding)]
    selected = [name for name in names if name in allowed]
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # float32 rounds neighbouring values of slow sines alike
    try:
        built = {name: SCHEMES[name](sizes, **SCHEMES.defaults(name)) for name in selected}
    finally:
        torch.set_default_dtype(previous_dtype)
    for name in names:
        if name not in built:
            raise UsageError(
                f"{name} is not an encoding of positions: {', '.join(allowed)}"
                f"{suggest(name, allowed)}"
            )
        if list(built[name].parameters()):
            raise UsageError(f"{name} is learned: give a trained model with --checkpoint RUN_DIR")
    return built


def find_encodings(model: nn.Module) -> dict[str, PositionEncoding]:
    """Return the position encodings of a model by scheme name, the first of each scheme."""
    encodings: dict[str, PositionEncoding] = {}
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            name = SCHEMES.find_name(type(module)) or type(module).__name__
            encodings.setdefault(name, module)
    return encodings


def compute_agreement(vectors: np.ndarray) -> np.ndarray:
    """Return exp(p_i . p_j / sqrt(d)) [t, t], each row divided by its largest; 0 for j > i.

    Rows are proportional to attention to positions only (FPARec, Figure 1 and appendix A).

    Args:
        vectors: [t, d] encodings of a session, the oldest interaction first.
    """
    logits = vectors @ vectors.T / np.sqrt(vectors.shape[1])
    logits = np.where(np.tri(len(logits), dtype=bool), logits, -np.inf)
    return np.exp(logits - logits.max(-1, keepdims=True))


def select_encodings(model: nn.Module, names: Sequence[str]) -> dict[str, PositionEncoding]:
    """Return the encodings of a model by name, all or only those in ``names``.

    Raises:
        UsageError: if the model has none, or lacks one of the names.
    """
    encodings = find_encodings(model)
    missing = [name for name in names if name not in encodings]
    if missing or not encodings:
        reason = "adds no encoding of positions to its input"
        if encodings:
            reason = f"has {', '.join(encodings)}"
        raise UsageError(f"{', '.join(missing) or 'nothing to draw'}: this model {reason}")
    return {name: scheme for name, scheme in encodings.items() if not names or name in names}


def compute_session_vectors(scheme: PositionEncoding, length: int) -> np.ndarray:
    """Return the vectors [length, d] of the interactions of a session, the oldest first."""
    position = torch.arange(length)
    return awareness.encode_positions(scheme, position, torch.full_like(position, length)).numpy()


def draw_encoding(vectors: dict[int, np.ndarray], title: str, file: Path) -> Path:
    """Draw vectors [length, d] by length, and dot products in and between sessions; return file."""
    vectors = {length: array.astype(np.float64) for length, array in vectors.items()}
    lengths = list(vectors)
    pairs = [(length, length) for length in lengths] + list(combinations(lengths, 2))
    products = [vectors[m] @ vectors[n].T for m, n in pairs]
    columns = min(len(pairs), 4)
    rows = math.ceil(len(pairs) / columns)
    figure = new_figure(max(4.6 * len(lengths), 3.5 * columns) + 0.8, 3.4 + 3.6 * rows)
    halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.25 * rows))
    top, bottom = halves
    highest = max(np.abs(array).max() for array in vectors.values())
    labels = [
        ("column of the encoding", "interaction (0: oldest)", f"{n} interactions") for n in lengths
    ]
    style = {"label": "value", "cmap": "RdBu_r", "vmin": -highest, "vmax": highest}
    _draw_images(top, (1, len(lengths)), list(vectors.values()), labels, **style)
    titles = ["within one history" if m == n else "between two" for m, n in pairs]
    labels = [
        (f"interaction of {n}", f"interaction of {m}", label)
        for (m, n), label in zip(pairs, titles, strict=True)
    ]
    limits = {"vmin": min(map(np.min, products)), "vmax": max(map(np.max, products))}
    style = {"label": "dot product", "cmap": "viridis", **limits}
    _draw_images(bottom, (rows, columns), products, labels, **style)
    return write(figure, file, title)


def _draw_images(
    figure: Any,
    shape: tuple[int, int],
    images: Sequence[np.ndarray],
    labels: Sequence[tuple[str, str, str]],
    label: str,
    **style: Any,
) -> None:
    """Draw images into a grid of panels; ``labels`` are of x and y, and the title, of each."""
    panels = figure.subplots(*shape, squeeze=False)
    for panel in panels.flat[len(images) :]:
        panel.set_visible(False)
    for panel, image, (x, y, title) in zip(panels.flat, images, labels, strict=False):
        colored = panel.imshow(image, interpolation="nearest", aspect="auto", **style)
        panel.set(xlabel=x, ylabel=y)
        panel.set_title(title, fontsize=10)
        set_whole_ticks(panel.xaxis)
        set_whole_ticks(panel.yaxis)
    figure.colorbar(colored, ax=panels, label=label)
