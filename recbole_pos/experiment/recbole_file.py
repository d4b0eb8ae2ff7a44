"""Checkpoints that RecBole's own trainer wrote, read without running what is in them.

RecBole pickles its ``Config`` into them, and with that the class of the model; some models put
layers or matrices beside their weights. torch 2.6 and later refuse such files, and reading them as
pickles runs whatever code they hold. Here an object of a file becomes a :class:`_Record`, of which
nothing is called. From records of classes that RecBole writes, values are then made; a file with
any other is refused.
"""

from __future__ import annotations

from enum import EnumMeta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from recbole.config import Config
from recbole.utils import enum_type, get_model

from recbole_pos.errors import CheckpointError
from recbole_pos.experiment import archive, checkpoint
from recbole_pos.experiment.archive import Refused
from recbole_pos.experiment.state import make_config
from recbole_pos.model.models import served
from recbole_pos.plain import from_plain
from recbole_pos.values import shown

_CONFIG = "recbole.config.configurator.Config"
_SCALAR = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
# What models keep beside their weights and have again once they are built: layers, whose weights
# are among those of the model, and matrices that ItemKNN, EASE and SLIMElastic make of the data.
_REBUILT = ("recbole.model.", "torch.nn.modules.", "scipy.sparse.", "numpy.")
_ENUMS = {
    f"{value.__module__}.{name}": value
    for name, value in vars(enum_type).items()
    if isinstance(value, EnumMeta)
}
# What RecBole's trainer resumes from.
_PART_TYPES: dict[str, Any] = {
    "epoch": int,
    "cur_step": int,
    "best_valid_score": (int, float),
    "state_dict": dict,
    "optimizer": dict,
}


class _Record:
    """An object of a file, which is not made."""

    name = ""  # of its class, with the module
    parts: tuple = ((), None)  # its arguments and its state, in which there may be further records

    def __new__(cls, *args: Any, **options: Any) -> _Record:
        record = super().__new__(cls)
        record.parts = (args, None)
        return record

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.parts = (self.parts[0], state)


def _make_stand_in(name: str) -> Any:
    """Return what replaces a class of a file: a new one, so that no file changes a shared one."""
    if name == "torch._utils._rebuild_parameter":
        return lambda tensor, *_: tensor
    if name == "torch.device":
        return lambda *args: torch.device(*args)
    if name in _ENUMS:
        return lambda value: _ENUMS[name](value)
    if name in _SCALAR:
        return lambda dtype, raw: np.frombuffer(raw, str(dtype.parts[0][0]))[0].item()
    return type("_Record", (_Record,), {"name": name})


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of RecBole's trainer, or the best weights in one of this package.

    Args:
        path: the file.

    Returns:
        The mapping that RecBole's trainer saves, on the CPU, its ``config`` a Config again. What a
        model has again once it is built is not in its ``other_parameter``.

    Raises:
        CheckpointError: if the file is missing or damaged, holds an object that RecBole's trainer
            does not write (nothing of it is run), or RecBole has other data for its model.
    """
    state = archive.read(path, _make_stand_in)
    try:
        if isinstance(state, dict) and state.get("format") == checkpoint.FORMAT:
            state = _read_ours(path)
        else:
            state = _restore_state(state)
    except Refused as error:
        raise CheckpointError(f"{path} {error}") from error
    # RecBole would unpickle whatever data the file says are cached: name a path below a file,
    # where nothing can exist
    for key in ("dataset_save_path", "dataloaders_save_path"):
        state["config"][key] = str(Path(path) / "nothing")
    return state


def _read_ours(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint of this package in the form of RecBole's, with the best weights."""
    state = checkpoint.load(path, ("config", "weights", "best_weights"))
    config = make_config(state, path)
    if not served(config["model"]):
        raise CheckpointError(
            f"{path} is of {config['model']}, trained by recbole-pos on its own split, which "
            "RecBole does not make; load it with recbole_pos.load"
        )
    weights = state["best_weights"] or state["weights"]
    return {
        **state,
        "config": config,
        "state_dict": weights["state_dict"],
        "other_parameter": from_plain(weights["other"]),
    }


def _restore_state(state: Any) -> dict[str, Any]:
    """Make the values of a checkpoint of RecBole's trainer from its records."""
    if not isinstance(state, dict) or getattr(state.get("config"), "name", None) != _CONFIG:
        raise _refuse("no config of RecBole")
    others = state.get("other_parameter") or {}
    if not isinstance(others, dict):
        raise _refuse("no config of RecBole")
    kept = {
        name: value
        for name, value in others.items()
        if not (isinstance(value, _Record) and value.name.startswith(_REBUILT))
    }
    values = {**state, "config": None, "other_parameter": kept}
    _require_values(values)
    if wrong := [key for key, kind in _PART_TYPES.items() if not isinstance(values.get(key), kind)]:
        raise _refuse(f"no {', '.join(wrong)} as expected")
    return {**values, "config": _restore_config(state["config"])}


def _restore_config(record: Any) -> Config:
    """Make RecBole's Config of its record; the model's class is looked up by name."""
    config, state = Config.__new__(Config), record.parts[1]
    if not isinstance(state, dict) or not isinstance(state.get("final_config_dict"), dict):
        raise _refuse("an empty config")
    values = {
        name: value
        for name, value in state.items()
        if name not in ("model_class", "yaml_loader") and not hasattr(Config, str(name))
    }
    _require_values(values)
    vars(config).update(values)
    try:
        config.model_class = get_model(config["model"])
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise Refused(
            f"is of the model {shown(config['model'])}, which is unknown; one of your own must be "
            "registered first (recbole_pos.register_model)"
        ) from error
    config.yaml_loader = yaml.FullLoader
    if not torch.cuda.is_available():
        config["device"] = torch.device("cpu")
    return config


def _require_values(tree: Any) -> None:
    """Refuse a tree of values in which a record is left."""
    if isinstance(tree, (_Record, type)):
        raise _refuse(getattr(tree, "name", tree))
    if isinstance(tree, (dict, list, tuple)):
        for child in tree.values() if isinstance(tree, dict) else tree:
            _require_values(child)


def _refuse(content: Any) -> Refused:
    """Return the error about a file with content that RecBole's trainer does not write."""
    return Refused(
        f"was refused, and nothing in it was run: it has {content}. Expected what RecBole's "
        "trainer writes: configuration, weights and optimiser"
    )
