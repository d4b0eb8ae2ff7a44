"""Searches that are extended, moved, or in which the infrastructure failed. One Ray for all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from recbole_pos.cli.main import main
from recbole_pos.tune.record import Record

SPACE = "learning_rate: {loguniform: [1e-4, 1e-1]}\nn_layers: {choice: [1, 2]}\n"
FAST = ("--hidden_size=16", "--inner_size=16", "--MAX_ITEM_LIST_LENGTH=12", "--epochs=3")
SEARCH = ("--train_batch_size=16", "--scheduler=none", "--max_concurrent=1", "--quiet")


def watched(log: str, broken: str) -> Callable[[], None]:
    """A function that makes a process note every epoch, and find no room while ``broken`` is."""

    def hook() -> None:
        import os

        import recbole_pos  # noqa: F401
        from recbole_pos.experiment.trainer import PosTrainer

        train = PosTrainer._train_epoch

        def _train_epoch(self, loader, epoch, **kwargs):
            if os.path.exists(broken) and self.config["n_layers"] == 2:
                raise OSError(28, "No space left on device")
            with open(log, "a") as stream:
                stream.write(f"{epoch}\n")
            return train(self, loader, epoch, **kwargs)

        PosTrainer._train_epoch = _train_epoch

    return hook


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray, and the folder of what its workers note: ``log``, and ``broken`` while it is there."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "log").touch()
    hook = watched(str(folder / "log"), str(folder / "broken"))
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False,
        runtime_env={"worker_process_setup_hook": hook},
    )  # fmt: skip
    yield folder
    ray.shutdown()


def tune(data: Path, folder: Path, *more: str, space: str = SPACE) -> int:
    file = folder.parent / "space.yaml"
    file.write_text(space)
    words = ["tune", "-m", "FPARec", "-d", "tiny", f"--data_path={data}", f"--space={file}"]
    return main([*words, *FAST, *SEARCH, f"--run_dir={folder}", *more])


def options(folder: Path) -> list[dict[str, Any]]:
    return [trial.options for trial in Record(folder / "trials.jsonl").trials]


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def whole(place: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search of four trials."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert tune(tiny, folder, "--num_samples=4") == 0
    return folder


def test_a_finished_search_is_extended(whole: Path, tiny: Path, tmp_path: Path, capsys) -> None:
    """As if it had been as long from the start; the test is spent again only for a new best."""
    folder = tmp_path / "out"
    assert tune(tiny, folder, "--num_samples=1") == 0
    before, first = read(folder, "test.json"), options(folder)
    assert main(["tune", "--resume", str(folder), "--num_samples=4", "--quiet"]) == 0
    assert options(folder)[:1] == first and options(folder) == options(whole)
    best, expected = (read(path, "tune.json")["best"] for path in (folder, whole))
    assert best == expected
    after = read(folder, "test.json")
    assert after["trial"] == best["trial"] and after["test"] == read(whole, "test.json")["test"]
    assert after.get("earlier", []) == ([before] if best["trial"] else [])
    assert main(["tune", "--resume", str(folder), "--num_samples=3", "--quiet"]) == 2
    assert "--num_samples" in capsys.readouterr().err
    assert main(["tune", "--resume", str(folder), "--quiet"]) == 0  # nothing is left to train
    assert read(folder, "test.json") == after


def test_a_search_is_resumed_elsewhere(
    place: Path, whole: Path, tiny: Path, tmp_path: Path, capsys
) -> None:
    """Stopped in its third trial, moved with its data, and run to the same end; what was trained is
    not trained again."""
    folder, data = tmp_path / "search", tmp_path / "data"
    old = tmp_path / "old"
    shutil.copytree(tiny, old)
    assert tune(old, folder, "--num_samples=4") == 0
    expected = [read(folder, name) for name in ("tune.json", "test.json")]
    lines = (folder / "trials.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["trial"] < 2]
    started = [line for line in lines if json.loads(line)["trial"] == 2]
    (folder / "trials.jsonl").write_text("".join([*kept, *started[:3]]) + started[3][:20])
    for name in ("checkpoint_000002", "../trial_00003"):  # as after two epochs of the third trial
        shutil.rmtree(folder / "trials" / "trial_00002" / name)
    for name in ("tune.json", "test.json", "trials.csv", "best.yaml"):
        (folder / name).unlink()
    shutil.rmtree(folder / "best")
    old.rename(data)
    folder = folder.rename(tmp_path / "elsewhere")
    resume = ["tune", "--resume", str(folder), "--quiet"]
    assert main(resume) == 2  # the data are not where they were: nothing is spent
    assert "data_path" in capsys.readouterr().err and not (folder / "test.json").exists()
    settings = read(folder, "search.json")
    (folder / "search.json").write_text(json.dumps({**settings, "cpus_per_trial": 64}))
    resume.append(f"--data_path={data}")
    assert main(resume) == 2  # a smaller machine: what the message advises can be given
    assert "--cpus_per_trial" in capsys.readouterr().err
    before = (place / "log").read_text()
    assert main([*resume, "--cpus_per_trial=1"]) == 0
    epochs = (place / "log").read_text().removeprefix(before).split()
    assert epochs == ["2", "0", "1", "2"]
    found = [read(folder, name) for name in ("tune.json", "test.json")]
    assert found[0]["best"] == expected[0]["best"] and found[1] == expected[1]
    assert found[0]["states"] == {"finished": 4, "stopped": 0, "failed": 0}
    assert main(resume[:-1]) == 0  # it knows now where the data are


def test_trials_that_never_ran_are_no_result(
    place: Path, tiny: Path, tmp_path: Path, capsys
) -> None:
    folder, space = tmp_path / "out", "n_layers: {choice: [1, 2, 3]}\n"
    (place / "broken").touch()
    try:
        assert tune(tiny, folder, "--searcher=grid", space=space) == 1
    finally:
        (place / "broken").unlink()
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "1 of 3 trials" in error and "No space left" in error
    assert not (folder / "test.json").exists() and not (folder / "best").exists()
    states = [trial.state for trial in Record(folder / "trials.jsonl").trials]
    assert states == ["finished", "lost", "finished"]
    before = (place / "log").read_text()
    assert main(["tune", "--resume", str(folder), "--quiet"]) == 0
    assert (place / "log").read_text().removeprefix(before).split() == ["0", "1", "2"]
    assert read(folder, "tune.json")["states"]["finished"] == 3


def test_a_full_disk_is_one_line(place: Path, tiny: Path, tmp_path: Path, capsys) -> None:
    """And nothing is in the way of the search once there is room."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "trials.jsonl").symlink_to("/dev/full")
    assert tune(tiny, folder, "--num_samples=2") == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "trials.jsonl" in error and "--resume" in error
    (folder / "trials.jsonl").unlink()
    assert main(["tune", "--resume", str(folder), "--quiet"]) == 0


def test_a_storage_that_moved_is_named(place: Path, tiny: Path, tmp_path: Path, capsys) -> None:
    folder, storage = tmp_path / "out", tmp_path / "storage"
    (place / "broken").touch()
    try:
        space = "n_layers: {choice: [1, 2]}\n"
        given = ("--searcher=grid", f"--storage={storage}")
        assert tune(tiny, folder, *given, space=space) == 1
    finally:
        (place / "broken").unlink()
    storage.rename(tmp_path / "moved")
    resume = ["tune", "--resume", str(folder), "--quiet"]
    assert main([*resume, f"--storage={tmp_path / 'moved'}"]) == 0
    assert (folder / "best" / "checkpoint.pt").is_file() and not storage.exists()
