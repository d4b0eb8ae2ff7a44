"""Parts of a checkpoint that are not what they must be, one by one, and what is said of each."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from torch import Tensor

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment import state as training_state
from recbole_pos.experiment.build import Experiment, prepare

HUGE = 2**2000
ADAM = "optimizer.state.0.exp_avg"
NAN = math.nan


def _negative(x: Tensor) -> Tensor:
    """With its negative bit set, as the imaginary part of a conjugate has it."""
    return torch.complex(x, x).conj().imag


# where, what stands there instead (a function: of what stood there), what is said
DAMAGES: list[tuple[str, Any, str]] = [
    ("progress", None, "progress: expected a mapping"),
    ("random", 7, "random: expected a mapping"),
    ("loader", {}, "loader: expected a vector"),
    ("config", None, "config: expected a mapping"),
    ("data", 7, "data: expected text"),
    ("best_weights", 7, "best_weights: expected a mapping"),
    ("scaler", 7, "scaler: expected a mapping"),
    ("progress.next_epoch", True, "progress.next_epoch: expected a whole number"),
    ("progress.next_epoch", 10**10, "progress.history: expected one line for each"),
    ("progress.next_epoch", HUGE, "progress.next_epoch: expected a whole number"),
    ("progress.stopped", 1, "progress.stopped: expected true or false"),
    ("progress.training_seconds", HUGE, "progress.training_seconds: expected a finite number"),
    ("progress.training_seconds", -1.0, "of at least 0"),
    ("progress.trained_targets", HUGE, "progress.trained_targets: expected a whole number"),
    ("progress.best_score", NAN, "progress.best_score: expected a finite number"),
    ("progress.best_score", None, "progress.best_score: expected a score"),
    ("progress.best_epoch", 2, "progress.best_epoch: 2 of 2 epochs"),
    ("progress.best_epoch", None, "expected both or neither"),
    ("progress.best_result", None, "expected the metrics of the best epoch"),
    ("progress.best_result", {"a": NAN}, "expected the metrics of the best epoch"),
    ("progress.history.0.loss", NAN, "progress.history.0.loss: expected a finite number"),
    ("progress.history.0.valid", {"ndcg@10": HUGE}, "valid.ndcg@10: expected a number"),
    ("progress.history.0.valid", {"ndcg@10": "1"}, "valid.ndcg@10: expected a number"),
    ("progress.history.1.epoch", 5, "one line for each of 2 epochs, in order"),
    ("random.torch", torch.zeros(5056, dtype=torch.uint8), "random: Invalid mt19937 state"),
    ("random.torch", lambda x: x[:100], "random: Expected a CPUGeneratorImplState"),
    ("random.numpy.1", torch.zeros(1, dtype=torch.int64).expand(10**10), "a vector of 624"),
    ("random.numpy.2", 700, "random.numpy.2: expected a whole number of at least 0 and at most"),
    ("random.numpy.4", HUGE, "random.numpy.4: expected a finite number"),
    ("random.python.1", (1, 2), "random: state vector is the wrong size"),
    (ADAM, torch.zeros(2), f"{ADAM}: expected a tensor"),
    (ADAM, lambda x: x.double(), "torch.float32, found a tensor"),
    (ADAM, lambda x: x * NAN, f"{ADAM} holds a value that is no finite number"),
    (ADAM, lambda x: x[:1].expand_as(x), f"{ADAM}: expected strides"),
    (ADAM, lambda x: x.mT.contiguous().mT, f"{ADAM}: expected strides"),
    (ADAM, lambda x: x.to(torch.complex64), f"{ADAM}: expected a tensor"),
    (ADAM, lambda x: torch.empty_like(x, device="meta"), f"{ADAM} cannot be read"),
    (ADAM, _negative, f"{ADAM}: expected a tensor"),
    (f"{ADAM}_sq", lambda x: x - 1, f"{ADAM}_sq holds a value below 0"),
    ("optimizer.state.0.step", torch.tensor(-1.0), "step holds a value below 0"),
    ("optimizer.state.0", {}, "optimizer.state.0 lacks 'step'"),
    ("optimizer.state", {999: {}}, "optimizer.state has an unknown 999"),
    ("optimizer.param_groups", [], "optimizer.param_groups: expected a list of 1"),
    ("weights.state_dict", {}, "weights.state_dict lacks"),
    ("weights.other", {"forward": 7}, "weights.other has an unknown 'forward'"),
    ("best_weights.state_dict.item_embedding.weight", lambda x: x / 0, "no finite number"),
    ("config.model", "Pop", "is of model Pop, not FPARec"),
]
SPARSE = [
    ("weights.other.w.indices", lambda x: x + 10**6, "weights.other.w is no sparse matrix"),
    ("weights.other.w.indptr", lambda x: x[:3], "weights.other.w is no sparse matrix"),
    ("weights.other.w.data", lambda x: x * NAN, "weights.other.w holds a value"),
    ("weights.other.w.data", lambda x: x.to(torch.complex64), "weights.other.w.data: expected"),
    ("weights.other.w.data", lambda x: x.bool(), "weights.other.w.data: expected"),
    ("weights.other.w.data", lambda x: x.requires_grad_(), "expected a sparse matrix"),
    ("weights.other.w.shape", (3, 3), "expected a sparse matrix"),
    ("weights.other.w.shape.0", torch.zeros(2), "expected a sparse matrix"),
    ("weights.other.w.shape.0", torch.zeros(0), "expected a sparse matrix"),
    ("weights.other.w.kind", 7, "expected a sparse matrix"),
]


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


def _damaged(run: Path, where: str, instead: Any, file: Path) -> Path:
    state = checkpoint.load(run / "checkpoint.pt")
    torch.save(_with(state, where, instead), file)
    return file


def _with(value: Any, where: str, instead: Any) -> Any:
    if not where:
        return instead(value) if callable(instead) else copy.copy(instead)
    names = [str(key) for key in value] if isinstance(value, dict) else map(str, range(len(value)))
    name = next(n for n in names if where == n or where.startswith(f"{n}."))
    rest = where[len(name) + 1 :]
    key = next(k for k in value if str(k) == name) if isinstance(value, dict) else int(name)
    changed = list(value) if isinstance(value, tuple) else copy.copy(value)
    changed[key] = _with(value[key], rest, instead)
    return tuple(changed) if isinstance(value, tuple) else changed


@pytest.mark.parametrize(
    ("model", "where", "instead", "said"),
    [("FPARec", *damage) for damage in DAMAGES] + [("ItemKNN", *damage) for damage in SPARSE],
)
def test_a_part_that_is_wrong_is_named(
    runs: dict[str, Path], tmp_path: Path, model: str, where: str, instead: Any, said: str
) -> None:
    made = _new(runs[model])
    file = _damaged(runs[model], where, instead, tmp_path / "checkpoint.pt")
    with pytest.raises((CheckpointError, UsageError)) as refusal:
        training_state.restore(made.trainer, file, made.loaders["train"])
    assert said in str(refusal.value) and str(file) in str(refusal.value)


def test_what_is_right_is_taken(runs: dict[str, Path]) -> None:
    for run in runs.values():
        made = _new(run)
        training_state.restore(made.trainer, run / "checkpoint.pt", made.loaders["train"])
        assert made.trainer.progress.next_epoch == len(made.trainer.progress.history)


def test_what_shares_memory_in_the_file_does_not_in_training(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    state = checkpoint.load(runs["FPARec"] / "checkpoint.pt")
    shared = state["optimizer"]["state"][0]["exp_avg_sq"]
    state["optimizer"]["state"][0]["exp_avg"] = shared
    torch.save(state, tmp_path / "checkpoint.pt")
    made = _new(runs["FPARec"])
    training_state.restore(made.trainer, tmp_path / "checkpoint.pt", made.loaders["train"])
    kept = made.trainer.optimizer.state_dict()["state"][0]
    assert kept["exp_avg"].data_ptr() != kept["exp_avg_sq"].data_ptr()


@pytest.mark.parametrize("instead", [lambda x: x * NAN, lambda x: x.double()])
def test_attach_holds_weights_against_the_model_too(
    runs: dict[str, Path], tmp_path: Path, instead: Any
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text((runs["FPARec"] / "config.yaml").read_text())
    where = "best_weights.state_dict.item_embedding.weight"
    _damaged(runs["FPARec"], where, instead, run / "checkpoint.pt")
    with pytest.raises(UsageError, match=r"init_from: .* best_weights.item_embedding.weight"):
        recbole_pos.attach(run, ["lpe"], run_dir=tmp_path / "new", verbose=False)
