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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.item_vectors import keep_file_names
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import make_rank_table
from recbole_pos.experiment.folder import make_folder
from recbole_pos.files import atomic_write, write_text
from recbole_pos.runs import DONE
from recbole_pos.study.configs import INDIFFERENT
from recbole_pos.study.plan import Plan
from recbole_pos.study.ranks import is_from_ranks, require_metrics
from recbole_pos.study.study_folder import (
    KNOWN_FROM,
    RunFacts,
    StudyFolder,
    parse,
    parse_epochs,
)
from recbole_pos.values import short, shown
from recbole_pos.yaml_files import read_yaml

_FIT, _CONFIG, _METRICS, _RANKS = "fit.json", "config.yaml", "metrics.jsonl", "ranks.npy"
_MEMBER = re.compile(
    r"searches\.json|runs/(\w{1,64})/(?:fit\.json|config\.yaml|metrics\.jsonl|ranks\.npy)"
)
# Facts of a run that others may read: no paths, no names of machines, no times of the split.
_PUBLIC_FACTS = (
    *("row", "seed", "stage", "trial", "commit", "model", "searched"),
    *("digest", "dataset"),
    *("best_valid", "test", "epochs", "best_epoch", "seconds", "targets_per_second", "parameters"),
    *("candidates", "valid_targets", "test_targets", "peak_rss_mb", "versions", "device"),
)
# Bounds of unpacking, whatever headers claim: bytes in all, bytes for each byte of the file (beyond
# the first 16 MiB), memory of the decompressor, and members.
_MAX_BYTES, _MAX_RATIO, _MAX_MEMORY, _MAX_MEMBERS = 2**30, 200, 2**27, 100_000
# Bounds of members in bytes. Ranks are read without a copy; config.yaml and searches.json, which
# packs of 0.2 have, are not read.
_MAX_MEMBER_BYTES = {_FIT: 2**20, _METRICS: 2**22}
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([|<>][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((\d{1,12}),\), \} *\n",
    re.DOTALL,
)


