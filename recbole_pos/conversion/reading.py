"""A file, or a folder of files, by what its name says it is."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from recbole_pos.conversion.json_lines import read_json
from recbole_pos.conversion.separated import Dialect, Separated
from recbole_pos.conversion.source import Part, Source, flat, require_few_columns, union
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
}
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_BESIDE = (".json", ".txt")
_KNOWN = "csv, tsv, json lines (.jsonl) and parquet, each but parquet also as .gz"


def read(path: str | Path, dialect: Dialect) -> Source:
    """Everything in a file, or in the files of a folder that have one format.

    Raises:
        UsageError: if there is no such file, or it is not of a format that can be read; if its
            first line has no usable names; if most of its lines are broken.
    """
    path = Path(path)
    files = _files(path)
    kind = _format(files[0])
    if dialect.names and kind != "csv":
        raise UsageError(f"{dialect.option}: {files[0]} names its columns; leave the option out")
    form, comma = kind, False
    parts: list[Part] = []
    try:
        if kind == "csv":
            reader = Separated(files[0], dialect)
            parts = [reader.read(file) for file in files]
            form = f"text separated by {shown(reader.separator)}"
            comma = reader.separator == ";"
        elif kind == "json":
            parts, form = [read_json(file) for file in files], "json lines"
        else:
            parts = [_parquet(file) for file in files]
    except (OSError, EOFError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for part in parts:
        _require_rows(part)
        _add_partitions(part, path)
    columns = union([(part.columns, part.rows) for part in parts])
    require_few_columns(path, len(columns))
    columns = {name: column for name, column in columns.items() if name not in dialect.drop}
    return Source(path, parts, columns, form, comma)


def _add_partitions(part: Part, folder: Path) -> None:
    """Columns that the names of folders tell, such as country=NO."""
    for name in part.path.relative_to(folder).parts[:-1]:
        column, equals, value = map(unquote, name.partition("="))
        if column and equals and column not in part.columns:
            cells: pa.Array = pa.nulls(part.rows)
            if value != _NO_PARTITION:
                codes = np.zeros(part.rows, np.int32)
                cells = pa.DictionaryArray.from_arrays(codes, pa.array([value]))
            part.columns[column] = pa.chunked_array([cells])


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no file or folder {shown(str(path))}")
    inside = (file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
    found = sorted(file for file in inside if _kind(file))
    # what lies beside data: dataset_infos.json, README.txt
    found = [file for file in found if file.suffix not in _BESIDE] or found
    kinds = {_kind(file) for file in found}
    if not found:
        raise UsageError(f"{path} holds no data file; known are {_KNOWN}")
    if len(kinds) > 1:
        names = ", ".join(file.name for file in found[:5])
        raise UsageError(f"{path} holds files of different formats ({names}); name one of them")
    return found


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _kind(file: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        kind = FORMATS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if kind == "parquet" else kind
    return FORMATS.get(suffixes[-1]) if suffixes else None


def _format(file: Path) -> str:
    if kind := _kind(file):
        return kind
    raise UsageError(f"{file.name}: its name does not end like a format that can be read: {_KNOWN}")


def _require_rows(part: Part) -> None:
    if not part.rows and not part.broken:
        raise UsageError(f"{part.path} has no line of data")
    if len(part.broken) > part.rows:
        first = part.broken[0]
        raise UsageError(
            f"{part.path}: {len(part.broken):,} of {part.rows + len(part.broken):,} lines are "
            f"broken, the first, line {part.line_of(first)}: {first.why}"
        )


def _parquet(file: Path) -> Part:
    try:
        table = parquet.read_table(file, partitioning=None)
    except pa.ArrowException as error:
        raise UsageError(f"{file} is no parquet file: {error}") from error
    return Part(file, flat(table), table.num_rows)
