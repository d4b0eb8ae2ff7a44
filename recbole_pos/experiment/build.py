"""From a configuration to an experiment; what does not fit together is refused first.

An experiment may start from the weights of another run, on the same data (``init_from``) or data
that have grown (``update_from``). The kernel attention paper attaches its kernel to the best
pretrained models and fine-tunes only the kernel's factors (Nabiev and Frolov, section 6.1). A
kernel starts as the identity, so training starts exactly at the trained model. ``init_from``
refuses other data, attributes or splits: the weights would have seen targets that are held out.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from recbole.utils import init_seed
from torch import Tensor, nn

from recbole_pos.config.options import MODEL, find_option
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.config.sources import own_defaults, starts_from_runs
from recbole_pos.data import preparation
from recbole_pos.data.dataset import (
    SIDE_FEATURES,
    Dataset,
    check_selected,
    map_fields_to_tables,
)
from recbole_pos.data.identity import Vocabulary, count_dataset, require_counts
from recbole_pos.data.loaders import make_held_out_loaders, make_training_loader
from recbole_pos.data.recbole_view import RecBoleView, make_views
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.checkpoint import find_difference
from recbole_pos.experiment.device import require_score_memory
from recbole_pos.experiment.diagnosis import locate_in_custom_code
from recbole_pos.experiment.folder import RunFolder, is_unfinished
from recbole_pos.experiment.trainer import PosTrainer
from recbole_pos.model.models import MODELS
from recbole_pos.model.training import make_adapter
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.values import Options, listed, shown


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
    # Some defaults depend on the numbers of items, of interactions, and of users who have any.
    users = int(np.count_nonzero(dataset.log.lengths))
    config.adapt({**count_dataset(dataset), "users": users})

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
        return config.model_class(config, train_data).to(config["device"])
    except UsageError:  # says already what is wrong
        raise
    except Exception as error:  # a model may raise anything for options it cannot work with
        if locate_in_custom_code(error):  # the place in a file of the user's, None if in none
            raise
        problem = f"{config['model']} cannot be built: {error}"
        if isinstance(error, KeyError):  # its text is the missing field
            problem = (
                f"{config['model']} needs {error}, but the fields loaded are "
                f"{listed(map_fields_to_tables(dataset))}; see load_col, and selected_features for "
                "models that embed attributes"
            )
        raise UsageError(problem) from error
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


# --- weights of another run ---


def apply_start_options(
    model: nn.Module, config: Options, dataset: Dataset, with_weights: bool
) -> None:
    """Give a new model the weights of another run, and freeze a part of it, where options say so.

    Args:
        model: the model, changed in place.
        config: configuration. ``init_from`` is the folder of a run on the same data,
            ``update_from`` that of one on the same data before they grew. ``train_only`` names the
            position schemes (parts of a model that encode positions) to train. Each may be None.
        dataset: the data of the new model.
        with_weights: whether weights of other runs are read. A resumed run does not read them: it
            gets its own weights from its checkpoint.
    """
    # ``require`` refuses a folder without a trained run, with the option's name in the message;
    # ``identity`` are digests of the data.
    if with_weights and config["init_from"]:
        source = RunFolder(config["init_from"]).require("init_from")
        _load_init_weights(model, source, config, dataset.identity)
    if with_weights and config["update_from"]:
        _update_weights(model, config, dataset)
    if config["train_only"]:
        _freeze_all_but(model, scheme_names(config["train_only"], "train_only"))


def _freeze_all_but(model: nn.Module, names: list[str]) -> None:
    """Freeze all parameters except those of the named position schemes, for ``train_only``.

    A position scheme is a module of the model that encodes positions. A frozen parameter gets no
    gradient, so that training does not change it.

    Args:
        model: the model, changed in place.
        names: names of the schemes that stay trainable, such as ``kernel``.

    Raises:
        UsageError: if the model lacks one of them, or none of them has parameters.
    """
    # Of each name, all modules of its class (SCHEMES: name -> class): a model may have one in every
    # layer.
    trained: set[nn.Parameter] = set()
    missing = []
    for name in names:
        schemes = [module for module in model.modules() if type(module) is SCHEMES[name]]
        trained |= {parameter for scheme in schemes for parameter in scheme.parameters()}
        if not schemes:
            missing.append(name)
    if missing or not trained:
        schemes_without = ", ".join(missing or names)
        raise UsageError(f"train_only: the model has no parameters of {schemes_without}")

    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)


def _load_init_weights(
    model: nn.Module, source: RunFolder, config: Options, identity: dict[str, Any]
) -> None:
    """Load the best weights of a run whose model has the same or fewer position schemes.

    Position schemes are parts of a model that encode positions. Those that the run did not have
    keep their initial weights.

    Args:
        model: the new model, changed in place.
        source: folder of the trained run.
        config: configuration of the new model.
        identity: digests of the data, which must be those that the run was trained on.

    Raises:
        UsageError: if data, options or architecture differ.
    """
    # The run must have had the same options and data: else its weights would mean something else,
    # or have seen targets that are held out here.
    earlier = source.read_config()
    _require_same_options(earlier, config, "init_from")
    state, best_weights = _read_best(source)
    try:
        checkpoint.require_same_data(state, identity, source.checkpoint)
    except CheckpointError as error:
        raise UsageError(f"init_from: {error}") from error

    # The run must have all weights of the model but those of the added schemes.
    earlier_schemes = scheme_names(earlier["position"])
    added_schemes = set(scheme_names(config["position"])).difference(earlier_schemes)
    expected = _get_weights_without(model, added_schemes)
    _require_fit(best_weights, expected, f"init_from: {source.path}")
    model.load_state_dict(best_weights, strict=False)  # the added schemes stay as they are


def _get_weights_without(model: nn.Module, schemes: set[str]) -> dict[str, Tensor]:
    """Return the weights of a model by name, except those of some position schemes.

    A scheme may be in several modules of the model, such as ``layers.0.kernel``. The names of its
    weights begin with that of the module: ``layers.0.kernel.factor``.

    Args:
        model: the model.
        schemes: names of the schemes to leave out.
    """
    classes = {SCHEMES[scheme] for scheme in schemes}
    modules = [name for name, module in model.named_modules() if type(module) in classes]
    prefixes = tuple(f"{name}." for name in modules)
    weights = model.state_dict()
    return {name: weights[name] for name in weights if not name.startswith(prefixes)}


def _require_fit(weights: dict[str, Tensor], expected: dict[str, Tensor], source: str) -> None:
    """Raise a UsageError if the weights of a run do not fit into a model of another architecture.

    Args:
        weights: tensors of the run by name.
        expected: tensors of the model by name, which must have the same names and shapes.
        source: option and folder of the run, with which the message begins.
    """
    if difference := find_difference(weights, expected):
        raise UsageError(f"{source} is of another architecture: {difference}")


def _read_best(source: RunFolder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the checkpoint of a run, and its best weights by the name in ``state_dict``.

    Without a validation there are no best weights; the newest are returned then.
    """
    state = checkpoint.load(source.checkpoint)
    return state, (state["best_weights"] or state["weights"])["state_dict"]


