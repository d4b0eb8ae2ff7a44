"""What is reported while something runs: bars, lines a minute, json."""

import logging
import re

from conftest import SMALL, wait
from rich.table import Table

from recbole_pos.cli.main import main
from recbole_pos.reporter import Reporter


def test_elsewhere_than_on_a_terminal_a_line_a_minute(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Reporter, "every", 0.001)
    printed = ""

    def is_printed() -> bool:
        nonlocal printed
        printed += capsys.readouterr().out
        return "targets/s" in printed

    with Reporter().task("epoch 3/9", 40) as task:
        task.advance(1000)
        wait(is_printed)
    last = [text for text in printed.splitlines() if "targets/s" in text][-1]
    wanted = r"epoch 3/9: \d+ s, 1 of 40, about [\d,]+ s left, [\d,]+ targets/s"
    assert re.fullmatch(wanted, last), last


def test_lines_are_printed_whole_and_as_they_are(capsys) -> None:
    Reporter().line(Table(*(f"number {n}" for n in range(12))))
    Reporter().line("out of memory [pair.cc:553] at [/lib/a]")  # brackets are no markup
    printed = capsys.readouterr().out
    assert "number 11" in printed and "[pair.cc:553] at [/lib/a]" in printed


def test_quiet_prints_nothing(tiny, tmp_path, capsys) -> None:
    options = [f"--{key}={value}" for key, value in SMALL.items() if key != "show_progress"]
    command = ["run", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}", *options]
    assert main([*command, f"--run_dir={tmp_path / 'quiet'}", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_messages_are_plain_text_also_in_a_notebook(monkeypatch, capsys, caplog):
    class ZMQInteractiveShell:
        """The name by which rich knows a notebook."""

    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels of notebooks have it
    reporter = Reporter()
    with caplog.at_level(logging.INFO, "recbole_pos"):
        reporter.line("one")
        reporter.show_results("test", {"test": {"ndcg@10": 0.5}})
    for text in (caplog.text, capsys.readouterr().out):
        assert "one\n" in text and "│ ndcg@10 │ 0.5000 │" in text and "\x1b" not in text


def test_an_application_decides_where_messages_go(monkeypatch, capsys, caplog) -> None:
    Reporter().line("one")
    assert capsys.readouterr().out == "one\n"
    with caplog.at_level(logging.INFO, "recbole_pos"):
        Reporter(False).line("two")
        monkeypatch.setattr(logging.getLogger("recbole_pos"), "handlers", [logging.NullHandler()])
        Reporter().warning("three")
    assert capsys.readouterr().out == ""
    found = [(one.levelname, one.getMessage()) for one in caplog.records]
    assert found == [("INFO", "two"), ("WARNING", "three")]
