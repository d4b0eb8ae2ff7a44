"""What a tree of plain values and tensors must look like, written as a tree, and its one check.

An expectation is an example: a tensor stands for tensors of its shape, strides and type (of finite
numbers, if its own are), a mapping for mappings with its keys, a list or tuple for one as long, a
float for any number, a whole number, a text or None for one of its kind; or one of the classes
below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from recbole_pos.plain import SPARSE
from recbole_pos.values import is_number, is_whole, shown


@dataclass(frozen=True)
class Anything:
    """No expectation."""


@dataclass(frozen=True)
class Maybe:
    """None, or as ``value``."""

    value: Any


@dataclass(frozen=True)
class Each:
    """A mapping of any size, keys of a type and values as ``value``."""

    key: type
    value: Any


@dataclass(frozen=True)
class Including:
    """A mapping with the keys of ``value``, and perhaps others."""

    value: dict[Any, Any]


@dataclass(frozen=True)
class Many:
    """A list or tuple of any length, its members as ``value``."""

    value: Any


@dataclass(frozen=True)
class Number:
    """A finite number."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False


@dataclass(frozen=True)
class Vector:
    """A tensor of one dimension, which has all its numbers in memory."""

    dtype: torch.dtype
    length: int | None = None  # any


@dataclass(frozen=True)
class AtLeast:
    """A tensor as ``example``, no entry below ``low``."""

    example: Tensor
    low: float


@dataclass(frozen=True)
class Sparse:
    """A sparse matrix, as its parts."""

    shape: tuple[int, int]
    dtype: torch.dtype


def difference(found: Any, expected: Any, path: str) -> str | None:
    """Where ``found`` first differs from what is expected, as words; None if it does not.

    Args:
        path: name of ``found``, such as ``optimizer.state``.
    """
    return next(_differences(found, expected, path), None)


def _differences(found: Any, expected: Any, path: str) -> Iterator[str]:
    match expected:
        case Anything():
            return
        case Maybe():
            if found is not None:
                yield from _differences(found, expected.value, path)
        case Each():
            if not isinstance(found, dict):
                yield _wanted(path, "a mapping", found)
                return
            for key, value in found.items():
                if type(key) is not expected.key:
                    yield _wanted(f"a key of {path}", _named(expected.key), key)
                yield from _differences(value, expected.value, f"{path}.{key}")
        case Including():
            known = found
            if isinstance(found, dict):
                known = {key: found[key] for key in expected.value if key in found}
            yield from _mapping(known, expected.value, path)
        case Many():
            if not isinstance(found, (list, tuple)):
                yield _wanted(path, "a list", found)
                return
            for i, value in enumerate(found):
                yield from _differences(value, expected.value, f"{path}.{i}")
        case Number():
            fits = is_whole(found) if expected.whole else is_number(found)
            if not (fits and expected.low <= found <= expected.high):
                kind = "a whole number" if expected.whole else "a finite number"
                low = f" of at least {expected.low:g}" if expected.low > -math.inf else ""
                high = f" and at most {expected.high:g}" if expected.high < math.inf else ""
                yield _wanted(path, kind + low + high, found)
        case Vector():
            fits = isinstance(found, Tensor) and found.dim() == 1 and _is_plain(found)
            long = len(found) if fits else None
            if not fits or found.dtype != expected.dtype or expected.length not in (None, long):
                size = "" if expected.length is None else f"{expected.length} "
                yield _wanted(path, f"a vector of {size}{expected.dtype}", found)
        case AtLeast():
            wrong = list(_tensor(found, expected.example, path))
            if not wrong and bool((found < expected.low).any()):
                wrong = [f"{path} holds a value below {expected.low:g}"]
            yield from wrong
        case Sparse():
            yield from _sparse(found, expected, path)
        case Tensor():
            yield from _tensor(found, expected, path)
        case dict():
            yield from _mapping(found, expected, path)
        case tuple() | list():
            if type(found) is not type(expected) or len(found) != len(expected):
                yield _wanted(path, f"a {type(expected).__name__} of {len(expected)}", found)
                return
            for i, (value, like) in enumerate(zip(found, expected, strict=True)):
                yield from _differences(value, like, f"{path}.{i}")
        case float():
            if not isinstance(found, float) and not is_number(found):  # nan is a float
                yield _wanted(path, "a number", found)
        case _:
            if type(found) is not type(expected):
                yield _wanted(path, _named(type(expected)), found)


