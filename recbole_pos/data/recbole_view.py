"""A dataset as RecBole's classes read it: its models, loaders, samplers and evaluator.

The view is made of a finished ``Dataset``: none of RecBole's loading steps run. Its rows, one for
each target, are made when they are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from recbole.data.dataset import SequentialDataset
from recbole.data.interaction import Interaction
from recbole.utils import FeatureSource, FeatureType, ModelType
from torch import Tensor

from recbole_pos.data.dataset import Columns, Dataset, read_feature_names, read_history_features
from recbole_pos.data.preparation import read_dataset
from recbole_pos.data.splits import PHASES, TRAIN
from recbole_pos.data.targets import Split, find_selected
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.values import Options, shown


class RecBoleView(SequentialDataset):
    """RecBole's dataset class over a finished dataset, for general models too.

    RecBole's models and loaders read the attributes that its own class takes from files; an
    attribute that is not set here is looked up in ``data``.

    Attributes:
        data: the dataset.
        phase: train, valid or test; None for a view of all interactions that have a history.
        config: configuration of the dataset.
        dataset_name, dataset_path: its name, and the folder that holds its folder.
        uid_field, iid_field, time_field: names of the fields of users, items and times.
        label_field: name of a field of labels, which RecBole's loaders add to rows.
        max_item_list_len: L, most interactions of a history.
        item_list_length_field: name of the field with the length of a history.
        field2id_token, field2token_id: field -> names by id, and ids by name.
        user_feat, item_feat: the tables of users and items; None if not loaded.
        inter_feat: the rows of the phase.
        field2type: field -> token, float, token_seq or float_seq.
        field2source: field -> the table that it is in; of ids, user_id and item_id.
        field2seqlen: field -> length of its lists; 1 if it has none.
        field2bucketnum: field of numbers -> 2, which RecBole sets where numbers are no buckets.
    """

    inter_feat: Any

    def __init__(self, data: Dataset, phase: str | None = None) -> None:
        """Set the attributes that RecBole's models and loaders read of a dataset.

        RecBole's own constructor, which reads them from files, is not called. Here they come from a
        dataset that is read already.

        Args:
            data: the dataset.
            phase: train, valid or test, the part of the split whose interactions are the rows of
                the view; None for all interactions.
        """
        config = data.config
        self.data, self.phase, self.config = data, phase, config

        # Names that RecBole's models and loaders read: of the dataset, its folder and its fields.
        self.dataset_name, self.dataset_path = data.dataset_name, config["data_path"]
        self.uid_field, self.iid_field = data.uid_field, data.iid_field
        self.time_field, self.label_field = data.time_field, config["LABEL_FIELD"]

        # Histories: the most items of one, and the field with the number of items.
        self.max_item_list_len = config["MAX_ITEM_LIST_LENGTH"]
        self.item_list_length_field = config["ITEM_LIST_LENGTH_FIELD"]

        # Names by id, and the tables of interactions, users and items. RecBole's Interaction is a
        # table: field -> tensor.
        self.field2id_token, self.field2token_id = data.field2id_token, data.field2token_id
        tables = {name: Interaction(self._pair(table)) for name, table in data.tables.items()}
        self.user_feat, self.item_feat = tables.get("user"), tables.get("item")
        self._describe_fields()

        # The rows of this view are ``inter_feat``: at first all interactions, with their own fields
        # only. From these fields RecBole's ``_aug_presets`` makes the names of the fields of
        # histories, such as ``self.item_id_list_field`` = "item_id_list".
        interactions = self.inter_feat = tables["inter"]
        is_sequential = config["MODEL_TYPE"] == ModelType.SEQUENTIAL
        if is_sequential:
            self._aug_presets()

        # Then the rows of the phase. A sequential model gets a history in each row.
        if is_sequential:
            self.inter_feat = self._make_rows_with_history(interactions, phase)
        elif phase is not None:
            self.inter_feat = self._make_rows_without_history(interactions, phase)

    def _pair(self, columns: Columns) -> Columns:
        """Return the columns of a table with numbers in the form in which RecBole embeds them.

        RecBole embeds the fields that the option ``numerical_features`` names. It takes each number
        of them as a pair of the number and 1: a column [n] becomes [n, 2].
        """
        numerical = set(self.config["numerical_features"] or ()) - {self.time_field}
        paired = dict(columns)
        for field in columns.keys() & numerical:
            paired[field] = torch.stack((columns[field], torch.ones_like(columns[field])), -1)
        return paired

    def _describe_fields(self) -> None:
        """Set what RecBole's models read about each field, to choose and size its embedding.

        ``field2type`` is its type, such as token. ``field2source`` is the table that it is in.
        ``field2seqlen`` is the length of its lists, 1 if it has none. ``field2bucketnum`` is there
        for numbers only, which RecBole can divide into buckets; it is 2 where they are not divided.
        """
        data = self.data
        self.field2type = {field: FeatureType(kind) for field, kind in data.kinds.items()}
        self.field2source, self.field2seqlen = {}, {}
        for name, table in data.tables.items():
            for field, column in table.items():
                self.field2source[field] = FeatureSource(name)
                has_lists = data.kinds[field].endswith("seq")
                self.field2seqlen[field] = column.size(1) if has_lists else 1
        self.field2source[data.uid_field] = FeatureSource.USER_ID
        self.field2source[data.iid_field] = FeatureSource.ITEM_ID
        self.field2bucketnum = {field: 2 for field, kind in data.kinds.items() if "float" in kind}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that this view does not have itself from the dataset, ``self.data``.

        Python calls this only for missing attributes. Those with names such as ``__deepcopy__`` are
        not looked up, nor any while ``data`` is not set yet, as in an object that pickle fills.
        """
        if name.startswith("__") or "data" not in vars(self):
            raise AttributeError(name)
        return getattr(self.data, name)

    def _make_rows_with_history(self, interactions: Interaction, phase: str | None) -> PrefixRows:
        """Return the rows of a sequential model: interactions, each with the history before it.

        A view of a phase (train, valid or test) has its targets, the interactions to predict. For
        training, the option ``augmentation: none`` leaves each user only the newest of them. A view
        of the whole dataset (``phase`` is None) has all interactions but the first of each user.

        Args:
            interactions: all interactions of the dataset, with the columns of the log in the form
                in which RecBole's models read numbers (see ``_pair``).
            phase: train, valid, test or None.
        """
        data, config = self.data, self.config
        log = replace(data.log, fields=interactions.interaction)
        return PrefixRows(
            replace(data.split, log=log),
            phase=None if phase is None else PHASES.index(phase),
            only_newest=phase == "train" and config["augmentation"] == "none",
            max_length=self.max_item_list_len,
            suffix=config["LIST_SUFFIX"],
            length_field=self.item_list_length_field,
            features=read_history_features(data),
        )

    def _make_rows_without_history(self, interactions: Interaction, phase: str) -> Interaction:
        """Return the interactions of a phase for general models, which read no histories.

        For validation and test these are the targets, the interactions to predict. For training
        they are all training interactions, also the first of each user. If the option
        ``target_events`` names kinds of interactions, such as purchases, training has only those.

        Args:
            interactions: all interactions of the dataset.
            phase: train, valid or test.
        """
        data = self.data
        if phase == "train":
            mask = data.part == TRAIN
            # [interactions] bool, which ones ``target_events`` names; None if it is not set.
            target_events = self.config["target_events"]
            is_selected = find_selected(target_events, data.log, data.missing, data.field2id_token)
            if is_selected is not None:
                mask &= is_selected
        else:
            # [interactions] bool, which ones are targets of the phase, given as its number: 1 or 2.
            mask = data.split.find_targets(PHASES.index(phase))

        rows = torch.from_numpy(np.flatnonzero(mask))
        columns = {name: column[rows] for name, column in interactions.interaction.items()}
        # A further column, called TARGET_EVENT, has the number of each row in the log.
        return Interaction({**columns, TARGET_EVENT: rows})

    def build(self) -> list[RecBoleView]:
        """Return the views of the phases, for RecBole's ``data_preparation``."""
        return list(make_views(self.data).values())

    def join(self, df: Interaction) -> Interaction:
        """Return rows with the columns of the tables of users and items added, as RecBole does.

        Rows may have columns of ``user_features`` already, with NaN where a number is missing. They
        keep these: RecBole would replace them by those of its table, which has the mean for NaN.

        Args:
            df: rows with ids of users and items, as RecBole's Interaction.
        """
        # RecBole's ``join`` replaces such columns, so they are put back.
        names = read_feature_names(self.config, "user_features")
        own_columns = {name: df[name] for name in names if name in df}
        joined = super().join(df)
        joined.interaction.update(own_columns)
        return joined

    @property
    def item_counter(self) -> Counter:
        """Training interactions of each item that has any, for RecBole's metrics of popularity.

        RecBole counts ``inter_feat``, whose rows are those that a model trains on, so that the
        metrics of two models would count differently.

        Returns:
            Id of the item -> number of training interactions.
        """
        counts = self.data.popularity
        items = np.flatnonzero(counts)
        return Counter(dict(zip(items.tolist(), counts[items].tolist(), strict=True)))

    def inter_matrix(self, form: str = "coo", value_field: str | None = None) -> Any:
        """Return a sparse matrix [users, items] of the interactions of this phase.

        A view without a phase has all interactions.

        Args:
            form: coo or csr, as in RecBole.
            value_field: field of interactions whose values the matrix has; ones if None.
        """
        # This replaces RecBole's method, which would read the rows of the view (``inter_feat``):
        # for sequential models each user's first interaction is missing there.
        part, fields = self.data.part, self.data.log.fields
        mask = np.ones(len(part), bool) if self.phase is None else part == PHASES.index(self.phase)
        rows = torch.from_numpy(np.flatnonzero(mask))
        inter = Interaction({name: column[rows] for name, column in fields.items()})
        return self._create_sparse_matrix(inter, self.uid_field, self.iid_field, form, value_field)


