"""Searches with real Ray processes: what is written, read, stopped, and what resumes."""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_log, small, write_atomic
from spy import notes
from test_trainer import assert_same, run

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.arguments import SearchArguments
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import StorageError, TrainingError, UsageError
from recbole_pos.experiment.build import prepare, read_dataset
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.reporter import Reporter
from recbole_pos.runs.training_runs import Resources, SharedData, train_run
from recbole_pos.study.study_folder import read_curve
from recbole_pos.tuning import SearchResult
from recbole_pos.tuning import tune as search
from recbole_pos.tuning.search_plan import plan_search, resume_search
from recbole_pos.tuning.trials import BEST, TrialSearch, TrialTable

FAST = {"hidden_size": 16, "inner_size": 16, "MAX_ITEM_LIST_LENGTH": 12, "train_batch_size": 16}
RATE = "learning_rate: {loguniform: [1e-3, 1e-1]}\n"
SPACE = RATE + "hidden_dropout_prob: {quniform: [0, 0.4, 0.2]}\n"


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
) -> tuple[SearchResult, SearchResult, Any]:
    """A search of two trials; the same search, extended to four; what its processes noted."""
    folder, before = tmp_path_factory.mktemp("tune"), len(notes(cluster))
    first = tune(tiny, folder, num_samples=2, max_concurrent=2)
    extended = search(resume=first.folder, num_samples=4, max_concurrent=1, verbose=False)
    return first, extended, notes(cluster)[before:]


def test_the_folder_is_complete(found: Any) -> None:
    _, made, _ = found
    folder = made.folder
    assert {"trials.csv", "test.json", "best.yaml", "best"} <= {*os.listdir(folder)}
    table = pd.read_csv(folder / "trials.csv", float_precision="round_trip")
    assert list(table["trial"]) == [0, 1, 2, 3]
    assert set(table["state"]) == {"finished"} and set(table["epochs"]) == {2}
    for (_, row), trial in zip(table.iterrows(), made.trials, strict=True):
        curve = read_curve(RunFolder(folder / "runs" / f"{trial.number:05d}"), "ndcg@10")
        assert row["valid ndcg@10"] == trial.score == max(curve.values())
        assert row["learning_rate"] == trial.options["learning_rate"]
    assert made.best.score == max(trial.score for trial in made.trials)
    written = read(folder, "test.json")
    assert written["trial"] == made.best.number and written["test"] == made.test
    assert list((folder / "trials").glob("trial_*/events.out.tfevents.*"))  # for TensorBoard


def test_an_extended_search_has_the_trials_of_a_longer_one(found: Any, tmp_path: Path) -> None:
    first, extended, by_workers = found
    assert extended.trials[:2] == first.trials
    plan = resume_search(extended.folder, SearchArguments(), {}, {})
    whole = TrialSearch(TrialTable(tmp_path, plan), Reporter(False))
    for number in range(4):
        whole.suggest(str(number))
    assert [trial.options for trial in extended.trials] == [t.options for t in whole.table.trials]
    assert sum(what == "epoch" for _, what, _ in by_workers) == 4 * 2  # none is trained again


def test_best_yaml_runs_and_repeats_the_trial(found: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = found[1]
    assert main(["run", f"--config_files={made.folder / 'best.yaml'}", "--run_dir=again"]) == 0
    again = read(tmp_path / "again", "result.json")
    assert again["best_valid"]["ndcg@10"] == made.best.score
    assert again["test"] == made.test  # the same weights to the last bit: one thread in both
    loaded = recbole_pos.load(made.run_dir)
    assert dict(loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)) == made.test


def test_test_data_are_read_once_and_by_no_trial(cluster: Path, found: Any, tiny: Path) -> None:
    """And workers read no files, and keep to their cores; nor does a resumed search read them."""
    first, made, by_workers = found
    counts = Counter(what for _, what, _ in by_workers)
    assert counts["file"] == 0 and counts["valid"] > 0  # the spy does see
    assert {count for _, what, count in by_workers if what == "threads"} == {1}
    targets = prepare(PosConfig("FPARec", "tiny", None, {**FAST, "data_path": str(tiny)}))
    tested = [count for _, what, count in by_workers if what == "test"]
    num_best = len({first.best.number, made.best.number})
    assert tested == [len(targets.loaders["test"]._dataset)] * num_best  # a batch each
    testers = {process for process, what, _ in by_workers if what == "test"}
    assert not testers & {process for process, what, _ in by_workers if what == "epoch"}
    before = len(notes(cluster))
    again = search(resume=made.folder, verbose=False)
    assert again.test == made.test and again.best == made.best and len(notes(cluster)) == before


