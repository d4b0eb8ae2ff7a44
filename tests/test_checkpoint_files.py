"""Checkpoints: what is on the disk at any moment, what is refused of a file; nothing is run."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from recbole.config import Config
from test_trainer import assert_same, outcome, run

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, StorageError, UsageError
from recbole_pos.experiment import archive, checkpoint, checkpoint_writer
from recbole_pos.experiment import state as training_state
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.checkpoint_writer import SHARE, CheckpointWriter
from recbole_pos.experiment.recbole_file import read
from recbole_pos.experiment.trainer import PosTrainer

pytestmark = pytest.mark.slow

# --- when it is written ---

# the best epoch is neither the first nor the last, and comes more than once
SCORES = [0.1, 0.3, 0.2, 0.2, 0.5, 0.4]


@pytest.fixture(scope="module")
def patched() -> Any:
    """Every epoch is written, and validation has the given scores."""
    evaluate = PosTrainer.evaluate

    def scored(self: PosTrainer, data: Any, *given: Any, **more: Any) -> Any:
        found, phase = evaluate(self, data, *given, **more), data._dataset.phase
        return found if phase != "valid" else {**found, "ndcg@10": SCORES[self.progress.next_epoch]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosTrainer, "evaluate", scored)
        patch.setattr(checkpoint_writer, "SHARE", math.inf)
        yield patch


@pytest.fixture(scope="module")
def moments(patched: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run, and before it copies of its folder: one whenever a checkpoint was written."""
    folder, found, save = tmp_path_factory.mktemp("moments"), [], checkpoint.save

    def frozen(file: Path, state: dict[str, Any]) -> None:
        save(file, state)
        found.append(Path(shutil.copytree(file.parent, folder / str(len(found)))))
        (found[-1] / "lock").unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", frozen)
        run(tiny, folder / "run")
    assert len(found) == 6
    return [*found, folder / "run"]


def test_from_every_checkpoint_to_the_same_bits(moments: list[Path], tmp_path: Path) -> None:
    """Its best weights are those of the best epoch so far, in the file once if they are newest."""
    states = [checkpoint.load(moment / "checkpoint.pt") for moment in moments[:-1]]
    for epoch, state in enumerate(states):
        best = SCORES.index(max(SCORES[: epoch + 1]))
        progress = state["progress"]
        assert (progress["next_epoch"], progress["best_epoch"]) == (epoch + 1, best)
        newest = states[best]["weights"]["state_dict"]
        for name, value in state["best_weights"]["state_dict"].items():
            assert torch.equal(value, newest[name])
    sizes = [(moment / "checkpoint.pt").stat().st_size for moment in moments[:-1]]
    assert max(sizes[0], sizes[1], sizes[4]) < min(sizes[2], sizes[3], sizes[5])
    for epochs in (2, 3, 5):
        folder = Path(shutil.copytree(moments[epochs - 1], tmp_path / str(epochs)))
        recbole_pos.run(resume=folder, verbose=False)
        assert_same(moments[-1], folder)
        assert outcome(folder)[2]["best_epoch"] == 4


def test_a_copy_stays_while_training_changes_its_tensors(tmp_path: Path) -> None:
    """Also the one of a state whose newest weights were the best, which no one changes."""
    weights, best = torch.zeros(2), torch.zeros(2)
    state = {"weights": weights, "best_weights": best, "seen": [weights.view(1, 2)]}
    state["progress"] = progress = {"next_epoch": 1, "best_epoch": 0}
    writer, written = CheckpointWriter(tmp_path / "c", lambda: state), []
    writer._write = written.append  # type: ignore[method-assign]
    writer._due = math.inf
    for _ in range(2):
        with writer:
            writer.keep()
            weights += 1
            progress["next_epoch"] += 1
            writer.keep()
            weights += 1
    assert [float(one["weights"][0]) for one in written] == [1, 3]
    assert [float(one["seen"][0][0, 0]) for one in written] == [1, 3] and not best.any()


