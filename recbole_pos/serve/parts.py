"""Recommendations to all users as a folder of parts, so that a job that was stopped resumes.

In: a run, and the users of its dataset or parquet files of histories. Out: ``part-00000.parquet``,
``part-00001.parquet``, ... and ``_job/manifest.json``, which says what the parts are made from. A
part is written whole or not at all, by one process: this one, others, or those of a Ray cluster.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recbole_pos.config.arguments import PartArguments, list_changed
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.data.item_vectors import digest_content
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.device import count_cores
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.experiment.run import Catalogue
from recbole_pos.files import digest_file, lock_folder, remove_unfinished, write_json
from recbole_pos.reporter import Reporter
from recbole_pos.serve.histories import Histories
from recbole_pos.serve.recommend import (
    HistorySource,
    ListOptions,
    is_parquet,
    load_model,
    open_writer,
    read_at,
    report_counts,
    write_lists,
    write_recommendations,
)
from recbole_pos.serve.recommender import Recommender
from recbole_pos.tables.storage import keep_freed_memory
from recbole_pos.values import shown
from recbole_pos.version import __version__

_PATHS = ("run_dir", "histories", "items", "exclude", "item_vectors")  # of ListOptions
JOB_FOLDER = "_job"  # readers of parquet folders, such as pandas, skip names that begin with _


@dataclass(frozen=True)
class PartJob:
    """What a process needs to know to write any part; it is sent to other processes.

    Attributes:
        options: what is recommended.
        out: folder of the parts.
        part_rows: number of users or histories in a part; the last part may have fewer.
    """

    options: ListOptions
    out: str
    part_rows: int


def recommend_to_files(
    settings: PartArguments,
    options: ListOptions,
    out: str | Path | None,
    users: Sequence[str] | None = None,
) -> Path:
    """Write recommendations as the command does: one file or, with ``part_rows``, many parts.

    Args:
        settings: how parts are written, if any.
        options: what is recommended.
        out: the file, or the folder of parts; None for a file in the folder of the run.
        users: names of users; ``["all"]`` or None for all.

    Returns:
        The file, or the folder of parts.

    Raises:
        UsageError: if parts are asked for without the folder or their size, or for some users only.
    """
    users = None if users == ["all"] else users
    if not list_changed(settings):  # names of the settings that the user has changed
        return write_recommendations(options, out, users)

    if settings.part_rows is None:
        raise UsageError("--workers, --part and --address need --part_rows, such as 100000")
    if out is None or users is not None:
        raise UsageError("--part_rows: needs the folder --out, and --users all or --histories")
    return recommend_in_parts(PartJob(options, str(out), settings.part_rows), settings)


def recommend_in_parts(job: PartJob, settings: PartArguments) -> Path:
    """Write recommendations to all users, or to all histories of a file, as a folder of files.

    A part is some of the users or histories, such as 100,000, and the file of what is recommended
    to them. Parts that the folder has already are not written again, so that the same call resumes
    a job that was stopped.

    Args:
        job: what to recommend, how many users or histories are in a part, and the folder.
        settings: ``workers``, number of processes that write parts side by side; or ``part``,
            where ``2/8`` writes the second of eight shares of the parts, so that a scheduler can
            start eight such commands on any machines that reach the folder; or ``address`` of a Ray
            cluster, whose machines then write the parts.

    Returns:
        The folder.

    Raises:
        UsageError: if an argument is wrong, or the folder holds parts of another job.
        StorageError: if a part cannot be written; finished parts stay.
    """
    for name, number in (("part_rows", job.part_rows), ("workers", settings.workers)):
        if number < 1:
            raise UsageError(f"{name}: expected 1 or more, found {number}")
    share_number, num_shares = _read_share(settings.part)  # "2/8" -> 2, 8; without it 1, 1

    # The writer loads the model, and counts the users or histories, and so the parts.
    keep_freed_memory()  # else each batch asks the system for memory anew, which takes time
    reporter, out = Reporter(), Path(job.out)
    writer = PartWriter(job, reporter)

    # Lock the folder, so that a second command is refused while this one writes. Commands for
    # shares run side by side, and each writes other parts, so that they need no lock.
    make_folder(out / JOB_FOLDER)
    lock = nullcontext() if settings.part else lock_folder(out / JOB_FOLDER, "written")
    with lock:
        # The manifest says what the parts are made from, so that parts of other jobs are not mixed.
        _keep_manifest(out, writer.describe())
        missing = writer.list_missing()
        if len(missing) < writer.num_parts:
            num_there = writer.num_parts - len(missing)
            reporter.line(f"{out}: {num_there:,} of {writer.num_parts:,} parts are there already")

        # Share 2 of 8 has the parts 1, 9, 17, ... of all.
        share = [number for number in missing if number % num_shares == share_number - 1]
        counts = _write_all(writer, share, settings, reporter)

    report_counts(counts, writer.trained, reporter)
    num_missing = len(writer.list_missing())
    state = f"{num_missing:,} parts are missing" if num_missing else "complete"
    reporter.line(f"{out}: {writer.num_parts:,} parts, {state}")
    return out


def _write_all(
    writer: PartWriter, numbers: list[int], settings: PartArguments, reporter: Reporter
) -> Counter[str]:
    """Write some parts of a job in this or in other processes, and return what they have in all.

    Args:
        writer: the writer of this process, which has loaded the model.
        numbers: numbers of the parts, from 0.
        settings: the address of a Ray cluster, or the number of processes on this machine; with 1
            it is this process.
        reporter: shows how many parts are written.

    Returns:
        Counts, such as the number of users, of all these parts together.
    """
    counts_by_part: Iterator[Counter[str]] = map(writer.write, numbers)  # as the loop asks for them
    if settings.address is not None and numbers:
        counts_by_part = _write_on_cluster(writer, numbers, settings.address)
    elif settings.workers > 1 and numbers:
        counts_by_part = _write_in_processes(writer, numbers, settings.workers)

    counts: Counter[str] = Counter()
    with reporter.task("recommending (parts)", len(numbers)) as task:
        for part_counts in counts_by_part:
            counts.update(part_counts)
            task.advance(part_counts["users"])  # one more part, with the users for the speed
    return counts


def _write_in_processes(
    writer: PartWriter, numbers: list[int], num_workers: int
) -> Iterator[Counter[str]]:
    """Write some parts of a job in other processes, each of which loads the model again.

    Args:
        writer: the writer of this process.
        numbers: numbers of the parts, from 0.
        num_workers: number of processes.

    Yields:
        For each part, in the order of ``numbers``, its counts, such as the number of its users.

    Raises:
        PosError: if a process was killed, for example by the system when memory is full.
    """
    packed_code = pack(writer.trained.config["model"])  # code of the user's models as bytes
    num_threads = max(1, count_cores() // num_workers)
    write_part = partial(_write_part, writer.job, packed_code, num_threads)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    try:
        with ProcessPoolExecutor(num_workers, context, initializer=_end_with_command) as pool:
            yield from pool.map(write_part, numbers)
    except BrokenProcessPool as error:
        raise PosError(
            "a process was killed, perhaps for its memory; use fewer --workers. What is written "
            "stays, and the same command resumes"
        ) from error


def _write_on_cluster(
    writer: PartWriter, numbers: list[int], address: str
) -> Iterator[Counter[str]]:
    """Write some parts of a job as tasks of a Ray cluster, whose processes load the model again.

    Args:
        writer: the writer of this process.
        numbers: numbers of the parts, from 0.
        address: ``auto`` or HOST:PORT of the cluster.

    Yields:
        For each part, in the order of ``numbers``, its counts, such as the number of its users.
    """
    from recbole_pos.runs.cluster import run_tasks  # imports Ray, which takes a second

    # Processes of Ray start in another folder, so they get absolute paths. The configuration has
    # the folder of the dataset, and the option ``data_path`` is the folder that holds it.
    job, config = writer.job, writer.trained.config
    given = {name: getattr(job.options, name) for name in _PATHS}
    paths = {name: os.path.abspath(path) for name, path in given.items() if path is not None}
    paths["data_path"] = os.path.dirname(os.path.abspath(config["data_path"]))
    job = replace(job, options=replace(job.options, **paths), out=os.path.abspath(job.out))
    return run_tasks(_write_part, (job, pack(config["model"]), 1), numbers, address)


def _end_with_command() -> None:
    """Start a thread that ends this process as soon as the command that started it has ended.

    A command that is killed cannot end its processes itself, and they would wait for ever.
    """

    def end() -> None:
        command = multiprocessing.parent_process()
        assert command is not None
        command.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _write_part(job: PartJob, packed_code: bytes, num_threads: int, number: int) -> Counter[str]:
    """Write a part in another process than that of the command, and return its counts.

    Args:
        job: what to recommend, and where to write it.
        packed_code: models and schemes of the user's own code, which this process lacks.
        num_threads: number of threads that torch takes.
        number: number of the part, from 0.
    """
    return _load_writer(job, packed_code, num_threads).write(number)


@lru_cache(maxsize=1)  # so that a process loads the model once for all its parts
def _load_writer(job: PartJob, packed_code: bytes, num_threads: int) -> PartWriter:
    """Return the writer of a job; the arguments are those of :func:`_write_part`."""
    unpack(packed_code)
    torch.set_num_threads(num_threads)
    return PartWriter(job, Reporter(enabled=False))


class PartWriter:
    """A trained model, and the users or histories of a job, of which it can write every part.

    Attributes:
        trained: the model.
        choice: the items that it may recommend.
        source: the users or histories.
        num_parts: number of parts; one, without rows, where there is nobody to recommend to.
    """

    def __init__(self, job: PartJob, reporter: Reporter) -> None:
        """Load the model, and find out how many users or histories there are.

        Args:
            job: what to write.
            reporter: prints what the model does not know, unless it is switched off.

        Raises:
            UsageError: if the model reads the time of the request and none is fixed: parts are
                written at different times, and the present would differ between them.
        """
        self.job = job
        self.trained, self.choice = load_model(job.options, reporter)
        # reads_request: the model was trained with request_time: target
        if self.trained.scorer.reads_request and job.options.at is None:
            raise UsageError(
                f"at: {self.trained.config['model']} reads the time of the request, which must be "
                "the same in all parts; give --at a date or a number"
            )

        self.source: UserSource | HistorySource
        if job.options.histories is None:
            self.source = UserSource(self.trained)
        elif is_parquet(job.options.histories):
            self.source = HistorySource(self.trained, job.options.histories)
        else:
            raise UsageError(
                f"histories: {job.options.histories}: parts are read from parquet (a file .parquet "
                "or a folder), which can be read from the middle"
            )
        self.num_parts = max(1, -(-len(self.source) // job.part_rows))  # rounded up

    def list_missing(self) -> list[int]:
        """Return the numbers of the parts, from 0, that the folder of the job lacks."""
        numbers = range(self.num_parts)
        return [number for number in numbers if not find_part(self.job.out, number).is_file()]

    def write(self, number: int) -> Counter[str]:
        """Write the part of the given number, from 0, and return its counts.

        The counts are those of :func:`recbole_pos.serve.recommend.write_lists`.
        """
        # Read the users or histories of this part.
        # With 100 in a part, part 2 has the numbers 200 to 299.
        options, trained = self.job.options, self.trained
        start = number * self.job.part_rows
        stop = min(start + self.job.part_rows, len(self.source))
        histories = trained.add_request_time(self.source.read(start, stop), read_at(options.at))

        # Recommend to them: ``write`` adds a batch of recommendations to the file, which appears
        # only when it is complete.
        file = find_part(self.job.out, number)
        remove_unfinished([file])  # of a process that was killed while it wrote this part
        with open_writer(file) as write:
            return write_lists(trained, self.choice, options, histories, write)

    def describe(self) -> dict[str, Any]:
        """Return what decides the content of the files of recommendations (parts) of this job.

        A manifest in the folder keeps it, so that parts of other jobs are not mixed with these.
        Weights, data and the files of options are given by digests (hashes) of their content.

        Returns:
            Name -> number, text, list of numbers, or None for an option that is not given.
        """
        # An approximate index of items, if there is one, finds the share ``recall`` of the best
        # items by reading ``num_probes`` of its lists.
        options, index = self.job.options, self.trained.scorer.index
        run = RunFolder(options.run_dir).require()  # an error if it is no folder of a run
        facts = {
            "model": digest_file(run.checkpoint),
            "data": _digest_data(self.trained.dataset),
            "input": _digest(self.source.list_facts()),
            "version": __version__,
            "k": options.k,
            "exclude_seen": self.trained.hides_seen(options.exclude_seen),
            "at": options.at,  # time of the requests
            "because": options.because,  # number of reasons for each item
            "index": None if index is None else [index.num_probes, index.recall],
            "part_rows": self.job.part_rows,
            "users": len(self.source),
            "parts": self.num_parts,
        }
        for name in ("items", "exclude", "item_vectors"):  # options that name files
            path = getattr(options, name)
            facts[name] = digest_content(path) if path else None
        return facts


class UserSource:
    """The users of a dataset that have an interaction, in the order of their ids.

    Attributes:
        names: their names.
    """

    def __init__(self, trained: Recommender) -> None:
        """List the users, as :meth:`Recommender.recommend` does if none are named."""
        self.trained, self.names = trained, trained.list_users()

    def __len__(self) -> int:
        return len(self.names)

    def read(self, start: int, stop: int) -> Histories:
        """Return the histories of the users from number ``start`` up to ``stop``."""
        return self.trained.read_users(self.names[start:stop])

    def list_facts(self) -> list[str]:
        """Return the names, by which a job sees whether it has the same users as before."""
        return self.names


def find_part(out: str | Path, number: int) -> Path:
    """Return the path of the part of the given number, from 0."""
    return Path(out) / f"part-{number:05d}.parquet"


def _keep_manifest(out: Path, description: dict[str, Any]) -> None:
    """Write the description of a job into its folder, or require that the one there is the same.

    Args:
        out: folder of the parts.
        description: what decides the content of the parts, see :meth:`PartWriter.describe`.

    Raises:
        UsageError: if the folder holds parts that were made from something else.
    """
    # JOB_FOLDER is the subfolder of all that is no part.
    file = out / JOB_FOLDER / "manifest.json"
    # Look for parts first: another command may be writing both, the manifest before the parts.
    has_parts = any(out.glob("part-*.parquet"))
    if not file.exists():
        if has_parts:
            raise UsageError(f"out: {out} holds parts without {file.name}; name another folder")
        write_json(file, description)
        return
    earlier = json.loads(file.read_text("utf-8"))
    for key, value in description.items():
        if earlier.get(key) != value:
            raise UsageError(
                f"out: {out} holds parts of another job: {key} was {shown(earlier.get(key))} and "
                f"is now {shown(value)}; name another folder, or delete this one"
            )


def _read_share(part: str | None) -> tuple[int, int]:
    """Return which share of the parts this command writes, and of how many shares.

    Args:
        part: ``--part``, such as ``2/8`` for (2, 8); None, if it is not given, for (1, 1).

    Raises:
        UsageError: for another text.
    """
    if part is None:
        return 1, 1
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(f"part: expected a share such as 2/8, from 1/8 to 8/8; found {part!r}")
    return int(number), int(count)


def _digest(texts: Iterable[str]) -> str:
    """Return a digest of texts, in hexadecimal."""
    # The zero byte ends each text, so that ["ab"] and ["a", "b"] have other digests.
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _digest_data(dataset: Any) -> str | None:
    """Return a digest (hash) of all interactions and attributes of a dataset; None without one.

    It is also of the interactions that the dataset has gained since the training.

    Args:
        dataset: the dataset; or a Catalogue, which has names of items only: that of a model that
            was loaded without its dataset.
    """
    if isinstance(dataset, Catalogue):
        return None

    # Where the interactions of each user begin.
    digest = hashlib.blake2b(np.ascontiguousarray(dataset.log.offsets).data, digest_size=16)
    # The tables of interactions, users and items, field by field: first the names that its ids
    # stand for (a field of numbers has none), then its values.
    for table in dataset.tables.values():
        for field in sorted(table):
            names = dataset.field2id_token.get(field, ())
            digest.update(_digest(names).encode())
            digest.update(np.ascontiguousarray(table[field]).ravel().data)
    return digest.hexdigest()
