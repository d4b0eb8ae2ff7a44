"""Statistics of a study: means over seeds, differences, minimum detectable differences.

Runs with several seeds on the same units (users, sessions) are a two-way layout with crossed random
effects. The value of seed s and unit u is ``mean + a[s] + b[u] + e[s, u]``, and the grand mean over
S seeds and U units has the variance ``var(a) / S + var(b) / U + var(e) / (S U)``; its parts are
estimated by the mean squares of an analysis of variance (Searle, Casella and McCulloch, Variance
Components, chapter 4), its degrees of freedom by Satterthwaite (An approximate distribution of
estimates of variance components, 1946).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from recbole_pos.errors import UsageError
from recbole_pos.study.ranks import RankTable
from recbole_pos.values import nearest, shown

LEVEL = 0.95
POWER = 0.8
ALL = "all targets"  # the bin that has every target
_FEW = 13  # units whose 2^13 flips are all tried
_ROUNDS = 9_999
_CELLS = 20_000_000  # signs in memory at a time


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
    def pooled(cls, rows: Iterable[np.ndarray]) -> SeedNoise | None:
        """Return that of several rows together; None where no row has two seeds that differ.

        Rows whose runs are all the same (Pop) have no seeds to speak of, and are left out.
        """
        found = [cls.of(values) for values in rows]
        noises = [noise for noise in found if noise is not None and noise.between > 0]
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
        """Return the interval that covers the true difference in ``level`` of all studies."""
        half = self.error * float(stats.t.ppf((1 + level) / 2, self.df))
        return self.difference - half, self.difference + half

    @property
    def p(self) -> float:
        """Of a t-test that the difference is zero, two-sided; nan where there is no error."""
        return float(2 * stats.t.sf(abs(self.difference) / self.error, self.df))

    def detectable(self, power: float = 0.8, level: float = 0.95) -> float:
        """Return the smallest true difference of which the interval leaves out zero so often."""
        quantiles = stats.t.ppf([(1 + level) / 2, power], self.df)
        return self.error * float(quantiles.sum())


def estimate(
    row: np.ndarray,
    reference: np.ndarray,
    pooled: SeedNoise | None = None,
    coupled: bool = False,
) -> Estimate:
    """Return the difference of two rows.

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
        # nothing differs, as where no one's cold item is found: that is no precision
        return Estimate(difference, float("nan"), float("nan"), source)
    df = max(variance**2 / weight, fewest)
    return Estimate(difference, float(np.sqrt(variance)), float(df), source)


def sign_flips(differences: np.ndarray, rounds: int = _ROUNDS, seed: int = 0) -> np.ndarray:
    """Tests that differences of units are as often so much below zero as above it.

    Signs of whole units are flipped at random, as they might have come out if the names of the two
    rows meant nothing: exactly where few units differ at all, by ``rounds`` random flips otherwise
    (Fisher's randomisation test). It takes the trained models as they are: what another
    seed would have made of them it does not know.

    Args:
        differences: [units, comparisons], sums over the targets of a unit; all comparisons get the
            same flips.
        rounds: random flips.
        seed: of these.

    Returns:
        [comparisons] two-sided p-values.
    """
    differences = np.asarray(differences, dtype=float)
    found = np.ones(differences.shape[1])
    many = []
    for column, values in enumerate(differences.T):
        values = values[values != 0]
        if len(values) > _FEW:
            many.append(column)
        elif len(values):
            bits = np.arange(2 ** len(values))[:, None] >> np.arange(len(values))
            sums = np.abs((1 - 2 * (bits & 1)) @ values)
            found[column] = (sums >= _just_below(abs(values.sum()))).mean()
    if many:
        chosen = differences[:, many]
        chosen = chosen[(chosen != 0).any(1)]
        found[many] = _random_flips(chosen, rounds, np.random.default_rng(seed))
    return found


