"""Changes of several objects that are made as a whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def undone_on_error(*objects: Any) -> Iterator[None]:
    """Undo changes of the attributes of objects, and of dicts in them, if a ``with`` block fails.

    Tensors are not copied, so they must be replaced, not changed.
    """
    kept = [
        {name: copy.copy(x) if isinstance(x, dict) else x for name, x in vars(one).items()}
        for one in objects
    ]
    try:
        yield
    except BaseException:
        for one, attributes in zip(objects, kept, strict=True):
            vars(one).clear()
            vars(one).update(attributes)
        raise
