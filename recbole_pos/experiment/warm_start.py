"""Start from a trained model: weights of another run, on the same data or data that have grown.

The kernel attention paper attaches its kernel to the best pretrained models and fine-tunes only the
kernel's factors (Nabiev and Frolov, section 6.1). A kernel starts as the identity, so training
starts exactly at the trained model. ``init_from`` refuses other data, attributes or splits: the
weights would have seen targets that are held out here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.config.options import MODEL, find_option
from recbole_pos.config.sources import own_defaults, starts_from_runs
from recbole_pos.data.dataset import SIDE_FEATURES, Dataset, read_item_attribute
from recbole_pos.data.identity import Vocabulary
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.checkpoint import find_difference
from recbole_pos.experiment.folder import RunFolder, is_unfinished
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.values import Options, shown


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

    # The position schemes of the earlier run must be there still. Not all models have the option
    # ``position``; the name ``nope`` in it stands for no scheme.
    position = earlier.get("position", ["nope"])
    present = [name for name in scheme_names(position) if name != "nope"]
    missing = [name for name in present if name not in scheme_names(config["position"])]
    if missing:
        raise UsageError(f"{option}: its run has the scheme {', '.join(missing)}, this run has not")

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
        UsageError: if it holds no run, no names of its items by id, or a run that is not finished.
    """
    folder = RunFolder(path).require("update_from")
    if not folder.names.is_file():
        raise UsageError(f"update_from: {folder.path} has no {folder.names.name}; copy it again")
    if is_unfinished(folder):
        raise UsageError(f"update_from: {folder.path} is unfinished; {folder.how_to_finish} first")
    return folder


def _update_weights(model: Any, config: Options, dataset: Dataset) -> None:
    """Give a model the weights of an earlier run, whose data had fewer interactions and items.

    With the option ``new_items``, items that are new since then begin as means over similar items.

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
    assert vocabulary is not None  # checked by require_updatable
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
    if config["new_items"] is not None:
        if not model.item_embedding.has_ids:  # vectors of items are computed from their content
            raise UsageError("new_items: items have no own vectors with item_vectors_use: replace")
        tokens = read_item_attribute(dataset, config["new_items"])  # [items, s] ids, 0 for none
        with torch.no_grad():
            fill_new_items(model.item_embedding.weight, num_known, tokens)


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


def fill_new_items(vectors: Tensor, num_known: int, tokens: Tensor) -> None:
    """Set the vectors of new items to means over the known items that share a token with them.

    Tokens are values of an attribute, such as genres. A token has the mean vector of its known
    items, and a new item gets the mean over its tokens that known items have. A new item without
    such a token keeps its vector. For example, if the known items with the genre "war" have the
    mean 1 and those with "love" 3, a new item with both genres gets 2.

    Args:
        vectors: [items, d] vectors of items, padding first; changed in place.
        num_known: number of known items, which come first.
        tokens: [items, s] tokens of each item, 0 for none.
    """
    # A pair for each token of each item, also if the item has it twice.
    item, slot = tokens.nonzero(as_tuple=True)
    pairs = torch.stack((item, tokens[item, slot])).unique(dim=1).to(vectors.device)
    item, token = pairs
    is_known = item < num_known

    # Mean vector of the known items of each token, [tokens, d]; 0 for tokens without known items.
    num_tokens = int(tokens.max()) + 1
    known_counts = torch.bincount(token[is_known], minlength=num_tokens)
    sums = vectors.new_zeros(num_tokens, vectors.size(1), dtype=torch.float64)
    sums.index_add_(0, token[is_known], vectors[item[is_known]].double())
    token_means = sums / known_counts.clamp(min=1)[:, None]

    # Mean over the tokens of each new item, of tokens that known items have, [items, d].
    is_used = ~is_known & (known_counts[token] > 0)
    used_counts = torch.bincount(item[is_used], minlength=len(vectors))
    sums = torch.zeros_like(vectors, dtype=torch.float64)
    sums.index_add_(0, item[is_used], token_means[token[is_used]])
    has_mean = used_counts > 0
    vectors[has_mean] = (sums[has_mean] / used_counts[has_mean, None]).to(vectors)
