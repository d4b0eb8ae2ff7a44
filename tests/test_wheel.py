"""The built wheel works from any empty directory: it has every module and every yaml file."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ("-d", "ml-100k", "--epochs=1", "--hidden_size=16", "--n_layers=1")


@pytest.mark.long
def test_the_wheel_runs_one_epoch_from_an_empty_folder(tmp_path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def call(*command: str | Path, cwd: Path | None = None) -> str:
        given = [str(word) for word in command]
        done = subprocess.run(given, capture_output=True, text=True, env=clean, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # the source distribution, and the wheel from that
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    call(*build, tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {n.removeprefix("recbole_pos/_") for n in names if n.endswith(".yaml")}
    source = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("properties/**/*.yaml", "dataset/*/*.yaml")
        for path in ROOT.glob(pattern)
    }
    assert shipped == source
    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("recbole_pos/**/*.py")}
    assert modules <= set(names)
    assert not any(re.search(r"^(tests|benchmarks)|\.(inter|item|user)$", name) for name in names)

    installed = tmp_path / "installed"
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", installed)
    call(sys.executable, *install, wheel)
    clean["PYTHONPATH"] = str(installed)

    empty = tmp_path / "empty"
    empty.mkdir()
    where = call(sys.executable, "-c", "import recbole_pos; print(recbole_pos.__file__)", cwd=empty)
    assert str(installed) in where
    command = installed / "bin" / "recbole-pos"
    call(command, "run", "-m", "FPARec", *SMALL, "--run_dir=out", cwd=empty)
    assert json.loads((empty / "out" / "result.json").read_text())["epochs"] == 1
    assert [p.name for p in empty.iterdir()] == ["out"]
