"""Seconds, FLOPs and memory of training steps on a device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch
from gpu_data import Size

from recbole_pos.data.loaders import WindowLoader
from recbole_pos.experiment.loss_watch import LossWatch
from recbole_pos.experiment.trainer import PosTrainer

WARM = 30  # steps before timing starts: allocator, kernels and graphs of all sizes


@dataclass(frozen=True)
class Timed:
    """Steps after the warm ones.

    Attributes:
        seconds: they took.
        targets: they learned.
        warm_seconds: the steps before took, compiling included.
    """

    seconds: float
    targets: int
    warm_seconds: float


def timed(trainer: PosTrainer, loader: WindowLoader, seconds: float) -> Timed:
    """Steps to the end of an epoch, or until the time is up, whichever is first."""
    loss, watch = trainer.adapter.loss(packed=True), LossWatch(partial(trainer._refuse, 0))
    trainer.model.train()
    loader.set_epoch(0)
    warm = min(WARM, len(loader) // 2)
    targets, begun = 0, time.perf_counter()
    started = begun
    with trainer.precision.steps():
        batches = loader.batches_on(trainer.device, trainer.config["data_on_device"])
        for number, batch in enumerate(batches):
            if number == warm:
                synchronise(trainer.device)
                targets, started = 0, time.perf_counter()
            trainer._step(loss, batch, watch, number)
            targets += len(batch)
            now = time.perf_counter()  # the host is LATE steps ahead at most
            if number >= warm and now - started > seconds:
                break
        watch.mean()
        synchronise(trainer.device)
    return Timed(time.perf_counter() - started, targets, started - begun)


def epoch_flops(loader: WindowLoader, size: Size) -> float:
    """Multiply-adds times two of one epoch on real events, forward and backward (3x forward)."""
    lengths = torch.from_numpy(loader.windows.lengths).double()
    m, pairs = lengths.sum(), (lengths * (lengths + 1) / 2).sum()
    per_layer = m * 12 * size.d**2 + 2 * pairs * size.d
    return float(6 * (size.layers * per_layer + loader.targets * size.d * size.items))


def peak_flops(device: torch.device, kind: torch.dtype) -> float:
    """What a large product reaches, a second."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=kind) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        synchronise(device)
        best = min(best, (time.perf_counter() - started) / 10)
    return 2 * n**3 / best


def synchronise(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> float:
    """GB in use now, from which on the largest is counted."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) / 2**30


def peak_memory(device: torch.device) -> float:
    """The most GB in use since; 0 on a CPU, where nothing is counted."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
