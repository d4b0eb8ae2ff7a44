"""What the workers of ``toolkits.py`` share: an exported split, early stopping, lists of items.

It runs in the environment of each toolkit, so it imports little.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

LENGTH = 100  # items of a list
# Options of Lightning's trainer: one process on the CPU that writes nothing.
QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
QUIET |= {f"enable_{what}": False for what in ("checkpointing", "progress_bar", "model_summary")}


@dataclass(frozen=True)
class Task:
    """One training of a toolkit's model on an exported split.

    Attributes:
        split: folder that ``recbole-pos split`` has written.
        out: file for the lists (parquet); the cost of training is written beside it (json).
        model: name of the model.
        seed: of all random numbers.
        settings: those of PosSASRec, by the toolkit's names; empty for the toolkit's defaults.
        max_epochs: most epochs.
        patience: epochs without a better validation after which training ends.
    """

    split: str
    out: str
    model: str
    seed: int
    settings: dict[str, Any]
    max_epochs: int
    patience: int

    @classmethod
    def read(cls) -> Task:
        """Return the task that the command line has as json."""
        return cls(**json.loads(sys.argv[1]))

    def read_split(self, name: str) -> pd.DataFrame:
        """Return a file of the split, such as ``train`` or ``test_requests``."""
        return pd.read_parquet(Path(self.split) / f"{name}.parquet")

    def write(self, lists: pd.DataFrame, seconds: float, epochs: int, package: str) -> None:
        """Write the lists of the test requests, and what the training has cost.

        Args:
            lists: request, item and rank of each item of a list.
            seconds: CPU-seconds of training, without validation.
            epochs: number of epochs trained; the best is not always the last.
            package: the toolkit, whose version is written.
        """
        # With the digest of the split, no one can score the lists on another split.
        digest = json.loads((Path(self.split) / "split.json").read_text())["test"]["digest"]
        lists[["request", "item", "rank"]].assign(split=digest).to_parquet(self.out, index=False)
        cost = {"seconds": round(seconds, 1), "epochs": epochs, package: version(package)}
        Path(self.out).with_suffix(".json").write_text(json.dumps(cost))


def compute_ndcg(lists: pd.DataFrame, targets: pd.DataFrame) -> float:
    """Return NDCG@10 of lists; a request without its target in the list is a miss.

    Args:
        lists: request, item and rank, which is 1 for the first item.
        targets: request and item, one line for each request.
    """
    ranks = lists.merge(targets, on=["request", "item"])["rank"]
    return float((1 / np.log2(ranks[ranks <= 10] + 1)).sum() / len(targets))


class StopEarly:
    """Ends a training of Lightning when validation gets no better, and keeps the best weights.

    A worker mixes it into the class ``Callback`` of its Lightning.

    Attributes:
        seconds: CPU-seconds of training so far; validation is not counted.
        scores: NDCG@10 on the validation requests after each epoch.
        weights: weights after the best epoch.
    """

    def __init__(self, task: Task, recommend: Callable[[], pd.DataFrame]) -> None:
        """Prepare for a training.

        Args:
            task: says when to stop.
            recommend: returns lists for the validation requests.
        """
        self.task, self.recommend = task, recommend
        self.targets = task.read_split("valid_targets")
        self.seconds, self.scores = 0.0, []

    def __deepcopy__(self, memo: dict[int, Any]) -> StopEarly:
        return self  # RecTools trains with a copy of its trainer; the results are read from here

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.began = time.process_time()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seconds += time.process_time() - self.began
        self.scores.append(compute_ndcg(self.recommend(), self.targets))
        module.train()  # recommending leaves it without dropout

        waited = len(self.scores) - 1 - self.scores.index(max(self.scores))
        if waited == 0:
            self.weights = copy.deepcopy(module.state_dict())
        trainer.should_stop = waited >= self.task.patience
        print(f"epoch {len(self.scores)}: {self.scores[-1]:.4f}, {self.seconds:.0f} s", flush=True)
