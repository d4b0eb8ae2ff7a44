"""Metrics of a trained run, without training: from its kept ranks, or by its best weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from recbole.evaluator import Evaluator
from recbole.evaluator.collector import DataStruct
from recbole.evaluator.register import metric_information

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.history import masks_history
from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import TOPK
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.result import read_result, unfinished
from recbole_pos.experiment.run import load, load_config
from recbole_pos.values import check_choice

PARTS = ("test", "valid")
RankMetric = Callable[[np.ndarray], float]


def evaluate(
    run_dir: str | Path,
    metrics: str | RankMetric | Sequence[str | RankMetric] | None = None,
    topk: int | Sequence[int] | None = None,
    part: str = "test",
    mask_history: bool | None = None,
    data_path: str | Path | None = None,
    dataset: Any = None,
) -> dict[str, float]:
    """Return metrics of a trained run, of its own kind or others, without training it again.

    They follow from the ranks that the run has kept where these suffice: metrics of the test
    targets' ranks, up to the largest cutoff of the run, with the same items left out. Otherwise the
    best weights are evaluated, which needs the dataset.

    Examples:
        >>> found = recbole_pos.evaluate("mine", metrics=["Hit", "MRR"], topk=[1, 5])
        >>> list(found)
        ['hit@1', 'hit@5', 'mrr@1', 'mrr@5']

    Args:
        run_dir: the folder of a run.
        metrics: names such as NDCG; those of the run if None. A function is a metric of the test
            targets' ranks ([targets] int64, 1 for the first), named as it is.
        topk: cutoffs; those of the run if None.
        part: test or valid.
        mask_history: whether items of a user's past are left out; as in the run if None.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.
        dataset: that of the run, after ``build``, which is then not read again.

    Returns:
        Values by name, ``ndcg@10``.

    Raises:
        UsageError: for an unknown metric, a wrong cutoff, a part without targets, or if the
            dataset is needed and not there.
        CheckpointError: if what the model was trained on is not there any more.
    """
    check_choice("part", part, PARTS)
    folder = RunFolder(run_dir).require()
    functions = [one for one in _listed(metrics) if callable(one)]
    own = _apply(functions, folder, part, mask_history) if functions else {}
    if own and not (metrics := [one for one in _listed(metrics) if not callable(one)]):
        return own
    kept = load_config(folder)
    options: dict[str, Any] = {
        "metrics": kept["metrics"] if metrics is None else _listed(metrics),
        "topk": kept["topk"] if topk is None else _listed(topk),
    }
    if options["metrics"] and options["topk"]:  # else the configuration refuses them
        names = [str(name) for name in options["metrics"] if str(name).lower() != "gauc"]
        options["valid_metric"] = f"{names[0]}@{options['topk'][0]}" if names else "GAUC"
    if mask_history is not None:
        options["mask_history"] = mask_history
    if data_path is not None:
        options["data_path"] = str(data_path)
    config = load_config(folder, options)
    if part == "test" and (found := _from_ranks(folder, kept, config)) is not None:
        return found | own
    trained = load(folder.path, options=options, dataset=dataset)
    measured = trained.trainer.evaluate(trained.loaders[part])
    if measured is None:
        raise UsageError(f"part: this split of {folder.path} has no {part} targets")
    return measured | own


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _from_ranks(folder: RunFolder, kept: PosConfig, config: PosConfig) -> dict[str, float] | None:
    """Metrics from the ranks of the test; None if they do not follow, or do not fit the result."""
    of_ranks = all(metric_information[name.lower()] == [TOPK] for name in config["metrics"])
    same = masks_history(kept) == masks_history(config)
    # beyond the largest cutoff items of equal scores have no order in the ranks
    exact = max(config["topk"]) <= max(kept["topk"])
    usable = folder.ranks.is_file() and folder.result.is_file() and not unfinished(folder)
    if not (of_ranks and same and exact and usable):
        return None
    result, rank = read_result(folder), _read_ranks(folder)
    whole = np.issubdtype(rank.dtype, np.integer) and len(rank) == result.test_targets
    if not whole or not len(rank) or rank.min() < 0:
        return None
    own = _metrics(rank, kept)
    if any((result.test or {}).get(name) != value for name, value in own.items()):
        return None
    return _metrics(rank, config)


def _read_ranks(folder: RunFolder) -> np.ndarray:
    try:
        return pd.read_parquet(folder.ranks, columns=["rank"])["rank"].to_numpy()
    except (OSError, ValueError, KeyError) as error:  # pyarrow's are of these kinds
        raise UsageError(f"{folder.ranks} is damaged: {error}") from error


def _apply(
    functions: Sequence[RankMetric], folder: RunFolder, part: str, mask_history: bool | None
) -> dict[str, float]:
    """Metrics of the user's own."""
    if part != "test" or mask_history is not None or not folder.ranks.is_file():
        raise UsageError(
            "metrics: a function takes the ranks that a finished run keeps, of its test targets "
            "under its own mask_history; leave part and mask_history out"
        )
    rank = _read_ranks(folder) + 1
    return {getattr(one, "__name__", type(one).__name__): float(one(rank)) for one in functions}


def _metrics(rank: np.ndarray, config: PosConfig) -> dict[str, float]:
    """RecBole's metrics of ranks [targets], those that follow from them."""
    most = max(config["topk"])
    hits = torch.zeros(len(rank), most + 1, dtype=torch.long)
    hits[:, -1] = 1  # relevant items of each
    row = np.flatnonzero(rank < most)
    hits[row, rank[row]] = 1
    struct = DataStruct()
    struct.set(TOPK, hits)
    evaluator = Evaluator(config)
    evaluator.metrics = [name for name in evaluator.metrics if metric_information[name] == [TOPK]]
    return {name: float(value) for name, value in evaluator.evaluate(struct).items()}
