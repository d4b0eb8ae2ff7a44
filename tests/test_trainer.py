"""Training: determinism, exact resume, validation, early stopping, the optimiser, checkpoints."""

import functools
import json
import math
import operator
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import SMALL, small

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, TrainingError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.checkpoint import CheckpointWriter, Progress
from recbole_pos.experiment.diagnosis import LossWatch
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.trainer import PosTrainer

OPTIONS = {**SMALL, "epochs": 6}
TIMING = ("seconds", "targets_per_second")


def run(tiny: Path, folder: Path, model: str = "FPARec", **options):
    given = small(model, **{"data_path": str(tiny), "epochs": 6, **options}).external_config_dict
    return recbole_pos.run(model, "tiny", None, given, run_dir=folder, verbose=False)


def outcome(folder: Path) -> tuple[dict, list[dict], dict]:
    """Weights, epochs and result of a run, without what a clock says."""
    state = checkpoint.load(folder / "checkpoint.pt")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [{key: line[key] for key in ("epoch", "loss", "valid")} for line in lines]
    result = json.loads((folder / "result.json").read_text())
    kept = {k: result[k] for k in ("best_valid", "test", "epochs", "best_epoch")}
    return state["weights"]["state_dict"], lines, kept


def assert_same(one: Path, two: Path) -> None:
    first, second = outcome(one), outcome(two)
    torch.testing.assert_close(dict(first[0]), dict(second[0]), rtol=0, atol=0)
    assert first[1:] == second[1:]


def test_the_same_seed_gives_the_same_bits(tiny, tmp_path) -> None:
    """Also from the configuration that a run has written; its folder is complete."""
    whole, again = tmp_path / "run", tmp_path / "again"
    run(tiny, whole, logger="tensorboard")
    files = [str(whole / "config.yaml")]
    recbole_pos.run(config_file_list=files, run_dir=again, verbose=False)
    assert_same(whole, again)
    run(tiny, tmp_path / "c", seed=7)
    assert outcome(tmp_path / "c")[1] != outcome(whole)[1]
    result = json.loads((whole / "result.json").read_text())
    assert result["seconds"].keys() == {"data", "training", "evaluation"}
    line = json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])
    assert line.keys() == {"epoch", "loss", "valid", *TIMING}
    assert list((whole / "tensorboard").iterdir())


AGAINST_SOME = {"loss_type": "sampled_softmax", "negative_sampler": "popularity", "negatives": 5}
FALLING = {"learner": "adamw", "lr_scheduler": "cosine", "warmup_steps": 9}


# a plugin model; batches of bounded events, whose number differs by epoch; a built-in whose loader
# has a generator and whose loss draws from numpy; directions that a loss draws; clocks of batches;
# each optimiser keeps something else of a parameter
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("FPARec", {}),
        ("FPARec", {"train_batch_events": 40, **FALLING, **AGAINST_SOME}),
        ("FPMC", {"learner": "rmsprop"}),
        ("PosSASRec", {"loss_type": "SCE", "bucket_size_y": 4}),
        ("AttrFormer", {"relations": ["time", "position"], "cross_sequence": "random_order"}),
    ],
    ids=str,
)
def test_resume_equals_uninterrupted(tiny, tmp_path, monkeypatch, model, options) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(tiny, whole, model, **options, epochs=4)
    step = PosTrainer._step

    def failing(self, loss_func, batch, watch, number: int):
        if (self.progress.next_epoch, number) == (2, 2):
            raise KeyboardInterrupt
        return step(self, loss_func, batch, watch, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PosTrainer, "_step", failing)
        run(tiny, broken, model, **options, epochs=4)
    np.random.seed(99), torch.manual_seed(99)
    recbole_pos.run(resume=broken, verbose=False)
    assert_same(whole, broken)


@pytest.mark.parametrize(
    ("kind", "warmup"), [("cosine", 4), ("linear", 0), ("step", 3), ("none", 0)]
)
def test_learning_rates_follow_their_formulas(experiment, kind, warmup) -> None:
    """Against the formulas; the last one of a schedule of steps ends near 0."""
    options = {"lr_scheduler": kind, "lr_decay_step": 2 if kind == "step" else 0}
    options["hidden_dropout_prob"] = 0.2
    made = experiment("FPARec", learning_rate=0.5, epochs=4, warmup_steps=warmup, **options)
    trainer, rates = made.trainer, []
    (group,) = trainer.optimizer.param_groups
    trainer.callbacks = [Mock(on_step=lambda *_: rates.append(group["lr"]))]
    loader = trainer.training_loader(made.loaders["train"])
    n = len(loader)
    for epoch in range(4):
        trainer._train_epoch(loader, epoch)
    want = [(i + 1) / (warmup + 1) for i in range(warmup)]
    for number in range(warmup, 4 * n):
        part = (number - warmup) / (4 * n - warmup)
        falling = {"cosine": (1 + np.cos(np.pi * part)) / 2, "linear": 1 - part}
        want.append(falling.get(kind, 0.1 if kind == "step" and number >= 2 * n else 1.0))
    assert n > warmup and rates == pytest.approx([0.5 * rate for rate in want], rel=1e-9, abs=1e-12)
    assert kind not in ("cosine", "linear") or 0 < rates[-1] < 0.03