class PackedStudy:
    """The runs of a file that :func:`pack` wrote; a UsageError refuses any other, or a damaged one.

    Attributes:
        fits: digest of a run -> its facts, as :meth:`StudyFolder.read_fit` returns them.
        used: digests of its runs that belong to the present study, which a scheduler adds.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the archive, and the facts of the runs in it."""
        self.path = Path(path)
        self.files = _read_archive(self.path)
        digests = dict.fromkeys(name.split("/")[1] for name in self.files)
        self.fits = {digest: self._read_fit(digest) for digest in digests}
        if not self.fits:
            raise UsageError(
                f"--known: {self.path} is not a file of `compare --pack`: no run is in it"
            )
        self.used: set[str] = set()

    def read_ranks(self, digest: str, config: PosConfig, dataset: Any) -> pd.DataFrame | None:
        """Return the table of ranks that the folder of a run has; None if the run has no ranks.

        A UsageError refuses ranks that do not fit the dataset, or the metrics of the run.

        Args:
            digest: digest of a run in this file.
            config: configuration of the run, with paths of this machine.
            dataset: dataset of the configuration.
        """
        name = f"runs/{digest}/{_RANKS}"
        if name not in self.files:
            return None
        rank = self._parse_ranks(name).astype(np.int64)
        prefix = self._describe_damage(name)
        targets = np.flatnonzero(dataset.split.find_targets(TEST))
        if len(rank) != len(targets):
            raise UsageError(f"{prefix}: {len(rank):,} ranks of {len(targets):,} targets")
        highest = rank.max(initial=0)
        if highest >= dataset.item_num:
            raise UsageError(f"{prefix}: a rank of {highest:,} among {dataset.item_num:,} items")
        metrics = self.fits[digest].get("test") or {}
        require_metrics(metrics, rank, config["metric_decimal_place"], prefix)
        return make_rank_table(dataset, targets, rank, config["timestamp_unit"])

    def restore(self, digest: str, folder: StudyFolder, config: PosConfig, dataset: Any) -> None:
        """Write a run into a study's folder, as if it had been trained there, but without weights.

        The other arguments and the errors are as of :meth:`read_ranks`. An error leaves no file.
        """
        ranks = self.read_ranks(digest, config, dataset)
        run = folder.run(digest)
        make_folder(run.path)
        run.write_config(config.plain)
        write_text(run.metrics, self.files[f"runs/{digest}/{_METRICS}"].decode())
        if ranks is not None:
            run.write_ranks(ranks)
        folder.write_fit(digest, self.fits[digest])  # last: it marks the run as done

    def __str__(self) -> str:
        """Return a sentence on how many of the runs belong to the present study."""
        summary = f"{self.path}: {len(self.used)} of its {len(self.fits)} runs are of this study"
        if len(self.used) < len(self.fits):
            summary += "; the others are of other configurations, data or seeds"
        return summary

    def _read_fit(self, digest: str) -> dict[str, Any]:
        """Validate all files of a run, and return its facts that others may read."""
        fit_name, metrics_name, ranks_name = (
            f"runs/{digest}/{file}" for file in (_FIT, _METRICS, _RANKS)
        )
        for name in (fit_name, metrics_name):
            if name not in self.files:
                raise UsageError(f"{self._describe_damage(name)}: it is missing")
        prefix = self._describe_damage(fit_name)
        fit = parse(RunFacts, self.files[fit_name], prefix).model_dump(exclude_unset=True)
        if (status := fit.get("status")) != DONE:
            raise UsageError(f"{prefix}: status is {shown(status)}, expected {DONE!r}")
        epochs = parse_epochs(self.files[metrics_name], self._describe_damage(metrics_name))
        best_valid = fit.get("best_valid")
        if best_valid and not any(epoch.valid == best_valid for epoch in epochs):
            raise UsageError(f"{prefix}: best_valid is of no epoch of {_METRICS}")
        if ranks_name in self.files:
            self._parse_ranks(ranks_name)
        elif any(map(is_from_ranks, fit.get("test") or {})):
            prefix = self._describe_damage(ranks_name)
            raise UsageError(f"{prefix}: it is missing, and its run was tested")
        return {**_select_public(fit), KNOWN_FROM: self.path.name}

    def _parse_ranks(self, name: str) -> np.ndarray:
        """Return the ranks [targets] in an npy file, as a view; a UsageError for anything else."""
        content = self.files[name]
        header = _NPY.match(content[:256])
        if header is not None:
            dtype, num_ranks = np.dtype(header[1].decode()), int(header[2])
            if num_ranks * dtype.itemsize == len(content) - header.end():
                rank = np.frombuffer(content, dtype, offset=header.end())
                if rank.min(initial=0) >= 0:
                    return rank
        prefix = self._describe_damage(name)
        raise UsageError(f"{prefix}: expected an array of ranks, whole numbers from 0")

    def _describe_damage(self, member: str) -> str:
        """Return the beginning of a message about a damaged member."""
        return f"{self.path} is damaged: {member}"


