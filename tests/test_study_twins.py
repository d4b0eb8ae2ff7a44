"""Rows that are the same run, data that moved, and numbers of machines that are none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_study import study

import recbole_pos
from recbole_pos.errors import UsageError


def test_two_rows_that_are_the_same_run(cluster, tiny: Path, tmp_path: Path) -> None:
    """It is trained once, though both could be begun, and is the run of both."""
    rows = {"A": {"position": ["nope"]}, "B": {"position": ["nope"]}}
    rows["B, larger batches"] = {"retest": "B", "eval_batch_size": 64}
    given = study(tiny, rows=rows, seeds=1)
    found = recbole_pos.compare(given, run_dir=tmp_path / "s", verbose=False)
    runs = found.runs.set_index("row")
    assert set(runs["status"]) == {"done"} and len(runs) == 3
    assert runs.loc["A", "digest"] == runs.loc["B", "digest"]


def test_data_that_moved(cluster, tiny: Path, tmp_path: Path) -> None:
    """What starts from finished runs finds them at the new place."""
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(tiny, old)
    rows = {"RoPE": {"position": ["rope"]}}
    recbole_pos.compare(study(old, rows=rows, seeds=1), run_dir=tmp_path / "s", verbose=False)
    old.rename(new)
    rows["RoPE + kernel"] = {"attach": {"to": "RoPE", "schemes": ["kernel"]}}
    rows["RoPE again"] = {"retest": "RoPE", "eval_batch_size": 64}
    given = study(new, rows=rows, seeds=1)
    found = recbole_pos.compare(given, run_dir=tmp_path / "s", verbose=False)
    assert list(found.runs["status"]) == ["done"] * 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_concurrent": -1}, "--max_concurrent: expected a whole number of at least 1"),
        ({"cpus_per_trial": 0}, "--cpus_per_trial: expected more than 0"),
        ({"gpus_per_trial": 1.5}, "--gpus_per_trial: expected a fraction or a whole number"),
    ],
)
def test_numbers_of_machines(tiny: Path, tmp_path: Path, given: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        recbole_pos.compare(study(tiny), run_dir=tmp_path / "s", verbose=False, **given)
    assert not (tmp_path / "s").exists()
