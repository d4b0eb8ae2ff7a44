"""Checkpoints that RecBole's own trainer wrote, read without running what is in them.

RecBole pickles its ``Config`` into them, and with that the class of the model; some models put
layers or sparse matrices beside their weights. torch 2.6 and later refuse such files, and reading
them as pickles runs whatever code they hold. Here every object of a file but its tensors becomes a
:class:`_Record`, the name of a class with its arguments and state, of which nothing is called. From
records of classes that RecBole writes, values are then made; a file with any other is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from enum import EnumMeta
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
import yaml
from recbole.config import Config
from recbole.utils import enum_type, get_model

from recbole_pos.errors import CheckpointError
from recbole_pos.experiment import archive, checkpoint
from recbole_pos.experiment.archive import Refused
from recbole_pos.experiment.checkpoint import is_any, is_count, is_tensor
from recbole_pos.experiment.state import config_in
from recbole_pos.model.models import served
from recbole_pos.plain import from_plain
from recbole_pos.values import shown


class _Record:
    """An object of a file: the name of its class, the arguments it is made with, and its state."""

    name = ""
    args: tuple = ()
    state: Any = None

    def __new__(cls, *args: Any, **options: Any) -> _Record:
        if cls.name not in _VALUES and not cls.name.startswith(_PASSED_OVER):
            raise Refused(_describe_refusal(f"to call {cls.name}"))
        record = super().__new__(cls)
        record.args = args
        return record

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def parts(self) -> tuple:
        """The values in which there may be further records."""
        return self.args, self.state


def _describe_refusal(what: str) -> str:
    """Return the message about a file that has ``what`` RecBole's trainer does not write."""
    return (
        f"was refused, and nothing in it was run: it has {what}. Expected what RecBole's trainer "
        "writes: configuration, weights and optimiser"
    )


def _make_stand_in(name: str) -> Any:
    """Return a stand-in for a class of a file, made anew so that a file cannot change a shared one.

    Args:
        name: ``module.Class``.
    """
    if name == "torch._utils._rebuild_parameter":
        return lambda tensor, *_: tensor
    if name == "torch.device":
        return lambda *args: torch.device(*args)
    return type("_Record", (_Record,), {"name": name.replace("numpy.core.", "numpy._core.")})


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of RecBole's trainer, or the best weights in one of this package.

    Args:
        path: the file.

    Returns:
        The mapping that RecBole's trainer saves, on the CPU, its ``config`` a Config again. Layers
        among ``other_parameter`` are left out, as their weights are in ``state_dict`` too.

    Raises:
        CheckpointError: if the file is missing or damaged, holds an object that RecBole's trainer
            does not write (nothing of it is run), or RecBole has other data for its model.
    """
    state = archive.read(path, _make_stand_in)
    if isinstance(state, dict) and state.get("format") == checkpoint.FORMAT:
        state = _read_ours(path)
    else:
        try:
            state = _read_recbole_state(state)
        except Refused as error:
            raise CheckpointError(f"{path} {error}") from error
        except CheckpointError:
            raise
        except Exception as error:
            raise archive.describe_damage(path, error) from error
    # RecBole would unpickle whatever data the file says are cached: name a path below a file,
    # where nothing can exist
    for key in ("dataset_save_path", "dataloaders_save_path"):
        state["config"][key] = str(Path(path) / "nothing")
    return state


def _read_ours(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint of this package in the form of RecBole's, with the best weights.

    Raises:
        CheckpointError: if the model was trained on a split that RecBole does not make.
    """
    state = checkpoint.load(path, ("config", "weights", "best_weights"))
    config = config_in(state, path)
    if not served(config["model"]):
        raise CheckpointError(
            f"{path} is of {config['model']}, trained by recbole-pos on its own split, which "
            "RecBole does not make; load it with recbole_pos.load"
        )
    weights = state["best_weights"] or state["weights"]
    others = from_plain(weights["other"])
    return {
        **{key: value for key, value in state.items() if key not in ("weights", "best_weights")},
        **{"config": config, "state_dict": weights["state_dict"], "other_parameter": others},
    }


def _read_recbole_state(state: Any) -> dict[str, Any]:
    """Make the values of a checkpoint of RecBole's trainer from its records, and check them.

    Raises:
        Refused: if a part is missing, of another form, or of a class that RecBole does not write.
    """
    if not isinstance(state, dict) or not {"config", "state_dict"} <= state.keys():
        raise Refused(_describe_refusal("no config with a state_dict"))
    others = state.get("other_parameter") or {}
    kept = {
        name: value
        for name, value in others.items()
        if not (isinstance(value, _Record) and value.name.startswith(_LAYERS))
    }
    config = _make_config(state["config"])
    values = _make_value({**state, "config": None, "other_parameter": kept})
    if missing := _SCHEMA.keys() - values.keys():
        raise Refused(_describe_refusal(f"no {', '.join(sorted(missing))}"))
    for key, schema in _SCHEMA.items():
        if wrong := checkpoint.find_difference(values[key], schema, key):
            raise Refused(_describe_refusal(wrong))
    return {**values, "config": config}


