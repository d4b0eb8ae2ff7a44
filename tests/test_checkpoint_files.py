"""Checkpoints: what is on the disk at any moment, what is refused of a file; nothing is run."""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import shutil
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from recbole.config import Config
from test_trainer import assert_same, run

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import archive, checkpoint
from recbole_pos.experiment import state as training_state
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.checkpoint import CheckpointWriter, Progress
from recbole_pos.experiment.recbole_file import read
from recbole_pos.experiment.trainer import PosTrainer

pytestmark = pytest.mark.slow

# --- when it is written ---

# the best epoch is neither the first nor the last, and comes more than once
SCORES = [0.1, 0.3, 0.2, 0.2, 0.5, 0.4]


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}], ids=str)
def test_from_every_checkpoint_to_the_same_bits(
    tiny: Path, tmp_path: Path, monkeypatch, options: dict[str, Any]
) -> None:
    """It has the best weights so far, once if they are the newest (of an average they are not)."""
    evaluate, save, found = PosTrainer.evaluate, checkpoint.save, []

    def scored(self: PosTrainer, data: Any, *given: Any, **more: Any) -> Any:
        result, phase = evaluate(self, data, *given, **more), data._dataset.phase
        score = SCORES[self.progress.next_epoch] if phase == "valid" else None
        return result if score is None else {**result, "ndcg@10": score}

    def frozen(file: Path, state: dict[str, Any]) -> None:
        save(file, state)
        found.append(Path(shutil.copytree(file.parent, tmp_path / str(len(found)))))
        (found[-1] / "lock").unlink()

    monkeypatch.setattr(PosTrainer, "evaluate", scored)
    monkeypatch.setattr(checkpoint, "SHARE", math.inf)  # every epoch is written
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", frozen)
        run(tiny, tmp_path / "run", **options)
    assert len(found) == 6
    states = [checkpoint.load(folder / "checkpoint.pt") for folder in found]
    for epoch, state in enumerate(states):
        best = SCORES.index(max(SCORES[: epoch + 1]))
        assert (state["progress"]["next_epoch"], state["progress"]["best_epoch"]) == (
            epoch + 1,
            best,
        )
        newest = states[best]["best_weights"]["state_dict"]
        for name, value in state["best_weights"]["state_dict"].items():
            assert torch.equal(value, newest[name])
    sizes = [(folder / "checkpoint.pt").stat().st_size for folder in found]
    assert options or max(sizes[0], sizes[1], sizes[4]) < min(sizes[2], sizes[3], sizes[5])
    for epochs in (2, 3, 5):
        recbole_pos.run(resume=found[epochs - 1], verbose=False)
        assert_same(tmp_path / "run", found[epochs - 1])


def test_writing_takes_a_twentieth_of_the_time(tmp_path: Path, monkeypatch) -> None:
    """An epoch every 15 seconds, writes of two; the newest waits as a copy, and is written at the
    end, also if its write was stopped."""
    clock, saved, stops = [0.0], [], []
    weights, progress = torch.zeros(2), Progress()

    def save(file: Path, state: dict[str, Any]) -> None:
        if stops:
            raise stops.pop()
        clock[0] += 2.0
        saved.append((state["progress"]["next_epoch"], float(state["weights"]["x"][0])))

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    state = {"progress": vars(progress), "weights": {"x": weights}, "best_weights": None}
    writer = CheckpointWriter(tmp_path / "c", lambda: state)
    for second in range(0, 120, 15):
        clock[0] = float(second)
        progress.next_epoch += 1
        writer.keep()
        weights += 1
    writer.flush()
    writer.flush()
    assert saved == [(1, 0), (4, 3), (7, 6), (8, 7)]
    clock[0], progress.next_epoch = 1000.0, 9
    stops.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        writer.keep()
    writer.flush()
    assert saved[4:] == [(9, 8)]


# --- parts that are wrong ---

