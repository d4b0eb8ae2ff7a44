"""Checkpoints of which a byte or a part is damaged at random: refused, or they harm nothing."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_files import MODELS, _new, _state, _with, runs  # noqa: F401

from recbole_pos.errors import CheckpointError, TrainingError, UsageError
from recbole_pos.experiment import state as training_state

pytestmark = [pytest.mark.slow, pytest.mark.long]

OTHER = [None, 7, -1, 2**70, True, {}, [], (), "text", math.nan, -1.5, torch.zeros(2)]
TENSORS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x[None],
    lambda x: x.double(),
    lambda x: x.flatten()[:1],
    lambda x: torch.zeros(1).expand(x.shape or (3,)),
    lambda x: torch.empty(x.shape, device="meta"),
    lambda x: (
        torch.zeros(x.shape[::-1]).permute(*range(x.dim())[::-1]) if x.dim() > 1 else torch.zeros(7)
    ),
    lambda x: -x.float() - 1,
    lambda x: x.float() / 0,
]


def list_parts(value: Any, name: str = "") -> list[str]:
    parts = value.items() if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple)):
        parts = list(enumerate(value))[:8]  # of 625 words a few will do
    inner = [path for key, part in parts for path in list_parts(part, f"{name}.{key}".strip("."))]
    return [name, *inner] if name else inner


def damage(content: bytes, state: dict[str, Any], file: Path, seed: int) -> str:
    """Write a checkpoint with another byte, or another part; return which."""
    rng = random.Random(seed)
    if seed % 2:
        changed = bytearray(content)
        changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
        file.write_bytes(changed)
        return "a byte"
    paths = list_parts(state)
    depth = rng.choice(sorted({path.count(".") for path in paths}))  # each is as likely
    part = rng.choice([path for path in paths if path.count(".") == depth])

    def replace(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor) and rng.random() < 0.7
        return rng.choice(TENSORS)(value) if is_tensor else copy.copy(rng.choice(OTHER))

    torch.save(_with(state, part, replace), file)
    return part


@pytest.mark.parametrize("model", MODELS)
def test_any_damage(runs, tmp_path, request, record_property, model: str) -> None:  # noqa: F811
    """A file that corrupts memory ends this process: then its case is the last that is printed."""
    whole, file = runs[model] / "checkpoint.pt", tmp_path / "damaged.pt"
    content, state = whole.read_bytes(), _state(whole)
    new, outcomes = _new(runs[model]), Counter[str]()
    for seed in range(1000 if request.config.getoption("--fuzz") else 24):
        part = damage(content, state, file, seed)
        print(seed, part, flush=True)
        try:
            training_state.restore(new.trainer, file, new.loaders["train"])
        except (CheckpointError, UsageError) as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["accepted"] += 1
        if part == "a byte":
            for name, value in new.model.state_dict().items():
                assert torch.equal(value, state["weights"]["state_dict"][name])
        try:
            new.trainer._train_epoch(
                new.trainer.training_loader(new.loaders["train"]), new.trainer.progress.next_epoch
            )
        except TrainingError:  # of moments without a root: the loss says so
            outcomes["accepted, then refused"] += 1
        new = _new(runs[model])
    counts = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    record_property("fuzz", f"{model}, {outcomes.total()} checkpoints: {counts}")
