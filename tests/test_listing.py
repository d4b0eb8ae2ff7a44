"""``models`` and ``schemes``: everything is there, whole, in the width there is, and true."""

from __future__ import annotations

import io
import re
import sys

import pytest

from recbole_pos.cli.listing import paragraph, summary
from recbole_pos.cli.main import main
from recbole_pos.model import recbole_models
from recbole_pos.model.models import BASELINES, MODELS
from recbole_pos.position.build import describe
from recbole_pos.position.schemes import FACTS, SCHEMES
from recbole_pos.yaml_files import ROOT, read_yaml

OURS = {name: paragraph(model.__doc__) for name, model in {**MODELS, **BASELINES}.items()}
OTHERS = {**recbole_models.SEQUENTIAL, **recbole_models.GENERAL}
WITHOUT_PAPER = {"SASRecF", "Pop"}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("width", "kind"), [(40, io.StringIO), (80, Terminal), (200, Terminal)])
def test_everything_is_there_and_whole(monkeypatch, width: int, kind: type[io.StringIO]) -> None:
    """No line is wider than there is room, and nothing of a text is lost where it wraps."""
    schemes = {name: paragraph(scheme.__doc__) for name, scheme in SCHEMES.items()}
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    for command, texts in (("models", {**OURS, **OTHERS}), ("schemes", schemes)):
        monkeypatch.setattr(sys, "stdout", screen := kind())
        assert main([command]) == 0
        lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()
        assert max(map(len, lines)) <= width and "``" not in screen.getvalue()
        cells = [re.sub("^[│ ]+", "", line).rpartition("│ ") for line in lines if "━" not in line]
        last = "".join("".join((cell[2] or cell[0]).strip("│ ").split()) for cell in cells)
        rest = iter("".join("".join(line.split()) for line in lines) if width < 80 else last)
        for name, text in texts.items():
            assert all(letter in rest for letter in "".join(text.split())), name
    if width == 200:
        assert any("kernel" in line and "1,375" in line for line in lines)  # n = 50, two layers
        assert "n = 50" in lines[-1]


def test_what_is_described_has_its_paper() -> None:
    for name, text in {**OURS, **OTHERS}.items():
        assert text.endswith(".") and text[0].isupper(), name
        if name not in WITHOUT_PAPER:
            assert re.search(r"( et al\.| and \w+), \".+\", .*\d{4}", text), name
    schemes = {name: paragraph(SCHEMES[name].__doc__) for name in SCHEMES}
    for name, text in {**OURS, **schemes}.items():
        assert text.endswith(".") or name == "linear_attention"
        for place in re.findall(r"\([^()]*\b(?:sections?|equations?|eq\.|Tables?)\b[^()]*\)", text):
            assert re.search(r"\((?:HSTU, )?\w+ (?:et al\.|and \w+), ", place), text


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_known_of_a_scheme_is_true(name: str) -> None:
    """It is written down, so that listing schemes imports none of them."""
    assert FACTS[name] == describe(name)
    assert set(read_yaml(ROOT / "position" / f"{name}.yaml")) == set(SCHEMES[name].options)
    assert summary(SCHEMES, name) == paragraph(SCHEMES[name].__doc__)
