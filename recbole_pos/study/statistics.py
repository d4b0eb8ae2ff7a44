"""Statistics of a study: metrics from ranks, means over seeds, differences and their errors.

Input are the ranks of the test targets in several runs (:class:`RankTable`). Output are tables with
one line per row of the study (a configuration): :func:`compute_means`, :func:`compute_differences`.

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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit  # Student's t; scipy.stats takes long to import

from recbole_pos.errors import UsageError

LEVEL = 0.95  # of confidence intervals
POWER = 0.8  # of the minimum detectable difference
ALL = "all targets"  # the bin that has every target
EVERY = slice(None)  # mask of all targets
ONE_BIN = {ALL: EVERY}  # name of the bin -> its mask
_MOST_UNITS_IN_FULL = 13  # up to so many units, all sign flips are tried, 2^13 at most
_NUM_RANDOM_FLIPS = 9_999  # of more units
_MOST_SIGNS = 20_000_000  # in memory at a time
# Columns of a table of differences: ends of the 95% interval, standard error and its degrees of
# freedom, two p-values (of which p is the larger), minimum detectable difference, and so on.
DIFFERENCES = [
    *("row", "reference", "metric", "bin", "difference", "low", "high", "error", "df"),
    *("p_t", "p_flips", "p", "p_holm", "star", "detectable", "seed_noise"),
    *("seeds", "reference_seeds", "targets", "units"),
]
# Metric -> gain of ranks below the cutoff k; a target is the only relevant item of its list.
_GAINS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "hit": lambda rank, k: np.ones_like(rank),
    "recall": lambda rank, k: np.ones_like(rank),
    "precision": lambda rank, k: np.ones_like(rank) / k,
    "ndcg": lambda rank, k: 1 / np.log2(rank + 2),
    "mrr": lambda rank, k: 1 / (rank + 1),
    "map": lambda rank, k: 1 / (rank + 1),
}
_METRIC = re.compile(r"([a-z]+)@([1-9]\d*)")
_OPTIONAL_COLUMNS = ("item", "history", "age", "popularity")  # of targets, if a run has them


def is_from_ranks(metric: str) -> bool:
    """Return whether a metric's name (``ndcg@10``) is one that :func:`compute_gains` knows."""
    match = _METRIC.fullmatch(metric.lower())
    return match is not None and match[1] in _GAINS


def compute_gains(rank: np.ndarray, metric: str) -> np.ndarray:
    """Return how much each test target adds to a metric; the mean over targets is the metric.

    For ``ndcg@2``, targets at the ranks [0, 1, 2] have the gains [1, 0.63, 0].

    Args:
        rank: [..., targets] ranks among all items, 0 for the first; a half rank is allowed for
            ties, infinity for a target that cannot be ranked. The gains have the same shape.
        metric: name and cutoff, such as ``ndcg@10``, for which :func:`is_from_ranks` is true.
    """
    name, _, cutoff = metric.lower().partition("@")
    rank, k = np.asarray(rank, dtype=float), int(cutoff)
    compute_gain = _GAINS[name]  # function of ranks below k: 1 / log2(rank + 2) for ndcg
    with np.errstate(invalid="ignore"):  # of infinite ranks, whose gain is 0 whatever comes out
        return np.where(rank < k, compute_gain(rank, k), 0.0)


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
        by_row = {
            row: totals[runs.sort_values("seed").index]
            for row, runs in self.runs.groupby("row", sort=False)
        }
        return by_row, num_targets


