"""What in a dataset and its splits decides how well any model seems to do, on one page.

In: a dataset, or a file or frame of interactions. Out: :class:`Audit`, counts for two splits with
what each means for a comparison, and the level of two baselines that learn nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recbole_pos.conversion.convert import Dataset
from recbole_pos.data.loading import read_dataset_name
from recbole_pos.data.splits import TRAIN
from recbole_pos.experiment.run import run
from recbole_pos.files import TemporaryFolder
from recbole_pos.referee.split import PAGES, Requests, make_requests, read_split_data

SPLITS: dict[str, dict[str, Any]] = {  # name -> option ``eval_args``
    "leave-one-out": {"split": {"LS": "valid_and_test"}},
    "by time": {"split": {"GT": [0.8, 0.9]}},
}
BASELINES = ("Pop", "TransitionGraph")
_RANDOM_ORDERS = ("random(1)", "random(2)", "random(3)")  # values of ``eval_args.ties``


@dataclass(frozen=True)
class Audit:
    """Facts about the test targets of a dataset under two splits.

    Attributes:
        name: name of the dataset.
        num_interactions, num_users, num_items: size of the dataset.
        num_targets: split -> number of test targets.
        counts: fact -> split -> number of test targets that it is true for.
        levels: baseline -> split -> NDCG@10 of the test targets, with the order of the file first.
            If targets of the first split are at a tie, it has those with some random orders, too.
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
        return PAGES.get_template("audit.md.jinja").render(audit=self)


def audit(data: Any, config_files: Sequence[str | Path] = (), **options: Any) -> Audit:
    """Count what in a dataset decides how well any model seems to do, and test two baselines on it.

    Targets are the held-out items that a model has to predict. Counted are, for example, targets at
    a tie (another interaction of the user has the same time), cold ones (the item never occurs in
    training), and those with training interactions later than themselves.

    Args:
        data: a dataset, its name or its folder; or a file or frame of interactions, as
            :func:`recbole_pos.convert` takes them.
        config_files: yaml files of options, later ones winning.
        options: options of the data, such as ``mask_history`` and filters. If ``eval_args`` has a
            split, the audit is about this one; otherwise about leave-one-out and a split by time.

    Returns:
        The counts and the metrics of the baselines, for each split.
    """
    # A text or path that is no file is the name or folder of a dataset.
    is_name = isinstance(data, (str, os.PathLike)) and not Path(data).is_file()
    dataset = data if is_name else Dataset.from_frame(data)

    # Name of each split -> option ``eval_args`` that makes it.
    eval_args = options.pop("eval_args", {})
    if "split" in eval_args:
        splits = {"as given": eval_args}
    else:
        splits = {name: {**eval_args, **split} for name, split in SPLITS.items()}

    # Split the dataset, and count its test targets; ``counts`` has fact -> split -> number. A
    # request is a history, and the target to predict after it.
    num_targets: dict[str, int] = {}
    counts: dict[str, dict[str, int]] = {}
    for name, split in splits.items():
        split_data = read_split_data(dataset, config_files, {**options, "eval_args": split})
        requests = make_requests(split_data)
        num_targets[name] = len(requests)
        for fact, count in count_facts(requests).items():
            counts.setdefault(fact, {})[name] = count

    # The baselines are measured once for each split. Interactions of the same time keep the order
    # of the file. If such targets exist, the baselines are also measured with random orders of
    # them, to show how much depends on the order. That takes long, so it is done for the first
    # split only, which is "as given" or leave-one-out.
    first_split = next(iter(splits))
    orders = {name: [split] for name, split in splits.items()}
    if counts["targets at a tie"][first_split]:
        orders[first_split] += [{**splits[first_split], "ties": ties} for ties in _RANDOM_ORDERS]

    # Numbers of interactions, users and items are the same for every split, so those of the last
    # one, ``split_data``, serve. Id 0 of users and of items is padding, hence the - 1.
    return Audit(
        name=str(split_data.dataset_name),
        num_interactions=len(split_data.log),
        num_users=split_data.user_num - 1,
        num_items=split_data.item_num - 1,
        num_targets=num_targets,
        counts=counts,
        levels=_measure_baselines(dataset, config_files, options, orders),
    )


def count_facts(requests: Requests) -> dict[str, int]:
    """Return facts such as "targets of cold users" -> number of test targets that each is true for.

    Args:
        requests: the test requests of a dataset, one for each target (the item to predict).
    """
    # The log has all interactions, sorted by user and then by time; targets are row numbers in it.
    # A target is never the first row of its user, so the row before it is of the same user.
    # The summary has counts of targets by phase (train, valid, test), made with the split, and
    # ``part`` has the phase of each row of the log.
    dataset, log = requests.dataset, requests.dataset.log
    summary, targets = dataset.split.summary, requests.target_rows
    users, items, times = log.users.numpy(), log.items.numpy(), log.times.numpy()
    is_training = dataset.part == TRAIN
    has_training = np.bincount(users[is_training], minlength=dataset.user_num) > 0
    newest_training = times[is_training].max(initial=-np.inf)
    return {
        # exact copies of an earlier interaction: the same user, item and time
        "copied targets": summary["copied_targets"]["test"],
        # another interaction of the user has the same time, so their order is arbitrary
        "targets at a tie": summary["tied_targets"]["test"],
        # no interaction of the item, or of the user, is in training
        "targets of cold items": summary["cold_targets"]["test"],
        "targets of cold users": int((~has_training[users[targets]]).sum()),
        # the user has had the item before: at any time, or in the row just before the target
        "repeated targets": summary["repeated_targets"]["test"],
        "targets that repeat the item before": int((items[targets] == items[targets - 1]).sum()),
        "targets with later training interactions": int((times[targets] < newest_training).sum()),
    }


def _measure_baselines(
    dataset: Any,
    config_files: Sequence[str | Path],
    options: Mapping[str, Any],
    orders: Mapping[str, Sequence[dict[str, Any]]],
) -> dict[str, dict[str, list[float]]]:
    """Train and test two baselines on every split of a dataset.

    Args:
        dataset: the dataset, its name or its folder.
        config_files: yaml files of options.
        options: options of the data, which win over files. Without ``mask_history`` among them,
            items of the user's past are ranked, too.
        orders: name of each split -> option ``eval_args`` of one or several runs, which says how it
            is made, such as {"by time": [{"split": {"GT": [0.8, 0.9]}}]}; several differ in the
            order of interactions at the same time.

    Returns:
        Baseline -> name of each split -> NDCG@10 of the test targets in each of these runs.
    """
    name, files = read_dataset_name(dataset), [os.fspath(file) for file in config_files]
    levels: dict[str, dict[str, list[float]]] = {model: {} for model in BASELINES}
    for model, split_name in itertools.product(BASELINES, orders):
        levels[model][split_name] = []
        for eval_args in orders[split_name]:
            given = {"mask_history": False, **options, "eval_args": eval_args}
            home = TemporaryFolder()  # for the output of the run; it is deleted with this object
            result = run(model, name, files, given, run_dir=home.path / "run", verbose=False)
            assert result is not None and result.test is not None  # one process; there are targets
            levels[model][split_name].append(result.test["ndcg@10"])
    return levels
