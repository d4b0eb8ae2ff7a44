"""Where the options of a run come from: defaults of its model, schemes and loss, and config files.

A config file may be for several models, with options for all and options for some under ``for``::

    hidden_size: 50
    for:
      PosSASRec, SASRec: {n_heads: 1}        # if one of these models runs
      fparec: {positional_rank: 40}          # if position names this scheme

So a paper's baselines run with the settings of its own model, and no key is ever left unread: what
stands outside must be known to every model that the file is for, what stands under a name to that
model, or to those that take that scheme.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from recbole_pos.config.options import MODEL, find_option
from recbole_pos.errors import UsageError
from recbole_pos.model import models
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.values import listed, shown, suggest
from recbole_pos.yaml_files import (
    ROOT,
    find_recbole_properties,
    list_property_files,
    read_overall_defaults,
    read_properties,
    read_yaml,
)

FOR = "for"  # the key of a config file under which options for some models or schemes stand
# Keys that decide which options under ``for`` a run takes, and so cannot stand there themselves.
_OUTSIDE = {"model", "dataset", "plugins", FOR}


def own_defaults(model: str) -> dict[str, Any]:
    """Return the defaults of a model's own options.

    Those of a model of this package stand in its yaml file; a custom model was registered with
    them.

    Args:
        model: name of the model.

    Returns:
        option -> default; ``{}`` for RecBole's models, whose defaults are RecBole's.
    """
    # MODELS are the models of this package and custom ones
    return models.MODELS.defaults(model) if model in models.MODELS else {}


def plugin_defaults(
    model: str, position: str | Iterable[str] | None = None, loss_type: str | None = None
) -> dict[str, Any]:
    """Return the defaults that this package has for a run of a model, without RecBole's.

    They come from four sources, of which a later one wins: options for every model, for each
    position scheme (a way to tell the model where in a history an interaction is), for the loss,
    and for the model.

    Args:
        model: name of the model.
        position: names of the position schemes of the run; the model's own if None. A model without
            the option ``position`` takes no schemes.
        loss_type: the loss of the run; the model's own if None.

    Returns:
        option -> default.
    """
    model_defaults = own_defaults(model)
    defaults = read_overall_defaults()

    if "position" in model_defaults:
        own_names = scheme_names(model_defaults["position"])
        names = own_names if position is None else scheme_names(position)
        # Custom schemes come last, so that the options of all others are known when they are
        # checked: none of them may have another default for the same option.
        built_in = [name for name in names if name not in SCHEMES.added]
        custom = [name for name in names if name in SCHEMES.added]
        for name in (*built_in, *custom):
            values = SCHEMES.defaults(name)
            if name in custom:
                # For a scheme that the model has by default, the model may set other defaults.
                earlier = defaults if name in own_names else defaults | model_defaults
                _require_own_options(name, values, earlier)
            defaults.update(values)

    # Losses that score only some items have options, and so defaults, of their own.
    loss = loss_type or model_defaults.get("loss_type")
    if loss in models.PARTIAL_LOSSES and models.is_on_our_base(model):
        defaults.update(read_properties("loss", loss).defaults)
    return {**defaults, **model_defaults}


def _require_own_options(name: str, values: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Raise a UsageError if a custom scheme has an option that others read with another default.

    All options of a run are in one mapping, so its default would change theirs: an
    ``initializer_range`` of 1 in a custom scheme would also hold for the model.

    Args:
        name: name of the custom position scheme.
        values: the defaults of its options.
        earlier: the defaults of the plugin's options, of other schemes and of the model.
    """
    # Others are also RecBole's own options, of which overall.yaml has the defaults.
    others = read_yaml(find_recbole_properties() / "overall.yaml") | earlier
    for key, value in values.items():
        if others.get(key, value) != value:
            raise UsageError(
                f"position: {key} of scheme {shown(name)} has the default {shown(value)}; others "
                f"read this option, too, there {shown(others[key])}: give yours another name"
            )


