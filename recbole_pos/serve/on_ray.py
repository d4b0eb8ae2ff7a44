"""The recommendations of ``recommend.py`` by the machines of a Ray cluster, into a folder."""

from __future__ import annotations

import math
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch

from recbole_pos.config.plugins import pack, unpack
from recbole_pos.errors import PosError, StorageError, UsageError
from recbole_pos.files import whole_folder, writing
from recbole_pos.layers.catalogue import Choice
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import connect, stop
from recbole_pos.serve.histories import UNIT, Histories, is_parquet, list_units, read_tables
from recbole_pos.serve.recommend import BulkRequest, Counts, read_at, rename_fields, report_unknown
from recbole_pos.serve.recommender import Recommender

_FEWEST = 256  # least histories of a part: fewer would not pay for being sent
_PARTS = 4  # parts for each process, so that the last part does not take long
_RETRIES = 5  # times that a part is computed again whose process or machine is lost


def recommend_on_ray(
    request: BulkRequest,
    out: str | Path,
    address: str | None = None,
    processes: int | None = None,
) -> Path:
    """Write recommendations by many machines, as
    :func:`~recbole_pos.serve.recommend.write_recommendations` does by one.

    Every process loads the run once and takes a CPU. What a lost machine had not delivered is
    computed again by others. Run, data, histories and ``out`` must be reached by all machines by
    the same path.

    Args:
        request: what to recommend; histories in parquet.
        out: a folder for parquet files, in no order; it appears once all of them are written.
        address: address of the cluster, or auto; ``local`` or None starts Ray on this machine.
        processes: largest number of processes; the number of CPUs if None.

    Raises:
        UsageError: for what is wrong with arguments or histories, or if a machine does not find
            the run.
        StorageError: if the folder cannot be written.
    """
    folder, reporter, histories = Path(out).absolute(), Reporter(), request.histories
    if os.path.exists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"--out: {out} is there already; choose another folder")
    if histories is not None and not is_parquet(histories):
        raise UsageError(f"--histories: with --address, parquet is read; found {histories}")
    paths = {name: getattr(request, name) for name in ("run_dir", "data_path", "item_vectors")}
    paths = {name: path and str(Path(path).resolve()) for name, path in paths.items()}
    names, trained = request.names(), request.load(reporter)
    trained.require_k(request.k)
    trained.choice(names["items"], names["exclude"])
    report_unknown(trained, reporter, **names)
    users = trained.of_users(request.users).ids if histories is None else []
    total = len(users)
    if histories is not None:
        trained.read([])  # whether it can at all
        units = list_units(Path(histories).absolute(), UNIT)
        if not (total := sum(unit["end"] - unit["begin"] for unit in units)):
            raise UsageError(f"--histories: {histories} has none")
    has_joined = connect(address)
    try:
        with whole_folder(folder) as place:
            most = processes or max(1, int(ray.cluster_resources().get("CPU", 1)))
            size = min(UNIT, max(_FEWEST, math.ceil(total / (_PARTS * most))))
            if histories is None:
                units = [{"users": users[i : i + size]} for i in range(0, total, size)]
            else:
                units = list_units(Path(histories).absolute(), size)
            asked = {
                "request": replace(request, users=None, at=None, **paths),
                "at": read_at(request.at),
                "names": names,
                "packed": pack(trained.config["model"]),
                "place": str(place),
                "call": uuid.uuid4().hex,
            }
            counts = collect(_compute(units, asked, processes), place, total, reporter)
        counts.report(reporter, trained.config["model"], request.exclude_seen)
    except ray.exceptions.RayError as error:
        raise PosError(f"Ray: {str(error).strip().splitlines()[-1]}") from error
    finally:
        stop(has_joined)
    reporter.line(str(out))
    return Path(out)


