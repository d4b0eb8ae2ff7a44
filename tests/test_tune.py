"""Searches with real Ray processes: what is written, read, stopped, and what resumes."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_log, write_atomic
from spy import notes

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.arguments import SearchArguments
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import StorageError, TrainingError, UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.reporter import Reporter
from recbole_pos.runs.worker import Resources, explain_failure, train_run
from recbole_pos.tuning import SearchResult
from recbole_pos.tuning import tune as search
from recbole_pos.tuning.search_plan import plan_search, resume_search
from recbole_pos.tuning.space import parse_space
from recbole_pos.tuning.trials import BEST, Trial, TrialSearch, TrialTable

FAST = {"hidden_size": 16, "inner_size": 16, "MAX_ITEM_LIST_LENGTH": 12, "train_batch_size": 16}
SPACE = (
    "learning_rate: {loguniform: [1e-3, 1e-1]}\nhidden_dropout_prob: {quniform: [0, 0.4, 0.2]}\n"
)


def tune(
    tiny: Path, folder: Path, space: str = SPACE, model: str = "FPARec", **options: Any
) -> SearchResult:
    folder.mkdir(exist_ok=True)
    (folder / "space.yaml").write_text(space)
    given = {**FAST, "epochs": 2, "data_path": str(tiny), **options.pop("given", {})}
    options = {"searcher": "random", "scheduler": "none", "max_concurrent": 1, **options}
    place = {"run_dir": folder / "out", "verbose": False}
    return search(model, "tiny", folder / "space.yaml", [], given, **place, **options)


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def found(
    cluster: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SearchResult, Any]:
    before = len(notes(cluster))
    made = tune(tiny, tmp_path_factory.mktemp("tune"), num_samples=4, max_concurrent=2)
    return made, notes(cluster)[before:]


def test_the_folder_is_complete(found: Any) -> None:
    made, folder = found[0], found[0].folder
    assert {"trials.csv", "test.json", "best.yaml", "best"} <= {*os.listdir(folder)}
    table = pd.read_csv(folder / "trials.csv", float_precision="round_trip")
    assert list(table["trial"]) == [0, 1, 2, 3]
    assert set(table["state"]) == {"finished"} and set(table["epochs"]) == {2}
    for (_, row), trial in zip(table.iterrows(), made.trials, strict=True):
        assert row["valid ndcg@10"] == trial.score == max(trial.curve.values())
        assert row["learning_rate"] == trial.options["learning_rate"]
        # epochs count from 0, as in RecBole and in all other files
        assert row["best_epoch"] == trial.best_epoch == max(trial.curve, key=trial.curve.get)
    assert made.best.score == max(trial.score for trial in made.trials)
    assert made.best.best_epoch == read(folder, "best/result.json")["best_epoch"]
    written = read(folder, "test.json")
    assert written["trial"] == made.best.number and written["test"] == made.test
    assert list((folder / "trials").glob("trial_*/events.out.tfevents.*"))  # for TensorBoard


def test_best_yaml_runs_as_it_is_and_repeats_the_trial(
    found: Any, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = found[0]
    assert main(["run", f"--config_files={made.folder / 'best.yaml'}", "--run_dir=again"]) == 0
    again = read(tmp_path / "again", "result.json")
    assert again["best_valid"]["ndcg@10"] == made.best.score
    assert again["test"] == made.test  # the same weights to the last bit: one thread in both
    loaded = recbole_pos.load(made.run_dir)
    assert dict(loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)) == made.test


def test_test_data_are_read_once_and_never_by_a_trial(
    cluster: Path, found: Any, tiny: Path
) -> None:
    """And workers read no files, and keep to their cores; nor does a resumed search read them."""
    made, by_workers = found
    counts = Counter(what for _, what, _ in by_workers)
    assert counts["file"] == 0 and counts["valid"] > 0  # the spy does see
    assert {count for _, what, count in by_workers if what == "threads"} == {1}
    targets = prepare(PosConfig("FPARec", "tiny", None, {**FAST, "data_path": str(tiny)}))
    tested = [n for n, (_, what, _) in enumerate(by_workers) if what == "test"]
    assert len(tested) == 1  # one batch, once, at the end
    assert by_workers[tested[0]][2] == len(targets.loaders["test"]._dataset)
    assert tested[0] > max(n for n, (_, what, _) in enumerate(by_workers) if what == "epoch")
    before = len(notes(cluster))
    again = search(resume=made.folder, verbose=False)
    assert again.test == made.test and again.best == made.best and len(notes(cluster)) == before


def test_a_search_is_extended(cluster: Path, found: Any, tmp_path: Path, capsys) -> None:
    """As if it had been as long from the start; the test is spent again only for a new best."""
    whole, folder = found[0].folder, tmp_path / "out"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("tests", "test.json", "0000[1-9]"))
    lines = (whole / "trials.csv").read_text().splitlines()
    (folder / "trials.csv").write_text("\n".join(lines[:2]))
    facts = read(folder, "search.json")
    (folder / "search.json").write_text(json.dumps({**facts, "num_samples": 1}))
    assert main(["tune", "--resume", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "best of 1 trial" in printed and "test (once)" in printed
    before = read(folder, "test.json")
    assert before["trial"] == 0
    again = search(resume=folder, num_samples=4, max_concurrent=1, verbose=False)
    assert [t.options for t in again.trials] == [t.options for t in found[0].trials]
    assert (folder / "trials.csv").read_text().splitlines()[1] == lines[1]  # not trained again
    after, expected = read(folder, "test.json"), read(whole, "test.json")
    assert (after["trial"], after["test"]) == (expected["trial"], expected["test"])
    earlier = [one["test"] for one in after["earlier"]]
    assert earlier == ([before["test"]] if after["trial"] else [])


def test_a_resumed_search_samples_what_it_would_have_sampled(
    cluster: Path, tiny: Path, tmp_path: Path, monkeypatch
) -> None:
    """Under a condition, one at a time, stopped as trial 2 begins; TPE: test_tune_space.py."""
    space = (
        "n_layers: {randint: [1, 2]}\nlearning_rate: {loguniform: [1e-3, 1e-1]}\n"
        "hidden_dropout_prob: {choice: [0.1, 0.3], when: {n_layers: 2}}\n"
    )
    how: dict[str, Any] = {"searcher": "optuna", "num_samples": 4, "given": {"epochs": 1}}
    whole = tune(tiny, tmp_path / "whole", space, **how)
    suggest = TrialSearch.suggest

    def stop(self: TrialSearch, trial_id: str) -> Any:
        config = suggest(self, trial_id)
        if config["number"] == 2:
            raise RuntimeError("killed")
        return config

    with monkeypatch.context() as patched, pytest.raises(TrainingError, match="killed"):
        patched.setattr(TrialSearch, "suggest", stop)
        tune(tiny, tmp_path / "killed", space, **how)
    folder = tmp_path / "killed" / "out"
    lines = (folder / "trials.csv").read_text().splitlines()
    assert len(lines) == 4 and lines[3].startswith("2,unfinished")
    before = len(notes(cluster))
    resumed = search(resume=folder, max_concurrent=1, verbose=False)
    assert [t.options for t in resumed.trials] == [t.options for t in whole.trials]
    assert [t.score for t in resumed.trials] == [t.score for t in whole.trials]
    assert all(("hidden_dropout_prob" in t.options) == (t.options["n_layers"] == 2)
               for t in whole.trials)  # fmt: skip
    epochs = [n for _, what, n in notes(cluster)[before:] if what == "epoch"]
    assert len(epochs) == 2  # of trials 2 and 3
    assert (folder / "trials.csv").read_text().splitlines()[1:3] == lines[1:3]


def test_a_lost_trial_is_trained_after_the_search_has_moved(
    cluster: Path, tiny: Path, tmp_path: Path, capsys, refused
) -> None:
    """A trial for which there is no room is no result; the rest is trained where the search and its
    data are now."""
    old, moved, out = tmp_path / "old", tmp_path / "data", tmp_path / "out"
    broken = Path(f"{cluster}.broken")
    shutil.copytree(tiny, old)
    np.save(old / "v.npy", np.random.default_rng(0).normal(size=(40, 4)))
    (old / "v.txt").write_text("\n".join(f"i{n}" for n in range(40)))
    (tmp_path / "space.yaml").write_text("n_layers: {choice: [1, 2]}\n")
    words = ["tune", "-m", "FPARec", "-d", "tiny", f"--data_path={old}", "--searcher=grid"]
    words += [*(f"--{key}={value}" for key, value in FAST.items()), "--epochs=2", "--quiet"]
    words += [f"--space={tmp_path / 'space.yaml'}", f"--run_dir={out}"]
    words += [f"--item_vectors={old / 'v.npy'}"]
    broken.touch()
    try:
        assert main([*words, "--max_concurrent=1"]) == 1
    finally:
        broken.unlink()
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "1 of 2 trials" in error and "No space left" in error
    assert not (out / "test.json").exists() and not (out / "best").exists()
    old.rename(moved)
    out = out.rename(tmp_path / "here")
    resume = ["tune", "--resume", str(out), "--quiet"]
    refused(resume, "data_path")
    resume.append(f"--data_path={moved}")
    refused(resume, "item_vectors")
    resume.append(f"--item_vectors={moved / 'v.npy'}")
    refused([*resume, "--init_from=x"], "leave out 'init_from'")
    refused([*resume, "--metric=mrr@10"], "--max_concurrent", "leave out 'metric'")
    refused([*resume, "--epochs=1"], "leave out 'epochs'")
    before = len(notes(cluster))
    assert main(resume) == 0
    assert [n for _, what, n in notes(cluster)[before:] if what == "epoch"] == [0, 1]
    assert list(pd.read_csv(out / "trials.csv")["state"]) == ["finished"] * 2
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
    how = {"searcher": "grid", "scheduler": "asha", "grace_epochs": 3, "given": given}
    made = tune(tmp_path, tmp_path, space, "PosSASRec", **how)
    assert [trial.state for trial in made.trials] == ["failed", "finished", "failed", "stopped"]
    assert [trial.epochs for trial in made.trials] == [0, 9, 0, 3]
    assert "over 16 heads" in made.trials[0].reason
    assert made.best.number == 1 and list(made.best.curve) == list(range(9))


def test_a_full_disk_is_one_line(
    cluster: Path, tiny: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def refuse(self: TrialTable) -> None:
        raise StorageError("trials.csv: No space left on device")

    monkeypatch.setattr(TrialTable, "write", refuse)
    arguments = ["tune", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}", "--quiet"]
    assert main([*arguments, "--num_samples=2", f"--run_dir={tmp_path / 'out'}"]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "No space left" in error and "--resume" in error


def test_wrong_input_leaves_nothing_behind(
    cluster: Path, tiny: Path, tmp_path: Path, monkeypatch, refused
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["tune", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}"]
    for more, message in (
        (["--eval_args={split: {LS: test_only}}"], "no validation targets"),
        (["--resume=nowhere"], "nowhere is not the folder of a search"),
    ):
        refused([*arguments, "--run_dir=made/for/it", *more], message)
        assert not os.listdir(tmp_path)


def test_folders_that_are_taken_or_differ(found: Any, tiny: Path, tmp_path: Path) -> None:
    folder = found[0].folder
    with pytest.raises(UsageError, match=f"holds a search already; .*tune --resume {folder}` or"):
        tune(tiny, folder.parent)
    for name in ("search.json", "trials.csv"):
        shutil.copy(folder / name, tmp_path)
    data = write_atomic(make_log(seed=1), tmp_path / "other")
    with pytest.raises(UsageError, match="the data, .* have changed"):
        search(resume=tmp_path, config_dict={"data_path": str(data)})
    with open(tmp_path / "trials.csv", "a") as file:
        file.write("4,finished,high\n")
    with pytest.raises(UsageError, match="trials.csv: the row of trial 4 is damaged"):
        search(resume=tmp_path)


# without Ray processes


def test_trials_start_from_the_weights_of_the_first_call(tmp_path: Path) -> None:
    """Which may be in another folder when the search is resumed."""
    folder, args = tmp_path / "search", SearchArguments()
    old, new = tmp_path / "old", tmp_path / "new"
    for path in (folder, old, new):
        path.mkdir()
        (path / "checkpoint.pt").write_bytes(b"1")
    options = {**FAST, "init_from": str(old)}
    begun = plan_search("FPARec", "ml-100k", None, [], options, args)
    begun.note_inputs({"data": "1"})
    (folder / "search.json").write_text(json.dumps(asdict(begun.facts)))
    resumed = resume_search(folder, args, {"init_from": str(new)}, {})
    resumed.note_inputs({"data": "1"})
    (new / "checkpoint.pt").write_bytes(b"2")
    with pytest.raises(UsageError, match="weights .* have changed"):
        resumed.note_inputs({"data": "1"})


def test_trials_without_a_score_are_not_bad_ones(tiny: Path, tmp_path: Path) -> None:
    """For Optuna they have failed, whatever they had reported before; resumed, they come first."""
    given = {"data_path": str(tiny)}
    plan = plan_search("FPARec", "tiny", None, [], given, SearchArguments(num_samples=4))
    table = TrialTable(tmp_path / "trials.csv", plan.space, plan.metric, plan.mode)
    trials = TrialSearch(plan, table, tmp_path, Reporter(False))
    asked = {name: trials.suggest(name) for name in "abcd"}
    done = {BEST: 0.1, "state": "finished", "best_epoch": 0, "epoch": 1, "parameters": 9}
    trials.on_trial_result("b", done)
    trials.on_trial_complete("a", done)
    trials.on_trial_complete("b", error=True)
    trials.on_trial_complete(
        "c", {BEST: math.nan, "epoch": 0, "state": "failed", "reason": "it diverged"}
    )
    states = [trial.state.name for trial in trials._ot_study.trials]
    assert states == ["COMPLETE", "FAIL", "FAIL", "RUNNING"]
    again = TrialTable(table.file, plan.space, plan.metric, plan.mode)
    assert again.trials == table.trials and again.find_best() == table.trials[0]
    assert [t.state for t in again.trials] == ["finished", "lost", "failed", "unfinished"]
    resumed = TrialSearch(plan, again, tmp_path, Reporter(False))
    assert [resumed.suggest(name) for name in "bcd"] == [asked[name] for name in "bcd"]


def test_a_table_is_safe_to_open_and_read_as_it_was(tmp_path: Path) -> None:
    space = parse_space(
        {
            "cell": {"choice": ["=1+1", ["rope"], None, True, 1e-05]},
            "step": {"quniform": [0, 1, 0.1]},
            "whole": {"randint": [-3, 3], "when": {"step": [0.3]}},
            "real": {"loguniform": [1e-9, 1e-2]},
        },
        {},
    )
    table = TrialTable(tmp_path / "trials.csv", space, "ndcg@10", "max")
    for number, value in enumerate(space.parameters[0].values):
        whole = {"whole": -2} if number else {}
        step = 0.3 if number else 0.7
        table.start(number, {"cell": value, "step": step, **whole, "real": 1 / 3e3})
    table.trials[0] = Trial(0, table.trials[0].options, "finished", 0.1 + 0.2, 1, 2, 3.0, 4, "")
    table.write()
    row = pd.read_csv(table.file, dtype=str).iloc[0]
    assert row["cell"] == "'=1+1" and row["epochs"] == "2" and pd.isna(row["whole"])
    assert TrialTable(table.file, space, "ndcg@10", "max").trials == table.trials


def test_a_run_says_why_it_failed(tmp_path: Path) -> None:
    """What the machine is to blame for is marked as lost."""
    for folder, lost in (("elsewhere/run", False), ("run", True)):
        gone = str(tmp_path / "none")
        facts = train_run({}, str(tmp_path / folder), None, Resources(), tested_run=gone)
        assert (facts["status"], facts["lost"]) == ("failed", lost), facts["reason"]
    assert explain_failure(MemoryError()).startswith("out of memory")
