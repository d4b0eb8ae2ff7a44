"""Which part of every batch is this process's, and sums over all that train together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Share:
    """The part of every batch that is this process's.

    ``own`` and ``whole`` count the targets of the current batch, here and in all processes. A batch
    with fewer rows than processes lends its first row to those left without, as ``own = 0``.
    """

    rank: int = 0
    size: int = 1
    own: int = 1
    whole: int = 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    def of(self, rows: Any, counts: Any = None) -> Any:
        """This process's rows of a batch, ``counts`` being their numbers of targets (1 if None)."""
        if self.alone:
            return rows
        own_rows = rows[self.rank :: self.size]
        self.whole = len(rows) if counts is None else int(counts.sum())
        self.own = len(own_rows) if counts is None else int(counts[self.rank :: self.size].sum())
        return own_rows if len(own_rows) else rows[:1]

    @property
    def weight(self) -> float:
        """Of this process's mean loss in the mean of the whole batch."""
        return self.own / self.whole


def this_share() -> Share:
    """What is this process's part; everything unless a group was joined."""
    joined = dist.is_available() and dist.is_initialized()
    return Share(dist.get_rank(), dist.get_world_size()) if joined else Share()


def sum_gradients(model: nn.Module) -> None:
    """Replace every gradient by the sum over all processes, in one message."""
    gradients: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # not used in this process's part of the batch
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    sums = flat.split([gradient.numel() for gradient in gradients])
    for gradient, summed in zip(gradients, sums, strict=True):
        gradient.copy_(summed.view_as(gradient))


def total(value: float, device: torch.device) -> float:
    """Sum of a number over all processes."""
    summed = torch.tensor([value], dtype=torch.float64).to(device)
    dist.all_reduce(summed)
    return float(summed)


def gather_rows(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all processes, one after another; a process without rows has none of them."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own)
    names = dict.fromkeys(name for part in of_all for name in part)
    return {name: torch.cat([part[name] for part in of_all if name in part]) for name in names}
