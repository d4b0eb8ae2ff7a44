"""Absurd values of all options of all models: a UsageError or a trained model, nothing else."""

from __future__ import annotations

import datetime
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import shop
from absurd_options import NAMES, VALUES, Case, Limited, cases, known

pytestmark = pytest.mark.long
SAMPLE = 300
LARGEST = 2**32  # no whole number above it means anything here, a seed included
TRAINING = ("learning_rate", "lr_decay_rate", "weight_decay", "initializer_range", "reg_weight")


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    data = shop.write(tmp_path_factory.mktemp("shop"), shop.tables())
    process = Limited(str(data), tmp_path_factory.mktemp("elsewhere"))
    yield process
    process.close()


def is_absurd(value: Any, default: Any) -> bool:
    """What nothing may be trained with: another kind than the default, or no such number."""
    if isinstance(value, dict):
        return any(is_absurd(v, None) or not isinstance(k, str) for k, v in value.items())
    if isinstance(value, list):
        return any(is_absurd(v, None) for v in value)
    kinds = {bool: (bool,), int: (int, float), float: (int, float), str: (str, int)}
    wanted = kinds.get(type(default))
    if wanted and value is not None and type(value) not in wanted:
        return True
    if value is None:
        return isinstance(default, (bool, int, float))
    if isinstance(value, (bytes, datetime.date)) or value == "":
        return True
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    tiny = number and 0 < abs(value) < 1e-300
    return number and (tiny or not math.isfinite(value) or abs(value) > LARGEST)


def problem(case: Case, outcome: str, text: str, default: Any) -> str:
    """What is wrong with how a case ended; empty if nothing is."""
    model, options, key = case
    if outcome == "TrainingError" and key in TRAINING and "learning_rate" in text:
        return ""
    if outcome == "UsageError":
        return "" if 20 < len(text) < 5000 else "a message that no one reads"
    if outcome != "trained":
        return text
    given = options.get("given_path", options.get(key))
    fine = key == "gpu_id" and given == ""  # none of them
    return "trained" if is_absurd(given, default) and not fine else ""


def try_out(limited: Limited, chosen: list[Case]) -> tuple[Counter[str], list[str]]:
    """Counts of outcomes, and what should not have been."""
    from recbole_pos.config.posconfig import PosConfig

    data = {"data_path": limited.given[0]}
    defaults = {m: PosConfig(m, "shop", None, data).internal_config_dict for m in NAMES}
    counts: Counter[str] = Counter()
    wrong = []
    for case in chosen:
        outcome, text = limited.try_out(case)
        counts[outcome] += 1
        if found := problem(case, outcome, text, defaults[case[0]].get(case[2])):
            shown = repr(case[1].get(case[2]))[:100]
            wrong.append(f"{case[0]} {case[2]}={shown}: {outcome}: {found[-1000:]}")
    return counts, wrong


def test_every_model_trains_as_it_is(limited: Limited) -> None:
    """So that a refusal is about what is absurd, not about the rest."""
    from absurd_options import make_case

    data = limited.given[0]
    plain = [make_case(model, known(model, data), "seed", 3) for model in NAMES]
    counts, wrong = try_out(limited, plain)
    assert wrong == [] and counts == {"trained": len(NAMES)}


def test_absurd_options(
    limited: Limited, request: pytest.FixtureRequest, record_property: Callable[[str, str], None]
) -> None:
    every = cases(limited.given[0])
    assert len(every) > 11_000 and len(VALUES) >= 30
    chosen = every if request.config.getoption("--fuzz") else random.Random(0).sample(every, SAMPLE)
    counts, wrong = try_out(limited, chosen)
    printed = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
    record_property("fuzz", f"{len(chosen):,} of {len(every):,} absurd options: {printed}")
    assert wrong == [] and counts["trained"] and counts["UsageError"]
