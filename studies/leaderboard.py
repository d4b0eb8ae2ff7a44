"""Write the leaderboards of results/README.md from the runs that are kept in results/runs/.

    python studies/leaderboard.py [--check]

results/leaderboard.yaml names the kept runs of each dataset, by protocol. NDCG@10 and HR@10 are
computed from the kept ranks of the test targets, so no data are needed and nothing is trained.
Published figures are those of the studies (``paper``), or stand in the yaml with their source.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from page_parts import RESULTS, STUDIES, make_table, write_pages

from recbole_pos.config.metrics import compute_gains

BOARDS = RESULTS / "leaderboard.yaml"
METRICS = ("ndcg@10", "hit@10")
_HEAD = ["model", "NDCG@10", "HR@10", "published: NDCG@10, HR@10", "seeds", "tuning"]
_BOARD = re.compile(r"(<!-- begin board (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class Line(NamedTuple):
    """A model of a leaderboard; figures are None where there is no run, or nothing is published.

    Attributes:
        model: name of the model.
        ndcgs: NDCG@10 of each seed.
        hits: HR@10 of each seed.
        published: NDCG@10 and HR@10 as published, each None if it is not.
        tuning: number of trials on validation, in words.
        is_random: whether its seeds differ; of a model without a random part one is kept.
    """

    model: str
    ndcgs: list[float]
    hits: list[float]
    published: tuple[float | None, float | None]
    tuning: str = ""
    is_random: bool = True

    def sort_key(self) -> float:
        """Return minus our NDCG@10, or minus the published one: the best model sorts first."""
        return -(float(np.mean(self.ndcgs)) if self.ndcgs else self.published[0] or 0.0)

    def cells(self) -> list[str]:
        """Return the cells of the line in the order of the header, empty without a figure."""
        ours = [_format_mean(self.ndcgs), f"{np.mean(self.hits):.4f}"] if self.ndcgs else ["", ""]

        published = ", ".join("–" if x is None else f"{x:.4f}" for x in self.published)
        if self.published == (None, None):
            published = ""

        seeds = str(len(self.ndcgs)) if self.is_random else "–"
        if not self.ndcgs:  # only published
            seeds = ""
        return [self.model, *ours, published, seeds, self.tuning]


def _format_mean(values: list[float]) -> str:
    """Return a mean, with the standard deviation over seeds where there are several."""
    mean = f"{np.mean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.4f}"


def read_line(entry: Mapping[str, Any], group: Mapping[str, Any], results: Path) -> Line:
    """Return the line of a model, with figures from its kept runs or as published.

    Args:
        entry: ``model``, and either ``row`` (or several names that one row has had) of the kept
            runs of ``study``, or ``published`` alone.
        group: its group, whose ``study`` and ``tuning`` hold unless the entry has its own.
        results: folder of results.

    Raises:
        KeyError: if there is no kept run of the row.
    """
    entry = {**group, **entry}
    if "row" not in entry:
        return Line(entry["model"], [], [], _pick(entry["published"]))

    # Find the tested runs of the row: seed -> digest, the name of the run's ranks.
    rows = entry["row"] if isinstance(entry["row"], list) else [entry["row"]]
    folder = results / "runs" / entry["study"]
    facts = json.loads((folder / "facts.json").read_text("utf-8"))
    runs = {
        run["seed"]: digest
        for digest, run in facts.items()
        if run["row"] in rows and run.get("test") is not None
    }
    if not runs:
        raise KeyError(f"{folder} has no tested run of {rows}")

    # Compute the metrics from the kept ranks, a column for each run.
    ranks = pd.read_parquet(folder / "ranks.parquet", columns=list(runs.values()))
    of_run = [ranks[digest].dropna().to_numpy(np.int64) for digest in ranks]
    figures = [[compute_gains(run, name).mean() for name in METRICS] for run in of_run]
    is_random = entry.get("varies", True)
    ndcgs, hits = zip(*(figures if is_random else figures[:1]), strict=True)

    # Published figures are those of the entry, or of the study's ``paper``.
    study = STUDIES / f"{entry['study'].partition('@')[0]}.yaml"
    paper = yaml.safe_load(study.read_text("utf-8")).get("paper") or {}
    published = _pick(entry.get("published", paper.get(rows[0], {})))
    tuning = entry.get("tuning", "")
    return Line(entry["model"], list(ndcgs), list(hits), published, tuning, is_random)


def _pick(published: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return the published NDCG@10 and HR@10, each None if it is not published.

    Args:
        published: metric -> value. With one target each, recall is the hit rate.
    """
    return published.get("ndcg@10"), published.get("hit@10", published.get("recall@10"))


def tabulate(groups: list[Mapping[str, Any]], results: Path) -> str:
    """Return the leaderboard of a dataset in markdown: by protocol, the best model first.

    Args:
        groups: of each protocol its words and its models, as in the yaml.
        results: folder of results.
    """
    lines: list[list[str]] = []
    for group in groups:
        lines.append([f"**{group['protocol']}**"])
        entries = [read_line(entry, group, results) for entry in group["models"]]
        lines += [line.cells() for line in sorted(entries, key=Line.sort_key)]
    return make_table(_HEAD, lines, "lrrrrl")


def main(arguments: list[str] | None = None) -> int:
    """Write the leaderboards into results/README.md; with ``--check`` nothing is written.

    Args:
        arguments: the command line; by default that of the process.

    Returns:
        Exit status: 1 if ``--check`` finds that a leaderboard differs.
    """
    parser = argparse.ArgumentParser(description="Write the leaderboards of results/README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one differs")
    args = parser.parse_args(arguments)
    page = RESULTS / "README.md"
    boards = yaml.safe_load(BOARDS.read_text("utf-8"))  # name of a leaderboard -> its protocols
    text = _BOARD.sub(
        lambda match: f"{match[1]}{tabulate(boards[match[2]], RESULTS)}{match[4]}",
        page.read_text("utf-8"),
    )
    return write_pages({page: text}, args.check)


if __name__ == "__main__":
    sys.exit(main())
