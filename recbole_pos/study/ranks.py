"""Ranks of the test targets of all runs of a study, and the metrics that follow from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.values import shown, suggest

# Of a rank below the cutoff; a target is the only relevant item of its list.
_GAINS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "hit": lambda rank, k: np.ones_like(rank),
    "recall": lambda rank, k: np.ones_like(rank),
    "precision": lambda rank, k: np.ones_like(rank) / k,
    "ndcg": lambda rank, k: 1 / np.log2(rank + 2),
    "mrr": lambda rank, k: 1 / (rank + 1),
    "map": lambda rank, k: 1 / (rank + 1),
}
_METRIC = re.compile(r"([a-z]+)@([1-9]\d*)")
# What tells targets apart, where runs have it, beside the unit.
_FACTS = ("item", "history", "age", "popularity")


def is_from_ranks(metric: str) -> bool:
    """Return whether a metric's name (``ndcg@10``) is one that :func:`gains` knows."""
    found = _METRIC.fullmatch(metric.lower())
    return found is not None and found[1] in _GAINS


def gains(rank: np.ndarray, metric: str) -> np.ndarray:
    """Return what each target adds to a metric.

    Args:
        rank: rank of the target among all items, 0 for the first; a half rank is allowed for
            ties, infinity for a target that cannot be ranked.
        metric: one of ``_GAINS`` and a cutoff: ``ndcg@10``.

    Returns:
        Values of the shape of ``rank``, whose mean over targets is the metric.

    Raises:
        UsageError: for another metric.
    """
    found = _METRIC.fullmatch(metric.lower())
    if not found or found[1] not in _GAINS:
        hint = suggest(metric.partition("@")[0], _GAINS)
        raise UsageError(
            f"metric {shown(metric)} does not follow from ranks; known are "
            f"{', '.join(f'{name}@K' for name in _GAINS)}{hint}"
        )
    rank, cutoff = np.asarray(rank, dtype=float), int(found[2])
    with np.errstate(invalid="ignore"):
        return np.where(rank < cutoff, _GAINS[found[1]](rank, cutoff), 0.0)


def require_metrics(
    metrics: Mapping[str, float], rank: np.ndarray, decimals: int, name: str
) -> None:
    """Require that metrics are those of their ranks, as far as they follow from ranks.

    Args:
        metrics: metrics of a test.
        rank: rank of its targets.
        decimals: that metrics are rounded to.
        name: name of the file, for messages.

    Raises:
        UsageError: naming the metric if one differs by more than rounding.
    """
    for metric, value in metrics.items():
        if len(rank) and is_from_ranks(metric):
            found = float(gains(rank, metric).mean())
            if abs(found - value) > 0.5001 * 10.0**-decimals + 1e-9:
                raise UsageError(
                    f"{name}: {metric} of these ranks is {found:.6f}, expected the {value:g} that "
                    "the run says about its test"
                )


@dataclass(frozen=True, eq=False)
class RankTable:
    """Ranks of the same targets in several runs.

    Attributes:
        runs: a line a run: row (str) and seed (int).
        targets: a line a target: unit (what is independent of the others: a user, a session), and
            where known item, history (length), age (of the newest event of the history, in seconds)
            and popularity (training events of the item; 0 is a cold one).
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
        """Put the ranks of runs beside each other.

        Args:
            frames: (row, seed) -> a line a test target, with the columns rank and ``unit``, and
                perhaps item, history, age, popularity. Order of lines does not matter.
            unit: the column of what is independent of the others.

        Raises:
            UsageError: if a column is missing, a rank is wrong, or two runs were not tested on the
                same targets; names the run.
        """
        first: pd.DataFrame | None = None
        ranks, name = [], ""
        for (row, seed), frame in frames.items():
            here = f"{row}, seed {seed}"
            targets, rank = _sorted(frame, unit, here)
            if first is None:
                first, name = targets, here
            elif not first.equals(targets):
                raise UsageError(f"{here} and {name} cannot be compared: {_unlike(targets, first)}")
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
        """Seeds of a row's runs, ascending."""
        return sorted(self.runs.loc[self.runs["row"] == row, "seed"])

    def totals(
        self, metric: str, where: np.ndarray | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return what the targets of each unit add up to.

        Args:
            metric: as in :func:`gains`.
            where: [targets] which of them count; all when None.

        Returns:
            Row -> [seeds, units] sums over targets, seeds ascending; and [units] the number of
            targets of each unit. Units without any are left out.
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
    """Return targets of a run in an order that all runs share, and their ranks."""
    if missing := [name for name in ("rank", unit) if name not in frame.columns]:
        raise UsageError(
            f"ranks of {run}: no column {', '.join(missing)}; found {', '.join(frame.columns)}"
        )
    facts = [name for name in _FACTS if name in frame.columns and name != unit]
    targets = frame[[unit, *facts]].rename(columns={unit: "unit"})
    rank = frame["rank"].to_numpy(dtype=float)
    if not len(rank):
        raise UsageError(f"ranks of {run}: there is no test target")
    if wrong := int((~(rank >= 0)).sum()):  # not a number is not above 0, too
        raise UsageError(f"ranks of {run}: {wrong:,} of {len(rank):,} are negative or no numbers")
    order = np.lexsort([targets[name].to_numpy() for name in reversed(targets.columns)])
    return targets.iloc[order].reset_index(drop=True), rank[order]


def _unlike(targets: pd.DataFrame, others: pd.DataFrame) -> str:
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
