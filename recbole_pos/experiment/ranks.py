"""Where the targets of a test stood in their rankings: ``test_ranks.parquet``.

Any metric of one relevant item follows from it, for all targets or for some (short histories, rare
items), and two runs can be compared target by target. It is made while the test is evaluated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from recbole_pos.data.splits import TRAIN
from recbole_pos.values import SECONDS

RANK, EVENT = "rec.rank", "rec.event"  # in RecBole's collector


def ranks(scores: Tensor, target: Tensor, best: Tensor | None) -> Tensor:
    """[B] int64 rank of each target, 0 for the first.

    Args:
        scores: [B, items], -inf for what is left out.
        target: [B].
        best: [B, K] the first items as the metrics have them, which so tell the rank of items with
            equal scores; None where no metric has a cutoff. Beyond them only higher scores count.
    """
    higher = (scores > scores.gather(1, target[:, None])).sum(1)
    return higher if best is None else placed(higher, target, best)


def placed(higher: Tensor, target: Tensor, best: Tensor) -> Tensor:
    """[B] ranks of targets among the first items [B, K], or by how many scores are higher."""
    hits = best == target[:, None]
    place = hits.long().argmax(1)
    return torch.where(hits.any(1), place, higher.clamp(min=best.size(1)))


def ranks_of_test(collector: Any, part: Any, time_unit: str) -> pd.DataFrame | None:
    """What a collector kept of the last test, as :func:`rank_table`; None if it kept nothing."""
    if collector.last is None or RANK not in collector.last:
        return None
    event, rank = (collector.last.get(name).cpu().numpy() for name in (EVENT, RANK))
    return rank_table(part, event, rank, time_unit)


def rank_table(part: Any, event: np.ndarray, rank: np.ndarray, time_unit: str) -> pd.DataFrame:
    """A line a target.

    Args:
        part: the dataset of the phase.
        event: [targets] their places in its log.
        rank: [targets] 0 for the first.
        time_unit: of the time field.

    Returns:
        Columns ``user`` and ``item``, as in the files; ``rank``; ``history``, how many events the
        user had before; ``age``, of the newest of them, in seconds; ``popularity``, the training
        events of the item. In the order of the log.
    """
    order = np.argsort(event, kind="stable")
    event, rank = event[order], rank[order]
    log = part.log
    items, times = log.items.numpy(), log.times.numpy()
    sold = np.bincount(items[part.part == TRAIN], minlength=part.item_num)
    users = part.field2id_token[part.uid_field][log.users.numpy()[event]]
    return pd.DataFrame(
        {
            "user": users.astype(str),
            "item": part.field2id_token[part.iid_field][items[event]].astype(str),
            "rank": rank,
            "history": log.ranks[event],
            "age": (times[event] - times[event - 1]) * SECONDS[time_unit],
            "popularity": sold[items[event]],
        }
    )
