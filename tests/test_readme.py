"""README.md, docs/ and examples/ as they stand: programs run; links and defaults are true."""

import doctest
import json
import logging
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from conftest import fork, run_python
from schemes import defaults, sizes

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.model.models import MODELS, RECBOLE
from recbole_pos.position.build import build_schemes
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.reporter import LOGGER
from recbole_pos.tuning.space import check_space, read_space
from recbole_pos.yaml_files import ROOT as PROPERTIES
from recbole_pos.yaml_files import read_overall_defaults, read_yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "results").glob("*.md"))]
MODEL_PAGES = [path for path in PAGES if path.parent.name == "models" and path.stem != "index"]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
long = pytest.mark.long


def text(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(language: str, page: str | Path, section: str = "") -> list[str]:
    """The blocks of a language in a page, or from a heading of it on."""
    content = text(page)
    content = content[content.index(section) :]
    return re.findall(rf"^```{language}\n(.*?)^```$", content, re.S | re.M)


# --- examples ---


def run_program(script: str, *arguments: str) -> str:
    """What a program of the working directory prints, in a process that has imported everything."""

    def run() -> None:
        sys.argv, sys.path[0] = [script, *arguments], ""
        runpy.run_path(script, run_name="__main__")

    done = fork(run)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def few_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the programs of the pages and 60 users of ml-100k."""
    source = Path(PosConfig("Pop", "ml-100k")["data_path"], "ml-100k.inter")
    header, *lines = source.read_text("utf-8").splitlines()
    users = list(dict.fromkeys(line.split("\t")[0] for line in lines))[:60]
    lines = [line for line in lines if line.split("\t")[0] in users]
    (tmp_path / "dataset" / "ml-100k").mkdir(parents=True)
    (tmp_path / "dataset" / "ml-100k" / source.name).write_text("\n".join([header, *lines, ""]))
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        for block in blocks("python", page):
            if named := re.match(r"# (\w+\.py)\n", block):
                assert not (tmp_path / named[1]).exists(), "two examples have one name"
                (tmp_path / named[1]).write_text(block, encoding="utf-8")


@pytest.mark.parametrize("script", ["first_steps", "recency", "dilated"])
def test_an_example(few_users: None, script: str) -> None:
    assert re.search(r"\b0\.\d+$", run_program(f"{script}.py"), re.M)  # NDCG@10


@long
def test_the_scheme_that_reads_the_clock_and_does_not_look_ahead(few_users: None) -> None:
    run_program("day_part.py")
    printed = run_program("looks_ahead.py", "day-part-run")
    assert "states before the change move by 0" in printed


@long
def test_examples_of_docstrings(cluster: Path, tmp_path: Path, monkeypatch) -> None:
    """One after another, in an empty folder, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LOGGER, "handlers", [logging.NullHandler()])  # prints no results
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    names, printed = {"recbole_pos": recbole_pos}, []
    for name in ("convert", "run", "load", "recommend", "attach", "tune", "compare"):
        docstring = getattr(recbole_pos, name).__doc__
        test = parser.get_doctest(docstring, {}, name, None, None)
        assert test.examples, f"recbole_pos.{name} has no example"
        test.globs = names  # of the docstrings before, too
        runner.run(test, out=printed.append, clear_globs=False)
    assert not runner.failures, "".join(printed)


def test_the_space_of_a_search(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(*blocks("yaml", "docs/tuning.md"))
    space = read_space(tmp_path / "space.yaml")
    check_space(space, lambda more: PosConfig("PosSASRec", "ml-100k", None, more))


def test_the_sample_dataset_is_what_its_generator_writes(tmp_path: Path) -> None:
    run_python(ROOT / "dataset" / "make_toyshop.py", tmp_path)
    for name in ("toyshop.inter", "toyshop.user", "toyshop.item"):
        assert (tmp_path / name).read_bytes() == (ROOT / "dataset/toyshop" / name).read_bytes()


def test_the_guide_from_csv_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "orders.csv").write_text(blocks("csv", "docs/data.md")[0], encoding="utf-8")
    words = shlex.split(blocks("sh", "docs/data.md")[0])
    assert words[:2] == ["recbole-pos", "convert"]
    monkeypatch.chdir(tmp_path)
    assert main(words[1:]) == 0
    written = read_yaml(tmp_path / "dataset" / "shop" / "shop.yaml")
    printed = yaml.safe_load(blocks("yaml", "docs/data.md")[0])  # of what the command writes
    assert {key: written[key] for key in printed} == printed

    relations, options = tmp_path / "relations.yaml", {"data_path": str(tmp_path / "dataset")}
    relations.write_text(blocks("yaml", "docs/models/attrformer.md", "### Relations")[0])
    for model, files in (("FPARec", None), ("AttrFormer", [relations])):
        given = {**options, "epochs": 1}
        result = recbole_pos.run(model, "shop", files, given, tmp_path / model, verbose=False)
        assert result.epochs == result.valid_targets == result.test_targets == 1
    log = recbole_pos.load(tmp_path / "FPARec").dataset.log
    assert (log.times[:2] == 1709399131).all()  # 2024-03-02 17:05:31 UTC, exact, twice


