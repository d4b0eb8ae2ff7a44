"""Time in buckets: a learned input encoding, and HSTU's bias; with both kinds of blocks."""

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

from recbole_pos.layers import chunks
from recbole_pos.layers.attention import TransformerEncoder, TransformerLayer
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.layers.hstu import HSTULayer
from recbole_pos.position import time_buckets
from recbole_pos.position.build import build_schemes
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
