"""Ranks of the test targets of all runs of a study, and the metrics that follow from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.values import shown, suggest

# Gain of a rank below the cutoff; a target is the only relevant item of its list.
_GAINS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "hit": lambda rank, k: np.ones_like(rank),
    "recall": lambda rank, k: np.ones_like(rank),
    "precision": lambda rank, k: np.ones_like(rank) / k,
    "ndcg": lambda rank, k: 1 / np.log2(rank + 2),
    "mrr": lambda rank, k: 1 / (rank + 1),
    "map": lambda rank, k: 1 / (rank + 1),
}
_METRIC = re.compile(r"([a-z]+)@([1-9]\d*)")
# Columns that identify targets, where runs have them, beside the unit.
_FACTS = ("item", "history", "age", "popularity")


def is_from_ranks(metric: str) -> bool:
    """Return whether a metric's name (``ndcg@10``) is one that :func:`gains` knows."""
    match = _METRIC.fullmatch(metric.lower())
    return match is not None and match[1] in _GAINS


def gains(rank: np.ndarray, metric: str) -> np.ndarray:
    """Return the gain of each target, whose mean is the metric.

    Args:
        rank: rank of the target among all items, 0 for the first; a half rank is allowed for
            ties, infinity for a target that cannot be ranked.
        metric: one of ``_GAINS`` and a cutoff: ``ndcg@10``.

    Returns:
        Values of the shape of ``rank``, whose mean over targets is the metric.

    Raises:
        UsageError: for another metric.
    """
    match = _METRIC.fullmatch(metric.lower())
    if not match or match[1] not in _GAINS:
        hint = suggest(metric.partition("@")[0], _GAINS)
        raise UsageError(
            f"metric {shown(metric)} does not follow from ranks; known are "
            f"{', '.join(f'{name}@K' for name in _GAINS)}{hint}"
        )
    rank, cutoff = np.asarray(rank, dtype=float), int(match[2])
    with np.errstate(invalid="ignore"):
        return np.where(rank < cutoff, _GAINS[match[1]](rank, cutoff), 0.0)


def require_metrics(
    metrics: Mapping[str, float], rank: np.ndarray, decimals: int, name: str
) -> None:
    """Require that the metrics of a test agree with the ranks of its targets.

    Args:
        metrics: metrics of a test; those that do not follow from ranks are not checked.
        rank: [targets] ranks.
        decimals: number of decimals that metrics are rounded to.
        name: name of the file, for messages.

    Raises:
        UsageError: naming the metric if one differs by more than rounding.
    """
    for metric, value in metrics.items():
        if len(rank) and is_from_ranks(metric):
            score = float(gains(rank, metric).mean())
            half_unit = 0.5001 * 10.0**-decimals + 1e-9  # of the last decimal, and float noise
            if abs(score - value) > half_unit:
                raise UsageError(
                    f"{name}: {metric} of these ranks is {score:.6f}, expected the {value:g} that "
                    "the run says about its test"
                )


