"""Damaged checkpoints, and a process of its own that tries to resume from them.

A file that corrupts memory ends the process that reads it, so the tests do not do it themselves.
``python damage.py RUN_DIR flip 0 500`` prints a json line for each case: its number and outcome.
"""

from __future__ import annotations

import copy
import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ACCEPTED = "accepted"
KINDS = ("flip", "change")


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


def main(run_dir: str, kind: str, first: int, last: int) -> None:
    """Try to resume from the cases of a kind, in this process."""
    from recbole_pos.config.posconfig import PosConfig
    from recbole_pos.errors import CheckpointError, UsageError
    from recbole_pos.experiment import checkpoint
    from recbole_pos.experiment import state as training_state
    from recbole_pos.experiment.build import prepare

    def fresh() -> tuple[Any, Any]:
        made = prepare(PosConfig(None, None, [f"{run_dir}/config.yaml"], {"epochs": 1000}))
        return made.trainer, made.loaders["train"]

    whole = Path(run_dir, "checkpoint.pt")
    content, state = whole.read_bytes(), checkpoint.load(whole)
    trainer, loader = fresh()
    untouched = copy.deepcopy(training_state.weights_of(trainer.model)["state_dict"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "checkpoint.pt")
        for seed in range(first, last):
            what = ""
            if kind == "flip":
                file.write_bytes(flipped(content, seed))
            else:
                damaged, what = changed(state, seed)
                torch.save(damaged, file)
            print(json.dumps({"case": seed, "what": what}), end=" ", flush=True)
            try:
                training_state.restore(trainer, file, loader)
                outcome = ACCEPTED
            except (CheckpointError, UsageError) as error:
                outcome = f"{type(error).__name__}: {error}"
                now = training_state.weights_of(trainer.model)["state_dict"]
                if not all(torch.equal(now[name], untouched[name]) for name in untouched):
                    outcome = "refused, but the weights are other ones now"
            except Exception as error:
                outcome = f"escaped: {type(error).__name__}: {error}"
            if outcome == ACCEPTED:
                now = training_state.weights_of(trainer.model)["state_dict"]
                kept = state["weights"]["state_dict"]
                if kind == "flip" and not all(torch.equal(now[name], kept[name]) for name in kept):
                    outcome = "accepted, but the weights are other ones"
                batches = trainer.training_loader(loader)
                line = trainer._train_epoch(batches, trainer.progress.next_epoch)
                if outcome == ACCEPTED and not math.isfinite(line["loss"]):
                    outcome = f"accepted, but the loss is {line['loss']}"
                trainer, loader = fresh()
            print(json.dumps({"outcome": outcome.replace(folder, "")}), flush=True)


if __name__ == "__main__":
    _, folder, kind, first, last = sys.argv
    sys.argv = sys.argv[:1]
    import recbole_pos  # noqa: F401 (the fixes RecBole needs)

    main(folder, kind, int(first), int(last))
