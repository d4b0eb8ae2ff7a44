"""Which part of every batch is this process's, and sums over all that train together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


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


class SharedLoss:
    """A loss whose gradients are summed over all processes while they are made.

    torch's DistributedDataParallel sends buckets of gradients as soon as they are complete, while
    those of earlier layers are still computed. As parameters may be unused in a step, its buckets
    stay what they are in the first: a run that goes on adds in the same order, to the same bits.

    Args:
        model: which has the parameters; those that are frozen are left alone.
        loss: of a batch, by the model: a tensor, or several.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        self.model = model
        with warnings.catch_warnings():  # newer versions of torch call it forward_sync_buffers
            warnings.simplefilter("ignore", FutureWarning)
            self.parallel = DistributedDataParallel(
                _Loss(model, loss), find_unused_parameters=True, broadcast_buffers=False
            )
        self.parallel.register_comm_hook(None, lambda _, bucket: _sum(bucket.buffer()))

    def __call__(self, batch: Any) -> Any:
        """Of this process's part; its ``backward`` leaves the sums."""
        return self.parallel(batch)

    def same_buffers(self) -> None:
        """Those of process 0 in all: what a model keeps of its batches, it evaluates with."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)


class _Loss(nn.Module):
    """A model with its loss as ``forward``, the one function of which torch knows the end."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        device = next(model.parameters()).device
        self.unused = nn.Parameter(torch.zeros((), device=device))  # torch warns where there is none

    def forward(self, batch: Any) -> Any:
        return self.loss(batch)


def _sum(gradients: Tensor) -> Any:
    """A future; instead of torch's mean, since losses have their weights already."""
    summed = dist.all_reduce(gradients, async_op=True).get_future()
    return summed.then(lambda done: done.value()[0])


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
