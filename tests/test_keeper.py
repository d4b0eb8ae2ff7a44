"""Checkpoints that a thread writes while training goes on: what is there at any moment."""

from __future__ import annotations

import math
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import assert_same, outcome, run

import recbole_pos
from recbole_pos.errors import StorageError, UsageError
from recbole_pos.experiment import checkpoint, keeper
from recbole_pos.experiment.best_file import best_files
from recbole_pos.experiment.snapshot import Snapshots
from recbole_pos.experiment.state import weights_of
from recbole_pos.experiment.trainer import PosTrainer

PARTS = ("weights", "best_weights")
# the best epoch is neither the first nor the last, and comes more than once
STORY = [0.1, 0.3, 0.2, 0.2, 0.5, 0.4]


@pytest.fixture
def every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is written, however long it takes."""
    monkeypatch.setattr(keeper, "SHARE", math.inf)


def told_by(patched: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """Runs have the validation values of the story; gives the weights of every epoch."""
    weights: dict[int, dict[str, Any]] = {}
    evaluate = PosTrainer.evaluate

    def scored(self: PosTrainer, data: Any, *given: Any, **more: Any) -> Any:
        found = evaluate(self, data, *given, **more)
        if data._dataset.phase != "valid":
            return found
        epoch = self.progress.next_epoch
        state = weights_of(self.model)["state_dict"]
        weights[epoch] = {name: value.clone() for name, value in state.items()}
        return {**found, "ndcg@10": STORY[epoch]}

    patched.setattr(PosTrainer, "evaluate", scored)
    return weights


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    return told_by(monkeypatch)


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@dataclass
class Story:
    """A run, the weights of its epochs, and copies of its folder: one at each moment at which
    something in it had changed."""

    run: Path
    weights: dict[int, dict[str, Any]]
    moments: list[Path] = field(default_factory=list)

    def after(self, epochs: int) -> list[Path]:
        """The moments at which the checkpoint was of so many epochs."""
        done = [
            checkpoint.load(m / "checkpoint.pt")["progress"]["next_epoch"] for m in self.moments
        ]
        return [moment for moment, one in zip(self.moments, done, strict=True) if one == epochs]


@pytest.fixture(scope="module")
def story(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    with pytest.MonkeyPatch.context() as patched:
        found = Story(folder / "run", told_by(patched))

        def frozen(act: Any) -> Any:
            def acted(file: Path, *given: Any) -> None:
                act(file, *given)
                place = folder / f"moment{len(found.moments)}"
                found.moments.append(Path(shutil.copytree(file.parent, place)))
                (place / "lock").unlink()

            return acted

        patched.setattr(keeper, "SHARE", math.inf)
        patched.setattr(checkpoint, "save", frozen(checkpoint.save))
        patched.setattr(keeper, "remove_others", frozen(keeper.remove_others))
        run(tiny, found.run)
    return found


def test_no_moment_mixes_two_epochs(story: Story) -> None:
    """Whatever ``kill -9`` leaves: the weights of an epoch, those of the best epoch up to it."""
    names: list[list[str]] = []
    for moment in story.moments:
        state = checkpoint.load(moment / "checkpoint.pt")
        newest, best = state["progress"]["next_epoch"] - 1, state["progress"]["best_epoch"]
        assert best == STORY.index(max(STORY[: newest + 1]))
        assert same_weights(state["weights"]["state_dict"], story.weights[newest])
        assert same_weights(state["best_weights"]["state_dict"], story.weights[best])
        if best == newest:  # they are in the file once
            places = [state[k]["state_dict"]["item_embedding.weight"].data_ptr() for k in PARTS]
            assert places[0] == places[1]
        names.append([file.name for file in best_files(moment / "checkpoint.pt")])
    # those of a best epoch are written once, when it is not the newest any more
    assert len({name for one in names for name in one}) == 2 and max(map(len, names)) == 1
    assert names[-1] == [] and outcome(story.run)[2]["best_epoch"] == 4


@pytest.mark.parametrize("epochs", [2, 3, 4, 5])
def test_from_every_checkpoint_to_the_same_bits(
    story: Story, tmp_path: Path, told, epochs: int
) -> None:
    folder = Path(shutil.copytree(story.after(epochs)[-1], tmp_path / "run"))
    recbole_pos.run(resume=folder, verbose=False)
    assert_same(story.run, folder)


def test_what_is_not_due_waits_in_memory(
    story: Story, tiny: Path, tmp_path: Path, told, monkeypatch
) -> None:
    """The first epoch and the end are written; a stop writes the newest epoch."""
    monkeypatch.setattr(keeper, "SHARE", 1e-9)
    save, step, saved = checkpoint.save, PosTrainer._step, []

    def counted(file: Path, state: dict[str, Any]) -> None:
        saved.append(state.get("progress", {}).get("next_epoch"))
        save(file, state)

    def stopping(self: PosTrainer, *given: Any) -> None:
        if self.progress.next_epoch == 2:
            raise KeyboardInterrupt
        step(self, *given)

    monkeypatch.setattr(checkpoint, "save", counted)
    run(tiny, tmp_path / "whole")
    assert saved == [1, 6]
    monkeypatch.setattr(PosTrainer, "_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "stopped")
    assert saved == [1, 6, 1, 2]
    monkeypatch.setattr(PosTrainer, "_step", step)
    recbole_pos.run(resume=tmp_path / "stopped", verbose=False)
    for name in ("whole", "stopped"):
        assert_same(story.run, tmp_path / name)


def test_writing_takes_a_twentieth_of_the_time(tmp_path: Path, monkeypatch) -> None:
    """Of processor time, as told by a clock that is set by hand."""
    clock, saved = {"now": 0.0, "worked": 0.0}, []
    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(time, "thread_time", lambda: clock["worked"])

    def save(file: Path, state: dict[str, Any]) -> None:
        clock["worked"] += 2.0
        saved.append(clock["now"])

    monkeypatch.setattr(checkpoint, "save", save)
    progress = {"next_epoch": 0, "best_epoch": None}
    state = {"progress": progress, "weights": {}, "best_weights": None}
    with keeper.Keeper(tmp_path / "checkpoint.pt", lambda: state) as kept:
        for second in range(0, 200, 15):
            clock["now"] = float(second)
            progress["next_epoch"] += 1
            kept.keep()
            kept._join()
    assert saved[:5] == [0.0, 45.0, 90.0, 135.0, 180.0]


def test_a_copy_that_is_interrupted_is_not_written(tmp_path: Path, monkeypatch) -> None:
    """Nor the one before it, whose memory it was taking."""
    monkeypatch.setattr(keeper, "SHARE", 1e-9)
    progress = {"next_epoch": 0, "best_epoch": None}
    state = {"progress": progress, "weights": {}, "best_weights": None}
    saved = []
    monkeypatch.setattr(checkpoint, "save", lambda file, of: saved.append(of["progress"]))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        keeper.Keeper(tmp_path / "checkpoint.pt", lambda: state) as kept,
    ):
        for _ in range(2):
            progress["next_epoch"] += 1
            kept.keep()
        monkeypatch.setattr(Snapshots, "take", interrupted)
        kept.keep()
    assert [one["next_epoch"] for one in saved] == [1]


def test_an_interrupt_waits_for_the_write(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """It ends neither in the middle of a file nor before it."""
    save, step = checkpoint.save, PosTrainer._step

    def slowly(file: Path, state: dict[str, Any]) -> None:
        time.sleep(0.3 if file.with_name("metrics.jsonl").exists() else 0)
        save(file, state)

    def stopping(self: PosTrainer, *given: Any) -> None:
        if self.progress.next_epoch == 2:
            raise KeyboardInterrupt
        step(self, *given)

    monkeypatch.setattr(checkpoint, "save", slowly)
    monkeypatch.setattr(keeper, "SHARE", math.inf)
    monkeypatch.setattr(PosTrainer, "_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "run")
    assert checkpoint.load(tmp_path / "run" / "checkpoint.pt")["progress"]["next_epoch"] == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


@pytest.mark.parametrize("failing", [2, 6])  # in the middle, and the last
def test_a_write_that_fails_stops_the_run(
    tiny: Path, tmp_path: Path, every_epoch, monkeypatch, failing: int
) -> None:
    save, trained = checkpoint.save, []

    def full(file: Path, state: dict[str, Any]) -> None:
        if state.get("progress", {}).get("next_epoch") == failing:
            raise StorageError(f"cannot write {file}: No space left on device")
        save(file, state)

    train = PosTrainer._train_epoch
    monkeypatch.setattr(checkpoint, "save", full)
    monkeypatch.setattr(
        PosTrainer, "_train_epoch", lambda *a, **k: trained.append(1) or train(*a, **k)
    )
    said = r"checkpoint.pt: No space left on device; the last checkpoint in .* is whole"
    with pytest.raises(StorageError, match=said):
        run(tiny, tmp_path / "run")
    assert len(trained) <= failing + 1
    monkeypatch.undo()
    done = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["progress"]["next_epoch"]
    assert done == failing - 1


def test_without_room_for_a_copy(
    story: Story, tiny: Path, tmp_path: Path, every_epoch, told, monkeypatch
) -> None:
    """It is written before the next epoch begins, by the thread that trains."""
    monkeypatch.setattr("recbole_pos.experiment.snapshot.free_memory", lambda: 1000)
    save, writers = checkpoint.save, set()

    def watched(file: Path, state: dict[str, Any]) -> None:
        writers.add(threading.current_thread())
        save(file, state)

    monkeypatch.setattr(checkpoint, "save", watched)
    run(tiny, tmp_path / "in_place")
    assert writers == {threading.main_thread()}
    assert_same(story.run, tmp_path / "in_place")


def test_a_run_that_was_stopped_in_its_first_epoch(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """Begins again with --resume; a finished one whose checkpoint is gone does not."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(tiny, whole)

    def stopping(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PosTrainer, "_step", stopping)
        run(tiny, broken)
    assert not (broken / "checkpoint.pt").exists() and not (broken / "metrics.jsonl").exists()
    recbole_pos.run(resume=broken, verbose=False)
    assert_same(whole, broken)
    (whole / "checkpoint.pt").unlink()
    with pytest.raises(UsageError, match="not a run folder"):
        recbole_pos.run(resume=whole)
