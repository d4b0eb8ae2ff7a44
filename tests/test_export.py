"""Export: programs against the models, in sizes they were not made with; files and README."""

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import fork
from schemes import ATTENTION, REPLACING, shake

import recbole_pos
from recbole_pos import PosRecommender
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.serve import export as module
from recbole_pos.serve.export import (
    Encoder,
    Recommend,
    load_program,
    make_encoder,
    trace,
    write_onnx,
)
from recbole_pos.yaml_files import read_yaml

Build = Callable[..., Experiment]
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
long = pytest.mark.long  # seconds each; one of a kind is in make test
# all schemes that can share a layer, then each that replaces attention
TOGETHER = ["learned", "sinusoidal", "time_learned", "request_age"]
TOGETHER += [name for name in ATTENTION if name not in ("nope", *REPLACING)]
EXPORTED = [TOGETHER, *([name] for name in REPLACING)]


def shaken(experiment: Experiment) -> Any:
    torch.manual_seed(0)
    shake(experiment.model.requires_grad_(False))
    return experiment.model.eval()


def written(module: Encoder | Recommend, form: str, folder: Path) -> Callable[..., list[Any]]:
    """A program by way of its file; of the form "eager", what is traced."""
    if form == "eager":
        return lambda given: [module(*given.values())]
    program = trace(module)
    path = folder / {"onnx": "program.onnx", "torch_export": "program.pt2"}[form]
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        outputs = ("vector",) if isinstance(module, Encoder) else ("best", "scores")
        write_onnx(program, path, module.inputs, outputs)
    else:
        torch.export.save(program, path)
    return load_program(path)


