"""Searches with real Ray processes: what is written, what is read, what is stopped, what fails."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import ray
import torch
from conftest import write_atomic
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from spy import install_spy, notes

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import prepare
from recbole_pos.tune import Found, search

FAST = {
    "hidden_size": 16,
    "inner_size": 16,
    "MAX_ITEM_LIST_LENGTH": 12,
    "train_batch_size": 16,
    "epochs": 2,
}
SPACE = (
    "learning_rate: {loguniform: [1e-3, 1e-1]}\nhidden_dropout_prob: {quniform: [0, 0.4, 0.2]}\n"
)


@pytest.fixture(scope="module")
def spied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray on this machine, two CPUs of it, whose workers note what they read."""
    file = tmp_path_factory.mktemp("spy") / "notes"
    file.touch()
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"worker_process_setup_hook": install_spy(str(file))},
    )
    yield file
    ray.shutdown()


def tune(
    tiny: Path, folder: Path, space: str = SPACE, model: str = "FPARec", **options: Any
) -> Found:
    folder.mkdir(exist_ok=True)
    (folder / "space.yaml").write_text(space)
    given = {**FAST, "data_path": str(tiny), **options.pop("given", {})}
    options = {"searcher": "random", "scheduler": "none", "max_concurrent": 1, **options}
    return search(model, "tiny", folder / "space.yaml", [], given, run_dir=folder / "out",
                  verbose=False, **options)  # fmt: skip


@pytest.fixture(scope="module")
def found(spied: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, list]:
    """A search of four trials, and what was read during it, by this process too."""
    patch = pytest.MonkeyPatch()
    from recbole_pos.data.loaders import TargetLoader

    here, collate = [], TargetLoader.collate_fn

    def collate_fn(self, index):
        here.append((self._dataset.phase, len(index)))
        return collate(self, index)

    patch.setattr(TargetLoader, "collate_fn", collate_fn)
    try:
        made = tune(tiny, tmp_path_factory.mktemp("tune"), num_samples=4, max_concurrent=2)
    finally:
        patch.undo()
    return made, here


