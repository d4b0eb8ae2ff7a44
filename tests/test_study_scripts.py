"""Scripts of studies/ that draw or tabulate what a paper shows of trained or fixed attention."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from study_scripts import load_script


def _weight(name: str, i: int, j: int) -> float:
    """a_ij of equations 12 to 14 of FPARec's paper, whose positions count from 1."""
    return {
        "average": 1.0,
        "linear_annealing": float(j),
        "exponential_annealing": math.exp(j - i),
    }[name]


@pytest.mark.parametrize("name", ["average", "linear_annealing", "exponential_annealing"])
def test_fixed_patterns_are_drawn_as_the_paper_has_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("fparec/patterns", monkeypatch)
    expected = np.zeros((script.EVENTS, script.EVENTS))
    for i in range(1, script.EVENTS + 1):
        weights = [_weight(name, i, j) for j in range(1, i + 1)]
        for j, weight in enumerate(weights, 1):
            expected[i - 1, j - 1] = weight / max(weights)
    np.testing.assert_allclose(script.pattern(name), expected, rtol=1e-5)


def test_attention_of_a_study_is_averaged_over_its_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("to_rope/attention", monkeypatch)
    runs = [("RoPE", 1, "done"), ("RoPE", 2, "done"), ("NoPE", 1, "done"), ("NoPE", 2, "failed")]
    frame = pd.DataFrame(runs, columns=["row", "seed", "status"])
    frame["path"] = "runs/" + frame["row"] + frame["seed"].astype(str)
    frame.to_csv(tmp_path / "runs.csv", index=False)
    # distance and entropy of layer 1, then of layer 2
    values = {
        "RoPE1": [[6.0, 1.0], [4.0, 0.5]],
        "RoPE2": [[8.0, 1.2], [5.0, 0.7]],
        "NoPE1": [[9.0, 2.0], [7.0, 1.5]],
    }
    asked = []

    def of(distance: float, entropy: float) -> dict:
        return {"all": {"distance": distance, "entropy": entropy}, "last": {}}

    def inspect_attention(run: Path, users: int, min_events: int) -> SimpleNamespace:
        asked.append((users, min_events))
        layers = [{"mean": of(*layer)} for layer in values[run.name]]
        return SimpleNamespace(content={"layers": layers, "uniform": of(12.0, 3.0)})

    monkeypatch.setattr(script, "inspect_attention", inspect_attention)
    table = script.attention_table(tmp_path, users=5, min_events=7)
    assert set(asked) == {(5, 7)}
    assert table.columns[2:] == (
        *("distance, layer 1", "distance, layer 2"),
        *("entropy, layer 1", "entropy, layer 2"),
    )
    lines = [[cell.text for cell in line] for line in table.lines]
    deviation = f"{statistics.stdev((6.0, 8.0)):.2f}"
    assert lines[0] == ["RoPE", "2", f"7.00 ± {deviation}", "4.50 ± 0.71", *lines[0][4:]]
    assert lines[0][4:] == ["1.10 ± 0.14", "0.60 ± 0.14"]
    assert lines[1] == ["NoPE", "1", "9.00", "7.00", "2.00", "1.50"]
    assert lines[2] == ["equal over all events", "", "12.00", "12.00", "3.00", "3.00"]
