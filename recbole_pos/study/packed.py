"""A packed study: one file with all that its tables need, so that no one has to train it again.

It has of every finished run configuration, validation by epoch, metrics, and ranks of the test
targets. It has no weights and no data: users, items and times are read from the dataset again. So
the file may be shared where the data may not, and serves only those who have the same data: runs
are identified by a digest of configuration, data and split.
"""

from __future__ import annotations

import io
import json
import lzma
import math
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import rank_table
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.files import whole, write_text
from recbole_pos.study import schema
from recbole_pos.study.configs import INDIFFERENT
from recbole_pos.study.expand import list_fits
from recbole_pos.study.plan import Plan
from recbole_pos.study.ranks import is_from_ranks, require_metrics
from recbole_pos.study.results import DONE
from recbole_pos.study.study_folder import KNOWN_FROM, StudyFolder
from recbole_pos.values import short, shown
from recbole_pos.yaml_files import read_yaml

_SEARCHES = "searches.json"
_FIT, _CONFIG, _METRICS, _RANKS = "fit.json", "config.yaml", "metrics.jsonl", "ranks.npy"
_MEMBER = re.compile(
    r"searches\.json|runs/(\w{1,64})/(?:fit\.json|config\.yaml|metrics\.jsonl|ranks\.npy)"
)
# Facts of a run that others may read: no paths, no names of machines, no times of the split.
_KEPT = (
    *("row", "seed", "stage", "trial", "commit", "model", "searched", "digest", "dataset"),
    *("best_valid", "test", "epochs", "best_epoch", "seconds", "targets_per_second", "parameters"),
    *("candidates", "valid_targets", "test_targets", "peak_rss_mb", "versions", "device"),
)
# Bounds of unpacking, whatever headers claim: bytes in all, bytes for each byte of the file (beyond
# the first 16 MiB), memory of the decompressor, and members.
_MOST, _MOST_TIMES, _MOST_MEMORY, _MOST_MEMBERS = 2**30, 200, 2**27, 100_000
_BLOCK = tarfile.BLOCKSIZE
# Bounds of members in bytes; config.yaml is not read, and ranks are read without a copy.
_MOST_BYTES = {_FIT: 2**20, _METRICS: 2**22, _SEARCHES: schema.MOST_BYTES}