def _random_flips(values: np.ndarray, rounds: int, rng: np.random.Generator) -> np.ndarray:
    units = len(values)
    observed = _just_below(np.abs(values.sum(0)))
    reached = np.zeros(values.shape[1])
    step = max(_CELLS // units, 1)
    for start in range(0, rounds, step):
        count = min(step, rounds - start)
        bits = np.frombuffer(rng.bytes(-(-count * units // 8)), dtype=np.uint8)
        up = np.unpackbits(bits, count=count * units).reshape(count, units).astype(np.float32)
        # sum of +-v is twice the sum of those that stay up, less the sum of all
        sums = 2 * (up @ values.astype(np.float32)) - values.sum(0)
        reached += (np.abs(sums) >= observed).sum(0)
    return (reached + 1) / (rounds + 1)


def _just_below(value: np.ndarray) -> np.ndarray:
    """Return sums that are equal but for rounding count as reached."""
    return value * (1 - 1e-6) - 1e-12


def holm(p: np.ndarray) -> np.ndarray:
    """p-values corrected for being many (Holm, A simple sequentially rejective procedure, 1979).

    Args:
        p: [tests]; nan where there was none, and those do not count.

    Returns:
        [tests] the smallest level, over all tests together, at which each is still significant.
    """
    p = np.asarray(p, dtype=float)
    found = np.full(p.shape, np.nan)
    made = np.flatnonzero(~np.isnan(p))
    order = made[np.argsort(p[made], kind="stable")]
    corrected = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    found[order] = np.minimum(corrected, 1.0)
    return found


def means(
    table: RankTable, metrics: Sequence[str], bins: Mapping[str, np.ndarray | None] | None = None
) -> pd.DataFrame:
    """Return every row's metrics.

    Args:
        table: ranks of the study's runs.
        metrics: such as ``ndcg@10``.
        bins: name -> [targets] which of them it has; all of them in one when None.

    Returns:
        A line for each row, metric and bin: row, metric, bin, mean (over seeds and targets),
        deviation (between seeds; nan of one), seeds, targets, units.
    """
    lines = []
    for name, where in (bins or {ALL: None}).items():
        for metric in metrics:
            totals, size = table.totals(metric, where)
            for row, values in totals.items():
                of_seed = values.sum(1) / size.sum() if len(size) else np.full(len(values), np.nan)
                lines.append(
                    {
                        "row": row,
                        "metric": metric,
                        "bin": name,
                        "mean": of_seed.mean(),
                        "deviation": of_seed.std(ddof=1) if len(of_seed) > 1 else np.nan,
                        "seeds": len(of_seed),
                        "targets": int(size.sum()),
                        "units": len(size),
                    }
                )
    return pd.DataFrame(lines)


def differences(
    table: RankTable,
    metrics: Sequence[str],
    reference: str,
    rows: Sequence[str] | None = None,
    bins: Mapping[str, np.ndarray | None] | None = None,
    coupled: Callable[[str, str], bool] | None = None,
) -> pd.DataFrame:
    """Return every row less the reference, paired by target.

    The interval knows the noise between units and between seeds (:mod:`.components`). Where a row
    has one seed, the noise between seeds is that of the study's rows with several; where no row has
    several it is unknown, and the interval, of these very models only, too narrow. A star needs two
    seeds on both sides and a p-value below 0.05 after Holm's correction over all lines, and that
    p-value is the larger of two: of the t-test that belongs to the interval, and of sign flips over
    the units, which assume no distribution.

    Args:
        table: ranks of the study's runs.
        metrics: such as ``ndcg@10``.
        reference: row that the others are compared to.
        rows: what is compared to it; all others when None.
        bins: name -> [targets] which of them it has; all of them in one when None.
        coupled: whether two rows share the noise of a seed, since one was made from runs of the
            other or both from runs of a third; never when None.

    Returns:
        A line for each row, metric and bin: row, reference, metric, bin, difference, low, high
        (the 95% interval), error (standard), df (degrees of freedom), p_t, p_flips, p (the larger),
        p_holm, star, detectable (the smallest true difference that is seen in 80% of such studies),
        seed_noise (own, pooled, unknown), seeds, reference_seeds, targets, units.

    Raises:
        UsageError: for an unknown row.
    """
    for name in [reference, *(rows or ())]:
        if name not in table.rows:
            raise UsageError(f"no runs of configuration {shown(name)}{nearest(name, table.rows)}")
    others = [row for row in (rows or table.rows) if row != reference]
    lines: list[dict[str, Any]] = []
    for name, where in (bins or {ALL: None}).items():
        for metric in metrics:
            totals, size = table.totals(metric, where)
            lines += _compare(table, totals, size, reference, others, coupled, metric, name)
    found = pd.DataFrame(lines, columns=_COLUMNS)
    found["p_holm"] = holm(found["p"].to_numpy(dtype=float))
    several = (found["seeds"] > 1) & (found["reference_seeds"] > 1)
    found["star"] = several & (found["p_holm"] < 1 - LEVEL)
    return found


_COLUMNS = [
    *("row", "reference", "metric", "bin", "difference", "low", "high", "error", "df"),
    *("p_t", "p_flips", "p", "p_holm", "star", "detectable", "seed_noise"),
    *("seeds", "reference_seeds", "targets", "units"),
]


def _compare(
    table: RankTable,
    totals: dict[str, np.ndarray],
    size: np.ndarray,
    reference: str,
    others: list[str],
    coupled: Callable[[str, str], bool] | None,
    metric: str,
    bin_name: str,
) -> list[dict[str, Any]]:
    """Return lines of one metric in one bin."""
    if not len(size):  # no target is in the bin
        return [
            {"row": row, "reference": reference, "metric": metric, "bin": bin_name, "targets": 0}
            | {"seeds": len(totals[row]), "reference_seeds": len(totals[reference]), "units": 0}
            for row in others
        ]
    values = {row: pseudo_values(total, size) for row, total in totals.items()}
    # a row that was made from another's models tells nothing more of the noise between seeds
    alone: list[str] = []
    for row in values:
        if coupled is None or not any(coupled(row, other) for other in alone):
            alone.append(row)
    pooled = SeedNoise.pooled(values[row] for row in alone)
    lines: list[dict[str, Any]] = []
    flipped = []
    for row in others:
        together = coupled is not None and coupled(row, reference)
        mine, baseline = _select_seeds(table, row, reference, together)
        found = estimate(values[row][mine], values[reference][baseline], pooled, together)
        flipped.append(totals[row][mine].mean(0) - totals[reference][baseline].mean(0))
        low, high = found.interval(LEVEL)
        difference = float(flipped[-1].sum() / size.sum())
        shift = difference - found.difference  # of jackknife and mean, nothing for equal units
        lines.append(
            {
                **{"row": row, "reference": reference, "metric": metric, "bin": bin_name},
                **{"difference": difference, "low": low + shift, "high": high + shift},
                **{"error": found.error, "df": found.df, "p_t": found.p},
                **{"detectable": found.detectable(POWER, LEVEL), "seed_noise": found.seed_noise},
                **{"seeds": len(mine), "reference_seeds": len(baseline)},
                **{"targets": int(size.sum()), "units": len(size)},
            }
        )
    for line, p in zip(lines, sign_flips(np.stack(flipped, axis=1)), strict=True):
        line |= {"p_flips": p, "p": float(np.fmax(p, line["p_t"]))}
    return lines


def _select_seeds(
    table: RankTable, row: str, reference: str, together: bool
) -> tuple[list[int], list[int]]:
    """Which runs of two rows are compared: all, but of coupled ones those of seeds both have."""
    seeds, baseline = table.seeds(row), table.seeds(reference)
    common = [seed for seed in seeds if seed in baseline]
    if not together or not common:
        return list(range(len(seeds))), list(range(len(baseline)))
    return [seeds.index(seed) for seed in common], [baseline.index(seed) for seed in common]
