"""Recommendations of a trained model for users or histories, as a table or a file.

:func:`recommend` returns a table for users of the dataset, :func:`write_recommendations` writes
those for users or for a file of histories, which is read by :func:`read_file`. Folders of many
files are in ``parts.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pydantic import ValidationError

from recbole_pos.config.arguments import IndexArguments
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.files import atomic_write
from recbole_pos.layers.large_products import Choice
from recbole_pos.reporter import Reporter
from recbole_pos.serve.histories import KEYS, Histories, History, describe_invalid, require_columns
from recbole_pos.serve.item_index import use_index
from recbole_pos.serve.recommender import MODEL, Recommender
from recbole_pos.tables.storage import keep_freed_memory
from recbole_pos.values import escape_formula, shown

PART = 1 << 14  # histories of a file that are read at once
_MAX_PRINTED = 30  # more recommendations than these are only in the file
# Types of the columns of a parquet file, without and of each reason.
_TYPES = (pa.string(), pa.int64(), pa.string(), pa.float32(), pa.string())  # id, ..., by
_REASON_TYPES = (pa.string(), pa.int64(), pa.float32(), pa.int64())  # item, steps_back, ...


def recommend(
    run_dir: str | Path,
    users: Sequence[str] | None = None,
    k: int = 10,
    mask_history: bool | None = None,
    data_path: str | Path | None = None,
) -> pd.DataFrame:
    """Return the k items with the highest scores after all interactions of a user, best first.

    These include interactions held out from training and those added to the dataset since then.
    :meth:`Recommender.recommend` can do more.

    Examples:
        >>> table = recbole_pos.recommend("mine", users=["196", "22"], k=5)
        >>> list(table), len(table)
        (['user_id', 'rank', 'item_id', 'score', 'by'], 10)

    Args:
        run_dir: the folder of a run, finished or not; its best weights are used.
        users: names of users (or sessions), each taken once; by default all with an interaction.
        k: items per user; fewer if fewer are left to recommend.
        mask_history: whether seen items are excluded; by default as in evaluation.
        data_path: the folder that holds the folder of the dataset; by default the run's.

    Returns:
        A row per recommendation, as of :meth:`Recommender.recommend`; users and items are in
        columns named like the fields of the dataset.

    Raises:
        UsageError: for users without an interaction.
        CheckpointError: if the dataset no longer has the data that the model was trained on.
    """
    trained = Recommender.load(run_dir, data_path)
    return rename_fields(trained.recommend(users, k=k, exclude_seen=mask_history), trained)


@dataclass(frozen=True, kw_only=True)
class ListOptions(IndexArguments):
    """What to recommend, and after which histories: arguments of the command ``recommend``.

    Attributes:
        run_dir: the folder of a run, whose model recommends.
        histories: a file of histories, see :func:`read_file`; None for users of the dataset.
        k: number of items for each user or history.
        exclude_seen: whether items of a history are not recommended to it; None as in evaluation.
        items: file with names of the only items to recommend, one a line; None for all.
        exclude: file with names of items not to recommend, one a line.
        data_path: the folder that holds the folder of the dataset; None for the run's.
        at: time of the requests, see :func:`read_at`.
        item_vectors: content vectors of further items, see :meth:`Recommender.add_items`.
        because: number of past interactions to name as reasons for each item.
        index, index_recall: an approximate index by which items are found, see :func:`use_index`;
            with None all items are scored.
    """

    run_dir: str
    histories: str | None = None
    k: int = 10
    exclude_seen: bool | None = None
    items: str | None = None
    exclude: str | None = None
    data_path: str | None = None
    at: str | None = None
    item_vectors: str | None = None
    because: int = 0


def load_model(options: ListOptions, reporter: Reporter) -> tuple[Recommender, Choice]:
    """Load the model that recommends, and find out which items it may recommend.

    Args:
        options: the run, the files with items, and whether there is an index.
        reporter: prints what the model does not know, unless it is switched off.

    Returns:
        The model, and its choice of items.
    """
    items, exclude = read_names(options.items), read_names(options.exclude)
    has_histories = options.histories is not None  # then those of the dataset are not needed
    trained = Recommender.load(options.run_dir, options.data_path, histories_only=has_histories)
    if options.item_vectors is not None:
        reporter.line(trained.add_items(options.item_vectors))
    if options.index is not None:
        reporter.line(use_index(trained, options, options.data_path))
    # Print what the dataset has gained since training, and names that are of no known item.
    _report_growth(trained, reporter)
    report_unknown(trained, reporter, items=items, exclude=exclude)
    return trained, trained.choose_items(items, exclude)


def write_recommendations(
    options: ListOptions, out: str | Path | None = None, users: Sequence[str] | None = None
) -> Path:
    """Write recommendations to a file, some histories at a time, so that memory does not grow.

    Args:
        options: what is recommended.
        out: a file named ``.csv`` or ``.parquet``; by default ``recommendations.csv`` in the run
            folder. A name without an ending is csv.
        users: names of users in the dataset; by default all, unless there are histories.

    Returns:
        The path of the file.

    Raises:
        UsageError: if an argument, the run or a history is wrong.
        StorageError: if the file cannot be written; an earlier file stays as it was.
    """
    keep_freed_memory()  # else each batch asks the system for memory again, which takes time
    file = Path(out or RunFolder(options.run_dir).require().path / "recommendations.csv")
    if file.suffix not in ("", ".csv", ".parquet"):
        raise UsageError(f"out: {file}: expected a name that ends in .csv or .parquet; change it")

    # The file is opened before the model is loaded, so that a wrong path fails at once. ``choice``
    # are the items that may be recommended. ``parts`` are some thousand histories each, as arrays.
    reporter = Reporter()
    counts: Counter[str] = Counter()
    first_rows: list[pd.DataFrame] = []  # of each table that is written, to print a short result
    with open_writer(file) as write:
        trained, choice = load_model(options, reporter)
        if options.histories is None:
            parts = iter([trained.read_users(users)])
        else:
            parts = read_file(trained, options.histories)

        with reporter.task("recommending") as task:

            def write_and_show(table: pd.DataFrame) -> None:
                """Write a table, show how far the work is, and keep the table's first rows."""
                write(table)
                task.advance(int((table["rank"] == 1).sum()))  # each user has one such row
                first_rows.append(table.head(_MAX_PRINTED).copy())  # not the memory of all rows

            for histories in parts:
                histories = trained.add_request_time(histories, read_at(options.at))
                counts += write_lists(trained, choice, options, histories, write_and_show)

    # Print a result of at most _MAX_PRINTED rows, unless it is for all users; then the counts.
    is_for_some = users is not None or options.histories is not None
    if is_for_some and 0 < counts["rows"] <= _MAX_PRINTED:
        reporter.line(pd.concat(first_rows).to_string(index=False))
    report_counts(counts, trained, reporter)
    reporter.line(str(file))
    return file


