"""Event log, splits, windows and loaders against brute force on random logs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import shop
import torch
from conftest import make_log, write_atomic
from hypothesis import given
from hypothesis import strategies as st

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import PosDataset, PosSequentialDataset
from recbole_pos.data.events import EventLog
from recbole_pos.data.loaders import BatchRequirements, make_training_loader
from recbole_pos.data.splits import TRAIN
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset

ML100K = {"show_progress": False, "MAX_ITEM_LIST_LENGTH": 20}


def log_of(user: list[int], time: list[float]) -> EventLog:
    fields = {
        "u": torch.tensor(user),
        "i": torch.arange(len(user)),
        "t": torch.tensor(time, dtype=torch.float64),
    }
    return EventLog.build(fields, max(user, default=0) + 1, "u", "i", "t")


events = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=40)


@given(events)
def test_log_sorts_by_user_time_and_file_order(pairs: list[tuple[int, int]]) -> None:
    log = log_of([u for u, _ in pairs], [t for _, t in pairs])
    want = sorted(range(len(pairs)), key=lambda row: (pairs[row], row))
    assert log.items.tolist() == want
    for user in range(1, len(log.offsets) - 1):
        mine = [i for i in want if pairs[i][0] == user]
        assert log.items[log.offsets[user] : log.offsets[user + 1]].tolist() == mine


def test_exact_times_change_ml_100k() -> None:
    """RecBole's float32 times give some users another last item; ours agree with pandas."""
    config = PosConfig("SASRec", "ml-100k", None, ML100K)
    dataset = PosSequentialDataset(config)
    frame = pd.read_csv(Path(config["data_path"]) / "ml-100k.inter", sep="\t")
    frame.columns = [c.split(":")[0] for c in frame]
    frame = frame.sort_values("timestamp", kind="stable")
    last = frame.groupby("user_id").item_id.last()
    test = dataset.build()[2][np.arange(943)]
    # RecBole's yaml for ml-100k normalises every float field; times are left alone
    assert dataset.log.times.min() == frame.timestamp.min() > 8e8
    users = dataset.field2id_token["user_id"][test["user_id"].numpy()]
    items = dataset.field2id_token["item_id"][test["item_id"].numpy()]
    assert {int(u): int(i) for u, i in zip(users, items, strict=True)} == last.to_dict()


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


@pytest.mark.parametrize("negatives", [None, {"distribution": "uniform", "sample_num": 1}])
def test_pop_counts_training_events(experiment, negatives: dict | None) -> None:
    """All of a batch, where RecBole's own counts an item once; and no sampled negative."""
    made = experiment("Pop", train_neg_sample_args=negatives, epochs=1)
    made.trainer.fit(made.loaders["train"], made.loaders["valid"])
    log, part = made.dataset.log, made.dataset.part
    counts = np.bincount(log.items.numpy()[part == TRAIN], minlength=made.dataset.item_num)
    assert counts.max() > 5
    np.testing.assert_array_equal(made.model.item_cnt[:, 0].numpy(), counts)


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


def test_interaction_matrix_holds_the_training_events(experiment) -> None:
    made = experiment("SASRec")
    train = made.loaders["train"]._dataset
    matrix = train.inter_matrix("csr")
    assert matrix.sum() == (made.dataset.part == TRAIN).sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_windows": "all"}, "train_windows"),
        ({"train_windows": "sliding", "window_stride": 0}, "window_stride"),
        ({"TIME_FIELD": "when"}, "when"),
        ({"window_stride": 3}, "only read under train_windows: sliding"),
        ({"ITEM_LIST_LENGTH_FIELD": "item_id"}, "exist already: item_id"),
        ({"LIST_SUFFIX": ""}, "LIST_SUFFIX: expected text"),
        ({"user_inter_num_interval": "[1000,inf)"}, "no interaction"),
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
    numbers[0] = np.nan
    made["item"]["v:float_seq"] = [" ".join(map(str, row)) for row in numbers]
    made["item"].loc[0, "v:float_seq"] = ""
    load = {**shop.LOAD, "item": ["item_id", "price", "v"]}
    options = {"data_path": str(shop.write(tmp_path, made)), "load_col": load, **chosen}
    plain, other = (
        read_dataset(PosConfig("PosSASRec", "shop", None, given, strict=False))
        for given in ({"data_path": str(tmp_path), "load_col": load}, options)
    )
    for dataset in (plain, other):
        dataset.build()
    assert torch.equal(plain.log.times, other.log.times)
    price, vectors = plain.item_feat["price"].double(), plain.item_feat["v"].double()
    low, high = np.nanmin(numbers), np.nanmax(numbers)
    names = list(made["item"]["item_id:token"])
    empty = plain.field2token_id["item_id"][names[0]]
    vectors = (vectors - low) / (high - low)
    vectors[[0, empty]] = 0
    torch.testing.assert_close(other.item_feat["v"].double(), vectors, rtol=0, atol=1e-6)
    scaled = (price - price.min()) / (price.max() - price.min())
    torch.testing.assert_close(other.item_feat["price"].double(), scaled, rtol=0, atol=1e-6)


def test_missing_times_are_an_error(tmp_path: Path) -> None:
    frame = make_log(users=10)
    frame.loc[[3, 5], "timestamp"] = np.nan, np.inf
    options = {"data_path": str(write_atomic(frame, tmp_path))}
    with pytest.raises(UsageError, match="2 of .* no finite 'timestamp'"):
        PosSequentialDataset(PosConfig("FPARec", "tiny", None, options))


def test_more_cutoffs_than_items_is_an_error(tmp_path: Path, experiment) -> None:
    path = str(write_atomic(make_log(users=10, items=8), tmp_path))
    with pytest.raises(UsageError, match="topk: 20 is more than the 8 items"):
        experiment("FPARec", data_path=path)
