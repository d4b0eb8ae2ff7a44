"""Arrays and pictures of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import recbole_pos
from recbole_pos.cli import main
from recbole_pos.inspect.attention import positional_weights


def test_positional_weights_are_the_attention_of_the_model(experiment) -> None:
    """[h, n, n] per layer, causal, rows that sum to one; nothing for dot-product attention."""
    model = experiment("FPARec", n_heads=2).model
    weights = positional_weights(model)
    assert [w.shape for w in weights] == [(2, 12, 12)] * 2
    for layer in weights:
        np.testing.assert_allclose(layer.sum(-1), 1, rtol=1e-5)
        assert (np.triu(layer, 1) == 0).all()
    assert positional_weights(experiment("PosSASRec").model) == []


@pytest.mark.parametrize(
    ("model", "files"), [("FPARec", ["curves.png", "attention.png"]), ("Pop", ["curves.png"])]
)
def test_plot_writes_pictures(tiny: Path, tmp_path: Path, capsys, model, files) -> None:
    options = {"data_path": str(tiny), "epochs": 2}
    recbole_pos.run(model, "tiny", None, options, run_dir=tmp_path / "run", verbose=False)
    assert main(["plot", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "run" / f) for f in files]
    for file in files:
        assert (tmp_path / "run" / file).read_bytes().startswith(b"\x89PNG")


def test_plot_of_no_run(tmp_path: Path, capsys) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
