"""Columns on disk, where interactions exceed memory_limit: the same, and nothing is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from test_cache import facts

from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.cache import capture
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.tables import storage
from recbole_pos.tables.storage import Storage

EVENTS = 6_000
COLUMNS = ["user_id", "item_id", "timestamp", "stars", "channel", "note"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many ties and copies, one user with a third of all, cells that are missing; text, parquet."""
    rng = np.random.default_rng(0)
    user = np.where(rng.random(EVENTS) < 0.3, 7, rng.integers(0, 400, EVENTS))
    table = pd.DataFrame(
        {
            "user_id:token": [f"u{u}" for u in user],
            "item_id:token": [f"i{i}" for i in rng.integers(0, 300, EVENTS)],
            "timestamp:float": rng.integers(0, 3000, EVENTS) / 4,
            "stars:float": np.where(rng.random(EVENTS) < 0.1, np.nan, rng.integers(1, 6, EVENTS)),
            "channel:token": np.where(rng.random(EVENTS) < 0.1, None, "web"),
            "note:token_seq": np.where(rng.random(EVENTS) < 0.5, "a b", "c"),
        }
    )
    table.loc[::500, "user_id:token"] = None
    copied = rng.integers(0, EVENTS, 750)
    table = table.iloc[np.sort(np.append(np.arange(EVENTS), copied))].reset_index(drop=True)
    folder = tmp_path_factory.mktemp("logs")
    for name in ("text", "columns", "parts"):
        (folder / name).mkdir()
    table.to_csv(folder / "text" / "text.inter", sep="\t", index=False)
    table.to_parquet(folder / "columns" / "columns.inter.parquet", index=False)
    for part, rows in (("train", slice(0, 4500)), ("test", slice(4500, None))):
        file = folder / "parts" / f"parts.{part}.inter"
        table[rows].to_csv(file, sep="\t", index=False)
    return folder


def read(folder: Path, name: str, model: str = "PosSASRec", **options: Any) -> Any:
    given = {"data_path": str(folder), "load_col": {"inter": COLUMNS}, "cache": False, **options}
    return read_dataset(PosConfig(model, name, None, given))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("columns", {"item_inter_num_interval": "[15,inf)", "rm_copies": True}),
    ("text", {"eval_args": {"split": {"GT": [0.9, 0.95]}, "ties": "random(3)"}}),
    ("columns", {"eval_args": {"split": {"ST": [0.8, 0.9]}}, "val_interval": {"stars": "[2,6)"}}),
    ("parts", {"benchmark_filename": ["train", "test"], "eval_args": {"ties": "drop"}}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_same_to_the_bit(folder: Path, name: str, options: dict[str, Any], monkeypatch) -> None:
    sizes, empty = [], Storage.empty

    def counted(self: Storage, shape: Any, dtype: Any) -> np.ndarray:
        sizes.append(self.sorted_rows if self.is_on_disk else None)
        return empty(self, shape, dtype)

    monkeypatch.setattr(Storage, "empty", counted)
    plain, before = read(folder, name, memory_limit="4GB", **options), set(folder.rglob("*"))
    assert set(sizes) == {None}
    monkeypatch.setattr("recbole_pos.data.interactions.CHUNK_INTERACTIONS", 500)
    small = read(folder, name, memory_limit="100KB", **options)
    assert set(sizes) == {None, 1024} and set(folder.rglob("*")) == before
    assert facts(capture(plain)) == facts(capture(small))
    columns = *small.log.fields.values(), small.split.part, small.split.is_target
    assert all(isinstance(np.asarray(column).base, np.memmap) for column in columns[-2:])


def test_auto_is_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "get_free_memory", lambda: 4800)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert storage.read_limit("auto") == 2400 and storage.read_limit("1.5 kb") == 1500
    assert not Storage(100, 2400).is_on_disk and Storage(101, 2400).is_on_disk
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert storage.read_limit("auto") == 1200
    for wrong in ("4 horses", -1):
        with pytest.raises(UsageError, match="memory_limit"):
            storage.read_limit(wrong)


def test_a_full_disk_is_one_line(folder: Path, monkeypatch, capsys) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = f"run -m PosSASRec -d text --memory_limit 100KB --data_path {folder} --quiet"
    before = set(folder.rglob("*"))
    assert main([*words.split(), "--run_dir", str(folder / "run")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "raise memory_limit" in error
    assert set(folder.rglob("*")) == before
