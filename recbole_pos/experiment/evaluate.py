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
from recbole_pos.data.windows import masks_history
from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import TOPK
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.result import is_unfinished, read_result
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
    """Compute metrics of a trained run, those that it was tested with or others.

    They are computed from the ranks that the run has kept where these suffice: for metrics of the
    test targets' ranks, up to the largest cutoff of the run, with the same items left out.
    Otherwise the best weights are evaluated, which needs the dataset.

    Examples:
        >>> metrics = recbole_pos.evaluate("mine", metrics=["Hit", "MRR"], topk=[1, 5])
        >>> list(metrics)
        ['hit@1', 'hit@5', 'mrr@1', 'mrr@5']

    Args:
        run_dir: the folder of a run.
        metrics: names such as NDCG; those of the run if None. A function is a metric of the test
            targets' ranks ([targets] int64, 1 for the first), under its own name.
        topk: cutoffs; those of the run if None.
        part: test or valid.
        mask_history: whether items of a user's past are left out; as in the run if None.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.
        dataset: dataset of the run, after ``build``; read from its files if None.

    Returns:
        Values by name, ``ndcg@10``.

    Raises:
        UsageError: for an unknown metric, a wrong cutoff, a part without targets, or if the
            dataset is needed and not there.
        CheckpointError: if the data that the model was trained on have changed.
    """
    check_choice("part", part, PARTS)
    folder = RunFolder(run_dir).require()
    requested = _to_list(metrics)
    names = [metric for metric in requested if not callable(metric)]
    functions = [metric for metric in requested if callable(metric)]
    if functions and (part != "test" or mask_history is not None or not folder.ranks.is_file()):
        raise UsageError(
            "metrics: a function takes the ranks that a finished run keeps, of its test targets "
            "under its own mask_history; leave part and mask_history out"
        )
    custom = _call_functions(functions, _read_ranks(folder) + 1) if functions else {}
    if custom and not names:
        return custom
    trained = load_config(folder)
    names = trained["metrics"] if metrics is None else names
    cutoffs = trained["topk"] if topk is None else _to_list(topk)
    options: dict[str, Any] = {"metrics": names, "topk": cutoffs}
    if names and cutoffs:  # else the configuration refuses them
        with_cutoff = [str(name) for name in names if str(name).lower() != "gauc"]
        options["valid_metric"] = f"{with_cutoff[0]}@{cutoffs[0]}" if with_cutoff else "GAUC"
    if mask_history is not None:
        options["mask_history"] = mask_history
    if data_path is not None:
        options["data_path"] = str(data_path)
    config = load_config(folder, options)
    if part == "test" and _has_ranks_for(folder, trained, config):
        ranks = _read_ranks(folder)
        if _reproduces_result(ranks, folder, trained):
            return _compute_metrics(ranks, config) | custom
    experiment = load(folder.path, options=options, dataset=dataset)
    values = experiment.trainer.evaluate(experiment.loaders[part])
    if values is None:
        raise UsageError(f"part: this split of {folder.path} has no {part} targets")
    return values | custom


def _to_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _call_functions(functions: list[RankMetric], ranks: np.ndarray) -> dict[str, float]:
    """Return custom metrics by the name of their function, given ranks from 1."""
    values = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        values[name] = float(function(ranks))
    return values


def _has_ranks_for(folder: RunFolder, trained: PosConfig, config: PosConfig) -> bool:
    """Return whether a finished run has kept ranks from which the metrics follow."""
    follow_from_ranks = all(metric_information[m.lower()] == [TOPK] for m in config["metrics"])
    # beyond the largest cutoff of the run, items of equal scores have no order in the ranks
    are_ordered = max(config["topk"]) <= max(trained["topk"])
    rank_same_items = masks_history(trained) == masks_history(config)
    is_finished = folder.ranks.is_file() and folder.result.is_file() and not is_unfinished(folder)
    return follow_from_ranks and are_ordered and rank_same_items and is_finished


def _reproduces_result(ranks: np.ndarray, folder: RunFolder, trained: PosConfig) -> bool:
    """Return whether ranks ([targets], 0 for the first) give the metrics of the run's result."""
    result = read_result(folder)
    is_complete = np.issubdtype(ranks.dtype, np.integer) and len(ranks) == result.test_targets
    if not is_complete or not len(ranks) or ranks.min() < 0:
        return False
    values, test = _compute_metrics(ranks, trained), result.test or {}
    return all(test.get(name) == value for name, value in values.items())


def _read_ranks(folder: RunFolder) -> np.ndarray:
    """Read the test ranks of a run, [targets], 0 for the first."""
    try:
        return pd.read_parquet(folder.ranks, columns=["rank"])["rank"].to_numpy()
    except (OSError, ValueError, KeyError) as error:  # pyarrow's are of these kinds
        raise UsageError(f"{folder.ranks} is damaged: {error}") from error


def _compute_metrics(ranks: np.ndarray, config: PosConfig) -> dict[str, float]:
    """Compute those of RecBole's metrics that follow from ranks ([targets], 0 for the first)."""
    cutoff = max(config["topk"])
    hits = torch.zeros(len(ranks), cutoff + 1, dtype=torch.long)
    hits[:, -1] = 1  # RecBole's last column: number of relevant items
    rows = np.flatnonzero(ranks < cutoff)
    hits[rows, ranks[rows]] = 1
    struct = DataStruct()
    struct.set(TOPK, hits)
    evaluator = Evaluator(config)
    evaluator.metrics = [name for name in evaluator.metrics if metric_information[name] == [TOPK]]
    return {name: float(value) for name, value in evaluator.evaluate(struct).items()}
