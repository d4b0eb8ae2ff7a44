"""Benchmarks in tiny sizes: what is too long to run for its numbers must at least run."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TABLE = pd.DataFrame(
    {
        "user_id": [1] * 6 + [2] * 4 + [3] * 5,
        "item_id": [10, 11, 12, 10, 13, 14, 11, 12, 99, 10, 13, 12, 11, 11, 12],
        "timestamp": [*range(6), *range(4), *range(5)],
    }
)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.long
def test_every_section_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    page = (gpu.RESULTS / "gpu.md").read_text("utf-8")
    monkeypatch.setattr(gpu, "PRECISIONS", ("bf16",))
    for name in gpu.SECTIONS:
        rows = gpu.measure(name, True)
        assert len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}, name
        assert f"<!-- begin {name} -->" in page and f"<!-- end {name} -->" in page


@pytest.fixture
def job(tmp_path: Path) -> Any:
    import quality

    events = quality.training_events(TABLE, 3)
    events.to_csv(tmp_path / "events.csv", index=False)
    quality.next_events(TABLE, events).to_csv(tmp_path / "next.csv", index=False)
    files = {"events": str(tmp_path / "events.csv"), "held_out": str(tmp_path / "next.csv")}
    return quality.Job(**files, length=3, targets=4, patience=2)


@pytest.mark.parametrize("padding", [0, 5])  # the side's number before or after those of the items
def test_ndcg_by_hand(job: Any, padding: int) -> None:
    from peer_workers.common import Curve

    ids = {item: number + (padding == 0) for number, item in enumerate(range(10, 14))}
    scores = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    scores[:, padding] = 100.0
    seen = []

    def score(histories: torch.Tensor) -> torch.Tensor:
        seen.extend(histories.tolist())
        return scores

    found = Curve(job, ids, torch.nn.Identity(), score, padding).ndcg()
    assert seen == [
        [ids[11], ids[12], ids[10]],
        [padding, ids[11], ids[12]],
        [ids[13], ids[12], ids[11]],
    ]
    want = 0.0
    for row, item in ((0, 13), (2, 11)):  # 99 was never trained
        own = scores[row, ids[item]]
        rank = sum(bool(scores[row, n] > own) for n in range(6) if n != padding)
        want += 1 / math.log2(rank + 2)
    assert found == pytest.approx(want / 3, abs=1e-12)


def test_the_clock_stands_during_evaluation(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from peer_workers import common

    now, values = [0.0], iter([0.1, 0.3, 0.2, 0.3, 0.9])
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])

    def evaluate(_: Any) -> float:
        now[0] += 100.0
        return next(values)

    monkeypatch.setattr(common.Curve, "ndcg", evaluate)
    curve = common.Curve(
        job, dict.fromkeys(range(10, 14), 1), torch.nn.Identity(), lambda _: None, 0
    )
    while not curve.done:
        now[0] += 1.0
        curve.tick(2)  # half an epoch
    assert curve.points == [(2.0, 0.1), (4.0, 0.3), (6.0, 0.2), (8.0, 0.3)]


def test_the_level_is_one_that_all_comparable_sides_reach() -> None:
    import quality

    fast = [{"points": [(1.0, 0.1), (2.0, 0.5)]}, {"points": [(1.0, 0.45), (2.0, 0.4)]}]
    slow = [{"points": [(4.0, 0.1), (8.0, 0.2), (12.0, 0.4)]}, {"points": [(6.0, 0.41)]}]
    low = [{"points": [(1.0, 0.1)]}] * 2
    text = quality.table({"PosSASRec": fast, "peer": slow, "low": low})
    assert "NDCG@10 of 0.3920" in text and "| low | not reached |  |  | 1.00 |" in text
    assert "| peer | 9.0 (6.0 to 12.0) | 6.0 (6.0 to 6.0) | 3, 1 |" in text
    assert "| PosSASRec | 1.5 (1.0 to 2.0) | 1.0 (1.0 to 1.0) | 2, 1 |" in text


@pytest.mark.slow
def test_a_cell_of_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures every phase; one that is stopped leaves no figures, and the table says so."""
    import scale

    monkeypatch.setattr(scale, "run_alone", lambda function, *args: function(*args))
    monkeypatch.setattr(scale.resource, "setrlimit", lambda *_: None)
    cell = scale.Cell("PosSASRec, SCE", events=3000, items=70, length=10, each=30)
    found = scale.run(cell, tmp_path, 0.01)
    assert found.keys() == scale.FIGURES.keys() and all(x > 0 for x in found.values())

    def too_large(*given: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    monkeypatch.setattr(scale, "measure", too_large)
    assert scale.run(cell, tmp_path, 0) == {}
    figures = [(cell, {}) for cell in scale.list_cells(5_000_000)]
    assert "| PosRec | 2,000 (stopped at its limit) |" in scale.tabulate(figures, "length")


def test_the_losses_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    import sce

    for name in (*sce.NAMES, *sce.SAMPLED):
        figures = sce.measure(name, 50, 8, 1)
        assert figures.keys() == sce.FORMS.keys() and figures["loss_seconds"] > 0


@pytest.mark.slow
def test_a_server_is_measured() -> None:
    import serving

    row = serving.measure_requests(30, 4)
    assert len(row) == len(serving.SERVE_HEADS) and float(row[5]) > 0