def write_lists(
    trained: Recommender,
    choice: Choice,
    options: ListOptions,
    histories: Histories,
    write: Callable[[pd.DataFrame], None],
) -> Counter[str]:
    """Recommend to some histories, and write the tables of recommendations.

    Args:
        trained: the model.
        choice: the items that it may recommend.
        options: what is recommended.
        histories: the histories, as arrays, with the times of the requests.
        write: writes a table.

    Returns:
        Counts: ``users`` (or histories); ``rows`` (recommendations); ``popular``, users who get the
        most popular items; and ``unknown``, items of histories that the model does not know.
    """
    counts = Counter(users=len(histories), unknown=int(histories.unknown.sum()))
    k, because = options.k, options.because
    for table in trained.make_tables(histories, k, options.exclude_seen, choice, because):
        # The columns ``id`` and ``item`` get the names of the dataset's fields, such as user_id and
        # item_id, unless the recommendations are for histories of a file.
        if options.histories is None:
            table = rename_fields(table, trained)
        write(table)

        # Each user has one row of rank 1. Its ``by`` says whether the model ranked the user's
        # items, or popularity.
        counts["rows"] += len(table)
        by = table["by"][table["rank"] == 1]
        counts["popular"] += int((by != MODEL).sum())
    return counts


def report_counts(counts: Counter[str], trained: Recommender, reporter: Reporter) -> None:
    """Print how many recommendations there are, and how many are not what the user may expect.

    Args:
        counts: what :func:`write_lists` returns.
        trained: the model.
        reporter: prints lines, unless it is switched off.
    """
    model, users = trained.config["model"], f"{counts['users']:,}"
    reporter.line(f"{counts['rows']:,} recommendations of {model} to {users} users or histories")
    if counts["unknown"]:
        reporter.line(
            f"{counts['unknown']:,} items of histories are not known to the model: left out"
        )
    if counts["popular"]:
        reporter.line(
            f"{counts['popular']:,} of {users} get the most popular items: nothing in their "
            "history is known to the model"
        )


