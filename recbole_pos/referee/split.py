"""A split of a dataset for other toolkits: what to predict, the right answers, and all as files.

In: a dataset and the options of its split. Out: :class:`Requests`, and :class:`DataSplit`, which
writes a folder with the interactions of each part, the requests of validation and test without
their targets, the targets, and the protocol in words. A request is the question for one held-out
target: which item comes next after this history?
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pyarrow import parquet

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.conversion import convert
from recbole_pos.data.loading import read_dataset_name
from recbole_pos.data.protocol import describe_candidates, find_excluded_items, masks_history
from recbole_pos.data.splits import PHASES
from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.experiment.evaluation import make_rank_table
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import load_config
from recbole_pos.files import replace_folder, write_json, write_text
from recbole_pos.values import check_choice

PARTS = ("test", "valid")
# To read a split, RecBole needs the configuration of some model; this one learns nothing.
_READING_MODEL = "SPop"
PROTOCOL_FILE = "split.json"
PAGES = Environment(  # of markdown, in this folder
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True
)
_CELLS = 1 << 22  # most items of histories, or interactions, that are in memory as text at a time


@dataclass(frozen=True)
class Requests:
    """The requests of one part of a split, in the order of the dataset: by user, then by time.

    Attributes:
        dataset: the dataset.
        part: test or valid.
        excludes_seen: whether items of the user's past are not ranked (``mask_history``).
        target_rows: [requests] int64 rows of the targets in ``dataset.log``.
    """

    dataset: Any
    part: str
    excludes_seen: bool
    target_rows: np.ndarray

    def __len__(self) -> int:
        return len(self.target_rows)

    @property
    def user_ids(self) -> np.ndarray:
        """[requests] int64 ids of the users; those of the same user stand together."""
        return self.dataset.log.users.numpy()[self.target_rows]

    @cached_property
    def users(self) -> np.ndarray:
        """[requests] names of the users, as text."""
        return self.dataset.field2id_token[self.dataset.uid_field][self.user_ids].astype(str)

    @cached_property
    def names(self) -> np.ndarray:
        """[requests] names of the requests, as text: each occurs once.

        A request, the question for one held-out item, has the name of its user. If any user has
        several requests, a number is added to all names, from the oldest request of a user on:
        ann#1, ann#2, bob#1.
        """
        numbers = count_within(self.user_ids) + 1
        if numbers.max(initial=1) == 1:
            return self.users
        return np.array([f"{u}#{number}" for u, number in zip(self.users, numbers, strict=True)])

    @property
    def item_names(self) -> np.ndarray:
        """[items] names of all items by id, as text; id 0 is padding and no item."""
        return self.dataset.field2id_token[self.dataset.iid_field].astype(str)

    @property
    def target_ids(self) -> np.ndarray:
        """[requests] int64 ids of the items that are the right answers."""
        return self.dataset.log.items.numpy()[self.target_rows]

    @property
    def times(self) -> np.ndarray:
        """[requests] float64 times of the targets, in the unit of the dataset."""
        return self.dataset.log.times.numpy()[self.target_rows]

    @property
    def history_starts(self) -> np.ndarray:
        """[requests] int64 row in the log of the oldest interaction of each request's user.

        The history of a request are the rows from there up to its target, without the target.
        """
        # The log has all interactions, sorted by user, then by time. Its offsets are the first row
        # of each user, by the user's id.
        return self.dataset.log.offsets[self.user_ids]

    @property
    def candidates(self) -> str:
        """Which items are ranked, in words."""
        return describe_candidates(self.excludes_seen)

    def find_excluded(self, chosen: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of a request and an item that a list must not contain for it.

        They are the items of the user's past, if the protocol says that these are not ranked
        (``mask_history``); otherwise there are no such pairs.

        Args:
            chosen: the requests to look at, as a range of their numbers.

        Returns:
            [pairs] int64 numbers of requests, counted from the first chosen one; [pairs] int64 ids
            of items. A pair may occur more than once.
        """
        if not self.excludes_seen:
            nothing = np.empty(0, dtype=np.int64)
            return nothing, nothing
        # find_excluded_items returns two tensors of equal length, numbers of requests and ids of
        # items, one entry for each pair.
        target_rows = torch.from_numpy(self.target_rows[chosen])
        examples, items = find_excluded_items(self.dataset.log, target_rows)
        return examples.numpy(), items.numpy()

    @cached_property
    def digest(self) -> str:
        """16 hex digits of a hash of the requests: equal digests, equal questions.

        Predictions of another program carry the digest of the requests that they answer, by which
        those made for another split are refused. The digest changes with the data, the split, the
        targets, and which items are ranked.
        """
        # Texts: a hash of the data, "test" or "valid", which items are ranked, and the names of the
        # requests, such as ann#2. A zero byte ends each.
        digest = hashlib.sha256()
        for text in (self.dataset.identity["data"], self.part, self.candidates, *self.names):
            digest.update(text.encode() + b"\0")
        # Numbers: the row of each request's target in the data.
        digest.update(np.ascontiguousarray(self.target_rows).tobytes())
        return digest.hexdigest()[:16]

    @property
    def protocol(self) -> dict[str, Any]:
        """What is predicted and which items are ranked, as plain values that json can hold.

        It is written beside a split for others, so that their programs have the same rules.
        ``digest`` is a hash of all requests, by which lists for another split are refused.
        """
        summary = self.dataset.split.summary  # what was split how, and counts of targets by part
        return {
            "dataset": str(self.dataset.dataset_name),
            "split": summary["split"],
            "boundaries": summary["boundaries"],
            "target": summary["target"],
            "cold_items": summary["cold_items"],
            "part": self.part,
            "requests": len(self),
            "repeated_targets": summary["repeated_targets"][self.part],
            "candidates": self.candidates,
            "digest": self.digest,
        }

    def make_rank_table(self, ranks: np.ndarray) -> Any:
        """Return the table that a run keeps of its test, given [requests] ranks from 0."""
        unit = self.dataset.config["timestamp_unit"]
        return make_rank_table(self.dataset, self.target_rows, ranks, unit)


