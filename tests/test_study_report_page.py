"""The report of a generated study, a page of html: what it says, and that it needs nothing else."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from study_example import example
from test_study_report import nothing_yet

from recbole_pos.study.charts import COLORS, all_charts, draw_cost, draw_curves, looks
from recbole_pos.study.findings import findings
from recbole_pos.study.plan import TablePlan
from recbole_pos.study.report import html, protocol
from recbole_pos.study.results import Comparison, Results, compare
from recbole_pos.study.tables import (
    markdown,
    tidy,
)


@pytest.fixture(scope="module")
def results() -> Results:
    return example(users=600)


@pytest.fixture(scope="module")
def found(results) -> Comparison:
    return compare(results, results.plan.tables[0])


class _Page(HTMLParser):
    """What a page is made of."""

    VOID = {"meta", "path", "use", "rect", "br", "link", "img", "input"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def test_the_report_needs_nothing_else(results, found):
    text = html(results, [found])
    page = _Page(text)
    assert not page.open
    for tag, name, value in page.attributes:
        assert tag not in ("script", "link", "img", "iframe"), tag
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#"), (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", text)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    referred = {v[1:] for _, name, v in page.attributes if name == "xlink:href"}
    referred |= set(re.findall(r"url\(#([^)]*)\)", text))
    assert referred and referred <= set(ids)
    assert len(text) < 1_000_000


def test_the_report_says_everything(results, found):
    words = " ".join(_Page(html(results, [found])).words)
    for text in (
        results.plan.title,
        results.plan.question,
        *findings(results, found),
        *protocol(results),
        "the loss is not a number after 3 epochs",
        "recbole-pos compare shop.yaml",
        "2.13.0",
        "0a1b2c3",
        "hidden_dropout_prob: 0.3",
        "NDCG@10 by history",
        "NDCG@10 against training time",
        "NDCG@10 against number of weights",
        "in validation, a line a run",
    ):
        assert text in words


def test_figures_stay_with_their_sign_and_unit(results):
    page = html(results, [compare(results, results.plan.tables[0])])
    assert re.search(r"0\.\d{4} ±\N{NO-BREAK SPACE}0\.\d{4}<", page)
    assert re.search(r">\d+\N{NO-BREAK SPACE}min \d+\N{NO-BREAK SPACE}s<", page)


def test_names_of_the_users_are_no_html(results):
    evil = '<script>alert("x")</script> $a$ & [b]'
    plan = dataclasses.replace(
        results.plan,
        title=evil,
        question=evil,
        rows={**results.plan.rows, evil: results.plan.rows["NoPE"]},
        tables=(TablePlan(evil, (evil, "RoPE"), ("ndcg@10",), evil),),
    )
    assert results.ranks is not None
    renamed = {"NoPE": evil}
    ranks = dataclasses.replace(results.ranks, runs=results.ranks.runs.replace(renamed))
    changed = {
        name: getattr(results, name).replace(renamed) for name in ("runs", "curves", "searches")
    }
    odd = dataclasses.replace(results, plan=plan, ranks=ranks, commands=(evil,), **changed)
    page = _Page(html(odd, [compare(odd, plan.tables[0])]))
    assert not any(tag == "script" for tag, _, _ in page.attributes)
    assert evil in " ".join(page.words)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_table_whose_rows_have_no_run_yet_beside_one_that_has(results, found):
    empty = nothing_yet(results)
    both = tidy([found, compare(empty, empty.plan.tables[0])])
    pd.testing.assert_frame_equal(both, tidy([found]))


def test_a_report_of_nothing_yet(results):
    empty = nothing_yet(results)
    found = compare(empty, empty.plan.tables[0])
    words = " ".join(_Page(html(empty, [found])).words)
    assert "No run has finished yet." in words
    assert all_charts(empty, found) == []
    assert "0 of 3" in markdown(empty, [found])
    assert len(tidy([found])) == 0


def test_pictures_are_the_same_each_time_and_say_what_they_show(results, found):
    charts, again = all_charts(results, found), all_charts(results, found)
    assert [chart.svg for chart in charts] == [chart.svg for chart in again]
    assert len(charts) == 7
    for chart in charts:
        assert chart.alternative and "Kernel" in chart.alternative
        head = chart.svg[: chart.svg.index(">")]
        assert "viewBox" in head and " width=" not in head and " height=" not in head


def test_rows_can_be_told_apart_without_colours():
    many = [f"row {number}" for number in range(20)]
    found = looks(many)
    assert len(set(found.values())) == 20 and len(set(COLORS)) == 7
    assert len({(look.marker, look.dash) for look in found.values()}) == 20


def test_what_cannot_be_drawn_is_left_out(results, found):
    free = dataclasses.replace(results, runs=results.runs.drop(columns="seconds"))
    assert draw_cost(free, found, "seconds") is None
    none = dataclasses.replace(results, curves=pd.DataFrame(columns=results.curves.columns))
    assert draw_curves(none, list(results.plan.rows)) is None
    one = compare(results, TablePlan("one", ("NoPE",), ("ndcg@10",), "NoPE"))
    assert [chart.title for chart in all_charts(results, one)][0].startswith("NDCG@10 in valid")
