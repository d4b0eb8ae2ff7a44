"""The results of a study so far, and the numbers of its tables.

The functions of ``collecting.py`` make :class:`Results` from run folders. They are the only input
of the tables and the report. :func:`compare_rows` computes the numbers of one table from them:
means (:func:`compute_means`) and differences from the reference (:func:`compute_differences`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.config.metrics import is_from_ranks
from recbole_pos.runs import DONE
from recbole_pos.study.plan import COLD, Plan, TablePlan, name_bins
from recbole_pos.study.statistics import (
    EVERY,
    LEVEL,
    RankTable,
    SeedNoise,
    compute_detectable,
    compute_pseudo_values,
    correct_by_holm,
    estimate_difference,
    flip_signs,
)
from recbole_pos.study.study_folder import StudyFacts

RUN_FOLDERS = "run folders"  # name of the source of a plan that was made of finished runs
VALIDATION = "validation"  # column of the first metric in validation, at the best epoch
# Suffix of a metric that is computed over cold targets only, items without training interactions.
COLD_TARGETS = ", cold targets"
ALL = "all targets"  # the bin that has every target
ONE_BIN = {ALL: EVERY}  # name of the bin -> its mask
# Columns of a table of differences: ends of the 95% interval, standard error and its degrees of
# freedom, two p-values (of which p is the larger), minimum detectable difference, and so on.
_DIFFERENCES = [
    *("row", "reference", "metric", "bin", "difference", "low", "high", "error", "df"),
    *("p_t", "p_flips", "p", "p_holm", "star", "detectable", "seed_noise"),
    *("seeds", "reference_seeds", "targets", "units"),
]
# Columns of a table of means.
_MEANS = ["row", "metric", "mean", "deviation", "seeds", "targets", "units"]


@dataclass(frozen=True)
class Results:
    """Runs of a study, finished or not. A row of the study is a configuration that it compares.

    Attributes:
        plan: the study.
        runs: one line per run: row, seed, status (``done``, ``failed``, or any other word while it
            is trained), and where known reason (of a failure), a column for each metric of the
            test, validation (the first metric, at the best epoch), seconds (of training),
            parameters (their number), epochs, candidates, device, commit, digest and path.
        ranks: ranks of the test targets in the finished runs; None if no run has saved them.
        curves: one line per epoch: row, seed, epoch, value (the first metric in validation).
        searches: one line per trial: row, trial, options (text), value (in validation), metric
            (of the value), chosen (bool).
        command: command that repeats the study.
        facts: its data, split, versions of packages, and warnings.
    """

    plan: Plan
    runs: pd.DataFrame
    ranks: RankTable | None = None
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    searches: pd.DataFrame = field(default_factory=pd.DataFrame)
    command: str = ""
    facts: StudyFacts = field(default_factory=StudyFacts)

    @property
    def done(self) -> pd.DataFrame:
        """The finished runs."""
        return self.runs[self.runs["status"] == DONE]

    @property
    def is_planned(self) -> bool:
        """Whether a plan asked for the runs, and each row for all seeds.

        Otherwise the plan was made afterwards, of finished runs; its source is then RUN_FOLDERS.
        """
        return self.plan.source.name != RUN_FOLDERS

    def is_ranked(self, row: str) -> bool:
        """Return whether a row can be compared by target: all its finished runs have ranks."""
        # ``list_seeds`` has a seed for each run of the row that has ranks. There must be as many as
        # finished runs, and more than none.
        num_done = int((self.done["row"] == row).sum())
        return self.ranks is not None and 0 < num_done == len(self.ranks.list_seeds(row))

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The numbers of every table of the plan."""
        return [compare_rows(self, table) for table in self.plan.tables]


# --- the numbers of a table ---


@dataclass(frozen=True)
class Comparison:
    """The numbers of one table of the study, whose rows are configurations.

    Attributes:
        table: the table of the plan.
        means: one line per row and metric (and validation, if the table has it): row, metric, mean,
            deviation, seeds; and targets and units, if they are computed from ranks.
        differences: differences in the first metric, as :func:`compute_differences` returns them;
            empty if no row can be compared.
        bins: kind (such as ``history``) -> means and differences of the first metric, in each bin
            of test targets.
    """

    table: TablePlan
    means: pd.DataFrame
    differences: pd.DataFrame
    bins: dict[str, tuple[pd.DataFrame, pd.DataFrame]]


