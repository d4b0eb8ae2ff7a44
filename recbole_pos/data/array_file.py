"""One file of arrays as they stand in memory, mapped instead of read, with a digest of it all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_MAGIC = b"recbole-pos arrays 1\n"
_ALIGN = 64  # bytes
_DIGEST = hashlib.sha256
_TAIL = 8 + _DIGEST().digest_size  # the length of the description, the digest


class BrokenFile(ValueError):
    """A file is not what was written: cut, changed, or of another kind."""


def write(file: BinaryIO, arrays: dict[str, np.ndarray], about: Any) -> None:
    """Write arrays and a description.

    Args:
        file: open for writing.
        arrays: by name; of numbers, bools or text of fixed length.
        about: plain values that json keeps.
    """
    digest, place, index = _DIGEST(), 0, {}

    def put(data: Any) -> None:
        nonlocal place
        digest.update(data)
        file.write(data)
        place += len(data)

    put(_MAGIC)
    for name, array in arrays.items():
        put(bytes(-place % _ALIGN))
        index[name] = (array.dtype.str, array.shape, place)
        put(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    described = json.dumps({"arrays": index, "about": about}).encode()
    put(described)
    put(len(described).to_bytes(8, "little"))
    file.write(digest.digest())


def read(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """What was written.

    Returns:
        arrays, mapped from the file: processes share its pages until one writes into them, which
        changes its own copy; and the description.

    Raises:
        BrokenFile: if a byte has changed or is missing.
        OSError: if the file cannot be opened.
    """
    if path.stat().st_size < len(_MAGIC) + _TAIL:
        raise BrokenFile(f"{path} is too short")
    content = np.memmap(path, dtype=np.uint8, mode="c")
    end = len(content) - _TAIL
    signed = content[: end + 8]
    if bytes(content[: len(_MAGIC)]) != _MAGIC or _DIGEST(signed.data).digest() != bytes(
        content[end + 8 :]
    ):
        raise BrokenFile(f"{path} is damaged")
    length = int.from_bytes(bytes(content[end : end + 8]), "little")
    described = json.loads(bytes(content[end - length : end]))
    arrays = {
        name: np.ndarray(shape, dtype, buffer=content, offset=place)
        for name, (dtype, shape, place) in described["arrays"].items()
    }
    return arrays, described["about"]
