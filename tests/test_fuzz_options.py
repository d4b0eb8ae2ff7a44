"""Absurd values of all options of all models: a UsageError or a trained model, nothing else."""

from __future__ import annotations

import datetime
import logging
import math
import multiprocessing
import os
import random
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import shop
import torch

from recbole_pos.config.option import DATA
from recbole_pos.config.options import OPTIONS, list_by_role
from recbole_pos.config.posconfig import DERIVED_KEYS, EXTRA_KEYS, PosConfig
from recbole_pos.errors import TrainingError, UsageError
from recbole_pos.experiment.build import prepare, read_dataset
from recbole_pos.model.models import LOSSES, list_built_in
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.values import shown
from recbole_pos.yaml_files import ROOT, read_yaml

Case = tuple[str, dict[str, Any], str]  # model, options, the one that is absurd
NAMES = list_built_in()
PATIENCE = 300  # seconds of a case, on a machine that has other things to do
ABSURD: list[Any] = [
    *(None, True, False, "", " ", "1e-3", "ünï✓", "a" * 20_000, "nul\0"),
    *(0, 1, -1, 10**6, 2**31, 2**63, 10**40),
    *(0.5, -0.5, 1e-320, 1e300, math.nan, math.inf),
    *([], [None], [1, "a"], [[1]], [2**63]),
    *({}, {"a": {"b": []}}, {1: None}, datetime.date(2026, 1, 2), b"bytes"),
]
# keys within options, by the option
INNER: dict[str, list[str]] = {
    **{"session_filter": ["item", "session"], "load_col": ["inter", "item", "user"]},
    **{"unused_col": ["inter", "item"], "unload_col": ["inter", "item"], "threshold": ["stars"]},
    **{"val_interval": ["stars", "price"], "seq_len": ["tags", "item_id_list"]},
    "discretization": ["price"],
    **{name: list(row.inner) for name, row in OPTIONS.items() if row.inner},
}
SMALLEST = ("train_batch_size", "eval_batch_size", "MAX_ITEM_LIST_LENGTH")
TINY = {
    **dict.fromkeys(("hidden_size", "inner_size", "embedding_size", "difsr_size"), 8),
    **{"n_heads": 2, "MAX_ITEM_LIST_LENGTH": 5, "topk": [3], "epochs": 1},
    **{"valid_metric": "NDCG@3", "show_progress": False, "eval_batch_size": 64},
    **{"selected_features": ["brand", "tags"], "load_col": shop.LOAD, "train_batch_size": 64},
    "filter_inter_by_user_or_item": False,
}


def make_tiny(model: str, data_path: str) -> dict[str, Any]:
    layers = 2 if model == "FEARec" else 1
    return shop.drop_unread(model, {**TINY, "n_layers": layers, "data_path": data_path})


def make_cases(data_path: str) -> list[Case]:
    """Every option of every model with every value; what all models have, each value once.

    Without ``compile: True``, which starts a C++ compiler beyond the time and memory that a case
    has here; ``test_compile.py`` trains so.
    """
    bases = {model: make_tiny(model, data_path) for model in NAMES}
    configs = {model: PosConfig(model, "shop", None, bases[model]) for model in NAMES}
    keys = {m: {*c.internal_config_dict} - DERIVED_KEYS - EXTRA_KEYS for m, c in configs.items()}
    common = sorted(set.intersection(*keys.values()))
    changed: list[tuple[str, str, dict[str, Any]]] = []  # model, option, options
    for model in NAMES:
        own = sorted(keys[model].difference(common))
        changed += [(model, key, {key: value}) for key in own for value in ABSURD]
        changed += [(model, key, {key: 1}) for key in SMALLEST if key in keys[model]]
    for scheme in SCHEMES:
        own = read_yaml(ROOT / "position" / f"{scheme}.yaml")
        given = {"position": [scheme]}
        changed += [("PosSASRec", key, {**given, key: v}) for key in own for v in ABSURD]
    for loss in LOSSES[1:]:
        own, given = read_yaml(ROOT / "loss" / f"{loss}.yaml"), {"loss_type": loss}
        changed += [("PosSASRec", key, {**given, key: v}) for key in own for v in ABSURD]
    inner = [(key, {name: v}) for key, names in INNER.items() for name in names for v in ABSURD]
    shared = [(key, v) for key in common for v in ABSURD if key != "compile" or v is not True]
    for number, (key, value) in enumerate([*shared, *inner]):
        fields = {"numerical_features": ["price"]} if key == "discretization" else {}
        changed.append((NAMES[number % len(NAMES)], key, {**fields, key: value}))
    return [(model, {**bases[model], **given}, key) for model, key, given in changed]


