"""Checkpoints: what is on the disk at any moment, and which files and parts are refused."""

from __future__ import annotations

import functools
import math
import operator
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_trainer import assert_same, run

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.checkpoint import CheckpointWriter, Progress
from recbole_pos.experiment.trainer import PosTrainer

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
