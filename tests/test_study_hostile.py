"""Packs and study folders from elsewhere: what is wrong is named, and a study is never harmed."""

from __future__ import annotations

import io
import json
import lzma
import shutil
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from test_study_packed import array, packed
from test_study_preview import plan

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import rank_table
from recbole_pos.study import packed as packing
from recbole_pos.study.packed import PackedStudy, pack
from recbole_pos.study.ranks import gains
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.study.work import Job, Work

SPACE = {"trials": 2, "space": {"learning_rate": {"loguniform": [1e-4, 1e-2]}}}
Files = dict[str, bytes]


def finish(work: Work, job: Job) -> None:
    """As if it had been trained, with everything that a run leaves but its weights."""
    dataset, folder, trial = work.datasets.of(job.config), work.folder, job.fit.stage == "trial"
    event = np.flatnonzero((dataset.part == TEST) & dataset.split.is_target)
    rank = np.arange(len(event)) % dataset.item_num
    test = {name: round(float(gains(rank, name).mean()), 6) for name in ("ndcg@10", "hit@10")}
    facts = {"row": job.fit.row, "seed": job.fit.seed, "stage": job.fit.stage, "epochs": 1}
    facts |= {"best_valid": {"ndcg@10": 0.1}, "test": None if trial else test, "parameters": 9}
    facts |= {"seconds": {"training": 1.5}, "versions": {"torch": "2"}, "trial": job.fit.trial}
    facts |= {"device": {"name": "cpu", "threads": 1, "precision": "float32"}}
    run = folder.run(job.digest)
    folder.write_fit(job.digest, {"status": "done", **facts})
    run.write_config(job.config.plain)
    run.write_metrics([{"epoch": 0, "loss": 1.0, "valid": {"ndcg@10": 0.1}}])
    if not trial:
        run.write_ranks(rank_table(dataset, event, rank, "seconds"))
    work.end(job.fit, "done", known=folder.fit(job.digest))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The file of a study, its pack, and a folder that was made of both."""
    from conftest import make_log, write_atomic

    root = tmp_path_factory.mktemp("hostile")
    data = write_atomic(make_log(), root)
    study = plan(data, rows={"NoPE": {"position": ["nope"]}}, search=SPACE, seeds=2)
    work = Work(study, StudyFolder(root / "here"))
    while job := work.ready():
        finish(work, job)
    work.folder.write_current(study, work.digests)
    assert pack(study, work.folder, root / "study.tar.xz") == 4
    (root / "study.json").write_text(json.dumps(study.source.content))
    study, good, there = root / "study.json", root / "study.tar.xz", root / "there"
    command = ["compare", study, "--known", good, "--report", "--run_dir", there]
    assert main([str(word) for word in command]) == 0
    return study, good, there


def content(folder: Path) -> Files:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(command: list[Any], capsys: pytest.CaptureFixture, *words: str) -> None:
    """One line that has these words, and exit code 2."""
    capsys.readouterr()
    assert main(["compare", *map(str, command)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 1000, said
    assert all(word in said for word in words), said


def fit(**fields: Any) -> Callable[[str, bytes], Files]:
    return lambda name, old: {name: json.dumps({**json.loads(old), **fields}).encode()}


def raw(text: bytes) -> Callable[[str, bytes], Files]:
    return lambda name, old: {name: text}


def header(text: str) -> bytes:
    filled = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(filled).to_bytes(2, "little") + filled.encode()


def npy(shape: str, dtype: str = "|u1") -> bytes:
    return header(f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}")


DEEP = b"[" * 100_000 + b"]" * 100_000
FORGED: list[tuple[str, str, Callable[[str, bytes], Files]]] = [
    ("fit.json", "seconds.training", fit(seconds={"training": "long"})),
    ("fit.json", "seconds.training", fit(seconds={"training": float("inf")})),
    ("fit.json", "seconds.training", fit(seconds={"training": -1})),
    ("fit.json", "seconds", fit(seconds=[1])),
    ("fit.json", "test.row", fit(test={"row": 1})),
    ("fit.json", "test.ndcg@10", fit(test={"ndcg@10": "high"})),
    ("fit.json", "test.status", fit(test={"status": 1.0, "ndcg@10": 0.5})),
    ("fit.json", "best_valid.ndcg@10", fit(best_valid={"ndcg@10": [0.1]})),
    ("fit.json", "versions", fit(versions=["torch"])),
    ("fit.json", "versions.torch", fit(versions={"torch": {"a": 1}})),
    ("fit.json", "device", fit(device={"name": "cpu"})),
    ("fit.json", "parameters", fit(parameters=10**400)),
    ("fit.json", "parameters", fit(parameters="many")),
    ("fit.json", "epochs", fit(epochs=1.5)),
    ("fit.json", "row", fit(row=["NoPE"])),
    ("fit.json", "row", fit(row="x" * 100_000)),
    ("fit.json", "seed", fit(seed=True)),
    ("fit.json", "searched", fit(searched=[1])),
    ("fit.json", "commit", fit(commit={})),
    ("fit.json", "status", fit(status="failed")),
    ("fit.json", "", raw(b'{"status": "done", "row": "\\ud800"}')),
    ("fit.json", "", raw(b'{"status": "done", "row": ' + DEEP + b"}")),
    ("fit.json", "", raw(b'{"epochs": ' + b"9" * 5000 + b"}")),
    ("fit.json", "", raw(b"\xff")),
    ("fit.json", "", raw(b"[1]")),
    ("metrics.jsonl", "epoch", raw(b'{"epoch": "one"}\n')),
    ("metrics.jsonl", "valid.ndcg@10", raw(b'{"epoch": 1, "valid": {"ndcg@10": NaN}}\n')),
    ("metrics.jsonl", "line 2", raw(b'{"epoch": 1}\n[1]')),
    ("metrics.jsonl", "", raw(b'{"epoch": 1, "x": ' + DEEP + b"}")),
    ("ranks.npy", "", raw(npy("(1000000000000,)", "<i8"))),
    ("ranks.npy", "", raw(npy("(((((((((((((((((((((("))),
    ("ranks.npy", "", raw(header("{'descr': '|u1', '''"))),
    ("ranks.npy", "", raw(npy("(2,)", "|O") + b"\x80\x04N.")),
    ("ranks.npy", "", raw(array(np.array([-1, 2])))),
    ("ranks.npy", "", raw(array(np.arange(3.0)))),
    ("ranks.npy", "3 ranks", raw(array(np.arange(3)))),
    ("ranks.npy", "", lambda name, old: {name: array(0 * np.load(io.BytesIO(old)))}),
    (
        "ranks.npy",
        "items",
        lambda name, old: {name: array(10**9 + np.load(io.BytesIO(old)).astype(int))},
    ),
    ("searches.json", "NoPE.drawn.0", raw(b'{"NoPE": {"space": "x", "drawn": {"0": [1]}}}')),
    ("searches.json", "NoPE.drawn", raw(b'{"NoPE": {"space": "x", "drawn": {"\xc2\xb2": {}}}}')),
    ("searches.json", "NoPE", lambda name, old: {name: old.replace(b'rate": 0', b'rate": 7')}),
]


@pytest.mark.parametrize(("file", "field", "change"), FORGED)
def test_a_forged_pack_leaves_the_study_as_it_was(
    made: tuple[Path, Path, Path],
    file: str,
    field: str,
    change: Callable[[str, bytes], Files],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """The last run of a pack is enough; the pack and the field are named."""
    study, good, there = made
    files = dict(PackedStudy(good).files)
    name = [name for name in files if name.endswith(file)][-1]
    forged = packed({**files, **change(name, files[name])}, tmp_path / "forged.tar.xz")
    command = [study, "--known", forged, "--report", "--run_dir"]
    refused([*command, tmp_path / "new"], capsys, "forged.tar.xz", file, field)
    assert not (tmp_path / "new").exists()
    before = content(there)
    assert main(["compare", *map(str, command), str(there)]) in (0, 2)  # 0: nothing of it is used
    assert content(there) == before


DAMAGED = [
    ("fit.json", "seconds.training", fit(seconds={"training": float("inf")})),
    ("fit.json", "test.row", fit(test={"row": 1})),
    ("fit.json", "versions", fit(versions=["a"])),
    ("fit.json", "", raw(b"{")),
    ("metrics.jsonl", "epoch", raw(b'{"epoch": "one"}\n')),
    ("test_ranks.parquet", "", raw(b"PAR1")),
    ("facts.json", "versions", fit(versions=[1])),
    ("facts.json", "ties", fit(ties={"users": 1})),
    ("facts.json", "unmade", fit(unmade=[1])),
    ("current.json", "run", lambda name, old: {name: old.replace(b'"run": "', b'"run": "../')}),
    ("study.json", "content", fit(content=[1])),
    ("study.json", "", raw(b'{"name": "x", "content": ' + DEEP + b"}")),
]


@pytest.mark.parametrize(("file", "field", "change"), DAMAGED)
def test_damage_in_a_study_is_named(
    made: tuple[Path, Path, Path],
    file: str,
    field: str,
    change: Callable[[str, bytes], Files],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    _, _, there = made
    there = Path(shutil.copytree(there, tmp_path / "there"))
    current = json.loads((there / "current.json").read_text())["NoPE, seed 2021"]["run"]
    path = next(path for path in there.rglob(file) if path.parent.name in (current, "there"))
    path.write_bytes(change(str(path), path.read_bytes())[str(path)])
    refused([there, "--report"], capsys, str(path), field)


def test_tables_are_of_the_ranks_that_the_run_was_tested_with(
    made: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, _, there = made
    there = Path(shutil.copytree(there, tmp_path / "there"))
    file = next(there.rglob("test_ranks.parquet"))
    pd.read_parquet(file).assign(rank=0).to_parquet(file)
    refused([there, "--report"], capsys, str(file), "ndcg@10")


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    about = tarfile.TarInfo(name)
    about.size, about.type = size, kind
    return about.tobuf(tarfile.USTAR_FORMAT)


BOMBS = {
    "extended header": member("x", 2**26, tarfile.XHDTYPE) + bytes(2**26),
    "long name": member("x", 2**26, tarfile.GNUTYPE_LONGNAME) + b"a" * 2**26,
    "large file": member("runs/a/fit.json", 2**26) + b" " * 2**26,
    "size that is not there": member("runs/a/ranks.npy", 2**32) + bytes(512),
    "many members": member("runs/a/fit.json", 0) * 500_000,
    "strange member": member("../fit.json", 0),
    "a link": member("runs/a/fit.json", 0, tarfile.SYMTYPE),
    "nothing": b"",
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_and_work_are_bounded(
    name: str, made: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By what leaves the decompressor, whatever headers claim."""
    bomb = tmp_path / "bomb.tar.xz"
    bomb.write_bytes(lzma.compress(BOMBS[name], preset=0))
    tracemalloc.start()
    try:
        refused([made[0], "--known", bomb, "--run_dir", tmp_path / "s"], capsys, str(bomb))
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "s").exists()


