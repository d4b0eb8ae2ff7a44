"""What the commands of ``inspect`` measure, against plain loops: attention, periods, relations."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import shop
import torch
from schemes import shake
from torch import Tensor

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.inspect import attention
from recbole_pos.inspect.attention import (
    average_attention,
    compute_kernel_factors,
    compute_layer_inputs,
    compute_positional_weights,
    find_attention_layers,
    measure_attention,
    sample_histories,
)
from recbole_pos.inspect.attention_report import inspect_attention
from recbole_pos.inspect.relation_use import measure_relations
from recbole_pos.layers.attention import TransformerLayer
from recbole_pos.layers.context import SequenceContext
from recbole_pos.position.rotary import RotaryPosition

# --- attention weights and positional kernels ---


def test_kernel_factors_are_the_matrices_of_equation_9(experiment) -> None:
    model = experiment("KernelAttention", kernel_u="full").model
    kernels = [
        layer.multi_head_attention.position.schemes["kernel"] for layer in model.trm_encoder.layer
    ]
    with torch.no_grad():
        for parameter in (*kernels[0].parameters(), *kernels[1].U.parameters()):
            parameter += torch.randn_like(parameter)
    factors = compute_kernel_factors(model)
    assert list(factors) == ["U, layer 1", "U, layer 2", "L, all layers"]
    low, at = factors["L, all layers"], 0
    for i in range(12):
        for j in range(i + 1):
            assert low[i, j] == kernels[1].L.weight[at]
            assert factors["U, layer 2"][j, i] == kernels[1].U.weight[at]
            at += 1
    assert (np.triu(low, 1) == 0).all() and (np.tril(factors["U, layer 1"], -1) == 0).all()
    assert compute_kernel_factors(experiment("PosSASRec").model) == {}


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
                ctx = SequenceContext.from_lengths(torch.tensor([length]), 12)
                weights = layer.weights(model.item_embedding(items), ctx)[0, 1].detach().numpy()
                total += weights[-newest:, -newest:]
                count += 1
    assert [m.shape for m in found] == [(2, newest, newest)] * 2
    np.testing.assert_allclose(found[0][1], total / count, rtol=1e-4, atol=1e-6)
    assert caption == f"newest 5 of up to 12 interactions of {count} histories"
    fparec = experiment("FPARec").model  # by position
    assert average_attention(fparec, loader)[0] == compute_positional_weights(made.model) == []
    for layer in compute_positional_weights(fparec):
        np.testing.assert_allclose(layer.sum(-1), 1, rtol=1e-5)
        assert layer.shape == (1, 12, 12) and (np.triu(layer, 1) == 0).all()


# --- distance, entropy and hours ---


def in_loops(weights: Tensor, times: Tensor) -> list[list[float]]:
    """Distance, entropy and hours of one history and head, [t, t] and [t]: mean and last query."""
    by_query = []
    for i in range(len(weights)):
        total = sum(abs(float(weights[i, j])) for j in range(i + 1)) or 1.0
        events = entropy = hours = 0.0
        for j in range(i + 1):
            a = abs(float(weights[i, j])) / total
            events += a * (i - j)
            entropy -= a * math.log(a) if a > 0 else 0
            hours += a * float(times[i] - times[j]) / 3600
        by_query.append([events, entropy, hours])
    return [np.mean(by_query, 0).tolist(), by_query[-1]]


@pytest.mark.parametrize(
    "options",
    [
        {"position": ["learned"]},
        {"position": ["parec"], "positional_mask": "after_softmax"},
        {"position": ["hstu"], "block": "hstu"},  # weights of any sign and sum
    ],
    ids=str,
)
def test_a_model_is_measured_history_by_history(experiment, monkeypatch, options) -> None:
    """Every history alone, so without padding, in loops; in several batches here."""
    made = experiment("PosSASRec", **options)
    shake(made.model)
    model, loader = made.model.double().eval(), made.loaders["test"]
    monkeypatch.setattr(attention, "chunk_elements", lambda _: 1000)
    rows, lengths, _ = sample_histories(model, loader, 9, 5, seed=1)
    assert len(rows) == 9 and len(set(lengths)) > 2
    found = measure_attention(model, loader, rows)
    layers, want = find_attention_layers(model), []
    for number in rows.tolist():
        inputs, ctx = compute_layer_inputs(model, layers, loader.collate_fn([number])[0])
        t = int(ctx.lengths)
        for layer, x in zip(layers, inputs, strict=True):
            scheme = next(iter(layer.position.schemes.values()), None)
            if hasattr(scheme, "weights"):
                weights = scheme.weights(model.max_seq_length)[:, -t:, -t:]
            else:
                weights = layer.weights(x, ctx)[0]
            want.append([in_loops(head.detach(), ctx.times) for head in weights])
    want = np.array(want).reshape(9, 2, -1, 2, 3).mean(0).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(found.layers, want, rtol=1e-9, atol=1e-9)
    assert found.is_rescaled == (options["position"] != ["learned"])


def test_samples_are_users(experiment) -> None:
    """One row each, the newest; seeded; all where fewer qualify."""
    made = experiment("PosSASRec", eval_args={"split": {"GT": [0.5, 0.6]}, "order": "TO"})
    model, loader = made.model, made.loaders["test"]
    table = loader._dataset.inter_feat
    user, length = table[model.USER_ID].numpy(), table[model.ITEM_SEQ_LEN].numpy()
    assert len(set(user)) < len(user)
    everyone, _, num_qualified = sample_histories(model, loader, 10**6, 6, seed=0)
    assert num_qualified == len(everyone)
    assert set(user[everyone]) == set(user[length >= 6])
    for row in everyone:
        assert row == np.flatnonzero(user == user[row])[-1]
    few = [sample_histories(model, loader, 5, 6, seed)[0].tolist() for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2] and len(set(few[0])) == 5


@pytest.fixture(scope="module")
def runs(trained) -> dict[int, Path]:
    return {n: trained("PosSASRec", position=["rope"], epochs=n) for n in (1, 3)}


def test_the_command_on_attention(runs: dict[int, Path], capsys) -> None:
    run = runs[1]
    assert main(["inspect", "attention", str(run), "--min_events=5"]) == 0
    printed = capsys.readouterr().out
    found = json.loads((run / "attention.json").read_text())
    assert found["position"] == ["rope"] and found["seed"] == 0 and found["min_events"] == 5
    assert found["users_asked"] == 200 and found["users"] == found["users_with_min_events"] < 60
    for layer in found["layers"]:
        for name in ("distance", "entropy", "hours"):
            each = [head["last"][name] for head in layer["heads"]]
            assert len(each) == 2 and layer["mean"]["last"][name] == pytest.approx(np.mean(each))
            assert f"{layer['mean']['last'][name]:.{1 if name == 'hours' else 3}f}" in printed
    assert (run / "attention_distance.png").read_bytes().startswith(b"\x89PNG")
    assert found["periods"] == [] and not (run / "periods.png").exists()


def test_a_checkpoint_file(runs: dict[int, Path]) -> None:
    """The folder's own, or another one in it: then its weights count."""
    one, two = runs[1], runs[3]
    shutil.copy(two / "checkpoint.pt", one / "later.pt")
    first, same, other, later = (
        inspect_attention(path, 4, 5).content["layers"]
        for path in (one, one / "checkpoint.pt", two, one / "later.pt")
    )
    assert first == same != other == later


