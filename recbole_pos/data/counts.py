"""Whether data are those of the public log that they are named after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbole_pos.errors import UsageError

# Options that decide what is counted; under others counts mean nothing.
FILTERS = (
    *("user_inter_num_interval", "item_inter_num_interval", "val_interval", "session_filter"),
    *("train_fraction", "rm_dup_inter", "rm_copies", "filter_inter_by_user_or_item"),
    "benchmark_filename",
)


def count_interactions(dataset: Any) -> dict[str, int]:
    """Return the numbers of users, items and events of a dataset after ``build``."""
    users, items = dataset.user_num - 1, dataset.item_num - 1
    return {"users": users, "items": items, "events": len(dataset.log)}


def require_counts(name: str, expected: Mapping[str, int], dataset: Any) -> None:
    """Refuse data whose counts differ from those of the public dataset of their name.

    Args:
        name: name of the dataset.
        expected: counts of the public dataset, by ``users``, ``items`` and ``events``.
        dataset: the data, after ``build``.

    Raises:
        UsageError: if a count differs.
    """
    actual = count_interactions(dataset)
    if all(actual[unit] == count for unit, count in expected.items()):
        return
    here, published = (
        ", ".join(f"{count:,} {unit}" for unit, count in counts.items())
        for counts in (actual, expected)
    )
    raise UsageError(
        f"dataset {name}: {here}; the public log of this name has {published}. `recbole-pos data "
        f"{name}` tells how it is made; other data need another name (of folder and files)"
    )
