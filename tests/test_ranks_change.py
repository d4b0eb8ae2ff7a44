"""A run that resumes with another number of processes trains on every window once an epoch."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_launch import OPTIONS, forking

import recbole_pos
from recbole_pos.data.loaders import WindowLoader
from recbole_pos.distributed import Shard
from recbole_pos.errors import TrainingError
from recbole_pos.experiment import launch
from recbole_pos.experiment.trainer import PosTrainer


@pytest.fixture
def trained_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which every process adds a line for each batch: epoch, processes, windows."""
    file, epoch = tmp_path / "windows", [0]
    iterate, take = WindowLoader.__iter__, Shard.take

    def iterate_and_note(loader: WindowLoader) -> Iterator[Any]:
        epoch[0] = loader.epoch
        return iterate(loader)

    def take_and_note(shard: Shard, rows: Any, target_counts: Any = None) -> Any:
        own = take(shard, rows, target_counts)
        if shard.num_targets and isinstance(rows, np.ndarray):  # none: its row is only borrowed
            line = json.dumps([epoch[0], shard.size, own.tolist()]) + "\n"
            with open(file, "ab", buffering=0) as notes:
                os.write(notes.fileno(), line.encode())
        return own

    monkeypatch.setattr(WindowLoader, "__iter__", iterate_and_note)
    monkeypatch.setattr(Shard, "take", take_and_note)
    monkeypatch.setattr(launch, "LaunchConfig", forking)
    return file


def count_windows(file: Path) -> dict[int, Counter[int]]:
    """How often each window was trained, by epoch; and forget it."""
    counts: dict[int, Counter[int]] = {}
    for line in file.read_text().splitlines():
        epoch, _, windows = json.loads(line)
        counts.setdefault(epoch, Counter()).update(windows)
    file.unlink()
    return counts


def test_each_window_is_trained_once_an_epoch(tiny, tmp_path, monkeypatch, trained_windows) -> None:
    """No window twice and none left out, also where the run was lost within an epoch."""
    folder, finish = tmp_path / "run", PosTrainer._finish_epoch
    given = {**OPTIONS, "data_path": str(tiny), "train_batch_size": 8}

    def fail_in_the_third(trainer: PosTrainer, *args: Any, **more: Any) -> Any:
        if trainer.progress.next_epoch == 2:
            raise KeyError("lost")
        return finish(trainer, *args, **more)

    monkeypatch.setattr(PosTrainer, "_finish_epoch", fail_in_the_third)
    how = {"nproc": 4, "max_restarts": 0, "verbose": False}
    with pytest.raises(TrainingError, match="lost"):
        recbole_pos.run("FPARec", "tiny", None, {**given, "epochs": 6}, folder, **how)
    monkeypatch.setattr(PosTrainer, "_finish_epoch", finish)
    by_four = count_windows(trained_windows)
    assert set(by_four) == {0, 1, 2}  # the checkpoint is of the second

    recbole_pos.run(resume=folder, config_dict={"epochs": 4}, nproc=2, verbose=False)
    by_two = count_windows(trained_windows)
    recbole_pos.run(resume=folder, config_dict={"epochs": 6}, verbose=False)
    by_one = count_windows(trained_windows)
    assert (set(by_two), set(by_one)) == ({2, 3}, {4, 5})

    every_window = set(by_one[4])
    for epochs in ({0: by_four[0], 1: by_four[1]}, by_two, by_one):
        for windows in epochs.values():
            assert set(windows) == every_window and set(windows.values()) == {1}
    assert len(folder.joinpath("metrics.jsonl").read_text().splitlines()) == 6


@pytest.mark.long
def test_the_script_of_the_documents_runs_on_two_machines(tiny: Path, tmp_path: Path) -> None:
    """Two launchers that meet at a port are two machines; then one of them resumes alone."""
    page = Path(__file__).parent.parent / "docs" / "scaling.md"
    script = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)[0]
    script = script.replace('"/mnt/shared"', repr(str(tmp_path))).replace('"shop"', '"tiny"')
    (tmp_path / "dataset").symlink_to(tiny)
    file = tmp_path / "train.py"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def train_on(num_machines: int, epochs: int) -> list[int]:
        file.write_text(script.replace('"epochs": 50', f'"epochs": {epochs}'))
        words = f"--nnodes {num_machines} --nproc_per_node 1 --rdzv_backend c10d"
        words += f" --rdzv_endpoint 127.0.0.1:{port} --local_addr 127.0.0.1"
        command = [sys.executable, "-m", "torch.distributed.run", *words.split(), str(file)]
        machines = [subprocess.Popen(command, cwd=tmp_path) for _ in range(num_machines)]
        return [machine.wait(timeout=300) for machine in machines]

    assert train_on(2, 2) == [0, 0]
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    assert len(metrics.read_text().splitlines()) == 2
    script = script.replace("run(resume=RUN)", 'run(resume=RUN, config_dict={"epochs": 3})')
    assert train_on(1, 3) == [0]
    assert len(metrics.read_text().splitlines()) == 3
