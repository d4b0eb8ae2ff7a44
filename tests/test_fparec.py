"""FPARec and PARec as whole models, against equations 5 to 10 written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from recbole_pos.layers import triangular
from recbole_pos.position import positional_attention
from recbole_pos.position.positional_attention import BLOCKS


def forward(model, items: Tensor, n: int) -> Tensor:
    """[t, items] scores of one history, in loops over positions; no dropout."""
    d = model.item_embedding.weight.size(1)
    pad = n - len(items)
    table = model.position_embedding.weight
    f = torch.stack(
        [
            model.item_embedding.weight[int(item)] * math.sqrt(d) + table[pad + i]
            for i, item in enumerate(items)
        ]
    )
    for layer in model.trm_encoder.layer:
        attention, ffn = layer.multi_head_attention, layer.feed_forward
        norm = attention.LayerNorm
        v = (
            reference.layer_norm(f, norm.weight, norm.bias, norm.eps) @ attention.value.weight.T
        )  # 5
        r = next(iter(attention.position.schemes.values()))
        r = r.R1[0] @ r.R2[0].T if hasattr(r, "R1") else r.R[0]
        f = f + reference.positional_attention(reference.learned_weights(r, d), v, n)  # 6, 7
        norm = ffn.LayerNorm
        hidden = reference.layer_norm(f, norm.weight, norm.bias, norm.eps)
        hidden = (hidden @ ffn.dense_1.weight.T + ffn.dense_1.bias).clamp(min=0)
        f = f + hidden @ ffn.dense_2.weight.T + ffn.dense_2.bias  # 8, with residual connections
    norm = model.LayerNorm
    f = reference.layer_norm(f, norm.weight, norm.bias, norm.eps)  # 9
    return f @ model.item_embedding.weight.T  # 10


@pytest.mark.parametrize("name", ["FPARec", "PARec"])
def test_scores_equal_the_paper(experiment, name: str) -> None:
    made = experiment(name, MAX_ITEM_LIST_LENGTH=7)
    model = made.model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
    rows = made.loaders["train"]._dataset[np.arange(0, 120, 7)]
    got = model.full_sort_predict(rows)
    for row in range(len(rows)):
        items = rows["item_id_list"][row, : int(rows["item_length"][row])]
        torch.testing.assert_close(got[row], forward(model, items, 7)[-1], rtol=1e-9, atol=1e-9)


def test_attention_of_the_yaml_has_the_parameters_of_table_1(experiment) -> None:
    """d^2 + 2kn and d^2 + n^2 per layer, as the models are configured."""
    n, d, k = 12, 16, 40
    for name, want in (("FPARec", d**2 + 2 * k * n), ("PARec", d**2 + n**2)):
        layer = experiment(name).model.trm_encoder.layer[0].multi_head_attention
        norm = sum(p.numel() for p in layer.LayerNorm.parameters())
        assert sum(p.numel() for p in layer.parameters()) - norm == want


@pytest.mark.parametrize("n_heads", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "options", [{}, {"positional_mask": "after_softmax"}, {"position": ["average"]}], ids=str
)
def test_products_without_the_zeros(
    experiment, monkeypatch, n_heads: int, size: int, options: dict
) -> None:
    """Loss and gradients of long histories, in blocks of rows, are those of full squares."""
    given = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0, "n_heads": n_heads}
    made = experiment("FPARec", **given, **options)
    model = made.model.double()
    batch = max(made.trainer.training_loader(made.loaders["train"]), key=lambda b: b.width)
    found, products = [], []

    def counted(*given: Any) -> Tensor:
        products.append(given)
        return triangular.triangular_product(*given)

    monkeypatch.setattr(positional_attention, "triangular_product", counted)
    for block in (10**6, size):
        monkeypatch.setitem(triangular.BLOCK, "cpu", block)
        loss = model.window_loss(batch)
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
        used = block == size and batch.width >= BLOCKS * size
        heads = 1 if "position" in options else n_heads
        assert len(products) == used * heads * len(model.trm_encoder.layer)
    for full, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, full, rtol=1e-9, atol=1e-12)
