"""Ranks of the test targets of all runs of a study, their metrics, and their bins."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.study.rendered_table import format_duration
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
# Columns that identify targets, where runs have them, beside the user.
_FACTS = ("item", "history", "age", "popularity")
KINDS = ("history", "age", "popularity")  # of bins by edges
COLD = "cold"  # the bins of cold and of other items


def is_from_ranks(metric: str) -> bool:
    """Return whether a metric's name (``ndcg@10``) is one that :func:`compute_gains` knows."""
    match = _METRIC.fullmatch(metric.lower())
    return match is not None and match[1] in _GAINS


def compute_gains(rank: np.ndarray, metric: str) -> np.ndarray:
    """Return the gain of each target, whose mean is the metric.

    Args:
        rank: [..., targets] ranks among all items, 0 for the first; a half rank is allowed for
            ties, infinity for a target that cannot be ranked.
        metric: name and cutoff: ``ndcg@10``.

    Raises:
        UsageError: for a metric that does not follow from ranks.
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
    """Raise a UsageError for a metric of a test that does not agree with its ranks.

    Args:
        metrics: metrics, rounded to ``decimals``; those not of ranks are not checked.
        rank: [targets] ranks.
        decimals: number of decimals.
        name: name of the file, for messages.
    """
    for metric, value in metrics.items():
        if len(rank) and is_from_ranks(metric):
            score = float(compute_gains(rank, metric).mean())
            rounding_error = 0.5001 * 10.0**-decimals + 1e-9
            if abs(score - value) > rounding_error:
                raise UsageError(
                    f"{name}: {metric} of these ranks is {score:.6f}, expected the {value:g} that "
                    "the run says about its test"
                )


@dataclass(frozen=True, eq=False)
class RankTable:
    """Ranks of the same targets in several runs.

    Attributes:
        runs: a line for each run: row (str) and seed (int).
        targets: a line for each target: user (or session; users are independent), and where
            known item, history (its length), age (of its newest interaction, in seconds) and
            popularity (training interactions of the item; 0 for a cold item).
        rank: [runs, targets] rank of a target among all items in a run, 0 for the first.
    """

    runs: pd.DataFrame
    targets: pd.DataFrame
    rank: np.ndarray

    @classmethod
    def from_runs(cls, frames: Mapping[tuple[str, int], pd.DataFrame]) -> RankTable:
        """Align the ranks of runs by target.

        Args:
            frames: (row, seed) -> a line for each test target, with the columns rank and user,
                and perhaps item, history, age, popularity. The order of lines does not matter.

        Raises:
            UsageError: naming runs of other targets, or one without ranks.
        """
        runs = pd.DataFrame(list(frames), columns=["row", "seed"])
        targets, ranks = pd.DataFrame(), list[np.ndarray]()
        for (row, seed), frame in frames.items():
            run_targets, rank = _sort_targets(frame, row, seed)
            if not ranks:
                targets = run_targets
            elif not targets.equals(run_targets):
                raise UsageError(
                    f"{row}, seed {seed} and {runs['row'][0]}, seed {runs['seed'][0]} cannot be "
                    f"compared: their {len(run_targets):,} and {len(targets):,} test targets are "
                    "not the same; were the data and the split?"
                )
            ranks.append(rank)
        return cls(runs, targets, np.stack(ranks))

    @property
    def rows(self) -> list[str]:
        """Names of the rows, in the order of their runs."""
        return list(dict.fromkeys(self.runs["row"]))

    def list_seeds(self, row: str) -> list[int]:
        """Return the seeds of a row's runs, ascending."""
        return sorted(self.runs.loc[self.runs["row"] == row, "seed"])

    def sum_gains(
        self, metric: str, mask: np.ndarray | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the gains of each user's targets, summed.

        Args:
            metric: as in :func:`compute_gains`.
            mask: [targets] whether a target counts; all if None.

        Returns:
            Row -> [seeds, users] sums over targets, seeds ascending; and [users] the number of
            targets of each user. Users without targets are left out.
        """
        mask = np.full(len(self.targets), True) if mask is None else mask
        _, user_index = np.unique(self.targets["user"].to_numpy()[mask], return_inverse=True)
        num_targets = np.bincount(user_index)
        gains = compute_gains(self.rank[:, mask], metric)
        totals = np.stack([np.bincount(user_index, run, len(num_targets)) for run in gains])
        runs = self.runs.sort_values("seed", kind="stable")
        by_row = {row: totals[runs.index[runs["row"] == row]] for row in self.rows}
        return by_row, num_targets


def _sort_targets(frame: pd.DataFrame, row: str, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the targets of a run in an order that all runs share, and their ranks."""
    name = f"ranks of {row}, seed {seed}"
    if not {"user", "rank"} <= set(frame.columns):
        raise UsageError(f"{name}: expected columns user and rank, found {', '.join(frame)}")
    targets = frame[["user", *(column for column in _FACTS if column in frame.columns)]]
    rank = frame["rank"].to_numpy(dtype=float)
    if not (len(rank) and (rank >= 0).all()):  # false for NaN, too
        raise UsageError(f"{name}: expected numbers from 0, a rank for each target")
    order = np.lexsort([targets[column].to_numpy() for column in reversed(targets.columns)])
    return targets.iloc[order].reset_index(drop=True), rank[order]


def assign_bins(targets: pd.DataFrame, bins: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Assign targets to the bins of a study.

    Args:
        targets: targets of a :class:`RankTable`.
        bins: history, age or popularity -> ascending edges, a value is in a bin if it is above one
            edge and not above the next; or cold (whether the popularity is 0) -> True.

    Returns:
        Kind -> name of the bin -> [targets] whether a target is in it.

    Raises:
        UsageError: if the runs have not recorded the column of the bins.
    """
    masks: dict[str, dict[str, np.ndarray]] = {}
    for kind, edges in bins.items():
        column = "popularity" if kind == COLD else kind
        if column not in targets.columns:
            raise UsageError(
                f"bins: the runs have no column {column}, so there are no bins by {kind}; found "
                f"{', '.join(targets.columns)}"
            )
        values = targets[column].to_numpy()
        if kind == COLD:
            masks[kind] = {"cold items": values == 0, "other items": values != 0}
        else:
            bin_index = np.searchsorted(edges, values)
            masks[kind] = {name: bin_index == i for i, name in enumerate(name_bins(kind, edges))}
    return masks


def name_bins(kind: str, edges: Sequence[float]) -> list[str]:
    """Return names of the bins between ascending edges: ``history up to 5``, ``history 6 to 15``"""
    texts = [format_duration(edge) if kind == "age" else f"{edge:,g}" for edge in edges]
    names = [f"{kind} up to {texts[0]}"]
    for i in range(1, len(edges)):
        first = math.floor(edges[i - 1]) + 1
        if first >= edges[i]:  # one whole number
            names.append(f"{kind} {texts[i]}")
        else:
            low = texts[i - 1] if kind == "age" else f"{first:,g}"
            names.append(f"{kind} {low} to {texts[i]}")
    return [*names, f"{kind} over {texts[-1]}"]
