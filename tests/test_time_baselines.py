"""Time in buckets (a learned input encoding, HSTU's bias) and HSTU's block."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from schemes import (
    LENGTHS,
    D,
    N,
    block,
    compare,
    context,
    dot_product,
    qkv,
    rows_of,
    scheme,
    shake,
    times_of,
)
from torch import Tensor

from recbole_pos.config.defaults import plugin_defaults
from recbole_pos.errors import UsageError
from recbole_pos.layers import chunks
from recbole_pos.layers.attention import MultiHeadAttention, TransformerEncoder, TransformerLayer
from recbole_pos.layers.hooks import AttentionPosition, Dimensions, replaces_attention
from recbole_pos.layers.hstu import HSTULayer, PointwiseAttention, pointwise_attention
from recbole_pos.model.models import MODELS
from recbole_pos.position import time_buckets
from recbole_pos.position.build import build_schemes
from recbole_pos.position.compose import Compose
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.yaml_files import ROOT, read_yaml

pytestmark = pytest.mark.usefixtures("double")
BLOCKS = {"transformer": TransformerLayer, "hstu": HSTULayer}
TIMED = [["time_learned"], ["hstu"], ["time_learned", "hstu", "rope"]]
TEN_YEARS = 10 * 365.25 * 86400


def draw_times(lengths: list[int] = LENGTHS) -> list[list[float]]:
    """Times around 1.5e9 that differ from sequence to sequence, with ties and long pauses."""
    found = []
    for length in lengths:
        gaps = (torch.rand(length) * 18).exp() * (torch.rand(length) > 0.2)
        found.append((1.5e9 + (gaps.round() / 2).cumsum(0)).tolist())
    return found


def flat(times: list[list[float]]) -> Tensor:
    return torch.tensor([t for row in times for t in row], dtype=torch.float64)


class Model(torch.nn.Module):
    """Input schemes and two blocks, all parameters random."""

    def __init__(self, names: list[str], kind: str = "transformer", **options) -> None:
        super().__init__()
        for name in names:
            options = {**read_yaml(ROOT / "position" / f"{name}.yaml"), **options}
        dimensions = Dimensions(max_length=N, hidden_size=D, n_heads=2, initializer_range=1.0)
        schemes = build_schemes(names, dimensions, options)
        self.first = schemes.input
        self.layers = TransformerEncoder(block(), 2, schemes.attention, BLOCKS[kind])
        shake(self)

    def forward(self, x: Tensor, ctx) -> Tensor:
        return self.layers(self.first(x, ctx), ctx)


def test_log_bucket() -> None:
    edges = [math.exp(0.301 * k) for k in range(1, 80)]
    seconds = [-5.0, 0.0, 0.5, 1.0, 1.35, 2.0, 60.0, 86400.0, 3e7, 1.5e9, 1e300]
    seconds += [factor * edge for edge in edges for factor in (1 - 1e-9, 1 + 1e-9)]
    for buckets in (1, 5, 128):
        want = [reference.log_bucket(s, buckets) for s in seconds]
        found = time_buckets.log_bucket(torch.tensor(seconds), buckets)
        assert found.tolist() == want and max(want) == min(buckets, 128) - 1
    seconds = torch.arange(200_000.0)
    want = [reference.log_bucket(s, 128) for s in seconds.tolist()]
    assert time_buckets.log_bucket(seconds, 128).tolist() == want


@pytest.mark.parametrize("since", ["first", "previous"])
@pytest.mark.parametrize("buckets", [7, 128])
def test_time_embedding(since: str, buckets: int) -> None:
    position = scheme("time_learned", time_from=since, time_buckets=buckets)
    times, x = draw_times(), torch.randn(sum(LENGTHS), D)
    out = position(x, context(times=flat(times)))
    for rows, own in zip(rows_of(LENGTHS), times, strict=True):
        want = reference.time_embedding(x[rows], own, position.weight, since)
        assert torch.equal(out[rows], want)


@pytest.mark.parametrize("buckets", [5, 128])
@pytest.mark.parametrize("heads", [1, 2])
def test_hstu_bias(heads: int, buckets: int) -> None:
    position = scheme("hstu", heads, hstu_time_buckets=buckets)
    shake(position)

    def want(q, k, v, head):
        bias = reference.hstu_bias(times_of([len(q)]).tolist(), position.distance, position.time)
        return reference.biased_attention(q, k, v, bias)

    compare(position, want, heads)


def test_seconds_count_after_years() -> None:
    """In float32, times this far from the first event would be 16 s apart."""
    own = [1.5e9, 1.7e9, 1.7e9 + 1, 1.7e9 + 4, 1.7e9 + 9]
    ctx, x = context([5], times=flat([own])), torch.zeros(5, D)
    position = scheme("time_learned", time_from="previous")
    want = reference.time_embedding(x, own, position.weight, "previous")
    assert torch.equal(position(x, ctx), want)
    buckets = time_buckets.pair_places(ctx, 128)[0] % 128
    for i in range(5):
        want = [reference.log_bucket(own[i] - own[j], 128) for j in range(i + 1)]
        assert buckets[i, : i + 1].tolist() == want


@pytest.mark.parametrize(("elements", "lanes"), [(2**20, 32), (2**20, 4), (100, 4), (1, 1)])
def test_gradients_of_the_hstu_bias(monkeypatch, elements: int, lanes: int) -> None:
    """In one chunk and in several, with more lanes than events and with fewer."""
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", elements)
    monkeypatch.setattr(time_buckets, "LANES", lanes)
    position, times = scheme("hstu", 2), draw_times()
    shake(position)
    ctx, q = context(times=flat(times)), torch.randn(len(LENGTHS), 2, N, D // 2)
    bias = position.bias(q, q, ctx)
    assert bias.shape == (len(LENGTHS), 1, N, N) and bias.isfinite().all()
    g = torch.randn(len(LENGTHS), 2, N, N).tril()
    got = torch.autograd.grad((bias * g).sum(), [position.time, position.distance])
    want = torch.zeros(128), torch.zeros(N)
    for b, (own, length) in enumerate(zip(times, LENGTHS, strict=True)):
        own = [s - own[0] for s in own] + [0.0] * (N - length)  # padding is at the oldest event
        for i in range(N):
            for j in range(i + 1):
                value = g[b, :, i, j].sum()
                want[0][reference.log_bucket(own[i] - own[j], 128)] += value
                want[1][i - j] += value
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_many_float32_gradients_add_up_to_what_they_are() -> None:
    """A bucket may get millions of them: summed one after the other they would lose digits."""
    torch.set_default_dtype(torch.float32)
    position, g = scheme("hstu", n=1000), torch.rand(4, 1, 1000, 1000)
    ctx = context([1000] * 4, 1000, times=torch.full([4000], 1.5e9, dtype=torch.float64))
    position.bias(g, g, ctx).backward(g)
    assert position.time.grad[0].item() == pytest.approx(g.double().sum().item(), rel=1e-6)


def test_a_fresh_hstu_bias_changes_nothing() -> None:
    q, k, v = qkv(sum(LENGTHS), 2)
    position = scheme("hstu", 2)
    assert all((parameter == 0).all() for parameter in position.parameters())
    plain = dot_product(scheme("nope", 2), q, k, v)
    torch.testing.assert_close(dot_product(position, q, k, v), plain, rtol=1e-12, atol=1e-12)


def test_layers_share_the_table_of_buckets(monkeypatch) -> None:
    made = []
    make = time_buckets.pair_places
    monkeypatch.setattr(time_buckets, "pair_places", lambda *a: made.append(1) or make(*a))
    model = Model(["hstu"])
    for calls in (1, 2):
        model(torch.randn(sum(LENGTHS), D), context())
        assert len(made) == calls


@pytest.mark.parametrize("since", ["first", "previous"])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("names", TIMED, ids=str)
def test_later_times_reach_nothing_before_them(names: list[str], kind: str, since: str) -> None:
    """Exactly: whatever the times of later events are, of any sequence. And times do matter."""
    model = Model(names, kind, time_from=since)
    times, x = draw_times(), torch.randn(sum(LENGTHS), D)
    before = model(x, context(times=flat(times)))
    for cut in (1, 3, 5):
        moved = [own[:cut] + [1e5 + 7 * s - 6 * own[0] for s in own[cut:]] for own in times]
        ctx = context(times=flat(moved))
        after = model(x, ctx)
        assert torch.equal(after[ctx.index < cut], before[ctx.index < cut])
        assert not torch.isclose(after[ctx.index >= cut], before[ctx.index >= cut]).any(-1).all()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("names", [*TIMED, [], ["rope", "kernel"], ["cape"]], ids=str)
def test_no_gradient_from_the_future(names: list[str], kind: str) -> None:
    model, ctx = Model(names, kind), context(times=flat(draw_times()))
    x = torch.randn(sum(LENGTHS), D, requires_grad=True)
    out = model(x, ctx)
    for t in range(len(out)):
        (grad,) = torch.autograd.grad(out[t].sum(), x, retain_graph=True)
        allowed = (ctx.row == ctx.row[t]) & (ctx.index <= ctx.index[t])
        assert (grad[~allowed] == 0).all()
        assert (grad[allowed] != 0).any(-1).all()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("names", [*TIMED, [], ["rope", "kernel"], ["cape"]], ids=str)
def test_neighbours_in_the_batch_change_nothing(names: list[str], kind: str) -> None:
    model, times, x = Model(names, kind), draw_times(), torch.randn(sum(LENGTHS), D)
    together = model(x, context(times=flat(times)))
    for rows, length, own in zip(rows_of(LENGTHS), LENGTHS, times, strict=True):
        alone = model(x[rows], context([length], times=flat([own])))
        torch.testing.assert_close(alone, together[rows], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("names", TIMED, ids=str)
def test_only_differences_of_times_count(names: list[str], kind: str) -> None:
    model, times, x = Model(names, kind), flat(draw_times()), torch.randn(sum(LENGTHS), D)
    later = model(x, context(times=times + TEN_YEARS))
    assert torch.equal(later, model(x, context(times=times)))


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


@pytest.mark.parametrize("kind", BLOCKS)
def test_half_precision_comes_close(kind: str) -> None:
    torch.set_default_dtype(torch.float32)
    model, x = Model(["time_learned", "hstu", "rope"], kind), torch.randn(sum(LENGTHS), D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(x, context())
        half.float().sum().backward()
    full = model(x, context())
    assert (half.float() - full).norm() < 0.05 * full.norm()
    assert all(p.grad.isfinite().all() for p in model.parameters())


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
        ("PosSASRec", {"norm": "post"}, "norm: post does not go with block: hstu"),
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
