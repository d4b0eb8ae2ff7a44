"""A run that is stopped: killed, interrupted, terminated, without room; and two at once."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import wait
from test_trainer import OPTIONS, assert_same, outcome, run

import recbole_pos
from recbole_pos import files
from recbole_pos.errors import CheckpointError, Interrupted, StorageError, UsageError
from recbole_pos.experiment import checkpoint, checkpoint_writer
from recbole_pos.experiment.folder import RunFolder

SCRIPT = Path(__file__).parent.parent / "run_recbole_pos.py"


def start(tiny: Path, folder: Path, *more: str, **options: Any) -> subprocess.Popen:
    """A run of 5,000 epochs in a process of its own, once it has finished three."""
    given = {**OPTIONS, "data_path": tiny, "epochs": 5000, "stopping_step": 5000, **options}
    arguments = [f"--{k}={v}" for k, v in given.items()]
    command = [sys.executable, str(SCRIPT), "-m", "FPARec", "-d", "tiny", *arguments]
    # a shell lets what it starts in the background ignore the signal, the tests as well
    heed = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [*command, f"--run_dir={folder}", *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, heed)
    wait(lambda: _epochs(folder) >= 3 or process.poll() is not None)
    return process


def test_resume_after_kill_minus_nine(tiny: Path, tmp_path: Path) -> None:
    """A real process, killed in the middle of training, twice."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = {"epochs": 120, "stopping_step": 120}
    run(tiny, whole, **options)
    arguments = [f"--{k}={v}" for k, v in {**OPTIONS, **options, "data_path": tiny}.items()]
    command = [sys.executable, str(SCRIPT), "-m", "FPARec", "-d", "tiny", *arguments]
    for attempt in range(2):
        until = _epochs(killed) + 4
        process = subprocess.Popen(
            [*command, f"--run_dir={killed}"]
            if attempt == 0
            else [sys.executable, str(SCRIPT), f"--resume={killed}"],
            stdout=subprocess.DEVNULL,
        )
        wait(lambda until=until: _epochs(killed) >= until)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert 8 <= _epochs(killed) < 120
    recbole_pos.run(resume=killed, verbose=False)
    assert_same(whole, killed)


