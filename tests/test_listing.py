"""``models`` and ``schemes``: everything is there, whole, in the width there is."""

from __future__ import annotations

import io
import re
import sys

import pytest
from recbole.utils import get_model

from recbole_pos.cli.listing import paragraph, summary
from recbole_pos.cli.main import main
from recbole_pos.model import recbole_models
from recbole_pos.model.models import BASELINES, MODELS
from recbole_pos.position.build import describe
from recbole_pos.position.facts import FACTS
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.yaml_files import ROOT, read_yaml

OURS = {name: paragraph(model.__doc__) for name, model in {**MODELS, **BASELINES}.items()}
THEIRS = {**recbole_models.SEQUENTIAL, **recbole_models.GENERAL}
WITHOUT_PAPER = {"SASRecF", "Pop"}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def printed(monkeypatch, command: str, width: int, terminal: bool) -> list[str]:
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    assert main([command]) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()


@pytest.mark.parametrize("terminal", [False, True], ids=["file", "terminal"])
@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_everything_is_there_and_whole(monkeypatch, width: int, terminal: bool) -> None:
    """No line is wider than there is room; names stand at the left, in one piece, as in the table.

    What wraps is put together again cell by cell, so nothing may be lost on the way.
    """
    for command, told in (("models", {**OURS, **THEIRS}), ("schemes", SCHEMES)):
        lines = printed(monkeypatch, command, width, terminal)
        assert max(map(len, lines)) <= width
        assert "``" not in "".join(lines)
        rows = cells(lines)
        assert list(rows)[-len(told) :] == list(told)
        for name, text in told.items():
            expected = text if isinstance(text, str) else paragraph(text.__doc__)
            assert squeezed(expected) in rows[name], name
            for option in getattr(text, "options", ()):
                assert squeezed(option) in rows[name]


def cells(lines: list[str]) -> dict[str, str]:
    """Name -> what is said of it, without spaces; of a table or of pages."""
    rows: dict[str, list[str]] = {}
    for line in lines:
        if line.strip().startswith("parameters added"):  # the note at the end
            break
        if line.startswith("│"):
            name, *others = (cell.strip() for cell in line.strip("│").split("│"))
        elif line.startswith("  ") and rows:
            name, others = "", [line]
        elif re.fullmatch(r"\w+", line):
            name, others = line, []
        else:
            continue
        if name:
            rows[name] = [""] * 6
        for column, cell in enumerate(others):
            rows[next(reversed(rows))][column] += cell
    return {name: " ".join(map(squeezed, row)) for name, row in rows.items()}


def squeezed(text: str) -> str:
    return "".join(text.split())


def test_what_schemes_add_is_told(monkeypatch) -> None:
    lines = printed(monkeypatch, "schemes", 120, False)
    assert any("kernel" in line and "1,375" in line for line in lines)  # n = 50, two layers
    assert "n = 50" in lines[-1]


@pytest.mark.parametrize("name", [n for n in THEIRS if n not in WITHOUT_PAPER])
def test_papers_are_those_of_recboles_source(name: str) -> None:
    """First author, title, venue and year."""
    author, title, venue, year = re.search(
        r"\(([\w-]+) et al\., \"(.+)\", (\w+) (\d{4})\)\.$", THEIRS[name]
    ).groups()
    source = " ".join(sys.modules[get_model(name).__module__].__doc__.split())
    reference = source.split("Reference:")[1].lower()
    assert re.search(rf"\b{author.lower()}\b", reference) and title.lower() in reference
    if name == "ItemKNN":  # "the 7th ACM conference on Recommender systems"
        venue, year = "recommender systems", "7th"
    assert year in reference and venue.lower() in reference


@pytest.mark.parametrize("name", [n for n in {**OURS, **THEIRS} if n not in WITHOUT_PAPER])
def test_a_model_is_a_sentence_with_its_paper(name: str) -> None:
    text = {**OURS, **THEIRS}[name]
    assert re.search(r"( et al\.| and \w+), \".+\", .*\d{4}", text) and text.endswith(").")
    assert text not in ("sequential", "general") and text[0].isupper()


@pytest.mark.parametrize("name", [*OURS, *SCHEMES])
def test_no_equation_without_its_paper(name: str) -> None:
    text = OURS.get(name) or paragraph(SCHEMES[name].__doc__)
    assert text.endswith(".") or name == "linear_attention"
    for place in re.findall(r"\([^()]*\b(?:sections?|equations?|eq\.|Tables?)\b[^()]*\)", text):
        assert re.search(r"\((?:HSTU, )?\w+ (?:et al\.|and \w+), ", place), text


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_told_of_a_scheme_is_true(name: str) -> None:
    """It is written down, so that listing schemes imports none of them."""
    found = describe(name)
    assert FACTS[name] == (found.place, found.needs, found.parameters)
    assert set(read_yaml(ROOT / "position" / f"{name}.yaml")) == set(found.options)
    assert summary(SCHEMES, name) == paragraph(SCHEMES[name].__doc__)
