"""What a dry run says is left of a study: exactly what would be trained, and nothing is written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recbole_pos.study.collect import results_of
from recbole_pos.study.plan import Plan
from recbole_pos.study.preview import preview
from recbole_pos.study.reading import make_plan, read_plan
from recbole_pos.study.results import DONE
from recbole_pos.study.source import Source
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.study.work import Job, Work

SMALL = {"hidden_size": 8, "inner_size": 8, "MAX_ITEM_LIST_LENGTH": 8, "epochs": 2, "n_layers": 1}


def plan(tiny: Path, **more: Any) -> Plan:
    rows = {
        "NoPE": {"position": ["nope"]},
        "RoPE": {"position": ["rope"]},
        "RoPE + kernel": {"attach": {"to": "RoPE", "schemes": ["kernel"]}},
    }
    base = {**SMALL, "model": "PosSASRec", "data_path": str(tiny)}
    content = {"dataset": "tiny", "title": "A study", "base": base, "rows": rows, "seeds": 2}
    return make_plan(Source("study", {**content, **more}))


def finish(folder: StudyFolder, job: Job, value: float = 0.1) -> None:
    """As if it had been trained."""
    metrics = {"best_valid": {"ndcg@10": value}}
    folder.write_fit(job.digest, {"status": DONE, "row": job.fit.row, **metrics})
    folder.run(job.digest).write_config(job.config.plain)
    folder.run(job.digest).checkpoint.touch()


def run(work: Work, most: int, values: tuple[float, ...] = ()) -> None:
    """Finish some fits."""
    for place in range(most):
        job = work.ready()
        assert job is not None
        value = values[place] if values else 0.1
        finish(work.folder, job, value)
        work.end(job.fit, DONE, known={"best_valid": {"ndcg@10": value}})


def said(made: Plan, folder: StudyFolder, rows: tuple[str, ...] = ()) -> str:
    lines, table = preview(Work(made, folder, rows))
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return "\n".join([*lines, console.file.getvalue()])


def test_nothing_has_begun(tiny: Path, tmp_path: Path) -> None:
    """And no data are needed to say so."""
    text = said(plan(tiny / "nowhere"), StudyFolder(tmp_path / "s"))
    assert "3 rows, 2 seeds, 6 fits" in text and "finished" not in text
    assert not list(tmp_path.iterdir())


def test_what_is_there_and_what_is_new_are_told_apart(tiny: Path, tmp_path: Path) -> None:
    folder, made = StudyFolder(tmp_path / "s"), plan(tiny)
    work = Work(made, folder)
    run(work, 2)
    begun = work.ready()
    assert begun is not None
    folder.write_fit(begun.digest, {"status": "running"})
    before = sorted(folder.path.rglob("*"))
    assert f"In {folder.path}: 2 finished, 4 to be trained" in said(made, folder)
    folder.run(begun.digest).checkpoint.touch()
    text = said(made, folder)
    assert "2 finished, 1 to go on from a checkpoint, 3 to be trained" in text
    folder.run(begun.digest).checkpoint.unlink()
    assert sorted(folder.path.rglob("*")) == before
    other = plan(tiny, seeds=3)  # runs of other seeds are other runs
    assert "2 finished, 7 to be trained" in said(other, folder)
    longer = plan(tiny, base={**made.base, "epochs": 3})
    assert "6 to be trained" in said(longer, folder) and "finished" not in said(longer, folder)
    assert "1 row, 2 seeds, 2 fits" in said(made, folder, ("NoPE",))


@pytest.mark.parametrize(
    "search",
    [
        {"learning_rate": [0.01, 0.001]},
        {"trials": 2, "space": {"learning_rate": {"loguniform": [1e-4, 1e-2]}}},
    ],
)
def test_a_search_decides_what_follows(tiny: Path, tmp_path: Path, search: dict) -> None:
    folder = StudyFolder(tmp_path / "s")
    rows = {"NoPE": {"position": ["nope"]}}
    made = plan(tiny, rows=rows, search=search)
    run(Work(made, folder), 1)
    drawn = [file.read_bytes() for file in folder.searches.glob("*")]
    assert "1 finished, 1 to be trained, 1 that a search decides first" in said(made, folder)
    assert [file.read_bytes() for file in folder.searches.glob("*")] == drawn
    run(Work(made, folder), 1, (0.2,))
    assert "2 finished, 1 to be trained" in said(made, folder)
    work = Work(made, folder)
    run(work, 2)  # what is chosen is tested with the first seed and trained with the second
    assert work.ready() is None and "3 finished" in said(made, folder)


def test_a_report_names_the_file_while_it_says_the_same(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text("dataset: tiny\nrows: {Pop: {model: Pop}, GRU: {model: GRU4Rec}}\n")
    made, folder = read_plan("s.yaml"), StudyFolder("out")
    assert results_of(made, folder).commands == ("recbole-pos compare s.yaml",)
    content = {**made.source.content, "base": {"data_path": "/here"}}
    elsewhere = make_plan(Source("s.yaml", content))
    assert results_of(elsewhere, folder).commands == (
        "recbole-pos compare s.yaml --data_path FOLDER",
    )
    other = make_plan(Source("s.yaml", {**content, "seeds": 3}))
    assert results_of(other, folder).commands == ("recbole-pos compare out",)
