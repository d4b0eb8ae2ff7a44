"""Which items are ranked for a target: all, or those that its user has not had yet.

In: the option ``mask_history``, and targets. Out: the items that are not ranked, and what reports
say about the candidates.
"""

from __future__ import annotations

from typing import Any

import torch
from recbole.utils import ModelType
from torch import Tensor

from recbole_pos.data.interactions import EventLog
from recbole_pos.data.windows import gather_index
from recbole_pos.values import Options

ALL_ITEMS, WITHOUT_SEEN = "all items", "items not in the user's past"


def masks_history(config: Options) -> bool:
    """Return whether seen items are excluded: ``mask_history``, or RecBole's choice if unset.

    RecBole excludes them for all models but sequential ones.
    """
    choice = config["mask_history"]
    return config["MODEL_TYPE"] != ModelType.SEQUENTIAL if choice is None else choice


def describe_candidates(excludes_seen: bool) -> str:
    """Return which items are ranked for a target, in words that reports show.

    Args:
        excludes_seen: whether items of the user's past are not ranked. A target that is itself in
            the user's past is not ranked then, either, and so counts as missed.
    """
    return WITHOUT_SEEN if excludes_seen else ALL_ITEMS


def find_excluded_items(log: EventLog, target_event: Tensor) -> tuple[Tensor, Tensor]:
    """Return the seen items that are not ranked, as pairs of an example and an item.

    An example is a target, an interaction that is to be predicted, with the user's history before
    it. If example 0 has the history [7, 9], its pairs are (0, 7) and (0, 9). The item of the target
    is among them if the user has had it before.

    Args:
        log: the interactions, sorted by user and time.
        target_event: [b] row in the log of the target of each example.

    Returns:
        examples: [n] int64 numbers of examples, from 0.
        items: [n] int64 ids of items that are not ranked for these examples.
    """
    target = target_event.numpy()
    # The history of an example: the rows from the first of its user up to its target.
    # ``gather_index`` lists them: from each start, as many rows as the history is long.
    start = log.offsets[log.users.numpy()[target]]
    lengths = target - start
    items = log.items[torch.from_numpy(gather_index(start, lengths))]
    # The number of each example, once for each row of its history: lengths [2, 1] give [0, 0, 1].
    return torch.repeat_interleave(torch.from_numpy(lengths)), items


def warn_of_repeats(summary: dict[str, Any], candidates: str) -> list[str]:
    """Warn if seen items are excluded though over 1% of the test targets are such items.

    A seen item is one that the user has had before.

    Args:
        summary: counts of a split; read are the numbers of test targets, in all
            (``targets``) and of seen items (``repeated_targets``).
        candidates: which items are ranked, as a text from :func:`describe_candidates`: "all items"
            (ALL_ITEMS) or "items not in the user's past" (WITHOUT_SEEN).

    Returns:
        One warning, or none.
    """
    num_targets = summary["targets"]["test"]
    num_repeated = summary["repeated_targets"]["test"]
    if candidates == ALL_ITEMS or num_repeated <= num_targets / 100:
        return []
    return [
        f"mask_history: {num_repeated:,} of {num_targets:,} test targets "
        f"({num_repeated / num_targets:.0%}) are items that their user has had before, which are "
        "excluded, so that no model can hit them; with mask_history: False all items are ranked"
    ]
