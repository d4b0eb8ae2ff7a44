"""Prepared data in the user's cache folder: the second start reads no text.

A cache is one Arrow file of arrays, which are mapped, and of plain values as json. Its name is a
digest of all that the data were made from: path, inode, size and times of the atomic files, the
options that preparing them reads, and versions. If one of these changes, there is no such file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import recbole

from recbole_pos.data.dataset import Columns, Dataset, NameIds
from recbole_pos.data.interactions import EventLog, wrap_read_only
from recbole_pos.data.targets import Split
from recbole_pos.errors import PosError
from recbole_pos.files import atomic_write
from recbole_pos.values import Options
from recbole_pos.version import __version__

FORMAT = 12  # number to raise when the same files and options are prepared in another way
MIN_BYTES = 4 << 20  # least size of the files: smaller ones are read in less than a second
MAX_CACHES = 4  # how many caches of a dataset are kept
_SETTLED = 2e9  # nanoseconds after which a change of a file changes its times, too
_ABANDONED = 3600  # seconds after which an unfinished file is taken for abandoned
# The options that preparing reads; a test checks that there are no others.
READ = (
    *("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD", "benchmark_filename", "column_types"),
    *("eval_args", "filter_inter_by_user_or_item", "item_inter_num_interval"),
    *("load_col", "normalize_all", "normalize_field", "numerical_features", "rm_copies"),
    *("rm_dup_inter", "seq_separator", "session_filter", "target_events"),
    *("timestamp_unit", "train_fraction", "user_inter_num_interval"),
    "val_interval",
)
# Attributes of a dataset that are kept as they are.
_KEPT_ATTRIBUTES = ("kinds", "identity", "user_counts", "missing")
_COLUMN = "(column of the array)"  # key of a mapping in json that stands for an array


def find_cache(config: Options, files: Iterable[Path]) -> Path | None:
    """Return the path of the cache of a dataset, which need not exist; None if it must have none.

    It must have none if the option ``cache`` is off; if the files are small (below ``MIN_BYTES``),
    so that reading them takes less than a second; if one was changed in the last two seconds
    (``_SETTLED``), since a further change might not show in its times; or if the user has no home
    folder.

    The name of the cache is a digest (a short hash) of all that its content depends on. If a file,
    an option of the data or a version changes, so does the path, so that no outdated cache is
    found.

    Args:
        config: configuration of the dataset.
        files: the atomic files, some of which may not exist.
    """
    existing = [file for file in files if file.is_file()]
    stats = [file.stat() for file in existing]
    if config["cache"] is not True or sum(stat.st_size for stat in stats) < MIN_BYTES:
        return None
    last_change = max(max(stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats)
    if time.time_ns() - last_change < _SETTLED:
        return None

    # All that the content of the cache depends on. First, versions: FORMAT is a number that is
    # raised whenever the same files and options are prepared in another way.
    versions = {"format": FORMAT, "recbole_pos": __version__, "recbole": recbole.__version__}
    # Second, the options that preparing the data reads (READ).
    options = {name: config[name] for name in READ}
    # Third, for each file its path, inode, size and times, one of which changes if a byte does.
    paths = [os.path.abspath(file) for file in existing]
    states = [
        (path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for path, stat in zip(paths, stats, strict=True)
    ]
    content = json.dumps([versions, options, states], sort_keys=True, default=str)

    # A folder for each dataset, named after it and the digest of where it is.
    folder_name = f"{config['dataset']}-{_digest(os.path.dirname(paths[0]))}"
    try:
        return find_cache_folder() / folder_name / f"{_digest(content)}.arrow"
    except RuntimeError:  # no home folder
        return None


def load_cache(path: Path, config: Options) -> Dataset | None:
    """Return the dataset from a cache; None if there is none, or it is damaged.

    Args:
        path: the file of the cache.
        config: configuration of the run, which the dataset gets.
    """
    try:
        os.utime(path)  # marks it as used now: those used longest ago are removed first
        return restore(_read_arrays(path), config)
    # Any error: a damaged file may fail in any way, and the data can be read without it.
    except Exception:
        return None


def save_cache(path: Path, dataset: Dataset) -> None:
    """Write a dataset to a cache. A failure is logged only, since a cache is not needed."""
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_arrays(path, capture(dataset))

        # Remove all caches but the ``MAX_CACHES`` used last. Remove temporary files, too, if they
        # are older than an hour (``_ABANDONED``): their writer must have been killed.
        last_used = sorted(folder.glob("*.arrow"), key=os.path.getmtime, reverse=True)
        for file in (*last_used[MAX_CACHES:], *folder.glob(".*.tmp")):
            if file.suffix == ".arrow" or time.time() - os.path.getmtime(file) > _ABANDONED:
                file.unlink(missing_ok=True)
    except (OSError, PosError) as error:
        message = "prepared data of %s are not kept for the next start: %s"
        logging.getLogger().info(message, dataset.dataset_name, error)


def find_cache_folder() -> Path:
    """Return the folder of all caches, or raise a RuntimeError if the user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recbole-pos"


