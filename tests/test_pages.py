"""The studies of this repository, and the pages of results: tables follow from the kept runs."""

import json
import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import yaml
from conftest import load_script, make_log, write_atomic

import recbole_pos
from recbole_pos.study.configs import check_plan, make_row_config
from recbole_pos.study.study_file import read_plan

ROOT = Path(__file__).parent.parent
PAGE = """# A page

Words that stay.

<!-- begin my :: A study -->
old
<!-- end -->
<!-- begin absent :: A study -->
of data that are not here
<!-- end -->
"""
ROWS = {"Pop": {"model": "Pop"}, "Last": {"model": "SPop"}}
STUDY = {"dataset": "tiny", "title": "A study", "rows": ROWS, "seeds": 2}


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("pages", monkeypatch)


@pytest.fixture(scope="module")
def packed(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_atomic(make_log(), folder / "data")
    args = {"run_dir": folder / "study", "pack": folder / "my", "verbose": False}
    recbole_pos.compare(STUDY, config_dict={"data_path": str(folder / "data")}, **args)
    return folder / "my"


@pytest.fixture
def repository(
    pages: ModuleType, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    places = {"ROOT": "", "STUDIES": "studies", "RESULTS": "results"}
    places |= {"RUNS": "results/runs", "TABLES": "results/tables"}
    for name, place in places.items():
        monkeypatch.setattr(pages, name, tmp_path / place)
        (tmp_path / place).mkdir(exist_ok=True)
    write_atomic(make_log(), tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    for name, dataset in (("my", "tiny"), ("absent", "nowhere")):
        study = {**STUDY, "dataset": dataset}
        Path(f"studies/{name}.yaml").write_text(yaml.safe_dump(study), encoding="utf-8")
        shutil.copytree(packed, f"results/runs/{name}")
    Path("results/page.md").write_text(PAGE, encoding="utf-8")
    return tmp_path


def test_pages_and_tables_are_written(
    pages: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page has the short form; results/tables has every table with the conditions of its runs.
    Words, and tables of data that are not there, stay; then nothing changes."""
    study = {**STUDY, "rows": {**STUDY["rows"], "Never": {"model": "ItemKNN"}}}
    Path("studies/my.yaml").write_text(yaml.safe_dump(study), encoding="utf-8")
    page = repository / "results/page.md"
    assert pages.main(["--data_path", "data", "--check"]) == 1
    assert page.read_text("utf-8") == PAGE
    assert pages.main(["--data_path", "data"]) == 0
    text = page.read_text("utf-8")
    assert "Words that stay." in text and "of data that are not here" in text and "old" not in text
    assert "difference from Last [95% CI] |\n|---|---:|" in text
    assert "| Pop | 2 |" in text and "|\n\nNot run: Never.\n<!-- end -->" in text
    everything = " ".join((repository / "results/tables/my.md").read_text("utf-8").split())
    assert "4 trained and tested runs" in everything and "60 users, 40 items" in everything
    assert "compare studies/my.yaml --known results/runs/my --data_path FOLDER" in everything
    assert "absent: its data are not there" in capsys.readouterr().out
    assert pages.main(["--data_path", "data", "--check"]) == 0


@pytest.mark.parametrize(
    ("measured", "effects", "expects", "verdict"),
    [
        ((2, 1, 3, True), [3], "better", "replicated"),
        ((2, 1, 3, True), [50], "better", "replicated, smaller"),
        ((-2, -3, -1, True), [], "better", "contradicted"),
        ((1, -1, 3, False), [2, 9], "better", "inconclusive"),
        ((1, -1, 3, False), [4, 9], "better", "not replicated"),
        ((1, -1, 3, False), [], "better", "inconclusive"),
        ((2, 1, 3, False), [4], "better", "inconclusive"),  # one seed, in the paper's direction
        ((-2, -3, -1, True), [-2], "same", "inconclusive"),
        ((-2, -3, -1, True), [-0.5], "same", "not replicated"),
    ],
)
def test_a_claim_is_judged(
    monkeypatch: pytest.MonkeyPatch, measured: tuple, effects: list, expects: str, verdict: str
) -> None:
    claims = load_script("claims", monkeypatch)
    difference, low, high, is_significant = measured
    found = claims.Measured(difference, low, high, is_significant, "own")
    assert claims.judge(found, effects, expects) == verdict
    if not is_significant:  # nor can an interval without the noise of seeds refute anything
        found = found._replace(seed_noise="unknown")
        assert claims.judge(found, effects, expects) == "inconclusive"


def test_claims_follow_from_tables(
    pages: ModuleType, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two configurations the table is about; a claim without one is an error."""
    pages.main(["--data_path", "data"])
    claims = load_script("claims", monkeypatch)
    lines = pd.read_csv("results/tables/my.csv")
    (table,) = lines["table"].unique()
    asked = (repository / "results", f"my :: {table}", "ndcg@10")
    means = lines[lines["metric"] == "ndcg@10"].drop_duplicates("row").set_index("row")["mean"]
    for row, other in (("Last", "Pop"), ("Pop", "Last")):
        one = claims.measure(*asked, row, other)
        assert one.difference == pytest.approx(100 * (means[row] / means[other] - 1))
    with pytest.raises(KeyError, match="Never"):
        claims.measure(*asked, "Pop", "Never")
    test = {"data": "a", "page": "page.md", "table": asked[1], "row": "Pop", "from": "Last"}
    given = {"Paper": [{"claim": "Pop helps", "paper": {"a": [30, 1], "b": None}, "here": [test]}]}
    Path("claims.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    tests = claims.read_claims(Path("claims.yaml"), asked[0])
    line = f"| Pop helps | [a](page.md) | +2900.0% | {one} | not replicated |"
    assert line in claims.tabulate(tests, "the papers' data")
    assert "Pop helps" not in claims.tabulate(tests, "other data")


def test_leaderboards_follow_from_runs(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both metrics are those that the runs recorded; the best model stands first."""
    board = load_script("leaderboard", monkeypatch)
    monkeypatch.setattr(board, "STUDIES", repository / "studies")
    models = [{"model": "popular", "row": "Pop", "varies": False}, {"model": "last", "row": "Last"}]
    models += [{"model": "theirs", "published": {"ndcg@10": 9.0}}]
    group = {"protocol": "one", "study": "my", "models": models}
    results = repository / "results"
    first, *others = re.findall(r"^\| (\w+) \|", board.tabulate([group], results), re.M)[1:]
    assert first == "theirs" and sorted(others) == ["last", "popular"]
    facts = json.loads((results / "runs/my/facts.json").read_text("utf-8"))
    recorded = {run["row"]: run["test"] for run in facts.values()}
    for entry, seeds in zip(models, ("–", "2"), strict=False):  # Pop does not vary
        last = board.read_figures("my", [entry["row"]], results).iloc[-1].to_dict()
        test = recorded[entry["row"]]
        assert last == pytest.approx({name: test[name] for name in last}, abs=1e-6)
        assert board.read_line(entry, group, results).cells[4] == seeds
    with pytest.raises(KeyError, match="Never"):
        board.read_line({"model": "x", "row": "Never"}, group, results)


def test_claims_and_leaderboards_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    claims, board = (load_script(name, monkeypatch) for name in ("claims", "leaderboard"))
    assert claims.main(["--check"]) == 0, "python studies/claims.py"
    claims.draw(claims.read_claims(claims.CLAIMS, claims.RESULTS), tmp_path / "claims.png")
    assert (tmp_path / "claims.png").stat().st_size > 50_000
    assert board.main(["--check"]) == 0, "python studies/leaderboard.py"


@pytest.mark.long  # a minute; `make pages ARGS=--check` is the same
def test_the_pages_of_this_repository(pages: ModuleType) -> None:
    """Tables of data that anyone has are those of the runs in results/runs/."""
    assert pages.main(["--check"]) == 0


# --- figures in words: tables are made again from runs, words would keep what no run says any more

FIGURE = re.compile(r"(?<![\d.])\d*\.\d{3,}(?!\d)")
LINK = re.compile(r"\]\(([\w./@-]+\.md)[)#]")


def linked_results(page: Path, text: str) -> list[Path]:
    """The pages of results, or of all tables of a study, that a text of a page links to."""
    pages = [(page.parent / name).resolve() for name in LINK.findall(text)]
    return [one for one in pages if (ROOT / "results") in one.parents and one.is_file()]


def figures_in_tables(page: Path) -> set[float]:
    lines = re.findall(r"^\|.*", page.read_text("utf-8"), re.MULTILINE)
    return {float(figure) for figure in FIGURE.findall("\n".join(lines))}


def unfounded_figures(page: Path, text: str) -> list[str]:
    """Figures of three digits or more in a page's words that no linked or own table has."""
    is_result = page.parent == ROOT / "results"
    if is_result:  # its findings, not its methods
        found = re.search(r"^## Findings\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        text = found[1] if found else ""
    missing = []
    for paragraph in re.split(r"\n(?=- |\||\n)", text):
        sources = linked_results(page, paragraph) + [page] * is_result
        sources += [table for one in sources for table in linked_results(one, one.read_text())]
        known = set().union(*map(figures_in_tables, sources))
        for figure in FIGURE.findall(paragraph) if sources else ():
            half = 0.5 * 10.0 ** -len(figure.partition(".")[2]) + 1e-9
            if not any(abs(float(figure) - other) <= half for other in known):
                missing.append(figure)
    return missing


PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")]


def test_figures_in_words_stand_in_tables() -> None:
    for page in {*PAGES} - {ROOT / "results/README.md"}:  # its table is that of claims, see above
        assert not unfounded_figures(page, page.read_text("utf-8")), page
    words = "## Findings\n\n- NoPE falls to .9999 ([positions](positions.md)).\n"
    assert unfounded_figures(ROOT / "results" / "positions.md", words) == [".9999"]


STUDIES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "studies").rglob("*.yaml"))


@pytest.mark.parametrize("study", STUDIES)
def test_rows_of_studies_are_valid(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options, presets and models know each other; data are not read."""
    monkeypatch.chdir(ROOT)
    plan = read_plan(study)
    assert plan.title and plan.question and plan.protocol
    assert {row for table in plan.tables for row in table.rows} == set(plan.rows)
    elsewhere = {} if plan.dataset == "ml-100k" else {"data_path": str(tmp_path)}
    complete = lambda options: make_row_config({**options, **elsewhere}).plain  # noqa: E731
    monkeypatch.setattr("recbole_pos.study.configs.complete_options", complete)
    found = check_plan(plan)
    measured = {f"{m}@{k}".lower() for c in found.values() for m in c["metrics"] for k in c["topk"]}
    assert set(plan.metrics) <= measured
    counting = ("Pop", "ItemKNN")  # they read no epochs
    learn = [one for one in found.values() if one["epochs"] > 1 and one["model"] not in counting]
    for key in ("eval_args", "metrics", "topk", "valid_metric", "epochs", "stopping_step"):
        assert len({str(one[key]) for one in learn}) == 1, f"{key} differs between rows"
    commands = re.findall(r"^#   recbole-pos compare (.*)$", Path(study).read_text(), re.M)
    assert commands and all(shlex.split(command)[0] == study for command in commands)