def test_writing_takes_a_twentieth_of_the_time(tmp_path: Path, monkeypatch) -> None:
    """An epoch every 15 seconds, writes of two; the newest one is written at the end."""
    clock, progress, saved = [0.0], {"next_epoch": 0, "best_epoch": None}, []

    def save(file: Path, state: dict[str, Any]) -> None:
        clock[0] += 2.0
        saved.append(state["progress"]["next_epoch"])

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(checkpoint_writer, "SHARE", SHARE)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    state = {"progress": progress, "weights": {}, "best_weights": None}
    with CheckpointWriter(tmp_path / "c", lambda: state) as writer:
        for second in range(0, 120, 15):
            clock[0] = float(second)
            progress["next_epoch"] += 1
            writer.keep()
            if writer._thread:
                writer._thread.join()
    assert saved == [1, 4, 7, 8]


@pytest.mark.parametrize("failing", [2, 6])  # in the middle, and the last
def test_a_write_that_fails_stops_the_run(
    tiny: Path, tmp_path: Path, patched: Any, monkeypatch, failing: int
) -> None:
    save, trained, train = checkpoint.save, [], PosTrainer._train_epoch

    def full(file: Path, state: dict[str, Any]) -> None:
        if state["progress"]["next_epoch"] == failing:
            raise StorageError(f"cannot write {file}: No space left on device")
        save(file, state)

    monkeypatch.setattr(checkpoint, "save", full)
    monkeypatch.setattr(
        PosTrainer, "_train_epoch", lambda *a, **k: trained.append(1) or train(*a, **k)
    )
    with pytest.raises(StorageError):
        run(tiny, tmp_path / "run")
    assert len(trained) <= failing + 1
    kept = checkpoint.load(tmp_path / "run" / "checkpoint.pt", ["progress"])["progress"]
    assert kept["next_epoch"] == failing - 1


def test_without_room_for_a_copy(moments, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """It is written before the next epoch begins, by the thread that trains."""
    monkeypatch.setattr(checkpoint_writer, "free_memory", lambda: 1000)
    save, writers = checkpoint.save, set()
    monkeypatch.setattr(
        checkpoint, "save", lambda *a: writers.add(threading.current_thread()) or save(*a)
    )
    run(tiny, tmp_path / "in_place")
    assert writers == {threading.main_thread()}
    assert_same(moments[-1], tmp_path / "in_place")


@pytest.mark.parametrize("stopped_in", [0, 2])
def test_an_interrupt_waits_for_the_write(
    moments, tiny: Path, tmp_path: Path, monkeypatch, stopped_in: int
) -> None:
    """A run that was stopped in its first epoch begins again with --resume."""
    step, save, folder = PosTrainer._step, checkpoint.save, tmp_path / "run"

    def stopping(self: PosTrainer, *given: Any) -> None:
        if self.progress.next_epoch == stopped_in:
            raise KeyboardInterrupt
        step(self, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "save", lambda *a: time.sleep(0.2) or save(*a))
        patch.setattr(PosTrainer, "_step", stopping)
        run(tiny, folder)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    file = folder / "checkpoint.pt"
    assert file.exists() == bool(stopped_in)
    if stopped_in:
        assert checkpoint.load(file, ["progress"])["progress"]["next_epoch"] == stopped_in
    recbole_pos.run(resume=folder, verbose=False)
    assert_same(moments[-1], folder)
    file.unlink()  # of a finished run: nothing begins again
    assert json.loads((folder / "result.json").read_text())
    with pytest.raises(UsageError):
        recbole_pos.run(resume=folder)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "c.pt"
    checkpoint.save(file, {"epoch": 1})
    monkeypatch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        checkpoint.save(file, {"epoch": 2})
    with pytest.raises(TypeError):  # would have to be pickled
        checkpoint.save(file, {"x": object()})
    assert checkpoint.load(file)["epoch"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


# --- parts that are wrong ---

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
    ],
    f"{ADAM}_sq": [lambda x: x - 1],
    "optimizer.state.0.step": [torch.tensor(-1.0)],
    "optimizer.state.0": [{}],
    "optimizer.state": [{999: {}}],
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


def _new(folder: Path) -> Experiment:
    file = str(folder / "config.yaml")
    return prepare(PosConfig(None, None, [file], {"epochs": 3}, strict=False))


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


def test_others_compare_weights_with_their_model_too(
    runs: dict[str, Path], tmp_path: Path, experiment
) -> None:
    state = checkpoint.load(runs["FPARec"] / "checkpoint.pt")
    with pytest.raises(CheckpointError):
        experiment("PARec").trainer.load_weights(state["weights"])
    _refused(
        lambda: experiment("PARec").trainer.resume_checkpoint(
            str(runs["FPARec"] / "checkpoint.pt")
        ),
        "FPARec",
    )
    (tmp_path / "run").mkdir()
    shutil.copy(runs["FPARec"] / "config.yaml", tmp_path / "run")
    where = "best_weights.state_dict.item_embedding.weight"
    torch.save(_with(state, where, lambda x: x.double()), tmp_path / "run/checkpoint.pt")
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
    given = {"data_path": str(tiny), "train_neg_sample_args": None}
    other = {"state_dict": {}, "other_parameter": HARM[harm], "epoch": 1, "cur_step": 0}
    state = {**other, "config": Config("SASRec", "tiny", config_dict=given)}
    state |= {"best_valid_score": 1.0, "optimizer": {"state": {}, "param_groups": []}}
    torch.save(state, "theirs.pth", pickle_protocol=4)
    _refused(lambda: read("theirs.pth"), "theirs.pth")
    assert not Path("touched").exists()
    for part in ("epoch", "cur_step", "best_valid_score", "state_dict", "optimizer"):
        torch.save({**state, "other_parameter": {}, part: ["x"]}, "theirs.pth", pickle_protocol=4)
        _refused(lambda: read("theirs.pth"), part)


def _packed(
    source: Path, target: Path, how: int = zipfile.ZIP_STORED, change: Any = lambda n, d: d
) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", how) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def _compressed(source: Path, target: Path) -> None:
    _packed(source, target, zipfile.ZIP_DEFLATED)


def _many(source: Path, target: Path) -> None:
    """A list of members that is long."""
    _packed(source, target)
    with zipfile.ZipFile(target, "a") as file:
        for number in range(80):
            file.writestr(f"checkpoint/{number}{'x' * 60_000}", b"")


def _too_short(source: Path, target: Path) -> None:
    """A tensor with more numbers than its member has."""
    _packed(source, target, change=lambda n, d: d[:-4] if n.endswith("/data/0") else d)


def _pickled(content: bytes) -> Callable[[Path, Path], None]:
    return lambda source, target: _packed(
        source, target, change=lambda n, d: content if n.endswith("data.pkl") else d
    )


def _flipped(source: Path, target: Path) -> None:
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)


