"""Checkpoints that RecBole's own trainer wrote, read without running what is in them.

RecBole pickles its ``Config`` into them, and with that the class of the model; some models put
layers or matrices beside their weights. torch 2.6 and later refuse such files, and unpickling them
runs whatever code they hold. Here an object of a file becomes a :class:`_Record`, of which nothing
is called; the values of classes that RecBole writes are then made of records, and a file with
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
from recbole_pos.model.models import is_served
from recbole_pos.plain import from_plain
from recbole_pos.values import shown

_CONFIG = "recbole.config.configurator.Config"
_SCALARS = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
# Objects beside the weights that a model makes again when it is built: layers, whose weights are
# among the model's, and matrices that ItemKNN, EASE and SLIMElastic compute from the data.
_REBUILT = ("recbole.model.", "torch.nn.modules.", "scipy.sparse.", "numpy.")
_ENUMS = {
    f"{kind.__module__}.{name}": kind
    for name, kind in vars(enum_type).items()
    if isinstance(kind, EnumMeta)
}
_TYPES: dict[str, Any] = {  # of the values that RecBole's trainer resumes from
    "epoch": int,
    "cur_step": int,
    "best_valid_score": (int, float),
    "state_dict": dict,
    "optimizer": dict,
}


class _Record:
    """The description of an object in a file, in place of the object.

    Attributes:
        name: class of the object, ``module.Class``.
        parts: arguments and state of the object, which may hold further records.
    """

    name = ""
    parts: tuple = ((), None)

    def __new__(cls, *args: Any, **options: Any) -> _Record:
        record = super().__new__(cls)
        record.parts = (args, None)
        return record

    def __setstate__(self, state: Any) -> None:
        self.parts = (self.parts[0], state)


def _make_stand_in(name: str) -> Any:
    """Return what stands for a class, a new object each time, as the file can change it."""
    if name == "torch._utils._rebuild_parameter":
        return lambda tensor, *_: tensor
    if name == "torch.device":
        return lambda *args: torch.device(*args)
    if name in _ENUMS:
        return lambda value: _ENUMS[name](value)
    if name in _SCALARS:
        return lambda dtype, raw: np.frombuffer(raw, str(dtype.parts[0][0]))[0].item()
    return type("_Record", (_Record,), {"name": name})


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of RecBole's trainer, or the best weights in one of this package.

    Returns:
        The mapping that RecBole's trainer saves, on the CPU, with ``config`` as a Config. Objects
        that the model makes again when it is built are not in ``other_parameter``.

    Raises:
        CheckpointError: if the file is missing or damaged, holds an object that RecBole's trainer
            does not write (nothing of it is run), or RecBole would load other data for its model.
    """
    state = archive.read(path, _make_stand_in)
    try:
        if isinstance(state, dict) and state.get("format") == checkpoint.FORMAT:
            state = _read_plugin_state(path)
        else:
            state = _read_recbole_state(state)
    except Refused as error:
        raise CheckpointError(f"{path} {error}") from error
    # RecBole would unpickle the cached data that the file names: instead, name a path below a
    # file, where nothing can exist
    for key in ("dataset_save_path", "dataloaders_save_path"):
        state["config"][key] = str(Path(path) / "nothing")
    return state


def _read_plugin_state(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint of this package in RecBole's form, with the best weights."""
    state = checkpoint.load(path, ("config", "weights", "best_weights"))
    config = make_config(state, path)
    if not is_served(config["model"]):
        raise CheckpointError(
            f"{path} is of {config['model']}, trained by recbole-pos on its own split, which "
            "RecBole does not make; load it with recbole_pos.load"
        )
    weights = state["best_weights"] or state["weights"]
    state["other_parameter"] = from_plain(weights["other"])
    return {**state, "config": config, "state_dict": weights["state_dict"]}


def _read_recbole_state(state: Any) -> dict[str, Any]:
    """Return the values of a checkpoint of RecBole's trainer, made from its records."""
    if not isinstance(state, dict):
        raise _make_refusal("no config of RecBole")
    record = state.get("config")
    parameters = state.get("other_parameter") or {}
    if getattr(record, "name", None) != _CONFIG or not isinstance(parameters, dict):
        raise _make_refusal("no config of RecBole")
    parameters = {
        name: value
        for name, value in parameters.items()
        if not (isinstance(value, _Record) and value.name.startswith(_REBUILT))
    }
    values = {**state, "config": None, "other_parameter": parameters}
    _require_values(values)
    if wrong := [key for key, type_ in _TYPES.items() if not isinstance(values.get(key), type_)]:
        raise _make_refusal(f"no {', '.join(wrong)} as expected")
    return {**values, "config": _restore_config(record)}


def _restore_config(record: Any) -> Config:
    """Make RecBole's Config from its record; the model's class is looked up by name."""
    config = Config.__new__(Config)
    state = record.parts[1]
    if not isinstance(state, dict) or not isinstance(state.get("final_config_dict"), dict):
        raise _make_refusal("an empty config")
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


def _require_values(value: Any) -> None:
    """Refuse a tree of values that has a record or a class in it."""
    if isinstance(value, (_Record, type)):
        raise _make_refusal(getattr(value, "name", value))
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            _require_values(inner)


def _make_refusal(found: Any) -> Refused:
    """Return the error about a file with ``found``, which RecBole's trainer does not write."""
    return Refused(
        f"was refused, and nothing in it was run: it has {found}. Expected what RecBole's trainer "
        "writes: configuration, weights and optimiser"
    )
