"""Parts of a search by themselves: data of trials, the command line. No Ray processes here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import shop

from recbole_pos.config import PosConfig
from recbole_pos.data.splits import TEST
from recbole_pos.quick_start import prepare
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
