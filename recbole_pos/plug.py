"""Lets RecBole itself find the plugin: ``run_recbole(model="FPARec", dataset="ml-100k")``.

RecBole looks four things up by a model's name: its class (``get_model``), ``<name>Dataset`` in
``recbole.data.dataset``, ``<name>Trainer`` in ``recbole.trainer``, and a yaml file among its own
properties. All are answered here, and so is what reads a checkpoint, which RecBole unpickles:
``load_data_and_model``, ``Trainer.evaluate`` and ``Trainer.resume_checkpoint``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from recbole_pos.compat import PATCHES, wrap


def register() -> None:
    """Register every model of the plugin with RecBole, as its modules are imported."""
    doors: dict[str, Callable[[ModuleType], None]] = {
        "recbole.utils.utils": _add_models,
        "recbole.data.dataset": functools.partial(_add_class, "Dataset", "data.dataset"),
        "recbole.trainer": functools.partial(_add_class, "Trainer", "experiment.trainer"),
        "recbole.config.configurator": _add_defaults,
        "recbole.trainer.trainer": _read_safely_in_trainer,
        "recbole.quick_start.quick_start": _read_safely_in_quick_start,
    }
    for name, door in doors.items():
        PATCHES.setdefault(name, []).append(door)


def _is_ours(name: str) -> bool:
    from recbole_pos.model.models import served

    return served(name)


_OURS = {"Dataset": "PosSequentialDataset", "Trainer": "PosTrainer"}


def _add_class(suffix: str, place: str, module: ModuleType) -> None:
    """Make a module have ``<model><suffix>`` for the plugin's models."""

    def attribute(name: str) -> Any:
        if name.endswith(suffix) and _is_ours(name.removesuffix(suffix)):
            return getattr(import_module(f"recbole_pos.{place}"), _OURS[suffix])
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = attribute


def _replace(module: ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Put a function in the place of RecBole's, in every module that has it by this name."""
    original = getattr(module, name)
    new = functools.wraps(original)(functools.partial(function, original))
    for other in [m for n, m in sys.modules.items() if n.startswith("recbole")]:
        if vars(other).get(name) is original:
            vars(other)[name] = new


def _add_models(module: ModuleType) -> None:
    def get_model(original: Callable[[str], type], model_name: str) -> type:
        from recbole_pos.model.models import OURS

        return OURS[model_name] if model_name in OURS else original(model_name)

    _replace(module, "get_model", get_model)


def _add_defaults(configurator: ModuleType) -> None:
    def around(load: Any, self: Any, model: str, model_class: type, dataset: str) -> None:
        from recbole_pos.config import checks, defaults
        from recbole_pos.config.presets import list_positions

        load(self, model, model_class, dataset)
        own = self.internal_config_dict
        if not _is_ours(model):  # of RecBole's: nothing; in RecBole's form: its own
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
                check = checks.check_own if key in free else checks.check_value
                check("configuration", key, given[key], added[key])
            both = {**added, **given}
            checks.check_sizes({key: both[key] for key in both if key not in free}, model)
        own["load_col"] = defaults.add_time_field({**own, **given, "load_col": own.get("load_col")})

    wrap(configurator.Config, "_load_internal_config_dict", around)


# --- checkpoints ---


def _put(model: Any, state: dict[str, Any]) -> None:
    model.load_state_dict(state["state_dict"])
    model.load_other_parameter(state.get("other_parameter"))


def _read_safely_in_trainer(module: ModuleType) -> None:
    def evaluate(
        original: Callable[..., Any],
        self: Any,
        eval_data: Any,
        load_best_model: bool = True,
        model_file: Any = None,
        show_progress: bool = False,
    ) -> Any:
        if eval_data and load_best_model:
            from recbole_pos.experiment.recbole_file import read

            _put(self.model, read(model_file or self.saved_model_file))
        return original(self, eval_data, False, None, show_progress)

    def resume_checkpoint(original: Callable[..., Any], self: Any, resume_file: Any) -> None:
        from recbole_pos.experiment.recbole_file import read

        state = read(resume_file)
        self.saved_model_file, self.start_epoch = str(resume_file), state["epoch"] + 1
        self.cur_step, self.best_valid_score = state["cur_step"], state["best_valid_score"]
        _put(self.model, state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.logger.info(f"Checkpoint loaded. Resume training from epoch {self.start_epoch}")

    wrap(module.Trainer, "evaluate", evaluate)
    wrap(module.Trainer, "resume_checkpoint", resume_checkpoint)


def _read_safely_in_quick_start(module: ModuleType) -> None:
    def load_data_and_model(original: Callable[..., Any], model_file: Any) -> tuple[Any, ...]:
        """Do what RecBole's does, with a file that is read without running code."""
        from recbole_pos.experiment.checkpoint import require_same_data
        from recbole_pos.experiment.recbole_file import read

        state = read(model_file)
        config = state["config"]
        module.init_seed(config["seed"], config["reproducibility"])
        module.init_logger(config)
        dataset = module.create_dataset(config)
        loaders = module.data_preparation(config, dataset)
        if state.get("data"):  # of a plugin's model
            require_same_data(state, dataset.identity, model_file)
        module.init_seed(config["seed"], config["reproducibility"])
        build = module.get_model(config["model"])
        model = build(config, loaders[0]._dataset).to(config["device"])
        _put(model, state)
        return config, model, dataset, *loaders

    _replace(module, "load_data_and_model", load_data_and_model)
