"""This process's part of every batch, and sums over all processes that train together."""

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
class Shard:
    """This process's part of every batch: every ``size``-th row, from row ``rank``.

    A process for which a batch has no row takes the first row, with 0 targets.

    Attributes:
        rank, size: number of this process from 0, and number of all processes.
        num_targets, num_batch_targets: numbers of targets of the current batch, in this process and
            in all.
    """

    rank: int = 0
    size: int = 1
    num_targets: int = 1
    num_batch_targets: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    def take(self, rows: Any, target_counts: Any = None) -> Any:
        """Return this process's rows of a batch, and count targets; a row has one by default."""
        if self.is_alone:
            return rows
        if target_counts is None:
            self.num_batch_targets = len(rows)
            self.num_targets = len(rows[self.rank :: self.size])
        else:
            self.num_batch_targets = int(target_counts.sum())
            self.num_targets = int(target_counts[self.rank :: self.size].sum())
        return self.take_rows(rows)

    def take_rows(self, rows: Any) -> Any:
        """Return this process's rows of a batch, without counting targets."""
        own_rows = rows[self.rank :: self.size]
        return own_rows if len(own_rows) else rows[:1]

    @property
    def weight(self) -> float:
        """Weight of this process's mean loss in the mean loss of the batch."""
        return self.num_targets / self.num_batch_targets


def current_shard() -> Shard:
    """Return the part of this process, which is the whole batch if it trains alone."""
    has_group = dist.is_available() and dist.is_initialized()
    return Shard(dist.get_rank(), dist.get_world_size()) if has_group else Shard()


class SharedLoss:
    """A loss of a batch, one tensor or several, whose gradients are summed over all processes.

    torch's DistributedDataParallel sends buckets of gradients while those of earlier layers are
    still computed. With ``find_unused_parameters`` its buckets never change: a resumed run adds in
    the same order, to the same bits.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        self.model = model
        with warnings.catch_warnings():  # newer versions of torch call it forward_sync_buffers
            warnings.simplefilter("ignore", FutureWarning)
            self.parallel = DistributedDataParallel(
                _Loss(model, loss), find_unused_parameters=True, broadcast_buffers=False
            )
        self.parallel.register_comm_hook(None, lambda _, bucket: _start_sum(bucket.buffer()))

    def __call__(self, batch: Any) -> Any:
        """Return the loss of this process's part, whose ``backward`` leaves summed gradients."""
        return self.parallel(batch)

    def broadcast_buffers(self) -> None:
        """Copy the model's buffers of process 0, such as statistics of batches, to all."""
        for buffer in self.model.buffers():
            if not buffer.is_sparse and buffer.is_contiguous():  # others never change
                dist.broadcast(buffer, 0)


class _Loss(nn.Module):
    """A model with its loss as ``forward``, the function that DistributedDataParallel wraps."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        # torch warns of find_unused_parameters where every parameter is used. On a CPU an unused
        # one prevents that; on a GPU it would cost a wait in every step, so the warning is hidden
        if next(model.parameters()).device.type == "cpu":
            self.unused = nn.Parameter(torch.zeros(()))
        else:
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")

    def forward(self, batch: Any) -> Any:
        return self.loss(batch)


def _start_sum(gradients: Tensor) -> Any:
    """Return a future of the sum over all processes; no mean, since losses are weighted already."""
    summed = dist.all_reduce(gradients, async_op=True).get_future()
    return summed.then(lambda done: done.value()[0])


def make_global_loss(loss: Callable[..., Tensor], shard: Shard) -> Callable[..., Tensor]:
    """Return a loss over the rows of all processes, for a loss that compares rows of a batch.

    Every process gathers the states of all, and computes the same loss with the same random state.
    Gradients reach only its own states.

    Args:
        loss: function of states [m, d], item embeddings and targets [m] that returns a scalar.
        shard: this process's part. The caller multiplies the returned loss by its ``weight``.
    """

    def compute(states: Tensor, items: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the rows of all processes, for this process's states [m, d]."""
        seed = int(torch.randint(2**62, ()))  # all processes use the seed of the first
        num_rows = len(states) if shard.num_targets else 0
        header = torch.tensor([num_rows, seed], device=states.device)
        headers = [torch.empty_like(header) for _ in range(shard.size)]
        dist.all_gather(headers, header)
        sizes = [int(size) for size, _ in headers]
        gathered = _GatheredRows.apply(states, sizes, shard.rank, shard.weight)
        all_targets = torch.cat(_gather(targets, sizes))
        devices = [states.device] if states.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(headers[0][1]))
            return loss(gathered, items, all_targets)

    return compute


class _GatheredRows(torch.autograd.Function):
    """Joins the rows of all processes to [total, d]; gradients reach this one's rows [m, d]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], rank: int, weight: float) -> Tensor:
        ctx.start = sum(sizes[:rank])
        ctx.size = sizes[rank]
        ctx.weight = weight
        ctx.num_rows = len(rows)
        return torch.cat(_gather(rows, sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.size:  # the row of a process without targets
            return grad.new_zeros(ctx.num_rows, grad.size(1)), None, None, None
        # the caller weights the loss, but every process has computed all of it
        own_grad = grad[ctx.start : ctx.start + ctx.size] / ctx.weight
        return own_grad, None, None, None


def _gather(rows: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return the first ``sizes[rank]`` rows of each process, in the order of ranks."""
    longest = max(sizes)
    padded = rows.new_zeros(longest, *rows.shape[1:])  # gloo sends tensors of one size only
    padded[: len(rows)].copy_(rows[:longest])  # a process of size 0 may hold a row all the same
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [tensor[:size] for tensor, size in zip(received, sizes, strict=True)]


def sum_over_processes(value: Tensor) -> Tensor:
    """Return the float64 sum of a tensor over all processes, without waiting for a GPU."""
    summed = value.detach().to(torch.float64, copy=True)
    dist.all_reduce(summed)
    return summed


def gather_rows(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return name -> rows of all processes, in the order of ranks; a process may lack names."""
    received: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(received, rows)
    names = dict.fromkeys(name for tensors in received for name in tensors)
    return {name: torch.cat([t[name] for t in received if name in t]) for name in names}
