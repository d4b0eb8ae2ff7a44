"""Draws what position schemes gain over none, by data: results/positions.png.

    python studies/positions/picture.py OUT.png STUDY_DIR...

A panel for each finished (or half-finished) study of this folder: NDCG@10 less that of NoPE, in
percent of NoPE's, with the study's own 95% intervals, in colour where it is told from zero after
Holm's correction. Rows without all their seeds are drawn hollow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

BETTER, WORSE, UNTOLD = "#0072B2", "#D55E00", "#595959"


def read(folder: Path) -> tuple[pd.DataFrame, float, int]:
    """Rows with gain and interval in percent; NoPE's NDCG@10; seeds of a full row."""
    table = pd.read_csv(folder / "table.csv")
    rows = table[(table["table"] == "Against NoPE") & (table["metric"] == "ndcg@10")]
    rows = rows.set_index("row")
    base = rows.loc["NoPE", "mean"]
    found = rows[["difference", "low", "high"]] * 100 / base
    found[["seeds", "star"]] = rows[["seeds", "star"]]
    return found.drop("NoPE"), base, int(rows["seeds"].max())


def draw(folders: list[Path], out: Path) -> None:
    """One panel a study, rows in the order of the first."""
    studies = [read(folder) for folder in folders]
    order = list(dict.fromkeys(row for found, _, _ in studies for row in found.index))[::-1]
    place = {row: n for n, row in enumerate(order)}
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False}):
        size = (2.0 + 3.3 * len(studies), 1.3 + 0.24 * len(order))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(studies), sharey=True, squeeze=False)[0]
        for axis, folder, (found, base, seeds) in zip(axes, folders, studies, strict=True):
            name = folder.name.removeprefix("pos-")
            axis.set_title(f"{name}\nNoPE: NDCG@10 {base:.4f}", fontsize=9)
            axis.axvline(0, color="black", linewidth=0.8)
            axis.grid(axis="x", alpha=0.3)
            for row, line in found.dropna(subset=["difference"]).iterrows():
                y = place[row]
                told = UNTOLD
                if line["star"] is True:
                    told = BETTER if line["difference"] > 0 else WORSE
                axis.plot([line["low"], line["high"]], [y, y], color=told, linewidth=1.2)
                whole = line["seeds"] == seeds
                axis.plot(line["difference"], y, "o", color=told, mfc=told if whole else "white")
            axis.set_yticks(range(len(order)), order)
            axis.set_xlabel("gain over NoPE, %")
        figure.savefig(out, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    draw(given.folders, given.out)
