"""Files of interactions to a dataset that runs: ``recbole-pos convert``, and :func:`convert`."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shlex
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recbole_pos.config.arguments import ConvertArguments, split_keywords
from recbole_pos.conversion.build import (
    TABLES,
    Builder,
    check_overrides,
    check_roles,
    make_field_name,
)
from recbole_pos.conversion.interaction_table import find_copies, read_interactions
from recbole_pos.conversion.reading import read_files, read_frame
from recbole_pos.conversion.report import Lines, Report
from recbole_pos.conversion.roles import (
    NAMES,
    explode_lists,
    find_roles,
    require_column,
    require_header,
)
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.writing import Table, choose_separator, format_yaml, write_table
from recbole_pos.data.location import PARQUET
from recbole_pos.errors import PosError, RunWarning, UsageError
from recbole_pos.files import LOCK, finish_replacement, replace_folder, write_text
from recbole_pos.reporter import Reporter
from recbole_pos.values import is_number, is_whole, listed, read_names, shown, suggest

REPORT = "convert.json"
_UNREADABLE = (
    *(OSError, EOFError, UnicodeError, RecursionError, MemoryError),
    *(pa.ArrowException, csv.Error, zlib.error),
)
_DEFAULT_CUTOFF = 20  # the longest ranking that metrics read by default
_MODEL = "PosSASRec"
# Names of frames in messages.
_FRAMES = {"events": "interactions", "item": "items", "user": "users"}
_MAX_LISTS = 4_000  # of a field that relates interactions, which AttrFormer keeps in pairs
_PARTS = ("train", "valid", "test")
# Options of single columns, and the arguments that have them.
_BY_COLUMN = {"type": "types", "table": "tables"}
_BY_COLUMN |= {option: option for option in ("rename", "decimal", "thousands")}
# An option in a message, and its value after =, without a comma or period that ends a clause.
_OPTION = re.compile(r"--([a-z_]+)(?:=((?:'[^']*'|[^\s',;.)]|,(?! )|\.(?! [A-Z]))+))?")
_NAME = re.compile(r"\w[\w.-]*")
_MAX_NAME_BYTES = 200  # file systems allow 255, of which suffixes need some


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
    args, unknown = split_keywords(settings or ConvertArguments(), given)
    if unknown:
        name = min(unknown)
        raise UsageError(f"{name}: no argument of convert{suggest(name, vars(args))}")
    is_file = isinstance(events, (str, os.PathLike))
    path = Path(events if is_file else _FRAMES["events"])
    try:
        return _convert(events, path, args)
    except UsageError as error:
        if settings is None:  # arguments in Python, options on the command line
            raise UsageError(write_as_python(str(error))) from error
        raise
    except PosError:
        raise
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{str(path)[:100]} cannot be converted: {reason}") from error


def write_as_python(text: str) -> str:
    """Return a message with arguments for options: ``time='COLUMN'`` for ``--time=COLUMN``."""

    def write(match: re.Match[str]) -> str:
        name, value = _BY_COLUMN.get(match[1], match[1]), (match[2] or "").replace("'", "")
        given: Any = value
        if name in _BY_COLUMN.values():
            given = dict([value.split("=", 1)]) if value else ""
        elif name.endswith("columns"):
            given = value.split(",") if value else ""
        return f"{name}={given!r}" if value else name

    return _OPTION.sub(write, re.sub("^(type|table):", r"\1s:", text))


def _convert(events: Any, path: Path, args: ConvertArguments) -> Report:
    """Make a dataset as :func:`convert` does; ``path`` is the file, or the name of a frame."""
    name = args.name or (path.name or path.resolve().name).split(".")[0]
    folder = Path(args.data_path) / name
    _require_name(name, folder, args)
    overrides = {
        option: _read_pairs(option, getattr(args, key)) for option, key in _BY_COLUMN.items()
    }
    reporter = Reporter(args.verbose)
    with reporter.task(f"reading {path}"):
        sources = _read_sources(events, args)
    check_overrides(overrides, _list_columns(sources))
    given_names = {role: None if (n := getattr(args, role)) is None else str(n) for role in NAMES}
    source = explode_lists(sources.pop("events"), given_names)
    roles = find_roles(source.columns, given_names, args.date_format)
    check_roles(overrides, roles, _list_columns(sources))
    if not args.columns:
        require_header(source.columns, roles, args.date_format)
    guessed = [f"--{role}={column}" for role, column in roles.items() if given_names[role] is None]
    if guessed:
        reporter.line(f"guessed: {', '.join(guessed)}")
    interactions = read_interactions(source, roles, args.date_format)
    lost = dict(interactions.dropped)
    if args.rm_copies:
        if roles["time"] not in source.columns:
            raise UsageError(
                "rm_copies: copies have the same user, item and time, and there are no times "
                f"(--time={roles['time']}); leave it out"
            )
        is_copy = find_copies(interactions)
        interactions.keep(~is_copy, "exact copy of an earlier row (user, item, time)")
    interactions.keep_core(max(args.min_user, args.core), max(args.min_item, args.core))

    report = Report(name)
    left_out = {r: rows for r, rows in interactions.dropped.items() if r not in lost}
    report.lines["events"] = Lines.count(source, lost, left_out)
    report.times = dict(interactions.forms)
    builder = Builder(source, interactions, roles, overrides, report)
    for role, attributes in sources.items():
        builder.add_file(attributes, role)
    _report_lost(report, args.max_lost)
    builder.add_columns()
    tables, loaded = builder.finish()
    num_copies = 0 if args.rm_copies else int(find_copies(interactions).sum())
    _add_counts(report, builder, num_copies)
    report.command = shlex.join(["recbole-pos", "run", "-m", _MODEL, "-d", name])
    if Path(args.data_path) != Path("dataset"):
        report.command += " " + shlex.quote(f"--data_path={args.data_path}")
    report.show(reporter)
    _warn_of_loss(folder, name, report.counts["events"])
    if args.dry_run:
        reporter.line("nothing is written (dry_run)")
        return report

    options = _make_options(report, builder, loaded, choose_separator(tables))
    if source.cuts:
        tables |= _split_parts(tables.pop("inter"), source.cuts, interactions.rows)
        options["benchmark_filename"] = ["train", *source.cuts]
    _write_dataset(folder, tables, options, report, reporter)
    return report


def _report_lost(report: Report, max_lost: float) -> None:
    """Warn of rows that cannot be used; raise a UsageError if a table loses a larger share."""
    tables = [lines for lines in report.lines.values() if lines.lost]
    too_many = [lines for lines in tables if lines.num_lost > max_lost * lines.read]
    if too_many:
        raise UsageError(
            f"{too_many[0].describe_lost()} cannot be used, expected at most {max_lost:.0%}; "
            "correct them, or raise --max_lost to go on without them"
        )
    if tables:
        text = "; ".join(lines.describe_lost() for lines in tables)
        warnings.warn(f"left out of {report.name}: {text}", RunWarning, stacklevel=5)


def _write_dataset(
    folder: Path,
    tables: Mapping[str, Table],
    options: Mapping[str, Any],
    report: Report,
    reporter: Reporter,
) -> None:
    """Write all files of a dataset; they replace the files of an earlier one."""
    name = report.name
    with replace_folder(folder, lambda file: not belongs_to_dataset(file, name)) as new_folder:
        write_text(new_folder / f"{name}.yaml", format_yaml(name, options))
        write_text(new_folder / REPORT, json.dumps(report.as_json(), indent=1) + "\n")
        for suffix, table in tables.items():
            with reporter.task(f"writing {folder / name}.{suffix}"):
                write_table(new_folder / f"{name}.{suffix}", table, options["seq_separator"])
    reporter.line(f"wrote {folder}: {listed([REPORT, *list_dataset_files(folder, name)])}")
    reporter.line(report.command)


def _warn_of_loss(folder: Path, name: str, num_interactions: int) -> None:
    """Warn if a dataset has more than the ``num_interactions`` that replace it."""
    files = [folder / file for file in list_dataset_files(folder, name) if ".inter" in file]
    num_replaced = sum(map(_count_rows, files))
    if num_interactions < num_replaced:
        warnings.warn(
            f"overwrite: {num_interactions:,} interactions replace {num_replaced:,} in {folder}; "
            "`update` and `recommend` need the whole history: convert old and new files together",
            RunWarning,
            stacklevel=5,
        )


def _count_rows(file: Path) -> int:
    """Return the number of rows of a table of a dataset; 0 if it cannot be read."""
    try:
        if file.suffix == PARQUET:
            return pq.read_metadata(file).num_rows
        with open(file, "rb") as lines:
            return max(sum(1 for _ in lines) - 1, 0)  # the first is the header
    except (OSError, pa.ArrowException):
        return 0


def _add_counts(report: Report, builder: Builder, num_copies: int) -> None:
    """Add counts of the kept interactions, and their first and last time, to the report."""
    seconds = builder.interactions.seconds
    has_time = builder.has_time
    report.counts |= {
        "events": len(seconds),
        "users": len(builder.entities["user"]),
        "items": len(builder.entities["item"]),
        "first": _format_time(seconds.min()) if has_time else None,
        "last": _format_time(seconds.max()) if has_time else None,
        "copies": num_copies,
    }
    if num_copies:
        report.notes.append(
            f"{num_copies:,} of {len(seconds):,} interactions are exact copies of an earlier one "
            "(user, item and time); --rm_copies leaves them out"
        )


def _make_options(
    report: Report, builder: Builder, loaded: dict[str, list[str]], separator: str
) -> dict[str, Any]:
    """Return the options of the dataset's yaml; ``loaded`` are the fields to load by table."""
    relations = []
    for column in report.columns:
        max_different = {"token": math.inf, "token_seq": _MAX_LISTS}.get(column.kind, 0)
        is_attribute = column.loaded and column.column not in builder.roles.values()
        if is_attribute and 1 < column.different <= max_different:
            relations.append({"field": column.field})
    if builder.has_time:
        relations.append({"field": "time"})
    relations.append({"field": "position"})
    options: dict[str, Any] = {
        "field_separator": "\t",
        "seq_separator": separator,
        "USER_ID_FIELD": builder.fields["user"],
        "ITEM_ID_FIELD": builder.fields["item"],
        "TIME_FIELD": builder.fields["time"],
        **({"timestamp_unit": "seconds"} if builder.has_time else {}),
        "load_col": loaded,
        "for": {"AttrFormer": {"relations": relations}},
    }
    if report.counts["items"] <= _DEFAULT_CUTOFF:  # too few for rankings of 20
        options |= {"topk": [1, 3], "valid_metric": "NDCG@3"}
    return options


