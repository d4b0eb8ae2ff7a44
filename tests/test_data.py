"""Datasets and what is read of them, against brute force on random logs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import shop
import torch
from conftest import make_log, write_atomic
from recbole.evaluator import Collector

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import PosDataset, PosSequentialDataset
from recbole_pos.data.loaders import BatchRequirements, make_training_loader
from recbole_pos.data.splits import TRAIN
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.experiment.evaluation import TOPK, TargetCollector


def brute_force_rows(frame: pd.DataFrame, longest: int) -> dict[str, list[tuple]]:
    """(user, history, target) of each phase, from the frame in file order."""
    rows: dict[str, list[tuple]] = defaultdict(list)
    for user, group in frame.sort_values("timestamp", kind="stable").groupby("user_id"):
        items = group.item_id.tolist()
        phases = ["test", "valid"][: max(len(items) - 2, 0)]
        for place in range(len(items) - 1, 0, -1):
            phase = phases.pop(0) if phases else "train"
            rows[phase].append((user, tuple(items[max(0, place - longest) : place]), items[place]))
    return {phase: sorted(found) for phase, found in rows.items()}


def lazy_rows(dataset, part) -> list[tuple]:
    users, items = (dataset.field2id_token[f] for f in ("user_id", "item_id"))
    batch = part[np.arange(len(part))]
    found = []
    for r in range(len(batch)):
        length = int(batch["item_length"][r])
        assert (batch["item_id_list"][r, length:] == 0).all()
        history = tuple(items[batch["item_id_list"][r, :length].numpy()])
        found.append((users[int(batch["user_id"][r])], history, items[int(batch["item_id"][r])]))
    return sorted(found)


def test_prefix_rows_against_brute_force(tiny: Path) -> None:
    dataset = PosSequentialDataset(
        PosConfig("SASRec", "tiny", None, {"data_path": str(tiny), "MAX_ITEM_LIST_LENGTH": 6})
    )
    want = brute_force_rows(make_log(), 6)
    for phase, part in zip(("train", "valid", "test"), dataset.build(), strict=True):
        assert lazy_rows(dataset, part) == want[phase]


def test_pop_counts_training_events(experiment) -> None:
    """All of a batch, where RecBole's own counts an item once."""
    made = experiment("Pop", epochs=1)
    made.trainer.fit(made.loaders["train"], made.loaders["valid"])
    log, part = made.dataset.log, made.dataset.part
    counts = np.bincount(log.items.numpy()[part == TRAIN], minlength=made.dataset.item_num)
    assert counts.max() > 5
    np.testing.assert_array_equal(made.model.item_cnt[:, 0].numpy(), counts)
    assert made.loaders["train"]._dataset.inter_matrix("csr").sum() == counts.sum()


