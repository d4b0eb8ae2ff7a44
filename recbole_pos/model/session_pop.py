"""SPop: what the session has shown most, as a baseline of session-based recommendation.

Reference:
    Hidasi et al. "Session-based Recommendations with Recurrent Neural Networks." ICLR 2016 (S-POP).
"""

from __future__ import annotations

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.utils import InputType
from torch import Tensor, nn

from recbole_pos.data.protocols import Dataset
from recbole_pos.data.splits import TRAIN
from recbole_pos.values import Options


class Untrained(SequentialRecommender):
    """Base of sequential models that count and learn nothing: one epoch without a gradient."""

    input_type = InputType.POINTWISE

    def __init__(self, config: Options, dataset: Dataset) -> None:
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
    """Session popularity: the items seen most often in the session, ties by overall popularity
    (Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks", ICLR 2016)."""

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        trained = dataset.log.items.numpy()[dataset.part == TRAIN]
        counts = np.bincount(trained, minlength=self.n_items)
        place = torch.empty(self.n_items, dtype=exact_float(self.max_seq_length, self.n_items))
        place[np.argsort(-counts, kind="stable")] = torch.arange(self.n_items).flip(0).to(place)
        # counted anew from the training data that a checkpoint belongs to
        self.register_buffer("popularity", place, persistent=False)

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """[B, items] whole numbers: how often an item is in the history, then its popularity."""
        history = interaction[self.ITEM_SEQ]
        seen = (history > 0).to(self.popularity) * self.n_items  # padding counts for nothing
        return self.popularity.repeat(len(history), 1).scatter_add_(1, history, seen)


def exact_float(longest: int, items: int) -> torch.dtype:
    """The smaller type that holds every score: up to ``longest`` repeats, and a place among all."""
    return torch.float32 if (longest + 1) * items <= 2**24 else torch.float64
