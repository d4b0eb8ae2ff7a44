"""RecBole's own functions with the plugin's models, and with the checkpoints that they write."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL, make_log, write_atomic
from recbole.config import Config
from recbole.quick_start import load_data_and_model, objective_function, run_recbole
from recbole.trainer import Trainer
from recbole.utils.case_study import full_sort_scores, full_sort_topk

import recbole_pos
from recbole_pos.config.posconfig import PosConfig, to_plain_options
from recbole_pos.errors import CheckpointError
from recbole_pos.experiment.recbole_file import read
from recbole_pos.experiment.run import load

# RecBole's default load_col leaves the time field out for its own models
COLUMNS = {"inter": ["user_id", "item_id", "timestamp"]}
ROOT = Path(recbole_pos.__file__).parent.parent
LAST = {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full"}
OTHERS = {"epochs": 1, "show_progress": False, "load_col": COLUMNS, "eval_args": LAST}
SASREC = {**OTHERS, "hidden_size": 8, "inner_size": 8, "train_neg_sample_args": None}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """RecBole writes into the working directory, and reads the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["recbole", "--hidden_size=4"])
    return tmp_path


def train(model: str, tiny: Path, **options: Any) -> tuple[dict, Path]:
    """What RecBole's function gives, and the file that it left."""
    given = {"data_path": str(tiny), "checkpoint_dir": "kept", **options}
    result = run_recbole(model=model, dataset="tiny", config_dict=given)
    (file,) = Path("kept").glob("*.pth")
    return result, file.resolve()


def same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


# --- models of the plugin ---


def test_a_file_of_run_recbole_is_loaded_by_both(tiny: Path, tmp_path_factory, monkeypatch) -> None:
    """Options of the configuration and of the command line included, and from another folder."""
    monkeypatch.chdir(tiny.parent)
    given = {**SMALL, "position": ["rope"], "eval_args": {"split": {"LS": "valid_and_test"}}}
    given.pop("hidden_size")
    result, file = train("PosSASRec", Path(tiny.name), **given, mine=1)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setattr("sys.argv", ["recbole", "--hidden_size=8"])

    ours = recbole_pos.load(file)
    assert ours.model.item_embedding.embedding_dim == 4
    assert ours.trainer.evaluate(ours.loaders["test"], False) == result["test_result"]
    config, model, dataset, _, _, test = load_data_and_model(file)
    assert config["position"] == ["rope"] and type(dataset).__name__ == "PosSequentialDataset"
    same(model, ours.model)
    assert len(test) == len(ours.loaders["test"])
    assert len(recbole_pos.recommend(file, users=["u9"], k=3)) == 3


def test_the_checkpoint_of_a_run_is_loaded_by_recbole(tiny: Path) -> None:
    given = {**SMALL, "data_path": str(tiny), "epochs": 1}
    recbole_pos.run("PARec", "tiny", None, given, "run", verbose=False)
    same(load_data_and_model("run/checkpoint.pt")[1], recbole_pos.load("run").model)
    same(recbole_pos.load("run/checkpoint.pt").model, recbole_pos.load("run").model)


def test_a_configuration_of_recbole_is_the_same_as_ours(tiny: Path) -> None:
    given = {"data_path": str(tiny), "learning_rate": 0.5, "hidden_size": 8}
    given["eval_args"] = {"order": "TO", "split": {"RS": [8, 1, 1]}, "target": "last"}
    other = to_plain_options(Config("FPARec", "tiny", config_dict={**given, "no_option": 3}))
    ours = PosConfig("FPARec", "tiny", None, {**given, "hidden_size": 4}).plain
    assert {k: v for k, v in other.items() if k != "eval_args"} == {
        k: v for k, v in ours.items() if k != "eval_args"
    }
    assert other["eval_args"].items() >= given["eval_args"].items()
    assert PosConfig(None, None, None, other).plain == other


