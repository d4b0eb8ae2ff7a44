"""Load trained models from run folders and checkpoints, to inspect them."""

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
    """Load a trained model from its run folder, or from a checkpoint in such a folder.

    Args:
        path: the folder or the checkpoint.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Raises:
        UsageError: if the path is neither.
        CheckpointError: if weights are not finite.
    """
    path = Path(path)
    folder = RunFolder(path.parent if path.is_file() else path).require()
    experiment = load(folder.path, data_path=data_path)
    if path.is_file() and path.name != folder.checkpoint.name:
        load_best(experiment.model, path, experiment.dataset.identity)
        experiment.model.eval()
    return folder, experiment


def require_finite(values: Iterable[np.ndarray], what: str) -> None:
    """Check that what was computed from a model is finite: huge finite weights may overflow.

    Args:
        values: arrays computed from the model.
        what: their name, for the message.

    Raises:
        CheckpointError: if some are NaN or infinite.
    """
    if not all(np.isfinite(array).all() for array in values):
        raise CheckpointError(
            f"{what} of this model is NaN or infinite: its weights are numbers, but too large to "
            "compute with"
        )


def describe_run(experiment: Experiment) -> str:
    """Return ``PosSASRec (rope, kernel) on ml-100k``; without schemes ``Pop on ml-100k``."""
    config = experiment.config
    schemes = scheme_names(config["position"]) if config["position"] else []
    in_brackets = f" ({', '.join(schemes)})" if schemes else ""
    return f"{config['model']}{in_brackets} on {config['dataset']}"
