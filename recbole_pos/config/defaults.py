"""Defaults of a model: what ``properties/`` has for it, its schemes and its loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recbole_pos.config.options import MODEL, find_option
from recbole_pos.errors import UsageError
from recbole_pos.model.models import ADDED, LOSSES, MODELS, TABLES, is_on_our_base
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.values import listed, shown
from recbole_pos.yaml_files import (
    ROOT,
    find_recbole_properties,
    read_overall_defaults,
    read_yaml,
)


def own_defaults(model: str) -> dict[str, Any]:
    """Return the defaults of a model's own yaml, or of its registration; ``{}`` for RecBole's."""
    registry = next((registry for registry in TABLES if model in registry), None)
    return registry.defaults(model) if registry is not None else {}


def plugin_defaults(
    model: str, position: str | Iterable[str] | None = None, loss_type: str | None = None
) -> dict[str, Any]:
    """Return the plugin's defaults for a model, without RecBole's.

    Later sources win: overall options, position schemes, the loss, the model. Schemes and loss are
    the model's own where None; a model without a default of ``position`` takes no schemes.
    """
    model_defaults = own_defaults(model)
    defaults = read_overall_defaults()
    if "position" in model_defaults:
        own_names = scheme_names(model_defaults["position"])
        names = own_names if position is None else scheme_names(position)
        for name in sorted(names, key=lambda name: name in SCHEMES.added):  # custom ones last
            values = SCHEMES.defaults(name)
            if name in SCHEMES.added:
                # a model with a scheme of its own gives the scheme's options other defaults
                _require_own_options(
                    name, values, defaults if name in own_names else defaults | model_defaults
                )
            defaults.update(values)
    loss = loss_type or model_defaults.get("loss_type")
    if loss in LOSSES and loss != "CE" and is_on_our_base(model):
        defaults.update(read_yaml(ROOT / "loss" / f"{loss}.yaml"))
    return {**defaults, **model_defaults}


def _require_own_options(name: str, values: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Refuse defaults of a custom scheme that would be those of another reader of the option."""
    others = read_yaml(find_recbole_properties() / "overall.yaml") | earlier
    for key, value in values.items():
        if others.get(key, value) != value:
            raise UsageError(
                f"position: {key} of scheme {shown(name)} has the default {shown(value)}; others "
                f"read this option, too, there {shown(others[key])}: give yours another name"
            )


def describe_readers(option: str) -> str:
    """Describe which position schemes, losses or models of the plugin have an option."""
    if schemes := [name for name in SCHEMES.paths if option in SCHEMES.defaults(name)]:
        return f"it is read with position: {listed(schemes)}"
    losses = [name for name in LOSSES[1:] if option in read_yaml(ROOT / "loss" / f"{name}.yaml")]
    if losses:
        return f"it is read with loss_type: {listed(losses)}"
    models = [name for name in MODELS if option in own_defaults(name)]
    return f"it is read by {listed(models)}" if models else ""


def starts_from_runs(model: str) -> bool:
    """Return whether a model can start (``init_from``) from a run with fewer schemes."""
    has_schemes = model in ADDED and is_on_our_base(model) and "position" in own_defaults(model)
    return model in MODELS or has_schemes


def free_options(model: str, schemes: Iterable[str]) -> set[str]:
    """Return the options that only a custom model or custom schemes have; any value is allowed.

    An option that the plugin or RecBole has too is not among them: it is checked as usual.
    """
    free: set[str] = set(ADDED.added[model].own_options) if model in ADDED else set()
    shared = {"position"}
    for name in schemes:
        if name in SCHEMES.added:
            free |= SCHEMES.added[name].own_options
        if name in SCHEMES.paths:
            shared |= SCHEMES.defaults(name).keys()
    shared |= {key for key in free if find_option(key).role != MODEL}
    if model in ADDED and not is_on_our_base(model) and hasattr(ADDED[model], "input_type"):
        shared.discard("loss_type")  # the model's input_type says what a batch holds, not the loss
    return free - shared


def add_time_field(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``load_col``, with the time field added to RecBole's default (user and item).

    Under ``data_part: by_rank`` names of items are loaded too, which number them.
    """
    load_col = config.get("load_col")
    fields = ("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD")
    if load_col == {"inter": ["user_id", "item_id"]}:
        load_col = {"inter": [config[field] for field in fields]}
    from recbole_pos.data.parts import is_part  # late: --help imports nothing heavy

    if load_col and is_part(config):
        load_col = {"item": [config["ITEM_ID_FIELD"]], **load_col}
    return load_col