def test_other_data_are_refused(tiny: Path, tmp_path: Path) -> None:
    write_atomic(make_log(), tmp_path)
    _, file = train("PARec", tmp_path, **{**SMALL, "epochs": 1})
    write_atomic(make_log(seed=1), tmp_path)
    for function in (load_data_and_model, load):
        with pytest.raises(CheckpointError, match="other data or another split"):
            function(file)


def test_objective_function(tiny: Path) -> None:
    """It reports its metrics to Ray, in one mapping."""
    found = objective_function({"model": "FPARec", "dataset": "tiny", "data_path": str(tiny),
                                **SMALL, "epochs": 1})  # fmt: skip
    assert found["model"] == "FPARec" and found["valid_score_bigger"]
    assert found["best_valid_score"] == found["best_valid_result"]["ndcg@10"]


def test_case_studies(experiment) -> None:
    made = experiment("PosSASRec")
    test, dataset = made.loaders["test"], made.dataset
    users = dataset.token2id(dataset.uid_field, ["u9", "u20"])
    scores = full_sort_scores(users, made.model.eval(), test)
    assert scores.shape == (2, dataset.item_num) and (scores[:, 0] == -torch.inf).all()
    for user, row in zip(users, scores, strict=True):
        history = dataset.log.items[dataset.log.offsets[user] : dataset.log.offsets[user + 1] - 1]
        ctx_items = history[-SMALL["MAX_ITEM_LIST_LENGTH"] :]
        state = made.model(ctx_items[None], torch.tensor([len(ctx_items)]))
        expected = (state @ made.model.item_embedding.weight.T)[0]
        torch.testing.assert_close(row[1:], expected[1:].detach())
    top, items = full_sort_topk(users, made.model, test, k=3)
    torch.testing.assert_close(top, scores.sort(descending=True).values[:, :3])
    assert dataset.id2token(dataset.iid_field, items).shape == (2, 3)


# --- RecBole's ---


def test_recboles_own_model_trains_is_tested_loaded_and_resumed(tiny: Path) -> None:
    result, file = train("SASRec", tiny, **{**SASREC, "epochs": 3})
    config, model, dataset, *loaders = load_data_and_model(str(file))
    assert type(config) is Config and config["model"] == "SASRec" and config["hidden_size"] == 4
    assert model.item_embedding.embedding_dim == 4 and config.model_class is type(model)
    trainer = Trainer(config, model)
    assert trainer.evaluate(loaders[-1], load_best_model=False) == result["test_result"]
    torch.nn.init.zeros_(model.item_embedding.weight)
    assert trainer.evaluate(loaders[-1], model_file=file) == result["test_result"]
    trainer.resume_checkpoint(file)
    assert trainer.start_epoch >= 1 and trainer.optimizer.state_dict()["state"]
    with pytest.raises(CheckpointError, match="loads with RecBole's load_data_and_model"):
        recbole_pos.load(file)


def test_what_models_keep_beside_their_weights(tiny: Path) -> None:
    """A sparse matrix of lists and one of columns, which are made again of the data."""
    result, file = train("ItemKNN", tiny, **{**OTHERS, "k": 5})
    *_, model, _, _, _, test = load_data_and_model(file)
    again = Trainer(
        Config("ItemKNN", "tiny", config_dict={"data_path": str(tiny), **OTHERS}), model
    )
    assert again.evaluate(test, load_best_model=False) == result["test_result"]


def test_layers_beside_weights_come_from_the_weights() -> None:
    columns = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "brand"]}
    given = {**SASREC, "data_path": str(ROOT / "dataset"), "checkpoint_dir": "kept"}
    given |= {"load_col": columns, "selected_features": ["brand"]}
    result = run_recbole(model="SASRecF", dataset="toyshop", config_dict=given)
    (file,) = Path("kept").glob("*.pth")
    config, model, *_, test = load_data_and_model(file)
    assert not read(file)["other_parameter"] and model.feature_embed_layer.token_embedding_table
    assert Trainer(config, model).evaluate(test, False) == result["test_result"]


