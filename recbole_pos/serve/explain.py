"""Why an item is recommended: its score and rank without each of the past interactions."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from recbole.utils import ModelType

from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.layers.catalogue import Choice, score_and_rank
from recbole_pos.serve.scorer import Histories, Scorer
from recbole_pos.values import is_whole, shown

BATCH = 256  # histories that are scored at once
MAX_REASONS = 100  # of an item
NOISE = 1e-6  # relative to a score: a smaller change is rounding

Effects = dict[str, np.ndarray]  # columns by name, see leave_one_out


def require_reasons(scorer: Scorer, because: int, histories: Histories) -> None:
    """Raise a UsageError if ``because`` reasons per item are invalid or the model can give none."""
    name = scorer.config["model"]
    if not (is_whole(because) and 0 <= because <= MAX_REASONS):
        raise UsageError(
            f"because: expected 1 to {MAX_REASONS} past interactions, or 0 for none, found "
            f"{shown(because)}"
        )
    reads_dataset = histories.users is not None and getattr(scorer.model, "needs_events", False)
    if because and (reads_dataset or scorer.config["MODEL_TYPE"] != ModelType.SEQUENTIAL):
        raise UsageError(
            f"because: {name} reads no history here that an interaction can be left out of; give "
            "histories to a sequential model"
        )


def add_reasons(
    table: pd.DataFrame, effects: Effects, because: int, item_names: np.ndarray
) -> pd.DataFrame:
    """Return recommendations with columns for their strongest ``because`` reasons, from 1.

    ``effects`` are those of :func:`leave_one_out` for the rows of the table; ``item_names`` is
    [items], from id 1 on.
    """
    reasons = find_reasons(effects, because)
    columns: dict[str, object] = {}
    for n in range(1, because + 1):
        is_nth = reasons["reason"] == n
        row = reasons["pair"][is_nth]
        past = np.full(len(table), None, dtype=object)
        past[row] = item_names[reasons["past"][is_nth] - 1]
        columns[f"because_{n}"] = past
        for name in ("steps_back", "score_change", "rank_change"):
            values = np.full(len(table), np.nan)
            values[row] = reasons[name][is_nth]
            dtype = "float32" if name == "score_change" else "Int64"
            columns[f"{name}_{n}"] = pd.Series(values).astype(dtype).array
    return pd.concat([table, pd.DataFrame(columns, table.index)], axis=1)


def find_reasons(effects: Effects, limit: int) -> Effects:
    """Return the effects of the interactions that carried each item most, ``limit`` at most.

    They are sorted by item, strongest first; a further column ``reason`` counts from 1 for each.
    """
    change = effects["score_change"]
    change = np.where(np.isnan(change), -np.inf, change)  # NaN: its history has no other
    order = np.lexsort((change, effects["pair"]))
    carries = change < -NOISE * np.maximum(np.abs(effects["score"]), 1)
    order = order[carries[order]]
    pair = effects["pair"][order]
    reason = 1 + np.arange(len(pair)) - np.searchsorted(pair, pair)
    ranked = {name: column[order] for name, column in effects.items()} | {"reason": reason}
    return {name: column[reason <= limit] for name, column in ranked.items()}


@torch.inference_mode()
def leave_one_out(
    scorer: Scorer,
    histories: Histories,
    row: np.ndarray,
    item: np.ndarray,
    choice: Choice,
    exclude_seen: bool,
) -> Effects:
    """Score p items after their histories, and without each of the interactions in turn.

    Candidates are the same as for the whole history: with ``exclude_seen`` the item of the
    interaction that is left out stays excluded, so that a rank changes only by the model.
    Interactions that are older than the model reads have no effect and are not left out.

    Args:
        scorer: the model.
        histories: the histories; empty ones have no effects.
        row, item: [p] index of the history (ascending) and id of each item to explain.
        choice, exclude_seen: the candidates of the ranking.

    Returns:
        Columns with an entry for each item to explain and each interaction of its history, the
        newest first: ``pair``, the index of (row, item); ``past``, the id of the interaction's
        item; ``steps_back``, 1 for the newest; ``score`` and ``rank`` after the whole history;
        ``score_change`` and ``rank_change``, their values without the interaction minus those with
        it: below 0 and above 0 if it carried the item, NaN if its history has no other.
    """
    # items [explained histories, columns]: those to explain of each history, then 0
    rows, owner, counts = np.unique(row, return_inverse=True, return_counts=True)
    column = np.arange(len(row)) - (np.cumsum(counts) - counts)[owner]
    items = np.zeros((len(rows), counts.max(initial=0)), dtype=np.int64)
    items[owner, column] = item
    explained = histories.select(rows)
    reach = explained.lengths.max(initial=0) if scorer.reach is None else scorer.reach
    num_read = np.minimum(explained.lengths, reach)
    # the variants of each history: all of it, and without the newest, the one before it, ...
    num_variants = num_read + 1
    first = np.cumsum(num_variants) - num_variants
    variant_owner = np.repeat(np.arange(len(rows)), num_variants)
    left_out = np.arange(len(variant_owner)) - first[variant_owner]  # steps back, 0: none
    score = np.full((len(variant_owner), items.shape[1]), np.nan)
    rank = score.copy()
    newest = scorer.drop_unread(explained, extra=1)
    not_empty = np.flatnonzero(explained.lengths[variant_owner] > (left_out > 0))
    for start in range(0, len(not_empty), BATCH):
        batch = not_empty[start : start + BATCH]
        batch_rows = variant_owner[batch]
        variants = newest.select(batch_rows).leave_out(left_out[batch])
        scores = variants.restrict(scorer.make_scores(variants))
        barred = explained.select(batch_rows).list_barred(exclude_seen)
        ids = torch.from_numpy(items[batch_rows])
        batch_score, batch_rank = score_and_rank(scores, choice, ids, barred)
        score[batch] = batch_score.numpy()
        rank[batch] = batch_rank.numpy()
    rank[np.isnan(score)] = np.nan
    # the entries of the result: each pair with each interaction that is read of its history
    pair = np.repeat(np.arange(len(row)), num_read[owner])
    steps_back = 1 + gather_index(np.zeros_like(row), num_read[owner])
    history = owner[pair]
    entry_with = first[history], column[pair]
    entry_without = first[history] + steps_back, column[pair]
    return {
        "pair": pair,
        "past": explained.items[np.cumsum(explained.lengths)[history] - steps_back],
        "steps_back": steps_back,
        "score": score[entry_with],
        "rank": rank[entry_with],
        "score_change": score[entry_without] - score[entry_with],
        "rank_change": rank[entry_without] - rank[entry_with],
    }