@pytest.mark.parametrize("model", ["FPMC", "BPR"])
def test_popular_negatives_come_from_training_alone(tmp_path: Path, model: str) -> None:
    """An item that only occurs held out must never be drawn as a popular negative."""
    frame = pd.DataFrame(
        {
            "user_id": [f"u{u}" for u in range(30) for _ in range(5)],
            "item_id": [i for u in range(30) for i in ("a", "bc"[u % 2], "d", "valid", "test")],
            "timestamp": list(range(5)) * 30,
        }
    )
    negatives = {"distribution": "popularity", "sample_num": 1}
    options = {"data_path": str(write_atomic(frame, tmp_path)), "train_neg_sample_args": negatives}
    config = PosConfig(model, "tiny", None, options)
    dataset = (PosSequentialDataset if model == "FPMC" else PosDataset)(config)
    train = make_training_loader(config, dataset.build()[0], BatchRequirements())
    drawn = torch.cat([batch["neg_item_id"] for _ in range(5) for batch in train])
    tokens = dataset.field2id_token["item_id"][drawn.unique()]
    assert set(tokens) <= {"a", "b", "c", "d"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_windows": "all"}, "train_windows"),
        ({"TIME_FIELD": "when"}, "when"),
        ({"window_stride": 3}, "only read under train_windows: sliding"),
        ({"train_windows": "sliding", "window_stride": 0}, "window_stride"),
        ({"ITEM_LIST_LENGTH_FIELD": "item_id"}, "exist already: item_id"),
        ({"LIST_SUFFIX": ""}, "LIST_SUFFIX"),
        ({"user_inter_num_interval": "[1000,inf)"}, "no interaction"),
        ({"val_interval": {"item_id": "[3,inf)"}}, "val_interval.*item_id.*float"),
        ({"item_inter_num_interval": "[24,inf)"}, "topk: 20 is more than the . items"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_data_options_say_what_is_wrong(experiment, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made = experiment("PosSASRec", **options)
        made.trainer.training_loader(made.loaders["train"])


@pytest.mark.parametrize("chosen", [{"normalize_all": True}, {"normalize_field": ["price", "v"]}])
def test_numbers_and_vectors_are_normalized_and_times_are_exact(
    tmp_path: Path, chosen: dict
) -> None:
    """Also of the missing: the mean of the others, and a vector of zeros."""
    made = shop.tables(users=20)
    numbers = np.random.default_rng(0).normal(size=(len(made["item"]), 3)).round(3)
    made["item"]["v:float_seq"] = [" ".join(map(str, row)) for row in numbers]
    made["item"].loc[0, "v:float_seq"] = ""
    low, high = numbers[1:].min(), numbers[1:].max()
    load = {**shop.LOAD, "item": ["item_id", "price", "v"]}
    given = {"data_path": str(shop.write(tmp_path, made)), "load_col": load}
    plain, other = (
        read_dataset(PosConfig("PosSASRec", "shop", None, {**given, **more}, strict=False))
        for more in ({}, chosen)
    )
    for dataset in (plain, other):
        dataset.build()
    assert torch.equal(plain.log.times, other.log.times)
    price, vectors = plain.item_feat["price"], (plain.item_feat["v"].double() - low) / (high - low)
    vectors[[0, plain.field2token_id["item_id"][made["item"]["item_id:token"][0]]]] = 0
    torch.testing.assert_close(other.item_feat["v"], vectors.float(), rtol=0, atol=1e-6)
    scaled = (price - price.min()) / (price.max() - price.min())
    torch.testing.assert_close(other.item_feat["price"], scaled, rtol=0, atol=1e-6)


def test_missing_times_are_an_error(tmp_path: Path) -> None:
    frame = make_log(users=10)
    frame.loc[[3, 5], "timestamp"] = np.nan, np.inf
    options = {"data_path": str(write_atomic(frame, tmp_path))}
    with pytest.raises(UsageError, match="2 of .* no finite 'timestamp'"):
        PosSequentialDataset(PosConfig("FPARec", "tiny", None, options))


@pytest.mark.parametrize("metrics", [["Recall", "MRR", "ItemCoverage"], ["GAUC"]])
def test_the_evaluator_is_given_what_recbole_gives_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, metrics: list[str]
) -> None:
    """With ties, and rows in any order; of several targets, which alone need RecBole's matrix."""
    ranked = metrics[0] if metrics == ["GAUC"] else f"{metrics[0]}@3"
    given = {"data_path": str(tiny), "metrics": metrics, "topk": [3], "valid_metric": ranked}
    config = PosConfig("PosSASRec", "tiny", None, given)
    needs_matrix, collect = [], Collector.eval_batch_collect

    def eval_batch_collect(self: Any, *batch: Any) -> None:
        needs_matrix.append(self.register.need(TOPK))
        collect(self, *batch)

    monkeypatch.setattr(Collector, "eval_batch_collect", eval_batch_collect)
    found = []
    for kind in (TargetCollector, Collector):
        torch.manual_seed(0)
        collector = kind(config)
        for rows, items in ((4, 9), (1, 9), (6, 9)):
            scores = torch.randint(0, 4, (rows, items)).float()
            scores[:, 0] = -torch.inf
            targets = torch.randperm(rows), torch.randint(1, items, (rows,))
            collector.eval_batch_collect(scores, None, *targets)
        several = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 8])
        collector.eval_batch_collect(torch.randn(2, 9), None, *several)
        found.append(collector.get_data_struct()._data_dict)
    ours, other = found
    assert set(ours) == set(other) and ours
    for key, value in ours.items():
        assert value.dtype == other[key].dtype and torch.equal(value, other[key])
    if metrics != ["GAUC"]:
        assert needs_matrix == [False] * 3 + [True] * 5
