"""Lets RecBole itself find the plugin: ``run_recbole(model="FPARec", dataset="ml-100k")``.

RecBole looks up four things by a model's name: its class (``get_model``), ``<name>Dataset`` in
``recbole.data.dataset``, ``<name>Trainer`` in ``recbole.trainer``, and its yaml file. The functions
here answer for the plugin's models. RecBole's checkpoints, which it would unpickle, are read
without running what they hold.
"""

from __future__ import annotations

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
        "recbole.data.dataset": ("Dataset", "data.dataset", "PosSequentialDataset"),
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

    from recbole_pos.config.defaults import add_time_field, own_defaults, plugin_defaults
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
    from recbole_pos.config.defaults import free_options
    from recbole_pos.config.presets import list_positions

    free = free_options(model, list_positions(options.get("position"), model))
    for key in options.keys() & defaults.keys():
        check_value("configuration", key, options[key], defaults[key], key in free)
    all_options = {**defaults, **options}
    check_sizes({key: all_options[key] for key in all_options if key not in free}, model)


# --- checkpoints ---


def _read_checkpoint(file: Any) -> dict[str, Any]:
    """Read a checkpoint without running code that it names."""
    from recbole_pos.experiment.recbole_file import read

    return read(file)


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
) -> Any:
    """Evaluate with the best weights, read without running code."""
    if eval_data and load_best_model:
        _load_weights(self.model, _read_checkpoint(model_file or self.saved_model_file))
    return evaluate(self, eval_data, load_best_model=False, show_progress=show_progress)


@wrap_function("recbole.trainer.trainer", "Trainer.resume_checkpoint")
def _resume_checkpoint(original: Any, self: Any, resume_file: Any) -> None:
    """Resume from a checkpoint, read without running code."""
    state = _read_checkpoint(resume_file)
    self.saved_model_file = str(resume_file)
    self.start_epoch = state["epoch"] + 1
    self.cur_step = state["cur_step"]
    self.best_valid_score = state["best_valid_score"]
    _load_weights(self.model, state)
    self.optimizer.load_state_dict(state["optimizer"])
    self.logger.info(f"Checkpoint loaded. Resume training from epoch {self.start_epoch}")


@wrap_function("recbole.quick_start.quick_start", "load_data_and_model")
def _load_data_and_model(original: Any, model_file: Any) -> tuple[Any, ...]:
    """Return config, model, dataset and three loaders of a checkpoint, without running its code."""
    from recbole.quick_start import quick_start

    from recbole_pos.experiment.checkpoint import require_same_data

    state = _read_checkpoint(model_file)
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
