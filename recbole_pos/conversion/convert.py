"""Files of interactions to a dataset that runs: ``recbole-pos convert``, and :func:`convert`."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion.build import TABLES, Builder, check_overrides, field_name
from recbole_pos.conversion.events import find_copies, read_events
from recbole_pos.conversion.reading import read, read_frame
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
# Names of frames in messages.
_FRAMES = {"events": "interactions", "item": "items", "user": "users"}
_FRAMES |= {"valid": "valid", "test": "test"}
_RELATED = 4_000  # most lists of a field that relates interactions, which AttrFormer keeps in pairs
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
    asked = replace(settings or ConvertArguments(), **given)
    is_file = isinstance(events, (str, os.PathLike))
    what = Path(events if is_file else _FRAMES["events"])
    try:
        return _convert(events, what, asked)
    except PosError:
        raise
    except _UNREADABLE as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{str(what)[:100]} cannot be converted: {why}") from error


def _convert(events: Any, what: Path, asked: ConvertArguments) -> Report:
    """Convert a file or frame of events, as :func:`convert` does; ``what`` is its path or name."""
    name = asked.name or (what.name or what.resolve().name).split(".")[0]
    folder = Path(asked.data_path) / name
    _require_name(name, folder, asked)
    overrides = {
        "type": _pairs("type", asked.types),
        "table": _pairs("table", asked.tables),
        **{key: _pairs(key, getattr(asked, key)) for key in ("rename", "decimal", "thousands")},
    }
    reporter = Reporter(asked.verbose)
    with reporter.task(f"reading {what}"):
        sources = _sources(events, asked)
    check_overrides(overrides, {name for source in sources.values() for name in source.columns})
    named = {"user": asked.user, "item": asked.item, "time": asked.time}
    source = sources.pop("events")
    roles = find_roles(source.columns, named, asked.date_format)
    if guessed := [role for role in roles if named[role] is None]:
        reporter.line("guessed: " + ", ".join(f"--{role} {roles[role]}" for role in guessed))
    kept = read_events(source, roles, asked.date_format)
    if asked.rm_copies:
        kept.keep(~find_copies(kept), "exact copy of an earlier row (user, item, time)")
    kept.keep_core(max(asked.min_user, asked.core), max(asked.min_item, asked.core))
    copies = 0 if asked.rm_copies else int(find_copies(kept).sum())
    has_time = roles["time"] in source.columns

    report = Report(name)
    report.lines["events"] = Lines.count(source, kept.dropped)
    report.times = dict(kept.forms)
    builder = Builder(source, kept, roles, overrides, report)
    for role, other in sources.items():
        builder.add_file(other, role)
    builder.add_columns()
    tables, loaded = builder.finish()
    report.counts = {
        "events": len(kept.rows),
        "users": len(builder.entities["user"]),
        "items": len(builder.entities["item"]),
        "first": _day(kept.seconds.min()) if has_time else None,
        "last": _day(kept.seconds.max()) if has_time else None,
        "copies": copies,
    }
    if copies:
        report.notes.append(
            f"{copies:,} of {len(kept.rows):,} interactions are exact copies of an earlier one "
            "(user, item and time); --rm_copies leaves them out"
        )
    report.command = shlex.join(["recbole-pos", "run", "-m", _MODEL, "-d", name])
    if Path(asked.data_path) != Path("dataset"):
        report.command += " " + shlex.quote(f"--data_path={asked.data_path}")
    report.show(reporter)
    if asked.dry_run:
        reporter.line("nothing is written (dry_run)")
        return report

    parts = ["train", *source.cuts] if source.cuts else []
    if parts:
        inter = tables.pop("inter")
        number = np.searchsorted(list(source.cuts.values()), kept.rows, side="right")
        for place, part in enumerate(parts):
            rows = np.flatnonzero(number == place)
            if not len(rows):
                raise UsageError(f"{part}: none of its interactions is left; see what was dropped")
            tables[f"{part}.inter"] = {field: cells[rows] for field, cells in inter.items()}
    separator = sequence_separator(tables)
    related = [
        column.field
        for column in report.columns
        if column.loaded
        and column.column not in roles.values()
        and (column.kind == "token" or column.kind == "token_seq" and column.different <= _RELATED)
        and column.different > 1
    ]
    related += ["time", "position"] if has_time else ["position"]
    options: dict[str, Any] = {
        "field_separator": "\t",
        "seq_separator": separator,
        **{f"{role.upper()}_ID_FIELD": builder.fields[role] for role in ("user", "item")},
        "TIME_FIELD": builder.fields["time"],
        **({"timestamp_unit": "seconds"} if has_time else {}),
        "load_col": loaded,
        "for": {"AttrFormer": {"relations": [{"field": name} for name in related]}},
    }
    if parts:
        options["benchmark_filename"] = parts
    if report.counts["items"] <= _CUTOFF:  # too few for rankings of 20
        options |= {"topk": [1, 3], "valid_metric": "NDCG@3"}
    with replacing(folder, lambda file: not belongs_to_dataset(file, name)) as new:
        write_text(new / f"{name}.yaml", shop_yaml(name, options))
        write_text(new / REPORT, json.dumps(report.as_json(), indent=1) + "\n")
        for suffix, table in tables.items():
            with reporter.task(f"writing {folder / name}.{suffix}"):
                write_table(new / f"{name}.{suffix}", table, separator)
    reporter.line(f"wrote {folder}: {listed([REPORT, *find_dataset(folder, name)])}")
    reporter.line(report.command)
    return report


def belongs_to_dataset(file: Path, name: str) -> bool:
    """Return whether a file belongs to the dataset ``name``, so that overwriting it replaces it.

    Tables, yaml, report, cache and unfinished files do; other files in the folder stay.
    """
    suffixes = {*TABLES, *_INTER}
    tables = [f"{name}.{suffix}{end}" for suffix in suffixes for end in ("", ".parquet")]
    own = [*tables, f"{name}.yaml", REPORT]
    unfinished = file.name.endswith(".tmp") and file.name.startswith(tuple(f".{o}." for o in own))
    return unfinished or file.name in (*own, CACHE, LOCK)


def find_dataset(folder: Path, name: str) -> list[str]:
    """Return the names of the tables and the yaml of a dataset that are in a folder."""
    files = folder.iterdir() if folder.is_dir() else ()
    own = [file.name for file in files if belongs_to_dataset(file, name)]
    return sorted(file for file in own if file.startswith(f"{name}."))


def _require_name(name: str, folder: Path, asked: ConvertArguments) -> None:
    """Refuse a name that no dataset can have, or one that exists, unless it is overwritten."""
    if not (_NAME.fullmatch(name) and len(name.encode()) <= _LONGEST):
        raise UsageError(
            f"name: {shown(name)} cannot be that of a dataset: letters, digits, _, - and ., at "
            f"most {_LONGEST}, as in --name {field_name(name[:40], ())}"
        )
    if (found := find_dataset(folder, name)) and not (asked.overwrite or asked.dry_run):
        raise UsageError(
            f"{folder} holds a dataset already ({', '.join(found)}); take another --name, or "
            "replace it with --overwrite"
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, where the folder of the dataset would be")


def _pairs(option: str, words: Any) -> dict[str, str]:
    """Return the ``COLUMN=VALUE`` words of an option, or its dict, as a dict."""
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
    """Read all files or frames, by role: events (with given parts below), item, user."""
    if min(asked.min_user, asked.min_item, asked.core) < 1:
        raise UsageError("min_user, min_item, core: expected numbers of events, at least 1")
    if asked.separator is not None and len(asked.separator) != 1:
        raise UsageError(f"separator: {shown(asked.separator)} must be one character")
    if asked.valid is not None and asked.test is None:
        raise UsageError("valid: interactions to test with are missing; give --test, too")
    given = {"events": events, "valid": asked.valid, "test": asked.test}
    given |= {"item": asked.items, "user": asked.users}
    sources = {}
    for role, table in given.items():
        option = f"{role}_columns" if role in ("item", "user") else "columns"
        if table is None:
            if getattr(asked, option) and option != "columns":
                raise UsageError(f"{option}: found no file of {role}s; add --{role}s FILE")
        elif isinstance(table, (str, os.PathLike)):
            sources[role] = read(Path(table), asked, option)
        elif getattr(asked, option):
            raise UsageError(f"{option}: a frame names its columns; leave the option out")
        else:
            sources[role] = read_frame(table, _FRAMES[role])
    columns = {name for source in sources.values() for name in source.columns}
    for column in asked.drop:
        require_column(column, columns, "drop")
    for role, source in sources.items():
        kept = {name: cells for name, cells in source.columns.items() if name not in asked.drop}
        sources[role] = replace(source, columns=kept)
    for part in _PARTS[1:]:
        if part in sources:
            sources["events"] = sources["events"].add_part(part, sources.pop(part))
    return sources


def _day(seconds: float) -> str:
    """Return a time for people."""
    if abs(seconds) > 1e17:  # more than numpy's years
        return f"{seconds:g}"
    return str(np.datetime64(int(np.floor(seconds)), "s")).replace("T", " ")
