"""From a configuration to an experiment; what does not fit together is refused first."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from recbole.utils import init_seed

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data import preparation
from recbole_pos.data.dataset import Dataset, check_selected, map_fields_to_tables
from recbole_pos.data.identity import require_counts
from recbole_pos.data.loaders import make_held_out_loaders, make_training_loader
from recbole_pos.data.recbole_view import RecBoleView, make_views
from recbole_pos.errors import UsageError
from recbole_pos.experiment.device import get_memory_limit, is_out_of_memory, require_score_memory
from recbole_pos.experiment.diagnosis import locate_in_custom_code
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.trainer import PosTrainer
from recbole_pos.experiment.warm_start import apply_start_options, require_updatable
from recbole_pos.model.models import MODELS
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
    """Make data, model and trainer for a configuration, after seeding all random numbers.

    The model gets the weights of another run if an option says so: ``init_from`` (a run on the same
    data) or ``update_from`` (a run on the same data before they grew).

    Args:
        config: configuration of the run.
        fresh: whether the run starts from the beginning. Otherwise the caller loads weights from a
            checkpoint, and ``init_from`` and ``update_from`` are not read.
        dataset: a dataset of this configuration; read from its files if None.

    Returns:
        The experiment: the model on its device, with loaders of batches and trainer, not trained
        yet.

    Raises:
        UsageError: if options, data and memory do not fit together.
    """
    started = time.perf_counter()
    init_seed(config["seed"], config["reproducibility"])
    dataset, train_data, loaders = _prepare_data(config, fresh, dataset)
    data_seconds = time.perf_counter() - started
    # Beyond ``sce_above`` items the default loss is one that scores only some of them.
    config.adapt_loss(dataset.item_num - 1)  # id 0 is padding

    # Reading the data may have drawn random numbers, or not, if they came from the cache. The
    # initial weights must not depend on that, so the seed is set again.
    init_seed(config["seed"], config["reproducibility"])
    model = build_model(config, dataset, train_data)
    # Weights of another run (``init_from``, ``update_from``), and what ``train_only`` freezes.
    apply_start_options(model, config, dataset, with_weights=fresh)

    # The training loader needs to know what the model requires of its batches, which an adapter
    # (between a model and the loop of training) tells.
    train = make_training_loader(config, train_data, make_adapter(config, model).requirements())

    # RecBole's metrics of popularity count training interactions, which the collector gets here.
    # The trainer's ``fit`` gives it these, too, but a loaded model is tested without ``fit``.
    trainer = PosTrainer(config, model)
    # ``part_size`` is the number of items of a part, None if all items are scored at once.
    require_score_memory(config, dataset, num_items=trainer.part_size or dataset.item_num)
    trainer.eval_collector.data_collect(train)
    return Experiment(config, dataset, {"train": train, **loaders}, model, trainer, data_seconds)


def _prepare_data(
    config: PosConfig, fresh: bool, dataset: Dataset | None
) -> tuple[Dataset, RecBoleView, dict[str, Any]]:
    """Read the dataset, if none is given, and make the loaders of validation and test.

    ``make_views`` divides it into the phases train, valid and test, each a view: a dataset in the
    form that RecBole's classes read.

    Args:
        config: configuration of the run.
        fresh: whether the run starts from the beginning; only then is a public dataset's number of
            interactions checked, since an existing run has passed the check.
        dataset: a dataset of this configuration; read from its files if None.

    Returns:
        dataset: the whole dataset.
        train: its training part, as RecBole's models read it.
        loaders: loaders of the phases valid and test, by name; None for a phase without targets.

    Raises:
        UsageError: if the data and options do not fit together.
    """
    try:
        if dataset is None:
            dataset = read_dataset(config)
        views = make_views(dataset)
        if fresh and config.expected_counts:
            require_counts(config["dataset"], config.expected_counts, dataset)
        loaders = make_held_out_loaders(config, views)
    except UsageError:  # says already what is wrong
        raise
    except (ValueError, NotImplementedError) as error:  # how RecBole refuses a data option
        raise UsageError(f"data: {error}") from error
    except KeyError as error:
        raise UsageError(f"data: an option names the field {error}, which is not loaded") from error
    # A list of the best items cannot be longer than the items, of which one id is padding.
    if max(config["topk"]) >= dataset.item_num:
        raise UsageError(
            f"topk: {max(config['topk'])} is more than the {dataset.item_num - 1} items of "
            f"{shown(config['dataset'])}; give smaller cutoffs"
        )
    return dataset, views["train"], loaders


def read_dataset(
    config: PosConfig, folder: RunFolder | None = None, hold_out_later: bool = False
) -> Dataset:
    """Read the dataset of a configuration from its files.

    Users and items get numbers (ids), and the weights of a model are stored by id. A run that uses
    the weights of an earlier run must give each user and item the id that it has there. These ids
    are in the vocabulary, a file in the folder of the earlier run. There are two cases:

    - This run itself is resumed or loaded. ``folder`` is its folder.
    - This run trains the model of another run further, whose folder is the option ``update_from``.
      Its vocabulary is used until this run has written one of its own.

    A new run gives ids in the order of the files.

    Args:
        config: the configuration.
        folder: folder of this run, if it is resumed or loaded; else None.
        hold_out_later: whether interactions that the earlier run did not have are kept apart, in
            ``held_out`` of the dataset.

    Returns:
        The dataset, split, with its held-out later data if these are asked for.
    """
    # ``read_vocabulary`` returns None if the folder has no vocabulary yet. ``require_updatable``
    # refuses the folder of a run that cannot be trained further, and else returns it.
    vocabulary = None if folder is None else folder.read_vocabulary(config)
    if vocabulary is None and config["update_from"]:
        vocabulary = require_updatable(config["update_from"]).read_vocabulary(config)
    return preparation.read_dataset(config, vocabulary, hold_out_later)


def build_model(config: PosConfig, dataset: Dataset, train_data: RecBoleView) -> Any:
    """Build the model of a configuration for a dataset, on the device of the configuration.

    Args:
        config: the configuration.
        dataset: the whole dataset.
        train_data: its training part, which the constructors of RecBole's models read.

    Returns:
        The model on its device, with random weights.

    Raises:
        UsageError: says why the model cannot be built. Errors in custom code are raised as they
            are, since its author needs the traceback.
    """
    # ``selected_features`` are attributes to embed; refuse those that the model cannot embed.
    if "selected_features" in config:
        check_selected(dataset, config["selected_features"])
    config.asked_for.clear()  # options without a value that the model reads
    try:
        model = config.model_class(config, train_data)
        _require_weight_memory(model)
        return model.to(config["device"])
    except UsageError:  # says already what is wrong
        raise
    except Exception as error:  # a model may raise anything for options it cannot work with
        if locate_in_custom_code(error):  # the place in a file of the user's, None if in none
            raise
        raise _explain_build_error(error, config, dataset) from error
    finally:  # also after an error, which such an option may have caused
        _warn_of_missing_options(config)


def _warn_of_missing_options(config: PosConfig) -> None:
    """Warn if a custom model of a new run reads an option that has no value, and so gets None.

    An option has no value if no yaml file, no argument and no default sets it. The configuration
    collects the names of such options in the set ``asked_for`` when the model reads them.
    """
    # MODELS.added has the custom models. ``strict`` is true for a new run only: whoever loads or
    # resumes a run was warned when it was new.
    # ``names`` is empty if the model has read no such option.
    names = ", ".join(sorted(config.asked_for))
    if names and config.strict and config["model"] in MODELS.added:
        text = f"{config['model']} reads {names}, and no default is given for that: it got None"
        logging.getLogger(__name__).warning(text)


def _require_weight_memory(model: Any) -> None:
    """Raise a MemoryError if the weights of a model, with a gradient of each, exceed the memory."""
    # ``p`` is a parameter; only those that require a gradient are trained.
    num_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if 2 * num_bytes > get_memory_limit():  # a gradient is as large as its weight
        raise MemoryError


def _explain_build_error(error: Exception, config: PosConfig, dataset: Dataset) -> UsageError:
    """Return the error to raise if a model of this package or of RecBole cannot be built.

    Args:
        error: what its constructor raised. A KeyError is of a field that is not loaded.
        config: the configuration.
        dataset: the dataset, whose loaded fields the message lists.
    """
    name = config["model"]
    if is_out_of_memory(error):
        return UsageError(
            f"{name}: its weights do not fit into the {get_memory_limit() / 2**30:,.3g} GiB of "
            f"memory, for {dataset.item_num:,} items; choose smaller sizes, of hidden_size, "
            "MAX_ITEM_LIST_LENGTH and the like"
        )
    if isinstance(error, KeyError):  # its text is the missing field
        loaded = listed(map_fields_to_tables(dataset))  # the names of the fields, with commas
        return UsageError(
            f"{name} needs {error}, but the fields loaded are {loaded}; "
            "see load_col, and selected_features for models that embed attributes"
        )
    return UsageError(f"{name} cannot be built: {error}")
