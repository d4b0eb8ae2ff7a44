"""The lists of a trained run, written as files that this package and other tools read.

In: the folder of a run. Out: parquet or csv with request, item and rank; a TREC run (.run, .trec),
as trec_eval reads it; or a ranx run (.json). The metrics of the run are those of these lists.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import EVENT, ITEMS
from recbole_pos.experiment.run import load
from recbole_pos.files import atomic_write
from recbole_pos.referee.predictions import SPLIT_COLUMN
from recbole_pos.referee.requests import make_requests, read_run_data

_LENGTH = 100  # items of a list by default
_SUFFIXES = (".parquet", ".csv", ".run", ".trec", ".json")
# Of RecBole's metrics, one that makes the evaluation keep the best items of each target.
_KEEPS_ITEMS = "ItemCoverage"


def write_lists(
    run_dir: str | Path,
    file: str | Path,
    k: int | None = None,
    part: str = "test",
    data_path: str | Path | None = None,
) -> Path:
    """Write the best items of a trained run for each request of its split.

    A request is the question which item comes next after a history; the held-out item is the right
    answer. Nothing stands at the path until the file is complete.

    Args:
        run_dir: the folder of a run.
        file: path of a .parquet, .csv, .run, .trec or .json file.
        k: items of a list, see :func:`compute_lists`.
        part: test or valid.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Returns:
        The path of the file.

    Raises:
        UsageError: if the suffix of the file is none of these, or ``k`` is more than there are
            items.
    """
    file = Path(file)
    if file.suffix not in _SUFFIXES:
        raise UsageError(f"{file}: expected a name that ends in {', '.join(_SUFFIXES)}")
    lists = compute_lists(run_dir, k, part, data_path)

    # Readers of ranx and TREC runs sort by scores: the first of K items gets K, the last one 1.
    scores = lists["rank"].max() + 1 - lists["rank"]
    # atomic_write opens a file that gets its name when the block has ended.
    with atomic_write(file, text=file.suffix != ".parquet") as unfinished:
        if file.suffix == ".parquet":
            lists.to_parquet(unfinished, index=False)
        elif file.suffix == ".csv":
            lists.to_csv(unfinished, index=False)
        elif file.suffix == ".json":
            # a ranx run, {request: {item: score}}
            run: dict[str, dict[str, float]] = {}
            for request, item, score in zip(lists["request"], lists["item"], scores, strict=True):
                run.setdefault(request, {})[item] = float(score)
            json.dump(run, unfinished)
        else:  # .run or .trec, which are both of a TREC run
            trec = lists.assign(q0="Q0", score=scores, tag="recbole-pos")
            columns = ["request", "q0", "item", "rank", "score", "tag"]
            trec.to_csv(unfinished, columns=columns, sep=" ", header=False, index=False)
    return file


def compute_lists(
    run_dir: str | Path,
    k: int | None = None,
    part: str = "test",
    data_path: str | Path | None = None,
) -> pd.DataFrame:
    """Return the best items of a run for each request, as :func:`write_lists` writes them.

    A request is the question which item comes next after a history.

    Args:
        run_dir: the folder of the run.
        k: items of a list. By default 100, or all items of a dataset that has fewer.
        part: test or valid.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Returns:
        A row for each request and item: request and item (text), rank (from 1), and split, the
        digest of the requests.
    """
    if k is None:
        num_items = read_run_data(run_dir, data_path).item_num - 1  # without the id of padding
        k = min(_LENGTH, num_items)

    # Evaluate the run once more. What an evaluation keeps of each target depends on the metrics.
    # The metric ItemCoverage (_KEEPS_ITEMS) makes it keep the best items; its value is not used.
    # Metrics that need ranks make it keep which interactions the targets are, too.
    metric = {"metrics": [_KEEPS_ITEMS], "topk": [k], "valid_metric": f"{_KEEPS_ITEMS}@{k}"}
    experiment = load(run_dir, data_path=data_path, options=metric)
    requests = make_requests(experiment.dataset, part)
    collector = experiment.trainer.eval_collector
    collector.needs_ranks = True
    experiment.trainer.evaluate(experiment.loaders[part], load_best_model=False)

    # Of each target: the row of its interaction in the dataset, [targets], and the ids of its best
    # items, [targets, k]. Targets are in the order of evaluation, and requests, one for each
    # target, in that of the rows: so sort the lists by row.
    target_rows = collector.last.get(EVENT).cpu().numpy()
    items = collector.last.get(ITEMS).cpu().numpy()
    items = items[np.argsort(target_rows, kind="stable")]

    # a row for each request and item: requests a, b and k = 2 give a, a, b, b with ranks 1, 2, 1, 2
    num_lists, length = items.shape
    return pd.DataFrame(
        {
            "request": np.repeat(requests.names, length),
            "item": requests.item_names[items.reshape(-1)],
            "rank": np.tile(np.arange(1, length + 1), num_lists),
            SPLIT_COLUMN: requests.digest,
        }
    )