def batches(encoder: Encoder) -> list[dict[str, Any]]:
    draw, n = torch.Generator().manual_seed(1), encoder.model.max_seq_length
    sizes = [[n], [1], [1, 1, 1], [n, 1, n // 2, max(n - 9, 1)]]
    return [encoder.random_inputs(torch.tensor(lengths), draw) for lengths in sizes]


def check(encoder: Encoder, form: str, folder: Path) -> None:
    program = written(encoder, form, folder)
    for given in batches(encoder):
        expected = encoder.model(*given.values()).detach()  # packed, as in training and evaluation
        torch.testing.assert_close(program(given)[0], expected, **CLOSE)


def options_of(position: list[str], **more: Any) -> dict[str, Any]:
    fields = {"difsr_fields": []} if "difsr" in position else {}
    windows = {"train_windows": "prefix"} if "request_age" in position else {}
    return {"position": position, "n_heads": 2, "n_layers": 1, **fields, **windows, **more}


@pytest.mark.parametrize(
    ("names", "block"), [*(([name], "transformer") for name in SCHEMES), (TOGETHER, "hstu")]
)
def test_rows_with_padding_are_packed_events(experiment, tmp_path, names, block) -> None:
    made = experiment("PosSASRec", **options_of(names, block=block))
    check(make_encoder(shaken(made)), "eager", tmp_path)


QUICK = ("PosSASRec", {"MAX_ITEM_LIST_LENGTH": 2})  # as a torch program
PROGRAMS: list[tuple[str, dict[str, Any]]] = [
    *(("PosSASRec", options_of(names)) for names in EXPORTED),
    *((name, {}) for name in ("PosSASRec", "KernelAttention", "TORoPE", "FPARec", "PARec")),
    ("PosSASRec", {"position": ["linear_attention"], "MAX_ITEM_LIST_LENGTH": 150}),
    ("KernelAttention", {"kernel_u": "full", "MAX_ITEM_LIST_LENGTH": 150}),
    ("PosSASRec", {"position": ["cape"], "cape_positions": 4}),
    ("PARec", {"positional_mask": "after_softmax", "n_heads": 2}),
    ("TORoPE", {"fusion": "split_head", "n_heads": 2, "timestamp_unit": "milliseconds"}),
    QUICK,
    ("PosSASRec", options_of(["hstu"], block="hstu", request_time="target")),
]


@pytest.mark.parametrize(
    ("model", "options", "form"),
    [
        pytest.param(*case, form, marks=() if case is QUICK and form != "onnx" else long)
        for case in PROGRAMS
        for form in ("onnx", "torch_export")
    ],
    ids=str,
)
def test_programs(
    experiment: Build, tmp_path: Path, model: str, options: dict[str, Any], form: str
) -> None:
    check(make_encoder(shaken(experiment(model, **options))), form, tmp_path)


@pytest.mark.parametrize("form", [pytest.param("onnx", marks=long), "torch_export"])
def test_the_best_of_the_allowed(experiment: Build, tmp_path: Path, form: str) -> None:
    """In PyTorch's form of a model with all schemes that can share a layer."""
    options = options_of(TOGETHER) if form == "torch_export" else {}
    encoder = make_encoder(shaken(experiment("PosSASRec", **options)))
    if form == "onnx":  # which takes the lower id first of equal scores
        encoder.model.item_embedding.weight[20:] = 0
    k, items = 6, encoder.model.n_items
    recommend = Recommend(encoder, k)
    program = written(recommend, form, tmp_path)
    draw = torch.Generator().manual_seed(2)
    for given in batches(encoder):
        scores = encoder.model(*given.values()) @ encoder.model.item_embedding.weight.t()
        allowed = torch.rand(len(scores), items, generator=draw) < 0.5
        allowed[-1, 3:] = False  # item 0, which is padding, and at most two more
        for mask in (allowed, allowed[-1:]):  # one for each history, or one for all
            wanted = scores.masked_fill(~mask, -torch.inf)
            wanted[:, 0] = -torch.inf
            best, ids = wanted.sort(descending=True, stable=True)
            best, ids = best[:, :k], ids[:, :k].masked_fill(best[:, :k].isinf(), 0)
            asked = {**given, "allowed": mask}
            found, found_scores = program({name: asked[name] for name in recommend.inputs})
            torch.testing.assert_close(found_scores, best, **CLOSE)
            assert torch.equal(found, ids)


# --- the folder ---


@pytest.mark.parametrize(("model", "form"), [("PosSASRec", "onnx"), ("TORoPE", "torch_export")])
def test_the_lines_of_the_readme(
    trained: Callable[..., Path], tmp_path: Path, model: str, form: str, capsys: Any
) -> None:
    run_dir = trained(model, n_layers=1)
    pytest.importorskip("onnxruntime")
    to, given = tmp_path / "deep" / "served", run_dir
    if form == "torch_export":  # the data are not where they were, and are not needed
        given = Path(shutil.copytree(run_dir, tmp_path / "moved"))
        config = read_yaml(given / "config.yaml")
        nowhere = yaml.safe_dump({**config, "data_path": str(tmp_path / "nowhere")})
        (given / "config.yaml").write_text(nowhere, encoding="utf-8")
    assert main(["export", str(given), "--to", str(to), "--format", form, "-k", "12"]) == 0
    assert capsys.readouterr().out.strip() == str(to)
    assert not list(to.parent.glob(".*"))  # nothing is left beside it
    readme = (to / "README.md").read_text("utf-8")
    lines, index = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    has_faiss = importlib.util.find_spec("faiss") is not None
    printed, *near = run_without_package(lines + index * has_faiss, to).splitlines()
    reported = re.findall(r"\('(i\d+)', (?:np.float32|tensor)\(([-\d.e]+)\)\)", printed)
    loaded = recbole_pos.load(run_dir)
    history = {"items": loaded.items[:3], "times": 1.5e9 + 3600.0 * np.arange(3)}
    best = loaded.recommend(histories=[history], k=10, exclude_seen=False)
    assert [name for name, _ in reported] == best["item"].tolist()
    np.testing.assert_allclose([float(x) for _, x in reported], best["score"], atol=2e-4)
    if (model, form) == ("PosSASRec", "onnx"):  # the page has the same lines, of ml-100k
        shown = lines.replace(json.dumps(loaded.items[:3].tolist()), '["50", "181", "172"]')
        page = Path(__file__).parent.parent / "docs" / "export.md"
        assert f"```python\n{shown.replace('[-12:]', '[-50:]')}```" in page.read_text("utf-8")
    if has_faiss:
        assert len(set(re.findall(r"'(i\d+)'", near[0])) & set(best["item"])) >= 9
    names, vectors = loaded.item_vectors()
    assert json.loads((to / "items.json").read_text()) == [None, *names]
    np.testing.assert_array_equal(np.load(to / "vectors.npy")[1:], vectors)
    with pytest.raises(UsageError, match="served is in use"):
        recbole_pos.export(run_dir, to, form)


def run_without_package(program: str, folder: Path) -> str:
    """What a program prints in a folder, where neither RecBole nor this package can be imported."""

    def run() -> None:
        for name in {"recbole", "recbole_pos", *sys.modules}:
            if name.partition(".")[0] in ("recbole", "recbole_pos"):
                sys.modules[name] = None  # type: ignore[assignment]
        os.chdir(folder)
        exec(program, {"__name__": "__main__"})

    done = fork(run)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_models_that_cannot_be_exported(experiment: Any) -> None:
    class Counting(PosRecommender):
        defaults = {"hidden_size": 16}

        def encode(self, batch: Any) -> torch.Tensor:
            return self.item_embedding(batch.items) * len(batch.items.unique())

    recbole_pos.register_model(Counting)
    recbole_pos.register_model(type("Overriding", (Counting,), {"compute_states": lambda *_: None}))
    other_layers = "cannot be exported: a program reads one history by the plugin's layers"
    refusals = dict.fromkeys(("SASRec", "AttrFormer", "PosRec", "Overriding"), other_layers)
    refusals["Counting"] = "Counting cannot be exported: torch.export refuses it: "
    for model, message in refusals.items():
        options = {"relations": ["time"]} if model == "AttrFormer" else {}
        with pytest.raises(UsageError, match=message):
            trace(make_encoder(experiment(model, **options).model))


def test_what_differs_is_not_written(trained, tmp_path: Path, monkeypatch) -> None:
    encoder = make_encoder(recbole_pos.load(trained("PosSASRec")).model)
    program = lambda given: [encoder(*given.values()) + 1e-2]  # noqa: E731
    monkeypatch.setattr(module, "_write_program", lambda *given: None)
    monkeypatch.setattr(module, "load_program", lambda path: program)
    with pytest.raises(UsageError, match="its output differs from it by"):
        recbole_pos.export(trained("PosSASRec"), tmp_path / "served", "torch_export")
    assert not list(tmp_path.iterdir())
