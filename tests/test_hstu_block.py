"""HSTU's block against loops, and with schemes, models and options."""

from __future__ import annotations

import pytest
import reference
import torch
from schemes import (
    LENGTHS,
    D,
    N,
    block,
    context,
    rows_of,
    scheme,
    shake,
)
from test_time_baselines import Model, draw_times, flat
from torch import Tensor

from recbole_pos.config.defaults import plugin_defaults
from recbole_pos.errors import UsageError
from recbole_pos.layers import chunks
from recbole_pos.layers.attention import MultiHeadAttention
from recbole_pos.layers.hooks import AttentionPosition, replaces_attention
from recbole_pos.layers.hstu import HSTULayer, PointwiseAttention, pointwise_attention
from recbole_pos.model.models import MODELS
from recbole_pos.position.compose import Compose
from recbole_pos.position.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("double")


def transposed(layer: PointwiseAttention, x: Tensor, own: list[float]) -> Tensor:
    """One sequence through HSTU's block, in loops."""
    h = reference.layer_norm(x, layer.LayerNorm.weight, layer.LayerNorm.bias, 1e-8)
    names = ("gate", "value", "query", "key")
    u, v, q, k = (torch.stack([getattr(layer, name)(row) for row in h]) for name in names)
    for part in (u, v, q, k):
        for value in part.view(-1):
            value.copy_(reference.silu(value.item()))
    schemes, t = layer.position.schemes, len(x)
    mixed = []
    for head in range(layer.n_heads):
        columns = slice(head * layer.head_size, (head + 1) * layer.head_size)
        qh, kh, vh = q[:, columns], k[:, columns], v[:, columns]
        bias = [[0.0] * t for _ in range(t)]
        if "rope" in schemes:
            qh, kh = (reference.rotate(part, 10000.0) for part in (qh, kh))
        if "kernel" in schemes:
            up, low = schemes["kernel"].U.matrix(t), schemes["kernel"].L.matrix(t)
            kh = torch.stack([sum(up[i, j] * kh[j] for j in range(i + 1)) for i in range(t)])
            vh = torch.stack([sum(low[i, j] * vh[j] for j in range(i + 1)) for i in range(t)])
        if "hstu" in schemes:
            bias = reference.hstu_bias(own, schemes["hstu"].distance, schemes["hstu"].time)
        mixed.append(reference.pointwise_attention(qh, kh, vh, bias, N))
    normed = reference.layer_norm(
        torch.cat(mixed, 1), layer.gate_norm.weight, layer.gate_norm.bias, 1e-8
    )
    return layer.dense(normed * u) + x


