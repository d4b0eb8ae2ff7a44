"""Values as checkpoints hold them: tensors, numbers, text, lists and mappings, nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch

SPARSE = "scipy.sparse.csr"  # kind of a mapping that stands for a sparse matrix


def to_plain(value: Any) -> Any:
    """Return a value as tensors and plain values, or raise a TypeError if it has others within."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(item) for item in value)
    if scipy.sparse.issparse(value):
        csr = value.tocsr()
        arrays = {"data": csr.data, "indices": csr.indices, "indptr": csr.indptr}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {"kind": SPARSE, **tensors, "shape": tuple(csr.shape)}
    raise TypeError(f"a {type(value).__name__} cannot be kept in a checkpoint")


def from_plain(value: Any) -> Any:
    """Return a value of :func:`to_plain` with its sparse matrices restored; arrays stay tensors."""
    if isinstance(value, (list, tuple)):
        return type(value)(from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.get("kind") == SPARSE:
        arrays = tuple(value[name].cpu().numpy() for name in ("data", "indices", "indptr"))
        matrix = scipy.sparse.csr_matrix(arrays, shape=value["shape"])
        matrix.check_format(full_check=True)  # scipy's functions in C do not check
        return matrix
    return {key: from_plain(item) for key, item in value.items()}
