"""Models with their data, and training steps as the trainer makes them: time, FLOPs, memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.loaders import WindowLoader
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.device import keep_freed_memory
from recbole_pos.experiment.trainer import LossWatch, PosTrainer

WARM = 30  # steps before timing starts: allocator, kernels and graphs of all sizes


def build(model: str, dataset: str, **options: Any) -> Experiment:
    """Return a model with its data and trainer, which shows no progress, as a run makes it."""
    keep_freed_memory()
    return prepare(PosConfig(model, dataset, None, {"show_progress": False, **options}))


def time_epochs(experiment: Experiment, epochs: int) -> list[float]:
    """Train epochs without validation, and return the seconds of each."""
    trainer = experiment.trainer
    loader = trainer.training_loader(experiment.loaders["train"])
    return [trainer._train_epoch(loader, epoch)["seconds"] for epoch in range(epochs)]


def make_step(trainer: PosTrainer, loss: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a function that makes a trainer's step with a batch and its ``loss``."""
    watch, numbers = LossWatch(partial(trainer._refuse_loss, 0)), itertools.count()
    return lambda batch: trainer._step(loss, batch, watch, next(numbers))


def train_epoch(trainer: PosTrainer, loader: Any) -> Iterator[Any]:
    """Yield the batches of an epoch, each after its step."""
    trainer.loader = loader  # as ``fit`` sets it; a checkpoint has its state
    trainer.model.train()
    loader.set_epoch(0)
    step = make_step(trainer, trainer.adapter.choose_loss(loader.packed))
    with trainer.precision.rounded_products(), trainer.steps_in_rows():
        for batch in loader.iterate_batches(trainer.device, trainer.config["data_on_device"]):
            step(batch)
            yield batch


@dataclass(frozen=True)
class Timed:
    """Steps after those that warm up.

    Attributes:
        seconds, steps, targets: their time and number, and the targets that they learned.
        warm_seconds: time of the steps before, compiling included.
    """

    seconds: float
    steps: int
    targets: int
    warm_seconds: float


def time_steps(
    trainer: PosTrainer,
    loader: Any,
    seconds: float,
    warm: int = WARM,
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Train to the end of an epoch, or until the time is up, after ``warm`` steps."""
    warm = min(warm, len(loader) // 2)
    targets = steps = 0
    begun = started = clock()
    for steps, batch in enumerate(train_epoch(trainer, loader), 1):
        targets += len(batch)
        if steps == warm:
            synchronise(trainer.device)
            targets, started = 0, clock()
        elif steps > warm and clock() - started > seconds:  # the host is few steps ahead
            break
    synchronise(trainer.device)
    return Timed(clock() - started, steps - warm, targets, started - begun)


def epoch_flops(
    loader: WindowLoader, d: int, layers: int, items: int, projections: int = 4, products: int = 2
) -> float:
    """Return the FLOPs of an epoch without padding, forward and backward (3x forward).

    A layer has so many projections and products of pairs, and a feed-forward of 4 d.
    """
    lengths = torch.from_numpy(loader.windows.lengths).double()
    m, pairs = lengths.sum(), (lengths * (lengths + 1) / 2).sum()
    per_layer = m * (projections + 8) * d**2 + products * pairs * d
    return float(6 * (layers * per_layer + loader.num_targets * d * items))


def peak_flops(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """Return the FLOPs a second of a product of two [n, n] matrices."""
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / min(mean_seconds(lambda: a @ b, 10, device) for _ in range(5))


def mean_seconds(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Return the mean time of so many calls, which end with the work of the device."""
    synchronise(device)
    started = time.perf_counter()
    for _ in range(times):
        call()
    synchronise(device)
    return (time.perf_counter() - started) / times


def synchronise(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> float:
    """Return the GB of GPU memory in use, and count the peak from now on."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) / 2**30


def peak_memory(device: torch.device) -> float:
    """Return the peak of GPU memory in GB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
