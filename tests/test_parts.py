"""``data_part: by_rank``: parts of the users make one dataset, or an error says why they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from conftest import make_log, small, write_atomic
from test_trainer import outcome

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data import cache
from recbole_pos.data.identity import count_dataset
from recbole_pos.distributed import current_shard, find_different
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare, read_dataset
from recbole_pos.experiment.evaluation import collect_test_ranks

LOAD = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "brand"]}
KINDS = {"user_id": "token", "item_id": "token", "timestamp": "float", "brand": "token"}


def write(frame: pd.DataFrame, folder: Path, suffix: str) -> None:
    named = frame.rename(columns={name: f"{name}:{kind}" for name, kind in KINDS.items()})
    named.to_csv(folder / "tiny" / f"tiny.{suffix}", sep="\t", index=False)


def divide(folder: Path, shares: tuple[int, ...] = (1, 2)) -> Path:
    """A data_path with a dataset and its parts, of which the second has more users; and its log."""
    frame = make_log(users=90)
    write_atomic(frame, folder)
    items = frame["item_id"].drop_duplicates()  # so ids are those of the whole without the file
    write(pd.DataFrame({"item_id": items, "brand": "b" + items.str[-1]}), folder, "item")
    owner = np.repeat(np.arange(len(shares)), shares)[frame["user_id"].str[1:].astype(int) % 3]
    for rank in range(len(shares)):
        write(frame[owner == rank], folder, f"{rank}.inter")
    return folder


def append(folder: Path, suffix: str, *lines: str) -> None:
    with open(folder / "tiny" / f"tiny.{suffix}", "a") as file:
        file.writelines(f"{line}\n" for line in lines)


def read_parts(rank: int, folder: Path) -> dict[str, Any]:
    """What a process finds of the dataset, and the error of each that is wrong."""
    found: dict[str, Any] = {}
    for case in sorted(folder.iterdir()):
        path = case / str(rank) if (case / str(rank)).is_dir() else case
        options = {"data_path": str(path), "data_part": "by_rank", "load_col": LOAD}
        try:
            if case.name != "whole":
                read_dataset(PosConfig("FPARec", "tiny", None, options)).build()
                continue
            for _ in range(2):  # the second from the cache
                experiment = prepare(small("FPARec", train_batch_size=16, **options))
            loader = experiment.loaders["train"]
            loader.divide(current_shard())
            batches = [(loader.shard.num_targets, loader.shard.num_batch_targets) for _ in loader]
            data = experiment.dataset
            found |= {
                "summary": data.split.summary,
                "popularity": data.popularity,
                "steps": batches,
            }
            found |= {"counts": count_dataset(data), "identity": data.identity["data"]}
            found |= {"targets": loader.num_targets, "users": data.user_num - 1}
        except UsageError as error:
            found[case.name] = str(error)
    one = [("same", torch.ones(2)), ("other", torch.full((), rank)), ("no", torch.ones(rank))]
    return {**found, "different": [find_different(one[:1]), find_different(one)]}


def _member(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    cache.MIN_BYTES = 0
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    torch.save(read_parts(rank, folder / "cases"), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_parts_make_the_dataset_or_an_error(tmp_path, monkeypatch) -> None:
    """Of two that are forked from this one: they need not import torch again."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    cases = tmp_path / "cases"
    whole = divide(cases / "whole")
    for name in ("shared_user", "unread_part", "no_target"):
        divide(cases / name)
    append(cases / "shared_user", "1.inter", "u0\ti1\t1", "u3\ti1\t1")
    shutil.copy(whole / "tiny" / "tiny.1.inter", cases / "unread_part" / "tiny" / "tiny.2.inter")
    write(pd.DataFrame([["a", "i1", 1], ["a", "i2", 2]], columns=list(KINDS)[:3]),
          cases / "no_target", "1.inter")  # fmt: skip
    for name, line in (("items", "i99\tb9"), ("brands", "")):
        for rank in (0, 1):  # the folders of two machines
            divide(cases / name / str(rank))
        append(cases / name / "1", "item", *([line] if line else []))
    file = cases / "brands" / "1" / "tiny" / "tiny.item"
    file.write_text(file.read_text().replace("\tb0", "\tb1"))
    torch.multiprocessing.start_processes(_member, (tmp_path,), 2, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]

    data = read_dataset(PosConfig("FPARec", "tiny", None, {
        "data_path": str(whole), "load_col": LOAD, "filter_inter_by_user_or_item": True,
    }))  # fmt: skip
    data.build()
    for one in found:
        assert one["summary"] == data.split.summary and one["counts"] == count_dataset(data)
        np.testing.assert_array_equal(np.sort(one["popularity"]), np.sort(data.popularity))
        assert one["different"] == [None, "other"]
        assert one["shared_user"].startswith("data_part: 2 users are in several parts, such as 'u")
        assert "processes 0 and 1" in one["shared_user"]
        assert "process 1 has another item_id" in one["items"]
        assert "process 1 has another brand" in one["brands"]
        assert "tiny.2.inter is read by process 2" in one["unread_part"]
        assert "part of process 1 has no valid target" in one["no_target"]
    assert found[0]["identity"] == found[1]["identity"]
    assert found[0]["users"] < found[1]["users"] < data.user_num - 1
    # both take the same steps, which have the targets of both
    steps = [np.array(one["steps"]) for one in found]
    np.testing.assert_array_equal(steps[0][:, 0] + steps[1][:, 0], steps[0][:, 1])
    np.testing.assert_array_equal(steps[0][:, 1], steps[1][:, 1])
    assert steps[0][:, 1].sum() == found[0]["targets"] == found[1]["targets"]
    kept = (whole / "tiny" / cache.FOLDER).rglob("*.pt")
    assert sorted(file.parent.name for file in kept) == ["0", "1"]


