"""Training a trained model further: with schemes added to it, or on data that have grown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import AttachArguments, RunArguments
from recbole_pos.config.plugins import allow, import_plugins
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.config.sources import list_positions
from recbole_pos.data.identity import describe_changes
from recbole_pos.errors import UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import read_dataset
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.result import Result, is_unfinished, read_result
from recbole_pos.experiment.run import load_config, run, warn_of_unfinished
from recbole_pos.experiment.warm_start import require_updatable
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.reporter import Reporter
from recbole_pos.values import shown


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

    The same call can be repeated with the same ``run_dir`` after an interruption: an unfinished run
    is resumed, or begins again if the data have changed; a finished run is left as it is.

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
    run_dir = run_dir or args.run_dir
    if run_dir is not None and RunFolder(run_dir).holds_run:
        return _continue_update(RunFolder(run_dir), files, options, args)
    return run(config_file_list=files, config_dict=options, run_dir=run_dir, settings=args)


def _continue_update(
    folder: RunFolder, files: list[str], options: dict[str, Any], args: RunArguments
) -> Result | None:
    """Return the result of an update that was begun in a folder: read, resumed or repeated."""
    reporter = Reporter(args.verbose, as_json=args.as_json, log=args.log)
    requested = PosConfig(config_file_list=files, config_dict=options).plain
    config = _require_same_update(folder, requested, options)
    has_changed = _has_other_data(folder, config)
    if folder.result.is_file() and not is_unfinished(folder):
        if has_changed:
            raise UsageError(
                f"{folder.path} is finished, and the data have changed since; choose another "
                "--run_dir"
            )
        reporter.line(f"{folder.path} is finished, on the data as they are: nothing to do")
        return read_result(folder)
    if has_changed:
        reporter.line(f"{folder.path}: the data have changed since it began: from the beginning")
        with folder.locked():
            folder.clear()
        return run(config_file_list=files, config_dict=options, run_dir=folder.path, settings=args)
    reporter.line(f"{folder.path}: unfinished, is resumed")
    moved: dict[str, Any] = {
        key: options[key] for key in ("data_path", "plugins") if key in options
    }
    args = replace(args, run_dir=None, resume=folder.path)
    return run(config_dict=moved, settings=args)


def _require_same_update(
    folder: RunFolder, requested: dict[str, Any], user_options: dict[str, Any]
) -> PosConfig:
    """Return the configuration of the update in a folder; a UsageError if it is not the same.

    ``requested`` has all options of the requested update, ``user_options`` only the caller's.
    """
    earlier = folder.read_config() if folder.config.is_file() else {}
    if earlier.get("update_from") != requested["update_from"]:
        folder.require_unused()
    for key in user_options.keys() & requested.keys() - {"data_path", "plugins"}:
        if requested[key] != earlier.get(key):
            raise UsageError(
                f"{key}: {folder.path} was begun with {shown(earlier.get(key))}, now it is "
                f"{shown(requested[key])}; {folder.how_to_finish}, or choose another --run_dir"
            )
    options = {"data_path": user_options["data_path"]} if "data_path" in user_options else {}
    return load_config(folder, options)


def _has_other_data(folder: RunFolder, config: PosConfig) -> bool:
    """Return whether a run has no checkpoint yet, or the data have changed since its last one."""
    if not folder.checkpoint.is_file():
        return True
    dataset = read_dataset(config, folder)
    dataset.build()
    state = checkpoint.load(folder.checkpoint, checkpoint.IDENTITY)
    return bool(describe_changes(state, dataset.identity))
