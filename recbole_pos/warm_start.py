"""Starting from a trained model: weights of another run, and training of chosen schemes only.

The kernel attention paper attaches its kernel to the best pretrained models and fine-tunes nothing
but the kernel's factors (Nabiev and Frolov, section 6.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recbole.utils.argument_list import dataset_arguments
from torch import nn

from recbole_pos import checkpoint
from recbole_pos.errors import UsageError
from recbole_pos.properties import read_yaml, scheme_names
from recbole_pos.registry import SCHEMES
from recbole_pos.report import RunFolder

# What must be the same, or item ids differ, or weights have seen events that are held out here.
SAME_DATA = ("dataset", "eval_args", *dataset_arguments)


def start_from(model: nn.Module, config: Any, weights: bool = True) -> None:
    """Do what the options ``init_from`` and ``train_only`` of a configuration say, if anything.

    Args:
        model: a fresh model.
        config: its configuration.
        weights: whether to load those of ``init_from``.

    Raises:
        UsageError: if the run is of other data, its weights do not fit, or a scheme to train is not
            there or has nothing to train.
    """
    if weights and config["init_from"]:
        _load_weights(model, RunFolder(config["init_from"]), config)
    if config["train_only"]:
        train_only(model, scheme_names(config["train_only"]))


def train_only(model: nn.Module, names: Iterable[str]) -> None:
    """Freeze every parameter but those of the named schemes."""
    chosen = set()
    for name in names:
        found = {p for m in model.modules() if type(m) is SCHEMES[name] for p in m.parameters()}
        if not found:
            raise UsageError(f"train_only: the model has no parameters of a scheme {name!r}")
        chosen |= found
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in chosen)


def _load_weights(model: nn.Module, source: RunFolder, config: Any) -> None:
    if not source.checkpoint.is_file() or not source.config.is_file():
        raise UsageError(
            f"init_from: {source.path} is not a run folder: no config.yaml with checkpoint.pt"
        )
    theirs, ours = read_yaml(source.config), config.plain
    different = [key for key in SAME_DATA if theirs.get(key) != ours.get(key)]
    if different:
        key = different[0]
        raise UsageError(
            f"init_from: {source.path} was trained with {key}: {theirs.get(key)!r}, this run has "
            f"{ours.get(key)!r}; weights fit only the same data under the same split"
        )
    state = checkpoint.load(source.checkpoint, ("weights", "best_weights"))
    weights = (state["best_weights"] or state["weights"])["state_dict"]
    present = {*scheme_names(theirs.get("position"))}
    added = {SCHEMES[name] for name in scheme_names(config["position"]) if name not in present}
    new = tuple(f"{name}." for name, module in model.named_modules() if type(module) in added)
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise UsageError(f"init_from: weights of {source.path} do not fit: {error}") from error
    wrong = [*unexpected, *(key for key in missing if not key.startswith(new))]
    if wrong:
        raise UsageError(
            f"init_from: {source.path} is of another architecture; the first of {len(wrong)} "
            f"weights without a counterpart is {wrong[0]}"
        )


def attach(
    trained: str | Path,
    schemes: str | Iterable[str],
    config_dict: dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    verbose: bool = True,
) -> Any:
    """Add position schemes to a trained model and fine-tune their parameters alone.

    A kernel starts as the identity, so training starts from the trained model itself.

    Args:
        trained: run folder of a plugin model.
        schemes: names to add, such as ``kernel``.
        config_dict: options that differ from the trained run's (``learning_rate``, ...).
        run_dir: where to write.
        verbose: print progress and the result table.

    Returns:
        The :class:`~recbole_pos.quick_start.Result` of the new run.

    Raises:
        UsageError: if the folder holds no run, or the schemes cannot be added to its model.
    """
    from recbole_pos.quick_start import run

    source = RunFolder(trained)
    config = read_yaml(source.config)
    if "position" not in config:
        raise UsageError(f"{source.path}: {config.get('model')} takes no position schemes")
    added = scheme_names(schemes)
    options = {
        "position": [*scheme_names(config["position"]), *added],
        "init_from": str(source.path.resolve()),
        "train_only": added,
        **(config_dict or {}),
    }
    return run(None, None, [str(source.config)], options, run_dir, verbose=verbose)