def _select_public(fit: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a finished run that others may read."""
    return {"status": DONE, **{key: fit[key] for key in _PUBLIC_FACTS if key in fit}}


def require_writable(path: str | Path) -> None:
    """Raise a UsageError for a path that a packed study cannot be written to."""
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise UsageError(f"--pack: {file}: expected a file in a folder, such as study.tar.xz")


def pack(plan: Plan, folder: StudyFolder, path: str | Path) -> int:
    """Write the finished runs of a study into a file, and return their number.

    The same runs give the same bytes. By convention the name of the file ends in ``.tar.xz``.

    Raises:
        UsageError: if no run is finished.
    """
    digests = sorted(set(folder.find_current_digests(plan).values()))
    finished = [digest for digest in digests if folder.read_fit(digest).get("status") == DONE]
    if not finished:
        raise UsageError(f"--pack {path}: {folder.path} has no finished run")
    members: dict[str, bytes] = {}
    for digest in finished:
        for name, content in _pack_run(folder, digest).items():
            members[f"runs/{digest}/{name}"] = content
    with atomic_write(path, text=False) as file, tarfile.open(fileobj=file, mode="w:xz") as archive:
        # sorted by file name, since files of one kind compress well together
        for name in sorted(members, key=lambda name: (name.split("/")[-1], name)):
            header = tarfile.TarInfo(name)
            header.size = len(members[name])
            archive.addfile(header, io.BytesIO(members[name]))
    return len(finished)


def _pack_run(folder: StudyFolder, digest: str) -> dict[str, bytes]:
    """Return file name -> content of a run, without facts and options of this machine."""
    run = folder.run(digest)
    facts = json.dumps(_select_public(folder.read_fit(digest)), indent=1, default=str)
    options = read_yaml(run.config)
    options = {key: value for key, value in options.items() if key not in INDIFFERENT}
    if options.get("item_vectors"):
        options["item_vectors"] = keep_file_names(options["item_vectors"])
    files = {
        _FIT: facts.encode(),
        _CONFIG: yaml.safe_dump(options, allow_unicode=True).encode(),
        _METRICS: run.metrics.read_bytes() if run.metrics.is_file() else b"",
    }
    if run.ranks.is_file():
        rank = pd.read_parquet(run.ranks, columns=["rank"])["rank"].to_numpy()
        smallest_dtype = np.min_scalar_type(int(rank.max(initial=0)))
        buffer = io.BytesIO()
        np.save(buffer, rank.astype(smallest_dtype))
        files[_RANKS] = buffer.getvalue()
    return files


def _read_archive(path: Path) -> dict[str, Any]:
    """Return name -> content of the files in an archive; a UsageError beyond the bounds."""
    try:
        if not path.is_file():
            raise FileNotFoundError("there is no such file")
        max_bytes = min(_MAX_BYTES, 2**24 + _MAX_RATIO * path.stat().st_size)
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_MEMORY)
        content = decompressor.decompress(path.read_bytes(), max_length=max_bytes + 1)
        if len(content) > max_bytes:
            raise tarfile.TarError(f"it has more than {max_bytes >> 20:,} MiB unpacked")
        if not decompressor.eof:
            raise EOFError("its end is missing")
        if decompressor.unused_data:
            raise tarfile.TarError("something follows its end")
        return dict(_iterate_members(memoryview(content)))
    except (OSError, ValueError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        name = short(str(path))
        raise UsageError(f"--known: {name} is not a file of `compare --pack`: {reason}") from error


def _iterate_members(content: memoryview) -> Iterator[tuple[str, Any]]:
    """Yield names and contents of a tar's files; a TarError for what :func:`pack` never writes."""
    # tarfile's own reader trusts the lengths in extended headers, so each header is read here
    names: set[str] = set()
    start = 0
    while True:
        block = bytes(content[start : start + tarfile.BLOCKSIZE])
        if not block.strip(b"\0"):  # the end of the archive
            return
        header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        start += tarfile.BLOCKSIZE
        if not _MEMBER.fullmatch(header.name) or header.type != tarfile.REGTYPE:
            raise tarfile.TarError(f"{shown(header.name)} is not one of its files")
        if header.name in names or len(names) == _MAX_MEMBERS:
            raise tarfile.TarError(f"{header.name} is there twice, or one of too many")
        names.add(header.name)
        file = header.name.split("/")[-1]
        bytes_left = len(content) - start
        if not 0 <= header.size <= min(bytes_left, _MAX_MEMBER_BYTES.get(file, bytes_left)):
            raise tarfile.TarError(f"{header.name} has {header.size:,} bytes")
        if file in (_FIT, _METRICS, _RANKS):
            member = content[start : start + header.size]
            yield header.name, member if file == _RANKS else bytes(member)
        start += math.ceil(header.size / tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
