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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import shop
import torch

from recbole_pos.config.option import DATA
from recbole_pos.config.options import list_by_role
from recbole_pos.config.posconfig import DERIVED_KEYS, EXTRA_KEYS, PosConfig
from recbole_pos.errors import TrainingError, UsageError
from recbole_pos.experiment.build import prepare, read_dataset
from recbole_pos.model.models import BUILTIN_GENERAL, LOSSES, built_in
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.yaml_files import ROOT, read_yaml

pytestmark = pytest.mark.long
Case = tuple[str, dict[str, Any], str]  # model, options, the one that is absurd

NAMES = built_in()
VALUES: list[Any] = [
    *(None, True, False, "", " ", "1e-3", "ünï✓", "a" * 20_000, "nul\0"),
    *(0, 1, -1, 10**6, 2**31, 2**63, 10**40),
    *(0.5, -0.5, 1e-320, 1e300, math.nan, math.inf),
    *([], [None], [1, "a"], [[1]], [2**63]),
    *({}, {"a": {"b": []}}, {1: None}, datetime.date(2026, 1, 2), b"bytes"),
]
# keys within options, by the option
INNER = {
    "eval_args": "split order group_by mode target cold_items".split(),
    "train_neg_sample_args": "distribution sample_num alpha dynamic candidate_num".split(),
    "clip_grad_norm": "max_norm norm_type error_if_nonfinite".split(),
    "session_filter": "item session".split(),
    "load_col": "inter item user".split(),
    "unused_col": "inter item".split(),
    "unload_col": "inter item".split(),
    "threshold": "stars".split(),
    "val_interval": "stars price".split(),
    "seq_len": "tags item_id_list".split(),
    "preload_weight": "brand".split(),
    "discretization": "price".split(),
}
SMALL = {
    **dict.fromkeys(("hidden_size", "inner_size", "embedding_size", "difsr_size"), 8),
    **{"n_layers": 1, "n_heads": 2, "MAX_ITEM_LIST_LENGTH": 5, "topk": [3], "epochs": 1},
    **{"valid_metric": "NDCG@3", "show_progress": False, "eval_batch_size": 64},
    **{"selected_features": ["brand", "tags"], "load_col": shop.LOAD, "train_batch_size": 64},
    "filter_inter_by_user_or_item": False,
}


def known(model: str, data_path: str, **options: Any) -> list[str]:
    """The options that a model reads, with given ones."""
    config = PosConfig(model, "shop", None, {"data_path": data_path, **options})
    return sorted({*config.internal_config_dict} - DERIVED_KEYS - EXTRA_KEYS)


def cases(data_path: str) -> list[Case]:
    """Every option of every model with every value; what all models have, each value once.

    Without ``compile: True``, which starts a C++ compiler beyond the time and memory that a case
    has here; ``test_compile.py`` trains so.
    """
    keys = {model: known(model, data_path) for model in NAMES}
    common = sorted(set.intersection(*map(set, keys.values())))
    pairs = [(model, key) for model in NAMES for key in keys[model] if key not in common]
    found = [make_case(model, keys[model], key, v) for model, key in pairs for v in VALUES]
    for number, (key, value) in enumerate((k, v) for k in common for v in VALUES):
        model = NAMES[number % len(NAMES)]
        found.append(make_case(model, keys[model], key, value))
    smallest = ("train_batch_size", "eval_batch_size", "MAX_ITEM_LIST_LENGTH")
    found += [make_case(model, keys[model], key, 1) for model in NAMES for key in smallest]
    inner = ((key, name) for key, names in INNER.items() for name in names)
    for number, (key, name, value) in enumerate((*pair, v) for pair in inner for v in VALUES):
        model = NAMES[number % len(NAMES)]
        given = {"numerical_features": ["price"]} if key == "discretization" else {}
        found.append(make_case(model, keys[model], key, {name: value}, given))
    more = [{"position": [scheme]} for scheme in SCHEMES] + [
        {"loss_type": name} for name in LOSSES[1:]
    ]
    for given in more:
        folder, name = next(iter(given.items()))
        folder, name = ("position", name[0]) if folder == "position" else ("loss", name)
        for key in read_yaml(ROOT / folder / f"{name}.yaml"):
            found += [
                make_case("PosSASRec", [*keys["PosSASRec"], key], key, v, given) for v in VALUES
            ]
    return [case for case in found if not (case[2] == "compile" and case[1]["compile"] is True)]


