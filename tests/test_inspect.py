"""Arrays and pictures of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.inspect.attention import attention_maps, kernel_factors, positional_weights
from recbole_pos.layers.context import SequenceContext


def test_positional_weights_are_the_attention_of_the_model(experiment) -> None:
    """[h, n, n] per layer, causal, rows that sum to one; nothing for dot-product attention."""
    model = experiment("FPARec", n_heads=2).model
    weights = positional_weights(model)
    assert [w.shape for w in weights] == [(2, 12, 12)] * 2
    for layer in weights:
        np.testing.assert_allclose(layer.sum(-1), 1, rtol=1e-5)
        assert (np.triu(layer, 1) == 0).all()
    assert positional_weights(experiment("PosSASRec").model) == []


def test_kernel_factors_are_the_matrices_of_equation_9(experiment) -> None:
    model = experiment("KernelAttention", kernel_u="full").model
    kernels = [
        layer.multi_head_attention.position.schemes["kernel"] for layer in model.trm_encoder.layer
    ]
    with torch.no_grad():
        for parameter in (*kernels[0].parameters(), *kernels[1].U.parameters()):
            parameter += torch.randn_like(parameter)
    factors = kernel_factors(model)
    assert list(factors) == ["U, layer 1", "U, layer 2", "L, all layers"]
    low, at = factors["L, all layers"], 0
    for i in range(12):
        for j in range(i + 1):
            assert low[i, j] == kernels[1].L.weight[at]
            assert factors["U, layer 2"][j, i] == kernels[1].U.weight[at]
            at += 1
    assert (np.triu(low, 1) == 0).all() and (np.tril(factors["U, layer 1"], -1) == 0).all()
    assert kernel_factors(experiment("PosSASRec").model) == {}


@pytest.mark.parametrize("position", [["kernel"], ["cape", "rope"]], ids=str)
def test_attention_maps_average_the_weights(experiment, position: list[str]) -> None:
    """Against each history on its own, in loops over the newest events."""
    made = experiment("PosSASRec", position=position)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model, loader, newest = made.model.eval(), made.loaders["test"], 5
    found = attention_maps(model, loader, newest)
    maps = found.weights
    assert [m.shape for m in maps] == [(2, newest, newest)] * 2
    total, count = np.zeros((newest, newest)), 0
    layer = model.trm_encoder.layer[0].multi_head_attention
    for batch in loader:
        for row in range(len(batch[0])):
            length = int(batch[0][model.ITEM_SEQ_LEN][row])
            if length < newest:
                continue
            items = batch[0][model.ITEM_SEQ][row][:length]
            ctx = SequenceContext.from_lengths(torch.tensor([length]), 12)
            weights = layer.weights(model.item_embedding(items), ctx)[0, 1].detach().numpy()
            np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
            total += weights[-newest:, -newest:]
            count += 1
    np.testing.assert_allclose(maps[0][1], total / count, rtol=1e-4, atol=1e-6)
    assert (np.triu(maps[0], 1) == 0).all()
    assert found.histories == count and found.longest == 12
    assert attention_maps(experiment("FPARec").model, loader) is None


def test_what_is_told_of_rows_is_what_they_sum_to(experiment) -> None:
    """All of a history, the newest part of longer ones, and attention without softmax."""
    made = experiment("PosSASRec")
    whole, part = (attention_maps(made.model.eval(), made.loaders["test"], n) for n in (12, 5))
    for found in (whole, part):
        for sums in found.sums:
            np.testing.assert_allclose(sums, 1, rtol=1e-5)
    assert whole.caption == f"{whole.histories} histories of 12 events; every row sums to one"
    for layer in whole.weights:
        np.testing.assert_allclose(layer.sum(-1), 1, rtol=1e-5)
    rows = np.stack([layer.sum(-1) for layer in part.weights])
    assert rows.max() < 0.999
    sums = f"rows sum to {rows.min():.2f} to {rows.max():.2f}, the rest is on older events"
    start = f"newest 5 of up to 12 events of {part.histories} histories"
    assert part.caption == f"{start}; {sums}"
    signed = experiment("PosSASRec", block="hstu")
    told = attention_maps(signed.model.eval(), signed.loaders["test"], 5).caption
    assert told == f"{start}; rows of this attention do not sum to one"


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("FPARec", ["curves.png", "attention.png", "positions.png"]),
        ("KernelAttention", ["curves.png", "attention.png", "kernel.png"]),
        ("Pop", ["curves.png"]),
        ("PosSASRec", ["curves.png"]),
    ],
)
def test_plot_writes_pictures(tiny: Path, tmp_path: Path, capsys, model, files) -> None:
    options = {"data_path": str(tiny), "epochs": 2}
    if model == "PosSASRec":
        options["position"] = ["token_mixing"]  # has no attention to show
    recbole_pos.run(model, "tiny", None, options, run_dir=tmp_path / "run", verbose=False)
    assert main(["plot", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "run" / f) for f in files]
    for file in files:
        assert (tmp_path / "run" / file).read_bytes().startswith(b"\x89PNG")


def test_plot_of_no_run(tmp_path: Path, capsys) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
