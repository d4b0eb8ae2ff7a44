"""Notebooks of examples/: the first one runs, and all were run to their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))
PARAMETERS = "users, epochs = None, "


def code_of(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_first_notebook_runs(capsys: pytest.CaptureFixture) -> None:
    (first,) = (one for one in NOTEBOOKS if one.stem == "ten_minutes")
    names: dict[str, Any] = {"__name__": "__main__"}
    parts = ["".join(cell["source"]) for cell in code_of(first)]
    assert sum(PARAMETERS in part for part in parts) == 1
    for part in parts:
        exec(part.replace(PARAMETERS + "20", "users, epochs = 40, 1"), names)
    assert names["found"].shape == (9, 1) and names["short"].result.epochs == 2
    assert len(names["again"].recommend(histories=[["Star Wars"]], k=3)) == 3
    assert "epoch 1: loss" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept(notebook: Path) -> None:
    cells = code_of(notebook)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert outputs and all(output["output_type"] != "error" for output in outputs)
    text = json.dumps(outputs)
    assert "site-packages" not in text and "\\u001b" not in text and len(text) < 500_000