def test_the_folder_is_complete(found: tuple[Found, list]) -> None:
    folder = found[0].folder
    names = {"search.json", "trials.csv", "tune.json", "test.json", "best.yaml", "curves.png"}
    names |= {"lock", "trials.jsonl"}
    assert names | {"parallel.png", "importance.png", "best", "trials"} == set(os.listdir(folder))
    with open(folder / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3"]
    assert {row["state"] for row in rows} == {"finished"} and {row["epochs"] for row in rows} == {
        "2"
    }
    for row, trial in zip(rows, found[0].trials, strict=True):
        assert float(row["valid ndcg@10"]) == trial.score == max(trial.curve.values())
        assert float(row["learning_rate"]) == trial.options["learning_rate"]
    written = json.loads((folder / "tune.json").read_text())
    assert written["states"] == {"finished": 4, "stopped": 0, "failed": 0}
    assert written["best"]["valid"] == max(trial.score for trial in found[0].trials)
    assert "test" not in json.dumps(written["best"])  # it is stored apart
    assert json.loads((folder / "test.json").read_text())["test"] == found[0].test
    for picture in ("curves.png", "parallel.png", "importance.png"):
        assert (folder / picture).stat().st_size > 5000


def test_tensorboard_finds_every_trial(found: tuple[Found, list]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder in (found[0].folder / "trials").glob("trial_*"):
        board = EventAccumulator(str(folder))
        board.Reload()
        assert len(board.Scalars("ray/tune/valid")) == 2


def test_best_yaml_runs_as_it_is_and_repeats_the_trial(
    found: tuple[Found, list], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = found[0]
    assert (
        main(["run", "--config_files", str(made.folder / "best.yaml"), "--run_dir", "again"]) == 0
    )
    again = json.loads((tmp_path / "again" / "result.json").read_text())
    assert again["best_valid"]["ndcg@10"] == made.best.score
    assert again["test"] == made.test  # the same weights to the last bit: one thread in both
    loaded = recbole_pos.load(made.folder / "best")
    assert dict(loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)) == made.test


def test_test_data_are_read_once_and_never_by_a_trial(
    spied: Path, found: tuple[Found, list], tiny: Path
) -> None:
    made, here = found
    by_workers = notes(spied)
    workers = {pid for pid, *_ in by_workers}
    assert os.getpid() not in workers and len(workers) >= 1
    counts = Counter(what for _, what, _ in by_workers)
    assert counts["test"] == 0 and counts["valid"] > 0  # the spy does see
    targets = prepare(PosConfig("FPARec", "tiny", None, {**FAST, "data_path": str(tiny)}))
    assert here == [("test", len(targets.loaders["test"]._dataset))]  # one batch, once, at the end


def test_workers_read_no_files_and_keep_to_their_cores(spied: Path, found: Any) -> None:
    by_workers = notes(spied)
    assert not [note for note in by_workers if note[1] == "file"]
    assert {count for _, what, count in by_workers if what == "threads"} == {1}


def test_asha_stops_what_is_hopeless(spied: Path, tmp_path: Path) -> None:
    """On data that can be learned: item n is followed by item n + 1."""
    users, steps = np.divmod(np.arange(60 * 12), 12)
    items = (7 * users + steps) % 40
    log = {"user_id": [f"u{u}" for u in users], "item_id": [f"i{i}" for i in items]}
    write_atomic(pd.DataFrame({**log, "timestamp": 1.5e9 + steps}), tmp_path)
    space = "learning_rate: {choice: [0.01, 1e-9, 2e-9]}\n"
    made = tune(tmp_path, tmp_path, space, searcher="grid", scheduler="asha", grace_epochs=3,
                max_concurrent=1, given={"epochs": 9, "stopping_step": 9})  # fmt: skip
    assert [trial.state for trial in made.trials] == ["finished", "stopped", "stopped"]
    assert [trial.epochs for trial in made.trials] == [9, 3, 3]
    assert made.best.number == 0 and list(made.best.curve) == list(range(1, 10))


class PauseOnce(FIFOScheduler):
    """Pauses every trial after its second epoch; it goes on when all others have."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: set[str] = set()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        if result["epoch"] == 2 and trial.trial_id not in self.paused:
            self.paused.add(trial.trial_id)
            return TrialScheduler.PAUSE
        return TrialScheduler.CONTINUE


@pytest.mark.long
def test_a_paused_trial_goes_on_from_its_own_checkpoint(
    spied: Path, tiny: Path, tmp_path: Path
) -> None:
    before = len(notes(spied))
    made = tune(tiny, tmp_path, num_samples=2, scheduler=PauseOnce(), max_concurrent=1,
                given={"epochs": 4, "learner": "adamw"})  # fmt: skip
    assert [trial.epochs for trial in made.trials] == [4, 4]
    epochs = [note for note in notes(spied)[before:] if note[1] == "threads"]
    assert len(epochs) == 8  # none was trained twice
    best = made.folder / "best.yaml"
    again = recbole_pos.run(config_file_list=[str(best)], run_dir=tmp_path / "b", verbose=False)
    assert again.best_valid["ndcg@10"] == made.best.score  # as if it had never been paused
    ends = [checkpoint.load(folder / "checkpoint.pt")["weights"]["state_dict"]
            for folder in (made.folder / "best", tmp_path / "b")]  # fmt: skip
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


FAILING = """
n_heads: {choice: [16, 1]}                                       # heads of one number do not rotate
learning_rate: {choice: [1.0e+11, 1.0e-3], when: {n_heads: 1}}
"""


def test_failed_trials_are_marked_and_the_search_goes_on(
    spied: Path, tiny: Path, tmp_path: Path
) -> None:
    made = tune(tiny, tmp_path, FAILING, searcher="grid", scheduler="asha", model="PosSASRec",
                given={"learner": "sgd", "position": "rope"})  # fmt: skip
    assert [trial.state for trial in made.trials] == ["failed"] * 2 + ["finished"]
    heads, nan, good = made.trials
    assert "rope rotates pairs" in heads.reason and "over 16 heads" in heads.reason
    assert "loss is" in nan.reason and "learning_rate" in nan.reason
    assert made.best is good and good.options["learning_rate"] == 1e-3
    with open(made.folder / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["reason"]) for row in rows] == [True, True, False]


def test_all_trials_failed_is_one_cause_and_exit_code_1(
    spied: Path, tiny: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "space.yaml").write_text("n_heads: {choice: [16]}\nn_layers: {choice: [1, 2]}\n")
    arguments = ["tune", "-m", "PosSASRec", "-d", "tiny", f"--data_path={tiny}", "--epochs=1"]
    arguments += ["--hidden_size=16", "--position=rope", "--space", str(tmp_path / "space.yaml")]
    arguments += ["--searcher", "grid", "--run_dir", str(tmp_path / "out")]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: all 2 trials failed; the first one: ")
    assert "rope rotates pairs and needs heads of even size" in error
    assert "Traceback" not in error and len(error.splitlines()) == 1
    assert (tmp_path / "out" / "trials.csv").is_file()


@pytest.mark.parametrize("model", ["SRGNN", "BPR"])
def test_models_of_recbole_are_tuned_the_same_way(
    spied: Path, tiny: Path, tmp_path: Path, model: str, capsys
) -> None:
    """By RecBole's own space file; a sequential one and a general one."""
    (tmp_path / "space.hyper").write_text(
        "learning_rate loguniform -8,-4\nembedding_size choice [8,16]\n"
    )
    arguments = ["tune", "-m", model, "-d", "tiny", f"--data_path={tiny}", "--epochs=1"]
    arguments += ["--space", str(tmp_path / "space.hyper"), "--num_samples=2", "--metric=mrr@10"]
    arguments += ["--searcher=optuna", "--max_concurrent=1", f"--run_dir={tmp_path / 'out'}"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "trial   0  finished  mrr@10 0." in printed and "test (once)" in printed
    assert "best of 2 trials" in printed


@pytest.mark.long
def test_a_trial_may_be_several_processes(spied: Path, tiny: Path, tmp_path: Path) -> None:
    """In a placement group; with the result of one process, since dropout is off."""
    space = "learning_rate: {choice: [0.01, 0.02]}\n"
    plain = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}
    for nproc, name in ((1, "one"), (2, "two")):
        (tmp_path / name).mkdir()
        made = tune(tiny, tmp_path / name, space, searcher="grid", given=plain, nproc=nproc)
        assert [trial.state for trial in made.trials] == ["finished"] * 2, made.trials[0].reason
    file = Path("out", "trials", "trial_00001", "checkpoint_000001", "checkpoint.pt")
    one, two = (checkpoint.load(tmp_path / name / file) for name in ("one", "two"))
    for name, tensor in one["weights"]["state_dict"].items():
        torch.testing.assert_close(two["weights"]["state_dict"][name], tensor, rtol=1e-2, atol=2e-4)


def test_wrong_input_leaves_nothing_behind(
    spied: Path, tiny: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "space.yaml").write_text("epochs: 1\nlearing_rate: {uniform: [0, 1]}\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["tune", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}"]
    arguments += ["--run_dir", "made/for/it"]
    for more, message in (
        ([f"--space={tmp_path / 'space.yaml'}"], "space.yaml, line 2: unknown key 'learing_rate'"),
        (["--cpus_per_trial=64"], "--cpus_per_trial: 64 is more than the 2 CPUs"),
        (["--nproc=3"], "--nproc: a trial of 3 processes does not fit"),
        (["--gpus_per_trial=0.5"], "--gpus_per_trial: 0.5 is more than the 0 GPUs"),
        (["--eval_args={split: {LS: test_only}}"], "no validation targets"),
        (["--no_such=1"], "unknown key 'no_such'"),
        ([f"--storage={'x' * 300}"], "--storage: cannot use"),
        ([f"--run_dir={tmp_path / ('x' * 300)}"], "--run_dir: File name too long"),
        ([f"--space={'x' * 300}"], "--space: no file"),
        (["--storage="], "--storage: empty"),
        (["--run_dir="], "--run_dir: empty"),
        (["--resume=nowhere"], "--resume takes everything"),
    ):
        assert main([*arguments, *more]) == 2, more
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1 and len(error) < 700
        assert os.listdir(tmp_path) == ["space.yaml"]
    assert main(["tune", "--resume", str(tmp_path)]) == 2
    assert "is not the folder of a search" in capsys.readouterr().err


def test_a_second_search_does_not_overwrite_the_first(found: Any, tiny: Path) -> None:
    with pytest.raises(UsageError, match="holds a search already"):
        tune(tiny, found[0].folder.parent)


def test_a_finished_search_is_not_tested_again(found: Any, tiny: Path, monkeypatch) -> None:
    monkeypatch.setattr("recbole_pos.tune.driver._test", lambda *a: pytest.fail("tested twice"))
    again = search(resume=found[0].folder, verbose=False)
    assert again.test == found[0].test and again.best.number == found[0].best.number


def test_resume_wants_the_same_data(found: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    plain = json.loads((found[0].folder / "search.json").read_text())
    other = {"data": "other", "fields": {}}
    (copy / "search.json").write_text(json.dumps({**plain, "identity": other}))
    with pytest.raises(UsageError, match="what is held out have changed"):
        search(resume=copy)
    (copy / "search.json").write_text("{}")
    with pytest.raises(UsageError, match="damaged"):
        search(resume=copy)
