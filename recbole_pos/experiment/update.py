"""Some more epochs of a trained model on data that have grown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import AttachArguments, RunArguments, arguments
from recbole_pos.experiment.grown_weights import updated_run
from recbole_pos.experiment.run import run

EPOCHS = 5  # at most, unless told otherwise


def update(
    trained: str | Path,
    config_dict: dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    *,
    new_items: str | None = None,
    settings: AttachArguments | None = None,
    **given: Any,
) -> Any:
    """Train a model some more on its data as they are now, from its weights, as a new run.

    >>> first = recbole_pos.run("FPARec", "ml-100k", config_dict={"epochs": 1}, run_dir="old")
    >>> later = recbole_pos.update("old", {"epochs": 2}, run_dir="new")
    >>> later.epochs
    2

    Args:
        trained: run folder of a plugin model.
        config_dict: options of training that differ from those of the run; at most
            ``epochs: 5`` are trained unless they say otherwise, the best by validation is kept.
        run_dir: where to write.
        new_items: a token or token_seq field of items: a new item starts with the mean vector of
            those that share it. With a fresh vector if None.
        settings: the other arguments together.
        given: or by name, as of :func:`recbole_pos.run`: ``verbose``, ``as_json``, ``log``: what is
            told.

    Returns:
        The :class:`~recbole_pos.experiment.result.Result` of the new run.

    Raises:
        UsageError: if the folder holds no run that can be updated.
    """
    source = updated_run(trained)
    options = {
        "epochs": EPOCHS,
        **(config_dict or {}),
        "init_from": None,
        "train_only": None,
        "update_from": str(source.path.resolve()),
        "new_items": new_items,
    }
    told = arguments(settings or AttachArguments(), given)
    return run(
        None, None, [str(source.config)], options, run_dir, settings=RunArguments(**vars(told))
    )
