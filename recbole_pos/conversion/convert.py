"""Files and frames of interactions to a dataset that runs.

:func:`convert` makes the folder of a dataset (``recbole-pos convert``), :class:`Dataset` is such a
folder as an object, which :meth:`Dataset.from_frame` makes of a frame.
"""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion import writing
from recbole_pos.conversion.build import Builder, find_roles, read_interactions, require_column
from recbole_pos.conversion.reading import Source, read_files, read_frame
from recbole_pos.conversion.writing import Lines, Report
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.files import TemporaryFolder
from recbole_pos.reporter import Reporter
from recbole_pos.values import read_names, shown

_DEFAULT_CUTOFF = 20  # the longest ranking that metrics read by default
_MODEL = "PosSASRec"
# Names of frames in messages.
_FRAME_NAMES = {"events": "interactions", "item": "items", "user": "users"}
_MAX_LISTS = 4_000  # of a field that relates interactions, which AttrFormer keeps in pairs
# Options that say something of single columns -> the argument of ``convert`` that has their values.
_BY_COLUMN = {"type": "types", "table": "tables", "rename": "rename"}
_NAME = re.compile(r"\w[\w.-]*")


def convert(events: Any, *, settings: ConvertArguments | None = None, **given: Any) -> Report:
    """Make a dataset of a file of interactions, or of a folder of them.

    Nothing is dropped in silence: every row is kept, or counted under a reason with its number, and
    a :class:`~recbole_pos.errors.RunWarning` counts those that cannot be used.
    Times become seconds since 1970 in UTC. A column that is the same for nearly all interactions of
    an item (or user) goes into the table of items (users): the first value that is not missing.

    Args:
        events: csv, tsv or json lines (.gz as well), parquet, or a folder of files of one of these;
            or a frame, as :meth:`recbole_pos.Dataset.from_frame` takes it.
        settings: all arguments, as :class:`~recbole_pos.config.arguments.ConvertArguments`.
        given: single arguments of this class by name; types, tables and rename as dicts.

    Returns:
        A report on every column and row, as ``convert.json`` has it.

    Raises:
        UsageError: if a file cannot be read, a column is not there or cannot be guessed, a date
            may mean two days, too many rows cannot be used, or there is a dataset of this name
            already.

    Examples:
        >>> import pathlib, tempfile, recbole_pos
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "orders.csv").write_text(
        ...     "customer,product,bought_at,brand\\n"
        ...     "ann,red kite,2024-03-02 17:05:31,Fjord\\n"
        ...     "bob,red kite,2024-03-04 08:00:12,Fjord\\n"
        ...     ",red kite,2024-03-05 08:00:12,\\n"
        ... )
        >>> report = recbole_pos.convert(
        ...     folder / "orders.csv", name="shop", data_path=folder, max_lost=0.5, verbose=False
        ... )
        >>> report.lines["events"].kept, report.lines["events"].dropped
        (2, {'no user (customer)': {'lines': 1, 'first': ['orders.csv:4']}})
        >>> [(column.field, column.kind, column.table) for column in report.columns][3:]
        [('brand', 'token', 'item')]
    """
    # Check the arguments. The dataset is called like the file if it is given no name.
    args = replace(settings or ConvertArguments(), **given)
    is_file = isinstance(events, (str, os.PathLike))
    path = Path(events if is_file else _FRAME_NAMES["events"])
    name = args.name or (path.name or path.resolve().name).split(".")[0]
    folder = Path(args.data_path) / name
    _check_arguments(args, name, folder)

    # Read the files, and what the user sets for single columns: option -> column -> value.
    reporter = Reporter(args.verbose)
    with reporter.task(f"reading {path}"):
        sources = _read_sources(events, args)
    columns = {column for table in sources.values() for column in table.columns}
    overrides = {}
    for option, argument in _BY_COLUMN.items():
        overrides[option] = _read_pairs(option, getattr(args, argument))
        for column in overrides[option]:
            require_column(column, columns, option)

    # Find the columns of user, item and time (the roles), and the interactions.
    source = sources["events"]
    roles = find_roles(source, args)
    guessed = [f"--{role}={column}" for role, column in roles.items() if not getattr(args, role)]
    if guessed:
        reporter.line(f"guessed: {', '.join(guessed)}")
    interactions = read_interactions(source, roles, args)

    # Make a field of every column, and report what became of columns and rows.
    report = Report(name)
    report.lines["events"] = Lines.count(source, interactions.dropped)
    report.times = interactions.form
    builder = Builder(source, interactions, roles, overrides, args, report)
    for role in ("item", "user"):
        if role in sources:
            builder.add_file(sources[role], role)
    _report_lost(report, args.max_lost)
    builder.add_columns()
    tables, loaded = builder.finish()

    # Say what the dataset holds, and by which command a model is trained on it.
    report.counts |= _count_dataset(builder)
    report.command = shlex.join(["recbole-pos", "run", "-m", _MODEL, "-d", name])
    if Path(args.data_path) != Path("dataset"):
        report.command += " " + shlex.quote(f"--data_path={args.data_path}")
    report.show(reporter)
    writing.warn_of_loss(folder, report.counts["events"])

    options = _make_options(report, builder, loaded, writing.choose_separator(tables))
    writing.write_dataset(folder, tables, options, report, reporter)
    reporter.line(report.command)
    return report


