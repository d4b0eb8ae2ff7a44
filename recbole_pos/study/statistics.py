"""Statistics of a study: the difference of two of its rows in a metric, its error and tests.

Input are the ranks of the test targets in several runs (:class:`RankTable`), from which
:func:`estimate_difference` makes an :class:`Estimate`. A row of a study is a configuration. The
tests are random sign flips (:func:`flip_signs`), with Holm's correction for several rows.

Runs with several seeds on the same units (users, sessions) are a two-way layout with crossed random
effects. The value of seed s and unit u is ``mean + a[s] + b[u] + e[s, u]``, and the grand mean over
S seeds and U units has the variance ``var(a) / S + var(b) / U + var(e) / (S U)``; its parts are
estimated by the mean squares of an analysis of variance (Searle, Casella and McCulloch, Variance
Components, chapter 4), its degrees of freedom by Satterthwaite (An approximate distribution of
estimates of variance components, 1946).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit  # Student's t; scipy.stats takes long to import

from recbole_pos.config.metrics import compute_gains
from recbole_pos.errors import UsageError

LEVEL = 0.95  # of confidence intervals
POWER = 0.8  # of the minimum detectable difference
EVERY = slice(None)  # mask of all targets
# Columns of targets, if all runs have them.
_OPTIONAL_COLUMNS = ("item", "history", "age", "repeats", "habit", "popularity")
_MOST_UNITS_IN_FULL = 13  # up to so many units, all sign flips are tried, 2^13 at most
_NUM_RANDOM_FLIPS = 9_999  # of more units
_MOST_SIGNS = 20_000_000  # in memory at a time


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
        # Runs of an earlier version may lack a column.
        columns = [name for name in _OPTIONAL_COLUMNS if all(name in x for x in frames.values())]
        columns = ["user", *columns]
        for (row, seed), frame in frames.items():
            rank = frame["rank"].to_numpy(dtype=float)
            if not (rank >= 0).all():  # NaN is not >= 0 either
                raise UsageError(f"ranks of {row}, seed {seed}: expected numbers from 0")

            # Sort the targets by all that is known of them, which is the same order in all runs.
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

        # Separate the runs by row (in the order of the rows), each row's sorted by seed. The index
        # of ``self.runs`` is 0, 1, 2 and so on: the number of a run, also in ``totals``.
        by_row = {}
        for row, runs in self.runs.groupby("row", sort=False):
            run_numbers = runs.sort_values("seed").index
            by_row[row] = totals[run_numbers]
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
        within: part of ``between`` that comes from single units, which react differently to a
            seed. The variance between units has this part in it already.
        df: degrees of freedom of ``between``.
        level: mean of the metric over seeds and units.
    """

    between: float
    within: float
    df: int
    level: float

    @classmethod
    def from_values(cls, values: np.ndarray) -> SeedNoise:
        """Estimate the noise of a single seed from the values of a metric in several runs.

        A value is a sum of effects, ``values[s, u] = mean + a[s] + b[u] + e[s, u]``: of the seed
        (a), of the unit (b, such as a user) and a residual (e). Only a and e vary with the seed, so
        the variance of a seed's mean over the units is

            between = var(a) + var(e) / num_units

        The second term is ``within``.

        Args:
            values: [seeds, units] values of two seeds or more.
        """
        num_seeds, num_units = values.shape
        seed_means = values.mean(1, keepdims=True)  # [seeds, 1]
        unit_means = values.mean(0, keepdims=True)  # [1, units]
        df = num_seeds - 1  # degrees of freedom of ``between``

        # var(e) is the sum of squared residuals over their degrees of freedom, which are
        # (seeds - 1) * (units - 1).
        residuals = values - seed_means - unit_means + values.mean()
        residual_variance = (residuals**2).sum() / (df * max(num_units - 1, 1))
        return cls(
            between=float(seed_means.var(ddof=1)),
            within=float(residual_variance / num_units),
            df=df,
            level=float(values.mean()),
        )

    @classmethod
    def pool(cls, rows: Iterable[np.ndarray]) -> SeedNoise | None:
        """Return the average noise of several rows (configurations), as a pooled variance.

        The noise of a row with n seeds has n - 1 degrees of freedom, ``df``. They are its weight in
        the average, which has their sum.

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

        # The weighted averages of three numbers of each noise: its two variances and its mean.
        numbers = [(noise.between, noise.within, noise.level) for noise in noises]
        dfs = [noise.df for noise in noises]
        between, within, level = np.average(numbers, axis=0, weights=dfs)
        return cls(between, within, df=sum(dfs), level=level)

    def scale_variances(self, factor: float) -> SeedNoise:
        """Return this noise with its two variances multiplied by a factor."""
        return replace(self, between=factor * self.between, within=factor * self.within)

    def average(self, num_seeds: int) -> SeedNoise:
        """Return the noise of a mean over n seeds: its variances are 1 / n of those of one seed.

        A study estimates these variances from its own n seeds. So they have n - 1 degrees of
        freedom, even if this noise was estimated from another number of seeds.

        Args:
            num_seeds: n, the seeds of the study.
        """
        return replace(self.scale_variances(1 / num_seeds), df=num_seeds - 1)

    def add_up(self, levels: Iterable[float]) -> SeedNoise:
        """Return the noise that rows (configurations) with one seed add to a difference.

        Such a row cannot show its own noise. It is assumed to have this one, the pooled noise of
        other rows, which grows with the metric: if these have a mean of 0.1, a row with a mean of
        0.2 gets four times their variances. A row with a lower mean gets them unchanged.

        The variances of several rows are multiples of one estimate. So they are added up to one
        noise, with the degrees of freedom of that estimate.

        Args:
            levels: mean of the metric of each row.
        """
        # A metric that is twice as large has four times the variance, so the ratio is squared.
        factors = []
        for level in levels:
            ratio = level / self.level if self.level > 0 else 1.0  # to the mean of the pooled rows
            factors.append(max(ratio, 1.0) ** 2)
        return self.scale_variances(sum(factors))


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
    # A 95% interval is ``estimate ± t_interval * error``. It excludes zero (from above) if the
    # estimate is over ``t_interval * error``. In 80% of studies the estimate is over ``true
    # difference - t_power * error``. Both bounds are equal at the difference that is returned.
    t_interval, t_power = stdtrit(df, [(1 + LEVEL) / 2, POWER])  # quantiles 0.975 and 0.8
    return error * float(t_interval + t_power)


def estimate_difference(
    row: np.ndarray,
    reference: np.ndarray,
    pooled: SeedNoise | None = None,
    is_coupled: bool = False,
) -> Estimate:
    """Estimate the difference of two rows (configurations) and its standard error.

    The error has two sources: the difference varies from unit to unit (from user to user), and the
    mean of a row varies from seed to seed.

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

    # The noise of seeds. Two independent rows each have their own. Of coupled rows, subtract seed s
    # of one from seed s of the other: the noise that they share cancels out, and only that of the
    # differences is left. One pair of seeds cannot show it, so such rows count as independent.
    uses_pairs = is_coupled and row.shape == reference.shape and len(row) > 1
    sides = [row - reference] if uses_pairs else [row, reference]
    noises, seed_noise = _estimate_seed_noises(sides, pooled)

    # Without any gain in either row, as where no model finds a cold item, nothing varies. That does
    # not mean that the estimate is precise, so it has no error.
    if not (row.any() or reference.any()):
        return Estimate(difference, math.nan, math.nan, seed_noise)

    # The variance of the mean over the units, together with the noise of seeds.
    unit_differences = row.mean(0) - reference.mean(0)  # [units]
    unit_variance = float(unit_differences.var(ddof=1)) / num_units
    error, df = combine_noise(unit_variance, num_units, noises)
    return Estimate(difference, error, df, seed_noise)


