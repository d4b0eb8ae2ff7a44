"""The built wheel works from any empty directory: it has every module and every yaml file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ("-d", "ml-100k", "--epochs=1", "--hidden_size=16", "--n_layers=1")


@pytest.mark.long
def test_wheel_runs_one_epoch_in_a_fresh_environment(tmp_path: Path) -> None:
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
    for name in names:
        assert not name.endswith((".inter", ".item", ".user"))
        assert not name.startswith(("tests", "benchmarks"))

    environment = tmp_path / "env"
    venv.create(environment, with_pip=True)
    # this interpreter may itself live in a virtual environment: hand its packages on by path
    packages = [p for p in sys.path if p.endswith("site-packages")]
    python = environment / "bin" / "python"
    site = call(python, "-c", "import site; print(site.getsitepackages()[0])").strip()
    Path(site, "system.pth").write_text("\n".join(packages) + "\n")
    call(python, "-m", "pip", "install", "--no-deps", "--no-index", "-q", wheel)

    empty = tmp_path / "empty"
    empty.mkdir()
    where = call(python, "-c", "import recbole_pos; print(recbole_pos.__file__)", cwd=empty)
    assert str(environment) in where
    command = environment / "bin" / "recbole-pos"
    call(command, "run", "-m", "FPARec", *SMALL, "--run_dir=out", cwd=empty)
    assert json.loads((empty / "out" / "result.json").read_text())["epochs"] == 1
    assert [p.name for p in empty.iterdir()] == ["out"]
