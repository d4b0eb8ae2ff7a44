"""Files of ``torch.save``, read without running anything that they name.

``torch.load`` reads the archive, with an unpickler that makes only tensors and mappings. The caller
says what stands for any other class. The size of a file limits its cost in time and memory.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recbole_pos.errors import CheckpointError

_MAX_DEPTH = 150  # of values nested in values


class Refused(Exception):
    """A file is refused. The message gives the reason and follows the name of the file."""


def read(path: str | Path, make_stand_in: Callable[[str], Any]) -> Any:
    """Return the value in a file of ``torch.save``, on the CPU; tensors are mapped into memory.

    ``make_stand_in`` returns what replaces a class that is not torch's, given ``module.name``, or
    raises :class:`Refused`. A CheckpointError says that a file is missing, damaged or refused.
    """
    path = Path(path)
    if not os.path.isfile(path):  # False if the name is too long, where pathlib may raise
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        _require_archive(path)
        methods = {"make_stand_in": staticmethod(make_stand_in)}
        unpickler = type("_Unpickler", (_Unpickler,), methods)
        module = SimpleNamespace(__name__="restricted", Unpickler=unpickler)
        value = torch.load(
            str(path), map_location="cpu", pickle_module=module, weights_only=False, mmap=True
        )
        # each value takes at least a byte of the file
        _require_tree(value, max_values=max(path.stat().st_size, 10**6))
        return value
    except Refused as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # damaged bytes make readers stumble anywhere
        reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise CheckpointError(f"{path} is truncated or damaged: {reason}") from error


def _require_archive(path: Path) -> None:
    """Refuse a file that is not a complete archive as ``torch.save`` writes it."""
    with path.open("rb") as file:
        if not b"PK\3\4".startswith(file.read(4)):
            raise Refused(
                "is not a checkpoint of this package, and was not read; name the folder of a run, "
                "or a .pt file in it"
            )
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.filename.endswith("/constants.pkl") for member in members):
            raise Refused("is a program (TorchScript) and not a checkpoint")
        # torch would unpack compressed members, and compares no checksums
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise Refused("is damaged: its members are compressed, or overlap")
        if damaged_member := archive.testzip():
            raise Refused(f"is truncated or damaged: the checksum of {damaged_member} differs")


def _refuse_tuple_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Return ``load``, which hashes ``keys`` of an unpickler's stack, so that it refuses tuples."""

    def load_checked(unpickler: Any) -> None:
        # nested tuples may share their parts, and hashing them could take forever
        if any(isinstance(key, (tuple, frozenset)) for key in unpickler.stack[keys]):
            raise Refused("has lists as keys, as no checkpoint has")
        load(unpickler)

    return load_checked


# The unpickler written in Python: the one in C makes room for whatever number a memo has.
_PythonUnpickler: Any = pickle._Unpickler
_HASHED = {  # opcode of a pickle -> the values of the stack that it hashes
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}


class _Unpickler(_PythonUnpickler):
    """An unpickler that makes tensors and mappings, and a stand-in of any other class."""

    make_stand_in: Callable[[str], Any]
    dispatch = _PythonUnpickler.dispatch | {
        opcode[0]: _refuse_tuple_keys(_PythonUnpickler.dispatch[opcode[0]], keys)
        for opcode, keys in _HASHED.items()
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class, a new object each time, as the file can change it."""
        path = f"{module}.{name}"
        if path == "torch._utils._rebuild_tensor_v2":
            return lambda storage, offset, size, stride, requires_grad, hooks: (
                torch._utils._rebuild_tensor(storage, offset, size, stride)
            )
        if path == "collections.OrderedDict":
            return lambda: OrderedDict()
        return self.make_stand_in(path)


def _require_tree(value: Any, max_values: int) -> None:
    """Refuse values that contain themselves or nest deeply, and tensors larger than their data."""
    stack = [(value, 0)]
    num_values = 0
    while stack:
        item, depth = stack.pop()
        num_values += 1
        if num_values > max_values or depth > _MAX_DEPTH:
            raise Refused("holds lists that are nested in each other without end")
        if isinstance(item, Tensor):
            if item.numel() * item.element_size() > item.untyped_storage().nbytes():
                raise Refused("is damaged: a tensor is not laid out as those of checkpoints are")
            continue
        if isinstance(item, dict):
            children: Any = item.values()
        elif isinstance(item, (list, tuple)):
            children = item
        else:  # only a stand-in has parts
            children = () if isinstance(item, type) else getattr(item, "parts", ())
        stack += ((child, depth + 1) for child in children)
