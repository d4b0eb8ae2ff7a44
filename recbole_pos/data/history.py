"""Which items of a user's history are excluded from recommendations."""

from __future__ import annotations

import torch
from recbole.utils import ModelType
from torch import Tensor

from recbole_pos.data.events import EventLog
from recbole_pos.data.windows import gather_index
from recbole_pos.values import Options


def masks_history(config: Options) -> bool:
    """Return whether seen items are excluded: ``mask_history``, or RecBole's choice if unset.

    RecBole excludes them for all models but sequential ones.
    """
    choice = config["mask_history"]
    return config["MODEL_TYPE"] != ModelType.SEQUENTIAL if choice is None else choice


def past_items(log: EventLog, target_event: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return (row, item) of every past interaction of each row, except of the row's target item.

    Args:
        log: the interactions.
        target_event: [B] int64 place of each row's target in the log.
        positive: [B] int64 item of each target.

    Returns:
        [n] int64 rows and [n] int64 items.
    """
    target = target_event.numpy()
    start = log.offsets[log.users.numpy()[target]]
    items = log.items[torch.from_numpy(gather_index(start, target - start))]
    rows = torch.repeat_interleave(torch.from_numpy(target - start))
    keep = items != positive[rows]
    return rows[keep], items[keep]