def count_within(groups: np.ndarray) -> np.ndarray:
    """Return for each row how many rows of its group stand before it.

    The groups [0, 0, 0, 2, 2] give [0, 1, 2, 0, 1].

    Args:
        groups: [rows] group of each row; rows of the same group stand together.
    """
    # A row is the first of its group if the row before has another group, so that their difference
    # is not 0; -1, which is no group, stands before row 0. In the example the first rows are 0 and
    # 3, and the sizes 3 and 2. A row's number, less that of its first row, is what is returned.
    first_rows = np.flatnonzero(np.diff(groups, prepend=-1))
    sizes = np.diff(first_rows, append=len(groups))
    return np.arange(len(groups)) - np.repeat(first_rows, sizes)


def divide(sizes: np.ndarray, largest: int) -> Iterator[slice]:
    """Yield ranges of requests that have, together, about as many elements as fit into memory.

    A new range begins where the sum of all sizes so far passes a multiple of ``largest``.

    Sizes [3, 1, 4, 2] and 5 elements give the ranges 0:2, 2:3 and 3:4.

    Args:
        sizes: [requests] elements of each, such as the items of its list.
        largest: elements of a range, about.
    """
    # The first request of a range is where the quotient differs from the one before: the sums
    # 3, 4, 8, 10 of the example give the quotients 0, 0, 1, 2. -1 makes the first request one.
    is_first = np.diff(np.cumsum(sizes) // largest, prepend=-1) != 0
    bounds = [*np.flatnonzero(is_first).tolist(), len(sizes)]
    for first, end in itertools.pairwise(bounds):
        yield slice(first, end)


def read_split_data(
    data: Any,
    config_files: Sequence[str | Path] = (),
    options: dict[str, Any] | None = None,
    strict: bool = True,
) -> Any:
    """Read a dataset from its files and split it, for predictions of other systems.

    Args:
        data: a dataset, its name or its folder.
        config_files: yaml files of options, later ones winning.
        options: options of the data, which win over files, such as ``eval_args``.
        strict: whether other options, such as those of a model, are errors.

    Returns:
        The dataset object of this package, with its split. No model is made.
    """
    if data is None:
        raise UsageError("dataset: none given; name one, as in -d shop")
    name = read_dataset_name(data)
    files = [os.fspath(file) for file in config_files]
    # numbers stay as they are in the files; RecBole's defaults for ml-100k scale them
    options = {"normalize_all": False, **(options or {})}
    # RecBole needs the name of a model to read data; _READING_MODEL is one that learns nothing.
    return read_dataset(PosConfig(_READING_MODEL, name, files, options, strict=strict))


def read_run_data(run_dir: str | Path, data_path: str | Path | None = None) -> Any:
    """Return the dataset of a trained run, with the split of that run.

    Args:
        run_dir: folder of the run.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.
    """
    options = {} if data_path is None else {"data_path": str(data_path)}
    run = RunFolder(run_dir).require()  # an error if it is no folder of a run
    return read_dataset(load_config(run, options))


def make_requests(dataset: Any, part: str = "test") -> Requests:
    """Return the requests of a part of a split: a question for each held-out item (target).

    Args:
        dataset: the dataset, with its split.
        part: ``test`` or ``valid``.

    Raises:
        UsageError: if the split leaves no target for the part.
    """
    check_choice("part", part, PARTS)  # one of test and valid
    is_target = dataset.split.find_targets(PHASES.index(part))  # for each row of the log
    target_rows = np.flatnonzero(is_target)
    if not len(target_rows):
        raise UsageError(f"part: this split of {dataset.dataset_name} has no {part} targets")
    excludes_seen = bool(masks_history(dataset.config))  # whether items of the past are not ranked
    return Requests(dataset, part, excludes_seen, target_rows)


class DataSplit:
    """A dataset that is split into training, validation and test.

    Args:
        dataset: the dataset.
        source: what the dataset was read from, whose temporary files are deleted with this object.
    """

    def __init__(self, dataset: Any, source: Any = None) -> None:
        self.dataset, self.source = dataset, source

    @property
    def train(self) -> pd.DataFrame:
        """The training interactions: user, item, time and the other columns."""
        return self.get_interactions("train")

    @property
    def valid(self) -> pd.DataFrame:
        """The interactions held out for validation."""
        return self.get_interactions("valid")

    @property
    def test(self) -> pd.DataFrame:
        """The interactions held out for the test."""
        return self.get_interactions("test")

    def get_interactions(self, part: str) -> pd.DataFrame:
        """Return the interactions of a part (train, valid or test), by user and then by time."""
        return pa.concat_tables(_tabulate_interactions(self.dataset, part)).to_pandas()

    def get_requests(self, part: str = "test") -> pd.DataFrame:
        """Return the requests of a part (valid or test), with their histories."""
        requests = make_requests(self.dataset, part)
        return pa.concat_tables(_tabulate_requests(requests)).to_pandas()

    def get_targets(self, part: str = "test") -> pd.DataFrame:
        """Return request and item of each target of a part (valid or test)."""
        return next(_tabulate_targets(make_requests(self.dataset, part))).to_pandas()

    def to_folder(self, folder: str | Path) -> Path:
        """Write the split as a folder of parquet files; a folder that exists is replaced.

        It gets the interactions of each part (train, valid, test); for valid and test the requests
        (the history before each held-out item) and, in a file of their own, the held-out items; and
        a description of the split for programs (split.json) and people (README.md).
        """
        # the parts with requests (PARTS: test and valid); a split may have none for validation
        num_targets = self.dataset.split.summary["targets"]
        all_requests = [make_requests(self.dataset, part) for part in PARTS if num_targets[part]]
        protocols = [requests.protocol for requests in all_requests]

        # The folder gets its name only when all files are complete. ``keep`` says which files of a
        # folder that is replaced stay in it: none.
        with replace_folder(folder, keep=lambda path: False) as unfinished:
            for part in PHASES:  # train, valid and test
                blocks = _tabulate_interactions(self.dataset, part)
                _write_blocks(unfinished / f"{part}.parquet", blocks)
            for requests in all_requests:
                path = unfinished / requests.part
                _write_blocks(Path(f"{path}_requests.parquet"), _tabulate_requests(requests))
                _write_blocks(Path(f"{path}_targets.parquet"), _tabulate_targets(requests))

            # PROTOCOL_FILE is split.json; a protocol says what is predicted for a part
            write_json(unfinished / PROTOCOL_FILE, {facts["part"]: facts for facts in protocols})
            readme = PAGES.get_template("split_readme.md.jinja").render(
                dataset=self.dataset.dataset_name,
                protocol_file=PROTOCOL_FILE,
                protocols=protocols,
            )
            write_text(unfinished / "README.md", readme)
        return Path(folder)


def split(data: Any, config_files: Sequence[str | Path] = (), **options: Any) -> DataSplit:
    """Split a dataset as a run does, for use outside of this package.

    Examples:
        >>> parts = recbole_pos.split("ml-100k", eval_args={"split": {"GT": [0.9, 0.95]}})
        >>> list(parts.train.columns)[:3], len(parts.train) + len(parts.valid) + len(parts.test)
        (['user', 'item', 'time'], 100000)
        >>> list(parts.get_requests("test").columns)
        ['request', 'user', 'time', 'history', 'history_times', 'excludes_seen']

    Args:
        data: a dataset, its name or its folder.
        config_files: yaml files of options, later ones winning.
        options: options of the data, such as ``eval_args``, ``mask_history`` and ``data_path``.
    """
    return DataSplit(read_split_data(data, config_files, options), source=data)


class Dataset(convert.Dataset):
    # The public class: that of convert.py, which knows no models, with the one method that does.
    __doc__ = convert.Dataset.__doc__

    def split(self, config_files: Sequence[str | Path] = (), **options: Any) -> DataSplit:
        """Split the dataset as :func:`recbole_pos.split` does, with the same arguments."""
        return split(self, config_files, **options)


def _tabulate_interactions(dataset: Any, part: str) -> Iterator[pa.Table]:
    """Yield the interactions of a part as tables of limited length, with names in place of ids.

    The columns are user, item, time and all other fields of the dataset. A part without
    interactions gives one empty table, which still has the columns.

    Args:
        dataset: the dataset, whose ``part`` says of every row of its log which part it is in.
        part: train, valid or test.
    """
    # _CELLS is the number of rows of a table; ids 0, 1, 2 of parts are train, valid, test (PHASES).
    log = dataset.log
    part_rows = np.flatnonzero(dataset.part == PHASES.index(part))
    names = {log.user_field: "user", log.item_field: "item", log.time_field: "time"}
    fields = [*names, *(field for field in log.fields if field not in names)]
    for start in range(0, max(len(part_rows), 1), _CELLS):  # once if there is no row
        rows = part_rows[start : start + _CELLS]
        columns = {names.get(field, field): _name_values(dataset, field, rows) for field in fields}
        yield pa.table(columns)


def _name_values(dataset: Any, field: str, rows: np.ndarray) -> pa.Array:
    """Return the values of a field in some rows of the log, with names in place of ids.

    ==================  =====================  ====================================
    kind of field       in the log             what is returned
    ==================  =====================  ====================================
    the time            number                 whole number if all times are
    names               id, 0 for none         name, null for none
    lists of names      ids, padded with 0     list of names
    numbers             number                 number, null for an empty cell
    lists of numbers    numbers                list of numbers
    ==================  =====================  ====================================

    Args:
        dataset: the dataset, whose log has all interactions.
        field: name of the field.
        rows: [n] int64 numbers of the rows.
    """
    values = dataset.log.fields[field].numpy()[rows]
    if field == dataset.time_field:
        return _convert_times(dataset, values)

    is_list = values.ndim == 2
    names = dataset.field2id_token.get(field)  # by id; None for a field of numbers
    if names is not None:
        if is_list:
            return pa.array([list(names[ids[ids > 0]]) for ids in values])
        return pa.array(names.astype(str)).take(pa.array(values, mask=values == 0))
    if is_list:
        return pa.array(list(values))
    # [log] bool, which cells are empty; None for a field without empty cells
    is_empty = dataset.missing.get(field)
    return pa.array(values, mask=None if is_empty is None else is_empty[rows])


def _convert_times(dataset: Any, times: np.ndarray) -> pa.Array:
    """Return times [n], as whole numbers if all times of the dataset are whole."""
    all_times = dataset.log.times.numpy()
    are_whole = (all_times == np.round(all_times)).all()
    return pa.array(times.astype(np.int64) if are_whole else times)


def _tabulate_requests(requests: Requests) -> Iterator[pa.Table]:
    """Yield the requests as tables: a row for each, with the history before the held-out item.

    Each table has some of the requests, so that memory is limited: their histories have about
    _CELLS interactions together.

    Args:
        requests: the requests. The history of each is a range of rows of the log, from
            ``history_starts`` up to, and without, the row of its target.
    """
    dataset, log = requests.dataset, requests.dataset.log
    item_names = pa.array(requests.item_names)
    all_lengths = requests.target_rows - requests.history_starts
    for chosen in divide(all_lengths, _CELLS):  # ranges of requests, as slices
        lengths = all_lengths[chosen]
        # All histories one after the other: starts [4, 9] and lengths [2, 3] give the rows of the
        # log [4, 5, 9, 10, 11], and offsets [0, 2, 5] say where each history begins and ends.
        rows = gather_index(requests.history_starts[chosen], lengths)
        items = item_names.take(pa.array(log.items.numpy()[rows]))
        times = _convert_times(dataset, log.times.numpy()[rows])
        offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
        yield pa.table(
            {
                "request": pa.array(requests.names[chosen]),
                "user": pa.array(requests.users[chosen]),
                "time": _convert_times(dataset, requests.times[chosen]),
                "history": pa.ListArray.from_arrays(offsets, items),
                "history_times": pa.ListArray.from_arrays(offsets, times),
                "excludes_seen": pa.array(np.full(len(lengths), requests.excludes_seen)),
            }
        )


def _tabulate_targets(requests: Requests) -> Iterator[pa.Table]:
    """Yield request and item of each target, in one table."""
    items = pa.array(requests.item_names[requests.target_ids])
    yield pa.table({"request": pa.array(requests.names), "item": items})


def _write_blocks(file: Path, blocks: Iterator[pa.Table]) -> None:
    """Write tables of the same columns one below the other into a parquet file."""
    first = next(blocks)
    with parquet.ParquetWriter(file, first.schema) as writer:
        for table in itertools.chain([first], blocks):
            writer.write_table(table)
