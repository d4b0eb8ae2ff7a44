"""Parts of a search by themselves: data of trials, the command line. No Ray processes here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shop

from recbole_pos.cli import main
from recbole_pos.config import PosConfig
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError
from recbole_pos.quick_start import prepare
from recbole_pos.tune import search
from recbole_pos.tune.data import SharedData


def test_empty_cells_of_events_are_cut_with_the_log(tmp_path: Path) -> None:
    """And those of items and users are not."""
    whole = shop.open_shop(shop.write(tmp_path, shop.tables()))
    config = PosConfig("AttrFormer", "shop", None, whole.config.external_config_dict)
    part = prepare(config, dataset=SharedData(whole.dataset).dataset(config))
    missing, kept = whole.dataset.missing, whole.dataset.part != TEST
    assert missing["stars"][~kept].any() and missing["stars"][kept].any()
    np.testing.assert_array_equal(part.dataset.missing["stars"], missing["stars"][kept])
    for field in ("price", "age"):
        np.testing.assert_array_equal(part.dataset.missing[field], missing[field])
    part.model.load_state_dict(whole.model.state_dict())
    scores = [dict(e.trainer.evaluate(e.loaders["valid"], load_best_model=False))
              for e in (whole, part)]  # fmt: skip
    assert scores[0] == scores[1]


@pytest.mark.parametrize("seed", [["--seed=5"], ["--seed", "5"]])
def test_the_seed_of_the_command_is_that_of_the_search(seed: list[str], monkeypatch) -> None:
    called: list[dict[str, Any]] = []

    def caught(model: str, dataset: str, space: Any, files: list, given: dict, **own: Any) -> None:
        called.append({"given": given, **own})

    monkeypatch.setattr("recbole_pos.tune.search", caught)
    assert main(["tune", "-m", "FPARec", "-d", "tiny", *seed, "--epochs=3"]) == 0
    assert called[0]["seed"] == 5 and called[0]["given"] == {"epochs": 3}


def test_the_seed_of_a_run_is_that_of_training(monkeypatch) -> None:
    called: list[dict[str, Any]] = []
    monkeypatch.setattr("recbole_pos.quick_start.run", lambda *a, **k: called.append(a[3]))
    assert main(["run", "-m", "FPARec", "-d", "tiny", "--seed=5"]) == 0
    assert called == [{"seed": 5}]


@pytest.mark.parametrize(
    "more",
    [
        {"num_samples": 9},
        {"max_concurrent": 2},
        {"metric": "mrr@10"},
        {"scheduler": "none"},
        {"grace_epochs": 1},
        {"searcher": "grid"},
        {"seed": 1},
        {"cpus_per_trial": 2},
        {"gpus_per_trial": 0.5},
        {"nproc": 2},
        {"run_dir": "elsewhere"},
        {"config_dict": {"epochs": 1}},
    ],
)
def test_a_resumed_search_takes_nothing_else(tmp_path: Path, more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(UsageError, match=f"only --address may change, not {name}$"):
        search(resume=tmp_path, config_file_list=[], **{"config_dict": {}, **more})