def _make_config(record: Any) -> Config:
    """Make RecBole's Config of its record; the model's class is looked up by name.

    Raises:
        Refused: if the record is of another class, or the model is unknown.
    """
    if not isinstance(record, _Record) or record.name != "recbole.config.configurator.Config":
        raise Refused(_describe_refusal("another config than RecBole's"))
    classes = ("model_class", "yaml_loader")
    state = _make_value({name: v for name, v in record.state.items() if name not in classes})
    config = Config.__new__(Config)
    vars(config).update({name: v for name, v in state.items() if not hasattr(Config, name)})
    try:
        config.model_class = get_model(config["model"])
    except (ValueError, AttributeError, ImportError) as error:
        raise Refused(
            f"is of the model {shown(config['model'])}, which is unknown; one of your own must be "
            "registered first (recbole_pos.register_model)"
        ) from error
    config.yaml_loader = yaml.FullLoader
    if not torch.cuda.is_available():
        config["device"] = torch.device("cpu")
    return config


def _make_value(part: Any) -> Any:
    """Make the value of records, also within lists and mappings; a mapping is changed in place.

    Raises:
        Refused: for a record of a class that is not among ``_VALUES``.
    """
    if isinstance(part, _Record) and part.name in _VALUES:
        return _VALUES[part.name](part)
    if isinstance(part, (_Record, type)):
        raise Refused(_describe_refusal(f"{getattr(part, 'name', part)}"))
    if isinstance(part, dict):
        for key, value in part.items():
            part[key] = _make_value(value)
        return part
    return type(part)(map(_make_value, part)) if isinstance(part, (list, tuple)) else part


def _make_member(enum: EnumMeta, record: _Record) -> Any:
    return enum(*record.args)


def _make_dtype(record: _Record) -> np.dtype:
    return np.dtype(str(record.args[0])).newbyteorder(record.state[1])


def _make_scalar(record: _Record) -> Any:
    dtype, raw = record.args
    return np.frombuffer(raw, _make_value(dtype))[0].item()


def _make_array(record: _Record) -> np.ndarray:
    _, shape, dtype, is_by_columns, raw = record.state
    if isinstance(raw, list):
        return np.fromiter(_make_value(raw), object, len(raw)).reshape(shape)
    numbers = np.frombuffer(raw, _make_value(dtype))
    array = numbers.reshape(shape, order="F" if is_by_columns else "C")
    return array.copy(order="K")


def _make_sparse(record: _Record) -> Any:
    """Make a sparse matrix, checking that its indices are within it: scipy's C code does not."""
    state = _make_value(record.state)
    kind = getattr(scipy.sparse, record.name.rpartition(".")[2])
    if kind is scipy.sparse.lil_matrix:
        rows, values = (list(itertools.chain(*state[part])) for part in ("rows", "data"))
        ends = np.cumsum([0, *map(len, state["rows"])])
        parts = (np.array(values, state["dtype"]), np.array(rows, dtype=np.int64), ends)
        matrix = scipy.sparse.csr_matrix(parts, shape=state["_shape"])
    else:
        parts = tuple(state[part] for part in ("data", "indices", "indptr"))
        matrix = kind(parts, shape=state["_shape"])
    matrix.check_format(full_check=True)
    return matrix.asformat(kind.__name__.partition("_")[0])


def _is_epoch(found: Any) -> bool:
    """a whole number of at least -1"""
    return found == -1 or is_count(found)


def _is_score(found: Any) -> bool:
    """a number"""
    return isinstance(found, (int, float)) and found == found  # NaN differs from itself


_SCHEMA: dict[str, Any] = {  # the parts that RecBole's trainer resumes from
    "epoch": _is_epoch,
    "cur_step": is_count,
    "best_valid_score": _is_score,
    "state_dict": {str: is_tensor},
    "optimizer": {"state": {int: {str: is_any}}, "param_groups": [{str: is_any}]},
}
_LAYERS = ("recbole.model.", "torch.nn.modules.")
# Classes in layers, which are left out: their records are allowed, and no value is made of them.
_PASSED_OVER = (*_LAYERS, "recbole.", "logging.getLogger", "torch.Size")
_ENUMS = [kind for kind in vars(enum_type).values() if isinstance(kind, EnumMeta)]
_VALUES: dict[str, Callable[[_Record], Any]] = {
    **{f"{enum.__module__}.{enum.__name__}": functools.partial(_make_member, enum)
       for enum in _ENUMS},
    "numpy.dtype": _make_dtype,
    "numpy._core.multiarray.scalar": _make_scalar,
    "numpy._core.multiarray._reconstruct": _make_array,
    **{f"scipy.sparse.{_}{kind}.{kind}_matrix": _make_sparse
       for _ in ("", "_") for kind in ("csr", "csc", "lil")},
}  # fmt: skip
