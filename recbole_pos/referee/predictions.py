"""Lists of recommended items: those of any system are read, and those of a trained run written.

:class:`Predictions` are the rows of a file (parquet, csv, tsv, TREC run, ranx json) or of a frame,
which are read in blocks and more than once, so that a file need not fit into memory; only json is
read whole. :func:`write_lists` writes the lists that the metrics of a run are made of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import EVENT, ITEMS
from recbole_pos.experiment.run import load
from recbole_pos.files import atomic_write
from recbole_pos.referee.split import make_requests, read_run_data
from recbole_pos.values import listed, shown

# Names of columns by what they hold: ours, RecTools', RePlay's, RecBole's, ranx's.
REQUEST_COLUMNS = ("request", "user_id", "query_id", "user", "user_idx", "session_id", "q_id")
ITEM_COLUMNS = ("item_id", "item", "items", "item_idx", "iid", "doc_id", "docid")
SCORE_COLUMNS = ("score", "rating", "relevance", "prediction")
RANK_COLUMNS = ("rank",)
SPLIT_COLUMN = "split"  # digest of the split that predictions were made for
# Columns of a TREC run, ``ann Q0 item7 1 0.9 tag``, which has no line of names. Its ranks, here
# ``place``, are not read: it is sorted by its scores, as trec_eval does.
_TREC_COLUMNS = ["request", "q0", "item", "place", "score", "tag"]
_SUFFIXES = (".parquet", ".csv", ".run", ".trec", ".json")  # of files that are written
_LENGTH = 100  # items of a list of a run by default
# Of RecBole's metrics, one that makes the evaluation keep the best items of each target.
_KEEPS_ITEMS = "ItemCoverage"
_BLOCK_ROWS = 1 << 20
_BLOCK_BYTES = 1 << 25


class Rows(NamedTuple):
    """Some rows of predictions.

    Attributes:
        requests, items: [n] their names, as text.
        order: [n] float64 numbers, of which the lowest of a request is its best item.
    """

    requests: pa.Array
    items: pa.Array
    order: np.ndarray


@dataclass(frozen=True)
class Predictions:
    """Lists of items, by request.

    Attributes:
        name: what messages call them: the file, or ``predictions``.
        read_blocks: returns an iterator over blocks of rows, from the first row on.
    """

    name: str
    read_blocks: Callable[[], Iterable[pa.RecordBatch]]

    def read_rows(self) -> Iterator[Rows]:
        """Yield all rows in blocks, in one form: request, item, and a number to sort by.

        A request is a question for recommended items, and each row has one item of its answer. The
        best item of a request has the lowest number: its rank, or the negative score; without both
        it is the number of the row.

        Raises:
            UsageError: if a column is missing, names are numbers with decimals such as 7.0, or a
                rank or score is not a number.
        """
        num_before = 0  # rows in the blocks before, from which those of a block are numbered
        for block in self._iterate_blocks():
            yield self._convert(block, num_before)
            num_before += block.num_rows

    def read_split_digest(self) -> str | None:
        """Return the digest in the first row's column ``split``; None without that column.

        A digest is a hash of the split that the lists were made for.
        """
        block = next(self._iterate_blocks(), None)  # None if there is no row
        if block is None or SPLIT_COLUMN not in block.schema.names or not block.num_rows:
            return None
        return str(block.column(SPLIT_COLUMN)[0].as_py())

    def _iterate_blocks(self) -> Iterator[pa.RecordBatch]:
        """Yield the blocks of rows, as they are in the file.

        ``read_blocks`` is the function that reads the file or frame from its beginning.

        Raises:
            UsageError: if something cannot be read, in place of the error of the library; it names
                the file.
        """
        try:
            yield from self.read_blocks()
        except UsageError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UsageError(f"{self.name} cannot be read: {error}") from error

    def _convert(self, block: pa.RecordBatch, num_before: int) -> Rows:
        """Return a block in one form: for each row the request, the item, and a number to sort by.

        Args:
            block: rows as they are in the file, one for each request and item, or one for each
                request with a list of items, the best first.
            num_before: number of rows in the blocks before this one, from which rows are counted.
        """
        # Find the columns, for which each library has other names: REQUEST_COLUMNS and ITEM_COLUMNS
        # have them all.
        request_column = self._require_column(block, REQUEST_COLUMNS)
        item_column = self._require_column(block, ITEM_COLUMNS)
        requests, items = block.column(request_column), block.column(item_column)

        if pa.types.is_nested(items.type):  # a row for each request, with the list of its items
            # requests [a, b] and items [[x, y], [z]] become [a, a, b] and [x, y, z]
            list_index = pc.list_parent_indices(items)
            requests, items = requests.take(list_index), pc.list_flatten(items)
            # Only the order within a request counts, and its list lies in one block as a whole.
            order = np.arange(len(items), dtype=float)
        else:
            order = self._find_order(block, num_before)
        return Rows(
            self._convert_names(requests, request_column),
            self._convert_names(items, item_column),
            order,
        )

    def _require_column(self, block: pa.RecordBatch, choices: Sequence[str]) -> str:
        """Return the first of some possible names that the block has as a column.

        Args:
            block: rows of the file.
            choices: names of the column in different libraries, such as user_id and query_id.

        Raises:
            UsageError: if the block has none of them.
        """
        for name in choices:
            if name in block.schema.names:
                return name
        raise UsageError(
            f"{self.name}: found the columns {listed(block.schema.names)}, expected one of "
            f"{', '.join(choices)}; give a row for each request and item, with a score or rank (a "
            "matrix of scores is not read: take the best items of each row)"
        )

    def _find_order(self, block: pa.RecordBatch, num_before: int) -> np.ndarray:
        """Return [rows] float64 numbers, of which the lowest of a list belongs to its best item.

        They are the ranks; without ranks the negative scores; without both the numbers of the rows
        in the file.

        Args:
            block: rows of the file.
            num_before: number of rows in the file before this block.
        """
        # the names that libraries give to a column of ranks, or of scores
        for name in (*RANK_COLUMNS, *SCORE_COLUMNS):
            if name in block.schema.names:
                numbers = self._convert_numbers(block.column(name), name, num_before)
                return numbers if name in RANK_COLUMNS else -numbers
        return np.arange(num_before, num_before + block.num_rows, dtype=float)

    def _convert_numbers(self, column: pa.Array, name: str, num_before: int) -> np.ndarray:
        """Return a column of ranks or scores as [rows] float64.

        Args:
            column: the column, as numbers or as text.
            name: its name, for messages.
            num_before: number of rows before this block in the file, for messages.

        Raises:
            UsageError: if a cell is no number, or is empty or NaN.
        """
        try:
            numbers = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid as error:
            raise UsageError(f"{self.name}: {name}: expected numbers; {error}") from error
        is_missing = np.isnan(numbers)  # NaN or an empty cell, by which nothing can be sorted
        if is_missing.any():
            row = num_before + int(is_missing.argmax()) + 1
            raise UsageError(
                f"{self.name}: {name}: row {row:,} is NaN or empty, and so are "
                f"{is_missing.sum() - 1:,} others near it; nothing can be ranked by that: leave "
                "out items that have no score"
            )
        return numbers

    def _convert_names(self, column: pa.Array, name: str) -> pa.Array:
        """Return a column of names of users or items as text.

        Args:
            column: the names, as text or whole numbers.
            name: name of the column, for messages.

        Raises:
            UsageError: for numbers with decimals. pandas makes 7.0 of the name 7 in a column with
                empty cells, and the text "7.0" would be another name.
        """
        if pa.types.is_floating(column.type):
            raise UsageError(
                f"{self.name}: {name}: found numbers with decimals such as "
                f"{shown(column[0].as_py())}, expected names as in the dataset: text or whole "
                "numbers; cast them, as in frame.astype(int), or read the file with dtype=str"
            )
        return column.cast(pa.string())


def open_predictions(source: Any) -> Predictions:
    """Return an object that reads recommended lists from a file or a frame.

    A file is not read here but when rows are asked for, and from its beginning each time.

    Args:
        source: a path; a frame of pandas, polars, pyarrow or DuckDB; or a ranx run as a dict.

    Raises:
        UsageError: if there is no such file, or the object is no frame.
    """
    # Predictions get a name for messages, and a function that begins to read anew, since rows are
    # read more than once. _BLOCK_ROWS is the number of rows that are in memory at a time.
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise UsageError(f"{path} is not a file of predictions, or is not there")
        return Predictions(str(path), lambda: _read_file(path))
    is_ranx = isinstance(source, Mapping)
    table = _convert_frame(_convert_ranx(source) if is_ranx else source)
    return Predictions("predictions", lambda: table.to_batches(max_chunksize=_BLOCK_ROWS))


def _read_file(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in blocks: parquet, ranx json, csv or tsv with names, or a TREC run.

    A TREC run is recognised by a first line of six words, of which the second is Q0.
    """
    if path.suffix == ".parquet":
        with parquet.ParquetFile(path) as parquet_file:
            yield from parquet_file.iter_batches(_BLOCK_ROWS)
        return
    if path.suffix == ".json":
        run = json.loads(path.read_bytes())
        yield from _convert_frame(_convert_ranx(run)).to_batches(max_chunksize=_BLOCK_ROWS)
        return

    # Tell the separator and the names of the columns from the first line, which is then skipped
    # unless it is a row of a TREC run.
    with open(path, encoding="utf-8-sig") as file:
        first_line = file.readline()
    words = first_line.split()
    is_trec = len(words) == len(_TREC_COLUMNS) and words[1].upper() == "Q0"
    delimiter = "\t" if "\t" in first_line else " " if is_trec else ","
    names = [name.strip().strip('"') for name in first_line.rstrip("\r\n").split(delimiter)]
    if is_trec:
        names = _TREC_COLUMNS
    yield from csv.open_csv(
        path,
        csv.ReadOptions(column_names=names, skip_rows=0 if is_trec else 1, block_size=_BLOCK_BYTES),
        csv.ParseOptions(delimiter=delimiter),
        # names stay as they are written: 007 is not 7
        csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )


