"""RecBole's dataset classes, over one event log, split and windows."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from recbole.data.dataset import Dataset, SequentialDataset
from recbole.data.interaction import Interaction
from recbole.utils import FeatureType
from scipy.sparse import coo_matrix

from recbole_pos.data.attributes import feature_columns
from recbole_pos.data.cache import Cache, collect_warnings
from recbole_pos.data.events import KIND, PART, EventLog, read_only
from recbole_pos.data.filtering import FilteredTables
from recbole_pos.data.grown import HeldOut, divide, extend_log, keep_known_lines
from recbole_pos.data.identity import compute_identity
from recbole_pos.data.known import Known
from recbole_pos.data.naming import number_names
from recbole_pos.data.splits import PHASES, TEST, TRAIN
from recbole_pos.data.tables import LARGEST
from recbole_pos.data.targets import (
    Split,
    count_items,
    find_kind,
    make_split,
    read_ties,
    shuffle_ties,
)
from recbole_pos.data.windows import TARGET_EVENT, PrefixRows, Windows, training_windows
from recbole_pos.errors import UsageError
from recbole_pos.layers.features import Features
from recbole_pos.values import Options, shown

Kind = TypeVar("Kind", bound="_ExactTimeMixin")


class _ExactTimeMixin(FilteredTables):
    """What both kinds of dataset share: readable errors, exact times, one log, one split.

    Args:
        config: RecBole configuration.
        known: names and counts of the data of an earlier run; its names keep their ids.
        alone: whether to read only the data of that run and hold all later data out.

    Attributes (after ``build``):
        held_out: data later than those of the run; None if none were held out.
        events_of_users: [users] int64 interactions of each before the split left any out.
        split: the log with the part of every interaction and the targets, see ``targets.py``.
        phase: train, valid or test; None for the dataset before the split.
        missing: for fields of type float, which cells had no number ([users], [items] or [events]
            bool): RecBole puts the mean there.
    """

    split: Split
    phase: str | None = None
    whole: _ExactTimeMixin | None = None  # of the part of one phase, the dataset that was split
    held_out: HeldOut | None = None
    events_of_users: np.ndarray

    def __init__(self, config: Options, known: Known | None = None, alone: bool = True) -> None:
        self.known, self.alone = known, alone
        super().__init__(config)

    def _from_scratch(self) -> None:
        """Load the prepared data from the cache, or read and prepare them as RecBole does."""
        self._get_preset()
        self._get_field_from_config()
        self.cache = None
        if self.known is None:
            self.cache = Cache.open(self.config, Path(self.dataset_path), self._files())
        if self.cache and self.cache.load_into(self):
            self._take_log()
        else:
            with collect_warnings(self.logger) as self.warnings:
                super()._from_scratch()

    def _filter_by_inter_num(self) -> None:
        """Filter by numbers of interactions, except where a run fixed its interactions already.

        With later interactions, users and items that the run left out would pass the filter.
        """
        if self.known is not None and self.alone:
            self._restrict_to_known(self.known)
        else:
            super()._filter_by_inter_num()

    def _restrict_to_known(self, known: Known) -> None:
        """Keep the interactions, users and items of the run; the later ones go to ``held_out``."""
        uid, iid = self.uid_field, self.iid_field
        self.inter_feat, self.held_out = divide(self.inter_feat, known, uid, iid, self.time_field)
        for name, field in (("user_feat", uid), ("item_feat", iid)):
            if (feat := getattr(self, name)) is not None:
                setattr(self, name, keep_known_lines(feat, field, known))

    def _remap(self, remap_list: list[Any]) -> None:
        """Replace names by ids in the fields that share them; known names keep their ids.

        Args:
            remap_list: RecBole's (table, field, type) of each of these fields.
        """
        if not remap_list:
            return
        columns = [feat[field] for feat, field, _ in remap_list]
        first = remap_list[0][1]
        if self.known is not None and first in self.known.tokens:
            columns.insert(0, pd.Series(self.known.tokens[first][1:], dtype=object))
        names, numbered = number_names(columns, self.scratch)
        ids = {name: i for i, name in enumerate(names.tolist())}
        interactions, replaced = self.inter_feat, {}
        for (feat, field, _), column in zip(remap_list, numbered[-len(remap_list) :], strict=True):
            if field not in self.field2id_token:
                self.field2id_token[field], self.field2token_id[field] = names, ids
            if self.scratch and feat is interactions:  # setting a column would copy it to memory
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
                    finite = np.isfinite(feat[field])
                    if field != self.time_field:  # models compute in float32; times stay float64
                        finite &= feat[field].abs() <= LARGEST
                    if not finite.all():
                        self.missing[field] = ~finite.to_numpy()
                        feat[field] = feat[field].where(finite)
        super()._fill_nan()

    def _normalize(self) -> None:
        """Scale fields by (x - min) / (max - min) as RecBole does, except the time.

        RecBole's own code unpacks vectors in a way that pandas 3 does not support.

        Raises:
            UsageError: if both options that choose fields are set.
        """
        chosen, scales_all = self.config["normalize_field"], self.config["normalize_all"]
        if chosen and scales_all:
            raise UsageError("normalize_field and normalize_all: one says all; leave one out")
        for field in self.float_like_fields if scales_all else chosen or ():
            for feat in self.field2feats(field) if field != self.time_field else ():
                is_vector = self.field2type[field] == FeatureType.FLOAT_SEQ
                numbers = np.concatenate(feat[field]) if is_vector else feat[field].to_numpy()
                low, high = numbers.min(), numbers.max()
                numbers = (numbers - low) / (high - low) if low < high else np.ones_like(numbers)
                ends = np.cumsum(feat[field].map(len))[:-1] if is_vector else ()
                feat[field] = np.split(numbers, ends) if is_vector else numbers

    def _dataframe_to_interaction(self, data: pd.DataFrame) -> Interaction:
        """Convert a table to tensors as RecBole does, but times exactly and ids without a copy.

        Times stay float64, since float32 has steps of 64-128 s for seconds since 1970.
        """
        exact = {name: column.to_numpy() for name, column in data.items() if self._is_exact(column)}
        with warnings.catch_warnings():  # pandas 3 returns read-only arrays, which RecBole copies
            warnings.filterwarnings("ignore", message=".*not writable.*")
            columns = super()._dataframe_to_interaction(data.drop(columns=list(exact))).interaction
        columns |= {name: read_only(column) for name, column in exact.items()}
        return Interaction({name: columns[name] for name in data})

    def _is_exact(self, column: pd.Series) -> bool:
        is_ids = self.field2type[column.name] == FeatureType.TOKEN and column.dtype == np.int64
        return is_ids or column.name == self.time_field

    @property
    def log(self) -> EventLog:
        """The interactions that are left after the split."""
        return self.split.log

    @property
    def part(self) -> np.ndarray:
        """[events] TRAIN, VALID or TEST."""
        return self.split.part

    def _build_log(self) -> None:
        """Sort the interactions into the log, split it, and write the cache."""
        fields, self.inter_feat = dict(self.inter_feat.interaction), None
        # masks of missing cells are sorted and cut as columns of the log, then taken out of it
        masks = {field: f"{field} is missing" for field in self.missing if field in fields}
        fields |= {name: torch.from_numpy(self.missing[field]) for field, name in masks.items()}
        if self.given is not None:
            fields[PART] = torch.from_numpy(self.given)
        if (kind := find_kind(self, fields)) is not None:
            fields[KIND] = torch.from_numpy(kind)
        eval_args = self.config["eval_args"]
        log = EventLog.build(
            shuffle_ties(fields, read_ties(eval_args["ties"])),
            self.user_num,
            self.uid_field,
            self.iid_field,
            self.time_field,
            self.scratch,
        )
        self.events_of_users = log.lengths
        tokens = self.field2id_token[self.uid_field]
        fraction, files = self.config["train_fraction"], self.config["benchmark_filename"]
        self.split = make_split(log, eval_args, tokens, self.item_num, fraction, files)
        if self.config["target_events"]:
            self.split.summary["target_events"] = self.config["target_events"]
        self.missing = {
            **self.missing,
            **{f: self.split.log.fields.pop(name).numpy() for f, name in masks.items()},
        }
        if self.scratch:
            self.scratch.release()
        self.scratch = None  # columns stay mapped; worker processes need no scratch folder
        if self.cache:
            self.cache.save(self, self.warnings)
        self._take_log()

    def _take_log(self) -> None:
        """Make the events of the log RecBole's ``inter_feat``."""
        raise NotImplementedError

    @property
    def popularity(self) -> np.ndarray:
        """[items] int64 training interactions of each item."""
        return count_items(self.log, self.part == TRAIN, self.item_num)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Digests of events, split and attributes, which weights are trained on and belong to."""
        return compute_identity(self) if self.whole is None else self.whole.identity

    @property
    def avg_actions_of_users(self) -> float:
        """Mean number of interactions of the users that have any."""
        return self._mean_count(self.uid_field)

    @property
    def avg_actions_of_items(self) -> float:
        """Mean number of interactions of the items that have any."""
        return self._mean_count(self.iid_field)

    def _mean_count(self, field: str) -> float:
        counts = np.bincount(np.asarray(self.inter_feat[field]))
        return float(np.mean(counts[counts > 0]))

    def features(self) -> Features:
        """Return the columns that ``event_features`` and ``user_features`` name.

        Raises:
            UsageError: for a field that cannot be one of them.
        """
        options = ("event_features", "user_features")
        return Features(*(feature_columns(self, option) for option in options))

    def _select_events(self, phase: str) -> np.ndarray:
        return np.flatnonzero(self.part == PHASES.index(phase))

    def _select_targets(self, phase: str) -> np.ndarray:
        return np.flatnonzero((self.part == PHASES.index(phase)) & self.split.is_target)

    def build(self: Kind) -> list[Kind]:
        """Return [train, valid, test] datasets over the same log.

        Raises:
            UsageError: if there is no training target.
        """
        if not hasattr(self, "split"):
            self._drop_unused_col()
            self._change_feat_format()
        parts = [self._part(phase) for phase in PHASES]
        if not len(parts[0]):
            raise UsageError(
                f"{shown(self.dataset_name)} has no training target: no user has two events"
                f"{' up to the first boundary' if self.split.summary['boundaries'] else ''}"
            )
        return parts

    def for_config(self: Kind, config: Options) -> Kind:
        """Return a copy, after ``build``, under other options of model and training."""
        other = copy.copy(self)
        other.config, other.phase = config, None
        other.inter_feat = Interaction(self.log.fields)
        return other

    def without_test(self: Kind) -> Kind:
        """Return a copy, after ``build``, whose log ends before the test events of every user.

        Training and validation stay as they are: histories never reach into a later part.
        """
        other = copy.copy(self)
        other.identity = self.identity  # weights learned from the copy fit the whole
        keep, split = self.part != TEST, self.split
        other.split = replace(
            split,
            log=split.log.keep(keep),
            part=split.part[keep],
            is_target=split.is_target[keep],
        )
        of_events = split.log.fields  # masks of users and items stay whole
        other.missing = {f: m[keep] if f in of_events else m for f, m in self.missing.items()}
        return other

    def with_later(self: Kind, new_users: bool = True) -> Kind:
        """Return a copy, after ``build``, in which held-out data are history (``grown.py``).

        Args:
            new_users: whether to add users that the run did not know.
        """
        return self if self.held_out is None else extend_log(self, self.held_out, new_users)

    def _part(self: Kind, phase: str) -> Kind:
        part = copy.copy(self)
        part.phase, part.whole = phase, self
        part.inter_feat = self._rows(phase)
        return part


class PosDataset(_ExactTimeMixin, Dataset):
    """Interactions for RecBole's general models, under the sequential split of the same log.

    These models read no histories, so with ``target_events`` they get only events of that kind.
    """

    def _change_feat_format(self) -> None:
        super()._change_feat_format()
        self._build_log()

    def _take_log(self) -> None:
        self.inter_feat = Interaction(self.log.fields)

    def _select_events(self, phase: str) -> np.ndarray:
        events, kind = super()._select_events(phase), find_kind(self, self.log.fields)
        return events if kind is None else events[kind[events]]

    def _rows(self, phase: str) -> Interaction:
        """Return all training events, or a row for each held-out target."""
        chosen = self._select_events(phase) if phase == "train" else self._select_targets(phase)
        events = torch.from_numpy(chosen)
        columns = {name: column[events] for name, column in self.log.fields.items()}
        return Interaction({**columns, TARGET_EVENT: events})


class PosSequentialDataset(_ExactTimeMixin, SequentialDataset):
    """Targets with their histories, gathered lazily; and training windows over the same events."""

    def _benchmark_presets(self) -> None:
        """Do nothing: RecBole's given parts hold histories, here they hold interactions."""

    def _change_feat_format(self) -> None:
        Dataset._change_feat_format(self)  # SequentialDataset's does not augment given parts
        self.data_augmentation()

    def data_augmentation(self) -> None:
        """Build the log, and rows over all targets, lazily: RecBole's hook for making rows."""
        self._check_field("uid_field", "time_field")
        self._build_log()

    def _take_log(self) -> None:
        self.inter_feat = Interaction(self.log.fields)
        self._aug_presets()
        self._require_distinct_fields()
        self.inter_feat = self._prefix_rows(self.log.has_history)

    def for_config(self, config: Options) -> PosSequentialDataset:
        """Return a copy, after ``build``, under other options, the length of histories included."""
        other = super().for_config(config)
        other.max_item_list_len = config["MAX_ITEM_LIST_LENGTH"]
        other.field2seqlen = dict(self.field2seqlen)
        other._aug_presets()
        other.inter_feat = other._prefix_rows(other.log.has_history)
        return other

    def _require_distinct_fields(self) -> None:
        """Refuse options that give a history column the name of another field."""
        columns = self._prefix_rows(np.empty(0, dtype=bool)).columns
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise UsageError(
                f"ITEM_LIST_LENGTH_FIELD and LIST_SUFFIX make field names that exist already: "
                f"{', '.join(twice)}"
            )

    def _prefix_rows(self, is_target: np.ndarray) -> PrefixRows:
        return PrefixRows(
            self.log,
            is_target,
            self.max_item_list_len,
            self.config["LIST_SUFFIX"],
            self.item_list_length_field,
            self.features(),
        )

    def _rows(self, phase: str) -> PrefixRows:
        """Return a row for each target of a phase; without augmentation, each user's newest."""
        is_target = (self.part == PHASES.index(phase)) & self.split.is_target
        if phase == "train" and self.config["augmentation"] == "none":
            targets = np.flatnonzero(is_target)
            newest = np.append(np.diff(self.log.users.numpy()[targets]) > 0, True)
            is_target[targets[~newest[: len(targets)]]] = False
        return self._prefix_rows(is_target)

    def training_windows(self) -> Windows:
        """Return windows over the training events, for models that learn from all positions."""
        start, train = self.log.offsets[:-1], np.zeros(self.user_num, dtype=np.int64)
        has_events = self.log.lengths > 0  # reduceat gives no 0 for an empty range
        train[has_events] = np.add.reduceat(self.part == TRAIN, start[has_events], dtype=np.int64)
        windows = training_windows(
            start,
            start + train,
            self.max_item_list_len,
            self.config["train_windows"],
            self.config["window_stride"],
        )
        is_restricted = self.config["target_events"]
        return windows.with_targets(self.split.is_target) if is_restricted else windows

    def inter_matrix(self, form: str = "coo", value_field: str | None = None) -> Any:
        """Return [users, items] the events of this phase (of all phases before the split).

        Args:
            form: scipy's name of a sparse format.
            value_field: field whose values are the entries; 1 for each event if None.
        """
        events = slice(None) if self.phase is None else self._select_events(self.phase)
        users, items = self.log.users[events].numpy(), self.log.items[events].numpy()
        data = np.ones(len(users)) if value_field is None else self.log.fields[value_field][events]
        matrix = coo_matrix((data, (users, items)), shape=(self.user_num, self.item_num))
        return matrix.asformat(form)
