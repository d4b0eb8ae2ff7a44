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
from pyarrow import parquet

from recbole_pos.conversion import frames
from recbole_pos.data.splits import PHASES, format_time
from recbole_pos.data.windows import gather_index
from recbole_pos.files import replace_folder, write_json, write_text
from recbole_pos.referee.requests import PARTS, Requests, make_requests, read_split_data

PROTOCOL_FILE = "split.json"
_CELLS = 1 << 22  # most items of histories, or interactions, that are in memory as text at a time
_NAMES = ("user", "item", "time")  # columns of interactions; others keep the names of their fields

_README = """# {dataset}, split for a comparison

Written by recbole-pos. Names of users and items are those of the dataset, as text.

| file | content |
|---|---|
| train.parquet, valid.parquet, test.parquet | interactions: user, item, time, other columns |
| valid_requests.parquet, test_requests.parquet | what to predict, without the answers |
| valid_targets.parquet, test_targets.parquet | the answers: request and item |
| {protocol_file} | the protocol, and its digest |

A **request** has its name (`request`), the `user`, the `time` at which it is made, the `history` of
items and their `history_times`, oldest first, and whether items of the history are excluded
(`excludes_seen`).

## Protocol

{protocol}

## What to do

1. Train on train.parquet; choose by valid_targets.parquet. Nothing may be learned from the test.
2. Write the best items of each request of test_requests.parquet, at least 10, as a parquet or csv
   file with the columns `request`, `item` and `score` (or `rank`).
3. `recbole-pos score FILE -d {dataset}` with the same options of the split.
"""