def test_early_stopping_keeps_and_tests_the_best_epoch(tiny, tmp_path) -> None:
    """A run that has ended is only tested again, by its own options, when it is resumed."""
    folder = RunFolder(tmp_path / "run")
    options = {"stopping_step": 2, "learning_rate": 0.01, "train_batch_size": 2048}
    finished = run(tiny, folder.path, epochs=60, **options)
    assert finished.best_epoch < finished.epochs - 1 < 59
    before = outcome(folder.path)
    scores = [line["valid"]["ndcg@10"] for line in before[1]]
    assert scores[finished.best_epoch] == max(scores) == finished.best_valid["ndcg@10"]
    made = recbole_pos.load(folder.path)
    test = made.loaders["test"]
    assert made.trainer.evaluate(test, load_best_model=False) == finished.test
    checkpoint.load_weights(made.model, checkpoint.load(folder.checkpoint)["weights"])
    assert made.trainer.evaluate(test, load_best_model=False) != finished.test
    assert made.trainer.evaluate(test, model_file=str(folder.checkpoint)) == finished.test

    folder.add_metrics({**before[1][0], "epoch": 99})  # after the checkpoint, so it is dropped
    recbole_pos.run(resume=folder.path, verbose=False)
    assert before[1:] == outcome(folder.path)[1:]
    with pytest.raises(UsageError, match="--resume"):
        recbole_pos.run(resume=folder.path, config_dict={"learning_rate": 1.0})


def fit(made: Any) -> Any:
    """The trainer after its training, which writes nothing."""
    made.trainer.fit(made.loaders["train"], made.loaders["valid"], verbose=False, saved=False)
    return made.trainer


@pytest.mark.parametrize(
    ("eval_step", "validated"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3]), (50, [4]), (0, [])]
)
def test_a_run_validates_every_few_epochs(experiment, eval_step, validated) -> None:
    """It is finished when no epoch is left that would be validated, also where it is resumed."""
    patience = {"stopping_step": 99} if validated else {}
    made = experiment("FPARec", epochs=5, eval_step=eval_step, **patience)
    for epoch in range(5):
        made.trainer.progress.next_epoch = epoch
        assert made.trainer.is_finished == (epoch > max(validated, default=4))
    made.trainer.progress.next_epoch = 0
    trainer = fit(made)
    assert [line["epoch"] for line in trainer.progress.history if line["valid"]] == validated
    assert trainer.progress.best_epoch in (validated or [4])
    if not validated:
        best, weights = trainer.best_weights["state_dict"], trainer.model.state_dict()
        torch.testing.assert_close(dict(best), dict(weights), rtol=0, atol=0)


def test_a_search_saves_the_epochs_that_it_reports(experiment, monkeypatch, tmp_path) -> None:
    """And the first; on the disk that a cluster shares, others would cost as much again."""
    saved: list[int] = []
    monkeypatch.setattr(checkpoint, "WRITING_SHARE", 1e-12)
    note = lambda file, state: saved.append(state["progress"]["next_epoch"] - 1)  # noqa: E731
    monkeypatch.setattr(checkpoint, "save", note)
    made = experiment("FPARec", epochs=6, eval_step=3, stopping_step=9)
    made.trainer.saved_model_file = str(tmp_path / "model.pth")
    parts = made.loaders["train"], made.loaders["valid"]
    made.trainer.fit(*parts, verbose=False, callback_fn=lambda *_: None)
    assert saved == [0, 2, 5]


def test_a_metric_may_be_better_when_smaller(experiment) -> None:
    options = {"metrics": ["NDCG", "AveragePopularity"], "valid_metric": "averagepopularity@10"}
    made = experiment("FPARec", epochs=60, stopping_step=2, learning_rate=0.01, **options)
    progress = fit(made).progress
    scores = [line["valid"]["averagepopularity@10"] for line in progress.history]
    assert scores[progress.best_epoch] == min(scores) == progress.best_score
    assert progress.stopped and made.trainer.is_finished and len(scores) < 60


