"""Paths and files of runs that cannot be: one line, exit code 2, whatever the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL

import recbole_pos
from recbole_pos.cli.main import main

COMMANDS = {
    "recommend": "recommend {}",
    "similar": "similar {} i1",
    "plot": "plot {}",
    "evaluate": "evaluate {}",
    "inspect": "inspect attention --checkpoint {}",
    "export": "export {} --to out",
    "update": "update {}",
    "attach": "attach {} kernel",
    "resume": "run --resume {}",
    "serve": "serve {}",
    "out": "recommend run --users u9 --out {}",
    "run_dir": "run -m FPARec -d ml-100k --run_dir {}",
    "log": "run -m FPARec -d ml-100k --run_dir new --log {}",
    "config": "run -m FPARec -d ml-100k --config_files {}",
    "histories": "recommend run --histories {}",
    "data": "recommend run --data_path {}",
    "dataset": "run -m Pop -d {}",
    "dataset_path": "run -m Pop -d {}/shop",
    "data_path": "run -m Pop -d shop --data_path {}",
    "split": "run -m Pop -d ml-100k --benchmark_filename=[{},b]",
    "suffix": "run -m Pop -d ml-100k --additional_feat_suffix=[{}]",
    "init_from": "run -m PosSASRec -d ml-100k --init_from={}",
    "update_from": "run -m PosSASRec -d ml-100k --update_from={}",
    "convert": "convert {}",
    "space": "tune -m FPARec -d ml-100k --space={}",
    "to": "export run --to {}",
}


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    given = {**SMALL, "data_path": str(tiny), "epochs": 1}
    recbole_pos.run("FPARec", "tiny", None, given, run_dir=place / "run", verbose=False)
    return place


def refused(command: str, path: str, capsys: pytest.CaptureFixture) -> str:
    """The one line."""
    assert main(command.format(path).split()) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ") and len(message) < 1000 and "\n" not in message
    return message


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_name_that_no_file_can_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, kind: str
) -> None:
    """And nothing is left behind."""
    monkeypatch.chdir(folder)
    there = set(folder.iterdir())
    for length in (300, 5000):
        refused(COMMANDS[kind], "x" * length, capsys)
    assert set(folder.iterdir()) == there


@pytest.mark.parametrize("kind", list(COMMANDS)[:10])
def test_a_run_folder_that_is_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, kind: str
) -> None:
    monkeypatch.chdir(folder)
    Path("file").write_text("no run")
    refused(COMMANDS[kind], "file", capsys)


@pytest.mark.parametrize("command", ["recommend run", "models", "run -m FPARec -d ml-100k"])
def test_a_working_directory_that_is_gone(tmp_path: Path, command: str) -> None:
    (tmp_path / "gone").mkdir()
    code = f"import os; os.rmdir('.'); import sys; sys.argv[1:] = {command.split()!r}\n"
    code = code.replace("os.rmdir('.')", "os.rmdir(os.getcwd())")
    done = subprocess.run(
        [sys.executable, "-c", f"{code}from recbole_pos.cli.main import main; sys.exit(main())"],
        cwd=tmp_path / "gone",
        env={**os.environ, "PYTHONPATH": str(Path(recbole_pos.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "working directory" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "forged",
    [
        {"epochs": "3"},
        {"epochs": -1},
        {"test": {"ndcg@10": "0.5"}},
        {"test": {"ndcg@10": float("inf")}},
        {"best_valid": [1]},
        {"model": "\ud800"},
        {"versions": {"a": [1]}},
        "[" * 100_000,
        '{"split": ' + '{"a":' * 5000 + "1" + "}" * 5001,
        "[]",
        "",
    ],
)
def test_a_forged_result_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, forged: Any
) -> None:
    """By who reads one run, and by who compares several."""
    file = folder / "run" / "result.json"
    good = file.read_text()
    try:
        text = json.dumps({**json.loads(good), **forged}) if isinstance(forged, dict) else forged
        file.write_text(text)
        assert "result.json" in refused("evaluate {}", str(folder / "run"), capsys)
        command = f"compare {folder / 'run'} {{}} --run_dir {tmp_path}"
        assert "result.json" in refused(command, str(folder / "run"), capsys)
    finally:
        file.write_text(good)


def test_a_forged_configuration_is_refused(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """By two commands each, which all read it alike; every option is held against its table."""
    file = folder / "run" / "config.yaml"
    good = file.read_text()
    try:
        for number, text in enumerate(
            (
                "[1]",
                "model: FPARec",
                "model: [FPARec]\ndataset: tiny",
                f"{good}\nepochs: .inf",
                f"{good}\nepochs: two" + "\nx: " + "[" * 5000,
                good.replace("dataset: tiny", "dataset: {tiny: 1}"),
                good.replace("model: FPARec", 'model: "\\ud800"'),
                good.replace("hidden_size: 16", "hidden_size: sixteen"),
            )
        ):
            file.write_text(text)
            for kind in ("recommend", ("evaluate", "update", "attach", "resume")[number % 4]):
                refused(COMMANDS[kind], str(folder / "run"), capsys)
    finally:
        file.write_text(good)


@pytest.mark.parametrize("content", [b"PAR1 nothing PAR1", b"", bytes(range(256)) * 9])
@pytest.mark.parametrize("name", ["shop.inter", "shop.inter.parquet"])
def test_damaged_files(
    content: bytes, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / name).write_bytes(content)
    assert name in refused("run -m Pop -d shop --data_path {}", str(tmp_path), capsys)