def test_periods(runs: dict[int, Path], monkeypatch, capsys) -> None:
    """Sorted, in hours and days, marked; heads together where they are the same."""
    run, day = runs[3], 86400.0
    same = [[6.2 * day, 41.665 * day, math.inf, 3600.0]] * 2
    differ = [[math.inf] * 4, [400 * day, 1.1 * day, 34 * day, 5.0]]
    given = iter([torch.tensor(same), torch.tensor(differ)])
    monkeypatch.setattr(RotaryPosition, "time_periods", lambda self: next(given))
    assert main(["inspect", "attention", str(run), "--min_events", "5"]) == 0
    printed = capsys.readouterr().out
    found = json.loads((run / "attention.json").read_text())["periods"]
    assert [(p["layer"], p["heads"], p["planes_without_time"]) for p in found] == [
        (1, [1, 2], 1),
        (2, [1], 4),
        (2, [2], 0),
    ]
    assert found[0]["scheme"] == "rope" and found[0]["hours"] == pytest.approx([1, 148.8, 999.96])
    assert [p["near"] for p in found] == [["", "week", ""], [], ["", "day", "month", "year"]]
    for text in ("periods of rope, layer 1", "149", "1,000 ", "a week", "(1 plane without time)"):
        assert text in printed
    assert (run / "periods.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("PosSASRec", {"position": ["token_mixing"]}, "token_mixing mixes interactions without"),
        ("SASRec", {}, "SASRec has RecBole's layers"),
    ],
)
def test_models_without_attention_weights(trained, model, options, message):
    with pytest.raises(UsageError, match=message):
        inspect_attention(trained(model, **options), min_events=5)


