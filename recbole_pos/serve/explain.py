"""Why an item is recommended: its score and rank without each of the past interactions."""

from __future__ import annotations

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
MOST = 100  # reasons of an item at most
NOISE = 1e-6  # relative to a score: a smaller change is rounding

Effects = dict[str, np.ndarray]  # columns by name, see leave_one_out


def require_reasons(scorer: Scorer, because: int, histories: Histories) -> None:
    """Raise a UsageError unless past interactions can be left out, if ``because``, the number of
    reasons for each item, is not 0."""
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
    if because and histories.users is not None and getattr(scorer.model, "needs_events", False):
        raise UsageError(
            f"because: {name} reads interactions of users from the dataset, where none can be "
            "left out; give the histories themselves"
        )


def add_reasons(
    table: pd.DataFrame, effects: Effects, because: int, names: np.ndarray
) -> pd.DataFrame:
    """Return a table of recommendations with their reasons as further columns, numbered from 1.

    Args:
        table: a row for each recommendation.
        effects: of each of them, as :func:`leave_one_out` returns them.
        because: number of reasons of each item.
        names: [items] names of the catalogue.
    """
    reasons, columns = find_reasons(effects, because), {}
    for n in range(1, because + 1):
        is_nth = reasons["reason"] == n
        row = reasons["pair"][is_nth]
        past = np.full(len(table), None, dtype=object)
        past[row] = names[reasons["past"][is_nth] - 1]
        changes = np.full((2, len(table)), np.nan)
        changes[:, row] = reasons["score_change"][is_nth], reasons["rank_change"][is_nth]
        columns[f"because_{n}"] = past
        columns[f"score_change_{n}"] = changes[0].astype(np.float32)
        columns[f"rank_change_{n}"] = pd.array(changes[1], dtype="Int64")
    return pd.concat([table, pd.DataFrame(columns, table.index)], axis=1)


def find_reasons(effects: Effects, most: int) -> Effects:
    """Return the interactions that carried each item, at most so many, the strongest first; a
    column ``reason`` numbers those of an item from 1."""
    change = effects["score_change"]
    change = np.where(np.isnan(change), -np.inf, change)  # of the only interaction of a history
    order = np.lexsort((change, effects["pair"]))
    carries = change < -NOISE * np.maximum(np.abs(effects["score"]), 1)
    order = order[carries[order]]
    pair = effects["pair"][order]
    reason = 1 + np.arange(len(pair)) - np.searchsorted(pair, pair)
    found = {name: column[order] for name, column in effects.items()} | {"reason": reason}
    return {name: column[reason <= most] for name, column in found.items()}


@torch.inference_mode()
def leave_one_out(
    scorer: Scorer,
    histories: Histories,
    row: np.ndarray,
    item: np.ndarray,
    choice: Choice,
    exclude_seen: bool,
) -> Effects:
    """Score histories without each of their interactions in turn, in batches.

    Candidates stay those of the whole history: with ``exclude_seen`` the item of the interaction
    that is left out is still excluded, so that a rank changes by the model alone. Interactions that
    are older than the model reads have no effect and are not left out.

    Args:
        scorer: scorer of the model.
        histories: the histories; those without a known item have no effects.
        row: [p] numbers of histories, ascending.
        item: [p] ids of the items to explain.
        choice: the items among which they are ranked.
        exclude_seen: whether items of a history are not ranked.

    Returns:
        Columns with a value for each of the p ``pair``s and each interaction, the newest first:
        ``past``, the id of its item; ``steps_back``, 1 for the newest; ``score`` and ``rank`` of
        the pair's item after the whole history; ``score_change`` and ``rank_change``, what is added
        to them without the interaction: below 0 and above 0 if it carried the item, NaN if it is
        the only one of its history.
    """
    reach = scorer.reach
    rows, owner, count = np.unique(row, return_inverse=True, return_counts=True)
    column = np.arange(len(row)) - (np.cumsum(count) - count)[owner]  # of the items of its history
    items = np.zeros((len(rows), count.max(initial=0)), dtype=np.int64)
    items[owner, column] = item
    explained = histories.select(rows)
    read = (
        explained if reach is None else explained.keep_newest(reach + 1)
    )  # the oldest one may move up
    steps = explained.lengths if reach is None else np.minimum(explained.lengths, reach)
    # the variants of each history: all of it, and without the newest, the one before it, ...
    begin = np.cumsum(steps + 1) - (steps + 1)
    whose = np.repeat(np.arange(len(rows)), steps + 1)
    left_out = np.arange(len(whose)) - begin[whose]
    score = np.full((len(whose), items.shape[1]), np.nan)
    rank = score.copy()
    possible = np.flatnonzero(explained.lengths[whose] > (left_out > 0))
    for number in range(0, len(possible), BATCH):
        part = possible[number : number + BATCH]
        barred = explained.select(whose[part]).list_pairs() if exclude_seen else None
        found = scorer.make_scores(read.select(whose[part]).leave_out(left_out[part]))
        ids = torch.from_numpy(items[whose[part]])
        score[part], rank[part] = (x.numpy() for x in scores_and_ranks(found, choice, ids, barred))
    rank[np.isnan(score)] = np.nan
    pair = np.repeat(np.arange(len(row)), steps[owner])
    first = np.cumsum(steps[owner]) - steps[owner]
    steps_back = 1 + np.arange(len(pair)) - first[pair]
    history, place = owner[pair], column[pair]
    whole = begin[history]
    return {
        "pair": pair,
        "past": explained.items[np.cumsum(explained.lengths)[history] - steps_back],
        "steps_back": steps_back,
        "score": score[whole, place],
        "rank": rank[whole, place],
        "score_change": score[whole + steps_back, place] - score[whole, place],
        "rank_change": rank[whole + steps_back, place] - rank[whole, place],
    }
