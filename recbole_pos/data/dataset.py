"""The dataset of a run: interactions in a log, tables of users and items, and the split.

Functions read the fields of its tables for models, and refuse what does not fit them.
``preparation.py`` makes it of files; models, relations and recommenders read it. Classes of RecBole
get a view of it, see ``recbole_view.py``.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.interactions import EventLog
from recbole_pos.data.splits import TEST, TRAIN
from recbole_pos.data.targets import Split, count_items
from recbole_pos.data.windows import Windows, cut_windows, gather_index
from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.values import Options, listed, shown, suggest

Columns = dict[str, Tensor]
# Options that name fields to embed beside the vectors of items, and the tables these stand in.
SIDE_FEATURES = {"item_features": "item", "user_features": "user", "event_features": "inter"}


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
        has_log: whether there are interactions; a dataset read from a run for serving has none.
    """

    has_log: ClassVar[bool] = True

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
        # User u has the rows offsets[u] up to offsets[u + 1], excluded. The last ones of them are
        # held out, for validation and test; all before them are of training.
        offsets = self.log.offsets
        held_out_rows = np.flatnonzero(self.part != TRAIN)
        users = self.log.find_users(held_out_rows)
        num_held_out = np.bincount(users, minlength=len(offsets) - 1)  # of each user

        # The option ``train_windows`` says how a user's rows are cut: ``last``, for example, into
        # one window of the newest, ``sliding`` into windows that overlap. Of these each begins
        # ``window_stride`` rows after the one before.
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

        # All training targets, user by user and oldest first: the user and the item of each, and
        # whether the model learns from the history before it. (Some options leave histories out:
        # with ``augmentation: none`` a user has only the newest.)
        rows = np.flatnonzero(self.split.find_targets(TRAIN))
        users, items = self.log.find_users(rows), self.log.items.numpy()[rows]
        is_learned = self._find_learned_targets()[rows]

        # Step 0 counts each learned target itself. Step 1 counts the one after it, if it is of the
        # same user: of [a, b, c] it pairs a with b and b with c, and counts b and c.
        counts = np.zeros(self.item_num, dtype=np.int64)
        for step in range(min(num_steps, len(rows))):
            num_pairs = len(rows) - step
            has_same_user = users[:num_pairs] == users[step:]
            is_counted = is_learned[:num_pairs] & has_same_user
            later_items = items[step:]
            counts += np.bincount(later_items[is_counted], minlength=self.item_num)
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

        # A window has its inputs in the rows ``start`` up to ``end`` (excluded) of the log. Those
        # from the row ``first`` on have a target, the interaction in the row after them. For
        # example, with start 2, first 3 and end 5 the inputs 3 and 4 have the targets 4 and 5.
        # ``gather_index`` lists the rows of these inputs of all windows: [3, 4] of this one.
        windows = self.make_training_windows()
        input_rows = gather_index(windows.first, windows.end - windows.first)
        is_in_window = np.zeros(len(self.log), dtype=bool)
        is_in_window[input_rows + 1] = True
        return is_learned & is_in_window

    def for_config(self, config: Options) -> Dataset:
        """Return a copy under other options of model, training and histories; arrays are shared."""
        other = copy.copy(self)
        other.config = config
        return other

    def without_test(self) -> Dataset:
        """Return a copy without the test interactions.

        Training and validation stay as they are, since test interactions are in none of their
        histories. A model that is trained on the copy can be used with the whole dataset, too.
        """
        # A model's weights are stored with the identity (digests) of its data, and are refused for
        # data with another one. So the copy gets the identity of the whole dataset.
        reduced = copy.copy(self)
        reduced.identity = self.identity

        split = self.split
        is_kept = split.part != TEST
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


# --- fields besides ids and times ---


def map_fields_to_tables(dataset: Dataset) -> dict[str, str]:
    """Return loaded field -> its table, inter, user or item."""
    return {field: name for name, table in dataset.tables.items() for field in table}


def explain_not_loaded(field: str, dataset: Dataset, alternatives: tuple[str, ...] = ()) -> str:
    """Return the text of a message: that a field is not loaded, and which fields are.

    Args:
        field: the field.
        dataset: the dataset.
        alternatives: names besides those of the dataset that may have been meant.
    """
    loaded = [*map_fields_to_tables(dataset), *alternatives]
    return (
        f"field {shown(field)} is not loaded{suggest(field, loaded)}; loaded are {listed(loaded)}; "
        "load_col names the columns to load"
    )


def check_selected(dataset: Dataset, fields: Sequence[str]) -> None:
    """Refuse fields in ``selected_features`` that RecBole's models cannot embed.

    Some of RecBole's models embed the attributes of items that this option names. A field must be
    in the table of items. If it holds numbers, the option ``numerical_features`` must name it, too:
    otherwise RecBole makes a layer wide enough for its embedding, but never computes the embedding.

    Args:
        dataset: the dataset.
        fields: the value of the option ``selected_features``.
    """
    for field in fields:
        # Raise an error if the field is not loaded, or not an attribute in the table of items.
        _require_field(dataset, "selected_features", field, "item")
        kind = dataset.kinds[field]
        if kind.startswith("float") and field not in dataset.config["numerical_features"]:
            raise UsageError(
                f"selected_features: {shown(field)} holds numbers, which RecBole embeds only if "
                f"numerical_features names them; add numerical_features: [{field}], or leave it out"
            )