def test_a_model_of_ours_on_its_split_is_not_for_recbole(tiny: Path) -> None:
    given = {"data_path": str(tiny), "epochs": 1, "hidden_size": 8, "inner_size": 8}
    recbole_pos.run("SASRec", "tiny", None, given, "run", verbose=False)
    with pytest.raises(CheckpointError, match="load it with recbole_pos.load"):
        load_data_and_model("run/checkpoint.pt")


def test_a_model_of_ones_own_must_be_registered_again(tiny: Path) -> None:
    from recbole.model.sequential_recommender import SASRec

    class Mine(SASRec):
        """Which the file names as a class of this module."""

    Mine.__qualname__ = "Mine"
    globals()["Mine"] = Mine
    recbole_pos.register_model(Mine)
    _, file = train("Mine", tiny, **SASREC)
    assert type(load_data_and_model(file)[1]) is Mine
    recbole_pos.model.models.ADDED.added.clear()
    with pytest.raises(CheckpointError, match="'Mine'.*register_model"):
        load_data_and_model(file)


# --- files that want something else ---


class Call:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.parts = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> tuple:
        return self.parts


MARK = "touched"
TOUCH = Call(os.mkdir, MARK)
CALLS = {
    "mkdir": TOUCH,
    "eval": Call(eval, f"__import__('os').mkdir({MARK!r})"),
    "getattr": Call(getattr, Call(__import__, "os"), "mkdir"),
    "numpy object": Call(np.dtype, Call(os.mkdir, MARK)),
    "in a tensor": Call(
        torch._utils._rebuild_tensor_v2, TOUCH, 0, (1,), (1,), False, OrderedDict()
    ),
    "into a function": Call(OrderedDict, state=Call(os.mkdir, MARK)),
    "pickle": Call(pickle.loads, pickle.dumps(TOUCH)),
}


PLACES = ("config", "state_dict", "other_parameter", "beside")


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_nothing_of_a_file_is_run(tiny: Path, number: int) -> None:
    place, evil = PLACES[number % len(PLACES)], [*CALLS.values()][number]
    state: dict[str, Any] = {
        "config": Config("SASRec", "tiny", config_dict={**SASREC, "data_path": str(tiny)}),
        "state_dict": {},
        "other_parameter": {},
        **{"epoch": 1, "cur_step": 0, "best_valid_score": 0.5},
        "optimizer": {"state": {}, "param_groups": []},
    }
    if place == "config":
        state["config"].final_config_dict["seed"] = evil
    elif place == "beside":
        state["epoch"] = evil
    else:
        state[place]["weight"] = evil
    torch.save(state, "evil.pth", pickle_protocol=4)
    for function in (load_data_and_model, read):
        with pytest.raises(CheckpointError, match=r"evil\.pth"):
            function("evil.pth")
    assert not Path(MARK).exists()


@pytest.mark.parametrize("model", ["SASRec", "PARec"])
def test_nothing_beside_a_file_is_run(tiny: Path, model: str) -> None:
    """RecBole looks for pickled data where a checkpoint says it was written."""
    _, file = train(model, tiny, **(SASREC if model == "SASRec" else {**SMALL, "epochs": 1}))
    for name in ("SequentialDataset", "PosSequentialDataset"):
        Path("kept", f"tiny-{name}.pth").write_bytes(pickle.dumps(TOUCH))
    Path("kept", f"tiny-for-{model}-dataloader.pth").write_bytes(pickle.dumps(TOUCH))
    assert type(load_data_and_model(file)[1]).__name__ == model
    assert not Path(MARK).exists()


def test_weights_alone_are_refused() -> None:
    torch.save(torch.nn.Linear(2, 2).state_dict(), "weights.pth")
    with pytest.raises(CheckpointError, match="config"):
        load_data_and_model("weights.pth")
