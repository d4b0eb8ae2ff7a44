"""A study in one file: the same tables without training, and only what is missing is trained."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import make_log, write_atomic
from small_study import study

import recbole_pos
from recbole_pos.errors import UsageError
from recbole_pos.study.packed import PackedStudy

_SPLIT = {"order": "TO", "mode": "full", "split": {"LS": "valid_and_test"}}
SPLITS: dict[str, dict[str, Any]] = {
    "leave-one-out": _SPLIT,
    "temporal": {**_SPLIT, "split": {"GT": [0.7, 0.85]}, "cold_items": "drop"},
    "untied": {**_SPLIT, "ties": "drop"},
}


def compare(what: Any, **given: Any) -> Any:
    return recbole_pos.compare(what, verbose=False, **given)


@pytest.fixture(scope="module")
def made(cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Path]:
    """A study, the folder where it was trained, and its file."""
    root = tmp_path_factory.mktemp("packed")
    data = write_atomic(make_log(), root)
    what = study(data, search={"hidden_dropout_prob": [0.1, 0.4]})
    compare(what, run_dir=root / "here", pack=root / "study.tar.xz")
    return what, root / "here", root / "study.tar.xz"


def text(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


def test_same_tables_without_training(made, tmp_path: Path) -> None:
    """Elsewhere, without weights: tables, values of each run and ranks are those of the first."""
    what, here, file = made
    found = compare(what, run_dir=tmp_path / "there", known=(file,), report=True)
    assert list(found.runs["status"]) == ["done"] * 4
    assert set(found.runs["known_from"]) == {"study.tar.xz"}
    assert text(tmp_path / "there", "table.md") == text(here, "table.md")
    one, two = (pd.read_csv(place / "runs.csv") for place in (here, tmp_path / "there"))
    pd.testing.assert_frame_equal(one.drop(columns="known_from"), two.drop(columns="known_from"))
    for ranks in here.glob("runs/*/test_ranks.parquet"):
        other = tmp_path / "there/runs" / ranks.parent.name / ranks.name
        assert other.read_bytes() == ranks.read_bytes()
    assert not list((tmp_path / "there").rglob("checkpoint.pt"))


def test_packed_again_it_is_the_same_file(made, tmp_path: Path) -> None:
    what, _, file = made
    again = tmp_path / "again.tar.xz"
    compare(what, run_dir=tmp_path / "there", known=(file,), report=True, pack=again)
    assert again.read_bytes() == file.read_bytes()


def test_only_what_is_missing_is_trained(made, tmp_path: Path) -> None:
    """A seed more: its runs are trained, the search and the other seeds are not."""
    what, _, file = made
    there = tmp_path / "there"
    found = compare({**what, "seeds": 3}, run_dir=there, known=(file,))
    new = found.runs[found.runs["known_from"].isna() | (found.runs["known_from"] == "")]
    assert list(new["seed"]) == [2022, 2022]
    trained = {path.parent.name for path in there.rglob("checkpoint.pt")}
    assert trained == set(new["digest"])


def test_nothing_of_the_log_is_in_it(made) -> None:
    """No user, item or time, no weights, and no place of the machine that trained."""
    _, here, file = made
    content = b"".join(PackedStudy(file).files.values())
    assert str(here).encode() not in content and str(here.parent).encode() not in content
    names = {name.split("/")[-1] for name in PackedStudy(file).files}
    assert names == {"fit.json", "config.yaml", "metrics.jsonl", "ranks.npy"}


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_of_any_split(cluster, split: str, tiny: Path, tmp_path: Path) -> None:
    """Ranks find their targets again, several of a user or left out as they may be."""
    what = study(tiny, rows={"NoPE": {"position": ["nope"]}, "Pop": {"model": "Pop"}}, seeds=1)
    what["base"] = {**what["base"], "epochs": 1, "eval_args": SPLITS[split]}
    file = tmp_path / "study.tar.xz"
    found = compare(what, run_dir=tmp_path / "here")
    assert list(found.runs["status"]) == ["done"] * 2, list(found.runs["reason"])
    compare(what, run_dir=tmp_path / "here", pack=file)
    compare(what, run_dir=tmp_path / "there", known=(file,), report=True)
    for ranks in (tmp_path / "here").glob("runs/*/test_ranks.parquet"):
        other = tmp_path / "there/runs" / ranks.parent.name / ranks.name
        assert other.read_bytes() == ranks.read_bytes()
    assert text(tmp_path / "here", "table.md") == text(tmp_path / "there", "table.md")


def test_other_data_or_options_know_nothing(made, tmp_path: Path, capsys) -> None:
    """And the dry run says so before anything is trained."""
    what, _, file = made
    write_atomic(make_log(seed=1), tmp_path)
    base = {**what["base"], "data_path": str(tmp_path)}
    others = ({**what, "base": base}, {**what, "base": {**what["base"], "n_layers": 2}})
    for number, other in enumerate(others):
        given = {"run_dir": tmp_path / str(number), "known": (file,)}
        recbole_pos.compare(other, **given, dry_run=True)
        assert "0 of its 8 runs are of this study" in capsys.readouterr().out
        assert compare(other, **given, report=True).runs.empty
    recbole_pos.compare(what, run_dir=tmp_path / "same", known=(file, file), dry_run=True)
    said = capsys.readouterr().out
    assert said.count("8 of its 8 runs are of this study") == 2 and "6 finished" in said


def packed(content: dict[str, bytes], path: Path) -> Path:
    with tarfile.open(path, "w:xz") as archive:
        for name, data in content.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return path


def array(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=True)
    return buffer.getvalue()


def test_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "text.tar.xz").write_text("no archive")
    with pytest.raises(UsageError, match="nowhere.tar.xz does not exist"):
        PackedStudy(tmp_path / "nowhere.tar.xz")
    with pytest.raises(UsageError, match="no file of `compare --pack`"):
        PackedStudy(tmp_path / "text.tar.xz")


def test_nothing_is_half_asked(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot end well is refused before it begins."""
    what, here, _ = made
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--pack: .* is in no folder: there is no nowhere"):
        compare(what, run_dir="a", pack="nowhere/study.tar.xz")
    with pytest.raises(UsageError, match="dataset 'tinny' not found"):
        compare(what, dataset="tinny", run_dir="a")
    with pytest.raises(UsageError, match="is a study of tiny, not of other"):
        compare(what, dataset="other", run_dir=here, report=True)
    base = {**what["base"], "epochs": 3}
    with pytest.raises(UsageError, match=r"trained with other options .* \(epochs\)"):
        compare({**what, "base": base}, run_dir=here, report=True)
    warm = {**what, "rows": {"Warm": {"init_from": str(here)}}}
    with pytest.raises(UsageError, match="init_from: a row of a study begins with fresh weights"):
        compare(warm, run_dir="a")
    assert not list(tmp_path.iterdir())


