"""Files of interactions to a dataset that runs: ``recbole-pos convert``, and :func:`convert`."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recbole_pos.config.arguments import ConvertArguments, fill_settings
from recbole_pos.conversion.build import TABLES, Builder, ColumnOverrides, field_name
from recbole_pos.conversion.cells import Cells
from recbole_pos.conversion.events import count_copied_targets, find_copies, read_events
from recbole_pos.conversion.layout import explode
from recbole_pos.conversion.reading import Dialect, is_frame, read, read_frame
from recbole_pos.conversion.report import Lines, Report
from recbole_pos.conversion.roles import find_roles, require_column
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.writing import sequence_separator, shop_yaml, write_table
from recbole_pos.errors import PosError, UsageError
from recbole_pos.files import LOCK, replacing, write_text
from recbole_pos.reporter import Reporter
from recbole_pos.values import listed, shown

REPORT = "convert.json"
CACHE = ".recbole_pos"
_UNREADABLE = (
    *(OSError, EOFError, UnicodeError, RecursionError, MemoryError),
    *(pa.ArrowException, csv.Error, zlib.error),
)
_CUTOFF = 20  # the largest that rankings have by default
_MODEL = "PosSASRec"
_FRAME = "interactions"  # name of a frame of interactions in messages
_FRAMES = {"events": _FRAME, "valid": "valid", "test": "test", "item": "items", "user": "users"}
_PARTS = ("train", "valid", "test")
_INTER = ("inter", *(f"{part}.inter" for part in _PARTS))
_NAME = re.compile(r"\w[\w.-]*")
_LONGEST = 200  # bytes of a name; file systems allow 255, of which suffixes need some


def convert(events: Any, *, settings: ConvertArguments | None = None, **given: Any) -> Report:
    """Make a dataset of a file of events, or of a folder of them.

    Nothing is dropped in silence: every line is kept, or counted under a reason with its number.
    Times become seconds since 1970 in UTC. A column that is the same for all events of an item (or
    user), but for few, goes into the table of items (users): the first value that is not missing.

    Args:
        events: csv, tsv or json lines (.gz as well), parquet, or a folder of files of one of these;
            or a frame, as :meth:`recbole_pos.Dataset.from_frame` takes it.
        settings: arguments of :class:`~recbole_pos.config.arguments.ConvertArguments`.
        given: single ones of them by name; types, tables and rename as dicts.

    Returns:
        what became of every column and line, as ``convert.json`` has it.

    Raises:
        UsageError: if a file cannot be read, a column is not there or cannot be guessed, a date
            may mean two days, or there is a dataset of this name already.

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
        ...     folder / "orders.csv", name="shop", data_path=folder, verbose=False
        ... )
        >>> report.lines["events"].kept, report.lines["events"].dropped
        (2, {'no user (customer)': {'lines': 1, 'first': ['orders.csv:4']}})
        >>> [(column.field, column.kind, column.table) for column in report.columns][3:]
        [('brand', 'token', 'item')]
    """
    asked = fill_settings(settings or ConvertArguments(), given)
    with _refusing(str(events) if isinstance(events, (str, os.PathLike)) else _FRAME):
        return make_dataset(events, asked)


@contextmanager
def _refusing(file: str) -> Iterator[None]:
    """Turn unexpected errors of readers into a UsageError on the file, for a ``with`` block."""
    try:
        yield
    except PosError:
        raise
    except _UNREADABLE as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{file[:100]} cannot be converted: {why}") from error


def make_dataset(events: Any, asked: ConvertArguments, allow_empty: bool = False) -> Report:
    """Convert a file or frame of events, as :func:`convert` does, by checked arguments.

    Args:
        events: path or frame of the interactions.
        asked: the arguments.
        allow_empty: whether columns that the arguments name may have no value.

    Returns:
        the report; unless ``dry_run``, the dataset is written.
    """
    what = Path(events if isinstance(events, (str, os.PathLike)) else _FRAME)
    name = asked.name or (what.name or what.resolve().name).split(".")[0]
    folder = Path(asked.data_path) / name
    _require_name(name, folder, asked)
    overrides = ColumnOverrides(
        _pairs("type", asked.types),
        _pairs("table", asked.tables),
        _pairs("rename", asked.rename),
        _pairs("decimal", asked.decimal),
        _pairs("thousands", asked.thousands),
    )
    reporter = Reporter(asked.verbose)
    with reporter.task(f"reading {what}"):
        sources = _sources(events, asked)
    overrides.check(list(sources.values()))
    named = {"user": asked.user, "item": asked.item, "time": asked.time}
    source, lists = explode(sources.pop("events"), named)
    roles, guessed = find_roles(source.columns, {**named, **lists}, asked.date_format)
    guessed = [role for role in roles if role in guessed or named[role] is None]
    if guessed:
        reporter.line("guessed: " + ", ".join(f"--{role} {roles[role]}" for role in guessed))
    kept = read_events(source, roles, asked.date_format)
    has_time = roles["time"] in source.columns
    if asked.rm_copies:
        kept.keep(~find_copies(kept), "exact copy of an earlier line (user, item, time)")
    kept.keep_core(max(asked.min_user, asked.core), max(asked.min_item, asked.core))
    copies = 0 if asked.rm_copies else int(find_copies(kept).sum())

    report = Report(name)
    report.lines["events"] = Lines.count(source, kept.dropped)
    report.times = dict(kept.forms)
    report.notes += [note for table in (source, *sources.values()) for note in table.notes]
    builder = Builder(source, kept, roles, overrides, report)
    for role, other in sources.items():
        builder.add_file(other, role)
    builder.add_columns()
    tables, loaded = builder.finish(allow_empty)
    report.counts = {
        "events": len(kept.rows),
        "users": len(builder.entities["user"]),
        "items": len(builder.entities["item"]),
        "first": _day(kept.seconds.min()) if has_time else None,
        "last": _day(kept.seconds.max()) if has_time else None,
        "copies": copies,
        "copied_targets": count_copied_targets(kept) if copies else 0,
    }
    if copies:
        report.notes.append(_describe_copies(report.counts))
    report.command = shlex.join(["recbole-pos", "run", "-m", _MODEL, "-d", name])
    if Path(asked.data_path) != Path("dataset"):
        report.command += " " + shlex.quote(f"--data_path={asked.data_path}")
    report.show(reporter)
    if asked.dry_run:
        reporter.line("nothing is written (dry_run)")
        return report

    parts = [part for part in _PARTS if part == "train" or getattr(asked, part) is not None]
    parts = parts if len(parts) > 1 else []
    if parts:
        inter, number = tables.pop("inter"), source.part_of(kept.rows)
        for place, part in enumerate(parts):
            rows = np.flatnonzero(number == place)
            if not len(rows):
                raise UsageError(f"{part}: none of its interactions is left; see what was dropped")
            tables[f"{part}.inter"] = {
                field: cells.take(rows) if isinstance(cells, Cells) else cells[rows]
                for field, cells in inter.items()
            }
    separator = sequence_separator(tables)
    text = shop_yaml(
        name,
        builder.fields,
        roles,
        loaded,
        separator,
        builder.list_relations(loaded, has_time),
        small=report.counts["items"] <= _CUTOFF,
        has_time=has_time,
        parts=parts,
    )
    with replacing(folder, lambda file: not belongs_to_dataset(file, name)) as new:
        write_text(new / f"{name}.yaml", text)
        write_text(new / REPORT, json.dumps(report.as_json(), indent=1) + "\n")
        for suffix, table in tables.items():
            with reporter.task(f"writing {folder / name}.{suffix}"):
                write_table(new / f"{name}.{suffix}", table, separator)
    files = sorted(folder.iterdir())
    reporter.line(
        f"wrote {folder}: {listed(one.name for one in files if belongs_to_dataset(one, name))}"
    )
    if others := [one.name for one in files if not belongs_to_dataset(one, name)]:
        reporter.line(f"left as they were: {listed(others)}")
    reporter.line(report.command)
    return report


def _describe_copies(counts: dict[str, Any]) -> str:
    """Return the note on exact copies; a warning if they are targets of leave-one-out."""
    note = (
        f"{counts['copies']:,} of {counts['events']:,} interactions are exact copies of an earlier "
        "one (user, item and time); --rm_copies leaves them out"
    )
    targets, users = counts["copied_targets"], counts["users"]
    if not targets:
        return note
    return (
        f"warning: {note}. The last interaction of {targets:,} of {users:,} users "
        f"({targets / users:.1%}), the target of leave-one-out, only repeats the one before it at "
        "the same time, so metrics are too good"
    )


def belongs_to_dataset(file: Path, name: str) -> bool:
    """Return whether a file belongs to the dataset ``name``, so that overwriting it replaces it.

    Tables, yaml, report, cache and unfinished files do; other files in the folder stay.
    """
    suffixes = {*TABLES, *_INTER}
    tables = [f"{name}.{suffix}{end}" for suffix in suffixes for end in ("", ".parquet")]
    own = [*tables, f"{name}.yaml", REPORT]
    unfinished = file.name.endswith(".tmp") and file.name.startswith(tuple(f".{o}." for o in own))
    return unfinished or file.name in (*own, CACHE, LOCK)


def parquet_files(folder: Path, name: str) -> list[Path]:
    """Return the tables of a dataset that exist in parquet."""
    files = [folder / f"{name}.{suffix}.parquet" for suffix in TABLES]
    return [file for file in files if file.exists()]


def _require_name(name: str, folder: Path, asked: ConvertArguments) -> None:
    """Refuse a name that no dataset can have, or one that exists, unless it is overwritten."""
    if not (_NAME.fullmatch(name) and len(name.encode()) <= _LONGEST):
        raise UsageError(
            f"name: {shown(name)} cannot be that of a dataset: letters, digits, _, - and ., at "
            f"most {_LONGEST}, as in --name {field_name(name[:40], ())}"
        )
    files = [folder / f"{name}.{suffix}" for suffix in (*_INTER, "item", "user", "yaml")]
    files += parquet_files(folder, name)
    if found := [file.name for file in files if file.exists()]:
        if not (asked.overwrite or asked.dry_run):
            raise UsageError(
                f"{folder} holds a dataset already ({', '.join(found)}); take another --name, or "
                "replace it with --overwrite"
            )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, where the folder of the dataset would be")


def _pairs(option: str, words: Any) -> dict[str, str]:
    """Return the ``COLUMN=VALUE`` words of an option, or its dict, as a dict.

    Raises:
        UsageError: if a word is not of that form.
    """
    if isinstance(words, Mapping):
        return dict(words)
    pairs = {}
    for word in words:
        column, equals, value = str(word).rpartition("=")
        if not (column and equals and value):
            raise UsageError(f"{option}: expected COLUMN=VALUE, found {shown(word)}")
        pairs[column] = value
    return pairs


def _sources(events: Any, asked: ConvertArguments) -> dict[str, Source]:
    """Read all files or frames.

    Returns:
        sources by role: events (with given parts below), item, user; without dropped columns.

    Raises:
        UsageError: if an argument is wrong, or a file cannot be read.
    """
    for option in ("min_user", "min_item", "core"):
        if getattr(asked, option) < 1:
            raise UsageError(f"{option}: expected a number of events, at least 1")
    if asked.separator is not None and len(asked.separator) != 1:
        raise UsageError(f"separator: {shown(asked.separator)} must be one character")
    if asked.valid is not None and asked.test is None:
        raise UsageError("valid: interactions to test with are missing; give --test, too")
    dialect = Dialect(asked.separator, not asked.no_quotes, asked.encoding, header=asked.header)
    sources = {}
    for role, given, option in (
        ("events", events, "columns"),
        ("valid", asked.valid, "columns"),
        ("test", asked.test, "columns"),
        ("item", asked.items, "item_columns"),
        ("user", asked.users, "user_columns"),
    ):
        names = getattr(asked, option)
        names = tuple(names.split(",")) if isinstance(names, str) else tuple(names)
        if given is None:
            if names and option != "columns":
                raise UsageError(f"{option}: found no file of {role}s; add --{role}s FILE")
        elif is_frame(given):
            if names:
                raise UsageError(f"{option}: a frame names its columns; leave the option out")
            sources[role] = read_frame(given, _FRAMES[role])
        elif isinstance(given, (str, os.PathLike)):
            sources[role] = read(Path(given), replace(dialect, names=names, option=option))
        else:
            raise UsageError(
                f"{_FRAMES[role]}: expected a file or a frame (pandas, polars, pyarrow, DuckDB), "
                f"found {type(given).__name__}; a lazy frame is collected first"
            )
    for part in ("valid", "test"):
        if part in sources:
            sources["events"] = sources["events"].add_part(sources.pop(part))
    columns = {n: c for source in sources.values() for n, c in source.columns.items()}
    for column in asked.drop:
        require_column(column, columns, "drop")
    return {
        role: replace(s, columns={n: c for n, c in s.columns.items() if n not in asked.drop})
        for role, s in sources.items()
    }


def _day(seconds: float) -> str:
    """Return a time for people."""
    try:
        return str(datetime(1970, 1, 1) + timedelta(seconds=float(np.floor(seconds))))
    except OverflowError:
        return f"{seconds:g}"