HUGE, NAN = 2**2000, math.nan
ADAM = "optimizer.state.0.exp_avg"
# where; what stands there instead (a function: of what stood there)
DAMAGES: dict[str, list[Any]] = {
    "config": [None, {1: 2}],
    "config.model": ["Pop", torch.ones(2)],
    "data": [7],
    "progress": [None, {"surprise": 1}],
    "progress.next_epoch": [-1, HUGE],
    "progress.training_seconds": [-1.0],
    "progress.best_score": [NAN],
    "progress.best_result": [{"a": NAN}],
    "progress.history": [7, [7]],
    "progress.history.0.valid": [{"ndcg@10": HUGE}, {"a\n" * 9999: "x"}],
    "weights.state_dict": [{}],
    "weights.other": [{"forward": 7}],
    "best_weights": [7],
    "best_weights.state_dict.item_embedding.weight": [lambda x: x / 0, lambda x: x.double()],
    ADAM: [
        torch.zeros(2),
        lambda x: x * NAN,
        lambda x: x[:1].clone().expand_as(x),
        lambda x: torch.empty_like(x, device="meta"),
        lambda x: torch.complex(x, x).conj().imag,  # its negative bit is set
        lambda x: x.to_sparse(),
        lambda x: torch.nested.nested_tensor([x, x]),
    ],
    "optimizer.state.0": [{}],
    "optimizer.state": [{999: {}}],
    "scaler": [7],
    "random": [7],
    "random.torch": [torch.zeros(5056, dtype=torch.uint8), lambda x: x[:100]],
    "random.numpy.1": [torch.zeros(1, dtype=torch.int64).expand(10**10)],
    "random.numpy.2": [700],  # numpy would read beyond its words
    "random.numpy.4": [HUGE],
    "random.python.1": [(1, 2)],
    "loader": [{}],
}
SPARSE: dict[str, list[Any]] = {
    "weights.other.w.indices": [lambda x: x + 10**6],
    "weights.other.w.indptr": [lambda x: x[:3]],
    "weights.other.w.data": [lambda x: x[:, None]],
    "weights.other.w.shape": [(3, 3)],
    "weights.other.w.kind": [7],
}
MODELS = {"FPARec": DAMAGES, "ItemKNN": SPARSE}


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of a model with weights, and of one with sparse matrices."""
    folder = tmp_path_factory.mktemp("runs")
    neighbours = {"data_path": str(tiny), "show_progress": False, "k": 5}
    for model, given in (("FPARec", {**SMALL, "data_path": str(tiny)}), ("ItemKNN", neighbours)):
        recbole_pos.run(model, "tiny", None, given, run_dir=folder / model, verbose=False)
    return {model: folder / model for model in MODELS}


def _new(folder: Path) -> Experiment:
    file = str(folder / "config.yaml")
    return prepare(PosConfig(None, None, [file], {"epochs": 1000}, strict=False))


def _state(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint as torch reads it."""
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def _with(value: Any, where: str, instead: Any) -> Any:
    """A copy of a tree in which one part is replaced."""
    if not where:
        return instead(value) if callable(instead) else copy.copy(instead)
    names = [str(key) for key in value] if isinstance(value, dict) else map(str, range(len(value)))
    name = next(n for n in names if where == n or where.startswith(f"{n}."))
    key = next(k for k in value if str(k) == name) if isinstance(value, dict) else int(name)
    changed = list(value) if isinstance(value, tuple) else copy.copy(value)
    changed[key] = _with(value[key], where[len(name) + 1 :], instead)
    return tuple(changed) if isinstance(value, tuple) else changed


def _refused(act: Callable[[], Any], *names: str) -> None:
    """It ends in one line that has these words."""
    with pytest.raises((CheckpointError, UsageError)) as refusal:
        act()
    text = str(refusal.value)
    assert "\n" not in text and len(text) < 1000 and all(name in text for name in names)


@pytest.mark.parametrize("model", MODELS)
def test_a_part_that_is_wrong_is_refused(runs: dict[str, Path], tmp_path: Path, model: str) -> None:
    state, made = _state(runs[model]), _new(runs[model])
    file, taken = tmp_path / "checkpoint.pt", []
    for where, values in MODELS[model].items():
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
    training_state.restore(made.trainer, runs[model] / "checkpoint.pt", made.loaders["train"])
    assert made.trainer.progress.next_epoch == len(made.trainer.progress.history) > 0


def test_what_was_restored_is_no_part_of_the_file(runs: dict[str, Path], tmp_path: Path) -> None:
    """Also if the file is written over while the training goes on."""
    state, made = _state(runs["FPARec"]), _new(runs["FPARec"])
    file = Path(shutil.copy(runs["FPARec"] / "checkpoint.pt", tmp_path))
    training_state.restore(made.trainer, file, made.loaders["train"])
    file.write_bytes(b"\xff" * file.stat().st_size)
    kept = made.trainer.optimizer.state_dict()["state"]
    for number, values in state["optimizer"]["state"].items():
        assert all(torch.equal(kept[number][name], value) for name, value in values.items())
    for name, value in state["best_weights"]["state_dict"].items():
        assert torch.equal(made.trainer.best_weights["state_dict"][name], value)


