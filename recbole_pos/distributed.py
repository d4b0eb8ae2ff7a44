"""Training of one model in several processes, each with a part of every batch.

:class:`Shard` cuts this process's part out of a batch. :class:`SharedLoss` sums gradients over all
processes, and :func:`make_global_loss` serves losses that compare the rows of a batch. The rest
sums or gathers tensors of all processes. torch.distributed must have a process group.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Shard:
    """This process's part of every batch: every ``size``-th row, from row ``rank`` on.

    With 3 processes and the rows [a, b, c, d], process 0 has [a, d], process 1 [b], process 2 [c].
    A process for which a batch has no row takes the first row, with 0 targets, since all processes
    must make the same steps.

    Attributes:
        rank: number of this process, from 0.
        size: number of all processes.
        num_targets: number of items to predict in this process's part of the current batch.
        num_batch_targets: the same number for the whole batch.
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
        """Return this process's rows of a batch, and count the targets in them and in the batch.

        The counts are kept in ``num_targets`` and ``num_batch_targets``, from which the process's
        share of the loss follows (``weight``).

        Args:
            rows: the rows of the whole batch, an array or a tensor.
            target_counts: number of items to predict in each row, as long as ``rows``; one each by
                default.
        """
        counts = np.ones(len(rows), dtype=int) if target_counts is None else target_counts
        self.num_batch_targets = int(counts.sum())
        # this process has the rows rank, rank + size, rank + 2 * size, ...
        self.num_targets = int(counts[self.rank :: self.size].sum())
        return self.take_rows(rows)

    def take_rows(self, rows: Any) -> Any:
        """Return this process's rows of a batch: every ``size``-th row from row ``rank`` on.

        Of [a, b, c, d], process 0 of 3 has [a, d]. A process without a row gets the first row of
        the batch, since all processes must make the same steps. :meth:`take` counts no target for
        it, so its ``weight`` in the loss is 0.

        Args:
            rows: the rows of the whole batch, an array or a tensor.
        """
        own_rows = rows[self.rank :: self.size]
        return own_rows if len(own_rows) else rows[:1]

    @property
    def weight(self) -> float:
        """This process's share of the batch's targets, by which its own mean loss is multiplied."""
        return self.num_targets / self.num_batch_targets


def current_shard() -> Shard:
    """Return this process's part of every batch, which is all of it if no other process trains."""
    has_group = dist.is_available() and dist.is_initialized()
    return Shard(dist.get_rank(), dist.get_world_size()) if has_group else Shard()


class SharedLoss:
    """A loss of a batch, one tensor or several, whose gradients are summed over all processes.

    The gradients of the last layers are sent in buckets while those of earlier layers are still
    computed (torch's DistributedDataParallel). With ``find_unused_parameters`` its buckets never
    change, so that a resumed run adds in the same order, and gets the same bits.

    Args:
        model: the model, which is the same in all processes.
        loss: function of this process's part of a batch that returns its loss.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        """Wrap the model and its loss so that gradients are summed over all processes.

        Args:
            model: the model, which is the same in all processes.
            loss: function of this process's part of a batch that returns its loss.
        """
        self.model = model

        # DistributedDataParallel calls the ``forward`` of a module, so _Loss is a module whose
        # ``forward`` returns the loss. Newer versions of torch warn that the argument
        # ``broadcast_buffers`` will get another name; older ones know only this name.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.parallel = DistributedDataParallel(
                _Loss(model, loss), find_unused_parameters=True, broadcast_buffers=False
            )

        # By default DistributedDataParallel takes the mean of the processes' gradients. This hook
        # replaces the mean by a sum. It gets the gradients of some layers (a bucket) as soon as
        # they are computed, and _start_sum returns a future of their sum over all processes.
        self.parallel.register_comm_hook(None, lambda _, bucket: _start_sum(bucket.buffer()))

    def __call__(self, batch: Any) -> Any:
        """Return the loss of this process's part, whose ``backward`` leaves summed gradients."""
        return self.parallel(batch)

    def broadcast_buffers(self) -> None:
        """Copy the model's buffers, such as running statistics, from process 0 to all others."""
        for buffer in self.model.buffers():
            if not buffer.is_sparse and buffer.is_contiguous():  # others never change
                dist.broadcast(buffer, 0)


