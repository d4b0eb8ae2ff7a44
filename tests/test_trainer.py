"""Training: determinism, exact resume after any kind of stop, safe checkpoints, bad losses."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CROSS_ENTROPY, make_log, write_atomic
from steps import learn

import recbole_pos
from recbole_pos.errors import CheckpointError, TrainingError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.diagnosis import explain_loss
from recbole_pos.experiment.state import weights_of

OPTIONS = {
    "hidden_size": 16,
    "inner_size": 16,
    "MAX_ITEM_LIST_LENGTH": 12,
    "epochs": 6,
    "train_batch_size": 16,
}
TIMING = ("seconds", "targets_per_second")


def run(tiny: Path, folder: Path, model: str = "FPARec", **options):
    given = {**OPTIONS, "data_path": str(tiny), **options}
    if model not in recbole_pos.model.models.MODELS:
        given = {k: v for k, v in given.items() if k not in ("hidden_size", "inner_size")}
    if model in ("FPMC", "Pop"):  # which know no history
        given.pop("MAX_ITEM_LIST_LENGTH", None)
    return recbole_pos.run(model, "tiny", None, given, run_dir=folder, verbose=False)


def outcome(folder: Path) -> tuple[dict, list[dict], dict]:
    """Weights, epochs and result of a run, without what a clock says."""
    state = checkpoint.load(folder / "checkpoint.pt")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for key in TIMING:
            line.pop(key)
    result = json.loads((folder / "result.json").read_text())
    kept = {k: result[k] for k in ("best_valid", "test", "epochs", "best_epoch")}
    return state["weights"]["state_dict"], lines, kept


def assert_same(one: Path, two: Path) -> None:
    first, second = outcome(one), outcome(two)
    assert first[0].keys() == second[0].keys()
    for name in first[0]:
        assert torch.equal(first[0][name], second[0][name]), name
    assert first[1:] == second[1:]


def test_same_seed_same_bits(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "a")
    run(tiny, tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")
    run(tiny, tmp_path / "c", seed=7)
    assert outcome(tmp_path / "c")[1] != outcome(tmp_path / "a")[1]


# a plugin model; a built-in whose loader has a generator and whose loss draws from numpy; one that
# keeps more than weights
@pytest.mark.parametrize("model", ["FPARec", "FPMC", "Pop"])
def test_resume_equals_uninterrupted(tiny: Path, tmp_path: Path, monkeypatch, model: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(tiny, whole, model)
    from recbole_pos.experiment.trainer import PosTrainer

    step, stop_at = PosTrainer._step, (0, 0) if model == "Pop" else (3, 2)

    def failing(self, loss_func, batch, watch, number: int):
        epoch = self.progress.next_epoch
        if (epoch, number) == stop_at:
            raise KeyboardInterrupt
        return step(self, loss_func, batch, watch, number)

    monkeypatch.setattr(PosTrainer, "_step", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, broken, model)
    monkeypatch.setattr(PosTrainer, "_step", step)
    np.random.seed(99), torch.manual_seed(99)
    recbole_pos.run(resume=broken, verbose=False)
    assert_same(whole, broken)


def test_batches_of_bounded_events_are_the_same_after_a_resume(tiny: Path, tmp_path: Path) -> None:
    bound = {"train_batch_events": 40}
    run(tiny, tmp_path / "whole", epochs=2, **bound)
    run(tiny, tmp_path / "parts", epochs=1, **bound)
    recbole_pos.run(resume=tmp_path / "parts", config_dict={"epochs": 2}, verbose=False)
    assert_same(tmp_path / "whole", tmp_path / "parts")
    run(tiny, tmp_path / "unbound", epochs=2)
    assert outcome(tmp_path / "unbound")[1] != outcome(tmp_path / "whole")[1]


def test_resume_of_a_finished_run_only_tests_again(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "run")
    before = outcome(tmp_path / "run")
    recbole_pos.run(resume=tmp_path / "run", verbose=False)
    after = outcome(tmp_path / "run")
    assert before[1:] == after[1:]


def test_resume_takes_no_other_options(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "run")
    with pytest.raises(UsageError, match="--resume"):
        recbole_pos.run(resume=tmp_path / "run", config_dict={"learning_rate": 1.0})
    with pytest.raises(UsageError, match="not a run folder"):
        recbole_pos.run(resume=tmp_path / "elsewhere")


def test_a_second_run_does_not_overwrite_the_first(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "run")
    with pytest.raises(UsageError, match="holds a run already"):
        run(tiny, tmp_path / "run")


def test_early_stopping_keeps_the_best_epoch(tiny: Path, tmp_path: Path) -> None:
    result = run(tiny, tmp_path / "run", epochs=200, stopping_step=2)
    assert result.epochs < 200
    scores = [line["valid"]["ndcg@10"] for line in outcome(tmp_path / "run")[1]]
    assert scores[result.best_epoch] == max(scores) == result.best_valid["ndcg@10"]
    loaded = recbole_pos.load(tmp_path / "run")
    test = loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)
    assert dict(test) == result.test


def test_run_folder_is_complete(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "run", tensorboard=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {
        "model",
        "dataset",
        "best_valid",
        "test",
        "epochs",
        "seconds",
        "targets_per_second",
    } <= (result.keys())
    assert {"peak_rss_mb", "seed", "versions"} <= result.keys()
    assert result["seconds"].keys() == {"data", "training", "evaluation"}
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line.keys() == {"epoch", "loss", "valid", "seconds", "targets_per_second"}
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    again = tmp_path / "again"
    recbole_pos.run(
        config_file_list=[str(tmp_path / "run" / "config.yaml")], run_dir=again, verbose=False
    )
    assert_same(tmp_path / "run", again)


def test_one_batch_can_be_learnt_by_heart(experiment) -> None:
    for model in recbole_pos.model.models.MODELS:
        given = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0, "learning_rate": 0.02}
        made = experiment(model, **given, **CROSS_ENTROPY.get(model, {}))
        loader = made.trainer.training_loader(made.loaders["train"])
        batch = next(iter(loader))
        losses = learn(made.trainer, made.model.window_loss, batch, 150)
        assert losses[-1] < 0.3 < 3 < losses[0], model


def test_nan_loss_says_where_and_why(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(TrainingError, match=r"epoch \d+, batch \d+.*learning_rate"):
        run(tiny, tmp_path / "run", learning_rate=1e12, learner="sgd")


def test_a_loader_field_that_is_not_finite_is_named(experiment) -> None:
    made = experiment("PosSASRec")
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    object.__setattr__(batch, "times", torch.full((3,), torch.nan))
    assert "the data: times" in explain_loss(batch, made.model, 1e-3)


@pytest.mark.parametrize(
    ("longest", "options", "told"),
    [
        (12, {}, True),
        (25, {}, False),
        (12, {"embedding_scale": True}, False),
        (12, {"model": "FPARec"}, False),  # has it by default
        (12, {"model": "Pop"}, False),  # does not read it
    ],
)
def test_short_histories_are_told_of(tmp_path: Path, capsys, longest, options, told) -> None:
    """By users that are there: the mean of 60, whose histories have 1 to ``longest`` events."""
    log = make_log(longest=longest)
    write_atomic(log, tmp_path)
    given = {"model": "PosSASRec", "epochs": 1, "data_path": str(tmp_path), **options}
    recbole_pos.run(given.pop("model"), "tiny", None, given, run_dir=tmp_path / "run")
    mean = len(log) / log["user_id"].nunique()
    assert (f"short histories, {mean:.1f} events a user" in capsys.readouterr().out) == told


def test_wrong_learner_and_augmentation(experiment) -> None:
    with pytest.raises(UsageError, match="learner: 'adm'"):
        experiment("FPARec", learner="adm")
    with pytest.raises(UsageError, match="STAMP can train with prefix or none"):
        experiment("STAMP", augmentation="all_positions")


def test_every_epoch_has_an_order_of_its_own(experiment) -> None:
    made = experiment("FPARec")
    loader = made.trainer.training_loader(made.loaders["train"])
    made.trainer._train_epoch(loader, 5)
    assert loader.epoch == 5


def test_prefix_augmentation_trains_a_plugin_model_too(tiny: Path, tmp_path: Path) -> None:
    result = run(tiny, tmp_path / "run", augmentation="prefix", epochs=1)
    assert result.test["hit@10"] >= 0


def test_weights_of_another_architecture(experiment) -> None:
    weights = weights_of(experiment("FPARec").model)
    with pytest.raises(CheckpointError, match="cannot be used with this model"):
        experiment("PARec").trainer.load_weights(weights)


class _Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


@pytest.mark.parametrize("write", [torch.save, lambda o, f: pickle.dump(o, open(f, "wb"))])
def test_a_checkpoint_with_code_is_refused(tmp_path: Path, monkeypatch, write) -> None:
    monkeypatch.chdir(tmp_path)
    write({"format": checkpoint.FORMAT, "weights": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="evil.pt"):
        checkpoint.load(tmp_path / "evil.pt")
    assert not (tmp_path / "evil-was-here").exists()


def test_a_pickled_config_as_recbole_saves_it_is_refused(tmp_path: Path, experiment) -> None:
    torch.save({"config": experiment("FPARec").config}, tmp_path / "x.pth", pickle_protocol=4)
    with pytest.raises(CheckpointError, match="pickled object.*nothing in it was run"):
        checkpoint.load(tmp_path / "x.pth")


def test_truncated_and_foreign_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    checkpoint.save(file, {"weights": torch.randn(1000)})
    content = file.read_bytes()
    for size in (0, 1, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="c.pt is truncated or damaged"):
            checkpoint.load(file)
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    file.write_bytes(bytes(flipped))
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.load(file)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="lacks optimizer"):
        checkpoint.load(file, ["weights", "optimizer"])
    torch.save({"weights": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match="not written by this package"):
        checkpoint.load(file)
    file.write_text('{"best_epoch": 3}')
    with pytest.raises(CheckpointError, match="not a checkpoint.*name the folder"):
        checkpoint.load(file)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        checkpoint.load(tmp_path / "none.pt")


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "c.pt"
    checkpoint.save(file, {"epoch": 1})
    monkeypatch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(file, {"epoch": 2})
    monkeypatch.undo()
    assert checkpoint.load(file)["epoch"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_only_plain_values_are_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="_Evil"):
        checkpoint.save(tmp_path / "c.pt", {"x": _Evil()})


def test_random_state_round_trip() -> None:
    import random

    def draw() -> list:
        return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]

    np.random.standard_normal()  # leaves a cached second value behind
    state = checkpoint.random_state()
    first = draw()
    checkpoint.set_random_state(state)
    assert draw() == first
