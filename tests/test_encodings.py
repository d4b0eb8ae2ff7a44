"""Encodings at the input against their equations, and the PosRec paper's theorems about them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import reference
import torch
from schemes import LENGTHS, D, context, rows_of, scheme
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.additive import PositionEncoding
from recbole_pos.position.awareness import (
    backward_columns,
    combines_linearly,
    encodings,
    forward_columns,
    is_backward_aware,
    is_forward_aware,
    is_unique,
    list_events,
)

pytestmark = pytest.mark.usefixtures("double")
N = 20
LEARNED = ("lpe", "lrpe", "alpe", "lpe2d", "ldpe")
DUAL = ("spe", "rspe", "aspe", "spe2d", "dpe", *LEARNED)
OLDEST, NEWEST = {"position_from": "oldest"}, {"position_from": "newest"}
ENDS = [(name, ends) for name in ("learned", "sinusoidal") for ends in (OLDEST, NEWEST)]


def make(name: str, d: int = 8, n: int = N, **options) -> PositionEncoding:
    return scheme(name, n=n, d=d, **options)


def spe(place: int, columns: int, d: float) -> list[float]:
    """Equation 1, its first columns (Vaswani et al., section 3.5)."""
    angles = [place / 10000 ** (2 * (column // 2) / d) for column in range(columns)]
    return [math.cos(a) if column % 2 else math.sin(a) for column, a in enumerate(angles)]


def formula(name: str, w: list[list[float]], pos: int, length: int, d: int) -> list[float]:
    """Equations 1, 4 to 6, 17 and 24, section 5.3, and rows counted from either end."""
    back, half, last = length - pos - 1, d - d // 2, length - 1
    frequency = [10000 ** (-2 * (column // 2) / d) for column in range(d)]
    formulas: dict[str, Callable[[], list[float]]] = {
        "spe": lambda: spe(pos, d, d),
        "rspe": lambda: spe(back, d, d),
        "aspe": lambda: [
            math.cos(pos * f) + math.sin((last - pos) * f)
            if column % 2
            else math.sin(pos * f) + math.cos((last - pos) * f)
            for column, f in enumerate(frequency)
        ],
        "spe2d": lambda: spe(pos, half, d / 2) + spe(length, d // 2, d / 2),
        "dpe": lambda: spe(pos, half, d) + spe(back, d // 2, d),
        "lpe": lambda: w[pos],
        "lrpe": lambda: w[back],
        "alpe": lambda: [w[pos][j] + w[back][d + j] for j in range(d)],
        "lpe2d": lambda: w[pos][:half] + w[last][half:],
        "ldpe": lambda: w[pos][:half] + w[back][half:],
        "learned oldest": lambda: w[pos],
        "learned newest": lambda: w[N - 1 - back],
        "sinusoidal oldest": lambda: spe(pos, d, d),
        "sinusoidal newest": lambda: spe(N - 1 - back, d, d),
    }
    return formulas[name]()


@pytest.mark.parametrize("d", [2, 5, 8])
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in DUAL), *ENDS], ids=str)
def test_encodings_equal_their_equations(name: str, options: dict, d: int) -> None:
    """By ``encode``, and packed; of an item that comes again, by its first and its last place."""
    encoding = make(name, d, **options)
    called = " ".join([name, *options.values()])
    weight = encoding.weight.tolist()
    position, length = list_events(N)
    want = torch.tensor(
        [formula(called, weight, p, n, d) for p, n in zip(position.tolist(), length.tolist())]  # noqa: B905
    )
    found = encodings(encoding, position, length)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(encoding.rows(position, length - 1 - position).detach(), want)
    x, ctx = torch.randn(sum(LENGTHS), d), context(n=N)
    for rows in rows_of(LENGTHS):
        t = rows.stop - rows.start
        code = torch.tensor([formula(called, weight, p, t, d) for p in range(t)])
        torch.testing.assert_close(encoding(x, ctx)[rows], x[rows] + code)
    first, last, four = 0, 2, torch.tensor(4)  # v1 v2 v1 v3 (section 4.3.3)
    row = encoding.rows(torch.tensor(first), four - 1 - last, four)
    one, other = (torch.tensor(formula(called, weight, p, 4, d)) for p in (first, last))
    half = d - d // 2
    if name in ("dpe", "ldpe"):
        torch.testing.assert_close(row, torch.cat((one[:half], other[half:])))
    elif name not in ("aspe", "alpe"):
        by_end = name in ("rspe", "lrpe") or options == NEWEST
        torch.testing.assert_close(row, other if by_end else one)


@pytest.mark.parametrize("since", ["first", "previous"])
@pytest.mark.parametrize("buckets", [7, 128])
def test_time_embedding(since: str, buckets: int) -> None:
    position = scheme("time_learned", time_from=since, time_buckets=buckets)
    ctx, x = context(), torch.randn(sum(LENGTHS), D)
    for rows in rows_of(LENGTHS):
        times = ctx.times[rows].tolist()
        want = reference.time_embedding(x[rows], times, position.weight, since)
        assert torch.equal(position(x, ctx)[rows], want)


AWARE = {
    **dict.fromkeys(("spe", "lpe"), "forward"),
    **dict.fromkeys(("rspe", "lrpe"), "backward"),
    **dict.fromkeys(("dpe", "ldpe"), "forward backward"),
    **dict.fromkeys(("aspe", "alpe"), ""),
    # section 3.4 says neither; its half of positions meets definition 3.1
    **dict.fromkeys(("spe2d", "lpe2d"), "forward"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", AWARE)
def test_awareness(name: str, dtype: torch.dtype) -> None:
    """Theorems 3.4 and 4.1, corollary 3.6, section 3.4; property 3.3 holds for all."""
    torch.set_default_dtype(dtype)
    for d in (2, 7, 64):
        encoding, half = make(name, d), d - d // 2
        for longest in (2, N) if dtype == torch.float64 else (N,):
            assert is_forward_aware(encoding, longest) == ("forward" in AWARE[name])
            assert is_backward_aware(encoding, longest) == ("backward" in AWARE[name])
        assert is_unique(encoding, N)
        if name in ("dpe", "ldpe", "spe2d", "lpe2d"):  # theorem 4.1 names the columns
            assert forward_columns(encoding, N) == list(range(half))
            backward = list(range(half, d)) if "backward" in AWARE[name] else []
            assert backward_columns(encoding, N) == backward


class _Own(PositionEncoding):
    """Any function of both ends, as [..., 2]."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(Dimensions(N, 2, 1, 1.0))
        self.function = function

    def rows(self, forward, backward, length=None) -> Tensor:
        given = (forward.double(), backward.double(), length.double())
        return torch.stack((self.function(*given), torch.ones_like(forward, dtype=float)), -1)


