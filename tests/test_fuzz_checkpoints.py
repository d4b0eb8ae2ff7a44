"""No damage to a checkpoint ends a resume in anything but a refusal that names the damage.

A file that corrupts memory ends the process that reads it: then the case is the last that was
printed (``pytest -s``).
"""

from __future__ import annotations

import collections
import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from torch import Tensor

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment import state as training_state
from recbole_pos.experiment.build import prepare

CASES = 500


def flipped(content: bytes, seed: int) -> bytes:
    """One byte has another value."""
    draw = random.Random(seed)
    changed = bytearray(content)
    changed[draw.randrange(len(changed))] ^= draw.randrange(1, 256)
    return bytes(changed)


def changed(state: dict[str, Any], seed: int) -> tuple[dict[str, Any], str]:
    """One part of a checkpoint is something else, is gone, or is new; and which."""
    draw = random.Random(seed)
    state = copy.deepcopy(state)
    paths = [path for path in _paths(state) if path]
    # tensors of the optimiser and words of a generator are many: every level is as likely
    depth = draw.choice(sorted({len(path) for path in paths}))
    path = draw.choice([path for path in paths if len(path) == depth])
    how = draw.choice(["replace", "replace", "replace", "remove", "add", "exchange"])
    parent, key = _at(state, path[:-1]), path[-1]
    value = parent[key]
    if how == "remove" and isinstance(parent, dict):
        del parent[key]
    elif how == "add" and isinstance(value, dict):
        value[draw.choice(["surprise", 7, 10**6, ""])] = draw.choice([7, None, torch.zeros(3)])
    elif how == "add" and isinstance(value, list):
        value.append(draw.choice([7, None, {}]))
    else:
        other = _at(state, draw.choice(paths)) if how == "exchange" else _nonsense(draw, value)
        state = _with(state, path, copy.deepcopy(other))
    return state, f"{how} {'.'.join(map(str, path))}"


def _nonsense(draw: random.Random, value: Any) -> Any:
    any_kind = [None, 7, -1, 0, 2**70, 2**2000, True, {}, [], (), "text", math.nan, math.inf, -1.5,
                torch.zeros(2), torch.zeros(0), torch.tensor(-1.0)]  # fmt: skip
    if isinstance(value, Tensor) and draw.random() < 0.7:
        wide = value.shape if value.dim() else (3,)
        own = [value[None], value.double(), value.int(), value.half(), value.flatten()[:1],
               torch.zeros(1).expand(wide), torch.zeros(wide).to_sparse(),
               torch.empty(wide, device="meta"), torch.zeros(tuple(wide)[::-1]).mT
               if len(wide) > 1 else torch.zeros(7), -value.float() - 1, value.float() * math.nan,
               value.float() / 0, torch.zeros(*wide, 2)]  # fmt: skip
        return draw.choice(own)
    return draw.choice(any_kind)


def _paths(value: Any, here: tuple = ()) -> list[tuple]:
    found = [here]
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(value))[:8]  # of 625 words a few will do
    else:
        return found
    for key, inner in parts:
        found += _paths(inner, (*here, key))
    return found


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(value: Any, path: tuple, new: Any) -> Any:
    """A copy with another value at a place, tuples included."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, tuple):
        parts = list(value)
        parts[key] = _with(value[key], tuple(rest), new)
        return tuple(parts)
    value[key] = _with(value[key], tuple(rest), new)
    return value


@pytest.mark.long
@pytest.mark.parametrize("kind", ["flip", "change"])
@pytest.mark.parametrize("model", ["FPARec", "ItemKNN"])
def test_every_damage_is_refused_or_harmless(
    tiny: Path, tmp_path: Path, request, record_property, model: str, kind: str
) -> None:
    options = {**SMALL, "data_path": str(tiny)}
    if model == "ItemKNN":  # which keeps sparse matrices, and trains nothing
        options = {"data_path": str(tiny), "show_progress": False, "k": 5}
    recbole_pos.run(model, "tiny", None, options, run_dir=tmp_path / "run", verbose=False)
    whole, file = tmp_path / "run" / "checkpoint.pt", tmp_path / "damaged.pt"
    content, state = whole.read_bytes(), checkpoint.load(whole)

    def fresh() -> tuple[Any, Any]:
        more = {"epochs": 1000}
        file = str(tmp_path / "run/config.yaml")
        made = prepare(PosConfig(None, None, [file], more, strict=False))
        return made.trainer, made.loaders["train"]

    def weights() -> dict[str, Tensor]:
        return training_state.extract_weights(trainer.model)["state_dict"]

    trainer, loader = fresh()
    untouched, outcomes = copy.deepcopy(weights()), collections.Counter()
    for seed in range(CASES if request.config.getoption("--fuzz") else 12):
        what = f"flip {seed}"
        if kind == "flip":
            file.write_bytes(flipped(content, seed))
        else:
            damaged, what = changed(state, seed)
            torch.save(damaged, file)
        print(seed, what, flush=True)
        try:
            training_state.restore(trainer, file, loader)
        except (CheckpointError, UsageError) as error:
            outcomes[type(error).__name__] += 1
            assert all(torch.equal(weights()[name], untouched[name]) for name in untouched), what
            continue
        outcomes["accepted"] += 1
        kept = state["weights"]["state_dict"]
        assert kind != "flip" or all(torch.equal(weights()[name], kept[name]) for name in kept)
        batches = trainer.training_loader(loader)
        line = trainer._train_epoch(batches, trainer.progress.next_epoch)
        assert math.isfinite(line["loss"]), what
        trainer, loader = fresh()
    counts = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    record_property("fuzz", f"{model}, {outcomes.total()} checkpoints, {kind}: {counts}")
