"""From a configuration to an experiment; what does not fit together is refused first."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from recbole.utils import init_seed

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data import preparation
from recbole_pos.data.attributes import check_selected, map_fields_to_tables
from recbole_pos.data.dataset import Dataset
from recbole_pos.data.identity import Vocabulary, require_counts
from recbole_pos.data.loaders import make_held_out_loaders, make_training_loader
from recbole_pos.data.recbole_view import RecBoleView, make_views
from recbole_pos.errors import UsageError
from recbole_pos.experiment.device import (
    require_scores,
)
from recbole_pos.experiment.diagnosis import locate_in_custom_code
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.trainer import PosTrainer
from recbole_pos.experiment.warm_start import apply_start_options, require_updatable, update_weights
from recbole_pos.model.models import ADDED
from recbole_pos.model.training import make_adapter
from recbole_pos.values import listed, shown


@dataclass(repr=False)
class Experiment:
    """A configured model, on its device, with its data.

    Attributes:
        dataset: all interactions, before the split.
        loaders: loaders by phase: train, valid, test.
        trainer: its PosTrainer; None where the model was loaded without data.
        data_seconds: seconds that reading and splitting the data took.
        changed: of a loaded model, fields whose values have changed since training.
    """

    config: PosConfig
    dataset: Dataset
    loaders: dict[str, Any]
    model: Any
    trainer: Any
    data_seconds: float
    changed: list[str] = field(default_factory=list)


def prepare(config: PosConfig, fresh: bool = True, dataset: Dataset | None = None) -> Experiment:
    """Make data, model and trainer for a configuration, seeded.

    Args:
        config: configuration of the run; a UsageError says what in it, the data and the memory
            does not fit together.
        fresh: whether the run starts from the beginning. Otherwise the caller loads weights from a
            checkpoint, and ``init_from`` and ``update_from`` are not read.
        dataset: a dataset of this configuration; read from its files if None.
    """
    started = time.perf_counter()
    init_seed(config["seed"], config["reproducibility"])
    dataset, train_data, loaders = _prepare_data(config, fresh, dataset)
    data_seconds = time.perf_counter() - started
    init_seed(config["seed"], config["reproducibility"])
    model = build_model(config, dataset, train_data)
    if config["request_time"] == "target" and not getattr(model, "reads_request", False):
        position = f" with position {shown(config['position'])}" if config["position"] else ""
        raise UsageError(
            f"request_time: target is for PosSASRec, TORoPE and the like with a time-aware scheme "
            f"in position; {config['model']}{position} reads no time of a request. Give such a "
            "scheme, as time_rope (`recbole-pos schemes` lists them), or set request_time: none"
        )
    train = make_training_loader(config, train_data, make_adapter(config, model).requirements())
    apply_start_options(model, config, dataset.identity, with_weights=fresh)
    if fresh and config["update_from"]:
        update_weights(model, config, dataset)
    trainer = PosTrainer(config, model)
    require_scores(config, dataset, trainer.part_size or dataset.item_num)
    trainer.eval_collector.data_collect(train)  # a loaded model is tested without fit
    return Experiment(config, dataset, {"train": train, **loaders}, model, trainer, data_seconds)


def _prepare_data(
    config: PosConfig, fresh: bool, dataset: Dataset | None
) -> tuple[Dataset, RecBoleView, dict[str, Any]]:
    """Return the dataset, the view of its training part, and the loaders of valid and test."""
    try:
        if dataset is None:
            dataset = read_dataset(config)
        views = make_views(dataset)
        if fresh and config.expected_counts:
            require_counts(config["dataset"], config.expected_counts, dataset)
        loaders = make_held_out_loaders(config, views)
    except UsageError:
        raise
    except (ValueError, NotImplementedError) as error:  # how RecBole refuses a data option
        raise UsageError(f"data: {error}") from error
    except KeyError as error:
        raise UsageError(f"data: an option names the field {error}, which is not loaded") from error
    if max(config["topk"]) >= dataset.item_num:
        raise UsageError(
            f"topk: {max(config['topk'])} is more than the {dataset.item_num - 1} items of "
            f"{shown(config['dataset'])}; give smaller cutoffs"
        )
    return dataset, views["train"], loaders


def read_dataset(
    config: PosConfig, folder: RunFolder | None = None, hold_out_later: bool = False
) -> Dataset:
    """Return the dataset of a configuration, read from its files.

    Users and items keep the ids that they have in an earlier run, by default ``update_from``;
    interactions that it did not have are held out if ``hold_out_later``.
    """
    vocabulary = None if folder is None else load_vocabulary(folder, config)
    if vocabulary is None and config["update_from"]:
        vocabulary = load_vocabulary(require_updatable(config["update_from"]), config)
    return preparation.read_dataset(config, vocabulary, hold_out_later)


def load_vocabulary(folder: RunFolder, config: PosConfig) -> Vocabulary | None:
    """Return the vocabulary of a run; None if its folder has none, as that of a .pth file."""
    return folder.read_vocabulary(config["USER_ID_FIELD"], config["ITEM_ID_FIELD"])


def build_model(config: PosConfig, dataset: Dataset, train_data: RecBoleView) -> Any:
    """Build the model of a configuration for the training part of a dataset, on its device.

    A UsageError says why it cannot be built; errors of custom code are raised unchanged.
    """
    if "selected_features" in config:
        check_selected(dataset, config["selected_features"])
    config.asked_for.clear()
    try:
        model = config.model_class(config, train_data)
        if config.strict and config["model"] in ADDED:
            _warn_of_missing(config)
        return model.to(config["device"])
    except UsageError:
        raise
    except Exception as error:  # a model may raise anything for options it cannot work with
        if locate_in_custom_code(error):  # its author needs the traceback
            _warn_of_missing(config)
            raise
        raise _explain_build_error(error, config, dataset) from error


def _warn_of_missing(config: PosConfig) -> None:
    """Log which options the constructor of a model has read that no source has."""
    if missing := sorted(config.asked_for):
        logging.getLogger(__name__).warning(
            f"{config['model']} reads {', '.join(missing)}, and no default is given for that: it "
            "got None"
        )


def _explain_build_error(error: Exception, config: PosConfig, dataset: Dataset) -> UsageError:
    """Return the error to raise where a model of the plugin or of RecBole cannot be built."""
    name = config["model"]
    if isinstance(error, KeyError):  # its text is the missing field
        loaded = listed(map_fields_to_tables(dataset))
        return UsageError(
            f"{name} needs {error}, but the fields loaded are {loaded}; "
            "see load_col, and selected_features for models that embed attributes"
        )
    return UsageError(f"{name} cannot be built: {error}")
