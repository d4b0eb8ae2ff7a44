"""What is told while something runs: bars, lines a minute, json, a log."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
from conftest import SMALL, wait

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import StorageError, UsageError
from recbole_pos.screen import Screen, Task


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute is over at once."""
    monkeypatch.setattr(Screen, "every", 0.001)


def test_elsewhere_than_on_a_terminal_a_line_a_minute(hasty, capsys) -> None:
    told = ""

    def line() -> bool:
        nonlocal told
        told += capsys.readouterr().out
        return "targets/s" in told

    with Screen().task("epoch 3/9", 40) as task:
        task.advance(1000)
        wait(line)
    last = [text for text in told.splitlines() if "targets/s" in text][-1]
    wanted = r"epoch 3/9: \d+ s, 1 of 40, about [\d,]+ s left, [\d,]+ targets/s"
    assert re.fullmatch(wanted, last), last


def test_what_has_no_end_is_told_with_its_seconds(hasty, capsys) -> None:
    with Screen().task("reading shop"):
        wait(lambda: "reading shop: 0 s\n" in capsys.readouterr().out)


@pytest.mark.parametrize("given", [{"enabled": False}, {"as_json": True}])
def test_quiet_and_json_tell_nothing_of_it(hasty, capsys, given: dict) -> None:
    with Screen(**given).task("epoch 3/9", 40) as task:
        task.advance()
    with Screen().task("epoch 3/9", 40, shown=False) as task:
        task.advance()
    assert capsys.readouterr().out == ""


def test_on_a_terminal_a_bar_that_vanishes() -> None:
    screen = Screen()
    screen.console = type(screen.console)(file=io.StringIO(), force_terminal=True, width=100)
    drawn = screen.console.file
    with screen.task("reading"):
        wait(lambda: "reading" in drawn.getvalue())
    with screen.task("epoch 1/2", 7) as task:
        task.advance(50)
        wait(lambda: "1/7" in drawn.getvalue() and "targets/s" in drawn.getvalue())
    assert drawn.getvalue().rstrip().endswith("\x1b[2K")  # its line is cleared


def test_an_exception_within_ends_the_teller() -> None:
    import threading

    before = threading.enumerate()  # those of other tests may end meanwhile
    with pytest.raises(ZeroDivisionError), Screen().task("x"):
        raise ZeroDivisionError
    assert set(threading.enumerate()) <= set(before)


def test_how_much_is_left() -> None:
    task = Task("x", total=4, done=1, targets=1000, began=time.monotonic() - 10)
    assert str(task) == "x: 10 s, 1 of 4, about 30 s left, 100 targets/s"


def test_a_task_of_no_step_yet() -> None:
    assert re.fullmatch(r"x: 0 s, 0 of 5", str(Task("x", 5)))


def test_every_part_of_a_run_has_a_task(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    seen, task = [], Screen.task

    def watched(self, title: str, total: int | None = None, shown: bool = True):
        seen.append((title, shown))
        return task(self, title, total, shown)

    monkeypatch.setattr(Screen, "task", watched)
    options = {**SMALL, "data_path": str(tiny), "show_progress": True}
    recbole_pos.run("FPARec", "tiny", None, options, run_dir=tmp_path / "run")
    epochs = [t for i in range(2) for t in (f"epoch {i}/2", "evaluation (valid)")]
    wanted = ["reading tiny", *epochs, "evaluation (test)"]
    assert seen == [(title, True) for title in wanted]


def _run(tiny: Path, folder: Path, *more: str) -> int:
    options = [f"--{key}={value}" for key, value in SMALL.items()]
    return main(
        ["run", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}", *options,
         f"--run_dir={folder}", *more]
    )  # fmt: skip


def test_json_is_start_epochs_result(tiny: Path, tmp_path: Path, capsys) -> None:
    assert _run(tiny, tmp_path / "run", "--json", f"--log={tmp_path / 'log'}") == 0
    out, error = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["start", "epoch", "epoch", "result"]
    assert lines[0]["run_dir"] == str(tmp_path / "run") and lines[0]["users"] == 60
    assert lines[0]["device"] == lines[-1]["device"]
    assert lines[0]["device"]["name"] == "cpu" and lines[0]["device"]["threads"] >= 1
    kept = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for line, epoch in zip(kept, lines[1:3], strict=True):
        assert {**line, "event": "epoch", "best": epoch["best"]} == epoch
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {**result, "event": "result"} == lines[-1]
    assert (tmp_path / "log").read_text() == out


def test_quiet_with_a_log(tiny: Path, tmp_path: Path, capsys) -> None:
    assert _run(tiny, tmp_path / "one", "--quiet", "--log", str(tmp_path / "log")) == 0
    assert capsys.readouterr().out == ""
    assert _run(tiny, tmp_path / "two", "--log", str(tmp_path / "log")) == 0
    printed, log = capsys.readouterr().out, (tmp_path / "log").read_text()
    for text in ("epoch   1", "│ ndcg@10", "result.json", "with 1 thread in float32"):
        assert printed.count(text) == 1 and log.count(text) == 2, text


def test_a_log_that_cannot_be_written(tiny: Path, tmp_path: Path, capsys) -> None:
    assert _run(tiny, tmp_path / "run", "--log", str(tmp_path / "none" / "log")) == 2
    assert "log: cannot write" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="log: cannot write"):
        Screen(log=tmp_path)
    for as_json in (False, True):
        full = Screen(False, as_json, "/dev/full")
        with pytest.raises(StorageError, match="cannot write /dev/full: No space left"):
            full.event("start", {}) if as_json else full.line("start")
