"""What is inspected is the network that predicts, relations and all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from shop import open_shop, shaken, tables, write

from recbole_pos.inspect.attention import attention_layers, layer_inputs
from recbole_pos.inspect.distance import measure_attention, sample_histories

OWN = {"inference_relations": "own", "chunking": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shop"), tables())


@torch.no_grad()
def test_layers_are_given_what_predictions_give_them(folder: Path, double) -> None:
    """Relations from the first layer on, and times though no scheme of the model needs them."""
    made = open_shop(folder, **OWN)
    model = shaken(made)
    assert not model.needs_time
    rows = made.loaders["test"]._dataset[np.arange(6)]
    layers = attention_layers(model)
    seen: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for m in layers]
    model.full_sort_predict(rows)
    for hook in hooks:
        hook.remove()
    inputs, ctx = layer_inputs(model, layers, rows)
    assert ctx.relations.edges and len(inputs) == 3
    for found, want in zip(inputs, seen, strict=True):
        assert torch.equal(found, want)
    want = [t for row in range(6) for t in rows["timestamp_list"][row, : ctx.lengths[row]].tolist()]
    assert ctx.times.tolist() == want


@torch.no_grad()
@pytest.mark.parametrize("inference", ["batch", "none"])
def test_a_history_does_not_depend_on_its_batch(folder: Path, double, inference: str) -> None:
    made = open_shop(folder, inference_relations=inference)
    model = shaken(made)
    layers = attention_layers(model)
    rows = made.loaders["valid"]._dataset[np.arange(6)]
    together, ctx = layer_inputs(model, layers, rows)
    assert (ctx.relations is None) == (inference == "none")
    for row in range(6):
        alone, _ = layer_inputs(model, layers, rows[row : row + 1])
        for x, one in zip(together, alone, strict=True):
            torch.testing.assert_close(x[ctx.row == row], one)


def test_the_report_has_relations_and_hours(folder: Path, double) -> None:
    made = open_shop(folder)
    model = shaken(made)
    sample = sample_histories(model, made.loaders["test"], 5, 3, seed=0)
    found = measure_attention(model, sample)
    assert [layer.shape for layer in found.layers] == [(2, 3, 2)] * 3 and not found.rescaled
    model.inference = "none"
    without = measure_attention(model, sample)
    changed = [not np.allclose(a, b) for a, b in zip(found.layers, without.layers, strict=True)]
    assert changed == [False, True, True]  # the first layer's weights know no relation yet
