"""Values as files hold them: tensors, numbers, text, lists and mappings, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch

SPARSE = "scipy.sparse.csr"  # kind of a mapping that stands for a sparse matrix


def to_plain(value: Any) -> Any:
    """Return tensors and plain values that ``weights_only=True`` accepts, recursively."""
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {to_plain(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(v) for v in value)
    if scipy.sparse.issparse(value):
        csr = value.tocsr()
        return {
            "kind": SPARSE,
            "data": torch.from_numpy(csr.data),
            "indices": torch.from_numpy(csr.indices),
            "indptr": torch.from_numpy(csr.indptr),
            "shape": tuple(csr.shape),
        }
    raise TypeError(f"a {type(value).__name__} cannot be kept in a checkpoint")


def from_plain(value: Any) -> Any:
    """Return inverse of :func:`to_plain` for the values models keep beside their weights."""
    if isinstance(value, dict):
        if value.get("kind") == SPARSE:
            parts = tuple(value[k].cpu().numpy() for k in ("data", "indices", "indptr"))
            matrix = scipy.sparse.csr_matrix(parts, shape=value["shape"])
            matrix.check_format(full_check=True)  # scipy's readers in C do not look
            return matrix
        return {k: from_plain(v) for k, v in value.items()}
    return value