def _mapping(found: Any, expected: dict[Any, Any], path: str) -> Iterator[str]:
    if not isinstance(found, dict):
        yield _wanted(path, "a mapping", found)
        return
    for kind, keys in (("lacks", [*expected]), ("has an unknown", [*found])):
        other = found if kind == "lacks" else expected
        if missing := [key for key in keys if key not in other]:
            yield f"{path} {kind} {_shown(missing[0])}" + _more(missing)
            return
    for key, like in expected.items():
        yield from _differences(found[key], like, f"{path}.{key}")


def _more(names: Sequence[Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _tensor(found: Any, expected: Tensor, path: str) -> Iterator[str]:
    wanted = f"a tensor {list(expected.shape)} of {expected.dtype}"
    strided = isinstance(found, Tensor) and found.layout == torch.strided and not found.is_neg()
    if not strided or found.shape != expected.shape or found.dtype != expected.dtype:
        yield _wanted(path, wanted, found)
        return
    one, other = (
        [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
        for x in (found, expected)
    )
    if one != other:  # fused optimisers write to memory as if it were laid out like the parameter
        yield _wanted(path, f"strides {other}", one)
        return
    try:
        if not bool(torch.isfinite(found).all()) and bool(torch.isfinite(expected).all()):
            yield f"{path} holds a value that is no finite number"
    except (RuntimeError, NotImplementedError) as error:  # it has no memory behind it
        yield f"{path} cannot be read: {error}"


def _is_plain(x: Tensor) -> bool:
    """Whether numpy can have it as it is, and every number of it is there."""
    odd = x.is_neg() or x.is_conj() or x.requires_grad or x.is_meta
    return x.layout == torch.strided and not odd and x.is_contiguous()


def _sparse(found: Any, expected: Sparse, path: str) -> Iterator[str]:
    integer, shape = (torch.int32, torch.int64), tuple(expected.shape)
    parts = [found.get(k) for k in ("data", "indices", "indptr")] if isinstance(found, dict) else []
    vectors = [p for p in parts if isinstance(p, Tensor) and p.dim() == 1 and _is_plain(p)]
    if len(vectors) < 3 or any(part.dtype not in integer for part in vectors[1:]):
        yield _wanted(path, "a sparse matrix", found)
        return
    kind, size = found.get("kind"), found.get("shape")
    whole = isinstance(size, (tuple, list)) and all(is_whole(n) for n in size)
    if not (isinstance(kind, str) and kind == SPARSE and whole and tuple(size) == shape):
        yield _wanted(path, f"a sparse matrix {list(shape)}", size)
        return
    if vectors[0].dtype != expected.dtype:
        yield _wanted(f"{path}.data", str(expected.dtype), vectors[0])
        return
    try:
        matrix = scipy.sparse.csr_matrix(tuple(part.numpy() for part in vectors), shape=shape)
        matrix.check_format(full_check=True)
    except (ValueError, TypeError, IndexError) as error:
        yield f"{path} is no sparse matrix: {error}"
        return
    if not np.isfinite(matrix.data).all():
        yield f"{path} holds a value that is no finite number"


def _wanted(path: str, wanted: str, found: Any) -> str:
    return f"{path}: expected {wanted}, found {_shown(found)}"


def _named(kind: type) -> str:
    names = {bool: "true or false", int: "a whole number", str: "text", type(None): "nothing"}
    return names.get(kind, f"a {kind.__name__}")


def _shown(value: Any) -> str:
    """A value as it stands in a message."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return shown(value)
