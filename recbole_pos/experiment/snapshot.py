"""A copy of a training's state, on the CPU, from which it is written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from recbole_pos.experiment.allocation import free_memory
from recbole_pos.plain import to_plain


class Snapshots:
    """Copies of states, one at a time, into the same memory.

    Fresh memory costs more than what is copied into it, so what one copy took the next one takes
    again: for Adam three times the weights, from the first copy to the end of the training.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[Any]] = {}  # size in bytes -> storages

    def take(self, state: Any, own: Any = None) -> Any:
        """The same tree of values that nobody changes, until the next call.

        What shares memory shares it in the copy; shapes and strides stay.

        Args:
            state: tensors and values, see ``plain.py``.
            own: tensors that nobody changes anyhow; they are not copied where they are on the CPU.

        Raises:
            TypeError: for a value that no checkpoint keeps.
        """
        free = {size: list(storages) for size, storages in self._kept.items()}
        done = {_place(s): s for s in _storages(own) if s.device.type == "cpu"}

        def copied(storage: Any) -> Any:
            if _place(storage) not in done:
                size = storage.nbytes()
                if not free.get(size):
                    fresh = torch.UntypedStorage(size)
                    self._kept.setdefault(size, []).append(fresh)
                    free.setdefault(size, []).append(fresh)
                done[_place(storage)] = free[size].pop().copy_(storage)
            return done[_place(storage)]

        return _mapped(to_plain(state), copied)

    def fits(self, state: Any, own: Any = None) -> bool:
        """Whether a copy takes at most half of the memory that is free."""
        theirs = {_place(storage) for storage in _storages(own)}
        sizes = {_place(s): s.nbytes() for s in _storages(state) if _place(s) not in theirs}
        kept = sum(size * len(storages) for size, storages in self._kept.items())
        return sum(sizes.values()) - kept <= free_memory() // 2


def _place(storage: Any) -> tuple[str, int]:
    return str(storage.device), storage.data_ptr()


def _is_strided(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_meta


def _storages(value: Any) -> Iterator[Any]:
    """The memory of all tensors in a tree."""
    if isinstance(value, Tensor) and _is_strided(value):
        yield value.untyped_storage()
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    for part in inner:
        yield from _storages(part)


def _mapped(value: Any, copied: Any) -> Any:
    if isinstance(value, Tensor):
        if not _is_strided(value):
            return copy.deepcopy(value)
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype).set_(copied(value.untyped_storage()), *place)
    if isinstance(value, dict):
        return {key: _mapped(part, copied) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, copied) for part in value)
    return value
