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
from typing import Any, NamedTuple

from recbole_pos.config.options import MODEL, find_option, find_unmet
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
_NOT_UNDER_FOR = {"model", "dataset", "plugins", FOR}


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

    Raises:
        UsageError: if a custom scheme gives another default to an option that others have.
    """
    model_defaults = own_defaults(model)
    defaults = read_overall_defaults()

    # The position schemes of the run; ``scheme_names`` makes a list of one name or several.
    if "position" in model_defaults:
        schemes = scheme_names(model_defaults["position"] if position is None else position)
        _check_custom_schemes(schemes, model_defaults)
        for name in schemes:
            defaults.update(SCHEMES.defaults(name))

    # Losses that score only some items have options, and so defaults, of their own.
    loss = loss_type or model_defaults.get("loss_type")
    if loss in models.PARTIAL_LOSSES and models.is_on_our_base(model):
        defaults.update(read_properties("loss", loss).defaults)
    return {**defaults, **model_defaults}


def _check_custom_schemes(schemes: list[str], model_defaults: dict[str, Any]) -> None:
    """Check that no custom position scheme changes the default of an option that others read.

    An option has one value in a run, which all classes get that read the option. For example, a
    custom scheme has an option ``initializer_range`` with the default 1. The model reads an option
    of this name, too, with the default 0.02, and would now get 1.

    Args:
        schemes: names of all position schemes of the run. Those that a user has written are in
            ``SCHEMES.added``.
        model_defaults: option -> default, of the options of the model, ``position`` included.

    Raises:
        UsageError: if a custom scheme and another reader have different defaults for an option.
    """
    schemes_of_model = scheme_names(model_defaults["position"])  # which it has by default
    for name in schemes:
        if name not in SCHEMES.added:
            continue
        other_defaults = _gather_defaults([other for other in schemes if other != name])
        # A model that has the scheme by default is made for it, and may set the scheme's options.
        if name not in schemes_of_model:
            other_defaults |= model_defaults

        for option, default in SCHEMES.defaults(name).items():
            other_default = other_defaults.get(option, default)
            if default != other_default:
                raise UsageError(
                    f"position: {option} of scheme {shown(name)} has the default {shown(default)}; "
                    f"others read this option, too, there {shown(other_default)}: give yours "
                    "another name"
                )


def _gather_defaults(schemes: list[str]) -> dict[str, Any]:
    """Return the defaults for every model, RecBole's and this package's, and those of schemes.

    Args:
        schemes: names of position schemes.

    Returns:
        option -> default. Of several defaults of an option this package's wins over RecBole's, and
        a scheme's over both.
    """
    defaults = read_yaml(find_recbole_properties() / "overall.yaml") | read_overall_defaults()
    for name in schemes:
        defaults |= SCHEMES.defaults(name)
    return defaults


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


def explain_unread(name: str, values: dict[str, Any], model: str, model_type: Any) -> str | None:
    """Return why an option has no effect in a run, as the end of a message; None if it has one.

    There are two reasons: the model does not read the option, or a condition is not met under which
    it is read, such as "with fusion: early", or "by custom models".

    Args:
        name: name of the option.
        values: option -> value, of all options of the run.
        model: name of its model.
        model_type: RecBole's ``ModelType`` of the model.
    """
    unread = models.find_unread_options(model)  # option -> why the model does not read it
    if name in unread:
        return f": {unread[name]}"
    # ``kinds`` are the kinds of models that the model is of, such as "custom models".
    kinds = models.list_kinds(model, model_type, list_positions(values.get("position"), model))
    unmet = find_unmet(name, values, kinds)
    return None if unmet is None else f", only {unmet}"


def merge_options(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Return the options of two sources together; where both have an option, ``high`` wins.

    Only ``eval_args``, a mapping, is merged key by key: ``{"split": a, "mode": b}`` and
    ``{"mode": c}`` give ``{"split": a, "mode": c}``.

    Args:
        low: option -> value, of the source with lower priority.
        high: option -> value, of the source with higher priority.
    """
    merged = {**low, **high}
    low_args, high_args = low.get("eval_args"), high.get("eval_args")
    if low_args and high_args and isinstance(low_args, dict) and isinstance(high_args, dict):
        merged["eval_args"] = {**low_args, **high_args}
    return merged


def starts_from_runs(model: str) -> bool:
    """Return whether a model can start from a run that has fewer position schemes (``init_from``).

    Those can that extend the plugin's base class and take schemes, that is, have the option
    ``position``.
    """
    return "position" in own_defaults(model) and models.is_on_our_base(model)


