"""A split as files that any other toolkit can read.

In: a dataset and the options of its split. Out: a folder with the interactions of each part, the
requests of validation and test without their targets, the targets, and the protocol in words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pyarrow import parquet

from recbole_pos.data.splits import PHASES
from recbole_pos.data.windows import gather_index
from recbole_pos.files import replace_folder, write_json, write_text
from recbole_pos.referee.requests import PARTS, Requests, divide, make_requests, read_split_data

PROTOCOL_FILE = "split.json"
PAGES = Environment(  # of markdown, in this folder
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True
)
_CELLS = 1 << 22  # most items of histories, or interactions, that are in memory as text at a time


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

    One table has as many requests as their histories fit into memory (``divide`` yields such
    ranges).

    Args:
        requests: the requests. The history of each is a range of rows of the log, from
            ``history_starts`` up to, and without, the row of its target.
    """
    dataset, log = requests.dataset, requests.dataset.log
    item_names = pa.array(requests.item_names)
    all_lengths = requests.target_rows - requests.history_starts
    for chosen in divide(all_lengths, _CELLS):
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
