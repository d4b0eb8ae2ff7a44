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
from recbole_pos.position.schemes import SCHEMES


class OneWay(recbole_pos.PosRecommender):
    """A GRU from the oldest event to the newest."""

    two = False

    def __init__(self, config, dataset):
        super().__init__(config, dataset)
        d = config["hidden_size"]
        self.gru = nn.GRU(d, d // (1 + self.two), batch_first=True, bidirectional=self.two)
        self.dropout = nn.Dropout(0.5)

    def encode(self, items, ctx):
        x = ctx.pad(self.dropout(self.item_embedding(items)), "start")
        return ctx.unpad(self.gru(x)[0], "start")


class BothWays(OneWay):
    """A state after an event knows the next ones."""

    two = True


class Honest(BothWays):
    """The same, which says so."""

    causal = False

    def states(self, items, ctx, positions):
        return self.encode(items, ctx)[ctx.last]


class NextValue(recbole_pos.AttentionPosition):
    """Each event gets the value of the next one."""

    def mix_values(self, v, ctx):
        return v + torch.cat((v[1:], v[:1]))


class NextHour(recbole_pos.InputPosition):
    """The hour of the next event as a whole number, which has no gradient."""

    needs_time = True

    def __init__(self, dimensions):
        super().__init__()
        self.hours = nn.Embedding(24, dimensions.hidden_size)

    def forward(self, x, ctx):
        hour = (ctx.times // 3600).long() % 24
        return x + self.hours(torch.cat((hour[1:], hour[:1])))


class PastValue(recbole_pos.AttentionPosition):
    """Each event gets the value of the one before."""

    def mix_values(self, v, ctx):
        before = torch.cat((torch.zeros_like(v[:1]), v[:-1]))
        return v + before * (ctx.index > 0)[:, None, None]


def fresh(model: Any, tiny: Path, **options: Any) -> Experiment:
    given = {key: value for key, value in SMALL.items() if key != "inner_size"}
    return prepare(
        PosConfig(model, "tiny", None, {**given, "data_path": str(tiny), "epochs": 1, **options})
    )


def warnings_of(caplog, made: Experiment) -> list[str]:
    made.trainer.fit(made.loaders["train"], made.loaders["valid"], verbose=False, saved=False)
    return [record.message for record in caplog.records if "looks ahead" in record.message]


@pytest.mark.parametrize(
    ("model", "options", "warned"),
    [
        (OneWay, {}, False),
        (BothWays, {}, True),
        (BothWays, {"augmentation": "prefix"}, False),
        (Honest, {"train_windows": "prefix"}, False),
    ],
)
def test_models(tiny: Path, caplog, model: type, options: dict, warned: bool) -> None:
    found = warnings_of(caplog, fresh(model, tiny, **options))
    assert len(found) == warned and all(text.startswith("BothWays: looks ahead.") for text in found)


@pytest.mark.parametrize(
    ("scheme", "warned"), [(NextValue, True), (NextHour, True), (PastValue, False)]
)
def test_schemes(tiny: Path, caplog, scheme: type, warned: bool) -> None:
    recbole_pos.register_scheme("mine", scheme)
    found = warnings_of(caplog, fresh("PosSASRec", tiny, position=["rope", "mine"]))
    assert len(found) == warned and all(scheme.__name__ in text for text in found)


def test_nothing_is_changed(tiny: Path) -> None:
    model = fresh(BothWays, tiny).model.train()
    before = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    assert looks_ahead(model) > 0.01
    assert model.training and torch.equal(torch.get_rng_state(), before[0])
    assert all(map(torch.equal, before[1], model.parameters()))


@pytest.mark.parametrize("name", [name for name in SCHEMES.places if name != "difsr"])
def test_no_scheme_of_the_plugin_does(experiment, name: str) -> None:
    made = experiment("PosSASRec", position=[name])
    assert looks_ahead(made.model) < 1e-6
