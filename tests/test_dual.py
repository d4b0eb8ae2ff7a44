"""Encodings of the PosRec paper against their equations, and its theorems about them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from schemes import LENGTHS, D, context, rows_of
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.additive import PositionEncoding
from recbole_pos.position.awareness import (
    backward_columns,
    combines_linearly,
    encodings,
    events,
    forward_columns,
    is_backward_aware,
    is_forward_aware,
    is_unique,
)
from recbole_pos.position.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("double")
N = 20
FIXED = ("spe", "rspe", "aspe", "spe2d", "dpe")
LEARNED = ("lpe", "lrpe", "alpe", "lpe2d", "ldpe")
SIZES = (2, 3, 5, 6, 7, 8, 12)


def make(name: str, d: int = 8, n: int = N, **options) -> PositionEncoding:
    sizes = Dimensions(max_length=n, hidden_size=d, n_heads=1, initializer_range=1.0)
    return SCHEMES[name](sizes, **options)


def spe(place: int, columns: int, d: float) -> list[float]:
    """Equation 1, its first columns."""
    out = []
    for column in range(columns):
        angle = place / 10000 ** (2 * (column // 2) / d)
        out.append(math.sin(angle) if column % 2 == 0 else math.cos(angle))
    return out


def aspe(pos: int, length: int, d: int) -> list[float]:
    """Equation 17 as it is written."""
    out = []
    for column in range(d):
        f = 10000 ** (2 * (column // 2) / d)
        x, last = pos / f, (length - 1) / f
        if column % 2 == 0:
            out.append(math.sin(x) + math.cos(last - x))
        else:
            out.append(math.cos(x) + math.sin(last - x))
    return out


def equation_24(pos: int, length: int, d: int) -> list[float]:
    half = d - d // 2
    first, second = [], []
    for column in range(half):
        turn = math.sin if column % 2 == 0 else math.cos
        f = 10000 ** (4 * (column // 2) / d)
        first.append(turn(pos / f))
        second.append(turn(length / f))
    return first + second[: d // 2]


def learned(name: str, w: Tensor, pos: int, length: int, d: int) -> list[float]:
    """Rows of the tables by name: section 5.3 and equation 6."""
    back, half = length - pos - 1, d - d // 2
    if name == "lpe":
        return [float(w[pos, j]) for j in range(d)]
    if name == "lrpe":
        return [float(w[back, j]) for j in range(d)]
    if name == "alpe":
        return [float(w[pos, j] + w[back, d + j]) for j in range(d)]
    other = back if name == "ldpe" else length - 1
    return [float(w[pos if j < half else other, j]) for j in range(d)]


def formula(scheme: PositionEncoding, name: str, pos: int, length: int, d: int) -> list[float]:
    back, half = length - pos - 1, d - d // 2
    fixed: dict[str, Callable[[], list[float]]] = {
        "spe": lambda: spe(pos, d, d),
        "rspe": lambda: spe(back, d, d),
        "aspe": lambda: aspe(pos, length, d),
        "spe2d": lambda: equation_24(pos, length, d),
        "dpe": lambda: spe(pos, half, d) + spe(back, d // 2, d),
    }
    return fixed[name]() if name in fixed else learned(name, scheme.weight.detach(), pos, length, d)


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("name", FIXED + LEARNED)
def test_equals_its_equation(name: str, d: int) -> None:
    scheme = make(name, d)
    position, length = events(N)
    found = encodings(scheme, position, length)
    assert found.shape == (N * (N + 1) // 2, d)
    want = [formula(scheme, name, p, n, d) for p, n in zip(position, length, strict=True)]
    want = torch.tensor([[float(value) for value in row] for row in want])
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FIXED + LEARNED)
def test_a_batch_gets_what_encode_says(name: str) -> None:
    """Packed sequences of several lengths; ``encode`` of blocks of any shape."""
    scheme, x = make(name, D), torch.randn(sum(LENGTHS), D)
    out = scheme(x, context(n=N))
    for rows, length in zip(rows_of(LENGTHS), LENGTHS, strict=True):
        want = scheme.encode(torch.arange(length), torch.tensor(length))
        torch.testing.assert_close(out[rows], x[rows] + want)
    position, length = torch.tensor([[0, 2], [1, 4]]), torch.tensor([[3], [5]])
    block = scheme.encode(position, length)
    assert block.shape == (2, 2, D)
    torch.testing.assert_close(block[1, 0], scheme.encode(position[1, 0], length[1, 0]))


def test_a_repeated_item_has_its_first_and_its_last_place() -> None:
    """Section 4.3.3: v1 v2 v1 v3, where v1 is 0 from the start and 1 from the end, and l is 4."""
    first, last, length = torch.tensor([0, 1, 3]), torch.tensor([2, 1, 3]), torch.tensor(4)
    for d in (7, 8):
        half = d - d // 2
        for name in FIXED + LEARNED:
            scheme = make(name, d)
            found = scheme.rows(first, length - 1 - last, length)
            for node, row in enumerate(found):
                of_first = scheme.encode(first[node], length)
                of_last = scheme.encode(last[node], length)
                want = {
                    **dict.fromkeys(("spe", "lpe", "spe2d", "lpe2d"), of_first),
                    **dict.fromkeys(("rspe", "lrpe"), of_last),
                    **dict.fromkeys(("dpe", "ldpe"), torch.cat((of_first[:half], of_last[half:]))),
                }
                if name in want:
                    torch.testing.assert_close(row, want[name])
                elif first[node] == last[node]:
                    torch.testing.assert_close(row, of_first)
        parts = [make(name, d) for name in ("alpe", "lpe", "lrpe")]
        with torch.no_grad():
            parts[0].weight.copy_(torch.cat((parts[1].weight, parts[2].weight), dim=1))
        places = (first, length - 1 - last, length)
        added, one, other = (scheme.rows(*places) for scheme in parts)
        torch.testing.assert_close(added, one + other)


@pytest.mark.parametrize("name", FIXED + LEARNED)
def test_length_follows_from_both_ends(name: str) -> None:
    scheme, (position, length) = make(name), events(N)
    torch.testing.assert_close(
        scheme.rows(position, length - 1 - position), scheme.encode(position, length)
    )


def test_the_older_names() -> None:
    """``sinusoidal`` and ``learned`` count from one end, too."""
    position, length = events(N)

    def same(name: str, older: str, position_from: str, turn: bool = False) -> None:
        one, other = make(name), make(older, position_from=position_from)
        if older == "learned":
            with torch.no_grad():
                other.weight.copy_(one.weight.flip(0) if turn else one.weight)
        assert torch.equal(one.encode(position, length), other.encode(position, length))

    same("spe", "sinusoidal", "oldest")
    same("lpe", "learned", "oldest")
    same("lrpe", "learned", "newest", turn=True)
    for name in ("sinusoidal", "learned"):
        assert is_forward_aware(make(name, position_from="oldest"), N)
        newest = make(name, position_from="newest")
        assert is_backward_aware(newest, N) and not is_forward_aware(newest, N)


AWARE = {
    **dict.fromkeys(("spe", "lpe"), "forward"),
    **dict.fromkeys(("rspe", "lrpe"), "backward"),
    **dict.fromkeys(("dpe", "ldpe"), "forward backward"),
    **dict.fromkeys(("aspe", "alpe"), ""),
    # section 3.4 says neither; its half of positions alone meets definition 3.1, see below
    **dict.fromkeys(("spe2d", "lpe2d"), "forward"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [*SIZES, 64])
@pytest.mark.parametrize("name", AWARE)
def test_awareness(name: str, d: int, dtype: torch.dtype) -> None:
    """Theorems 3.4 and 4.1, corollary 3.6, section 3.4; property 3.3 holds for all."""
    torch.set_default_dtype(dtype)
    scheme = make(name, d)
    for longest in (2, N) if dtype == torch.float64 else (N,):
        assert is_forward_aware(scheme, longest) == ("forward" in AWARE[name])
        assert is_backward_aware(scheme, longest) == ("backward" in AWARE[name])
    assert is_unique(scheme, N)


def test_columns_of_the_halves() -> None:
    """Theorem 4.1 names them; 2DSPE's columns of positions are those of definition 3.1."""
    for d in (7, 8):
        half = d - d // 2
        for name in ("dpe", "ldpe"):
            assert forward_columns(make(name, d), N) == list(range(half))
            assert backward_columns(make(name, d), N) == list(range(half, d))
        for name in ("spe2d", "lpe2d"):
            assert forward_columns(make(name, d), N) == list(range(half))
            assert backward_columns(make(name, d), N) == []


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
    assert not is_forward_aware(constant, N) and not is_backward_aware(constant, N)
    assert not is_unique(constant, N)
    # equal for equal positions, but the two last positions share a vector
    ends = _Own(lambda f, b, n: f.clamp(max=N - 2))
    assert not is_forward_aware(ends, N) and is_forward_aware(ends, N - 1)
    assert not is_unique(ends, N) and is_unique(ends, N - 1)
    # within tolerance
    noisy = _Own(lambda f, b, n: f + 1e-12 * n)
    assert is_forward_aware(noisy, N) and not is_forward_aware(noisy, N, tolerance=0)
    with pytest.raises(ValueError, match="2 events"):
        is_forward_aware(noisy, 1)


