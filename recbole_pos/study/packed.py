"""A study in one file: what its tables are made of, so that nobody has to train it again.

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
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.experiment.ranks import rank_table
from recbole_pos.files import whole, write_text
from recbole_pos.study.configs import INDIFFERENT
from recbole_pos.study.expand import fits
from recbole_pos.study.folder import KNOWN_FROM, StudyFolder
from recbole_pos.study.plan import Plan
from recbole_pos.study.results import DONE
from recbole_pos.yaml_files import read_yaml

_SEARCHES = "searches.json"
_FIT, _CONFIG, _METRICS, _RANKS = "fit.json", "config.yaml", "metrics.jsonl", "ranks.npy"
_FIT_OF = re.compile(rf"runs/(\w+)/{re.escape(_FIT)}")
# What is said of a run that others may read: no paths, no names of machines, no times of the split.
_SAID = (
    *("row", "seed", "stage", "trial", "commit", "model", "searched", "digest", "dataset"),
    *("best_valid", "test", "epochs", "best_epoch", "seconds", "targets_per_second", "parameters"),
    *("candidates", "valid_targets", "test_targets", "peak_rss_mb", "versions", "device"),
)
_MAPPINGS = ("best_valid", "test", "seconds", "versions", "device", "searched")
_MOST = 2**30  # bytes that a file may have unpacked


class PackedStudy:
    """The runs of a file that :func:`pack` wrote.

    Args:
        path: of the file.

    Attributes:
        used: digests of runs in here that a study has, too.

    Raises:
        UsageError: if it cannot be read as one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = _read(self.path)
        names = {found[1]: name for name in self.files if (found := _FIT_OF.fullmatch(name))}
        self.fits = {digest: self._fit(name) for digest, name in names.items()}
        self.searches = self._json(_SEARCHES) if _SEARCHES in self.files else {}
        self.used: set[str] = set()

    def __contains__(self, digest: object) -> bool:
        return digest in self.fits

    def drawn(self, row: str, space: str, trial: int) -> dict[str, Any] | None:
        """What was drawn for a trial of a row from the same space; None if nothing was."""
        search = self.searches.get(row)
        if not isinstance(search, dict) or search.get("space") != space:
            return None
        drawn = search.get("drawn")
        options = drawn.get(str(trial)) if isinstance(drawn, dict) else None
        return options if isinstance(options, dict) else None

    def fit(self, digest: str) -> dict[str, Any]:
        """What was said of a run, as :meth:`StudyFolder.fit`."""
        return {**self.fits[digest], KNOWN_FROM: self.path.name}

    def config(self, digest: str) -> dict[str, Any]:
        """The configuration of a run, but for what is of its machine."""
        try:
            found = yaml.safe_load(self._text(f"runs/{digest}/{_CONFIG}"))
        except yaml.YAMLError as error:
            raise self._damaged(f"{_CONFIG} of {digest}: {error}") from error
        if not isinstance(found, dict):
            raise self._damaged(f"{_CONFIG} of {digest} is no mapping")
        return found

    def restore(self, digest: str, folder: StudyFolder, config: PosConfig, dataset: Any) -> None:
        """Write a run into a study's folder, as if it had been trained there, but for its weights.

        Args:
            digest: of the run, one of those in here.
            folder: of the study.
            config: of the run, with the places of this machine.
            dataset: of the configuration, which the ranks are of.

        Raises:
            UsageError: if the file is damaged; nothing is written then.
        """
        metrics, ranks = self._metrics(digest), None
        if (name := f"runs/{digest}/{_RANKS}") in self.files:
            rank = self._array(name)
            event = np.flatnonzero((dataset.part == TEST) & dataset.split.is_target)
            if len(rank) != len(event):
                raise self._damaged(f"{name} has {len(rank):,} ranks of {len(event):,} targets")
            ranks = rank_table(dataset, event, rank, config["timestamp_unit"])
        run = folder.run(digest)
        make_folder(run.path)
        run.write_config(config.plain)
        write_text(run.metrics, metrics)
        if ranks is not None:
            run.write_ranks(ranks)
        folder.write_fit(digest, self.fit(digest))  # from here on nothing trains it

    def __str__(self) -> str:
        """How much of it a study has."""
        said = f"{self.path}: {len(self.used)} of its {len(self.fits)} runs are of this study"
        others = "; others have other options, data, rows or seeds"
        return said + others * (len(self.used) < len(self.fits))

    def _fit(self, name: str) -> dict[str, Any]:
        fit = self._json(name)
        if fit.get("status") != DONE:
            raise self._damaged(f"{name} is of no finished run")
        for key in _MAPPINGS:
            if not isinstance(fit.get(key) or {}, dict):
                raise self._damaged(f"{name}: {key} is no mapping")
        return fit

    def _metrics(self, digest: str) -> str:
        text = self._text(name := f"runs/{digest}/{_METRICS}")
        try:
            lines = [json.loads(line) for line in text.splitlines()]
            fine = all(isinstance(line["epoch"], int) for line in lines)
            fine = fine and all(isinstance(line.get("valid") or {}, dict) for line in lines)
        except (ValueError, TypeError, KeyError, AttributeError):
            fine = False
        if not fine:
            raise self._damaged(f"{name} has lines that are no epochs")
        return text

    def _text(self, name: str) -> str:
        try:
            return self.files[name].decode("utf-8")
        except (KeyError, ValueError) as error:
            raise self._damaged(f"{name} is missing or no text") from error

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self._text(name))
        except ValueError as error:
            raise self._damaged(f"{name}: {error}") from error
        if not isinstance(found, dict):
            raise self._damaged(f"{name} is no mapping")
        return found

    def _array(self, name: str) -> np.ndarray:
        try:
            found = np.lib.format.read_array(io.BytesIO(self.files[name]), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise self._damaged(f"{name}: {error}") from error
        whole_numbers = np.issubdtype(found.dtype, np.integer)
        if found.ndim != 1 or not whole_numbers or found.min(initial=0) < 0:
            raise self._damaged(f"{name} are no ranks: {found.dtype} {list(found.shape)}")
        return found.astype(np.int64)

    def _damaged(self, why: str) -> UsageError:
        return UsageError(f"{self.path} is damaged: {why}")


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
        plan: of the study.
        folder: of the study.
        path: of the file, by convention ending in ``.tar.xz``.

    Returns:
        How many runs are in it.

    Raises:
        UsageError: if no run is finished.
    """
    current = folder.current(plan)
    digests = {current[one.name] for one in fits(plan) if one.name in current}
    files: dict[str, bytes] = {}
    count = 0
    for digest in sorted(digests):
        known = folder.fit(digest) or {}
        if known.get("status") == DONE:
            count += 1
            for name, content in _files_of(known, folder.run(digest)):
                files[f"runs/{digest}/{name}"] = content
    if not count:
        raise UsageError(f"--pack {path}: {folder.path} has no finished run")
    searches = {row: kept for row in plan.rows if (kept := folder.search(row))}
    if searches:
        files[_SEARCHES] = _bytes(searches)
    with whole(path, text=False) as file, tarfile.open(fileobj=file, mode="w:xz") as archive:
        # alike files beside each other: most of a configuration is that of the next run
        for name in sorted(files, key=lambda name: (name.split("/")[-1], name)):
            about = tarfile.TarInfo(name)
            about.size = len(files[name])
            archive.addfile(about, io.BytesIO(files[name]))
    return count


def _files_of(known: Mapping[str, Any], run: RunFolder) -> Iterable[tuple[str, bytes]]:
    yield _FIT, _bytes({"status": DONE, **{key: known[key] for key in _SAID if key in known}})
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


def _read(path: Path) -> dict[str, bytes]:
    """The files in an archive, by name; nothing is written anywhere."""
    found: dict[str, bytes] = {}
    size = 0
    try:
        with tarfile.open(path, "r:xz") as archive:
            for one in archive:
                file = archive.extractfile(one) if one.isfile() else None
                size += one.size
                if size > _MOST:
                    raise UsageError(f"{path} has more than {_MOST >> 20:,} MiB unpacked")
                if file is not None:
                    found[one.name] = file.read()
    except FileNotFoundError as error:
        raise UsageError(f"--known: {path} does not exist") from error
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise UsageError(f"--known: {path} is no file of `compare --pack`: {error}") from error
    if not any(map(_FIT_OF.fullmatch, found)):
        raise UsageError(f"--known: {path} is no file of `compare --pack`: no run is in it")
    return found