def test_attention_of_too_few(runs: dict[int, Path], tmp_path: Path) -> None:
    for run, given, message in (
        (runs[1], {"min_events": 30}, "the longest has 12"),
        (runs[1], {"users": 0}, "--users"),
        (tmp_path, {}, "not a run folder"),
    ):
        with pytest.raises(UsageError, match=message):
            inspect_attention(run, **given)


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
    inputs, ctx = compute_layer_inputs(model, layers, rows)
    assert ctx.relations.edges and len(inputs) == 3
    assert all(torch.equal(found, want) for found, want in zip(inputs, seen, strict=True))
    want = [t for row in range(6) for t in rows["timestamp_list"][row, : ctx.lengths[row]].tolist()]
    assert ctx.times.tolist() == want


@torch.no_grad()
@pytest.mark.parametrize("inference", ["batch", "none"])
def test_a_history_does_not_depend_on_its_batch(folder: Path, double, inference: str) -> None:
    made = shop.open_shop(folder, inference_relations=inference)
    model = shop.shaken(made)
    layers = find_attention_layers(model)
    rows = made.loaders["valid"]._dataset[np.arange(6)]
    together, ctx = compute_layer_inputs(model, layers, rows)
    assert (ctx.relations is None) == (inference == "none")
    for row in range(6):
        alone, _ = compute_layer_inputs(model, layers, rows[row : row + 1])
        for x, one in zip(together, alone, strict=True):
            torch.testing.assert_close(x[ctx.row == row], one)


@torch.no_grad()
def test_use_of_relations_equals_loops(folder: Path, double) -> None:
    """Who has, reads and gains what, event by event and relation by relation."""
    made = shop.open_shop(folder, user_layers="odd")
    model, rows = shop.shaken(made), shop.all_windows(made)
    uses, events = measure_relations(model, [rows])
    order, heads, users = shop.find(model, rows)
    assert events == len(order)
    for use, edges in zip(uses, [*heads, users], strict=True):
        assert use.read == pytest.approx(len(edges.value) / events)
        is_other = order.user[edges.reader] != order.user[edges.source]
        assert use.others == pytest.approx(np.mean(is_other))
    known = {use.field: use.known for use in uses}
    items = torch.from_numpy(model.lookup.items[rows.events])
    cells = shop.Cells(made.dataset, shop.tables())
    of_users = [[cells.of("user", int(u), f) for f in ("age", "country")] for u in order.user]
    values = {
        "brand": [cells.of("item", int(item), "brand") for item in items],
        "stars": [cells.of("inter", int(event), "stars") for event in rows.events],
        "country, age": [age or country for age, country in of_users],
    }
    for field, column in values.items():
        assert 0 < known[field] < 1
        assert known[field] == pytest.approx(np.mean([v is not None for v in column]))
    # what the relation adds is what is missing without it
    relations, times = model._look_up(rows, model.lookup, torch.device("cpu"))
    lengths = torch.from_numpy(rows.lengths)
    ctx = SequenceContext.from_lengths(lengths, model.max_seq_length, times, None, relations)
    x = model.position_embedding(model.item_embedding(items), ctx)
    for number, layer in enumerate(model.trm_encoder.layer):
        block = layer.multi_head_attention
        normed = block.LayerNorm(x)
        full, mix = block.attention(normed, ctx), block.relation_mix.clone()
        block.relation_mix.zero_()
        alone = block.attention(normed, ctx)
        block.relation_mix.copy_(mix)
        for i, use in enumerate(uses[:-1]):
            assert use.heads[number] == mix[i].tolist()
            block.relation_mix[i] = 0
            without = block.attention(normed, ctx)
            block.relation_mix.copy_(mix)
            assert use.adds[number] == pytest.approx(float((full - without).norm() / alone.norm()))
        x, before = layer(x, ctx), TransformerLayer.forward(layer, x, ctx)
        moved, gate = float((x - before).norm() / before.norm()), layer.user_gate
        want = (moved, float(gate)) if layer.aggregates else (np.nan, np.nan)
        found = uses[-1].adds[number], uses[-1].gate[number]
        assert found == pytest.approx(want, nan_ok=True)


