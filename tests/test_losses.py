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


def test_full_cross_entropy_under_autocast() -> None:
    hidden, weight = torch.randn(8, 4), torch.randn(5, 4)
    targets = torch.randint(1, 5, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses.full_cross_entropy(hidden.bfloat16(), weight, targets)
    want = losses.full_cross_entropy(hidden.bfloat16().float(), weight, targets)
    torch.testing.assert_close(loss, want)


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
