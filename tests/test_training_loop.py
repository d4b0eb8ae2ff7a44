"""What an epoch does: validation, early stopping, the best epoch, steps of the optimiser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recbole_pos
from recbole_pos.errors import TrainingError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.loss_watch import LossWatch


def fit(made: Any, **given: Any) -> Any:
    """The trainer after its training, which writes nothing."""
    made.trainer.fit(
        made.loaders["train"], made.loaders["valid"], verbose=False, saved=False, **given
    )
    return made.trainer


@pytest.mark.parametrize(
    ("eval_step", "validated", "whole"), [(1, [0, 1, 2, 3, 4], 5), (2, [1, 3], 4), (50, [4], 5)]
)
def test_validation_every_few_epochs(
    experiment, eval_step: int, validated: list[int], whole: int
) -> None:
    """It is finished when no epoch is left that would be validated."""
    made = experiment("FPARec", epochs=5, eval_step=eval_step, stopping_step=99)
    ended = []
    trainer = fit(made, callback_fn=lambda epoch, _: ended.append((epoch, made.trainer.finished)))
    assert [line["epoch"] for line in trainer.progress.history if line["valid"]] == validated
    assert ended == [(epoch, epoch + 1 == whole) for epoch in validated]
    assert trainer.progress.best_epoch in validated


def test_no_validation_keeps_the_last_epoch(experiment) -> None:
    trainer = fit(experiment("FPARec", epochs=3, eval_step=0))
    assert trainer.progress.best_epoch == 2 and trainer.progress.best_result is None
    weights = trainer.model.state_dict()
    for name, best in trainer.best_weights["state_dict"].items():
        assert torch.equal(best, weights[name])


def test_a_stopped_training_is_finished(experiment) -> None:
    trainer = fit(experiment("FPARec", epochs=50, stopping_step=1))
    assert trainer.progress.next_epoch < 50 and trainer.finished


def test_a_metric_that_is_better_when_smaller(experiment) -> None:
    options = {"metrics": ["NDCG", "AveragePopularity"], "valid_metric": "averagepopularity@10"}
    made = experiment("FPARec", epochs=60, stopping_step=2, learning_rate=0.01, **options)
    progress = fit(made).progress
    scores = [line["valid"]["averagepopularity@10"] for line in progress.history]
    assert scores[progress.best_epoch] == min(scores) == progress.best_score
    assert progress.stopped and len(scores) < 60


def test_a_score_that_is_no_number(experiment, monkeypatch) -> None:
    made = experiment("FPARec", epochs=1)
    monkeypatch.setattr(made.trainer, "evaluate", lambda *_, **__: {"ndcg@10": float("nan")})
    with pytest.raises(TrainingError, match="is nan on validation data"):
        fit(made)


def test_the_loss_of_an_epoch_is_a_mean_over_targets(experiment, monkeypatch) -> None:
    made = experiment("FPARec", epochs=1, train_batch_size=4)
    seen = []

    def step(_: Any, batch: Any, watch: LossWatch, number: int) -> None:
        seen.append((len(batch), float(len(seen))))
        watch.add(seen[-1][1], number, batch, len(batch))

    monkeypatch.setattr(made.trainer, "_step", step)
    line = made.trainer._train_epoch(made.trainer.training_loader(made.loaders["train"]), 0)
    targets, losses = np.array(seen).T
    assert len(set(targets)) > 1
    assert line["loss"] == pytest.approx((targets * losses).sum() / targets.sum())


def test_gradients_are_clipped(experiment) -> None:
    options = {"learner": "sgd", "learning_rate": 1.0, "epochs": 1, "train_batch_size": 10**6}
    made = experiment("FPARec", **options, clip_grad_norm={"max_norm": 1e-3})
    before = torch.cat([p.detach().flatten().clone() for p in made.model.parameters()])
    fit(made)
    after = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    assert (after - before).norm().item() == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize(
    ("learner", "kind"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)],
)
def test_options_of_the_optimiser(experiment, learner: str, kind: type) -> None:
    given = {"learning_rate": 0.02, "weight_decay": 0.03}
    if learner != "sgd":
        given["adam_betas"] = [0.8, 0.7]
    optimizer = experiment("FPARec", learner=learner, **given).trainer.optimizer
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.02, 0.03)
    assert learner == "sgd" or group["betas"] == (0.8, 0.7)


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that early stopping ended after its best epoch."""
    sizes = {"hidden_size": 16, "inner_size": 16, "MAX_ITEM_LIST_LENGTH": 12}
    options = {**sizes, "data_path": str(tiny), "epochs": 60, "stopping_step": 2}
    folder = tmp_path_factory.mktemp("finished") / "run"
    options |= {"learning_rate": 0.01}
    found = recbole_pos.run("FPARec", "tiny", None, options, run_dir=folder, verbose=False)
    assert found.best_epoch < found.epochs - 1
    return found


def test_the_best_epoch_of_a_file_is_tested(finished: Any) -> None:
    made = recbole_pos.load(finished.run_dir)
    made.trainer.best_weights = None
    file = RunFolder(finished.run_dir).checkpoint
    assert made.trainer.evaluate(made.loaders["test"], model_file=str(file)) == finished.test
    made.trainer.load_weights(checkpoint.load(file)["weights"])
    assert made.trainer.evaluate(made.loaders["test"], load_best_model=False) != finished.test


def test_the_training_of_another_model_is_not_taken_up(finished: Any, experiment) -> None:
    with pytest.raises(UsageError, match="is of model FPARec, not PARec"):
        experiment("PARec").trainer.resume_checkpoint(str(RunFolder(finished.run_dir).checkpoint))


def test_epochs_after_the_checkpoint_are_dropped_on_resume(finished: Any) -> None:
    folder = RunFolder(finished.run_dir)
    folder.add_metrics({"epoch": 99})
    recbole_pos.run(resume=finished.run_dir, verbose=False)
    epochs = [json.loads(line)["epoch"] for line in folder.metrics.read_text().splitlines()]
    assert epochs == list(range(finished.epochs))
