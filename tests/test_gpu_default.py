"""Trainings get a GPU where the cluster has one, unless they are told not to."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from recbole_pos.config.arguments import CompareArguments, require_shares
from recbole_pos.runs.cluster import choose_resources, count_concurrent_runs
from recbole_pos.runs.worker import Resources


def node(cpus: int, gpus: int, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}}


def test_one_gpu_a_training_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    default = CompareArguments()
    require_shares(default)
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
