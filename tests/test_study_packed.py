"""Studies in files: the same tables without training, what is left to train, and strangers' packs.

One small study is trained for all of them.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import make_log, write_atomic
from small_study import study

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.study.study_folder import PackedStudy

ROWS = {"NoPE": {"position": ["nope"]}, "Pop": {"model": "Pop", "search": False}}
# Several targets of a user, which ranks have to find.
SPLIT = {"split": {"GT": [0.7, 0.85]}, "cold_items": "drop", "ties": "drop"}


@pytest.fixture(scope="module")
def made(cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A study, the folder where it was trained, and its pack."""
    root = tmp_path_factory.mktemp("packed")
    what = study(write_atomic(make_log(), root), rows=ROWS, search={"learning_rate": [1e-3, 1e-2]})
    what["base"]["eval_args"] = SPLIT
    here, pack = root / "here", root / "kept" / "study"
    compare(what, run_dir=here, pack=pack)
    return {"what": what, "here": here, "pack": pack}


def compare(what: Any, **given: Any) -> Any:
    return recbole_pos.compare(what, **{"verbose": False, **given})


def test_same_tables_without_training(made: dict, tmp_path: Path) -> None:
    """Elsewhere, without weights: tables, values of each run and ranks; packed again, the pack."""
    there, here, again = tmp_path / "there", made["here"], tmp_path / "again"
    (file := tmp_path / "study.json").write_text(json.dumps(made["what"]))
    known = Path(shutil.copytree(made["pack"], tmp_path / "study")) / "facts.json"
    # as of a study that did not search
    known.write_text(re.sub(r'"searched": {[^}]*}', '"searched": {}', known.read_text()))
    folders = ["--known", known.parent, "--run_dir", there, "--pack", again]
    assert main(list(map(str, ["compare", file, "--report", *folders]))) == 0
    assert (there / "table.md").read_text() == (here / "table.md").read_text()
    one, two = (pd.read_csv(place / "runs.csv") for place in (here, there))
    assert list(two["status"]) == ["done"] * 4 and set(two["known_from"]) == {"study"}
    pd.testing.assert_frame_equal(one.drop(columns="known_from"), two.drop(columns="known_from"))
    ranks = list(here.glob("runs/*/test_ranks.parquet"))
    for file in ranks:
        assert (there / file.relative_to(here)).read_bytes() == file.read_bytes()
    assert len(ranks) == 4 and not list(there.rglob("checkpoint.pt"))
    for file in ("facts.json", "epochs.parquet", "ranks.parquet"):
        assert (again / file).read_bytes() == (made["pack"] / file).read_bytes()


def test_only_what_is_missing_is_trained(made: dict, tmp_path: Path) -> None:
    """A seed more: its runs are trained, the search and the other seeds are not."""
    there = tmp_path / "there"
    found = compare({**made["what"], "seeds": 3}, run_dir=there, known=(made["pack"],))
    new = found.runs[found.runs["known_from"].fillna("") == ""]
    assert list(new["seed"]) == [2022, 2022] and set(new["status"]) == {"done"}
    assert {path.parent.name for path in there.rglob("checkpoint.pt")} == set(new["digest"])


def test_nothing_of_the_log_or_the_machine_is_in_it(made: dict, tmp_path: Path) -> None:
    """No user, item or time, no weights, no reasons, and no place of the machine that trained."""
    folder = Path(shutil.copytree(made["here"], tmp_path / "copy"))
    file = next(folder.glob("runs/*/fit.json"))
    more = {"reason": "/home/me is full", "split": {"boundaries": [1715729063.4]}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    compare(folder, report=True, pack=tmp_path / "kept")
    kept = b"".join(file.read_bytes() for file in (tmp_path / "kept").glob("*.*"))
    for word in (str(made["here"].parent), "/home/me", "1715729063"):
        assert word.encode() not in kept
    epochs = pd.read_parquet(tmp_path / "kept" / "epochs.parquet")
    ranks = pd.read_parquet(tmp_path / "kept" / "ranks.parquet")
    assert {*epochs["digest"], *ranks.columns} == set(PackedStudy(tmp_path / "kept").fits)


@pytest.mark.parametrize(
    ("change", "restored"),
    [
        ({"rows": {**ROWS, "NoPE": {"position": ["rope"]}}}, 2),
        ({"rows": {**ROWS, "NoPE": {"position": ["nope"], "n_layers": 2}}}, 2),
        ({"search": {"learning_rate": [1e-3, 1e-2, 1e-1]}}, 4),
    ],
    ids=["another row", "another option", "more trials"],
)
def test_a_report_trains_nothing(made: dict, tmp_path: Path, change: dict, restored: int) -> None:
    """What another row was trained for is not taken; with more trials nothing is chosen yet."""
    what = {**made["what"], **change}
    found = compare(what, run_dir=tmp_path, known=(made["pack"],), report=True)
    assert list(found.runs["row"]) == ["Pop", "Pop"]
    assert len(list(tmp_path.glob("runs/*"))) == restored


def test_runs_of_other_data_are_not_known(made: dict, tmp_path: Path) -> None:
    data_path = str(write_atomic(make_log(seed=1), tmp_path))
    other = {**made["what"], "base": {**made["what"]["base"], "data_path": data_path}}
    with pytest.raises(UsageError, match="no finished run"):
        compare(other, run_dir=tmp_path / "s", known=(made["pack"],), report=True)


def test_arguments_that_do_not_fit_leave_no_folder(made: dict, tmp_path: Path, monkeypatch) -> None:
    what, here = made["what"], made["here"]
    monkeypatch.chdir(tmp_path)
    longer = {**what, "base": {**what["base"], "epochs": 3}}
    runs = list(here.glob("runs/*"))[:2]
    for message, one, given in (
        ("--known: .* is not a folder of `compare --pack`", what, {"known": (here,)}),
        ("'tinny'", what, {"dataset": "tinny", "run_dir": "a"}),
        ("--report: .* no finished run", longer, {"run_dir": here, "report": True}),
        ("compare: known: not read", runs, {"known": (made["pack"],)}),
    ):
        with pytest.raises(UsageError, match=message):
            compare(one, **given)
    assert not list(tmp_path.iterdir())
