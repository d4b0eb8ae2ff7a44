"""Draws results/positions.png: what position schemes gain over none, by data, and what they cost.

    python studies/pictures.py [--data_path FOLDER]...

A panel for each study of studies/positions/ whose runs are kept in results/runs/: NDCG@10 less that
of NoPE, in percent of NoPE's, with the study's own 95% intervals, in colour where it differs
significantly after Holm's correction. Rows without all their seeds are drawn hollow. The last panel
has the seconds of a training epoch, by those of NoPE. Data as for pages.py; nothing is trained.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pages import RESULTS, RUNS, Studies

BETTER, WORSE, INCONCLUSIVE = "#0072B2", "#D55E00", "#595959"
TABLE, BASE, METRIC = "Against NoPE", "NoPE", "ndcg@10"
CONTROL = "-shuffled"  # studies whose histories have no order are no panel
COST_DATASET = "weekly"  # epochs of a second and more; those of toyshop are too short to be shown


@dataclass(frozen=True)
class Panel:
    """One study.

    Attributes:
        name: name of its dataset.
        base: NDCG@10 of NoPE.
        seeds: number of seeds of a complete row.
        gains: row -> difference, low and high in percent of base; seeds, star.
        cost: row -> seconds of an epoch, divided by those of NoPE.
    """

    name: str
    base: float
    seeds: int
    gains: pd.DataFrame
    cost: pd.Series

    @classmethod
    def read(cls, name: str, folder: Path, runs: pd.DataFrame) -> Panel:
        """Return the panel of a compared study from its folder and its runs."""
        table = pd.read_csv(folder / "table.csv")
        rows = table[(table["table"] == TABLE) & (table["metric"] == METRIC)].set_index("row")
        base = float(rows.loc[BASE, "mean"])
        gains = rows[["difference", "low", "high"]] * 100 / base
        gains[["seeds", "star"]] = rows[["seeds", "star"]]
        seconds = (runs["seconds"] / runs["epochs"]).groupby(runs["row"]).median()
        seeds = int(rows["seeds"].max())
        return cls(name, base, seeds, gains.drop(BASE).dropna(), seconds / seconds[BASE])


def panels(folders: Sequence[Path], work: Path) -> list[Panel]:
    """Return the panels of the studies of positions whose runs are kept and whose data exist.

    Args:
        folders: folders where data may lie.
        work: an empty folder.
    """
    studies, found = Studies(folders, work), []
    for folder in sorted((RUNS / "positions").iterdir()):
        name = folder.name
        compared = None if CONTROL in name else studies.compare(f"positions/{name}")
        if compared is not None:
            found.append(Panel.read(name, compared.folder, compared.runs))
    return found


def draw(panels: Sequence[Panel], out: Path) -> None:
    """Draw one panel a study, rows in the order in which they first occur, and the cost."""
    rows = list(dict.fromkeys(row for panel in panels for row in panel.gains.index))[::-1]
    cost = next((panel.cost for panel in panels if panel.name == COST_DATASET), panels[0].cost)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False}):
        size = (3.6 + 2.7 * len(panels), 1.3 + 0.24 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        widths = [*[1.0] * len(panels), 0.6]
        axes = figure.subplots(1, len(widths), sharey=True, width_ratios=widths, squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=False):
            axis.set_title(f"{panel.name}\nNoPE: NDCG@10 {panel.base:.4f}", fontsize=9)
            axis.set_xlabel("gain over NoPE, %")
            axis.axvline(0, color="black", linewidth=0.8)
            _draw_gains(axis, panel, rows)
        axes[-1].set_title("seconds of an epoch\nNoPE: 1", fontsize=9)
        axes[-1].set_xlabel("times NoPE's")
        axes[-1].barh(rows, cost.reindex(rows), color=INCONCLUSIVE, height=0.55)
        axes[-1].axvline(1, color="black", linewidth=0.8)
        for axis in axes:
            axis.grid(axis="x", alpha=0.3)
            axis.set_axisbelow(True)
        axes[0].set_ylim(-0.7, len(rows) - 0.3)
        figure.savefig(out, dpi=130)


def _draw_gains(axis: Axes, panel: Panel, rows: Sequence[str]) -> None:
    """Draw the gains of a study with their intervals, a line for each row."""
    for row in rows:
        if row not in panel.gains.index:
            axis.plot([0], [row], alpha=0)  # keeps its line, so that panels agree
            continue
        gain = panel.gains.loc[row]
        color = INCONCLUSIVE
        if gain["star"] in (True, "True"):
            color = BETTER if gain["difference"] > 0 else WORSE
        axis.plot([gain["low"], gain["high"]], [row, row], color=color, linewidth=1.2)
        face = color if gain["seeds"] == panel.seeds else "white"
        axis.plot(gain["difference"], row, "o", color=color, mfc=face)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Draw results/positions.png.")
    parser.add_argument("--data_path", action="append", type=Path, default=[])
    parser.add_argument("--out", type=Path, default=RESULTS / "positions.png")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        draw(panels(args.data_path, Path(work)), args.out)


if __name__ == "__main__":
    main()
