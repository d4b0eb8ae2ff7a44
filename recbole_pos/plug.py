"""Lets RecBole itself find the plugin: ``run_recbole(model="FPARec", dataset="ml-100k")``.

RecBole looks up four things by a model's name: its class (``get_model``), ``<name>Dataset`` in
``recbole.data.dataset``, ``<name>Trainer`` in ``recbole.trainer``, and its yaml file. The functions
here answer for the plugin's models. RecBole's checkpoints, which it would unpickle, load if this
process has written them or the user trusts them; those of the plugin are for ``recbole_pos.load``.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Any

from recbole_pos.compat import patch_module, wrap_function


@wrap_function("recbole.utils.utils", "get_model")
def _get_model(get_model: Any, model_name: str) -> type:
    """Return the class of a model by its name, of the plugin's models and of RecBole's.

    It replaces RecBole's function, which knows only its own models.

    Args:
        get_model: RecBole's function.
        model_name: name of the model.
    """
    from recbole_pos.model.models import MODELS

    # MODELS has the plugin's models and those that users have registered.
    return MODELS[model_name] if model_name in MODELS else get_model(model_name)


@patch_module("recbole.data.dataset")
def _add_datasets(module: ModuleType) -> None:
    """Let RecBole find the plugin's data where it looks for a dataset by a model's name."""
    _add_class(module, "Dataset", "recbole_pos.data.recbole_view", "read_view")


@patch_module("recbole.trainer")
def _add_trainers(module: ModuleType) -> None:
    """Let RecBole find the plugin's trainer where it looks for a trainer by a model's name."""
    _add_class(module, "Trainer", "recbole_pos.experiment.trainer", "PosTrainer")


def _add_class(module: ModuleType, suffix: str, home: str, class_name: str) -> None:
    """Let RecBole find a class (or function) of this package in one of RecBole's modules.

    For example RecBole trains the model FPARec by the class ``FPARecTrainer`` in its module
    ``recbole.trainer``. The module has no such class. With ``suffix="Trainer"`` it gets a function
    ``__getattr__``, which Python calls for names that a module lacks (PEP 562), and which returns
    this package's ``PosTrainer`` for FPARec and all other models that this package trains.

    Args:
        module: RecBole's module, such as ``recbole.trainer``.
        suffix: what follows a model's name in the names that RecBole asks for.
        home: full name of the module of this package that has the class.
        class_name: name of the class there, such as ``PosTrainer``.
    """

    def find_class(name: str) -> Any:
        from recbole_pos.model.models import is_served

        # ``is_served`` says whether this package makes the data and the training of a model.
        if name.endswith(suffix) and is_served(name.removesuffix(suffix)):
            return getattr(import_module(home), class_name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = find_class


@wrap_function("recbole.config.configurator", "Config._load_internal_config_dict")
def _add_defaults(load: Any, self: Any, model: str, model_class: type, dataset: str) -> None:
    """Read the defaults of options as RecBole does, and add those of this package.

    This function replaces a method of RecBole's ``Config``, and calls it first (``load``). What it
    adds depends on the model:

    - a model that this package trains (``is_served``): the defaults of all options of this package,
      those of the model, its position schemes and its loss included (``plugin_defaults``)
    - any other model, such as one of RecBole's: only the defaults that a user has registered it
      with, if any (``own_defaults``).

    Args:
        load: RecBole's method, which fills ``self.internal_config_dict`` with its own defaults.
        self: the configuration. Its ``external_config_dict`` has the options that the user gave.
        model: name of the model.
        model_class: its class.
        dataset: name of the dataset.
    """
    from recbole.config import Config

    from recbole_pos.config.sources import add_time_field, own_defaults, plugin_defaults
    from recbole_pos.model.models import is_served

    load(self, model, model_class, dataset)
    internal, options = self.internal_config_dict, self.external_config_dict
    if not is_served(model):
        internal.update(own_defaults(model))
        return

    defaults = plugin_defaults(model, options.get("position"), options.get("loss_type"))
    internal.update(defaults)

    # This package's own configurations (PosConfig, a subclass of Config) check the user's options
    # themselves. For one that RecBole's ``run_recbole`` makes, they are checked here.
    if type(self) is Config:
        # RecBole would replace the whole default of eval_args by the keys that are given.
        if isinstance(options.get("eval_args"), dict):
            options["eval_args"] = {**defaults["eval_args"], **options["eval_args"]}
        _check_options(options, defaults, model)

    # ``load_col`` lists the columns to read. RecBole's default leaves out the time, which models of
    # this package need, so it is added. All options are given for the name of the time's column.
    all_options = {**internal, **options}
    internal["load_col"] = add_time_field(internal.get("load_col"), all_options)


def _check_options(options: dict[str, Any], defaults: dict[str, Any], model: str) -> None:
    """Raise a UsageError for an option of the plugin that has a wrong value or contradicts another.

    Args:
        options: options that the user gave to RecBole.
        defaults: the plugin's defaults for the model. Options without a default here are RecBole's
            own, and not checked.
        model: name of the model.
    """
    from recbole_pos.config.checks import check_sizes, check_value
    from recbole_pos.config.options import find_option
    from recbole_pos.config.sources import free_options, list_positions

    # Options that only a custom model or position scheme has may hold anything.
    free = free_options(model, list_positions(options.get("position"), model))
    for key in options.keys() & defaults.keys() - free:
        check_value("configuration", find_option(key), options[key])

    all_options = {**defaults, **options}
    check_sizes({key: all_options[key] for key in all_options if key not in free}, model)


# --- checkpoints ---
# RecBole 1.2 calls a bare ``torch.load``, which in torch 2.6 and later refuses RecBole's own files:
# their pickled configuration could run code. Here such a file loads if this process has written it,
# or if the user trusts it: the functions of RecBole take a further argument ``trust``.

_WRITTEN: set[str] = set()  # absolute paths of the checkpoints that this process has written


@wrap_function("recbole.trainer.trainer", "Trainer._save_checkpoint")
def _save_checkpoint(save: Any, self: Any, *args: Any, **options: Any) -> None:
    """Write a checkpoint as RecBole's trainer does, and remember that this process has written it.

    Such a file may be unpickled later, which could run code if it came from a stranger.

    Args:
        save: RecBole's method.
        self: the trainer.
        args, options: arguments of the method.
    """
    file = options.get("saved_model_file", self.saved_model_file)
    save(self, *args, **options)
    _WRITTEN.add(os.path.realpath(file))  # such files are read without being trusted by the user


@wrap_function("recbole.trainer.trainer", "Trainer.evaluate")
@wrap_function("recbole.trainer.trainer", "Trainer.resume_checkpoint")
@wrap_function("recbole.quick_start.quick_start", "load_data_and_model")
def _unpickle_trusted(original: Any, *args: Any, trust: bool = False, **options: Any) -> Any:
    """Call a function of RecBole that reads a checkpoint, but run no code of strangers.

    While the function runs, ``torch.load`` unpickles a file that this process has written, or any
    file if the user trusts it. Another file raises an error.

    Args:
        original: RecBole's function.
        args, options: its arguments.
        trust: whether code in the checkpoint may be run.

    Returns:
        What RecBole's function returns.

    Raises:
        CheckpointError: if the file is not trusted; those of this package never are, since RecBole
            cannot read them.
    """
    import torch

    from recbole_pos.errors import CheckpointError

    torch_load = torch.load

    def load_trusted(file: Any, **load_options: Any) -> Any:
        if trust or os.path.realpath(file) in _WRITTEN:
            return torch_load(file, weights_only=False, **load_options)
        raise CheckpointError(
            f"{file} may run code when RecBole loads it, and this process has not written it: load "
            "one of recbole-pos with recbole_pos.load; one of RecBole's that you trust, trust=True"
        )

    vars(torch)["load"] = load_trusted
    try:
        return original(*args, **options)
    finally:
        vars(torch)["load"] = torch_load
