"""Statistics of a study: differences of its rows in a metric, their errors and tests.

Input are the ranks of the test targets in several runs (:class:`RankTable`). Output is a table with
one line per row of the study (a configuration), see :func:`compute_differences`.

Runs with several seeds on the same units (users, sessions) are a two-way layout with crossed random
effects. The value of seed s and unit u is ``mean + a[s] + b[u] + e[s, u]``, and the grand mean over
S seeds and U units has the variance ``var(a) / S + var(b) / U + var(e) / (S U)``; its parts are
estimated by the mean squares of an analysis of variance (Searle, Casella and McCulloch, Variance
Components, chapter 4), its degrees of freedom by Satterthwaite (An approximate distribution of
estimates of variance components, 1946).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit  # Student's t; scipy.stats takes long to import

from recbole_pos.config.metrics import compute_gains
from recbole_pos.errors import UsageError
from recbole_pos.study.significance import correct_by_holm, flip_signs

LEVEL = 0.95  # of confidence intervals
POWER = 0.8  # of the minimum detectable difference
ALL = "all targets"  # the bin that has every target
EVERY = slice(None)  # mask of all targets
ONE_BIN = {ALL: EVERY}  # name of the bin -> its mask
# Columns of a table of differences: ends of the 95% interval, standard error and its degrees of
# freedom, two p-values (of which p is the larger), minimum detectable difference, and so on.
DIFFERENCES = [
    *("row", "reference", "metric", "bin", "difference", "low", "high", "error", "df"),
    *("p_t", "p_flips", "p", "p_holm", "star", "detectable", "seed_noise"),
    *("seeds", "reference_seeds", "targets", "units"),
]
_OPTIONAL_COLUMNS = ("item", "history", "age", "popularity")  # of targets, if a run has them


@dataclass(frozen=True, eq=False)
class RankTable:
    """Ranks of the same test targets in several runs.

    Attributes:
        runs: one line per run: row (str, the configuration) and seed (int).
        targets: one line per target: user (or session), and where known item, history (its length),
            age (of its newest interaction, in seconds) and popularity (training interactions).
        rank: [runs, targets] rank of a target among all items in a run, 0 for the first.
    """

    runs: pd.DataFrame
    targets: pd.DataFrame
    rank: np.ndarray

    @classmethod
    def from_runs(cls, frames: Mapping[tuple[str, int], pd.DataFrame]) -> RankTable:
        """Align the ranks of several runs by target.

        Args:
            frames: row (configuration) and seed of a run -> one line per test target, in any order,
                with the columns user and rank, and perhaps item, history, age and popularity.

        Raises:
            UsageError: naming two runs that have different targets, or a run with a bad rank.
        """
        runs = pd.DataFrame(list(frames), columns=["row", "seed"])
        targets = pd.DataFrame()
        ranks: list[np.ndarray] = []
        for (row, seed), frame in frames.items():
            rank = frame["rank"].to_numpy(dtype=float)
            if not (rank >= 0).all():  # NaN is not >= 0 either
                raise UsageError(f"ranks of {row}, seed {seed}: expected numbers from 0")

            # Sort the targets by all that is known of them, which is the same order in all runs.
            columns = ["user", *(column for column in _OPTIONAL_COLUMNS if column in frame)]
            # lexsort sorts by its last key first, so that users are passed last.
            order = np.lexsort([frame[column].to_numpy() for column in reversed(columns)])
            run_targets = frame[columns].iloc[order].reset_index(drop=True)
            ranks.append(rank[order])
            if len(ranks) == 1:  # the first run
                targets = run_targets
            elif not targets.equals(run_targets):
                raise UsageError(
                    f"{row}, seed {seed} and {runs['row'][0]}, seed {runs['seed'][0]} cannot be "
                    f"compared: their {len(run_targets):,} and {len(targets):,} test targets are "
                    "not the same; were the data and the split?"
                )
        return cls(runs, targets, np.stack(ranks))

    def list_seeds(self, row: str) -> list[int]:
        """Return the seeds of a row's runs, ascending."""
        return sorted(self.runs.loc[self.runs["row"] == row, "seed"])

    def sum_gains(
        self, metric: str, mask: np.ndarray | slice = EVERY
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Sum the gains (what a target adds to a metric) of each user's targets in every run.

        Args:
            metric, mask: name such as ``ndcg@10``; [targets] whether a target counts, or all do.

        Returns:
            Row (configuration) -> sums [seeds, users], seeds ascending; and [users] number of
            targets. Users without a target that counts are left out.
        """
        users = self.targets["user"].to_numpy()[mask]
        _, user_index = np.unique(users, return_inverse=True)  # [targets] users numbered from 0
        num_targets = np.bincount(user_index)
        gains = compute_gains(self.rank[:, mask], metric)  # [runs, targets]
        # With weights, bincount sums the gains of each user: [runs, users].
        totals = np.stack([np.bincount(user_index, run, len(num_targets)) for run in gains])

        # Separate the runs by row (in the order of the rows), each row's sorted by seed.
        by_row = {}
        for row, runs in self.runs.groupby("row", sort=False):
            by_row[row] = totals[runs.sort_values("seed").index]
        return by_row, num_targets


def compute_pseudo_values(totals: np.ndarray, num_targets: np.ndarray) -> np.ndarray:
    """Return a value for each unit (user), to compute the error of a mean over all targets.

    If users have different numbers of targets, the mean over targets is not a mean over users. The
    jackknife (Quenouille; Tukey) leaves out each user in turn. The pseudo-value of a user is

        num_units * mean - (num_units - 1) * mean_without_user

    Mean and variance of these values can be used as if each user had one target. An example: two
    users with totals [1, 2] over 1 and 3 targets have the mean 3/4; without the first user it is
    2/3, without the second 1. The values are 2 * 3/4 - 1 * 2/3 and 2 * 3/4 - 1 * 1.

    Args:
        totals: [..., units] sums over the targets of each unit; the values have the same shape.
        num_targets: [units] number of targets of each unit.
    """
    # With one target each, the formula gives the totals themselves. A single unit cannot be left
    # out, since none would remain, and its value is its mean.
    num_units = len(num_targets)
    if (num_targets == 1).all() or num_units == 1:
        return totals / num_targets
    total, all_targets = totals.sum(-1, keepdims=True), num_targets.sum()
    # The two terms of the formula; the first is the same for all users.
    with_user = num_units * total / all_targets
    without_user = (num_units - 1) * (total - totals) / (all_targets - num_targets)
    return with_user - without_user


@dataclass(frozen=True)
class SeedNoise:
    """The noise of seeds: how the mean of a run over units (users) varies with its seed.

    Attributes:
        between: variance of the means of runs with different seeds.
        within: part of ``between`` that comes from units that react differently to a seed. The
            variance between units covers it already.
        df: degrees of freedom of ``between``.
        level: mean of the metric over seeds and units.
    """

    between: float
    within: float
    df: int
    level: float

    @classmethod
    def from_values(cls, values: np.ndarray) -> SeedNoise:
        """Estimate the noise of seeds from the values of a metric in several runs.

        A value is ``values[s, u] = mean + a[s] + b[u] + e[s, u]``, with the effects a of the seed
        and b of the unit (user), and the residual e. ``between``, the variance of the seeds' means,
        estimates ``var(a) + var(e) / num_units``. Its second part is ``within``.

        Args:
            values: [seeds, units] values of two seeds or more.
        """
        num_seeds, num_units = values.shape
        seed_means = values.mean(1, keepdims=True)  # [seeds, 1]
        unit_means = values.mean(0, keepdims=True)  # [1, units]
        level, df = float(values.mean()), num_seeds - 1
        between = float(seed_means.var(ddof=1))

        # var(e) is the sum of squares over its degrees of freedom, (seeds - 1) * (units - 1).
        residuals = values - seed_means - unit_means + values.mean()
        residual_variance = (residuals**2).sum() / (df * max(num_units - 1, 1))
        return cls(between, float(residual_variance / num_units), df, level)

    @classmethod
    def pool(cls, rows: Iterable[np.ndarray]) -> SeedNoise | None:
        """Average the noise of several rows (configurations), as a pooled variance does.

        A row with n seeds has n - 1 degrees of freedom, ``df``, which is its weight; the average
        has their sum. Averaged are ``between``, the variance of a row's means by seed; ``within``,
        the part of it that comes from single units (users); and ``level``, the mean of the metric.

        Args:
            rows: for each row its values [seeds, units]. Rows with equal values in all seeds are
                left out, such as those of Pop, which does not depend on the seed.

        Returns:
            The average; None if no row has two seeds with different values.
        """
        noises = []
        for values in rows:
            # The largest difference between two seeds in any unit; ``initial`` counts for a row
            # without units. Sums are rounded, so equal runs may differ a little.
            largest_difference = np.ptp(values, axis=0).max(initial=0.0)
            if largest_difference > 1e-9 * np.abs(values).max(initial=0.0):
                noises.append(cls.from_values(values))
        if not noises:
            return None

        numbers = [(noise.between, noise.within, noise.level) for noise in noises]
        dfs = [noise.df for noise in noises]
        between, within, level = np.average(numbers, axis=0, weights=dfs)
        return cls(between, within, sum(dfs), level)

    def scale(self, factor: float) -> SeedNoise:
        """Return this noise with its two variances multiplied by a factor."""
        return replace(self, between=factor * self.between, within=factor * self.within)

    def average(self, num_seeds: int) -> SeedNoise:
        """Return the noise of the mean over n seeds: 1 / n of the noise of a single seed.

        Args:
            num_seeds: n, the seeds that are averaged. Their own variance is the estimate of the
                noise, so it has n - 1 degrees of freedom.
        """
        return replace(self.scale(1 / num_seeds), df=num_seeds - 1)

    def add_up(self, levels: Iterable[float]) -> SeedNoise:
        """Return the noise that rows (configurations) with one seed add to a difference.

        Such a row cannot show its own noise. It is assumed to have this one, the pooled noise of
        other rows. Noise grows with the metric: a row with twice the mean of the pooled rows is
        assumed to have four times their variance. A row with a lower mean has the whole variance.

        The variances of two rows are multiples of the same estimate. So they are added up to one
        noise, with the degrees of freedom of that estimate.

        Args:
            levels: mean of the metric of each row.
        """
        # ``self.level`` is the mean of the metric in the pooled rows. If it is 0, nothing can be
        # compared to it, and the noise is taken as it is.
        factors = [max(level / self.level, 1.0) ** 2 if self.level > 0 else 1.0 for level in levels]
        return self.scale(sum(factors))


@dataclass(frozen=True)
class Estimate:
    """The estimated difference of the mean of a row (a configuration) and that of the reference.

    Attributes:
        difference: mean of the row, less the mean of the reference.
        error: standard error; nan for a single unit (user), or if no value varies.
        df: degrees of freedom; nan without an error.
        seed_noise: source of the noise between seeds: ``own`` (both sides have several seeds),
            ``pooled`` (a side has one seed, and takes the noise of the study's other rows) or
            ``unknown`` (no row has several seeds, and the error covers only the units).
    """

    difference: float
    error: float
    df: float
    seed_noise: str

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high end of the 95% confidence interval; nan without an error."""
        half_width = self.error * float(stdtrit(self.df, (1 + LEVEL) / 2))  # LEVEL is 0.95
        return self.difference - half_width, self.difference + half_width

    @property
    def p(self) -> float:
        """Two-sided p-value of a t-test that the difference is zero; nan without an error."""
        return float(2 * stdtr(self.df, -abs(self.difference) / self.error))


def compute_detectable(error: float, df: float) -> float:
    """Return the minimum detectable difference at 80% power; nan without an error.

    It is the true difference with which 80% of studies have a 95% interval that excludes zero.

    Args:
        error, df: standard error of the difference, and its degrees of freedom.
    """
    # An interval excludes zero if the estimate is above t(0.975) errors, half of its width. That is
    # so in 80% of studies if the true difference is t(0.8) errors above this bound. stdtrit returns
    # these quantiles t of Student's distribution.
    quantiles = stdtrit(df, [(1 + LEVEL) / 2, POWER])
    return error * float(quantiles.sum())


def estimate_difference(
    row: np.ndarray,
    reference: np.ndarray,
    pooled: SeedNoise | None = None,
    is_coupled: bool = False,
) -> Estimate:
    """Estimate the difference of two rows (configurations) and its standard error.

    The error has two sources: that of the units (users), and that of the seeds, which
    :class:`SeedNoise` describes as the variance of a row's means by seed.

    Args:
        row, reference: [seeds, units] values of a metric for the same units.
        pooled: noise between seeds, averaged over the rows of the study. It is used for a row with
            one seed, which cannot show its own noise. None if no row has several seeds.
        is_coupled: whether seed s of one row was trained from seed s of the other. The two share
            the noise of that seed.
    """
    difference = float(row.mean() - reference.mean())
    _, num_units = row.shape
    if num_units < 2:
        return Estimate(difference, math.nan, math.nan, "unknown")

    # The seeds. Two independent rows each have noise of their own. Of coupled rows, subtract seed s
    # of one from seed s of the other: the noise that they share cancels out, and only that of the
    # differences is left. One pair of seeds cannot show it, so such rows count as independent.
    uses_pairs = is_coupled and row.shape == reference.shape and len(row) > 1
    sides = [row - reference] if uses_pairs else [row, reference]
    noises, seed_noise = _estimate_seed_noises(sides, pooled)

    # The units: the error of the mean over them. Then both sources together.
    unit_differences = row.mean(0) - reference.mean(0)  # [units]
    unit_variance = float(unit_differences.var(ddof=1)) / num_units
    error, df = combine_noise(unit_variance, num_units, noises)
    if not (row.any() or reference.any()):
        # Zeros only, as where no cold item is found, do not mean that the estimate is precise.
        error = df = math.nan
    return Estimate(difference, error, df, seed_noise)


def _estimate_seed_noises(
    sides: Sequence[np.ndarray], pooled: SeedNoise | None
) -> tuple[list[SeedNoise], str]:
    """Estimate the noise of seeds in the means of the sides of a difference.

    Args:
        sides: [seeds, units] values of each side: of two rows (configurations), or of their
            differences by seed.
        pooled: as of :func:`estimate_difference`.

    Returns:
        The noises, whose variances add up; and where they are from, as ``seed_noise`` of
        :class:`Estimate`.
    """
    # A side with several seeds shows its own noise. Its mean over n seeds has 1 / n of it.
    noises = [SeedNoise.from_values(side).average(len(side)) for side in sides if len(side) > 1]
    if len(noises) == len(sides):
        return noises, "own"

    # The others have one seed each, and take the pooled noise.
    if pooled is None:
        return noises, "unknown"
    noises.append(pooled.add_up(float(side.mean()) for side in sides if len(side) == 1))
    return noises, "pooled"


def combine_noise(
    unit_variance: float, num_units: int, noises: Sequence[SeedNoise]
) -> tuple[float, float]:
    """Return the standard error of a difference of two means, and its degrees of freedom.

    The variance of the difference comes from the units (users) and from the seeds of each noise:

        variance = unit_variance + (between_1 - within_1) + (between_2 - within_2)

    ``between`` is the variance that different seeds give to a mean. ``within`` is the part of it
    that comes from single units. It is subtracted, since ``unit_variance`` has it already.

    Each term is estimated with degrees of freedom of its own. By Satterthwaite's approximation, the
    degrees of freedom of their sum are

        variance^2 / (unit_variance^2 / (num_units - 1) + between_1^2 / df_1 + between_2^2 / df_2)

    Args:
        unit_variance: variance of the difference that comes from the units.
        num_units: number of units.
        noises: noise of the seeds in the difference, of two sides, one or none.

    Returns:
        The standard error, and its degrees of freedom; both are nan if nothing varies.
    """
    # An estimate of what the seeds add may fall below zero, which no variance does.
    seed_variance = max(sum(noise.between - noise.within for noise in noises), 0.0)
    variance = unit_variance + seed_variance
    if variance == 0:
        return math.nan, math.nan

    denominator = unit_variance**2 / (num_units - 1)
    denominator += sum(noise.between**2 / noise.df for noise in noises)
    # A sum never has fewer degrees of freedom than the term with the fewest. The formula can give
    # fewer, since ``within`` is subtracted in its numerator only.
    lowest = min([num_units - 1, *(noise.df for noise in noises)])
    return math.sqrt(variance), float(max(variance**2 / denominator, lowest))


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
        are_coupled: returns whether two rows share the noise of a seed: one was made from runs of
            the other, or both from runs of a third.

    Returns:
        One line per row and bin, with the columns of ``DIFFERENCES``. A bin without targets only
        has names and counts.
    """
    lines = []  # one mapping of columns per line
    for bin_name, mask in bins.items():
        for line in _compare_in_bin(table, metric, reference, rows, mask, are_coupled):
            lines.append({**line, "reference": reference, "metric": metric, "bin": bin_name})

    frame = pd.DataFrame(lines, columns=DIFFERENCES)
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

    A bin is a group of targets. A row is compared over the seeds that :func:`_select_seeds` takes.

    Args:
        table, metric, reference, rows, are_coupled: as of :func:`compute_differences`.
        mask: [targets] whether a target is in the bin.

    Returns:
        A mapping for each row, column -> value: its name, counts of targets, units and seeds, and
        if there are targets, what :func:`_describe_difference` returns, and ``p_flips``.
    """
    # The metric, summed over the targets of each unit (user): row -> [seeds, units].
    totals, num_targets = table.sum_gains(metric, mask)
    pooled = _pool_noise(totals, num_targets, are_coupled)  # for rows with a single seed
    lines, unit_differences = [], []
    for row in rows:
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

    The difference is that of the means over all test targets. Its error is estimated from one value
    for each unit (user), since the targets of a unit are not independent. If units have different
    numbers of targets, the difference of the means of these values is not quite the one that is
    shown. So the confidence interval is moved to that one, with the same width.

    Args:
        row_sums, reference_sums: [seeds, units] sums of a metric over the targets of each unit.
        num_targets: [units] number of targets of each unit.
        pooled, is_coupled: as of :func:`estimate_difference`.

    Returns:
        Column -> value: difference, low, high, error, df, p_t, detectable and seed_noise.
    """
    row_values = compute_pseudo_values(row_sums, num_targets)  # [seeds, units]
    reference_values = compute_pseudo_values(reference_sums, num_targets)
    estimate = estimate_difference(row_values, reference_values, pooled, is_coupled)

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