def _estimate_seed_noises(
    sides: Sequence[np.ndarray], pooled: SeedNoise | None
) -> tuple[list[SeedNoise], str]:
    """Estimate how much the seeds make a difference vary.

    Args:
        sides: [seeds, units] values of a metric: of the two rows (configurations) that are
            compared, or, where seeds are paired, only of their differences by seed.
        pooled: average noise of one seed in the study, which a side with a single seed takes; None
            if it is unknown.

    Returns:
        noises: of the mean of each side over its seeds. Sides with a single seed have one noise
            together, or none if it is unknown. The variances of all of them add up.
        source: where they are from: ``own`` (several seeds of each side), ``pooled`` or
            ``unknown``.
    """
    # A side with several seeds shows its own noise. Its mean over n seeds has 1 / n of it.
    noises = [SeedNoise.from_values(side).average(len(side)) for side in sides if len(side) > 1]
    if len(noises) == len(sides):
        return noises, "own"

    # The other sides take the pooled noise, which grows with the mean of the metric.
    if pooled is None:
        return noises, "unknown"
    means = [float(side.mean()) for side in sides if len(side) == 1]
    noises.append(pooled.add_up(means))
    return noises, "pooled"


def combine_noise(
    unit_variance: float, num_units: int, noises: Sequence[SeedNoise]
) -> tuple[float, float]:
    """Return the standard error of a difference of two means, and its degrees of freedom.

    A mean varies from seed to seed by the variance ``between``. A part of that, ``within``, comes
    from single units (users), and the variance between units has it in it already. So the variance
    of the difference is that of the units, and what the seeds of each side add to it:

        variance = unit_variance + (between_1 - within_1) + (between_2 - within_2)

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
    df = variance**2 / denominator

    # A sum has at least the degrees of freedom of its term with the fewest. The formula can give
    # less than that, since ``within`` makes only its numerator smaller.
    lowest_df = min([num_units - 1, *(noise.df for noise in noises)])
    return math.sqrt(variance), float(max(df, lowest_df))


# --- tests ---


def flip_signs(differences: np.ndarray) -> np.ndarray:
    """Test by random sign flips of units whether differences are symmetric about zero.

    If two rows (configurations) were exchangeable, the difference of each unit (user) could as well
    have the opposite sign (Fisher's randomisation test). The p-value is the share of sign flips
    whose sum is as far from zero as the real one. All flips are tried where up to 13 units differ,
    otherwise 9,999 random ones, the same for all comparisons. The test is of these trained models
    and does not cover the noise of seeds.

    Args:
        differences: [units, comparisons] sums over the targets of a unit.

    Returns:
        [comparisons] two-sided p-values; 1 where no unit differs.
    """
    # A flip counts if its sum is as far from zero as the real one. Rounding may make equal sums
    # differ, so take a little off the distances.
    thresholds = np.abs(differences.sum(0)) * (1 - 1e-6) - 1e-12  # [comparisons]
    p_values = np.empty(len(thresholds))

    # Comparisons in which few units differ (up to _MOST_UNITS_IN_FULL, 13): all flips.
    has_few = np.count_nonzero(differences, axis=0) <= _MOST_UNITS_IN_FULL  # [comparisons]
    for comparison in np.flatnonzero(has_few):
        p_values[comparison] = _try_all_flips(differences[:, comparison], thresholds[comparison])

    # The others together: random flips. Units whose difference is 0 in all of them add nothing.
    has_many = ~has_few
    if has_many.any():
        has_value = (differences[:, has_many] != 0).any(1)  # [units]
        values = differences[has_value][:, has_many]
        p_values[has_many] = _sample_flips(values, thresholds[has_many])
    return p_values


def _try_all_flips(differences: np.ndarray, threshold: float) -> float:
    """Return the share of all sign flips whose sum is at least so far from zero.

    Args:
        differences: [units] a value of each unit. One of 0 has no sign to flip.
        threshold: the distance from zero.
    """
    values = differences[differences != 0]
    # All combinations of signs, for two units [[1, 1], [1, -1], [-1, 1], [-1, -1]].
    signs = np.array(list(itertools.product([1, -1], repeat=len(values))))
    sums = np.abs(signs @ values)
    return (sums >= threshold).mean()


def _sample_flips(values: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the p-values of random sign flips: the share whose sum is far enough from zero.

    Args:
        values: [units, comparisons] values whose signs are flipped at random.
        thresholds: [comparisons] distance from zero that the sum of the real values has. A flip
            counts if its sum is at least as far from zero.

    Returns:
        [comparisons] p-values. The real signs count as one more flip, so that none is zero.
    """
    rng = np.random.default_rng(0)  # fixed, so that a report can be made again with the same p
    num_units, num_comparisons = values.shape
    num_reached = np.zeros(num_comparisons)
    chunk_size = max(_MOST_SIGNS // num_units, 1)  # flips in memory at a time
    for start in range(0, _NUM_RANDOM_FLIPS, chunk_size):
        num_flips = min(chunk_size, _NUM_RANDOM_FLIPS - start)
        # [flips, units] a random bit: 1 if the unit keeps its sign in this flip, 0 if not.
        num_bits = num_flips * num_units
        random_bytes = np.frombuffer(rng.bytes(math.ceil(num_bits / 8)), dtype=np.uint8)
        keeps_sign = np.unpackbits(random_bytes, count=num_bits).reshape(num_flips, num_units)
        # [flips, comparisons] sums of the values that keep their sign. The others are subtracted:
        # kept - (total - kept) is the sum of all values with the signs of the flip.
        kept = keeps_sign.astype(np.float32) @ values.astype(np.float32)
        sums = 2 * kept - values.sum(0)
        num_reached += (np.abs(sums) >= thresholds).sum(0)
    return (num_reached + 1) / (_NUM_RANDOM_FLIPS + 1)


def correct_by_holm(p: np.ndarray) -> np.ndarray:
    """Correct p-values [tests] for multiple tests by Holm's method (1979).

    The smallest of n p-values is multiplied by n, the next by n - 1, and so on; none gets smaller
    than the one before. For [0.01, 0.04, 0.03] the result is [0.03, 0.06, 0.06]. It is at most 1.
    A p-value that is nan (there is no test) does not count and stays nan.
    """
    corrected = np.full(p.shape, np.nan)
    num_tests = np.count_nonzero(~np.isnan(p))
    order = np.argsort(p, kind="stable")[:num_tests]  # argsort has nan last
    ascending = np.maximum.accumulate(p[order] * np.arange(num_tests, 0, -1))
    corrected[order] = np.minimum(ascending, 1.0)
    return corrected
