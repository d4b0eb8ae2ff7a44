"""``make bench-gpu`` in tiny sizes: what nobody can run here for its numbers must at least run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    yield gpu
    for name in ("gpu", "gpu_attention", "gpu_data", "gpu_several", "gpu_timing"):
        del sys.modules[name]


@pytest.mark.slow
def test_every_section_and_the_page(gpu: Any, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "PRECISIONS", ("bf16",))
    found = {name: (list(gpu.measure(name, True)), "") for name in gpu.SECTIONS}
    for name, (rows, _) in found.items():
        assert len(rows) > 1 or name == "peers"
        assert {len(row) for row in rows} == {len(rows[0])}
    text = gpu.page({**found, "million": ([], "Failed: a word")}, True)
    assert all(f"## {section.title}" in text for section in gpu.SECTIONS.values())
    assert "Failed: a word" in text and "numbers say nothing" in text


def test_all_sections_end_within_nine_minutes(gpu: Any) -> None:
    assert sum(section.seconds for section in gpu.SECTIONS.values()) <= 9 * 60


def test_a_section_that_hangs_or_fails_keeps_what_it_has(gpu: Any, monkeypatch) -> None:
    def run(command: list[str], stdout: Any, stderr: Any, timeout: float) -> Any:
        assert command[-3:] == ["--section", "million", "--tiny"]
        stdout.write('["a"]\n')
        stderr.write("a line\nthe last word\n")
        if timeout < 10:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu.in_a_process("million", True) == ([["a"]], "Failed: the last word")
    monkeypatch.setitem(gpu.SECTIONS, "million", gpu.Section("", 3, ""))
    assert gpu.in_a_process("million", True) == ([["a"]], "The rest was not done within 3 s.")
