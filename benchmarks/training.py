"""Models with their data, and training steps as the trainer makes them: time, FLOPs, memory.

Data may be of any size without files.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from recbole.utils import init_seed

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.interactions import EventLog
from recbole_pos.data.loaders import WindowLoader
from recbole_pos.data.windows import Windows, training_windows
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.trainer import LossWatch, PosTrainer
from recbole_pos.layers.features import Features

WARM = 30  # steps before timing starts: allocator, kernels and graphs of all sizes


def build(model: str, dataset: str, **options: Any) -> Experiment:
    """Return a model with its data and trainer, which shows no progress."""
    return prepare(PosConfig(model, dataset, None, {"show_progress": False, **options}))


@dataclass(frozen=True)
class Size:
    """Sizes of a dataset (``events``: interactions) and of the model that learns from it."""

    users: int
    items: int
    events: int
    length: int
    d: int
    layers: int
    batch: int


class GeneratedDataset:
    """The part of a dataset that a model and a loader read, around interactions without a file."""

    def __init__(self, log: EventLog, items: int, length: int, config: PosConfig) -> None:
        self.log, self.length, self.config = log, length, config
        self.item_num, self.user_num = items + 1, len(log.offsets) - 1

    def num(self, field: str) -> int:
        """Return the number of ids of a field, padding included."""
        return self.item_num if field == self.log.item_field else self.user_num

    def get_features(self) -> Features:
        """Return no features of interactions and users."""
        return Features()

    def make_training_windows(self) -> Windows:
        """Return windows over all interactions."""
        offsets = self.log.offsets
        return training_windows(offsets[:-1], offsets[1:], self.length, "chunk", None)


def generate(size: Size, config: PosConfig) -> GeneratedDataset:
    """Return long and short histories, items of popularity 1 / rank, growing timestamps.

    Lengths are log-normal as MovieLens', where the mean is 145 interactions and the median 68.
    """
    rng = np.random.default_rng(0)
    share = rng.lognormal(0.0, 1.2, size.users)
    lengths = np.maximum(share / share.sum() * size.events, 2).astype(np.int64)
    offsets = np.concatenate(([0, 0], np.cumsum(lengths)))  # no one has id 0
    total = int(offsets[-1])
    rank = np.floor(np.exp(rng.random(total) * np.log(size.items + 1))).astype(np.int64)
    fields = {
        "user_id": torch.from_numpy(np.repeat(np.arange(1, size.users + 1), lengths)),
        "item_id": torch.from_numpy(np.minimum(rank, size.items)),
        "timestamp": torch.from_numpy(1e9 + np.arange(total, dtype=np.float64)),
    }
    log = EventLog(fields, offsets, "user_id", "item_id", "timestamp")
    return GeneratedDataset(log, size.items, size.length, config)


def make_trainer(size: Size, **options: Any) -> tuple[PosTrainer, WindowLoader]:
    """Return a trainer of PosSASRec, default but for the sizes, and a loader of generated data."""
    given = {
        "MAX_ITEM_LIST_LENGTH": size.length,
        "hidden_size": size.d,
        "inner_size": 4 * size.d,
        "n_layers": size.layers,
        "n_heads": max(size.d // 64, 1),
        "attn_dropout_prob": 0.0,
        "train_batch_size": size.batch,
        "show_progress": False,
        **options,
    }
    config = PosConfig("PosSASRec", "ml-100k", config_dict=given)  # its files are not read
    init_seed(config["seed"], config["reproducibility"])
    data = generate(size, config)
    trainer = PosTrainer(config, config.model_class(config, data).to(config["device"]))
    return trainer, WindowLoader(config, data, trainer.adapter.requirements())


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
