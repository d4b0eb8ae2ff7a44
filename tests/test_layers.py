"""Blocks and layers: HSTU's and LiGR's against their equations, dropout, memory, products."""

import functools
from collections.abc import Callable

import pytest
import reference
import schemes
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import LENGTHS, D, N, block, composed, context, heads_of, rows_of, scheme, shake
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers import large_products
from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.forward import MultiHeadAttention
from recbole_pos.layers.gated_blocks import PointwiseAttention, build_layer
from recbole_pos.layers.hooks import AttentionPosition
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position.build import Compose

pytestmark = pytest.mark.usefixtures("double")


def by_heads(
    parts: list[Tensor], ctx: SequenceBatch, heads: int, attention: Callable[..., Tensor]
) -> Tensor:
    """[m, d] the reference for every head of every sequence, of q, k and v [m, d]."""
    out = torch.zeros_like(parts[2])
    for rows, head in heads_of(ctx, heads):
        columns = slice(head.head * D // heads, (head.head + 1) * D // heads)
        out[rows, columns] = attention(*(x[rows, columns] for x in parts), head)
    return out


@pytest.mark.parametrize(("names", "heads"), [([], 1), (["hstu"], 2), (["rope", "kernel"], 2)])
@torch.no_grad()
def test_hstu_block_equals_equations_1_to_3(names: list[str], heads: int) -> None:
    position, options = composed(names, heads, N, D, {})
    layer = build_layer("hstu", block(n_heads=heads), position)
    ctx, x = context(), torch.randn(20, D)
    shake(layer)
    attention = layer.multi_head_attention
    h, parts = attention.LayerNorm(x), position.parts()
    u, q, k, v = (F.silu(getattr(attention, p)(h)) for p in ("gate", "query", "key", "value"))

    def equation_2(q: Tensor, k: Tensor, v: Tensor, head: reference.Head) -> Tensor:
        places = reference.fill_places(parts, options, q, k, v, head)
        return reference.pointwise_attention(*places, N)

    mixed = by_heads([q, k, v], ctx, heads, equation_2)
    want = attention.dense(attention.gate_norm(mixed) * u) + x
    torch.testing.assert_close(layer(x, ctx), want, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_ligr_block_equals_its_equations() -> None:
    position, options = composed(["rope"], 2, N, D, {})
    layer = build_layer("ligr", block(inner_size=5), position)
    ctx, x = context(), torch.randn(20, D)
    shake(layer)
    out, attention, feed = layer(x, ctx), layer.multi_head_attention, layer.feed_forward
    h, parts = attention.LayerNorm(x), position.parts()
    projected = [part(h) for part in (attention.query, attention.key, attention.value)]
    equation = functools.partial(reference.attention, parts, options)
    mixed = by_heads(projected, ctx, 2, equation)
    x = x + attention.gate(x).sigmoid() * attention.dense(mixed)
    left, right = (feed.LayerNorm(x) @ feed.dense_1.weight.T).chunk(2, 1)
    want = x + feed.gate(x).sigmoid() * ((F.silu(left) * right) @ feed.dense_2.weight.T)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", schemes.REPLACING)
def test_hstu_has_an_attention_of_its_own(name: str) -> None:
    with pytest.raises(UsageError, match=f"^block: hstu .*{name} replaces attention"):
        PointwiseAttention(block(), composed([name], 2, N, D, {})[0])


@pytest.mark.parametrize("name", [n for n in schemes.ATTENTION if n not in schemes.REPLACING])
@torch.no_grad()
def test_the_weights_that_are_shown_are_those_of_the_layer(name: str) -> None:
    """Weights times values are what attention gives, of HSTU's block too."""
    position, _ = composed([name], 2, N, D, {})
    ctx, x = context(), torch.randn(sum(LENGTHS), D)
    for norm in ("pre", "post"):
        layer = MultiHeadAttention(block(norm=norm, output=False), position).eval()
        read = layer.LayerNorm(x) if norm == "pre" else x
        mixed = layer.weights(x, ctx) @ layer.apply_hooks(*layer.project(read), ctx)[2]
        out = ctx.unpad(mixed.transpose(1, 2), "start").reshape(x.shape)
        torch.testing.assert_close(out, layer.attention(read, ctx))
    layer = PointwiseAttention(block(), position)
    query, key, value, gate = layer._project_gated(x)
    mixed = layer.weights(x, ctx) @ layer.apply_hooks(query, key, value, ctx)[2]
    mixed = ctx.unpad(mixed.transpose(1, 2), "start").flatten(1)
    want = x + layer.dense(layer.gate_norm(mixed) * gate.flatten(1))
    torch.testing.assert_close(layer(x, ctx), want)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("transformer", n) for n in ("t5", *schemes.REPLACING)), ("hstu", "t5"), ("ligr", "nope")],
)
def test_dropout_in_training_only(kind: str, name: str) -> None:
    for where in ("hidden_dropout_prob", "attn_dropout_prob"):
        layer = build_layer(kind, block(**{where: 0.5}), composed([name], 2, N, D, {})[0])
        x, ctx = torch.randn(sum(LENGTHS), D), context()
        assert not torch.equal(layer(x, ctx), layer(x, ctx))
        assert torch.equal(layer.eval()(x, ctx), layer(x, ctx))


