"""The results of a study so far: the only input of its tables and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from recbole_pos.study.bins import all_masks
from recbole_pos.study.plan import Plan, TablePlan
from recbole_pos.study.ranks import RankTable, is_from_ranks
from recbole_pos.study.statistics import differences, means
from recbole_pos.study.ties import TieCount

DONE, FAILED = "done", "failed"
VALIDATION = "validation"  # column of the first metric in validation, at the best epoch
COLD = ", cold targets"  # suffix of a metric of targets whose item has no training interaction
_CONTENT = ("item_vectors", "preload_weight", "item_features")  # options to score cold items by


def _empty(*columns: str) -> pd.DataFrame:
    return pd.DataFrame(columns=list(columns))


@dataclass(frozen=True)
class Results:
    """Runs of a study, finished or not.

    Attributes:
        plan: plan of the study.
        runs: a line for each run: row, seed, status (``done``, ``failed``, or any other word while
            it is trained), and where known reason (of a failure), a column for each metric of the
            test, validation (the first metric, at the best epoch), seconds (of training),
            parameters (their number), epochs, device, commit, digest and path.
        ranks: ranks of the finished runs; None if no run has written them.
        curves: a line for each epoch: row, seed, epoch, value (of ``curve_metric``).
        searches: a line for each trial: row, trial, options (text), value (in validation), metric
            (of the value), chosen (bool).
        curve_metric: validation metric of the curves.
        ties: how many held-out items depend on the order of equal times; None if unknown.
        warnings: sentences on what in the data inflates the metrics.
        data: facts about the data: name -> number or text.
        versions: package -> version.
        commands: commands that repeat the study.
    """

    plan: Plan
    runs: pd.DataFrame
    ranks: RankTable | None = None
    curves: pd.DataFrame = field(default_factory=lambda: _empty("row", "seed", "epoch", "value"))
    searches: pd.DataFrame = field(
        default_factory=lambda: _empty("row", "trial", "options", "value", "chosen")
    )
    curve_metric: str = ""
    ties: TieCount | None = None
    warnings: tuple[str, ...] = ()
    data: Mapping[str, int | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()

    @property
    def done(self) -> pd.DataFrame:
        """The finished runs."""
        return self.runs[self.runs["status"] == DONE]

    @property
    def failed(self) -> pd.DataFrame:
        """The runs that failed, with their reasons."""
        return self.runs[self.runs["status"] == FAILED]

    def ranked(self, row: str) -> bool:
        """Return whether a row can be compared by target: all of its finished runs have ranks."""
        done = int((self.done["row"] == row).sum())
        return self.ranks is not None and 0 < done == len(self.ranks.seeds(row))


@dataclass(frozen=True)
class Comparison:
    """The numbers of one table.

    Attributes:
        table: plan of the table.
        means: a line for each row and metric (and validation, if the table has it): row, metric,
            mean, deviation, seeds; and targets and units, if they come from ranks.
        differences: differences in the first metric, with the columns of
            :func:`recbole_pos.study.statistics.differences`; empty if no row can be compared.
        bins: kind -> means and differences by bin, of the first metric.
    """

    table: TablePlan
    means: pd.DataFrame
    differences: pd.DataFrame
    bins: dict[str, tuple[pd.DataFrame, pd.DataFrame]]


def compare(results: Results, table: TablePlan, bins: bool = True) -> Comparison:
    """Return the numbers of one table.

    Args:
        results: results of the study.
        table: plan of the table.
        bins: whether to compute bins, too.
    """
    main, *_ = table.metrics
    shown = (*table.metrics, VALIDATION) if table.validation else table.metrics
    if _has_cold(results, table):
        shown = (*shown, f"recall@{main.partition('@')[2]}{COLD}")
    values = pd.concat([_means(results, table, metric) for metric in shown])
    values = values.reset_index(drop=True)
    ranks, plan = results.ranks, results.plan
    rows = [row for row in table.rows if results.ranked(row)]
    none = pd.DataFrame(columns=["row", "metric", "bin", "star"])
    if ranks is None or table.reference not in rows or not is_from_ranks(main):
        return Comparison(table, values, none, {})
    others = [row for row in rows if row != table.reference]
    options: dict[str, Any] = {"rows": others, "coupled": plan.coupled}
    pairs = differences(ranks, [main], table.reference, **options) if others else none
    by_bin = {}
    for kind, masks in (all_masks(ranks.targets, plan.bins) if bins else {}).items():
        mean = means(ranks, [main], masks)
        pair = (
            differences(ranks, [main], table.reference, bins=masks, **options) if others else none
        )
        by_bin[kind] = mean[mean["row"].isin(rows)].reset_index(drop=True), pair
    return Comparison(table, values, pairs, by_bin)


def _has_cold(results: Results, table: TablePlan) -> bool:
    """Return whether targets are cold, and a configuration of the table can score their items."""
    ranks, plan = results.ranks, results.plan
    if ranks is None or "popularity" not in ranks.targets or not is_from_ranks(table.metrics[0]):
        return False
    content = any(plan.options(row).get(key) for row in table.rows for key in _CONTENT)
    return content and bool((ranks.targets["popularity"] == 0).any())


def _means(results: Results, table: TablePlan, metric: str) -> pd.DataFrame:
    """Return the means of one metric of all rows, from ranks or else as their runs report it."""
    parts = []
    plain = metric.removesuffix(COLD)
    ranked = [row for row in table.rows if results.ranked(row) and is_from_ranks(plain)]
    if ranked and results.ranks is not None:
        cold = {COLD: results.ranks.targets["popularity"] == 0} if plain != metric else None
        found = means(results.ranks, [plain], cold).set_index("row").loc[ranked].reset_index()
        parts.append(found.drop(columns="bin").assign(metric=metric))
    others = [row for row in table.rows if row not in ranked]
    if metric in results.runs.columns and others:
        done = results.done[results.done["row"].isin(others)].dropna(subset=[metric])
        if len(done):
            found = done.groupby("row", sort=False)[metric].agg(["mean", "std", "size"])
            found.columns = ["mean", "deviation", "seeds"]
            parts.append(found.reset_index().assign(metric=metric))
    columns = ["row", "metric", "mean", "deviation", "seeds", "targets", "units"]
    if not parts:
        return pd.DataFrame(columns=columns)
    return pd.concat(parts, ignore_index=True).reindex(columns=columns)
