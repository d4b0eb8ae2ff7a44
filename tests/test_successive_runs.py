"""Runs under a global temporal split: metrics by hand, results, what cannot be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_atomic
from test_successive import GT, NUMBERS, PLAIN, brute_force, edges, late_log

import recbole_pos
from recbole_pos.model.models import BUILTIN_GENERAL


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> str:
    """data_path of the late log; it has what the tests are about."""
    frame = late_log()
    first, last = edges(frame)
    begins = frame.groupby("user_id").timestamp.min()
    assert begins["v"] > first and begins["v"] <= last < begins["t"] and begins["w"] > first
    return str(write_atomic(frame, tmp_path_factory.mktemp("late")))


def by_hand(made: Any, phase: str, k: int) -> dict[str, float]:
    """Hit, NDCG and coverage from the scores, without RecBole's evaluator."""
    log, hits, gains, shown = made.dataset.log, [], [], set()
    mask = made.config["MODEL_TYPE"].name == "GENERAL"
    for interaction, _, _, items in made.loaders[phase]:
        scores = made.model.full_sort_predict(interaction).view(len(items), -1).tolist()
        for row, target in enumerate(items.tolist()):
            event, user = int(interaction["target_event"][row]), int(interaction["user_id"][row])
            left_out = {0}
            while mask and event > log.offsets[user]:
                event -= 1
                left_out.add(int(log.items[event]))
            left_out -= {target}
            order = [i for i in range(len(scores[row])) if i not in left_out]
            order.sort(key=lambda item, values=scores[row]: -values[item])
            shown |= set(order[:k])
            hits.append(target in order[:k])
            gains.append(1 / math.log2(order.index(target) + 2) if hits[-1] else 0.0)
    return {
        f"hit@{k}": sum(hits) / len(hits),
        f"ndcg@{k}": sum(gains) / len(gains),
        # RecBole divides by all ids, the padding included
        f"itemcoverage@{k}": len(shown) / (len(made.dataset.field2id_token["item_id"])),
    }


@pytest.mark.parametrize("model", ["PosSASRec", "SASRec", "GRU4Rec", "BPR"])
def test_metrics_by_hand(late: str, tmp_path: Path, model: str) -> None:
    options = {"data_path": late, "eval_args": GT, "epochs": 2, "show_progress": False}
    chosen = {"metrics": ["Hit", "NDCG", "ItemCoverage"], "topk": [10]}
    result = recbole_pos.run(
        model, "tiny", None, {**options, **chosen}, run_dir=tmp_path / "run", verbose=False
    )
    made = recbole_pos.load(tmp_path / "run")
    with torch.inference_mode():
        assert result.test == pytest.approx(by_hand(made, "test", 10), abs=1e-6)
        assert result.best_valid == pytest.approx(by_hand(made, "valid", 10), abs=1e-6)
    assert result.test["hit@10"] > 0
    again = made.trainer.evaluate(made.loaders["test"], load_best_model=False)
    assert dict(again) == result.test


@pytest.mark.parametrize("model", [*PLAIN, *BUILTIN_GENERAL])
def test_builtins_run_under_the_global_split(late: str, tmp_path: Path, model: str) -> None:
    options = {"data_path": late, "eval_args": GT, "epochs": 1}
    if model not in BUILTIN_GENERAL and model != "FPMC":
        options["MAX_ITEM_LIST_LENGTH"] = 8
    result = recbole_pos.run(model, "tiny", None, options, run_dir=tmp_path / "run", verbose=False)
    want = brute_force("all", "keep")
    assert (result.valid_targets, result.test_targets) == (len(want["valid"]), len(want["test"]))
    assert 0 <= result.test["hit@20"] <= 1


@pytest.mark.parametrize("model", ["FPARec", "Pop"])
def test_the_result_says_what_was_split(late: str, tmp_path: Path, capsys, model: str) -> None:
    frame = late_log()
    first, last = edges(frame)
    options = {"data_path": late, "epochs": 1, "eval_args": {**GT, "cold_items": "drop"}}
    result = recbole_pos.run(model, "tiny", None, options, run_dir=tmp_path / "run")
    split = json.loads((tmp_path / "run" / "result.json").read_text())["split"]
    assert split == result.split and split["boundaries"] == [first, last]
    assert split["split"] == {"GT": NUMBERS} and split["cold_items"] == "drop"
    assert split["target"] == "all"
    assert split["events"] == {
        "train": int((frame.timestamp <= first).sum()),
        "valid": int(((frame.timestamp > first) & (frame.timestamp <= last)).sum()),
        "test": int((frame.timestamp > last).sum()),
    }
    assert split["targets"]["valid"] == result.valid_targets
    assert split["targets"]["test"] == result.test_targets
    # a user's first event, whatever its part: v and w begin in validation, t and one in test
    assert split["without_history"]["valid"] >= 2 and split["without_history"]["test"] >= 2
    shown = capsys.readouterr().out
    assert (
        f"split GT at time {repr(first).removesuffix('.0')} and" in shown
        and "without history" in shown
    )


def test_a_split_without_validation(late: str, tmp_path: Path, capsys) -> None:
    options = {"data_path": late, "eval_args": {"split": {"GT": [0.8]}}, "epochs": 1}
    result = recbole_pos.run("FPARec", "tiny", None, options, run_dir=tmp_path / "run")
    assert result.valid_targets == 0 and result.best_valid is None and result.test
    assert result.split["events"]["valid"] == 0 and len(result.split["boundaries"]) == 1
    assert "no validation" in capsys.readouterr().out
