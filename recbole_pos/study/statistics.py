"""Statistics of a study: means over seeds, differences, minimum detectable differences.

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
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from recbole_pos.study.ranks import RankTable

LEVEL = 0.95
POWER = 0.8
ALL = "all targets"  # the bin that has every target
_FEW = 13  # units of which all 2^13 flips are tried
_ROUNDS = 9_999  # random flips for more units
_CELLS = 20_000_000  # most signs in memory at a time
# Columns of a table of differences.
DIFFERENCES = [
    *("row", "reference", "metric", "bin", "difference", "low", "high", "error", "df"),
    *("p_t", "p_flips", "p", "p_holm", "star", "detectable", "seed_noise"),
    *("seeds", "reference_seeds", "targets", "units"),
]


def compute_pseudo_values(totals: np.ndarray, num_targets: np.ndarray) -> np.ndarray:
    """Return the jackknife values of units, for a mean over targets of which units have several.

    Args:
        totals: [..., units] sums over the targets of each unit.
        num_targets: [units] number of targets of each unit.

    Returns:
        [..., units] values whose mean and variance are computed as if each unit had one target;
        the totals themselves if each has one (Quenouille; Tukey).
    """
    if (num_targets == 1).all() or len(num_targets) == 1:
        return totals / num_targets
    units, targets = len(num_targets), num_targets.sum()
    total = totals.sum(-1, keepdims=True)
    return units * total / targets - (units - 1) * (total - totals) / (targets - num_targets)


@dataclass(frozen=True)
class SeedNoise:
    """The noise of seeds: how the mean of a run varies with its seed.

    Attributes:
        between: variance of the means of runs with different seeds.
        within: part of ``between`` that comes from the units, and that the variance between units
            has already.
        df: degrees of freedom of ``between``.
        level: mean of the metric over seeds and units.
    """

    between: float
    within: float
    df: int
    level: float

    @classmethod
    def from_values(cls, values: np.ndarray) -> SeedNoise | None:
        """Estimate the noise from values [seeds, units] of one row; None for a single seed."""
        seeds, units = values.shape
        if seeds < 2:
            return None
        seed_means, unit_means = values.mean(1, keepdims=True), values.mean(0, keepdims=True)
        residuals = values - seed_means - unit_means + values.mean()
        within = (residuals**2).sum() / ((seeds - 1) * max(units - 1, 1)) / units
        return cls(float(seed_means.var(ddof=1)), float(within), seeds - 1, float(values.mean()))

    @classmethod
    def pool(cls, rows: Iterable[np.ndarray]) -> SeedNoise | None:
        """Average the noise of rows, each [seeds, units] values, weighted by degrees of freedom.

        A row whose runs are all equal (Pop does not depend on the seed) is left out; None if no row
        has two seeds with different means.
        """
        estimates = [cls.from_values(values) for values in rows]
        noises = [noise for noise in estimates if noise is not None and noise.between > 0]
        df = sum(noise.df for noise in noises)
        if not df:
            return None
        between, within, level = (
            sum(getattr(noise, name) * noise.df for noise in noises) / df
            for name in ("between", "within", "level")
        )
        return cls(between, within, df, level)

    def factor(self, level: float) -> float:
        """Return the factor of the variances for a row with a mean of ``level``: noise grows with
        the metric, and is not reduced for a row below the others."""
        return max(level / self.level, 1.0) ** 2 if self.level > 0 else 1.0


@dataclass(frozen=True)
class Estimate:
    """The difference of two means, row less reference.

    Attributes:
        error: standard error; nan where it cannot be estimated (one unit, or none that differs).
        df: degrees of freedom.
        seed_noise: source of the noise between seeds: ``own`` (both sides have several seeds),
            ``pooled`` (over the study's rows, since a side has one seed) or ``unknown`` (no row has
            several: the error covers the units only, and is too small).
    """

    difference: float
    error: float
    df: float
    seed_noise: str

    def interval(self) -> tuple[float, float]:
        """Return the 95% confidence interval of the difference, low and high."""
        half = self.error * float(stats.t.ppf((1 + LEVEL) / 2, self.df))
        return self.difference - half, self.difference + half

    @property
    def p(self) -> float:
        """Two-sided p-value of a t-test that the difference is zero; nan without an error."""
        return float(2 * stats.t.sf(abs(self.difference) / self.error, self.df))

    def detectable(self) -> float:
        """Return the minimum detectable difference: the interval of a true difference of this size
        excludes zero in 80% of all studies."""
        quantiles = stats.t.ppf([(1 + LEVEL) / 2, POWER], self.df)
        return self.error * float(quantiles.sum())


def estimate(
    row: np.ndarray,
    reference: np.ndarray,
    pooled: SeedNoise | None = None,
    coupled: bool = False,
) -> Estimate:
    """Estimate the difference of two rows and its error.

    Args:
        row, reference: [seeds, units] values of the same units.
        pooled: noise between seeds over the study, for a side that has one seed.
        coupled: whether seed s of a side was made from seed s of the other, so that they share its
            noise: then it is estimated from the differences of each seed, not from the two sides.
    """
    difference, units = float(row.mean() - reference.mean()), row.shape[1]
    if units < 2:
        return Estimate(difference, float("nan"), float("nan"), "unknown")
    # the noise of one coupled seed is unknown; that of two independent sides is an upper bound
    is_coupled = coupled and row.shape == reference.shape and len(row) > 1
    sides = [row - reference] if is_coupled else [row, reference]
    between_units = float((row.mean(0) - reference.mean(0)).var(ddof=1)) / units
    # extra variance of seeds, and the denominator of Satterthwaite's degrees of freedom
    extra, weight = 0.0, between_units**2 / (units - 1)
    lowest_df = units - 1  # degrees of freedom of a sum are never below those of its parts
    pooled_factor = 0.0  # sum of the factors by which the pooled variances are taken
    for side in sides:
        noise = SeedNoise.from_values(side)
        if noise is None:
            pooled_factor += pooled.factor(float(side.mean())) if pooled is not None else 1.0
            continue
        extra += (noise.between - noise.within) / len(side)
        weight += (noise.between / len(side)) ** 2 / noise.df
        lowest_df = min(lowest_df, noise.df)
    seed_noise = "own"
    if pooled_factor:
        seed_noise = "unknown"
        if pooled is not None:
            seed_noise = "pooled"
            extra += pooled_factor * (pooled.between - pooled.within)
            weight += (pooled_factor * pooled.between) ** 2 / pooled.df
            lowest_df = min(lowest_df, pooled.df)
    variance = between_units + max(extra, 0.0)
    if not variance or not (row.any() or reference.any()):
        # equal values, such as zeros where no cold item is found, do not mean a precise estimate
        return Estimate(difference, float("nan"), float("nan"), seed_noise)
    df = max(variance**2 / weight, lowest_df)
    return Estimate(difference, float(np.sqrt(variance)), float(df), seed_noise)


def flip_signs(differences: np.ndarray) -> np.ndarray:
    """Test by random sign flips of units whether differences are symmetric about zero.

    If the two rows were exchangeable, each unit could have the opposite sign (Fisher's
    randomisation test). All flips are tried where few units differ, otherwise random
    ones. The test is of these trained models: it does not cover the noise of seeds.

    Args:
        differences: [units, comparisons] sums over the targets of a unit; all comparisons get the
            same random flips.

    Returns:
        [comparisons] two-sided p-values.
    """
    differences = np.asarray(differences, dtype=float)
    p_values = np.ones(differences.shape[1])
    sampled = []  # comparisons with too many units to try all flips
    for comparison, values in enumerate(differences.T):
        values = values[values != 0]
        if len(values) > _FEW:
            sampled.append(comparison)
        elif len(values):
            flips = np.arange(2 ** len(values))[:, None] >> np.arange(len(values))
            sums = np.abs((1 - 2 * (flips & 1)) @ values)
            p_values[comparison] = (sums >= _just_below(abs(values.sum()))).mean()
    if sampled:
        values = differences[:, sampled]
        p_values[sampled] = _sample_flips(values[(values != 0).any(1)])
    return p_values


def _sample_flips(values: np.ndarray) -> np.ndarray:
    """Return p-values [comparisons] of random sign flips of values [units, comparisons]."""
    rng = np.random.default_rng(0)
    units = len(values)
    observed = _just_below(np.abs(values.sum(0)))
    num_reached = np.zeros(values.shape[1])
    step = max(_CELLS // units, 1)  # flips at a time
    for start in range(0, _ROUNDS, step):
        count = min(step, _ROUNDS - start)
        bits = np.frombuffer(rng.bytes(math.ceil(count * units / 8)), dtype=np.uint8)
        stays = np.unpackbits(bits, count=count * units).reshape(count, units).astype(np.float32)
        # sum of +-v is twice the sum of those that stay, less the sum of all
        sums = 2 * (stays @ values.astype(np.float32)) - values.sum(0)
        num_reached += (np.abs(sums) >= observed).sum(0)
    return (num_reached + 1) / (_ROUNDS + 1)


def _just_below(value: np.ndarray) -> np.ndarray:
    """Return a threshold that sums reach which are equal to ``value`` but for rounding."""
    return value * (1 - 1e-6) - 1e-12


def correct_by_holm(p: np.ndarray) -> np.ndarray:
    """Correct p-values for multiple tests (Holm, A simple sequentially rejective procedure, 1979).

    Args:
        p: [tests] p-values; nan where there is no test, which does not count.
    """
    adjusted = np.full(p.shape, np.nan)
    order = np.argsort(p, kind="stable")[: np.count_nonzero(~np.isnan(p))]  # nan are last
    corrected = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    adjusted[order] = np.minimum(corrected, 1.0)
    return adjusted


def compute_means(
    table: RankTable, metric: str, bins: Mapping[str, np.ndarray] | None = None
) -> pd.DataFrame:
    """Return the mean of a metric of each row.

    Args:
        table: ranks of the study's runs.
        metric: a name such as ``ndcg@10``.
        bins: name of a bin -> [targets] whether a target is in it; one bin of all if None.

    Returns:
        A line for each row and bin: row, metric, bin, mean (over seeds and targets), deviation
        (between seeds; nan of one), seeds, targets, units.
    """
    lines = []
    masks: Mapping[str, np.ndarray | None] = {ALL: None} if bins is None else bins
    for bin_name, mask in masks.items():
        totals, num_targets = table.totals(metric, mask)
        units, targets = len(num_targets), int(num_targets.sum())
        for row, values in totals.items():
            by_seed = pd.Series(values.sum(1) / targets if units else np.nan)
            means = by_seed.mean(), by_seed.std()
            lines.append((row, metric, bin_name, *means, len(values), targets, units))
    columns = ["row", "metric", "bin", "mean", "deviation", "seeds", "targets", "units"]
    return pd.DataFrame(lines, columns=columns)


def compute_differences(
    table: RankTable,
    metric: str,
    reference: str,
    rows: Sequence[str],
    bins: Mapping[str, np.ndarray] | None = None,
    coupled: Callable[[str, str], bool] = lambda row, other: False,
) -> pd.DataFrame:
    """Return the difference of each row from the reference, paired by target.

    The interval covers the noise between units and between seeds. Where a row has one seed, the
    noise between seeds is that of the study's rows with several; where no row has several it is
    unknown, and the interval, for these trained models only, too narrow. A star needs two seeds on
    both sides and a p-value below 0.05 after Holm's correction over all lines. That p-value is the
    larger of two: of the t-test that belongs to the interval, and of sign flips over the units,
    which assume no distribution.

    Args:
        table: ranks of the study's runs.
        metric: a name such as ``ndcg@10``.
        reference: row that the others are compared to.
        rows: rows to compare.
        bins: name of a bin -> [targets] whether a target is in it; one bin of all if None.
        coupled: returns whether two rows share the noise of a seed, since one was made from runs of
            the other or both from runs of a third.

    Returns:
        A line for each row and bin: row, reference, metric, bin, difference, low, high (the 95%
        interval), error (standard), df (degrees of freedom), p_t, p_flips, p (the larger), p_holm,
        star, detectable (the minimum detectable difference at 80% power), seed_noise (own, pooled,
        unknown), seeds, reference_seeds, targets, units.
    """
    lines: list[dict[str, Any]] = []
    masks: Mapping[str, np.ndarray | None] = {ALL: None} if bins is None else bins
    for bin_name, mask in masks.items():
        totals, num_targets = table.totals(metric, mask)
        for line in _compare_rows(table, totals, num_targets, reference, rows, coupled):
            lines.append({**line, "metric": metric, "bin": bin_name})
    frame = pd.DataFrame(lines, columns=DIFFERENCES)
    frame["p_holm"] = correct_by_holm(frame["p"].to_numpy(dtype=float))
    has_seeds = (frame["seeds"] > 1) & (frame["reference_seeds"] > 1)
    frame["star"] = has_seeds & (frame["p_holm"] < 1 - LEVEL)
    return frame


def _compare_rows(
    table: RankTable,
    totals: dict[str, np.ndarray],
    num_targets: np.ndarray,
    reference: str,
    rows: Sequence[str],
    coupled: Callable[[str, str], bool],
) -> list[dict[str, Any]]:
    """Return the lines of a table of differences from sums and numbers of targets in one bin."""
    units, targets = len(num_targets), int(num_targets.sum())
    values, pooled = {}, None
    if units:
        values = {row: compute_pseudo_values(total, num_targets) for row, total in totals.items()}
        pooled = SeedNoise.pool(values[row] for row in _select_independent(values, coupled))
    lines, differences = [], []
    reference_seeds = np.array(table.seeds(reference))
    for row in rows:
        seeds = np.array(table.seeds(row))
        index, reference_index = np.arange(len(seeds)), np.arange(len(reference_seeds))
        is_coupled = coupled(row, reference)
        if is_coupled and np.isin(seeds, reference_seeds).any():  # only the seeds of both
            _, index, reference_index = np.intersect1d(seeds, reference_seeds, return_indices=True)
        line: dict[str, Any] = {
            **{"row": row, "reference": reference, "seeds": len(index)},
            **{"reference_seeds": len(reference_index), "targets": targets, "units": units},
        }
        lines.append(line)
        if not units:  # no target is in the bin
            continue
        sides = values[row][index], values[reference][reference_index]
        result = estimate(*sides, pooled, is_coupled)
        by_unit = totals[row][index].mean(0) - totals[reference][reference_index].mean(0)
        differences.append(by_unit)
        difference = float(by_unit.sum() / targets)
        # of the jackknife from the mean; zero for units of equal size
        shift = difference - result.difference
        low, high = result.interval()
        line |= {"difference": difference, "low": low + shift, "high": high + shift}
        line |= {"error": result.error, "df": result.df, "p_t": result.p}
        line |= {"detectable": result.detectable(), "seed_noise": result.seed_noise}
    if differences:
        for line, p in zip(lines, flip_signs(np.stack(differences, axis=1)), strict=True):
            line |= {"p_flips": p, "p": float(np.fmax(p, line["p_t"]))}
    return lines


def _select_independent(rows: Iterable[str], coupled: Callable[[str, str], bool]) -> list[str]:
    """Return one row of each group of coupled ones, which share the noise of their seeds."""
    selected: list[str] = []
    for row in rows:
        if not any(coupled(row, other) for other in selected):
            selected.append(row)
    return selected
