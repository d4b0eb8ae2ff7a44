"""From a run folder to a folder that is served: its files, its README, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import SMALL

import recbole_pos
from recbole_pos import PosRecommender
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.serve.export import random_histories
from recbole_pos.serve.programs import make_encoder, trace

pytestmark = pytest.mark.slow
TRAINED = ["PosSASRec", "TORoPE"]
long = pytest.mark.long  # the other two of two models and two formats


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    given = {**SMALL, "data_path": str(tiny), "epochs": 1}
    for model in TRAINED:
        recbole_pos.run(model, "tiny", None, given, run_dir=folder / model, verbose=False)
    yield folder


def blocks(folder: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.S)


def executed(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("PosSASRec", "onnx"),
        ("TORoPE", "torch_export"),
        pytest.param("PosSASRec", "torch_export", marks=long),
        pytest.param("TORoPE", "onnx", marks=long),
    ],
)
def test_the_lines_of_the_readme(
    runs: Path, tmp_path: Path, model: str, form: str, capsys: Any
) -> None:
    pytest.importorskip("onnxruntime")
    to = tmp_path / "deep" / "served"
    assert main(["export", str(runs / model), "--to", str(to), "--format", form, "-k", "12"]) == 0
    assert capsys.readouterr().out.strip() == str(to)
    assert not list(to.parent.glob(".*"))  # nothing is left beside it
    lines, index = blocks(to)
    assert len(lines.splitlines()) <= 13 and "recbole" not in lines
    has_faiss = importlib.util.find_spec("faiss") is not None
    printed, *near = executed(lines + index * has_faiss, to).splitlines()
    reported = re.findall(r"\('(i\d+)', (?:np.float32|tensor)\(([-\d.e]+)\)\)", printed)
    made = recbole_pos.load(runs / model)
    ids, names = (getattr(made.dataset, f"field2{x}")["item_id"] for x in ("token_id", "id_token"))
    history = torch.tensor([[1, 2, 3]])
    times = 1.5e9 + 3600 * torch.arange(3, dtype=torch.float64)[None]
    with torch.no_grad():
        vector = made.model(history, torch.tensor([3]), times if model == "TORoPE" else None)
        scores = (vector @ made.model.item_embedding.weight.t())[0]
    scores[0] = -torch.inf
    best = scores.topk(10)
    assert [name for name, _ in reported] == names[best.indices.numpy()].tolist()
    if (model, form) == ("PosSASRec", "onnx"):  # the page has the same lines, of ml-100k
        shown = lines.replace(json.dumps(names[1:4].tolist()), '["50", "181", "172"]')
        page = Path(__file__).parent.parent / "docs" / "export.md"
        assert f"```python\n{shown.replace('[-12:]', '[-50:]')}```" in page.read_text("utf-8")
    if has_faiss:
        assert len(set(re.findall(r"'(i\d+)'", near[0])) & {name for name, _ in reported}) >= 9
    np.testing.assert_allclose([float(score) for _, score in reported], best.values, atol=2e-4)
    assert json.loads((to / "items.json").read_text()) == [None, *list(ids)[1:]]
    vectors = made.model.item_embedding.weight.detach().numpy()
    np.testing.assert_array_equal(np.load(to / "vectors.npy"), vectors)
    table = pq.read_table(to / "vectors.parquet").to_pydict()
    assert table["id"] == list(range(1, len(vectors))) and table["name"] == list(ids)[1:]
    np.testing.assert_array_equal(np.array(table["vector"], np.float32), vectors[1:])
    with pytest.raises(UsageError, match="served is in use"):
        recbole_pos.export(runs / model, to, form)


def test_what_cannot_be_exported(runs: Path, tmp_path: Path, experiment: Any, capsys: Any) -> None:
    given = [str(runs / "PosSASRec"), "--to", str(tmp_path / "served")]
    for options, message in (
        (["--format", "pmml"], "format: 'pmml' is not one of onnx, torch_export"),
        (["-k", "0"], "k: expected the number of items"),
        (["--inference_relations", "own"], "PosSASRec has none, AttrFormer alone does"),
    ):
        assert main(["export", *given, *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
        assert not list(tmp_path.iterdir())
    deep = str(tmp_path / "deep" / "served")
    for name in ("none", "x" * 300):
        assert main(["export", str(runs / name), "--to", deep]) == 2
    assert main(["export", given[0], "--to", str(tmp_path / ("x" * 300))]) == 2
    assert not list(tmp_path.iterdir())
    for model in ("SASRec", "SPop", "AnchoredSRGNN"):
        with pytest.raises(UsageError, match=f"{model} cannot be exported: its forward"):
            make_encoder(experiment(model).model)


class Counting(PosRecommender):
    """As many states as the data have."""

    defaults = {"hidden_size": 16}

    def encode(self, items: torch.Tensor, ctx: Any) -> torch.Tensor:
        return self.item_embedding(items) * len(items.unique())


class Overriding(Counting):
    def forward(self, *given: Any) -> torch.Tensor:
        return super().forward(*given) + 1


def test_models_of_ones_own(experiment: Any) -> None:
    recbole_pos.register_model(Counting)
    recbole_pos.register_model(Overriding)
    with pytest.raises(UsageError, match="Counting cannot be exported: torch.export refuses it: "):
        trace(make_encoder(experiment("Counting").model))
    with pytest.raises(UsageError, match="Overriding cannot be exported: it defines forward"):
        make_encoder(experiment("Overriding").model)


@pytest.mark.parametrize("form", [pytest.param("onnx", marks=long), "torch_export"])
def test_a_full_disk(runs: Path, tmp_path: Path, form: str) -> None:
    """No file may grow beyond 20 kB. In a process of its own, since torch used to end it."""
    code = "import resource, sys; from recbole_pos.cli.main import main; "
    code += (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.exit(main(sys.argv[1:]))"
    )
    to = tmp_path / "deep" / "served"
    command = ["export", str(runs / "PosSASRec"), "--to", str(to), "--format", form]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: cannot write"), done.stderr
    assert not list(tmp_path.iterdir())


def test_what_differs_is_not_written(runs: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from recbole_pos.serve import export as module

    encoder = make_encoder(recbole_pos.load(runs / "TORoPE").model)
    assert set(random_histories(encoder, torch.tensor([2]), torch.Generator())) >= {
        "items",
        "times",
    }
    monkeypatch.setattr(
        module, "load_program", lambda path: lambda given: [encoder(*given.values()) + 1e-2]
    )
    with pytest.raises(UsageError, match="its output differs from it by"):
        recbole_pos.export(runs / "TORoPE", tmp_path / "served", "torch_export")
    assert not list(tmp_path.iterdir())
