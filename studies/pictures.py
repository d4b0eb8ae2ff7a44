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

BETTER, WORSE, UNTOLD = "#0072B2", "#D55E00", "#595959"
TABLE, BASE, METRIC = "Against NoPE", "NoPE", "ndcg@10"
CONTROL = "-shuffled"  # studies whose histories have no order are no panel
COST_OF = "weekly"  # epochs of a second and more; those of toyshop are too short to be reported


@dataclass(frozen=True)
class Panel:
    """One study.

    Attributes:
        name: of its data.
        base: NDCG@10 of NoPE.
        seeds: of a row that is whole.
        gains: by row difference, low and high in percent of base; seeds, star.
        cost: by row seconds of an epoch, by those of NoPE.
    """

    name: str
    base: float
    seeds: int
    gains: pd.DataFrame
    cost: pd.Series

    @classmethod
    def read(cls, name: str, folder: Path, runs: pd.DataFrame) -> Panel:
        """From the folder of a compared study."""
        table = pd.read_csv(folder / "table.csv")
        rows = table[(table["table"] == TABLE) & (table["metric"] == METRIC)].set_index("row")
        base = float(rows.loc[BASE, "mean"])
        gains = rows[["difference", "low", "high"]] * 100 / base
        gains[["seeds", "star"]] = rows[["seeds", "star"]]
        epoch = (runs["seconds"] / runs["epochs"]).groupby(runs["row"]).median()
        whole = int(rows["seeds"].max())
        return cls(name, base, whole, gains.drop(BASE).dropna(), epoch / epoch[BASE])


def panels(folders: Sequence[Path], work: Path) -> list[Panel]:
    """The studies of positions whose runs are kept and whose data are there."""
    studies, found = Studies(folders, work), []
    for file in sorted((RUNS / "positions").glob("*.tar.xz")):
        name = file.name.removesuffix(".tar.xz")
        compared = None if CONTROL in name else studies.compared(f"positions/{name}")
        if compared is not None:
            folder, runs, _ = compared
            found.append(Panel.read(name, folder, runs))
    return found


def draw(studies: Sequence[Panel], out: Path) -> None:
    """One panel a study, rows in the order in which they first come, then cost."""
    order = list(dict.fromkeys(row for one in studies for row in one.gains.index))[::-1]
    cost = next((one.cost for one in studies if one.name == COST_OF), studies[0].cost)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False}):
        size = (3.6 + 2.7 * len(studies), 1.3 + 0.24 * len(order))
        figure = Figure(figsize=size, layout="constrained")
        widths = [*[1.0] * len(studies), 0.6]
        axes = figure.subplots(1, len(widths), sharey=True, width_ratios=widths, squeeze=False)[0]
        for axis, study in zip(axes, studies, strict=False):
            axis.set_title(f"{study.name}\nNoPE: NDCG@10 {study.base:.4f}", fontsize=9)
            axis.set_xlabel("gain over NoPE, %")
            axis.axvline(0, color="black", linewidth=0.8)
            _gains(axis, study, order)
        axes[-1].set_title("seconds of an epoch\nNoPE: 1", fontsize=9)
        axes[-1].set_xlabel("times NoPE's")
        axes[-1].barh(order, cost.reindex(order), color=UNTOLD, height=0.55)
        axes[-1].axvline(1, color="black", linewidth=0.8)
        for axis in axes:
            axis.grid(axis="x", alpha=0.3)
            axis.set_axisbelow(True)
        axes[0].set_ylim(-0.7, len(order) - 0.3)
        figure.savefig(out, dpi=130)


def _gains(axis: Axes, study: Panel, order: Sequence[str]) -> None:
    for row in order:
        if row not in study.gains.index:
            axis.plot([0], [row], alpha=0)  # keeps its line, so that panels agree
            continue
        line = study.gains.loc[row]
        args = UNTOLD
        if line["star"] in (True, "True"):
            args = BETTER if line["difference"] > 0 else WORSE
        axis.plot([line["low"], line["high"]], [row, row], color=args, linewidth=1.2)
        fill = args if line["seeds"] == study.seeds else "white"
        axis.plot(line["difference"], row, "o", color=args, mfc=fill)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Draw results/positions.png.")
    parser.add_argument("--data_path", action="append", type=Path, default=[])
    parser.add_argument("--out", type=Path, default=RESULTS / "positions.png")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        draw(panels(given.data_path, Path(work)), given.out)


if __name__ == "__main__":
    main()
