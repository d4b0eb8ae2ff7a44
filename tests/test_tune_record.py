"""The record of a search, from which it is resumed: cut off, damaged, or of an earlier version."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from ray.tune.schedulers import FIFOScheduler

from recbole_pos.config.arguments import SearchArguments
from recbole_pos.errors import UsageError
from recbole_pos.runs.searchers import BEST, SEARCHERS
from recbole_pos.runs.space import Parameter, Space
from recbole_pos.tune import search
from recbole_pos.tune.record import Record, adopt
from recbole_pos.tune.settings import SearchFolder, Settings, read_settings, resumed_settings

SPACE = Space(
    [
        Parameter("n_layers", "choice", [1, 2, 3], "here"),
        Parameter("dropout", "quniform", [0.0, 0.5, 0.1], "here"),
        Parameter("window", "randint", [3, 9], "here", {"n_layers": [2]}),
        Parameter("learning_rate", "loguniform", [1e-4, 1e-1], "here"),
    ]
)
GRID = Space([p for p in SPACE.parameters if p.kind != "loguniform"])


@pytest.mark.parametrize("name", list(SEARCHERS))
def test_a_searcher_recalls_what_it_asked(name: str) -> None:
    """A new one stands as the old one did: the same trials, told the same; new ones differ."""
    space = GRID if name == "grid" else SPACE
    old, new = (SEARCHERS[name](space, "max", 3) for _ in range(2))
    asked = [old.suggest(f"t{n}")["options"] for n in range(8)]
    told = {n: {BEST: n / 10} for n in (0, 2, 3)}
    for n, options in enumerate(asked):
        new.recall(f"t{n}", options)
    for searcher in (old, new):
        for n, result in told.items():
            searcher.on_trial_complete(f"t{n}", result)
        searcher.on_trial_complete("t1", None, error=True)
    assert new.numbers == old.numbers == {f"t{n}": n for n in range(8)}
    if name == "optuna":
        trials = [
            [(t.number, t.state, t.params, t.value) for t in searcher.study.trials]
            for searcher in (old, new)
        ]
        assert trials[0] == trials[1] and set(old.asked) == set(new.asked)
    assert new.suggest("t8") == old.suggest("t8")


def begun(number: int, **more: Any) -> dict[str, Any]:
    return {"trial": number, "options": {"n_layers": 1}, "folder": f"trial_{number:05d}", **more}


def test_a_record_that_was_cut_off_loses_its_last_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    record = Record(file)
    record.add(begun(0))
    whole = file.read_bytes()
    record.add({"trial": 0, "state": "finished", "reason": ""})
    cut_off = file.read_bytes()[:-3]
    file.write_bytes(cut_off)
    assert Record(file).trials[0].state == "interrupted" and file.read_bytes() == cut_off
    Record(file).add(begun(1))
    assert len(Record(file).trials) == 2 and file.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "line",
    [
        "text",
        "[]",
        "[" * 100_000,
        json.dumps(begun(7)),
        json.dumps(begun(-1)),
        json.dumps(begun(0, trial="0")),
        json.dumps(begun(0, folder="../../elsewhere")),
        json.dumps(begun(0, options=3)),
        json.dumps(begun(0, state="won", reason="")),
        json.dumps(begun(0, epoch=1)),
        json.dumps(begun(0, epoch="one", valid=0.1)),
        '{"trial": 0, "options": {}, "epoch": 1e999, "valid": 0}',
        "\udcff",
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trials.jsonl"
    file.write_bytes(f"{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as error:
        Record(file)
    assert str(file) in str(error.value) and len(str(error.value)) < 500


def test_a_search_of_the_version_before_is_adopted(tmp_path: Path) -> None:
    """Which kept no record: by what Ray wrote for each trial, and trials.csv of how it ended."""
    numbers = {"epoch": 1, "valid": 0.1, BEST: 0.1, "best_epoch": 0, "best_valid": {}}
    numbers |= {"ended": False, "seconds": 1.0, "parameters": 9, "hostname": "h", "node": "n"}
    of_another = {**numbers, "config": {"number": 9}}
    for number, reports in enumerate(
        [
            [numbers, {**numbers, "epoch": 2, "ended": True}],
            [{BEST: None, "failure": "no heads"}],
            [numbers],
            [of_another, numbers],
        ]
    ):
        folder = tmp_path / "trials" / f"trial_{number:05d}"
        folder.mkdir(parents=True)
        config = {"number": number, "options": {"n_layers": number}}
        (folder / "params.json").write_text(json.dumps(config))
        lines = [json.dumps({"config": config, **report}) + "\n" for report in reports]
        (folder / "result.json").write_text("".join(lines) + "{cut off")
    table = tmp_path / "trials.csv"
    for text, third in (("", "interrupted"), ("2,stopped,\n3,interrupted,\n", "stopped")):
        if text:
            table.write_text(f"trial,state,reason\n{text}")
        record = Record(tmp_path / f"{third}.jsonl")
        adopt(record, str(tmp_path / "trials"), table)
        states = [trial.state for trial in record.trials]
        assert states == ["finished", "failed", third, "interrupted"]
        assert record.trials[0].curve == {1: 0.1, 2: 0.1} and record.trials[0].best_epoch == 1
        assert record.trials[1].reason == "no heads" and record.trials[3].epochs == 1
        assert [trial.options["n_layers"] for trial in record.trials] == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["[" * 100_000, "{}", '{"space": 1}', "\udcff", "[]"])
def test_damaged_settings_are_refused(tmp_path: Path, damage: str) -> None:
    content = damage.encode("utf-8", "surrogateescape")
    (tmp_path / "search.json").write_bytes(content)
    with pytest.raises(UsageError):
        search(resume=tmp_path)


@pytest.mark.parametrize("key", [f.name for f in fields(Settings) if f.name != "max_concurrent"])
@pytest.mark.parametrize("value", [[], -1, math.nan, {"a": [1]}])
def test_settings_of_another_type_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    """Whatever a file has, it is one line of what is wrong."""
    good = read_settings("FPARec", "ml-100k", None, None, {}, SearchArguments(num_samples=2))
    (tmp_path / "search.json").write_text(json.dumps({**good.to_plain(), key: value}))
    if (key, value) in (("overruled", []), ("identity", {"a": [1]}), ("base", {"a": [1]})):
        return  # such as it may be
    with pytest.raises(UsageError):
        SearchFolder(tmp_path).read()


def test_a_scheduler_of_the_users_is_given_again(tmp_path: Path) -> None:
    """Ray pickles it, and what it pickled is not read."""
    mine = {"scheduler": FIFOScheduler()}
    for given, again in ((mine, {}), ({}, mine)):
        arguments = SearchArguments(num_samples=2, **given)
        kept = read_settings("FPARec", "ml-100k", None, None, {}, arguments)
        (tmp_path / "search.json").write_text(json.dumps(kept.to_plain()))
        with pytest.raises(UsageError) as error:
            search(resume=tmp_path, **again)
        assert "scheduler" in str(error.value)
        folder = SearchFolder(tmp_path)
        resumed = resumed_settings(folder, SearchArguments(resume=tmp_path, **given), {})
        assert resumed.scheduler == kept.scheduler
