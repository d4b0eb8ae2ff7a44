"""What a study has found so far: the only value that tables and report are made of."""

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
VALIDATION = "validation"  # of the best epoch, in the first metric of the study
COLD = ", cold targets"  # behind a metric of the targets whose item has no interaction in training
_CONTENT = ("item_vectors", "preload_weight", "item_features")  # what such items may be scored by


def _empty(*columns: str) -> pd.DataFrame:
    return pd.DataFrame(columns=list(columns))


@dataclass(frozen=True)
class Results:
    """Runs of a study, finished or not.

    Attributes:
        plan: what was to be run.
        runs: a line a run: row, seed, status (``done``, ``failed``, or any other word for one that
            is under way), and where known reason (of a failure), a column for each metric of the
            test, validation (the first metric, at the best epoch), seconds (of training),
            parameters (their number), epochs, device, commit, digest and path.
        ranks: ranks of the finished runs; None where none wrote them.
        curves: a line an epoch: row, seed, epoch, value (of ``curve_metric`` in validation).
        searches: a line a trial: row, trial, options (text), value (in
            validation), metric (of the value), chosen (bool).
        curve_metric: of curves.
        ties: what the order of events at one time decides.
        warnings: sentences on what in the data makes metrics easier than they look.
        data: facts about the data: name -> number or text.
        versions: of what decides a result.
        commands: how the study is run again.
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
        """Return whether a row can be compared by target: all of its runs have ranks."""
        done = int((self.done["row"] == row).sum())
        return self.ranks is not None and 0 < done == len(self.ranks.seeds(row))


@dataclass(frozen=True)
class Comparison:
    """One table's numbers.

    Attributes:
        table: what was asked for.
        means: a line for each row and metric (and validation, if the table has it): row, metric,
            mean, deviation, seeds, and where they come from ranks targets and units.
        differences: in the first metric, as :func:`recbole_pos.study.statistics.differences` has
            them; empty where nothing can be compared.
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
        table: one of the plan's.
        bins: whether to look at the bins, too.
    """
    main, *_ = table.metrics
    shown = (*table.metrics, VALIDATION) if table.validation else table.metrics
    if _has_cold(results, table):
        shown = (*shown, f"recall@{main.partition('@')[2]}{COLD}")
    found = pd.concat([_means(results, table, metric) for metric in shown])
    found = found.reset_index(drop=True)
    ranks, plan = results.ranks, results.plan
    rows = [row for row in table.rows if results.ranked(row)]
    none = pd.DataFrame(columns=["row", "metric", "bin", "star"])
    if ranks is None or table.reference not in rows or not is_from_ranks(main):
        return Comparison(table, found, none, {})
    others = [row for row in rows if row != table.reference]
    given: dict[str, Any] = {"rows": others, "coupled": plan.coupled}
    pairs = differences(ranks, [main], table.reference, **given) if others else none
    by_bin = {}
    for kind, masks in (all_masks(ranks.targets, plan.bins) if bins else {}).items():
        mean = means(ranks, [main], masks)
        pair = differences(ranks, [main], table.reference, bins=masks, **given) if others else none
        by_bin[kind] = mean[mean["row"].isin(rows)].reset_index(drop=True), pair
    return Comparison(table, found, pairs, by_bin)


def _has_cold(results: Results, table: TablePlan) -> bool:
    """Whether targets are cold, and a configuration knows more of items than interactions."""
    ranks, plan = results.ranks, results.plan
    if ranks is None or "popularity" not in ranks.targets or not is_from_ranks(table.metrics[0]):
        return False
    content = any(plan.options(row).get(key) for row in table.rows for key in _CONTENT)
    return content and bool((ranks.targets["popularity"] == 0).any())


def _means(results: Results, table: TablePlan, metric: str) -> pd.DataFrame:
    """Return one metric of all rows: from the ranks, or else as the runs report it."""
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