def _program(source: Path, target: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), target)


def _another(source: Path, target: Path) -> None:
    torch.save({"weights": torch.ones(1)}, target)


MADE: dict[str, Callable[[Path, Path], Any]] = {
    "compressed": _compressed,
    "many": _many,
    "too short": _too_short,
    # a dag of tuples is hashed for ever, the memo takes as much memory as its largest number says
    "key": _pickled(b"\x80\x02}K\x01\x85" + b"q\x01h\x01\x86" * 40 + b"K\x01s."),
    "memo": _pickled(b"\x80\x02}r\xff\xff\xff\x7f."),
    "lists": _pickled(b"\x80\x02(" + b"]" * 110_000 + b"1N."),
    "flipped": _flipped,
    "cut": lambda source, target: target.write_bytes(source.read_bytes()[:-100]),
    "empty": lambda source, target: target.write_bytes(b""),
    "two bytes": lambda source, target: target.write_bytes(b"PK"),
    "text": lambda source, target: target.write_bytes(b"best_epoch: 3"),
    "program": _program,
    "another": _another,
    "pickle": lambda source, target: target.write_bytes(pickle.dumps({"x": Call()})),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", MADE)
def test_files_that_torch_does_not_write_are_refused(
    runs: dict[str, Path], tmp_path: Path, monkeypatch, make: str
) -> None:
    monkeypatch.setattr(archive, "_LISTS", 100_000)
    MADE[make](runs["FPARec"] / "checkpoint.pt", file := tmp_path / "file.pt")
    _refused(lambda: checkpoint.load(file), "file.pt")
    _refused(lambda: read(file), "file.pt")
    _refused(lambda: archive.read(tmp_path / "none.pt", checkpoint._refuse), "none.pt")


def test_parts_that_are_missing_are_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c.pt", {"weights": {"state_dict": {}, "other": {}}})
    _refused(lambda: checkpoint.load(tmp_path / "c.pt", ["weights", "optimizer"]), "optimizer")
