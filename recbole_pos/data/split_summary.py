"""What users are told about a split: a line of its counts, and warnings."""

from __future__ import annotations

from typing import Any

from recbole_pos.data.splits import PHASES, format_time
from recbole_pos.values import Options

# Counts of held-out interactions in a summary that are worth a remark if they are not 0.
_REMARKABLE = (
    *("without_history", "other_events", "dropped", "not_chosen"),
    *("cold_targets", "tied_targets"),
)


def describe_split(summary: dict[str, Any]) -> str:
    """Return the counts of a split as a line of text for the screen.

    Args:
        summary: of the split; see :func:`~recbole_pos.data.targets.make_split`.

    Returns:
        Such as "split GT at time 893286638: train 900 targets of 1,000 interactions; test 80
        targets of 90 interactions (10 without history)". The text is empty if there is nothing to
        remark on the held-out parts, and the split is not at a point in time.
    """
    # Describe each part that has interactions. Only whole sessions have counts in ``sessions``. The
    # text is returned if ``is_remarkable``: the split is at points in time (``boundaries``), or
    # there is a remark on validation or test.
    sessions, boundaries = summary["sessions"], summary["boundaries"]
    parts = []
    is_remarkable = bool(boundaries)
    for phase in PHASES:
        num_interactions = summary["events"][phase]
        if not num_interactions:
            continue
        part = f"{phase} {summary['targets'][phase]:,} targets of {num_interactions:,} interactions"
        if sessions:
            part += f" of {sessions[phase]:,} sessions"
        if remarks := _list_remarks(summary, phase):
            part += f" ({', '.join(remarks)})"
            is_remarkable |= phase != "train"
        parts.append(part)
    if not is_remarkable:
        return ""

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

    They warn of exact copies of interactions; of leaks, which are held-out interactions that are
    copies of training interactions or older than these; and of a phase whose targets all have items
    that were never trained on.

    Args:
        summary: counts of the split, each by phase, such as {"train": 9, "valid": 1, "test": 1};
            see :func:`~recbole_pos.data.targets.make_split`.
    """
    # Exact copies.
    warnings = []
    targets, num_copies = summary["targets"], sum(summary["copies"].values())
    if num_copies:
        copied = {phase: summary["copied_targets"][phase] for phase in ("valid", "test")}
        phrases = [
            f"{n:,} of {targets[phase]:,} {phase} targets" for phase, n in copied.items() if n
        ]
        warnings.append(
            f"{num_copies:,} interactions are exact copies of an earlier one (user, "
            f"item, time), among them {' and '.join(phrases) or 'no held-out target'}; "
            "`rm_copies: True` leaves copies out"
        )
    # The others are looked for only if the user gives a file for each part, which may be wrong.
    if "leaks" not in summary:
        return warnings

    # Parts of which all targets are of items that were never trained on (cold).
    for phase in ("valid", "test"):
        if summary["cold_targets"][phase] == targets[phase] > 0:
            warnings.append(
                f"benchmark_filename: no item of the {phase} targets is in training; unless that "
                "is meant, names are written differently in the files"
            )

    # Leaks.
    for leak, text in (
        ("in_earlier_part", "are in an earlier file as well (user, item, time)"),
        ("before_earlier_part", "are earlier than an interaction of their user in an earlier file"),
    ):
        phrases = [f"{n:,} {phase}" for phase, n in summary["leaks"][leak].items() if n]
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