def compare_rows(results: Results, table: TablePlan) -> Comparison:
    """Compute the numbers of one table: means of its metrics, differences, and both by bin.

    The rows of a table are configurations. Each but one, the reference, is compared with the
    reference, in the first metric of the table. Bins are groups of test targets, for example by the
    length of the user's history.

    Args:
        results: results of the study.
        table: a table of its plan.

    Returns:
        The means of all rows; and the differences and bins of rows whose runs have saved the ranks
        of the test targets. If the reference has no ranks, or the first metric is not computed from
        ranks, there are only means.
    """
    # The means of all metrics; a table may also show the validation metric, and cold targets.
    ranked = [row for row in table.rows if results.is_ranked(row)]  # rows whose runs have ranks
    metrics = [*table.metrics, *([VALIDATION] if table.validation else [])]
    frames = [_average_metric(results, table, metric) for metric in metrics]
    means = concatenate([*frames, _average_cold_targets(results, table, ranked)])

    main, ranks, reference = table.metrics[0], results.ranks, table.reference
    if ranks is None or reference not in ranked or not is_from_ranks(main):
        return Comparison(table, means, differences=pd.DataFrame(columns=_DIFFERENCES), bins={})

    # The differences over all targets (ONE_BIN has every target). are_coupled says whether two rows
    # start from the same trained models, so that their results are not independent.
    others, are_coupled = [row for row in ranked if row != reference], results.plan.are_coupled
    differences = compute_differences(ranks, main, reference, others, ONE_BIN, are_coupled)

    # Means and differences in the bins of each kind, such as ``history``; ``masks`` are the bins:
    # name -> [targets] whether a target is in the bin.
    bins = {}
    for kind, masks in assign_bins(ranks.targets, results.plan.bins).items():
        bin_means = compute_means(ranks, main, masks)
        bin_means = bin_means[bin_means["row"].isin(ranked)].reset_index(drop=True)
        bin_differences = compute_differences(ranks, main, reference, others, masks, are_coupled)
        bins[kind] = bin_means, bin_differences
    return Comparison(table, means, differences, bins)