def test_a_loss_or_score_must_be_finite(experiment, tiny, tmp_path, monkeypatch) -> None:
    """A loss says where and why, and so does a score."""
    with pytest.raises(TrainingError, match=r"epoch \d+, batch \d+.*learning_rate"):
        run(tiny, tmp_path / "run", learning_rate=1e12, learner="sgd")
    made = experiment("PosSASRec", epochs=1)
    monkeypatch.setattr(made.trainer, "evaluate", lambda *_, **__: {"ndcg@10": float("nan")})
    with pytest.raises(TrainingError, match="ndcg@10 is nan"):
        fit(made)


def test_the_loss_of_an_epoch_is_a_mean_over_targets(experiment, monkeypatch) -> None:
    """Batches are in an order of the epoch."""
    made = experiment("FPARec", epochs=1, train_batch_size=4)
    seen = []

    def step(_: Any, batch: Any, watch: LossWatch, number: int) -> None:
        seen.append((len(batch), float(len(seen))))
        watch.add(seen[-1][1], number, len(batch))

    monkeypatch.setattr(made.trainer, "_step", step)
    loader = made.trainer.training_loader(made.loaders["train"])
    line = made.trainer._train_epoch(loader, 5)
    targets, losses = np.array(seen).T
    assert len(set(targets)) > 1 and loader.epoch == 5
    assert line["loss"] == pytest.approx((targets * losses).sum() / targets.sum())


def test_gradients_are_clipped(experiment) -> None:
    options = {"learner": "sgd", "learning_rate": 1.0, "epochs": 1, "train_batch_size": 10**6}
    made = experiment("FPARec", **options, clip_grad_norm={"max_norm": 1e-3})
    before = torch.cat([p.detach().flatten().clone() for p in made.model.parameters()])
    fit(made)
    after = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    assert (after - before).norm().item() == pytest.approx(1e-3, rel=0.01)


def test_options_reach_the_optimiser(experiment) -> None:
    given = {"learning_rate": 0.02, "weight_decay": 0.03, "adam_betas": [0.8, 0.7]}
    optimizer = experiment("FPARec", learner="adamw", **given).trainer.optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.02, 0.03, (0.8, 0.7))


# --- checkpoints: what is on the disk at any moment, and which files and parts are refused ---


# --- when it is written ---

# the best epoch is neither the first nor the last, and comes more than once
SCORES = [0.1, 0.3, 0.2, 0.2, 0.5, 0.4]


def test_from_the_checkpoint_of_any_epoch_to_the_same_bits(tiny, tmp_path, monkeypatch) -> None:
    """It has the best weights so far, once if they are the newest: the file is smaller then."""
    evaluate, save, states, sizes = PosTrainer.evaluate, checkpoint.save, [], []

    def scored(self: PosTrainer, data: Any, *given: Any, **more: Any) -> Any:
        result = evaluate(self, data, *given, **more)
        is_test = data._dataset.phase == "test"
        return result if is_test else {**result, "ndcg@10": SCORES[self.progress.next_epoch]}

    def noted(file: Path, state: dict[str, Any]) -> None:
        save(file, state)
        states.append(checkpoint.load(file))
        sizes.append(file.stat().st_size)
        shutil.copytree(file.parent, tmp_path / str(len(sizes)))

    monkeypatch.setattr(PosTrainer, "evaluate", scored)
    monkeypatch.setattr(checkpoint, "WRITING_SHARE", math.inf)  # every epoch is written
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", noted)
        run(tiny, tmp_path / "run")
    for epoch, state in enumerate(states):
        best = SCORES.index(max(SCORES[: epoch + 1]))
        assert state["progress"]["best_epoch"] == best
        newest = states[best]["weights"]["state_dict"]
        for name, value in state["best_weights"]["state_dict"].items():
            assert torch.equal(value, newest[name])
    assert max(sizes[0], sizes[1], sizes[4]) < min(sizes[2], sizes[3], sizes[5])
    for epoch in range(1, len(SCORES)):
        recbole_pos.run(resume=tmp_path / str(epoch), verbose=False)
        assert_same(tmp_path / "run", tmp_path / str(epoch))


