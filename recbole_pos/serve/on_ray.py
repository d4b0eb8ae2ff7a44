"""The recommendations of ``recommend.py`` by the machines of a Ray cluster, into a folder."""

from __future__ import annotations

import logging
import math
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import torch

from recbole_pos.config.plugins import pack, unpack
from recbole_pos.errors import PosError, StorageError, UsageError
from recbole_pos.files import whole_folder, writing
from recbole_pos.runs.cluster import connect, stop
from recbole_pos.screen import Screen
from recbole_pos.serve.parquet import UNIT, count_of, is_parquet, tables_of, units_of
from recbole_pos.serve.recommend import (
    Counts,
    moment_of,
    named,
    read_names,
    tell_growth,
    tell_unknown,
)
from recbole_pos.serve.recommender import Recommender

_FEWEST = 256  # histories of a part: fewer would not pay for being sent
_PARTS = 4  # of a process, so that none is long alone at the end


def recommend_on_ray(
    run_dir: str | Path,
    out: str | Path,
    address: str | None = None,
    users: Sequence[str] | None = None,
    k: int = 10,
    exclude_seen: bool | None = None,
    items: str | Path | None = None,
    exclude: str | Path | None = None,
    histories: str | Path | None = None,
    processes: int | None = None,
    data_path: str | Path | None = None,
    at: str | None = None,
) -> Path:
    """As :func:`~recbole_pos.serve.recommend.write_recommendations`, by many machines.

    Every process loads the run once and takes a CPU. What a lost machine had not delivered is made
    again by others. Run, data, histories and ``out`` must be reached by all machines by the same
    path.

    Args:
        run_dir, users, k, exclude_seen, items, exclude, data_path, at: as there.
        out: a folder that takes its place once all of it is there; parquet files, in no order.
        address: of the cluster, or auto; None starts Ray on this machine.
        histories: a file or folder of parquet with columns ``id``, ``items`` (lists of names) and
            perhaps ``times`` (lists of numbers), instead of the users of the data.
        processes: how many at most; as many as there are CPUs if None.

    Raises:
        UsageError: for what is wrong with arguments or histories, or if a machine does not find
            the run.
        StorageError: if the folder cannot be written.
    """
    folder, screen = Path(out).absolute(), Screen()
    if os.path.exists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"--out: {out} is there already; choose another folder")
    if users is not None and histories is not None:
        raise UsageError("give users or histories, not both")
    if histories is not None and not is_parquet(histories):
        raise UsageError(f"--histories: with --address, parquet is read; found {histories}")
    source: dict[str, Any] = {
        "run_dir": str(Path(run_dir).resolve()),
        "data_path": None if data_path is None else str(Path(data_path).resolve()),
        "histories_only": histories is not None,
    }
    trained = Recommender.load(**source)
    tell_growth(trained.growth, screen)
    task: dict[str, Any] = {
        **source,
        "packed": pack(trained.config["model"]),
        "allowed": None if items is None else read_names(items),
        "excluded": None if exclude is None else read_names(exclude),
        "k": trained.require_k(k),
        "exclude_seen": exclude_seen,
        "at": moment_of(at),
    }
    trained.choice(task["allowed"], task["excluded"])
    tell_unknown(trained, screen, items=task["allowed"], exclude=task["excluded"])
    if histories is None:
        names = trained.of_users(users).ids
        total = len(names)
    else:
        trained.read([])  # whether it can at all
        if not (total := count_of(histories)):
            raise UsageError(f"--histories: {histories} has none")
    began = connect(address)
    try:
        with whole_folder(folder) as place, _quiet():
            most = processes or max(1, int(ray.cluster_resources().get("CPU", 1)))
            size = min(UNIT, max(_FEWEST, math.ceil(total / (_PARTS * most))))
            if histories is None:
                units = [{"users": names[i : i + size]} for i in range(0, total, size)]
            else:
                units = units_of(Path(histories).absolute(), size)
            # Ray's own reading and writing would wait for CPUs that these processes hold
            parts = ray.data.from_arrow([pa.Table.from_pylist([unit]) for unit in units])
            found = parts.map_batches(
                _Part,
                fn_constructor_kwargs={**task, "place": str(place)},
                batch_size=1,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=max(1, min(most, len(units)))),
                num_cpus=1,
            )
            counts = _collect(found, place, total, screen)
        counts.tell(screen, trained.config["model"], exclude_seen)
    except ray.exceptions.RayError as error:
        raise PosError(f"Ray: {str(error).strip().splitlines()[-1]}") from error
    finally:
        stop(began)
    screen.line(str(out))
    return Path(out)


