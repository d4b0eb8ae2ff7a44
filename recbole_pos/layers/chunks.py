"""How much of a large product is alive at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Elements of a chunk of logits or weights, so that memory does not grow with the batch times the
# catalogue. On CPU 4 MB stay in cache; a GPU needs larger products.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


def chunk_elements(device: torch.device) -> int:
    """Return the number for a device."""
    return CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])


def chunks(rows: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Yield rows of so many elements each in parts of the number; all at once while a graph is
    traced, which cannot be of any number of parts."""
    if torch.compiler.is_compiling():
        yield slice(None)
        return
    size = max(1, chunk_elements(device) // elements)
    yield from (slice(start, start + size) for start in range(0, rows, size))
