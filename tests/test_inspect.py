"""What ``recbole-pos inspect`` reads of a model, against plain loops; and what pictures show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shop
import torch
from schemes import shake

from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.experiment.pictures import (
    average_attention,
    choose_colors,
    compute_layer_inputs,
    find_attention_layers,
    inspect_attention,
)
from recbole_pos.layers.sequence_batch import SequenceBatch

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


# --- pictures ---


def test_colours_go_to_both_sides_of_zero() -> None:
    matrices = [np.array([[0.5, 0.0], [-0.25, 0.1]])]
    assert choose_colors(matrices) == {"cmap": "RdBu_r", "vmin": -0.5, "vmax": 0.5}
