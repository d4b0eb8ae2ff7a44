"""What makes recommending to everyone fast gives the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recbole_pos.layers import catalogue
from recbole_pos.layers.catalogue import Choice
from recbole_pos.layers.context import SequenceContext
from recbole_pos.serve.recommender import find_best_items


@pytest.mark.parametrize("items", [5, 255, 256, 300, 1000, 3000])
@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("levels", [0, 2, 50])
def test_best_items(items: int, k: int, levels: int, monkeypatch) -> None:
    """In chunks whose rests are groups of one, of all, and of columns that are left out; of equal
    scores, of which there are many where there are few levels, the lower ids."""
    monkeypatch.setattr(catalogue, "PART", 2100)
    generator = torch.Generator().manual_seed(items)
    scores = torch.randn(9, items + 1, generator=generator)
    scores = (scores * levels).round() if levels else scores
    barred = torch.randint(9, (4 * items,), generator=generator)
    of_item = torch.randint(1, items + 1, (4 * items,), generator=generator)
    choice = Choice(torch.arange(1, items + 1))
    value, item = find_best_items(lambda some: scores[:, some], choice, k, (barred, of_item))
    scores[:, 0] = -torch.inf
    scores[barred, of_item] = -torch.inf
    want = [x[:, : min(k, items)] for x in scores.sort(dim=1, descending=True, stable=True)]
    np.testing.assert_array_equal(value, want[0].numpy())
    there = value > -np.inf
    np.testing.assert_array_equal(item[there], want[1].numpy()[there])


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosSASRec", {}),
        ("PosSASRec", {"norm": "post", "position": ["learned"]}),
        ("PosSASRec", {"block": "hstu", "n_layers": 1}),
        ("FPARec", {"n_layers": 3}),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_newest_states_alone(experiment, double, model: str, options: dict) -> None:
    """The last block makes no others, and those are the same."""
    made = experiment(model, **options).model.double().eval()
    lengths = torch.tensor([3, 12, 1, 7])
    items = torch.randint(1, made.n_items, (int(lengths.sum()),))
    ctx = SequenceContext.from_lengths(lengths, 12, items=items)
    want = made.encode(items, ctx)[ctx.last]
    torch.testing.assert_close(made.states(items, ctx, ctx.last), want, rtol=1e-12, atol=1e-12)
