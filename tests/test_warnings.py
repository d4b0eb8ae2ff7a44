"""Warnings before training: times that do not tell the time, classes that look ahead."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL, make_log, write_atomic
from torch import nn

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.interactions import check_clock, sort_interactions
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.diagnosis import looks_ahead

DAY = 86400.0


def check(times: list[float]) -> list[str]:
    """What is said about the times of a user with three interactions, and of one with two."""
    fields = {
        "user": torch.tensor([1, 1, 1, 2, 2]),
        "item": torch.ones(5, dtype=torch.int64),
        "when": torch.tensor(times, dtype=torch.float64),
    }
    log, _ = sort_interactions(fields, 3, "user", "item", "when")
    return check_clock(log, "seconds")


def days(*numbers: int, since: int = 0) -> list[float]:
    return [DAY * (since + number) for number in numbers]


CLOCKS = [
    ([3, 4, 5, 1, 2], ["running number"]),
    ([1995, 1997, 2005, 2001, 2003], ["from the year 1970 to 1970. .*timestamp_unit"]),
    ([1.5e12, 1.6e12, 1.6e12, 1.5e12, 1.7e12], ["to 55839. .*timestamp_unit"]),
    (days(1, 3, 10, 2, 400), ["from the year 1970 to 1971. "]),
    (days(0, 2, 9, 1, 1, since=15000), []),
]


@pytest.mark.parametrize("times,warnings", CLOCKS, ids=lambda x: str(x)[:25])
def test_times_that_are_no_clock_are_warned_of(times: list[float], warnings: list[str]) -> None:
    for found, pattern in zip(check(times), warnings, strict=True):
        assert re.match("'when'.*" + pattern, found), found


def test_times_that_tell_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="'when' is the same for all interactions of a user"):
        check([7, 7, 7, 9, 9])


def test_training_warns_and_opening_a_run_does_not(tmp_path: Path, caplog) -> None:
    frame = make_log()
    frame["timestamp"] = (frame["timestamp"] - 1.5e9) * DAY
    given = {**SMALL, "data_path": str(write_atomic(frame, tmp_path, "dates")), "epochs": 1}
    recbole_pos.run("TORoPE", "dates", None, given, run_dir=tmp_path / "run", verbose=False)
    assert sum("'timestamp'" in record.getMessage() for record in caplog.records) == 1
    caplog.clear()
    recbole_pos.recommend(tmp_path / "run", k=2)
    assert not [r for r in caplog.records if "'timestamp'" in r.getMessage()]


class BothWays(recbole_pos.PosRecommender):
    """A GRU in both directions: a state after an event knows the next ones."""

    two = True

    def __init__(self, config, dataset):
        super().__init__(config, dataset)
        d = config["hidden_size"]
        self.gru = nn.GRU(d, d // (1 + self.two), batch_first=True, bidirectional=self.two)
        self.dropout = nn.Dropout(0.5)

    def encode(self, batch):
        x = batch.pad(self.dropout(self.item_embedding(batch.items)), "start")
        return batch.take_queries(batch.unpad(self.gru(x)[0], "start"))


class OneWay(BothWays):
    two = False


class Honest(BothWays):
    """Says that it looks ahead, and has one state for a session."""

    causal = False


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


def test_the_check_for_looking_ahead_changes_nothing_of_the_training(tiny: Path) -> None:
    model = fresh(BothWays, tiny).model.train()
    before = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    assert looks_ahead(model) > 0.01
    assert model.training and torch.equal(torch.get_rng_state(), before[0])
    assert all(map(torch.equal, before[1], model.parameters()))


def test_an_option_without_a_default_is_named(tiny: Path, caplog) -> None:
    """The constructor would train with None, silently."""

    class Misspelt(OneWay):
        def __init__(self, config, dataset):
            super().__init__(config, dataset)
            self.width = config["gru_widht"]

    fresh(Misspelt, tiny)
    assert "Misspelt reads gru_widht" in caplog.text
    caplog.clear()
    fresh(OneWay, tiny)
    assert not caplog.records
