"""A study in one file: what its tables are made of, so that no one has to train it again.

Of every finished run: configuration, validation by epoch, what it found, and where each test target
stood. No weights, and nothing of the log: neither users nor items nor times, which are read from
the data again. So the file may be given away where the data may not, and is of no use with others:
runs are found by the digest of what decides them, data and split among it.
"""

from __future__ import annotations

import io
import json
import lzma
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
from recbole_pos.study.expand import fits
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
# Bounds of what leaves the decompressor, whatever headers claim: bytes in all and for each byte of
# the file (beside the first 16 MiB), its memory, and members.
_MOST, _MOST_TIMES, _MOST_MEMORY, _MOST_MEMBERS = 2**30, 200, 2**27, 100_000
_BLOCK = tarfile.BLOCKSIZE
# Of each member; no one reads config.yaml, and ranks are looked at without a copy.
_MOST_BYTES = {_FIT: 2**20, _METRICS: 2**22, _SEARCHES: schema.MOST_BYTES}


class PackedStudy:
    """The runs of a file that :func:`pack` wrote.

    Args:
        path: path of the file.

    Attributes:
        used: digests of runs in here that a study has, too.

    Raises:
        UsageError: if it cannot be read as one.
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
        """Return what was drawn for a trial of a row from the same space; None if nothing was."""
        search = self.searches.get(row, {})
        if search.get("space") != space:
            return None
        return (search.get("drawn") or {}).get(str(trial))

    def fit(self, digest: str) -> dict[str, Any]:
        """Return the facts of a run, as :meth:`StudyFolder.fit`."""
        return {**self.fits[digest], KNOWN_FROM: self.path.name}

    def ranks(self, digest: str, config: PosConfig, dataset: Any) -> pd.DataFrame | None:
        """Return where the targets of a run stood, as its folder has it; None if it is not known.

        Args:
            digest: digest of the run, one of those in here.
            config: configuration of the run, with the places of this machine.
            dataset: dataset of the configuration, which the ranks are of.

        Raises:
            UsageError: if they cannot be of these data, or are not those that its metrics are of.
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
        """Write a run into a study's folder, as if it had been trained there, but for its weights.

        Takes the arguments of :meth:`ranks`, and raises as it does; nothing is written then.
        """
        ranks = self.ranks(digest, config, dataset)
        run = folder.run(digest)
        make_folder(run.path)
        run.write_config(config.plain)
        write_text(run.metrics, self.files[f"runs/{digest}/{_METRICS}"].decode())
        if ranks is not None:
            run.write_ranks(ranks)
        folder.write_fit(digest, self.fit(digest))  # from here on nothing trains it

    def __str__(self) -> str:
        """Return how much of it a study has."""
        summary = f"{self.path}: {len(self.used)} of its {len(self.fits)} runs are of this study"
        others = "; the others have other options, data or seeds"
        return summary + others * (len(self.used) < len(self.fits))

    def _fit(self, digest: str) -> dict[str, Any]:
        """Return the facts of a run, after all of it was validated."""
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
    """A file can be written there, which is better known before than after the training.

    Raises:
        UsageError: if not.
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
        How many runs are in it.

    Raises:
        UsageError: if no run is finished.
    """
    current = folder.current(plan)
    digests = {current[one.name] for one in fits(plan) if one.name in current}
    done = {digest: known for digest in sorted(digests) if (known := folder.fit(digest))}
    done = {digest: known for digest, known in done.items() if known.get("status") == DONE}
    if not done:
        raise UsageError(f"--pack {path}: {folder.path} has no finished run")
    files: dict[str, bytes] = {}
    for digest, known in done.items():
        for name, content in _iterate_files(known, folder.run(digest)):
            files[f"runs/{digest}/{name}"] = content
    if searches := {row: kept for row in plan.rows if (kept := folder.search(row))}:
        files[_SEARCHES] = _bytes(searches)
    with whole(path, text=False) as file, tarfile.open(fileobj=file, mode="w:xz") as archive:
        # alike files beside each other: most of a configuration is that of the next run
        for name in sorted(files, key=lambda name: (name.split("/")[-1], name)):
            about = tarfile.TarInfo(name)
            about.size = len(files[name])
            archive.addfile(about, io.BytesIO(files[name]))
    return len(done)


def _iterate_files(known: Mapping[str, Any], run: RunFolder) -> Iterable[tuple[str, bytes]]:
    yield _FIT, _bytes({"status": DONE, **{key: known[key] for key in _KEPT if key in known}})
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
    """Return the files in an archive, by name; nothing is written anywhere.

    Not by ``tarfile``, which believes extended headers about their own length.
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
    """Plain files of a tar with the names that :func:`pack` gives.

    Raises:
        TarError: for anything else.
    """
    found: set[str] = set()
    start = 0
    while bytes(header := content[start : start + _BLOCK]).strip(b"\0"):
        about = tarfile.TarInfo.frombuf(bytes(header), "utf-8", "strict")
        start += _BLOCK
        if not _MEMBER.fullmatch(about.name) or about.type != tarfile.REGTYPE:
            raise tarfile.TarError(f"{shown(about.name)} is not one of its files")
        if about.name in found or len(found) == _MOST_MEMBERS:
            raise tarfile.TarError(f"{about.name} is there twice, or one of too many")
        found.add(about.name)
        if not 0 <= about.size <= len(content) - start:
            raise tarfile.TarError(f"{about.name} is cut off")
        file = about.name.split("/")[-1]
        if about.size > _MOST_BYTES.get(file, about.size):
            raise tarfile.TarError(f"{about.name} has {about.size:,} bytes")
        if file != _CONFIG:
            part = content[start : start + about.size]
            yield about.name, part if file == _RANKS else bytes(part)
        start += -(-about.size // _BLOCK) * _BLOCK
