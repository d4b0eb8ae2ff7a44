"""Clusters to join, and the GPUs of their runs. One's own cluster: test_study_driver.py."""

import socket
from pathlib import Path

from recbole_pos.config.arguments import CompareArguments
from recbole_pos.runs.training_runs import Resources, choose_resources, count_runs


def test_nothing_answers_at_the_address(no_ray, tmp_path: Path, refused) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    what = ["-m", "FPARec", "-d", "ml-100k", f"--run_dir={tmp_path / 'out'}"]
    for command, given in (("tune", address), ("compare", "localhost")):
        refused([command, *what, f"--address={given}"], "--address")
        assert not (tmp_path / "out").exists()


def test_one_gpu_a_training_where_there_is_one() -> None:
    default = CompareArguments()
    asked = default.cpus_per_trial, default.gpus_per_trial
    machines = [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 2.0}]
    assert choose_resources(machines, *asked, uses_gpu=True) == Resources(1, 1)
    assert count_runs(machines, Resources(1, 1)) == 2
    assert choose_resources(machines, *asked, uses_gpu=False) == Resources(1, 0)
    assert choose_resources(machines, 2, 0.5, uses_gpu=False) == Resources(2, 0.5)
    assert choose_resources(machines, 1, 0, uses_gpu=True) == Resources(1, 0)
    assert choose_resources(machines[:1], *asked, uses_gpu=True) == Resources(1, 0)
    assert str(Resources(1, 0.5)) == "1 CPU and 0.5 GPU a training"
