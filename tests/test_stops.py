"""A run that is stopped: killed, interrupted, terminated, without room; and two at once."""

import io
import math
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from conftest import SCRIPT, wait
from test_trainer import OPTIONS, assert_same, run

import recbole_pos
from recbole_pos import files
from recbole_pos.cli.main import main
from recbole_pos.errors import Interrupted, StorageError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.trainer import PosTrainer


def start(tiny: Path, folder: Path, *more: str, epochs=5000, heeds=True, pauses=False) -> Any:
    """The command line in a process of its own, once it has finished three epochs.

    It is forked from this one, which has imported everything, unless it starts others; its stderr
    is in a file.

    Args:
        epochs: 0 where ``more`` is the whole command.
        heeds: whether it heeds SIGINT, unlike a command that a script starts in the background.
        pauses: whether it stands still within the fourth.
    """
    given = {**OPTIONS, "data_path": tiny, "epochs": epochs, "stopping_step": epochs}
    words = ["run", "-m", "FPARec", "-d", "tiny", *(f"--{k}={v}" for k, v in given.items())]
    words = [*words, f"--run_dir={folder}", *more] if epochs else [*more, "--quiet"]
    until, step = epochs_done(folder) + 3, PosTrainer._step

    def pause(self: PosTrainer, *given: Any) -> None:
        if (self.progress.next_epoch, given[-1]) == (until, 2):
            signal.pause()
        step(self, *given)

    def child() -> None:
        PosTrainer._step = pause if pauses else step
        signal.signal(signal.SIGINT, signal.default_int_handler if heeds else signal.SIG_IGN)
        with open(f"{folder}.err", "w") as sys.stderr, open(os.devnull, "w") as sys.stdout:
            code = main(words)
        os._exit(code)

    if "--nproc=2" in more:
        with open(f"{folder}.err", "w") as errors:
            command = [sys.executable, str(SCRIPT), *words]
            process: Any = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
    else:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    wait(lambda: epochs_done(folder) >= until or not psutil.pid_exists(process.pid))
    return process


def ended(process: Any) -> int:
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


def test_a_killed_run_resumes_to_the_same_bits(tiny, tmp_path) -> None:
    """A process that is killed in the middle of an epoch, twice."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(tiny, whole, epochs=9, stopping_step=9)
    for more in ((), ("run", f"--resume={killed}")):
        process = start(tiny, killed, *more, epochs=0 if more else 9, pauses=True)
        os.kill(process.pid, signal.SIGKILL)
        assert ended(process) == -signal.SIGKILL
    assert epochs_done(killed) == 6
    recbole_pos.run(resume=killed, verbose=False)
    assert_same(whole, killed)


@pytest.mark.parametrize(
    ("number", "code", "more"),
    [
        (signal.SIGINT, 130, ()),
        (signal.SIGTERM, 143, ()),
        pytest.param(signal.SIGINT, 130, ("--nproc=2",), marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, -9, ("--nproc=2",), marks=pytest.mark.long),
    ],
)
def test_a_signal_says_how_to_go_on(tiny, tmp_path, number, code, more) -> None:
    """And leaves no process behind, and the newest epoch."""
    folder = tmp_path / "run"
    process = start(tiny, folder, *more, heeds=number != signal.SIGTERM)
    members = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(members) >= 2 * len(more)
    os.kill(process.pid, number)
    assert ended(process) == code
    wait(lambda: not any(is_running(pid) for pid in members))
    error = Path(f"{folder}.err").read_text()
    if number == signal.SIGKILL:
        return
    assert f"--resume {folder}`" in error and error.count("\n") == 1
    done = checkpoint.load(folder / "checkpoint.pt")["progress"]["next_epoch"]
    assert done >= epochs_done(folder)
    result = recbole_pos.run(resume=folder, config_dict={"epochs": done + 2}, verbose=False)
    assert result.epochs == done + 2
    assert f"epochs: {done + 2}\n" in (folder / "config.yaml").read_text()


def test_ctrl_c_while_a_checkpoint_is_written_leaves_the_former_one(tmp_path, monkeypatch) -> None:
    """torch ends its file after an exception, and raises one of its own."""
    file, writes = tmp_path / "c.pt", iter(range(1, 100))
    checkpoint.save(file, {"steps": 1})

    class Stopped(io.FileIO):
        def write(self, data: Any) -> int:
            if next(writes) == 4:
                raise KeyboardInterrupt
            return super().write(data)

    monkeypatch.setattr(files, "open", Stopped, raising=False)
    tensors = {"x": torch.zeros(300_000), "y": torch.ones(300_000)}
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(file, {"average": tensors})
    assert checkpoint.load(file)["steps"] == 1 and [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_a_signal_in_the_first_epoch_names_no_resume(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "save", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as stop:
        run(tiny, tmp_path / "run")
    assert not isinstance(stop.value, Interrupted)


def test_the_command_to_resume_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    """In messages too: a folder with a space, and the modules that must be named again."""
    folder = RunFolder(tmp_path / "my run")
    folder.path.mkdir()
    folder.write_config({"model": "Mine", "dataset": "tiny", "plugins": ["mine"]})
    assert folder.resume_command == f"recbole-pos run --resume '{folder.path}' --plugins='[mine]'"
    folder.checkpoint.touch()
    with pytest.raises(UsageError, match=re.escape(folder.resume_command)):
        folder.require_unused()


def test_two_runs_that_begin_at_once_do_not_share_a_folder(tiny, tmp_path, monkeypatch) -> None:
    """A folder in which another process begins after it was found to be free."""
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(RunFolder, "create", lambda *_: RunFolder(tmp_path))
    with pytest.raises(UsageError, match="--resume"):
        run(tiny, tmp_path)


def test_no_file_that_a_killed_run_was_writing_stays(tmp_path: Path) -> None:
    """In the folder of the run, in which other files may be."""
    run = RunFolder(tmp_path)
    written = [run.config, run.metrics, run.checkpoint, run.result, run.ranks, run.names]
    for file in (*written, run.vectors, run.vectors.with_suffix(".txt"), tmp_path / "other"):
        (tmp_path / f".{file.name}.0a1b2c3d.tmp").touch()
    with run.locked():
        assert [p.name for p in tmp_path.glob(".*")] == [".other.0a1b2c3d.tmp"]


def test_one_process_trains_in_a_folder(tiny, tmp_path) -> None:
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


def test_a_full_disk_leaves_the_last_checkpoint(tiny, tmp_path, monkeypatch) -> None:
    """The last checkpoint stays, and the message says how to go on."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(tiny, whole)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    save, saved = checkpoint.save, []

    def full(path: Path, state: dict[str, Any]) -> None:
        saved.append(path)
        size = 10_000 if len(saved) == 4 else before[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", full)
    monkeypatch.setattr(checkpoint, "WRITING_SHARE", math.inf)
    with pytest.raises(StorageError, match=f"checkpoint.pt: File too large.*--resume {broken}"):
        run(tiny, broken)
    monkeypatch.undo()
    assert not [p.name for p in broken.iterdir() if p.name.startswith(".")]
    recbole_pos.run(resume=broken, verbose=False)
    assert_same(whole, broken)
