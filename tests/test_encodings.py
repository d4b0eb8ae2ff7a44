"""Encodings at the input against their equations, and the PosRec paper's theorems about them."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import load_script
from reference import log_bucket
from schemes import LENGTHS, D, context, rows_of, scheme, times_of

from recbole_pos.position.additive import PositionEncoding

pytestmark = pytest.mark.usefixtures("double")
N = 20
LEARNED = ("lpe", "lrpe", "alpe", "lpe2d", "ldpe")
DUAL = ("spe", "rspe", "aspe", "spe2d", "dpe", *LEARNED)
ENDS = [(name, end) for name in ("learned", "sinusoidal") for end in ("oldest", "newest")]


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("posrec/encodings", monkeypatch)


def make(name: str, d: int = 8, n: int = N, **options) -> PositionEncoding:
    return scheme(name, n=n, d=d, **options)


def spe(place: int, columns: int, d: float, exchanged: bool = False) -> list[float]:
    """Equation 1, its first columns (Vaswani et al., section 3.5); sine and cosine exchanged."""
    angles = [place / 10000 ** (2 * (column // 2) / d) for column in range(columns)]
    odd = [column % 2 != exchanged for column in range(columns)]
    return [math.cos(a) if cos else math.sin(a) for cos, a in zip(odd, angles, strict=True)]


def formula(name: str, w: list[list[float]], pos: int, back: int, length: int) -> list[float]:
    """Equations 1, 4 to 6, 17 and 24, section 5.3, and rows counted from either end.

    Args:
        w: the table; two tables side by side for ``aspe`` and ``alpe``.
        pos, back, length: pos and l - pos - 1, of an item's first and last place; l.
    """
    d = len(w[0]) // 2 if name in ("aspe", "alpe") else len(w[0])
    half, last = d - d // 2, length - 1
    formulas: dict[str, Callable[[], list[float]]] = {
        "spe": lambda: spe(pos, d, d),
        "rspe": lambda: spe(back, d, d),
        "aspe": lambda: [a + b for a, b in zip(spe(pos, d, d), spe(back, d, d, True), strict=True)],
        "spe2d": lambda: spe(pos, half, d / 2) + spe(length, d // 2, d / 2),
        "dpe": lambda: spe(pos, half, d) + spe(back, d // 2, d),
        "lpe": lambda: w[pos],
        "lrpe": lambda: w[back],
        "alpe": lambda: [a + b for a, b in zip(w[pos][:d], w[back][d:], strict=True)],
        "lpe2d": lambda: w[pos][:half] + w[last][half:],
        "ldpe": lambda: w[pos][:half] + w[back][half:],
        "learned oldest": lambda: w[pos],
        "learned newest": lambda: w[N - 1 - back],
        "sinusoidal oldest": lambda: spe(pos, d, d),
        "sinusoidal newest": lambda: spe(N - 1 - back, d, d),
    }
    return formulas[name]()


@pytest.mark.parametrize("d", [2, 5, 8])
@pytest.mark.parametrize(("name", "end"), [*((name, "") for name in DUAL), *ENDS])
def test_encodings_equal_their_equations(encodings, name: str, end: str, d: int) -> None:
    """Of all places, packed, and of an item that comes again: by its first and its last place."""
    encoding = make(name, d, **({"position_from": end} if end else {}))
    called, weight = f"{name} {end}".strip(), encoding.weight.tolist()
    found, position, length = encodings.list_vectors(encoding, N)
    places = zip(position.tolist(), length.tolist(), strict=True)
    want = torch.tensor([formula(called, weight, p, n - 1 - p, n) for p, n in places])
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    x, ctx = torch.randn(sum(LENGTHS), d), context(n=N)
    for rows in rows_of(LENGTHS):
        t = rows.stop - rows.start
        code = torch.tensor([formula(called, weight, p, t - 1 - p, t) for p in range(t)])
        torch.testing.assert_close(encoding(x, ctx)[rows], x[rows] + code)
    first, back, four = torch.tensor([0, 1, 4])  # v1 v2 v1 v3 (section 4.3.3)
    row = torch.tensor(formula(called, weight, 0, 1, 4))
    torch.testing.assert_close(encoding.rows(first, back, four).detach(), row)


@pytest.mark.parametrize("since", ["first", "previous"])
@pytest.mark.parametrize("buckets", [7, 128])
def test_time_embedding(since: str, buckets: int) -> None:
    position = scheme("time_learned", time_from=since, time_buckets=buckets)
    ctx, x = context(), torch.randn(sum(LENGTHS), D)
    for rows in rows_of(LENGTHS):
        times = ctx.times[rows].tolist()
        before = [times[0]] * len(times) if since == "first" else [times[0], *times[:-1]]
        spans = [log_bucket(b - a, buckets) for a, b in zip(before, times, strict=True)]
        assert torch.equal(position(x, ctx)[rows], x[rows] + position.weight[spans])


@pytest.mark.parametrize(("scale", "function"), [("sqrt", math.sqrt), ("log", math.log)])
def test_request_age(scale: str, function: Any) -> None:
    """x_j + T[bucket(t - t_j)], where t is of the newest event, or of the request after it."""
    position = scheme("request_age", age_buckets=500, age_scale=scale)
    x, newest = torch.randn(sum(LENGTHS), D), torch.tensor(LENGTHS).cumsum(0) - 1
    requests = times_of(LENGTHS)[newest] + torch.tensor([0.0, 59.0, 61.0, 1e7])
    for at in (None, requests):
        ctx = context(at=at)
        for number, rows in enumerate(rows_of(LENGTHS)):
            times = ctx.times[rows].tolist()
            asked = times[-1] if at is None else at[number].item()
            buckets = [function(max(asked - time, 1e-6) / 60) for time in times]
            buckets = [int(min(max(bucket, 0), 499)) for bucket in buckets]
            assert torch.equal(position(x, ctx)[rows], x[rows] + position.weight[buckets])


COLUMNS = {  # that are equal for equal places from the start, and from the end
    **dict.fromkeys(("spe", "lpe"), ("all", "none")),
    **dict.fromkeys(("rspe", "lrpe"), ("none", "all")),
    **dict.fromkeys(("dpe", "ldpe"), ("first", "second")),  # theorem 4.1
    **dict.fromkeys(("aspe", "alpe"), ("none", "none")),
    # section 3.4 says neither; its half of positions meets definition 3.1
    **dict.fromkeys(("spe2d", "lpe2d"), ("first", "none")),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_awareness(encodings, name: str) -> None:
    """Theorems 3.4 and 4.1, corollary 3.6, section 3.4; property 3.3 holds for all."""
    for d in (2, 7, 64):
        encoding, half = make(name, d), d - d // 2
        columns = {"all": range(d), "first": range(half), "second": range(half, d), "none": ()}
        forward, backward = (list(columns[which]) for which in COLUMNS[name])
        assert encodings.describe(encoding, N) == (forward, backward, True)
