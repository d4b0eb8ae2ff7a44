"""Attention distance, entropy and periods against plain loops; the command that shows them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from schemes import LENGTHS, rows_of, shake
from torch import Tensor

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.inspect import distance
from recbole_pos.inspect.attention_weights import attention_layers, layer_inputs
from recbole_pos.inspect.distance import measure, measure_attention, sample_histories
from recbole_pos.layers.context import SequenceContext
from recbole_pos.position.rotary import RotaryPosition

FAST = {"epochs": 1, "hidden_size": 16, "inner_size": 16, "MAX_ITEM_LIST_LENGTH": 12}


def in_loops(weights: Tensor, times: Tensor) -> list[list[float]]:
    """One history and head, [t, t] and [t]: distance, entropy, hours; mean and last query."""
    t, each = len(weights), []
    for i in range(t):
        total = sum(abs(float(weights[i, j])) for j in range(i + 1))
        distance = entropy = hours = 0.0
        for j in range(i + 1):
            a = abs(float(weights[i, j])) / total
            distance += a * (i - j)
            entropy -= a * math.log(a) if a > 0 else 0
            hours += a * float(times[i] - times[j]) / 3600
        each.append([distance, entropy, hours])
    return [np.mean(each, 0).tolist(), each[-1]]


def batch_of_times() -> tuple[SequenceContext, Tensor]:
    times = 1.5e9 + torch.cat([torch.rand(length).cumsum(0) * 1e5 for length in LENGTHS])
    return SequenceContext.from_lengths(torch.tensor(LENGTHS), 9, times), times


def test_measures_are_the_sums(double) -> None:
    """Rows of any sign and sum, padded histories."""
    ctx, times = batch_of_times()
    weights = torch.randn(len(LENGTHS), 2, 9, 9).tril()
    weights[0, 0, 2, 1] = 0  # 0 ln 0 = 0
    found = measure(weights, ctx)
    assert found.shape == (4, 2, 3, 2)
    for row, (length, part) in enumerate(zip(LENGTHS, rows_of(LENGTHS), strict=True)):
        for head in range(2):
            want = in_loops(weights[row, head, :length, :length], times[part])
            np.testing.assert_allclose(found[row, :, :, head], want, rtol=1e-12, atol=1e-10)
    without = SequenceContext.from_lengths(ctx.lengths, 9)
    assert torch.equal(measure(weights, without), found[:, :, :2])


def test_a_row_of_zeros_measures_zero(double) -> None:
    ctx, _ = batch_of_times()
    assert (measure(torch.zeros(4, 1, 9, 9), ctx) == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"position": ["learned"]},
        {"position": ["fparec"]},
        {"position": ["parec"], "positional_mask": "after_softmax"},
        {"position": ["tisas"]},
    ],
    ids=str,
)
def test_a_model_is_measured_history_by_history(experiment, monkeypatch, options) -> None:
    """Every history alone, so without padding, in loops; in several batches here."""
    made = experiment("PosSASRec", **options)
    shake(made.model)
    model, loader = made.model.double().eval(), made.loaders["test"]
    monkeypatch.setattr(distance, "chunk_elements", lambda _: 1000)
    sample = sample_histories(model, loader, 9, 5, seed=1)
    assert len(sample.rows) == 9 and len(set(sample.lengths)) > 2
    found = measure_attention(model, sample)
    layers, want = attention_layers(model), []
    for number in sample.rows.tolist():
        rows = loader.collate_fn([number])[0]
        inputs, ctx = layer_inputs(model, layers, rows)
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
    assert found.rescaled == ("positional_mask" in options)


def test_samples_are_users(experiment) -> None:
    """One row each, the newest; seeded; all where fewer qualify."""
    splits = {"split": {"GT": [0.5, 0.6]}, "order": "TO"}
    made = experiment("PosSASRec", eval_args=splits)
    model, loader = made.model, made.loaders["test"]
    table = loader._dataset.inter_feat
    user, length = table[model.USER_ID].numpy(), table[model.ITEM_SEQ_LEN].numpy()
    assert len(set(user)) < len(user)
    everyone = sample_histories(model, loader, 10**6, 6, seed=0)
    assert everyone.qualified == len(everyone.rows) == len(set(user[length >= 6]))
    assert set(user[everyone.rows]) == set(user[length >= 6])
    for row in everyone.rows:
        assert row == np.flatnonzero(user == user[row])[-1] and length[row] >= 6
    few = [sample_histories(model, loader, 5, 6, seed).rows.tolist() for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2]
    assert len(set(few[0])) == 5 and set(few[0]) <= set(everyone.rows.tolist())


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of the same model after 1 and after 3 epochs."""
    root = tmp_path_factory.mktemp("runs")
    options = {**FAST, "data_path": str(tiny), "position": ["rope"]}
    for epochs in (1, 3):
        given = {**options, "epochs": epochs}
        folder = root / str(epochs)
        recbole_pos.run("PosSASRec", "tiny", None, given, run_dir=folder, verbose=False)
    return {epochs: root / str(epochs) for epochs in (1, 3)}