def _split_parts(inter: Table, cuts: dict[str, int], rows: np.ndarray) -> dict[str, Table]:
    """Return a table for each part; ``rows`` [interactions] are those of the source."""
    tables: dict[str, Table] = {}
    part_numbers = np.searchsorted(list(cuts.values()), rows, side="right")
    for number, part in enumerate(("train", *cuts)):
        in_part = np.flatnonzero(part_numbers == number)
        if not len(in_part):
            raise UsageError(
                f"{part}: none of its interactions is left; its columns of user, item and time "
                "need the names of the others, and values"
            )
        tables[f"{part}.inter"] = {field: cells[in_part] for field, cells in inter.items()}
    return tables


def belongs_to_dataset(file: Path, name: str) -> bool:
    """Return whether a file belongs to the dataset ``name``, so that overwriting it replaces it.

    Tables, yaml, report, cache and unfinished files do; other files in the folder stay.
    """
    suffixes = (*TABLES, *(f"{part}.inter" for part in _PARTS))
    tables = [f"{name}.{suffix}{end}" for suffix in suffixes for end in ("", ".parquet")]
    files = [*tables, f"{name}.yaml", REPORT]
    is_unfinished = file.name.endswith(".tmp") and file.name.startswith(
        tuple(f".{name}." for name in files)
    )
    return is_unfinished or file.name in (*files, LOCK)


