"""README.md and docs/ as they stand: examples run; links, files, names and defaults are true."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
import yaml

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.model import recbole_models
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.runs.space import fit_space, read_space
from recbole_pos.yaml_files import ROOT as PROPERTIES
from recbole_pos.yaml_files import read_yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "results").glob("*.md"))]
MODEL_PAGES = [path for path in PAGES if path.parent.name == "models" and path.stem != "index"]


def text(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(language: str, page: str | Path) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.S | re.M)


def scripts() -> dict[str, str]:
    """Examples that are whole programs: the first line is a comment with the file's name."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in blocks("python", page):
            if named := re.match(r"# (\w+\.py)\n", block):
                assert named[1] not in found, f"two examples are called {named[1]}"
                found[named[1]] = block
    return found


def rows(page: str | Path, section: str = "") -> Iterator[list[str]]:
    """The cells of every table below a heading (of all, without one), headers left out."""
    under = text(page).partition(section)[2] if section else text(page)
    under = under.split("\n## ")[0] if section else under
    lines = [line for line in under.splitlines() if line.startswith("|")]
    for line in lines:
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        yield [cell.strip() for cell in cells]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def run_scripts(folder: Path, *commands: list[str]) -> str:
    """Lays all examples into a folder and runs some of them there; what the last one printed."""
    for name, content in scripts().items():
        (folder / name).write_text(content, encoding="utf-8")
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_examples_are_run_here() -> None:
    reported = {"recency.py", "tiny_gru.py", "day_part.py", "looks_ahead.py", "dilated.py"}
    assert set(scripts()) == reported | {"first_steps.py", "quick_start.py"}


# dilated.py and day_part.py are also run by tests/test_wheel.py, as a package of their own
long = pytest.mark.long  # docstrings have the calls of quick_start.py


@pytest.mark.parametrize(
    "script",
    [
        *(
            pytest.param(f"{name}.py", marks=long)
            for name in ("quick_start", "recency", "first_steps")
        ),
        "tiny_gru.py",
    ],
)
def test_an_example(tmp_path: Path, script: str) -> None:
    printed = run_scripts(tmp_path, [script])
    assert re.search(r"\b0\.\d+$", printed, re.M)  # NDCG@10


@long
def test_the_scheme_that_reads_the_clock_and_does_not_look_ahead(tmp_path: Path) -> None:
    printed = run_scripts(tmp_path, ["day_part.py"], ["looks_ahead.py", "day-part-run"])
    assert "states before the change move by 0" in printed


def test_the_space_of_a_search(tmp_path: Path) -> None:
    (block,) = blocks("yaml", "docs/tuning.md")
    (tmp_path / "space.yaml").write_text(block)
    space = read_space(tmp_path / "space.yaml")
    fit_space(space, lambda more: PosConfig("PosSASRec", "ml-100k", None, more))
    assert {"rope", "kernel"} == {name for o in space.parameters[2].values for name in o}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.suggest(study.ask()) for _ in range(20)]
    assert all(("kernel_l" in options) == ("kernel" in options["position"]) for options in drawn)


def test_recbole_models_are_counted_and_named() -> None:
    usable = [*recbole_models.SEQUENTIAL, *recbole_models.GENERAL]
    assert f"{len(usable)} of RecBole's models" in text("README.md")
    section = text("docs/models/index.md").partition("## RecBole's")[2]
    listed = re.search(r"ranking: (.*?)\.\s", section, re.S)[1]
    assert re.split(r",\s+|\s+and\s+", listed) == usable


def test_every_scheme_has_its_row() -> None:
    reported = [row[0].strip("`") for row in rows("docs/schemes.md") if len(row) >= 5]
    assert sorted(name for name in reported if name not in ("scheme", "---")) == sorted(SCHEMES)


@pytest.mark.parametrize("page", MODEL_PAGES, ids=lambda page: page.stem)
def test_options_are_called_so_and_have_these_defaults(page: Path) -> None:
    """Defaults are compared in rows of one option."""
    model = re.match(r"# (\w+)", text(page))[1]
    known = read_yaml(PROPERTIES / "overall.yaml")
    own = read_yaml(PROPERTIES / "model" / f"{model}.yaml")
    for scheme in own["position"]:
        known |= read_yaml(PROPERTIES / "position" / f"{scheme}.yaml")
    known |= own
    checked = 0
    for option, default, *_ in rows(page, "\n## Options\n"):
        for name in names(option):
            assert name in known, f"{model} has no option {name}"
        if len(names(option)) == 1 and known[names(option)[0]] is not None:
            assert yaml.safe_load(default.strip("`")) == known[names(option)[0]], option
            checked += 1
        if option.startswith("`top_k`") and model == "AttrFormer":
            break  # tables of `relations` follow
    assert checked or model == "PARec"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", text(page)):
        assert (page.parent / link).is_file(), f"{page.name}: {link}"


def test_a_package_index_gets_absolute_links() -> None:
    made = runpy.run_path(str(ROOT / "setup.py"))["metadata"](text("README.md"), "https://x.org/r")
    links = re.findall(r"\]\(([^)#][^)]*)\)", made["long_description"])
    assert len(links) > 30 and all(link.startswith("https://") for link in links)
    of_repository = [link for link in links if link.startswith("https://x.org/r/")]
    for link in [*of_repository, *made["project_urls"].values()]:
        kind, _, path = link.removeprefix("https://x.org/r/").partition("/main/")
        assert link == "https://x.org/r" or (ROOT / path).is_file()
        assert (kind == "raw") == link.endswith((".svg", ".png")) or "report-1280" in link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`(?!dataset/)([\w./]+/[\w.]+\.(?:py|yaml|md))`", text(page)):
        places = (ROOT, ROOT / "recbole_pos", PROPERTIES / "presets", ROOT / "docs")
        assert any((place / name).is_file() for place in places), f"{page.name}: {name}"


@long
def test_examples_of_docstrings(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another, in an empty folder, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    names, reported = {"recbole_pos": recbole_pos}, []
    for name in ("convert", "run", "load", "recommend", "attach", "search", "compare"):
        text = getattr(recbole_pos, name).__doc__
        test = parser.get_doctest(text, names, name, None, None)
        assert test.examples, f"recbole_pos.{name} has no example"
        with contextlib.redirect_stdout(io.StringIO()):  # tables of results
            for example in test.examples:
                if not example.want:
                    exec(example.source, names)
                    example.source = "None\n"
        test.globs = names
        runner.run(test, out=reported.append, clear_globs=False)
    assert not runner.failures, "".join(reported)
