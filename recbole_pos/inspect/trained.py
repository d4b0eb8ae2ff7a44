"""Trained models as their folders and checkpoints have them, fit to be looked into."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from recbole_pos.errors import CheckpointError
from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import load
from recbole_pos.experiment.state import load_best
from recbole_pos.position.schemes import scheme_names


def open_run(path: str | Path, data_path: str | Path | None = None) -> tuple[RunFolder, Experiment]:
    """Return a trained model from its run folder, or from a checkpoint in such a folder.

    Raises:
        UsageError: if that is something else.
        CheckpointError: if its weights are no numbers.
    """
    path = Path(path)
    folder = RunFolder(path.parent if path.is_file() else path).require()
    experiment = load(folder.path, data_path=data_path)
    if path.is_file() and path.name != folder.checkpoint.name:
        load_best(experiment.model, path, experiment.dataset.identity)
        experiment.model.eval()
    return folder, experiment


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


def registered_name(experiment: Experiment) -> str:
    """Return ``PosSASRec (rope, kernel) on ml-100k``; without schemes ``Pop on ml-100k``."""
    config = experiment.config
    schemes = scheme_names(config["position"]) if config["position"] else []
    known = f" ({', '.join(schemes)})" if schemes else ""
    return f"{config['model']}{known} on {config['dataset']}"