def read_file(trained: Recommender, file: str) -> Iterator[Histories]:
    """Yield the histories of a file as arrays, at most ``PART`` at a time.

    A history without an id gets its number in the file, from 0, as ``id``. A file without histories
    gives one empty :class:`Histories`, of which a table without rows can be made.

    Args:
        trained: the model, which knows the ids of items.
        file: a folder or file of parquet, with a history in each row; or a file of another name,
            with a history as json in each line.

    Raises:
        UsageError: if the file cannot be read, or a history is malformed.
    """
    if is_parquet(file):
        source = HistorySource(trained, file)
        for start in range(0, max(len(source), 1), PART):
            yield source.read(start, min(start + PART, len(source)))
        return

    # The first part, which is also yielded if it is empty, then all others.
    lines = _read_lines(file)  # a generator, of which each part takes the next ones
    part = list(islice(lines, PART))
    yield _read_part(trained, part, file, num_before=0)
    num_read = len(part)
    while part := list(islice(lines, PART)):
        yield _read_part(trained, part, file, num_read)
        num_read += len(part)


def is_parquet(path: str) -> bool:
    """Return whether a path names parquet: a file of that suffix, or a folder of such files."""
    return path.endswith(".parquet") or os.path.isdir(path)


def _read_part(trained: Recommender, histories: Any, file: str, num_before: int) -> Histories:
    """Return some of the histories of a file as arrays.

    Args:
        trained: the model, which knows the ids of items.
        histories: the histories, in any form that the model reads.
        file: the file, for messages.
        num_before: number of histories in the file before these.

    Raises:
        UsageError: for a malformed history. The message is such as "counted from 16,384:
            histories[3]", for the one with the number 16,387 in the file.
    """
    try:
        return trained.read(histories)
    except UsageError as error:
        raise UsageError(f"{file}, counted from {num_before:,}: {error}") from error