class _Part:
    """A process: writes the recommendations of a part into a file of its own, and says so.

    What is wrong is said too, not raised, since Ray would make a page of it.
    """

    def __init__(self, run_dir: str, packed: bytes, place: str, **asked: Any) -> None:
        self.place, self.error = Path(place), ""
        torch.set_num_threads(1)
        host = f"machine {socket.gethostname()}"
        try:
            unpack(packed)
            self.trained = Recommender.load(
                run_dir, asked.get("data_path"), asked.get("histories_only", False)
            )
            self.k, self.exclude_seen, self.at = asked["k"], asked["exclude_seen"], asked.get("at")
            self.choice = self.trained.choice(asked["allowed"], asked["excluded"])
            if not self.place.is_dir():
                self.error = f"{host} does not find the folder of --out, {self.place.parent}"
        except (PosError, OSError) as error:
            self.error = f"{host}: {error}"
        if self.error:
            self.error += "; all machines must reach run, data and --out by the same path"

    def __call__(self, batch: pa.Table) -> pa.Table:
        (unit,) = batch.to_pylist()
        file, counts, error = f"{uuid.uuid4().hex}.tmp", Counts(), self.error
        if not error:
            try:
                counts = self._write(unit, self.place / file)
            except (PosError, OSError) as refused:
                error = str(refused)
        told = {"file": file, "error": error, **asdict(counts)}
        return pa.table({name: [value] for name, value in told.items()})

    def _write(self, unit: dict[str, Any], file: Path) -> Counts:
        trained, counts, by_user = self.trained, Counts(), "users" in unit
        asked = (
            [trained.of_users(unit["users"])] if by_user else map(trained.read, tables_of(**unit))
        )
        with writing(file), ExitStack() as opened:
            writer = None
            for some in asked:
                counts.unknown += int(some.unknown.sum())
                some = trained.requested(some, self.at)
                for part, again in trained.parts(some, self.k, self.exclude_seen, self.choice):
                    counts.add(part, again)
                    part = named(part, trained) if by_user else part
                    table = pa.Table.from_pandas(part, preserve_index=False)
                    if writer is None:
                        writer = opened.enter_context(pq.ParquetWriter(file, table.schema))
                    writer.write_table(table.cast(writer.schema))
        return counts


def _collect(found: Any, place: Path, total: int, screen: Screen) -> Counts:
    """Files that were delivered, each once, whatever was begun on machines that are lost."""
    counts, files = Counts(), []
    with screen.task("recommending", total) as task:
        for row in found.iter_rows():
            if row["error"]:
                raise UsageError(row["error"])
            if row["rows"]:
                files.append((row["file"], row["rows"]))
            counts.sum(Counts(**{name: row[name] for name in vars(counts)}))
            task.advance(row["people"])
    for number, (file, rows) in enumerate(files):
        try:
            written = pq.read_metadata(place / file).num_rows
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"cannot read what a machine wrote: {error}") from error
        if written != rows:
            raise StorageError(f"{place / file} has {written:,} rows, {rows:,} were written")
        (place / file).rename(place / f"part-{number:05}.parquet")
    for left in place.glob("*.tmp"):
        left.unlink()
    return counts


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Ray Data's bars and lines; ours say how far it is."""
    context, log = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    bars, level = context.enable_progress_bars, log.level
    context.enable_progress_bars = False
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        log.setLevel(level)
