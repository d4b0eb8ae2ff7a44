"""Checkpoints: what is on the disk at any moment, and which files and parts are refused."""

from __future__ import annotations

import functools
import math
import operator
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

pytestmark = pytest.mark.slow

# --- when it is written ---

# the best epoch is neither the first nor the last, and comes more than once
SCORES = [0.1, 0.3, 0.2, 0.2, 0.5, 0.4]


def test_every_checkpoint_leads_to_the_same_bits(tiny, tmp_path, monkeypatch) -> None:
    """It has the best weights so far, once if they are the newest."""
    evaluate, save, found = PosTrainer.evaluate, checkpoint.save, []

    def scored(self: PosTrainer, data: Any, *given: Any, **more: Any) -> Any:
        result, phase = evaluate(self, data, *given, **more), data._dataset.phase
        score = SCORES[self.progress.next_epoch] if phase == "valid" else None
        return result if score is None else {**result, "ndcg@10": score}

    def frozen(file: Path, state: dict[str, Any]) -> None:
        save(file, state)
        found.append(Path(shutil.copytree(file.parent, tmp_path / str(len(found)))))
        (found[-1] / "lock").unlink()

    monkeypatch.setattr(PosTrainer, "evaluate", scored)
    monkeypatch.setattr(checkpoint, "WRITING_SHARE", math.inf)  # every epoch is written
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", frozen)
        run(tiny, tmp_path / "run")
    states = [checkpoint.load(folder / "checkpoint.pt") for folder in found]
    for epoch, state in enumerate(states):
        best = SCORES.index(max(SCORES[: epoch + 1]))
        progress = state["progress"]
        assert (progress["next_epoch"], progress["best_epoch"]) == (epoch + 1, best)
        newest = states[best]["best_weights"]["state_dict"]
        for name, value in state["best_weights"]["state_dict"].items():
            assert torch.equal(value, newest[name])
    sizes = [(folder / "checkpoint.pt").stat().st_size for folder in found]
    assert max(sizes[0], sizes[1], sizes[4]) < min(sizes[2], sizes[3], sizes[5])
    for folder in (found[2], found[4]):
        recbole_pos.run(resume=folder, verbose=False)
        assert_same(tmp_path / "run", folder)


def test_writing_takes_a_twentieth_of_the_time(tmp_path, monkeypatch) -> None:
    """An epoch every 15 seconds, writes of two; the newest waits as a copy, and is written at the
    end, also if its write was stopped."""
    clock, saved, stops = [0.0], [], []
    weights, progress = torch.zeros(2), Progress()

    def save(file: Path, state: dict[str, Any]) -> None:
        if stops:
            raise stops.pop()
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
    clock[0], progress.next_epoch = 1000.0, 9
    stops.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        writer.keep()
    writer.flush()
    assert saved[4:] == [(9, 8)]


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
    ("optimizer", ("state", 0, "exp_avg"), lambda x: x * math.nan),
    ("random", ("torch",), lambda x: x[:100]),
    ("random", ("python",), (3, (1, 2), None)),
    ("loader", (), {}),
]


@pytest.fixture(scope="module")
def trained_run(trained) -> Path:
    return trained("FPARec", epochs=2)


def _state(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True)


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
        state = _state(whole)
        *outer, last = (entry, *place)
        part = functools.reduce(operator.getitem, outer, state)
        part[last] = instead(part[last]) if callable(instead) else instead
        torch.save(state, file)
        _refused(lambda: restore(file, made.loaders["train"]), str(file))
    restore(whole, made.loaders["train"])
    assert made.trainer.progress.next_epoch == len(made.trainer.progress.history) > 0


def test_weights_of_another_model_are_refused(trained_run, tmp_path, experiment) -> None:
    file, other = trained_run / "checkpoint.pt", experiment("PARec").trainer
    _refused(lambda: other.load_weights(_state(file)["weights"]), "model")
    _refused(lambda: other.resume_checkpoint(str(file)), "FPARec")
    with pytest.raises(TypeError):  # would have to be pickled
        checkpoint.save(tmp_path / "c.pt", {"data": object()})


# --- files of others ---


class Call:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("touched",)


def test_other_files_are_refused(trained_run, tmp_path, monkeypatch) -> None:
    """And nothing in them is called."""
    monkeypatch.chdir(tmp_path)
    source, target = trained_run / "checkpoint.pt", Path("other.pt")
    for make in (
        lambda: torch.save({**_state(source), "config": Call()}, target),
        lambda: target.write_bytes(source.read_bytes()[:-100]),
        lambda: target.write_bytes(pickle.dumps({"x": Call()})),
    ):
        make()
        _refused(lambda: checkpoint.load(target), target.name)
    assert not Path("touched").exists()
