"""A study that is like another one: what it takes over, what its own file wins, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from recbole_pos.errors import UsageError
from recbole_pos.study.plan import Plan
from recbole_pos.study.reading import make_plan, read_plan
from recbole_pos.study.source import Source

FIRST = {
    "title": "First",
    "dataset": "ml-100k",
    "base": {"model": "PosSASRec", "epochs": 9, "topk": [10]},
    "rows": {"NoPE": {"position": ["nope"]}, "time": {"position": ["time_rope"], "n_layers": 3}},
    "seeds": 3,
    "tables": [{"title": "All"}],
}


def second(folder: Path, **content: Any) -> Plan:
    (folder / "first.yaml").write_text(yaml.safe_dump(FIRST), encoding="utf-8")
    path = folder / "more/second.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({"like": "../first.yaml", **content}), encoding="utf-8")
    return read_plan(path)


def test_what_is_not_said_is_taken_over(tmp_path: Path) -> None:
    plan = second(tmp_path, title="Second", dataset="shop")
    assert (plan.title, plan.dataset, plan.seeds) == ("Second", "shop", (2020, 2021, 2022))
    assert plan.base == FIRST["base"] and list(plan.rows) == ["NoPE", "time"]
    assert plan.tables[0].title == "All" and plan.tables[0].rows == ("NoPE", "time")


def test_base_and_rows_option_by_option(tmp_path: Path) -> None:
    plan = second(
        tmp_path,
        base={"epochs": 2},
        rows={"time": {"n_layers": 1}, "RoPE": {"position": ["rope"]}},
    )
    assert plan.base == {"model": "PosSASRec", "epochs": 2, "topk": [10]}
    assert list(plan.rows) == ["NoPE", "time", "RoPE"]
    assert plan.rows["time"].options == {"position": ["time_rope"], "n_layers": 1}


def test_nothing_of_its_own(tmp_path: Path) -> None:
    """An empty row or base takes all of the other's."""
    plan = second(tmp_path, base=None, rows={"time": None})
    assert plan.base == FIRST["base"]
    assert plan.rows["time"].options == {"position": ["time_rope"], "n_layers": 3}


def test_what_belongs_to_rows_goes_with_them(tmp_path: Path) -> None:
    """Reference, figures and tables of rows that are left out, and figures of other data."""
    more = {
        "reference": "time",
        "paper": {"NoPE": {"ndcg@10": 0.1}, "time": {"ndcg@10": 0.2}},
        "tables": [
            {"title": "Both", "rows": ["NoPE", "time"]},
            {"title": "To time", "reference": "time"},
            {"title": "One", "rows": ["time"]},
        ],
    }
    for number, content in enumerate(({"rows": ["NoPE"]}, {"dataset": "shop"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "other.yaml").write_text(yaml.safe_dump({**FIRST, **more}), encoding="utf-8")
        plan = second(folder, **content, like="../other.yaml")
        if number:
            assert plan.paper == {} and len(plan.tables) == 3
        else:
            assert plan.reference == "NoPE" and plan.paper == {"NoPE": {"ndcg@10": 0.1}}
            assert [(one.title, one.rows) for one in plan.tables] == [("Both", ("NoPE",))]


def test_some_of_the_rows(tmp_path: Path) -> None:
    plan = second(tmp_path, rows=["time"])
    assert list(plan.rows) == ["time"] and plan.tables[0].rows == ("time",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"rows": ["Time"]}, r"second.yaml, line 2: there is no row 'Time'.*'?time"),
        ({"like": "third.yaml"}, r"second.yaml, line 1: like: .*third.yaml does not exist"),
        ({"like": "second.yaml"}, r"second.yaml, line 1: like: goes round in a circle"),
        ({"like": ""}, "like: expected the file of another study"),
        ({"rows": {"NoPE": {"seed": 3}}}, r"second.yaml, line 4: seed cannot stand here"),
        ({"tables": 3}, r"second.yaml, line 2: tables: expected a list"),
        ({"like": "."}, r"second.yaml, line 1: like: .* is a folder"),
        ({"base": {"model": "X"}, "reference": "Nope"}, r"second.yaml, line 4: there is no row"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    content: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        second(tmp_path, **content)


def test_what_is_wrong_in_the_other_file_is_told_there(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("dataset: a\nrows: {A: {}}\n", encoding="utf-8")
    (tmp_path / "second.yaml").write_text("like: first.yaml\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"first.yaml, line 2: row A has no model"):
        read_plan(tmp_path / "second.yaml")
    (tmp_path / "first.yaml").write_text("dataset: a\nbase: abc\n", encoding="utf-8")
    (tmp_path / "second.yaml").write_text("like: first.yaml\nbase: {epochs: 2}\n", "utf-8")
    with pytest.raises(UsageError, match=r"first.yaml, line 2: base: expected a mapping"):
        read_plan(tmp_path / "second.yaml")


def test_a_mapping_is_like_nothing() -> None:
    with pytest.raises(UsageError, match="like: goes with the file of a study"):
        make_plan(Source("study", {"like": "a.yaml"}))
    with pytest.raises(UsageError, match="unknown key 'lik'.*like"):
        make_plan(Source("study", {"lik": "a.yaml"}))
