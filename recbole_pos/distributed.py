"""Training of one model in several processes, each with a part of every batch.

:class:`Shard` cuts this process's part out of a batch. :class:`SharedLoss` sums gradients over all
processes, and :func:`compute_global_loss` serves losses that compare the rows of a batch. The rest
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

    def take(self, rows: Any) -> Any:
        """Return this process's rows of a batch in which each row has one target, and count these.

        Args:
            rows: the rows of the whole batch, an array or a tensor.
        """
        self.count_targets(np.ones(len(rows), dtype=int))
        return self.take_rows(rows)

    def count_targets(self, counts: np.ndarray) -> None:
        """Keep how many items a batch has to predict (targets): in all, and in this process's rows.

        Process 0 of 2 has the rows [a, c] of [a, b, c]. If the three rows have 4, 1 and 3 targets,
        its ``num_targets`` becomes 7 and ``num_batch_targets`` 8. From these two follows its
        ``weight`` 7 / 8, by which the process multiplies its mean loss.

        Args:
            counts: [rows] number of targets of each row of the whole batch.
        """
        own_counts = counts[self.rank :: self.size]  # of the rows that ``take_rows`` returns
        self.num_targets, self.num_batch_targets = int(own_counts.sum()), int(counts.sum())

    def take_rows(self, rows: Any) -> Any:
        """Return this process's rows of a batch: every ``size``-th row from row ``rank`` on.

        Of [a, b, c, d], process 0 of 3 has [a, d]. If there are fewer rows than processes, a
        process without a row of its own gets the first row of the batch, since all processes must
        make the same steps. That row does not count: the process's loss has the weight 0.

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

        # DistributedDataParallel calls the ``forward`` of a module and sums the gradients of the
        # module's parameters. So the loss becomes a module: the ``forward`` of _Loss returns it.
        module = _Loss(model, loss)
        with warnings.catch_warnings():
            # Newer versions of torch warn that the argument ``broadcast_buffers`` will get another
            # name; older ones know only this name.
            warnings.simplefilter("ignore", FutureWarning)
            self.parallel = DistributedDataParallel(
                module, find_unused_parameters=True, broadcast_buffers=False
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

        # With ``find_unused_parameters`` DistributedDataParallel looks for parameters that a step
        # does not use, and warns if it finds none. So on a CPU the module gets a parameter that is
        # never used. On a GPU such a parameter would make every step wait for the GPU; there the
        # warning is only hidden.
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


def compute_global_loss(
    loss: Callable[..., Tensor], shard: Shard, states: Tensor, items: Tensor, targets: Tensor
) -> Tensor:
    """Return a loss of the rows of all processes, where each process has some rows of a batch.

    A loss that compares the rows of a batch, for example with the targets of other rows as
    negatives, would miss the rows of other processes. So each process gathers the rows of all, and
    computes the same loss L of the whole batch with the same random numbers.

    The training loop then multiplies the loss of each process by its weight w (``shard.weight``;
    those of all processes sum to 1), and adds up the gradients of all processes. These sums must be
    the gradients that one process with the whole batch would have:

    - Of the item embeddings E, every process computes the gradient dL/dE. Since the weights sum to
      1, the weighted sum is dL/dE again.
    - Of the state s of a row, only the process that has the row computes the gradient. Its weighted
      gradient w dL/ds would be too small, so dL/ds is divided by w here.

    Args:
        loss: the loss, a function of states, item embeddings and targets that returns a scalar.
        shard: this process's part of the batch.
        states: [m, d] hidden states of this process's rows.
        items: [items, d] item embeddings.
        targets: [m] ids of the target items of these rows.

    Returns:
        Scalar L, the same in each process.
    """
    # If a batch has fewer rows than there are processes, a process without a row has got one that
    # does not count (``num_targets`` is 0). That row is left out.
    num_rows = len(states) if shard.num_targets else 0
    own_states, own_targets = states[:num_rows], targets[:num_rows]
    if own_states.requires_grad:  # the backward pass calls this hook with dL/ds
        own_states.register_hook(lambda gradient: gradient / shard.weight)

    # Tell all processes how many rows this one has, and a seed.
    header = torch.tensor([[num_rows, int(torch.randint(2**62, ()))]], device=states.device)
    headers = torch.cat(_gather(header, [1] * shard.size))  # [processes, 2]
    sizes, seeds = headers.t().tolist()

    # Join the rows of all processes. States of other processes come without a gradient; in the
    # place of this process's own ones, the original tensor keeps theirs.
    parts = _gather(own_states.detach(), sizes)  # the states of each process
    parts[shard.rank] = own_states
    all_states, all_targets = torch.cat(parts), torch.cat(_gather(own_targets, sizes))

    # All processes draw the same random numbers, from the seed of process 0. The random state of
    # the model itself, on CPU and GPU, is left as it was.
    devices = [states.device] if states.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seeds[0])
        return loss(all_states, items, all_targets)


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
