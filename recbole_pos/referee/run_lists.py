"""The lists of a trained run, written as files that this package and other tools read.

In: the folder of a run. Out: parquet or csv with request, item and rank; a TREC run (.run, .trec),
as trec_eval reads it; or a ranx run (.json). The metrics of the run are those of these lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import EVENT, ITEMS
from recbole_pos.experiment.run import load
from recbole_pos.files import atomic_write
from recbole_pos.referee.predictions import SPLIT_COLUMN
from recbole_pos.referee.requests import make_requests

# Of RecBole's metrics, one that makes the evaluation keep the best items of each target.
_KEEPS_ITEMS = "ItemCoverage"


def write_lists(
    run_dir: str | Path,
    file: str | Path,
    k: int = 100,
    part: str = "test",
    data_path: str | Path | None = None,
) -> Path:
    """Write the best items of a trained run for each request of its split.

    A request is the question which item comes next after a history; the held-out item is the right
    answer. Nothing stands at the path until the file is complete.

    Args:
        run_dir: the folder of a run.
        file: path of a .parquet, .csv, .run, .trec or .json file.
        k: items of a list.
        part: test or valid.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Returns:
        The path of the file.

    Raises:
        UsageError: if the suffix of the file is none of these.
    """
    file = Path(file)
    write = _WRITERS.get(file.suffix)
    if write is None:
        raise UsageError(f"{file}: expected a name that ends in {', '.join(_WRITERS)}")
    with atomic_write(file, text=file.suffix != ".parquet") as unfinished:
        write(compute_lists(run_dir, k, part, data_path), unfinished)
    return file


def compute_lists(
    run_dir: str | Path, k: int = 100, part: str = "test", data_path: str | Path | None = None
) -> pd.DataFrame:
    """Return the best items of a run for each request, as :func:`write_lists` writes them.

    The run is evaluated once more, by which RecBole's collector of results keeps the best items.

    Args:
        run_dir: the folder of the run.
        k: items of a list.
        part: test or valid.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Returns:
        A row for each request and item: request and item (text), rank (from 1), and split, the
        digest of the requests.
    """
    # Only a metric that needs the best items makes the evaluation keep them.
    metric = {"metrics": [_KEEPS_ITEMS], "topk": [k], "valid_metric": f"{_KEEPS_ITEMS}@{k}"}
    experiment = load(run_dir, data_path=data_path, options=metric)
    requests = make_requests(experiment.dataset, part)
    collector = experiment.trainer.eval_collector
    loader = experiment.loaders[part]
    loader._dataset.phase = "test"  # the evaluation keeps the targets of a test only
    experiment.trainer.evaluate(loader, load_best_model=False)

    # Batches need not be in the order of the requests. EVENT is the row of each target in the log,
    # and requests are sorted by that row; ITEMS are the best items [targets, k] by id.
    order = np.argsort(collector.last.get(EVENT).cpu().numpy(), kind="stable")
    items = collector.last.get(ITEMS).cpu().numpy()[order]
    num_lists, length = items.shape
    return pd.DataFrame(
        {
            "request": np.repeat(requests.names, length),
            "item": requests.item_names[items.reshape(-1)],
            "rank": np.tile(np.arange(1, length + 1), num_lists),
            SPLIT_COLUMN: requests.digest,
        }
    )


def _write_trec(lists: pd.DataFrame, file: Any) -> None:
    """Write a TREC run. Readers sort by scores, so the first of K items has the score K."""
    best_score = int(lists["rank"].max())
    for row in lists.itertuples():
        file.write(
            f"{row.request} Q0 {row.item} {row.rank} {best_score + 1 - row.rank} recbole-pos\n"
        )


def _write_ranx(lists: pd.DataFrame, file: Any) -> None:
    """Write a ranx run, {request: {item: score}}; the first of K items has the score K.

    Args:
        lists: a row for each request and item, with columns request, item and rank (from 1).
        file: an open file for text.
    """
    scores = lists.assign(score=(lists["rank"].max() + 1 - lists["rank"]).astype(float))
    run = {
        str(request): dict(zip(rows["item"], rows["score"], strict=True))
        for request, rows in scores.groupby("request", sort=False)
    }
    json.dump(run, file)


# Suffix of a file -> function that writes lists into it.
_WRITERS: dict[str, Callable[[pd.DataFrame, Any], None]] = {
    ".parquet": lambda lists, file: lists.to_parquet(file, index=False),
    ".csv": lambda lists, file: lists.to_csv(file, index=False),
    ".run": _write_trec,
    ".trec": _write_trec,
    ".json": _write_ranx,
}
