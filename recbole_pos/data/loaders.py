"""Loaders of batches: RecBole's rows or packed windows for training, targets for evaluation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from recbole.data.dataloader import AbstractDataLoader, FullSortEvalDataLoader, TrainDataLoader
from recbole.data.interaction import Interaction
from recbole.sampler import RepeatableSampler, Sampler
from torch import Tensor

from recbole_pos.data.dataset import read_history_features
from recbole_pos.data.recbole_view import RecBoleView
from recbole_pos.data.splits import PHASES, VALID
from recbole_pos.data.windows import (
    BatchRequirements,
    SequenceBatch,
    WindowGatherer,
    fits_on_device,
    prefetch,
    send_to_device,
)
from recbole_pos.distributed import Shard, current_shard
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, shown


class WindowLoader:
    """Yields batches of packed training windows (a window: inputs of one user that follow).

    The order of an epoch depends on the seed and the epoch only, so a resumed run sees the same
    batches. As many random windows as ``length_pool`` batches have are sorted by length and cut
    into batches with about equal numbers of targets, which are then shuffled: little padding, and
    every target weighs about the same in a step. A batch with more than ``train_batch_events``
    inputs is cut, but never within a group of windows.

    A group are the windows that must come in the same batch: all windows of a user if the model
    takes these together (``requirements.linked``), else a single window.

    Attributes:
        dataset: the training interactions, as RecBole's classes read them.
        log: the interactions; a window is a range of its rows.
        windows: all training windows.
        features: columns of attributes of interactions and users that batches carry.
        requirements: what the model declares about its batches.
        num_targets: number of targets in one epoch, of all processes.
        epoch: number of the epoch whose batches are yielded.
        shard: the part of every batch that this process yields: all of it, until :meth:`divide`.
    """

    packed = True  # batches are packed windows, not rows

    def __init__(
        self, config: Options, dataset: RecBoleView, requirements: BatchRequirements
    ) -> None:
        """Cut the histories of users into windows, and read how batches of these are formed.

        The inputs of a window are interactions of one user that follow each other. The target of an
        input is the interaction after it.

        Args:
            config: the configuration.
            dataset: the training interactions, as RecBole's classes read them.
            requirements: what the model declares about its batches, such as that they carry times
                or (``linked``) all windows of a user.
        """
        # The data. ``log`` has all interactions, and a window is a range of its rows. RecBole's
        # code looks for the dataset of a loader under the name ``_dataset``.
        self.dataset = self._dataset = dataset
        self.log = dataset.data.log
        self.windows = dataset.data.make_training_windows()
        self.num_targets = int(self.windows.num_targets.sum())
        self.features = read_history_features(dataset.data)
        self.requirements = requirements

        # Options of the batches. Each has about ``batch_size`` windows, and at most ``max_inputs``
        # inputs (None for no limit). To get batches of like lengths, the windows of ``pool_size``
        # batches are sorted by length together.
        self.batch_size, self.pool_size = config["train_batch_size"], config["length_pool"]
        self.max_inputs = config["train_batch_events"]
        self.seed, self.shuffle = config["seed"], config["shuffle"]

        # The trainer sets both: the epoch, since each shuffles the windows in another way, and the
        # part of every batch that this process yields, at first all of it.
        self.epoch, self.shard = 0, Shard()
        # Given the indices of some windows, the gatherer makes their batch. It keeps a copy of the
        # data on the device on which it does so, at first the CPU.
        self._gatherer = self._make_gatherer(torch.device("cpu"))
        # The batches of one epoch are kept: its number, and the windows of each batch.
        self._cached: tuple[int, list[np.ndarray]] | None = None

    def divide(self, shard: Shard) -> None:
        """Yield only this process's part (shard) of every batch, where several train together."""
        self.shard = shard

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._get_batches())

    def _group_windows(self) -> tuple[pd.DataFrame, list[np.ndarray] | None]:
        """Find the groups of windows that must come in the same batch.

        Some models need all windows of a user in one batch (``requirements.linked``): a group has
        the windows of a user. For example, if the windows 0, 1 and 2 are of the users 5, 3 and 5,
        the groups are [1] (of user 3) and [0, 2] (of user 5). For other models each window is a
        group of its own.

        Returns:
            groups: a row for each group, with the columns ``windows`` (how many it has),
                ``max_length`` (inputs of its longest window), ``inputs`` and ``targets`` (how many
                its windows have together).
            windows_by_group: for each group the indices of its windows, oldest first, such as [0,
                2]; None if group i is window i.
        """
        # The number of inputs and of targets of each window.
        lengths, num_targets = self.windows.lengths, self.windows.num_targets
        if not self.requirements.linked:
            sizes = {"windows": 1, "max_length": lengths, "inputs": lengths, "targets": num_targets}
            return pd.DataFrame(sizes), None

        # ``windows.start`` is the row in the log where a window begins. The log is sorted by user
        # and time, so sorting windows by it puts those of a user together, oldest first.
        windows = np.argsort(self.windows.start, kind="stable")
        users = self.log.find_users(self.windows.start[windows])
        table = pd.DataFrame({"length": lengths[windows], "targets": num_targets[windows]})
        groups = table.groupby(users).agg(
            windows=("length", "size"),
            max_length=("length", "max"),
            inputs=("length", "sum"),
            targets=("targets", "sum"),
        )
        return groups, np.split(windows, groups["windows"].cumsum()[:-1])

    def _get_batches(self) -> list[np.ndarray]:
        """Return the windows of each batch of this epoch, from the cache if they are there."""
        if self._cached is None or self._cached[0] != self.epoch:
            self._cached = self.epoch, self._make_batches()
        return self._cached[1]

    def _make_batches(self) -> list[np.ndarray]:
        """Distribute the training windows over the batches of this epoch, at random.

        What is distributed are groups: windows that must come in the same batch, such as all of a
        user. For most models every window is a group of its own.

        Returns:
            For each batch the indices of its windows, [k] int64.
        """
        # ``groups`` is a table with a row for each group: how many windows and inputs it has.
        # ``windows_by_group`` has the indices of its windows; None if group i is window i.
        groups, windows_by_group = self._group_windows()
        num_windows, num_inputs = groups["windows"].to_numpy(), groups["inputs"].to_numpy()
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(len(groups)) if self.shuffle else np.arange(len(groups))

        # Cut the groups, in this order, into pools; each pool into batches, in which windows are
        # about equally long; and batches with more than ``max_inputs`` inputs into smaller ones.
        batches: list[np.ndarray] = []
        for pool in self._cut_into_pools(order, num_windows[order]):
            for batch in self._cut_into_batches(pool, groups.iloc[pool]):
                batches += self._limit_inputs(batch, num_inputs)
        if self.shuffle:
            batches = [batches[i] for i in rng.permutation(len(batches))]

        # Replace the groups of each batch by their windows.
        if windows_by_group is None:
            return batches
        return [np.concatenate([windows_by_group[i] for i in batch]) for batch in batches]

    def _cut_into_pools(self, groups: np.ndarray, num_windows: np.ndarray) -> list[np.ndarray]:
        """Cut groups, in their order, into pools with about the windows of ``pool_size`` batches.

        For example, a pool has 100 windows. Groups with [60, 50, 70] windows have [0, 60, 110]
        windows before them, so they go to the pools [0, 0, 1].

        Args:
            groups: [n] numbers of the groups.
            num_windows: [n] how many windows each has.

        Returns:
            For each pool the numbers of its groups.
        """
        num_before = np.cumsum(num_windows) - num_windows
        pool_by_group = num_before // (self.batch_size * self.pool_size)
        return _split_where_different(groups, pool_by_group)

    def _cut_into_batches(self, pool: np.ndarray, sizes: pd.DataFrame) -> list[np.ndarray]:
        """Cut a pool of groups into batches, each with about ``batch_size`` windows.

        The groups are sorted by length first, so that the windows of a batch are about equally
        long, and cut into batches with about equal numbers of targets. Without shuffling, or with
        ``pool_size`` 1, they stay in their order, and batches have about equal numbers of groups.

        Args:
            pool: [n] numbers of groups.
            sizes: their rows in the table of groups, see :meth:`_group_windows`.

        Returns:
            For each batch the numbers of its groups.
        """
        num_batches = math.ceil(sizes["windows"].sum() / self.batch_size)
        if self.pool_size == 1 or not self.shuffle:
            return np.array_split(pool, min(num_batches, len(pool)))
        by_length = np.argsort(sizes["max_length"].to_numpy(), kind="stable")
        num_targets = sizes["targets"].to_numpy()
        return _split_evenly(pool[by_length], num_targets[by_length], num_batches)

    def _limit_inputs(self, batch: np.ndarray, num_inputs: np.ndarray) -> list[np.ndarray]:
        """Cut a batch into smaller ones, each of at most ``max_inputs`` inputs or of one group.

        If there is no limit (``max_inputs`` is None), the batch stays as it is.

        Args:
            batch: [k] numbers of the groups in the batch.
            num_inputs: [groups] number of inputs of every group.

        Returns:
            For each smaller batch the numbers of its groups.
        """
        if self.max_inputs is None or len(batch) == 1:
            return [batch]
        total = int(num_inputs[batch].sum())
        if total <= self.max_inputs:
            return [batch]
        # ``_split_evenly`` cuts the groups, in their order, into parts of about as many inputs
        # each. One that still has too many, since groups are not of equal size, is cut again.
        cuts = _split_evenly(batch, num_inputs[batch], math.ceil(total / self.max_inputs))
        return [part for cut in cuts for part in self._limit_inputs(cut, num_inputs)]

    def __iter__(self) -> Iterator[SequenceBatch]:
        """Yield the batches of this epoch, packed on the device of ``_gatherer``.

        If several processes train together, each yields its own part of every batch.
        """
        # For each batch the indices of its windows: of all processes, and of this one (its part is
        # described by ``shard``).
        batches = self._get_batches()
        own_batches = [self.shard.take_rows(batch) for batch in batches]

        # Copy the indices of all batches to the device at once, and divide them there. A copy for
        # each batch would have to wait until the device has finished the batch before.
        all_indices = torch.from_numpy(np.concatenate(own_batches)).to(self._gatherer.device)
        indices_on_device = all_indices.split(list(map(len, own_batches)))

        # The shard keeps how many targets the current batch has, in this process and in all: the
        # loss is weighted by these. ``gather`` makes the batch: it reads the indices on the host,
        # for its size, and on the device, for its content.
        for batch, own_batch, indices in zip(batches, own_batches, indices_on_device, strict=True):
            self.shard.count_targets(self.windows.num_targets[batch])
            yield self._gatherer.gather(own_batch, indices)

    def iterate_batches(self, device: torch.device) -> Iterator[SequenceBatch]:
        """Yield the batches of an epoch on the device of the model.

        If all training data fit there, they are copied once, and batches are made on the device.
        Else each batch is made on the host and copied.

        Args:
            device: device of the model.
        """
        # ``iter(self)`` makes the batches where the training data are.
        self._move_data(device)
        batches = iter(self)
        if self._gatherer.device == device:
            yield from batches
            return

        # The data stay on the host, so each batch is made there and copied. Some models have a
        # function ``prepare``, which computes sizes of the batch before that.
        if self.requirements.prepare is not None:
            batches = map(self.requirements.prepare, batches)
        if device.type == "cuda":
            batches = (batch.pin_memory() for batch in batches)
        # A thread makes the next batch while the model uses this one (``prefetch``). Not if several
        # processes train together: making a batch sets the number of its targets in the shard, and
        # the loss of the batch before still needs its own number.
        if self.shard.is_alone:
            batches = prefetch(batches)
        for batch in batches:
            yield batch.to(device)

    def _move_data(self, device: torch.device) -> None:
        """Copy the training data to a device and make batches there from now on, if possible.

        It is not possible if the data do not fit there, or if the model has a function ``prepare``
        for batches, which must run on the host.
        """
        # The gatherer makes the batches, and has a copy of the data on its device.
        if self._gatherer.device == device or self.requirements.prepare is not None:
            return
        if fits_on_device(device, self.log, self.windows, self.features):
            self._gatherer = self._make_gatherer(device)

    def gather(self, batch: np.ndarray) -> SequenceBatch:
        """Return the windows of the given numbers as one packed batch."""
        numbers = torch.from_numpy(batch).to(self._gatherer.device)
        return self._gatherer.gather(batch, numbers)

    def _make_gatherer(self, device: torch.device) -> WindowGatherer:
        return WindowGatherer(self.log, self.windows, self.requirements, device, self.features)