def make_case(model: str, keys: list[str], key: str, value: Any, given: dict | None = None) -> Case:
    """A model with small sizes and one option changed."""
    small = {k: v for k, v in SMALL.items() if k in keys}
    if model == "FEARec":
        small["n_layers"] = 2
        small.pop("n_heads", None)
    if model in (*BUILTIN_GENERAL, "SessionKNN", "SessionFPMC", "FPMC"):  # know no history
        small.pop("MAX_ITEM_LIST_LENGTH", None)
    if model in ("Pop", "ItemKNN", "SPop", "SessionKNN"):  # count
        small.pop("train_batch_size", None)
    if key == "data_path":
        return model, {**small, "given_path": value}, key
    return model, {**small, **(given or {}), key: value}, key


class Limited:
    """A process in which cases run; replaced when one takes it down, or hangs."""

    PATIENCE = 120  # seconds without an answer, on a machine that has other things to do

    def __init__(self, data_path: str, folder: Path) -> None:
        self.given, self.process = (data_path, str(folder)), None

    def try_out(self, case: Case) -> tuple[str, str]:
        """Return the outcome of a case and its output."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, end = context.Pipe()
            self.process = context.Process(target=_answer, args=(end, *self.given))
            self.process.start()
            end.close()
        try:
            self.pipe.send(case)
            if self.pipe.poll(self.PATIENCE):
                return self.pipe.recv()
            found = "hangs", "nothing is heard of the process"
        except (EOFError, OSError):
            self.process.join(10)
            found = "crashed", f"exit code {self.process.exitcode}"
        self.close()
        return found

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
        self.process = None


def _answer(pipe: Connection, data_path: str, folder: str) -> None:
    """Answer cases with (outcome, text), within 6 GB of memory and files of 64 MB."""
    for limit, most in ((resource.RLIMIT_AS, 6 << 30), (resource.RLIMIT_FSIZE, 64 << 20)):
        resource.setrlimit(limit, (most, most))
    os.chdir(folder)
    silence = os.open(os.devnull, os.O_WRONLY)
    for output in (1,) if "FUZZ_SHOW" in os.environ else (1, 2):
        os.dup2(silence, output)
    sys.argv = sys.argv[:1]
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    datasets: dict[Any, Any] = {}
    while True:
        model, options, changed = pipe.recv()
        try:
            loss = _train(model, {**options, "data_path": data_path}, changed, datasets)
            answer = ("trained", "") if math.isfinite(loss) else ("failed", f"loss {loss}")
        except (UsageError, TrainingError) as error:
            kind = UsageError if isinstance(error, UsageError) else TrainingError
            answer = kind.__name__, str(error)
        except Exception:  # also MemoryError
            answer = "failed", traceback.format_exc()
        pipe.send(answer)


def _train(model: str, options: dict[str, Any], changed: str, datasets: dict[Any, Any]) -> float:
    """Train an epoch; the data are read again only where an option is about them."""
    if changed == "data_path":
        options["data_path"] = options.pop("given_path")
    config, dataset = PosConfig(model, "shop", None, options), None
    about_data = (*list_by_role(DATA), "numerical_features", "discretization", "worker")
    if changed not in about_data:
        kind = config["MODEL_TYPE"], str(config["load_col"])
        if kind not in datasets:
            datasets[kind] = read_dataset(config)
            datasets[kind].build()
        dataset = datasets[kind].for_config(config)
    made = prepare(config, dataset=dataset)
    made.trainer.epochs = 1
    made.trainer.fit(made.loaders["train"], made.loaders["valid"], saved=False, verbose=False)
    made.trainer.evaluate(made.loaders["test"])
    return made.trainer.progress.history[0]["loss"]


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
    return number and (not math.isfinite(value) or abs(value) > LARGEST)


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