@pytest.fixture(scope="module")
def moved(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A search with ASHA in which trial 3 finds no room on the disk; search and data then move.

    The data can be learned: item n is followed by item n + 1.

    Returns:
        The new folder, with the data in it; the states of the trials; and the error.
    """
    folder = tmp_path_factory.mktemp("search")
    users, steps = np.divmod(np.arange(60 * 12), 12)
    items = (7 * users + steps) % 40
    log = {"user_id": [f"u{u}" for u in users], "item_id": [f"i{i}" for i in items]}
    data = write_atomic(pd.DataFrame({**log, "timestamp": 1.5e9 + steps}), folder / "data")
    np.save(data / "v.npy", np.random.default_rng(0).normal(size=(40, 4)))
    (data / "v.txt").write_text("\n".join(f"i{n}" for n in range(40)))
    space = (
        "n_heads: {choice: [16, 1]}\n"
        "n_layers: {choice: [1, 2], when: {n_heads: 1}}\n"
        "learning_rate: {choice: [0.01, 1e-9], when: {n_layers: 1}}\n"
    )
    given = {"epochs": 6, "stopping_step": 9, "position": "rope", "item_vectors": data / "v.npy"}
    how = {"searcher": "grid", "scheduler": "asha", "grace_epochs": 3, "given": given}
    broken = Path(f"{cluster}.broken")
    broken.touch()
    try:
        with pytest.raises(TrainingError) as raised:
            tune(data, folder, space, "PosSASRec", **how)
    finally:
        broken.unlink()
    trials = read(folder / "out", "trials.json")["trials"]
    return folder.rename(folder.with_name("moved")), trials, str(raised.value)


def test_what_is_hopeless_is_stopped_and_what_is_wrong_is_marked(moved: Any) -> None:
    """Nothing is tested while a trial is lost."""
    folder, trials, error = moved
    assert [trial["state"] for trial in trials] == ["failed", "finished", "stopped", "lost"]
    assert [trial["epochs"] for trial in trials] == [0, 6, 3, 0]
    assert "over 16 heads" in trials[0]["reason"]
    assert "\n" not in error and "1 of 4 trials" in error and "No space left" in error
    assert not (folder / "out" / "test.json").exists() and not (folder / "out" / "best").exists()


def test_a_lost_trial_is_trained_after_a_move(cluster: Path, moved: Any, refused) -> None:
    folder, trials, _ = moved
    out, data = folder / "out", folder / "data"
    resume = ["tune", "--resume", str(out), "--quiet"]
    refused(resume, "data_path")
    resume.append(f"--data_path={data}")
    refused(resume, "item_vectors")
    resume.append(f"--item_vectors={data / 'v.npy'}")
    refused([*resume, "--init_from=x"], "leave out 'init_from'")
    refused([*resume, "--searcher=grid"], "--max_concurrent", "leave out 'searcher'")
    refused([*resume, "--epochs=1"], "leave out 'epochs'")
    before = len(notes(cluster))
    assert main(resume) == 0
    # only the lost trial is trained; the failed one fails again
    assert [n for _, what, n in notes(cluster)[before:] if what == "epoch"] == [*range(6)]
    now = read(out, "trials.json")["trials"]
    assert [trial["state"] for trial in now] == ["failed", "finished", "stopped", "finished"]
    assert now[1:3] == trials[1:3]
    assert (out / "best" / "checkpoint.pt").is_file() and read(out, "test.json")["test"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (StorageError("trials.csv: No space left on device"), 1, "No space left"),
        (KeyboardInterrupt(), 130, "trials.csv has the trials so far"),
    ],
)
def test_a_full_disk_and_ctrl_c_say_how_to_resume(
    cluster: Path, tiny: Path, tmp_path: Path, monkeypatch, capsys, error, code, message
) -> None:
    def fail(self: TrialTable) -> None:
        raise error

    monkeypatch.setattr(TrialTable, "write", fail)
    arguments = ["tune", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}", "--quiet"]
    assert main([*arguments, "--num_samples=2", f"--run_dir={tmp_path / 'out'}"]) == code
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1 and message in printed and "--resume" in printed


def test_wrong_input_leaves_nothing_behind(tiny: Path, tmp_path: Path, refused) -> None:
    words = ["tune", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}"]
    words += [f"--run_dir={tmp_path / 'made/for/it'}"]
    refused([*words, "--eval_args={split: {LS: test_only}}"], "no validation targets")
    refused([*words, "--resume=nowhere"], "nowhere is not the folder of a search")
    assert not os.listdir(tmp_path)


def test_folders_that_are_taken_or_differ(found: Any, tiny: Path, tmp_path: Path) -> None:
    folder = found[1].folder
    with pytest.raises(UsageError, match=f"holds a search already; .*tune --resume {folder}` or"):
        tune(tiny, folder.parent)
    shutil.copy(folder / "search.json", tmp_path)
    data = write_atomic(make_log(seed=1), tmp_path / "other")
    with pytest.raises(UsageError, match="the data, .* are not those that the search began with"):
        search(resume=tmp_path, config_dict={"data_path": str(data)})
    (tmp_path / "trials.json").write_text('{"trials": [')
    with pytest.raises(UsageError, match="trials.json is damaged"):
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
    with pytest.raises(UsageError, match="weights .* are not those"):
        resumed.note_inputs({"data": "1"})


@pytest.fixture
def restart(tiny: Path, tmp_path: Path) -> Callable[[str], TrialSearch]:
    """``restart(folder)``: the searcher of a search with a condition, as each call makes it."""
    (file := tmp_path / "space.yaml").write_text(
        RATE + "n_layers: {randint: [1, 2]}\n"
        "hidden_dropout_prob: {quniform: [0, 0.4, 0.1], when: {n_layers: 2}}\n"
    )
    options = {"data_path": str(tiny)}
    plan = plan_search("FPARec", "tiny", file, [], options, SearchArguments(seed=3))

    def restart_search(folder: str) -> TrialSearch:
        (tmp_path / folder).mkdir(exist_ok=True)
        return TrialSearch(TrialTable(tmp_path / folder, plan), Reporter(False))

    return restart_search


def test_a_resumed_search_samples_what_it_would_have_sampled(restart: Any) -> None:
    """By TPE, which samples at random for ten trials; stopped as trials 2 and 13 had begun."""

    def train(trials: TrialSearch, first: int, last: int) -> None:
        for number in range(first, last + 1):
            rate = trials.suggest(str(number))["run_options"]["learning_rate"]
            trials.on_trial_complete(str(number), {BEST: -rate, "state": "finished", "epoch": 1})

    whole, resumed = restart("whole"), restart("resumed")
    train(whole, 0, 15)
    for first, last in ((0, 1), (2, 12), (13, 15)):
        train(resumed, first, last)
        resumed.suggest("killed")
        resumed = restart("resumed")
    options = [trial.options for trial in whole.table.trials]
    assert [trial.options for trial in resumed.table.trials[:16]] == options
    assert {len(trial) for trial in options} == {2, 3}  # the third only under its condition


def test_trials_without_a_score_are_not_bad_ones(restart: Any) -> None:
    """For Optuna they have failed, whatever they had reported before; resumed, they come first."""
    trials = restart("search")
    asked = {name: trials.suggest(name) for name in "abcd"}
    done = {BEST: 0.1, "state": "finished", "epoch": 1}
    trials.on_trial_result("b", done)
    trials.on_trial_complete("a", done)
    trials.on_trial_complete("b", error=True)
    failed = {BEST: math.nan, "epoch": 0, "state": "failed", "reason": "it diverged"}
    trials.on_trial_complete("c", failed)
    states = [trial.state.name for trial in trials._ot_study.trials]
    assert states == ["COMPLETE", "FAIL", "FAIL", "RUNNING"]
    resumed = restart("search")
    table = resumed.table
    assert table.trials == trials.table.trials and table.find_best() == table.trials[0]
    assert [t.state for t in table.trials] == ["finished", "lost", "failed", "unfinished"]
    assert [resumed.suggest(name) for name in "bcd"] == [asked[name] for name in "bcd"]


def test_a_stopped_winner_is_trained_to_its_end_and_tested(tiny: Path, tmp_path: Path) -> None:
    """It ends with the bits of a run that was never stopped."""
    config = small("FPARec", data_path=str(tiny), epochs=6)
    data, trial = read_dataset(config), tmp_path / "trial"

    def stop(experiment: Any) -> None:  # as Ray's report does, which does not return
        if experiment.trainer.progress.next_epoch == 3:
            raise SystemExit

    with pytest.raises(SystemExit):
        train_run(config.plain, str(trial), SharedData(data), Resources(), report=stop)
    whole = SharedData(data, includes_test=True)
    given = config.plain, str(tmp_path / "best"), whole, Resources()
    assert train_run(*given, tested_run=str(trial))["status"] == "done"
    run(tiny, tmp_path / "undisturbed")
    assert_same(tmp_path / "best", tmp_path / "undisturbed")


def test_a_run_says_why_it_failed(tmp_path: Path) -> None:
    """What the machine is to blame for is marked as lost."""
    for folder, lost in (("elsewhere/run", False), ("run", True)):
        gone = str(tmp_path / "none")
        facts = train_run({}, str(tmp_path / folder), None, Resources(), tested_run=gone)
        assert (facts["status"], facts["lost"]) == ("failed", lost), facts["reason"]
