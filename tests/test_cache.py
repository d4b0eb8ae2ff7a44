"""Prepared data that are kept: the same as made again, never believed wrongly, nothing is left."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from shop import shop_options, tables, write
from test_config import Recording

from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data import cache
from recbole_pos.data.atomic_files import TextTable
from recbole_pos.data.cache import capture
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.tables import storage
from recbole_pos.tables.storage import Storage

TEXT = TextTable.read_blocks


@pytest.fixture(autouse=True)
def any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Small files are cached too, and new ones; the names of those that are read as text."""
    texts: list[str] = []

    def read_blocks(self: TextTable, kinds: Any) -> Any:
        texts.append(self.path.name)
        return TEXT(self, kinds)

    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    monkeypatch.setattr(cache, "_SETTLED", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(TextTable, "read_blocks", read_blocks)
    return texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, tables())


def prepared(folder: Path, model: str = "AttrFormer", **options: Any) -> Any:
    given = shop_options(folder, **{"eval_args": {"split": {"GT": [0.8, 0.9]}}, **options})
    if model != "AttrFormer":
        given = {k: given[k] for k in given if k in (*cache.READ, "cache", "data_path")}
    return read_dataset(PosConfig(model, "shop", None, given))


def kept() -> list[Path]:
    return sorted(cache.find_cache_folder().glob("shop-*/*.arrow"))


