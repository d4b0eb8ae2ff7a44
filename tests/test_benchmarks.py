"""Benchmarks in tiny sizes: what is too long to run for its numbers must at least run."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_training_of_a_toolkit_ends_early_and_keeps_the_best_weights(tmp_path: Path) -> None:
    """By NDCG@10 of its lists; the clock stands while they are made."""
    from peer_workers.lists import StopEarly, Task

    targets = pd.DataFrame({"request": ["a", "b", "c"], "item": ["x", "y", "z"]})
    targets.to_parquet(tmp_path / "valid_targets.parquet")
    task = Task(str(tmp_path), "", "", 0, {}, max_epochs=9, patience=2)
    # of each epoch the place of x in the list of a; c always misses, and y is below the tenth
    places = iter([3, 1, 2, 7, 1])

    def recommend() -> pd.DataFrame:
        sum(range(10**6))  # takes time
        lists = {"request": ["b", "a"], "item": ["y", "x"], "rank": [11, next(places)]}
        return pd.DataFrame(lists)

    trainer = SimpleNamespace(should_stop=False)
    stop, epoch = StopEarly(task, recommend), 0
    while not trainer.should_stop:
        module = SimpleNamespace(train=lambda: None, state_dict=partial(dict, epoch=epoch))
        stop.on_train_epoch_start(trainer, module)
        stop.on_train_epoch_end(trainer, module)
        epoch += 1
    assert stop.scores == pytest.approx([0.5 / 3, 1 / 3, 1 / math.log2(3) / 3, 1 / 9])
    assert stop.weights == {"epoch": 1} and stop.seconds < 0.01


def test_a_cell_of_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures every phase; one that is stopped leaves no figures, and the table says so."""
    import scale

    monkeypatch.setattr(scale, "run_alone", lambda function, *args: function(*args))
    monkeypatch.setattr(scale.resource, "setrlimit", lambda *_: None)
    cell = scale.Cell("PosSASRec, SCE", events=3000, items=70, length=10, each=30)
    monkeypatch.setattr(scale, "SECONDS", 0.01)
    found = scale.run(cell, tmp_path)
    assert found.keys() == scale.FIGURES.keys() and all(x > 0 for x in found.values())

    def too_large(*given: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    monkeypatch.setattr(scale, "measure", too_large)
    assert scale.run(cell, tmp_path) == {}
    figures = {cell: {} for cell in scale.list_cells("length")}
    assert "| PosRec | 2,000 (stopped at its limit) |" in scale.tabulate("length", figures)


def test_a_server_is_measured() -> None:
    import serving

    row = serving.measure_requests(30, 4)
    assert len(row) == len(serving.SERVE_HEADS) and float(row[-1].split(" / ")[0]) > 0