def test_plain_addition_is_symmetric() -> None:
    """Section 3.4: without the exchange, both ends of a session have the same vector."""
    one, other = make("spe"), make("rspe")
    position, length = events(N)
    back = length - 1 - position
    both = one.encode(position, length) + other.encode(position, length)
    mirrored = one.encode(back, length) + other.encode(back, length)
    torch.testing.assert_close(both, mirrored)
    torch.testing.assert_close(
        both[:3], both[[0, 2, 1]]
    )  # the two events of length 2 are rows 1, 2


@pytest.mark.parametrize("d", SIZES)
def test_linear_combination(d: int) -> None:
    """Equation 15: of SPE, RSPE and either half of DPE, counted from its own end; not of ASPE."""
    place, length = torch.arange(N), torch.tensor(N)
    half = d - d // 2
    assert combines_linearly(make("spe", d).encode(place, length), 1e-12)
    assert combines_linearly(make("rspe", d).encode(place, length).flip(0), 1e-12)
    dpe = make("dpe", d).encode(place, length)
    assert combines_linearly(dpe[:, :half], 1e-12)
    assert combines_linearly(dpe[:, half:].flip(0), 1e-12)
    if d > 3:  # a half of two columns or more counts the wrong way round
        assert not combines_linearly(dpe[:, half:])
    for n in (2, 7, N):
        added = make("aspe", d).encode(torch.arange(n), torch.tensor(n))
        assert not combines_linearly(added) and not combines_linearly(added.flip(0))
    flat = torch.stack((torch.zeros(N), torch.arange(N) + 2.0), dim=1)
    assert not combines_linearly(flat)  # its sines do, its cosines do not
    torch.set_default_dtype(torch.float32)
    assert combines_linearly(make("spe", d, n=200).weight)


