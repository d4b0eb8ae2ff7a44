"""RecBole's causal models at every position, against RecBole's own code on one row a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_builtins import WITH_FEATURES, shop  # noqa: F401

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.batch import SequenceBatch
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.model.models import BUILTIN_SEQUENTIAL, CAUSAL_BUILTINS
from recbole_pos.model.training import adapter, every_state


@pytest.fixture
def made(shop: Path) -> Callable[..., Experiment]:  # noqa: F811
    """``made(model, **options)``: in float64, without dropout, all weights random and large."""

    def build(model: str, **options: Any) -> Experiment:
        given = {
            "data_path": str(shop),
            "augmentation": "all_positions",
            "MAX_ITEM_LIST_LENGTH": 12,
            "train_batch_size": 16,
            **options,
        }
        if model == "FPMC":  # reads the last item only
            del given["MAX_ITEM_LIST_LENGTH"]
        if model in WITH_FEATURES:
            given["load_col"] = {"inter": ["user_id", "item_id", "timestamp"], "item": "*"}
            given["selected_features"] = ["class"]
        experiment = prepare(PosConfig(model, "tiny", None, given))
        torch.manual_seed(0)
        for parameter in experiment.model.double().parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        experiment.model.eval()
        return experiment

    return build


@pytest.mark.parametrize("model", CAUSAL_BUILTINS)
@pytest.mark.parametrize("windows", ["chunk", "prefix"])
def test_same_loss_as_recboles_rows(made, model: str, windows: str) -> None:
    """Every history fits: the scores of RecBole's ``full_sort_predict``, target by target."""
    experiment = made(model, train_windows=windows)
    rows = experiment.loaders["train"]._dataset
    loader = experiment.loaders["train"]
    loss = adapter(experiment.config, experiment.model).loss(loader.packed)
    with torch.no_grad():
        got = sum(loss(batch) * len(batch) for batch in loader)
        want = torch.zeros(1, dtype=torch.float64)
        for r in range(len(rows)):
            row = rows[np.array([r])]
            scores = experiment.model.full_sort_predict(row)[0]
            candidates = scores[1:]  # padding is none
            want += candidates.exp().sum().log() - scores[row["item_id"]]
    assert len(rows) == loader.targets
    torch.testing.assert_close(got, want[0], rtol=1e-10, atol=1e-10)
    assert "gather_indexes" not in vars(experiment.model)


@pytest.mark.parametrize("model", CAUSAL_BUILTINS)
def test_states_stand_with_their_targets(made, model: str) -> None:
    """Sliding windows have context without targets: each state is that of the window up to it."""
    options = {"MAX_ITEM_LIST_LENGTH": 4, "train_windows": "sliding", "window_stride": 1}
    experiment = made(model, **options)
    model_ = experiment.model
    loader = experiment.loaders["train"]
    batch = loader.gather(np.arange(len(loader.windows.start)))
    assert batch.positions is not None
    with torch.no_grad():
        states, seen = every_state(model_, batch), 0
        asked = np.zeros(len(batch.items), dtype=bool)
        asked[batch.positions] = True
        ends = np.cumsum(batch.lengths.numpy())
        for end, length in zip(ends, batch.lengths.tolist(), strict=True):
            items = batch.items[end - length : end]
            for t in range(length):
                if asked[end - length + t]:
                    want = model_(items[None, : t + 1], torch.tensor([t + 1]))
                    torch.testing.assert_close(states[seen], want[0], rtol=1e-10, atol=1e-10)
                    seen += 1
    assert seen == len(states) == len(batch)


@pytest.mark.parametrize("model", CAUSAL_BUILTINS)
def test_no_gradient_from_later_events(made, model: str) -> None:
    """The state after event t knows nothing of the embeddings of later items."""
    experiment = made(model)
    model_, items = experiment.model, torch.arange(1, 8)
    batch = SequenceBatch(items, torch.tensor([7]), items, width=7)
    for t in range(7):
        model_.zero_grad()
        every_state(model_, batch)[t].square().sum().backward()
        grad = model_.item_embedding.weight.grad[1:8].abs().sum(1)
        assert (grad[: t + 1] > 0).all() and not grad[t + 1 :].any()


def test_train_and_resume(shop: Path, tmp_path: Path) -> None:  # noqa: F811
    options = {"data_path": str(shop), "augmentation": "all_positions", "train_batch_size": 8}
    given = {**options, "MAX_ITEM_LIST_LENGTH": 8, "learning_rate": 0.01}
    whole = recbole_pos.run(
        "GRU4Rec", "tiny", None, {**given, "epochs": 3}, run_dir=tmp_path / "whole", verbose=False
    )
    part = {**given, "epochs": 1}
    recbole_pos.run("GRU4Rec", "tiny", None, part, run_dir=tmp_path / "part", verbose=False)
    again = recbole_pos.run(resume=tmp_path / "part", config_dict={"epochs": 3}, verbose=False)
    assert again.test == whole.test and again.best_valid == whole.best_valid
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]


def test_windows_a_batch(shop: Path) -> None:  # noqa: F811
    """128 unless given; RecBole's own number is one of rows."""
    base = {"data_path": str(shop), "augmentation": "all_positions"}
    sizes = [
        PosConfig("SASRec", "tiny", None, options)["train_batch_size"]
        for options in (base, {**base, "train_batch_size": 9}, {"data_path": str(shop)})
    ]
    assert sizes == [128, 9, 2048]


def test_what_cannot_learn_from_windows_says_so(made) -> None:
    with pytest.raises(UsageError, match="loss_type: .*GRU4Rec by BPR needs augmentation"):
        made("GRU4Rec", loss_type="BPR", train_neg_sample_args={"sample_num": 1})
    for model in set(BUILTIN_SEQUENTIAL) - set(CAUSAL_BUILTINS):
        with pytest.raises(UsageError, match=f"{model} can train with prefix or none"):
            made(model)
