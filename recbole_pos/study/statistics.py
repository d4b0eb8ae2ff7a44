"""What the runs of a study say: means over seeds, differences to a reference, what can be seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.study.components import SeedNoise, estimate, pseudo_values
from recbole_pos.study.ranks import RankTable
from recbole_pos.study.significance import holm, sign_flips
from recbole_pos.values import nearest, shown

LEVEL = 0.95
POWER = 0.8
ALL = "all targets"  # the bin that has every target


def means(
    table: RankTable, metrics: Sequence[str], bins: Mapping[str, np.ndarray | None] | None = None
) -> pd.DataFrame:
    """Every row's metrics.

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
    family: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Every row less the reference, paired by target.

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
        family: lines of earlier calls that Holm's correction counts as well.

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
            raise UsageError(f"no runs of row {shown(name)}{nearest(name, table.rows)}")
    others = [row for row in (rows or table.rows) if row != reference]
    lines: list[dict[str, Any]] = []
    for name, where in (bins or {ALL: None}).items():
        for metric in metrics:
            totals, size = table.totals(metric, where)
            lines += _compare(table, totals, size, reference, others, coupled, metric, name)
    found = pd.DataFrame(lines, columns=_COLUMNS)
    before = [] if family is None else family["p"].tolist()
    found["p_holm"] = holm(np.array([*before, *found["p"]], dtype=float))[len(before) :]
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
    """Lines of one metric in one bin."""
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
    noises = [SeedNoise.of(values[row]) for row in alone]
    pooled = SeedNoise.pooled([noise for noise in noises if noise is not None])
    lines: list[dict[str, Any]] = []
    flipped = []
    for row in others:
        together = coupled is not None and coupled(row, reference)
        mine, theirs = _seeds_of(table, row, reference, together)
        found = estimate(values[row][mine], values[reference][theirs], pooled, together)
        flipped.append(totals[row][mine].mean(0) - totals[reference][theirs].mean(0))
        low, high = found.interval(LEVEL)
        difference = float(flipped[-1].sum() / size.sum())
        shift = difference - found.difference  # of jackknife and mean, nothing for equal units
        lines.append(
            {
                **{"row": row, "reference": reference, "metric": metric, "bin": bin_name},
                **{"difference": difference, "low": low + shift, "high": high + shift},
                **{"error": found.error, "df": found.df, "p_t": found.p},
                **{"detectable": found.detectable(POWER, LEVEL), "seed_noise": found.seed_noise},
                **{"seeds": len(mine), "reference_seeds": len(theirs)},
                **{"targets": int(size.sum()), "units": len(size)},
            }
        )
    for line, p in zip(lines, sign_flips(np.stack(flipped, axis=1)), strict=True):
        line |= {"p_flips": p, "p": float(np.fmax(p, line["p_t"]))}
    return lines


def _seeds_of(
    table: RankTable, row: str, reference: str, together: bool
) -> tuple[list[int], list[int]]:
    """Which runs of two rows are compared: all, but of coupled ones those of seeds both have."""
    seeds, theirs = table.seeds(row), table.seeds(reference)
    common = [seed for seed in seeds if seed in theirs]
    if not together or not common:
        return list(range(len(seeds))), list(range(len(theirs)))
    return [seeds.index(seed) for seed in common], [theirs.index(seed) for seed in common]
