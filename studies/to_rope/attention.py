"""How far back the trained rows of a study look, and how widely ("Rotate Both Ways", section 5.3).

    python studies/to_rope/attention.py STUDY_DIR [--users 500] [--min_events 50]

Prints attention distance in events and entropy in nats by layer (Figures 3 and 4), as
``recbole-pos inspect attention`` has them: means over heads, histories and all their queries, ± the
standard deviation over seeds. It needs the weights, so a study that was trained here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from recbole_pos.inspect.attention_report import UNIFORM, inspect_attention
from recbole_pos.study.rendered_table import Cell, RenderedTable

MEASURES = ("distance", "entropy")


def measured(run: Path, users: int, min_events: int) -> np.ndarray:
    """[layers + 1, measures] of a trained run; last is attention that is equal over all events."""
    content = inspect_attention(run, users, min_events).content
    places = [*(layer["mean"] for layer in content["layers"]), content[UNIFORM]]
    return np.array([[place["all"][name] for name in MEASURES] for place in places])


def attention_table(study: Path, users: int, min_events: int) -> RenderedTable:
    """A line for each row of the study that has runs.

    Raises:
        FileNotFoundError: if the study has no table of runs, or a run no weights.
    """
    runs = pd.read_csv(study / "runs.csv").query("status == 'done'")
    lines, columns, equal = [], (), np.empty(0)
    for row, its in runs.groupby("row", sort=False):
        seeds = np.stack([measured(study / path, users, min_events) for path in its["path"]])
        layers = range(seeds.shape[1] - 1)
        columns = tuple(f"{name}, layer {n + 1}" for name in MEASURES for n in layers)
        equal = np.repeat(seeds[0, -1], len(layers))
        values = seeds[:, :-1].transpose(0, 2, 1).reshape(len(seeds), -1)  # as the columns
        lines.append((Cell(str(row)), Cell(str(len(seeds))), *_cells(values)))
    lines.append((Cell("equal over all events"), Cell(), *_cells(equal[None])))
    return RenderedTable("Attention", ("row", "seeds", *columns), tuple(lines))


def _cells(values: np.ndarray) -> list[Cell]:
    """Mean and standard deviation over seeds of [seeds, columns]."""
    if len(values) == 1:
        return [Cell(f"{value:.2f}") for value in values[0]]
    pairs = zip(values.mean(0), values.std(0, ddof=1), strict=True)
    return [Cell(f"{mean:.2f} ± {spread:.2f}") for mean, spread in pairs]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Attention distance and entropy of a study.")
    parser.add_argument("study", type=Path, metavar="STUDY_DIR")
    parser.add_argument("--users", type=int, default=500, help="how many to draw at most")
    parser.add_argument("--min_events", type=int, default=50, help="shortest history to include")
    given = parser.parse_args(arguments)
    print(attention_table(given.study, given.users, given.min_events).markdown())


if __name__ == "__main__":
    main()