def describe_readers(option: str) -> str:
    """Return which position schemes, losses or models of this package read an option, as a text.

    The text is for a message about an option that this run does not read: ``it is read with
    position: rope, t5``. Schemes are looked at first, then losses, then models. It is empty if none
    of them reads the option.
    """
    # Each scheme, loss and model has a yaml file with its options in one of these folders.
    for folder, text in (
        ("position", "it is read with position: "),
        ("loss", "it is read with loss_type: "),
        ("model", "it is read by "),
    ):
        readers = [
            name
            for name in list_property_files(folder)
            if option in read_properties(folder, name).defaults
        ]
        if readers:
            return text + listed(readers)
    return ""


def starts_from_runs(model: str) -> bool:
    """Return whether a model can start from a run that has fewer position schemes (``init_from``).

    Those can that extend the plugin's base class and take schemes, that is, have the option
    ``position``.
    """
    return "position" in own_defaults(model) and models.is_on_our_base(model)


def free_options(model: str, schemes: Iterable[str]) -> set[str]:
    """Return the options that only a custom model or custom position schemes have.

    This package does not know what they mean, so their values are not checked. An option that this
    package or RecBole has, too, is not among them.

    Args:
        model: name of the model.
        schemes: names of its position schemes.

    Returns:
        Names of options; an empty set if model and schemes are all this package's or RecBole's.
    """
    # Gather the options of custom classes (``free``), and those that schemes of this package have
    # (``shared``), which are not free even if a custom class has them, too.
    custom = models.MODELS.added.get(model)  # None for a model of this package or RecBole's
    free: set[str] = set(custom.own_options) if custom is not None else set()
    shared = {"position"}
    for name in schemes:
        if name in SCHEMES.added:
            free |= SCHEMES.added[name].own_options
        if name in SCHEMES.shipped:
            shared |= SCHEMES.defaults(name).keys()

    # An option on data or training means the same for every model, and is checked. Those that shape
    # a model (MODEL) may mean something else in another one.
    for name in free:
        row = find_option(name)
        if row.role != MODEL or row.refused:
            shared.add(name)

    # RecBole finds out by ``loss_type`` what a batch must hold. A custom model in RecBole's form
    # whose ``input_type`` says so itself may use ``loss_type`` as it likes.
    is_in_recboles_form = custom is not None and not models.is_on_our_base(model)
    if is_in_recboles_form and hasattr(models.MODELS[model], "input_type"):
        shared.discard("loss_type")
    return free - shared


