"""Lets RecBole itself find the plugin: ``run_recbole(model="FPARec", dataset="ml-100k")``.

RecBole looks up four things by a model's name: its class (``get_model``), ``<name>Dataset`` in
``recbole.data.dataset``, ``<name>Trainer`` in ``recbole.trainer``, and its yaml file. The functions
here answer for the plugin's models. RecBole's checkpoints, which it would unpickle, load if this
process has written them or the user trusts them.
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


def _read_checkpoint(file: Any, trust: bool, device: Any = None) -> dict[str, Any]:
    """Return the content of a checkpoint as RecBole names it, without running code of strangers.

    There are two kinds of files. RecBole's trainer pickles its checkpoints, so that reading one may
    run code that is in it: it is read only if this process has written it, or the user trusts it.
    The checkpoints of recbole-pos have only tensors and plain values, and are always read. Their
    content is then converted to RecBole's names.

    Args:
        file: path of the checkpoint.
        trust: whether the user allows that code in the file is run.
        device: device for the tensors of a file that this process has written or the user trusts;
            by default where they were saved. Those of other files are on the CPU.

    Returns:
        ``config``, ``state_dict`` (the weights), ``other_parameter`` and so on, by name.

    Raises:
        CheckpointError: if the file must not be, or cannot be, read.
    """
    import torch

    from recbole_pos.experiment import checkpoint

    # ``_WRITTEN`` are the checkpoints of RecBole's trainer that this process has written.
    if not trust and os.path.realpath(file) not in _WRITTEN:
        # ``load`` refuses a pickled file, and names the argument ``trust``.
        return _convert_to_recbole(checkpoint.load(file), file)

    # A file that the user trusts may be of either kind; recbole-pos marks its own by ``FORMAT``.
    state = torch.load(file, map_location=device, weights_only=False)
    is_ours = state.get("format") == checkpoint.FORMAT
    return _convert_to_recbole(state, file) if is_ours else state


def _convert_to_recbole(state: dict[str, Any], file: Any) -> dict[str, Any]:
    """Give a checkpoint of this package the names that RecBole looks for, with the best weights.

    Args:
        state: content of the checkpoint.
        file: its path.

    Returns:
        The content with RecBole's names added: ``config``, ``state_dict`` (the weights) and
        ``other_parameter`` (what a model keeps beside weights, such as counts).

    Raises:
        CheckpointError: if RecBole would split the data of the model in another way than the run.
    """
    from recbole_pos.config.posconfig import PosConfig
    from recbole_pos.errors import CheckpointError
    from recbole_pos.model.models import is_served
    from recbole_pos.plain import from_plain

    # RecBole gets the data of this package, split as in the run, for models that this package
    # trains (``is_served``). Data of other models, such as its SASRec, it would split itself.
    config = PosConfig(config_dict=state["config"], strict=False)
    if not is_served(config["model"]):
        raise CheckpointError(
            f"{file} is of {config['model']}, trained by recbole-pos on its own split, which "
            "RecBole does not make; load it with recbole_pos.load"
        )

    # RecBole unpickles data that it finds at these two paths, by default in its usual folder. That
    # could run code, so they lead nowhere: nothing is within a checkpoint, a file and no folder.
    for key in ("dataset_save_path", "dataloaders_save_path"):
        config[key] = os.path.join(file, "nothing")

    weights = state["best_weights"] or state["weights"]
    return {
        **state,
        "config": config,
        "state_dict": weights["state_dict"],
        "other_parameter": from_plain(weights["other"]),
    }


def _load_weights(model: Any, state: dict[str, Any]) -> None:
    """Load the parameters of a checkpoint into a model.

    Args:
        model: a model of RecBole's form.
        state: the checkpoint. ``state_dict`` are the weights. ``other_parameter`` are values that
            RecBole keeps beside them, such as the counts of the model Pop; it may be missing.
    """
    model.load_state_dict(state["state_dict"])
    # RecBole's method does nothing for None
    model.load_other_parameter(state.get("other_parameter"))


@wrap_function("recbole.trainer.trainer", "Trainer.evaluate")
def _evaluate(
    evaluate: Any,
    self: Any,
    eval_data: Any,
    load_best_model: bool = True,
    model_file: Any = None,
    show_progress: bool = False,
    trust: bool = False,
) -> Any:
    """Evaluate as RecBole's trainer does, but run no code that the checkpoint may hold.

    Args:
        evaluate: RecBole's method, which gets a model that has its weights already.
        self: the trainer.
        eval_data: loader of the interactions to predict.
        load_best_model: whether to load a checkpoint first, and not to evaluate the present
            weights.
        model_file: the checkpoint to load; by default the one that this trainer has saved.
        show_progress: whether to show a progress bar.
        trust: whether code in the checkpoint may be run.

    Returns:
        The metrics by name.
    """
    if eval_data and load_best_model:
        file = model_file or self.saved_model_file
        _load_weights(self.model, _read_checkpoint(file, trust, self.device))
    # The weights are loaded by now, and RecBole must not load them again.
    return evaluate(self, eval_data, load_best_model=False, show_progress=show_progress)


@wrap_function("recbole.trainer.trainer", "Trainer.resume_checkpoint")
def _resume_checkpoint(original: Any, self: Any, resume_file: Any, trust: bool = False) -> None:
    """Let a trainer of RecBole's go on from a checkpoint, without running code that the file holds.

    Args:
        original: RecBole's method, which is not called.
        self: the trainer, which gets the weights and the states of the checkpoint.
        resume_file: path of the checkpoint.
        trust: whether code in the checkpoint may be run.
    """
    state = _read_checkpoint(resume_file, trust, self.device)
    self.saved_model_file = str(resume_file)
    self.start_epoch = state["epoch"] + 1
    self.cur_step = state["cur_step"]
    self.best_valid_score = state["best_valid_score"]
    _load_weights(self.model, state)
    self.optimizer.load_state_dict(state["optimizer"])
    self.logger.info(f"Checkpoint loaded. Resume training from epoch {self.start_epoch}")


@wrap_function("recbole.quick_start.quick_start", "load_data_and_model")
def _load_data_and_model(original: Any, model_file: Any, trust: bool = False) -> tuple[Any, ...]:
    """Return what RecBole's function of this name does, without running code in the checkpoint.

    Args:
        original: RecBole's function, which is not called.
        model_file: path of the checkpoint.
        trust: whether code in the checkpoint may be run.

    Returns:
        The configuration, the model with its weights, the dataset, and the loaders of training,
        validation and test.
    """
    from recbole.quick_start import quick_start

    from recbole_pos.experiment.checkpoint import require_same_data

    state = _read_checkpoint(model_file, trust)
    config = state["config"]

    # The dataset is read and split again, with the seed of the run.
    quick_start.init_seed(config["seed"], config["reproducibility"])
    quick_start.init_logger(config)
    dataset = quick_start.create_dataset(config)
    loaders = quick_start.data_preparation(config, dataset)
    if state.get("data"):  # checkpoints of this package say which data the model was trained on
        require_same_data(state, dataset.identity, model_file)

    # Seed again, as RecBole's function does, so that the model is built with the run's numbers.
    quick_start.init_seed(config["seed"], config["reproducibility"])
    model_class = quick_start.get_model(config["model"])
    model = model_class(config, loaders[0]._dataset).to(config["device"])
    _load_weights(model, state)
    return config, model, dataset, *loaders