class HistorySource:
    """The histories in a parquet file, or in a folder of them, by number from 0.

    A parquet file is divided into row groups, which are read whole. Only the groups that are asked
    for are read, so memory does not grow with the files.

    Attributes:
        data: pyarrow's view of the files.
        row_groups: the row groups of all files in order, each with its number of histories.
        schema: the columns to read, with their types in the first file.
    """

    def __init__(self, trained: Recommender, path: str) -> None:
        """Read which row groups the files have; parquet lists them at the end of each file.

        Args:
            trained: the model, which reads the histories.
            path: the parquet file, or a folder of them.

        Raises:
            UsageError: if a file is no parquet, or its columns are not those of histories.
        """
        self.trained, self.path = trained, path
        with name_read_errors(path):
            self.data = ds.dataset(path, format="parquet")
            require_columns(self.data.schema.names, path)
            # pyarrow divides a file into objects, each of which reads one row group. The list
            # ``row_groups`` of such an object has one entry: facts about its group.
            self.row_groups: list[tuple[Any, int]] = []
            for file_fragment in self.data.get_fragments():
                for group in file_fragment.split_by_row_group():
                    (facts,) = group.row_groups
                    self.row_groups.append((group, facts.num_rows))
        # KEYS are the columns that a history may have; others are not read.
        columns = [name for name in KEYS if name in self.data.schema.names]
        self.schema = pa.schema([self.data.schema.field(name) for name in columns])
        self._last_read: tuple[Any, pa.Table] = None, self.schema.empty_table()

    def __len__(self) -> int:
        return sum(num_rows for _, num_rows in self.row_groups)

    def read(self, start: int, stop: int) -> Histories:
        """Return the histories from number ``start`` up to ``stop``, without ``stop``, as arrays.

        Only the row groups that have some of them are read. With row groups of 100, 100 and 50
        histories, 150 to 220 are the rows from 50 of the second group and the first 20 of the
        third. Histories without an id get their number.

        Raises:
            UsageError: for a file that cannot be read, or a malformed history.
        """
        tables = [self.schema.empty_table()]  # so that there is something to concatenate
        num_before = 0  # histories in the row groups before this one
        with name_read_errors(self.path):
            for group, num_rows in self.row_groups:
                # The rows of this group that are asked for: from ``first`` up to ``end``.
                first, end = max(start - num_before, 0), min(stop - num_before, num_rows)
                num_before += num_rows
                if first < end:  # else no row of this group is asked for
                    tables.append(self._read_group(group)[first:end])

        # Without a column of ids, the histories get their numbers.
        histories = pa.concat_tables(tables)
        if "id" not in self.schema.names:
            histories = histories.append_column("id", pa.array(range(start, stop), pa.int64()))
        return _read_part(self.trained, histories, self.path, start)

    def _read_group(self, group: Any) -> pa.Table:
        """Return a row group; the last one is kept, since the next histories are often in it."""
        last_group, table = self._last_read
        if group is not last_group:
            table = group.to_table(self.schema)
            table.validate(full=True)  # a damaged file may hold invalid text
            self._last_read = group, table
        return table

    def list_facts(self) -> list[str]:
        """Return name, size and time of change of each file, by which one sees whether it changed.

        Their content, which may be a terabyte, is not read.
        """
        files = [(Path(file), os.stat(file)) for file in self.data.files]
        return [f"{file.name} {facts.st_size} {facts.st_mtime:.0f}" for file, facts in files]


def _read_lines(file: str | Path) -> Iterator[History]:
    """Yield the history in each line of a file of json lines; empty lines are skipped.

    A history without an id gets its number, from 0, as ``id``.

    Raises:
        UsageError: if the file cannot be read, or a line is no history.
    """
    with name_read_errors(file), open(file, encoding="utf-8-sig") as lines:
        num_histories = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():  # describe_invalid makes one line of pydantic's error
                try:
                    history = History.model_validate_json(line)
                except ValidationError as error:
                    raise UsageError(describe_invalid(error, f"{file}, line {number}")) from None
                history.id = num_histories if history.id is None else history.id
                num_histories += 1
                yield history


def _report_growth(trained: Recommender, reporter: Reporter) -> None:
    """Print what the dataset has gained since training, and which of it the model does not know.

    A line is such as ``not in training (new, or left out by filters): interactions 120, users 7;
    all of them are read``.

    Args:
        trained: the model, whose dataset was read again when it was loaded. ``growth`` counts what
            is new in it, and ``changed`` names the fields of users and items with other values.
        reporter: prints lines, unless it is switched off.
    """
    growth = trained.growth
    label = "not in training (new, or left out by filters)"

    # New interactions of known items (``events``), which the model can read; and new users.
    if growth.users or growth.events:
        reporter.line(
            f"{label}: interactions {growth.events:,}, users {growth.users:,}; all of them are read"
        )

    # New items, and the interactions of these (``skipped``), which the model cannot read.
    if growth.items:
        reporter.line(
            f"{label}: items {growth.items:,}, which the model does not know; interactions of "
            f"them, skipped: {growth.skipped:,} (`recbole-pos update` learns new ones)"
        )
    if trained.changed:
        reporter.line(f"since training: values of {', '.join(trained.changed)} have changed")


