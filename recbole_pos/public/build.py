"""Raw files of a public log to a dataset: ``recbole-pos data build``."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.conversion.convert import is_of_dataset, make_dataset, parquet_files
from recbole_pos.data.counts import counts_of, require_counts
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.files import replacing
from recbole_pos.public.described import PublicLog, public_log
from recbole_pos.public.recipes import RECIPES, Tables
from recbole_pos.screen import Screen

SUFFIXES = (".inter", ".item", ".user")


def build(
    name: str,
    files: Sequence[str | Path],
    data_path: str | Path = "dataset/",
    overwrite: bool = False,
    verbose: bool = True,
) -> Path:
    """Make a dataset of the raw files of a public log; the same files make the same bytes.

    Args:
        name: of the log.
        files: the raw ones, in the order in which :func:`public_log` names them.
        data_path: folder that gets the dataset.
        overwrite: replace one that is there.
        verbose: whether to tell.

    Returns:
        The folder.

    Raises:
        UsageError: if a file is missing or no such file, or counts are not those of the papers.
    """
    log, screen, folder = public_log(name), Screen(verbose), Path(data_path) / name
    given = _require_files(log, [Path(file) for file in files])
    if ((folder / f"{name}.inter").exists() or parquet_files(folder, name)) and not overwrite:
        raise UsageError(f"data: {folder} holds a dataset already; --overwrite replaces it")
    for published, file in zip(log.files, given, strict=True):
        if published in log.md5 and (found := checksum(file, "md5")) != log.md5[published]:
            screen.line(
                f"{file} is not the {published} of {log.source}: md5 {found}, published is "
                f"{log.md5[published]}"
            )
    with screen.task(f"reading {', '.join(file.name for file in given)}"):
        tables = RECIPES[log.recipe](*given)
    with tempfile.TemporaryDirectory() as made:
        paths = _written(tables, Path(made))
        user, item, time = tables.events.columns[:3]
        asked = ConvertArguments(
            name=name,
            items=paths.get("items"),
            users=paths.get("users"),
            user=user,
            item=item,
            time=time,
            date_format="s",
            types=_kinds(tables),
            rename={user: user},
            tables=dict.fromkeys(tables.events.columns[3:], "inter"),
            data_path=made,
            verbose=False,
        )
        make_dataset(paths["events"], asked, allow_empty=True)
        with replacing(folder, lambda file: not is_of_dataset(file, name)) as new:
            for suffix in SUFFIXES:
                if (file := Path(made) / name / f"{name}{suffix}").is_file():
                    shutil.move(file, new / file.name)
            shutil.copyfile(log.yaml, new / log.yaml.name)
    dataset = read_dataset(PosConfig("Pop", name, None, {"data_path": str(data_path)}))
    dataset.build()
    counts = counts_of(dataset).items()
    screen.line(f"{folder}: " + ", ".join(f"{count:,} {what}" for what, count in counts))
    for file in sorted(folder.glob(f"{name}.*")):
        if file.suffix in SUFFIXES:
            screen.line(f"{checksum(file)}  {file.name}")
    require_counts(name, log.counts, dataset)
    return folder


def checksum(file: Path, kind: str = "sha256") -> str:
    """Of a file."""
    digest = hashlib.new(kind, usedforsecurity=False)
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _require_files(log: PublicLog, files: list[Path]) -> list[Path]:
    expected = " ".join(log.files)
    if len(files) != len(log.files):
        raise UsageError(
            f"data: {log.name} is built from {expected} ({log.source}), found {len(files)} files: "
            f"recbole-pos data build {log.name} {expected}"
        )
    for file in files:
        if not file.is_file():
            raise UsageError(f"data: {file} is not there; {log.source} has it")
    return files


def _kinds(tables: Tables) -> dict[str, str]:
    """Of the columns that there are: not every edition of a log has them all."""
    found = [table for table in (tables.events, tables.items, tables.users) if table is not None]
    names = {name for table in found for name in table}
    return {name: kind for name, kind in (tables.kinds or {}).items() if name in names}


def _written(tables: Tables, folder: Path) -> dict[str, Path]:
    """The tables as files that ``convert`` reads."""
    paths = {}
    for role in ("events", "items", "users"):
        table = getattr(tables, role)
        if table is not None:
            paths[role] = folder / f"{role}.parquet"
            table.to_parquet(paths[role], index=False)
    return paths
