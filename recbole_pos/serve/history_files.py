"""Histories from a file of json lines or parquet, a part at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
from pydantic import ValidationError

from recbole_pos.errors import UsageError
from recbole_pos.serve.histories import KEYS, History, describe_invalid, require_columns

PART = 1 << 14  # histories of a file that are read at once


def read_parts(file: str | Path) -> Iterator[list[History] | pa.Table]:
    """Yield the histories of a file, at most ``PART`` at a time; raise a UsageError for a fault.

    A folder, or a file named ``.parquet``, is parquet; any other file has json lines, in which a
    history without an id gets its number, from 0.
    """
    if Path(file).suffix != ".parquet" and not os.path.isdir(file):
        histories = _read_lines(file)
        while part := list(islice(histories, PART)):
            yield part
        return
    with name_read_errors(file):
        data = ds.dataset(str(file), format="parquet")
        require_columns(data.schema.names, file)
        names = [name for name in KEYS if name in data.schema.names]
        for batch in data.to_batches(names, batch_size=PART, batch_readahead=1):
            batch.validate(full=True)  # a damaged file may hold invalid text
            if len(batch):
                yield pa.Table.from_batches([batch])


def _read_lines(file: str | Path) -> Iterator[History]:
    """Yield the histories of a file of json lines."""
    with name_read_errors(file), open(file, encoding="utf-8-sig") as lines:
        num_histories = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    history = History.model_validate_json(line)
                except ValidationError as error:
                    raise UsageError(describe_invalid(error, f"{file}, line {number}")) from None
                history.id = num_histories if history.id is None else history.id
                num_histories += 1
                yield history


@contextmanager
def name_read_errors(file: str | Path) -> Iterator[None]:
    """Turn errors of reading a file into a UsageError that names it."""
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