def test_others_compare_weights_with_their_model_too(
    runs: dict[str, Path], tmp_path: Path, experiment
) -> None:
    state, file = _state(runs["FPARec"]), runs["FPARec"] / "checkpoint.pt"
    _refused(lambda: experiment("PARec").trainer.load_weights(state["weights"]))
    _refused(lambda: experiment("PARec").trainer.resume_checkpoint(str(file)), "FPARec")
    _refused(lambda: checkpoint.load(file, ["weights", "nothing"]), "nothing")
    with pytest.raises(TypeError):  # would have to be pickled
        checkpoint.save(tmp_path / "c.pt", {"data": object()})
    shutil.copytree(runs["FPARec"], tmp_path / "run")
    where = "best_weights.state_dict.item_embedding.weight"
    torch.save(_with(state, where, lambda x: x.double()), tmp_path / "run/checkpoint.pt")
    _refused(lambda: recbole_pos.attach(tmp_path / "run", ["lpe"], run_dir="new"), "init_from")


# --- files made to harm ---


def _dag(kind: type) -> Any:
    value: Any = kind([1])
    for _ in range(40):
        value = kind([value, value])
    return value


def _cycle() -> list:
    value: list = []
    value.append(value)
    return value


def _nested(depth: int) -> list:
    return [_nested(depth - 1)] if depth else []


class Call:
    """Pickled, it is a call."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("touched",)


HARM: dict[str, Any] = {
    "dag of lists": _dag(list),
    "dag of tuples": _dag(tuple),
    "cycle": _cycle(),
    "deep": _nested(200),
    "many": [[] for _ in range(11_000)],
    "call": Call(),
}


@pytest.mark.parametrize("harm", HARM)
def test_values_without_end_are_refused(
    runs: dict[str, Path], tiny: Path, tmp_path: Path, monkeypatch, harm: str
) -> None:
    """Of both kinds of file, before they take time or memory; and nothing is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(archive, "_CONTAINERS", 10_000)
    torch.save({**_state(runs["FPARec"]), "config": {"a": HARM[harm]}}, "checkpoint.pt")
    _refused(lambda: checkpoint.load("checkpoint.pt"), "checkpoint.pt")
    given = {"data_path": str(tiny), "train_neg_sample_args": None}
    state = {"state_dict": {}, "epoch": 1, "cur_step": 0, "other_parameter": {"a": HARM[harm]}}
    state |= {"config": Config("SASRec", "tiny", config_dict=given), "best_valid_score": 1.0}
    state |= {"optimizer": {"state": {}, "param_groups": []}}
    torch.save(state, "theirs.pth", pickle_protocol=4)
    _refused(lambda: read("theirs.pth"), "theirs.pth")
    for part in ("epoch", "cur_step", "best_valid_score", "state_dict", "optimizer"):
        torch.save({**state, "other_parameter": {}, part: ["x"]}, "theirs.pth", pickle_protocol=4)
        _refused(lambda: read("theirs.pth"), part)
    assert not Path("touched").exists()


def _packed(
    source: Path, target: Path, how: int = zipfile.ZIP_STORED, change: Any = lambda n, d: d
) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", how) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def _pickled(content: bytes) -> Callable[[Path, Path], None]:
    return lambda source, target: _packed(
        source, target, change=lambda n, d: content if n.endswith("data.pkl") else d
    )


def _too_long(source: Path, target: Path) -> None:
    """A tensor with a million numbers of which the file has ten."""
    torch.save(torch.arange(10.0), part := target.with_suffix(".part"))
    _packed(part, target, change=lambda n, d: d.replace(b"K\n", b"J\x40\x42\x0f\x00"))


def _flipped(source: Path, target: Path) -> None:
    """Another number in a tensor; what stands between members is no part of a checkpoint."""
    content = bytearray(source.read_bytes())
    with zipfile.ZipFile(source) as file:
        (name,) = (name for name in file.namelist() if name.endswith("/data/0"))
        content[content.find(file.read(name))] ^= 1
    target.write_bytes(content)


