"""The best weights beside a checkpoint: two files that are read, copied and kept as one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_keeper import PARTS, Story, same_weights, story  # noqa: F401

import recbole_pos
from recbole_pos.errors import CheckpointError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.best_file import best_files
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.state import weights_of
from recbole_pos.tune.storage import Mirror


@pytest.fixture
def two_files(story: Story, tmp_path: Path) -> Path:  # noqa: F811
    """The folder of a run that goes on, whose best weights stand beside its checkpoint."""
    (folder,) = {m for m in story.after(4)[-1:] if best_files(m / "checkpoint.pt")}
    return Path(shutil.copytree(folder, tmp_path / "two"))


def test_two_files_are_read_as_one(story: Story, two_files: Path, tmp_path: Path) -> None:  # noqa: F811
    file = two_files / "checkpoint.pt"
    (best,) = best_files(file)
    loaded = recbole_pos.load(two_files)
    assert same_weights(weights_of(loaded.model)["state_dict"], story.weights[1])
    assert "best_file" not in checkpoint.load(file)
    checkpoint.copy(file, tmp_path / "one.pt")
    one, two = checkpoint.load(tmp_path / "one.pt"), checkpoint.load(file)
    for part in PARTS:
        assert same_weights(one[part]["state_dict"], two[part]["state_dict"])
    shutil.copy(best, tmp_path / "kept")
    best.unlink()
    with pytest.raises(
        CheckpointError, match=r"checkpoint.pt lacks its best weights, which are in"
    ):
        recbole_pos.load(two_files)
    assert checkpoint.load(file, ("data",))["data"]
    checkpoint.save(best, {"token": "000000000000", "weights": one["best_weights"]})
    with pytest.raises(CheckpointError, match="has best weights of another checkpoint"):
        recbole_pos.load(two_files)
    checkpoint.save(best, {"token": best.name[-12:], "weights": 7})
    with pytest.raises(CheckpointError, match=f"{best.name} cannot be used: weights: expected a"):
        checkpoint.load(file)
    shutil.copy(tmp_path / "kept", best)
    assert same_weights(checkpoint.load(file)["best_weights"]["state_dict"], story.weights[1])


def test_a_training_that_goes_on_while_it_is_read(
    story: Story,  # noqa: F811
    two_files: Path,
    monkeypatch,
) -> None:
    """The best weights are gone, and the checkpoint is another one."""
    file, read = two_files / "checkpoint.pt", checkpoint._read
    (best,) = best_files(file)

    def meanwhile(path: Path) -> dict[str, Any]:
        state = read(path)
        if best.exists():
            shutil.copy(story.run / "checkpoint.pt", file)
            best.unlink()
        return state

    monkeypatch.setattr(checkpoint, "_read", meanwhile)
    assert checkpoint.load(file)["progress"]["next_epoch"] == 6


def test_a_storage_has_the_best_weights_of_its_checkpoint(
    story: Story,  # noqa: F811
    two_files: Path,
    tmp_path: Path,
    monkeypatch,
) -> None:
    here = RunFolder(two_files)
    (best,) = best_files(here.checkpoint)
    mirror = Mirror(here, str(tmp_path / "far"))
    read = best.read_bytes()

    def replaced(source: Any, target: Any) -> None:
        """The training goes on as soon as its checkpoint was read."""
        target.write(source.read())
        if source.name == str(here.checkpoint):
            best.unlink(missing_ok=True)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", replaced)
        mirror.keep()
    assert not (tmp_path / "far" / "checkpoint.pt").exists()  # the next look finds it
    best.write_bytes(read)
    mirror.keep()
    (tmp_path / "far" / f"{best.name[:-1]}{'0' if best.name[-1] != '0' else '1'}").touch()
    Mirror(here, str(tmp_path / "far")).keep()
    there = RunFolder(tmp_path / "there")
    Mirror(there, str(tmp_path / "far")).fetch()
    assert [file.name for file in best_files(there.checkpoint)] == [best.name]
    state = checkpoint.load(there.checkpoint)
    assert same_weights(state["best_weights"]["state_dict"], story.weights[1])
