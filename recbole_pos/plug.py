"""Lets RecBole itself find the plugin: ``run_recbole(model="FPARec", dataset="ml-100k")``.

RecBole looks four things up by a model's name: the module ``recbole.model.*.<name in lower case>``,
``<name>Dataset`` in ``recbole.data.dataset``, ``<name>Trainer`` in ``recbole.trainer``, and a yaml
file among its own properties. The first three are filled in below; the last becomes one wrapper
around ``Config._load_internal_config_dict``. No function of RecBole is replaced by a copy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import recbole.data.dataset
import recbole.trainer
from recbole.config import Config

from recbole_pos.data.dataset import PosSequentialDataset
from recbole_pos.properties import plugin_defaults, with_time_field
from recbole_pos.registry import BASELINES, MODELS
from recbole_pos.trainer import PosTrainer


def into_recbole() -> None:
    """Register every model of the plugin with RecBole. Safe to call twice."""
    for name, model in {**MODELS, **BASELINES}.items():
        sys.modules[f"recbole.model.sequential_recommender.{name.lower()}"] = sys.modules[
            model.__module__
        ]
        setattr(recbole.data.dataset, f"{name}Dataset", PosSequentialDataset)
        setattr(recbole.trainer, f"{name}Trainer", PosTrainer)
    if not hasattr(Config._load_internal_config_dict, "__wrapped__"):
        Config._load_internal_config_dict = _with_plugin_defaults(Config._load_internal_config_dict)


def _with_plugin_defaults(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def wrapper(self: Config, model: str, model_class: type, dataset: str) -> None:
        load(self, model, model_class, dataset)
        if model in MODELS or model in BASELINES:
            given = self.external_config_dict
            defaults = plugin_defaults(model, given.get("position"), given.get("loss_type"))
            self.internal_config_dict.update(defaults)
            both = {**self.internal_config_dict, **given}
            self.internal_config_dict["load_col"] = with_time_field(both)

    return wrapper
