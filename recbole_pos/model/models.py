"""The tables of models: the plugin's, custom ones, and RecBole's that run here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.registry import (
    Defaults,
    Registration,
    Registry,
    find_home_module,
    find_importing_module,
    import_path,
)
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import (
    ROOT,
    find_recbole_properties,
    list_property_files,
    read_yaml,
)

# Values of ``loss_type`` that compare a target with some items only, which the loss chooses itself.
# Each has a file of its options in ``properties/loss/``.
PARTIAL_LOSSES = tuple(list_property_files("loss"))
# All values of ``loss_type`` of the plugin's models.
LOSSES = ("CE", *PARTIAL_LOSSES)

# RecBole's own models that run here: name -> what properties/recbole_models.yaml says of it.
_FROM_RECBOLE = read_yaml(ROOT / "recbole_models.yaml")
RECBOLE_SEQUENTIAL: dict[str, dict[str, Any]] = _FROM_RECBOLE["sequential"]  # models of histories
RECBOLE_GENERAL: dict[str, dict[str, Any]] = _FROM_RECBOLE["general"]  # of users and items
RECBOLE = {**RECBOLE_SEQUENTIAL, **RECBOLE_GENERAL}
# Models of RecBole's that are causal: no state is made of newer interactions.
CAUSAL_BUILTINS = [name for name, facts in RECBOLE.items() if facts.get("causal")]

# The plugin's models and those of users (``register_model``): name -> class. One of the plugin's is
# a class and a yaml file, properties/model/<name>.yaml. RecBole's own models are not among them.
MODELS = Registry("model", "model", reserved=RECBOLE)


def list_runnable() -> list[str]:
    """Return the names of all models that can be run, those that users have registered too."""
    return [*MODELS.shipped, *RECBOLE, *MODELS.added]


def is_on_our_base(model: str) -> bool:
    """Return whether a model extends ``PosRecommender``, the base class of the plugin's models.

    Such a model can be trained on windows, parts of histories in which many interactions have a
    target, and by every value of ``loss_type``.

    Args:
        model: name of the model. It may be one of the plugin's, of RecBole's or of a user's.
    """
    from recbole_pos.model.base import PosRecommender

    return model in MODELS and issubclass(MODELS[model], PosRecommender)


def is_untrained(model: str) -> bool:
    """Return whether a model only counts, and has no parameters for gradients to change.

    A class of the plugin's or of a user's (MODELS) says so by an attribute ``is_untrained``; of
    RecBole's models a table (RECBOLE) says it.

    Args:
        model: name of the model.
    """
    if model in MODELS:
        return getattr(MODELS[model], "is_untrained", False)
    return RECBOLE[model].get("untrained", False)


def list_kinds(model: str, model_type: Any, schemes: Iterable[str] = ()) -> set[str]:
    """Return of which kinds a model is, which decides the options that it can read.

    The table of options (``options.yaml``) says of an option by which kinds of models it is read.
    The kinds overlap: a model is of each kind whose condition is met.

    Args:
        model: name of the model.
        model_type: RecBole's ``ModelType`` of its class.
        schemes: names of its position schemes.

    Returns:
        Kinds, such as "the plugin's models".
    """
    kinds = set()
    # A model that a user has registered may read histories and times, whatever it extends.
    is_custom = model in MODELS.added
    if is_custom:
        kinds.add("custom models")
    if is_custom or model_type.name == "SEQUENTIAL":
        kinds.add("models of histories")

    # models that extend ``PosRecommender``: the plugin's, and possibly a user's
    has_our_base = is_on_our_base(model)
    if has_our_base:
        kinds.add("the plugin's models")
    # time-aware schemes have an attribute ``reads_request``: they read when a request comes
    reads_time = any(getattr(SCHEMES[name], "reads_request", False) for name in schemes)
    if is_custom or (has_our_base and reads_time):
        kinds.add("models with a time-aware scheme")

    # models that only count have no gradients; RecBole calls its own of that kind TRADITIONAL
    if model_type.name != "TRADITIONAL" and not is_untrained(model):
        kinds.add("models trained by gradients")
    return kinds


def find_unread_options(model: str) -> Mapping[str, str]:
    """Return which of the options that every model accepts one model never reads, and why.

    For example, a model that knows only the last item of a history does not read
    ``MAX_ITEM_LIST_LENGTH``. A user who gives it for this model would see no effect, so the run is
    refused with the reason.

    Args:
        model: name of the model.

    Returns:
        Name of each such option -> the reason, as a sentence for the user.
    """
    # a class of the plugin or of a user may name such options in an attribute ``refuses``
    if model in MODELS:
        return getattr(MODELS[model], "refuses", {})
    # RecBole's classes have no such attribute: a table, name of the model -> facts, has theirs
    return RECBOLE[model].get("unread", {})


def reads_users(name: str, model_class: type) -> bool:
    """Return whether a model reads who the user is, as matrix factorisation does.

    Such a model has something trained for each user, so it can score only users of the training
    data. All other models read a history, and can score any.

    Args:
        name: name of the model.
        model_class: class of the model. Classes of this package and of users may have an attribute
            ``reads_users`` that says it. For RecBole's models the mapping ``RECBOLE`` says it.
    """
    default = RECBOLE.get(name, {}).get("reads_users", False)
    return getattr(model_class, "reads_users", default)


def is_served(model: str) -> bool:
    """Return whether ``plug.py`` gives RecBole the plugin's data and trainer for a model.

    It does for the plugin's own models and for classes of users that extend the plugin's base
    class.
    """
    return model in MODELS.shipped or is_on_our_base(model)


def register_model(model: type, defaults: Defaults | None = None, name: str | None = None) -> type:
    """Register a custom model under a name, wherever the plugin takes names of models.

    A :class:`~recbole_pos.model.base.PosRecommender` trains, is tested and searched as the plugin's
    models are. Any other sequential or general recommender in RecBole's form (``calculate_loss``,
    ``predict`` or ``full_sort_predict``) trains as RecBole's models do, on histories with one
    target each.

    Args:
        model: the class. It inherits the defaults of the model that it extends, such as all options
            of ``PosSASRec``.
        defaults: values of the other options that it reads; the attribute ``defaults`` of the class
            when None. Only keys that have a default can be given to a run.
        name: name of the model; that of the class when None.

    Returns:
        The class, so that the function can be used as a decorator.

    Raises:
        UsageError: if the class is no recommender that can run here, the name is another model's,
            or the defaults cannot be read.

    Example::

        class Deep(recbole_pos.PosRecommender): ...

        recbole_pos.register_model(Deep, defaults={"n_layers": 3})
        recbole_pos.run("Deep", "ml-100k", config_dict={"n_layers": 4})
    """
    _require_recommender(model)
    # the module of the caller, one frame up, which other processes import to register the model
    module = find_importing_module(sys._getframe(1))
    _register(model, defaults, name or model.__name__, module)
    return model


def ensure_registered(model: type) -> str:
    """Return the name by which a run finds a model class, and register the class if it has none.

    RecBole's models, the plugin's, and those that users have registered have names already. Any
    other class is registered under its ``__name__``.

    Args:
        model: the class.

    Returns:
        The name.

    Raises:
        UsageError: if the class is no recommender that can run here.
    """
    _require_recommender(model)
    # one of RecBole's models
    if model.__module__.startswith("recbole.model.") and model.__name__ in list_runnable():
        return model.__name__
    # one of the plugin's models, or one that a user has registered
    if name := MODELS.find_name(model):
        return name

    # A notebook cell that is run twice makes a new class of the same name. If the first one was
    # registered with defaults (``given``), the new one keeps them.
    earlier = MODELS.find_registration(model)
    defaults = None if earlier is None else earlier.given
    _register(model, defaults, model.__name__, module=None)
    return model.__name__


def _register(model: type, defaults: Defaults | None, name: str, module: str | None) -> None:
    """Add a model to the table MODELS: its class, the defaults of its options, and a module.

    The module is what other processes of a run import, to have the model in their tables, too.

    Args:
        model: the class.
        defaults: those that a user has given for some options; None if for none.
        name: name of the model.
        module: the module that registers this model when it is imported, as it calls
            ``register_model``; None if no module does.

    Raises:
        UsageError: if the name is another model's, or the defaults cannot be read.
    """
    # A model of this package under its own name and with its defaults is in the table already.
    if defaults is None and name == MODELS.find_shipped_name(model):
        return

    # If no module registers the model, another process may still find the class, by its name in the
    # module that defines it. That is enough if the model has the name of the class and no defaults.
    # ``find_home_module`` returns that module; None for a class of a notebook, which no process
    # can import.
    is_plain_class = defaults is None and name == model.__name__
    if module is None and is_plain_class:
        module = find_home_module(model)

    # The default of every option, inherited ones too, and the names of options that are new.
    # ``_read_base_defaults`` reads those of classes that it extends and that are not in MODELS.
    all_defaults, new_options = MODELS.gather_defaults(model, defaults, _read_base_defaults)
    MODELS.add(name, Registration(model, defaults, all_defaults, new_options, module))


def _require_recommender(model: Any) -> None:
    """Raise UsageError unless ``model`` is the class of a model that can be trained here.

    Args:
        model: what a user has given as a model.
    """
    if not isinstance(model, type):
        raise UsageError(f"model: expected a class or a name, found {shown(model)}")
    from recbole.model.abstract_recommender import AbstractRecommender
    from recbole.utils import ModelType

    # RecBole's classes have an attribute ``type``: of histories, or of users and items
    kinds = (ModelType.SEQUENTIAL, ModelType.GENERAL, ModelType.TRADITIONAL)
    if not issubclass(model, AbstractRecommender) or getattr(model, "type", None) not in kinds:
        raise UsageError(
            f"model {import_path(model)} is no recommender that can run here: expected a class "
            "that extends recbole_pos.PosRecommender, or RecBole's SequentialRecommender or "
            "GeneralRecommender"
        )


def _read_base_defaults(model: type) -> dict[str, Any]:
    """Return the defaults that a custom model inherits from one of the classes that it extends.

    Args:
        model: the class that is extended. Only ``PosRecommender`` and RecBole's models have a yaml
            file of defaults that is read here.

    Returns:
        Option -> default; ``{}`` for any other class.
    """
    path = import_path(model)  # text such as "module:Class"
    if path == "recbole_pos.model.base:PosRecommender":
        return read_yaml(ROOT / "base.yaml")  # ROOT is the folder ``properties``
    if path.startswith("recbole.model."):
        file = find_recbole_properties() / "model" / f"{model.__name__}.yaml"
        return read_yaml(file) if file.is_file() else {}
    return {}


def explain_unknown(name: str) -> str:
    """Return the message that no model that can be run has this name, and what to do."""
    return (
        f"unknown model {shown(name)}{suggest(name, list_runnable())}; `recbole-pos models` lists "
        "what can be run. Another of RecBole's, or one of your own: name the module that has it, "
        "as in --plugins='[my_models]', or in Python call recbole_pos.register_model first"
    )
