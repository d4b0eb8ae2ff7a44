"""Full cross-entropy and dropout."""

from __future__ import annotations

import pytest
import reference
import torch

from recbole_pos.layers import chunks, losses
from recbole_pos.layers.dropout import Dropout


@pytest.mark.parametrize("chunk", [64, 2**20])
def test_full_cross_entropy_equals_equation_11(monkeypatch, chunk: int) -> None:
    """Value and both gradients, with several chunks and with one."""
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk)
    torch.manual_seed(0)
    m, items, d = 150, 23, 6
    hidden = torch.randn(m, d, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(items, d, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, items, (m,))
    loss = losses.full_cross_entropy(hidden, weight, targets)
    got = torch.autograd.grad(3 * loss, (hidden, weight))
    want = reference.cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(got, torch.autograd.grad(3 * want, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert (got[1][0] == 0).all()  # padding is no candidate


def test_full_cross_entropy_survives_large_logits() -> None:
    """Float32 logits of +-1000: the probability of the target underflows, the loss must not."""
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    loss = losses.full_cross_entropy(hidden, weight, torch.tensor([2]))
    assert loss.item() == 2000
    loss.backward()
    assert hidden.grad.isfinite().all()


def test_full_cross_entropy_holds_no_positions_by_items_tensor() -> None:
    """The largest tensor allocated is far below m x items."""
    m, items, d = 4096, 4000, 8
    hidden = torch.randn(m, d, requires_grad=True)
    weight = torch.randn(items, d, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        losses.full_cross_entropy(hidden, weight, torch.randint(1, items, (m,))).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < m * items * 4 / 8


@pytest.mark.parametrize("chunk", [64, 2**20])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_full_cross_entropy_in_bfloat16(monkeypatch, chunk: int, spread: float) -> None:
    """Value and gradients are as far from float64 as rounding the factors of products allows.

    With u = 2^-8 a factor is off by u of itself, so a logit by D = (2 u + u^2) |h| |w| at most; a
    loss by 2 max D, since log-sum-exp moves by no more than its largest logit; a probability by
    exp(2 max D) - 1 of itself; and their products by 2 u + u^2 of what they add up.
    """
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk)
    torch.manual_seed(0)
    m, items, d = 150, 23, 16
    hidden = (spread * torch.randn(m, d)).requires_grad_()
    weight = (spread * torch.randn(items, d)).requires_grad_()
    targets = torch.randint(1, items, (m,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses.full_cross_entropy(hidden, weight, targets)
    got = torch.autograd.grad(loss, (hidden, weight))
    assert loss.dtype == got[0].dtype == got[1].dtype == torch.float32

    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    want = reference.cross_entropy(h, w, targets)
    exact = torch.autograd.grad(want, (h, w))
    h, w = h.detach(), w.detach()
    two = 2 * 2**-8 + 2**-16
    off = 2 * two * (h.abs() @ w[1:].abs().T).amax(1, keepdim=True)  # [m, 1] of logits, twice
    slack = 1e-5  # of float32, with 16 terms each
    assert 0 < abs(loss.item() - want.item()) < off.mean() + slack
    p = (h @ w[1:].T).softmax(1)
    residual = p.clone()
    residual[torch.arange(m), targets - 1] -= 1
    moved = (p * off.expm1() + two * (residual.abs() + p * off.expm1())) / m  # [m, items - 1]
    for g, e, bound in (
        (got[0], exact[0], moved @ w[1:].abs()),
        (got[1][1:], exact[1][1:], moved.T @ h.abs()),
    ):
        assert ((g - e).abs() <= bound + slack / m).all() and not torch.equal(g, e.float())


def test_sums_of_bfloat16_products_have_all_digits_of_float32() -> None:
    """The loss is that of the rounded factors: neither logits nor log-sum-exp are rounded."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32), torch.randn(50, 32)
    targets = torch.randint(1, 50, (64,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses.full_cross_entropy(hidden, weight, targets)
    rounded = (x.bfloat16().double() for x in (hidden, weight))
    want = reference.cross_entropy(*rounded, targets)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)


def test_a_small_dropout_is_not_none() -> None:
    assert (Dropout(1e-3)(torch.ones(100_000)) == 0).any()


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9])
def test_dropout_keeps_the_expectation(p: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(1_000_003)
    out = Dropout(p)(x)
    assert (out == 0).double().mean().item() == pytest.approx(p, abs=4e-3)
    assert out.mean().item() == pytest.approx(1, abs=1e-2)
    assert out.unique().numel() == 2


def test_dropout_elements_are_independent() -> None:
    """Eight bytes of one random number serve neighbouring elements: no correlation among them."""
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(8 * 200_000)) > 0).double().view(-1, 8)
    correlation = torch.corrcoef(kept.T) - torch.eye(8)
    assert correlation.abs().max() < 0.01


def test_dropout_is_repeatable_and_off_in_evaluation() -> None:
    x, drop = torch.randn(100, requires_grad=True), Dropout(0.3)
    torch.manual_seed(1)
    first = drop(x)
    torch.manual_seed(1)
    assert torch.equal(drop(x), first)
    (grad,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(grad * x, first)
    assert drop.eval()(x) is x
