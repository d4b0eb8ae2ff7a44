"""Paths and files that cannot be used: one line, exit code 2, whatever the command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recbole_pos.errors import UsageError
from recbole_pos.yaml_files import parse_scalar, read_yaml


@pytest.fixture
def here(trained, tmp_path, monkeypatch) -> Path:
    shutil.copytree(trained("FPARec"), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_folder_that_is_a_file(here, refused) -> None:
    Path("file").write_text("no run")
    for command in ("recommend file", "export file --to out", "update file", "run --resume file"):
        refused(command)


def test_a_damaged_configuration_is_named(here, refused) -> None:
    good = (here / "run" / "config.yaml").read_text()
    for text in ("[1]", good.replace("hidden_size: 16", "hidden_size: sixteen")):
        (here / "run" / "config.yaml").write_text(text)
        refused("recommend run", "config.yaml")


# --- any yaml is read, or refused on one line ---


def test_yaml_is_read_within_bounds_or_refused_in_one_line(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    doubled = (f"b{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 20))
    aliases = "a: &a0 [1]\n" + "".join(doubled)
    deep, itself = b"[" * 100_000, b"a: &a [1, *a]"
    for text in (b"\xff\xfe\x00", b"a: 1\na: 2", aliases.encode(), deep, itself):
        file.write_bytes(text)
        with pytest.raises(UsageError) as refusal:
            read_yaml(file)
        assert str(file) in (message := str(refusal.value))
        assert len(message) < 600 and "\n" not in message
    assert parse_scalar("[&a [1, 2], *a]") == [[1, 2], [1, 2]], "aliases as such are fine"
    file.write_text("a: &a {x: 1}\nb: {c: &c {<<: *a, x: 2}}\nd: {<<: *c}\n")
    assert read_yaml(file) == {"a": {"x": 1}, "b": {"c": {"x": 2}}, "d": {"x": 2}}


def test_a_separator_on_the_command_line_is_text() -> None:
    assert [parse_scalar(sign) for sign in " |>-?#!~"] == [*" |>-?#!", None]