@dataclass(frozen=True, eq=False)
class RankTable:
    """Ranks of the same targets in several runs.

    Attributes:
        runs: a line for each run: row (str) and seed (int).
        targets: a line for each target: unit (user or session; units are independent), and where
            known item, history (length), age (of the newest event of the history, in seconds) and
            popularity (training events of the item; 0 for a cold item).
        rank: [runs, targets] rank of a target among all items in a run, 0 for the first.
        unit: [targets] number of the unit of a target, 0 to units - 1.
    """

    runs: pd.DataFrame
    targets: pd.DataFrame
    rank: np.ndarray
    unit: np.ndarray

    @classmethod
    def from_runs(
        cls, frames: Mapping[tuple[str, int], pd.DataFrame], unit: str = "user"
    ) -> RankTable:
        """Align the ranks of runs by target.

        Args:
            frames: (row, seed) -> a line for each test target, with the columns rank and ``unit``,
                and perhaps item, history, age, popularity. The order of lines does not matter.
            unit: column of the independent units, such as users.

        Raises:
            UsageError: if a column is missing, a rank is wrong, or two runs were not tested on the
                same targets; names the run.
        """
        first: pd.DataFrame | None = None
        ranks, name = [], ""
        for (row, seed), frame in frames.items():
            run = f"{row}, seed {seed}"
            targets, rank = _sorted(frame, unit, run)
            if first is None:
                first, name = targets, run
            elif not first.equals(targets):
                raise UsageError(f"{run} and {name} cannot be compared: {_unlike(targets, first)}")
            ranks.append(rank)
        if first is None:
            raise UsageError("found no run to compare")
        _, number = np.unique(first["unit"].to_numpy(), return_inverse=True)
        runs = pd.DataFrame(list(frames), columns=["row", "seed"])
        return cls(runs, first, np.stack(ranks), number)

    @property
    def rows(self) -> list[str]:
        """Names of the rows, in the order of their runs."""
        return list(dict.fromkeys(self.runs["row"]))

    def seeds(self, row: str) -> list[int]:
        """Return the seeds of a row's runs, ascending."""
        return sorted(self.runs.loc[self.runs["row"] == row, "seed"])

    def totals(
        self, metric: str, where: np.ndarray | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the gains of each unit's targets, summed.

        Args:
            metric: as in :func:`gains`.
            where: [targets] whether a target counts; all if None.

        Returns:
            Row -> [seeds, units] sums over targets, seeds ascending; and [units] the number of
            targets of each unit. Units without targets are left out.
        """
        keep = np.ones(len(self.unit), dtype=bool) if where is None else where
        _, unit = np.unique(self.unit[keep], return_inverse=True)
        size = np.bincount(unit)
        values = gains(self.rank[:, keep], metric)
        total = np.stack([np.bincount(unit, line, len(size)) for line in values])
        order = self.runs.sort_values("seed", kind="stable").groupby("row", sort=False).indices
        place = self.runs["seed"].argsort(kind="stable").to_numpy()
        return {row: total[place[order[row]]] for row in self.rows}, size


def _sorted(frame: pd.DataFrame, unit: str, run: str) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the targets of a run in an order that all runs share, and their ranks.

    Raises:
        UsageError: for a missing column, no target, or a wrong rank; names the run.
    """
    if missing := [name for name in ("rank", unit) if name not in frame.columns]:
        raise UsageError(
            f"ranks of {run}: no column {', '.join(missing)}; found {', '.join(frame.columns)}"
        )
    facts = [name for name in _FACTS if name in frame.columns and name != unit]
    targets = frame[[unit, *facts]].rename(columns={unit: "unit"})
    rank = frame["rank"].to_numpy(dtype=float)
    if not len(rank):
        raise UsageError(f"ranks of {run}: there is no test target")
    if wrong := int((~(rank >= 0)).sum()):  # true for NaN, too
        raise UsageError(f"ranks of {run}: {wrong:,} of {len(rank):,} are negative or no numbers")
    order = np.lexsort([targets[name].to_numpy() for name in reversed(targets.columns)])
    return targets.iloc[order].reset_index(drop=True), rank[order]


def _unlike(targets: pd.DataFrame, others: pd.DataFrame) -> str:
    """Return how the targets of two runs differ, in words."""
    if list(targets.columns) != list(others.columns):
        columns = [", ".join(frame.columns) for frame in (targets, others)]
        return f"one has the columns {columns[0]}, the other {columns[1]}"
    if len(targets) != len(others):
        return f"they were tested on {len(targets):,} and {len(others):,} targets"
    different = [name for name in targets if not targets[name].equals(others[name])]
    count = int((targets != others).any(axis=1).sum())
    return (
        f"{count:,} of {len(targets):,} test targets differ, in {', '.join(different)}; were the "
        "data and the split the same?"
    )