def read_column(field: str, table: str, dataset: Dataset) -> np.ndarray:
    """Return the values of a field, with NaN again where a number was missing.

    The dataset keeps missing numbers as the mean, and a mask of them in ``dataset.missing``.

    Args:
        field: the field.
        table: the table it is of: inter, user or item.
        dataset: the dataset.

    Returns:
        [n], or [n, s] of lists: by id for users and items, by row of the log for interactions.
        Tokens are int64 with 0 where one is missing, numbers float64 with NaN where one is missing.
    """
    column: np.ndarray = dataset.tables[table][field].numpy()
    if column.dtype.kind != "f":
        return column
    column = column.astype(np.float64)
    if field in dataset.missing:
        column[dataset.missing[field]] = np.nan
    return column


def read_feature_names(config: Options, option: str) -> list[str]:
    """Return the fields that one of the options in ``SIDE_FEATURES`` names: one or a list."""
    names = config[option] or []
    return [names] if isinstance(names, str) else list(names)


def read_features(dataset: Dataset, option: str) -> dict[str, Tensor]:
    """Read the fields that a model embeds beside the vectors of items, and check that it can.

    Args:
        dataset: the dataset.
        option: the option that names them: item_features, user_features or event_features, for
            fields of items, users or interactions.

    Returns:
        Name of a field -> its column: [n] or [n, s] int64 tokens, 0 where one is missing; or [n]
        float32 numbers, NaN where one is missing.

    Raises:
        UsageError: if a field cannot be embedded.
    """
    columns: dict[str, Tensor] = {}
    config, table = dataset.config, SIDE_FEATURES[option]  # of item_features: item
    for field in read_feature_names(config, option):
        _require_field(dataset, option, field, table)  # refuses a field that cannot be embedded
        columns[field] = torch.from_numpy(read_column(field, table, dataset))
        if not columns[field].is_floating_point():  # ids of tokens, which are not scaled
            continue
        columns[field] = columns[field].float()
        # The model standardizes numbers, which RecBole's options may have scaled already.
        if config["normalize_all"] or field in (config["normalize_field"] or ()):
            raise UsageError(
                f"{option} standardizes {shown(field)}: take it out of normalize_field, and set "
                "normalize_all to False"
            )
    return columns


def read_history_features(dataset: Dataset) -> Features:
    """Return the columns that ``event_features`` and ``user_features`` name."""
    return Features(
        read_features(dataset, "event_features"), read_features(dataset, "user_features")
    )


def _require_field(dataset: Dataset, option: str, field: str, table: str) -> None:
    """Raise an error if a model could not embed a field as an attribute of the rows of a table.

    Refused is a field that is not loaded, is an id or the time, is of another table, or holds
    vectors (type float_seq).

    Args:
        dataset: the dataset.
        option: the option that names the field, for the message.
        field: the field.
        table: the table that it must be of: inter, user or item.
    """
    table_by_field = map_fields_to_tables(dataset)
    if field not in table_by_field:
        raise UsageError(f"{option}: {explain_not_loaded(field, dataset)}")

    problem, actual = None, table_by_field[field]
    if field in (dataset.uid_field, dataset.iid_field, dataset.time_field):
        problem = "is an id or the time, which are read anyhow; leave it out"
    elif actual != table:
        # Advise the option for the table that the field is in: ``SIDE_FEATURES`` maps such options
        # to their tables, as item_features to item.
        option_by_table = {read: name for name, read in SIDE_FEATURES.items()}
        problem = f"is a field of {dataset.dataset_name}.{actual}; see {option_by_table[actual]}"
    elif dataset.kinds[field] == "float_seq":
        problem = "holds vectors; give each number a column of type float, or leave it out"
    if problem is not None:
        raise UsageError(f"{option}: expected attributes in .{table}, but {shown(field)} {problem}")


def read_item_attribute(dataset: Dataset, field: str) -> Tensor:
    """Return the tokens of each item in a field, such as its genres.

    Args:
        dataset: the dataset.
        field: a field of items, of type token or token_seq.

    Returns:
        [items, s] int64 ids of tokens by id of the item, 0 for none; s is 1 for a token field.

    Raises:
        UsageError: if the field is not loaded, or of another type or table.
    """
    _require_field(dataset, "an attribute of items", field, "item")
    if not dataset.kinds[field].startswith("token"):
        raise UsageError(f"{shown(field)}: expected a field of items of type token or token_seq")

    # One token for each item, [items], becomes [items, 1].
    column = dataset.tables["item"][field]
    return column.reshape(len(column), -1)
