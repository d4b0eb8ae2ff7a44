"""RecBole's own functions with the plugin's models, and with the checkpoints that they write."""

import copy
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import SMALL, make_log, run_python, write_atomic
from recbole.config import Config
from recbole.quick_start import load_data_and_model, run_recbole
from recbole.trainer import Trainer

import recbole_pos
from recbole_pos.config.posconfig import PosConfig, to_plain_options
from recbole_pos.errors import CheckpointError
from recbole_pos.plug import keep_plain_values

# RecBole's default load_col leaves the time field out for its own models
COLUMNS = {"inter": ["user_id", "item_id", "timestamp"]}
SASREC = {"epochs": 3, "load_col": COLUMNS, "hidden_size": 8, "inner_size": 8}
SASREC |= {"eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full"}}
SASREC |= {"train_neg_sample_args": None, "show_progress": False}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
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


# --- models of the plugin ---


def test_a_file_of_run_recbole_is_loaded_here(tiny, tmp_path_factory, monkeypatch) -> None:
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
    assert len(recbole_pos.recommend(file, users=["u9"], k=3)) == 3
    with pytest.raises(CheckpointError, match="recbole-pos with recbole_pos.load"):
        load_data_and_model(file)


def test_a_configuration_of_recbole_is_the_same_as_ours(tiny) -> None:
    given = {"data_path": str(tiny), "learning_rate": 0.5, "hidden_size": 8}
    given["eval_args"] = {"order": "TO", "split": {"RS": [8, 1, 1]}, "target": "last"}
    given["short_histories"] = None  # which RecBole's functions do not follow
    other = to_plain_options(Config("FPARec", "tiny", config_dict={**given, "no_option": 3}))
    ours = PosConfig("FPARec", "tiny", None, {**given, "hidden_size": 4}).plain
    assert PosConfig(None, None, None, other).plain == other
    assert other.pop("eval_args").items() >= given["eval_args"].items()
    assert ours.pop("eval_args") and other == ours


def test_other_data_are_refused(tiny, tmp_path) -> None:
    write_atomic(make_log(), tmp_path)
    _, file = train("PARec", tmp_path, **{**SMALL, "epochs": 1})
    write_atomic(make_log(seed=1), tmp_path)
    with pytest.raises(CheckpointError, match="other data or another split"):
        recbole_pos.load(file)


# --- RecBole's ---


def test_recboles_own_model_is_tested_loaded_and_resumed(tiny) -> None:
    """In the process that wrote the file; another file wants trust."""
    result, file = train("SASRec", tiny, **SASREC)
    for path, trust in ((file, {}), (shutil.copy(file, "copy.pth"), {"trust": True})):
        config, model, *_, test = load_data_and_model(str(path), **trust)
        assert type(config) is Config and config["model"] == "SASRec"
        trainer = Trainer(config, model)
        assert trainer.evaluate(test, load_best_model=False) == result["test_result"]
        torch.nn.init.zeros_(model.item_embedding.weight)
        assert trainer.evaluate(test, model_file=path, **trust) == result["test_result"]
        trainer.resume_checkpoint(path, **trust)
        assert trainer.start_epoch >= 1 and trainer.optimizer.state_dict()["state"]
    for act in (
        lambda: load_data_and_model("copy.pth"),
        lambda: trainer.evaluate(test, model_file="copy.pth"),
        lambda: trainer.resume_checkpoint("copy.pth"),
    ):
        with pytest.raises(CheckpointError, match=r"copy\.pth .*trust=True"):
            act()


# --- files that want something else ---


class Call:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("touched",)


def test_nothing_of_a_file_is_run() -> None:
    torch.save({"config": {"seed": Call()}, "state_dict": {}}, "evil.pth", pickle_protocol=4)
    with pytest.raises(CheckpointError, match=r"evil\.pth"):
        load_data_and_model("evil.pth")
    assert not Path("touched").exists()


# --- the fixes that RecBole needs ---


def test_plain_numbers_are_kept_where_recbole_1_2_1_moves_every_value_to_the_cpu() -> None:
    def get_data_struct(collector: Any) -> Any:
        values = collector.data_struct._data_dict
        for key in values:
            values[key] = values[key].cpu()
        return copy.deepcopy(collector.data_struct)

    values = {"data.num_items": 7, "rec.topk": torch.ones(2)}
    collector = SimpleNamespace(data_struct=SimpleNamespace(_data_dict=values))
    struct = keep_plain_values(get_data_struct, collector)
    assert struct._data_dict.keys() == values.keys()
    assert struct._data_dict["data.num_items"] == values["data.num_items"] == 7


def test_a_fresh_process_is_left_as_it_was() -> None:
    """RecBole's models switch anomaly mode on, which is put back; scikit-learn and tensorboard are
    imported when they are called."""
    code = """
import sys, torch
torch.autograd.set_detect_anomaly(True)
import recbole_pos
import recbole.model.sequential_recommender.sine
from recbole.evaluator import metrics
print(torch.is_anomaly_enabled())
print([name for name in ("sklearn", "torch.utils.tensorboard") if name in sys.modules])
print(metrics.sk_auc([0, 0.5, 1], [0, 0.7, 1]))
"""
    assert run_python("-c", code).split() == ["True", "[]", "0.6"]
