"""Lets RecBole itself find the plugin: ``run_recbole(model="FPARec", dataset="ml-100k")``.

RecBole looks four things up by a model's name: its class (``get_model``), ``<name>Dataset`` in
``recbole.data.dataset``, ``<name>Trainer`` in ``recbole.trainer``, and a yaml file among its own
properties. All are answered here, and so is what reads a checkpoint, which RecBole unpickles.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from recbole_pos.compat import patches, wrap


@patches("recbole.utils.utils")
def _add_models(utils: ModuleType) -> None:
    def get_model(original: Callable[[str], type], model_name: str) -> type:
        from recbole_pos.model.models import OURS

        return OURS[model_name] if model_name in OURS else original(model_name)

    wrap(utils, "get_model", get_model)


@patches("recbole.data.dataset")
@patches("recbole.trainer")
def _add_class(module: ModuleType) -> None:
    """Make a module have ``<model>Dataset`` or ``<model>Trainer`` for the plugin's models."""
    suffix, submodule, class_name = {
        "recbole.trainer": ("Trainer", "experiment.trainer", "PosTrainer"),
        "recbole.data.dataset": ("Dataset", "data.dataset", "PosSequentialDataset"),
    }[module.__name__]

    def find_class(name: str) -> Any:
        from recbole_pos.model.models import served

        if name.endswith(suffix) and served(name.removesuffix(suffix)):
            return getattr(import_module(f"recbole_pos.{submodule}"), class_name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = find_class  # called for names that the module lacks (PEP 562)


@patches("recbole.config.configurator")
def _add_defaults(configurator: ModuleType) -> None:
    def around(load: Any, self: Any, model: str, model_class: type, dataset: str) -> None:
        from recbole_pos.config import checks, defaults
        from recbole_pos.config.presets import list_positions
        from recbole_pos.model.models import served

        load(self, model, model_class, dataset)
        own = self.internal_config_dict
        if not served(model):  # of RecBole's: nothing; in RecBole's form: its own
            own.update(defaults.own_defaults(model))
            return
        given = self.external_config_dict
        added = defaults.plugin_defaults(model, given.get("position"), given.get("loss_type"))
        own.update(added)
        if type(self) is configurator.Config:  # PosConfig merges and checks more
            if isinstance(given.get("eval_args"), dict):  # RecBole would replace all of it
                given["eval_args"] = {**added["eval_args"], **given["eval_args"]}
            free = defaults.free_options(model, list_positions(given.get("position"), model))
            for key in given.keys() & added.keys():
                checks.check_value("configuration", key, given[key], added[key], key in free)
            both = {**added, **given}
            checks.check_sizes({key: both[key] for key in both if key not in free}, model)
        own["load_col"] = defaults.add_time_field({**own, **given, "load_col": own.get("load_col")})

    wrap(configurator.Config, "_load_internal_config_dict", around)


# --- checkpoints ---


def _read(file: Any) -> dict[str, Any]:
    """Read a checkpoint without running code that it names."""
    from recbole_pos.experiment.recbole_file import read

    return read(file)


def _load_weights(model: Any, state: dict[str, Any]) -> None:
    model.load_state_dict(state["state_dict"])
    model.load_other_parameter(state.get("other_parameter"))


@patches("recbole.trainer.trainer")
def _read_safely_in_trainer(trainer: ModuleType) -> None:
    def evaluate(
        original: Callable[..., Any],
        self: Any,
        eval_data: Any,
        load_best_model: bool = True,
        model_file: Any = None,
        show_progress: bool = False,
    ) -> Any:
        if eval_data and load_best_model:
            _load_weights(self.model, _read(model_file or self.saved_model_file))
        return original(self, eval_data, False, None, show_progress)

    def resume_checkpoint(original: Callable[..., Any], self: Any, resume_file: Any) -> None:
        state = _read(resume_file)
        self.saved_model_file, self.start_epoch = str(resume_file), state["epoch"] + 1
        self.cur_step, self.best_valid_score = state["cur_step"], state["best_valid_score"]
        _load_weights(self.model, state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.logger.info(f"Checkpoint loaded. Resume training from epoch {self.start_epoch}")

    wrap(trainer.Trainer, "evaluate", evaluate)
    wrap(trainer.Trainer, "resume_checkpoint", resume_checkpoint)


@patches("recbole.quick_start.quick_start")
def _read_safely_in_quick_start(quick_start: ModuleType) -> None:
    def load_data_and_model(original: Callable[..., Any], model_file: Any) -> tuple[Any, ...]:
        """Do what RecBole's does, with a file that is read without running code."""
        from recbole_pos.experiment.checkpoint import require_same_data

        state = _read(model_file)
        config = state["config"]
        quick_start.init_seed(config["seed"], config["reproducibility"])
        quick_start.init_logger(config)
        dataset = quick_start.create_dataset(config)
        loaders = quick_start.data_preparation(config, dataset)
        if state.get("data"):  # of a plugin's model
            require_same_data(state, dataset.identity, model_file)
        quick_start.init_seed(config["seed"], config["reproducibility"])
        build = quick_start.get_model(config["model"])
        model = build(config, loaders[0]._dataset).to(config["device"])
        _load_weights(model, state)
        return config, model, dataset, *loaders

    wrap(quick_start, "load_data_and_model", load_data_and_model)
