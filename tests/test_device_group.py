"""A step of several processes waits for no device either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elsewhere import ELSEWHERE, Far, elsewhere, no_reads
from test_device import there

from recbole_pos import distributed
from recbole_pos.distributed import Share
from recbole_pos.experiment.parallel_trainer import ParallelTrainer
from recbole_pos.experiment.trainer import PosTrainer


@pytest.fixture
def group() -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Summed:
    """Stands where torch's own parallel module is, which knows no device elsewhere."""

    def __init__(self, model: Any, loss: Any) -> None:
        self.loss = loss

    def __call__(self, batch: Any) -> Any:
        return self.loss(batch)

    def same_buffers(self) -> None:
        """Nothing: there is one process."""


@pytest.mark.parametrize("options", [{}, {"train_windows": "sliding"}], ids=str)
def test_no_step_of_a_group_reads(tiny: Path, monkeypatch, group, options: dict) -> None:
    """The loss that is told is the mean over all processes; it stays where it is until later."""
    monkeypatch.setattr(distributed, "SharedLoss", Summed)
    with elsewhere(monkeypatch):
        made = there("FPARec", tiny, **options)
        alone = PosTrainer(made.config, made.model)
        trainer = ParallelTrainer(made.config, made.model)
        loader = trainer.training_loader(made.loaders["train"])
        batch = next(loader.batches_on(ELSEWHERE, "auto"))
        value = trainer._value(alone._loss(made.model.window_loss, batch))
        assert isinstance(value, Far) and value.dtype == torch.float64
        monkeypatch.setattr(trainer, "_step", no_reads()(trainer._step))
        assert trainer._train_epoch(loader, 0)["loss"] > 0


def test_a_part_is_gathered_without_copies(tiny: Path, monkeypatch) -> None:
    """Which windows are this process's is sent to the device once an epoch."""
    with elsewhere(monkeypatch):
        made = there("FPARec", tiny)
        loader = made.trainer.training_loader(made.loaders["train"])
        whole = [len(batch) for batch in loader]
        parts = []
        for rank in range(2):
            loader.divide(Share(rank, 2))
            batches = loader.batches_on(ELSEWHERE, "always")
            found = [next(batches)]
            with no_reads():
                found += batches
            parts.append([len(batch) for batch in found])
        assert [a + b for a, b in zip(*parts, strict=True)] == whole


def test_the_sum_leaves_what_it_sums(group) -> None:
    value = torch.tensor(3.0, dtype=torch.float64)
    assert distributed.total(value).add_(1) == 4 and value == 3
