"""Functions of time on the logits, and rotary angles of the calendar; against loops."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from schemes import LENGTHS, D, N, compare, context, dot_product, qkv, scheme, shake, times_of

from recbole_pos.errors import UsageError
from recbole_pos.position.time_decay import log_spans

pytestmark = pytest.mark.usefixtures("double")
DAY = 86400.0
KINDS = ["exponential_power", "power"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 2])
def test_time_decay(kind: str, heads: int) -> None:
    position = scheme("time_decay", heads, decay_kind=kind)
    shake(position)

    def want(q, k, v, head):
        times = times_of([len(q)]).tolist()
        a, s = position.strength[head].item(), math.exp(position.log_reach[head].item())
        b = math.log1p(math.exp(position.raw_power[head].item()))
        bias = [[0.0] * len(q) for _ in times]
        for i, query in enumerate(times):
            for j, key in enumerate(times):
                d = max(query - key, 1e-9)
                decay = 2 ** -((d / s) ** b) if kind == "exponential_power" else (1 + d / s) ** -b
                bias[i][j] = a * decay if d / s < 1e30 else 0.0
        return reference.biased_attention(q, k, v, bias)

    compare(position, want, heads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_decay_changes_nothing_and_falls_by_half(kind: str) -> None:
    position, inputs = scheme("time_decay", 2, decay_kind=kind), qkv(sum(LENGTHS), 2)
    torch.testing.assert_close(
        dot_product(position, *inputs), dot_product(scheme("nope", 2), *inputs)
    )
    with torch.no_grad():
        position.strength.fill_(3.0)
    for head, days in enumerate((0.05, 100.0)):
        log = torch.tensor([[[math.log(days * DAY)]]])
        assert position.curve(log)[head].item() == pytest.approx(1.5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_and_reach_every_number(kind: str) -> None:
    """At equal times, and years apart."""
    position = scheme("time_decay", 2, decay_kind=kind)
    shake(position)
    times = torch.tensor([0.0, 0.0, 1e-3, 1.0, 4e8, 4e8], dtype=torch.float64) + 1.5e9
    ctx = context([6], times=times)
    bias = position.bias(torch.zeros(1, 2, 6, D // 2), torch.zeros(1, 2, 6, D // 2), ctx)
    bias.tril().pow(2).sum().backward()
    for parameter in position.parameters():
        assert parameter.grad.isfinite().all() and (parameter.grad != 0).all()


def test_spans_of_time_are_those_of_a_loop() -> None:
    times = times_of(LENGTHS)
    found = log_spans(context(times=times), torch.float64)
    begin = 0
    for row, length in enumerate(LENGTHS):
        own = times[begin : begin + length].tolist()
        begin += length
        for i in range(length):
            for j in range(i + 1):
                want = math.log(max(own[i] - own[j], 1e-9))
                assert found[row, i, j].item() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("heads", [1, 2])
def test_calendar_rope(heads: int) -> None:
    """Every plane turns query and key by 2 pi n t / period."""
    parts = {"day": DAY, "week": 7 * DAY}
    position = scheme("calendar_rope", heads, calendar_parts=list(parts))

    def want(q, k, v, head):
        times = times_of([len(q)]).tolist()
        angles = [
            [
                2 * math.pi * (seconds - times[0]) / list(parts.values())[plane % 2] * turns
                for plane in range(q.size(1) // 2)
                for turns in [plane // 2 + 1]
            ]
            for seconds in times
        ]
        q, k = (reference.turn(x, angles) for x in (q, k))
        return reference.dot_product_attention(q, k, v)

    compare(position, want, heads)


def test_whole_weeks_are_no_time_at_all() -> None:
    position, inputs = scheme("calendar_rope", calendar_parts=["day", "week"]), qkv(N)
    weeks = torch.arange(N, dtype=torch.float64) ** 2 * 7 * DAY + 1.5e9
    turned = position.rotate(*inputs[:2], context([N], times=weeks))
    for got, want in zip(turned, inputs, strict=False):
        torch.testing.assert_close(got, want)


def test_periods_are_told_in_seconds() -> None:
    position = scheme("calendar_rope", 1, calendar_parts=["day", "week", "year"])
    want = [DAY, 7 * DAY, 365.2425 * DAY, DAY / 2]
    assert position.time_periods().tolist() == [pytest.approx(want)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("time_decay", {"decay_shortest": 3.0, "decay_longest": 2.0}, "decay_shortest must not"),
        ("calendar_rope", {"calendar_parts": ["hour", "day", "week", "month", "year"]}, "4 planes"),
    ],
)
def test_bad_options(name: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scheme(name, **options)