def test_awareness_needs_both_directions_of_the_definitions() -> None:
    """The paper's examples of section 3.2; equal for equal places and different for others."""
    assert forward_columns(_Own(lambda f, b, n: f), N) == [0, 1]  # a constant does no harm
    assert backward_columns(_Own(lambda f, b, n: b), N) == [0, 1]
    assert not is_backward_aware(_Own(lambda f, b, n: f), N)
    constant = _Own(lambda f, b, n: 0 * f)
    assert not is_forward_aware(constant, N) and not is_unique(constant, N)
    # equal for equal positions, but the two last positions share a vector
    ends = _Own(lambda f, b, n: f.clamp(max=N - 2))
    assert not is_forward_aware(ends, N) and is_forward_aware(ends, N - 1)
    assert not is_unique(ends, N) and is_unique(ends, N - 1)
    noisy = _Own(lambda f, b, n: f + 1e-12 * n)
    assert is_forward_aware(noisy, N) and not is_forward_aware(noisy, N, tolerance=0)
    with pytest.raises(ValueError, match="2 events"):
        is_forward_aware(noisy, 1)


@pytest.mark.parametrize("d", [3, 8])
def test_linear_combination(d: int) -> None:
    """Equation 15: of SPE, RSPE and either half of DPE, counted from its own end; not of ASPE."""
    place, length, half = torch.arange(N), torch.tensor(N), d - d // 2
    assert combines_linearly(make("spe", d).encode(place, length), 1e-12)
    assert combines_linearly(make("rspe", d).encode(place, length).flip(0), 1e-12)
    dpe = make("dpe", d).encode(place, length)
    assert combines_linearly(dpe[:, :half], 1e-12)
    assert combines_linearly(dpe[:, half:].flip(0), 1e-12)
    if d > 3:  # a half of two columns or more counts the wrong way round
        assert not combines_linearly(dpe[:, half:])
    for n in (2, N):
        added = make("aspe", d).encode(torch.arange(n), torch.tensor(n))
        assert not combines_linearly(added) and not combines_linearly(added.flip(0))
    flat = torch.stack((torch.zeros(N), torch.arange(N) + 2.0), dim=1)
    assert not combines_linearly(flat)  # its sines do, its cosines do not


@pytest.mark.parametrize("name", LEARNED)
def test_parameters(name: str) -> None:
    """LDPE has as many as LPE (section 5.3); sums need no halves, halves two columns."""
    encoding, times = make(name, 7), 2 if name == "alpe" else 1
    assert sum(p.numel() for p in encoding.parameters()) == times * N * 7
    if name in ("lpe2d", "ldpe"):
        with pytest.raises(UsageError, match="hidden_size"):
            make(name, 1)
    else:
        assert make(name, 1).weight.shape == (N, times)
