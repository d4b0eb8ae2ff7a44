"""One file of arrays as they stand in memory, mapped instead of read, signed with a key."""

from __future__ import annotations

import hmac
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_MAGIC = b"recbole-pos arrays 2\n"
_ALIGN = 64  # bytes
_DIGEST = "sha256"
_TAIL = 8 + 32  # the length of the description, the signature


class BrokenFile(ValueError):
    """A file is not what was written: cut, changed, or of another kind."""


def write(file: BinaryIO, arrays: dict[str, np.ndarray], about: Any, key: bytes) -> None:
    """Write arrays and a description.

    Args:
        file: open for writing.
        arrays: by name; of numbers, bools or text of fixed length.
        about: plain values that json keeps.
        key: who reads the file must have the same.
    """
    digest, place, index = hmac.new(key, digestmod=_DIGEST), 0, {}

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


def read(path: Path, key: bytes) -> tuple[dict[str, np.ndarray], Any]:
    """What was written.

    Returns:
        arrays, mapped from the file: processes share its pages until one writes into them, which
        changes its own copy; and the description.

    Raises:
        BrokenFile: if a byte has changed or is missing, or another key was used.
        OSError: if the file cannot be opened.
        Exception: any other, if somebody with the key has written something else.
    """
    if path.stat().st_size < len(_MAGIC) + _TAIL:
        raise BrokenFile(f"{path} is too short")
    content = np.memmap(path, dtype=np.uint8, mode="c")
    end = len(content) - _TAIL
    digest = hmac.new(key, digestmod=_DIGEST)
    digest.update(content[: end + 8].data)
    signature = bytes(content[end + 8 :])
    is_whole = hmac.compare_digest(digest.digest(), signature)
    if bytes(content[: len(_MAGIC)]) != _MAGIC or not is_whole:
        raise BrokenFile(f"{path} is damaged, or written by somebody else")
    length = int.from_bytes(bytes(content[end : end + 8]), "little")
    described = json.loads(bytes(content[end - length : end]))
    if any(np.dtype(dtype).kind not in "biufU" for dtype, _, _ in described["arrays"].values()):
        raise BrokenFile(f"{path} holds something else than numbers, bools and text")
    arrays = {
        name: np.ndarray(shape, dtype, buffer=content, offset=place)
        for name, (dtype, shape, place) in described["arrays"].items()
    }
    return arrays, described["about"]