@pytest.mark.parametrize(
    ("kind", "name"), [("transformer", "t5"), ("hstu", "nope"), ("hstu", "t5")]
)
def test_no_tensor_of_batch_times_pairs(monkeypatch, kind: str, name: str) -> None:
    """In chunks: the same output and gradients, and nothing of size [b, h, t, t]."""
    b, t = 16, 40
    layer = build_layer(kind, block(), Compose({name: scheme(name, 2, n=t)}))
    shake(layer)
    x, ctx = torch.randn(b * t, D, requires_grad=True), context([t] * b, t)
    wanted, g = [x, *layer.parameters()], torch.randn(b * t, D)
    want = torch.autograd.grad((layer(x, ctx) * g).sum(), wanted)
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", 2 * 2 * t * t)  # two sequences
    with torch.profiler.profile(profile_memory=True) as profile:
        got = torch.autograd.grad((layer(x, ctx) * g).sum(), wanted)
    torch.testing.assert_close(got, want)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < b * 2 * t * t * 8 / 2


class _PlainBias(AttentionPosition):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))

    def bias(self, q: Tensor, k: Tensor, ctx: SequenceBatch) -> Tensor:
        return self.weight


@pytest.mark.parametrize("kind", ["transformer", "hstu"])
@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5), (8, 1, 5, 5), (8, 2, 5, 5)])
def test_learned_biases_of_any_shape(monkeypatch, kind: str, shape: tuple[int, ...]) -> None:
    """Whatever is broadcastable to [b, h, t, t]: in one chunk and in several, as autograd."""
    layer = build_layer(kind, block(), Compose({"own": _PlainBias(*shape)}))
    x, ctx = torch.randn(40, D, requires_grad=True), context([5] * 8)

    def compute(elements: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", elements)
        out = layer(x, ctx)
        return out, torch.autograd.grad(out.pow(2).sum(), [x, *layer.parameters()])

    whole = compute(2**20)
    for elements in (2 * 50, 1):
        torch.testing.assert_close(compute(elements), whole)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["nope", "t5", "hstu"])  # no bias, one for all, one a sequence
@pytest.mark.parametrize("elements", [9 * 50, 2 * 50])
def test_dropout_on_weights(monkeypatch, elements: int, name: str, causal: bool) -> None:
    """In one chunk and in several: output and gradients are those of weights times the mask."""
    options = block(attn_dropout_prob=0.4, causal=causal)
    layer = build_layer("transformer", options, Compose({name: scheme(name, 2, n=5)}))
    shake(layer)
    attention = layer.multi_head_attention
    x, ctx = torch.randn(36, D, requires_grad=True), context([5, 3] * 4 + [4])
    kept = attention.attn_dropout.draw_kept((9, 2, 5, 5))
    monkeypatch.setattr(attention.attn_dropout, "draw_kept", lambda shape: kept.view(shape))
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", elements)
    normed = attention.LayerNorm(x) if attention.pre_norm else x
    out = attention.attention(normed, ctx)
    value = attention.project(normed)[2]
    dropped = attention.weights(x, ctx) * kept / (1 - 102 / 256)  # 0.4 in 256ths
    mixed = dropped @ ctx.pad(value, "start").transpose(1, 2)
    want = attention.dense(ctx.unpad(mixed.transpose(1, 2), "start").flatten(1))
    wanted = [x, *(p for p in attention.parameters() if p.requires_grad)]
    how = {"retain_graph": True, "allow_unused": True}
    found, expected = (torch.autograd.grad(y.pow(2).sum(), wanted, **how) for y in (out, want))
    torch.testing.assert_close((out, found), (want, expected))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_pad_and_unpad_are_inverse(lengths: list[int], at_end: bool, time_major: bool) -> None:
    ctx, align = context(lengths), "end" if at_end else "start"
    x = torch.randn(sum(lengths), 2, 3)
    padded = ctx.pad(x, align, time_major)
    assert torch.equal(ctx.unpad(padded, align, time_major), x)
    padded = padded.transpose(0, 1) if time_major else padded
    for b, (rows, length) in enumerate(zip(rows_of(lengths), lengths, strict=True)):
        first = ctx.width - length if at_end else 0
        assert torch.equal(padded[b, first : first + length], x[rows])
    assert padded.abs().sum() == pytest.approx(x.abs().sum().item())  # padding is zero


@pytest.mark.parametrize("p", [1e-3, 0.2, 0.9])
def test_dropout_keeps_the_expectation(p: float) -> None:
    """In 256ths, at least one; eight elements share a random number, but nothing else."""
    x = torch.ones(8 * 200_000, requires_grad=True)
    out = Dropout(p)(x)
    assert (out == 0).double().mean().item() == pytest.approx(max(p, 1 / 256), abs=4e-3)
    assert out.mean().item() == pytest.approx(1, abs=1e-2) and out.unique().numel() == 2
    kept = (out > 0).double().view(-1, 8)
    assert (torch.corrcoef(kept.T) - torch.eye(8)).abs().max() < 0.01
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], out)
