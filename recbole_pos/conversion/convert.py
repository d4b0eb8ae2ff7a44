"""Files of events to a dataset that runs: ``recbole-pos convert``, and :func:`convert`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from recbole_pos.config.arguments import ConvertArguments, arguments
from recbole_pos.conversion.build import Builder, Wishes, require_wishes
from recbole_pos.conversion.cells import Cells
from recbole_pos.conversion.events import keep_core, read_events
from recbole_pos.conversion.naming import field_name, is_dataset_name
from recbole_pos.conversion.reading import read
from recbole_pos.conversion.relations import relations
from recbole_pos.conversion.report import Lines, Report
from recbole_pos.conversion.roles import find_roles, require_column
from recbole_pos.conversion.separated import Dialect
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.writing import sequence_separator, shop_yaml, write_table
from recbole_pos.errors import UsageError
from recbole_pos.files import write_text, writing
from recbole_pos.screen import Screen
from recbole_pos.values import shown

REPORT = "convert.json"
_CUTOFF = 20  # the largest that rankings have by default
_MODEL = "PosSASRec"


def convert(
    events: str | Path, *, settings: ConvertArguments | None = None, **given: Any
) -> Report:
    """Make a dataset of a file of events, or of a folder of them.

    Nothing is dropped in silence: every line is kept, or counted under a reason with its number.
    Times become seconds since 1970 in UTC. A column that is the same for all events of an item (or
    user), but for few, goes into the table of items (users): the first value that is not missing.

    Args:
        events: csv, tsv or json lines (.gz as well), parquet, or a folder of files of one of these.
        settings: arguments of :class:`~recbole_pos.config.arguments.ConvertArguments`.
        given: single ones of them by name; types, tables and rename as dicts.

    Returns:
        what became of every column and line, as ``convert.json`` has it.

    Raises:
        UsageError: if a file cannot be read, a column is not there or cannot be guessed, a date
            may mean two days, or there is a dataset of this name already.

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
    asked = arguments(settings or ConvertArguments(), given)
    events = Path(events)
    name = asked.name or (events.name or events.resolve().name).split(".")[0]
    folder = Path(asked.data_path) / name
    _require_name(name, folder, asked)
    wishes = Wishes(
        _pairs("type", asked.types), _pairs("table", asked.tables), _pairs("rename", asked.rename)
    )
    screen = Screen(asked.verbose)
    with screen.task(f"reading {events}"):
        sources = _sources(events, asked)
    require_wishes(wishes, list(sources.values()))
    source = sources.pop("events")
    named = {"user": asked.user, "item": asked.item, "time": asked.time}
    roles, guessed = find_roles(source.columns, named, asked.date_format)
    if guessed:
        screen.line("guessed: " + ", ".join(f"--{role} {roles[role]}" for role in guessed))
    kept = read_events(source, roles, asked.date_format)
    keep_core(kept, max(asked.min_user, asked.core), max(asked.min_item, asked.core))

    report = Report(name)
    report.lines["events"] = Lines.of(source, kept.dropped)
    report.times = dict(kept.times.forms)
    builder = Builder(source, kept, roles, wishes, report)
    for role, other in sources.items():
        builder.add_file(other, role)
    builder.add_columns()
    tables = builder.finished()
    report.counts = {
        "events": len(kept.rows),
        "users": len(builder.things["user"]),
        "items": len(builder.things["item"]),
        "first": _day(kept.seconds.min()),
        "last": _day(kept.seconds.max()),
    }
    report.command = _command(name, asked)
    report.show_columns(screen)
    report.show_lines(screen)
    if asked.dry_run:
        screen.line("nothing is written (dry_run)")
        return report

    separator = sequence_separator(tables)
    loaded = builder.loaded()
    fields = {
        table: {f: tables[table][f] for f in names if f not in builder.fields.values()}
        for table, names in loaded.items()
    }
    own = {
        table: {f: cells for f, cells in of.items() if isinstance(cells, Cells)}
        for table, of in fields.items()
    }
    text = shop_yaml(
        name,
        builder.fields,
        roles,
        loaded,
        separator,
        relations(own, kept.seconds),
        small=len(builder.things["item"]) <= _CUTOFF,
    )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("item", "user", "inter"):  # the last one makes it a dataset
        path = folder / f"{name}.{suffix}"
        if suffix == "inter":
            write_text(folder / f"{name}.yaml", text)
            write_text(folder / REPORT, json.dumps(report.as_json(), indent=1) + "\n")
        if suffix in tables:
            with screen.task(f"writing {path}"):
                write_table(path, tables[suffix], separator)
        elif path.exists():  # of what is overwritten
            path.unlink()
    for path in parquet_files(folder, name):  # likewise, and a run takes no table in two forms
        path.unlink()
    screen.line(f"wrote {folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    screen.line(report.command)
    return report


def parquet_files(folder: Path, name: str) -> list[Path]:
    """The tables of a dataset that are there in parquet."""
    files = [folder / f"{name}.{suffix}.parquet" for suffix in ("inter", "item", "user")]
    return [file for file in files if file.exists()]


def _require_name(name: str, folder: Path, asked: ConvertArguments) -> None:
    if not is_dataset_name(name):
        raise UsageError(
            f"name: {shown(name)} cannot be that of a dataset: letters, digits, _, - and ., as in "
            f"--name {field_name(name, ())}"
        )
    files = [folder / f"{name}.{suffix}" for suffix in ("inter", "item", "user", "yaml")]
    files += parquet_files(folder, name)
    if found := [file.name for file in files if file.exists()]:
        if not (asked.overwrite or asked.dry_run):
            raise UsageError(
                f"{folder} holds a dataset already ({', '.join(found)}); take another --name, or "
                "replace it with --overwrite"
            )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, where the folder of the dataset would be")


def _pairs(option: str, given: Any) -> dict[str, str]:
    """``column=value`` words as a dict, which may be given itself."""
    if isinstance(given, Mapping):
        return dict(given)
    pairs = {}
    for word in given:
        column, equals, value = str(word).rpartition("=")
        if not (column and equals and value):
            raise UsageError(f"{option}: expected COLUMN=VALUE, found {shown(word)}")
        pairs[column] = value
    return pairs


def _sources(events: Path, asked: ConvertArguments) -> dict[str, Source]:
    """What is read, by what it is of: events, item, user."""
    for option in ("min_user", "min_item", "core"):
        if getattr(asked, option) < 1:
            raise UsageError(f"{option}: expected a number of events, at least 1")
    if asked.separator is not None and len(asked.separator) != 1:
        raise UsageError(f"separator: {shown(asked.separator)} must be one character")
    dialect = Dialect(asked.separator, not asked.no_quotes, asked.encoding)
    sources = {"events": read(events, dialect)}
    for role, path in (("item", asked.items), ("user", asked.users)):
        if path is not None:
            sources[role] = read(path, dialect)
    columns = {n: c for source in sources.values() for n, c in source.columns.items()}
    for column in asked.drop:
        require_column(column, columns, "drop")
    return {
        of: replace(s, columns={n: c for n, c in s.columns.items() if n not in asked.drop})
        for of, s in sources.items()
    }


def _day(seconds: float) -> str:
    """A time for people."""
    try:
        return str(datetime(1970, 1, 1) + timedelta(seconds=float(np.floor(seconds))))
    except OverflowError:
        return f"{seconds:g}"


def _command(name: str, asked: ConvertArguments) -> str:
    command = ["recbole-pos", "run", "-m", _MODEL, "-d", name]
    if Path(asked.data_path) != Path("dataset"):
        command.append(f"--data_path={asked.data_path}")
    return shlex.join(command)
