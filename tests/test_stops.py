"""A run that is stopped: killed, interrupted, terminated, without room; and two at once."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import wait
from test_trainer import OPTIONS, assert_same, run

import recbole_pos
from recbole_pos import files
from recbole_pos.cli.main import main
from recbole_pos.errors import Interrupted, StorageError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder

SCRIPT = Path(__file__).parent.parent / "run_recbole_pos.py"


def start(
    tiny: Path,
    folder: Path,
    *more: str,
    epochs: int = 5000,
    forked: bool = True,
    on_sigint: Any = signal.default_int_handler,
) -> Any:
    """The command line in a process of its own, once it has finished three epochs.

    Args:
        forked: from this one, which has imported everything; with its stderr in a file.
        on_sigint: SIG_IGN as of a command that a script starts in the background.
    """
    given = {**OPTIONS, "data_path": tiny, "epochs": epochs, "stopping_step": epochs}
    words = ["run", "-m", "FPARec", "-d", "tiny", *(f"--{k}={v}" for k, v in given.items())]
    words = [*words, f"--run_dir={folder}", *more] if epochs else [*more, "--quiet"]
    until = epochs_done(folder) + 3
    with open(f"{folder}.err", "w") as errors:

        def child() -> None:
            signal.signal(signal.SIGINT, on_sigint)
            os.dup2(errors.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            code = main(words)
            sys.stderr.flush()
            os._exit(code)

        if forked:
            process: Any = multiprocessing.get_context("fork").Process(target=child)
            process.start()
        else:
            process = psutil.Popen(
                [sys.executable, str(SCRIPT), *words], stdout=subprocess.DEVNULL, stderr=errors
            )
    wait(lambda: epochs_done(folder) >= until or not psutil.pid_exists(process.pid))
    return process


def ended(process: Any) -> int:
    """Its exit code."""
    if isinstance(process, psutil.Popen):
        return process.wait(60)
    process.join(60)
    return process.exitcode


def epochs_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_resume_after_kill_minus_nine(tiny: Path, tmp_path: Path) -> None:
    """A real process, killed in the middle of training, twice."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(tiny, whole, epochs=60, stopping_step=60)
    for more in ((), ("run", f"--resume={killed}")):
        process = start(tiny, killed, *more, epochs=0 if more else 60)
        os.kill(process.pid, signal.SIGKILL)
        assert ended(process) == -signal.SIGKILL
    assert 6 <= epochs_done(killed) < 60
    recbole_pos.run(resume=killed, verbose=False)
    assert_same(whole, killed)


@pytest.mark.parametrize(
    ("number", "code", "more"),
    [
        (signal.SIGINT, 130, ()),
        (signal.SIGTERM, 143, ()),
        pytest.param(signal.SIGINT, 130, ("--nproc=2",), marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 143, ("--nproc=2",), marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, -9, ("--nproc=2",), marks=pytest.mark.long),
    ],
)
def test_a_signal_says_how_to_go_on(
    tiny: Path, tmp_path: Path, number: int, code: int, more: tuple[str, ...]
) -> None:
    """And leaves no process behind, and the newest epoch."""
    folder = tmp_path / "run"
    ignored = {"on_sigint": signal.SIG_IGN} if number == signal.SIGTERM else {}
    process = start(tiny, folder, *more, forked=not more, **ignored)
    members = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(members) >= 2 * len(more)
    os.kill(process.pid, number)
    assert ended(process) == code
    wait(lambda: not any(is_running(pid) for pid in members))
    error = Path(f"{folder}.err").read_text()
    if number == signal.SIGKILL:
        return
    assert f"--resume {folder}`" in error and error.count("\n") == 1
    done = checkpoint.load(folder / "checkpoint.pt", ["progress"])["progress"]["next_epoch"]
    assert done >= epochs_done(folder)
    result = recbole_pos.run(resume=folder, config_dict={"epochs": done + 2}, verbose=False)
    assert result.epochs == done + 2
    assert f"epochs: {done + 2}\n" in (folder / "config.yaml").read_text()


@pytest.mark.parametrize("nth", [1, 4])
def test_ctrl_c_while_a_checkpoint_is_written(tmp_path: Path, nth: int) -> None:
    """torch ends its file after an exception, and raises one of its own."""
    file, writes = tmp_path / "c.pt", 0
    checkpoint.save(file, {"steps": 1})

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
            checkpoint.save(
                file, {"average": {"x": torch.zeros(300_000), "y": torch.ones(300_000)}}
            )
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, heed)
    assert checkpoint.load(file)["steps"] == 1 and [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_a_signal_before_anything_was_kept(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """It names nothing to continue."""

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
            folder.rename(tmp_path / "elsewhere")
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", removed)
    monkeypatch.setattr(checkpoint, "SHARE", math.inf)  # every epoch is written
    with pytest.raises(UsageError, match=str(folder)):
        run(tiny, folder)
    assert not folder.exists()


@pytest.mark.long
def test_standard_output_that_nobody_reads(tiny: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "data_path": tiny, "epochs": 3}
    command = [sys.executable, str(SCRIPT), "-m", "FPARec", "-d", "tiny"]
    command += [f"--{k}={v}" for k, v in options.items()]
    for number, more in enumerate(([], ["--json"])):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*command, *more, f"--run_dir={tmp_path / str(number)}"],
                stdout=full, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert done.returncode == 1
        assert "error: cannot write standard output: No space left on device" in done.stderr


def test_one_process_trains_in_a_folder(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(tiny, folder)
    try:
        with pytest.raises(UsageError, match=f"{folder} is being trained by process {process.pid}"):
            recbole_pos.run(resume=folder, verbose=False)
        with pytest.raises(UsageError, match="--resume"):
            run(tiny, folder)
        assert process.is_alive()
    finally:
        process.kill()
        ended(process)
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
    with pytest.raises(UsageError, match="--resume"):
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
    monkeypatch.setattr(checkpoint, "SHARE", math.inf)
    try:
        with pytest.raises(StorageError, match=f"checkpoint.pt: File too large.*--resume {broken}"):
            run(tiny, broken)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert not [p.name for p in broken.iterdir() if p.name.startswith(".")]
    recbole_pos.run(resume=broken, verbose=False)
    assert_same(whole, broken)
