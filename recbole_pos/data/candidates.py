"""Which items are ranked for a target: all, or those that its user has not had yet.

In: the options ``mask_history`` and ``repeated_targets``, and targets. Out: the items that are not
ranked, and what reports say about the candidates.
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


def describe_candidates(excludes_seen: bool, repeated_targets: str) -> str:
    """Return which items are ranked for a target, in words that reports show.

    ALL_ITEMS is "all items", and WITHOUT_SEEN "items not in the user's past".

    Args:
        excludes_seen: whether items of the user's past are not ranked.
        repeated_targets: what happens to a target that is itself in the user's past. With ``miss``
            it is not ranked, and so counts as missed; with any other value it is ranked.
    """
    if not excludes_seen:
        return ALL_ITEMS
    if repeated_targets == "miss":
        return WITHOUT_SEEN
    return f"{WITHOUT_SEEN}, and the target"


def find_excluded_items(
    log: EventLog, target_event: Tensor, target_items: Tensor, repeated_targets: str
) -> tuple[Tensor, Tensor]:
    """Return the seen items that are not ranked, as pairs of an example and an item.

    An example is a target, an interaction that is to be predicted, with the user's history before
    it. If example 0 has the history [7, 9], its pairs are (0, 7) and (0, 9).

    Args:
        log: the interactions, sorted by user and time.
        target_event: [b] row in the log of the target of each example.
        target_items: [b] item of the target of each example.
        repeated_targets: ``miss`` also excludes a target that is itself in the history; any other
            value does not.

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
    examples = torch.repeat_interleave(torch.from_numpy(lengths))
    if repeated_targets == "miss":
        return examples, items
    is_other = items != target_items[examples]
    return examples[is_other], items[is_other]


def warn_of_repeats(summary: dict[str, Any], candidates: str) -> list[str]:
    """Warn if seen items are excluded though over 1% of the test targets are such items.

    A seen item is one that the user has had before.

    Args:
        summary: counts of a split; read are the numbers of test targets, in all
            (``targets``) and of seen items (``repeated_targets``).
        candidates: which items are ranked, as a text from :func:`describe_candidates`: one of "all
            items" (ALL_ITEMS), "items not in the user's past" (WITHOUT_SEEN) and "items not in the
            user's past, and the target".

    Returns:
        One warning, or none.
    """
    num_targets = summary["targets"]["test"]
    num_repeated = summary["repeated_targets"]["test"]
    if candidates == ALL_ITEMS or num_repeated <= num_targets / 100:
        return []

    if candidates == WITHOUT_SEEN:
        effect = "which are excluded, so that no model can hit them"
    else:  # of the seen items only the target is ranked
        effect = "which makes them easy to hit: no other seen item is ranked"
    return [
        f"mask_history: {num_repeated:,} of {num_targets:,} test targets "
        f"({num_repeated / num_targets:.0%}) are items that their user has had before, {effect}; "
        "with mask_history: False all items are ranked"
    ]
