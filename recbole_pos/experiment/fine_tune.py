"""Training a trained model further: with schemes added to it, or on data that have grown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import AttachArguments, RunArguments
from recbole_pos.config.plugins import allow, import_plugins
from recbole_pos.config.sources import list_positions
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.result import Result
from recbole_pos.experiment.run import run, warn_of_unfinished
from recbole_pos.experiment.warm_start import require_updatable
from recbole_pos.position.schemes import SCHEMES, scheme_names


def attach(
    trained: str | Path,
    schemes: str | Iterable[str],
    config_dict: dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    *,
    settings: AttachArguments | None = None,
    **keywords: Any,
) -> Result | None:
    """Add position schemes to a trained model and fine-tune only their parameters.

    Examples:
        >>> short = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
        >>> first = recbole_pos.run("PosSASRec", "ml-100k", config_dict=short, run_dir="first")
        >>> tuned = recbole_pos.attach("first", "kernel", {"epochs": 1}, run_dir="tuned")
        >>> tuned.parameters < first.parameters  # only the kernel's are trained
        True

    A kernel starts as the identity and a bias at zero, so training starts from the trained model
    itself; schemes that have no such start (``learned``, ``rope``) change it at once.

    Args:
        trained: run folder of a plugin model.
        schemes: names to add, such as ``kernel``.
        config_dict: options that differ from the trained run's (``learning_rate``, ...).
        run_dir: folder of the new run.
        settings: what is printed, as one object.
        keywords: the same by name: ``verbose``, ``as_json``, ``log``, see :func:`recbole_pos.run`.

    Returns:
        The result of the new run, as of :func:`recbole_pos.run`.

    Raises:
        UsageError: if the folder holds no run, or the schemes cannot be added to its model.
    """
    source = RunFolder(trained).require()
    options = dict(config_dict or {})
    warn_of_unfinished(source)
    config = source.read_config()
    if refused := {"position", "init_from", "train_only"} & options.keys():
        raise UsageError(f"{min(refused)}: attach decides it; use run with init_from instead")
    if "position" not in config:
        raise UsageError(f"{source.path}: {config['model']} takes no position schemes")
    allow(options.get("plugins"))
    import_plugins(options.get("plugins"), "configuration")
    are_registered = all(name in SCHEMES for name in list_positions(config["position"], None))
    import_plugins(config.get("plugins"), str(source.config), are_registered)
    added = scheme_names(schemes if isinstance(schemes, str) else list(schemes), "schemes")
    present = [name for name in scheme_names(config["position"]) if name != "nope"]
    options |= {"position": [*present, *added], "train_only": added}
    # the weights of an updated run include those that its update started from
    options |= {"init_from": str(source.path.resolve()), "update_from": None, "new_items": None}
    args = RunArguments(**vars(replace(settings or AttachArguments(), **keywords)))
    files = [str(source.config)]
    return run(config_file_list=files, config_dict=options, run_dir=run_dir, settings=args)


def update(
    trained: str | Path,
    config_dict: dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    *,
    new_items: str | None = None,
    settings: AttachArguments | None = None,
    **keywords: Any,
) -> Result | None:
    """Train a model for further epochs on its data as they are now, as a new run.

    An interrupted update is resumed like any run: ``recbole_pos.run(resume=...)``.

    Examples:
        >>> first = recbole_pos.run("FPARec", "ml-100k", config_dict={"epochs": 1}, run_dir="old")
        >>> later = recbole_pos.update("old", {"epochs": 2}, run_dir="new")
        >>> later.epochs
        2

    Args:
        trained: run folder of a plugin model.
        config_dict: options of training that differ from those of the run (default ``epochs: 5``);
            the best epoch by validation is kept.
        run_dir: folder of the new run.
        new_items: a token or token_seq field of items: a new item starts with the mean vector of
            the items that share a token with it; with a random one if None.
        settings: what is printed, as one object.
        keywords: the same by name: ``verbose``, ``as_json``, ``log``, see :func:`recbole_pos.run`.

    Returns:
        The result of the new run, as of :func:`recbole_pos.run`.

    Raises:
        UsageError: if the folder holds no run that can be updated, or ``run_dir`` another run.
    """
    source = require_updatable(trained)
    files = [str(source.config)]
    options = {"epochs": 5, "new_items": None, **(config_dict or {})}
    for option in ("init_from", "train_only", "update_from"):
        if options.get(option) is not None:
            raise UsageError(f"{option}: update decides it; leave it out")
    options |= {"init_from": None, "train_only": None, "update_from": str(source.path.resolve())}
    if new_items is not None:
        options["new_items"] = new_items
    allow(options.get("plugins"))
    args = RunArguments(**vars(replace(settings or AttachArguments(), **keywords)))
    return run(config_file_list=files, config_dict=options, run_dir=run_dir, settings=args)
