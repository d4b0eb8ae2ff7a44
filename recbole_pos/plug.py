"""Lets RecBole itself find the plugin: ``run_recbole(model="FPARec", dataset="ml-100k")``.

RecBole looks four things up by a model's name: the module ``recbole.model.*.<name in lower case>``,
``<name>Dataset`` in ``recbole.data.dataset``, ``<name>Trainer`` in ``recbole.trainer``, and a yaml
file among its own properties. The first three are answered below when RecBole asks; the last is one
wrapper around ``Config._load_internal_config_dict``. Where RecBole reads a checkpoint, its
``torch.load`` is given one that runs nothing: ``load_data_and_model``, ``Trainer.evaluate`` and
``Trainer.resume_checkpoint``. No function of RecBole is replaced by a copy.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from recbole_pos.compat import after, when_imported

_PLACE = "recbole.model.sequential_recommender."


def into_recbole() -> None:
    """Register every model of the plugin with RecBole. Safe to call twice."""
    if not any(isinstance(finder, _Models) for finder in sys.meta_path):
        sys.meta_path.append(_Models())
    when_imported("recbole.data.dataset", after(functools.partial(_answer, "Dataset", _dataset)))
    when_imported("recbole.trainer", after(functools.partial(_answer, "Trainer", _trainer)))
    when_imported("recbole.config.configurator", after(_add_defaults))
    when_imported("recbole.trainer.trainer", after(_read_safely_in_trainer))
    when_imported("recbole.quick_start.quick_start", after(_read_safely_in_quick_start))


def _ours(name: str) -> bool:
    from recbole_pos.model.models import served

    return served(name)


def _dataset() -> type:
    from recbole_pos.data.dataset import PosSequentialDataset

    return PosSequentialDataset


def _trainer() -> type:
    from recbole_pos.experiment.trainer import PosTrainer

    return PosTrainer


def _answer(suffix: str, found: Callable[[], type], module: ModuleType) -> None:
    """Make a module have ``<model><suffix>`` for the plugin's models."""

    def attribute(name: str) -> type:
        if name.endswith(suffix) and _ours(name.removesuffix(suffix)):
            return found()
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = attribute


class _Models(MetaPathFinder, Loader):
    """Modules with the plugin's models, where RecBole looks for models."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(_PLACE) or self._model(name) is None:
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from recbole_pos.model.models import OURS

        vars(module)["__getattr__"] = lambda name: _attribute(module, name, OURS)

    def _model(self, name: str) -> Any:
        from recbole_pos.model.models import OURS

        wanted = name.removeprefix(_PLACE)
        return next((model for model in OURS if model.lower() == wanted), None)


def _attribute(module: ModuleType, name: str, models: Mapping[str, type]) -> type:
    """Looked up each time: a name may be registered for another class meanwhile."""
    if name not in models:
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    return models[name]


def _add_defaults(configurator: ModuleType) -> None:
    load = configurator.Config._load_internal_config_dict
    if not hasattr(load, "__wrapped__"):
        configurator.Config._load_internal_config_dict = _with_plugin_defaults(load)


def _with_plugin_defaults(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def wrapper(self: Any, model: str, model_class: type, dataset: str) -> None:
        from recbole_pos.config.checks import check_own, check_sizes, check_value
        from recbole_pos.config.defaults import (
            free_options,
            own_defaults,
            plugin_defaults,
            with_time_field,
        )
        from recbole_pos.config.presets import positions

        load(self, model, model_class, dataset)
        if _ours(model):
            given = self.external_config_dict
            defaults = plugin_defaults(model, given.get("position"), given.get("loss_type"))
            self.internal_config_dict.update(defaults)
            if type(self).__module__ == load.__module__:  # PosConfig merges and checks more
                if isinstance(given.get("eval_args"), dict):  # RecBole would replace all of it
                    given["eval_args"] = {**defaults["eval_args"], **given["eval_args"]}
                free = free_options(model, positions(given.get("position"), model))
                for key in given.keys() & defaults.keys():
                    check = check_own if key in free else check_value
                    check("configuration", key, given[key], defaults[key])
                both = {**defaults, **given}
                check_sizes({key: both[key] for key in both if key not in free}, model)
            both = {**self.internal_config_dict, **given}
            both["load_col"] = self.internal_config_dict.get("load_col")
            self.internal_config_dict["load_col"] = with_time_field(both)
        else:  # of RecBole's: nothing; in RecBole's form: its own, all else is RecBole's
            self.internal_config_dict.update(own_defaults(model))

    return wrapper


# --- checkpoints ---

_LOADING = threading.RLock()


@contextmanager
def _torch_load(path: str, read: Callable[..., dict[str, Any]]) -> Iterator[None]:
    """Within, the first ``torch.load`` of that very object is ``read``."""
    import torch

    def load(file: Any, *args: Any, **options: Any) -> Any:
        if file is not path:  # of another thread
            return theirs(file, *args, **options)
        vars(torch)["load"] = theirs
        return read(file, *args, **options)

    with _LOADING:
        theirs = torch.load
        vars(torch)["load"] = load
        try:
            yield
        finally:
            vars(torch)["load"] = theirs


def _read_safely_in_trainer(module: ModuleType) -> None:
    Trainer = module.Trainer
    evaluate, resume = Trainer.evaluate, Trainer.resume_checkpoint
    if hasattr(resume, "__wrapped__"):
        return

    @functools.wraps(evaluate)
    def evaluated(
        self: Any,
        eval_data: Any,
        load_best_model: bool = True,
        model_file: Any = None,
        show_progress: bool = False,
    ) -> Any:
        if not load_best_model:
            return evaluate(self, eval_data, False, model_file, show_progress)
        from recbole_pos.experiment.recbole_file import read

        file = str(model_file or self.saved_model_file)
        with _torch_load(file, read):
            return evaluate(self, eval_data, True, file, show_progress)

    @functools.wraps(resume)
    def resumed(self: Any, resume_file: Any) -> None:
        from recbole_pos.experiment.recbole_file import read

        file = str(resume_file)
        with _torch_load(file, read):
            resume(self, file)

    Trainer.evaluate, Trainer.resume_checkpoint = evaluated, resumed


def _read_safely_in_quick_start(module: ModuleType) -> None:
    theirs = module.load_data_and_model
    if hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def loaded(model_file: Any) -> Any:
        from recbole_pos.experiment.checkpoint import require_same_data
        from recbole_pos.experiment.recbole_file import read_any

        state: dict[str, Any] = {}
        file = str(model_file)
        with _torch_load(file, lambda path: state.update(read_any(path)) or state):
            found = theirs(file)
        if state.get("data"):  # of a plugin's model
            require_same_data(state, found[2].identity, file)
        return found

    for place in (module, sys.modules.get("recbole.quick_start")):
        if hasattr(place, "load_data_and_model"):
            vars(place)["load_data_and_model"] = loaded
