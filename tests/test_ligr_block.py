"""Gated residual blocks: against loops, and in models."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from schemes import LENGTHS, D, N, block, context, rows_of, scheme, shake
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import TransformerEncoder
from recbole_pos.layers.ligr import LiGRLayer
from recbole_pos.position.compose import Compose


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("heads", [1, 2])
def test_ligr_block(heads: int) -> None:
    layer = LiGRLayer(block(n_heads=heads, inner_size=5), Compose({"nope": scheme("nope", heads)}))
    shake(layer)
    x = torch.randn(sum(LENGTHS), D)
    found = layer(x, context())
    kept = torch.tensor([3, 0, 19])
    torch.testing.assert_close(layer(x, context(), kept), found[kept])
    attention, feed = layer.multi_head_attention, layer.feed_forward
    for rows in rows_of(LENGTHS):
        own = x[rows]
        q, k, v = (_affine(_norm(own, attention), part) for part in attention.projections)
        size, parts = D // heads, []
        for head in range(heads):
            one = slice(head * size, (head + 1) * size)
            parts.append(reference.dot_product_attention(q[:, one], k[:, one], v[:, one]))
        out = _affine(torch.cat(parts, 1), attention.dense)
        own = own + _sigmoid(_affine(own, attention.gate)) * out
        both = _norm(own, feed) @ feed.dense_1.weight.T
        hidden = both[:, :5] * _sigmoid(both[:, :5]) * both[:, 5:]
        want = own + _sigmoid(_affine(own, feed.gate)) * (hidden @ feed.dense_2.weight.T)
        torch.testing.assert_close(found[rows], want, rtol=1e-10, atol=1e-10)


def _affine(x: Tensor, layer: torch.nn.Linear) -> Tensor:
    return x @ layer.weight.T + layer.bias


def _sigmoid(x: Tensor) -> Tensor:
    flat = [1 / (1 + math.exp(-value)) for value in x.flatten().tolist()]
    return torch.tensor(flat).view_as(x)


def _norm(x: Tensor, of: torch.nn.Module) -> Tensor:
    norm = of.LayerNorm
    centred = x - x.mean(1, keepdim=True)
    scale = (centred.pow(2).mean(1, keepdim=True) + norm.eps).sqrt()
    return centred / scale * norm.weight + norm.bias


@pytest.mark.usefixtures("double")
def test_a_block_sees_no_future_and_no_neighbour() -> None:
    encoder = TransformerEncoder(
        block(), 2, lambda: Compose({"rope": scheme("rope", 2)}), LiGRLayer
    )
    shake(encoder)
    x = torch.randn(sum(LENGTHS), D, requires_grad=True)
    row = LENGTHS[0] + 4  # the fifth event of the second sequence
    (grad,) = torch.autograd.grad(encoder(x, context())[row].pow(2).sum(), x)
    seen = torch.zeros(len(x), dtype=torch.bool)
    seen[LENGTHS[0] : row + 1] = True
    assert (grad[seen].abs().sum(1) > 0).all() and (grad[~seen] == 0).all()
    alone = encoder(x[LENGTHS[0] : LENGTHS[0] + N], context([N]))
    torch.testing.assert_close(encoder(x, context())[rows_of(LENGTHS)[1]], alone)


@pytest.mark.parametrize("position", [["learned"], ["kernel"], ["fparec"], ["time_decay", "rope"]])
def test_models_train_with_it(experiment, position: list[str]) -> None:
    made = experiment("PosSASRec", block="ligr", position=position)
    assert all(isinstance(layer, LiGRLayer) for layer in made.model.trm_encoder.layer)
    made.trainer.fit(made.loaders["train"], verbose=False)
    assert math.isfinite(made.trainer.progress.history[-1]["loss"])


def test_what_does_not_go_with_it(experiment) -> None:
    with pytest.raises(UsageError, match="norm .*block.* ligr"):
        experiment("PosSASRec", block="ligr", norm="post")
