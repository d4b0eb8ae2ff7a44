"""Clusters to join, and the GPUs of their runs. One's own cluster: test_study_driver.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from recbole_pos.config.arguments import CompareArguments
from recbole_pos.runs.cluster import choose_resources, count_concurrent_runs
from recbole_pos.runs.worker import Resources

JOIN = """
import sys
from recbole_pos.errors import UsageError
from recbole_pos.runs.cluster import connect, stop
try:
    stop(connect(*sys.argv[1:] or [None]))
    print("joined")
except UsageError as error:
    print(error)
"""
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    return {**kept, "HOME": str(home), **more}


def join(home: Path, *address: str, **more: str) -> str:
    command = [sys.executable, "-c", JOIN, *address]
    done = subprocess.run(command, env=environment(home, **more), capture_output=True, text=True)
    return done.stdout + done.stderr[-2000:] * done.returncode


@pytest.mark.long
def test_a_cluster_that_asks_for_a_token(tmp_path: Path) -> None:
    home, other = tmp_path / "head", tmp_path / "other"
    other.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    start = f"start --head --port {port} --num-cpus 1 --include-dashboard false"
    given = environment(
        home, RAY_AUTH_MODE="token", RAY_TMPDIR=os.environ.get("RAY_TMPDIR", "/tmp")
    )
    command = [*RAY, *start.split(), "--disable-usage-stats", "--block"]
    address = f"127.0.0.1:{port}"
    with subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True) as head:
        try:
            assert head.stdout is not None
            next(line for line in head.stdout if "Ray runtime started" in line)
            assert "joined" in join(home, address, RAY_AUTH_MODE="token")
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
            assert "joined" in join(other, address, **token)
            printed = join(other, address)
            assert "wants another token: copy ~/.ray/auth_token of the machine" in printed
        finally:
            head.terminate()


def test_nothing_answers_at_the_address(no_ray, tmp_path: Path, monkeypatch, refused) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    what = ["-m", "FPARec", "-d", "ml-100k", f"--run_dir={tmp_path / 'out'}"]
    for command, given in (("tune", "auto"), ("tune", address), ("compare", "localhost:99999")):
        refused([command, *what, f"--address={given}"], "--address")
        assert not (tmp_path / "out").exists()


# --- GPUs of a cluster ---


def node(cpus: int, gpus: int, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}}


def test_one_gpu_a_training_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    default = CompareArguments()
    asked = default.cpus_per_trial, default.gpus_per_trial
    monkeypatch.setattr(ray, "nodes", lambda: [node(8, 0), node(4, 2)])
    assert choose_resources(*asked, uses_gpu=True) == Resources(1, 1)
    assert count_concurrent_runs(choose_resources(*asked, uses_gpu=True)) == 2
    assert choose_resources(*asked, uses_gpu=False) == Resources(1, 0)
    assert choose_resources(2, 0.5, uses_gpu=False) == Resources(2, 0.5)
    assert choose_resources(1, 0, uses_gpu=True) == Resources(1, 0)
    assert str(Resources(1, 0.5)) == "1 CPU and 0.5 GPU a training"
    monkeypatch.setattr(ray, "nodes", lambda: [node(8, 0), node(8, 8, alive=False)])
    assert choose_resources(*asked, uses_gpu=True) == Resources(1, 0)