def _require_same_options(earlier: dict[str, Any], config: Options, option: str) -> None:
    """Refuse an earlier run whose weights would mean something else in this run.

    Both runs must have the same dataset and the same options that shape the model. This run must
    have the position schemes of the earlier one, and may have more. Only models of the plugin
    declare which options shape them, so runs of other models are refused.

    Args:
        earlier: options of the earlier run.
        config: configuration of this run.
        option: init_from or update_from, the option that named the earlier run. An updated model
            must be of the same class, too.
    """
    model = str(earlier["model"])
    if not starts_from_runs(model):  # true of the plugin's models, and of custom ones on its base
        raise UsageError(f"{option}: its run is of {model}, not a plugin model")

    # This run must have the position schemes of the earlier one. Not all models have the option
    # ``position``; the name ``nope`` in it stands for no scheme.
    position = earlier.get("position", ["nope"])
    present = [name for name in scheme_names(position) if name != "nope"]
    missing = [name for name in present if name not in scheme_names(config["position"])]
    if missing:
        raise UsageError(f"{option}: its run has the scheme {', '.join(missing)}, this run has not")

    # Compare the options that shape the weights: of the data, of the model and of its schemes.
    names = _list_shaping_options(model, present)
    if option == "update_from":
        names.append("model")
    for name in names:
        if earlier.get(name) != config[name]:
            problem = f"{option}: its run was trained with {name}: {earlier.get(name)}"
            raise UsageError(f"{problem}, this run has {config[name]}")


