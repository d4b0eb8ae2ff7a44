"""The gradient of a large item table, kept from step to step: the same bits as a dense one."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import CROSS_ENTROPY

from recbole_pos.layers import large_products, scalable
from recbole_pos.layers.item_table import ItemTable, kept_gradient, takes_rows
from recbole_pos.model import training

SIZES = {"n_buckets": 5, "bucket_size_x": 9, "bucket_size_y": 4, "mix_x": True}


def example(rows: int = 400, d: int = 8) -> tuple[ItemTable, torch.Tensor, torch.Tensor]:
    """A table, and items that are read (padding too) and predicted, some of them several times."""
    torch.manual_seed(0)
    table = ItemTable(rows, d)
    items, targets = torch.randint(1, 60, (2, 50))
    items[::7] = 0
    return table, items, targets


def loss_of(table: ItemTable, items: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The table is read at both ends, as by a model."""
    torch.manual_seed(1)
    return scalable.scalable_cross_entropy(3 * table(items), table.weight, targets, **SIZES)


def test_a_step_writes_what_a_dense_gradient_has() -> None:
    """Added up until it is cleared, also where a gradient is dense after all or was changed."""
    table, items, targets = example()
    loss_of(table, items, targets).backward()
    want, table.weight.grad = table.weight.grad, None
    assert not want[0].any() and want.any(1).sum() < 80
    with kept_gradient(table.weight) as kept:
        for _ in range(3):
            kept.clear()
            assert not kept.dense.any() and takes_rows(table.weight)
            loss_of(table, items, targets).backward()
            assert table.weight.grad is kept.dense and torch.equal(kept.dense, want)
        (2 * loss_of(table, items, targets)).backward()
        torch.testing.assert_close(kept.dense, 3 * want)
        table.weight.square().sum().backward()
        assert kept.dense[1:].any(1).all()
        kept.clear()
        assert not kept.dense.any()
        table(items).sum().backward()
        assert kept.dense.any() and not kept.dense[0].any()  # padding learns nothing
    assert table.weight.grad is None and not takes_rows(table.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("FPARec", {"clip_grad_norm": {"max_norm": 0.01}, "weight_decay": 0.1}),
        ("PosSASRec", {"augmentation": "prefix", "learner": "sgd", "train_batch_size": 128}),
        ("AttrFormer", CROSS_ENTROPY["AttrFormer"]),
        ("PosRec", {"loss_type": "in_batch", "train_batch_size": 128}),
    ],
)
def test_training_ends_with_the_same_bits(experiment, monkeypatch, model: str, options) -> None:
    weights = []
    for kept in (True, False):
        monkeypatch.setattr(training, "LARGE", 0 if kept else 2**40)
        made = experiment(model, **{"loss_type": "SCE"} | options)
        step, trainer = made.trainer._step, made.trainer

        def checked(*given: Any, step=step, trainer=trainer, kept=kept) -> None:
            step(*given)
            assert (trainer.kept_gradient is not None) == kept

        monkeypatch.setattr(trainer, "_step", checked)
        trainer._train_epoch(trainer.training_loader(made.loaders["train"]), 0)
        weights.append(made.model.state_dict())
    for name, own in weights[0].items():
        assert torch.equal(own, weights[1][name]), name


@pytest.mark.parametrize("kept", [True, False])
def test_a_step_makes_nothing_of_the_size_of_the_table(monkeypatch, kept: bool) -> None:
    """Which it does without, so the test can tell."""
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", 2**14)
    table, items, targets = example(rows=50_000)
    optimizer = torch.optim.Adam([table.weight], fused=True)
    with kept_gradient(table.weight) if kept else nullcontext() as one:
        for _ in range(2):
            with torch.profiler.profile(profile_memory=True) as profile:
                optimizer.zero_grad()
                if one:
                    one.clear()
                loss_of(table, items, targets).backward()
                optimizer.step()  # whose state is made in the first
        sizes = [event.cpu_memory_usage for event in profile.events()]
    assert any(size >= 8 * 50_000 * 4 for size in sizes) != kept