def capture(dataset: Dataset) -> dict[str, Any]:
    """Return a prepared dataset as a tree of arrays and plain values, for :func:`restore`.

    Its data are filtered, numbered, sorted and split already.

    Args:
        dataset: the dataset, whose arrays are not copied.

    Returns:
        ``part`` and ``is_target``: [interactions], for each interaction whether it is of training,
        validation or test, and whether it may be a target. ``tables``: table -> field -> array.
        ``names``: field -> [ids] names.
        Other values are attributes of the dataset (``_KEPT_ATTRIBUTES``) or its split, by name.
    """
    split = dataset.split
    return {
        **{name: getattr(dataset, name) for name in _KEPT_ATTRIBUTES},
        "offsets": split.log.offsets,
        "summary": split.summary,
        "part": split.part,
        "is_target": split.is_target,
        "tables": {
            name: {field: column.numpy() for field, column in table.items()}
            for name, table in dataset.tables.items()
        },
        "names": dataset.field2id_token,
    }


def restore(state: dict[str, Any], config: Options) -> Dataset:
    """Make a dataset again from what :func:`capture` returned.

    Args:
        state: the tree of arrays and plain values.
        config: configuration of the run. Its options of the data are those of the captured dataset;
            those of model and training may be others.

    Returns:
        The dataset, whose arrays are still read from disk as they are used.
    """
    # Tensors that share the arrays of the tree.
    tables: dict[str, Columns] = {
        name: {field: wrap_read_only(column) for field, column in table.items()}
        for name, table in state["tables"].items()
    }
    # The log: the interactions; user u has the rows offsets[u] to offsets[u + 1] of it. Ids of
    # names (``NameIds``) are not in the tree, since they follow from the order of the names.
    key_fields = (config["USER_ID_FIELD"], config["ITEM_ID_FIELD"], config["TIME_FIELD"])
    log = EventLog(tables["inter"], state["offsets"], *key_fields)

    dataset = Dataset(
        config=config,
        kinds=state["kinds"],
        field2id_token=state["names"],
        field2token_id={field: NameIds(names) for field, names in state["names"].items()},
        user_feat=tables.get("user"),
        item_feat=tables.get("item"),
        missing=state["missing"],
        user_counts=state["user_counts"],
        split=Split(log, state["part"], state["is_target"], state["summary"]),
    )
    dataset.identity = state["identity"]
    return dataset


def _write_arrays(path: Path, content: Any) -> None:
    """Write nested dicts and lists of arrays and plain values as one file of Arrow.

    The file is a table of one row, with a column for every array: the cell has the bytes of the
    array. All else is text in the metadata of the table, as json. There a mapping stands for each
    array, such as {_COLUMN: 3, "dtype": "<f8", "shape": [7, 2]} for the one whose bytes are in
    column 3. ``_COLUMN`` is a text, a key that no other mapping has.

    Args:
        path: the file, which appears only when it is whole (``atomic_write``).
        content: the nested dicts and lists.
    """
    arrays: list[np.ndarray] = []

    def replace_array(value: Any) -> Any:
        """Add an array to ``arrays``, and return the mapping that stands for it in json.

        ``json.dumps`` calls this for every value that json has no form for. Besides arrays these
        are single numbers of numpy, which become numbers of Python.
        """
        if isinstance(value, np.generic):
            return value.item()
        arrays.append(np.ascontiguousarray(value))
        return {_COLUMN: len(arrays) - 1, "dtype": value.dtype.str, "shape": value.shape}

    text = json.dumps(content, default=replace_array)
    columns = [_wrap_bytes(array) for array in arrays]
    row = pa.record_batch(columns, names=list(map(str, range(len(columns)))))  # 0, 1, 2, ...
    schema = row.schema.with_metadata({"content": text})
    with atomic_write(path, text=False) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(row)


def _wrap_bytes(array: np.ndarray) -> pa.Array:
    """Return a column of Arrow with one cell: the bytes of an array, which are not copied.

    Arrow makes a column of three buffers: which cells are missing (None if none is), where each
    cell begins and the last one ends, and the bytes of all cells. An array of 48 bytes is one cell
    from byte 0 to byte 48.
    """
    bounds, data = np.array([0, array.nbytes]), array.reshape(-1).view(np.uint8)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), 1, buffers)


def _read_arrays(path: Path) -> Any:
    """Read nested dicts and lists of arrays and plain values from a file of a cache.

    The file is an Arrow table of one row, written by :func:`_write_arrays`. Each column has the
    bytes of one array. The metadata ``content`` has the dicts and lists as json, where a mapping
    stands for each array: {_COLUMN: 3, "dtype": "<f8", "shape": [7, 2]} for the array whose bytes
    are in column 3. ``_COLUMN`` is a text, a key that no other mapping has.

    The arrays are mapped: they are read from disk when they are used. What is written into one
    (mode "c", copy on write) stays in this process and does not change the file.
    """
    reader = pa.ipc.open_file(pa.py_buffer(np.memmap(path, mode="c")))
    columns = reader.get_batch(0).columns

    def replace_mapping(value: dict[str, Any]) -> Any:
        """Return the array that a mapping of the json text stands for; other mappings as they are.

        For example {_COLUMN: 3, "dtype": "<f8", "shape": [7, 2]} stands for 7 x 2 numbers of type
        float64. Their bytes are in column 3 of the file (``columns``, read above), which has one
        cell.
        """
        if _COLUMN not in value:  # a key that only such mappings have
            return value
        # Arrow keeps a column in three buffers: which cells are missing, where each cell begins,
        # and the bytes of all cells. The last one is None for an array without elements.
        _missing, _bounds, array_bytes = columns[value[_COLUMN]].buffers()
        numbers = np.frombuffer(array_bytes or b"", np.dtype(value["dtype"]))
        return numbers.reshape(value["shape"])

    # json.loads calls the function for every mapping of the text.
    return json.loads(reader.schema.metadata[b"content"], object_hook=replace_mapping)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
