"""What is inspected is the network that predicts, relations and all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from shop import Cells, all_windows, find, open_shop, shaken, tables, train, write

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.inspect.attention_weights import attention_layers, layer_inputs
from recbole_pos.inspect.distance import measure_attention, sample_histories
from recbole_pos.inspect.relation_use import measure_relations
from recbole_pos.layers.attention import TransformerLayer
from recbole_pos.layers.context import SequenceContext

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


@torch.no_grad()
def test_use_of_relations_equals_loops(folder: Path, double) -> None:
    """Who has, reads and gains what, event by event and relation by relation."""
    made = open_shop(folder, user_layers="odd")
    model, rows = shaken(made), all_windows(made)
    loader = made.trainer.training_loader(made.loaders["train"])
    batch = loader.gather(np.concatenate(loader._batches()))
    uses, events = measure_relations(model, [model.window_rows(batch)[0]])
    fields = [use.field for use in uses]
    order, heads, users = find(model, rows)
    m = events
    assert m == len(order)
    assert fields[-1] == ", ".join(r.field for r in model.declared if r.source == "user")
    for use, edges in zip(uses, [*heads, users], strict=True):
        others = [order.user[a] != order.user[b] for a, b in zip(edges.reader, edges.source)]  # noqa: B905
        assert use.read == pytest.approx(len(edges.value) / m)
        assert use.others == pytest.approx(np.mean(others))
    known = dict(zip(fields, (use.known for use in uses), strict=True))
    cells, items = Cells(made.dataset, tables()), model.lookup.items[torch.from_numpy(rows.events)]
    have = {
        "brand": [cells.of("item", int(item), "brand") for item in items],
        "stars": [cells.of("inter", int(event), "stars") for event in rows.events],
        fields[-1]: [
            cells.of("user", int(u), "age") or cells.of("user", int(u), "country")
            for u in order.user
        ],
    }
    for field, values in have.items():
        assert 0 < known[field] < 1
        assert known[field] == pytest.approx(np.mean([v is not None for v in values]))
    # what the relation adds is what is missing without it
    x, lengths = model.item_embedding(items), torch.from_numpy(rows.lengths)
    rng = np.random.default_rng(model.seed)
    relations = model.lookup.relations(rows, rng, torch.device("cpu"), torch.float64)
    times = torch.from_numpy(model.lookup.times[rows.events])
    ctx = SequenceContext.from_lengths(lengths, model.max_seq_length, times, None, relations)
    x = model.position_embedding(x, ctx)
    x = x if model.pre_norm else model.LayerNorm(x)
    for number, layer in enumerate(model.trm_encoder.layer):
        attention = layer.multi_head_attention
        normed = attention.LayerNorm(x) if model.pre_norm else x
        full, mix = attention.attention(normed, ctx), attention.relation_mix.clone()
        attention.relation_mix.zero_()
        alone = attention.attention(normed, ctx)
        attention.relation_mix.copy_(mix)
        for i, use in enumerate(uses[:-1]):
            assert use.heads[number] == mix[i].tolist()
            attention.relation_mix[i] = 0
            without = attention.attention(normed, ctx)
            attention.relation_mix.copy_(mix)
            assert use.adds[number] == pytest.approx(float((full - without).norm() / alone.norm()))
        x, before = layer(x, ctx), TransformerLayer.forward(layer, x, ctx)
        if layer.aggregates:
            share = float((x - before).norm() / before.norm())
            assert uses[-1].adds[number] == pytest.approx(share)
            assert uses[-1].gate[number] == float(layer.user_gate)
        else:
            assert np.isnan(uses[-1].adds[number]) and np.isnan(uses[-1].gate[number])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"relations": ["country"], "user_update": "replace"},
    ],
    ids=str,
)
def test_relations_are_shown(folder: Path, tmp_path: Path, capsys, options: dict) -> None:
    train(folder, tmp_path, epochs=1, **options)
    assert main(["inspect", "relations", "--checkpoint", str(tmp_path), "--batches", "2"]) == 0
    shown = capsys.readouterr().out
    text = (tmp_path / "relations.json").read_text()
    found = json.loads(text, parse_constant=pytest.fail)["relations"]
    assert all(use["field"] in shown for use in found) and "relations.png" in shown
    assert (tmp_path / "relations.png").stat().st_size > 5000
    assert ("gate of layer 1" in shown) == (
        found[-1]["source"] == "user" and not options.get("user_update")
    )


def test_nothing_to_show(folder: Path, tmp_path: Path, capsys) -> None:
    run = ["inspect", "relations", "--checkpoint", str(tmp_path)]
    train(folder, tmp_path, epochs=1, relations=[])
    assert main([*run, "--batches", "0"]) and "--batches: 0 is below 1" in capsys.readouterr().err
    assert main(run) and "trained without relations" in capsys.readouterr().err
    given = {"data_path": str(folder), "epochs": 1}
    recbole_pos.run("Pop", "shop", None, given, run_dir=tmp_path / "pop", verbose=False)
    assert main([*run[:3], str(tmp_path / "pop")])
    assert "Pop has no relations; AttrFormer has" in capsys.readouterr().err
    assert main([*run[:3], str(folder)]) and "not a run folder" in capsys.readouterr().err
