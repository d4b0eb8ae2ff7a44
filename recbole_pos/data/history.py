"""Which items of a user's past are left out of what is recommended."""

from __future__ import annotations

import torch
from recbole.utils import ModelType
from torch import Tensor

from recbole_pos.data.events import EventLog
from recbole_pos.data.windows import gather_index
from recbole_pos.values import Options


def masks_history(config: Options) -> bool:
    """Return whether items of a user's past are left out: ``mask_history``, or RecBole's choice."""
    given = config["mask_history"]
    return config["MODEL_TYPE"] != ModelType.SEQUENTIAL if given is None else given


def past_items(log: EventLog, target_event: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return (row, item) of every past interaction of each row, but the row's own target item.

    Args:
        log: what ``target_event`` points into.
        target_event: [B] places of the targets in the log.
        positive: [B] their items.
    """
    target = target_event.numpy()
    start = log.offsets[log.users.numpy()[target]]
    items = log.items[torch.from_numpy(gather_index(start, target - start))]
    rows = torch.repeat_interleave(torch.from_numpy(target - start))
    keep = items != positive[rows]
    return rows[keep], items[keep]
