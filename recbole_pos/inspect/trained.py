"""Load trained models to inspect them, and report what was found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.errors import CheckpointError
from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import load
from recbole_pos.experiment.state import load_best
from recbole_pos.position.schemes import scheme_names


@dataclass(frozen=True)
class Report:
    """Results of an inspection; ``print`` shows all but ``content``.

    Attributes:
        headline: what was inspected.
        parts: tables, and lines between them.
        files: the files written.
        content: content of the json file, if there is one.
    """

    headline: str
    parts: list[str | pd.DataFrame]
    files: list[Path]
    content: dict[str, Any]

    def __str__(self) -> str:
        texts = [
            part if isinstance(part, str) else f"\n{part.to_string(index=False)}\n"
            for part in self.parts
        ]
        return "\n".join([self.headline, *texts, *map(str, self.files)])


def open_run(path: str | Path, data_path: str | Path | None = None) -> tuple[RunFolder, Experiment]:
    """Load a trained model from its run folder, or from a checkpoint in such a folder.

    Args:
        path: the folder, whose best weights are used, or the checkpoint.
        data_path: the folder that holds the folder of the dataset; by default the run's.

    Returns:
        The run folder, and the experiment, whose model is in evaluation mode.

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


def require_finite(arrays: Iterable[np.ndarray], what: str) -> None:
    """Raise a CheckpointError, which calls the arrays ``what``, if one has NaN or infinity."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise CheckpointError(
            f"{what} of this model is NaN or infinite: its weights are numbers, but too large to "
            "compute with"
        )


def describe_run(experiment: Experiment) -> str:
    """Return text such as ``PosSASRec (rope, kernel) on ml-100k``, or ``Pop on ml-100k``."""
    config = experiment.config
    schemes = scheme_names(config["position"]) if config["position"] else []
    in_brackets = f" ({', '.join(schemes)})" if schemes else ""
    return f"{config['model']}{in_brackets} on {config['dataset']}"


def format_spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, such as ``1-3, 5``."""
    numbers = list(numbers)
    spans = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)