def free_options(model: str, schemes: Iterable[str]) -> set[str]:
    """Return the options of a run whose values this package does not check.

    These are options that the user's own models or position schemes declare, and whose values this
    package does not know. Not among them, and so checked, are those

    1. that a position scheme of this package in the same run reads, too;
    2. that are called like an option on data or training, such as ``epochs``, which means the same
       for every model; or
    3. that are called like an option of RecBole's that this package refuses.

    Args:
        model: name of the model.
        schemes: names of its position schemes.

    Returns:
        Names of options; an empty set if model and schemes are all this package's or RecBole's.
    """
    # ``added`` has the user's models and schemes by name. ``own_options`` are their options without
    # those that they have in common with RecBole or this package, such as a base class's.
    options: set[str] = set()
    if model in models.MODELS.added:
        options |= models.MODELS.added[model].own_options
    for scheme in schemes:
        if scheme in SCHEMES.added:
            options |= SCHEMES.added[scheme].own_options

    # Leave out those of the package's schemes (1). ``shipped`` are all schemes of this package.
    for scheme in schemes:
        if scheme in SCHEMES.shipped:
            options -= SCHEMES.defaults(scheme).keys()
    # Leave out those with another role than MODEL, which are on data or training (2), and refused
    # ones (3). ``find_option`` describes an option; of one it does not know, the role is MODEL.
    described = [find_option(name) for name in options]
    return {option.name for option in described if option.role == MODEL and not option.refused}


def add_time_field(load_col: Any, config: dict[str, Any]) -> Any:
    """Return the option ``load_col``, with the time field added to RecBole's default of it.

    ``load_col`` says which columns of the files are read, as ``{"inter": ["user_id", ...]}``.
    RecBole's default is user and item only, and position-aware models need the time. Any other
    value is returned as it is.

    Args:
        load_col: the value of the option.
        config: option -> value, with the names of the three columns, such as ``USER_ID_FIELD``.
    """
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


class Part(NamedTuple):
    """Options of a config file for some models or schemes only, ``for: {"A, B": {...}}``.

    Attributes:
        location: file and title, for messages: ``a.yaml, for A, B``.
        names: the models and schemes that the title names: ``["A", "B"]``.
        options: option -> value.
    """

    location: str
    names: list[str]
    options: dict[str, Any]


def select_parts(
    content: dict[str, Any], names: Collection[str], file: str | Path
) -> list[tuple[str, dict[str, Any]]]:
    """Return the parts of a config file that a run reads, each with its place in the file.

    The first part has the options for all models. A file may have others under ``for``, such as
    ``for: {"SASRec, GRU4Rec": {n_heads: 1}, "rope": {rope_base: 100}}``. A run reads those whose
    title names its model or one of its position schemes. Of two parts with the same option, the
    later wins.

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
    selected = [(str(file), for_all)]
    for part in _read_parts(content, file):
        # ``model`` and the like decide which parts a run reads, and so cannot stand in a part.
        misplaced = _NOT_UNDER_FOR & part.options.keys()
        # Nor can ``position`` in a part for a scheme: it decides whether a run reads the part.
        is_for_scheme = any(name in SCHEMES for name in part.names)
        if is_for_scheme and "position" in part.options:
            misplaced.add("position")
        if misplaced:
            raise UsageError(f"{part.location}: {', '.join(sorted(misplaced))} cannot stand here")
        if set(part.names) & set(names):
            selected.append((part.location, part.options))
    return selected


def find_parts_by_scheme(content: dict[str, Any], model: str, file: str | Path) -> list[str]:
    """Return the parts of a config file that a run reads only with a certain position scheme.

    Such a part is ``for: {rope: {rope_base: 100}}``: it is for runs with the scheme ``rope``. A
    search that varies the schemes of its trials gives all of them the same options, and so refuses
    a file with such a part. A title that also names the model, as in ``for: {"PosSASRec, rope":
    ...}``, is for all runs of the model, so its part is not returned.

    Args:
        content: the mapping in the file.
        model: name of the model.
        file: path of the file.

    Returns:
        The place of each part, such as ``a.yaml, for rope``.
    """
    places = []
    for part in _read_parts(content, file):
        # ``part.names`` are the models and schemes in its title, SCHEMES all schemes that exist.
        is_for_scheme = any(name in SCHEMES for name in part.names)
        is_for_model = model in part.names
        if is_for_scheme and not is_for_model:
            places.append(part.location)
    return places


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
    names = [position] if isinstance(position, str) else position
    are_several = isinstance(names, (list, tuple))
    return [name for name in names if isinstance(name, str)] if are_several else []


def _read_parts(content: dict[str, Any], file: str | Path) -> list[Part]:
    """Return the parts of a config file that stand under ``for``, with options for some runs only.

    Args:
        content: the mapping in the file.
        file: path of the file, for messages.

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
        location = f"{file}, for {title}"
        names = [name.strip() for name in str(title).split(",")]
        for name in names:
            if name not in allowed:
                raise UsageError(
                    f"{location}: {shown(name)} is neither a model nor a scheme"
                    f"{suggest(name, allowed)}; see `recbole-pos models` and `recbole-pos schemes`"
                )
        parts.append(Part(location, names, options or {}))
    return parts
