"""How far a difference can be trusted: noise between units (users, sessions) and between seeds.

Runs with several seeds on the same units are a two-way layout with crossed random effects. The
value of seed s and unit u is ``mean + a[s] + b[u] + e[s, u]``, and the grand mean over S seeds and
U units has the variance ``var(a) / S + var(b) / U + var(e) / (S U)``; its parts are estimated by
the mean squares of an analysis of variance (Searle, Casella and McCulloch, Variance Components,
chapter 4), its degrees of freedom by Satterthwaite (An approximate distribution of estimates of
variance components, 1946).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats


def pseudo_values(totals: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The jackknife's values of the units, for a mean over targets of which units have several.

    Args:
        totals: [..., units] sums over the targets of a unit.
        size: [units] number of targets of each.

    Returns:
        [..., units] values whose mean and variance are taken as if units had one target each; they
        are the totals themselves where units have (Quenouille; Tukey).
    """
    if (size == 1).all() or len(size) == 1:
        return totals / size
    units, all_targets = len(size), size.sum()
    whole = totals.sum(-1, keepdims=True)
    return units * whole / all_targets - (units - 1) * (whole - totals) / (all_targets - size)


@dataclass(frozen=True)
class SeedNoise:
    """What seeds do to the mean of one run.

    Attributes:
        between: variance of the means of runs, that of a seed and of the units under it.
        within: the part of it that comes from the units: it is in the noise between units already.
        df: degrees of freedom of ``between``.
        level: the mean itself.
    """

    between: float
    within: float
    df: int
    level: float

    @classmethod
    def of(cls, values: np.ndarray) -> SeedNoise | None:
        """From [seeds, units] values; None of a single seed."""
        seeds, units = values.shape
        if seeds < 2:
            return None
        of_seed, of_unit = values.mean(1, keepdims=True), values.mean(0, keepdims=True)
        left = values - of_seed - of_unit + values.mean()
        within = (left**2).sum() / ((seeds - 1) * max(units - 1, 1)) / units
        return cls(float(of_seed.var(ddof=1)), float(within), seeds - 1, float(values.mean()))

    @classmethod
    def pooled(cls, noises: list[SeedNoise]) -> SeedNoise | None:
        """Of several rows together; None where no row has two seeds that differ.

        Rows whose runs are all the same (Pop) have no seeds to speak of, and are left out.
        """
        noises = [noise for noise in noises if noise.between > 0]
        df = sum(noise.df for noise in noises)
        if not df:
            return None
        between, within, level = (
            sum(getattr(noise, name) * noise.df for noise in noises) / df
            for name in ("between", "within", "level")
        )
        return cls(between, within, df, level)

    def at(self, level: float) -> float:
        """By how much the variances grow for a row of this level.

        Noise grows with what it is in; for a row below the others it is left as it is, to be safe.
        """
        return max(level / self.level, 1.0) ** 2 if self.level > 0 else 1.0


@dataclass(frozen=True)
class Estimate:
    """A difference of two means, its standard error and the degrees of freedom of that.

    Attributes:
        error: nan where one unit, or none that differs, tells nothing of it.
        seed_noise: where the noise between seeds was taken from: ``own`` (both sides have several
            seeds), ``pooled`` (over the study's rows, since a side has one) or ``unknown`` (no row
            has several: the error is that between units alone, and too small).
    """

    difference: float
    error: float
    df: float
    seed_noise: str

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The interval that covers the true difference in ``level`` of all studies."""
        half = self.error * float(stats.t.ppf((1 + level) / 2, self.df))
        return self.difference - half, self.difference + half

    @property
    def p(self) -> float:
        """Of a t-test that the difference is zero, two-sided; nan where there is no error."""
        return float(2 * stats.t.sf(abs(self.difference) / self.error, self.df))

    def detectable(self, power: float = 0.8, level: float = 0.95) -> float:
        """The smallest true difference of which the interval leaves out zero so often."""
        quantiles = stats.t.ppf([(1 + level) / 2, power], self.df)
        return self.error * float(quantiles.sum())


def estimate(
    row: np.ndarray,
    reference: np.ndarray,
    pooled: SeedNoise | None = None,
    coupled: bool = False,
) -> Estimate:
    """The difference of two rows.

    Args:
        row, reference: [seeds, units] values of the same units.
        pooled: noise between seeds over the study, for a side that has one seed.
        coupled: whether seed s of the one was made from seed s of the other, so that they share
            its noise: then the differences of each seed are looked at, not the two sides.
    """
    difference = float(row.mean() - reference.mean())
    # of one coupled seed the noise is not known; that of two sides without a bond is more
    bonded = coupled and row.shape == reference.shape and len(row) > 1
    sides = [row - reference] if bonded else [row, reference]
    units = row.shape[1]
    if units < 2:
        return Estimate(difference, float("nan"), float("nan"), "unknown")
    between_units = float((row.mean(0) - reference.mean(0)).var(ddof=1)) / units
    extra, weight = 0.0, between_units**2 / (units - 1)
    fewest = units - 1  # degrees of freedom of a sum are never below those of its parts
    shared = 0.0  # times that the noise of a run is taken from the pool
    for side in sides:
        noise = SeedNoise.of(side)
        if noise is None:
            shared += pooled.at(float(side.mean())) if pooled is not None else 1.0
            continue
        extra += (noise.between - noise.within) / len(side)
        weight += (noise.between / len(side)) ** 2 / noise.df
        fewest = min(fewest, noise.df)
    if shared and pooled is not None:
        extra += shared * (pooled.between - pooled.within)
        weight += (shared * pooled.between) ** 2 / pooled.df
        fewest = min(fewest, pooled.df)
    variance = between_units + max(extra, 0.0)
    source = "own" if not shared else "unknown" if pooled is None else "pooled"
    if not variance or not (row.any() or reference.any()):
        # nothing differs, as where nobody's cold item is found: that is no precision
        return Estimate(difference, float("nan"), float("nan"), source)
    df = max(variance**2 / weight, fewest)
    return Estimate(difference, float(np.sqrt(variance)), float(df), source)