def add_time_field(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the option ``load_col``, with the time field added to RecBole's default of it.

    ``load_col`` says which columns of the files are read, as ``{"inter": ["user_id", ...]}``.
    RecBole's default is user and item only, and position-aware models need the time. A value that
    the user gives is returned as it is.

    Args:
        config: option -> value, with ``load_col`` and the names of the three fields.
    """
    load_col = config.get("load_col")
    is_default = load_col == {"inter": ["user_id", "item_id"]}
    fields = ("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD")
    return {"inter": [config[field] for field in fields]} if is_default else load_col


# --- config files ---


def find_config_file(name: str | Path) -> Path:
    """Return the path of a config file or, if there is no such file, of a preset of the package.

    Args:
        name: path of the file, or a preset such as ``fparec/ml-1m.yaml``.

    Returns:
        The path; ``name`` itself if there is neither, which the reader of the file then refuses.
    """
    preset = ROOT / "presets" / name
    # os.path says False for a name that no file can have, for which Path would raise.
    is_preset = os.path.isfile(preset) and not os.path.exists(name)
    return preset if is_preset else Path(name)


def select_parts(
    content: dict[str, Any], names: Collection[str], file: str | Path
) -> list[tuple[str, dict[str, Any]]]:
    """Return the parts of a config file that a run reads, each with its place in the file.

    The first part has the options for all models. A file may have others under ``for``, as in
    ``for: {"SASRec, GRU4Rec": {n_heads: 1}}``, of which a run reads those whose title names its
    model or one of its position schemes. Of two parts with the same option, the later wins.

    Args:
        content: the mapping in the file.
        names: the model that runs and its schemes.
        file: path of the file, for messages.

    Returns:
        (place, options) of each part, such as ("a.yaml, for SASRec", {"n_heads": 1}).

    Raises:
        UsageError: if ``for`` is not as expected, or an option stands there that cannot.
    """
    for_all = {key: value for key, value in content.items() if key != FOR}  # the key ``for``
    parts = [(str(file), for_all)]
    for title, title_names, options in _split_by_title(content, file):
        location = f"{file}, for {title}"
        # Some options (_OUTSIDE, such as ``model``) decide which parts a run reads, and so cannot
        # stand in one. ``position``, the schemes of a run, may stand in a part for models (whose
        # names ``list_runnable`` has), but not in one for schemes.
        misplaced = _OUTSIDE & options.keys()
        if "position" in options and not set(title_names) <= set(models.list_runnable()):
            misplaced.add("position")
        if misplaced:
            raise UsageError(f"{location}: {', '.join(sorted(misplaced))} cannot stand here")
        if set(title_names) & set(names):
            parts.append((location, options))
    return parts


def find_parts_by_scheme(content: dict[str, Any], model: str, file: str | Path) -> list[str]:
    """Return which parts under ``for`` in a config file are for position schemes and not a model.

    ``for: {rope: {rope_base: 100}}`` has a part for runs whose option ``position`` names the scheme
    ``rope``, a way to tell the model where in a history an interaction is. A search that varies
    ``position`` cannot read such parts, since its trials have different schemes; so it refuses a
    file that has any.

    Args:
        content: the mapping in the file.
        model: name of the model; parts that name it are left out.
        file: path of the file.

    Returns:
        The place of each part, such as ``a.yaml, for rope``.
    """
    return [
        f"{file}, for {title}"
        for title, names, _ in _split_by_title(content, file)
        if model not in names and set(names) & set(SCHEMES)
    ]


def list_positions(position: Any, model: str | None) -> list[str]:
    """Return the names of position schemes in a value of the option ``position``.

    A position scheme is a way to tell the model where in a history, or when, an interaction is.

    Args:
        position: the value. It need not be checked yet: what is no name is left out. None stands
            for the schemes that the model has by default.
        model: name of the model; None to take no schemes by default.
    """
    if position is None and model is not None:
        position = own_defaults(model).get("position")
    if isinstance(position, str):
        return [position]
    if not isinstance(position, (list, tuple)):
        return []
    return [name for name in position if isinstance(name, str)]


def _split_by_title(
    content: dict[str, Any], file: str | Path
) -> list[tuple[str, list[str], dict[str, Any]]]:
    """Return the parts of a config file that stand under ``for``, with options for some runs only.

    ``for: {"PosSASRec, SASRec": {n_heads: 1}}`` gives
    ``[("PosSASRec, SASRec", ["PosSASRec", "SASRec"], {"n_heads": 1})]``.

    Args:
        content: the mapping in the file.
        file: path of the file, for messages.

    Returns:
        (title, names of models and schemes in it, options) of each part.

    Raises:
        UsageError: if a part is no mapping, or a title names neither a model nor a scheme.
    """
    by_title = content.get(FOR) or {}  # FOR is the key ``for``
    parts_are_mappings = isinstance(by_title, dict) and all(
        options is None or isinstance(options, dict) for options in by_title.values()
    )
    if not parts_are_mappings:
        raise UsageError(
            f"{file}: {FOR}: expected options under names of models or schemes, as in "
            f"{{SASRec: {{n_heads: 1}}}}, found {shown(by_title)}"
        )

    # A title has one name or several with commas between them; each must exist.
    allowed = [*SCHEMES, *models.list_runnable()]
    parts = []
    for title, options in by_title.items():
        names = [name.strip() for name in str(title).split(",")]
        for name in names:
            if name not in allowed:
                raise UsageError(
                    f"{file}, for {title}: {shown(name)} is neither a model nor a scheme"
                    f"{suggest(name, allowed)}; see `recbole-pos models` and `recbole-pos schemes`"
                )
        parts.append((str(title), names, options or {}))
    return parts
