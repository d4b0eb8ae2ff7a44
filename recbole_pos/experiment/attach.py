"""Schemes added to a trained model, which are then trained alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import AttachArguments, RunArguments, fill_settings
from recbole_pos.config.plugins import allow, import_plugins
from recbole_pos.config.presets import list_positions
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import run, warn_of_unfinished
from recbole_pos.position.schemes import SCHEMES, scheme_names

OWN_KEYS = ("position", "init_from", "train_only")  # options that attach sets


def attach(
    trained: str | Path,
    schemes: str | Iterable[str],
    config_dict: dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    *,
    settings: AttachArguments | None = None,
    **given: Any,
) -> Any:
    """Add position schemes to a trained model and fine-tune only their parameters.

    Examples:
        >>> short = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
        >>> first = recbole_pos.run("PosSASRec", "ml-100k", config_dict=short, run_dir="first")
        >>> one = {"epochs": 1}
        >>> tuned = recbole_pos.attach("first", "kernel", config_dict=one, run_dir="tuned")
        >>> tuned.parameters < first.parameters  # only the kernel's are trained
        True

    A kernel starts as the identity and a bias at zero, so training starts from the trained model
    itself; schemes that have no such start (``learned``, ``rope``) change it at once.

    Args:
        trained: run folder of a plugin model.
        schemes: names to add, such as ``kernel``.
        config_dict: options that differ from the trained run's (``learning_rate``, ...).
        run_dir: folder of the new run.
        settings: the other arguments together.
        given: the other arguments by name, as of :func:`recbole_pos.run`: ``verbose``,
            ``as_json``, ``log``: what is printed.

    Returns:
        The :class:`~recbole_pos.experiment.result.Result` of the new run.

    Raises:
        UsageError: if the folder holds no run, or the schemes cannot be added to its model.
    """
    source = RunFolder(trained).require()
    warn_of_unfinished(source)
    config = source.read_config()
    for key in OWN_KEYS:
        if key in (config_dict or {}):
            raise UsageError(f"{key}: attach decides it; use run with init_from instead")
    if "position" not in config:
        raise UsageError(f"{source.path}: {config.get('model')} takes no position schemes")
    used = list_positions(config["position"], None)
    plugins = (config_dict or {}).get("plugins")
    allow(plugins)
    import_plugins(plugins, "configuration")
    import_plugins(
        config.get("plugins"), str(source.config), lambda: all(name in SCHEMES for name in used)
    )
    added = scheme_names(schemes if isinstance(schemes, str) else list(schemes), "schemes")
    kept = [name for name in scheme_names(config["position"]) if name != "nope"]
    options = {
        **(config_dict or {}),
        "position": [*kept, *added],
        "init_from": str(source.path.resolve()),
        "train_only": added,
    }
    args = fill_settings(settings or AttachArguments(), given)
    return run(
        None, None, [str(source.config)], options, run_dir, settings=RunArguments(**vars(args))
    )