@pytest.mark.parametrize("names", [[], ["hstu"], ["rope", "kernel", "hstu"]], ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_hstu_block(names: list[str], heads: int) -> None:
    position = Compose({name: scheme(name, heads) for name in names})
    layer = HSTULayer(block(n_heads=heads), position)
    shake(layer)
    times, x = draw_times(), torch.randn(sum(LENGTHS), D)
    with torch.no_grad():
        out = layer(x, context(times=flat(times)))
        for rows, own in zip(rows_of(LENGTHS), times, strict=True):
            want = transposed(layer.multi_head_attention, x[rows], own)
            torch.testing.assert_close(out[rows], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "shape", [None, (5, 5), (2, 1, 5), (1, 1, 5, 5), (6, 1, 5, 5), (6, 2, 5, 5)]
)
@pytest.mark.parametrize("elements", [2**20, 2 * 50, 1])
def test_gradients_of_pointwise_attention(monkeypatch, shape, elements: int) -> None:
    """Against autograd, for biases of any shape, in one chunk and in several."""
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", elements)
    inputs = [torch.randn(6, 2, 5, D, requires_grad=True) for _ in range(3)]
    bias = None if shape is None else torch.randn(shape, requires_grad=True)
    wanted = inputs if bias is None else [*inputs, bias]
    q, k, v = inputs
    logits = q @ k.transpose(-1, -2) + (0 if bias is None else bias)
    plain = (logits * logits.sigmoid() / 7).tril() @ v
    out = pointwise_attention(q, k, v, bias, 7)
    torch.testing.assert_close(out, plain)
    g = torch.randn_like(plain)
    got = torch.autograd.grad((out * g).sum(), wanted)
    torch.testing.assert_close(got, torch.autograd.grad((plain * g).sum(), wanted))


@pytest.mark.parametrize("name", ["nope", "t5"])
def test_the_hstu_block_needs_no_tensor_of_batch_times_pairs(monkeypatch, name: str) -> None:
    b, t, heads = 16, 40, 2
    layer = HSTULayer(block(), scheme(name, heads, n=t))
    x, ctx = torch.randn(b * t, D, requires_grad=True), context([t] * b, t)
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", 2 * heads * t * t)  # two sequences
    with torch.profiler.profile(profile_memory=True) as profile:
        layer(x, ctx).pow(2).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < b * heads * t * t * 8 / 2


def test_weights_of_the_hstu_block_are_what_multiplies_the_values() -> None:
    layer = PointwiseAttention(block(), Compose({"hstu": scheme("hstu", 2)}))
    shake(layer)
    x, ctx = torch.randn(sum(LENGTHS), D), context()
    weights = layer.weights(x, ctx)
    assert weights.shape == (len(LENGTHS), 2, N, N) and torch.equal(weights, weights.tril())
    query, key, value, gate = layer._parts(x)
    values = layer._places(query, key, value, ctx)[2]
    mixed = ctx.unpad((weights @ values).transpose(1, 2), "start").flatten(1)
    want = x + layer.dense(layer.gate_norm(mixed) * gate.flatten(1))
    torch.testing.assert_close(layer(x, ctx), want)


def test_dropout_on_the_weights_of_the_hstu_block() -> None:
    layer = HSTULayer(block(attn_dropout=0.5), Compose({"hstu": scheme("hstu", 2)}))
    shake(layer)
    x, ctx = torch.randn(sum(LENGTHS), D), context()
    full = layer.eval()(x, ctx)
    torch.testing.assert_close(layer(x, ctx), full)
    first, second = (layer.train()(x, ctx) for _ in range(2))
    assert not torch.allclose(first, full) and not torch.allclose(first, second)
    plain = PointwiseAttention(block(), layer.multi_head_attention.position)
    plain.load_state_dict(layer.multi_head_attention.state_dict())
    torch.testing.assert_close(plain.train()(x, ctx), full)


def test_what_walks_attention_finds_the_hstu_block() -> None:
    for layer in Model(["hstu"], "hstu").layers.layer:
        attention = layer.multi_head_attention
        assert isinstance(attention, MultiHeadAttention)
        assert type(attention.position.schemes["hstu"]) is SCHEMES["hstu"]
        assert [type(m) for m in layer.modules() if type(m).__name__ == "FeedForward"] == []


@pytest.mark.parametrize("name", [n for n in SCHEMES if issubclass(SCHEMES[n], AttentionPosition)])
def test_the_hstu_block_takes_a_scheme_or_says_why_not(name: str) -> None:
    """Whatever replaces attention has no place in it."""
    position = Compose({name: scheme(name, 2)})
    if replaces_attention(SCHEMES[name]):
        with pytest.raises(UsageError, match=f"block: hstu .* {name} replaces attention"):
            PointwiseAttention(block(), position)
        with pytest.raises(UsageError, match=r"block: hstu .* replaces attention"):
            PointwiseAttention(block(), position.schemes[name])
    else:
        x = torch.randn(sum(LENGTHS), D)
        assert HSTULayer(block(), position)(x, context()).isfinite().all()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("FPARec", {}, "block: hstu has an attention of its own, and fparec replaces attention"),
        ("PosSASRec", {"norm": "post"}, "norm .*block.* hstu"),
    ],
)
def test_bad_options(experiment, model: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        experiment(model, **{"block": "hstu", **options})


@pytest.mark.parametrize("model", [m for m in MODELS if "block" in plugin_defaults(m)])
@pytest.mark.parametrize(
    "position",
    [["nope"], ["hstu"], ["time_learned", "hstu"], ["learned", "rope", "kernel"]],
    ids=str,
)
def test_the_hstu_block_runs_in_every_model(experiment, model: str, position: list[str]) -> None:
    """Trains, and one history scores alike alone and in a batch."""
    torch.set_default_dtype(torch.float32)
    made = experiment(model, position=position, block="hstu")
    loader = made.trainer.training_loader(made.loaders["train"])
    losses = [made.trainer._train_epoch(loader, epoch)["loss"] for epoch in range(3)]
    assert losses[2] < losses[0]
    rows = next(iter(made.loaders["test"]))[0]
    net = made.model.eval()
    with torch.inference_mode():
        together = net.full_sort_predict(rows)
        torch.testing.assert_close(net.full_sort_predict(rows[3:4])[0], together[3])