class PackedStudy:
    """The runs of a file that :func:`pack` wrote.

    Args:
        path: path of the file.

    Attributes:
        used: digests of its runs that belong to the present study.

    Raises:
        UsageError: if the file is not a packed study, or is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = _read(self.path)
        runs = [name.split("/")[1] for name in self.files if name != _SEARCHES]
        self.fits = {digest: self._fit(digest) for digest in dict.fromkeys(runs)}
        if not self.fits:
            raise UsageError(
                f"--known: {self.path} is not a file of `compare --pack`: no run is in it"
            )
        searches = self.files.get(_SEARCHES, b"{}")
        self.searches = schema.parse(schema.DrawnByRow, searches, self._name(_SEARCHES))
        self.used: set[str] = set()

    def __contains__(self, digest: object) -> bool:
        return digest in self.fits

    def drawn(self, row: str, space: str, trial: int) -> dict[str, Any] | None:
        """Return the options that were sampled for a trial of a row, or None.

        Args:
            row: name of the row.
            space: digest of its space; samples from another space do not count.
            trial: number of the trial.
        """
        search = self.searches.get(row, {})
        if search.get("space") != space:
            return None
        return (search.get("drawn") or {}).get(str(trial))

    def fit(self, digest: str) -> dict[str, Any]:
        """Return the facts of a run, as :meth:`StudyFolder.fit` does, and their file."""
        return {**self.fits[digest], KNOWN_FROM: self.path.name}

    def ranks(self, digest: str, config: PosConfig, dataset: Any) -> pd.DataFrame | None:
        """Return the ranks of the targets of a run, as its folder has them; None if there are none.

        Args:
            digest: digest of a run in this file.
            config: configuration of the run, with paths of this machine.
            dataset: dataset of the configuration.

        Raises:
            UsageError: if the ranks do not fit the dataset, or the metrics of the run.
        """
        if (name := f"runs/{digest}/{_RANKS}") not in self.files:
            return None
        rank, place = self._array(name), self._name(name)
        event = np.flatnonzero((dataset.part == TEST) & dataset.split.is_target)
        if len(rank) != len(event):
            raise UsageError(f"{place}: {len(rank):,} ranks of {len(event):,} targets")
        if (last := rank.max(initial=0)) >= dataset.item_num:
            raise UsageError(f"{place}: a rank of {last:,} among {dataset.item_num:,} items")
        rank, test = rank.astype(np.int64), self.fits[digest].get("test") or {}
        require_metrics(test, rank, config["metric_decimal_place"], place)
        return rank_table(dataset, event, rank, config["timestamp_unit"])

    def restore(self, digest: str, folder: StudyFolder, config: PosConfig, dataset: Any) -> None:
        """Write a run into a study's folder, as if it had been trained there, but without weights.

        Arguments and errors are as of :meth:`ranks`; nothing is written if it raises.
        """
        ranks = self.ranks(digest, config, dataset)
        run = folder.run(digest)
        make_folder(run.path)
        run.write_config(config.plain)
        write_text(run.metrics, self.files[f"runs/{digest}/{_METRICS}"].decode())
        if ranks is not None:
            run.write_ranks(ranks)
        folder.write_fit(digest, self.fit(digest))  # last: it marks the run as done

    def __str__(self) -> str:
        """Return how many of its runs belong to the present study."""
        summary = f"{self.path}: {len(self.used)} of its {len(self.fits)} runs are of this study"
        others = "; the others have other options, data or seeds"
        return summary + (others if len(self.used) < len(self.fits) else "")

    def _fit(self, digest: str) -> dict[str, Any]:
        """Return the facts of a run that others may read, once all its files are validated.

        Raises:
            UsageError: naming the file and field that is wrong.
        """
        name, metrics, ranks = (f"runs/{digest}/{file}" for file in (_FIT, _METRICS, _RANKS))
        for needed in (name, metrics):
            if needed not in self.files:
                raise UsageError(f"{self._name(needed)}: it is missing")
        fit = schema.parse(schema.RunFacts, self.files[name], self._name(name))
        if (status := fit.get("status")) != DONE:
            raise UsageError(f"{self._name(name)}: status is {shown(status)}, expected {DONE!r}")
        schema.epochs(self.files[metrics], self._name(metrics))
        if ranks in self.files:
            self._array(ranks)
        elif any(map(is_from_ranks, fit.get("test") or {})):
            raise UsageError(f"{self._name(ranks)}: it is missing, and its run was tested")
        return {"status": DONE, **{key: fit[key] for key in _KEPT if key in fit}}

    def _array(self, name: str) -> np.ndarray:
        return schema.array(self.files[name], self._name(name))

    def _name(self, member: str) -> str:
        return f"{self.path} is damaged: {member}"


def require_place(path: str | Path) -> None:
    """Require before the training that a packed study can be written to a path.

    Raises:
        UsageError: if the path is a folder, or in none.
    """
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else f"is in no folder: there is no {file.parent}"
        raise UsageError(f"--pack: {file} {what}; name a file such as study.tar.xz")


def pack(plan: Plan, folder: StudyFolder, path: str | Path) -> int:
    """Write the finished runs of a study into one file; the same runs give the same bytes.

    Args:
        plan: plan of the study.
        folder: folder of the study.
        path: path of the file, by convention ending in ``.tar.xz``.

    Returns:
        The number of runs in the file.

    Raises:
        UsageError: if no run is finished.
    """
    current = folder.current(plan)
    digests = {current[fit.name] for fit in list_fits(plan) if fit.name in current}
    done = {digest: facts for digest in sorted(digests) if (facts := folder.fit(digest))}
    done = {digest: facts for digest, facts in done.items() if facts.get("status") == DONE}
    if not done:
        raise UsageError(f"--pack {path}: {folder.path} has no finished run")
    files: dict[str, bytes] = {}
    for digest, facts in done.items():
        for name, content in _iterate_files(facts, folder.run(digest)):
            files[f"runs/{digest}/{name}"] = content
    if searches := {row: search for row in plan.rows if (search := folder.search(row))}:
        files[_SEARCHES] = _bytes(searches)
    with whole(path, text=False) as file, tarfile.open(fileobj=file, mode="w:xz") as archive:
        # sorted by kind, since the files of one kind are alike and compress well together
        for name in sorted(files, key=lambda name: (name.split("/")[-1], name)):
            about = tarfile.TarInfo(name)
            about.size = len(files[name])
            archive.addfile(about, io.BytesIO(files[name]))
    return len(done)


def _iterate_files(facts: Mapping[str, Any], run: RunFolder) -> Iterable[tuple[str, bytes]]:
    """Yield names and contents of the packed files of a run, from its facts and folder."""
    yield _FIT, _bytes({"status": DONE, **{key: facts[key] for key in _KEPT if key in facts}})
    options = read_yaml(run.config).items()
    plain = {key: value for key, value in options if key not in INDIFFERENT}
    yield _CONFIG, yaml.safe_dump(plain, allow_unicode=True).encode()
    yield _METRICS, run.metrics.read_bytes() if run.metrics.is_file() else b""
    if run.ranks.is_file():
        rank = pd.read_parquet(run.ranks, columns=["rank"])["rank"].to_numpy()
        buffer = io.BytesIO()
        np.save(buffer, rank.astype(np.min_scalar_type(int(rank.max(initial=0)))))
        yield _RANKS, buffer.getvalue()


def _bytes(content: Any) -> bytes:
    return json.dumps(content, indent=1, default=str).encode()


def _read(path: Path) -> dict[str, Any]:
    """Return the files of an archive by name, without writing any.

    ``tarfile`` is not used, since it trusts the lengths in extended headers.

    Raises:
        UsageError: if the file is not a packed study, or exceeds a bound.
    """
    name = f"--known: {short(str(path))}"
    try:
        if not path.is_file():
            problem = "is not a file" if path.exists() else "does not exist"
            raise UsageError(f"{name} {problem}; name one that `compare --pack` wrote")
        most = min(_MOST, 2**24 + _MOST_TIMES * path.stat().st_size)
        unpack = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_MEMORY)
        content = unpack.decompress(path.read_bytes(), max_length=most + 1)
        if len(content) > most:
            raise UsageError(f"{name} has more than {most >> 20:,} MiB unpacked, too much for it")
        if not unpack.eof:
            raise EOFError("its end is missing")
        return dict(_members(memoryview(content)))
    except (OSError, ValueError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{name} is not a file of `compare --pack`: {reason}") from error


def _members(content: memoryview) -> Iterable[tuple[str, Any]]:
    """Yield names and contents of the files of a tar, whose names must be those of :func:`pack`.

    Raises:
        TarError: for anything else.
    """
    names: set[str] = set()
    start = 0
    while bytes(header := content[start : start + _BLOCK]).strip(b"\0"):
        about = tarfile.TarInfo.frombuf(bytes(header), "utf-8", "strict")
        start += _BLOCK
        if not _MEMBER.fullmatch(about.name) or about.type != tarfile.REGTYPE:
            raise tarfile.TarError(f"{shown(about.name)} is not one of its files")
        if about.name in names or len(names) == _MOST_MEMBERS:
            raise tarfile.TarError(f"{about.name} is there twice, or one of too many")
        names.add(about.name)
        if not 0 <= about.size <= len(content) - start:
            raise tarfile.TarError(f"{about.name} is cut off")
        file = about.name.split("/")[-1]
        if about.size > _MOST_BYTES.get(file, about.size):
            raise tarfile.TarError(f"{about.name} has {about.size:,} bytes")
        if file != _CONFIG:
            part = content[start : start + about.size]
            yield about.name, part if file == _RANKS else bytes(part)
        start += math.ceil(about.size / _BLOCK) * _BLOCK  # files fill whole blocks
