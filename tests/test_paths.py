"""Paths that a user names and that cannot be: one line, exit 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recbole_pos.cli.main import main

POP = ["run", "-m", "Pop", "--epochs=1"]
PLUGIN = ["run", "-m", "PosSASRec", "-d", "ml-100k", "--epochs=1"]


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize(
    "words",
    [
        [*POP, "-d", "{}"],
        [*POP, "-d", "{}/shop"],
        [*POP, "-d", "shop", "--data_path={}"],
        [*POP, "-d", "ml-100k", "--config_files", "{}.yaml"],
        [*POP, "-d", "ml-100k", "--run_dir={}"],
        [*POP, "-d", "ml-100k", "--log={}"],
        [*POP, "-d", "ml-100k", "--benchmark_filename=[{},b]"],
        [*POP, "-d", "ml-100k", "--additional_feat_suffix=[{}]"],
        ["run", "--resume={}"],
        [*PLUGIN, "--init_from={}"],
        [*PLUGIN, "--update_from={}"],
    ],
    ids=" ".join,
)
def test_a_name_that_no_file_can_have(
    words: list[str],
    length: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("{}", "a" * length) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "Error" not in error.split()[1] and len(error) < 1000
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("content", [b"PAR1 nothing PAR1", b"", bytes(range(256)) * 9])
@pytest.mark.parametrize("name", ["shop.inter", "shop.inter.parquet"])
def test_damaged_files(
    content: bytes, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / name).write_bytes(content)
    assert main([*POP, "-d", "shop", f"--data_path={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="elsewhere no one can delete it")
def test_a_working_directory_that_was_deleted(tmp_path: Path) -> None:
    code = "import os, sys; os.rmdir(os.getcwd()); from recbole_pos.cli.main import main; "
    code += "sys.exit(main(['run', '-m', 'Pop', '-d', 'ml-100k']))"
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "gone", capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: the working directory")
