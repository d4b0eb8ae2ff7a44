"""Checkpoints that are damaged or made to harm: refused in one line, nothing of them run."""

from __future__ import annotations

import copy
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from recbole.config import Config

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint, torch_file
from recbole_pos.experiment import state as training_state
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.recbole_file import read

HUGE, NAN = 2**2000, math.nan
ADAM = "optimizer.state.0.exp_avg"
# where; what stands there instead (a function: of what stood there)
DAMAGES: dict[str, list[Any]] = {
    "config": [None, {1: 2}, {"a": torch.ones(1)}],
    "config.model": ["Pop"],
    "data": [7],
    "progress": [None],
    "progress.next_epoch": [True, 10**10, HUGE],
    "progress.stopped": [1],
    "progress.training_seconds": [HUGE, -1.0],
    "progress.best_score": [NAN, None],
    "progress.best_epoch": [2, None],
    "progress.best_result": [None, {"a": NAN}],
    "progress.history.0.loss": [NAN],
    "progress.history.0.valid": [{"ndcg@10": HUGE}, {"ndcg@10": "1"}, {"a\n" * 9999: "1"}],
    "progress.history.1.epoch": [5],
    "weights.state_dict": [{}],
    "weights.other": [{"forward": 7}],
    "best_weights": [7],
    "best_weights.state_dict.item_embedding.weight": [lambda x: x / 0],
    ADAM: [
        torch.zeros(2),
        lambda x: x.double(),
        lambda x: x * NAN,
        lambda x: x[:1].clone().expand_as(x),
        lambda x: x.to(torch.complex64),
        lambda x: torch.empty_like(x, device="meta"),
        lambda x: torch.complex(x, x).conj().imag,  # its negative bit is set
        lambda x: x.to_sparse(),
        lambda x: torch.nested.nested_tensor([x, x]),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        lambda x: x.requires_grad_(),
    ],
    f"{ADAM}_sq": [lambda x: x - 1],
    "optimizer.state.0.step": [torch.tensor(-1.0)],
    "optimizer.state.0": [{}],
    "optimizer.state": [{999: {}}],
    "optimizer.param_groups": [[]],
    "optimizer.param_groups.0.params": [[torch.ones(2)], None],
    "scaler": [7],
    "random": [7],
    "random.torch": [torch.zeros(5056, dtype=torch.uint8), lambda x: x[:100]],
    "random.numpy.1": [torch.zeros(1, dtype=torch.int64).expand(10**10)],
    "random.numpy.2": [700],
    "random.numpy.4": [HUGE],
    "random.python.1": [(1, 2)],
    "loader": [{}],
}
SPARSE: dict[str, list[Any]] = {
    "weights.other.w.indices": [lambda x: x + 10**6],
    "weights.other.w.indptr": [lambda x: x[:3]],
    "weights.other.w.data": [
        lambda x: x * NAN,
        lambda x: x.to(torch.complex64),
        lambda x: x[:, None],
    ],
    "weights.other.w.shape": [(3, 3), (torch.zeros(2), 1)],
    "weights.other.w.kind": [7],
}


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of a model with weights, and of one with sparse matrices."""
    folder = tmp_path_factory.mktemp("runs")
    neighbours = {"data_path": str(tiny), "show_progress": False, "k": 5}
    for model, given in (("FPARec", {**SMALL, "data_path": str(tiny)}), ("ItemKNN", neighbours)):
        recbole_pos.run(model, "tiny", None, given, run_dir=folder / model, verbose=False)
    return {model: folder / model for model in ("FPARec", "ItemKNN")}


def _new(run: Path) -> Experiment:
    return prepare(PosConfig(None, None, [str(run / "config.yaml")], {"epochs": 3}))


def _with(value: Any, where: str, instead: Any) -> Any:
    if not where:
        return instead(value) if callable(instead) else copy.copy(instead)
    names = [str(key) for key in value] if isinstance(value, dict) else map(str, range(len(value)))
    name = next(n for n in names if where == n or where.startswith(f"{n}."))
    key = next(k for k in value if str(k) == name) if isinstance(value, dict) else int(name)
    changed = list(value) if isinstance(value, tuple) else copy.copy(value)
    changed[key] = _with(value[key], where[len(name) + 1 :], instead)
    return tuple(changed) if isinstance(value, tuple) else changed


def _refused(act: Callable[[], Any], *names: str) -> None:
    with pytest.raises((CheckpointError, UsageError)) as refusal:
        act()
    text = str(refusal.value)
    assert "\n" not in text and len(text) < 1000 and all(name in text for name in names)


@pytest.mark.parametrize(("model", "damages"), [("FPARec", DAMAGES), ("ItemKNN", SPARSE)])
def test_a_part_that_is_wrong_is_refused(
    runs: dict[str, Path], tmp_path: Path, model: str, damages: dict[str, list[Any]]
) -> None:
    """And the trainer is left as it was, so that the whole checkpoint then resumes."""
    state, made = checkpoint.load(runs[model] / "checkpoint.pt"), _new(runs[model])
    file, before = tmp_path / "checkpoint.pt", copy.deepcopy(made.model.state_dict())
    taken = []
    for where, values in damages.items():
        for number, instead in enumerate(values):
            torch.save(_with(state, where, instead), file)
            try:
                _refused(
                    lambda: training_state.restore(made.trainer, file, made.loaders["train"]),
                    str(file),
                )
            except pytest.fail.Exception:
                taken.append((where, number))
    assert not taken
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    training_state.restore(made.trainer, runs[model] / "checkpoint.pt", made.loaders["train"])
    assert made.trainer.progress.next_epoch == len(made.trainer.progress.history) > 0


def test_what_shares_memory_in_the_file_does_not_in_training(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """And lies in memory as its parameter does: fused Adam writes as if it did."""
    state, made = checkpoint.load(runs["FPARec"] / "checkpoint.pt"), _new(runs["FPARec"])
    moments = state["optimizer"]["state"][0]
    moments["exp_avg"] = moments["exp_avg_sq"] = moments["exp_avg_sq"].mT.contiguous().mT
    torch.save(state, tmp_path / "checkpoint.pt")
    training_state.restore(made.trainer, tmp_path / "checkpoint.pt", made.loaders["train"])
    kept = made.trainer.optimizer.state_dict()["state"][0]
    assert kept["exp_avg"].data_ptr() != kept["exp_avg_sq"].data_ptr()
    assert kept["exp_avg"].is_contiguous() and torch.equal(kept["exp_avg"], moments["exp_avg"])


@pytest.mark.parametrize("instead", [lambda x: x * NAN, lambda x: x.double()])
def test_attach_compares_weights_with_the_model_too(
    runs: dict[str, Path], tmp_path: Path, instead: Any
) -> None:
    state = checkpoint.load(runs["FPARec"] / "checkpoint.pt")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text((runs["FPARec"] / "config.yaml").read_text())
    where = "best_weights.state_dict.item_embedding.weight"
    torch.save(_with(state, where, instead), tmp_path / "run/checkpoint.pt")
    _refused(
        lambda: recbole_pos.attach(tmp_path / "run", ["lpe"], run_dir=tmp_path / "new"), "init_from"
    )


# --- files made to harm ---


def _dag(kind: type) -> Any:
    value: Any = kind([1])
    for _ in range(40):
        value = kind([value, value])
    return value


def _top_down() -> list:
    """A dag that is filled from its top, and a cycle at its end."""
    top: list = []
    inner = top
    for _ in range(40):
        inner[:] = [below := [], below]
        inner = below
    inner.append(top)
    return top


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


class Call:
    """Pickled, it is a call."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("touched",)