def _epochs(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.parametrize(
    ("number", "code", "more"),
    [
        (signal.SIGINT, 130, ()),
        pytest.param(signal.SIGTERM, 143, (), marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 130, ("--nproc=2",), marks=pytest.mark.long),
        (signal.SIGTERM, 143, ("--nproc=2",)),
    ],
)
def test_a_signal_says_how_to_go_on(
    tiny: Path, tmp_path: Path, number: int, code: int, more: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    process = start(tiny, folder, *more)
    members = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(members) >= 2 * len(more)
    process.send_signal(number)
    try:
        error = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert process.returncode == code
    assert f"--resume {folder}`" in error and error.count("\n") == 1
    wait(lambda: not any(_runs(pid) for pid in members))
    done = checkpoint.load(folder / "checkpoint.pt", ["progress"])["progress"]["next_epoch"]
    if more:
        return
    result = recbole_pos.run(resume=folder, config_dict={"epochs": done + 2}, verbose=False)
    assert result.epochs == done + 2
    assert f"epochs: {done + 2}\n" in (folder / "config.yaml").read_text()


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_ctrl_c_while_a_checkpoint_is_written(tmp_path: Path, nth: int) -> None:
    """torch ends its file after an exception, and raises one of its own."""
    file, writes = tmp_path / "c.pt", 0
    checkpoint.save(file, {"x": 1})

    def interrupt(frame: Any, event: str, what: Any) -> None:
        nonlocal writes
        if event == "c_call" and what.__name__ == "write" and frame.f_code is raw_write:
            writes += 1
            if writes == nth:
                signal.raise_signal(signal.SIGINT)

    raw_write = files._Raw.write.__code__
    heed = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(file, {"x": torch.zeros(300_000), "y": torch.ones(300_000)})
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, heed)
    assert checkpoint.load(file)["x"] == 1 and [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_a_signal_before_anything_was_kept(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """It does not say that there is something to continue."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", interrupted)
    with pytest.raises(KeyboardInterrupt) as stop:
        run(tiny, tmp_path / "run")
    assert not isinstance(stop.value, Interrupted)


def test_a_folder_that_is_gone_is_not_made_again(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    folder, save, saved = tmp_path / "run", checkpoint.save, []

    def removed(path: Path, state: dict[str, Any]) -> None:
        saved.append(path)
        if len(saved) == 3:
            shutil.rmtree(folder)
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", removed)
    monkeypatch.setattr(checkpoint_writer, "SHARE", math.inf)  # every epoch is written
    with pytest.raises(UsageError, match=f"there is no folder {folder}"):
        run(tiny, folder)
    assert not folder.exists()


@pytest.mark.long
def test_processes_do_not_outlive_their_parent(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(tiny, folder, "--nproc=2")
    members = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(members) >= 2
    process.kill()
    process.communicate()
    wait(lambda: not any(_runs(pid) for pid in members))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
def test_standard_output_that_nobody_reads(tiny: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "data_path": tiny, "epochs": 3}
    command = [sys.executable, str(SCRIPT), "-m", "FPARec", "-d", "tiny"]
    command += [f"--{k}={v}" for k, v in options.items()]
    for number, more in enumerate(([], ["--json"])):
        folder = tmp_path / f"run{number}"
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [*command, *more, f"--run_dir={folder}"],
                stdout=full, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert ended.returncode == 1
        assert "error: cannot write standard output: No space left on device" in ended.stderr


def test_sigterm_where_ctrl_c_is_ignored(tiny: Path, tmp_path: Path) -> None:
    """As of a command that a script starts in the background."""
    ignore = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
        command = "from recbole_pos.cli import listing, main as cli\n"
        command += f"listing.list_models = lambda: exec({code!r})\n"
        command += "raise SystemExit(cli.main(['models']))"
        ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, ignore)
    assert (ended.returncode, ended.stderr) == (143, "interrupted\n")


def test_one_process_trains_in_a_folder(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(tiny, folder)
    try:
        held = f"{folder} is being trained by process {process.pid} on"
        with pytest.raises(UsageError, match=held):
            recbole_pos.run(resume=folder, verbose=False)
        with pytest.raises(UsageError, match="holds a run already"):
            run(tiny, folder)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    done = checkpoint.load(folder / "checkpoint.pt", ["progress"])["progress"]["next_epoch"]
    recbole_pos.run(resume=folder, config_dict={"epochs": done + 1}, verbose=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(done + 1))


def test_a_folder_that_another_process_has_begun_meanwhile(
    tiny: Path, tmp_path: Path, monkeypatch
) -> None:
    """Both saw an empty folder; the other one has even finished when this one may write."""
    held = RunFolder.held

    def later(self: RunFolder) -> Any:
        (self.path / "metrics.jsonl").write_text("")
        return held(self)

    monkeypatch.setattr(RunFolder, "held", later)
    with pytest.raises(UsageError, match="holds a run already"):
        run(tiny, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_full_disk(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """The last checkpoint stays, and the message says how to go on."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(tiny, whole)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    save, saved = checkpoint.save, []

    def full(path: Path, state: dict[str, Any]) -> None:
        saved.append(path)
        if len(saved) == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", full)
    monkeypatch.setattr(checkpoint_writer, "SHARE", math.inf)
    said = re.escape(f"{broken} is whole: make room and continue with `recbole-pos run --resume")
    try:
        with pytest.raises(StorageError, match=f"checkpoint.pt: File too large.*{said}"):
            run(tiny, broken)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert sorted(p.name for p in broken.iterdir() if p.name.startswith(".")) == []
    recbole_pos.run(resume=broken, verbose=False)
    assert_same(whole, broken)


def test_an_optimiser_of_a_wrong_shape_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Fused Adam would write beyond the two numbers; a view is copied into a layout of its own."""
    run(tiny, tmp_path / "run", epochs=1)
    file = tmp_path / "run" / "checkpoint.pt"
    state = checkpoint.load(file)
    good = state["optimizer"]["state"][0]["exp_avg"]
    for bad in (torch.zeros(2), good.double(), good / 0):
        state["optimizer"]["state"][0]["exp_avg"] = bad
        checkpoint.save(file, state)
        with pytest.raises(CheckpointError, match=r"optimizer\.state\.0\.exp_avg"):
            recbole_pos.run(resume=tmp_path / "run", config_dict={"epochs": 2}, verbose=False)


@pytest.mark.parametrize("learner", ["adam", "adamw", "sgd", "adagrad", "rmsprop"])
def test_every_optimiser_can_be_resumed(tiny: Path, tmp_path: Path, learner: str) -> None:
    run(tiny, tmp_path / "whole", epochs=2, learner=learner)
    run(tiny, tmp_path / "parts", epochs=1, learner=learner)
    recbole_pos.run(resume=tmp_path / "parts", config_dict={"epochs": 2}, verbose=False)
    assert outcome(tmp_path / "whole")[1] == outcome(tmp_path / "parts")[1]