def _report_lost(report: Report, max_lost: float) -> None:
    """Warn of rows that cannot be used, such as interactions without an item.

    Args:
        report: ``report.lines`` has, for each table, the numbers of rows that were read and lost.
        max_lost: share of the rows of a table, from 0 to 1, that may be lost.

    Raises:
        UsageError: if a table loses more.
    """
    with_losses = [lines for lines in report.lines.values() if lines.lost]
    too_many = [lines for lines in with_losses if lines.num_lost > max_lost * lines.read]
    if too_many:
        raise UsageError(
            f"{too_many[0].describe_lost()} cannot be used, expected at most {max_lost:.0%}; "
            "correct them, or raise --max_lost to go on without them"
        )
    if with_losses:
        text = "; ".join(lines.describe_lost() for lines in with_losses)
        warnings.warn(f"left out of {report.name}: {text}", RunWarning, stacklevel=4)


def _count_dataset(builder: Builder) -> dict[str, Any]:
    """Return the numbers of kept interactions, users and items, and the first and last time.

    Args:
        builder: has read the interactions and numbered users and items.

    Returns:
        ``events`` (interactions), ``users`` and ``items`` -> their number; ``first`` and ``last``
        -> a text such as ``2024-03-02 17:05:31``, in UTC, or None if only the order is known.
    """
    seconds = builder.interactions.seconds
    counts: dict[str, Any] = {
        "events": len(seconds),
        "users": len(builder.entities["user"]),
        "items": len(builder.entities["item"]),
    }
    # numpy writes whole seconds since 1970 as a date and a clock, with the letter T between them.
    for key, time in (("first", seconds.min()), ("last", seconds.max())):
        text = str(np.datetime64(int(np.floor(time)), "s")).replace("T", " ")
        counts[key] = text if builder.has_time else None
    return counts


def _make_options(
    report: Report, builder: Builder, loaded: dict[str, list[str]], separator: str
) -> dict[str, Any]:
    """Make the options that are written beside a dataset, so that models can be trained on it.

    Args:
        report: what became of each column.
        builder: has made the fields of the dataset.
        loaded: table (inter, item, user) -> names of the fields that a run should load.
        separator: character between the values of a field that holds lists.

    Returns:
        Name of an option -> value, as in the yaml file of a run.
    """
    options: dict[str, Any] = {
        "seq_separator": separator,
        "USER_ID_FIELD": builder.fields["user"],
        "ITEM_ID_FIELD": builder.fields["item"],
        "TIME_FIELD": builder.fields["time"],
    }
    if builder.has_time:
        options["timestamp_unit"] = "seconds"

    # Under ``for`` are options of single models. AttrFormer relates interactions that have equal or
    # similar values of a field, such as the same brand. Its option ``relations`` lists the fields.
    relations = [{"field": field} for field in _choose_relations(report, builder)]
    options |= {"load_col": loaded, "for": {"AttrFormer": {"relations": relations}}}

    # Too few items for the usual metrics, which read lists of up to 20 items (_DEFAULT_CUTOFF).
    if report.counts["items"] <= _DEFAULT_CUTOFF:
        options |= {"topk": [1, 3], "valid_metric": "NDCG@3"}
    return options


