"""Banks of frequencies, fixed and learned."""

from __future__ import annotations

import math

import pytest
import torch

from recbole_pos.position.frequencies import FrequencyBank, base_form, wavelength_form

pytestmark = pytest.mark.usefixtures("double")


def test_banks() -> None:
    assert base_form(4, 10000.0, 2.0).tolist() == pytest.approx([2, 0.2, 0.02, 0.002])
    periods = 2 * math.pi / wavelength_form(4, 1.0, 1000.0)
    assert periods.tolist() == pytest.approx([1, 10, 100, 1000])
    assert (2 * math.pi / wavelength_form(1, 1.0, 100.0)).item() == pytest.approx(10)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_learned_ladder_stays_in_order(scaled: bool) -> None:
    """Before the scales, which stand outside it."""
    bank = FrequencyBank(wavelength_form(8, 1.0, 1000.0), "ladder", scaled)
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter += 5 * torch.randn_like(parameter)
    scales = torch.nn.functional.softplus(bank.raw_scale.double()) if scaled else 1
    assert ((bank() / scales).diff() < 0).all() and (bank() > 0).all()


def test_a_fixed_bank_keeps_its_digits_in_half_precision() -> None:
    bank = FrequencyBank(wavelength_form(8, 1.0, 1000.0), "fixed", False).half()
    assert torch.equal(bank(), wavelength_form(8, 1.0, 1000.0))
