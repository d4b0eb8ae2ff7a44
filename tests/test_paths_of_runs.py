"""Paths and files that cannot be used: one line, exit code 2, whatever the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import recbole_pos
from recbole_pos.errors import UsageError
from recbole_pos.yaml_files import parse_scalar, read_yaml

RUN = "run -m FPARec -d tiny"
COMMANDS = {
    "recommend": "recommend {}",
    "evaluate": "evaluate {}",
    "export": "export {} --to out",
    "update": "update {}",
    "resume": "run --resume {}",
    "out": "recommend run --users u9 --out {}",
    "histories": "recommend run --histories {}",
    "run_dir": "run -m FPARec -d ml-100k --run_dir {}",
    "log": "run -m FPARec -d ml-100k --run_dir new --log {}",
    "config": f"{RUN} --config_files {{}}",
    "data_path": "run -m Pop -d shop --data_path {}",
    "init_from": "run -m PosSASRec -d ml-100k --init_from={}",
    "convert": "convert {}",
    "space": "tune -m FPARec -d ml-100k --run_dir new --space={}",
    "study": "compare {} --run_dir new",
}


@pytest.fixture
def here(trained, tmp_path, monkeypatch) -> Path:
    shutil.copytree(trained("FPARec"), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_name_that_no_file_can_have(here, refused, kind) -> None:
    """And nothing is left behind."""
    refused(COMMANDS[kind].format("x" * 300))
    assert [path.name for path in here.iterdir()] == ["run"]


def test_a_run_folder_that_is_a_file(here, refused) -> None:
    Path("file").write_text("no run")
    for kind in ("recommend", "export", "update", "resume"):
        refused(COMMANDS[kind].format("file"))


def test_a_working_directory_that_is_gone(tmp_path) -> None:
    code = "import os, sys; os.rmdir(os.getcwd()); from recbole_pos.cli.main import main; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main(['recommend', 'run']))"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(recbole_pos.__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "working directory" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "forged",
    [
        {"epochs": "3"},
        {"test": {"ndcg@10": float("inf")}},
        {"model": "\ud800"},
        '{"split": ' + '{"a":' * 5000 + "1" + "}" * 5001,
        "",
    ],
)
def test_a_forged_result_is_refused(here, refused, forged) -> None:
    """By who reads one run, and by who compares several."""
    file = here / "run" / "result.json"
    good = json.loads(file.read_text())
    file.write_text(json.dumps({**good, **forged}) if isinstance(forged, dict) else forged)
    for command in ("evaluate {}", "compare run {} --run_dir new"):
        refused(command.format("run"), "result.json")


def test_a_forged_configuration_is_refused(here, refused) -> None:
    """By two commands each, which all read it alike; every option is held against its table."""
    good = (here / "run" / "config.yaml").read_text()
    texts = (
        "[1]",
        "model: FPARec",
        f"{good}\nepochs: .inf",
        good.replace("model: FPARec", 'model: "\\ud800"'),
        good.replace("hidden_size: 16", "hidden_size: sixteen"),
    )
    for number, text in enumerate(texts):
        (here / "run" / "config.yaml").write_text(text)
        for kind in ("recommend", ("evaluate", "update", "resume")[number % 3]):
            refused(COMMANDS[kind].format("run"))


# --- any yaml is read, or refused on one line, within bounds ---

ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 7)
)
HOSTILE: dict[str, str | bytes] = {
    "aliases in aliases": ALIASES,
    "an alias in itself": "a: &a [*a]\n",
    "deep": f"a: {'[' * 120}{']' * 120}\n",
    "deeper": f"a: {'[' * 1000}{']' * 1000}\n",
    "a long name, twice": 2 * f"{'x' * 900}: 1\n",
    "a tag that is not true": "a: !!bool x\n",
    "an unknown alias": f"a: *{'x' * 1000}\n",
    "long": "a: 1\n" * 4_000_000,
    "no UTF-8": b"\xff\xfe\x00",
    "a date that is not one": "a: 2020-13-45",
    "a set that is a list": "a: !!set [1]",
    "a number too large, in base 60": f"a: 1:{'00:' * 250}0.5",
    "a key twice": "a: 1\na: 2",
}


def test_yaml_is_read_within_bounds(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    for text in HOSTILE.values():
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(UsageError) as refusal:
            read_yaml(file)
        assert str(file) in (message := str(refusal.value))
        assert len(message) < 600 and "\n" not in message
    file.write_text("".join(f"k{n}: {n}\n" for n in range(5000)))
    assert len(read_yaml(file)) == 5000
    with pytest.raises(UsageError, match="--vary"):  # a value of the command line
        parse_scalar("[" * 500 + "]" * 500, "--vary")
    assert parse_scalar("[&a [1, 2], *a]", "--x") == [[1, 2], [1, 2]], "aliases as such are fine"
    file.write_text("a: &a {x: 1}\nb: {c: &c {<<: *a, x: 2}}\nd: {<<: *c}\n")
    assert read_yaml(file) == {"a": {"x": 1}, "b": {"c": {"x": 2}}, "d": {"x": 2}}


def test_a_separator_on_the_command_line_is_text() -> None:
    assert [parse_scalar(sign, "--seq_separator") for sign in " |>-?#!~"] == [*" |>-?#!", None]


@pytest.mark.parametrize("kind", ["config", "study", "space", "dataset"])
def test_every_command_reads_yaml_so(here, tiny, refused, kind) -> None:
    file, command = Path("a.yaml"), COMMANDS.get(kind, f"{RUN} --data_path .")
    if kind == "dataset":
        shutil.copytree(tiny / "tiny", "tiny")
        file = Path("tiny", "tiny.yaml")
    file.write_text(ALIASES)
    refused(command.format(file), str(file))
    assert not Path("new").exists()
