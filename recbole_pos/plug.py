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
    """Return the class of a model, the plugin's included."""
    from recbole_pos.model.models import OURS

    return OURS[model_name] if model_name in OURS else get_model(model_name)


@patch_module("recbole.data.dataset")
@patch_module("recbole.trainer")
def _add_class(module: ModuleType) -> None:
    """Let RecBole find ``<model>Dataset`` or ``<model>Trainer`` in a module for our models."""
    suffix, submodule, class_name = {
        "recbole.trainer": ("Trainer", "experiment.trainer", "PosTrainer"),
        "recbole.data.dataset": ("Dataset", "data.recbole_view", "read_view"),
    }[module.__name__]

    def find_class(name: str) -> Any:
        from recbole_pos.model.models import is_served

        if name.endswith(suffix) and is_served(name.removesuffix(suffix)):
            return getattr(import_module(f"recbole_pos.{submodule}"), class_name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = find_class  # called for names that the module lacks (PEP 562)


@wrap_function("recbole.config.configurator", "Config._load_internal_config_dict")
def _add_defaults(load: Any, self: Any, model: str, model_class: type, dataset: str) -> None:
    """Add the plugin's defaults to a configuration of RecBole, and check its options."""
    from recbole.config import Config

    from recbole_pos.config.sources import add_time_field, own_defaults, plugin_defaults
    from recbole_pos.model.models import is_served

    load(self, model, model_class, dataset)
    internal, options = self.internal_config_dict, self.external_config_dict
    if not is_served(model):  # RecBole's model, or a custom one in RecBole's form
        internal.update(own_defaults(model))
        return
    defaults = plugin_defaults(model, options.get("position"), options.get("loss_type"))
    internal.update(defaults)
    if type(self) is Config:  # PosConfig merges and checks more
        if isinstance(options.get("eval_args"), dict):  # RecBole would replace all of it
            options["eval_args"] = {**defaults["eval_args"], **options["eval_args"]}
        _check_options(options, defaults, model)
    load_col = internal.get("load_col")
    internal["load_col"] = add_time_field({**internal, **options, "load_col": load_col})


def _check_options(options: dict[str, Any], defaults: dict[str, Any], model: str) -> None:
    """Refuse options of the plugin that do not fit their defaults, or each other."""
    from recbole_pos.config.checks import check_sizes, check_value
    from recbole_pos.config.options import find_option
    from recbole_pos.config.sources import free_options, list_positions

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
    """Write a checkpoint of RecBole's trainer, and remember its path."""
    file = options.get("saved_model_file", self.saved_model_file)
    save(self, *args, **options)
    _WRITTEN.add(os.path.realpath(file))


def _read_checkpoint(file: Any, trust: bool, device: Any = None) -> dict[str, Any]:
    """Return what RecBole's trainer saves, from its file or a checkpoint of this package.

    Args:
        trust: whether code in the file may be run; without, it holds tensors and plain values, or
            was written by this process.
        device: device for the tensors of a file of RecBole's; by default where they were saved.
    """
    import torch

    from recbole_pos.experiment import checkpoint

    if trust or os.path.realpath(file) in _WRITTEN:
        state = torch.load(file, map_location=device, weights_only=False)
        if state.get("format") != checkpoint.FORMAT:
            return state
    return _read_own_checkpoint(file)


def _read_own_checkpoint(file: Any) -> dict[str, Any]:
    """Return a checkpoint of this package in RecBole's form, with the best weights."""
    from recbole_pos.errors import CheckpointError
    from recbole_pos.experiment import checkpoint
    from recbole_pos.experiment.checkpoint import make_config
    from recbole_pos.model.models import is_served
    from recbole_pos.plain import from_plain

    state = checkpoint.load(file, ("config", "weights", "best_weights"))
    config = make_config(state, file)
    if not is_served(config["model"]):
        raise CheckpointError(
            f"{file} is of {config['model']}, trained by recbole-pos on its own split, which "
            "RecBole does not make; load it with recbole_pos.load"
        )
    # RecBole would unpickle the data that these options name, or its own guesses of their place:
    # no file can be below another file
    for key in ("dataset_save_path", "dataloaders_save_path"):
        config[key] = os.path.join(file, "nothing")
    weights = state["best_weights"] or state["weights"]
    others = from_plain(weights["other"])
    return {
        **state,
        "config": config,
        "state_dict": weights["state_dict"],
        "other_parameter": others,
    }


def _load_weights(model: Any, state: dict[str, Any]) -> None:
    """Load the weights of a checkpoint into a model, and its ``other_parameter``."""
    model.load_state_dict(state["state_dict"])
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
    """Evaluate with the best weights, of the trainer's own file or of ``model_file``."""
    if eval_data and load_best_model:
        file = model_file or self.saved_model_file
        _load_weights(self.model, _read_checkpoint(file, trust, self.device))
    return evaluate(self, eval_data, load_best_model=False, show_progress=show_progress)


@wrap_function("recbole.trainer.trainer", "Trainer.resume_checkpoint")
def _resume_checkpoint(original: Any, self: Any, resume_file: Any, trust: bool = False) -> None:
    """Resume from a checkpoint."""
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
    """Return config, model, dataset and three loaders of a checkpoint."""
    from recbole.quick_start import quick_start

    from recbole_pos.experiment.checkpoint import require_same_data

    state = _read_checkpoint(model_file, trust)
    config = state["config"]
    quick_start.init_seed(config["seed"], config["reproducibility"])
    quick_start.init_logger(config)
    dataset = quick_start.create_dataset(config)
    loaders = quick_start.data_preparation(config, dataset)
    if state.get("data"):  # of a plugin's model
        require_same_data(state, dataset.identity, model_file)
    quick_start.init_seed(config["seed"], config["reproducibility"])
    model_class = quick_start.get_model(config["model"])
    model = model_class(config, loaders[0]._dataset).to(config["device"])
    _load_weights(model, state)
    return config, model, dataset, *loaders