def test_members_are_counted(
    made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_MOST_MEMBERS", 10)
    with pytest.raises(UsageError, match="too many"):
        PackedStudy(made[1])


def test_what_is_no_pack_is_refused(
    made: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    cut = tmp_path / "cut.tar.xz"
    cut.write_bytes(made[1].read_bytes()[:-50])
    for path in (cut, tmp_path, tmp_path / ("x" * 5000), Path("/dev/zero")):
        refused([made[0], "--known", path, "--run_dir", tmp_path / "s"], capsys, "--known")


def test_a_pack_of_the_version_before_is_read() -> None:
    """Those of the results were written by it; a value differs from its ranks by rounding only."""
    kept = sorted((Path(__file__).parent.parent / "results" / "runs").rglob("*.tar.xz"))
    assert len(kept) > 20
    for path in kept[:: len(kept) // 5]:
        assert PackedStudy(path).fits


def test_the_tables_are_unpacked(made: tuple[Path, Path, Path]) -> None:
    """As the documents have it."""
    runs, pairs = recbole_pos.compare(made[2], report=True, verbose=False)
    assert list(runs["seed"]) == [2020, 2021] and pairs.empty


def test_cells_begin_no_formula(tiny: Path, tmp_path: Path) -> None:
    """Names of configurations are the user's, and csv is opened in spreadsheets."""
    study = plan(tiny, rows={"=1+1": {"position": ["nope"]}, "@x": {"position": ["rope"]}}, seeds=1)
    folder = StudyFolder(tmp_path / "s")
    work = Work(study, folder)
    while job := work.ready():
        finish(work, job)
    folder.write_plan(study)
    folder.write_current(study, work.digests)
    assert main(["compare", str(folder.path), "--report"]) == 0
    for name in ("runs.csv", "table.csv"):
        cells = [
            cell
            for line in (folder.path / name).read_text().splitlines()
            for cell in line.split(",")
        ]
        assert "'=1+1" in cells and not any(cell.startswith(("=", "@")) for cell in cells)
    assert list(pd.read_parquet(folder.path / "runs.parquet")["row"]) == ["=1+1", "@x"]
