"""Write the leaderboards of results/README.md from the runs that are kept in results/runs/.

    python studies/leaderboard.py [--check]

results/leaderboard.yaml names the kept runs of each dataset, by protocol. NDCG@10 and HR@10 are
computed from the kept ranks of the test targets, so no data are needed and nothing is trained.
(The tables of some studies have other metrics, as their papers do.) Published figures are those of
the studies (``paper``), or stand in the yaml with their source.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from page_parts import RESULTS, STUDIES, make_parser, make_table, replace_tables, write_pages

from recbole_pos.config.metrics import compute_gains
from recbole_pos.study.rendered_table import format_mean

METRICS = ("ndcg@10", "hit@10")
_HEAD = ["model", "NDCG@10", "HR@10", "published: NDCG@10, HR@10", "seeds", "tuning"]


class Line(NamedTuple):
    """A model of a leaderboard.

    Attributes:
        ndcg: NDCG@10 that the model is sorted by: ours, or the published one where there is no run.
        cells: texts in the order of the header, empty without a figure.
    """

    ndcg: float
    cells: list[str]


def read_figures(study: str, rows: list[str], results: Path) -> pd.DataFrame:
    """Return NDCG@10 and HR@10 of the kept runs of a row, a line for each run.

    Args:
        study: name of the study.
        rows: all names that the row has had.
        results: folder of results.

    Raises:
        KeyError: if there is no kept run of the row.
    """
    # Find the tested runs of the row: seed -> digest, the name of the run's ranks.
    folder = results / "runs" / study
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
    of_run = [ranks[digest].dropna() for digest in ranks]
    return pd.DataFrame({name: [compute_gains(x, name).mean() for x in of_run] for name in METRICS})


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
        cells = [entry["model"], "", "", _format_published(entry["published"]), "", ""]
        return Line(entry["published"]["ndcg@10"], cells)

    # Only models with a random part have a deviation over seeds; the seeds of others are one run.
    rows = entry["row"] if isinstance(entry["row"], list) else [entry["row"]]
    figures = read_figures(entry["study"], rows, results)
    ndcg, hit = figures.mean()
    ndcg_text, seeds = f"{ndcg:.4f}", "–"
    if entry.get("varies", True):
        ndcg_text, seeds = format_mean(ndcg, figures["ndcg@10"].std()), str(len(figures))

    # Published figures are those of the entry, or of the study's ``paper``.
    study = STUDIES / f"{entry['study'].partition('@')[0]}.yaml"
    paper = yaml.safe_load(study.read_text("utf-8")).get("paper") or {}
    published = _format_published(entry.get("published", paper.get(rows[0], {})))
    tuning = entry.get("tuning", "")
    return Line(ndcg, [entry["model"], ndcg_text, f"{hit:.4f}", published, seeds, tuning])


def _format_published(published: Mapping[str, float]) -> str:
    """Return the published NDCG@10 and HR@10 as text, empty if neither is published.

    Args:
        published: metric -> value. With one target each, recall is the hit rate.
    """
    figures = published.get("ndcg@10"), published.get("hit@10", published.get("recall@10"))
    if figures == (None, None):
        return ""
    return ", ".join("–" if figure is None else f"{figure:.4f}" for figure in figures)


def tabulate(groups: list[Mapping[str, Any]], results: Path) -> str:
    """Return the leaderboard of a dataset in markdown: by protocol, the best model first.

    Args:
        groups: of each protocol its words and its models, as in the yaml.
        results: folder of results.
    """
    cells: list[list[str]] = []
    for group in groups:
        lines = [read_line(entry, group, results) for entry in group["models"]]
        lines.sort(key=lambda line: -line.ndcg)
        cells += [[f"**{group['protocol']}**"], *(line.cells for line in lines)]
    if not any(len(row) > 1 and row[-1] for row in cells):  # nothing was tuned
        head = _HEAD[:-1]
        return make_table(head, [row[: len(head)] for row in cells], "lrrrr")
    return make_table(_HEAD, cells, "lrrrrl")


def main(arguments: list[str] | None = None) -> int:
    """Write the leaderboards into results/README.md; with ``--check`` nothing is written.

    Args:
        arguments: the command line; by default that of the process.

    Returns:
        Exit status: 1 if ``--check`` finds that a leaderboard differs.
    """
    args = make_parser("Write the leaderboards of results/README.md.").parse_args(arguments)
    page = RESULTS / "README.md"
    # name of a leaderboard -> its protocols
    boards = yaml.safe_load((RESULTS / "leaderboard.yaml").read_text("utf-8"))
    text = replace_tables(page, r"board (\S+)", lambda name: tabulate(boards[name], RESULTS))
    return write_pages({page: text}, args.check)


if __name__ == "__main__":
    sys.exit(main())
