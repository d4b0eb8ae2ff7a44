"""Files of interactions to a dataset that runs: ``recbole-pos convert``, and :func:`convert`."""

from __future__ import annotations

import math
import os
import re
import shlex
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zoneinfo import available_timezones

import numpy as np

from recbole_pos.config.arguments import ConvertArguments, split_keywords
from recbole_pos.conversion.build import Builder, check_overrides
from recbole_pos.conversion.interaction_table import (
    explode_lists,
    find_roles,
    read_interactions,
    require_column,
)
from recbole_pos.conversion.reading import Source, read_files, read_frame
from recbole_pos.conversion.report import Lines, Report
from recbole_pos.conversion.writing import (
    HELD_OUT,
    Table,
    choose_separator,
    list_dataset_files,
    warn_of_loss,
    write_dataset,
)
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.reporter import Reporter
from recbole_pos.values import is_number, read_names, shown, suggest

_DEFAULT_CUTOFF = 20  # the longest ranking that metrics read by default
_MODEL = "PosSASRec"
# Names of frames in messages.
_FRAMES = {"events": "interactions", "item": "items", "user": "users"}
_MAX_LISTS = 4_000  # of a field that relates interactions, which AttrFormer keeps in pairs
_BY_COLUMN = {"type": "types", "table": "tables", "rename": "rename"}  # option -> argument
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
    args, unknown = split_keywords(settings or ConvertArguments(), given)
    if unknown:
        name = min(unknown)
        raise UsageError(f"{name}: no argument of convert{suggest(name, vars(args))}")
    is_file = isinstance(events, (str, os.PathLike))
    path = Path(events if is_file else _FRAMES["events"])
    name = args.name or (path.name or path.resolve().name).split(".")[0]
    folder = Path(args.data_path) / name
    _check_arguments(args)
    _require_name(name, folder, args)
    overrides = {
        option: _read_pairs(option, getattr(args, key)) for option, key in _BY_COLUMN.items()
    }
    reporter = Reporter(args.verbose)
    with reporter.task(f"reading {path}"):
        sources = _read_sources(events, args)
    roles = find_roles(sources["events"], args)
    check_overrides(overrides, roles, sources.values())
    guessed = [f"--{role}={column}" for role, column in roles.items() if not getattr(args, role)]
    if guessed:
        reporter.line(f"guessed: {', '.join(guessed)}")
    source = explode_lists(sources["events"], roles)
    interactions = read_interactions(source, roles, args)

    report = Report(name)
    report.lines["events"] = Lines.count(source, interactions.dropped)
    report.times = dict(interactions.forms)
    builder = Builder(source, interactions, roles, overrides, args, report)
    for role in ("item", "user"):
        if role in sources:
            builder.add_file(sources[role], role)
    _report_lost(report, args.max_lost)
    builder.add_columns()
    tables, loaded = builder.finish()
    _add_counts(report, builder)
    report.command = shlex.join(["recbole-pos", "run", "-m", _MODEL, "-d", name])
    if Path(args.data_path) != Path("dataset"):
        report.command += " " + shlex.quote(f"--data_path={args.data_path}")
    report.show(reporter)
    warn_of_loss(folder, report.counts["events"])
    if args.dry_run:
        reporter.line("nothing is written (dry_run)")
        return report

    options = _make_options(report, builder, loaded, choose_separator(tables))
    if source.cuts:
        tables |= _split_parts(tables.pop("inter"), source.cuts, interactions.rows)
        options["benchmark_filename"] = ["train", *source.cuts]
    write_dataset(folder, tables, options, report, reporter)
    reporter.line(report.command)
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
        warnings.warn(f"left out of {report.name}: {text}", RunWarning, stacklevel=4)


def _add_counts(report: Report, builder: Builder) -> None:
    """Add counts of the kept interactions, and their first and last time, to the report."""
    seconds = builder.interactions.seconds
    report.counts |= {
        "events": len(seconds),
        "users": len(builder.entities["user"]),
        "items": len(builder.entities["item"]),
        "first": _format_time(seconds.min()) if builder.has_time else None,
        "last": _format_time(seconds.max()) if builder.has_time else None,
    }


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


def _split_parts(inter: Table, cuts: Mapping[str, int], rows: np.ndarray) -> dict[str, Table]:
    """Return a table for each part; ``rows`` [interactions] are those of the source."""
    tables: dict[str, Table] = {}
    part_numbers = np.searchsorted(list(cuts.values()), rows, side="right")
    for number, part in enumerate(("train", *cuts)):
        in_part = np.flatnonzero(part_numbers == number)
        if not len(in_part):
            raise UsageError(f"{part}: none of its rows is an interaction")
        tables[f"{part}.inter"] = {field: cells[in_part] for field, cells in inter.items()}
    return tables


def _require_name(name: str, folder: Path, args: ConvertArguments) -> None:
    """Refuse a name that no dataset can have, and a dataset that exists unless overwritten."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"name: found {shown(name)}, expected letters, digits, _, - and .")
    files = list_dataset_files(folder, name)
    if files and not (args.overwrite or args.dry_run):
        raise UsageError(
            f"{folder} holds a dataset already ({', '.join(files)}); take another --name, or "
            "replace it with --overwrite"
        )


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
    tables = {"events": events, "valid": args.valid, "test": args.test}
    tables |= {"item": args.items, "user": args.users}
    sources = {}
    for role, table in tables.items():
        columns = () if role in ("item", "user") else args.columns
        if isinstance(table, (str, os.PathLike)):
            sources[role] = read_files(Path(table), args, columns)
        elif table is not None:
            sources[role] = read_frame(table, _FRAMES.get(role, role))
    for column in read_names(args.drop, "drop"):
        names = {name for source in sources.values() for name in source.columns}
        require_column(column, names, "drop")
        for role, source in sources.items():
            if column in source.columns:
                sources[role] = replace(source, table=source.table.drop_columns(column))
    for part in HELD_OUT:
        if part in sources:
            sources["events"] = sources["events"].add_part(part, sources.pop(part))
    return sources


def _check_arguments(args: ConvertArguments) -> None:
    """Refuse values of arguments that fit no file."""
    if not (is_number(args.max_lost) and 0 <= args.max_lost <= 1):
        raise UsageError(f"max_lost: expected a share from 0 to 1, found {shown(args.max_lost)}")
    for option in ("separator", "decimal"):
        if len(getattr(args, option) or ".") != 1:
            raise UsageError(f"{option}: expected one character, found {getattr(args, option)!r}")
    if args.valid is not None and args.test is None:
        raise UsageError("valid: interactions to test with are missing; give --test, too")
    if args.timezone is not None and args.timezone not in available_timezones():
        raise UsageError(
            f"timezone: found {shown(args.timezone)}, expected a zone such as Europe/Oslo"
        )


def _format_time(seconds: float) -> str:
    """Return seconds since 1970 as a date with a clock in UTC."""
    if abs(seconds) > 1e17:  # more than the years that numpy has
        return f"{seconds:g}"
    return str(np.datetime64(int(np.floor(seconds)), "s")).replace("T", " ")
