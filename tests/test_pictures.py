"""Pictures of models, by ``inspect`` and by the scripts of ``studies/``, against plain loops."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import shop
import torch
from conftest import load_script
from schemes import shake
from torch import Tensor

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.experiment import pictures
from recbole_pos.experiment.pictures import (
    average_attention,
    compute_layer_inputs,
    find_attention_layers,
    inspect_attention,
)
from recbole_pos.layers.sequence_batch import SequenceBatch

PNG = b"\x89PNG"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """``script("fparec/patterns")``: the module."""
    return lambda name: load_script(name, monkeypatch)


# --- FPARec, Figures 1, 3 and 4 ---


def test_patterns(script, trained, tmp_path: Path, monkeypatch) -> None:
    """Similarities of positions by appendix A; weights by position are those of the layers."""
    patterns, run = script("fparec/patterns"), trained("FPARec")
    model = recbole_pos.load(run).model
    p = model.position_embedding.weight.detach().double().numpy()
    (found,) = patterns.similarities(model).values()
    for i in range(12):
        logits = [math.fsum(p[i] * p[j]) / math.sqrt(p.shape[1]) for j in range(i + 1)]
        want = np.exp(np.array(logits) - max(logits))
        np.testing.assert_allclose(found[i, : i + 1] / found[i, : i + 1].max(), want, rtol=1e-12)
    layers = [layer.position.parts()["fparec"] for layer in find_attention_layers(model)]
    weights = patterns.positional_weights(model)
    assert list(weights) == ["layer 1, head 1", "layer 2, head 1"]
    assert np.array_equal(weights["layer 2, head 1"], layers[1].weights(12)[0].detach().numpy())
    patterns.main([str(run)])
    monkeypatch.setattr(patterns, "OUT", tmp_path / "fixed.png")
    patterns.main([])
    files = [run / "positions.png", run / "attention_by_position.png", tmp_path / "fixed.png"]
    assert all(file.read_bytes().startswith(PNG) for file in files)


# --- kernel attention, Figures 1 and 2 ---


def test_kernel_factors_are_the_matrices_of_equation_9(script, trained, experiment) -> None:
    kernels_script = script("kernel_attention/kernels")
    model = experiment("KernelAttention", kernel_u="full").model
    kernels = [layer.position.schemes["kernel"] for layer in find_attention_layers(model)]
    with torch.no_grad():
        for parameter in (*kernels[0].parameters(), *kernels[1].U.parameters()):
            parameter += torch.randn_like(parameter)
    factors = kernels_script.kernel_factors(model)
    assert list(factors) == ["U, layer 1", "U, layer 2", "L, all layers"]
    with torch.no_grad():  # the layer multiplies keys by U^T; reference.py has the equation
        assert np.array_equal(factors["U, layer 2"], kernels[1].U.matrix(12).T)
        assert np.array_equal(factors["L, all layers"], kernels[1].L.matrix(12))
    run = trained("KernelAttention")
    kernels_script.main([str(run)])
    assert (run / "kernel.png").read_bytes().startswith(PNG)


# --- PosRec, Figures 7 to 12 ---


def test_encodings(script, double, trained, tmp_path: Path, capsys) -> None:
    """Fixed ones, and those of a run; the definitions themselves are in test_encodings.py."""
    encodings, run = script("posrec/encodings"), trained("PosRec", MAX_ITEM_LIST_LENGTH=20)
    encodings.main(["spe", "--out", str(tmp_path)])
    encodings.main(["--run", str(run)])
    printed = capsys.readouterr().out
    for file in (tmp_path / "encoding_spe.png", run / "encoding_LDPE.png"):
        assert file.read_bytes().startswith(PNG) and str(file) in printed


# --- TO-RoPE, section 5.3, Figures 3 and 4 ---


def in_loops(weights: Tensor, times: Tensor) -> list[list[float]]:
    """Distance, entropy and hours of one history and head, [t, t] and [t]: mean and last query."""
    by_query = []
    for i in range(len(weights)):
        shares = weights[i, : i + 1].abs().numpy()
        shares /= shares.sum() or 1.0
        hours = (times[i] - times[: i + 1]).numpy() / 3600
        entropy = -sum(a * math.log(a) for a in shares if a > 0)
        by_query.append([shares @ np.arange(i, -1, -1), entropy, shares @ hours])
    return [np.mean(by_query, 0).tolist(), by_query[-1]]


@pytest.mark.parametrize(
    "options",
    [
        {"position": ["learned"]},
        {"position": ["parec"], "positional_mask": "after_softmax"},
        {"position": ["fparec"]},
        {"position": ["hstu"], "block": "hstu"},  # weights of any sign and sum
    ],
    ids=str,
)
def test_a_model_is_measured_history_by_history(script, experiment, monkeypatch, options) -> None:
    """Every history alone, so without padding, in loops; in several batches here."""
    made = experiment("PosSASRec", **options)
    shake(made.model)
    model, loader = made.model.double().eval(), made.loaders["test"]
    monkeypatch.setattr(pictures, "chunk_elements", lambda _: 1000)
    rows = script("to_rope/attention").sample_rows(made, 9, 5)
    assert len(rows) == 9 and len(set(loader._dataset.inter_feat[model.USER_ID][rows])) == 9
    layers, want = find_attention_layers(model), []
    for number in rows.tolist():
        inputs = compute_layer_inputs(model, layers, loader.collate_fn([number])[0])
        for layer, (x, ctx) in zip(layers, inputs, strict=True):
            t = int(ctx.lengths)
            assert t >= 5
            scheme = next(iter(layer.position.schemes.values()), None)
            if hasattr(scheme, "weights"):
                weights = scheme.weights(model.max_seq_length)[:, -t:, -t:]
            else:
                weights = layer.weights(x, ctx)[0]
            want.append([in_loops(head.detach(), ctx.times) for head in weights])
    want = np.array(want).reshape(9, 2, -1, 2, 3).mean(0).transpose(0, 2, 3, 1)
    found, _ = script("to_rope/attention").measure_run(made, rows)
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-9)


def test_attention_of_a_study_and_of_a_run(script, trained, tmp_path: Path, capsys) -> None:
    attention = script("to_rope/attention")
    run = trained("TORoPE", n_heads=2)
    limits = ["--users", "20", "--min_events", "5"]
    attention.main([str(run), *limits])
    assert "layer 2, head 2: periods in hours 0.24" in capsys.readouterr().out
    assert (run / "attention_distance.png").read_bytes().startswith(PNG)
    runs = {"row": ["TORoPE", "TORoPE"], "path": [run, run], "status": ["done", "done"]}
    pd.DataFrame(runs).to_csv(tmp_path / "runs.csv")
    attention.main([str(tmp_path), *limits])
    assert "± 0.00" in capsys.readouterr().out


# --- averaged attention ---


def test_attention_maps_average_the_weights(experiment) -> None:
    """Against each history on its own, in loops over the newest events."""
    made = experiment("PosSASRec", position=["cape", "rope"])
    shake(made.model)
    model, loader, newest = made.model.eval(), made.loaders["test"], 5
    found, caption = average_attention(model, loader, newest)
    total, count = np.zeros((newest, newest)), 0
    layer = model.trm_encoder.layer[0].multi_head_attention
    for batch in loader:
        for row, length in enumerate(batch[0][model.ITEM_SEQ_LEN].tolist()):
            if length >= newest:
                items = batch[0][model.ITEM_SEQ][row][:length]
                one = SequenceBatch.from_lengths(items, torch.tensor([length]), 12)
                weights = layer.weights(model.item_embedding(items), one)[0, 1].detach().numpy()
                total += weights[-newest:, -newest:]
                count += 1
    assert [m.shape for m in found] == [(2, newest, newest)] * 2
    np.testing.assert_allclose(found[0][1], total / count, rtol=1e-4, atol=1e-6)
    assert caption == f"newest 5 of up to 12 interactions of {count} histories"


def test_attention_by_position_is_averaged_too(experiment) -> None:
    """Of the longest histories it is the matrix of the layer, each row divided by its sum."""
    model, loader = (made := experiment("FPARec")).model.eval(), made.loaders["test"]
    found, caption = average_attention(model, loader, newest=12)
    assert caption.startswith("newest 12 of up to 12 interactions")
    for layer, weights in zip(find_attention_layers(model), found, strict=True):
        scheme = layer.position.schemes["fparec"]
        want = scheme.weights(12).detach()
        torch.testing.assert_close(torch.tensor(weights), want / want.sum(-1, keepdim=True))


def test_the_command_draws_attention(trained, tmp_path: Path, capsys, refused) -> None:
    run = trained("PosSASRec", position=["rope"])
    assert main(["inspect", "attention", str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / "attention.png")]
    assert (run / "attention.png").read_bytes().startswith(b"\x89PNG")
    refused(f"inspect attention {tmp_path}", "not a run folder")


def test_models_without_attention_weights_are_refused(trained) -> None:
    with pytest.raises(UsageError, match="token_mixing mixes interactions without"):
        inspect_attention(trained("PosSASRec", position=["token_mixing"]))
    with pytest.raises(UsageError, match="SASRec has no causal attention layers"):
        inspect_attention(trained("SASRec"))


# --- AttrFormer: what is inspected is the network that predicts, relations and all ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shop.write(tmp_path_factory.mktemp("shop"), shop.tables())


@torch.no_grad()
def test_layers_are_given_what_predictions_give_them(folder: Path, double) -> None:
    """Relations from the first layer on, and times though no scheme of the model needs them."""
    made = shop.open_shop(folder, inference_relations="own", chunking=False)
    model = shop.shaken(made)
    assert not model.needs_time
    rows = made.loaders["test"]._dataset[np.arange(6)]
    layers = find_attention_layers(model)
    seen: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for m in layers]
    model.full_sort_predict(rows)
    for hook in hooks:
        hook.remove()
    inputs = compute_layer_inputs(model, layers, rows)
    _, batch = inputs[0]
    assert batch.extras.heads is not None and len(inputs) == 3
    assert all(torch.equal(found, want) for (found, _), want in zip(inputs, seen, strict=True))
    is_real = torch.arange(rows["timestamp_list"].size(1)) < batch.lengths[:, None]
    assert torch.equal(batch.times, rows["timestamp_list"][is_real])
