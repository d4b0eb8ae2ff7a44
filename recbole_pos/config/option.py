"""What is known of an option: a row of the table in ``options.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recbole_pos.values import Options

# What changing an option changes.
MODEL = "model"  # the function that is learned
TRAINING = "training"  # how it is learned or asked
SCHEDULE = "schedule"  # how long a run trains, and where; in a search the scheduler's
DATA = "data"  # events, split and metrics: the same in all trials of a search
IGNORED = "ignored"  # nothing here; ``why`` says why

Condition = Callable[[Options, Any], str | None]  # of all options, and the value of this one


@dataclass(frozen=True)
class Option:
    """One row.

    Attributes:
        name: of the option.
        low, high: smallest and largest number allowed; sizes are also checked against the memory of
            the machine, see ``experiment/allocation.py``.
        choices: the names it may have.
        unit: what its number counts, where the name does not tell.
        example: of what is expected, where the default is empty or of another kind.
        inner: of a mapping whose keys are known, an example of each value; None: checked where it
            is read.
        role: what changing it changes.
        alone: whether a list may be given as the one thing in it.
        empty: whether it may be empty although its default is not.
        pair: whether it is a list of two.
        interval: whether it is text that says which numbers are kept, as RecBole writes it.
        only: conditions under which it is read, see ``effects.py``: each returns what is wrong, as
            it follows the name of the option in a message, and None if the option is read.
        why: of an option without effect, the reason.
    """

    name: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""
    example: Any = None
    inner: dict[str, Any] | None = None
    role: str = MODEL
    alone: bool = False
    empty: bool = False
    pair: bool = False
    interval: bool = False
    only: tuple[Condition, ...] = ()
    why: str = ""