class DataSplit:
    """A dataset that is split into training, validation and test.

    Args:
        dataset: the dataset after ``build``.
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
        rows = np.flatnonzero(self.dataset.part == PHASES.index(part))
        return _tabulate_interactions(self.dataset, rows).to_pandas()

    def get_requests(self, part: str = "test") -> pd.DataFrame:
        """Return the requests of a part (valid or test), with their histories."""
        requests = make_requests(self.dataset, part)
        return pa.concat_tables(_tabulate_requests(requests)).to_pandas()

    def get_targets(self, part: str = "test") -> pd.DataFrame:
        """Return request and item of each target of a part (valid or test)."""
        return _tabulate_targets(make_requests(self.dataset, part)).to_pandas()

    def to_folder(self, folder: str | Path) -> Path:
        """Write the split as a folder of parquet files; a folder that exists is replaced."""
        with replace_folder(folder, keep=lambda path: False) as unfinished:
            for number, part in enumerate(PHASES):
                rows = np.flatnonzero(self.dataset.part == number)
                blocks = (
                    _tabulate_interactions(self.dataset, rows[start : start + _CELLS])
                    for start in range(0, max(len(rows), 1), _CELLS)
                )
                _write_blocks(unfinished / f"{part}.parquet", blocks)

            all_requests = [make_requests(self.dataset, part) for part in self._list_parts()]
            for requests in all_requests:
                part = requests.part
                _write_blocks(unfinished / f"{part}_requests.parquet", _tabulate_requests(requests))
                targets = _tabulate_targets(requests)
                parquet.write_table(targets, unfinished / f"{part}_targets.parquet")

            write_json(
                unfinished / PROTOCOL_FILE,
                {requests.part: requests.protocol for requests in all_requests},
            )
            write_text(unfinished / "README.md", _write_readme(all_requests))
        return Path(folder)

    def _list_parts(self) -> list[str]:
        """Return the parts that have targets, the test first."""
        counts = self.dataset.split.summary["targets"]
        return [part for part in PARTS if counts[part]]


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


class Dataset(frames.Dataset):
    # the package's public Dataset: the one of frames, which cannot import what splits it
    __doc__ = frames.Dataset.__doc__

    def split(self, config_files: Sequence[str | Path] = (), **options: Any) -> DataSplit:
        """Split the dataset as a run does; arguments are those of :func:`recbole_pos.split`."""
        return split(self, config_files, **options)


def _tabulate_interactions(dataset: Any, rows: np.ndarray) -> pa.Table:
    """Return rows of the log ([n] int64) as a table, with names in the place of ids."""
    log = dataset.log
    fields = dict(zip((log.user_field, log.item_field, log.time_field), _NAMES, strict=True))
    columns = {}
    for field in (*fields, *(name for name in log.fields if name not in fields)):
        values = log.fields[field].numpy()[rows]
        is_missing = log.missing.get(field)
        mask = None if is_missing is None else is_missing[rows]
        columns[fields.get(field, field)] = _decode(dataset, field, values, mask)
    return pa.table(columns)


def _decode(
    dataset: Any, field: str, values: np.ndarray, is_missing: np.ndarray | None
) -> pa.Array:
    """Return the values of a field with names for ids: [n], or a list for each of [n, s]."""
    tokens = dataset.field2id_token.get(field)
    if values.ndim == 2:
        cells = values if tokens is None else tokens[values]
        # 0 and empty names pad the lists of ids
        lists = [
            row if tokens is None else row[ids > 0] for row, ids in zip(cells, values, strict=True)
        ]
        return pa.array([list(row) for row in lists])
    if tokens is not None:
        return _name_ids(tokens, values)
    if field == dataset.time_field:
        return _convert_times(dataset, values)
    return pa.array(values, mask=is_missing)


def _convert_times(dataset: Any, times: np.ndarray) -> pa.Array:
    """Return times [n], as whole numbers if all times of the dataset are whole."""
    all_times = dataset.log.times.numpy()
    are_whole = (all_times == np.round(all_times)).all()
    return pa.array(times.astype(np.int64) if are_whole else times)


def _name_ids(tokens: np.ndarray, ids: np.ndarray) -> pa.Array:
    """Return the names of ids [n]; the id 0 has none."""
    codes = pa.array(ids, mask=ids == 0)
    return pa.array(tokens.astype(str)).cast(pa.string()).take(codes)


def _tabulate_requests(requests: Requests) -> Iterator[pa.Table]:
    """Yield the requests in blocks whose histories have about as many items as fit into memory."""
    dataset, log = requests.dataset, requests.dataset.log
    starts, ends = requests.history_starts, requests.target_rows
    num_items = np.cumsum(ends - starts)
    is_first = np.diff(num_items // _CELLS, prepend=-1) != 0  # of a block
    bounds = [*np.flatnonzero(is_first).tolist(), len(requests)]
    item_names = pa.array(requests.item_names)

    for first, end in itertools.pairwise(bounds):
        chosen = slice(first, end)
        lengths = ends[chosen] - starts[chosen]
        rows = gather_index(starts[chosen], lengths)
        offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
        history_times = _convert_times(dataset, log.times.numpy()[rows])
        yield pa.table(
            {
                "request": pa.array(requests.names[chosen]),
                "user": pa.array(requests.users[chosen]),
                "time": _convert_times(dataset, requests.times[chosen]),
                "history": pa.ListArray.from_arrays(
                    offsets, item_names.take(pa.array(log.items.numpy()[rows]))
                ),
                "history_times": pa.ListArray.from_arrays(offsets, history_times),
                "excludes_seen": pa.array(np.full(len(lengths), requests.excludes_seen)),
            }
        )


def _tabulate_targets(requests: Requests) -> pa.Table:
    """Return request and item of each target."""
    items = _name_ids(requests.item_names, requests.target_ids)
    return pa.table({"request": pa.array(requests.names), "item": items})


def _write_blocks(file: Path, blocks: Iterator[pa.Table]) -> None:
    """Write tables of the same columns one below the other into a parquet file."""
    first = next(blocks)
    with parquet.ParquetWriter(file, first.schema) as writer:
        for table in itertools.chain([first], blocks):
            writer.write_table(table)


def _write_readme(all_requests: Sequence[Requests]) -> str:
    """Return the README of a folder, with the protocol of its parts in words."""
    first = all_requests[0].protocol
    kind, value = next(iter(first["split"].items()))
    boundaries = " and ".join(map(format_time, first["boundaries"]))
    sentences = [
        f"Split {kind}: {value}" + (f", at time {boundaries}" if boundaries else "") + ".",
        f"Targets of a user and part: {first['target']}. Items without training: "
        f"{first['cold_items']}.",
    ]
    for requests in all_requests:
        protocol = requests.protocol
        sentences.append(
            f"{protocol['part']}: {len(requests):,} requests, each with one target; "
            f"{protocol['repeated_targets']:,} targets are items that their user has had before. "
            f"Digest {protocol['digest']}."
        )
    sentences.append(f"Ranked for each request: {first['candidates']}.")
    sentences.append(
        "The history of a request is everything of its user before the target, also what was held "
        "out earlier."
    )
    return _README.format(
        dataset=first["dataset"],
        protocol_file=PROTOCOL_FILE,
        protocol="\n".join(f"- {sentence}" for sentence in sentences),
    )
