"""How much of a large product is alive at a time."""

from __future__ import annotations

import torch

# Elements of a chunk of logits or weights, so that memory does not grow with the batch times the
# catalogue. On CPU 4 MB stay in cache; a GPU needs larger products.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


def chunk_elements(device: torch.device) -> int:
    """The number for a device."""
    return CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