def _convert_ranx(run: Any) -> pd.DataFrame:
    """Return a ranx run as a frame with a row for each request and item.

    ``{"ann": {"x": 2.0, "y": 1.0}}`` gives the rows (ann, x, 2.0) and (ann, y, 1.0).

    Raises:
        UsageError: if it is none.
    """
    if not isinstance(run, Mapping) or not all(isinstance(v, Mapping) for v in run.values()):
        raise UsageError("predictions: expected a run as ranx writes it, {request: {item: score}}")
    rows = [(request, *entry) for request, scores in run.items() for entry in scores.items()]
    return pd.DataFrame(rows, columns=["request", "item", "score"])


def _convert_frame(frame: Any) -> pa.Table:
    """Return a frame of pandas, polars, pyarrow or DuckDB as a table of Arrow.

    Raises:
        UsageError: if it is none of these, such as a numpy matrix of scores.
    """
    # The libraries are told apart by methods that only their frames have, so that none is imported.
    # ``reason`` is what the message says if it is none of them, or if the conversion fails.
    try:
        if hasattr(frame, "iloc"):  # pandas
            return pa.Table.from_pandas(frame, preserve_index=False)
        if hasattr(frame, "to_arrow"):  # polars, whose streams pyarrow 14 cannot read
            return pa.table(frame.to_arrow())
        if hasattr(frame, "__arrow_c_stream__"):  # of pyarrow, DuckDB and others that give Arrow
            return pa.table(frame)
        reason = f"found {type(frame).__name__} of shape {np.shape(frame)}"
    except (TypeError, ValueError, pa.ArrowException) as error:
        reason = str(error)
    raise UsageError(
        f"predictions: expected a file, or a frame with a row for each request and item; {reason} "
        "(of a matrix of scores take the best items of each row)"
    )