@long  # each step has tests of its own
@pytest.mark.skipif(shutil.which("curl") is None, reason="the script asks the service by curl")
def test_the_example_of_a_shop_from_export_to_service(tmp_path: Path) -> None:
    """As examples/shop/run.sh has it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, "PORT": str(port), "CUSTOMERS": "150"}
    command = ["bash", str(ROOT / "examples/shop/run.sh"), "--epochs=1", "--hidden_size=16"]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(answer["recommendations"][0]["items"]) == 3
    baskets = pd.read_csv(tmp_path / "baskets.csv")
    assert baskets.groupby("id")["by"].first().tolist() == ["model", "popularity"]
    assert (tmp_path / "exported" / "README.md").is_file()


def code_of(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_first_notebook_runs(capsys: pytest.CaptureFixture) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = code_of(ROOT / "examples/ten_minutes.ipynb")
    code = "\n".join("".join(cell["source"]) for cell in cells)
    parameters = "users, epochs = None, 20"
    assert code.count(parameters) == 1
    exec(code.replace(parameters, "users, epochs = 40, 1"), names)
    assert names["found"].shape == (9, 1) and names["short"].result.epochs == 2
    assert len(names["again"].recommend(histories=[["Star Wars"]], k=3)) == 3
    assert "epoch 1: loss" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_all_notebooks_were_run_to_their_end(notebook: Path) -> None:
    cells = code_of(notebook)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert outputs and all(output["output_type"] != "error" for output in outputs)
    printed = json.dumps(outputs)
    assert "site-packages" not in printed and "\\u001b" not in printed and len(printed) < 500_000


# --- what pages say ---


def rows(page: str | Path, section: str = "") -> Iterator[list[str]]:
    under = text(page).partition(section)[2].split("\n## ")[0] if section else text(page)
    for line in under.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_recbole_models_are_counted_and_named() -> None:
    assert f"{len(RECBOLE)} models of RecBole" in text("README.md")
    section = text("docs/models/index.md").partition("## RecBole's")[2]
    listed = re.search(r"ranking: (.*?)\.\s", section, re.S)[1]
    assert re.split(r",\s+|\s+and\s+", listed) == list(RECBOLE)


def test_every_scheme_has_its_row_and_its_number_of_parameters() -> None:
    table = list(rows("docs/schemes.md"))
    names = re.findall(r"`(\w+)`", str([row[:1] if len(row) == 4 else row for row in table]))
    assert sorted(names) == sorted(SCHEMES)
    learned = {row[0].strip("`"): row[2] for row in table if len(row) == 4}
    for name in SCHEMES.keys() & learned:
        options = {**defaults(name), "train_windows": "prefix"}
        schemes = build_schemes(name, sizes(heads=2, n=50, d=64), options, has_attention=True)
        parts = (schemes.input, schemes.attention(), schemes.attention())
        learns = {parameter for part in parts for parameter in part.parameters()}
        assert sum(p.numel() for p in learns) == int(learned[name].replace(",", "")), name


@pytest.mark.parametrize("page", MODEL_PAGES, ids=lambda page: page.stem)
def test_options_are_called_so_and_have_these_defaults(page: Path) -> None:
    """Defaults are compared in rows of one option."""
    model = re.match(r"# (\w+)", text(page))[1]
    own = MODELS.defaults(model)
    known = read_overall_defaults()
    for scheme in own["position"]:
        known |= SCHEMES.defaults(scheme)
    known |= own
    checked = 0
    for option, default, *_ in rows(page, "\n## Options\n"):
        names = re.findall(r"`(\w+)`", option)
        assert set(names) <= set(known)
        if len(names) == 1 and known[names[0]] is not None:
            assert yaml.safe_load(default.strip("`")) == known[names[0]], option
            checked += 1
        if option.startswith("`top_k`") and model == "AttrFormer":
            break  # tables of `relations` follow
    assert checked or model == "PARec"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_and_named_files_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", text(page)):
        assert (page.parent / link).is_file(), f"{page.name}: {link}"
    for name in re.findall(r"`(?!dataset/)([\w./]+/[\w.]+\.(?:py|yaml|md))`", text(page)):
        places = (ROOT, ROOT / "recbole_pos", PROPERTIES / "presets", ROOT / "docs")
        assert page not in PAGES or any((place / name).is_file() for place in places), name
