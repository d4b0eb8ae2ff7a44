"""RecBole's own models train and are tested through the plugin, one short epoch each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_log, write_atomic

import recbole_pos
from recbole_pos.model.models import BUILTIN_GENERAL, BUILTIN_SEQUENTIAL

# models that embed attributes of items
WITH_FEATURES = ("SASRecF", "GRU4RecF", "FDSA")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small log with an item attribute of type token_seq."""
    folder = write_atomic(make_log(users=40, longest=10), tmp_path_factory.mktemp("shop"))
    rng = np.random.default_rng(0)
    items = pd.DataFrame(
        {
            "item_id:token": [f"i{i}" for i in range(40)],
            "class:token_seq": [" ".join(rng.choice(list("abcd"), 2)) for _ in range(40)],
        }
    )
    items.to_csv(folder / "tiny" / "tiny.item", sep="\t", index=False)
    return folder


COMMON = ("GRU4Rec", "SASRec", "BERT4Rec", "SASRecF", "FPMC", "BPR", "ItemKNN")  # one of each kind
OTHERS = [name for name in (*BUILTIN_SEQUENTIAL, *BUILTIN_GENERAL) if name not in COMMON]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [*COMMON, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_trains_one_epoch(shop: Path, tmp_path: Path, model: str) -> None:
    options: dict[str, Any] = {"data_path": str(shop), "epochs": 1}
    if model not in (*BUILTIN_GENERAL, "FPMC"):
        options["MAX_ITEM_LIST_LENGTH"] = 8
    if model in WITH_FEATURES:
        options["load_col"] = {"inter": ["user_id", "item_id", "timestamp"], "item": "*"}
        options["selected_features"] = ["class"]
    result = recbole_pos.run(model, "tiny", None, options, run_dir=tmp_path / "run", verbose=False)
    assert result.epochs == 1 and 0 <= result.test["hit@20"] <= 1
    assert result.candidates.startswith("items not" if model in BUILTIN_GENERAL else "all items")
    loaded = recbole_pos.load(tmp_path / "run")
    again = loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)
    assert dict(again) == result.test