def _choose_relations(report: Report, builder: Builder) -> list[str]:
    """Choose the fields by which the model AttrFormer relates interactions.

    Two interactions are related if they have a name in common, such as the brand of the item, or by
    their times and positions.

    Args:
        report: what became of each column.
        builder: ``roles`` has the columns of users and items, which relate nothing, and of times.

    Returns:
        Names of fields with tokens (names), or with lists of tokens (token_seq).
    """
    fields = []
    for column in report.columns:
        is_attribute = column.loaded and column.column not in builder.roles.values()
        if not is_attribute or column.different < 2:  # one name for all says nothing
            continue
        # the model keeps all pairs of different lists, of which too many would not fit into memory
        has_lists = column.kind == "token_seq" and column.different <= _MAX_LISTS
        if column.kind == "token" or has_lists:
            fields.append(column.field)
    return [*fields, "time", "position"] if builder.has_time else [*fields, "position"]


def _read_pairs(option: str, words: Any) -> dict[str, str]:
    """Return what the user sets for single columns by an option: column -> value.

    Args:
        option: name of the option, for the message.
        words: a dict, as Python gives it; or one or several words ``COLUMN=VALUE`` of a command.

    Raises:
        UsageError: for a word of another form.
    """
    if isinstance(words, Mapping):
        return {str(column): str(value) for column, value in words.items()}
    pairs = {}
    for word in [words] if isinstance(words, str) else words:
        column, equals, value = str(word).rpartition("=")  # the last =: columns may have one, too
        if not (column and equals and value):
            raise UsageError(f"{option}: expected --{option}=COLUMN=VALUE, found {shown(word)}")
        pairs[column] = value
    return pairs


def _read_sources(events: Any, args: ConvertArguments) -> dict[str, Source]:
    """Read all files and frames of a dataset.

    Args:
        events: file or frame of interactions.
        args: the other files and frames: items and users.

    Returns:
        ``events``, and ``item`` and ``user`` if they are given -> the table that was read.
    """
    # Read each of them. ``--columns`` names the columns of the interactions only. _FRAME_NAMES has
    # what a message calls a frame, such as ``interactions``.
    sources = {}
    for role, table in {"events": events, "item": args.items, "user": args.users}.items():
        if isinstance(table, (str, os.PathLike)):
            columns = args.columns if role == "events" else ()
            sources[role] = read_files(Path(table), args, columns)
        elif table is not None:
            sources[role] = read_frame(table, _FRAME_NAMES[role])

    # Leave out the columns that the user does not want, in whatever table they are.
    for column in read_names(args.drop, "drop"):
        names = {name for source in sources.values() for name in source.columns}
        require_column(column, names, "drop")
        for role, source in sources.items():
            if column in source.columns:
                sources[role] = replace(source, table=source.table.drop_columns(column))
    return sources