def assign_bins(targets: pd.DataFrame, bins: Mapping[Any, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Assign test targets to the bins of a study.

    With the edges [5, 15] of ``history``, histories of lengths [3, 5, 6, 20] are in the bins
    ``history up to 5`` (the first two), ``history 6 to 15`` and ``history over 15``.

    Args:
        targets: one line per target, as in a :class:`RankTable`.
        bins: a kind such as ``history`` -> ascending edges; a bin has the values above one edge and
            up to the next, and no bin has missing ones. Or ``cold`` -> True; cold items have a
            popularity of 0.

    Returns:
        Kind -> name of the bin -> [targets] bool, whether a target is in it.
    """
    masks: dict[str, dict[str, np.ndarray]] = {}
    for kind, edges in bins.items():
        values = targets["popularity" if kind == COLD else kind].to_numpy()
        if kind == COLD:
            masks[kind] = {"cold items": values == 0, "other items": values != 0}
        else:
            # A value equal to an edge is below it. One that is missing (NaN) is in no bin.
            bin_index = np.where(np.isnan(values), -1, np.searchsorted(edges, values))
            masks[kind] = {name: bin_index == i for i, name in enumerate(name_bins(kind, edges))}
    return masks


def compute_means(
    table: RankTable, metric: str, bins: Mapping[str, np.ndarray | slice] = ONE_BIN
) -> pd.DataFrame:
    """Return the mean of a metric of each row (a configuration), over its seeds and all targets.

    Args:
        table, metric: ranks of the targets in all runs, and a name such as ``ndcg@10``.
        bins: name of a bin -> [targets] whether a target is in it; by default one bin of all.

    Returns:
        One line per row and bin: row, metric, bin, mean (over seeds and targets; nan in an empty
        bin), deviation (between seeds; nan for a single seed), seeds, targets, units (users).
    """
    lines = []
    for bin_name, mask in bins.items():
        totals, num_targets = table.sum_gains(metric, mask)
        units, targets = len(num_targets), int(num_targets.sum())
        for row, row_totals in totals.items():  # [seeds, units] sums of the targets' gains
            by_seed = pd.Series(row_totals.sum(1) / targets if units else np.nan)
            line = {"row": row, "metric": metric, "bin": bin_name, "mean": by_seed.mean()}
            line |= {"deviation": by_seed.std(), "seeds": len(row_totals)}
            lines.append({**line, "targets": targets, "units": units})
    return pd.DataFrame(lines)


def _average_metric(results: Results, table: TablePlan, metric: str) -> pd.DataFrame:
    """Return the mean of a metric over the seeds, one line for each row (configuration) of a table.

    If all runs of a row have saved ranks, the mean is computed from them. Otherwise, or if the
    metric does not follow from ranks, it is the mean of what the runs have reported.

    Args:
        results: results of the study.
        table: the table, whose rows are averaged.
        metric: such as ``ndcg@10``.

    Returns:
        Columns row, metric, mean, deviation, seeds, targets, units (users). The last two are empty
        for reported values, and rows without values are left out.
    """
    # _MEANS are the columns that are returned; this empty frame is all if no row has a value.
    frames = [pd.DataFrame(columns=_MEANS)]

    # Rows whose runs have ranks.
    ranked = [row for row in table.rows if is_from_ranks(metric) and results.is_ranked(row)]
    if results.ranks is not None and ranked:
        frames.append(_select_rows(compute_means(results.ranks, metric), ranked))

    # The other rows, if their runs have reported the metric.
    if metric in results.runs.columns:
        reported = results.done[results.done["row"].isin(set(table.rows) - set(ranked))]
        by_row = reported.dropna(subset=[metric]).groupby("row", sort=False)[metric]
        frames.append(by_row.agg(mean="mean", deviation="std", seeds="size").reset_index())
    return concatenate(frames).assign(metric=metric).reindex(columns=_MEANS)


def _average_cold_targets(
    results: Results, table: TablePlan, ranked: Sequence[str]
) -> pd.DataFrame:
    """Return the mean recall of cold targets, which are items without training interactions.

    Only models that read content (vectors or features of items) can find such items. A table
    without such a model does not show this recall.

    Args:
        results: results of the study, with the ranks of the test targets.
        table: a table of its plan. The cutoff of its first metric is that of the recall.
        ranked: rows (configurations) of the table whose runs have saved ranks.

    Returns:
        One line for each row in ``ranked``, in this order, with the columns ``_MEANS``; the metric
        is called, for example, ``recall@10, cold targets``. Empty if there is nothing to show: no
        row of the table reads content, no target is cold, or the first metric of the table is not
        computed from ranks.
    """
    no_lines = pd.DataFrame(columns=_MEANS)  # the columns row, metric, mean, and so on
    main, ranks = table.metrics[0], results.ranks
    if ranks is None or not is_from_ranks(main):
        return no_lines

    row_options = [results.plan.make_options(row) for row in table.rows]
    if not any(o.get("item_vectors") or o.get("item_features") for o in row_options):
        return no_lines

    # The popularity of a target is its number of training interactions.
    is_cold = ranks.targets["popularity"].to_numpy() == 0  # [targets]
    if not is_cold.any():
        return no_lines

    # compute_means returns a line for each row of the study that has ranks. Only those of this
    # table are kept.
    _, _, cutoff = main.partition("@")
    metric = f"recall@{cutoff}"
    means = _select_rows(compute_means(ranks, metric, {"cold": is_cold}), ranked)
    return means.assign(metric=metric + COLD_TARGETS).reindex(columns=_MEANS)


def _select_rows(means: pd.DataFrame, rows: Sequence[str]) -> pd.DataFrame:
    """Return the lines of some rows (configurations) of a table of means, in the order given."""
    return means.set_index("row").loc[list(rows)].reset_index()


def concatenate(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return frames one below the other, as one frame with a new index.

    Empty frames are left out if others are not, since their columns have no types.
    """
    filled = [frame for frame in frames if not frame.empty]
    return pd.concat(filled or frames, ignore_index=True)


# --- differences from the reference ---


def compute_differences(
    table: RankTable,
    metric: str,
    reference: str,
    rows: Sequence[str],
    bins: Mapping[str, np.ndarray | slice] = ONE_BIN,
    are_coupled: Callable[[str, str], bool] = lambda row, other: False,
) -> pd.DataFrame:
    """Return the difference of each row (a configuration) from the reference, paired by target.

    There are two tests, a t-test and a test by sign flips, and the larger of their p-values counts.
    A difference gets a star if its p-value is below 0.05 after Holm's correction over all lines,
    and both sides have two seeds or more.

    Args:
        table, metric: ranks of the test targets in all runs, and a name such as ``ndcg@10``.
        reference: row that all ``rows`` are compared to.
        rows: names of the rows to compare.
        bins: name of a bin -> [targets] whether a target is in it; by default one bin of all.
        are_coupled: returns whether two rows share the noise of a seed, because one was made from
            runs of the other, or both from runs of a third. Their runs are then paired by seed.

    Returns:
        One line per row and bin, with the columns of ``_DIFFERENCES``. A bin without targets only
        has names and counts.
    """
    lines = []  # one mapping of columns per line
    for bin_name, mask in bins.items():
        for line in _compare_in_bin(table, metric, reference, rows, mask, are_coupled):
            lines.append({**line, "reference": reference, "metric": metric, "bin": bin_name})

    frame = pd.DataFrame(lines, columns=_DIFFERENCES)
    frame["p"] = frame[["p_t", "p_flips"]].max(axis=1)  # without those that are nan
    frame["p_holm"] = correct_by_holm(frame["p"].to_numpy(dtype=float))
    has_seeds = (frame["seeds"] > 1) & (frame["reference_seeds"] > 1)
    return frame.assign(star=has_seeds & (frame["p_holm"] < 1 - LEVEL))  # LEVEL is 0.95


def _compare_in_bin(
    table: RankTable,
    metric: str,
    reference: str,
    rows: Sequence[str],
    mask: np.ndarray | slice,
    are_coupled: Callable[[str, str], bool],
) -> list[dict[str, Any]]:
    """Compare rows (configurations) with the reference over the test targets of one bin.

    A bin is a group of targets.

    Args:
        table, metric: ranks of the test targets in all runs, and a name such as ``ndcg@10``.
        reference, rows: the row that all others are compared to, and the names of these.
        mask: [targets] whether a target is in the bin.
        are_coupled: returns whether two rows come from the same trained models, so that they share
            the noise of a seed.

    Returns:
        A mapping for each row, column -> value: its name, counts of targets, units and seeds, and
        if there are targets, what :func:`_describe_difference` returns, and ``p_flips``.
    """
    # The metric, summed over the targets of each unit (user): row -> [seeds, units].
    totals, num_targets = table.sum_gains(metric, mask)
    # The noise between seeds, averaged over the rows; a row with a single seed takes it.
    pooled = _pool_noise(totals, num_targets, are_coupled)
    lines, unit_differences = [], []
    for row in rows:
        # The sums of the seeds that are compared: of coupled rows those that both have, else all.
        is_coupled = are_coupled(row, reference)
        row_sums, reference_sums = _select_seeds(table, totals, row, reference, is_coupled)
        line = {"row": row, "targets": num_targets.sum(), "units": len(num_targets)}
        line |= {"seeds": len(row_sums), "reference_seeds": len(reference_sums)}
        if len(num_targets) > 0:
            line |= _describe_difference(row_sums, reference_sums, num_targets, pooled, is_coupled)
            unit_differences.append(row_sums.mean(0) - reference_sums.mean(0))  # [units]
        lines.append(line)

    # The p-values of the test by sign flips, for all rows at once, so that they share the flips.
    if unit_differences:
        p_flips = flip_signs(np.stack(unit_differences, axis=1))
        for line, p in zip(lines, p_flips, strict=True):
            line["p_flips"] = p
    return lines


def _describe_difference(
    row_sums: np.ndarray,
    reference_sums: np.ndarray,
    num_targets: np.ndarray,
    pooled: SeedNoise | None,
    is_coupled: bool,
) -> dict[str, Any]:
    """Return what a table shows of the difference of a row (configuration) and the reference.

    The difference that is shown is that of the means over all test targets. Its error cannot be
    estimated from the targets, since those of a unit (user) are not independent. So it is estimated
    from one value for each unit.

    Args:
        row_sums, reference_sums: [seeds, units] sums of a metric over the targets of each unit.
        num_targets: [units] number of targets of each unit.
        pooled: average noise between seeds, for a row with a single seed; None if it is unknown.
        is_coupled: whether both rows come from the same trained models, and share their noise.

    Returns:
        Column -> value: difference, low, high, error, df, p_t, detectable and seed_noise.
    """
    # One value for each seed and unit. Their mean over the units is about that over the targets.
    row_values = compute_pseudo_values(row_sums, num_targets)  # [seeds, units]
    reference_values = compute_pseudo_values(reference_sums, num_targets)
    estimate = estimate_difference(row_values, reference_values, pooled, is_coupled)

    # Show the exact difference over the targets, and an interval of the same width around it.
    unit_differences = row_sums.mean(0) - reference_sums.mean(0)  # [units] of the sums
    shown = replace(estimate, difference=float(unit_differences.sum() / num_targets.sum()))
    low, high = shown.interval
    detectable = compute_detectable(estimate.error, estimate.df)
    return {**asdict(shown), "low": low, "high": high, "p_t": estimate.p, "detectable": detectable}


def _pool_noise(
    totals: Mapping[str, np.ndarray],
    num_targets: np.ndarray,
    are_coupled: Callable[[str, str], bool],
) -> SeedNoise | None:
    """Return the noise of seeds, averaged over all rows (configurations) with several seeds.

    The noise of a row says how much its mean of the metric varies from seed to seed: a
    :class:`SeedNoise` has the variance. Rows are coupled if they start from the same trained
    models. The noise of these models is in all of them, and would count several times in the
    average. So of coupled rows only one is taken, the one with the most seeds.

    Args:
        totals: row -> [seeds, units] sums over the targets of each unit (user).
        num_targets: [units] number of targets of each unit.
        are_coupled: returns whether two rows, given by name, are coupled.

    Returns:
        The average noise; None if no row has several seeds, or no value depends on the seed.
    """
    # Go through the rows from the most seeds to the fewest, and leave out each one that is coupled
    # to one already taken.
    independent: list[str] = []
    for row in sorted(totals, key=lambda row: len(totals[row]), reverse=True):
        if not any(are_coupled(row, other) for other in independent):
            independent.append(row)

    # The noise is estimated from one value for each seed and unit; ``pool`` leaves out rows with
    # one seed, which show none.
    return SeedNoise.pool(compute_pseudo_values(totals[row], num_targets) for row in independent)


def _select_seeds(
    table: RankTable, totals: Mapping[str, np.ndarray], row: str, reference: str, is_coupled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a row (a configuration) and of the reference that are compared.

    Coupled rows share the noise of a seed, so only seeds that both have are compared: of the seeds
    [1, 2, 3] and [2, 3, 4] these are 2 and 3. Without such seeds, all are compared.

    Args:
        table: has the seeds of both rows.
        totals: row -> [seeds, units] values, seeds ascending.
        row, reference, is_coupled: names of the two rows, and whether they are coupled.
    """
    seeds, reference_seeds = table.list_seeds(row), table.list_seeds(reference)
    common = sorted(set(seeds) & set(reference_seeds))
    if is_coupled and common:
        is_common, is_common_in_reference = np.isin(seeds, common), np.isin(reference_seeds, common)
        return totals[row][is_common], totals[reference][is_common_in_reference]
    return totals[row], totals[reference]
