"""Files of ``torch.save``, read without running anything that they name.

``torch.load`` reads the archive and makes the tensors. The unpickler that it is given knows the
classes of tensors and mappings; of any other the caller says what stands for it. What a file can
cost in time and memory follows from its size.
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
    """A file is refused; the message says why, as it follows the file's name."""


def read(path: str | Path, stand_in: Callable[[str], Any]) -> Any:
    """Read a file of ``torch.save`` onto the CPU; its tensors are mapped into memory.

    Args:
        path: the file.
        stand_in: returns what replaces a class that is not torch's, given ``module.name``; it
            raises :class:`Refused` for one that must not be there.

    Raises:
        CheckpointError: if the file is missing, damaged or refused.
    """
    path = Path(path)
    if not os.path.isfile(path):  # no OSError of a name that is too long
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        _require_archive(path)
        unpickler = type("_Unpickler", (_Unpickler,), {"stand_in": staticmethod(stand_in)})
        module = SimpleNamespace(__name__="restricted", Unpickler=unpickler)
        value = torch.load(
            str(path), map_location="cpu", pickle_module=module, weights_only=False, mmap=True
        )
        _require_tree(value, max_values=max(path.stat().st_size, 10**6))  # a byte each, at least
        return value
    except Refused as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # damaged bytes make readers stumble anywhere
        reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise CheckpointError(f"{path} is truncated or damaged: {reason}") from error


def _require_archive(path: Path) -> None:
    """Refuse a file that is not a complete archive as ``torch.save`` writes it."""
    # torch itself compares no checksums, and would unpack what is compressed
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
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise Refused("is damaged: its members are compressed, or overlap")
        if damaged_member := archive.testzip():
            raise Refused(f"is truncated or damaged: the checksum of {damaged_member} differs")


def _refuse_tuple_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Wrap a step of an unpickler that hashes ``keys`` of its stack; tuples are refused."""

    def load_checked(unpickler: Any) -> None:
        # tuples may share their parts, and hashing them could go on without end
        if any(isinstance(key, (tuple, frozenset)) for key in unpickler.stack[keys]):
            raise Refused("has lists as keys, as no checkpoint has")
        load(unpickler)

    return load_checked


# Python's own unpickler in Python: the one in C makes room for whatever number a memo has.
_Python: Any = pickle._Unpickler
_HASHED = {  # instruction of a pickle -> what it hashes of the stack
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}


class _Unpickler(_Python):
    """An unpickler that knows tensors and mappings; what else is named becomes a stand-in."""

    stand_in: Callable[[str], Any]
    dispatch = _Python.dispatch | {
        opcode[0]: _refuse_tuple_keys(_Python.dispatch[opcode[0]], keys)
        for opcode, keys in _HASHED.items()
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a new function each time: a file can change what it is given."""
        path = f"{module}.{name}"
        if path == "torch._utils._rebuild_tensor_v2":
            return lambda storage, offset, size, stride, requires_grad, hooks: (
                torch._utils._rebuild_tensor(storage, offset, size, stride)
            )
        if path == "collections.OrderedDict":
            return lambda: OrderedDict()
        return self.stand_in(path)


def _require_tree(value: Any, max_values: int) -> None:
    """Refuse values that contain themselves or nest deeply, and tensors larger than their data."""
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        max_values -= 1
        if max_values < 0 or depth > _MAX_DEPTH:
            raise Refused("holds lists that are nested in each other without end")
        if isinstance(item, Tensor):
            if item.numel() * item.element_size() > item.untyped_storage().nbytes():
                raise Refused("is damaged: a tensor is not laid out as those of checkpoints are")
            continue
        if isinstance(item, dict):
            children: Any = item.values()
        elif isinstance(item, (list, tuple)):
            children = item
        else:  # a stand-in has parts, other values none
            children = () if isinstance(item, type) else getattr(item, "parts", ())
        stack += ((child, depth + 1) for child in children)
