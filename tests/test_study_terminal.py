"""Tables on terminals of any width: no number and no word is broken, what is left out is named."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from study_example import example

from recbole_pos.study.rendered_table import Cell, RenderedTable
from recbole_pos.study.result_tables import all_tables
from recbole_pos.study.results import compare
from recbole_pos.study.terminal import Fitted

FIGURE = re.compile(r"[+-]?\d[\d.,]*\d\*?|\d\*?")
METRICS = RenderedTable(
    "Two models",
    ("row", "seeds", "NDCG@10", "HR@10", "NDCG@10 - GRU4Rec", "epochs"),
    ((Cell("PosSASRec"), Cell("2"), Cell("0.1080 ± 0.0034"), Cell("0.2025 ± 0.0060"),
      Cell("+0.0501*", "[+0.0357, +0.0646]"), Cell("20")),),
    spare=(5, 3, 1),
)  # fmt: skip


def printed(table: RenderedTable, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(Fitted(table))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


def body(text: str) -> list[str]:
    """Cells, one a line of the terminal."""
    lines = [line for line in text.splitlines() if line.startswith(("│", "┃"))]
    return [cell.strip() for line in lines for cell in re.split("[│┃]", line)[1:-1]]


@pytest.mark.parametrize("width", [120, 80, 60])
def test_no_figure_and_no_word_is_broken(width: int) -> None:
    results = example(users=300)
    for table in all_tables(results, [compare(results, results.plan.tables[0])]):
        cells = [cell for line in table.lines for cell in line]
        whole = {part for cell in cells for part in FIGURE.findall(f"{cell.text} {cell.detail}")}
        names = [cell.text for cell in cells] + [cell.detail for cell in cells] + [*table.columns]
        words = {word for name in names for word in re.split(r"[ |]", name)}
        for cell in body(printed(table, width)):
            assert set(cell.split()) <= words, table.title
            assert set(FIGURE.findall(cell)) <= whole | set(FIGURE.findall(" ".join(table.columns)))


def test_what_is_folded_is_folded_between_figures() -> None:
    for width, cell in ((120, "0.1080 ± 0.0034"), (70, "± 0.0034")):
        assert cell in body(printed(METRICS, width)), width
    assert "[+0.0357, +0.0646]" in body(printed(METRICS, 70))  # in a line of its own


def test_columns_go_in_their_order_and_are_named() -> None:
    assert "Left out" not in printed(METRICS, 74)
    text = " ".join(printed(METRICS, 60).split())
    assert "Left out for want of width: HR@10 and epochs; table.md has all columns." in text
    assert {"PosSASRec", "+0.0501*"} <= set(body(printed(METRICS, 60)))
    few = printed(METRICS, 24)  # the name and the main metric are the last to stay
    assert {"PosSASRec", "0.1080"} <= set(body(few)) and "+0.0501" not in few


def test_names_of_many_words_are_folded_between_them() -> None:
    name = "AttrFormer from all attributes of behaviour and none of posterior targets"
    table = RenderedTable("t", ("row", "x"), ((Cell(name), Cell("0.1080 ± 0.0034")),))
    cells = body(printed(table, 50))
    assert " ".join(cells[2::2]) == name
