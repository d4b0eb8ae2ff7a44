"""The part of every batch that is this process's, and sums over all that train together."""

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
    """The part of every batch that is this process's.

    A batch with fewer rows than processes lends its first row to those left without, whose ``own``
    is 0.

    Attributes:
        rank, size: number of this process, of how many.
        own, whole: number of targets of the current batch, here and in all processes.
    """

    rank: int = 0
    size: int = 1
    own: int = 1
    whole: int = 1

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    def of(self, rows: Any, counts: Any = None) -> Any:
        """Return this process's rows of a batch, and count its targets, one a row by default."""
        if self.alone:
            return rows
        own = rows[self.rank :: self.size]
        self.whole = len(rows) if counts is None else int(counts.sum())
        self.own = len(own) if counts is None else int(counts[self.rank :: self.size].sum())
        return self.part(rows)

    def part(self, rows: Any) -> Any:
        """Return this process's rows, without counting targets."""
        own = rows[self.rank :: self.size]
        return own if len(own) else rows[:1]

    @property
    def weight(self) -> float:
        """The weight of this process's mean loss in the mean of the whole batch."""
        return self.own / self.whole


def current_shard() -> Shard:
    """Return the part of this process; everything unless it has joined a group."""
    joined = dist.is_available() and dist.is_initialized()
    return Shard(dist.get_rank(), dist.get_world_size()) if joined else Shard()


class SharedLoss:
    """A loss whose gradients are summed over all processes while they are computed.

    torch's DistributedDataParallel sends buckets of gradients as soon as they are complete, while
    those of earlier layers are still computed. As parameters may be unused in a step, its buckets
    stay what they are in the first: a resumed run adds in the same order, to the same bits.

    Args:
        model: the model; parameters that are frozen are left alone.
        loss: function of a batch, by the model: a tensor, or several.
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
        """Return the loss of this process's part, whose ``backward`` leaves summed gradients."""
        return self.parallel(batch)

    def same_buffers(self) -> None:
        """Copy the buffers of process 0 to all: a model evaluates with what it keeps of batches."""
        for buffer in self.model.buffers():
            if not buffer.is_sparse and buffer.is_contiguous():  # others were made once
                dist.broadcast(buffer, 0)


class _Loss(nn.Module):
    """A model with its loss as ``forward``, the one function of which torch knows the end.

    torch advises against ``find_unused_parameters`` where every parameter is used, but a model may
    need it. On a CPU an unused one prevents the advice; on a GPU, which would be waited for in
    every step, the advice is not shown.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        if next(model.parameters()).device.type == "cpu":
            self.unused = nn.Parameter(torch.zeros(()))
        else:
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")

    def forward(self, batch: Any) -> Any:
        return self.loss(batch)


def _sum(gradients: Tensor) -> Any:
    """Return a future of the sum, not torch's mean: losses have their weights already."""
    summed = dist.all_reduce(gradients, async_op=True).get_future()
    return summed.then(lambda done: done.value()[0])


def over_whole_batch(loss: Callable[..., Tensor], shard: Shard) -> Callable[..., Tensor]:
    """Return a loss in which the targets of a batch meet each other, as that of the whole batch.

    The states of all processes are gathered, and every process computes the same loss with the same
    random state; gradients are those of its own states.

    Args:
        loss: function of states [m, d], item embeddings and targets [m], all of one batch.
        shard: this process's part; the result is to be weighted with it, as other losses are.
    """

    def compute(states: Tensor, items: Tensor, targets: Tensor) -> Tensor:
        seed = int(torch.randint(2**62, ()))  # that of the first process is for all
        own = torch.tensor([len(states) if shard.own else 0, seed], device=states.device)
        every = [torch.empty_like(own) for _ in range(shard.size)]
        dist.all_gather(every, own)
        sizes = [int(one[0]) for one in every]
        gathered = _GatheredRows.apply(states, sizes, shard.rank, shard.weight)
        all_targets = torch.cat(_gather(targets, sizes))
        devices = [states.device] if states.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(every[0][1]))
            return loss(gathered, items, all_targets)

    return compute


class _GatheredRows(torch.autograd.Function):
    """Rows of all processes; the gradient goes to those of this one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], rank: int, weight: float) -> Tensor:
        ctx.begin, ctx.size, ctx.weight = sum(sizes[:rank]), sizes[rank], weight
        ctx.lent = len(rows)
        return torch.cat(_gather(rows, sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.size:  # a row that was lent
            return grad.new_zeros(ctx.lent, grad.size(1)), None, None, None
        # no one else has a part of it, so it is not to be weighted
        own = grad[ctx.begin : ctx.begin + ctx.size] / ctx.weight
        return own, None, None, None


def _gather(rows: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return a tensor of each process, in the order of ranks: the first ``sizes[rank]`` rows.

    Padded to one length, as gloo sends equal numbers only.
    """
    longest = max(sizes)
    sent = rows.new_zeros(longest, *rows.shape[1:])
    sent[: len(rows)].copy_(rows[:longest])  # a process of size 0 may hold a row all the same
    parts = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(parts, sent)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def sum_over_processes(value: Tensor) -> Tensor:
    """Return the sum of a scalar over all processes, in float64, without waiting for a GPU."""
    summed = value.detach().to(torch.float64, copy=True)
    dist.all_reduce(summed)
    return summed


def gather_rows(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all processes, joined by name; one without rows has none of them."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}
