"""Recommendations to all users as a folder of parts, so that a job that was stopped resumes.

In: a run, and the users of its dataset or parquet files of histories. Out: ``part-00000.parquet``,
``part-00001.parquet``, ... and ``_job/manifest.json``, which says what the parts are made from. A
part is written whole or not at all, by one process. Processes of this machine are in
``part_workers.py``, a Ray cluster in ``runs/cluster.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch

from recbole_pos.config.arguments import IndexArguments, PartArguments, list_changed
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.device import count_cores
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.experiment.run import Catalogue
from recbole_pos.files import digest_file, lock_folder, remove_unfinished, write_json
from recbole_pos.reporter import Reporter
from recbole_pos.serve.histories import KEYS, Histories, require_columns
from recbole_pos.serve.recommend import (
    ListOptions,
    load_model,
    name_read_errors,
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

JOB_FOLDER = "_job"  # readers of parquet folders, such as pandas, skip names that begin with _
_PATHS = ("run_dir", "histories", "items", "exclude", "data_path", "item_vectors")  # of ListOptions


@dataclass(frozen=True)
class PartJob:
    """What a process needs to know to write any part; it is sent to other processes.

    Attributes:
        options: what is recommended; its paths are absolute, since other machines start elsewhere.
        out: folder of the parts, as an absolute path.
        part_rows: number of users or histories in a part; the last part may have fewer.
        packed_code: models and schemes of the user's own code, for processes that lack them.
        num_threads: threads of each process; None leaves what torch chose.
    """

    options: ListOptions
    out: str
    part_rows: int
    packed_code: bytes = b""
    num_threads: int | None = None


def recommend_to_files(
    settings: PartArguments,
    options: ListOptions,
    out: str | Path | None,
    users: Sequence[str] | None = None,
) -> Path:
    """Write recommendations as the command does: one file or, with ``part_rows``, many parts.

    Args:
        settings: how parts are written, if any, and whether there is an index.
        options: what is recommended.
        out: the file, or the folder of parts; None for a file in the folder of the run.
        users: names of users; ``["all"]`` or None for all.

    Returns:
        The file, or the folder of parts.

    Raises:
        UsageError: if parts are asked for without the folder or their size, or for some users only.
    """
    users = None if users == ["all"] else users
    # The index finds nearly all of the best items, faster than an exact search. ``index_recall`` is
    # the least share of them that it must find.
    if settings.index is not None:
        options = replace(options, item_index=IndexArguments(settings.index, settings.index_recall))
    # Without settings of parts, write one file. ``list_changed`` returns the names of the settings
    # that the user has changed; those of the index are for one file, too.
    part_settings = set(list_changed(settings)) - {"index", "index_recall"}
    if not part_settings:
        return write_recommendations(options, out, users)

    # Write parts. Other processes, which may write some of them, may have another working
    # directory, so all paths in the options are made absolute.
    if settings.part_rows is None:
        raise UsageError("--workers, --part and --address need --part_rows, such as 100000")
    if out is None or users is not None:
        raise UsageError("--part_rows: needs the folder --out, and --users all or --histories")
    paths = {name: getattr(options, name) for name in _PATHS}
    absolute = {name: os.path.abspath(path) for name, path in paths.items() if path is not None}
    job = PartJob(replace(options, **absolute), os.path.abspath(out), settings.part_rows)
    return recommend_in_parts(job, settings)


def recommend_in_parts(job: PartJob, settings: PartArguments) -> Path:
    """Write the parts of a job that its folder lacks; the same call resumes what was stopped.

    Args:
        job: what to recommend, and where to write it.
        settings: ``workers``, number of processes on this machine; or ``part``, where ``2/8``
            writes the second of eight shares of the parts, so that a scheduler can start eight such
            commands on any machines that reach the folder; or ``address`` of a Ray cluster, whose
            machines then write the parts.

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
    keep_freed_memory()  # else each batch asks the system for memory anew, which takes time
    # The writer loads the model, and counts the users or histories, and so the parts.
    reporter, out = Reporter(), Path(job.out)
    writer = PartWriter(job, reporter)
    make_folder(out / JOB_FOLDER)
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        # A scheduler runs several commands side by side, each on its share of the parts. Any other
        # command locks the folder, so that a second one is refused while this one writes.
        if settings.part is None:
            stack.enter_context(lock_folder(out / JOB_FOLDER, "written"))
        # The manifest says what the parts are made from, so that parts of other jobs are not mixed.
        _keep_manifest(out, writer.describe())

        # Share 2 of 8 has the parts 1, 9, 17, ... of all; those that are there are not written.
        missing = writer.list_missing()
        if len(missing) < writer.num_parts:
            num_there = writer.num_parts - len(missing)
            reporter.line(f"{out}: {num_there:,} of {writer.num_parts:,} parts are there already")
        share = [number for number in missing if number % num_shares == share_number - 1]
        task = stack.enter_context(reporter.task("recommending (parts)", len(share)))
        for part_counts in _write_all(job, writer, share, settings):
            counts.update(part_counts)
            task.advance(part_counts["users"])  # one more part, with the users for the speed

    report_counts(counts, writer.trained, reporter)
    if counts["refused"]:
        reporter.warning(
            f"{counts['refused']:,} histories get no answer: they lack times that the model reads, "
            "or ask before their newest interaction"
        )
    num_missing = len(writer.list_missing())
    state = f"{num_missing:,} parts are missing" if num_missing else "complete"
    reporter.line(f"{out}: {writer.num_parts:,} parts, {state}")
    return out


