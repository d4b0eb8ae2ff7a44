"""Every position scheme against its formula, and the properties all of them must have."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import LENGTHS, D, N, attend, block, context, qkv, rows_of, scheme
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import MultiHeadAttention, TransformerEncoder
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition, Dimensions, InputPosition
from recbole_pos.position.build import build_schemes
from recbole_pos.position.compose import Compose
from recbole_pos.position.positional_attention import PositionalAttention
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.yaml_files import ROOT, read_yaml

pytestmark = pytest.mark.usefixtures("double")
ATTENTION = [n for n, c in SCHEMES.items() if issubclass(c, AttentionPosition)]
POSITIONAL = [n for n, c in SCHEMES.items() if issubclass(c, PositionalAttention)]


def expected(name: str, position, q: Tensor, k: Tensor, v: Tensor, head: int, n: int) -> Tensor:
    """The loop-level reference for one sequence and head."""
    e = v.size(1)
    if name == "linear_attention":
        return reference.linear_attention(q, k, v)
    if name == "token_mixing":
        return reference.token_mixing(position.W1, position.W2, v)
    if name in ("parec", "fparec"):
        r = position.R[head] if name == "parec" else position.R1[head] @ position.R2[head].T
        if not position.normalised:
            return reference.masked_after_softmax(r, v, n, e)
        return reference.positional_attention(reference.learned_weights(r, e), v, n)
    return reference.positional_attention(reference.fixed_weights(name, n), v, n)


# schemes that replace attention, and read no time, have their formula in reference.py; others are
# tested where they are written
FORMULAS = [n for n in ATTENTION if SCHEMES[n].attend is not AttentionPosition.attend]
FORMULAS = [n for n in FORMULAS if not SCHEMES[n].needs_time]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", FORMULAS)
def test_equals_its_formula(name: str, heads: int) -> None:
    masks = ["before_softmax", "after_softmax"] if name in ("parec", "fparec") else [None]
    for mask in masks:
        position = scheme(name, heads, **({"positional_mask": mask} if mask else {}))
        ctx = context()
        q, k, v = qkv(sum(LENGTHS), heads)
        out = attend(position, q, k, v, ctx)
        start = 0
        for length in LENGTHS:
            rows = slice(start, start + length)
            for head in range(heads):
                parts = (x[rows, head] for x in (q, k, v))
                want = expected(name, position, *parts, head, N)
                torch.testing.assert_close(out[rows, head], want, rtol=1e-10, atol=1e-10)
            start += length


def test_extreme_weights_stay_finite() -> None:
    """A short sequence beside a long one, with logits whose exponentials underflow."""
    position = scheme("parec")
    with torch.no_grad():
        position.R.zero_()[:, :, :2] = 3e4
    v = torch.randn(2 + N, 1, D)
    out = attend(position, v, v, v, context([2, N]))
    assert out.isfinite().all()


def test_linear_attention_across_chunks() -> None:
    """Longer than two chunks, so that the running state matters."""
    n = 150
    q, k, v = qkv(n + 70)
    out = attend(scheme("linear_attention", n=n), q, k, v, context([n, 70], n))
    want = [reference.linear_attention(*(x[r, 0] for x in (q, k, v))) for r in rows_of([n, 70])]
    torch.testing.assert_close(out[:, 0], torch.cat(want), rtol=1e-9, atol=1e-9)


def test_linear_attention_has_no_rounding_of_later_events() -> None:
    """Not even in the last bits, though events stand in one chunk of the running sum."""
    n, query = 190, 150
    q, k, v = (x.float() for x in qkv(n))
    one = attend(scheme("linear_attention", n=n), q, k, v, context([n], n))
    k[query + 1 :] *= 100
    v[query + 1 :] *= 1000
    other = attend(scheme("linear_attention", n=n), q, k, v, context([n], n))
    assert torch.equal(one[: query + 1], other[: query + 1])


@pytest.mark.parametrize("position_from", ["oldest", "newest"])
def test_learned_positions(position_from: str) -> None:
    position = scheme("learned", position_from=position_from)
    x = torch.randn(sum(LENGTHS), D)
    out = position(x, context())
    for rows, length in zip(rows_of(LENGTHS), LENGTHS, strict=True):
        first = 0 if position_from == "oldest" else N - length
        torch.testing.assert_close(out[rows], x[rows] + position.weight[first : first + length])


@pytest.mark.parametrize("name", POSITIONAL)
def test_rows_sum_to_one(name: str) -> None:
    """Equation 15, over the events that exist: equal values come out unchanged."""
    ones = torch.ones(sum(LENGTHS), 1, D)
    out = attend(scheme(name), ones, ones, ones, context())
    torch.testing.assert_close(out, ones)


@pytest.mark.parametrize("name", ["parec", "fparec"])
def test_mask_after_softmax_loses_the_future(name: str) -> None:
    """As equation 6 is written, only the newest row of a full sequence sums to one."""
    ones = torch.ones(N, 1, D)
    out = attend(scheme(name, positional_mask="after_softmax"), ones, ones, ones, context([N]))
    assert (out[:-1] < 1 - 1e-6).all()
    torch.testing.assert_close(out[-1], ones[-1])


def encoder(
    names: list[str], n: int = N, norm: str = "pre"
) -> tuple[InputPosition, torch.nn.Module]:
    options: dict[str, object] = {}
    for name in names:
        options.update(read_yaml(ROOT / "position" / f"{name}.yaml"))
    dimensions = Dimensions(max_length=n, hidden_size=D, n_heads=2, initializer_range=0.5)
    schemes = build_schemes(names, dimensions, options)
    layers = TransformerEncoder(block(norm=norm), 2, schemes.attention)
    with torch.no_grad():  # kernels start as the identity and tables at zero: too tame for a test
        for layer in layers.layer:
            for parameter in layer.multi_head_attention.position.parameters():
                parameter += 0.5 * torch.randn_like(parameter)
    return schemes.input, layers


STACKS = [
    [],
    *([name] for name in SCHEMES),
    ["learned", "fparec"],
    ["rope", "kernel"],
    ["cape", "kernel"],
    ["sinusoidal", "rope", "t5", "kernel"],
]


@pytest.mark.parametrize("names", STACKS, ids=str)
def test_no_gradient_from_the_future(names: list[str]) -> None:
    """The output at step t has exactly zero gradient to every later input, in all sequences."""
    first, layers = encoder(names)
    ctx = context()
    x = torch.randn(sum(LENGTHS), D, requires_grad=True)
    out = layers(first(x, ctx), ctx)
    for t in range(len(out)):
        (grad,) = torch.autograd.grad(out[t].sum(), x, retain_graph=True)
        allowed = (ctx.row == ctx.row[t]) & (ctx.index <= ctx.index[t])
        assert (grad[~allowed] == 0).all()
        assert grad[allowed].abs().sum() > 0


@pytest.mark.parametrize("names", STACKS, ids=str)
def test_neighbours_in_the_batch_change_nothing(names: list[str]) -> None:
    """Padding invariance: a sequence alone, or beside longer ones, gives the same output."""
    first, layers = encoder(names)
    x = torch.randn(sum(LENGTHS), D)
    together = layers(first(x, context()), context())
    for rows, length in zip(rows_of(LENGTHS), LENGTHS, strict=True):
        ctx = context([length])
        torch.testing.assert_close(layers(first(x[rows], ctx), ctx), together[rows])


def test_parameter_counts_of_table_1() -> None:
    """Per attention layer: SASRec 3 d^2, PARec d^2 + n^2, FPARec d^2 + 2 k n."""

    def count(position: AttentionPosition) -> int:
        layer = MultiHeadAttention(block(n_heads=1, bias=False, output=False), position)
        norm = sum(p.numel() for p in layer.LayerNorm.parameters())
        return sum(p.numel() for p in layer.parameters()) - norm

    k = 3
    assert count(AttentionPosition()) == 3 * D**2
    assert count(scheme("parec")) == D**2 + N**2
    assert count(scheme("fparec", positional_rank=k)) == D**2 + 2 * k * N


class _Toy(AttentionPosition):
    """Fills every place of dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.l = torch.rand(N, N).triu(), torch.rand(N, N).tril()

    def rotate(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> tuple[Tensor, Tensor]:
        scale = 1 + ctx.index[:, None, None]
        return q * scale, k * scale

    def mix_keys(self, k: Tensor, ctx: SequenceContext) -> Tensor:
        return self._mix(self.u[: ctx.width, : ctx.width].T, k, ctx)

    def mix_values(self, v: Tensor, ctx: SequenceContext) -> Tensor:
        return self._mix(self.l[: ctx.width, : ctx.width], v, ctx)

    @staticmethod
    def _mix(matrix: Tensor, x: Tensor, ctx: SequenceContext) -> Tensor:
        block = ctx.pad(x, "start")
        return ctx.unpad((matrix @ block.flatten(2)).view(block.shape), "start")

    def bias(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> Tensor:
        t = torch.arange(ctx.width)
        return -0.3 * (t[:, None] - t[None, :]).abs().to(q.dtype)


@pytest.mark.parametrize("compose", [False, True])
def test_every_place_is_where_the_equation_says(compose: bool) -> None:
    """o = softmax(M + B(Rq . U^T(R k))) . L v, against loops; also when composed of one."""
    toy = _Toy()
    position = Compose({"toy": toy}) if compose else toy
    layer = MultiHeadAttention(block(n_heads=1, output=False), position)
    x = torch.randn(sum(LENGTHS), D)
    out = layer(x, context()) - x
    h = reference.layer_norm(x, layer.LayerNorm.weight, layer.LayerNorm.bias, 1e-8)
    for rows in rows_of(LENGTHS):
        q, k, v = (p(h[rows]) for p in (layer.query, layer.key, layer.value))
        t = len(q)
        scale = torch.arange(1, t + 1)[:, None]
        q, k = q * scale, k * scale
        k = torch.stack([sum(toy.u[j, i] * k[j] for j in range(i + 1)) for i in range(t)])
        v = torch.stack([sum(toy.l[i, j] * v[j] for j in range(i + 1)) for i in range(t)])
        for i in range(t):
            logits = [float(q[i] @ k[j]) / D**0.5 - 0.3 * abs(i - j) for j in range(i + 1)]
            weight = torch.tensor(logits).softmax(0)
            want = sum(w * v[j] for j, w in enumerate(weight))
            torch.testing.assert_close(out[rows][i], want, rtol=1e-9, atol=1e-9)


def test_two_replacements_of_attention_cannot_share_a_layer() -> None:
    with pytest.raises(UsageError, match="replaces attention"):
        Compose({name: scheme(name) for name in ("parec", "average")})


def test_dot_product_attention_equals_its_formula() -> None:
    layer = encoder([])[1].layer[0].multi_head_attention
    x = torch.randn(sum(LENGTHS), D)
    q, k, v = layer._project(x)
    out = layer._dot_product(q, k, v, context())
    for rows in rows_of(LENGTHS):
        for head in range(2):
            want = reference.dot_product_attention(q[rows, head], k[rows, head], v[rows, head])
            torch.testing.assert_close(out[rows, head], want)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_pad_and_unpad_are_inverse(lengths: list[int], at_end: bool, time_major: bool) -> None:
    ctx, align = context(lengths), "end" if at_end else "start"
    x = torch.randn(sum(lengths), 2, 3)
    block = ctx.pad(x, align, time_major)
    assert torch.equal(ctx.unpad(block, align, time_major), x)
    block = block.transpose(0, 1) if time_major else block
    for b, (rows, length) in enumerate(zip(rows_of(lengths), lengths, strict=True)):
        first = ctx.width - length if at_end else 0
        assert torch.equal(block[b, first : first + length], x[rows])
    assert block.abs().sum() == pytest.approx(x.abs().sum().item())  # padding is zero


@pytest.mark.parametrize("name", list(SCHEMES))
def test_yaml_holds_exactly_the_options_of_the_class(name: str) -> None:
    assert set(read_yaml(ROOT / "position" / f"{name}.yaml")) == set(SCHEMES[name].options)
