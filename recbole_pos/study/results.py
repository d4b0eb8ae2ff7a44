"""The results of a study so far: the only input of its tables and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pandas as pd

from recbole_pos.runs import DONE
from recbole_pos.study.plan import Plan, TablePlan
from recbole_pos.study.ranks import RankTable, assign_bins, is_from_ranks
from recbole_pos.study.statistics import DIFFERENCES, ONE_BIN, compute_differences, compute_means

RUN_FOLDERS = "run folders"  # name of the source of a plan that was made of runs
VALIDATION = "validation"  # column of the first metric in validation, at the best epoch
COLD = ", cold targets"  # suffix of a metric of targets whose item has no training interaction
_CONTENT = ("item_vectors", "item_features")  # options to score cold items by
_MEANS = ["row", "metric", "mean", "deviation", "seeds", "targets", "units"]


def select_protocol(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tables say of a split, from its summary, empty if unknown."""
    keys = ("split", "target", "targets", "repeated_targets", "tied_targets")
    return {key: summary[key] for key in keys if key in summary}


@dataclass(frozen=True)
class Results:
    """Runs of a study, finished or not.

    Attributes:
        runs: a line for each run: row, seed, status (``done``, ``failed``, or any other word while
            it is trained), and where known reason (of a failure), a column for each metric of the
            test, validation (the first metric, at the best epoch), seconds (of training),
            parameters (their number), epochs, candidates, device, commit, digest and path.
        ranks: ranks of the finished runs; None if no run has written them.
        curves: a line for each epoch: row, seed, epoch, value (the first metric in validation).
        searches: a line for each trial: row, trial, options (text), value (in validation), metric
            (of the value), chosen (bool).
        command: command that repeats the study.
        split: split, target, and by phase targets, repeated_targets and tied_targets, as
            :func:`recbole_pos.data.targets.make_split` gives them; empty if unknown.
        warnings: sentences on what in the data inflates the metrics.
        data: facts about the data: name -> number or text.
        versions: package -> version.
    """

    plan: Plan
    runs: pd.DataFrame
    ranks: RankTable | None = None
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    searches: pd.DataFrame = field(default_factory=pd.DataFrame)
    command: str = ""
    split: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    data: Mapping[str, int | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def done(self) -> pd.DataFrame:
        """The finished runs."""
        return self.runs[self.runs["status"] == DONE]

    @property
    def is_planned(self) -> bool:
        """Whether a plan asked for the runs, and each row for all seeds."""
        return self.plan.source.name != RUN_FOLDERS

    def is_ranked(self, row: str) -> bool:
        """Return whether a row can be compared by target: all of its finished runs have ranks."""
        num_done = int((self.done["row"] == row).sum())
        return self.ranks is not None and 0 < num_done == len(self.ranks.list_seeds(row))

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The numbers of every table of the plan."""
        return [compare_rows(self, table) for table in self.plan.tables]


@dataclass(frozen=True)
class Comparison:
    """The numbers of one table.

    Attributes:
        means: a line for each row and metric (and validation, if the table has it): row, metric,
            mean, deviation, seeds; and targets and units, if they come from ranks.
        differences: differences in the first metric, as ``statistics.compute_differences`` returns
            them; empty if no row can be compared.
        bins: kind -> means and differences by bin, of the first metric.
    """

    table: TablePlan
    means: pd.DataFrame
    differences: pd.DataFrame
    bins: dict[str, tuple[pd.DataFrame, pd.DataFrame]]


def compare_rows(results: Results, table: TablePlan) -> Comparison:
    """Return the numbers of one table; no differences or bins if the reference has no ranks."""
    main, ranks = table.metrics[0], results.ranks
    metrics = list(table.metrics)
    if table.validation:
        metrics.append(VALIDATION)
    if _has_cold_targets(results, table):
        metrics.append(f"recall@{main.partition('@')[2]}{COLD}")
    means = concatenate([_average_metric(results, table, metric) for metric in metrics])
    rows = [row for row in table.rows if results.is_ranked(row)]
    if ranks is None or table.reference not in rows or not is_from_ranks(main):
        return Comparison(table, means, pd.DataFrame(columns=DIFFERENCES), {})
    compare = partial(
        compute_differences,
        ranks,
        main,
        reference=table.reference,
        rows=[row for row in rows if row != table.reference],
        are_coupled=results.plan.are_coupled,
    )
    bins = {}
    for kind, masks in assign_bins(ranks.targets, results.plan.bins).items():
        bin_means = compute_means(ranks, main, masks)
        bin_means = bin_means[bin_means["row"].isin(rows)].reset_index(drop=True)
        bins[kind] = bin_means, compare(bins=masks)
    return Comparison(table, means, compare(), bins)


def _has_cold_targets(results: Results, table: TablePlan) -> bool:
    """Return whether targets are cold, and a configuration of the table can score their items."""
    ranks = results.ranks
    if ranks is None or "popularity" not in ranks.targets or not is_from_ranks(table.metrics[0]):
        return False
    options = [results.plan.make_options(row) for row in table.rows]
    has_content = any(row_options.get(key) for row_options in options for key in _CONTENT)
    return has_content and bool((ranks.targets["popularity"] == 0).any())


def _average_metric(results: Results, table: TablePlan, metric: str) -> pd.DataFrame:
    """Return a line for each row with its mean of a metric: from ranks, or else as reported."""
    frames = [pd.DataFrame(columns=_MEANS)]
    base_metric = metric.removesuffix(COLD)
    ranked = [row for row in table.rows if is_from_ranks(base_metric) and results.is_ranked(row)]
    if results.ranks is not None and ranked:
        is_cold = metric != base_metric
        bins = {COLD: results.ranks.targets["popularity"] == 0} if is_cold else ONE_BIN
        means = compute_means(results.ranks, base_metric, bins)
        frames.append(means.set_index("row").loc[ranked].reset_index())
    if metric in results.runs.columns:
        reported = results.done[results.done["row"].isin(set(table.rows) - set(ranked))]
        by_row = reported.dropna(subset=[metric]).groupby("row", sort=False)[metric]
        columns = {"mean": "mean", "std": "deviation", "size": "seeds"}
        frames.append(by_row.agg(list(columns)).rename(columns=columns).reset_index())
    return concatenate(frames).assign(metric=metric).reindex(columns=_MEANS)


def concatenate(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return frames one below the other, with the column types of those that are not empty."""
    filled = [frame for frame in frames if not frame.empty]
    return pd.concat(filled or frames, ignore_index=True)