def test_aspe_is_turned_by_the_same_angle_in_every_session() -> None:
    """Equation 23 concludes otherwise: from a sign in equation 18, sin(L - X) = ... - cos L sin X.

    So what k events on adds is linear after all, though not in the form of equation 15.
    """
    d, k = 8, 3
    scheme = make("aspe", d)
    w = 10000.0 ** (-torch.arange(0, d, 2) / d)
    for n in range(k + 1, N + 1):
        vectors = scheme.encode(torch.arange(n), torch.tensor(n))
        sine, cosine = vectors[:-k, 0::2], vectors[:-k, 1::2]
        torch.testing.assert_close(vectors[k:, 0::2], sine * (k * w).cos() + cosine * (k * w).sin())
        torch.testing.assert_close(vectors[k:, 1::2], cosine * (k * w).cos() - sine * (k * w).sin())
        start = math.pi / 4 - (n - 1) * w / 2
        turn = torch.arange(n)[:, None] * w + start
        torch.testing.assert_close(vectors[:, 0::2], 2 * start.cos() * turn.sin())
        torch.testing.assert_close(vectors[:, 1::2], 2 * start.cos() * turn.cos())


@pytest.mark.parametrize(
    ("name", "times"), [(name, 2 if name == "alpe" else 1) for name in LEARNED]
)
def test_parameters(name: str, times: int) -> None:
    """LDPE has as many as LPE (section 5.3)."""
    scheme = make(name, 7)
    assert sum(p.numel() for p in scheme.parameters()) == times * N * 7
    scheme(torch.zeros(N, 7), context([N], N)).pow(2).sum().backward()
    used = scheme.weight.grad.ne(0)
    if name == "lpe2d":  # a batch of one length reads one row of lengths
        assert used[:, :4].all() and used[:, 4:].any(1).tolist() == [False] * (N - 1) + [True]
    else:
        assert used.all()
    assert all(not list(make(fixed).parameters()) for fixed in FIXED)


@pytest.mark.parametrize("name", ["spe2d", "lpe2d", "dpe", "ldpe"])
def test_one_column_has_no_halves(name: str) -> None:
    with pytest.raises(UsageError, match="hidden_size"):
        make(name, 1)


def test_sums_need_no_even_size() -> None:
    """Both halves of an encoding that is added have all columns."""
    one = Dimensions(max_length=4, hidden_size=1, n_heads=1, initializer_range=1.0)
    assert SCHEMES["alpe"](one).weight.shape == (4, 2)
    with pytest.raises(UsageError, match="halves hidden_size"):
        SCHEMES["ldpe"](one)
