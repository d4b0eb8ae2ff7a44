"""Some more epochs of a trained model on data that have grown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import AttachArguments, RunArguments, arguments
from recbole_pos.config.plugins import allow
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.identity import describe_changes
from recbole_pos.errors import UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.result import read_result, unfinished
from recbole_pos.experiment.run import load_config, run
from recbole_pos.experiment.train import load_dataset
from recbole_pos.experiment.warm_start import updated_run
from recbole_pos.reporter import Reporter
from recbole_pos.values import shown

EPOCHS = 5  # at most, by default


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

    The same call can be repeated with the same ``run_dir``, whatever ended it: an unfinished run is
    resumed, or begins again if the data have changed since; a finished one is left as it is.

    Examples:
        >>> first = recbole_pos.run("FPARec", "ml-100k", config_dict={"epochs": 1}, run_dir="old")
        >>> later = recbole_pos.update("old", {"epochs": 2}, run_dir="new")
        >>> later.epochs
        2

    Args:
        trained: run folder of a plugin model.
        config_dict: options of training that differ from those of the run; at most
            ``epochs: 5`` are trained by default, the best by validation is kept.
        run_dir: where to write.
        new_items: a token or token_seq field of items: a new item starts with the mean vector of
            those that share it. With a fresh vector if None.
        settings: the other arguments together.
        given: or by name, as of :func:`recbole_pos.run`: ``verbose``, ``as_json``, ``log``: what is
            printed.

    Returns:
        The :class:`~recbole_pos.experiment.result.Result` of the new run.

    Raises:
        UsageError: if the folder holds no run that can be updated, or ``run_dir`` another run.
    """
    source = updated_run(trained)
    args = arguments(settings or AttachArguments(), given)
    options = {
        "epochs": EPOCHS,
        **(config_dict or {}),
        "init_from": None,
        "train_only": None,
        "update_from": str(source.path.resolve()),
        "new_items": new_items,
    }
    allow(options.get("plugins"))
    where = run_dir or args.run_dir
    if where is not None and (begun := RunFolder(where)).holds_run:
        reporter = Reporter(args.verbose, as_json=args.as_json, log=args.log)
        config = _require_same_update(begun, source, options)
        if not begun.checkpoint.is_file() or _has_other_data(begun, config):
            if begun.result.is_file() and not unfinished(begun):
                raise UsageError(
                    f"{begun.path} is finished, and the data have changed since; choose another "
                    "--run_dir"
                )
            reporter.line(f"{begun.path}: the data have changed since it began: from the beginning")
            with begun.held():
                begun.clear()
        elif unfinished(begun):
            reporter.line(f"{begun.path}: unfinished, is resumed")
            kept = ("data_path", "plugins")
            moved: dict[str, Any] = {key: options[key] for key in kept if key in options}
            resumed = RunArguments(**{**vars(args), "run_dir": None, "resume": begun.path})
            return run(None, None, None, moved, settings=resumed)
        else:
            reporter.line(f"{begun.path} is finished, on the data as they are: nothing to do")
            return read_result(begun)
    return run(
        None, None, [str(source.config)], options, run_dir, settings=RunArguments(**vars(args))
    )


def _require_same_update(begun: RunFolder, source: RunFolder, options: dict[str, Any]) -> PosConfig:
    """The configuration of an update that was begun, which must be the one that is requested.

    Raises:
        UsageError: if it is another run, or has other options.
    """
    asked = PosConfig(None, None, [str(source.config)], options).plain
    kept = begun.read_config() if begun.config.is_file() else {}
    if kept.get("update_from") != asked["update_from"]:
        begun.require_unused()
    for key in options:
        if key in asked and key not in ("data_path", "plugins") and asked[key] != kept.get(key):
            raise UsageError(
                f"{key}: {begun.path} was begun with {shown(kept.get(key))}, now it is "
                f"{shown(asked[key])}; {begun.how_to_finish}, or choose another --run_dir"
            )
    return load_config(begun, {key: options[key] for key in ("data_path",) if key in options})


def _has_other_data(begun: RunFolder, config: PosConfig) -> bool:
    dataset = load_dataset(begun, config)
    dataset.build()
    return bool(describe_changes(checkpoint.load(begun.checkpoint, ("data",)), dataset.identity))
