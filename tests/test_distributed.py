"""What processes of a group share: gradients, buffers, the states that a loss compares."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn

from recbole_pos.distributed import Shard, SharedLoss, make_global_loss
from recbole_pos.experiment.environment import Rank
from recbole_pos.experiment.launch import find_free_port
from recbole_pos.experiment.rendezvous import Rendezvous
from recbole_pos.layers.sampled import SampledLoss
from recbole_pos.layers.sce import scalable_cross_entropy

SIZE = 2


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


def summed_gradients(rank: int) -> dict[str, Any]:
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
            gradients = {n: p.grad for n, p in model.named_parameters()}
            dense = {n: g if g is None else g.to_dense().clone() for n, g in gradients.items()}
            found[name].append(dense)
    loss.broadcast_buffers()
    return {**found, "buffers": dict(shared.named_buffers()), "before": dict(own.named_buffers())}


def sampled_losses(rank: int) -> list[dict[str, Any]]:
    """Values and gradients of SCE and in_batch, in parts and by one process.

    A batch of one row leaves a process with a row that is only lent.
    """
    found = []
    sizes = {"n_buckets": 3, "bucket_size_x": 2, "bucket_size_y": 6}
    by_class: Any = SampledLoss("in_batch", torch.ones(30), logq_correction="refined")
    buckets = functools.partial(scalable_cross_entropy, **sizes, mix_x=False)
    mixed = functools.partial(scalable_cross_entropy, **sizes, mix_x=True)
    for rows, alone in ((7, buckets), (7, mixed), (1, buckets), (7, by_class)):
        torch.manual_seed(rows)
        encoder, items = nn.Linear(4, 4), nn.Embedding(30, 4)
        model = nn.ModuleList([encoder, items])
        x, targets = torch.randn(rows, 4), torch.randint(1, 30, (rows,))
        shard = Shard(rank, SIZE)

        def compute(loss: Any, index: Tensor, e=encoder, i=items, x=x, t=targets) -> Tensor:
            return loss(e(x[index]), i.weight, t[index])

        together = functools.partial(compute, make_global_loss(alone, shard))
        shared = SharedLoss(model, together)
        torch.manual_seed(50 + rank)
        value = shared(shard.take(torch.arange(rows))) * shard.weight
        value.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(50)
        torch.manual_seed(int(torch.randint(2**62, ())))  # what the first process drew
        expected = compute(alone, torch.cat([torch.arange(rows)[of::SIZE] for of in range(SIZE)]))
        expected.backward()
        whole = [expected.detach(), *(p.grad for p in model.parameters())]
        found.append({"value": value.detach(), "gradients": gradients, "whole": whole})
    return found


def _member(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    place = Rank(rank, SIZE, rank, SIZE, "localhost", port)
    with Rendezvous("localhost", port, rank == 0, 60).joined(place, on_gpu=False):
        torch.save((summed_gradients(rank), sampled_losses(rank)), folder / f"{rank}.pt")


def test_what_two_processes_share(tmp_path) -> None:
    """In one start of processes, which takes longer than what they do."""
    torch.multiprocessing.spawn(_member, (find_free_port(), tmp_path), SIZE)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(SIZE)]
    _require_sums([gradients for gradients, _ in found])
    for parts in zip(*(losses for _, losses in found), strict=True):
        value, *gradients = parts[0]["whole"]
        torch.testing.assert_close(sum(part["value"] for part in parts), value)
        for part in parts:
            torch.testing.assert_close(part["gradients"], gradients)


def _require_sums(found: list[dict[str, Any]]) -> None:
    """Parameters may be frozen, sparse, never used, or used in some processes of some steps."""
    for step in range(3):
        own = [one["own"][step] for one in found]
        for name in own[0]:
            parts = [part[name] for part in own if part[name] is not None]
            for one in found:
                shared = one["shared"][step][name]
                if parts:
                    torch.testing.assert_close(shared, sum(parts), msg=f"{name}, step {step}")
                else:
                    assert shared is None or not shared.any(), (name, step)
        assert any(part["sometimes.weight"] is None for part in own) is (step > 0)
    for name, buffer in found[0]["before"].items():
        assert all(torch.equal(one["buffers"][name], buffer) for one in found)
    means = [one["before"]["norm.running_mean"] for one in found]
    assert not torch.equal(*means)  # each would have gone its own way
