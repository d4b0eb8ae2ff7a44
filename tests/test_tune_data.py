"""What the trials of a search are given of the data. No Ray here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shop
import torch

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.splits import TEST
from recbole_pos.experiment.build import prepare
from recbole_pos.runs.shared_data import SharedData


@pytest.mark.parametrize(
    ("model", "split"),
    [
        ("FPARec", {"LS": "valid_and_test"}),
        ("GRU4Rec", {"RS": [6, 2, 2]}),
        ("BPR", {"GT": [0.7, 0.85]}),
    ],
)
def test_what_trials_get_has_no_test_event(tiny: Path, split: dict, model: str) -> None:
    """And is otherwise the same: rows of training and validation, identity, catalogue."""
    options = {"data_path": str(tiny), "eval_args": {"split": split}}
    config = PosConfig(model, "tiny", None, options)
    whole = prepare(config)
    assert (whole.dataset.part == TEST).any() and whole.loaders["test"]
    shared = SharedData(whole.dataset)
    other = PosConfig(model, "tiny", None, {**options, "train_batch_size": 7})
    assert shared.make_dataset(other).config["train_batch_size"] == 7
    config = PosConfig(model, "tiny", None, options)
    part = prepare(config, dataset=shared.make_dataset(config))
    assert part.loaders["test"] is None and not (part.dataset.part == TEST).any()
    assert len(part.dataset.log) == (whole.dataset.part != TEST).sum()
    assert shared.template.inter_feat is None and shared.template.config is None
    for phase in ("train", "valid"):
        one, two = whole.loaders[phase]._dataset, part.loaders[phase]._dataset
        assert len(one) == len(two)
        for name in ("user_id", "item_id", "timestamp"):
            assert torch.equal(one.inter_feat[name], two.inter_feat[name])
        if model != "BPR":
            rows = list(range(len(one)))
            assert torch.equal(one[rows]["item_id_list"], two[rows]["item_id_list"])
    assert part.dataset.identity == whole.dataset.identity
    assert part.dataset.item_num == whole.dataset.item_num
    scores = [dict(e.trainer.evaluate(e.loaders["valid"], load_best_model=False))
              for e in (whole, part)]  # fmt: skip
    assert scores[0] == scores[1]


def test_empty_cells_of_events_are_cut_with_the_log(tmp_path: Path) -> None:
    """And those of items and users are not."""
    whole = shop.open_shop(shop.write(tmp_path, shop.tables()))
    config = PosConfig("AttrFormer", "shop", None, whole.config.external_config_dict)
    part = prepare(config, dataset=SharedData(whole.dataset).make_dataset(config))
    missing, kept = whole.dataset.missing, whole.dataset.part != TEST
    assert missing["stars"][~kept].any() and missing["stars"][kept].any()
    np.testing.assert_array_equal(part.dataset.missing["stars"], missing["stars"][kept])
    for field in ("price", "age"):
        np.testing.assert_array_equal(part.dataset.missing[field], missing[field])
    part.model.load_state_dict(whole.model.state_dict())
    scores = [dict(e.trainer.evaluate(e.loaders["valid"], load_best_model=False))
              for e in (whole, part)]  # fmt: skip
    assert scores[0] == scores[1]
