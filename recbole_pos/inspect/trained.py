"""Trained models as their folders and checkpoints have them, fit to be looked into."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from recbole_pos import checkpoint
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.model.base import PosRecommender
from recbole_pos.properties import scheme_names
from recbole_pos.quick_start import Experiment, load
from recbole_pos.report import RunFolder


def load_trained(path: str | Path) -> tuple[RunFolder, Experiment]:
    """A trained plugin model, see :func:`open_run`.

    Raises:
        UsageError: if that is something else, or a model of RecBole's own.
    """
    folder, experiment = open_run(path)
    if not isinstance(experiment.model, PosRecommender):
        raise UsageError(
            f"{experiment.config['model']} has RecBole's layers; only attention of the plugin's "
            "own can be inspected"
        )
    return folder, experiment


def open_run(path: str | Path) -> tuple[RunFolder, Experiment]:
    """A trained model from its run folder, or from a checkpoint in such a folder.

    Raises:
        UsageError: if that is something else.
        CheckpointError: if its weights are no numbers.
    """
    path = Path(path)
    folder = RunFolder(path.parent if path.is_file() else path).require()
    experiment = load(folder.path)
    if path.is_file() and path.name != folder.checkpoint.name:
        state = checkpoint.load(path, ("weights", "best_weights"))
        checkpoint.require_same_data(state, experiment.dataset.identity, path)
        experiment.trainer.load_weights(state["best_weights"] or state["weights"])
        experiment.model.eval()
    require_finite_weights(experiment.model, path if path.is_file() else folder.checkpoint)
    return folder, experiment


def require_finite_weights(model: nn.Module, path: Path) -> None:
    """Refuse a model that no training of this package leaves behind.

    Args:
        model: with the weights of a checkpoint.
        path: the checkpoint's, for the message.

    Raises:
        CheckpointError: if a parameter holds NaN or infinity; names it.
    """
    for name, weight in model.named_parameters():
        broken = int((~torch.isfinite(weight)).sum())
        if broken:
            raise CheckpointError(
                f"{path}: {broken:,} of {weight.numel():,} weights of {name} are NaN or infinite"
            )


def require_finite(values: Iterable[np.ndarray], what: str) -> None:
    """Refuse what weights that are finite, but out of all proportion, have led to.

    Args:
        values: what was computed from them.
        what: its name, for the message.

    Raises:
        CheckpointError: if some are NaN or infinite.
    """
    if not all(np.isfinite(array).all() for array in values):
        raise CheckpointError(
            f"{what} of this model is NaN or infinite: its weights are numbers, but too large to "
            "compute with"
        )


def full_name(experiment: Experiment) -> str:
    """``PosSASRec (rope, kernel) on ml-100k``: a model, what it knows of positions, and its data.

    Models without position schemes are ``Pop on ml-100k``.
    """
    config = experiment.config
    position = config["position"]
    schemes = f" ({', '.join(scheme_names(position))})" if position else ""
    return f"{config['model']}{schemes} on {config['dataset']}"