def write_lists(
    run_dir: str | Path,
    file: str | Path,
    k: int | None = None,
    part: str = "test",
    data_path: str | Path | None = None,
) -> Path:
    """Write the best items of a trained run for each request of its split.

    A request is the question which item comes next after a history; the held-out item is the right
    answer. Nothing stands at the path until the file is complete.

    Args:
        run_dir: the folder of a run.
        file: path of a .parquet, .csv, .run or .trec (TREC run) or .json (ranx) file.
        k: items of a list, see :func:`compute_lists`.
        part: test or valid.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Returns:
        The path of the file.

    Raises:
        UsageError: if the suffix of the file is another, or ``k`` is more than there are items.
    """
    file = Path(file)
    if file.suffix not in _SUFFIXES:
        raise UsageError(f"{file}: expected a name that ends in {', '.join(_SUFFIXES)}")
    lists = compute_lists(run_dir, k, part, data_path)

    # Readers of ranx and TREC runs sort by scores: the first of K items gets K, the last one 1.
    scores = lists["rank"].max() + 1 - lists["rank"]
    # atomic_write opens a file that gets its name when the block has ended.
    with atomic_write(file, text=file.suffix != ".parquet") as unfinished:
        if file.suffix == ".parquet":
            lists.to_parquet(unfinished, index=False)
        elif file.suffix == ".csv":
            lists.to_csv(unfinished, index=False)
        elif file.suffix == ".json":
            run: dict[str, dict[str, float]] = {}
            for request, item, score in zip(lists["request"], lists["item"], scores, strict=True):
                run.setdefault(request, {})[item] = float(score)
            json.dump(run, unfinished)
        else:
            trec = lists.assign(q0="Q0", place=lists["rank"], score=scores, tag="recbole-pos")
            trec.to_csv(unfinished, columns=_TREC_COLUMNS, sep=" ", header=False, index=False)
    return file


