"""Loaders: which one training gets, rows or packed windows of all positions, is decided here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from recbole.data.dataloader import AbstractDataLoader, FullSortEvalDataLoader, TrainDataLoader
from recbole.data.interaction import Interaction
from recbole.sampler import RepeatableSampler, Sampler
from torch import Tensor

from recbole_pos.data.batch import (
    BatchRequirements,
    SequenceBatch,
    WindowGatherer,
    fits_on_device,
    prefetch,
    send_to_device,
)
from recbole_pos.data.dataset import PosDataset, PosSequentialDataset
from recbole_pos.data.splits import PHASES
from recbole_pos.data.windows import gather_index
from recbole_pos.distributed import Shard, current_shard
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, shown

MIXED = 16  # blocks whose windows are mixed


class WindowLoader:
    """Batches of packed training windows.

    The order of an epoch depends on the seed and the epoch only, so a resumed run sees the same
    batches. As many random windows as ``length_pool`` batches have are sorted by length and cut
    into batches with about equal numbers of targets, which are then shuffled: little padding, and
    every target weighs about the same in a step. A batch with more than ``train_batch_events`` is
    cut, but never one window (of ``linked`` ones, all of a user's).

    With ``shuffle_block`` windows are not shuffled one by one, but in blocks of neighbours in the
    log, of which ``MIXED`` are mixed at a time: a log on a disk is read nearly in order.
    """

    packed = True  # batches are packed windows, not rows

    def __init__(
        self, config: Options, dataset: PosSequentialDataset, requirements: BatchRequirements
    ) -> None:
        self.dataset = self._dataset = dataset  # RecBole's names for it
        self.log, self.requirements = dataset.log, requirements
        self.windows, self.features = dataset.training_windows(), dataset.features()
        self.batch_size, self.pool = config["train_batch_size"], config["length_pool"]
        self.seed, self.shuffle = config["seed"], config["shuffle"]
        self.block = config["shuffle_block"]
        self.most_events = config["train_batch_events"]
        self.members, self.sizes = self._groups(requirements.linked)
        self.epoch = 0
        self.shard = Shard()
        self._gatherer = self._gatherer_on(torch.device("cpu"))
        self._cached: tuple[int, list[np.ndarray]] | None = None  # an epoch and its batches

    @property
    def targets(self) -> int:
        """Targets in one epoch."""
        return int(self.windows.counts.sum())

    def divide(self, shard: Shard) -> None:
        """Give out this process's part of every batch."""
        self.shard = shard

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches())

    def _batches(self) -> list[np.ndarray]:
        """Return the windows of each batch of this epoch, in order."""
        if self._cached is None or self._cached[0] != self.epoch:
            self._cached = self.epoch, self._make_batches()
        return self._cached[1]

    def _make_batches(self) -> list[np.ndarray]:
        """Order the groups of windows, and cut them into the batches of this epoch."""
        begin = np.cumsum(self.sizes) - self.sizes  # place of each group among the members
        lengths = np.maximum.reduceat(self.windows.lengths[self.members], begin)
        targets = np.add.reduceat(self.windows.counts[self.members], begin)
        rng = np.random.default_rng((self.seed, self.epoch))
        order = self._order_groups(rng, len(begin))
        batches: list[np.ndarray] = []
        before = np.cumsum(self.sizes[order]) - self.sizes[order]  # windows before each group
        pools = np.flatnonzero(np.diff(before // (self.batch_size * self.pool))) + 1
        for groups in np.split(order, pools):
            count = math.ceil(int(self.sizes[groups].sum()) / self.batch_size)
            if self.pool == 1 or not self.shuffle:
                batches += np.array_split(groups, min(count, len(groups)))
                continue
            groups = groups[np.argsort(lengths[groups], kind="stable")]
            of_pool = _split_evenly(groups, targets[groups], count)
            if self.block:
                rng.shuffle(of_pool)
            batches += of_pool
        events = np.add.reduceat(self.windows.lengths[self.members], begin)
        batches = [part for batch in batches for part in self._limit_events(batch, events)]
        if self.shuffle and not self.block:
            batches = [batches[i] for i in rng.permutation(len(batches))]
        return [self.members[gather_index(begin[groups], self.sizes[groups])] for groups in batches]

    def _order_groups(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return the order of groups in an epoch: random, or of mixed blocks of neighbours."""
        if not self.shuffle:
            return np.arange(count)
        if not self.block:
            return rng.permutation(count)
        block = np.arange(count) // self.block
        place = rng.permutation(int(block[-1]) + 1)[block]
        return np.lexsort((rng.random(count), place // MIXED))

    def _limit_events(self, groups: np.ndarray, events: np.ndarray) -> list[np.ndarray]:
        """Cut ``groups`` until no part has more than ``most_events`` events, or it is one group.

        ``events`` are those of each group there is.
        """
        total = int(events[groups].sum())
        if self.most_events is None or total <= self.most_events or len(groups) == 1:
            return [groups]
        parts = _split_evenly(groups, events[groups], math.ceil(total / self.most_events))
        return [limited for part in parts for limited in self._limit_events(part, events)]

    def _groups(self, linked: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows group by group, and the size of each group.

        Windows of a group stay in one batch: under ``linked`` all windows of a user, else one.
        """
        start = self.windows.start
        if not linked:
            return np.arange(len(start)), np.ones(len(start), dtype=np.int64)
        members = np.argsort(start, kind="stable")  # the log is sorted by user, then time
        user = self.log.users.numpy()[start[members]]
        return members, np.unique(user, return_counts=True)[1]

    def __iter__(self) -> Iterator[SequenceBatch]:
        targets = self.windows.counts
        batches = self._batches()
        own = batches if self.shard.is_alone else [self.shard.take_rows(batch) for batch in batches]
        order = torch.from_numpy(np.concatenate(own))
        index = order.to(self._gatherer.device)  # one copy to the device for the whole epoch
        for batch, rows in zip(batches, index.split(list(map(len, own))), strict=True):
            yield self._gatherer.gather(self.shard.take(batch, targets[batch]), rows)

    def batches_on(self, device: torch.device, wanted: str) -> Iterator[SequenceBatch]:
        """Yield the batches of an epoch on the device of the model.

        By ``data_on_device`` the log is copied there once, or batch by batch, each made one ahead.
        """
        here, prepare = self._gatherer.device, self.requirements.prepare
        columns = self.log, self.windows, self.features
        if here != device and prepare is None and fits_on_device(device, wanted, *columns):
            self._gatherer = self._gatherer_on(device)
        if self._gatherer.device == device:
            yield from self
            return
        batches: Iterator[SequenceBatch] = iter(self)
        if prepare is not None:
            batches = map(prepare, batches)
        if device.type == "cuda":
            batches = (batch.pin_memory() for batch in batches)
        if self.shard.is_alone:  # a shard counts the current batch, which must not be the next one
            batches = prefetch(batches)
        for batch in batches:
            yield batch.to(device)

    def gather(self, batch: np.ndarray) -> SequenceBatch:
        """Return the given windows as one packed batch."""
        return self._gatherer.gather(batch)

    def _gatherer_on(self, device: torch.device) -> WindowGatherer:
        return WindowGatherer(self.log, self.windows, self.requirements, device, self.features)


def _split_evenly(groups: np.ndarray, weights: np.ndarray, parts: int) -> list[np.ndarray]:
    """Split [n] groups, in order, into at most ``parts`` parts of about equal total weight."""
    middle = np.cumsum(weights) - weights / 2  # a group goes where its middle lies
    part = np.minimum(middle * parts // weights.sum(), parts - 1)
    return np.split(groups, np.flatnonzero(np.diff(part)) + 1)


class RowLoader(TrainDataLoader):
    """RecBole's loader of rows, one target each, with the interface of ``WindowLoader``."""

    packed = False
    shard = Shard()
    requirements = BatchRequirements()
    collate_fn: Any  # a method of RecBole's, until the batch is divided

    @property
    def targets(self) -> int:
        """Targets in one epoch."""
        return self.sample_size

    def batches_on(self, device: torch.device, wanted: str) -> Iterator[Interaction]:
        """Yield the batches of an epoch on the device of the model; rows are made on the host."""
        pack = self.requirements.pack
        for batch in self:
            if device.type == "cpu":
                yield batch.to(device)
            else:
                yield send_to_device(batch if pack is None else pack(batch), device)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: torch's generator, which checkpoints keep, makes the order."""

    def divide(self, shard: Shard) -> None:
        """Collate only this process's part of every batch from now on."""
        if shard.is_alone or not self.shard.is_alone:
            return
        if self.num_workers:
            raise UsageError("worker: with nproc batches are made in each process; expected 0")
        whole, self.shard = self.collate_fn, shard
        self.collate_fn = lambda index: whole(shard.take(index))


class TargetLoader(FullSortEvalDataLoader):
    """One row for each held-out interaction, for RecBole's general models too.

    RecBole ranks once per user for them; here ``mask_history`` decides what is excluded.
    """

    def __init__(self, config: Options, dataset: PosDataset | PosSequentialDataset) -> None:
        self.uid_field, self.iid_field = dataset.uid_field, dataset.iid_field
        shard = current_shard()
        self.rows = np.arange(shard.rank, len(dataset), shard.size)  # this process's
        self.sample_size = len(self.rows)
        AbstractDataLoader.__init__(self, config, dataset, None, shuffle=False)

    def _init_batch_size_and_step(self) -> None:
        self.step = self.config["eval_batch_size"]
        self.set_batch_size(self.step)

    def collate_fn(self, index: list[int]) -> tuple[Interaction, None, Tensor, Tensor]:
        """Return rows, no history, and the row and item of each target, both [rows] int64."""
        rows = self.transform(self._dataset, self._dataset[self.rows[np.array(index)]])
        return rows, None, torch.arange(len(rows)), rows[self.iid_field]


def make_training_loader(
    config: Options, train: PosDataset | PosSequentialDataset, requirements: BatchRequirements
) -> WindowLoader | RowLoader:
    """Return packed windows under ``augmentation: all_positions``, else rows."""
    name, augmentation = config["model"], config["augmentation"]
    choices = ["prefix", "none"] + ["all_positions"] * requirements.windows
    if augmentation not in choices:
        raise UsageError(
            f"augmentation: {name} can train with {' or '.join(choices)}, found "
            f"{shown(augmentation)}"
        )
    if augmentation != "all_positions":
        rows = RowLoader(config, train, _sampler(config, train), shuffle=config["shuffle"])
        rows.requirements = requirements
        return rows
    if not requirements.causal and config["train_windows"] != "prefix":
        raise UsageError(
            f"train_windows: {name} is not causal, so a window has one target, after its newest "
            f"interaction: prefix; found {shown(config['train_windows'])}"
        )
    return WindowLoader(config, train, requirements)


def make_held_out_loaders(
    config: Options, parts: dict[str, PosDataset | PosSequentialDataset]
) -> dict[str, TargetLoader | None]:
    """Return a loader for validation and for test; None for a phase without targets."""
    loaders: dict[str, TargetLoader | None] = dict.fromkeys(PHASES[1:])
    for phase in loaders:
        if 0 < len(parts[phase]) < current_shard().size:
            raise UsageError(
                f"nproc: {current_shard().size} processes share the {phase} targets, of which "
                f"there are {len(parts[phase])}; use fewer"
            )
        if len(parts[phase]):
            loaders[phase] = TargetLoader(config, parts[phase])
    return loaders


def _sampler(config: Options, train: PosDataset | PosSequentialDataset) -> Any:
    """Return RecBole's sampler of negatives, over training events only; None for no negatives.

    RecBole's own construction counts popularity in all parts.
    """
    options = config["train_neg_sample_args"]
    if options["distribution"] == "none":
        return None
    distribution = options["distribution"], options["alpha"]
    if config["repeatable"]:
        most, sampler = 1, RepeatableSampler(["train"], train, *distribution).set_phase("train")
    else:
        sampler = Sampler(["train"], [train], *distribution).set_phase("train")
        most = max(map(len, sampler.used_ids))
    items = train.inter_feat[train.iid_field].unique().numel()
    if options["distribution"] == "popularity" and most == items:
        raise UsageError(  # RecBole would draw forever
            f"train_neg_sample_args: a user has all {items} items that occur in training, which "
            "leaves none to draw by popularity; use distribution: uniform"
        )
    return sampler
