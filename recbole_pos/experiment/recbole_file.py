"""Checkpoints that RecBole's own trainer wrote, read without running what is in them.

RecBole pickles its ``Config`` into them, and with that the class of the model; some models put
layers or sparse matrices beside their weights. torch 2.6 and later refuse such files, and who reads
them freely runs whatever code they hold. Here every object of a file but its tensors becomes a
:class:`_Record`: a name and what belongs to it, of which nothing is called. Out of the records of
what RecBole writes, values are then made; a file with any other object is refused.
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
    """An object of a file: the name of its class, what made it and what was put into it."""

    name = ""
    args: tuple = ()
    state: Any = None

    def __new__(cls, *args: Any, **options: Any) -> _Record:
        if cls.name not in _VALUES and not cls.name.startswith(_PASSED_OVER):
            raise Refused(_wants(f"to call {cls.name}"))
        record = super().__new__(cls)
        record.args = args
        return record

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def parts(self) -> tuple:
        """What may hold more records."""
        return self.args, self.state


def _wants(what: str) -> str:
    return (
        f"was refused, and nothing in it was run: it has {what}. Expected what RecBole's trainer "
        "writes: configuration, weights and optimiser"
    )


def _stand_in(name: str) -> Any:
    """Return what takes the place of a class of the file; new each time, so that nothing is
    changed."""
    if name == "torch._utils._rebuild_parameter":
        return lambda tensor, *_: tensor
    if name == "torch.device":
        return lambda *args: torch.device(*args)
    return type("_Record", (_Record,), {"name": name.replace("numpy.core.", "numpy._core.")})


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint that RecBole has for a model: of its trainer, or the best of this package.

    Args:
        path: the file.

    Returns:
        What RecBole's trainer has saved, on the CPU, its ``config`` a Config again. Layers among
        ``other_parameter`` are left out: their weights are in ``state_dict`` too.

    Raises:
        CheckpointError: if the file is missing or damaged, holds an object that RecBole's trainer
            does not write (nothing of it is run), or RecBole has other data for its model.
    """
    state = archive.read(path, _stand_in)
    if isinstance(state, dict) and state.get("format") == checkpoint.FORMAT:
        state = _ours(path)
    else:
        try:
            state = _read_recbole_state(state)
        except Refused as error:
            raise CheckpointError(f"{path} {error}") from error
        except CheckpointError:
            raise
        except Exception as error:
            raise archive.damaged(path, error) from error
    # RecBole may have cached data where the file says, and would unpickle them freely
    for key in ("dataset_save_path", "dataloaders_save_path"):
        state["config"][key] = str(Path(path) / "nothing")  # below a file, where nothing can be
    return state


def _ours(path: str | Path) -> dict[str, Any]:
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
    if not isinstance(state, dict) or not {"config", "state_dict"} <= state.keys():
        raise Refused(_wants("no config with a state_dict"))
    others = state.get("other_parameter") or {}
    kept = {
        name: value
        for name, value in others.items()
        if not (isinstance(value, _Record) and value.name.startswith(_LAYERS))
    }
    config = _config(state["config"])
    values = _value({**state, "config": None, "other_parameter": kept})
    if missing := _SCHEMA.keys() - values.keys():
        raise Refused(_wants(f"no {', '.join(sorted(missing))}"))
    for key, schema in _SCHEMA.items():
        if wrong := checkpoint.difference(values[key], schema, key):
            raise Refused(_wants(wrong))
    return {**values, "config": config}


def _config(record: Any) -> Config:
    """RecBole's Config; its model is looked up by name, as the file alone must not name code."""
    if not isinstance(record, _Record) or record.name != "recbole.config.configurator.Config":
        raise Refused(_wants("another config than RecBole's"))
    classes = ("model_class", "yaml_loader")
    state = _value({name: v for name, v in record.state.items() if name not in classes})
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


def _value(found: Any) -> Any:
    """Return what records stand for, recursively; mappings keep what they are."""
    if isinstance(found, _Record) and found.name in _VALUES:
        return _VALUES[found.name](found)
    if isinstance(found, (_Record, type)):
        raise Refused(_wants(f"{getattr(found, 'name', found)}"))
    if isinstance(found, dict):
        for key, value in found.items():
            found[key] = _value(value)
        return found
    return type(found)(map(_value, found)) if isinstance(found, (list, tuple)) else found


def _member(kind: EnumMeta, record: _Record) -> Any:
    return kind(*record.args)


def _dtype(record: _Record) -> np.dtype:
    return np.dtype(str(record.args[0])).newbyteorder(record.state[1])


def _scalar(record: _Record) -> Any:
    kind, raw = record.args
    return np.frombuffer(raw, _value(kind))[0].item()


def _array(record: _Record) -> np.ndarray:
    _, shape, kind, by_columns, raw = record.state
    if isinstance(raw, list):
        return np.fromiter(_value(raw), object, len(raw)).reshape(shape)
    array = np.frombuffer(raw, _value(kind)).reshape(shape, order="F" if by_columns else "C")
    return array.copy(order="K")


def _sparse(record: _Record) -> Any:
    """Return a sparse matrix whose indices are within it: its readers in C do not look."""
    state = _value(record.state)
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
    return isinstance(found, (int, float)) and found == found


_SCHEMA: dict[str, Any] = {  # what RecBole's trainer takes up from a checkpoint
    "epoch": _is_epoch,
    "cur_step": is_count,
    "best_valid_score": _is_score,
    "state_dict": {str: is_tensor},
    "optimizer": {"state": {int: {str: is_any}}, "param_groups": [{str: is_any}]},
}
_LAYERS = ("recbole.model.", "torch.nn.modules.")
# Of these there are records within layers, which are left out, and of which no value is made.
_PASSED_OVER = (*_LAYERS, "recbole.", "logging.getLogger", "torch.Size")
_ENUMS = [kind for kind in vars(enum_type).values() if isinstance(kind, EnumMeta)]
_VALUES: dict[str, Callable[[_Record], Any]] = {
    **{f"{kind.__module__}.{kind.__name__}": functools.partial(_member, kind) for kind in _ENUMS},
    "numpy.dtype": _dtype,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.multiarray._reconstruct": _array,
    **{f"scipy.sparse.{_}{kind}.{kind}_matrix": _sparse
       for _ in ("", "_") for kind in ("csr", "csc", "lil")},
}  # fmt: skip
