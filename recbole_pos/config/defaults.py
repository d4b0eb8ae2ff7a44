"""Defaults of a model: what ``properties/`` has for it, its schemes and its loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recbole_pos.model.models import on_our_base
from recbole_pos.position.schemes import scheme_names
from recbole_pos.yaml_files import ROOT, overall_defaults, read_yaml


def plugin_defaults(
    model: str, position: str | Iterable[str] | None = None, loss_type: str | None = None
) -> dict[str, Any]:
    """Defaults of one plugin model: overall, its position schemes and loss, then its own yaml.

    A model whose yaml has no ``position`` takes no schemes.

    Args:
        model: name in the registry.
        position: scheme names that replace the model's own, or None.
        loss_type: replaces the model's own, or None.
    """
    own = read_yaml(ROOT / "model" / f"{model}.yaml")
    schemes: dict[str, Any] = {}
    if "position" in own:
        for name in scheme_names(own["position"] if position is None else position):
            schemes.update(read_yaml(ROOT / "position" / f"{name}.yaml"))
    sampled = (loss_type or own.get("loss_type")) == "SCE" and on_our_base(model)
    loss = read_yaml(ROOT / "loss" / "SCE.yaml") if sampled else {}
    return {**overall_defaults(), **schemes, **loss, **own}


def with_time_field(config: dict[str, Any]) -> dict[str, Any] | None:
    """``load_col``, or where it is RecBole's default (user and item), also with the time field."""
    load_col = config.get("load_col")
    if load_col != {"inter": ["user_id", "item_id"]}:
        return load_col
    fields = ("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD")
    return {"inter": [config[field] for field in fields]}
