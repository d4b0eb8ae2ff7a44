"""What a file names is not imported from the working directory; what the user names is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from own_models import MODULE, REGISTER, options

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config import plugins
from recbole_pos.errors import UsageError

ROOT = str(Path(recbole_pos.__file__).parent.parent)
CLI = ["-m", "recbole_pos.cli.main"]
LOAD = ["-c", "import recbole_pos; recbole_pos.load('.')"]
READ = ["recommend", ".", "--users", "u9", "--out", "found.csv"]


@pytest.fixture(scope="module")
def stranger(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that names a module, and the module beside it."""
    folder = tmp_path_factory.mktemp("stranger") / "run"
    given = {**options(tiny), "hidden_size": 8, "inner_size": 8}
    recbole_pos.run("FPARec", "tiny", None, given, run_dir=folder, verbose=False)
    name(folder, "mine")
    code = "open('ran', 'w').close()\n"
    (folder / "mine.py").write_text(code)
    (folder / "nested").mkdir()
    (folder / "nested" / "part.py").write_text(code)
    with zipfile.ZipFile(folder / "lib.zip", "w") as file:
        file.writestr("zipped.py", code)
    return folder


def name(folder: Path, module: str) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "plugins": [module]}))


def python(folder: Path, *command: str, path: str = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "path", "command"),
    [
        ("mine", ROOT, LOAD),
        ("mine", ROOT, [*CLI, *READ]),
        ("mine", ROOT, [*CLI, "run", "--resume", "."]),
        ("mine", ROOT, [*CLI, "run", "--config_files", "config.yaml", "--run_dir", "again"]),
        ("mine", os.pathsep.join((ROOT, ".")), [*CLI, *READ]),
        ("nested.part", ROOT, [*CLI, "update", ".", "--run_dir", "later"]),
        ("zipped", os.pathsep.join((ROOT, "lib.zip")), [*CLI, "attach", ".", "kernel"]),
    ],
)
def test_a_file_does_not_choose_code(
    stranger: Path, module: str, path: str, command: list[str]
) -> None:
    name(stranger, module)
    done = python(stranger, *command, path=path)
    assert done.returncode and "--plugins" in done.stderr
    assert not (stranger / "ran").exists()


def test_the_user_does(stranger: Path) -> None:
    name(stranger, "mine")
    done = python(stranger, *CLI, *READ, "--plugins", "mine")
    assert done.returncode == 0 and (stranger / "ran").exists(), done.stderr
    (stranger / "ran").unlink()
    done = python(stranger, "-c", "import mine, recbole_pos; recbole_pos.load('.')")
    assert done.returncode == 0, done.stderr
    (stranger / "ran").unlink()


def test_installed_modules_are_imported_as_before(stranger: Path) -> None:
    name(stranger, "json.tool")
    done = python(stranger, *LOAD)
    assert done.returncode == 0, done.stderr


def test_a_pretended_package_beside_a_run_is_none(stranger: Path) -> None:
    """Entry points are read of what is installed, not of the working directory."""
    about = stranger / "evil-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[recbole_pos.models]\nEvil = mine\n")
    done = python(stranger, *CLI, "run", "-m", "Evil", "-d", "tiny")
    assert done.returncode == 2 and not (stranger / "ran").exists()


def test_other_processes_may_import_what_the_user_names(here: Path, tiny: Path) -> None:
    """And nothing else from there."""
    (here / "my_models.py").write_text(MODULE + REGISTER)
    plugins.allow("my_models")
    packed = plugins.pack("FPARec")
    plugins._allowed.clear()
    with pytest.raises(UsageError, match="--plugins"):
        plugins.import_plugins(["my_models"], "config.yaml", lambda: False)
    plugins.unpack(packed)
    assert plugins.import_plugins(["my_models"], "config.yaml", lambda: False) == ["my_models"]


def test_the_name_of_a_file_is_answered_with_that_of_its_module(here: Path, capsys) -> None:
    assert main(["models", "--plugins", "my_models.py"]) == 2
    assert "--plugins my_models" in capsys.readouterr().err
