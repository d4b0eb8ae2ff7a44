"""Values as checkpoints hold them: tensors, numbers, text, lists and mappings, nothing else.

:func:`to_plain` makes them of arrays, sparse matrices and numpy's numbers before a checkpoint is
written; :func:`from_plain` makes sparse matrices of them again when it has been read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch

SPARSE = "scipy.sparse.csr"  # kind of a mapping that stands for a sparse matrix


def to_plain(value: Any) -> Any:
    """Return a value in the form that checkpoints hold: tensors, plain numbers, text, collections.

    A numpy array becomes a tensor that shares its memory, a number of numpy one of Python, and a
    sparse matrix a dict of tensors with ``kind: scipy.sparse.csr``, by which :func:`from_plain`
    knows it. Lists, tuples and dicts are converted element by element.

    Raises:
        TypeError: if the value is, or holds, anything else.
    """
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
    # The three arrays of a matrix in compressed rows, and its shape.
    if scipy.sparse.issparse(value):
        csr = value.tocsr()
        arrays = {"data": csr.data, "indices": csr.indices, "indptr": csr.indptr}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        # SPARSE is "scipy.sparse.csr", by which from_plain knows such a dict
        return {"kind": SPARSE, **tensors, "shape": tuple(csr.shape)}
    raise TypeError(f"a {type(value).__name__} cannot be kept in a checkpoint")


def from_plain(value: Any) -> Any:
    """Return a value that :func:`to_plain` has made, with its sparse matrices restored.

    A sparse matrix is stored as a dict of tensors with ``kind: scipy.sparse.csr``. What was a numpy
    array stays a tensor, since nothing tells it from other tensors any more.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.get("kind") == SPARSE:  # the text scipy.sparse.csr
        arrays = tuple(value[name].cpu().numpy() for name in ("data", "indices", "indptr"))
        matrix = scipy.sparse.csr_matrix(arrays, shape=value["shape"])
        # A damaged file may hold indices out of range, which scipy's functions in C do not check.
        matrix.check_format(full_check=True)
        return matrix
    return {key: from_plain(item) for key, item in value.items()}