def _write_all(
    job: PartJob, writer: PartWriter, numbers: list[int], settings: PartArguments
) -> Iterator[Counter[str]]:
    """Write some parts of a job in this or in other processes.

    Args:
        job: what to recommend, and where to write it.
        writer: the writer of this process, which has loaded the model.
        numbers: numbers of the parts, from 0.
        settings: the number of processes on this machine, or the address of a Ray cluster.

    Yields:
        For each part, once it is written, its counts, such as the number of its users.
    """
    if not numbers:
        return
    address, workers = settings.address, settings.workers
    if address is not None:  # processes on the machines of a Ray cluster
        from recbole_pos.runs.cluster import run_tasks  # imports Ray, which takes a second

        job = _complete_job(job, writer.trained, num_threads=1)
        outcomes = run_tasks(try_part, job, numbers, address)
    elif workers > 1:  # processes of this machine
        from recbole_pos.serve.part_workers import run_workers

        num_threads = max(1, count_cores() // workers)
        job = _complete_job(job, writer.trained, num_threads)
        outcomes = run_workers(try_part, job, numbers, workers)
    else:  # this process
        outcomes = map(writer.write, numbers)

    # An outcome is the counts of a part, or the error that another process had.
    for outcome in outcomes:
        if isinstance(outcome, PosError):
            raise outcome
        yield outcome


def _complete_job(job: PartJob, trained: Recommender, num_threads: int) -> PartJob:
    """Return a job that can be sent to other processes, each of which loads the model again.

    The job gets what they need: the folder of the data, the code of custom models, and a number of
    threads.

    Args:
        job: what to recommend, and where to write it.
        trained: the model as this process has loaded it, with its configuration.
        num_threads: number of threads that torch takes in each process.
    """
    # The folder of the data is given by the user or found: ``config["data_path"]`` is the folder of
    # the dataset itself, and the option wants the one above it.
    dataset_folder = Path(trained.config["data_path"]).resolve()
    data_path = job.options.data_path or str(dataset_folder.parent)
    return replace(
        job,
        options=replace(job.options, data_path=data_path),
        packed_code=pack(trained.config["model"]),  # code of the user's models as bytes
        num_threads=num_threads,
    )


def try_part(job: PartJob, number: int) -> Counter[str] | PosError:
    """Recommend to the users or histories of one part, and write its file.

    Other processes than the command's call this. Their errors are returned, not raised: a raised
    one would reach the command as a text with a traceback.

    Args:
        job: what to recommend, and where to write it.
        number: number of the part, from 0.

    Returns:
        Counts, such as that of the users; or the error, which the command then raises.
    """
    try:
        # ``get_writer`` loads the model at the first call in a process, and then remembers it.
        return get_writer(job).write(number)
    except PosError as error:
        return error
    except Exception as error:  # for example of the user's own model
        return PosError(f"part {number}: {type(error).__name__}: {error}")


@lru_cache(maxsize=1)
def get_writer(job: PartJob) -> PartWriter:
    """Return the writer of a job; a process loads the model once for all its parts."""
    # The cache keeps one writer, by its job, which is frozen and so can be a key.
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
                written at different times, and "now" would differ between them.
        """
        # Models of the user's own code, which this process may lack, come with the job.
        unpack(job.packed_code)
        if job.num_threads is not None:
            torch.set_num_threads(job.num_threads)
        self.job = job
        self.trained, self.choice = load_model(job.options, reporter)
        # reads_request: the model was trained with request_time: target
        if self.trained.scorer.reads_request and job.options.at in (None, "now"):
            raise UsageError(
                f"at: {self.trained.config['model']} reads the time of the request, which must be "
                "the same in all parts; give --at a date or a number"
            )

        self.source: UserSource | HistorySource
        if job.options.histories is None:
            self.source = UserSource(self.trained)
        else:
            self.source = HistorySource(self.trained, job.options.histories)
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
        """Return what decides the content of the parts, in plain values, for the manifest.

        Weights, data and the files of options are given by digests (hashes) of their content: parts
        that were made from other content must not be mixed.

        Returns:
            Name -> number, text, or None for an option that is not given.
        """
        options, index = self.job.options, self.trained.scorer.index
        # ``require`` refuses a folder without a run; ``source`` has the users or histories. An
        # approximate index reads ``num_probes`` of its lists of items, and finds the share
        # ``recall`` of the best items.
        facts = {
            "model": digest_file(RunFolder(options.run_dir).require().checkpoint),
            "data": _digest_data(self.trained.dataset),
            "input": self.source.digest(),
            "version": __version__,
            "k": options.k,
            "exclude_seen": self.trained.hides_seen(options.exclude_seen),
            "at": options.at,
            "because": options.because,
            "index": None if index is None else [index.num_probes, index.recall],
            "part_rows": self.job.part_rows,
            "users": len(self.source),
            "parts": self.num_parts,
        }
        for name in ("items", "exclude", "item_vectors"):
            facts[name] = _digest_option(getattr(options, name))
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

    def digest(self) -> str:
        """Return the digest of the names; their interactions are in the digest of the data."""
        return _digest(self.names)


class HistorySource:
    """The histories in a parquet file, or in a folder of them, by number from 0.

    A parquet file is divided into row groups, which are read whole. A part reads only the groups
    that it needs, so memory does not grow with the files.

    Attributes:
        data: pyarrow's view of the files.
        row_groups: the row groups of all files in order, each with its number of histories.
        schema: the columns to read, with their types in the first file.
    """

    def __init__(self, trained: Recommender, path: str) -> None:
        """Read which row groups the files have; parquet lists them at the end of each file.

        Args:
            trained: the model, which reads the histories.
            path: the parquet file, or a folder of them.

        Raises:
            UsageError: if a file is no parquet, or its columns are not those of histories.
        """
        self.trained, self.path = trained, path
        if not (path.endswith(".parquet") or os.path.isdir(path)):
            raise UsageError(
                f"histories: {path}: parts are read from parquet (a file .parquet or a folder), "
                "which can be read from the middle"
            )
        with name_read_errors(path):
            self.data = ds.dataset(path, format="parquet")
            require_columns(self.data.schema.names, path)
            # pyarrow calls a file, or a part of one, a fragment. Its ``row_groups`` are facts about
            # the row groups in it, of which each fragment here has one, such as its number of rows.
            self.row_groups = [
                (fragment, fragment.row_groups[0].num_rows)
                for file in self.data.get_fragments()
                for fragment in file.split_by_row_group()
            ]
        # KEYS are the columns that a history may have; others are not read.
        columns = [name for name in KEYS if name in self.data.schema.names]
        self.schema = pa.schema([self.data.schema.field(name) for name in columns])

    def __len__(self) -> int:
        return sum(num_rows for _, num_rows in self.row_groups)

    def read(self, start: int, stop: int) -> Histories:
        """Return the histories from number ``start`` up to ``stop``, without ``stop``, as arrays.

        Only the row groups that have some of them are read. With row groups of 100, 100 and 50
        histories, 150 to 220 are the rows from 50 of the second group and the first 20 of the
        third. Histories without an id get their number.

        Raises:
            UsageError: for a file that cannot be read, or a malformed history.
        """
        tables = [self.schema.empty_table()]  # so that there is something to concatenate
        num_before = 0  # histories in the row groups before this one
        with name_read_errors(self.path):
            for group, num_rows in self.row_groups:
                # The rows of this group that are asked for: from ``first`` up to ``end``.
                first, end = max(start - num_before, 0), min(stop - num_before, num_rows)
                num_before += num_rows
                if first < end:  # else no row of this group is asked for
                    table = group.to_table(self.schema)
                    table.validate(full=True)  # a damaged file may hold invalid text
                    tables.append(table[first:end])

        # Without a column of ids, the histories get their numbers.
        histories = pa.concat_tables(tables)
        if "id" not in self.schema.names:
            histories = histories.append_column("id", pa.array(range(start, stop), pa.int64()))
        try:
            return self.trained.read(histories)
        except UsageError as error:
            raise UsageError(f"{self.path}, counted from {start:,}: {error}") from error

    def digest(self) -> str:
        """Return a digest (hash) of the files, by which the job sees that they have changed.

        It is made of their names, sizes and times of change. Their content, which may be a
        terabyte, is not read.
        """
        files = [(Path(file), os.stat(file)) for file in self.data.files]
        return _digest(f"{file.name} {facts.st_size} {facts.st_mtime:.0f}" for file, facts in files)


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
    """Return a digest (hash) of all interactions and attributes of a dataset.

    The digests in ``dataset.identity`` are of the training data; this one is also of interactions
    that the dataset has gained since. The return value is None for a Catalogue, which a model that
    was loaded without its dataset has: its recommendations depend on no data but names of items.
    """
    if isinstance(dataset, Catalogue):
        return None
    # ``offsets`` are where the interactions of each user begin; ``tables`` have the fields of
    # interactions, users and items, whose ids stand for the names in ``field2id_token``.
    digest = hashlib.blake2b(np.ascontiguousarray(dataset.log.offsets).data, digest_size=16)
    for table in dataset.tables.values():
        for field in sorted(table):
            digest.update(_digest(dataset.field2id_token.get(field, ())).encode())
            digest.update(np.ascontiguousarray(table[field]).ravel().data)
    return digest.hexdigest()


def _digest_option(path: str | None) -> str | None:
    """Return a digest (hash) of the file that an option names; None if the option is not given.

    Vectors in a ``.npy`` file have their names in a ``.txt`` file beside it, which counts, too.
    """
    if path is None:
        return None
    files = [Path(path), Path(path).with_suffix(".txt")]
    with name_read_errors(path):
        # dict.fromkeys: once, if the file is a .txt itself
        return _digest([digest_file(file) for file in dict.fromkeys(files) if file.is_file()])
