"""Ranks of test targets in the runs of a study, metrics of these ranks, and bins of targets."""

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
# Columns of targets beside the user, which not all runs have.
_OPTIONAL_COLUMNS = ("item", "history", "age", "popularity")
KINDS = ("history", "age", "popularity")  # kinds of bins that have edges
EVERY = slice(None)  # mask of all targets
COLD = "cold"  # kind of the two bins of cold and of other items


def is_from_ranks(metric: str) -> bool:
    """Return whether a metric's name (``ndcg@10``) is one that :func:`compute_gains` knows."""
    match = _METRIC.fullmatch(metric.lower())
    return match is not None and match[1] in _GAINS


def compute_gains(rank: np.ndarray, metric: str) -> np.ndarray:
    """Return the gain of each target [..., targets], whose mean is the metric.

    Args:
        rank: [..., targets] ranks among all items, 0 for the first; a half rank is allowed for
            ties, infinity for a target that cannot be ranked.
        metric: name and cutoff, such as ``ndcg@10``, for which :func:`is_from_ranks` is true.
    """
    name, _, cutoff = metric.lower().partition("@")
    rank, k = np.asarray(rank, dtype=float), int(cutoff)
    with np.errstate(invalid="ignore"):
        return np.where(rank < k, _GAINS[name](rank, k), 0.0)


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
        """Align the ranks of runs by target; a UsageError names runs of different targets.

        Args:
            frames: row and seed -> a line for each test target, in any order, with the columns
                user and rank, and perhaps item, history, age and popularity.
        """
        runs = pd.DataFrame(list(frames), columns=["row", "seed"])
        targets = pd.DataFrame()
        ranks: list[np.ndarray] = []
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

    def list_seeds(self, row: str) -> list[int]:
        """Return the seeds of a row's runs, ascending."""
        return sorted(self.runs.loc[self.runs["row"] == row, "seed"])

    def sum_gains(
        self, metric: str, mask: np.ndarray | slice = EVERY
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Sum the gains of each user's targets in every run.

        Args:
            metric: as in :func:`compute_gains`.
            mask: [targets] whether a target counts.

        Returns:
            Row -> sums [seeds, users], seeds ascending; and the number of targets of each user
            [users]. Users without a target that counts are left out.
        """
        _, user_index = np.unique(self.targets["user"].to_numpy()[mask], return_inverse=True)
        num_targets = np.bincount(user_index)
        gains = compute_gains(self.rank[:, mask], metric)
        sums = [np.bincount(user_index, run_gains, len(num_targets)) for run_gains in gains]
        totals = np.stack(sums)
        runs = self.runs.sort_values("seed", kind="stable")
        rows = self.runs["row"].unique()
        by_row = {row: totals[runs.index[runs["row"] == row]] for row in rows}
        return by_row, num_targets


def _sort_targets(frame: pd.DataFrame, row: str, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the targets of a run in an order that all runs share, and their ranks [targets]."""
    columns = ["user", *(column for column in _OPTIONAL_COLUMNS if column in frame.columns)]
    targets, rank = frame[columns], frame["rank"].to_numpy(dtype=float)
    if not (rank >= 0).all():  # NaN is not >= 0 either
        raise UsageError(f"ranks of {row}, seed {seed}: expected a number from 0 for each target")
    # lexsort sorts by its last key first
    order = np.lexsort([targets[column].to_numpy() for column in reversed(columns)])
    return targets.iloc[order].reset_index(drop=True), rank[order]


def assign_bins(targets: pd.DataFrame, bins: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Assign targets to the bins of a study.

    Args:
        targets: targets of a :class:`RankTable`.
        bins: history, age or popularity -> ascending edges; a bin has the values above one edge and
            up to the next. Or cold -> True; cold items have a popularity of 0.

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
        lowest = math.floor(edges[i - 1]) + 1  # whole number in the bin
        if lowest >= edges[i]:
            names.append(f"{kind} {texts[i]}")
        else:
            lowest_text = texts[i - 1] if kind == "age" else f"{lowest:,g}"
            names.append(f"{kind} {lowest_text} to {texts[i]}")
    return [*names, f"{kind} over {texts[-1]}"]