HARM: dict[str, Any] = {
    "dag of lists": {"config": {"a": _dag(list)}},
    "dag of tuples": {"config": {"a": _dag(tuple)}},
    "dag from its top": {"weights": {"state_dict": {}, "other": {"a": _top_down()}}},
    "deep": {"config": {"a": _nested(200)}},
    "a call": {"config": {"a": Call()}},
}


@pytest.mark.parametrize("harm", HARM)
def test_values_without_end_are_refused(
    runs: dict[str, Path], tiny: Path, tmp_path: Path, monkeypatch, harm: str
) -> None:
    """Of both kinds of file, before they take time or memory."""
    monkeypatch.chdir(tmp_path)
    state = checkpoint.load(runs["FPARec"] / "checkpoint.pt")
    torch.save({**state, **HARM[harm]}, "checkpoint.pt")
    _refused(lambda: recbole_pos.load("checkpoint.pt"), "checkpoint.pt")
    theirs = {"state_dict": {}, "other_parameter": HARM[harm], "epoch": 1, "cur_step": 0}
    config = Config(
        "SASRec", "tiny", config_dict={"data_path": str(tiny), "train_neg_sample_args": None}
    )
    state = {**theirs, "config": config, "best_valid_score": 1.0}
    state["optimizer"] = {"state": {}, "param_groups": []}
    torch.save(state, "theirs.pth", pickle_protocol=4)
    if harm != "deep":  # what is nested 200 deep is no harm there
        _refused(lambda: read("theirs.pth"), "theirs.pth")
        assert not Path("touched").exists()
    for part in ("epoch", "cur_step", "best_valid_score", "state_dict", "optimizer"):
        torch.save({**state, "other_parameter": {}, part: ["x"]}, "theirs.pth", pickle_protocol=4)
        _refused(lambda: read("theirs.pth"), part)


