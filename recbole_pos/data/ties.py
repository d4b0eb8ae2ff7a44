"""The order of a user's events at one time, which no log knows: ``eval_args.ties``.

Many logs have times of a day, or of a rating session: on MovieLens-100K and Amazon Beauty another
order would make another event the last of four users in ten, so what is held out is a convention.
``file`` takes the order of the file, as RecBole does; ``random(SEED)`` another one; ``drop`` leaves
out targets that depend on it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.events import EventLog
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_RANDOM = re.compile(r"random\((\d{1,9})\)")
FILE, DROP = "file", "drop"


def read_ties(value: Any) -> str | int:
    """``file``, ``drop``, or the seed of a random order.

    Raises:
        UsageError: for anything else.
    """
    text = str(value).strip()
    if found := _RANDOM.fullmatch(text):
        return int(found[1])
    if text not in (FILE, DROP):
        raise UsageError(
            f"eval_args.ties: {shown(value)} is none of file, drop and random(SEED), such as "
            "random(7)"
        )
    return text


def shuffled(fields: dict[str, Tensor], ties: str | int) -> dict[str, Tensor]:
    """Columns in the order in which events at one time shall stand."""
    if isinstance(ties, str):
        return fields
    count = len(next(iter(fields.values())))
    order = torch.from_numpy(np.random.default_rng(ties).permutation(count))
    return {name: column[order] for name, column in fields.items()}


def tied(log: EventLog) -> np.ndarray:
    """[events] bool: whether another item of the same user stands at the same time."""
    users, times, items = log.users.numpy(), log.times.numpy(), log.items.numpy()
    new = np.ones(len(log), dtype=bool)
    new[1:] = (users[1:] != users[:-1]) | (times[1:] != times[:-1])
    group = np.cumsum(new) - 1
    first = items[new][group]
    several = np.zeros(int(new.sum()), dtype=bool)
    several[group[items != first]] = True
    return several[group]
