"""Which fits of a study are trained, resumed and chosen: no run stands for what it is not."""

from pathlib import Path
from typing import Any

import pytest
from small_study import BASE, NOPE, ROWS, plan, train

from recbole_pos.errors import UsageError
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.collecting import collect_results
from recbole_pos.study.comparing import _require_metrics
from recbole_pos.study.plan import Plan
from recbole_pos.study.result_tables import make_search_table
from recbole_pos.study.scheduler import Scheduler
from recbole_pos.study.study_folder import StudyFolder, pack

GRID = {"learning_rate": [0.01, 0.001]}
# seed 2020 alone would choose the first trial, the mean of two the second
VALUES = {(0, 2020): 0.3, (0, 2021): 0.1, (1, 2020): 0.25, (1, 2021): 0.2}


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    return StudyFolder(tmp_path / "s")


def done(made: Plan, folder: StudyFolder) -> list[tuple[str, int]]:
    runs = collect_results(made, folder).runs
    return [(line["row"], line["seed"]) for _, line in runs.iterrows() if line["status"] == "done"]


def chosen(made: Plan, folder: StudyFolder) -> dict[str, int]:
    """The trial of each row that its search has chosen."""
    searches = collect_results(made, folder).searches
    return dict(searches[searches["chosen"]][["row", "trial"]].itertuples(index=False))


def searched(tiny: Path, **more: Any) -> Plan:
    return plan(tiny, **{"rows": NOPE, "search": GRID, "seeds": 3, "search_seeds": 2, **more})


def test_a_report_has_no_old_run(tiny: Path, folder: StudyFolder, tmp_path: Path) -> None:
    """Interrupted after one row, and when one row alone was asked for; nothing is trained again."""
    first = plan(tiny, seeds=1)
    assert len(train(Scheduler(first, folder))) == 2
    other = plan(tiny, seeds=1, base={**first.base.options, "epochs": 4})
    assert train(Scheduler(other, folder), fits=1) == ["NoPE, seed 2020"]
    assert done(other, folder) == [("NoPE", 2020)]
    assert train(Scheduler(other, folder, ("Learned",))) == ["Learned, seed 2020"]
    assert done(other, folder) == [("NoPE", 2020), ("Learned", 2020)]
    assert train(Scheduler(first, folder)) == [] and len(done(first, folder)) == 2
    assert pack(first, folder, tmp_path / "all", {}) == 2


def test_the_command_that_resumes_names_the_modules_of_the_user(tiny: Path) -> None:
    made = plan(tiny, base={**BASE, "data_path": str(tiny), "plugins": ["json.tool"]})
    command = "recbole-pos compare 'my study' --plugins='[json.tool]'"
    assert StudyFolder("my study").make_command(made) == command


def test_other_searches_make_other_rows(tiny: Path, folder: StudyFolder) -> None:
    """Also where all trials of the other one failed; one row alone changes no choice of others."""
    first = plan(tiny, search=GRID)
    train(Scheduler(first, folder))
    before = chosen(first, folder)
    train(Scheduler(first, folder, ("NoPE",)))
    assert chosen(first, folder) == before and set(before) == {"NoPE", "Learned"}
    for search, seeds in ((GRID, 2), (None, 1)):
        assert done(plan(tiny, search=search, search_seeds=seeds), folder) == []
    made = plan(tiny, seeds=1, search={"learning_rate": [0.1, 0.2]})
    train(Scheduler(made, folder), {(0, 2020): None, (1, 2020): None})
    runs = collect_results(made, folder).runs
    assert list(runs["status"]) == [FAILED, FAILED]
    assert all("all trials failed; the first one: it diverged" in why for why in runs["reason"])


def test_a_search_goes_by_the_metric_of_its_row(tiny: Path, folder: StudyFolder) -> None:
    """Which is that of early stopping, and not the one that the tables begin with."""
    rows = {"NoPE": {**NOPE["NoPE"], "valid_metric": "MRR@10"}, "Learned": ROWS["Learned"]}
    made = plan(tiny, rows=rows, search=GRID, seeds=1, metrics=["hit@10"])
    train(Scheduler(made, folder), {(0, 2020): 0.1, (1, 2020): 0.3})
    assert chosen(made, folder) == {"NoPE": 0, "Learned": 1}
    table = make_search_table(collect_results(made, folder)).markdown()
    assert "0.9000 (MRR@10)" in table and "0.3000 (NDCG@10)" in table


def test_metrics_that_nothing_computes(tiny: Path) -> None:
    configs = {"NoPE": {"metrics": ["NDCG", "GAUC"], "topk": [10]}}
    _require_metrics(plan(tiny, metrics=["ndcg@10", "hit@3"]), configs)  # of the ranks
    with pytest.raises(UsageError, match="gauc@10 is not computed for NoPE, but ndcg@10, gauc;"):
        _require_metrics(plan(tiny, metrics=["gauc@10"]), configs)


def test_the_mean_chooses_and_only_what_is_left_is_trained(tiny: Path, folder: StudyFolder) -> None:
    """Stopped after three runs, it resumes with the same options of all trials."""
    made = searched(tiny)
    first = train(Scheduler(made, folder), VALUES, fits=3)
    scheduler = Scheduler(made, folder)
    names = [*first, *train(scheduler, VALUES)]
    tried = ["trial 0", "trial 0, seed 2021", "trial 1", "trial 1, seed 2021"]
    finals = ["seed 2020 *", "seed 2021 *", "seed 2022"]  # the first two are only tested
    assert names == [f"NoPE, {name}" for name in (*tried, *finals)]
    assert chosen(made, folder) == {"NoPE": 1}
    finished = [folder.run(digest).read_config() for digest in scheduler.digests.values()]
    rates = [config["learning_rate"] for config in finished]
    assert rates == [0.01, 0.01, 0.001, 0.001, 0.001, 0.001, 0.001]
    again = Scheduler(made, folder)
    assert again.next_job() is None and set(again.status.values()) == {DONE}
    results = collect_results(made, folder)
    assert list(results.searches["value"]) == pytest.approx([0.2, 0.225])
    assert "the mean of 2 seeds" in make_search_table(results).notes[0]


def test_a_trial_of_which_a_seed_failed_is_not_chosen(tiny: Path, folder: StudyFolder) -> None:
    """Its mean would be one of fewer seeds."""
    made = searched(tiny)
    train(Scheduler(made, folder), {**VALUES, (1, 2021): None})
    assert chosen(made, folder) == {"NoPE": 0}