def _escape_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with a ' before names that a spreadsheet would take for formulas.

    Such a name, as ``=1+1``, could run code on the machine of whoever opens the csv.
    """
    # Columns of text; escape_formula returns a name that is no formula as it is.
    for column in table.select_dtypes(exclude="number"):
        escaped = {name: escape_formula(name) for name in table[column].unique()}
        table = table.assign(**{column: table[column].map(escaped)})
    return table


def rename_fields(table: pd.DataFrame, trained: Recommender) -> pd.DataFrame:
    """Rename the columns ``id`` and ``item`` to the user and item fields of the dataset."""
    dataset = trained.dataset
    return table.rename(columns={"id": dataset.uid_field, "item": dataset.iid_field})


def read_at(text: str | None) -> float | str | None:
    """Read the time of a request, for which recommendations are made, from the command line.

    Args:
        text: a number, a date in ISO 8601, or None.

    Returns:
        A float, the text of a date as it is, which is read later, or None, which stands for now.
    """
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def read_names(file: str | Path | None) -> list[str] | None:
    """Return the names in a file, one on each line, with their spaces; None without a file."""
    if file is None:
        return None
    with name_read_errors(file):
        text = Path(file).read_text(encoding="utf-8-sig")  # newlines of any system are \n here
    return [line for line in text.split("\n") if line]


def report_unknown(
    trained: Recommender, reporter: Reporter, **names_by_option: list[str] | None
) -> None:
    """Print how many names of items that the user gives are not known to the model.

    Args:
        trained: the model.
        reporter: prints lines, unless it is switched off.
        names_by_option: option such as ``items`` -> names; None if the option is not given.
    """
    for option, names in names_by_option.items():
        # ``trained.ids`` has the known items by name.
        unknown = [name for name in names or () if name not in trained.ids]
        if names and unknown:
            reporter.line(
                f"--{option}: {len(unknown):,} of {len(names):,} names are of no item that "
                f"the model knows, {shown(unknown[0])} first; they count for nothing"
            )


@contextmanager
def name_read_errors(file: str | Path) -> Iterator[None]:
    """Turn errors of reading a file into a UsageError that names it."""
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


@contextmanager
def open_writer(file: Path) -> Iterator[Callable[[pd.DataFrame], None]]:
    """Yield a function that appends tables of recommendations to a csv or parquet file.

    The file appears, or replaces an earlier one, when the ``with`` block ends without an error:
    until then, `atomic_write` writes under another name.

    Args:
        file: parquet if its suffix is ``.parquet``, otherwise csv.
    """
    is_parquet = file.suffix == ".parquet"
    with atomic_write(file, text=not is_parquet) as unfinished, ExitStack() as stack:
        parquet_writer: pq.ParquetWriter | None = None  # from the first table on
        has_header = False  # only the first table of csv has a line of the names of columns

        def write_parquet(table: pd.DataFrame) -> None:
            nonlocal parquet_writer
            schema = _make_schema(list(table.columns))
            if parquet_writer is None:
                parquet_writer = stack.enter_context(pq.ParquetWriter(unfinished, schema))
            table = table.astype({table.columns[0]: str})  # ids of histories may be numbers
            parquet_writer.write_table(pa.Table.from_pandas(table, schema, preserve_index=False))

        def write_csv(table: pd.DataFrame) -> None:
            nonlocal has_header
            _escape_formulas(table).to_csv(unfinished, header=not has_header, index=False)
            has_header = True

        yield write_parquet if is_parquet else write_csv


def _make_schema(names: list[str]) -> pa.Schema:
    """Return the names and types of the columns of recommendations in parquet.

    Args:
        names: names of the columns. The first five are user, rank, item, score and by, where user
            and item are named as in the dataset. For each reason of the recommendation there are
            four more, such as because_1, steps_back_1, score_change_1 and rank_change_1.
    """
    # _TYPES has the types of the five columns, _REASON_TYPES those of the four of each reason.
    num_reasons = (len(names) - len(_TYPES)) // len(_REASON_TYPES)
    types = _TYPES + _REASON_TYPES * num_reasons
    return pa.schema(zip(names, types, strict=True))
