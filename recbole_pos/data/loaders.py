"""Loaders: RecBole's for rows, and one for packed windows of all positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from recbole.data.utils import create_samplers, get_dataloader
from recbole.sampler import Sampler

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.data.dataset import PosDataset, PosSequentialDataset
from recbole_pos.data.splits import PHASES
from recbole_pos.data.windows import gather_index


class WindowLoader:
    """Batches of packed training windows.

    The order of an epoch depends on the seed and the epoch alone, so a resumed run sees the same
    batches. ``length_pool`` batches' worth of random windows are sorted by length and cut into
    batches with about equal numbers of events, which are then shuffled: little padding, and every
    target weighs about the same in a step.

    Args:
        dataset: the training part.
        batch_size: windows per batch on average.
        pool: batches sorted together; 1 for none.
        seed: of the order.
        needs_time: whether batches carry times.
    """

    def __init__(
        self,
        dataset: PosSequentialDataset,
        *,
        batch_size: int,
        pool: int,
        seed: int,
        shuffle: bool,
        needs_time: bool,
    ) -> None:
        self.log = dataset.log
        self.windows = dataset.training_windows()
        self.batch_size, self.pool, self.seed = batch_size, pool, seed
        self.shuffle, self.needs_time = shuffle, needs_time
        self.epoch = 0
        self._made: tuple[int, list[np.ndarray]] | None = None

    @property
    def targets(self) -> int:
        """Targets in one epoch."""
        return self.windows.targets

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches())

    def _batches(self) -> list[np.ndarray]:
        """The windows of each batch of this epoch, in order."""
        if self._made is None or self._made[0] != self.epoch:
            self._made = self.epoch, self._make_batches()
        return self._made[1]

    def _make_batches(self) -> list[np.ndarray]:
        lengths = self.windows.lengths
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(len(lengths)) if self.shuffle else np.arange(len(lengths))
        size = self.batch_size * self.pool
        batches: list[np.ndarray] = []
        for start in range(0, len(order), size):
            pool = order[start : start + size]
            count = -(-len(pool) // self.batch_size)
            if self.pool == 1 or not self.shuffle:
                batches += np.array_split(pool, count)
                continue
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            middle = np.cumsum(lengths[pool]) - lengths[pool] / 2
            share = np.minimum(middle * count // lengths[pool].sum(), count - 1)
            batches += [part for part in np.split(pool, np.flatnonzero(np.diff(share)) + 1)]
        if self.shuffle:
            batches = [batches[i] for i in rng.permutation(len(batches))]
        return batches

    def __iter__(self) -> Iterator[SequenceBatch]:
        for batch in self._batches():
            yield self.gather(batch)

    def gather(self, batch: np.ndarray) -> SequenceBatch:
        """The given windows as one packed batch."""
        start, end = self.windows.start[batch], self.windows.end[batch]
        first, lengths = self.windows.first[batch], end - start
        event = gather_index(start, lengths)
        positions = None
        if (first > start).any():
            positions = torch.from_numpy(np.flatnonzero(event >= np.repeat(first, lengths)))
        event = torch.from_numpy(event)
        targets = event + 1 if positions is None else event[positions] + 1
        return SequenceBatch(
            items=self.log.items[event],
            lengths=torch.from_numpy(lengths),
            targets=self.log.items[targets],
            positions=positions,
            times=self.log.times[event] if self.needs_time else None,
        )


def build_loaders(config: Any, dataset: PosDataset | PosSequentialDataset) -> dict[str, Any]:
    """RecBole's loader for each phase, over the plugin's datasets.

    Popularity-weighted negatives are drawn from training events alone; RecBole counts all.
    """
    parts = dict(zip(PHASES, dataset.build(), strict=True))
    samplers = list(create_samplers(config, parts["train"], list(parts.values())))
    negatives = config["train_neg_sample_args"]
    if negatives["distribution"] == "popularity" and isinstance(dataset, PosDataset):
        train_only = Sampler(["train"], [parts["train"]], "popularity", negatives["alpha"])
        samplers[0] = train_only.set_phase("train")
    loaders = {}
    for (phase, part), sampler in zip(parts.items(), samplers, strict=True):
        if not len(part):
            loaders[phase] = None
            continue
        kind = get_dataloader(config, phase)
        loaders[phase] = kind(config, part, sampler, shuffle=phase == "train" and config["shuffle"])
    return loaders
