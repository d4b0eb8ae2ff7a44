"""What in a dataset and its splits decides how well any model seems to do, on one page.

In: a dataset, or a file or frame of interactions. Out: :class:`Audit`, counts for two splits with
what each means for a comparison, and the level of two baselines that learn nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recbole_pos.data.location import read_dataset_name
from recbole_pos.data.splits import TRAIN
from recbole_pos.experiment.run import run
from recbole_pos.files import TemporaryFolder
from recbole_pos.referee.requests import Requests, make_requests, read_split_data
from recbole_pos.referee.split_folder import Dataset

SPLITS: dict[str, dict[str, Any]] = {
    "leave-one-out": {"LS": "valid_and_test"},
    "by time": {"GT": [0.8, 0.9]},
}
BASELINES = {"Pop": "popularity", "TransitionGraph": "transitions of training"}
_METRIC = "ndcg@10"
_ORDERS = 3  # random orders of simultaneous interactions
# Name of a fact -> what it means for a comparison.
_MEANINGS = {
    "exact copies": (
        "The same user, item and time twice: a copied target is easy to guess. `rm_copies: True` "
        "leaves copies out."
    ),
    "targets at a tie": (
        "The user has another item at the same time, so the order of rows decides what the target "
        "is. Say which order was used; `ties: drop` leaves these targets out."
    ),
    "targets of cold items": (
        "Items without a training interaction. Models of ids cannot find them, which lowers all "
        "levels alike; models of content can."
    ),
    "targets of cold users": (
        "Users without a training interaction. Models with a vector for each user have learned "
        "nothing of them."
    ),
    "repeated targets": (
        "Items that the user has had before. With seen items excluded they are misses for every "
        "model; with all items ranked, repeating the history finds them."
    ),
    "targets that repeat the item before": (
        "A model that repeats the newest item finds them. Look whether they are real choices, or "
        "pages that were loaded twice."
    ),
    "targets with later training interactions": (
        "Training has interactions of other users from after the target: what becomes popular "
        "later is known. Levels are too good for use; a split by time excludes it."
    ),
}


@dataclass(frozen=True)
class Audit:
    """Facts about the test targets of a dataset under two splits.

    Attributes:
        name: name of the dataset.
        num_interactions, num_users, num_items: size of the dataset.
        num_targets: split -> number of test targets.
        counts: fact -> split -> number of interactions (of copies) or test targets.
        levels: baseline -> split -> NDCG@10 of each order of simultaneous interactions, that of the
            file first.
    """

    name: str
    num_interactions: int
    num_users: int
    num_items: int
    num_targets: Mapping[str, int]
    counts: Mapping[str, Mapping[str, int]]
    levels: Mapping[str, Mapping[str, Sequence[float]]]

    def __str__(self) -> str:
        """The page in markdown: a table, and what its lines mean."""
        splits = list(self.num_targets)
        lines = [["", *splits], ["---", *("---:" for _ in splits)]]
        lines.append(["test targets", *(f"{number:,}" for number in self.num_targets.values())])
        for fact, by_split in self.counts.items():
            cells = [self._format_count(fact, split, count) for split, count in by_split.items()]
            lines.append([fact, *cells])
        for model, levels_by_split in self.levels.items():
            levels = [_format_levels(levels_by_split[split]) for split in splits]
            lines.append([f"NDCG@10 of {model}, {BASELINES[model]}", *levels])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)

        meanings = [
            f"- **{fact}**: {_MEANINGS[fact]}"
            for fact, by_split in self.counts.items()
            if any(by_split.values())
        ]
        meanings.append(
            "- **NDCG@10**: a model that learns has to be above both baselines. A span is that of "
            f"the file's order and {_ORDERS} random orders of simultaneous interactions: smaller "
            "differences between papers may be differences of order."
        )
        size = (
            f"{self.num_interactions:,} interactions, {self.num_users:,} users, "
            f"{self.num_items:,} items"
        )
        return "\n\n".join([f"# Audit of {self.name}", size, table, "\n".join(meanings)])

    def _format_count(self, fact: str, split: str, count: int) -> str:
        """Return ``12 (1.2%)``, of the test targets of a split; copies are of all interactions."""
        total = self.num_interactions if fact == "exact copies" else self.num_targets[split]
        return f"{count:,} ({count / total:.1%})" if count else "0"


def _format_levels(levels: Sequence[float]) -> str:
    """Return ``0.0224``, or ``0.0224 (0.0210 to 0.0231)`` for several orders."""
    first = f"{levels[0]:.4f}"
    return f"{first} ({min(levels):.4f} to {max(levels):.4f})" if len(levels) > 1 else first


def audit(data: Any, config_files: Sequence[str | Path] = (), **options: Any) -> Audit:
    """Audit a dataset: copies, ties, cold and repeated targets, leakage in time, baselines.

    Args:
        data: a dataset, its name or its folder; or a file or frame of interactions, as
            :func:`recbole_pos.convert` takes them.
        config_files: yaml files of options, later ones winning.
        options: options of the data, such as ``mask_history`` and filters.
    """
    is_name = isinstance(data, (str, os.PathLike)) and not Path(data).is_file()
    dataset = data if is_name else Dataset.from_frame(data)
    eval_args = options.pop("eval_args", {})
    splits = {"as given": eval_args["split"]} if "split" in eval_args else SPLITS
    requests_by_split = {
        name: make_requests(
            read_split_data(dataset, config_files, {**options, "eval_args": {"split": split}})
        )
        for name, split in splits.items()
    }
    counts = {name: count_facts(requests) for name, requests in requests_by_split.items()}
    levels: dict[str, dict[str, list[float]]] = {model: {} for model in BASELINES}
    for number, (name, split) in enumerate(splits.items()):
        has_ties = counts[name]["targets at a tie"] > 0
        # of the first split only, since each order is read and counted again
        orders = ["file"]
        if number == 0 and has_ties:
            orders += [f"random({seed})" for seed in range(1, _ORDERS + 1)]
        for model in BASELINES:
            levels[model][name] = [
                _measure(model, dataset, config_files, options, {"split": split, "ties": ties})
                for ties in orders
            ]

    built = next(iter(requests_by_split.values())).dataset
    return Audit(
        name=str(built.dataset_name),
        num_interactions=len(built.log),
        num_users=built.user_num - 1,
        num_items=built.item_num - 1,
        num_targets={name: len(requests) for name, requests in requests_by_split.items()},
        counts={fact: {name: counts[name][fact] for name in splits} for fact in _MEANINGS},
        levels=levels,
    )


def count_facts(requests: Requests) -> dict[str, int]:
    """Return fact -> number of test targets (of copies: of interactions) that it is true for."""
    dataset, log = requests.dataset, requests.dataset.log
    summary, targets = dataset.split.summary, requests.target_rows
    users, items, times = log.users.numpy(), log.items.numpy(), log.times.numpy()
    is_training = dataset.part == TRAIN
    has_training = np.bincount(users[is_training], minlength=dataset.user_num) > 0
    newest_training = times[is_training].max(initial=-np.inf)
    return {
        "exact copies": sum(summary["copies"].values()),
        "targets at a tie": summary["tied_targets"]["test"],
        "targets of cold items": summary["cold_targets"]["test"],
        "targets of cold users": int((~has_training[users[targets]]).sum()),
        "repeated targets": summary["repeated_targets"]["test"],
        # every target has an interaction of its user before it
        "targets that repeat the item before": int((items[targets] == items[targets - 1]).sum()),
        "targets with later training interactions": int((times[targets] < newest_training).sum()),
    }


def _measure(
    model: str,
    dataset: Any,
    config_files: Sequence[str | Path],
    options: Mapping[str, Any],
    eval_args: Mapping[str, Any],
) -> float:
    """Return the test NDCG@10 of a baseline, which ranks the same items as other models."""
    home = TemporaryFolder()
    given = {"mask_history": False, **options, "eval_args": dict(eval_args)}
    files = [os.fspath(file) for file in config_files]
    name = read_dataset_name(dataset)
    result = run(model, name, files, given, run_dir=home.path / "run", verbose=False)
    assert result is not None and result.test is not None  # one process, and there are targets
    return result.test[_METRIC]
