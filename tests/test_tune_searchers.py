"""What searchers draw: by seed, without repeating, as their trials went. No Ray here."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from test_tune_space import ALL_KINDS, settings, write

from recbole_pos.runs.searchers import BEST, GridSearcher, OptunaSearcher, RandomSearcher


def test_random_trials_depend_on_seed_and_number_alone(tmp_path: Path) -> None:
    space = settings(write(tmp_path, ALL_KINDS)).space
    one, two = RandomSearcher(space, "max", 5), RandomSearcher(space, "max", 5)
    first = [one.suggest(f"a{n}") for n in range(6)]
    second = []
    for n in range(6):  # other names, and results that come in between
        second.append(two.suggest(f"b{n}"))
        two.on_trial_complete(f"b{n}", {BEST: 0.1})
    assert first == second and [trial["number"] for trial in first] == list(range(6))
    assert first[0]["options"] != RandomSearcher(space, "max", 6).suggest("a0")["options"]


def test_random_trials_do_not_repeat(tmp_path: Path) -> None:
    text = (
        "kernel_u: {choice: [toeplitz, full]}\nn_layers: {randint: [1, 3]}\n"
        "kernel_band: {choice: [5, 9], when: {kernel_u: toeplitz}}\n"
    )
    found = settings(write(tmp_path, text), "KernelAttention", searcher="random")
    assert found.space.points() == found.total == 3 * 2 + 3
    assert settings(write(tmp_path, text), "KernelAttention").total == 60  # Optuna may repeat
    searcher = RandomSearcher(found.space, "max", 0)
    drawn = [searcher.suggest(str(n))["options"] for n in range(9)]
    assert all(options in drawn for options in found.space.grid())
    assert searcher.suggest("9") == "FINISHED"
    assert settings(write(tmp_path, ALL_KINDS)).space.points() is None


def _step(searcher, number: int) -> dict:
    trial = searcher.suggest(f"t{number}")
    searcher.on_trial_complete(f"t{number}", {BEST: trial["options"]["learning_rate"]})
    return trial


def test_optuna_learns_and_knows_failures(tmp_path: Path) -> None:
    text = "learning_rate: {uniform: [0.0001, 1.0]}\n"
    space = settings(write(tmp_path, text)).space
    searcher = OptunaSearcher(space, "min", 0)
    found = [_step(searcher, n)["options"]["learning_rate"] for n in range(40)]
    assert np.mean(found[-10:]) < 0.5 * np.mean(found[:10])
    searcher.suggest("lost")
    searcher.on_trial_complete("lost", {BEST: math.nan})
    searcher.on_trial_complete("lost", {BEST: 0.0})  # a second word about the same trial
    assert [trial.state.name for trial in searcher.study.trials[-1:]] == ["FAIL"]


def test_a_grid_ends(tmp_path: Path) -> None:
    searcher = GridSearcher(
        settings(write(tmp_path, "n_layers: {choice: [1, 2]}\n")).space, "max", 0
    )
    assert [searcher.suggest(str(n)) for n in range(3)][2] == "FINISHED"
