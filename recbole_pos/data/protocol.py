"""The protocol of an evaluation: which items are ranked, and what users are told about the split.

``find_excluded_items`` gives the items that are not ranked for a target, by the option
``mask_history``. The other functions put candidates and counts of a split into words, and warn of
what makes metrics too good.
"""

from __future__ import annotations

from typing import Any

import torch
from recbole.utils import ModelType
from torch import Tensor

from recbole_pos.data.interactions import EventLog
from recbole_pos.data.splits import PHASES, format_time
from recbole_pos.data.windows import gather_index
from recbole_pos.values import Options

ALL_ITEMS, WITHOUT_SEEN = "all items", "items not in the user's past"
# Counts of held-out interactions in a summary that are worth a remark if they are not 0.
_REMARKABLE = (
    *("without_history", "other_events", "dropped", "not_chosen"),
    *("cold_targets", "tied_targets"),
)


# --- which items are ranked ---


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


# --- what users are told about a split ---


def describe_split(summary: dict[str, Any]) -> str:
    """Return the counts of a split as a line of text for the screen.

    Args:
        summary: of the split; see :func:`~recbole_pos.data.targets.make_split`.

    Returns:
        Such as "split GT at time 893286638: train 900 targets of 1,000 interactions; test 80
        targets of 90 interactions (10 without history)".
    """
    # Describe each part that has interactions. Only whole sessions have counts in ``sessions``, and
    # only a split at points in time has these as ``boundaries``.
    sessions, boundaries = summary["sessions"], summary["boundaries"]
    parts = []
    for phase in PHASES:
        num_interactions = summary["events"][phase]
        if not num_interactions:
            continue
        part = f"{phase} {summary['targets'][phase]:,} targets of {num_interactions:,} interactions"
        if sessions:
            part += f" of {sessions[phase]:,} sessions"
        if remarks := _list_remarks(summary, phase):
            part += f" ({', '.join(remarks)})"
        parts.append(part)

    (kind,) = summary["split"]  # its only key, such as GT
    at = f" at time {' and '.join(map(format_time, boundaries))}" if boundaries else ""
    return f"split {kind}{at}: {'; '.join(parts)}"


def _list_remarks(summary: dict[str, Any], phase: str) -> list[str]:
    """Return what is worth a remark on one phase of a split, such as "10 without history".

    Args:
        summary: counts of the split. Most are by phase, such as ``{"without_history": {"train": 0,
            "valid": 4, "test": 10}}``. ``sessions`` is empty unless whole sessions were split;
            then it may have ``left_out``, the number of training sessions that are not used.
        phase: train, valid or test.
    """
    # For training only sessions that are not used are remarked on.
    if phase == "train":
        num_left_out = summary["sessions"].get("left_out")
        return [f"{num_left_out:,} older sessions left out"] if num_left_out else []

    # For validation and test the counts that ``_REMARKABLE`` names: of interactions that are no
    # targets, such as ``without_history``, and of unusual targets, such as ``cold_targets``, whose
    # items were never trained on. Some splits do not have all of these.
    counts = {name: summary[name][phase] for name in _REMARKABLE if name in summary}
    return [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count]


def make_warnings(summary: dict[str, Any]) -> list[str]:
    """Return warnings about what makes metrics too good, or hides a mistake in the files.

    They warn of exact copies of interactions, and of leaks: held-out interactions that are copies
    of training interactions, or older than these.

    Args:
        summary: counts of the split. Its key ``leaks`` is there only if the user gives a file for
            each part (train, valid and test), since only then leaks are possible.
    """
    warnings = _warn_of_copies(summary)
    if "leaks" in summary:
        warnings += _warn_of_leaks(summary["leaks"])
    return warnings


def _warn_of_copies(summary: dict[str, Any]) -> list[str]:
    """Warn if interactions are exact copies of earlier ones: same user, item and time.

    Args:
        summary: counts by phase, such as {"train": 9, "valid": 1, "test": 1}, under three keys:
            ``copies`` (interactions that are copies), ``targets`` (interactions to predict) and
            ``copied_targets`` (targets that are copies).

    Returns:
        One warning, or none.
    """
    num_copies = sum(summary["copies"].values())
    if not num_copies:
        return []

    # How many of the held-out targets are copies, such as "1 of 80 test targets".
    phrases = []
    for phase in ("valid", "test"):
        num_copied, num_targets = summary["copied_targets"][phase], summary["targets"][phase]
        if num_copied:
            phrases.append(f"{num_copied:,} of {num_targets:,} {phase} targets")
    return [
        f"{num_copies:,} interactions are exact copies of an earlier one (user, "
        f"item, time), among them {' and '.join(phrases) or 'no held-out target'}; "
        "`rm_copies: True` leaves copies out"
    ]


def _warn_of_leaks(leaks: dict[str, dict[str, int]]) -> list[str]:
    """Warn of held-out interactions that are in an earlier file, too, or older than it allows.

    Args:
        leaks: kind of leak (``in_earlier_part`` or ``before_earlier_part``) -> number of such
            interactions by phase, such as {"valid": 0, "test": 2}.

    Returns:
        A warning for each kind of leak that occurs.
    """
    texts = {
        "in_earlier_part": "are in an earlier file as well (user, item, time)",
        "before_earlier_part": "are earlier than an interaction of their user in an earlier file",
    }
    warnings = []
    for leak, text in texts.items():
        phrases = [f"{n:,} {phase}" for phase, n in leaks[leak].items() if n]
        if phrases:
            warnings.append(f"benchmark_filename: {' and '.join(phrases)} interactions {text}")
    return warnings


def add_sample(summary: dict[str, Any], config: Options) -> dict[str, Any]:
    """Return the summary of a split, with ``valid_users`` if validation is on a sample of users.

    Args:
        summary: counts of the split; those of validation targets stay those of all users.
        config: options; ``valid_users`` is the size of the sample, None for all users, with which
            the summary is returned as it is.
    """
    if config["valid_users"] is None:
        return summary
    return {**summary, "valid_users": config["valid_users"]}
