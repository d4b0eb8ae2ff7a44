"""Angles that a network learns of times, and channels of content, order and time; against loops."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from schemes import (
    LENGTHS,
    N,
    attend,
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

from recbole_pos.errors import UsageError

pytestmark = pytest.mark.usefixtures("double")
DAY = 86400.0


def siren_angles(position: torch.nn.Module, times: list[float], planes: int) -> list[list[float]]:
    """Number by number."""
    found = []
    for n, t in enumerate(times):
        u = [math.log(1 + (t - times[0]) / DAY) / 10]
        for period in (DAY, 7 * DAY):
            turn = 2 * math.pi * (t % period) / period  # without whole turns, which take digits
            u += [math.sin(turn), math.cos(turn)]
        u.append(1.0)
        row = []
        for plane in range(planes):
            angle = n * 10_000.0 ** (-plane / planes)
            for unit in range(len(position.sine)):
                wave = sum(a * x for a, x in zip(position.sine[unit].tolist(), u, strict=True))
                angle += position.sine_out[plane, unit].item() * math.sin(30.0 * wave)
                x = sum(b * x for b, x in zip(position.smooth[unit].tolist(), u, strict=True))
                gelu = x * (1 + math.erf(x / math.sqrt(2))) / 2
                angle += position.smooth_out[plane, unit].item() * gelu
            row.append(angle)
        found.append(row)
    return found


@pytest.mark.parametrize("heads", [1, 2])
def test_siren_rope(heads: int) -> None:
    position = scheme("siren_rope", heads, siren_width=3)
    shake(position)

    def want(q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
        angles = siren_angles(position, times_of([len(q)]).tolist(), q.size(1) // 2)
        q, k = (reference.turn(x, angles) for x in (q, k))
        return reference.dot_product_attention(q, k, v)

    compare(position, want, heads)


def test_a_fresh_siren_is_rope() -> None:
    inputs = qkv(sum(LENGTHS), 2)
    want = dot_product(scheme("rope", 2), *inputs)
    torch.testing.assert_close(dot_product(scheme("siren_rope", 2), *inputs), want)


def test_every_weight_of_a_siren_learns() -> None:
    position = scheme("siren_rope", 2)
    shake(position)
    dot_product(position, *qkv(sum(LENGTHS), 2)).pow(2).sum().backward()
    for name, weight in position.named_parameters():
        assert weight.grad.isfinite().all() and weight.grad.abs().sum() > 0, name


def channels(position, q: Tensor, k: Tensor, v: Tensor, times: list[float]) -> Tensor:
    """One head of one sequence."""
    content, order, _ = position.sizes
    out = torch.zeros_like(v)
    for i in range(len(q)):
        past = range(i + 1)
        logits = [
            [float(q[i] @ k[j]) / math.sqrt(q.size(1)) for j in past],
            [position.distance[i - j].item() for j in past],
            [position.time[reference.log_bucket(times[i] - times[j], 128)].item() for j in past],
        ]
        ends = ((0, content), (content, content + order), (content + order, v.size(1)))
        for row, (begin, end) in zip(logits, ends, strict=True):
            weights = [math.exp(x) for x in row]
            for j in past:
                out[i, begin:end] += weights[j] / sum(weights) * v[j, begin:end]
    return out


@pytest.mark.parametrize("heads", [1, 2])
def test_channels(heads: int) -> None:
    position = scheme("channels", heads)
    shake(position)
    q, k, v = qkv(sum(LENGTHS), heads)
    out = attend(position, q, k, v, context())
    for rows, length in zip(rows_of(LENGTHS), LENGTHS, strict=True):
        times = times_of([length]).tolist()
        for head in range(heads):
            want = channels(position, *(x[rows, head] for x in (q, k, v)), times)
            torch.testing.assert_close(out[rows, head], want, rtol=1e-10, atol=1e-10)


def test_channels_have_parts_of_the_head() -> None:
    assert scheme("channels", 1).sizes == (4, 2, 2)
    assert scheme("channels", 1, channel_share=0.0).sizes == (6, 1, 1)
    with pytest.raises(UsageError, match=r"channel_share: 0.5 of a head of 8 .* none for content"):
        scheme("channels", 1, channel_share=0.5)


@pytest.mark.parametrize("name", ["siren_rope", "channels"])
def test_times_say_something(name: str) -> None:
    """A later first event changes what follows: nothing of time is dropped on the way."""
    position, inputs = scheme(name, 1), qkv(N)
    shake(position)
    times = torch.arange(N, dtype=torch.float64) * 3 * DAY + 1.5e9
    moved = times.clone()
    moved[0] -= 11 * DAY
    found = []
    for one in (times, moved):
        ctx = context([N], times=one)
        if name == "channels":
            found.append(attend(position, *inputs, ctx))
        else:
            found.append(position.rotate(*inputs[:2], ctx)[0])
    assert (found[0] - found[1])[1:].abs().amax(-1).gt(1e-6).all()
