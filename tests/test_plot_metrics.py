"""metrics.jsonl that a crash, or somebody, has damaged: a picture with a word, or its line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.inspect import plot
from recbole_pos.inspect.plot import HALF_A_LINE, best_epoch, read_metrics
from recbole_pos.inspect.trained import open_run

METRIC = "ndcg@10"


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plot") / "run"
    recbole_pos.run("Pop", "tiny", None, {"data_path": str(tiny)}, run_dir=folder, verbose=False)
    return folder


def line(epoch: int, score: float | None = 0.5, **others) -> bytes:
    valid = None if score is None else {"hit@10": 0.1, METRIC: score}
    content = {"epoch": epoch, "loss": 4.0, "valid": valid, "seconds": 0.1, **others}
    return json.dumps(content).encode() + b"\n"


WHOLE = line(0) + line(1)
LINE_3 = {
    "binary rubbish": b"\x80\x00\xff\xfe{\n",
    "no json": b"epoch 2\n",
    "half a line in the middle": line(2)[:20] + b"\n" + line(3),
    "a list": b"[1, 2]\n",
    "a number": b"7\n",
    "null": b"null\n",
    "nested too deeply": b"[" * 100_000 + b"\n",
    "no epoch": b'{"loss": 1.0, "valid": null}\n',
    "no loss": b'{"epoch": 2, "valid": null}\n',
    "no valid": b'{"epoch": 2, "loss": 1.0}\n',
    "epoch is text": line("2"),
    "epoch is true": line(True),
    "epoch is a fraction": line(2.5),
    "epoch is below 0": line(-1),
    "epoch out of range": line(10**30),
    "the same epoch again": line(1),
    "an earlier epoch": line(0),
    "loss is NaN": line(2, loss=float("nan")),
    "loss is infinite": line(2, loss=float("-inf")),
    "loss is null": line(2, loss=None),
    "loss is text": line(2, loss="1.0"),
    "loss too large to draw": line(2, loss=1e308),
    "loss has a thousand digits": line(2, loss=10**1000),
    "loss has ten thousand digits": b'{"epoch": 2, "loss": ' + b"1" * 10_000 + b"}\n",
    "valid is a list": line(2, valid=[0.5]),
    "valid is text": line(2, valid="0.5"),
    "metric missing": line(2, valid={"hit@10": 0.5}),
    "metric is NaN": line(2, float("nan")),
    "metric is infinite": line(2, float("inf")),
    "metric is null": line(2, valid={METRIC: None}),
    "metric is true": line(2, valid={METRIC: True}),
}


@pytest.fixture
def plotted(run: Path, monkeypatch, capsys, caplog) -> Iterator:
    """``plotted(content)`` of metrics.jsonl: exit code, everything printed, the figure's title."""
    trained = open_run(run)
    monkeypatch.setattr(plot, "open_run", lambda *_: trained)
    titles = []

    def keep(figure: Figure, file: Path, **given) -> None:
        figure.draw_without_rendering()
        titles.append(figure.get_suptitle())

    monkeypatch.setattr(Figure, "savefig", keep)

    def command(content: bytes) -> tuple[int, str, str]:
        (run / "metrics.jsonl").write_bytes(content)
        code = main(["plot", str(run)])
        return code, capsys.readouterr().err + caplog.text, "".join(titles)

    return command


@pytest.mark.parametrize("damage", LINE_3)
def test_a_damaged_line_is_named(plotted, run: Path, damage: str) -> None:
    code, printed, title = plotted(WHOLE + LINE_3[damage])
    assert code == 2 and not title
    assert f"{run / 'metrics.jsonl'}, line 3: " in printed and f"--resume {run}" in printed


def test_half_a_last_line_is_left_out_and_told(plotted) -> None:
    """As a process leaves it that was killed within the write, wherever that was."""
    for cut in (1, len(line(2)) // 2, len(line(2)) - 2):
        code, printed, title = plotted(WHOLE + line(2)[:cut])
        assert code == 0 and HALF_A_LINE in printed and HALF_A_LINE in title
    code, printed, _ = plotted(WHOLE + b"\0" * 100)  # a file system after a power cut
    assert code == 0 and HALF_A_LINE in printed


def test_a_last_line_without_its_end_is_a_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for end in (b"", b"\n", b"\n\n", b"\r\n"):
        file.write_bytes(WHOLE + line(2).rstrip() + end)
        history, note = read_metrics(file, METRIC)
        assert len(history) == 3 and not note


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_no_line_is_no_epoch(plotted, content: bytes) -> None:
    code, printed, _ = plotted(content)
    assert code == 2 and "no finished epoch yet" in printed


def test_half_a_first_line(plotted, run: Path) -> None:
    code, printed, _ = plotted(line(0)[:30])
    assert code == 2 and f"{run / 'metrics.jsonl'}, line 1: " in printed


def test_a_folder_in_its_place(plotted, run: Path) -> None:
    (run / "metrics.jsonl").unlink(missing_ok=True)
    (run / "metrics.jsonl").mkdir()
    try:
        assert main(["plot", str(run)]) == 2
    finally:
        (run / "metrics.jsonl").rmdir()


def test_the_best_epoch_is_the_one_that_is_kept(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """Where lower is better, and where it is not: what is marked is what result.json says."""
    marked, found = {}, {}

    def keep(figure: Figure, file: Path, **given) -> None:
        line, dot = figure.axes[1].lines
        marked[metric] = dot.get_xdata().tolist()
        found[metric] = line.get_ydata().tolist()
        assert dot.get_ydata() == found[metric][marked[metric][0]]
        assert dot.get_color() == line.get_color()

    monkeypatch.setattr(Figure, "savefig", keep)
    options = {"data_path": str(tiny), "epochs": 4, "position": ["token_mixing"]}
    options |= {"metrics": ["NDCG", "GiniIndex"], "topk": [10], "learning_rate": 0.003}
    for metric, pick in (("GiniIndex@10", min), ("NDCG@10", max)):
        folder = tmp_path / metric
        given = {**options, "valid_metric": metric}
        result = recbole_pos.run("PosSASRec", "tiny", None, given, run_dir=folder, verbose=False)
        assert main(["plot", str(folder)]) == 0
        assert marked[metric] == [result.best_epoch]
        assert found[metric][result.best_epoch] == pick(found[metric])
        assert len(set(found[metric])) > 1


def test_of_equal_epochs_training_keeps_the_latest() -> None:
    assert best_epoch([(0, 0.2), (2, 0.5), (4, 0.5), (6, 0.1)], bigger=True) == 4
    assert best_epoch([(0, 0.2), (2, 0.1), (4, 0.5)], bigger=False) == 2
    assert best_epoch([], bigger=True) is None
