"""A search that chooses by the mean of several seeds: planned, chosen, not trained twice, kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_runs import finish, plan

from recbole_pos.study.collect import collect_results
from recbole_pos.study.expand import dry_run, list_fits
from recbole_pos.study.packed import PackedStudy, pack
from recbole_pos.study.preview import preview
from recbole_pos.study.result_tables import search_table
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.study.scheduler import Scheduler
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.study.study_report import protocol

ROWS = {"NoPE": {"position": ["nope"]}}
GRID = {"learning_rate": [0.01, 0.001]}
SPACE = {"trials": 2, "space": {"learning_rate": {"loguniform": [1e-4, 1e-2]}}}
# seed 2020 alone would choose the first trial, the mean of two the second
VALUES = {(0, 2020): 0.3, (0, 2021): 0.1, (1, 2020): 0.25, (1, 2021): 0.2}


def searched(tiny: Path, **more: Any) -> Any:
    return plan(tiny, **{"rows": ROWS, "search": GRID, "seeds": 3, "search_seeds": 2, **more})


def train(scheduler: Scheduler, values: dict[tuple[int, int], float | None] = VALUES) -> list[str]:
    """As if all were trained, None for one that fails: what was, with * where only tested."""
    made = []
    while job := scheduler.ready():
        value = values.get((job.fit.trial, job.fit.seed), 0.2)
        made.append(job.fit.name + " *" * (job.begin is not None))
        if value is None:
            scheduler.end(job.fit, FAILED, "it diverged")
            continue
        finish(scheduler.folder, job, value)
        scheduler.end(job.fit, DONE, facts=scheduler.folder.fit(job.digest))
    scheduler.folder.write_current(scheduler.plan, scheduler.digests)
    return made


def test_every_trial_has_every_seed(tiny: Path) -> None:
    made = searched(tiny)
    names = [fit.name for fit in list_fits(made)]
    tried = [
        "NoPE, trial 0",
        "NoPE, trial 0, seed 2021",
        "NoPE, trial 1",
        "NoPE, trial 1, seed 2021",
    ]
    assert names == [*tried, "NoPE, seed 2020", "NoPE, seed 2021", "NoPE, seed 2022"]
    assert [fit.seed for fit in list_fits(made)] == [2020, 2021, 2020, 2021, 2020, 2021, 2022]
    assert [fit.repeats for fit in list_fits(made)][4:] == [True, True, False]
    assert list(dry_run(made)["runs"]) == [5]
    alone = [fit.name for fit in list_fits(searched(tiny, search_seeds=1))]
    assert set(alone) <= set(names), "with more seeds a search goes on, it does not begin again"


@pytest.mark.parametrize("search", [GRID, SPACE], ids=["grid", "space"])
def test_the_mean_chooses_and_only_what_is_left_is_trained(
    tiny: Path, tmp_path: Path, search: dict[str, Any]
) -> None:
    made, folder = searched(tiny, search=search), StudyFolder(tmp_path / "s")
    scheduler = Scheduler(made, folder)
    done = train(scheduler)
    assert scheduler.chosen() == {"NoPE": 1}
    assert done[-3:] == ["NoPE, seed 2020 *", "NoPE, seed 2021 *", "NoPE, seed 2022"]
    rates = {
        name: folder.run(digest).config.read_text().split("learning_rate: ")[1].split()[0]
        for name, digest in scheduler.digests.items()
    }
    assert rates["NoPE, trial 1"] == rates["NoPE, trial 1, seed 2021"] == rates["NoPE, seed 2022"]
    assert rates["NoPE, trial 0"] == rates["NoPE, trial 0, seed 2021"] != rates["NoPE, trial 1"]
    assert "5 finished" in preview(Scheduler(made, folder))[0][1]
    assert Scheduler(made, folder).ready() is None
    one = searched(tiny, search=search, search_seeds=1)
    assert train(Scheduler(one, StudyFolder(tmp_path / "one")))[-3:] == [
        *("NoPE, seed 2020 *", "NoPE, seed 2021", "NoPE, seed 2022")
    ]


def test_a_trial_of_which_a_seed_failed_is_not_chosen(tiny: Path, tmp_path: Path) -> None:
    """Its mean would be one of fewer seeds."""
    scheduler = Scheduler(searched(tiny), StudyFolder(tmp_path / "s"))
    train(scheduler, {**VALUES, (1, 2021): None})
    assert scheduler.chosen() == {"NoPE": 0}


def test_nothing_is_chosen_before_all_seeds_are_through(tiny: Path, tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s")
    train(Scheduler(searched(tiny, search_seeds=1), folder))
    pack(searched(tiny, search_seeds=1), folder, tmp_path / "one.tar.xz")
    made = searched(tiny)
    scheduler = Scheduler(
        made, StudyFolder(tmp_path / "there"), (), [PackedStudy(tmp_path / "one.tar.xz")]
    )
    scheduler.take()
    assert scheduler.chosen() == {"NoPE": None}
    assert (
        scheduler.status["NoPE, trial 1"] == DONE and scheduler.status["NoPE, seed 2020"] == FAILED
    )
    scheduler.folder.write_current(scheduler.plan, scheduler.digests)
    assert collect_results(made, scheduler.folder).searches["value"].isna().all(), (
        "a mean of one is not one"
    )


def test_a_report_has_the_mean(tiny: Path, tmp_path: Path) -> None:
    made, folder = searched(tiny), StudyFolder(tmp_path / "s")
    scheduler = Scheduler(made, folder)
    train(scheduler)
    folder.write_facts({"chosen": scheduler.chosen()})
    results = collect_results(made, folder)
    assert list(results.searches["value"]) == pytest.approx([0.2, 0.225])
    shown = search_table(results)
    assert shown is not None and "the mean of 2 seeds" in shown.notes[0]
    assert "2 trials with seeds 2020 and 2021 each" in " ".join(protocol(results))
