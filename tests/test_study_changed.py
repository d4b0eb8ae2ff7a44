"""Studies whose options change: no run stands for what it was not made for."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest
from fake_runs import finish, plan

from recbole_pos.errors import UsageError
from recbole_pos.study.asked import plan_and_folder, require_metrics
from recbole_pos.study.collect import collect_results
from recbole_pos.study.comparing import collect_facts
from recbole_pos.study.configs import _read_typed
from recbole_pos.study.packed import PackedStudy, pack
from recbole_pos.study.plan import Plan
from recbole_pos.study.result_tables import search_table
from recbole_pos.study.results import FAILED
from recbole_pos.study.scheduler import Scheduler
from recbole_pos.study.study_folder import StudyFolder

ROWS: dict[str, Any] = {"NoPE": {"position": ["nope"]}, "Learned": {"position": ["learned"]}}
GRID = {"learning_rate": [0.01, 0.001]}


def train(
    made: Plan, folder: StudyFolder, fits: int = 1000, rows: tuple[str, ...] = ()
) -> list[str]:
    """As if so many fits were trained, and then a report were asked for."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_plan(made)
    scheduler, found = Scheduler(made, folder, rows), []
    while len(found) < fits and (job := scheduler.ready()):
        finish(folder, job)
        scheduler.end(job.fit, "done", facts=folder.fit(job.digest))
        found.append(job.fit.name)
    folder.write_current(made, scheduler.digests)
    folder.write_facts(collect_facts(scheduler))
    return found


def done(made: Plan, folder: StudyFolder) -> list[tuple[str, int]]:
    runs = collect_results(made, folder).runs
    return [(line["row"], line["seed"]) for _, line in runs.iterrows() if line["status"] == "done"]


def test_a_report_has_no_run_of_the_options_before(tiny: Path, tmp_path: Path) -> None:
    """Interrupted after one row, and when one row alone was asked for; nothing is trained again."""
    folder = StudyFolder(tmp_path / "s")
    first = plan(tiny, rows=ROWS, seeds=1)
    assert len(train(first, folder)) == 2
    other = plan(tiny, rows=ROWS, seeds=1, base={**first.base, "epochs": 4})
    assert train(other, folder, fits=1) == ["NoPE, seed 2020"]
    assert done(other, folder) == [("NoPE", 2020)]
    assert train(other, folder, rows=("Learned",)) == ["Learned, seed 2020"]
    assert done(other, folder) == [("NoPE", 2020), ("Learned", 2020)]
    assert train(first, folder) == [] and len(done(first, folder)) == 2
    assert pack(first, folder, tmp_path / "all.tar.xz") == 2