def compute_pseudo_values(totals: np.ndarray, num_targets: np.ndarray) -> np.ndarray:
    """Return a value for each unit (user), to compute the error of a mean over all targets.

    If users have different numbers of targets, the mean over targets is not a mean over users. The
    jackknife (Quenouille; Tukey) leaves out each user in turn and returns values whose mean and
    variance can be used as if each user had one target. If each has one, the totals are returned.

    Two users with totals [1, 2] over 1 and 3 targets have the mean 3/4. Without the first user it
    is 2/3, without the second 1. The values are 2 * 3/4 - 2/3 and 2 * 3/4 - 1, their mean is 2/3.

    Args:
        totals: [..., units] sums over the targets of each unit; the values have the same shape.
        num_targets: [units] number of targets of each unit.
    """
    num_units = len(num_targets)
    if (num_targets == 1).all() or num_units == 1:
        return totals / num_targets
    total, all_targets = totals.sum(-1, keepdims=True), num_targets.sum()
    # The mean over targets without each unit, times the number of the other units.
    without_unit = (num_units - 1) * (total - totals) / (all_targets - num_targets)
    return num_units * total / all_targets - without_unit


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

        Args:
            values: [seeds, units] values of two seeds or more.
        """
        # Residuals: what is left of each value without the effects of its seed and its unit (user).
        # ``within`` is the part that they have in the variance of a run's mean over all units.
        num_seeds, num_units = values.shape
        seed_means = values.mean(1, keepdims=True)
        unit_means = values.mean(0, keepdims=True)
        residuals = values - seed_means - unit_means + values.mean()
        df = num_seeds - 1
        between, level = float(seed_means.var(ddof=1)), float(values.mean())
        within = float((residuals**2).sum() / (df * max(num_units - 1, 1)) / num_units)
        return cls(between, within, df, level)

    @classmethod
    def pool(cls, rows: Iterable[np.ndarray]) -> SeedNoise | None:
        """Average the noise of several rows (configurations), weighted by degrees of freedom.

        Rows whose runs are all equal are left out, such as Pop, which does not depend on the seed.
        Return None if no row (values [seeds, units]) has two seeds with different values.
        """
        noises = []
        for values in rows:
            # Sums are rounded, so equal runs may differ a little.
            largest_difference = np.ptp(values, axis=0).max(initial=0.0)
            if largest_difference > 1e-9 * np.abs(values).max(initial=0.0):
                noises.append(cls.from_values(values))
        if not noises:
            return None

        parts = [(noise.between, noise.within, noise.level) for noise in noises]
        dfs = [noise.df for noise in noises]
        between, within, level = np.average(parts, axis=0, weights=dfs)
        return cls(between, within, sum(dfs), level)

    def scale(self, factor: float) -> SeedNoise:
        """Return this noise with its two variances multiplied by a factor."""
        return replace(self, between=factor * self.between, within=factor * self.within)

    def compute_factor(self, level: float) -> float:
        """Return the factor that turns the variances of this pooled noise into those of a row.

        Noise grows with the metric: a row with twice the mean of the pooled rows is assumed to have
        four times their variance. A row with a lower mean has the whole variance.

        Args:
            level: mean of the metric of the row (configuration), which has only one seed.
        """
        return max(level / self.level, 1.0) ** 2 if self.level > 0 else 1.0


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

    @property
    def detectable(self) -> float:
        """Minimum detectable difference at 80% power; nan without an error."""
        quantiles = stdtrit(self.df, [(1 + LEVEL) / 2, POWER])  # levels 0.975 and 0.8
        return self.error * float(quantiles.sum())

    def describe(self, difference: float) -> dict[str, Any]:
        """Return the columns of a table of differences that follow from the estimate.

        Args:
            difference: the difference of the means over targets, which the table shows. The
                estimate is of means over pseudo-values, which are not quite the same where users
                have different numbers of targets. The interval is moved to this difference.
        """
        low, high = replace(self, difference=difference).interval
        columns = {"difference": difference, "low": low, "high": high, "p_t": self.p}
        return {**asdict(self), **columns, "detectable": self.detectable}


def estimate_difference(
    row: np.ndarray,
    reference: np.ndarray,
    pooled: SeedNoise | None = None,
    is_coupled: bool = False,
) -> Estimate:
    """Estimate the difference of two rows (configurations) and its standard error.

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

    # The noise that coupled rows share cancels out in the differences of their pairs of seeds, so
    # only the noise of these counts. A single pair shows none; then the rows count as independent.
    uses_pairs = is_coupled and row.shape == reference.shape and len(row) > 1
    sides = [row - reference] if uses_pairs else [row, reference]

    # The noise of each side with several seeds. A mean over n seeds has 1 / n of its variance.
    noises = [SeedNoise.from_values(side).scale(1 / len(side)) for side in sides if len(side) > 1]

    # Sides with one seed take the pooled noise, times a factor that grows with their mean metric.
    # If both sides take it, it is still a single estimate, so it is added once, with the sum of the
    # two factors.
    seed_noise = "own"
    levels = [float(side.mean()) for side in sides if len(side) == 1]
    if levels and pooled is None:
        seed_noise = "unknown"
    elif levels and pooled is not None:
        seed_noise = "pooled"
        noises.append(pooled.scale(sum(pooled.compute_factor(level) for level in levels)))

    unit_differences = row.mean(0) - reference.mean(0)
    unit_variance = float(unit_differences.var(ddof=1)) / num_units  # of their mean
    error, df = combine_noise(unit_variance, num_units, noises)
    if not (row.any() or reference.any()):
        # Zeros only, as where no cold item is found, do not mean that the estimate is precise.
        error = df = math.nan
    return Estimate(difference, error, df, seed_noise)


