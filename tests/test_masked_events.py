"""BERT4Rec's loss against RecBole's own code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recbole.model.sequential_recommender import BERT4Rec
from test_builtins import shop  # noqa: F401

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.model.training import adapter


@pytest.fixture(autouse=True)
def float32_again() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def bert(data: Path, **options: Any) -> Experiment:
    """In float64 (RecBole's loss makes tensors of its own), all weights random and large."""
    torch.set_default_dtype(torch.float64)
    given = {"data_path": str(data), "MAX_ITEM_LIST_LENGTH": 12, "train_batch_size": 16, **options}
    experiment = prepare(PosConfig("BERT4Rec", "tiny", None, given))
    torch.manual_seed(0)
    for parameter in experiment.model.double().parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experiment.model.train() and experiment


def both(experiment: Experiment, rows: Any) -> list[tuple[torch.Tensor, list[torch.Tensor | None]]]:
    """Loss and gradients of RecBole's code and of ours, with the same dropout."""
    model = experiment.model
    ours = adapter(experiment.config, model).loss(packed=False)
    assert ours is not model.calculate_loss
    found = []
    for loss in (model.calculate_loss, ours):
        model.zero_grad()
        torch.manual_seed(1)
        value = loss(rows)
        value.backward()
        found.append((value.detach(), [p.grad for p in model.parameters()]))
    return found


@pytest.mark.parametrize("last", [0.0, 1.0])
def test_recboles_loss_and_gradients(shop: Path, last: float) -> None:  # noqa: F811
    """Masks at random, and of the newest event alone (``ft_ratio``)."""
    experiment = bert(shop, mask_ratio=0.5, ft_ratio=last)
    rows = next(iter(experiment.loaders["train"]))
    assert 0 < (rows["MASK_INDEX"] > 0).sum() < rows["MASK_INDEX"].numel()
    (want, grads), (got, ours) = both(experiment, rows)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, grads, rtol=1e-10, atol=1e-12)


def test_nothing_masked_teaches_nothing(shop: Path) -> None:  # noqa: F811
    """RecBole divides by the number of masked events, and is NaN."""
    experiment = bert(shop)
    rows = next(iter(experiment.loaders["train"]))
    rows["MASK_INDEX"] = torch.zeros_like(rows["MASK_INDEX"])
    (want, _), (got, grads) = both(experiment, rows)
    assert want.isnan() and got == 0
    assert not any(grad is not None and grad.any() for grad in grads)


def test_bpr_stays_recboles(shop: Path) -> None:  # noqa: F811
    experiment = bert(shop, loss_type="BPR", train_neg_sample_args={"sample_num": 1})
    loss = adapter(experiment.config, experiment.model).loss(packed=False)
    assert loss.__func__ is BERT4Rec.calculate_loss
