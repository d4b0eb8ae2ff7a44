"""The warning before training with a class of someone else's that looks ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from torch import nn

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.diagnosis import looks_ahead


class BothWays(recbole_pos.PosRecommender):
    """A GRU in both directions: a state after an event knows the next ones."""

    two = True

    def __init__(self, config, dataset):
        super().__init__(config, dataset)
        d = config["hidden_size"]
        self.gru = nn.GRU(d, d // (1 + self.two), batch_first=True, bidirectional=self.two)
        self.dropout = nn.Dropout(0.5)

    def encode(self, items, ctx):
        x = ctx.pad(self.dropout(self.item_embedding(items)), "start")
        return ctx.unpad(self.gru(x)[0], "start")


class OneWay(BothWays):
    two = False


class Honest(BothWays):
    """Says that it looks ahead, and has one state for a session."""

    causal = False

    def states(self, items, ctx, positions):
        return self.encode(items, ctx)[ctx.last]


class NextHour(recbole_pos.InputPosition):
    """The hour of the next event as a whole number, which has no gradient."""

    needs_time = True

    def __init__(self, dimensions):
        super().__init__()
        self.hours = nn.Embedding(24, dimensions.hidden_size)

    def forward(self, x, ctx):
        hour = (ctx.times // 3600).long() % 24
        return x + self.hours(hour.roll(-1))


def fresh(model: Any, tiny: Path, **options: Any) -> Experiment:
    given = {key: value for key, value in SMALL.items() if key != "inner_size"}
    given |= {"data_path": str(tiny), "epochs": 1, **options}
    return prepare(PosConfig(model, "tiny", None, given))


@pytest.mark.parametrize(
    ("model", "options", "warned"),
    [
        (OneWay, {}, None),
        (BothWays, {}, "BothWays"),
        (BothWays, {"augmentation": "prefix"}, None),
        (Honest, {"train_windows": "prefix"}, None),
        (NextHour, {}, "NextHour"),
    ],
)
def test_training_warns(tiny: Path, caplog, model: type, options: dict, warned: str | None) -> None:
    if not issubclass(model, recbole_pos.PosRecommender):
        recbole_pos.register_scheme("mine", model)
        model, options = "PosSASRec", {"position": ["rope", "mine"]}
    made = fresh(model, tiny, **options)
    made.trainer.fit(made.loaders["train"], made.loaders["valid"], verbose=False, saved=False)
    found = [record.message for record in caplog.records if "looks ahead" in record.message]
    assert len(found) == (warned is not None) and all(warned in text for text in found)


def test_nothing_is_changed(tiny: Path) -> None:
    model = fresh(BothWays, tiny).model.train()
    before = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    assert looks_ahead(model) > 0.01
    assert model.training and torch.equal(torch.get_rng_state(), before[0])
    assert all(map(torch.equal, before[1], model.parameters()))