def test_with_runs_it_is_refused(made, tmp_path: Path) -> None:
    _, here, file = made
    runs = sorted(here.glob("runs/*"))[:2]
    with pytest.raises(UsageError, match="--known: goes with models or a study"):
        compare(runs, known=(file,))


def test_known_runs_are_compared_by_their_study(made, tmp_path: Path) -> None:
    what, _, file = made
    compare(what, run_dir=tmp_path / "there", known=(file,), report=True)
    runs = sorted((tmp_path / "there").glob("runs/*"))[:2]
    with pytest.raises(UsageError, match="was taken from study.tar.xz, without weights"):
        compare(runs)


def test_a_study_on_other_data(cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``-d``: the same rows on another dataset, and the command that is told repeats it."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "other"):
        write_atomic(make_log(seed=len(name)), tmp_path / "dataset", name)
    what = study(tmp_path, rows={"Pop": {"model": "Pop"}, "NoPE": {"position": ["nope"]}}, seeds=1)
    del what["base"]["data_path"]
    Path("my.yaml").write_text(yaml.safe_dump(what), encoding="utf-8")
    found = compare("my.yaml", dataset="other", run_dir="made")
    assert list(found.runs["status"]) == ["done", "done"]
    assert "recbole-pos compare my.yaml -d other" in text(Path("made"), "report.html")
    assert compare("made", dataset="other", report=True).runs.equals(found.runs)
    with pytest.raises(UsageError, match="made is a study of other, not of tiny"):
        compare("made", dataset="tiny", report=True)
