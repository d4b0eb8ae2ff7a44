"""Runs in processes of this machine: killed ones resume, none outlives its command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import SMALL, wait

EPOCHS = 6
SCRIPT = """
import sys, recbole_pos
compared = recbole_pos.compare(
    ["PosSASRec", "Pop"], "tiny", None, {options}, run_dir="study", seeds=2, max_concurrent=2
)
assert "ray" not in sys.modules
print(sorted(compared.runs["status"]))
"""


@pytest.fixture
def script(tiny: Path, tmp_path: Path) -> Path:
    """A script that calls ``compare`` without a guard, as users write them."""
    sizes = {**SMALL, "epochs": EPOCHS, "stopping_step": EPOCHS, "train_batch_size": 2}
    options = {**sizes, "data_path": str(tiny)}
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.replace("{options}", repr(options)))
    return file


def start(script: Path) -> subprocess.Popen:
    """The script as a process of the folder it is in."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(script)], cwd=script.parent, **pipes)


def find_training(process: subprocess.Popen, folder: Path) -> psutil.Process:
    """A process that trains, once a checkpoint of it is there."""
    wait(lambda: process.poll() is not None or list(folder.glob("study/runs/*/checkpoint.pt")))
    assert process.poll() is None, process.communicate()
    children = psutil.Process(process.pid).children(recursive=True)
    trainings = [c for c in children if os.getpgid(c.pid) == c.pid]
    assert trainings
    return trainings[0]


def test_killed_runs_resume_and_end_with_their_command(script: Path) -> None:
    """A killed process is replaced; when the command is killed, none goes on; it resumes."""
    folder = script.parent
    process = start(script)
    try:
        find_training(process, folder).kill()
        time.sleep(0.2)
        trainings = [find_training(process, folder)]
        process.kill()
        _, alive = psutil.wait_procs(trainings, timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert not alive
    again = start(script)
    out, error = again.communicate()
    assert again.returncode == 0, error
    assert "['done', 'done', 'done', 'done']" in out
    epochs = [len(f.read_text().splitlines()) for f in folder.glob("study/runs/*/metrics.jsonl")]
    # of PosSASRec: none trained twice, none left out
    assert sorted(epochs)[-2:] == [EPOCHS, EPOCHS]


def test_ctrl_c_ends_all_and_says_how_to_resume(script: Path) -> None:
    process = start(script)
    try:
        training = find_training(process, script.parent)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "continue with `recbole-pos compare" in error and "KeyboardInterrupt" in error
    psutil.wait_procs([training], timeout=60)
    assert not training.is_running()
