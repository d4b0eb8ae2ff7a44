"""Checkpoints that a thread writes while training goes on: what is there at any moment."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import assert_same, outcome, run

import recbole_pos
from recbole_pos.errors import StorageError, UsageError
from recbole_pos.experiment import checkpoint, checkpoint_writer
from recbole_pos.experiment.checkpoint_writer import CheckpointWriter
from recbole_pos.experiment.trainer import PosTrainer

# the best epoch is neither the first nor the last, and comes more than once
SHARE = checkpoint_writer.SHARE
SCORES = [0.1, 0.3, 0.2, 0.2, 0.5, 0.4]


@pytest.fixture(scope="module")
def patched() -> Any:
    """Every epoch is written, and validation has the given scores."""
    evaluate = PosTrainer.evaluate

    def scored(self: PosTrainer, data: Any, *given: Any, **more: Any) -> Any:
        found = evaluate(self, data, *given, **more)
        phase = data._dataset.phase
        return found if phase != "valid" else {**found, "ndcg@10": SCORES[self.progress.next_epoch]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosTrainer, "evaluate", scored)
        patch.setattr(checkpoint_writer, "SHARE", math.inf)
        yield patch


@pytest.fixture(scope="module")
def moments(patched: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run, and before it copies of its folder: one whenever a checkpoint was written."""
    folder, found, save = tmp_path_factory.mktemp("moments"), [], checkpoint.save

    def frozen(file: Path, state: dict[str, Any]) -> None:
        save(file, state)
        found.append(Path(shutil.copytree(file.parent, folder / str(len(found)))))
        (found[-1] / "lock").unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", frozen)
        run(tiny, folder / "run")
    assert len(found) == 6
    return [*found, folder / "run"]


def test_best_weights_are_those_of_the_best_epoch(moments: list[Path]) -> None:
    states = [checkpoint.load(moment / "checkpoint.pt") for moment in moments[:-1]]
    for epoch, state in enumerate(states):
        best = SCORES.index(max(SCORES[: epoch + 1]))
        assert (state["progress"]["next_epoch"], state["progress"]["best_epoch"]) == (
            epoch + 1,
            best,
        )
        of_best = states[best]["weights"]["state_dict"]
        for name, value in state["best_weights"]["state_dict"].items():
            assert torch.equal(value, of_best[name])
        places = [state[k]["state_dict"]["item_embedding.weight"].data_ptr()
                  for k in ("weights", "best_weights")]  # fmt: skip
        assert (len(set(places)) == 1) == (best == epoch)  # the newest are in the file once


@pytest.mark.parametrize("epochs", [2, 3, 5])
def test_from_every_checkpoint_to_the_same_bits(
    moments: list[Path], tmp_path: Path, epochs: int
) -> None:
    folder = Path(shutil.copytree(moments[epochs - 1], tmp_path / "run"))
    recbole_pos.run(resume=folder, verbose=False)
    assert_same(moments[-1], folder)
    assert outcome(folder)[2]["best_epoch"] == 4


def test_a_copy_stays_while_training_changes_its_tensors(tmp_path: Path) -> None:
    """Also the one of a state whose newest weights were the best."""
    weights, best = torch.zeros(2), torch.zeros(2)
    state = {"weights": weights, "best_weights": best, "seen": [weights.view(1, 2)]}
    state["progress"] = progress = {"next_epoch": 1, "best_epoch": 0}
    writer, written = CheckpointWriter(tmp_path / "c", lambda: state), []
    writer._write = written.append  # type: ignore[method-assign]
    writer._due = math.inf
    for _ in range(2):
        with writer:
            writer.keep()
            weights += 1
            progress["next_epoch"] += 1
            writer.keep()
            weights += 1
    assert [float(one["weights"][0]) for one in written] == [1, 3]
    assert [float(one["seen"][0][0, 0]) for one in written] == [1, 3] and not best.any()


