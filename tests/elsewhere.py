"""A device that is not the CPU, where none exists: its tensors hide a CPU tensor each.

Operations run on what is hidden, after checking what a GPU would: that no tensor of the CPU takes
part, but for scalars and indices. The device calls itself ``meta``, which torch lets anyone claim.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = torch.device("meta")

# Operations for whose result, or its shape, the host must wait.
READS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero", "nonzero_numpy", "argwhere"),
    *("masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive"),
}
_refused = False  # whether one is an error now


class Far(Tensor):
    """A tensor elsewhere."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        far = Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=ELSEWHERE,
        )
        far.near = near
        return far

    def __init__(self, near: Tensor) -> None:
        pass

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> Tensor:
        """As on any device but meta, where torch leaves the values out."""
        return torch.tensor(data, dtype=dtype or self.dtype).to(self.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Everything(TorchDispatchMode):
    """Catches what makes tensors from none, such as arange."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _run(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    name, leaves = function.overloadpacket.__name__, tree_leaves((args, kwargs))
    far = [x for x in leaves if isinstance(x, Far)]
    near = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Far) and x.dim()]
    indexes = name.startswith("index") and isinstance(args[0], Far)
    if far and near and name not in ("_to_copy", "copy_") and not indexes:
        raise RuntimeError(f"{function}: a tensor of the CPU among those elsewhere")
    if _refused and (_reads(name, args, kwargs) if far else near and _copies(name, kwargs)):
        raise AssertionError(f"{function}: a GPU is waited for")
    goes = bool(far) and not (name == "copy_" and args[0] is not far[0])
    if (device := kwargs.get("device")) is not None:
        goes, kwargs = device == ELSEWHERE, {**kwargs, "device": torch.device("cpu")}
    args, hidden = tree_map(_show, args), tree_map(_show, kwargs)
    with _disable_current_modes():
        found = function(*args, **hidden)
    if not goes:
        return found
    if function._schema.is_mutable:  # in place: the same object, not another around it
        return tree_map(lambda x: next((f for f in far if f.near is x), x), found)
    return tree_map(lambda x: Far(x) if isinstance(x, Tensor) else x, found)


def _reads(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a GPU would be waited for."""
    if name in ("_to_copy", "copy_"):
        here = kwargs.get("device", ELSEWHERE) if name == "_to_copy" else args[0].device
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and any(args[2:])))
        return waits and torch.device(here).type == "cpu"
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = (torch.bool, torch.uint8)
        return any(x.dtype in masks or type(x) is Tensor for x in args[1] if x is not None)
    return name in READS


def _copies(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether memory of the host goes to the device."""
    return name == "_to_copy" and kwargs.get("device") == ELSEWHERE


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    """Within, what waits for the device, or copies to it, is an error."""
    global _refused
    _refused = True
    try:
        yield
    finally:
        _refused = False


def _show(x: Any) -> Any:
    return x.near if isinstance(x, Far) else x


@contextlib.contextmanager
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, tensors can be moved to ``ELSEWHERE``; without what no meta tensor may do."""
    adam = sys.modules["torch.optim.adam"]  # torch.optim hides it
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_: None)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    with _Everything(), sdpa_kernel(SDPBackend.MATH):
        yield
