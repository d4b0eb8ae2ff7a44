"""Theirs against ours: RecBole's SASRec, its evaluator, and its own ``run_recbole``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.trainer import Trainer
from recbole.utils import init_seed

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import prepare
from recbole_pos.model.sasrec import PosSASRec

AS_RECBOLE = {
    "norm": "post",
    "position_from": "oldest",
    "hidden_dropout_prob": 0.0,
    "attn_dropout_prob": 0.0,
    "inner_size": 24,
}


@pytest.mark.parametrize("layers", [1, 3])
def test_weights_of_recboles_sasrec_load_strictly(experiment, layers: int) -> None:
    """Same outputs in float64, in evaluation and (without dropout) in training mode."""
    options = {"n_layers": layers, "hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}
    theirs = experiment("SASRec", hidden_size=16, inner_size=24, **options)
    ours = experiment("PosSASRec", **{**AS_RECBOLE, "n_layers": layers})
    for p in theirs.model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ours.model.load_state_dict(theirs.model.state_dict(), strict=True)
    theirs.model.double(), ours.model.double()
    rows = theirs.loaders["train"]._dataset[np.arange(200)]
    for mode in (True, False):
        theirs.model.train(mode), ours.model.train(mode)
        torch.testing.assert_close(
            ours.model.full_sort_predict(rows),
            theirs.model.full_sort_predict(rows),
            rtol=1e-10,
            atol=1e-10,
        )
        torch.testing.assert_close(ours.model.predict(rows), theirs.model.predict(rows))


def test_all_positions_and_prefix_rows_give_the_same_loss(experiment) -> None:
    """Position t of a window is the prefix up to t, when positions count from the oldest."""
    made = experiment("PosSASRec", **AS_RECBOLE, MAX_ITEM_LIST_LENGTH=30)
    model = made.model.double().eval()
    windows = made.trainer.training_loader(made.loaders["train"])
    total = sum(model.window_loss(batch) * len(batch) for batch in windows) / windows.targets
    rows = made.loaders["train"]._dataset[np.arange(windows.targets)]
    torch.testing.assert_close(total, model.calculate_loss(rows), rtol=1e-9, atol=1e-9)


def test_training_and_evaluation_mode_agree_without_dropout(experiment) -> None:
    for name in ("PosSASRec", "FPARec", "PARec"):
        made = experiment(name, hidden_dropout_prob=0.0, attn_dropout_prob=0.0)
        rows = made.loaders["valid"]._dataset[np.arange(20)]
        scores = [made.model.train(mode).full_sort_predict(rows) for mode in (True, False)]
        torch.testing.assert_close(*scores)


def test_evaluation_equals_stock_recbole_on_the_same_weights(tmp_path, tiny) -> None:
    """Metrics of RecBole's trainer on RecBole's data, against ours, for the same SASRec weights.

    The tiny dataset's times are small enough after subtraction to be exact in float32 too.
    """
    shared = {
        "data_path": str(tiny),
        "metrics": ["Hit", "NDCG", "MRR"],
        "topk": [5, 10, 20],
        "valid_metric": "NDCG@10",
        "metric_decimal_place": 6,
        "MAX_ITEM_LIST_LENGTH": 12,
        "show_progress": False,
        "train_neg_sample_args": None,
        "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
    }
    # stable order of the file decides ties in both; float32 must not make new ones
    config = Config("SASRec", "tiny", config_dict={**shared, "checkpoint_dir": str(tmp_path)})
    dataset = create_dataset(config)
    exact = dataset.inter_feat["timestamp"] - dataset.inter_feat["timestamp"].min()
    dataset.inter_feat["timestamp"] = exact
    _, valid, test = data_preparation(config, dataset)
    init_seed(1, True)
    from recbole.model.sequential_recommender import SASRec

    model = SASRec(config, dataset)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    import os

    here = os.getcwd()
    os.chdir(tmp_path)  # RecBole's trainer writes log_tensorboard/ into the working directory
    try:
        trainer = Trainer(config, model)
    finally:
        os.chdir(here)
    want = [dict(trainer.evaluate(part, load_best_model=False)) for part in (valid, test)]

    ours = prepare(
        PosConfig("PosSASRec", "tiny", None, {**shared, **AS_RECBOLE, "inner_size": 256})
    )
    ours.model.load_state_dict(model.state_dict())
    builtin = prepare(PosConfig("SASRec", "tiny", None, shared))
    builtin.model.load_state_dict(model.state_dict())
    for made in (builtin, ours):
        got = [
            dict(made.trainer.evaluate(made.loaders[phase], load_best_model=False))
            for phase in ("valid", "test")
        ]
        assert got == want
    assert want[1]["ndcg@10"] > 0


@pytest.mark.parametrize("model", ["SASRec", "Pop"])
def test_mask_history_against_brute_force(experiment, model: str) -> None:
    """Past items leave the ranking (the target excepted), for sequential and general models."""
    for mask in (True, False):
        made = experiment(model, mask_history=mask)
        made.trainer.fit(made.loaders["train"], saved=False, verbose=False)
        made.trainer.tot_item_num, made.trainer.eval_log = made.dataset.item_num, made.dataset.log
        log = made.dataset.log
        for batch in made.loaders["test"]:
            interaction, scores, rows, items = made.trainer._full_sort_batch_eval(batch)
            for row, target in zip(rows.tolist(), items.tolist(), strict=True):
                user = int(interaction["user_id"][row])
                past = log.items[log.offsets[user] : log.offsets[user + 1] - 1].tolist()
                hidden = {0} | (set(past) - {target} if mask else set())
                assert set(torch.where(scores[row] == -torch.inf)[0].tolist()) == hidden


def test_recboles_own_run_recbole_finds_the_plugin(tmp_path, monkeypatch) -> None:
    """``import recbole_pos`` is all it takes; data, trainer and defaults are the plugin's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pytest"])
    from recbole.quick_start import run_recbole

    options = {"epochs": 1, "show_progress": False, "hidden_size": 16, "inner_size": 16}
    result = run_recbole(model="FPARec", dataset="ml-100k", config_dict=options)
    assert result["best_valid_score"] == result["best_valid_result"]["ndcg@10"] > 0
    ours = prepare(PosConfig("FPARec", "ml-100k", None, options))
    ours.trainer.fit(ours.loaders["train"], ours.loaders["valid"], saved=False, verbose=False)
    assert dict(ours.trainer.evaluate(ours.loaders["test"])) == dict(result["test_result"])


def test_models_are_one_class_however_they_are_found() -> None:
    from recbole.utils import get_model

    assert get_model("PosSASRec") is PosSASRec


def test_run_recbole_loads_the_time_field_of_other_data(tiny, tmp_path, monkeypatch) -> None:
    """RecBole's default load_col leaves it out, and then no sequence can be ordered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pytest"])
    from recbole.quick_start import run_recbole

    options = {"epochs": 1, "show_progress": False, "data_path": str(tiny)}
    assert run_recbole(model="PARec", dataset="tiny", config_dict=options)["test_result"]
