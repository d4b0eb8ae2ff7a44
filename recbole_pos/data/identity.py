"""Digests of the data that a model was trained on, which its checkpoint keeps."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from recbole_pos.data.protocols import Dataset


def compute_identity(dataset: Dataset) -> dict[str, Any]:
    """Return digests of a dataset after ``build``.

    Returns:
        ``data``: digest of items, sequences and split, followed by the digest of times; and
        ``fields``: by name of every other loaded field, digest of its values and their tokens.
    """
    log = dataset.log
    ids = {log.user_field, log.item_field, log.time_field}
    tokens = "\n".join(dataset.field2id_token[log.item_field])
    sequences = _digest(tokens, log.items.numpy(), log.offsets, dataset.part)
    tables = (log.fields, dataset.user_feat, dataset.item_feat)
    columns = {
        field: feat[field].numpy()
        for feat in tables
        if feat is not None
        for field in feat
        if field not in ids
    }
    return {
        "data": sequences + _digest("", log.times.numpy()),
        "fields": {field: _of_field(dataset, field, columns[field]) for field in sorted(columns)},
    }


def describe_changes(then: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return what has changed between two identities, in words for a message; None if nothing has.

    Fields are compared where both have them; earlier versions kept fewer in ``then``.
    """
    if not now["data"].startswith(then.get("data") or ""):
        return "items, events, their times or what is held out"
    changed = changed_fields(then, now)
    return f"the values of {', '.join(changed)}, or the order of their lines," if changed else None


def changed_fields(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return names of the fields that both identities have, with different values."""
    before, after = then.get("fields") or {}, now["fields"]
    return [field for field in before if field in after and before[field] != after[field]]


def _of_field(dataset: Dataset, field: str, column: np.ndarray) -> str:
    tokens = "\n".join(map(str, dataset.field2id_token.get(field, ())))
    return _digest(tokens, column, dataset.missing.get(field, np.empty(0, dtype=bool)))


def _digest(text: str, *columns: np.ndarray) -> str:
    """Return the digest of a text and of the bytes of arrays, in hexadecimal."""
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for column in columns:
        digest.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