def limit_resources(folder: str) -> None:
    """Begin a process with 6 GB of memory and files of 64 MB, whose output is dropped."""
    for limit, most in ((resource.RLIMIT_AS, 6 << 30), (resource.RLIMIT_FSIZE, 64 << 20)):
        resource.setrlimit(limit, (most, most))
    os.chdir(folder)
    silence = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(silence, output)
    sys.argv = sys.argv[:1]
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


DATASETS: dict[Any, Any] = {}  # of the process in which cases run


def run_case(case: Case) -> tuple[str, str]:
    """Return how a training ends, and with which message."""
    try:
        loss = train_epoch(*case)
        return ("trained", "") if math.isfinite(loss) else ("failed", f"loss {loss}")
    except (UsageError, TrainingError) as error:
        return ("UsageError" if isinstance(error, UsageError) else "TrainingError"), str(error)
    except Exception:  # also MemoryError
        return "failed", traceback.format_exc()


def train_epoch(model: str, options: dict[str, Any], changed: str) -> float:
    """Return the loss; the data are read again only where an option is about them."""
    config, dataset = PosConfig(model, "shop", None, options), None
    if changed not in (*list_by_role(DATA), "numerical_features", "discretization", "worker"):
        kind = config["MODEL_TYPE"], str(config["load_col"])
        if kind not in DATASETS:
            DATASETS[kind] = read_dataset(config)
            DATASETS[kind].build()
        dataset = DATASETS[kind].for_config(config)
    made = prepare(config, dataset=dataset)
    made.trainer.epochs = 1
    made.trainer.fit(made.loaders["train"], made.loaders["valid"], saved=False, verbose=False)
    made.trainer.evaluate(made.loaders["test"])
    return made.trainer.progress.history[0]["loss"]


TRAINING = ("learning_rate", "lr_decay_rate", "weight_decay", "initializer_range", "reg_weight")


def find_problem(case: Case, outcome: str, text: str) -> str:
    """What is wrong with how a case ended, but for bounds (test_options); empty if nothing is."""
    if outcome == "TrainingError" and case[2] in TRAINING and "learning_rate" in text:
        return ""
    if outcome == "UsageError":
        return "" if 20 < len(text) < 5000 else "a message that no one reads"
    return text


@pytest.mark.long
def test_absurd_options(
    tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[[str, str], None]
) -> None:
    """In a process of its own, with limits; first every model as it is, so that a refusal is about
    what is absurd."""
    data = str(shop.write(tmp_path / "shop", shop.tables()))
    every = make_cases(data)
    assert len(every) > 11_000 and len(ABSURD) >= 30
    chosen = every if request.config.getoption("--fuzz") else random.Random(0).sample(every, 300)
    plain = [(model, make_tiny(model, data), "seed") for model in NAMES]
    counts: Counter[str] = Counter()
    wrong = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, limit_resources, (str(tmp_path),)) as pool:
        cases = [*plain, *chosen]
        for case, future in zip(cases, [pool.submit(run_case, one) for one in cases], strict=True):
            try:
                outcome, text = future.result(PATIENCE)
            except (BrokenProcessPool, TimeoutError) as error:
                for process in list((pool._processes or {}).values()):
                    process.kill()  # else the pool waits for it
                pytest.fail(f"{case[0]} {case[2]}={shown(case[1].get(case[2]))}: {error!r}")
            counts[outcome] += 1
            found = text if case in plain else find_problem(case, outcome, text)
            if found:
                value = shown(case[1].get(case[2]))
                wrong.append(f"{case[0]} {case[2]}={value}: {outcome}: {found[-1000:]}")
    printed = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
    record_property("fuzz", f"{len(chosen):,} of {len(every):,} absurd options: {printed}")
    assert wrong == [] and counts["trained"] > len(NAMES) and counts["UsageError"]