def _split_where_different(values: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Split an array between neighbours whose keys differ: [5, 6, 7] by [0, 0, 1] to [5, 6], [7].

    Args:
        values: [n].
        keys: [n] whole numbers.
    """
    return np.split(values, np.flatnonzero(np.diff(keys)) + 1)


def _split_evenly(groups: np.ndarray, weights: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Split groups, in their order, into at most ``num_parts`` parts of about equal weight.

    For example, groups of the weights [1, 1, 2, 4] have their middles at [0.5, 1.5, 3, 6] of 8. Of
    two parts, the first gets the three groups with middles below 4, and the second gets the last.

    Args:
        groups: [n] numbers of the groups.
        weights: [n] weight of each, such as its number of targets.
        num_parts: number of parts; there are fewer if a part would be empty.

    Returns:
        The numbers of the groups of each part.
    """
    # A group belongs to the part in which the middle of its weight lies.
    middle = np.cumsum(weights) - weights / 2
    part = np.minimum(middle * num_parts // weights.sum(), num_parts - 1)
    return _split_where_different(groups, part)


class RowLoader(TrainDataLoader):
    """RecBole's loader of rows, one target each, with the interface of ``WindowLoader``."""

    packed = False
    shard = Shard()
    requirements = BatchRequirements()
    collate_fn: Any  # a method of RecBole's, until the batch is divided

    @property
    def num_targets(self) -> int:
        """Number of targets in one epoch."""
        return self.sample_size

    def iterate_batches(self, device: torch.device) -> Iterator[Interaction]:
        """Yield the batches of an epoch on the device of the model; rows are made on the host.

        For a GPU, a model's own ``pack`` turns RecBole's rows into its batch before the copy, since
        sizes that depend on the values would have to be read back from the GPU.

        Args:
            device: device of the model.
        """
        pack = self.requirements.pack
        for batch in self:
            if pack is not None and device.type != "cpu":
                batch = pack(batch)
            yield send_to_device(batch, device)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: torch's generator, which checkpoints keep, makes the order."""

    def divide(self, shard: Shard) -> None:
        """Let this process make only its share of every batch, where several train together.

        A shard says which rows of a batch are those of this process. RecBole's ``collate_fn`` makes
        a batch of the numbers of its rows, so it is replaced by a function that gives it only the
        numbers of this share. Nothing changes if there is only one process, or if the loader was
        divided before.

        Raises:
            UsageError: if the option ``worker`` asks for worker processes to make batches.
        """
        if shard.is_alone or not self.shard.is_alone:
            return
        # ``shard.take`` also stores the number of targets of a batch, by which its loss is
        # weighted. A worker process would store it in a copy of the shard, and training not see it.
        if self.num_workers:
            raise UsageError(
                f"worker: found {self.num_workers}, expected 0 with nproc: each process makes its "
                "batches itself"
            )
        collate, self.shard = self.collate_fn, shard
        self.collate_fn = lambda index: collate(shard.take(index))


class TargetLoader(FullSortEvalDataLoader):
    """An example for each held-out target, for RecBole's general models too.

    RecBole ranks once per user for them; here ``mask_history`` decides what is excluded.

    Attributes:
        num_targets: number of targets that all processes evaluate together.
        rows: [n] int64 numbers of the targets that this process evaluates.
    """

    def __init__(self, config: Options, dataset: RecBoleView) -> None:
        """Choose the targets of the evaluation for which this process ranks the items.

        With n processes each takes every n-th target: the first of two takes the rows 0, 2, 4, ...

        Args:
            config: the configuration.
            dataset: the view of the phase, valid or test, with a row for each target.
        """
        self.uid_field, self.iid_field = dataset.uid_field, dataset.iid_field

        # All targets; in validation perhaps those of a sample of users (option ``valid_users``).
        rows = np.arange(len(dataset))
        if dataset.phase == PHASES[VALID]:
            rows = find_validation_rows(config, dataset)
        self.num_targets = len(rows)  # of all processes

        # the number of this process (``rank``), and how many there are (``size``)
        shard = current_shard()
        self.rows = rows[shard.rank :: shard.size]
        self.sample_size = len(self.rows)  # RecBole's name for how many rows a loader has
        # The base class, RecBole's full-sort loader, would list the items of each user here. So it
        # is passed over: this calls the initialiser of its own base class.
        AbstractDataLoader.__init__(self, config, dataset, sampler=None, shuffle=False)

    def _init_batch_size_and_step(self) -> None:
        """Set the number of rows of a batch; RecBole's constructor calls this."""
        self.step = self.config["eval_batch_size"]
        self.set_batch_size(self.step)

    def collate_fn(self, index: list[int]) -> tuple[Interaction, None, Tensor, Tensor]:
        """Return examples, no history, and the row and item of each target, both [b] int64."""
        rows = self.transform(self._dataset, self._dataset[self.rows[np.array(index)]])
        return rows, None, torch.arange(len(rows)), rows[self.iid_field]


def find_validation_rows(config: Options, dataset: Any) -> np.ndarray:
    """Return which validation targets are evaluated: all, or those of a sample of the users.

    Args:
        config: options; ``valid_users`` is the size of the sample, None for all users.
        dataset: the dataset of any phase; its validation targets are numbered from 0 in the order
            of the interactions.

    Returns:
        [n] int64 numbers of the targets, in ascending order.
    """
    split = dataset.split
    users = split.log.users.numpy()[split.find_targets(VALID)]
    if config["valid_users"] is None:
        return np.arange(len(users))
    # The sample depends on the names of the users only, so every run has the same one.
    names = dataset.field2id_token[dataset.uid_field]
    return np.flatnonzero(np.isin(users, sample_users(users, names, config["valid_users"])))


def sample_users(users: np.ndarray, names: np.ndarray, num_users: int) -> np.ndarray:
    """Return the ids of a random sample of users, [num_users] int64 or fewer if there are fewer.

    A user's random number is a digest (a hash, read as a whole number) of the name, so every run
    has the same; the users with the smallest numbers are taken.

    Args:
        users: [targets] int64 ids to choose from, which may occur several times.
        names: [users] name of each user by id.
        num_users: size of the sample.
    """
    # The number of the user ann is the digest of the text "valid ann": PHASES[VALID] is "valid".
    ids = np.unique(users)
    texts = (f"{PHASES[VALID]} {name}" for name in names[ids].tolist())
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    numbers = np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64)
    return ids[np.argsort(numbers, kind="stable")[:num_users]]


def make_training_loader(
    config: Options, train: RecBoleView, requirements: BatchRequirements
) -> WindowLoader | RowLoader:
    """Return the loader of training batches that suits the model and the options.

    Args:
        config: the configuration. Under ``augmentation: all_positions`` a batch is packed windows,
            with a target at every position; else it is RecBole's rows of one target each.
        train: the training interactions.
        requirements: what the model declares about its batches, such as whether it can learn from
            windows, and whether it is causal.

    Raises:
        UsageError: if the model cannot train as the options say.
    """
    # Augmentation: which targets a user's interactions give. ``prefix``: each, with the history
    # before it, as a row; ``none``: the newest only; ``all_positions``: all of a window at once.
    name, augmentation = config["model"], config["augmentation"]
    choices = ["prefix", "none"]
    if requirements.windows:
        choices.append("all_positions")
    if augmentation not in choices:
        raise UsageError(
            f"augmentation: {name} can train with {' or '.join(choices)}, found "
            f"{shown(augmentation)}"
        )
    if augmentation != "all_positions":
        loader = RowLoader(config, train, _make_sampler(config, train), shuffle=config["shuffle"])
        loader.requirements = requirements  # RecBole's constructor does not take them
        return loader

    # ``train_windows`` says how histories are cut into windows: ``prefix`` gives a target only to
    # the newest input of a window, all other values to earlier ones, too. A model that is not
    # causal would see the targets of these, which come later in the same window.
    if not requirements.causal and config["train_windows"] != "prefix":
        raise UsageError(
            f"train_windows: {name} is not causal, so a window has one target, after its newest "
            f"interaction: prefix; found {shown(config['train_windows'])}"
        )
    return WindowLoader(config, train, requirements)


def make_held_out_loaders(
    config: Options, parts: dict[str, RecBoleView]
) -> dict[str, TargetLoader | None]:
    """Return the loaders of the phases ``valid`` and ``test``, by name; None without targets.

    Args:
        config: the configuration.
        parts: dataset of each phase, by name.

    Raises:
        UsageError: for more processes than targets: a process without a target would leave the
            others waiting for it.
    """
    num_processes = current_shard().size
    loaders: dict[str, TargetLoader | None] = {}
    for phase in PHASES[1:]:  # all but training
        loader = TargetLoader(config, parts[phase]) if len(parts[phase]) else None
        if loader is not None and loader.num_targets < num_processes:
            raise UsageError(
                f"nproc: {num_processes} processes share the {phase} targets, of which there are "
                f"{loader.num_targets}; use fewer"
            )
        loaders[phase] = loader
    return loaders


def _make_sampler(config: Options, train: RecBoleView) -> Any:
    """Return RecBole's sampler of negative items; None if the model samples none.

    A negative is a random item that the user has not had, with which the loss compares the target.

    The sampler knows training interactions only. RecBole itself would make it of all parts, so that
    held-out interactions would count in the popularity of items.

    Args:
        config: configuration. ``train_neg_sample_args`` says from which distribution items are
            drawn: uniform, popularity (in proportion to its power ``alpha``), or none. With
            ``repeatable`` a negative may be any item but the target itself.
        train: the training interactions.
    """
    options = config["train_neg_sample_args"]
    distribution, alpha = options["distribution"], options["alpha"]
    if distribution == "none":
        return None
    if config["repeatable"]:
        return RepeatableSampler(["train"], train, distribution, alpha).set_phase("train")
    return Sampler(["train"], [train], distribution, alpha).set_phase("train")