def _compressed(source: Path, target: Path) -> None:
    _packed(source, target, zipfile.ZIP_DEFLATED)


def _packed(
    source: Path, target: Path, how: int = zipfile.ZIP_STORED, change: Any = lambda n, d: d
) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", how) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def _many(source: Path, target: Path) -> None:
    """A list of members that is long."""
    _packed(source, target)
    with zipfile.ZipFile(target, "a") as file:
        for number in range(80):
            file.writestr(f"checkpoint/{number}{'x' * 60_000}", b"")


def _too_short(source: Path, target: Path) -> None:
    """A tensor with more numbers than its member has, which old torch reads beyond."""
    _packed(source, target, change=lambda n, d: d[:-4] if n.endswith("/data/0") else d)


def _key(source: Path, target: Path) -> None:
    """A dag of tuples as a key: its hash takes for ever."""
    dag = b"\x80\x02}K\x01\x85" + b"q\x01h\x01\x86" * 40 + b"K\x01s."
    _packed(source, target, change=lambda n, d: dag if n.endswith("data.pkl") else d)


def _twice(source: Path, target: Path) -> None:
    _packed(source, target)
    with zipfile.ZipFile(target, "a") as file, pytest.warns(UserWarning):
        file.writestr(file.namelist()[0], b"x")


def _two_directories(source: Path, target: Path) -> None:
    """Readers that begin at different ends see different members."""
    target.write_bytes(source.read_bytes() + source.read_bytes())


def _flipped(source: Path, target: Path) -> None:
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)


def _cut(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes()[:-100])


def _program(source: Path, target: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), target)


@pytest.mark.parametrize(
    "make",
    [_compressed, _many, _too_short, _key, _twice, _two_directories, _flipped, _cut, _program],
)
def test_archives_that_torch_does_not_write_are_refused(
    runs: dict[str, Path], tmp_path: Path, monkeypatch, make: Callable[[Path, Path], None]
) -> None:
    """Before torch, or anything that believes their sizes, reads them."""
    make(runs["FPARec"] / "checkpoint.pt", file := tmp_path / "file.pt")
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(torch_file.zipfile.ZipFile, "extractall", None)
    _refused(lambda: checkpoint.load(file), "file.pt")
    _refused(lambda: read(file), "file.pt")