def combine_noise(
    unit_variance: float, num_units: int, noises: Sequence[SeedNoise]
) -> tuple[float, float]:
    """Return the standard error of a difference of two means, and its degrees of freedom.

    With the variance u that comes from the units (users), and the noise of each side's seeds with
    the variance b (``between``), of which u covers the part w (``within``) already, the variance of
    the difference is the sum

        v = u + (b1 - w1) + (b2 - w2)

    Satterthwaite's degrees of freedom of such a sum are

        v^2 / (u^2 / (number of units - 1) + b1^2 / df1 + b2^2 / df2)

    Args:
        unit_variance: variance of the difference that comes from the units, u.
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
    # Subtracting w can make the formula smaller than the degrees of freedom of each part, which
    # those of a sum never are.
    lowest = min([num_units - 1, *(noise.df for noise in noises)])
    return math.sqrt(variance), float(max(variance**2 / denominator, lowest))


def flip_signs(differences: np.ndarray) -> np.ndarray:
    """Test by random sign flips of units whether differences are symmetric about zero.

    If two rows (configurations) were exchangeable, the difference of each unit (user) could as well
    have the opposite sign (Fisher's randomisation test). The p-value is the share of sign flips
    whose sum is as far from zero as the real one. All flips are tried where up to 13 units differ,
    otherwise 9,999 random ones, the same for all comparisons. The test is of these trained models
    and does not cover the noise of seeds.

    Args:
        differences: [units, comparisons] sums over the targets of a unit. The p-values are
            two-sided, [comparisons], and 1 where no unit differs.
    """
    # The distance of each real sum from zero, a little smaller, so that sums that are equal but for
    # rounding reach it.
    thresholds = np.abs(differences.sum(0)) * (1 - 1e-6) - 1e-12
    p_values = np.empty(len(thresholds))
    sampled = []  # comparisons with too many units (_MOST_UNITS_IN_FULL, 13) to try all flips
    for comparison, column in enumerate(differences.T):
        values = column[column != 0]  # a difference of 0 has no sign to flip
        if len(values) > _MOST_UNITS_IN_FULL:
            sampled.append(comparison)
            continue
        # All combinations of signs, for two units [[1, 1], [1, -1], [-1, 1], [-1, -1]].
        signs = np.array(list(itertools.product([1, -1], repeat=len(values))))
        sums = np.abs(signs @ values)
        p_values[comparison] = (sums >= thresholds[comparison]).mean()

    if sampled:
        columns = differences[(differences[:, sampled] != 0).any(1)][:, sampled]
        p_values[sampled] = _sample_flips(columns, thresholds[sampled])
    return p_values


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


def compute_differences(
    table: RankTable,
    metric: str,
    reference: str,
    rows: Sequence[str],
    bins: Mapping[str, np.ndarray | slice] = ONE_BIN,
    are_coupled: Callable[[str, str], bool] = lambda row, other: False,
) -> pd.DataFrame:
    """Return the difference of each row (a configuration) from the reference, paired by target.

    :func:`estimate_difference` gives the difference with its interval and t-test, and
    :func:`flip_signs` a second p-value. The larger of the two p-values counts. A difference gets a
    star if its p-value is below 0.05 after Holm's correction over all lines, and both sides have
    two seeds or more.

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
    lines: list[dict[str, Any]] = []
    for bin_name, mask in bins.items():
        # row -> [seeds, units] sums over each unit's targets; [units] numbers of these targets
        totals, num_targets = table.sum_gains(metric, mask)
        pooled = _pool_noise(totals, num_targets, are_coupled)
        bin_lines, unit_differences = [], []
        for row in rows:
            is_coupled = are_coupled(row, reference)
            row_sums, reference_sums = _select_seeds(table, totals, row, reference, is_coupled)
            line: dict[str, Any] = {"row": row, "reference": reference, "metric": metric}
            line |= {"bin": bin_name, "targets": num_targets.sum(), "units": len(num_targets)}
            line |= {"seeds": len(row_sums), "reference_seeds": len(reference_sums)}
            bin_lines.append(line)
            if len(num_targets) == 0:
                continue
            estimate = estimate_difference(
                compute_pseudo_values(row_sums, num_targets),
                compute_pseudo_values(reference_sums, num_targets),
                pooled,
                is_coupled,
            )
            # [units] difference of the sums over a unit's targets, on average over the seeds
            unit_difference = row_sums.mean(0) - reference_sums.mean(0)
            unit_differences.append(unit_difference)
            line |= estimate.describe(float(unit_difference.sum() / num_targets.sum()))

        if unit_differences:
            p_flips = flip_signs(np.stack(unit_differences, axis=1))
            for line, p in zip(bin_lines, p_flips, strict=True):
                line["p_flips"] = p
        lines += bin_lines

    frame = pd.DataFrame(lines, columns=DIFFERENCES)
    frame["p"] = frame[["p_t", "p_flips"]].max(axis=1)  # without those that are nan
    frame["p_holm"] = correct_by_holm(frame["p"].to_numpy(dtype=float))
    has_seeds = (frame["seeds"] > 1) & (frame["reference_seeds"] > 1)
    return frame.assign(star=has_seeds & (frame["p_holm"] < 1 - LEVEL))  # LEVEL is 0.95


def _pool_noise(
    totals: Mapping[str, np.ndarray],
    num_targets: np.ndarray,
    are_coupled: Callable[[str, str], bool],
) -> SeedNoise | None:
    """Return the noise between seeds over all rows (configurations); None if no row shows any.

    Coupled rows (``are_coupled``) share their noise, so only the one with the most seeds counts.

    Args:
        totals: row -> [seeds, units] sums over the targets of each unit (user).
        num_targets: [units] number of targets of each unit.
    """
    independent: list[str] = []
    for row in sorted(totals, key=lambda row: len(totals[row]), reverse=True):
        if not any(are_coupled(row, other) for other in independent):
            independent.append(row)
    return SeedNoise.pool(compute_pseudo_values(totals[row], num_targets) for row in independent)


def _select_seeds(
    table: RankTable,
    totals: Mapping[str, np.ndarray],
    row: str,
    reference: str,
    is_coupled: bool,
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