def list_dataset_files(folder: Path, name: str) -> list[str]:
    """Return the names of a dataset's tables and yaml in a folder; none if it has no dataset."""
    finish_replacement(folder)
    files = sorted(folder.iterdir()) if folder.is_dir() else ()
    return [
        file.name
        for file in files
        if file.name.startswith(f"{name}.") and belongs_to_dataset(file, name)
    ]


def _require_name(name: str, folder: Path, args: ConvertArguments) -> None:
    """Refuse a name that no dataset can have, and a dataset that exists unless overwritten."""
    if not (_NAME.fullmatch(name) and len(name.encode()) <= _MAX_NAME_BYTES):
        raise UsageError(
            f"name: {shown(name)} cannot be that of a dataset: letters, digits, _, - and ., at "
            f"most {_MAX_NAME_BYTES}, as in --name={make_field_name(name[:40], ())}"
        )
    files = list_dataset_files(folder, name)
    if files and not (args.overwrite or args.dry_run):
        raise UsageError(
            f"{folder} holds a dataset already ({', '.join(files)}); take another --name, or "
            "replace it with --overwrite"
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, where the folder of the dataset would be")


def _read_pairs(option: str, words: Any) -> dict[str, str]:
    """Return the ``COLUMN=VALUE`` words of an option, or its dict, as a dict."""
    if isinstance(words, Mapping):
        return {str(column): str(value) for column, value in words.items()}
    pairs = {}
    for word in [words] if isinstance(words, str) or not isinstance(words, Iterable) else words:
        column, equals, value = str(word).rpartition("=")
        if not (column and equals and value):
            raise UsageError(f"{option}: expected --{option}=COLUMN=VALUE, found {shown(word)}")
        pairs[column] = value
    return pairs


def _read_sources(events: Any, args: ConvertArguments) -> dict[str, Source]:
    """Return the sources of events (with held-out parts at their end), item and user, if given."""
    _check_arguments(args)
    tables = {"events": events, "valid": args.valid, "test": args.test}
    tables |= {"item": args.items, "user": args.users}
    sources = {}
    for role, table in tables.items():
        option = f"{role}_columns" if role in ("item", "user") else "columns"
        if table is None:
            if getattr(args, option) and option != "columns":
                raise UsageError(f"{option}: found no file of {role}s; add --{role}s=FILE")
        elif isinstance(table, (str, os.PathLike)):
            sources[role] = read_files(Path(table), args, option)
        elif getattr(args, option):
            raise UsageError(f"{option}: a frame names its columns; leave the option out")
        else:
            sources[role] = read_frame(table, _FRAMES.get(role, role))
    dropped = read_names(args.drop, "drop")
    for column in dropped:
        require_column(column, _list_columns(sources), "drop")
    for role, source in sources.items():
        kept = {name: cells for name, cells in source.columns.items() if name not in dropped}
        sources[role] = replace(source, columns=kept)
    for part in _PARTS[1:]:
        if part in sources:
            sources["events"] = sources["events"].add_part(part, sources.pop(part))
    return sources


def _list_columns(sources: Mapping[str, Source]) -> list[str]:
    """Return the names of the columns of all sources, each once, in their order."""
    return list(dict.fromkeys(name for source in sources.values() for name in source.columns))


def _check_arguments(args: ConvertArguments) -> None:
    """Refuse values of arguments that fit no file."""
    for option in ("min_user", "min_item", "core"):
        value = getattr(args, option)
        if not is_whole(value) or value < 1:
            raise UsageError(f"{option}: expected a number of interactions, found {shown(value)}")
    if not (is_number(args.max_lost) and 0 <= args.max_lost <= 1):
        raise UsageError(f"max_lost: expected a share from 0 to 1, found {shown(args.max_lost)}")
    if args.separator is not None and len(args.separator) != 1:
        raise UsageError(f"separator: {shown(args.separator)} must be one character")
    if args.valid is not None and args.test is None:
        raise UsageError("valid: interactions to test with are missing; give --test, too")


def _format_time(seconds: float) -> str:
    """Return seconds since 1970 as a date with a clock in UTC."""
    if abs(seconds) > 1e17:  # more than the years that numpy has
        return f"{seconds:g}"
    return str(np.datetime64(int(np.floor(seconds)), "s")).replace("T", " ")