def compute_lists(
    run_dir: str | Path,
    k: int | None = None,
    part: str = "test",
    data_path: str | Path | None = None,
) -> pd.DataFrame:
    """Return the best items of a run for each request, as :func:`write_lists` writes them.

    A request is the question which item comes next after a history.

    Args:
        run_dir: the folder of the run.
        k: items of a list. By default 100, or all items of a dataset that has fewer.
        part: test or valid.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Returns:
        A row for each request and item: request and item (text), rank (from 1), and split, the
        digest of the requests.
    """
    if k is None:
        num_items = read_run_data(run_dir, data_path).item_num - 1  # without the id of padding
        k = min(_LENGTH, num_items)

    # Evaluate the run again, since an evaluation ranks the items for each target. Its collector
    # keeps only what some metric needs. So ask for a metric that needs the best k items
    # (_KEEPS_ITEMS); its value is not used. ``needs_ranks`` makes the collector keep the row of
    # each target in the dataset, too.
    metric = {"metrics": [_KEEPS_ITEMS], "topk": [k], "valid_metric": f"{_KEEPS_ITEMS}@{k}"}
    experiment = load(run_dir, data_path=data_path, options=metric)
    requests = make_requests(experiment.dataset, part)
    collector = experiment.trainer.eval_collector
    collector.needs_ranks = True
    experiment.trainer.evaluate(experiment.loaders[part], load_best_model=False)

    # What was kept: the row of each target [targets], and the ids of the best items [targets, k].
    # The evaluation has an order of its own. Each target belongs to one request, and requests are
    # in the order of the dataset's rows: so sort the lists by these.
    target_rows = collector.last.get(EVENT).cpu().numpy()
    items = collector.last.get(ITEMS).cpu().numpy()
    items = items[np.argsort(target_rows, kind="stable")]

    # a row for each request and item: requests a, b and k = 2 give a, a, b, b with ranks 1, 2, 1, 2
    num_lists, length = items.shape
    return pd.DataFrame(
        {
            "request": np.repeat(requests.names, length),
            "item": requests.item_names[items.reshape(-1)],
            "rank": np.tile(np.arange(1, length + 1), num_lists),
            SPLIT_COLUMN: requests.digest,
        }
    )
