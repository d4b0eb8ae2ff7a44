"""Defaults of a model: what ``properties/`` has for it, its schemes and its loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recbole_pos.config.option import MODEL
from recbole_pos.config.options import rule
from recbole_pos.model.models import ADDED, LOSSES, MODELS, TABLES, on_our_base
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.yaml_files import ROOT, overall_defaults, read_yaml


def own_defaults(model: str) -> dict[str, Any]:
    """Those of a model itself: its yaml or what it was registered with; ``{}`` for RecBole's."""
    table = next((table for table in TABLES if model in table), None)
    return table.defaults(model) if table is not None else {}


def plugin_defaults(
    model: str, position: str | Iterable[str] | None = None, loss_type: str | None = None
) -> dict[str, Any]:
    """Defaults of a model, without RecBole's: overall, its position schemes and loss, then its own.

    A model that has no ``position`` among its own takes no schemes.

    Args:
        model: its name.
        position: scheme names that replace the model's own, or None.
        loss_type: replaces the model's own, or None.
    """
    own = own_defaults(model)
    schemes: dict[str, Any] = {}
    if "position" in own:
        for name in scheme_names(own["position"] if position is None else position):
            schemes.update(SCHEMES.defaults(name))
    kind = loss_type or own.get("loss_type")
    sampled = kind in LOSSES and kind != "CE" and on_our_base(model)
    loss = read_yaml(ROOT / "loss" / f"{kind}.yaml") if sampled else {}
    return {**overall_defaults(), **schemes, **loss, **own}


def starts_from_runs(model: str) -> bool:
    """Return whether a model can start with the weights of a run with fewer schemes
    (``init_from``)."""
    schemes = model in ADDED and on_our_base(model) and "position" in own_defaults(model)
    return model in MODELS or schemes


def free_options(model: str, schemes: Iterable[str]) -> set[str]:
    """Return options of a model and schemes that are not the plugin's, which may have any value.

    What they share with the plugin or RecBole means the same, and is checked in the same way.
    """
    schemes = [name for name in schemes if name in SCHEMES]
    free = set(ADDED.own_options(model)) if model in ADDED else set()
    free = free.union(*(SCHEMES.own_options(name) for name in schemes))
    ours = (SCHEMES.defaults(name) for name in schemes if name in SCHEMES.places)
    shared = {"position"}.union(*ours)
    shared |= {key for key in free if rule(key).role != MODEL}
    if model in ADDED and not on_our_base(model) and hasattr(ADDED[model], "input_type"):
        shared.discard("loss_type")  # RecBole does not ask it what a batch holds
    return free - shared


def with_time_field(config: dict[str, Any]) -> dict[str, Any] | None:
    """``load_col``, or where it is RecBole's default (user and item), also with the time field."""
    load_col = config.get("load_col")
    if load_col != {"inter": ["user_id", "item_id"]}:
        return load_col
    fields = ("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD")
    return {"inter": [config[field] for field in fields]}
