"""Evaluation on catalogues of any size: RecBole's matrix [rows, items] of scores, made in parts.

RecBole scores, sorts and marks whole rows: 512 rows of a million items take 2 GB for the scores
alone. Here a batch takes rows x :data:`~recbole_pos.layers.catalogue.PART`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from recbole_pos.layers.catalogue import Choice, best_of, products, score_parts


@dataclass(frozen=True)
class StreamedScores:
    """Scores of a batch whose rows have one target each.

    Attributes:
        states: [b, d] what vectors of items are multiplied with.
        vectors: [items, d], the padding item's first, which is not ranked.
        barred: [p] rows and [p] items of pairs that are left out; None for none.
    """

    states: Tensor
    vectors: Tensor
    barred: tuple[Tensor, Tensor] | None

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids [c], scores [b, c]) of one part of the items after the other."""
        every = Choice(torch.arange(1, len(self.vectors), device=self.vectors.device))
        return score_parts(
            lambda items: products(self.states, self.vectors, items), every, self.barred
        )

    def best(self, k: int) -> Tensor:
        """[b, k] ids of the items with the highest scores."""
        return best_of(self.parts(), k)[1]

    def higher(self, target: Tensor) -> Tensor:
        """[b] how many items have a higher score than the target ([b] ids).

        In two passes, so that both sides of a comparison come out of the same product.
        """
        own = self.states.new_empty(len(target))
        for items, part in self.parts():
            here = (target >= items[0]) & (target <= items[-1])
            own[here] = part[here, target[here] - items[0]]
        return torch.stack([(part > own[:, None]).sum(1) for _, part in self.parts()]).sum(0)