@pytest.mark.long
def test_parts_are_trained_and_tested_as_the_whole(tmp_path) -> None:
    """With one batch an epoch and without dropout: the same losses; same weights, same metrics."""
    folder = divide(tmp_path / "data")
    given = {
        **{"data_path": str(folder), "train_batch_size": 10**6, "epochs": 3},
        **{"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0, "learning_rate": 0.01},
        **{"hidden_size": 16, "MAX_ITEM_LIST_LENGTH": 12},
    }
    parts = {**given, "data_part": "by_rank"}
    more: dict[str, Any] = {"nproc": 2, "verbose": False}
    one, two = tmp_path / "one", tmp_path / "two"
    recbole_pos.run("FPARec", "tiny", None, given, one, **more)
    recbole_pos.run("FPARec", "tiny", None, {**parts, "epochs": 2}, two, **more)
    recbole_pos.run(resume=two, config_dict={"epochs": 3}, **more)
    (weights, epochs, _), (others, other_epochs, _) = outcome(one), outcome(two)
    for line, other in zip(epochs, other_epochs, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-5)
        assert other["valid"] == pytest.approx(line["valid"], abs=0.02)
    torch.testing.assert_close(dict(others), dict(weights), rtol=1e-2, atol=2e-4)
    result, other_result = (json.loads((run / "result.json").read_text()) for run in (one, two))
    for key in ("valid_targets", "test_targets", "split"):
        assert other_result[key] == result[key]

    trained = recbole_pos.Recommender.load(two)
    whole = prepare(PosConfig("FPARec", "tiny", None, given))
    whole.model.load_state_dict(trained.model.state_dict())
    test = whole.loaders["test"]
    metrics = whole.trainer.evaluate(test, load_best_model=False)
    assert other_result["test"] == pytest.approx(metrics, abs=1e-12)
    ranks = collect_test_ranks(whole.trainer.eval_collector, test._dataset)
    tables = [ranks, pd.read_parquet(two / "test_ranks.parquet")]
    tables = [table.sort_values(["user", "history"], ignore_index=True) for table in tables]
    pd.testing.assert_frame_equal(*tables)

    assert len(trained.recommend(histories=[{"items": ["i1", "i2"]}], k=3)) == 3
    mrr = recbole_pos.evaluate(two, metrics=["MRR"], topk=[5])
    assert mrr["mrr@5"] == other_result["test"]["mrr@5"]
    with pytest.raises(UsageError, match="must be read from all users"):
        recbole_pos.load(two, histories_only=False)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("eval_args.split", {"eval_args": {"split": {"GT": [0.8, 0.9]}}}),
        ("eval_args.cold_items", {"eval_args": {"cold_items": "drop"}}),
        ("item_inter_num_interval", {"item_inter_num_interval": "[5,inf)"}),
        ("benchmark_filename", {"benchmark_filename": ["train", "test"]}),
        ("load_col", {"load_col": {**LOAD, "user": ["user_id", "age"]}}),
        ("load_col", {"load_col": {"inter": [*LOAD["inter"], "stars"]}}),
        ("metrics", {"metrics": ["NDCG", "AveragePopularity"]}),
        ("augmentation", {"augmentation": "prefix"}),
        ("data_part", {}),  # one process
    ],
)
def test_what_needs_all_users(tmp_path, key, options) -> None:
    given = {"data_part": "by_rank", "data_path": str(divide(tmp_path)), **options}
    with pytest.raises(UsageError, match=f"^{key}: ") as error:
        recbole_pos.run("FPARec", "tiny", None, given, verbose=False)
    assert "data_part: none" in str(error.value)
