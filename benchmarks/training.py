"""Models with their data, and training steps as the trainer makes them: time, FLOPs, memory.

Every other benchmark of training builds its model, times its steps and counts its work here.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.loaders import WindowLoader
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.diagnosis import LossWatch
from recbole_pos.experiment.trainer import PosTrainer
from recbole_pos.tables.storage import keep_freed_memory

D, LAYERS = 64, 2
# Options of most models that are timed.
SIZES = {"hidden_size": D, "inner_size": 4 * D, "n_layers": LAYERS, "hidden_dropout_prob": 0.2}
WARM = 30  # steps before timing starts: allocator, kernels and graphs of all sizes


def build(model: str, dataset: str, **options: Any) -> Experiment:
    """Return a model with its data and its trainer, as a run makes them, but without progress bars.

    Args:
        model: name of the model.
        dataset: name of the dataset.
        options: options of the run.
    """
    keep_freed_memory()
    return prepare(PosConfig(model, dataset, None, {"show_progress": False, **options}))


def time_epochs(experiment: Experiment, epochs: int) -> list[float]:
    """Train so many epochs without validation, and return the seconds of each."""
    trainer = experiment.trainer
    loader = trainer.training_loader(experiment.loaders["train"])
    return [trainer._train_epoch(loader, epoch)["seconds"] for epoch in range(epochs)]


def train_epoch(trainer: PosTrainer, loader: Any) -> Iterator[Any]:
    """Train an epoch, and yield each of its batches after the step that it was used in.

    Args:
        trainer: the trainer.
        loader: its loader of training batches.
    """
    trainer.loader = loader  # as ``fit`` sets it; a checkpoint has its state
    trainer.model.train()
    loader.set_epoch(0)
    loss = trainer.adapter.choose_loss(loader.packed)
    # The watch raises an error at a loss that is not finite, which names the number of the step.
    watch = LossWatch(0, trainer.learning_rate)
    keeping = trainer.keep_item_gradient()
    with trainer.precision.rounded_products(), keeping as trainer.kept_gradient:
        for number, batch in enumerate(loader.iterate_batches(trainer.device)):
            trainer._step(loss, batch, watch, number)
            yield batch


@dataclass(frozen=True)
class Timed:
    """What was measured of training steps, after those that warm up.

    Attributes:
        seconds: their time.
        targets: number of items that they learned to predict.
        warm_seconds: time of the steps before them, compiling included.
    """

    seconds: float
    targets: int
    warm_seconds: float


def time_steps(
    trainer: PosTrainer,
    loader: Any,
    seconds: float,
    warm: int = WARM,
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Time training steps until the end of an epoch, or until the time is up.

    Args:
        trainer: the trainer.
        loader: its loader of training batches.
        seconds: time after which to stop.
        warm: number of steps before timing starts; half of the epoch at most.
        clock: returns the present time in seconds.
    """
    warm = min(warm, len(loader) // 2)
    targets = steps = 0
    begun = started = clock()
    for steps, batch in enumerate(train_epoch(trainer, loader), 1):
        targets += len(batch)
        if steps == warm:  # from here on it counts
            synchronise(trainer.device)
            targets, started = 0, clock()
        elif steps > warm and clock() - started > seconds:  # the host is few steps ahead
            break
    synchronise(trainer.device)
    return Timed(clock() - started, targets, started - begun)


def extrapolate_epoch(trainer: PosTrainer, data: Any, seconds: float, warm: int = WARM) -> float:
    """Return the CPU-seconds of an epoch, from its steps of the first seconds.

    Args:
        trainer: the trainer.
        data: the loader of the training part.
        seconds: CPU-seconds after which to stop.
        warm: number of steps before timing starts; half of the epoch at most.
    """
    loader = trainer.training_loader(data)
    timed = time_steps(trainer, loader, seconds, warm, time.process_time)
    return timed.seconds / timed.targets * loader.num_targets


def epoch_flops(
    loader: WindowLoader, d: int, layers: int, items: int, projections: int = 4, products: int = 2
) -> float:
    """Return the floating-point operations of an epoch of a Transformer, padding not counted.

    A backward pass costs two forward passes, and a product of matrices two operations for each
    multiplication: hence the 6.

    Args:
        loader: loader of training windows, which knows their lengths.
        d: hidden size.
        layers: number of layers.
        items: number of items, over which each target is scored.
        projections: [d, d] projections of each input in a layer; the feed-forward of 4 d counts as
            8.
        products: products of all pairs of inputs in a layer, such as scores and their sum of
            values.
    """
    lengths = torch.from_numpy(loader.windows.lengths).double()
    m, pairs = lengths.sum(), (lengths * (lengths + 1) / 2).sum()
    per_layer = m * (projections + 8) * d**2 + products * pairs * d
    return float(6 * (layers * per_layer + loader.num_targets * d * items))


def peak_flops(device: torch.device | str, dtype: torch.dtype, n: int) -> float:
    """Return the operations a second of a product of two [n, n] matrices, the fastest of 5 times.

    Args:
        device: where to compute.
        dtype: type of the matrices.
        n: their size.
    """
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / min(mean_seconds(lambda: a @ b, 10) for _ in range(5))


def mean_seconds(call: Callable[[], Any], times: int) -> float:
    """Return the mean time of several calls, until a GPU has finished their work."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.timeit(times).mean)


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
