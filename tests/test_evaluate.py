"""Metrics of a trained run without training: from its ranks, or by its best weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import SMALL

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    given = {**SMALL, "data_path": str(tiny), "epochs": 3, "stopping_step": 1}
    recbole_pos.run("PosSASRec", "tiny", None, given, run_dir=folder, verbose=False)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def away(run: Path) -> Path:
    """The same without data: only ranks are left to answer from."""
    config = (run / "config.yaml").read_text()
    lines = [x if not x.startswith("data_path") else "data_path: away" for x in config.split("\n")]
    (run / "config.yaml").write_text("\n".join(lines))
    return run


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def test_its_own_metrics_come_out_the_same(run: Path) -> None:
    assert recbole_pos.evaluate(run) == result(run)["test"]
    assert recbole_pos.evaluate(run, part="valid") == result(run)["best_valid"]
    (run / "test_ranks.parquet").unlink()
    assert recbole_pos.evaluate(run) == result(run)["test"]


@pytest.mark.parametrize("metrics", ["MRR", ["MAP", "Precision", "Recall", "NDCG"]])
def test_ranks_and_weights_give_the_same(run: Path, metrics: Any) -> None:
    by_ranks = recbole_pos.evaluate(run, metrics, [1, 3, 7])
    (run / "test_ranks.parquet").unlink()
    assert recbole_pos.evaluate(run, metrics, [1, 3, 7]) == by_ranks


def test_ranks_suffice_or_not(away: Path, capsys: pytest.CaptureFixture) -> None:
    """What needs more than they have needs the data, and says so."""
    assert main(["evaluate", str(away), "--metrics", "Hit,MRR", "--topk", "1", "5", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["hit@1", "hit@5", "mrr@1", "mrr@5"]
    for more in (["--topk=30"], ["--metrics=ItemCoverage"], ["--part=valid"], ["--mask_history=1"]):
        assert main(["evaluate", str(away), *more]) == 2


@pytest.mark.parametrize("damage", ["zero", "fewer", "result"])
def test_ranks_that_do_not_fit_the_result_are_not_believed(away: Path, damage: str) -> None:
    table = pd.read_parquet(away / "test_ranks.parquet")
    if damage == "zero":
        table["rank"] = 0
    elif damage == "fewer":
        table = table.iloc[1:]
    else:
        content = result(away)
        content["test"]["ndcg@10"] = 0.75
        (away / "result.json").write_text(json.dumps(content))
    table.to_parquet(away / "test_ranks.parquet", index=False)
    with pytest.raises(UsageError, match="data_path"):  # so the weights are asked
        recbole_pos.evaluate(away)


def test_items_of_the_past_are_left_out_where_that_is_asked(run: Path) -> None:
    masked = recbole_pos.evaluate(run, ["Hit"], [5], mask_history=True)
    plain = recbole_pos.evaluate(run, ["Hit"], [5])
    assert masked != plain and masked["hit@5"] > plain["hit@5"]


@pytest.mark.parametrize(
    "words",
    [["--metrics=Nonsense"], ["--metrics=AUC"], ["--topk=0"], ["--topk=x"], ["--topk=400"],
     ["--part=train"], ["--mask_history=maybe"], ["--metrics="]],
)  # fmt: skip
def test_wrong_questions(run: Path, capsys: pytest.CaptureFixture, words: list[str]) -> None:
    assert main(["evaluate", str(run), *words]) == 2
    message = capsys.readouterr().err.strip()
    assert words[0].partition("=")[0].lstrip("-") in message and "\n" not in message


def test_a_loaded_trainer_evaluates(run: Path) -> None:
    made = recbole_pos.load(run)
    assert made.trainer.evaluate(made.loaders["test"]) == result(run)["test"]
