"""Searches with real Ray processes: what is written, read, stopped, and what resumes."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import write_atomic
from spy import notes

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.loaders import TargetLoader
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.tuning import Found, search
from recbole_pos.tuning.record import Record

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


def tune(
    tiny: Path, folder: Path, space: str = SPACE, model: str = "FPARec", **options: Any
) -> Found:
    folder.mkdir(exist_ok=True)
    (folder / "space.yaml").write_text(space)
    given = {**FAST, "data_path": str(tiny), **options.pop("given", {})}
    options = {"searcher": "random", "scheduler": "none", "max_concurrent": 1, **options}
    return search(model, "tiny", folder / "space.yaml", [], given, run_dir=folder / "out",
                  verbose=False, **options)  # fmt: skip


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def found(cluster: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Any]:
    """A search of four trials, what this process read during it, and what its workers did."""
    here, collate, before = [], TargetLoader.collate_fn, len(notes(cluster))

    def collate_fn(self, index):
        here.append((self._dataset.phase, len(index)))
        return collate(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetLoader, "collate_fn", collate_fn)
        made = tune(tiny, tmp_path_factory.mktemp("tune"), num_samples=4, max_concurrent=2)
    return made, (here, notes(cluster)[before:])


def test_the_folder_is_complete(found: Any) -> None:
    folder = found[0].folder
    names = {"search.json", "trials.csv", "tune.json", "test.json", "best.yaml", "curves.png"}
    names |= {"lock", "trials.jsonl", "options.png", "importance.png", "best", "runs", "trials"}
    assert names == set(os.listdir(folder))
    with open(folder / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3"]
    assert {(row["state"], row["epochs"]) for row in rows} == {("finished", "2")}
    for row, trial in zip(rows, found[0].trials, strict=True):
        assert float(row["valid ndcg@10"]) == trial.score == max(trial.curve.values())
        assert float(row["learning_rate"]) == trial.options["learning_rate"]
    written = read(folder, "tune.json")
    assert written["states"] == {"finished": 4, "stopped": 0, "failed": 0}
    assert written["best"]["valid"] == max(trial.score for trial in found[0].trials)
    assert "test" not in json.dumps(written["best"])  # it is stored apart
    assert read(folder, "test.json")["test"] == found[0].test


def test_tensorboard_finds_every_trial(found: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = list((found[0].folder / "trials").glob("trial_*"))
    assert len(folders) == 4
    for folder in folders:
        board = EventAccumulator(str(folder))
        board.Reload()
        assert len(board.Scalars("ray/tune/valid")) == 2


def test_best_yaml_runs_as_it_is_and_repeats_the_trial(
    found: Any, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = found[0]
    assert (
        main(["run", "--config_files", str(made.folder / "best.yaml"), "--run_dir", "again"]) == 0
    )
    again = read(tmp_path / "again", "result.json")
    assert again["best_valid"]["ndcg@10"] == made.best.score
    assert again["test"] == made.test  # the same weights to the last bit: one thread in both
    loaded = recbole_pos.load(made.folder / "best")
    assert dict(loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)) == made.test


def test_test_data_are_read_once_and_never_by_a_trial(found: Any, tiny: Path) -> None:
    """And workers read no files, and keep to their cores."""
    here, by_workers = found[1]
    assert by_workers and os.getpid() not in {pid for pid, *_ in by_workers}
    counts = Counter(what for _, what, _ in by_workers)
    assert counts["test"] == counts["file"] == 0 and counts["valid"] > 0  # the spy does see
    assert {count for _, what, count in by_workers if what == "threads"} == {1}
    targets = prepare(PosConfig("FPARec", "tiny", None, {**FAST, "data_path": str(tiny)}))
    assert here == [("test", len(targets.loaders["test"]._dataset))]  # one batch, once, at the end


def test_a_finished_search_is_not_tested_again(found: Any, monkeypatch) -> None:
    monkeypatch.setattr(
        "recbole_pos.tuning.tuning.load_best", lambda *a: pytest.fail("tested twice")
    )
    again = search(resume=found[0].folder, verbose=False)
    assert again.test == found[0].test and again.best.number == found[0].best.number


def test_a_search_is_extended(cluster: Path, found: Any, tmp_path: Path, capsys) -> None:
    """As if it had been as long from the start; the test is spent again only for a new best."""
    whole, folder = found[0].folder, tmp_path / "out"
    shutil.copytree(whole, folder)
    for name in ("best", "trials", *(f"runs/0000{n}" for n in (1, 2, 3))):
        shutil.rmtree(folder / name)
    (folder / "test.json").unlink()
    lines = (folder / "trials.jsonl").read_text().splitlines(keepends=True)
    first = [line for line in lines if json.loads(line)["trial"] == 0]
    (folder / "trials.jsonl").write_text("".join(first) + lines[-1][:20])  # cut off by a kill
    (folder / "search.json").write_text(
        json.dumps({**read(folder, "search.json"), "num_samples": 1})
    )
    resume = ["tune", "--resume", str(folder), "--quiet"]
    assert main(resume) == 0
    before = read(folder, "test.json")
    assert before["trial"] == 0
    assert main([*resume, "--num_samples=4", "--max_concurrent=1"]) == 0
    options = [[t.options for t in Record(f / "trials.jsonl").trials] for f in (folder, whole)]
    assert options[0] == options[1]
    best, expected = (read(path, "tune.json")["best"] for path in (folder, whole))
    assert best == expected
    after = read(folder, "test.json")
    assert after["trial"] == best["trial"] and after["test"] == read(whole, "test.json")["test"]
    assert after.get("earlier", []) == ([before] if best["trial"] else [])
    assert main([*resume, "--num_samples=3"]) == 2 and "--num_samples" in capsys.readouterr().err


def test_lost_moved_and_resumed(cluster: Path, tiny: Path, tmp_path: Path, capsys) -> None:
    """A trial for which there is no room is no result; the rest is trained where the search, its
    data and its storage are now."""
    old, moved, out = tmp_path / "old", tmp_path / "data", tmp_path / "out"
    storage, broken = tmp_path / "storage", Path(f"{cluster}.broken")
    shutil.copytree(tiny, old)
    (tmp_path / "space.yaml").write_text("n_layers: {choice: [1, 2]}\n")
    words = ["tune", "-m", "FPARec", "-d", "tiny", f"--data_path={old}", "--searcher=grid"]
    words += [*(f"--{key}={value}" for key, value in FAST.items()), "--quiet"]
    words += [f"--space={tmp_path / 'space.yaml'}", f"--run_dir={out}", f"--storage={storage}"]
    broken.touch()
    try:
        assert main([*words, "--max_concurrent=1"]) == 1
    finally:
        broken.unlink()
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "1 of 2 trials" in error and "No space left" in error
    assert not (out / "test.json").exists() and not (out / "best").exists()
    assert [trial.state for trial in Record(out / "trials.jsonl").trials] == ["finished", "lost"]
    old.rename(moved)
    storage.rename(tmp_path / "elsewhere")
    out = out.rename(tmp_path / "here")
    settings = read(out, "search.json")
    (out / "search.json").write_text(json.dumps({**settings, "cpus_per_trial": 64}))
    resume = ["tune", "--resume", str(out), "--quiet", f"--storage={tmp_path / 'elsewhere'}"]
    assert main(resume) == 2 and "data_path" in capsys.readouterr().err
    resume.append(f"--data_path={moved}")
    assert main(resume) == 2 and "--cpus_per_trial" in capsys.readouterr().err
    before = len(notes(cluster))
    assert main([*resume, "--cpus_per_trial=1"]) == 0
    assert [n for _, what, n in notes(cluster)[before:] if what == "epoch"] == [0, 1]
    assert read(out, "tune.json")["states"]["finished"] == 2 and not storage.exists()
    assert (out / "best" / "checkpoint.pt").is_file() and read(out, "test.json")["test"]


def test_what_is_hopeless_is_stopped_and_what_is_wrong_is_marked(
    cluster: Path, tmp_path: Path
) -> None:
    """On data that can be learned: item n is followed by item n + 1."""
    users, steps = np.divmod(np.arange(60 * 12), 12)
    items = (7 * users + steps) % 40
    log = {"user_id": [f"u{u}" for u in users], "item_id": [f"i{i}" for i in items]}
    write_atomic(pd.DataFrame({**log, "timestamp": 1.5e9 + steps}), tmp_path)
    space = "learning_rate: {choice: [0.01, 1e-9]}\nn_heads: {choice: [16, 1]}\n"
    given = {"epochs": 9, "stopping_step": 9, "position": "rope"}
    made = tune(tmp_path, tmp_path, space, "PosSASRec", searcher="grid", scheduler="asha",
                grace_epochs=3, given=given)  # fmt: skip
    heads = made.trials[0]
    assert [trial.state for trial in made.trials] == ["failed", "finished", "failed", "stopped"]
    assert [trial.epochs for trial in made.trials] == [0, 9, 0, 3]
    assert "rope rotates pairs" in heads.reason and "over 16 heads" in heads.reason
    assert made.best.number == 1 and list(made.best.curve) == list(range(1, 10))
    with open(made.folder / "trials.csv", newline="") as file:
        assert [bool(row["reason"]) for row in csv.DictReader(file)] == [True, False, True, False]


def test_a_general_model_by_the_space_of_recbole(
    cluster: Path, tiny: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "space.hyper").write_text(
        "learning_rate loguniform -8,-4\nembedding_size choice [8,16]\n"
    )
    arguments = ["tune", "-m", "BPR", "-d", "tiny", f"--data_path={tiny}", "--epochs=1"]
    arguments += ["--space", str(tmp_path / "space.hyper"), "--num_samples=2", "--metric=mrr@10"]
    arguments += ["--searcher=optuna", "--max_concurrent=1", f"--run_dir={tmp_path / 'out'}"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "trial   0  finished  mrr@10 0." in printed and "test (once)" in printed
    assert "best of 2 trials" in printed


def test_a_full_disk_is_one_line(cluster: Path, tiny: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trials.jsonl").symlink_to("/dev/full")
    arguments = ["tune", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}", "--quiet"]
    assert main([*arguments, "--num_samples=2", f"--run_dir={tmp_path / 'out'}"]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "trials.jsonl" in error and "--resume" in error


def test_wrong_input_leaves_nothing_behind(
    cluster: Path, tiny: Path, tmp_path: Path, monkeypatch, capsys
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
        ([f"--storage={'x' * 300}"], "--storage: cannot use"),
        ([f"--run_dir={tmp_path / ('x' * 300)}"], "File name too long"),
        ([f"--space={'x' * 300}"], "--space: no file"),
        (["--storage="], "--storage: empty"),
        (["--run_dir="], "run_dir is empty"),
        (["--resume=nowhere"], "--resume takes everything"),
    ):
        assert main([*arguments, *more]) == 2, more
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1 and len(error) < 700
        assert os.listdir(tmp_path) == ["space.yaml"]


def test_folders_that_are_taken_or_differ(found: Any, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds a search"):
        tune(tiny, found[0].folder.parent)
    other = {**read(found[0].folder, "search.json"), "identity": {"data": "other", "fields": {}}}
    (tmp_path / "search.json").write_text(json.dumps(other))
    with pytest.raises(UsageError, match="what is held out have changed"):
        search(resume=tmp_path)