def _check_arguments(args: ConvertArguments, name: str, folder: Path) -> None:
    """Check, before any file is read, whether a dataset can be written under its name.

    Args:
        args: arguments of the command ``convert``.
        name: name of the dataset.
        folder: the folder to write. If it holds a dataset, the user must have said to replace it
            (``overwrite``).

    Raises:
        UsageError: if it cannot.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"name: found {shown(name)}, expected letters, digits, _, - and .")
    files = writing.list_dataset_files(folder, name)
    if files and not args.overwrite:
        raise UsageError(
            f"{folder} holds a dataset already ({', '.join(files)}); take another --name, or "
            "replace it with --overwrite"
        )


class Dataset(os.PathLike[str]):
    """A dataset to train on: a folder with its files, named by its path or made of frames.

    It stands wherever the name of a dataset does: in :func:`fit`, :func:`compare`, :func:`tune`,
    :func:`run`.

    Examples:
        >>> import pandas, recbole_pos
        >>> frame = pandas.DataFrame(
        ...     {"customer": ["ann", "bob", "ann"], "product": ["tent", "tent", "stove"]}
        ... )
        >>> frame["bought_at"] = pandas.to_datetime(["2024-03-02", "2024-03-04", "2024-03-05"])
        >>> data = recbole_pos.Dataset.from_frame(frame)
        >>> data.counts["users"], data.counts["items"], data.counts["events"]
        (2, 2, 3)

    Args:
        path: the folder, such as ``dataset/ml-100k``.

    Attributes:
        path: the folder.
        report: what became of every column and row, if the dataset was made here; else None.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name a folder, which need not exist yet; refuse a file or a frame in its place."""
        if not isinstance(path, (str, os.PathLike)) or os.path.isfile(path):
            raise UsageError(
                f"path: found {shown(path)}, expected a folder; recbole_pos.convert makes one of a "
                "file, and Dataset.from_frame of a frame"
            )
        self.path = Path(path)
        self.report: Any = None
        self.home: TemporaryFolder | None = None  # temporary folder, removed with this object

    @classmethod
    def from_frame(
        cls, frame: Any, *, path: str | os.PathLike[str] | None = None, **given: Any
    ) -> Dataset:
        """Make a dataset of a frame, as :func:`convert` makes it of a file of the same columns.

        A frame is a pandas or polars DataFrame, a pyarrow Table, a relation of DuckDB, or any
        object with ``__arrow_c_stream__``. Rows are numbered from 0 in what is reported.

        Args:
            frame: interactions, one in each row.
            path: the folder to make, whose name is that of the dataset; None for a temporary one,
                which is removed with the last object that needs it.
            given: arguments of :func:`convert`: columns of ``user``, ``item`` and ``time``; frames
                or files of ``items`` and ``users``; ``types``, ``drop`` etc.
                ``name`` names a dataset in a temporary folder, by default ``data``.

        Raises:
            UsageError: as :func:`convert` raises it.
        """
        name = given.pop("name", "data")
        home = None
        if path is None:
            home = TemporaryFolder()  # it is removed when nothing refers to this object
            path = home.path / name
        dataset = cls(os.path.abspath(path))
        dataset.home = home
        # ``convert`` makes the folder data_path/name, and prints nothing unless it is asked to.
        given = {"verbose": False, **given}
        dataset.report = convert(frame, name=dataset.name, data_path=dataset.path.parent, **given)
        return dataset

    @property
    def name(self) -> str:
        """Name of the dataset and of its folder."""
        return self.path.name

    @property
    def counts(self) -> dict[str, Any]:
        """Numbers of interactions (``events``), users and items, first and last time, if known."""
        if self.report is not None:
            return dict(self.report.counts)
        return writing.read_counts(self.path)

    def __fspath__(self) -> str:
        # Python calls this to take the object for a path.
        return str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        # The copy in another process does not own the temporary folder: the files stay here.
        return {**vars(self), "home": None}

    def __repr__(self) -> str:
        """Return the name and, if known, the numbers and times of a dataset in one line."""
        if not self.counts:
            return f"Dataset {self.path}"
        return f"Dataset {self.name}: {writing.describe_counts(self.counts)}"


def find_folder_beside(dataset: Any, name: str) -> Path | None:
    """Return a folder ``name`` that vanishes with a temporary dataset; None for other datasets."""
    home = dataset.home if isinstance(dataset, Dataset) else None
    return None if home is None else home.path / name
