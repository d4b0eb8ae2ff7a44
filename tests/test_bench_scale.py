"""``make bench-scale``: its cells, its fits and its page, in small."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scale

    yield scale
    for name in ("scale", "scale_cell", "scale_page", "reading", "page"):
        del sys.modules[name]


def small(scale: Any, side: str) -> Any:
    return replace(scale.CENTRE, side=side, events=3000, items=70, length=10, each=30)


@pytest.mark.slow
def test_a_cell_tells_every_phase(scale: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    cell = small(scale, "PosSASRec, SCE")
    scale.make_log(replace(cell, side=scale.FIRST), tmp_path)
    found = scale.run(cell, tmp_path, 0.01)
    figures = sys.modules["scale_page"].FIGURES
    assert "wrong" not in found and all(found[name] > 0 for name in figures)
    assert found["steps"] > 0 and found["peak_mb"] >= found["start_mb"] >= found["before_mb"]


def test_a_cell_that_ends_early_keeps_what_it_told(scale: Any, tmp_path: Path, monkeypatch) -> None:
    def too_large(*given: Any) -> None:
        given[-1](start=1.0)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    def too_long(*given: Any) -> None:
        given[-1](start=2.0)
        os.kill(os.getpid(), signal.SIGXCPU)

    def broken(*_: Any) -> None:
        raise KeyError("epoch")

    monkeypatch.setattr(scale, "make_log", lambda *_: None)
    for measure, want in (
        (too_large, {"start": 1.0, "wrong": "memory"}),
        (too_long, {"start": 2.0, "wrong": "over 150 CPU-seconds"}),
        (broken, {"wrong": "KeyError: 'epoch'"}),
    ):
        monkeypatch.setattr(scale, "measure", measure)
        assert scale.run(small(scale, "FPARec"), tmp_path, 0) == want


def test_one_size_is_varied_at_a_time(scale: Any) -> None:
    grid = list(scale.cells(full=False))
    for axis, sizes in (("items", scale.ITEMS), ("length", scale.LENGTHS), ("events", None)):
        for side in scale.MODELS:
            here = [cell for cell in grid if (cell.axis, cell.side) == (axis, side)]
            assert [cell.size for cell in here] == list(sizes or scale.EVENTS)[: len(here)]
            others = {replace(cell, **{axis: 0}) for cell in here}
            assert len(here) >= 2 and len(others) == 1
    assert len({cell.log for cell in grid}) < len(grid) / 8
    assert all(cell.batch * cell.items * cell.length <= 2e8 or cell.batch == 1 for cell in grid)


def test_fits(scale: Any) -> None:
    page = sys.modules["scale_page"]
    x = np.array([10.0, 100.0, 1000.0])
    assert page.slope(x, 3 * x**1.5) == pytest.approx(1.5)
    assert page.line_at(x, 7 + 2 * x, 1e5) == pytest.approx(7 + 2e5)
    assert page.line_at(x, np.array([5.0, 5.0, 5.0]), 1e5) == pytest.approx(5)


def test_the_page(scale: Any, tmp_path: Path) -> None:
    """A cell that was stopped says so, and its sizes are not fitted."""
    page = sys.modules["scale_page"]
    found = []
    for cell in scale.cells(full=False):
        figures = {name: 1e-3 * cell.size**2 for name in page.FIGURES}
        if cell.side == "PosRec" and cell.size == 2_000:
            figures = {"start": 1.0, "wrong": "over 150 CPU-seconds"}
        found.append((cell, figures))
    text = page.tables(found)
    assert "| PosRec | 2,000 (stopped: over 150 CPU-seconds) | 1 |  |  |  |  |" in text
    assert "| FPARec | 2.00 (2.00) | 2.00 (2.00) |" in text and "50 to 2,000, 3 sizes" in text
    assert "| PosSASRec | 2.00 (2.00) |" in text.partition("## By events")[2]
    page.draw(found, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000
