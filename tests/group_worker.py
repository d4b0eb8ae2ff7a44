"""Functions that run in each of a few processes that have joined a group of torch's."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn

from recbole_pos.distributed import Shard, SharedLoss, over_whole_batch
from recbole_pos.experiment.environment import Rank
from recbole_pos.experiment.rendezvous import Rendezvous
from recbole_pos.layers.sampled import SampledLoss
from recbole_pos.layers.sce import scalable_cross_entropy


def in_group(size: int, function: Callable[[int, int], Any], folder: Path) -> list[Any]:
    """What ``function(rank, size)`` gives in each of ``size`` processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_member, (size, port, function, folder), size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def _member(rank: int, size: int, port: int, function: Callable, folder: Path) -> None:
    torch.set_num_threads(1)
    place = Rank(rank, size, rank, size, "localhost", port)
    with Rendezvous("localhost", port, rank == 0, 60).joined(place, on_gpu=False):
        torch.save(function(rank, size), folder / f"{rank}.pt")


class Parts(nn.Module):
    """Parameters of every kind that a step may find."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Linear(3, 1) for _ in range(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.rows = nn.Embedding(5, 3, sparse=True)

    def loss(self, batch: tuple[Tensor, Tensor, bool]) -> tuple[Tensor, Tensor]:
        """Two losses, with weights; the last of the batch says whether all is used."""
        x, rows, all_used = batch
        x = self.frozen(self.norm(x)) + self.rows(rows)
        more = self.sometimes(x) if all_used else x.new_zeros(())
        return self.used(x).square().mean(), 0.25 * more.sum()


def summed_gradients(rank: int, size: int) -> dict[str, Any]:
    """Of three steps, as they come from a shared loss; and each process's own, without it."""
    torch.manual_seed(0)
    shared, own = Parts(), Parts()
    own.load_state_dict(shared.state_dict())
    loss = SharedLoss(shared, shared.loss)
    found: dict[str, Any] = {"shared": [], "own": []}
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        # in the second step in one process alone, in the third in none
        batch = torch.randn(4, 3), torch.randint(5, (4,)), step == 0 or (step == 1 and rank == 0)
        for name, model, function in (("shared", shared, loss), ("own", own, own.loss)):
            model.zero_grad()
            sum(function(batch)).backward()
            found[name].append({n: _dense(p.grad) for n, p in model.named_parameters()})
    loss.same_buffers()
    return {**found, "buffers": dict(shared.named_buffers()), "before": dict(own.named_buffers())}


def sampled_loss(rank: int, size: int) -> dict[str, Any]:
    """SCE and in_batch of batches of 7 rows and of 1, in parts and by one process."""
    found: dict[str, Any] = {}
    for rows, mix in ((7, False), (7, True), (1, False), (7, None)):
        torch.manual_seed(rows)
        encoder, items = nn.Linear(4, 4), nn.Embedding(30, 4)
        model = nn.ModuleList([encoder, items])
        x, targets = torch.randn(rows, 4), torch.randint(1, 30, (rows,))
        sizes = {"n_buckets": 3, "bucket_size_x": 2, "bucket_size_y": 6}
        alone = functools.partial(scalable_cross_entropy, **sizes, mix_x=mix)
        if mix is None:
            alone = SampledLoss("in_batch", torch.ones(30), logq_correction="refined")
        shard = Shard(rank, size)
        together = over_whole_batch(alone, shard)

        def of_rows(index: Tensor, loss=alone, e=encoder, i=items, x=x, t=targets) -> Tensor:
            return loss(e(x[index]), i.weight, t[index])

        shared = SharedLoss(model, functools.partial(of_rows, loss=together))
        torch.manual_seed(50 + rank)
        value = shared(shard.of(torch.arange(rows))) * shard.weight
        value.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(50)
        torch.manual_seed(int(torch.randint(2**62, ())))  # what the first process drew
        order = torch.cat([torch.arange(rows)[of::size] for of in range(size)])
        expected = of_rows(order)
        expected.backward()
        found[f"{rows} rows, mix_x {mix}"] = {
            "value": value.detach(),
            "gradients": gradients,
            "expected value": expected.detach(),
            "expected": [p.grad for p in model.parameters()],
        }
    return found


def everything(rank: int, size: int) -> dict[str, Any]:
    """Of one start of processes, which takes longer than what they do."""
    return {"gradients": summed_gradients(rank, size), "sampled": sampled_loss(rank, size)}


def _dense(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to_dense().clone()