def _compute(
    units: list[dict[str, Any]], asked: dict[str, Any], processes: int | None
) -> Iterator[dict[str, Any]]:
    """Yield the results of :func:`write_part` for all units, as soon as each is done.

    Args:
        units: the parts.
        asked: what to recommend, as of :func:`write_part`.
        processes: largest number of processes; no limit if None.
    """
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(write_part)
    shared, waiting = ray.put(asked), list(units)
    running: list[Any] = []
    while waiting or running:
        while waiting and len(running) < (processes or len(units)):
            running.append(task.remote(waiting.pop(), shared))
        done, running = ray.wait(running)
        yield from ray.get(done)


def write_part(unit: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Write the recommendations of a part into a file of its own, in a process of Ray.

    An error is returned, not raised, since Ray would wrap it in a long traceback.

    Args:
        unit: ``users``, or arguments of ``read_tables``.
        asked: what to recommend: ``request``, ``at``, ``names`` of items, the ``packed`` plugins
            and the ``place`` of the files.

    Returns:
        ``file``, the name of the file; ``error``, empty if there is none; and ``counts``.
    """
    file, counts, request = f"{uuid.uuid4().hex}.tmp", Counts(), asked["request"]
    try:
        trained, choice = _load(asked)
        place, by_user = Path(asked["place"]) / file, "users" in unit
        parts: Iterable[Histories] = (
            [trained.of_users(unit["users"])] if by_user else map(trained.read, read_tables(**unit))
        )
        with writing(place), ExitStack() as stack:
            writer = None
            for histories in parts:
                counts.unknown += int(histories.unknown.sum())
                histories = trained.requested(histories, asked["at"])
                options = request.k, request.exclude_seen, choice, request.because
                for part, seen in trained.parts(histories, *options):
                    counts.add(part, seen)
                    part = rename_fields(part, trained) if by_user else part
                    table = pa.Table.from_pandas(part, preserve_index=False)
                    if writer is None:
                        writer = stack.enter_context(pq.ParquetWriter(place, table.schema))
                    writer.write_table(table.cast(writer.schema))
    except (PosError, OSError) as error:
        return {"file": file, "error": str(error), "counts": counts}
    return {"file": file, "error": "", "counts": counts}


# id of the call that this process works for -> its model and items
_loaded: dict[str, tuple[Recommender, Choice]] = {}


def _load(asked: dict[str, Any]) -> tuple[Recommender, Choice]:
    """Return the model and the items to choose from, loaded once in each process.

    Raises:
        UsageError: naming the machine, if it cannot read the run or the folder.
    """
    if (call := asked["call"]) not in _loaded:
        torch.set_num_threads(1)
        try:
            if not Path(asked["place"]).is_dir():
                parent = Path(asked["place"]).parent
                raise UsageError(f"the folder of --out, {parent}, is not found")
            unpack(asked["packed"])
            trained = asked["request"].load(Reporter(False))
        except (PosError, OSError) as error:
            raise UsageError(
                f"machine {socket.gethostname()}: {error}; all machines must reach run, data and "
                "--out by the same path"
            ) from error
        _loaded.clear()
        _loaded[call] = trained, trained.choice(*asked["names"].values())
    return _loaded[call]


def collect(
    results: Iterable[dict[str, Any]], place: Path, total: int, reporter: Reporter
) -> Counts:
    """Keep the files of finished parts, and delete files that lost machines left behind.

    Args:
        results: results of :func:`write_part`.
        place: the folder of the files.
        total: how many users or histories there are.
        reporter: where progress is shown.

    Raises:
        UsageError: with the first error in the results.
        StorageError: if a file does not have as many rows as were written.
    """
    counts, files = Counts(), []
    with reporter.task("recommending", total) as task:
        for result in results:
            if result["error"]:
                raise UsageError(result["error"])
            if result["counts"].rows:
                files.append((place / result["file"], result["counts"].rows))
            counts.sum(result["counts"])
            task.advance(result["counts"].people)
    for number, (file, rows) in enumerate(files):
        try:
            rows_read = pq.read_metadata(file).num_rows
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"cannot read what a machine wrote: {error}") from error
        if rows_read != rows:
            raise StorageError(f"{file} has {rows_read:,} rows, {rows:,} were written")
        file.rename(place / f"part-{number:05}.parquet")
    for leftover in place.glob("*.tmp"):
        leftover.unlink()
    return counts
