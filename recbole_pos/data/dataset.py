"""RecBole's dataset classes, over one event log, split and windows."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from recbole.data.dataset import Dataset, SequentialDataset
from recbole.data.interaction import Interaction
from recbole.utils import FeatureType

from recbole_pos.data.atomic_files import LARGEST
from recbole_pos.data.attributes import read_feature_names, read_features
from recbole_pos.data.cache import Cache, collect_warnings
from recbole_pos.data.identity import (
    HeldOut,
    Vocabulary,
    compute_identity,
    divide_interactions,
    keep_known_rows,
)
from recbole_pos.data.interactions import EventLog, wrap_read_only
from recbole_pos.data.loading import AtomicTables, NameIds, number_names
from recbole_pos.data.splits import PHASES, TEST, TRAIN
from recbole_pos.data.targets import (
    Split,
    count_items,
    find_selected,
    make_split,
    read_ties,
)
from recbole_pos.data.windows import (
    TARGET_EVENT,
    PrefixRows,
    Windows,
    gather_index,
    training_windows,
)
from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.values import Options, shown

Kind = TypeVar("Kind", bound="_ExactTimeMixin")


class _ExactTimeMixin(AtomicTables):
    """What both kinds of dataset share: readable errors, exact times, one log, one split.

    Args:
        config: RecBole configuration.
        known: vocabulary of an earlier run; its names keep their ids.
        holds_out_later: whether to read only the data of that run and hold all later data out.

    Attributes (after ``build``):
        held_out: data later than those of the run; None if none were held out.
        user_counts: [users] int64 interactions of each before the split left any out.
        split: the log with the part of every interaction and the targets, see ``targets.py``.
        phase: train, valid or test; None for the dataset before the split.
        whole: for the part of one phase, the dataset that was split.
        missing: for fields of type float, which cells had no number ([users], [items] or
            [interactions] bool): RecBole puts the mean there.
    """

    split: Split
    phase: str | None = None
    whole: _ExactTimeMixin | None = None
    held_out: HeldOut | None = None
    user_counts: np.ndarray

    def __init__(
        self, config: Options, known: Vocabulary | None = None, holds_out_later: bool = True
    ) -> None:
        self.known, self.holds_out_later = known, holds_out_later
        super().__init__(config)

    def _from_scratch(self) -> None:
        """Load the prepared data from the cache, or read and prepare them as RecBole does."""
        self._get_preset()
        self._get_field_from_config()
        self.cache = None
        if self.known is None:
            self.cache = Cache.open(self.config, self._list_files())
        if self.cache and self.cache.load_into(self):
            self._take_log()
        else:
            with collect_warnings(self.logger) as self.warnings:
                super()._from_scratch()

    def _filter_by_inter_num(self) -> None:
        """Filter by numbers of interactions, except where a run fixed its interactions already.

        With later interactions, users and items that the run left out would pass the filter.
        """
        if self.known is None or not self.holds_out_later:
            super()._filter_by_inter_num()
            return
        fields = self.uid_field, self.iid_field, self.time_field
        self.inter_feat, self.held_out = divide_interactions(self.inter_feat, self.known, *fields)
        for name, field in (("user_feat", self.uid_field), ("item_feat", self.iid_field)):
            if (feat := getattr(self, name)) is not None:
                setattr(self, name, keep_known_rows(feat, field, self.known))

    def _remap(self, remap_list: list[Any]) -> None:
        """Replace names by ids in fields that share them; known names keep theirs."""
        if not remap_list:
            return
        columns = [feat[field] for feat, field, _ in remap_list]
        first_field = remap_list[0][1]
        if self.known is not None and first_field in self.known.tokens:
            columns.insert(0, pd.Series(self.known.tokens[first_field][1:], dtype=object))
        names, numbered = number_names(columns, self.storage)
        ids = NameIds(names)
        interactions = self.inter_feat
        replaced = {}
        for (feat, field, _), column in zip(remap_list, numbered[-len(remap_list) :], strict=True):
            if field not in self.field2id_token:
                self.field2id_token[field], self.field2token_id[field] = names, ids
            if feat is interactions:  # setting a column would copy it
                replaced[field] = column
            else:
                feat[field] = column
        if replaced:
            data = {name: replaced.get(name, col._values) for name, col in interactions.items()}
            self.inter_feat = pd.DataFrame(data, index=interactions.index, copy=False)

    def _fill_nan(self) -> None:
        """Fill missing cells as RecBole does, and keep which float cells were missing."""
        self.missing: dict[str, np.ndarray] = {}
        for name in self.feat_name_list:
            feat = getattr(self, name)
            for field in feat:
                if self.field2type[field].value == "float":
                    is_valid = np.isfinite(feat[field])
                    if field != self.time_field:  # models compute in float32; times stay float64
                        is_valid &= feat[field].abs() <= LARGEST
                    if not is_valid.all():
                        self.missing[field] = ~is_valid.to_numpy()
                        feat[field] = feat[field].where(is_valid)
        super()._fill_nan()

    def _normalize(self) -> None:
        """Scale fields by (x - min) / (max - min) as RecBole does, except the time.

        RecBole's own code unpacks vectors in a way that pandas 3 does not support.
        """
        fields = self.config["normalize_field"] or ()
        if self.config["normalize_all"]:
            if fields:
                raise UsageError("normalize_field and normalize_all: one says all; leave one out")
            fields = self.float_like_fields
        for field in fields:
            if field == self.time_field:
                continue
            for feat in self.field2feats(field):
                column = feat[field]
                if self.field2type[field] == FeatureType.FLOAT_SEQ:
                    ends = np.cumsum(column.map(len))[:-1]
                    feat[field] = np.split(_scale(np.concatenate(column)), ends)
                else:
                    feat[field] = _scale(column.to_numpy())

    def _dataframe_to_interaction(self, data: pd.DataFrame) -> Interaction:
        """Convert a table to tensors as RecBole does, but times exactly and ids without a copy.

        Times stay float64, since float32 has steps of 64-128 s for seconds since 1970.
        """
        exact = {}
        for name, column in data.items():
            is_ids = self.field2type[name] == FeatureType.TOKEN and column.dtype == np.int64
            if is_ids or name == self.time_field:
                exact[name] = column.to_numpy()
        with warnings.catch_warnings():  # pandas 3 returns read-only arrays, which RecBole copies
            warnings.filterwarnings("ignore", message=".*not writable.*")
            columns = super()._dataframe_to_interaction(data.drop(columns=list(exact))).interaction
        columns |= {name: wrap_read_only(column) for name, column in exact.items()}
        return Interaction({name: columns[name] for name in data})

    @property
    def log(self) -> EventLog:
        """The interactions that are left after the split."""
        return self.split.log

    @property
    def part(self) -> np.ndarray:
        """[interactions] int8 TRAIN, VALID or TEST."""
        return self.split.part

    def _change_feat_format(self) -> None:
        """Convert tables to tensors; sort the interactions into the log, and split it."""
        Dataset._change_feat_format(self)
        fields, self.inter_feat = dict(self.inter_feat.interaction), None
        config, eval_args = self.config, self.config["eval_args"]
        ties = read_ties(eval_args["ties"])
        log = EventLog.build(
            fields,
            self.user_num,
            *(self.uid_field, self.iid_field, self.time_field),
            storage=self.storage,
            tie_seed=ties if isinstance(ties, int) else None,
            missing={field: mask for field, mask in self.missing.items() if field in fields},
            given_part=self.given_part,
            is_selected=find_selected(self, fields, requires_all=True),
        )
        self.user_counts = log.lengths
        user_tokens = self.field2id_token[self.uid_field]
        options = config["train_fraction"], config["benchmark_filename"], config["timestamp_unit"]
        self.split = make_split(log, eval_args, user_tokens, self.item_num, *options)
        if config["target_events"]:
            self.split.summary["target_events"] = config["target_events"]
        self.missing |= self.log.missing
        part, is_target = map(self.storage.store, (self.part, self.split.is_target))
        self.split = replace(self.split, part=part, is_target=is_target)
        if self.cache:
            self.cache.save(self, self.warnings)
        self._take_log()

    def _take_log(self) -> None:
        """Set RecBole's ``inter_feat`` to the interactions of the log."""
        self.inter_feat = Interaction(self.log.fields)

    @property
    def popularity(self) -> np.ndarray:
        """[items] int64 training interactions of each item."""
        return count_items(self.log, self.part == TRAIN, self.item_num)

    @property
    def item_counter(self) -> Counter:
        """Training interactions of each item that has any, for RecBole's metrics of popularity.

        RecBole counts ``inter_feat``, whose rows are those that a model trains on, so that the
        metrics of two models would count differently.
        """
        counts = self.popularity
        items = np.flatnonzero(counts)
        return Counter(dict(zip(items.tolist(), counts[items].tolist(), strict=True)))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Digests of the data that trained weights belong to, see ``compute_identity``."""
        return compute_identity(self) if self.whole is None else self.whole.identity

    def get_features(self) -> Features:
        """Return the columns that ``event_features`` and ``user_features`` name."""
        return Features(read_features(self, "event_features"), read_features(self, "user_features"))

    def build(self: Kind) -> list[Kind]:
        """Return [train, valid, test] datasets over the same log.

        Raises:
            UsageError: if there is no training target.
        """
        if not hasattr(self, "split"):
            self._drop_unused_col()
            self._change_feat_format()
        datasets = []
        for phase in PHASES:
            dataset = copy.copy(self)
            dataset.phase, dataset.whole = phase, self
            dataset.inter_feat = self._make_examples(phase)
            datasets.append(dataset)
        if not len(datasets[0]):
            raise UsageError(
                f"{shown(self.dataset_name)} has no training target: no user has two interactions"
                f"{' up to the first boundary' if self.split.summary['boundaries'] else ''}"
            )
        if self.config["benchmark_filename"]:
            for part, held_out in enumerate(datasets):
                if not len(held_out):
                    self._require_shared_users(part)
        return datasets

    def _require_shared_users(self, phase: int) -> None:
        """Refuse a given part of users who have no interaction before it."""
        users, part = self.log.users.numpy(), self.part
        here, earlier = users[part == phase], users[part < phase]
        if len(here) and not np.isin(here, earlier).any():
            new, known = self.field2id_token[self.uid_field][[here[0], earlier[0]]].tolist()
            raise UsageError(
                f"benchmark_filename: nothing of the {PHASES[phase]} part can be predicted: none "
                f"of its users, such as {shown(new)}, has an earlier interaction; earlier parts "
                f"have such as {shown(known)}"
            )

    def for_config(self: Kind, config: Options) -> Kind:
        """Return a copy of a built dataset under other options of model, training and histories."""
        other = copy.copy(self)
        other.config, other.phase = config, None
        other._take_log()
        return other

    def without_test(self: Kind) -> Kind:
        """Return a copy of a built dataset without the test interactions.

        Training and validation stay as they are: histories never reach into a later part.
        """
        reduced = copy.copy(self)
        reduced.identity = self.identity  # weights learned from the copy fit the whole
        split = self.split
        is_kept = split.part != TEST
        reduced.split = replace(
            split,
            log=split.log.keep(is_kept),
            part=split.part[is_kept],
            is_target=split.is_target[is_kept],
        )
        reduced.missing = self.missing | reduced.log.missing
        return reduced


def _scale(numbers: np.ndarray) -> np.ndarray:
    """Return (x - min) / (max - min) of each number x, or ones if all are the same."""
    low, high = numbers.min(initial=np.inf), numbers.max(initial=-np.inf)  # there may be none
    return (numbers - low) / (high - low) if low < high else np.ones_like(numbers)


class PosDataset(_ExactTimeMixin, Dataset):
    """Interactions for RecBole's general models, under the sequential split of the same log.

    These models read no histories, so ``target_events`` leaves them only interactions of that kind.
    """

    def _make_examples(self, phase: str) -> Interaction:
        """Return all training interactions, or an example for each held-out target."""
        mask = self.split.find_targets(PHASES.index(phase))
        if phase == "train":
            mask = self.part == TRAIN
            if (is_selected := find_selected(self, self.log.fields)) is not None:
                mask &= is_selected
        rows = torch.from_numpy(np.flatnonzero(mask))
        columns = {name: column[rows] for name, column in self.log.fields.items()}
        return Interaction({**columns, TARGET_EVENT: rows})


class PosSequentialDataset(_ExactTimeMixin, SequentialDataset):
    """Targets with their histories, gathered lazily; and training windows over the same log."""

    def _benchmark_presets(self) -> None:
        """Do nothing: RecBole's given parts hold histories, here they hold interactions."""

    def _take_log(self) -> None:
        """Take over the log, with a row for every interaction that has a history."""
        self.max_item_list_len = self.config["MAX_ITEM_LIST_LENGTH"]
        self.field2seqlen = dict(self.field2seqlen)
        super()._take_log()
        self._aug_presets()
        self.inter_feat = self._make_prefix_rows(partial(attrgetter("has_history"), self.log))

    def _make_prefix_rows(self, find_mask: Callable[[], np.ndarray]) -> PrefixRows:
        names = self.config["LIST_SUFFIX"], self.item_list_length_field
        options = self.max_item_list_len, *names, self.get_features()
        return PrefixRows(self.log, find_mask, *options)

    def _make_examples(self, phase: str) -> PrefixRows:
        """Return the targets of a phase; for training without augmentation each user's newest."""
        is_newest_only = phase == "train" and self.config["augmentation"] == "none"
        number = PHASES.index(phase)
        return self._make_prefix_rows(partial(self.split.find_targets, number, is_newest_only))

    def join(self, df: Interaction) -> Interaction:
        """Join the tables of users and items as RecBole does, but keep what rows have of users.

        RecBole's table has the mean where a number is missing, rows of ``user_features`` NaN.
        """
        names = read_feature_names(self.config, "user_features")
        gathered = {name: df[name] for name in names if name in df}
        joined = super().join(df)
        joined.interaction.update(gathered)
        return joined

    def make_training_windows(self) -> Windows:
        """Return windows over the training interactions, for models that learn at all positions."""
        start, end = self.log.offsets[:-1], self.log.offsets[1:]
        held_out = np.flatnonzero(self.part != TRAIN)  # the last interactions of their users
        num_held_out = np.diff(np.searchsorted(held_out, self.log.offsets))
        options = self.config["train_windows"], self.config["window_stride"]
        windows = training_windows(start, end - num_held_out, self.max_item_list_len, *options)
        if self.config["target_events"]:
            return windows.with_targets(self.split.is_target)
        return windows

    @property
    def target_counts(self) -> np.ndarray:
        """[items] int64 how often each item is a target in an epoch of training.

        Under ``target_window: n`` a state learns the n targets after it, so that a target counts
        once for each learning state among the n before it.
        """
        learns_from_windows = self.config["augmentation"] == "all_positions"
        window = self.config["target_window"] if learns_from_windows else 1
        is_learned = self._find_learned_targets()
        targets = np.flatnonzero(self.split.find_targets(TRAIN))
        users = self.log.find_users(targets)
        index = np.arange(len(targets))
        first = np.maximum(index - window + 1, np.searchsorted(users, users))
        num_before = np.concatenate(([0], np.cumsum(is_learned[targets])))
        counts = num_before[index + 1] - num_before[first]
        items = self.log.items.numpy()[targets]
        return np.bincount(items, counts, self.item_num).astype(np.int64)

    def _find_learned_targets(self) -> np.ndarray:
        """Return [interactions] bool: whether the state before each learns in an epoch."""
        augmentation = self.config["augmentation"]
        is_learned = self.split.find_targets(TRAIN, only_newest=augmentation == "none")
        if augmentation == "all_positions":
            windows = self.make_training_windows()  # train_windows: last leaves out old targets
            is_in_window = np.zeros(len(self.log), dtype=bool)
            is_in_window[gather_index(windows.first + 1, windows.end - windows.first)] = True
            is_learned &= is_in_window
        return is_learned

    def inter_matrix(self, form: str = "coo", value_field: str | None = None) -> Any:
        """Return a sparse matrix [users, items] of the interactions of this phase, or of all.

        As in RecBole, ``form`` is coo or csr, and ``value_field`` gives the values; 1 if None.
        """
        rows = torch.arange(len(self.part))
        if self.phase is not None:
            rows = torch.from_numpy(np.flatnonzero(self.part == PHASES.index(self.phase)))
        inter = Interaction({name: column[rows] for name, column in self.log.fields.items()})
        return self._create_sparse_matrix(inter, self.uid_field, self.iid_field, form, value_field)
