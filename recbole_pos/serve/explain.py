"""Why an item is recommended: its score and rank without each of the past interactions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from recbole.utils import ModelType

from recbole_pos.errors import UsageError
from recbole_pos.layers.catalogue import Choice, scores_and_ranks
from recbole_pos.serve.histories import Histories
from recbole_pos.serve.scorer import Scorer
from recbole_pos.values import is_whole, shown

BATCH = 256  # histories that are scored at once
MOST = 100  # reasons that may be asked for, for an item
COLUMNS = ("because", "score_change", "rank_change")  # of each reason, numbered
NOISE = 1e-6  # relative to a score: a smaller change is rounding


@dataclass(frozen=True)
class Effects:
    """Effects of leaving out each interaction of g histories on at most k items of each.

    Interactions are counted back, the newest first. Missing items have the id 0 and NaN for their
    numbers. Changes are NaN, too, for a history of one interaction, which leaves no history.

    Attributes:
        items: [g, k] ids.
        past: [g, r] ids of the items of past interactions.
        score, rank: [g, k] score and rank of an item after the whole history; ranks from 1.
        score_change, rank_change: [g, k, r] change of score and rank without an interaction. The
            score falls without an interaction that carried the item, and the rank rises.
    """

    items: np.ndarray
    past: np.ndarray
    score: np.ndarray
    rank: np.ndarray
    score_change: np.ndarray
    rank_change: np.ndarray

    def strongest(self, most: int) -> tuple[np.ndarray, ...]:
        """Return the interactions that carried each item, the strongest first.

        Returns:
            Four arrays [p, most], a row for each item, history by history: ids of past items, 0
            where fewer carried the item; how many steps back they are; changes of score; changes
            of rank.
        """
        least = -NOISE * np.maximum(1, np.abs(self.score))[..., None]
        change = np.where(np.isnan(self.score_change), -np.inf, self.score_change)
        carries = (change < least) & (self.past > 0)[:, None]
        order = np.where(carries, change, np.inf).argsort(-1, kind="stable")[..., :most]
        steps = np.arange(1, carries.shape[-1] + 1)
        padding, rows = ((0, 0), (0, max(0, most - len(steps)))), self.items > 0
        columns = (self.past[:, None], 0), (steps, 0), (self.score_change, np.nan)
        return tuple(
            np.pad(
                np.take_along_axis(np.where(carries, x, none), order, -1)[rows],
                padding,
                constant_values=none,
            )
            for x, none in (*columns, (self.rank_change, np.nan))
        )

    def table(self, names: np.ndarray) -> pd.DataFrame:
        """Return every interaction of the only history, as ``Recommender.explain`` has it.

        Args:
            names: [items] names of the catalogue.
        """
        order = self.score_change[0].argsort(-1, kind="stable")  # NaN last
        which, back = np.repeat(np.arange(len(order)), order.shape[1]), order.ravel()
        return pd.DataFrame(
            {
                "item": names[self.items[0, which] - 1],
                "rank": self.rank[0, which].astype(np.int64),
                "score": self.score[0, which],
                "past": names[self.past[0, back] - 1],
                "steps_back": back + 1,
                "score_change": self.score_change[0, which, back],
                "rank_change": pd.array(self.rank_change[0, which, back], "Int64"),
            }
        )


def require_reasons(scorer: Scorer, because: int, asked: Histories) -> None:
    """Check that past interactions can be left out, if reasons are requested.

    Args:
        scorer: scorer of the model.
        because: number of reasons of each item; 0 for none.
        asked: the histories.

    Raises:
        UsageError: if the number is out of range, or the model reads no history to leave out from.
    """
    name = scorer.config["model"]
    if not (is_whole(because) and 0 <= because <= MOST):
        raise UsageError(
            f"because: expected 1 to {MOST} past interactions, or 0 for none, found "
            f"{shown(because)}"
        )
    if because and scorer.config["MODEL_TYPE"] != ModelType.SEQUENTIAL:
        raise UsageError(
            f"because: {name} reads no history, so no past interaction carries what it "
            "recommends; sequential models can be asked"
        )
    if because and asked.users is not None and getattr(scorer.model, "needs_events", False):
        raise UsageError(
            f"because: {name} reads interactions of users from the dataset, where none can be "
            "left out; give the histories themselves"
        )


def reason_columns(because: int) -> list[str]:
    """Return the names of the columns of ``because`` reasons, numbered from 1."""
    return [f"{name}_{n}" for n in range(1, because + 1) for name in COLUMNS]


def add_reasons(
    table: pd.DataFrame, found: tuple[np.ndarray, ...], names: np.ndarray
) -> pd.DataFrame:
    """Return a table of recommendations with their reasons as further columns.

    Args:
        table: a row for each recommendation.
        found: the arrays [p, most] of :func:`reasons`.
        names: [items] names of the catalogue.
    """
    past, _, score, rank = (column.T for column in found)
    names_by_id = np.concatenate([[None], names])
    parts = (
        part
        for n in range(len(past))
        for part in (names_by_id[past[n]], score[n].astype(np.float32), pd.array(rank[n], "Int64"))
    )
    return table.assign(**dict(zip(reason_columns(len(past)), parts, strict=True)))


@torch.inference_mode()
def reasons(
    scorer: Scorer,
    asked: Histories,
    row: np.ndarray,
    item: np.ndarray,
    most: int,
    choice: Choice,
    exclude_seen: bool,
) -> tuple[np.ndarray, ...]:
    """Return the past interactions that carried each recommended item.

    Args:
        scorer, asked, row, item, choice, exclude_seen: as of :func:`leave_one_out`; histories
            without a known item have no reasons.
        most: number of reasons of each item.

    Returns:
        Four arrays [p, most], as of :meth:`Effects.strongest`.
    """
    found = [np.full((len(row), most), none) for none in (0, 0, np.nan, np.nan)]
    has_history = asked.lengths[row] > 0
    effects = leave_one_out(
        scorer, asked, row[has_history], item[has_history], choice, exclude_seen
    )
    parts = [effect.strongest(most) for effect in effects]
    for column, part in zip(found, zip(*parts, strict=True), strict=False):
        column[has_history] = np.concatenate(part)
    return tuple(found)


def leave_one_out(
    scorer: Scorer,
    asked: Histories,
    row: np.ndarray,
    item: np.ndarray,
    choice: Choice,
    exclude_seen: bool,
) -> Iterator[Effects]:
    """Score histories without each of their interactions in turn, in batches.

    Candidates stay those of the whole history: with ``exclude_seen`` the item of the interaction
    that is left out is still excluded, so that a rank changes by the model alone. Interactions that
    are older than the model reads have no effect and are not left out.

    Args:
        scorer: scorer of the model.
        asked: the histories.
        row: [p] numbers of histories with known interactions, ascending.
        item: [p] ids of the items to explain.
        choice: the items among which they are ranked.
        exclude_seen: whether items of a history are not ranked.

    Yields:
        The effects for some histories at a time, in the order of ``row``.
    """
    reach = scorer.reach
    rows, count = np.unique(row, return_counts=True)
    steps = asked.lengths[rows] if reach is None else np.minimum(asked.lengths[rows], reach)
    begin = np.cumsum(count) - count
    bounds = np.flatnonzero(np.diff(np.cumsum(steps + 1) // BATCH)) + 1
    for group in np.split(np.arange(len(rows)), bounds):
        if not len(group):
            continue
        some, most = asked.some(rows[group]), steps[group]
        read = some if reach is None else some.newest(reach + 1)  # the oldest one may move up
        k = np.arange(count[group].max())
        items = np.where(k < count[group, None], item[(begin[group, None] + k) % len(item)], 0)
        owner = np.repeat(np.arange(len(group)), most + 1)
        back = np.arange(len(owner)) - np.repeat(np.cumsum(most + 1) - most - 1, most + 1)
        score = np.full((len(group), most.max() + 1, len(k)), np.nan)
        rank = score.copy()
        possible = np.flatnonzero((back == 0) | (some.lengths[owner] > 1))
        for part in np.split(possible, np.arange(BATCH, len(possible), BATCH)):
            whose, left_out = owner[part], back[part]
            barred = some.some(whose).pairs() if exclude_seen else None
            found = scorer.scores(read.some(whose).without(left_out))
            ids = torch.from_numpy(items[whose])
            score[whose, left_out], rank[whose, left_out] = (
                x.numpy() for x in scores_and_ranks(found, choice, ids, barred)
            )
        rank[np.isnan(score)] = np.nan
        ends, ages = np.cumsum(some.lengths)[:, None], np.arange(1, most.max() + 1)
        past = np.where(ages <= most[:, None], some.items[np.maximum(ends - ages, 0)], 0)
        changes = ((x[:, 1:] - x[:, :1]).transpose(0, 2, 1) for x in (score, rank))
        yield Effects(items, past, score[:, 0], rank[:, 0], *changes)
