"""Why an item is recommended: its score and rank without each of the past interactions.

:func:`leave_one_out` computes these, :func:`find_reasons` picks the interactions without which
the score of an item falls most, and :func:`add_reasons` puts them into a table of recommendations.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from recbole.utils import ModelType

from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.layers.large_products import Choice, score_and_rank
from recbole_pos.serve.scorer import Histories, Scorer
from recbole_pos.values import is_whole, shown

BATCH = 256  # histories that are scored at once
MAX_REASONS = 100  # of an item
NOISE = 1e-6  # relative to a score: a smaller change is rounding


def require_reasons(scorer: Scorer, because: int, histories: Histories) -> None:
    """Raise a UsageError if reasons for recommendations are requested that cannot be given.

    A reason is a past interaction without which the score of the recommended item falls.

    Args:
        scorer: the trained model.
        because: requested number of reasons for each item; 0 for none, which is always allowed.
        histories: the histories that items are recommended to.
    """
    if not (is_whole(because) and 0 <= because <= MAX_REASONS):
        raise UsageError(
            f"because: expected 1 to {MAX_REASONS} past interactions, or 0 for none, found "
            f"{shown(because)}"
        )

    if not because:
        return

    # Interactions are left out of ``histories``, so the model must read these. Models that are not
    # sequential read no history. And a model that compares users (``needs_events``) reads the
    # histories of the dataset's users, which have user ids, from the dataset itself.
    is_sequential = scorer.config["MODEL_TYPE"] == ModelType.SEQUENTIAL
    has_user_ids = histories.users is not None
    reads_dataset = has_user_ids and getattr(scorer.model, "needs_events", False)
    if not is_sequential or reads_dataset:
        raise UsageError(
            f"because: {scorer.config['model']} reads no history here that an interaction can be "
            "left out of; give histories to a sequential model"
        )


def add_reasons(
    table: pd.DataFrame, effects: pd.DataFrame, because: int, item_names: np.ndarray
) -> pd.DataFrame:
    """Return a table of recommendations with further columns for the reasons of each row.

    A reason is a past interaction without which the score of the recommended item falls.

    Args:
        table: recommendations, an item in each row.
        effects: what :func:`leave_one_out` returns for the items of the rows: what changes without
            each past interaction. ``pair`` is the number of the row of ``table``.
        because: number of reasons for each row.
        item_names: [items] names of the items with the ids 1, 2, ...

    Returns:
        The table with the columns ``because_1`` (the item of the past interaction that counts
        most), ``steps_back_1``, ``score_change_1``, ``rank_change_1``, then ``because_2`` and so
        on. They are empty where a row has fewer reasons.
    """
    # The reasons, the strongest of each row first. Here row 0 of the table has two, row 1 none:
    #
    #     pair  reason  past  steps_back  score_change  rank_change
    #        0       1    17           1          -0.8            5
    #        0       2     9           4          -0.1            1
    #        2       1    17           1          -0.3            2
    reasons = find_reasons(effects, because)
    columns: dict[str, object] = {}
    for n in range(1, because + 1):
        # In the example the rows 0 and 2 have a first reason, and row 0 has a second one.
        is_nth = reasons["reason"] == n
        row = reasons["pair"][is_nth]

        # The other rows stay empty. ``past`` is the id of the past item; the first name has id 1.
        past = np.full(len(table), None, dtype=object)
        past[row] = item_names[reasons["past"][is_nth] - 1]
        columns[f"because_{n}"] = past

        for name in ("steps_back", "score_change", "rank_change"):
            values = np.full(len(table), np.nan)
            values[row] = reasons[name][is_nth]
            # Int64 with a capital is pandas' type of whole numbers that may be missing.
            dtype = "float32" if name == "score_change" else "Int64"
            columns[f"{name}_{n}"] = pd.Series(values).astype(dtype).array
    return pd.concat([table, pd.DataFrame(columns, table.index)], axis=1)


def find_reasons(effects: pd.DataFrame, limit: int) -> pd.DataFrame:
    """Return for each explained item the past interactions without which its score falls most.

    Args:
        effects: what :func:`leave_one_out` returns: a row for each pair of an explained item and a
            past interaction.
        limit: number of interactions for each item, at most.

    Returns:
        The rows of these, sorted by explained item (``pair``) and then by the fall of the score,
        the largest first. A further column ``reason`` numbers the rows of each item from 1: for
        ``pair`` [0, 0, 2] it is [1, 2, 1].
    """
    # Only a fall that is larger than rounding (NOISE, relative to the score) is a reason. So is the
    # only interaction of a history: without it there is no score, and the change is missing.
    change = effects["score_change"]
    is_reason = change.isna() | (change < -NOISE * effects["score"].abs().clip(lower=1))
    reasons = effects[is_reason].sort_values(["pair", "score_change"], kind="stable")
    reasons["reason"] = 1 + reasons.groupby("pair").cumcount()
    return reasons[reasons["reason"] <= limit]


def make_effects_table(
    effects: pd.DataFrame, item_ids: np.ndarray, item_names: np.ndarray
) -> pd.DataFrame:
    """Return how items change without each past interaction of one history, as a table of names.

    Args:
        effects: what :func:`leave_one_out` returns for the items: a row for each pair of an item
            and a past interaction.
        item_ids: [p] ids of the explained items; the column ``pair`` has an index of this array.
        item_names: [items] names of the items with the ids 1, 2, ...

    Returns:
        The columns that :meth:`Recommender.explain` documents. Of each item, the interactions come
        first without which its score falls most.
    """
    # Replace ids of items by names. Ids begin at 1, so the name of an item has the index id - 1.
    table = effects.sort_values(["pair", "score_change"], kind="stable")
    explained_id, past_id = item_ids[table["pair"]], table["past"]
    table["item"], table["past"] = item_names[explained_id - 1], item_names[past_id - 1]

    # A change is missing for the only interaction of a history. Int64, with a capital, is pandas'
    # type of integers of which some are missing.
    table = table.astype({"rank": np.int64, "rank_change": "Int64"})
    columns = ["item", "rank", "score", "past", "steps_back", "score_change", "rank_change"]
    return table[columns].reset_index(drop=True)


@torch.inference_mode()
def leave_one_out(
    scorer: Scorer,
    histories: Histories,
    row: np.ndarray,
    item: np.ndarray,
    choice: Choice,
    exclude_seen: bool,
) -> pd.DataFrame:
    """Return how scores and ranks of p items change without each past interaction in turn.

    Each item is ranked among the same candidates with and without the interaction: if
    ``exclude_seen``, the item of the interaction that is left out stays excluded. So a rank changes
    only by what the model reads. Interactions that are older than the model reads are not left out.
    For this, each history is scored several times: whole, and as one variant for each interaction.

    Args:
        scorer: the trained model.
        histories: the histories; those without interactions get no entries.
        row: [p] index in ``histories`` for each item to explain, ascending.
        item: [p] id of each item to explain.
        choice: ids of the items that are ranked, and boosts, which are added to their scores.
        exclude_seen: whether the items of a history are left out of its ranking.

    Returns:
        A row for each item to explain and each interaction of its history, the newest first, with
        the columns ``pair``, the index of (row, item); ``past``, the id of the interaction's
        item; ``steps_back``, 1 for the newest; ``score`` and ``rank`` after the whole history;
        ``score_change`` and ``rank_change``, their values without the interaction minus those with
        it: below 0 and above 0 if it carried the item, NaN if its history has no other.
    """
    # One row for each history with items to explain: rows [0, 0, 3] and items [7, 8, 9] become
    # the table [[7, 8], [9, 0]], in which ``owner`` [0, 0, 1] and ``column`` [0, 1, 0] find them.
    rows, owner, counts = np.unique(row, return_inverse=True, return_counts=True)
    column = np.arange(len(row)) - (np.cumsum(counts) - counts)[owner]
    items = np.zeros((len(rows), counts.max(initial=0)), dtype=np.int64)
    items[owner, column] = item
    explained = histories.select(rows)

    # Number of newest interactions that the model reads of each history, all if it has no limit.
    reach = explained.lengths.max(initial=0) if scorer.reach is None else scorer.reach
    num_read = np.minimum(explained.lengths, reach)

    # Variants of each history: the whole, then without the newest interaction, without the one
    # before it, ... With two interactions read, ``left_out`` is [0, 1, 2] steps back; 0: none.
    num_variants = num_read + 1
    first = np.cumsum(num_variants) - num_variants
    variant_owner = np.repeat(np.arange(len(rows)), num_variants)
    left_out = np.arange(len(variant_owner)) - first[variant_owner]

    # Score and rank of the items after each variant; NaN where the variant has no interaction left.
    score = np.full((len(variant_owner), items.shape[1]), np.nan)
    rank = score.copy()
    # One interaction more than the model reads is kept: it is read once a newer one is left out.
    newest = scorer.drop_unread(explained, extra=1)
    not_empty = np.flatnonzero(explained.lengths[variant_owner] > (left_out > 0))
    for start in range(0, len(not_empty), BATCH):
        batch = not_empty[start : start + BATCH]
        batch_rows = variant_owner[batch]
        variants = newest.select(batch_rows).leave_out(left_out[batch])
        scores = scorer.make_scores(variants)
        # The whole histories say what is not recommended, not the variants.
        barred = explained.select(batch_rows).list_barred(exclude_seen)
        ids = torch.from_numpy(items[batch_rows])
        batch_score, batch_rank = score_and_rank(scores, choice, ids, barred)
        score[batch] = batch_score.numpy()
        rank[batch] = batch_rank.numpy()
    rank[np.isnan(score)] = np.nan

    # Entries of the result: each item to explain with each interaction that is read of its history.
    # An entry compares two cells of the scores: the whole history, and the one without it. For two
    # items with 2 and 3 interactions read, ``pair`` is [0, 0, 1, 1, 1], and gather_index counts the
    # entries of each item from 0, so that ``steps_back`` is [1, 2, 1, 2, 3].
    pair = np.repeat(np.arange(len(row)), num_read[owner])
    steps_back = 1 + gather_index(np.zeros_like(row), num_read[owner])
    history = owner[pair]
    entry_with = first[history], column[pair]
    entry_without = first[history] + steps_back, column[pair]
    columns = {
        "pair": pair,
        "past": explained.items[np.cumsum(explained.lengths)[history] - steps_back],
        "steps_back": steps_back,
        "score": score[entry_with],
        "rank": rank[entry_with],
        "score_change": score[entry_without] - score[entry_with],
        "rank_change": rank[entry_without] - rank[entry_with],
    }
    return pd.DataFrame(columns)
