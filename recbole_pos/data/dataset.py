"""The dataset of a run: interactions in a log, tables of users and items, and the split.

``preparation.py`` makes it of files; models, relations and recommenders read it. Classes of RecBole
get a view of it, see ``recbole_view.py``.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from recbole_pos.data.interactions import EventLog
from recbole_pos.data.splits import TEST, TRAIN
from recbole_pos.data.targets import Split, count_items
from recbole_pos.data.windows import Windows, cut_windows, gather_index
from recbole_pos.values import Options

Columns = dict[str, Tensor]


class NameIds(Mapping[str, int]):
    """Ids by name, a dict that is made when the first id is looked up, which training never does.

    Args:
        names: [ids] names by id, each once.
    """

    def __init__(self, names: np.ndarray) -> None:
        self._names = names

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._names.tolist())}

    def __getitem__(self, name: str) -> int:
        return self._ids[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(repr=False)
class Dataset:
    """Interactions, users and items of a run, as numbers.

    Attributes:
        config: configuration that the dataset is read and split by.
        kinds: field -> token, float, token_seq or float_seq, for the fields of all tables.
        field2id_token: field of tokens -> [ids] its names by id, padding first.
        field2token_id: field of tokens -> ids by name.
        user_feat, item_feat: columns of the table of users or items by field, [n] or [n, s] by id;
            None if no such table is loaded. Missing tokens are 0, missing numbers the mean.
        missing: field of type float -> which of its cells had no number ([users], [items] or
            [interactions] bool); a field without missing cells need not be there.
        user_counts: [users] int64 interactions of each before the split left any out.
        split: the log with the part of every interaction and the targets, see ``targets.py``.
        held_out: ``HeldOut`` of ``identity.py``: data later than those of the run; None if none
            were held out.
    """

    config: Options
    kinds: dict[str, str]
    field2id_token: dict[str, np.ndarray]
    field2token_id: dict[str, NameIds]
    user_feat: Columns | None
    item_feat: Columns | None
    missing: dict[str, np.ndarray]
    user_counts: np.ndarray
    split: Split
    held_out: Any = None

    @property
    def dataset_name(self) -> str:
        """Name of the dataset."""
        return str(self.config["dataset"])

    @property
    def uid_field(self) -> str:
        """Name of the field of users."""
        return self.log.user_field

    @property
    def iid_field(self) -> str:
        """Name of the field of items."""
        return self.log.item_field

    @property
    def time_field(self) -> str:
        """Name of the field of times."""
        return self.log.time_field

    @property
    def user_num(self) -> int:
        """Number of user ids, padding included."""
        return len(self.field2id_token[self.uid_field])

    @property
    def item_num(self) -> int:
        """Number of item ids, padding included."""
        return len(self.field2id_token[self.iid_field])

    @property
    def log(self) -> EventLog:
        """The interactions that are left after the split."""
        return self.split.log

    @property
    def part(self) -> np.ndarray:
        """[interactions] int8 TRAIN, VALID or TEST."""
        return self.split.part

    @property
    def tables(self) -> dict[str, Columns]:
        """Columns of the loaded tables, by the names inter, user and item."""
        tables = {"inter": self.log.fields, "user": self.user_feat, "item": self.item_feat}
        return {name: columns for name, columns in tables.items() if columns is not None}

    @property
    def popularity(self) -> np.ndarray:
        """[items] int64 training interactions of each item."""
        return count_items(self.log, self.part == TRAIN, self.item_num)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Digests (short hashes) of the data, by which a run notices that they have changed.

        The order of rows counts, too.

        Returns:
            ``data``: 64 hexadecimal digits, of which 32 are a digest of the names of items, the
            interactions and the split, and 32 one of the times.
            ``fields``: each other loaded field -> 32 digits, a digest of its names, its values and
            its missing cells.
        """
        # ``_digest`` gives 32 digits for the names of a field and some arrays. The empty text names
        # no field, since times have no names.
        log = self.log
        items_and_split = self._digest(log.item_field, log.items.numpy(), log.offsets, self.part)
        times = self._digest("", log.times.numpy())

        # All other fields, of interactions, users and items.
        columns = {name: column for table in self.tables.values() for name, column in table.items()}
        other_fields = columns.keys() - {log.user_field, log.item_field, log.time_field}
        fields = {}
        for name in sorted(other_fields):
            missing = self.missing.get(name, np.empty(0))
            fields[name] = self._digest(name, columns[name].numpy(), missing)
        return {"data": items_and_split + times, "fields": fields}

    def _digest(self, field_name: str, *columns: np.ndarray) -> str:
        """Return one digest (a short hash) of the names of a field and the bytes of some arrays.

        Args:
            field_name: a field of names; any other, or an empty text, adds no names.
            columns: arrays of numbers.

        Returns:
            32 hexadecimal digits.
        """
        names = "\n".join(map(str, self.field2id_token.get(field_name, ())))
        digest = hashlib.blake2b(names.encode(), digest_size=16)
        for column in columns:
            digest.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def make_training_windows(self) -> Windows:
        """Cut the training interactions into windows, for models that learn at all positions.

        A window is a range of rows of the log that follow each other, of one user, at most
        ``MAX_ITEM_LIST_LENGTH`` long.

        Under the option ``target_events``, which says what kind of interaction is to be predicted,
        only windows with such a target are returned.

        Returns:
            Which rows of the log are the inputs of each window, and which of them have a target.
        """
        # User u has the rows offsets[u] to offsets[u + 1]. The last ones of them are held out, for
        # validation and test; all before them are of training. ``searchsorted`` gives how many
        # held-out rows come before each offset, and ``diff`` so how many each user has.
        offsets = self.log.offsets
        held_out_rows = np.flatnonzero(self.part != TRAIN)
        num_held_out = np.diff(np.searchsorted(held_out_rows, offsets))

        # The option ``train_windows`` says how a user's rows are cut, such as ``last``: only the
        # newest window. ``window_stride`` is how many new targets one of several windows has.
        windows = cut_windows(
            user_start=offsets[:-1],
            user_end=offsets[1:] - num_held_out,
            max_length=self.config["MAX_ITEM_LIST_LENGTH"],
            mode=self.config["train_windows"],
            stride=self.config["window_stride"],
        )
        if self.config["target_events"]:
            return windows.with_targets(self.split.is_target)
        return windows

    @property
    def target_counts(self) -> np.ndarray:
        """[items] int64 how often each item is a target in an epoch of training, by id.

        A target is an interaction that the model learns to predict from those before it. With the
        option ``target_window: n`` it learns from the same history to predict the next n targets of
        the user. For example, a user with the targets [a, b, c] has three such histories, which
        end before a, before b and before c. With n = 2 they have the targets [a, b], [b, c] and
        [c]: a counts once, b and c twice.
        """
        # Only models that train on windows read ``target_window``.
        learns_from_windows = self.config["augmentation"] == "all_positions"
        num_steps = self.config["target_window"] if learns_from_windows else 1

        # All m training targets, user by user and oldest first: the user and the item of each, and
        # whether the model learns from the history that ends before it. (Some options leave
        # histories out, such as ``augmentation: none`` all but the newest of a user.)
        rows = np.flatnonzero(self.split.find_targets(TRAIN))
        users, items = self.log.find_users(rows), self.log.items.numpy()[rows]
        has_history_learned = self._find_learned_targets()[rows]

        # For step = 0, 1, ...: the history before target i also has the target i + step, if that is
        # of the same user. There are m - step such pairs of i and i + step.
        counts = np.zeros(self.item_num, dtype=np.int64)
        for step in range(min(num_steps, len(rows))):
            num_pairs = len(rows) - step
            has_same_user = users[:num_pairs] == users[step:]
            is_counted = has_history_learned[:num_pairs] & has_same_user
            counts += np.bincount(items[step:][is_counted], minlength=self.item_num)
        return counts

    def _find_learned_targets(self) -> np.ndarray:
        """Return which interactions a model learns to predict in an epoch of training.

        The option ``augmentation`` says which: ``none`` only the newest training target of each
        user, ``prefix`` all training targets, and ``all_positions`` those that are the target of an
        input of a training window. (With ``train_windows: last`` a user has one window, so older
        targets are in none.)

        Returns:
            [interactions] bool.
        """
        augmentation = self.config["augmentation"]
        is_learned = self.split.find_targets(TRAIN, only_newest=augmentation == "none")
        if augmentation != "all_positions":
            return is_learned

        # Mark the rows of the targets of all windows. A window, of which this is an example, has
        # its inputs in the rows from ``start`` on, before ``end``. Those from ``first`` on have a
        # target, which is in the next row.
        #     inputs                 rows 2 3 4    start 2, end 5
        #     inputs with a target   rows   3 4    first 3
        #     their targets          rows     4 5  so from first + 1 to end
        # ``gather_index`` lists the rows of all windows: [4, 5] of a window with these numbers.
        windows = self.make_training_windows()
        target_rows = gather_index(windows.first + 1, windows.end - windows.first)
        is_in_window = np.zeros(len(self.log), dtype=bool)
        is_in_window[target_rows] = True
        return is_learned & is_in_window

    def for_config(self, config: Options) -> Dataset:
        """Return a copy under other options of model, training and histories; arrays are shared."""
        other = copy.copy(self)
        other.config = config
        return other

    def without_test(self) -> Dataset:
        """Return a copy without the test interactions.

        Training and validation stay as they are: no history has an interaction of a later part. The
        copy has the identity of the whole dataset, for which weights that are trained on the copy
        are then accepted.
        """
        # The identity (digests of the data) is computed before rows are left out.
        split = self.split
        is_kept = split.part != TEST
        reduced = copy.copy(self)
        reduced.identity = self.identity
        reduced.split = replace(
            split,
            log=split.log.keep(is_kept),
            part=split.part[is_kept],
            is_target=split.is_target[is_kept],
        )
        # Masks of interactions lose the same rows; those of users and items stay.
        reduced.missing = {
            name: mask[is_kept] if name in self.log.fields else mask
            for name, mask in self.missing.items()
        }
        return reduced