class _Loss(nn.Module):
    """A module whose ``forward`` returns the loss of a model.

    DistributedDataParallel needs such a module: it calls ``forward``, and sums the gradients of the
    module's parameters, which are those of the model.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        """Keep the model and its loss, and prevent a warning of DistributedDataParallel.

        Args:
            model: the model.
            loss: function of a batch that returns the model's loss.
        """
        super().__init__()
        self.model, self.loss = model, loss

        # DistributedDataParallel is told to expect parameters that a step does not use
        # (``find_unused_parameters``), and warns if there are none. On a CPU a parameter that is
        # never used prevents the warning. On a GPU every step would have to wait for the number of
        # unused parameters, so that the warning is hidden there.
        if next(model.parameters()).device.type == "cpu":
            self.unused = nn.Parameter(torch.zeros(()))
        else:
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")

    def forward(self, batch: Any) -> Any:
        return self.loss(batch)


def _start_sum(gradients: Tensor) -> Any:
    """Start to sum gradients over all processes, and return a future of the sum.

    It is a sum and no mean, since each process has weighted its loss by ``Shard.weight`` already.

    Args:
        gradients: gradients of this process, which the sum replaces.
    """
    summed = dist.all_reduce(gradients, async_op=True).get_future()
    return summed.then(lambda done: done.value()[0])  # its value is a list of one tensor


def make_global_loss(loss: Callable[..., Tensor], shard: Shard) -> Callable[..., Tensor]:
    """Make a loss that sees the rows of all processes, from one that compares rows of a batch.

    Such a loss uses, for example, the targets of other rows as negatives, and would miss those of
    other processes. So each process gathers the rows of all processes, and computes the same loss
    of the whole batch with the same random numbers.

    The gradients are those of one process with the whole batch. All processes compute the same loss
    L. The training loop multiplies L by ``shard.weight`` (the weights of all processes sum to 1)
    and adds up the gradients of the parameters over the processes:

    - The gradient of the item embeddings is dL/dE in every process. Times the weights, and added
      up, it is dL/dE again.
    - A row's hidden state has a gradient only in the process to which the row belongs. Times that
      process's weight it is too small, so a hook divides it by the weight.

    Args:
        loss: function of states [m, d], item embeddings [items, d] and targets [m] that returns a
            scalar.
        shard: this process's part of the batch.

    Returns:
        A function with the arguments of ``loss``: states and targets of this process's part.
    """

    def compute_global_loss(states: Tensor, items: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the rows of all processes (a scalar), the same in each process.

        Args:
            states: [m, d] hidden states of this process's rows.
            items: [items, d] item embeddings.
            targets: [m] ids of the target items of these rows.
        """
        # Tell all processes how many rows this one has, and a seed. A process without targets has
        # a row as well (``Shard.take_rows``), which is left out here.
        num_rows = len(states) if shard.num_targets else 0
        own_states = states[:num_rows]
        seed = int(torch.randint(2**62, ()))
        header = torch.tensor([num_rows, seed], device=states.device)
        headers = [torch.empty_like(header) for _ in range(shard.size)]
        dist.all_gather(headers, header)
        sizes = [int(size) for size, _ in headers]
        first_seed = int(headers[0][1])

        # Join the rows of all processes. What comes from other processes has no gradient.
        parts = _gather(own_states.detach(), sizes)
        parts[shard.rank] = own_states
        all_states, all_targets = torch.cat(parts), torch.cat(_gather(targets[:num_rows], sizes))

        # The training loop will multiply the loss by ``shard.weight``, and so all gradients. That
        # of this process's states comes from no other process, so it is divided by the weight. That
        # of the item embeddings is added up over all processes, whose weights sum to 1.
        if own_states.requires_grad:
            own_states.register_hook(lambda gradient: gradient / shard.weight)

        # All processes draw the same negatives, from the seed of process 0. The random state of
        # the model itself, on CPU and GPU, is left as it was.
        devices = [states.device] if states.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(first_seed)
            return loss(all_states, items, all_targets)

    return compute_global_loss


def _gather(rows: Tensor, sizes: list[int]) -> list[Tensor]:
    """Send this process's rows to all processes, and return the rows of each.

    All processes must call it together.

    Args:
        rows: this process's rows.
        sizes: number of rows of each process, by its number (rank).

    Returns:
        A tensor [size, ...] for each process.
    """
    # Pad all to one length, since gloo sends tensors of one size only.
    longest = max(sizes)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows

    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [tensor[:size] for tensor, size in zip(received, sizes, strict=True)]


def sum_over_processes(value: Tensor) -> Tensor:
    """Return the float64 sum of a tensor over all processes, without waiting for a GPU."""
    summed = value.detach().to(torch.float64, copy=True)
    dist.all_reduce(summed)
    return summed


def gather_rows(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows that all processes have under each name, joined in the order of processes.

    Two processes with ``{"loss": [a]}`` and ``{"loss": [b], "rank": [c]}`` both get
    ``{"loss": [a, b], "rank": [c]}``. All processes must call it together.

    Args:
        rows: name -> rows of this process; names that other processes have may be missing.
    """
    received: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(received, rows)  # one dict of each process

    parts: dict[str, list[Tensor]] = {}
    for process_rows in received:
        for name, tensor in process_rows.items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


@contextmanager
def keep_working_directory_out() -> Iterator[None]:
    """Let Python processes that a ``with`` block starts not search the working directory first.

    Else a file there that is called like a module, such as a user's ``random.py``, would be
    imported in its place. Before Python 3.11 this has no effect.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before
