"""Prepared data that are kept: the same as made again, and never believed wrongly."""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shop import LOAD, shop_options, tables, write

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data import cache
from recbole_pos.data.tables import TextTable
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset

TEXT = TextTable.read


@pytest.fixture(autouse=True)
def any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Small files are cached too; the names of those that are read as text."""
    texts: list[str] = []

    def read(self: TextTable, *args: Any) -> Any:
        texts.append(self.path.name)
        return TEXT(self, *args)

    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(TextTable, "read", read)
    return texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, tables())


def prepared(folder: Path, model: str = "AttrFormer", **options: Any) -> Any:
    given = shop_options(folder, **{"eval_args": {"split": {"GT": [0.8, 0.9]}}, **options})
    if model != "AttrFormer":
        given = {k: given[k] for k in given if k in (*cache.READ, "cache", "data_path")}
    dataset = read_dataset(PosConfig(model, "shop", None, given))
    dataset.parts = dataset.build()
    return dataset


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "shop" / cache.FOLDER).glob("*.pt"))


def facts(value: Any) -> Any:
    """A value that == compares, with types of arrays."""
    if isinstance(value, dict):
        return {key: facts(cell) for key, cell in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return str(value.dtype), tuple(value.shape), value.tolist()
    return value


ATTRIBUTES = (
    *("field2type", "field2source", "field2seqlen", "field2bucketnum", "field2id_token", "alias"),
    *("field2token_id", "missing", "user_counts", "identity", "feat_name_list", "_rest_fields"),
)


def all_of(dataset: Any) -> dict[str, Any]:
    """Everything that is read of a dataset, and rows of its parts."""
    found = {name: getattr(dataset, name) for name in ATTRIBUTES}
    feats = [name for name in dataset.feat_name_list if name != "inter_feat"]
    found |= {name: getattr(dataset, name).interaction for name in feats}
    found |= vars(dataset.split) | {"log": vars(dataset.log), "text": str(dataset)}
    found["parts"] = {n: p[np.arange(len(p))].interaction for n, p in enumerate(dataset.parts)}
    return facts(found)


def test_the_cached_dataset_equals_the_fresh_one(folder: Path, any_size: list[str]) -> None:
    options = {"load_col": LOAD, "relations": ["brand"], "normalize_all": True}
    options |= {"rm_dup_inter": "first", "unused_col": {"item": ["weight"]}}
    made = prepared(folder, **options)
    texts = list(any_size)
    assert len(texts) >= 3
    mapped = prepared(folder, **options)
    assert any_size == texts, "the second start reads no text"
    assert all_of(mapped) == all_of(made)
    assert all_of(made) == all_of(prepared(folder, cache=False, **options))


def test_the_second_start_makes_no_dict_of_names(folder: Path, any_size: list[str]) -> None:
    prepared(folder)
    ids = prepared(folder).field2token_id
    assert ids and not any("_ids" in vars(one) for one in ids.values())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux")
def test_pages_are_those_of_the_file(folder: Path) -> None:
    prepared(folder)
    (file,) = kept(folder)
    before = file.read_bytes()
    mapped = prepared(folder)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    for column in (*mapped.log.fields.values(), mapped.item_feat["price"]):
        assert any(low <= column.data_ptr() < high for low, high in ranges)
    mapped.log.items[0] = 7  # of this process alone
    assert file.read_bytes() == before


def test_other_content_of_one_size_and_time(folder: Path, any_size: list[str]) -> None:
    before = prepared(folder)
    file = folder / "shop" / "shop.item"
    stat, text = file.stat(), file.read_text()
    file.write_text(text.replace("\tA\t", "\tB\t"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    now = prepared(folder)
    assert now.identity["fields"]["brand"] != before.identity["fields"]["brand"]
    assert len(any_size) == 6 and len(kept(folder)) == 1, "the newer one takes its place"
    file.unlink()
    assert prepared(folder, relations=["channel"], load_col=None).item_feat is None


def test_unchanged_files_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their inode, size and times; whatever has changed is compared byte by byte."""
    monkeypatch.setattr(cache, "_SETTLED", 0)
    made, digested = all_of(prepared(folder)), []
    digest = cache.digest_file
    monkeypatch.setattr(
        cache, "digest_file", lambda path: digested.append(path.name) or digest(path)
    )
    assert all_of(prepared(folder)) == made and not digested
    table, (file,) = folder / "shop" / "shop.inter", kept(folder)
    table.touch()  # other times, the same bytes: compared once, and not again
    for names in (["shop.inter", "shop.item", "shop.user", file.name], []):
        del digested[:]
        assert all_of(prepared(folder)) == made and sorted(digested) == sorted(names)
    whole = file.read_bytes()
    file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    assert all_of(prepared(folder)) == made and file.read_bytes() == whole
    monkeypatch.setattr(cache, "_SETTLED", 1e15)
    file.with_suffix(".json").unlink()
    prepared(folder)
    del digested[:]
    prepared(folder)
    assert len(digested) == 4, "tables that are new can change without other times"


def test_options_of_model_and_training_share_one(folder: Path, any_size: list[str]) -> None:
    prepared(folder)
    prepared(folder, hidden_size=16, MAX_ITEM_LIST_LENGTH=3, topk=[1], valid_metric="MRR@1")
    prepared(folder, model="BPR")
    assert len(any_size) == 3 and len(kept(folder)) == 1


class Recorder(PosConfig):
    def __getitem__(self, key: str) -> Any:
        self.__dict__.setdefault("read", set()).add(key)
        return super().__getitem__(key)


