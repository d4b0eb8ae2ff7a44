"""Slices of a large product, so that memory does not grow with batch times catalogue."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Elements of a chunk of logits or weights: on CPU 4 MB stay in cache; a GPU needs larger products.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


def chunk_elements(device: torch.device) -> int:
    """Return how many elements a chunk of logits or weights has on a device."""
    return CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])


def chunks(rows: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of ``rows`` rows of ``elements`` each, with about ``chunk_elements`` in a slice.

    A traced graph must not depend on the number of slices, so there it is one slice of all rows.
    """
    if torch.compiler.is_compiling():
        yield slice(None)
        return
    size = max(1, chunk_elements(device) // elements)
    yield from (slice(start, start + size) for start in range(0, rows, size))