def test_other_searches_make_other_rows(tiny: Path, tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s")
    first = plan(tiny, rows=ROWS, seeds=2, search=GRID)
    train(first, folder)
    assert len(done(first, folder)) == 4
    more = {"seeds": 2, "rows": ROWS}
    for other in (
        plan(tiny, **more, search={"learning_rate": [0.01, 0.001, 0.1]}),
        plan(tiny, **more, search=GRID, search_seeds=2),
        plan(tiny, **more),
    ):
        results = collect_results(other, folder)
        assert done(other, folder) == [] and search_table(results) is None


def test_what_cannot_be_trained_is_a_failed_run(tiny: Path, tmp_path: Path) -> None:
    """Its row had a result with other options."""
    folder = StudyFolder(tmp_path / "s")
    train(plan(tiny, rows=ROWS, seeds=1, search=GRID), folder)
    made = plan(tiny, rows=ROWS, seeds=1, search={"learning_rate": [1e11, 1e12]})
    folder.write_plan(made)
    scheduler = Scheduler(made, folder)
    while job := scheduler.ready():
        scheduler.end(job.fit, FAILED, "the loss is not a number")
    folder.write_current(made, scheduler.digests)
    folder.write_facts(collect_facts(scheduler))
    runs = collect_results(made, folder).runs
    assert list(runs["status"]) == [FAILED, FAILED]
    assert all("all trials failed; the first one: the loss" in why for why in runs["reason"])


def test_what_a_report_does_not_find_has_not_failed(tiny: Path, tmp_path: Path) -> None:
    """Runs of a file, to which a row would be attached that no one has trained."""
    folder, there = StudyFolder(tmp_path / "here"), StudyFolder(tmp_path / "there")
    train(plan(tiny, rows=ROWS, seeds=1), folder)
    pack(plan(tiny, rows=ROWS, seeds=1), folder, tmp_path / "two.tar.xz")
    more = {"NoPE + kernel": {"attach": {"to": "NoPE", "schemes": ["kernel"]}}}
    more |= {"RoPE": {"position": ["rope"]}, "RoPE again": {"retest": "RoPE", "mask_history": True}}
    made = plan(tiny, rows={**ROWS, **more}, seeds=1)
    scheduler = Scheduler(made, there, (), [PackedStudy(tmp_path / "two.tar.xz")])
    scheduler.take()
    there.write_current(made, scheduler.digests)
    there.write_facts(collect_facts(scheduler))
    assert list(collect_results(made, there).runs["status"]) == ["done", "done"]


def test_rows_alone_leave_what_others_chose(tiny: Path, tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s")
    made = plan(tiny, rows=ROWS, seeds=1, search=GRID)
    train(made, folder)
    before = folder.facts()["chosen"]
    train(made, folder, rows=("NoPE",))
    assert folder.facts()["chosen"] == before and None not in before.values()


@pytest.mark.parametrize("place", ["base", "row"])
@pytest.mark.parametrize("space", [False, True])
def test_an_option_is_given_or_tried(tiny: Path, tmp_path: Path, place: str, space: bool) -> None:
    given = {"learning_rate": 0.1}
    search: dict[str, Any] = GRID
    if space:
        search = {"trials": 2, "space": {"learning_rate": {"loguniform": [1e-3, 1e-2]}}}
    first = plan(tiny)
    rows = {"NoPE": {**ROWS["NoPE"], **(given if place == "row" else {})}}
    base = {**first.base, **(given if place == "base" else {})}
    made = plan(tiny, rows=rows, base=base, search=search)
    with pytest.raises(UsageError, match="learning_rate is given here, and its search tries it"):
        Scheduler(made, StudyFolder(tmp_path / "s"))


def test_what_a_space_fixes_gives_way_to_what_is_given(tiny: Path, tmp_path: Path) -> None:
    search = {
        "trials": 2,
        "space": {"learning_rate": {"loguniform": [1e-3, 1e-2]}, "epochs": 9, "n_heads": 1},
    }
    made = plan(tiny, rows={"NoPE": ROWS["NoPE"]}, search=search)
    job = Scheduler(made, StudyFolder(tmp_path / "s")).ready()
    assert job is not None
    assert job.config["epochs"] == made.base["epochs"] and job.config["n_heads"] == 1


def test_conditions_on_options_that_are_given(tiny: Path, tmp_path: Path) -> None:
    """As in ``tune``; and what no model has is refused before training."""
    drawn = {"uniform": [0.1, 0.4], "when": {"n_heads": 2}}
    search = {"trials": 2, "space": {"hidden_dropout_prob": drawn}}
    base = {**plan(tiny).base, "n_heads": 2}
    made = plan(tiny, rows={"NoPE": ROWS["NoPE"]}, search=search, base=base)
    job = Scheduler(made, StudyFolder(tmp_path / "s")).ready()
    assert job is not None and job.config["hidden_dropout_prob"] != 0.2
    for wrong in ({"hiden_dropout_prob": drawn}, {"hidden_dropout_prob": {"uniform": [0.1, 1.9]}}):
        made = plan(tiny, rows={"NoPE": ROWS["NoPE"]}, search={"trials": 2, "space": wrong})
        with pytest.raises(UsageError, match="dropout_prob"):
            Scheduler(made, StudyFolder(tmp_path / "t"))


def test_names_of_rows_do_not_share_their_draws(tiny: Path, tmp_path: Path) -> None:
    search = {"trials": 2, "space": {"learning_rate": {"loguniform": [1e-3, 1e-2]}}}
    names = ("RoPE + kernel", "RoPE kernel", "Модель А", "Модель Б", "long " * 60)
    made = plan(tiny, rows={name: ROWS["NoPE"] for name in names}, search=search, seeds=1)
    folder = StudyFolder(tmp_path / "s")
    train(made, folder)
    assert len(list(folder.searches.glob("*.json"))) == len(names)


def test_a_search_goes_by_the_metric_of_its_row(tiny: Path, tmp_path: Path) -> None:
    """Which is that of early stopping, and not the one that the tables begin with."""
    rows = {"NoPE": {**ROWS["NoPE"], "valid_metric": "MRR@10"}, "Learned": ROWS["Learned"]}
    made = plan(tiny, rows=rows, search=GRID, seeds=1, metrics=["hit@10"])
    folder = StudyFolder(tmp_path / "s")
    scheduler = Scheduler(made, folder)
    assert {row: one.metric for row, one in scheduler.searches.items()} == {
        "NoPE": "mrr@10",
        "Learned": "ndcg@10",
    }
    while job := scheduler.ready():
        finish(folder, job)
        value = 0.3 if job.fit.trial == 1 else 0.1
        folder.write_fit(job.digest, {"best_valid": {"mrr@10": value, "ndcg@10": 1 - value}})
        scheduler.end(job.fit, "done", facts=folder.fit(job.digest))
    folder.write_current(made, scheduler.digests)
    folder.write_facts(collect_facts(scheduler))
    assert scheduler.chosen() == {"NoPE": 1, "Learned": 0}
    table = search_table(collect_results(made, folder))
    assert table is not None
    text = table.markdown()
    assert "0.3000 (MRR@10)" in text and "0.9000 (NDCG@10)" in text


def test_metrics_that_nothing_computes(tiny: Path) -> None:
    configs = {"NoPE": {"metrics": ["NDCG"], "topk": [10]}}
    require_metrics(plan(tiny, metrics=["ndcg@10", "hit@3"]), configs)  # of the ranks
    with pytest.raises(UsageError, match="foo@10 is not computed for NoPE"):
        require_metrics(plan(tiny, metrics=["ndcg@10", "foo@10"]), configs)
    tables = [{"title": "T", "validation": True}]
    with pytest.raises(UsageError, match="ndcg@15 is not computed"):
        require_metrics(plan(tiny, metrics=["ndcg@15"], tables=tables), configs)


def test_more_of_the_command_line_than_the_study_has(tiny: Path) -> None:
    """Its files stay, and its seeds."""
    from recbole_pos.config.arguments import CompareArguments

    content = {**plan(tiny).source.content, "seeds": [7, 8]}
    content["base"] = {**content["base"], "config_files": ["one.yaml", "two.yaml"]}
    printed = CompareArguments(seeds=3)
    found, _ = plan_and_folder(content, None, {"config_files": ["one.yaml", "three.yaml"]}, printed)
    assert found.config_files == ("two.yaml", "one.yaml", "three.yaml")
    assert found.seeds == (7, 8, 9)
    found, _ = plan_and_folder(content, None, {}, CompareArguments(seeds=1))
    assert found.seeds == (7,)


def code_of(text: str) -> list[str]:
    """What is read of a class that was typed into a cell of a notebook."""
    cell, names = f"<cell {hash(text)}>", {"__name__": "__main__"}
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    exec(compile(text, cell, "exec"), names)
    found: dict[int, str] = {}
    _read_typed(names["Mine"], "__main__", found)
    return list(found.values())


def test_code_of_a_class_that_no_file_has() -> None:
    """The same text the same; another constant, another helper, another base are others."""
    text = """
K = 2
def helper(x):
    return x * K
class Base:
    def more(self): return {1, 2}
class Mine(Base):
    size = 3
    def encode(self, x): return helper(x) + (lambda y: y + 1)(x)
    @property
    def name(self): return "a"
"""
    same = code_of(text)
    assert same == code_of(text)
    changes = [
        ("K = 2", "K = 3"),
        ("x * K", "x + K"),
        ("{1, 2}", "{1, 3}"),
        ("size = 3", "size = 4"),
    ]
    changes += [("y + 1", "y + 2"), ('"a"', '"b"'), ("more(", "less(")]
    for before, after in changes:
        assert code_of(text.replace(before, after)) != same, after
