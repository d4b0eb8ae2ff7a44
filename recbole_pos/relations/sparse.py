"""Relations of a batch as a constant sparse matrix, which multiplies states and has a gradient.

In: relations as numpy arrays. Out: a function of tensors [cols, d] to [rows, d].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbole_pos.relations.search import Edges


@dataclass(frozen=True)
class SparseProduct:
    """A constant sparse matrix [rows, cols] that multiplies dense ones, [cols, d] to [rows, d].

    Entries are kept by rows and, for the gradient, by columns. ``embedding_bag`` sums the rows in a
    twentieth of the time of torch's own sparse product on a CPU.

    Attributes:
        by_row: the E entries row by row, for the product: column [E] and value [E] of each entry,
            and the index of the first entry of each row [rows].
        by_column: the same entries column by column, for the gradient: row [E] and value [E] of
            each entry, and the index of the first entry of each column [cols].
    """

    by_row: tuple[Tensor, Tensor, Tensor]
    by_column: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def build(
        cls,
        row: np.ndarray,
        col: np.ndarray,
        weight: np.ndarray,
        shape: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> SparseProduct:
        """Build a sparse matrix, which multiplies dense ones, from its E entries that are not zero.

        Args:
            row, col, weight: [E] row, column and value of each entry, sorted by row.
            shape: numbers of rows and columns.
            device: where the tensors of the matrix are put.
            dtype: type of the values.

        Returns:
            The matrix. It keeps its entries twice: row by row, from which a product is summed, and
            column by column, from which the gradient is summed.
        """
        # row i has the entries borders[i] to borders[i + 1] - 1: if the 3 entries of a matrix with
        # 3 rows are in the rows 0, 0, 2, the borders are 0, 2, 2, 3
        borders = np.searchsorted(row, np.arange(shape[0] + 1))
        matrix = sp.csr_matrix((weight, col, borders), shape=shape)
        by_row = _list_entries(matrix, device, dtype)
        by_column = _list_entries(matrix.tocsc(), device, dtype)
        return cls(by_row, by_column)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [rows, d] with x [cols, d]."""
        return _Product.apply(x, self)


def _list_entries(
    matrix: sp.csr_matrix | sp.csc_matrix, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the E entries of a sparse matrix into tensors, in the order in which it has them.

    A matrix that scipy keeps row by row (csr) has three arrays: the column and the value of each
    entry, and where each row begins among the entries. One that is kept column by column (csc) has
    the same arrays for its transpose, so what is a row below is then a column, and vice versa.

    Args:
        matrix: the matrix.
        device: where the tensors are put.
        dtype: type of the values.

    Returns:
        [E] column of each entry, [E] value of each entry, and [rows] the index of the first entry
        of each row.
    """
    column = torch.from_numpy(matrix.indices).to(device)
    value = torch.from_numpy(matrix.data).to(device, dtype)
    first = torch.from_numpy(matrix.indptr[:-1]).to(device)  # its last number is E, not a row
    return column, value, first


class _Product(torch.autograd.Function):
    """The product with a :class:`SparseProduct`, with a gradient to the dense factor only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: SparseProduct) -> Tensor:
        ctx.matrix = matrix
        return _sum_rows(x, *matrix.by_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(grad, *ctx.matrix.by_column), None


def _sum_rows(x: Tensor, index: Tensor, weight: Tensor, first: Tensor) -> Tensor:
    """Return the product [rows, d] of a sparse matrix with x [cols, d].

    A row of the product is the sum over the entries of that row of the matrix: their values times
    the rows of x that their columns name. ``embedding_bag`` computes such sums.

    Args:
        x: [cols, d] dense matrix.
        index, weight: [E] column and value of each entry of the sparse matrix, row by row.
        first: [rows] which entry is the first of each row: 0, 2, 2 for rows of 2, 0 and 1 entries.
    """
    weight = weight.to(x.dtype)
    return F.embedding_bag(index, x.contiguous(), first, mode="sum", per_sample_weights=weight)


def normalise(edges: Edges, m: int) -> np.ndarray:
    """Return the weights of the relations R of one attribute: D^-1/2 R D^-1/2.

    That is Norm(R) of equation 6 (AttrFormer, Liu et al., KDD 2025), where D is the diagonal matrix
    of degrees.

    Args:
        edges: the E entries of R that are not zero: rows are the ``reader``, columns the ``source``
            of a relation, the state of which is added to that of the reader.
        m: number of interactions in the batch; R is [m, m].

    Returns:
        [E] float64 normalised entries.
    """
    # The degree of an interaction is the sum over its row of R (the paper counts the entries, but
    # strong and weak relations differ). Degrees below 1 become 1. So none is 0, even if a row has
    # no entry, and weak relations are not made stronger.
    row, column = edges.reader, edges.source
    degree = np.maximum(np.bincount(row, edges.value, minlength=m), 1)
    return edges.value / np.sqrt(degree[row] * degree[column])


def stack_relations(
    by_attribute: Sequence[Edges], m: int, device: torch.device, dtype: torch.dtype
) -> SparseProduct:
    """Stack the normalised relations of M attributes into one sparse matrix [M * m, m].

    The matrix [m, m] of the second attribute is under that of the first, and so on: a relation of
    attribute 1 from interaction 3 to 2 is the entry at row m + 3 and column 2.

    Args:
        by_attribute: the relations of each attribute.
        m: number of interactions in the batch.
        device, dtype: of the matrix.

    Returns:
        The matrix, which multiplies states [m, d] to weighted sums of related states [M * m, d].
    """
    row = np.concatenate([index * m + edges.reader for index, edges in enumerate(by_attribute)])
    column = np.concatenate([edges.source for edges in by_attribute])
    weight = np.concatenate([normalise(edges, m) for edges in by_attribute])
    return SparseProduct.build(row, column, weight, (len(by_attribute) * m, m), device, dtype)
