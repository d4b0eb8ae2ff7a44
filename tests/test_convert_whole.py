"""recbole-pos convert: a dataset is replaced whole or not at all."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from recbole_pos.cli.main import main

WORKER = Path(__file__).with_name("killed_convert.py")
TABLES = {"shop/shop.inter", "shop/shop.item", "shop/shop.yaml", "shop/convert.json"}


def orders(path: Path, brand: str, users: int = 3) -> Path:
    rows = [f"u{n % users},i{n % 4},{1_700_000_000 + n},{brand}{n % 4}" for n in range(24)]
    path.write_text("\n".join(["user,item,time,brand", *rows]) + "\n")
    return path


STRIDES = [4, pytest.param(1, marks=pytest.mark.long)]


def killed(file: Path, folder: Path, stride: int, *options: str) -> list[dict]:
    command = [sys.executable, str(WORKER), str(file), str(folder), str(stride), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("stride", STRIDES)
def test_killed_while_it_replaces_a_dataset(tmp_path: Path, stride: int) -> None:
    folder = tmp_path / "data"
    main(
        ["convert", str(orders(tmp_path / "a.csv", "old")), "--name=shop", f"--data_path={folder}"]
    )
    (folder / "shop" / "notes.txt").write_text("mine")
    (folder / "shop" / ".shop.inter.0a1b2c3d.tmp").write_text("left by a version before")
    (folder / "shop" / ".recbole_pos").mkdir()
    (folder / "shop" / ".recbole_pos" / "cached").write_text("made of the old one")
    old = {name: (folder / name).read_text() for name in TABLES}
    steps = killed(orders(tmp_path / "b.csv", "new"), folder, stride, "--overwrite")
    assert len(steps) > 15 / stride and not steps[-1]["killed"]
    new = {name: steps[-1]["again"][name] for name in TABLES}
    assert new["shop/shop.item"] != old["shop/shop.item"]
    for step in steps:
        found = {name: text for name, text in step["after"].items() if name in TABLES}
        assert found in (old, new) or not found and ".shop.old/notes.txt" in step["after"]
        assert step["again"] == {**new, "shop/notes.txt": "mine"}


@pytest.mark.parametrize("stride", STRIDES)
def test_killed_while_it_makes_a_dataset(tmp_path: Path, stride: int) -> None:
    steps = killed(orders(tmp_path / "a.csv", "one"), tmp_path / "deep" / "data", stride)
    assert len(steps) > 8 / stride
    complete = steps[-1]["again"]
    assert set(complete) == TABLES
    for step in steps:
        assert {name for name in step["after"] if name.startswith("shop/")} - {"shop/lock"} in (
            set(),
            TABLES,
        )
        assert {name: step["again"][name] for name in TABLES} == complete
        assert set(step["again"]) <= TABLES | {"shop/lock"}


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "data"
    command = ["convert", str(tmp_path / "a.csv"), "--name=shop", f"--data_path={folder}"]
    orders(tmp_path / "a.csv", "old")
    before = {}
    if there:
        assert main(command) == 0
        before = {file.name: file.read_bytes() for file in (folder / "shop").iterdir()}
    orders(tmp_path / "a.csv", "new" * 1000)
    done = subprocess.run(
        [sys.executable, "-m", "recbole_pos.cli.main", *command, "--overwrite"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000)),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: cannot write") and done.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir() if file.name != "a.csv"] == ["data"] * there
    if there:
        assert [file.name for file in folder.iterdir()] == ["shop"]
        assert {file.name: file.read_bytes() for file in (folder / "shop").iterdir()} == before
    assert main([*command, "--overwrite"] if there else command) == 0


def test_two_at_once_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from recbole_pos.files import replacing

    file = orders(tmp_path / "a.csv", "one")
    with replacing(tmp_path / "data" / "shop", lambda file: True) as folder:
        (folder / "half").write_text("")
        command = ["convert", str(file), "--name=shop", f"--data_path={tmp_path / 'data'}"]
        assert main(command) == 2
        assert str(os.getpid()) in capsys.readouterr().err
        assert (folder / "half").exists()
