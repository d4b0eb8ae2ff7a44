"""SPop: what the session has shown most, as a baseline of session-based recommendation.

Reference:
    Hidasi et al. "Session-based Recommendations with Recurrent Neural Networks." ICLR 2016 (S-POP).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.utils import InputType
from torch import Tensor, nn

from recbole_pos.data.splits import TRAIN


class Untrained(SequentialRecommender):
    """Base of sequential models that count and learn nothing: one epoch without a gradient."""

    input_type = InputType.POINTWISE

    def __init__(self, config: Any, dataset: Any) -> None:
        super().__init__(config, dataset)
        self.nothing = nn.Parameter(torch.zeros(1))  # an optimiser wants a parameter

    def calculate_loss(self, interaction: Interaction) -> Tensor:
        """Zero."""
        return self.nothing.sum() * 0

    def predict(self, interaction: Interaction) -> Tensor:
        """[B] score of each row's item after its history."""
        items = interaction[self.ITEM_ID][:, None]
        return self.full_sort_predict(interaction).gather(1, items).squeeze(1)


class SPop(Untrained):
    """Session popularity: the items seen most often in the session, ties by overall popularity."""

    def __init__(self, config: Any, dataset: Any) -> None:
        super().__init__(config, dataset)
        trained = dataset.log.items.numpy()[dataset.part == TRAIN]
        counts = np.bincount(trained, minlength=self.n_items)
        # distinct values below 1, float64 as a count of 50 would round them away
        order = np.argsort(-counts, kind="stable")
        tie_break = np.empty(self.n_items)
        tie_break[order] = 1 - np.arange(1, self.n_items + 1) / (self.n_items + 1)
        # counted anew from the training data that a checkpoint belongs to
        self.register_buffer("tie_break", torch.from_numpy(tie_break), persistent=False)

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """[B, items] how often each item is in the history, and less than 1 for its popularity."""
        history = interaction[self.ITEM_SEQ]
        seen = (history > 0).to(self.tie_break)  # padding counts for nothing
        return self.tie_break.repeat(len(history), 1).scatter_add_(1, history, seen)
