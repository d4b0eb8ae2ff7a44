"""A study of a few seconds, which its test files train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL = {"hidden_size": 8, "inner_size": 8, "MAX_ITEM_LIST_LENGTH": 8, "epochs": 2}
BASE = {**SMALL, "model": "PosSASRec", "n_layers": 1, "train_batch_size": 16}


def study(tiny: Path, **more: Any) -> dict[str, Any]:
    """Two rows and two seeds; more keys of a study win."""
    return {
        "dataset": "tiny",
        "title": "A study",
        "base": {**BASE, "data_path": str(tiny)},
        "rows": {"NoPE": {"position": ["nope"]}, "Learned": {"position": ["learned"]}},
        "seeds": 2,
        **more,
    }