@pytest.mark.parametrize(
    "options", [{}, {"relations": ["country"], "user_update": "replace"}], ids=str
)
def test_the_command_on_relations(folder: Path, tmp_path: Path, capsys, options: dict) -> None:
    shop.train(folder, tmp_path, epochs=1, **options)
    assert main(["inspect", "relations", str(tmp_path), "--batches", "2"]) == 0
    shown = capsys.readouterr().out
    text = (tmp_path / "relations.json").read_text()
    found = json.loads(text, parse_constant=pytest.fail)["relations"]
    assert all(use["field"] in shown for use in found) and "relations.png" in shown
    assert (tmp_path / "relations.png").stat().st_size > 5000
    assert ("gate of layer 1" in shown) == (not options)


def test_relations_that_cannot_be_inspected(folder: Path, tmp_path: Path, trained, refused) -> None:
    shop.train(folder, tmp_path, epochs=1, relations=[])
    for run, batches, message in (
        (tmp_path, 0, "--batches"),
        (tmp_path, 1, "trained without relations"),
        (trained("Pop"), 1, "Pop has no relations"),
    ):
        refused(f"inspect relations {run} --batches {batches}", message)


# --- weights that are no numbers, or too large to compute with: every command says so ---

# by command, the model that it is for
COMMANDS = {
    "plot": "FPARec",
    "inspect attention --min_events 5": "AttrFormer",
    "inspect relations --batches 1": "AttrFormer",
    "inspect encoding --length 5 --checkpoint": "PosSASRec",
    "inspect because --user u1": "PosSASRec",
}


@pytest.fixture(scope="module")
def whole(folder: Path, trained, tmp_path_factory) -> dict[str, Path]:
    run = tmp_path_factory.mktemp("runs") / "AttrFormer"
    shop.train(folder, run, epochs=1)
    encoded = trained("PosSASRec", position=["ldpe", "to_rope", "kernel"])
    return {"AttrFormer": run, "PosSASRec": encoded, "FPARec": trained("FPARec")}


def damaged(run: Path, folder: Path, value: float, everywhere: bool = False) -> tuple[Path, str]:
    """A copy with ``value`` in one weight, or in all; the parameter's name."""
    ignored = shutil.ignore_patterns("*.png", "attention.json", "relations.json")
    copy = Path(shutil.copytree(run, folder / "run", ignore=ignored))
    state = torch.load(copy / "checkpoint.pt", weights_only=True)
    names = [name for name, _ in recbole_pos.load(run).model.named_parameters()]
    middle = names[len(names) // 2]
    for weights in (state["weights"], state["best_weights"]):
        for name in names if everywhere else [middle]:
            weights["state_dict"][name].view(-1)[slice(None) if everywhere else -1] = value
    torch.save(state, copy / "checkpoint.pt")
    return copy, middle


@pytest.mark.parametrize(("command", "model"), COMMANDS.items())
def test_a_parameter_that_is_no_number_is_named(whole, tmp_path, capsys, command, model) -> None:
    """And its file, also one beside the run's own checkpoint, which is whole."""
    run, name = damaged(whole[model], tmp_path, math.nan)
    file = run / "checkpoint.pt"
    if "encoding" in command:
        file.rename(run / "later.pt")
        shutil.copy(whole[model] / "checkpoint.pt", run)
        assert main([*command.split(), str(run)]) == 0
        file = run = run / "later.pt"
    assert main([*command.split(), str(run)]) == 2
    printed = capsys.readouterr().err
    assert name in printed and str(file) in printed


@pytest.mark.long
@pytest.mark.parametrize("command", list(COMMANDS)[:4])
def test_weights_too_large_to_compute_with_are_refused(whole, tmp_path, capsys, command) -> None:
    """They are numbers, and may be drawn; what they lead to may be none, and is then refused."""
    run, _ = damaged(whole[COMMANDS[command]], tmp_path, 1e30, everywhere=True)
    code = main([*command.split(), str(run)])
    assert code in (0, 2)
    assert ("too large to compute with" in capsys.readouterr().err) == (code == 2)
