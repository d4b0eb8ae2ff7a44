"""Clusters that do not answer, and what of their noise is passed on."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import pytest

from recbole_pos.cli.main import main
from recbole_pos.runs.cluster import _no_stacks


@pytest.mark.parametrize("how", ["given", "auto"])
def test_nothing_answers_at_the_address(how: str, tmp_path: Path, monkeypatch, capsys) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.time()
    arguments = ["-m", "FPARec", "-d", "ml-100k", f"--run_dir={tmp_path / 'out'}"]
    assert main(["tune", *arguments, "--address", "auto" if how == "auto" else address]) == 2
    error = capsys.readouterr().err
    assert f"no Ray cluster answers at {address!r}" in error and time.time() - began < 60
    assert not (tmp_path / "out").exists()


def test_an_address_that_is_none(tmp_path: Path, capsys) -> None:
    given = ["-m", "FPARec", "-d", "ml-100k", f"--run_dir={tmp_path / 'out'}", "--address=-inf"]
    assert main(["tune", *given]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_already_gone_is_no_stack() -> None:
    text = "Trial %s: Error handling checkpoint %s"  # as ray.tune logs it

    def told(error: Exception) -> bool:
        cause = (type(error), error, None)
        return _no_stacks(logging.LogRecord("ray", logging.ERROR, "", 0, text, (1, 2), cause))

    assert not told(FileNotFoundError("Path not found"))
    assert told(PermissionError("storage"))
    text = "Saving experiment state to storage at '/x' failed with exception: "
    assert not told(OSError(28, "No space left on device")) and told(ValueError("something else"))