def test_every_option_that_preparing_reads_counts(folder: Path) -> None:
    config = Recorder("AttrFormer", "shop", None, shop_options(folder, cache=False))
    config.read = set()
    read_dataset(config).build()
    later = {"data_path", "dataset", "cache", "MAX_ITEM_LIST_LENGTH", "ITEM_LIST_LENGTH_FIELD"}
    later |= {"LIST_SUFFIX", "augmentation", "update_from", "memory_limit"}  # read afterwards
    later |= {"event_features", "user_features", "MODEL_TYPE", "data_part"}  # parts: own folders
    assert config.read - later <= set(cache.READ)


def test_damage_is_never_believed(folder: Path, any_size: list[str]) -> None:
    want = all_of(prepared(folder))
    whole = kept(folder)[0].read_bytes()
    places = [0, len(whole) // 2, len(whole) - 40, len(whole) - 1]
    flipped = [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in places]
    for damaged in (*flipped, b"", whole[:-1], whole + b"\0"):
        kept(folder)[0].write_bytes(damaged)
        del any_size[:]
        assert all_of(prepared(folder)) == want
        assert len(any_size) == 3 and kept(folder)[0].read_bytes() == whole, "it is made again"
    (path,) = kept(folder)
    path.unlink()
    path.symlink_to("/dev/zero")  # reading it would never end
    assert all_of(prepared(folder)) == want and path.read_bytes() == whole


def test_a_cache_of_another_user_is_not_read(
    folder: Path, any_size: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset folder from elsewhere, in which every interaction is item 1."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    want = all_of(prepared(folder))
    (other,) = kept(folder)
    content = torch.load(other, weights_only=True)
    content["state"]["log"]["item_id"] = torch.ones_like(content["state"]["log"]["item_id"])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "here"))
    prepared(folder)
    (ours,) = set(kept(folder)) - {other}
    torch.save(content, ours)  # with a seal of the other user
    seal = json.loads(json.loads(other.with_suffix(".json").read_text())[0])
    text = json.dumps({**seal, "digest": cache.digest_file(ours)})
    key = (tmp_path / "elsewhere" / "recbole-pos" / "cache.key").read_bytes()
    signed = [text, hmac.new(key, text.encode(), "sha256").hexdigest()]
    ours.with_suffix(".json").write_text(json.dumps(signed))
    del any_size[:]
    assert all_of(prepared(folder)) == want and len(any_size) == 3
    key = tmp_path / "here" / "recbole-pos" / "cache.key"
    assert key.stat().st_mode & 0o777 == 0o600
    (tmp_path / "no one").touch()  # no folder can be made in it
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no one"))
    assert all_of(prepared(folder)) == want


@pytest.mark.parametrize("damaged", ["", "{}", "[1, 2]", '["{}", "x"]'])
def test_a_damaged_seal_is_replaced(folder: Path, any_size: list[str], damaged: str) -> None:
    prepared(folder)
    (path,) = kept(folder)
    seal = path.with_suffix(".json")
    seal.write_text(damaged)
    prepared(folder)
    del any_size[:]
    prepared(folder)
    assert not any_size and len(json.loads(seal.read_text())) == 2


def test_small_tables_are_not_kept_and_few_others(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 1 << 20)
    prepared(folder)
    assert not kept(folder)
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    for least in range(cache.MAX_CACHES + 2):
        prepared(folder, item_inter_num_interval=f"[{least},inf)")
        if least == 0:
            begun = kept(folder)[0].with_suffix(".part")
            begun.touch()
            os.utime(begun, (0, 0))  # its writer was killed long ago
    assert len(kept(folder)) == cache.MAX_CACHES and not begun.exists()
    assert len(list(begun.parent.iterdir())) == 2 * cache.MAX_CACHES


def test_warnings_are_repeated_from_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = tables()
    made["inter"].iloc[2, 1] = ""
    folder = write(tmp_path, made)
    for _ in range(2):
        caplog.clear()
        prepared(folder)
        assert "shop.inter: 1 rows have no item_id and are left out; of" in caplog.text
        assert "counted from 1: 3\n" in caplog.text
    made["inter"].iloc[:40, 0] = ""
    prepared(write(tmp_path, made))
    assert "40 rows have no user_id" in caplog.text and "12, ... (40 in all)\n" in caplog.text


def test_a_file_that_changes_or_a_disk_that_is_full(folder: Path, monkeypatch) -> None:
    """Nothing is kept, and the run goes on."""

    def read(self: TextTable, *args: Any) -> Any:
        table = TEXT(self, *args)
        with open(folder / "shop" / "shop.user", "a") as file:
            file.write("\n")
        return table

    monkeypatch.setattr(TextTable, "read", read)
    prepared(folder)
    monkeypatch.setattr(TextTable, "read", TEXT)
    monkeypatch.setattr(cache.torch, "save", lambda *_: open("/dev/full", "wb", 0).write(b"x"))
    prepared(folder)
    assert not kept(folder)


def test_what_is_refused_is_refused_again(tmp_path: Path) -> None:
    for part, user in (("train", "a"), ("test", "b")):
        rows = "".join(f"{user}\ti{n}\t{n}\n" for n in range(1, 4 if part == "train" else 2))
        (tmp_path / "shop").mkdir(exist_ok=True)
        header = "user_id:token\titem_id:token\ttimestamp:float\n"
        (tmp_path / "shop" / f"shop.{part}.inter").write_text(header + rows)
    given = {"data_path": str(tmp_path), "benchmark_filename": ["train", "test"]}
    for _ in range(2):
        with pytest.raises(UsageError, match="nothing of the test part can be predicted"):
            read_dataset(PosConfig("PosSASRec", "shop", None, given)).build()
    assert kept(tmp_path)
