"""Arrays and pictures of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.inspect import run_pictures
from recbole_pos.inspect.attention_weights import attention_maps, kernel_factors, positional_weights
from recbole_pos.inspect.run_pictures import HALF_A_LINE, read_metrics
from recbole_pos.inspect.trained import open_run
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


def test_attention_maps_average_the_weights(experiment) -> None:
    """Against each history on its own, in loops over the newest events."""
    made = experiment("PosSASRec", position=["cape", "rope"])
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


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("FPARec", ["curves.png", "attention.png", "positions.png"]),
        ("KernelAttention", ["curves.png", "attention.png", "kernel.png"]),
    ],
)
def test_plot_writes_pictures(tiny: Path, tmp_path: Path, capsys, model, files) -> None:
    options = {"data_path": str(tiny), "epochs": 1, "hidden_size": 8}
    recbole_pos.run(model, "tiny", None, options, run_dir=tmp_path / "run", verbose=False)
    assert main(["plot", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "run" / f) for f in files]
    for file in files:
        assert (tmp_path / "run" / file).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "empty").mkdir()
    assert main(["plot", str(tmp_path / "empty")]) == 2
    assert "not a run folder" in capsys.readouterr().err


# metrics.jsonl that a crash, or someone, has damaged: a picture with a word, or its line


METRIC = "ndcg@10"


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plot") / "run"
    recbole_pos.run("Pop", "tiny", None, {"data_path": str(tiny)}, run_dir=folder, verbose=False)
    return folder


def line(epoch: int, score: float | None = 0.5, **others) -> bytes:
    valid = None if score is None else {"hit@10": 0.1, METRIC: score}
    content = {"epoch": epoch, "loss": 4.0, "valid": valid, "seconds": 0.1, **others}
    return json.dumps(content).encode() + b"\n"


WHOLE = line(0) + line(1)
LINE_3 = {
    "binary rubbish": b"\x80\x00\xff\xfe{\n",
    "nested too deeply": b"[" * 100_000 + b"\n",
    "epoch is true": line(True),
    "an earlier epoch": line(0),
    "loss too large to draw": line(2, loss=1e308),
    "metric missing": line(2, valid={"hit@10": 0.5}),
    "metric is infinite": line(2, float("inf")),
}


@pytest.fixture
def plotted(run: Path, monkeypatch, capsys, caplog) -> Iterator:
    """``plotted(content)`` of metrics.jsonl: exit code, everything printed, the figure's title."""
    trained = open_run(run)
    monkeypatch.setattr(run_pictures, "open_run", lambda *_: trained)
    titles = []

    def keep(figure: Figure, file: Path, **given) -> None:
        figure.draw_without_rendering()
        titles.append(figure.get_suptitle())

    monkeypatch.setattr(Figure, "savefig", keep)

    def command(content: bytes) -> tuple[int, str, str]:
        (run / "metrics.jsonl").write_bytes(content)
        code = main(["plot", str(run)])
        return code, capsys.readouterr().err + caplog.text, "".join(titles)

    return command


@pytest.mark.parametrize("damage", LINE_3)
def test_a_damaged_line_is_named(plotted, run: Path, damage: str) -> None:
    code, printed, title = plotted(WHOLE + LINE_3[damage])
    assert code == 2 and not title
    assert f"{run / 'metrics.jsonl'}, line 3: " in printed and f"--resume {run}" in printed


def test_half_a_last_line_is_left_out_and_told(plotted) -> None:
    """As a process leaves it that was killed within the write, wherever that was."""
    for cut in (1, len(line(2)) // 2, len(line(2)) - 2):
        code, printed, title = plotted(WHOLE + line(2)[:cut])
        assert code == 0 and HALF_A_LINE in printed and HALF_A_LINE in title
    code, printed, _ = plotted(WHOLE + b"\0" * 100)  # a file system after a power cut
    assert code == 0 and HALF_A_LINE in printed


def test_a_last_line_without_its_end_is_a_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for end in (b"", b"\n\n", b"\r\n"):
        file.write_bytes(WHOLE + line(2).rstrip() + end)
        assert len(read_metrics(file, METRIC)[0]) == 3


def test_no_whole_line_is_no_epoch(plotted, run: Path) -> None:
    code, printed, _ = plotted(b"\n \n")
    assert code == 2 and "no finished epoch yet" in printed
    code, printed, _ = plotted(line(0)[:30])
    assert code == 2 and f"{run / 'metrics.jsonl'}, line 1: " in printed
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert main(["plot", str(run)]) == 2
    (run / "metrics.jsonl").rmdir()


def test_the_best_epoch_is_the_one_that_is_kept(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """Where lower is better, and where it is not: what is marked is what result.json says."""
    marked, found = {}, {}

    def keep(figure: Figure, file: Path, **given) -> None:
        line, dot = figure.axes[1].lines
        marked[metric] = dot.get_xdata().tolist()
        found[metric] = line.get_ydata().tolist()
        assert dot.get_ydata() == found[metric][marked[metric][0]]
        assert dot.get_color() == line.get_color()

    monkeypatch.setattr(Figure, "savefig", keep)
    options = {"data_path": str(tiny), "epochs": 4, "position": ["token_mixing"], "hidden_size": 8}
    options |= {"metrics": ["NDCG", "GiniIndex"], "topk": [10], "learning_rate": 0.003}
    for metric, pick in (("GiniIndex@10", min), ("NDCG@10", max)):
        folder = tmp_path / metric
        given = {**options, "valid_metric": metric}
        result = recbole_pos.run("PosSASRec", "tiny", None, given, run_dir=folder, verbose=False)
        assert main(["plot", str(folder)]) == 0
        assert marked[metric] == [result.best_epoch]
        assert found[metric][result.best_epoch] == pick(found[metric])
        assert len(set(found[metric])) > 1


@pytest.mark.parametrize("bigger", [True, False])
def test_of_equal_epochs_the_latest_is_marked(tmp_path: Path, monkeypatch, bigger: bool) -> None:
    """As early stopping keeps its weights."""
    marked = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *_, **__: marked.extend(self.axes[1].lines[1].get_xdata())
    )
    values = [0.1, 0.3, 0.3, 0.2] if bigger else [0.3, 0.1, 0.1, 0.2]
    history = [{"epoch": n, "loss": 1.0, "valid": {"m": x}} for n, x in enumerate(values)]
    run_pictures.draw_curves(history, "m", bigger, ["title"], tmp_path / "x.png")
    assert marked == [2]
