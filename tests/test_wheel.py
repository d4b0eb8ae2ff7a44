"""The built wheel works from any empty directory, yaml files included."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_wheel_runs_one_epoch_in_a_fresh_environment(tmp_path: Path) -> None:
    def call(*command: str | Path, **options) -> str:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        tmp_path / "dist",
        ROOT,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {n.removeprefix("recbole_pos/_properties/") for n in names if n.endswith(".yaml")}
    source = {
        p.relative_to(ROOT / "properties").as_posix() for p in ROOT.glob("properties/**/*.yaml")
    }
    assert shipped == source
    assert not [n for n in names if n.startswith(("tests", "benchmarks"))]

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
    small = ["--epochs=1", "--hidden_size=16", "--inner_size=16"]
    call(command, "run", "-m", "FPARec", "-d", "ml-100k", *small, "--run_dir=out", cwd=empty)
    assert json.loads((empty / "out" / "result.json").read_text())["epochs"] == 1
    assert [p.name for p in empty.iterdir()] == ["out"]
