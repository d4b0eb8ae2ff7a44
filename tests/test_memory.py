"""Freed memory goes back to the system."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import pytest
from conftest import SMALL

import recbole_pos
from recbole_pos.experiment import memory


def resident() -> float:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such call")
def test_gaps_of_the_heap_are_given_back() -> None:
    blocks = [bytearray(100_000) for _ in range(1000)]
    del blocks[::2]
    before = resident()
    memory.give_back()
    assert resident() < before - 20e6 and len(blocks) == 500


def test_other_c_libraries_do_without(monkeypatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    memory.keep_freed_memory()
    memory.give_back()


def test_after_every_epoch(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr("recbole_pos.experiment.trainer.give_back", lambda: calls.append(1))
    given = {**SMALL, "data_path": str(tiny), "epochs": 2}
    recbole_pos.run("PosSASRec", "tiny", None, given, run_dir=tmp_path / "run", verbose=False)
    assert len(calls) == 4  # after training and after validation