def read_view(config: Options) -> RecBoleView:
    """Read a dataset for RecBole's ``run_recbole``, which splits it by ``build``."""
    return RecBoleView(read_dataset(config))


def make_views(data: Dataset) -> dict[str, RecBoleView]:
    """Return a view of each phase, by its name: train, valid and test.

    Args:
        data: the finished dataset.

    Raises:
        UsageError: if there is no training target, so that there is nothing to learn from.
    """
    views = {phase: RecBoleView(data, phase) for phase in PHASES}
    if not len(views["train"]):
        raise UsageError(
            f"{shown(data.dataset_name)} has no training target: no user has two interactions in "
            "training"
        )
    return views


class PrefixRows(Interaction):
    """RecBole's augmented interactions, computed when they are read.

    Row r is a target with the history before it. RecBole keeps histories of all rows as tensors of
    [rows, L]; this keeps the log only, and the number of each target's row once rows are read.

    Attributes:
        log: the interactions.
        length: RecBole's name for how many rows there are.
    """

    def __init__(
        self,
        split: Split,
        phase: int | None,
        only_newest: bool,
        max_length: int,
        suffix: str,
        length_field: str,
        features: Features | None = None,
    ) -> None:
        """Keep the interactions; a row for each target is computed when it is read.

        Args:
            split: the interactions, with their parts and targets.
            phase: TRAIN, VALID or TEST, whose targets have a row; None for all interactions that
                have a history.
            only_newest: whether of the targets of a user only the newest one has a row.
            max_length: L, histories keep their last L interactions and are padded on the right.
            suffix: appended to a field's name for its history (RecBole's LIST_SUFFIX).
            length_field: name of the field with the length of the history.
            features: columns of attributes of interactions (``events``), which histories take
                instead of those in the log, and of users (``users``), which each row gets, too.
        """
        super().__init__({})
        self.split, self.log, self.phase, self.only_newest = split, split.log, phase, only_newest
        self.max_length, self.suffix, self.length_field = max_length, suffix, length_field
        self.features = features or Features()
        self.length = int(np.count_nonzero(self._has_row()))

    def _has_row(self) -> np.ndarray:
        """Return which interactions have a row: [interactions] bool, computed by every call."""
        if self.phase is None:
            return self.log.has_history
        return self.split.find_targets(self.phase, self.only_newest)

    @cached_property
    def target(self) -> Tensor:
        """[rows] int64 row of each target in the log."""
        return torch.from_numpy(np.flatnonzero(self._has_row()))

    @property
    def columns(self) -> list[str]:
        """Names of all fields of a row."""
        # Fields of the target; of its history (except the user, who is the same); its length.
        names = list(self.log.fields)
        lists = [name + self.suffix for name in names if name != self.log.user_field]
        return [*names, *lists, self.length_field, *self.features.users]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, index: Any) -> Tensor | Interaction:
        """Return a field of all rows, or all fields of some rows.

        Args:
            index: name of a field; or a slice or array of the numbers of rows.
        """
        if not isinstance(index, str):
            return self._gather(index)

        # Two kinds of fields need no histories: those of the targets, which are in the rows
        # ``target`` of the log, and the length of each history. A history has the rows of the log
        # from its start up to its target, excluded.
        if index in self.log.fields:
            return self.log.fields[index][self.target]
        if index == self.length_field:
            return self.target - self._find_start(self.target)
        return self._gather(slice(None))[index]

    def _gather(self, index: Any) -> Interaction:
        """Compute some rows: the interactions to be predicted, each with the history before it.

        For example, for a target in row 7 of the log, whose user begins in row 5, the history is
        the rows [5, 6], followed by padding (0) up to L (``max_length``) cells.

        Args:
            index: a slice, or an array of n numbers of rows.

        Returns:
            The fields of the targets, [n]; the fields of their histories, [n, L]; the lengths of
            the histories; and the row of each target in the log.
        """
        # Rows of the targets in the log, and of where their histories begin.
        numbers = np.arange(self.length)[index] if isinstance(index, slice) else index
        target = self.target[torch.as_tensor(numbers).reshape(-1)]
        start = self._find_start(target)
        fields = {name: column[target] for name, column in self.log.fields.items()}

        # Histories: L rows from the start on, of which those from the target on are padding. The
        # columns in ``features.events`` take the place of those of the log with the same name.
        history_rows = start[:, None] + torch.arange(self.max_length)  # [n, L]
        is_padding = history_rows >= target[:, None]
        history_rows.masked_fill_(is_padding, 0)
        for name, column in self.log.fields.items():
            if name != self.log.user_field:
                history = self.features.events.get(name, column)[history_rows]
                history[is_padding] = 0
                fields[name + self.suffix] = history

        for name, column in self.features.users.items():
            fields[name] = column[fields[self.log.user_field]]
        fields[self.length_field] = target - start
        fields[TARGET_EVENT] = target
        return Interaction(fields)

    def _find_start(self, target: Tensor) -> Tensor:
        """Return [n] int64 row of the oldest interaction in each target's history."""
        user_start = torch.from_numpy(self.log.offsets)[self.log.users[target]]
        return torch.maximum(user_start, target - self.max_length)
