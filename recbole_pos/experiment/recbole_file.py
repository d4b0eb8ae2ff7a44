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
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse
import torch
import yaml
from recbole.config import Config
from recbole.utils import enum_type, get_model

from recbole_pos.errors import CheckpointError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.state import config_in
from recbole_pos.experiment.torch_file import damaged, require_archive
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
            raise CheckpointError(f"it wants to call {cls.name}")
        record = super().__new__(cls)
        record.args = args
        return record

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _tensor(storage: Any, offset: int, size: tuple, stride: tuple, *_: Any) -> torch.Tensor:
    # without hooks
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, False, OrderedDict())


# What is made while a file is read; of all else a record.
_MADE: dict[str, Callable] = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch.device": torch.device,
}


class _Unpickler(pickle.Unpickler):
    """Whatever a file finds is new, so that it changes nothing that others use."""

    def find_class(self, module: str, name: str) -> Any:
        found = f"{module.replace('numpy.core.', 'numpy._core.')}.{name}"
        if made := _MADE.get(found):
            return lambda *parts: made(*parts)
        return type("_Record", (_Record,), {"name": found})


def read(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint of RecBole's trainer, as RecBole's functions use it.

    Args:
        path: the file.
        map_location: where its tensors go.

    Returns:
        What RecBole's trainer has saved, its ``config`` a Config again. Layers among
        ``other_parameter`` are left out: their weights are in ``state_dict`` too.

    Raises:
        CheckpointError: if the file is missing or damaged, holds an object that RecBole's trainer
            does not write (nothing of it is run), or is none of its checkpoints.
    """
    with _told_of(path):
        return _uncached(_theirs(_unpickled(path, map_location), _most(path)), path)


def read_any(path: str | Path) -> dict[str, Any]:
    """The same, also of a checkpoint of this package: its best weights, on the CPU.

    Raises:
        CheckpointError: as :func:`read`, or if RecBole has other data for the model.
    """
    with _told_of(path):
        state = _unpickled(path, "cpu")
        if state.get("format") != checkpoint.FORMAT:
            return _uncached(_theirs(state, _most(path)), path)
    state = checkpoint.load(path, ("config", "weights", "best_weights"))
    config = config_in(state, path)
    if not served(config["model"]):
        raise CheckpointError(
            f"{path} is of {config['model']}, trained by recbole-pos on its own split, which "
            "RecBole does not make; load it with recbole_pos.load"
        )
    weights = state["best_weights"] or state["weights"]
    others = from_plain(weights["other"])
    ours = {"config": config, "state_dict": weights["state_dict"], "other_parameter": others}
    return _uncached({**state, **ours}, path)


def _uncached(state: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Without what RecBole may have cached where the file says: it would unpickle that freely."""
    for key in ("dataset_save_path", "dataloaders_save_path"):
        state["config"][key] = str(Path(path) / "nothing")  # below a file, where nothing can be
    return state


def _most(path: str | Path) -> int:
    return max(Path(path).stat().st_size, 10**6)


@contextmanager
def _told_of(path: str | Path) -> Iterator[None]:
    """Within, whatever is raised is told of the file."""
    require_archive(path, plain=False)
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} was refused, and nothing in it was run: {error}. Expected what RecBole's "
            "trainer writes: configuration, weights and optimiser"
        ) from error
    except Exception as error:
        raise damaged(path, error) from error


def _unpickled(path: str | Path, map_location: Any) -> dict[str, Any]:
    safely: Any = SimpleNamespace(Unpickler=_Unpickler, __name__=__name__)
    state = torch.load(path, map_location, pickle_module=safely, weights_only=False)
    if not isinstance(state, dict):
        raise CheckpointError("it is no checkpoint")
    return state


def _theirs(state: dict[str, Any], most: int) -> dict[str, Any]:
    if not {"config", "state_dict"} <= state.keys():
        raise CheckpointError("it has no config with a state_dict")
    _require_tree(state, most)
    others = state.get("other_parameter") or {}
    kept = {
        name: value
        for name, value in others.items()
        if not (isinstance(value, _Record) and value.name.startswith(_LAYERS))
    }
    config = _config(state["config"])
    read = _value({**state, "config": None, "other_parameter": kept})
    if missing := _LAYOUT.keys() - read.keys():
        raise CheckpointError(f"it lacks {', '.join(sorted(missing))}")
    for key, like in _LAYOUT.items():
        if wrong := checkpoint.difference(read[key], like, key):
            raise CheckpointError(wrong)
    return {**read, "config": config}


def _require_tree(state: Any, most: int) -> None:
    """Lists in several places are a tree that never ends: of one in the file, a value is a byte."""
    waiting = [state]
    while waiting:
        if (most := most - 1) < 0:
            raise CheckpointError("its lists are nested in each other without end")
        found = waiting.pop()
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, _Record):
            waiting += (found.args, found.state)
        elif isinstance(found, (list, tuple)):
            waiting += found


def _config(record: Any) -> Config:
    """RecBole's Config; its model is looked up by name, as the file alone must not name code."""
    if not isinstance(record, _Record) or record.name != "recbole.config.configurator.Config":
        raise CheckpointError("its config is none of RecBole's")
    classes = ("model_class", "yaml_loader")
    state = _value({name: v for name, v in record.state.items() if name not in classes})
    config = Config.__new__(Config)
    vars(config).update({name: v for name, v in state.items() if not hasattr(Config, name)})
    try:
        config.model_class = get_model(config["model"])
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"its model {shown(config['model'])} is unknown; one of your own must be registered "
            f"first "
            "(recbole_pos.register_model)"
        ) from error
    config.yaml_loader = yaml.FullLoader
    if not torch.cuda.is_available():
        config["device"] = torch.device("cpu")
    return config


def _value(found: Any) -> Any:
    """What records stand for, recursively; mappings keep what they are."""
    if isinstance(found, _Record) and found.name in _VALUES:
        return _VALUES[found.name](found)
    if isinstance(found, (_Record, type)):
        raise CheckpointError(f"it holds {getattr(found, 'name', found)}")
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
    """A sparse matrix whose indices are within it: its readers in C do not look."""
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


_LAYOUT: dict[str, Any] = {  # what RecBole's trainer takes up from a checkpoint
    "epoch": checkpoint.number(-1, 2**53, whole=True),
    "cur_step": checkpoint.number(0, 2**53, whole=True),
    "best_valid_score": lambda x: "" if isinstance(x, (int, float)) and x == x else "a number",
    "state_dict": checkpoint.Each(str, checkpoint.any_tensor),
    "optimizer": {
        "state": checkpoint.Each(int, checkpoint.Each(str, lambda _: "")),
        "param_groups": [checkpoint.Each(str, lambda _: "")],
    },
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