def _writer(
    path: Path, patch: pytest.MonkeyPatch, clock: dict[str, float]
) -> tuple[Callable[[], None], CheckpointWriter, list[int]]:
    """What ends an epoch; a writer whose writes cost two seconds; the epochs it has written."""
    progress, saved = {"next_epoch": 0, "best_epoch": None}, []
    state = {"progress": progress, "weights": {}, "best_weights": None}

    def save(file: Path, state: dict[str, Any]) -> None:
        clock["worked"] += 2.0
        saved.append(state["progress"]["next_epoch"])

    patch.setattr(checkpoint, "save", save)
    patch.setattr(checkpoint_writer, "SHARE", SHARE)
    patch.setattr(checkpoint, "old_best_files", lambda path: [])
    patch.setattr(time, "monotonic", lambda: clock["now"])
    patch.setattr(time, "thread_time", lambda: clock["worked"])
    writer = CheckpointWriter(path, lambda: state)

    def keep() -> None:
        progress["next_epoch"] += 1
        writer.keep()
        if writer._thread:
            writer._thread.join()

    return keep, writer, saved


def test_writing_takes_a_twentieth_of_the_time(tmp_path: Path, monkeypatch) -> None:
    """Of processor time; the newest epoch is written at the end."""
    clock = {"now": 0.0, "worked": 0.0}
    keep, writer, saved = _writer(tmp_path, monkeypatch, clock)
    with writer:
        for second in range(0, 120, 15):
            clock["now"] = float(second)
            keep()
    assert saved == [1, 4, 7, 8]


def test_a_copy_that_is_interrupted_is_not_written(tmp_path: Path, monkeypatch) -> None:
    """Nor the one before it, whose memory it was taking."""
    keep, writer, saved = _writer(tmp_path, monkeypatch, {"now": 0.0, "worked": 0.0})

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), writer:
        keep()
        keep()
        monkeypatch.setattr(checkpoint_writer, "_copied", interrupted)
        keep()
    assert saved == [1]


@pytest.mark.parametrize("failing", [2, 6])  # in the middle, and the last
def test_a_write_that_fails_stops_the_run(
    tiny: Path, tmp_path: Path, patched: Any, monkeypatch, failing: int
) -> None:
    save, trained, train = checkpoint.save, [], PosTrainer._train_epoch

    def full(file: Path, state: dict[str, Any]) -> None:
        if state["progress"]["next_epoch"] == failing:
            raise StorageError(f"cannot write {file}: No space left on device")
        save(file, state)

    monkeypatch.setattr(checkpoint, "save", full)
    monkeypatch.setattr(
        PosTrainer, "_train_epoch", lambda *a, **k: trained.append(1) or train(*a, **k)
    )
    with pytest.raises(StorageError):
        run(tiny, tmp_path / "run")
    assert len(trained) <= failing + 1
    assert checkpoint.load(tmp_path / "run" / "checkpoint.pt", ["progress"])["progress"][
        "next_epoch"
    ] == (failing - 1)


def test_without_room_for_a_copy(moments, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """It is written before the next epoch begins, by the thread that trains."""
    monkeypatch.setattr(checkpoint_writer, "free_memory", lambda: 1000)
    save, writers = checkpoint.save, set()
    monkeypatch.setattr(
        checkpoint, "save", lambda *a: writers.add(threading.current_thread()) or save(*a)
    )
    run(tiny, tmp_path / "in_place")
    assert writers == {threading.main_thread()}
    assert_same(moments[-1], tmp_path / "in_place")


@pytest.mark.parametrize("stopped_in", [0, 2])
def test_an_interrupt_waits_for_the_write(
    moments, tiny: Path, tmp_path: Path, monkeypatch, stopped_in: int
) -> None:
    """A run that was stopped in its first epoch begins again with --resume."""
    step, save, folder = PosTrainer._step, checkpoint.save, tmp_path / "run"

    def stopping(self: PosTrainer, *given: Any) -> None:
        if self.progress.next_epoch == stopped_in:
            raise KeyboardInterrupt
        step(self, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "save", lambda *a: time.sleep(0.2) or save(*a))
        patch.setattr(PosTrainer, "_step", stopping)
        run(tiny, folder)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    file = folder / "checkpoint.pt"
    assert file.exists() == bool(stopped_in)
    if stopped_in:
        assert checkpoint.load(file, ["progress"])["progress"]["next_epoch"] == stopped_in
    recbole_pos.run(resume=folder, verbose=False)
    assert_same(moments[-1], folder)
    file.unlink()  # of a finished run: nothing begins again
    assert json.loads((folder / "result.json").read_text())
    with pytest.raises(UsageError):
        recbole_pos.run(resume=folder)
