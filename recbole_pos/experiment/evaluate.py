"""Metrics of a trained run, computed from the ranks it has kept or with its best weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from recbole.evaluator import Evaluator
from recbole.evaluator.collector import DataStruct
from recbole.evaluator.register import metric_information

from recbole_pos.config.checks import as_list
from recbole_pos.config.metrics import has_cutoff
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.protocol import describe_candidates, masks_history
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment.evaluation import TOPK
from recbole_pos.experiment.folder import RunFolder, is_unfinished, list_warnings, read_result
from recbole_pos.experiment.run import load, load_config
from recbole_pos.values import check_choice

PARTS = ("test", "valid")


def evaluate(
    run_dir: str | Path,
    metrics: str | Sequence[str] | None = None,
    topk: int | Sequence[int] | None = None,
    part: str = "test",
    mask_history: bool | None = None,
    data_path: str | Path | None = None,
    dataset: Any = None,
) -> dict[str, float]:
    """Compute metrics of a trained run, those that it was tested with or others.

    The ranks of test targets that the run has kept suffice for metrics of ranks, up to the largest
    cutoff of the run, with the same items left out. For other metrics the best weights are
    evaluated, which needs the dataset.

    Examples:
        >>> metrics = recbole_pos.evaluate("mine", metrics=["Hit", "MRR"], topk=[1, 5])
        >>> list(metrics)
        ['hit@1', 'hit@5', 'mrr@1', 'mrr@5']

    Args:
        run_dir: the folder of a run.
        metrics: names such as NDCG; those of the run if None.
        topk: cutoffs; those of the run if None.
        part: test or valid.
        mask_history: whether items of a user's past are left out; as in the run if None.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.
        dataset: dataset of the run; read from its files if None.

    Returns:
        Values by name, such as ``ndcg@10``.

    Raises:
        UsageError: if a metric is unknown, a cutoff is wrong, the part has no targets, or the
            dataset is needed and missing.
        CheckpointError: if the data that the model was trained on have changed; later interactions
            are left out.
    """
    # PARTS are test and valid. ``require`` refuses a folder without a trained run.
    check_choice("part", part, PARTS)
    folder = RunFolder(run_dir).require()

    # The options of the run, with the metrics that are asked for.
    trained = load_config(folder)
    names = trained["metrics"] if metrics is None else as_list(metrics)
    cutoffs = trained["topk"] if topk is None else as_list(topk)
    options = _make_metric_options(names, cutoffs)
    if mask_history is not None:
        options["mask_history"] = mask_history
    if data_path is not None:
        options["data_path"] = str(data_path)
    config = load_config(folder, options)

    # The ranks of a finished run are those of its best weights.
    if part == "test" and folder.ranks.is_file() and not is_unfinished(folder):
        if _follow_from_ranks(trained, config):
            ranks = pd.read_parquet(folder.ranks, columns=["rank"])["rank"].to_numpy()
            return _compute_metrics(ranks, config)

    # Else the best weights are evaluated again.
    try:
        experiment = load(folder.path, options=options, dataset=dataset)
    except CheckpointError as error:
        # The data have changed. If they only grew, a slower reading (``grown``) finds those of the
        # run among them; where values of attributes are others, too, the error stands.
        experiment = load(folder.path, options=options, dataset=dataset, grown=True)
        if experiment.changed:
            raise error from None
    values = experiment.trainer.evaluate(experiment.loaders[part])
    if values is None:  # the split has no such part
        raise UsageError(f"part: this split of {folder.path} has no {part} targets")
    return values


def describe_evaluation(
    run_dir: str | Path, part: str, mask_history: bool | None = None
) -> dict[str, Any]:
    """Describe an evaluation of a run for a report: what is predicted, and which items are ranked.

    Args:
        run_dir: the folder of a run.
        part: the part whose targets are predicted: test or valid.
        mask_history: whether items of a user's past are left out; as in the run if None.

    Returns:
        ``part`` and ``candidates`` (which items are ranked, in words). Of a finished run also
        ``split``; ``targets``, their number; ``repeated_targets``, how many of these their user has
        had before; and ``warnings``.
    """
    folder = RunFolder(run_dir)
    config = load_config(folder)
    excludes_seen = masks_history(config) if mask_history is None else mask_history
    candidates = describe_candidates(excludes_seen)
    description: dict[str, Any] = {"part": part, "candidates": candidates}
    # Counts and warnings are in the result, which an unfinished run does not have.
    if not folder.result.is_file():
        return description
    result = read_result(folder)
    split = result.split

    # The run has counted the repeated targets of all users. If it validates only a sample of the
    # users (``valid_users``), that count is not of the targets of validation, and is left out.
    is_sample = part == "valid" and "valid_users" in split
    if not is_sample:
        description["repeated_targets"] = split["repeated_targets"].get(part)
    num_targets = {"valid": result.valid_targets, "test": result.test_targets}
    description["split"] = split["split"]
    description["targets"] = num_targets[part]
    description["warnings"] = list_warnings(split, candidates, result.request_time)
    return description


def _make_metric_options(metrics: list[Any], cutoffs: list[Any]) -> dict[str, Any]:
    """Return the options of a run that evaluate given metrics at given cutoffs.

    Args:
        metrics: names such as NDCG.
        cutoffs: lengths of lists, such as 10.

    Returns:
        ``metrics``, ``topk`` and ``valid_metric``. RecBole requires that the last is one of the
        metrics, so it is the first of them, such as ndcg@10.
    """
    options: dict[str, Any] = {"metrics": metrics, "topk": cutoffs}
    if metrics and cutoffs:  # the configuration refuses an empty list
        first = str(metrics[0])
        options["valid_metric"] = f"{first}@{cutoffs[0]}" if has_cutoff(first) else first
    return options


def _follow_from_ranks(trained: PosConfig, config: PosConfig) -> bool:
    """Return whether requested metrics can be computed from the ranks that a run has kept.

    Args:
        trained: configuration of the run that has kept the ranks.
        config: configuration with the requested metrics, cutoffs and masking of seen items.
    """
    # RecBole's table ``metric_information`` lists for each metric the data that it needs. For a
    # metric of ranks, such as NDCG, the list is [TOPK]: where the target is among the best items.
    metrics = [str(name).lower() for name in config["metrics"]]
    has_rank_metrics = all(metric_information[name] == [TOPK] for name in metrics)

    # A cutoff may be at most the number of items, which is not known here. The cutoffs of the run
    # were checked when it was trained, so a cutoff up to the largest of them is allowed.
    has_checked_cutoffs = max(config["topk"]) <= max(trained["topk"])
    ranks_same_items = masks_history(trained) == masks_history(config)
    return has_rank_metrics and has_checked_cutoffs and ranks_same_items


def _compute_metrics(ranks: np.ndarray, config: PosConfig) -> dict[str, float]:
    """Compute the metrics of a configuration, all of which are metrics of ranks.

    Args:
        ranks: [targets] rank of each target, 0 for the first.
        config: its metrics and cutoffs.

    Returns:
        Metric -> value, such as ``ndcg@10``, as RecBole's evaluator rounds it.
    """
    # RecBole's form: a row for each target, with 1 in the column of its rank. For example, with a
    # cutoff of 3 the rank 1 gives [0, 1, 0 | 1], and a rank of 3 or more gives [0, 0, 0 | 1].
    cutoff = max(config["topk"])
    hits = torch.zeros(len(ranks), cutoff + 1, dtype=torch.long)
    hits[:, -1] = 1  # RecBole's last column: number of relevant items
    rows = np.flatnonzero(ranks < cutoff)
    hits[rows, ranks[rows]] = 1

    # RecBole's evaluator reads the hits under the name TOPK.
    struct = DataStruct()
    struct.set(TOPK, hits)
    values = Evaluator(config).evaluate(struct)
    return {name: float(value) for name, value in values.items()}