MADE: dict[str, Callable[[Path, Path], Any]] = {
    "compressed": lambda source, target: _packed(source, target, zipfile.ZIP_DEFLATED),
    "too long": _too_long,
    # a dag of tuples is hashed for ever, the memo takes as much memory as its largest number says
    "key": _pickled(b"\x80\x02}K\x01\x85" + b"q\x01h\x01\x86" * 40 + b"K\x01s."),
    "keys": _pickled(b"\x80\x02}(K\x01\x85" + b"q\x01h\x01\x86" * 40 + b"K\x01u."),
    "memo": _pickled(b"\x80\x02}r\xff\xff\xff\x7f."),
    "flipped": _flipped,
    "cut": lambda source, target: target.write_bytes(source.read_bytes()[:-100]),
    "empty": lambda source, target: target.write_bytes(b""),
    "two bytes": lambda source, target: target.write_bytes(b"PK"),
    "text": lambda source, target: target.write_bytes(b"best_epoch: 3"),
    "program": lambda _, target: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), target),
    "another": lambda source, target: torch.save({"weights": torch.ones(1)}, target),
    "pickle": lambda source, target: target.write_bytes(pickle.dumps({"x": Call()})),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_files_that_torch_does_not_write_are_refused(
    runs: dict[str, Path], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, make in MADE.items():
        make(runs["FPARec"] / "checkpoint.pt", file := tmp_path / f"{name}.pt")
        _refused(lambda file=file: checkpoint.load(file), file.name)
        _refused(lambda file=file: read(file), file.name)
    _refused(lambda: read(tmp_path / "none.pt"), "none.pt")
    assert not Path("touched").exists()


# --- any damage ---

ANYTHING = [None, 7, -1, 2**70, True, {}, [], (), "text", NAN, -1.5, torch.zeros(2), torch.zeros(0)]
TENSORS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x[None],
    lambda x: x.double(),
    lambda x: x.flatten()[:1],
    lambda x: torch.zeros(1).expand(x.shape or (3,)),
    lambda x: torch.empty(x.shape, device="meta"),
    lambda x: torch.zeros(tuple(x.shape)[::-1]).T if x.dim() > 1 else torch.zeros(7),
    lambda x: -x.float() - 1,
    lambda x: x.float() / 0,
]


def _paths(value: Any, here: str = "") -> list[str]:
    parts = value.items() if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple)):
        parts = list(enumerate(value))[:8]  # of 625 words a few will do
    own = [here] if here else []
    return own + [path for key, part in parts for path in _paths(part, f"{here}.{key}".strip("."))]


def _damage(content: bytes, state: dict[str, Any], file: Path, seed: int) -> str:
    """Write a checkpoint in which a byte has another value, or a part is something else."""
    draw = random.Random(seed)
    if seed % 2:
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= draw.randrange(1, 256)
        file.write_bytes(changed)
        return "flip"
    paths = _paths(state)
    depth = draw.choice(sorted({path.count(".") for path in paths}))  # each is as likely
    where = draw.choice([path for path in paths if path.count(".") == depth])

    def instead(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor) and draw.random() < 0.7
        return draw.choice(TENSORS)(value) if is_tensor else copy.copy(draw.choice(ANYTHING))

    torch.save(_with(state, where, instead), file)
    return where


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_every_damage_is_refused_or_harmless(
    runs: dict[str, Path], tmp_path: Path, request, record_property, model: str
) -> None:
    """A file that corrupts memory ends this process: then its case is the last that is printed."""
    whole, file = runs[model] / "checkpoint.pt", tmp_path / "damaged.pt"
    content, state = whole.read_bytes(), _state(runs[model])
    made, outcomes = _new(runs[model]), Counter()
    for seed in range(1000 if request.config.getoption("--fuzz") else 24):
        what = _damage(content, state, file, seed)
        print(seed, what, flush=True)
        try:
            training_state.restore(made.trainer, file, made.loaders["train"])
        except (CheckpointError, UsageError) as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["accepted"] += 1
        if what == "flip":
            for name, value in made.model.state_dict().items():
                assert torch.equal(value, state["weights"]["state_dict"][name])
        batches = made.trainer.training_loader(made.loaders["train"])
        try:
            made.trainer._train_epoch(batches, made.trainer.progress.next_epoch)
        except recbole_pos.errors.TrainingError:  # of moments without a root: the loss says so
            outcomes["accepted, then refused"] += 1
        made = _new(runs[model])
    counts = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    record_property("fuzz", f"{model}, {outcomes.total()} checkpoints: {counts}")
