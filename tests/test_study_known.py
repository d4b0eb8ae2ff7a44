"""What is left of a study whose runs are partly known from a file: planned, not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_study_preview import finish, plan

from recbole_pos.study.packed import PackedStudy, pack
from recbole_pos.study.plan import Plan
from recbole_pos.study.results import FAILED
from recbole_pos.study.study_folder import KNOWN_FROM, StudyFolder
from recbole_pos.study.work import Work


def test_attaching_needs_weights(tiny: Path, tmp_path: Path) -> None:
    """A run that starts from a known one cannot be trained, and it is said why.

    Not even where a checkpoint lies that was not finished: its weights are none of the known run.
    """
    made = plan(tiny, seeds=1)
    folder = StudyFolder(tmp_path / "here")
    work = Work(made, folder)
    for _ in range(2):
        job = work.ready()
        assert job is not None
        finish(folder, job)
    folder.write_current(work.plan, work.digests)
    assert pack(made, folder, tmp_path / "two.tar.xz") == 2
    there = StudyFolder(tmp_path / "there")
    for digest in work.digests.values():
        there.run(digest).path.mkdir(parents=True)
        there.run(digest).checkpoint.touch()  # of an epoch before the last
    again = Work(made, there, (), [PackedStudy(tmp_path / "two.tar.xz")])
    assert again.ready() is None
    reason = again.reasons["RoPE + kernel, seed 2020"]
    assert again.status["RoPE + kernel, seed 2020"] == FAILED
    assert "two.tar.xz has none" in reason and "leave --known out" in reason


SEARCH = {"trials": 3, "space": {"learning_rate": {"loguniform": [1e-4, 1e-2]}, "n_heads": 1}}


def searched(tiny: Path, tmp_path: Path) -> tuple[Plan, StudyFolder, PackedStudy]:
    """A study with a search, finished, and its file."""
    made = plan(tiny, rows={"NoPE": {"position": ["nope"]}}, search=SEARCH, seeds=1)
    folder = StudyFolder(tmp_path / "here")
    work = Work(made, folder)
    while job := work.ready():
        assert job.config["n_heads"] == 1, "what the space fixes"
        finish(folder, job)
        work.end(job.fit, "done", known=folder.fit(job.digest))
    folder.write_current(work.plan, work.digests)
    pack(made, folder, tmp_path / "search.tar.xz")
    return made, folder, PackedStudy(tmp_path / "search.tar.xz")


def draws(folder: StudyFolder) -> dict[str, Any]:
    return folder.search("NoPE").get("drawn", {})


def test_what_a_search_drew_comes_along(tiny: Path, tmp_path: Path) -> None:
    """A space's trials are known by what was drawn, which other draws would not repeat."""
    made, folder, known = searched(tiny, tmp_path)
    assert len({one["learning_rate"] for one in draws(folder).values()}) == 3
    there = StudyFolder(tmp_path / "there")
    work = Work(made, there, (), [known])
    work.take()
    assert set(work.status.values()) == {"done"} and draws(there) == draws(folder)
    assert Work(made, there).ready() is None, "and stays"
    assert (there.fit(next(iter(work.digests.values()))) or {})[KNOWN_FROM] == "search.tar.xz"


@pytest.mark.parametrize("search", [{"learning_rate": [0.1, 0.01]}, SEARCH], ids=["grid", "space"])
def test_a_search_that_is_not_finished_chooses_nothing(
    tiny: Path, tmp_path: Path, search: dict[str, Any]
) -> None:
    """A report of known runs does not test what the missing trials may beat."""
    rows = {"NoPE": {"position": ["nope"]}}
    made = plan(tiny, rows=rows, search=search, seeds=1)
    folder = StudyFolder(tmp_path / "here")
    work = Work(made, folder)
    while job := work.ready():
        finish(folder, job)
        work.end(job.fit, "done", known=folder.fit(job.digest))
    folder.write_current(work.plan, work.digests)
    pack(made, folder, tmp_path / "search.tar.xz")
    if "trials" in search:
        longer = {**search, "trials": 5}
    else:
        longer = {"learning_rate": [0.1, 0.01, 0.001]}
    more = plan(tiny, rows=rows, search=longer, seeds=1)
    there = Work(
        more, StudyFolder(tmp_path / "there"), (), [PackedStudy(tmp_path / "search.tar.xz")]
    )
    there.take()
    assert there.status["NoPE, seed 2020"] == FAILED
    assert there.status["NoPE, trial 0"] == "done"


@pytest.mark.parametrize("other", ["space", "row", "base"])
def test_what_another_search_drew_does_not(tiny: Path, tmp_path: Path, other: str) -> None:
    """The same name of a row says nothing: neither a report nor a training takes those draws."""
    _, folder, known = searched(tiny, tmp_path)
    rows, search, more = {"NoPE": {"position": ["nope"]}}, SEARCH, {}
    if other == "space":
        search = {**SEARCH, "space": {"learning_rate": {"loguniform": [1e-4, 1e-3]}}}
    elif other == "row":
        rows = {"NoPE": {"position": ["rope"]}}
    else:
        more = {"base": {**plan(tiny).base, "epochs": 3}}
    made = plan(tiny, rows=rows, search=search, seeds=1, **more)
    there = StudyFolder(tmp_path / "there")
    Work(made, there, (), [known]).take()
    assert draws(there) == {}, "a report draws nothing"
    job = Work(made, there, (), [known]).ready()
    assert job is not None and draws(there)["0"]["learning_rate"] == job.config["learning_rate"]
    before = draws(there)
    edited = plan(tiny, rows=rows, search={**search, "space": {"n_heads": {"choice": [1, 2]}}})
    Work(edited, there).ready()
    assert "n_heads" in draws(there)["0"] and draws(there) != before, "of the edited space"


def test_times_and_reasons_stay_at_home(tiny: Path, tmp_path: Path) -> None:
    """Boundaries of a split in time, and what an earlier attempt failed of."""
    made = plan(tiny, rows={"NoPE": {"position": ["nope"]}}, seeds=1)
    folder = StudyFolder(tmp_path / "here")
    work = Work(made, folder)
    job = work.ready()
    assert job is not None
    folder.write_fit(job.digest, {"status": FAILED, "reason": "/home/me is full"})
    finish(folder, job)
    folder.write_fit(job.digest, {"split": {"boundaries": [1715729063.4]}})
    assert "reason" not in (folder.fit(job.digest) or {})
    folder.write_current(work.plan, work.digests)
    pack(made, folder, tmp_path / "one.tar.xz")
    content = b"".join(PackedStudy(tmp_path / "one.tar.xz").files.values())
    assert b"1715729063" not in content and b"/home/me" not in content
