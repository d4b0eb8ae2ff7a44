"""RecBole's BERT4Rec: its loss, computed for masked events alone.

RecBole gives every row ``mask_ratio * MAX_ITEM_LIST_LENGTH`` places for masked events, ranks the
catalogue at each of them and multiplies what stands for none by zero. Histories are mostly shorter
than that: on Amazon Beauty four places in five are empty.
"""

from __future__ import annotations

from typing import Any

import torch
from recbole.data.interaction import Interaction
from torch import Tensor

from recbole_pos.layers.losses import full_cross_entropy


def masked_event_loss(model: Any, rows: Interaction) -> Tensor:
    """``BERT4Rec.calculate_loss`` under ``loss_type: CE``; 0 where a batch has nothing masked.

    Index 0 says that a place is empty, so that a masked first event is no target, as in RecBole.
    Padding is a candidate as it is there.
    """
    masked = rows[model.MASK_INDEX]
    real = masked > 0
    row = torch.nonzero(real)[:, 0]
    states = model.forward(rows[model.MASK_ITEM_SEQ])[row, masked[real]]  # [k, d]
    if not len(row):
        return states.sum()
    # the bias is the weight of an input that is 1; in front stands the row that is no candidate
    items = model.item_embedding.weight[: model.n_items]
    weight = torch.cat((items, model.output_bias[:, None]), 1)
    weight = torch.cat((weight.new_zeros(1, weight.size(1)), weight))
    states = torch.cat((states, states.new_ones(len(states), 1)), 1)
    return full_cross_entropy(states, weight, rows[model.POS_ITEMS][real] + 1)
