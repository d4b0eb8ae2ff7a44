"""A study on two machines, one of which dies, and what they share. Real raylets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import wait
from machines import killed, went_on

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.runs.storage import Mirror
from recbole_pos.runs.worker import find_folder

LAST = 10
BASE = {
    **{"model": "PosSASRec", "hidden_size": 8, "inner_size": 8, "n_layers": 1, "epochs": LAST},
    **{"MAX_ITEM_LIST_LENGTH": 8, "train_batch_size": 16, "stopping_step": 100},
}


@pytest.mark.long
@pytest.mark.parametrize("storage", [None, "file://{}/far"])
def test_a_node_is_killed_in_the_middle(
    two_machines, tiny: Path, tmp_path: Path, storage: str | None
) -> None:
    log = tmp_path / "log"
    rows = {"NoPE": {"position": ["nope"]}, "RoPE": {"position": ["rope"]}}
    rows["RoPE + kernel"] = {"attach": {"to": "RoPE", "schemes": ["kernel"]}}
    study = {"dataset": "tiny", "base": {**BASE, "data_path": str(tiny)}, "rows": rows, "seeds": 1}
    place = storage and storage.format(tmp_path)
    with killed(two_machines, log, after=6) as node:
        found = recbole_pos.compare(study, run_dir=tmp_path / "s", storage=place, verbose=False)
    assert set(found.runs["status"]) == {"done"} and set(found.runs["epochs"]) == {LAST}
    went_on(log, node, LAST)
    runs = list(tmp_path.glob("s/runs/*"))
    for path in runs:  # wherever they were trained
        assert {"result.json", "test_ranks.parquet", "checkpoint.pt"} <= set(os.listdir(path))
    far = {path.name for path in tmp_path.glob("far/s/*")}
    assert far == ({path.name for path in runs} if storage else set())
    assert recbole_pos.compare(tmp_path / "s", verbose=False).runs.equals(found.runs)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_copy_has_whole_files_and_the_newest(tmp_path: Path, scheme: str) -> None:
    run, place = RunFolder(tmp_path / "run"), f"{scheme}{tmp_path}/far/run"
    run.path.mkdir()
    run.write_config({"model": "FPARec"})
    Path(run.path / ".config.yaml.tmp").write_text("half")
    mirror = Mirror(run, place)
    with mirror.kept():
        run.checkpoint.write_bytes(b"one")
        wait(lambda: (tmp_path / "far" / "run" / "checkpoint.pt").is_file())
        run.checkpoint.write_bytes(b"two")
    assert sorted(os.listdir(tmp_path / "far" / "run")) == ["checkpoint.pt", "config.yaml"]
    (tmp_path / "far" / "run" / "result.json.part").write_text("half")
    other = RunFolder(tmp_path / "other")
    Mirror(other, place).fetch()
    assert other.checkpoint.read_bytes() == b"two"
    assert sorted(os.listdir(other.path)) == ["checkpoint.pt", "config.yaml"]


def test_the_checkpoint_is_copied_last(tmp_path: Path) -> None:
    """With it a copy counts as whole."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    for file in (run.checkpoint, run.result, run.known):
        file.touch()
    (tmp_path / "far" / "result.json.part").mkdir(parents=True)  # cannot be written
    with pytest.raises(OSError):
        Mirror(run, str(tmp_path / "far")).keep()
    assert not (tmp_path / "far" / "checkpoint.pt").exists()


def test_a_storage_that_cannot_be_is_told(cluster, tiny: Path, tmp_path: Path, capsys) -> None:
    """Before anything is trained, in one line, by compare as by tune."""
    (tmp_path / "file").touch()
    what = f"-m FPARec -d tiny --data_path={tiny} --run_dir={tmp_path / 'out'}".split()
    for storage in ("nowhere://bucket/x", str(tmp_path / "file" / "x")):
        for command in (["compare", *what], ["tune", *what, "--num_samples=1"]):
            assert main([*command, "--storage", storage]) == 2
            printed = capsys.readouterr().err.strip()
            assert printed.startswith(f"error: --storage: cannot use {storage!r}: ")
            assert "\n" not in printed


def test_a_machine_that_does_not_see_the_folder_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not see .*--storage"):
        find_folder(str(tmp_path / "elsewhere" / "run"), None, tmp_path)