def facts(value: Any) -> Any:
    """A value that == compares, with types of arrays."""
    if isinstance(value, dict):
        return {key: facts(cell) for key, cell in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return str(value.dtype), tuple(value.shape), value.tolist()
    return value


def all_of(dataset: Any) -> dict[str, Any]:
    """Everything that is read of a dataset."""
    return facts(cache.capture(dataset))


def test_the_cached_dataset_equals_the_fresh_one(folder: Path, any_size: list[str]) -> None:
    options = {"relations": ["brand"], "normalize_all": True, "rm_dup_inter": "first"}
    made = prepared(folder, **options)
    texts = list(any_size)
    assert len(texts) >= 3
    mapped = prepared(folder, **options)
    assert any_size == texts, "the second start reads no text"
    assert all_of(mapped) == all_of(made)
    assert all_of(made) == all_of(prepared(folder, cache=False, **options))
    ids = prepared(folder, **options).field2token_id
    assert not any("_ids" in vars(one) for one in ids.values()), "no dict of names is made"


def test_what_is_written_into_a_mapped_column_stays_in_the_process(folder: Path) -> None:
    prepared(folder)
    (file,) = kept()
    before = file.read_bytes()
    prepared(folder).log.items[0] = 7
    assert file.read_bytes() == before


def test_other_content_of_one_size_and_time(
    folder: Path, any_size: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepared(folder)
    file = folder / "shop" / "shop.item"
    stat, text = file.stat(), file.read_text()
    file.write_text(text.replace("\tA\t", "\tB\t"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    now = prepared(folder)
    assert now.identity["fields"]["brand"] != before.identity["fields"]["brand"]
    assert len(any_size) == 6
    monkeypatch.setattr(cache, "_SETTLED", 1e15)
    prepared(folder)
    assert len(any_size) == 9, "files that are new can change without other times"
    file.unlink()
    assert prepared(folder, relations=["channel"], load_col=None).item_feat is None


def test_options_of_model_and_training_share_one(folder: Path, any_size: list[str]) -> None:
    prepared(folder)
    prepared(folder, hidden_size=16, MAX_ITEM_LIST_LENGTH=3, topk=[1], valid_metric="MRR@1")
    prepared(folder, model="BPR")
    assert len(any_size) == 3 and len(kept()) == 1


def test_every_option_that_preparing_reads_counts(folder: Path) -> None:
    config = Recording("AttrFormer", "shop", None, shop_options(folder, cache=False))
    config.read = set()
    read_dataset(config)
    later = {"data_path", "dataset", "cache", "MAX_ITEM_LIST_LENGTH", "ITEM_LIST_LENGTH_FIELD"}
    later |= {"LIST_SUFFIX", "augmentation", "update_from", "memory_limit"}  # read afterwards
    later |= {"event_features", "user_features", "MODEL_TYPE"}
    assert config.read - later <= set(cache.READ)


def test_a_damaged_cache_is_made_again(folder: Path) -> None:
    want = all_of(prepared(folder))
    (path,) = kept()
    whole = path.read_bytes()
    for damaged in (b"", whole[:5000]):
        path.write_bytes(damaged)
        assert all_of(prepared(folder)) == want
        assert path.read_bytes() == whole


def test_small_tables_are_not_kept_and_few_others(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 1 << 20)
    prepared(folder)
    assert not kept()
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    for least in range(cache.MAX_CACHES + 2):
        prepared(folder, item_inter_num_interval=f"[{least},inf)")
        if least == 0:
            begun = kept()[0].with_name(".begun.arrow.tmp")
            begun.touch()
            os.utime(begun, (0, 0))  # its writer was killed long ago
    assert len(list(begun.parent.iterdir())) == cache.MAX_CACHES == len(kept())


def test_without_a_place_for_a_cache_a_dataset_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").touch()  # no folder can be made in it
    assert len(prepared(folder).log)


# --- columns on disk, where interactions exceed memory_limit ---


EVENTS = 6_000
COLUMNS = ["user_id", "item_id", "timestamp", "stars", "channel", "note"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    logs = tmp_path_factory.mktemp("logs")
    for name in ("text", "columns", "parts"):
        (logs / name).mkdir()
    table.to_csv(logs / "text" / "text.inter", sep="\t", index=False)
    table.to_parquet(logs / "columns" / "columns.inter.parquet", index=False)
    for part, rows in (("train", slice(0, 4500)), ("test", slice(4500, None))):
        file = logs / "parts" / f"parts.{part}.inter"
        table[rows].to_csv(file, sep="\t", index=False)
    return logs


def read(logs: Path, name: str, model: str = "PosSASRec", **options: Any) -> Any:
    given = {"data_path": str(logs), "load_col": {"inter": COLUMNS}, "cache": False, **options}
    return read_dataset(PosConfig(model, name, None, given))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("columns", {"item_inter_num_interval": "[15,inf)", "rm_copies": True}),
    ("text", {"eval_args": {"split": {"GT": [0.9, 0.95]}, "ties": "random(3)"}}),
    ("columns", {"eval_args": {"split": {"ST": [0.8, 0.9]}}, "val_interval": {"stars": "[2,6)"}}),
    ("parts", {"benchmark_filename": ["train", "test"], "eval_args": {"ties": "drop"}}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_same_to_the_bit(logs: Path, name: str, options: dict[str, Any], monkeypatch) -> None:
    sizes, empty = [], Storage.empty

    def counted(self: Storage, shape: Any, dtype: Any) -> np.ndarray:
        sizes.append(self.sorted_rows if self.is_on_disk else None)
        return empty(self, shape, dtype)

    monkeypatch.setattr(Storage, "empty", counted)
    plain, before = read(logs, name, memory_limit="4GB", **options), set(logs.rglob("*"))
    assert set(sizes) == {None}
    monkeypatch.setattr("recbole_pos.data.interactions.CHUNK_INTERACTIONS", 500)
    small = read(logs, name, memory_limit="100KB", **options)
    assert set(sizes) == {None, 1024} and set(logs.rglob("*")) == before
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


def test_a_full_disk_is_one_line(logs: Path, monkeypatch, capsys) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = f"run -m PosSASRec -d text --memory_limit 100KB --data_path {logs} --quiet"
    before = set(logs.rglob("*"))
    assert main([*words.split(), "--run_dir", str(logs / "run")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "raise memory_limit" in error
    assert set(logs.rglob("*")) == before