def test_writing_takes_a_twentieth_of_the_time(tmp_path, monkeypatch) -> None:
    """An epoch every 15 seconds, writes of two; the newest waits as a copy, also for the end."""
    clock, saved = [0.0], []
    weights, progress = torch.zeros(2), Progress()

    def save(file: Path, state: dict[str, Any]) -> None:
        clock[0] += 2.0
        saved.append((state["progress"]["next_epoch"], float(state["weights"]["x"][0])))

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    state = {"progress": vars(progress), "weights": {"x": weights}, "best_weights": None}
    writer = CheckpointWriter(tmp_path / "c", lambda: state)
    for second in range(0, 120, 15):
        clock[0] = float(second)
        progress.next_epoch += 1
        writer.keep()
        weights += 1
    writer.flush()
    writer.flush()
    assert saved == [(1, 0), (4, 3), (7, 6), (8, 7)]


# --- parts that are wrong ---

# the entry and, within it, the part; what stands there instead (a function: of what stood there)
DAMAGES: list[tuple[str, tuple, Any]] = [
    ("config", ("model",), "Pop"),
    ("data", (), "other"),
    ("progress", (), None),
    ("weights", ("state_dict",), {}),
    ("best_weights", ("state_dict", "item_embedding.weight"), lambda x: x / 0),
    ("best_weights", ("state_dict", "item_embedding.weight"), lambda x: x.double()),
    ("optimizer", ("state", 0, "exp_avg"), torch.zeros(2)),
    ("random", ("torch",), lambda x: x[:100]),
]


@pytest.fixture(scope="module")
def trained_run(trained) -> Path:
    return trained("FPARec", epochs=2)


def _refused(act: Callable[[], Any], name: str) -> None:
    """It ends in one line with this word."""
    with pytest.raises((CheckpointError, UsageError)) as refusal:
        act()
    text = str(refusal.value)
    assert "\n" not in text and len(text) < 1000 and name in text


def test_a_part_that_is_wrong_is_refused(trained_run, tmp_path) -> None:
    whole, file = trained_run / "checkpoint.pt", tmp_path / "checkpoint.pt"
    config = str(trained_run / "config.yaml")
    made = prepare(PosConfig(None, None, [config], {"epochs": 1000}, strict=False))
    restore = functools.partial(checkpoint.restore, made.trainer)
    for entry, place, instead in DAMAGES:
        state = torch.load(whole)
        *outer, last = (entry, *place)
        part = functools.reduce(operator.getitem, outer, state)
        part[last] = instead(part[last]) if callable(instead) else instead
        torch.save(state, file)
        _refused(lambda: restore(file, made.loaders["train"]), str(file))
    restore(whole, made.loaders["train"])
    assert made.trainer.progress.next_epoch == len(made.trainer.progress.history) > 0


def test_what_was_restored_is_no_part_of_the_file(trained_run, tmp_path) -> None:
    """Also if the file is written over while the training goes on."""
    file = Path(shutil.copy(trained_run / "checkpoint.pt", tmp_path))
    made = prepare(PosConfig(None, None, [str(trained_run / "config.yaml")], strict=False))
    state = torch.load(file)
    checkpoint.restore(made.trainer, file)
    file.write_bytes(b"\xff" * file.stat().st_size)
    weights, best = dict(made.model.state_dict()), made.trainer.best_weights["state_dict"]
    found = weights, dict(best), made.trainer.optimizer.state_dict()["state"]
    parts = (state[name]["state_dict"] for name in ("weights", "best_weights"))
    want = *map(dict, parts), state["optimizer"]["state"]
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_random_states_of_more_gpus_than_there_are(monkeypatch) -> None:
    """Of a run that saw two, on a machine with one: the state of the other is not needed."""
    states, restored = [torch.zeros(16), torch.ones(16)], Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored)
    checkpoint.set_random_state(checkpoint.get_random_state())
    restored.assert_called_once_with(states[:1])


def test_weights_of_another_model_are_refused(trained_run, tmp_path, experiment) -> None:
    file, other = trained_run / "checkpoint.pt", experiment("PARec").trainer
    _refused(lambda: checkpoint.load_weights(other.model, torch.load(file)["weights"]), "model")
    _refused(lambda: other.resume_checkpoint(str(file)), "FPARec")
    with pytest.raises(TypeError):  # would have to be pickled
        checkpoint.save(tmp_path / "c.pt", {"data": object()})


def test_a_truncated_file_is_refused(trained_run, tmp_path) -> None:
    """Files that hold code: test_recbole_doors.py."""
    file = tmp_path / "half.pt"
    file.write_bytes((trained_run / "checkpoint.pt").read_bytes()[:-100])
    _refused(lambda: checkpoint.load(file), file.name)