def _list_shaping_options(model: str, schemes: list[str]) -> list[str]:
    """Return the names of the options that shape a model.

    Two models of the same class can have the same weights only if these options are equal. Options
    of the training, such as the learning rate, are not among them.

    Args:
        model: name of the model.
        schemes: names of its position schemes, which have options of their own.
    """
    # SIDE_FEATURES name the attributes of items, users and interactions that a model embeds.
    common = ["dataset", "MAX_ITEM_LIST_LENGTH", "timestamp_unit", *SIDE_FEATURES]
    of_model = [name for name in own_defaults(model) if find_option(name).role == MODEL]
    of_schemes = [name for scheme in schemes for name in SCHEMES.defaults(scheme)]
    return list(dict.fromkeys([*common, *of_model, *of_schemes]))  # each name once


# --- data that have grown ---
# Known users, items and attributes keep their ids and new ones follow, so each weight of the old
# model is the first part of the same weight of the new model.


def require_updatable(path: str | Path) -> RunFolder:
    """Return the folder of a run that can be trained further (``update_from``).

    Args:
        path: folder of the earlier run.

    Raises:
        UsageError: if it holds no run, or one that is not finished.
    """
    folder = RunFolder(path).require("update_from")
    if is_unfinished(folder):
        raise UsageError(f"update_from: {folder.path} is unfinished; {folder.how_to_finish} first")
    return folder


def _update_weights(model: Any, config: Options, dataset: Dataset) -> None:
    """Give a model the weights of an earlier run, whose data had fewer interactions and items.

    Users and items that are new since then keep the random vectors of the new model.

    Args:
        model: the new model, changed in place.
        config: configuration; ``update_from`` is the folder of the run.
        dataset: the data as they are now.

    Raises:
        UsageError: if the run does not fit, or interactions that it had are missing now.
    """
    # Refuse a run with other options, or data in which interactions of the run are missing. The
    # vocabulary has the names and numbers of interactions of its users and items.
    source = require_updatable(config["update_from"])
    _require_same_options(source.read_config(), config, "update_from")
    vocabulary = source.read_vocabulary(config)
    assert vocabulary is not None  # every run folder has one
    _require_no_loss(vocabulary, config["USER_ID_FIELD"], dataset, source)

    # Users and items of the run have the same ids here, so their weights come first.
    _, weights = _read_best(source)
    _copy_known_weights(weights, model, source)

    # New items have the ids after those of the run. The training logs ``notices`` when it begins.
    num_known = len(vocabulary.tokens[config["ITEM_ID_FIELD"]])  # with the padding id 0
    num_new = dataset.item_num - num_known
    if num_new > 0:
        notice = f"update_from: new items since {source.path.name} was trained: {num_new:,}"
        model.notices.append(notice)


def _copy_known_weights(weights: dict[str, Tensor], model: nn.Module, source: RunFolder) -> None:
    """Copy the weights of an earlier run into the first parts of those of a model.

    Items that the run knew have the same ids, and new ones follow them. So the vectors of items,
    [100, 64] in the run, are the first 100 rows of [120, 64] in the model, whose other rows stay.

    Args:
        weights: weights of the run by name.
        model: the new model, changed in place.
        source: folder of the run, for the message if its model is of another architecture.
    """
    # Of each weight of the model a view of the part that the run has, or the whole weight if the
    # run has no such weight, which is refused. What is copied into a view is in the model.
    parts = model.state_dict()
    # For a weight of shape [100, 64] in the run, the view is ``parts[name][:100, :64]``.
    for name, weight in weights.items():
        if name in parts and parts[name].dim() == weight.dim():
            parts[name] = parts[name][tuple(slice(size) for size in weight.shape)]
    _require_fit(weights, parts, f"update_from: {source.path}")
    for name, part in parts.items():
        part.copy_(weights[name])


def _require_no_loss(
    known: Vocabulary, user_field: str, dataset: Dataset, source: RunFolder
) -> None:
    """Refuse data in which a user has fewer interactions than when an earlier run was trained.

    The last interactions of a user are held out for the test. Where some are missing, the test
    could be on interactions that the run was trained on. A user who has none now is not tested.

    Args:
        known: names and numbers of interactions of the earlier run.
        user_field: name of the field of users.
        dataset: the data as they are now.
        source: folder of the earlier run, for the message.
    """
    # Users of the run have the same ids now; new users follow them.
    before = known.user_counts
    now = dataset.user_counts[: len(before)]
    shrunk = np.flatnonzero((now > 0) & (now < before))
    if len(shrunk) > 0:
        user = shrunk[0]
        name = shown(str(known.tokens[user_field][user]))
        raise UsageError(
            f"update_from: user {name} has {now[user]} interactions, {before[user]} when "
            f"{source.path} was trained ({len(shrunk):,} such users): the test could be on others "
            "that it was trained on; add what is missing, or train from scratch"
        )
