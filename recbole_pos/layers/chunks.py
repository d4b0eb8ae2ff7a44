"""Slices of a large product: memory need not grow with the batch times the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Elements of a chunk of logits or weights. On a CPU, for each thread: 1 MB stays in the cache of a
# core, with 4 MB the loss on ml-100k takes a quarter longer. A GPU needs larger products.
CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**26}


def chunk_elements(device: torch.device) -> int:
    """Return how many elements a chunk of logits or weights has on a device."""
    if device.type == "cpu":
        return CHUNK_ELEMENTS["cpu"] * torch.get_num_threads()
    return CHUNK_ELEMENTS["cuda"]


def fixed_chunk_elements(device: torch.device) -> int:
    """Return a larger size that does not depend on threads, where it decides what is computed."""
    return 4 * CHUNK_ELEMENTS["cpu"] if device.type == "cpu" else CHUNK_ELEMENTS["cuda"]


def iterate_chunks(num_rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of consecutive rows, so that each has about as many elements as a chunk may.

    With 10 rows of 1,000 elements and chunks of 4,000 they are 0:4, 4:8 and 8:12. A traced graph
    must not depend on the number of slices, so tracing gets one slice of all rows.

    Args:
        num_rows: number of rows in all.
        row_elements: elements that are computed for a row.
        device: decides how many elements a chunk has, see :func:`chunk_elements`.
    """
    if torch.compiler.is_compiling():
        yield slice(None)
        return
    rows_per_chunk = max(1, chunk_elements(device) // row_elements)
    for start in range(0, num_rows, rows_per_chunk):
        yield slice(start, start + rows_per_chunk)


def compute_in_chunks(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], row_elements: int
) -> Tensor:
    """Return ``function(*tensors)``, computed for a chunk of rows at a time.

    Nothing that the function makes on its way is kept: the backward pass computes each chunk again.
    A tensor with one row, or None, is handed to every chunk as it is.

    Args:
        function: computes the rows of its result from the same rows of the tensors; not random.
        tensors: [n, ...] the first one; the others too, or [1, ...] for all rows, or None.
        row_elements: elements that the function makes for a row.

    Returns:
        [n, ...], the rows of all chunks joined.
    """
    rows = tensors[0]
    assert rows is not None
    rows_per_chunk = max(1, chunk_elements(rows.device) // row_elements)
    if torch.compiler.is_compiling() or len(rows) <= rows_per_chunk:
        return function(*tensors)

    # the chunks of each tensor; a tensor that all rows share, or None, is the same in every chunk
    chunks = [repeat(x) if x is None or len(x) == 1 else x.split(rows_per_chunk) for x in tensors]
    # ``checkpoint`` computes a chunk again in the backward pass
    results = [
        checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(*chunks, strict=False)  # ``repeat`` has no end
    ]
    return torch.cat(results)