def test_the_command(runs: dict[int, Path], capsys) -> None:
    run = runs[1]
    assert main(["inspect", "attention", "--checkpoint", str(run), "--min_events=5"]) == 0
    printed = capsys.readouterr().out
    found = json.loads((run / "attention.json").read_text())
    assert found["position"] == ["rope"] and found["seed"] == 0 and found["min_events"] == 5
    assert found["users_asked"] == 200 and found["users"] == found["users_with_min_events"] < 60
    assert f"all {found['users']} test users" in printed and str(run / "attention.json") in printed
    assert [len(layer["heads"]) for layer in found["layers"]] == [2] * 2
    for layer in found["layers"]:
        for queries in ("all", "last"):
            for name in ("distance", "entropy", "hours"):
                each = [head[queries][name] for head in layer["heads"]]
                assert layer["mean"][queries][name] == pytest.approx(np.mean(each))
                assert f"{layer['mean'][queries][name]:.{1 if name == 'hours' else 3}f}" in printed
    assert (run / "attention_distance.png").read_bytes().startswith(b"\x89PNG")
    assert found["periods"] == [] and not (run / "periods.png").exists()


def test_a_checkpoint_file(runs: dict[int, Path]) -> None:
    """The folder's own, or another one in it: then its weights count."""
    one, two = runs[1], runs[3]
    shutil.copy(two / "checkpoint.pt", one / "later.pt")

    def layers(path: Path) -> list:
        arguments = ["--checkpoint", str(path), "--min_events", "5", "--users", "4"]
        assert main(["inspect", "attention", *arguments]) == 0
        folder = path.parent if path.is_file() else path
        return json.loads((folder / "attention.json").read_text())["layers"]

    assert layers(one) == layers(one / "checkpoint.pt") != layers(two)
    assert layers(one / "later.pt") == layers(two)


def test_periods(runs: dict[int, Path], monkeypatch, capsys) -> None:
    """Sorted, in hours and days, marked; heads together where they are the same."""
    run = runs[3]
    day = 86400.0
    same = [[6.2 * day, 90 * day, math.inf, 3600.0]] * 2
    differ = [[math.inf] * 4, [400 * day, 1.1 * day, 34 * day, 5.0]]
    given = iter([torch.tensor(same), torch.tensor(differ)])
    monkeypatch.setattr(RotaryPosition, "time_periods", lambda self: next(given))
    capsys.readouterr()
    assert main(["inspect", "attention", "--checkpoint", str(run), "--min_events", "5"]) == 0
    printed = capsys.readouterr().out
    found = json.loads((run / "attention.json").read_text())["periods"]
    assert [(p["layer"], p["heads"], p["planes_without_time"]) for p in found] == [
        (1, [1, 2], 1),
        (2, [1], 4),
        (2, [2], 0),
    ]
    assert found[0]["scheme"] == "rope" and found[0]["hours"] == pytest.approx([1, 148.8, 2160])
    assert found[0]["near"] == ["", "week", ""] and found[1]["hours"] == []
    assert found[2]["near"] == ["", "day", "month", "year"]
    for text in ("periods of rope, layer 1", "149", "a week", "34", "(1 plane without time)"):
        assert text in printed
    assert (run / "periods.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("model", "position", "message"),
    [
        ("PosSASRec", ["token_mixing"], "token_mixing mixes events without"),
        ("SASRec", None, "SASRec has RecBole's layers"),
    ],
)
def test_what_has_no_attention_weights(
    tiny: Path, tmp_path: Path, capsys, model, position, message
) -> None:
    given = {**FAST, "data_path": str(tiny)}
    given |= {"position": position} if position else {"loss_type": "CE"}
    if not position:
        given["train_neg_sample_args"] = None
    run = tmp_path / "run"
    recbole_pos.run(model, "tiny", None, given, run_dir=run, verbose=False)
    assert main(["inspect", "attention", "--checkpoint", str(run), "--min_events=5"]) == 2
    assert message in capsys.readouterr().err and not (run / "attention.json").exists()


def test_errors(runs: dict[int, Path], tmp_path: Path, capsys) -> None:
    for run, argument, message in (
        (runs[1], "--min_events=30", "the longest has 12 (MAX_ITEM_LIST_LENGTH is 12)"),
        (runs[1], "--users=0", "--users: 0 is below 1"),
        (tmp_path, "--users=3", "not a run folder"),
    ):
        assert main(["inspect", "attention", "--checkpoint", str(run), argument]) == 2
        assert message in capsys.readouterr().err
