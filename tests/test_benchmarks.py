"""Benchmarks in tiny sizes: what is too long to run for its numbers must at least run."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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


def test_kernels_that_are_wrong_or_missing_are_reported() -> None:
    import gpu_attention as bench

    size = bench.Size(0, 0, 0, length=20, d=128, layers=1, batch=0)
    case = bench.make_case(size, 7, False, torch.device("cpu"))
    tried = {"layers": bench.padded, "wrong": lambda case: 2 * bench.padded(case)}
    ours, wrong, missing = bench.compare(case, tried | {"varlen": bench.varlen})
    assert (ours[0], ours[-1], wrong[-1]) == ("layers", "yes", "NO")
    assert missing[0] == "varlen" and missing[-1].startswith("fails: ")


@pytest.mark.slow
@pytest.mark.long
def test_every_section_and_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    monkeypatch.setattr(gpu, "PRECISIONS", ("bf16",))
    found = {name: (list(gpu.measure(name, True)), "") for name in gpu.SECTIONS}
    for name, (rows, _) in found.items():
        assert len(rows) > 1, name
        assert {len(row) for row in rows} == {len(rows[0])}
    text = gpu.make_page({**found, "million": ([], "Failed: a word")}, True)
    assert all(f"## {section.title}" in text for section in gpu.SECTIONS.values())
    assert "Failed: a word" in text and "numbers mean nothing" in text


def test_a_section_that_hangs_or_fails_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    def run(command: list[str], stdout: Any, stderr: Any, timeout: float) -> Any:
        assert command[-3:] == ["--section", "million", "--tiny"]
        stdout.write('["a"]\n')
        stderr.write("a line\nthe last word\n")
        if timeout < 10:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 1)

    assert sum(section.seconds for section in gpu.SECTIONS.values()) <= 9 * 60
    monkeypatch.setattr(subprocess, "run", run)
    assert gpu.run_section("million", True) == ([["a"]], "Failed: the last word")
    monkeypatch.setitem(gpu.SECTIONS, "million", gpu.Section("", 3, ""))
    assert gpu.run_section("million", True) == ([["a"]], "The rest was not done within 3 s.")


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
    model = torch.nn.Identity()
    broken = Curve(job, ids, model, lambda _: torch.full((3, 6), torch.nan), padding)
    with pytest.raises(SystemExit, match="epoch 1"):  # nothing stands above NaN
        broken.ndcg()


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
    assert quality.find_level({"PosSASRec": low, "peer": fast})[1] == ["PosSASRec", "peer"]
    assert "| peer | 9.0 (6.0 to 12.0) | 6.0 (6.0 to 6.0) | 3, 1 |" in text
    assert "| PosSASRec | 1.5 (1.0 to 2.0) | 1.0 (1.0 to 1.0) | 2, 1 |" in text


def test_steps_over_many_items_are_timed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    import sce

    monkeypatch.setattr(
        sce, "MILLION", replace(sce.MILLION, users=90, items=70, events=3000, batch=4)
    )
    dense, kept = (sce.million_steps(side) for side in ("dense", "kept"))
    assert dense["weights"] == kept["weights"] and set(sce.PARTS) <= set(dense)


@pytest.mark.slow
def test_a_cell_measures_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that ends early keeps what it has."""
    import scale

    sizes = {"events": 3000, "items": 70, "length": 10, "each": 30}
    cell = replace(scale.CENTRE, side="PosSASRec, SCE", **sizes)
    scale.write_dataset(replace(cell, side=scale.FIRST), tmp_path)
    found = scale.run(cell, tmp_path, 0.01)
    assert "wrong" not in found and all(found[name] > 0 for name in scale.FIGURES)
    assert found["steps"] > 0 and found["peak_mb"] >= found["start_mb"] >= found["before_mb"]

    def too_large(*given: Any) -> None:
        given[-1](start=1.0)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    def too_long(*given: Any) -> None:
        given[-1](start=2.0)
        os.kill(os.getpid(), signal.SIGXCPU)

    monkeypatch.setattr(scale, "write_dataset", lambda *_: None)
    for measure, want in (
        (too_large, {"start": 1.0, "wrong": "memory"}),
        (too_long, {"start": 2.0, "wrong": "over 150 CPU-seconds"}),
    ):
        monkeypatch.setattr(scale, "measure", measure)
        assert scale.run(replace(cell, side="FPARec"), tmp_path, 0) == want


def test_the_page_of_scale(tmp_path: Path) -> None:
    """A cell that was stopped says so, and its sizes are not fitted."""
    import scale

    x = np.array([10.0, 100.0, 1000.0])
    assert scale.slope(x, 3 * x**1.5) == pytest.approx(1.5)
    assert scale.extrapolate(x, 7 + 2 * x, 1e5) == pytest.approx(7 + 2e5)
    found = []
    for cell in scale.make_cells(full=False):
        figures = {name: 1e-3 * cell.size**2 for name in scale.FIGURES}
        if cell.side == "PosRec" and cell.size == 2_000:
            figures = {"start": 1.0, "wrong": "over 150 CPU-seconds"}
        found.append((cell, figures))
    assert "scale.png" in scale.make_section(found)
    cells = scale.make_cells_page(found)
    assert "| PosRec | 2,000 (stopped: over 150 CPU-seconds) | 1 |  |  |  |  |" in cells
    assert "| FPARec | 2.00 (2.00) | 2.00 (2.00) |" in cells and "| 50 to 2,000 |" in cells
    scale.draw(found, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000


@pytest.mark.slow
def test_an_epoch_shorter_than_its_steps(tmp_path: Path) -> None:
    """The benchmark of reading has a column less then, and every figure stands below its name."""
    import reading

    path = reading.write_log(tmp_path, 3000)
    figures = reading.train_steps("FPARec", path, "auto", 20)
    heads, _, row = reading.tabulate_training({"FPARec": figures}).splitlines()
    assert heads == "| training | own memory, MB, step 2 | mapped, MB, step 2 | targets |"
    assert row.endswith(f" {figures['targets']:,.0f} |")


def test_requests_fewer_than_those_that_warm_up() -> None:
    import serve

    ticks = iter(range(100))
    assert serve.time_requests(id, [["a"], ["b"]], lambda: next(ticks)) == "1000.0 / 1000.0"


@pytest.mark.slow
def test_a_server_is_measured(tmp_path: Path) -> None:
    import serve

    row = serve.measure(serve.make_run(tmp_path, 30), 30, 4)
    assert len(row) == len(serve.HEAD) and float(row[5]) > 0
