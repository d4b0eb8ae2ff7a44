"""Starting from a trained model: weights of another run, on the same data or data that have grown.

The kernel attention paper attaches its kernel to the best pretrained models and fine-tunes nothing
but the kernel's factors (Nabiev and Frolov, section 6.1). A kernel starts as the identity, so
training starts exactly at the trained model. Other data, attributes or another split are refused:
the weights would have seen what is held out here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from recbole_pos.config.defaults import own_defaults, plugin_defaults, starts_from_runs
from recbole_pos.config.option import MODEL
from recbole_pos.config.options import find_option
from recbole_pos.data.attributes import read_item_attribute
from recbole_pos.data.location import SIDE_FEATURES
from recbole_pos.data.protocols import Dataset
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.result import is_unfinished
from recbole_pos.experiment.state import find_difference, require_known
from recbole_pos.layers.hooks import InputPosition, PositionScheme
from recbole_pos.position.compose import ComposeInput
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.values import Options, shown


def start_from(
    model: nn.Module, config: Options, data: dict[str, Any], weights: bool = True
) -> None:
    """Apply the options ``init_from`` and ``train_only`` of a configuration to a new model.

    Args:
        model: a new model.
        config: configuration of the run.
        data: ``identity`` of the dataset, which must be that of the earlier run.
        weights: whether to load the weights of ``init_from``.
    """
    if weights and config["init_from"]:
        _load_weights(model, RunFolder(config["init_from"]).require("init_from"), config, data)
    if config["train_only"]:
        _train_only(model, scheme_names(config["train_only"], "train_only"))


def _train_only(model: nn.Module, names: list[str]) -> None:
    """Freeze all parameters except those of the named schemes."""
    chosen: set[nn.Parameter] = set()
    for name in names:
        modules = [m for m in model.modules() if type(m) is SCHEMES[name]]
        if not modules:
            raise UsageError(f"train_only: the model has no scheme {shown(name)}")
        chosen |= {parameter for module in modules for parameter in module.parameters()}
    if not chosen:
        raise UsageError(f"train_only: {', '.join(names)} has no parameters to train")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in chosen)


def _load_weights(
    model: nn.Module, source: RunFolder, config: Options, data: dict[str, Any]
) -> None:
    """Load the best weights of a run with fewer schemes; added schemes keep their initial ones."""
    earlier = source.read_config()
    if not starts_from_runs(str(earlier.get("model"))):
        raise UsageError(
            f"init_from: {source.path} is of {earlier.get('model')}, not a plugin model"
        )
    _require_same_function(earlier, config, "init_from")
    state, best = _read_best(source, "init_from")
    try:
        checkpoint.require_same_data(state, data, source.checkpoint)
    except CheckpointError as error:
        raise UsageError(f"init_from: {error}") from error
    present = scheme_names(earlier["position"])
    weights, own = _rename_input(best, present, model), model.state_dict()
    added = {SCHEMES[name] for name in scheme_names(config["position"]) if name not in present}
    places = tuple(f"{name}." for name, part in model.named_modules() if type(part) in added)
    like = {name: own[name] for name in own if name in weights or not name.startswith(places)}
    if wrong := find_difference(weights, like):
        raise UsageError(f"init_from: {source.path} is of another architecture: {wrong}")
    model.load_state_dict(weights, strict=False)


def _read_best(source: RunFolder, option: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the checkpoint of a run and its best weights by name."""
    state = checkpoint.load(source.checkpoint, ("best_weights",))
    weights = (state["best_weights"] or {}).get("state_dict")
    if not isinstance(weights, dict):
        raise UsageError(f"{option}: {source.path} has no trained epoch yet")
    return state, weights


def _require_same_function(earlier: dict[str, Any], ours: Options, option: str) -> None:
    """Refuse weights that mean something else in this run; the shapes may be the same.

    Dataset, options of the model and options of the earlier run's schemes must be the same, and
    none of its schemes may be missing. A UsageError names ``option`` and the first difference.
    """
    present = scheme_names(earlier["position"]) if "position" in earlier else []
    lost = set(present) - {*(scheme_names(ours["position"]) if present else ()), "nope"}
    if lost:
        raise UsageError(f"{option}: its run has the scheme {', '.join(lost)}, this run has not")
    keys = {key for key in own_defaults(earlier["model"]) if find_option(key).role == MODEL}
    schemes: list[type[PositionScheme]] = [SCHEMES[name] for name in present]
    keys.update(*(scheme.options for scheme in schemes))
    keys |= {"MAX_ITEM_LIST_LENGTH", "timestamp_unit", *SIDE_FEATURES}
    defaults = plugin_defaults(earlier["model"], present)
    for key in ("dataset", *sorted(keys)):
        value = earlier.get(key, defaults.get(key))  # an old run may lack a new option
        if value != ours[key]:
            raise UsageError(
                f"{option}: its run was trained with {key}: {value}, this run has {ours[key]}"
            )


def _rename_input(weights: dict[str, Tensor], present: list[str], model: Any) -> dict[str, Tensor]:
    """Return weights with the names that a model with several input encodings has.

    A single one is a part of the model itself; several are parts of a ComposeInput, by name.
    """
    inputs = [name for name in present if issubclass(SCHEMES[name], InputPosition)]
    places = [f"{name}." for name, part in model.named_modules() if isinstance(part, ComposeInput)]
    if len(inputs) != 1 or not places:
        return weights
    (place,), inner = places, f"{places[0]}schemes.{inputs[0]}."
    return {
        inner + key.removeprefix(place) if key.startswith(place) else key: value
        for key, value in weights.items()
    }


# --- data that have grown ---
#
# Names keep their ids and new names follow, so each weight of the old model (of items, attributes,
# users) is the first part of the same weight of the new model.


def updated_run(path: str | Path) -> RunFolder:
    """Return the folder of ``update_from``, which must hold a finished run with its vocabulary."""
    folder = RunFolder(path).require("update_from")
    if not folder.known.is_file():
        raise UsageError(
            f"update_from: {folder.path} has no {folder.known.name}: it was made by an earlier "
            "version, and which item a weight is of is unknown; train again"
        )
    if is_unfinished(folder):
        raise UsageError(f"update_from: {folder.path} is unfinished; {folder.how_to_finish} first")
    return folder


def update_weights(model: Any, config: Options, dataset: Dataset) -> None:
    """Give a new model the weights of ``update_from``, and new items those of ``new_items``.

    In the dataset, which has grown since, known names keep their ids.
    """
    source = updated_run(config["update_from"])
    earlier = source.read_config()
    if earlier["model"] != config["model"]:
        raise UsageError(
            f"update_from: {source.path} is of {earlier['model']}, this run of {config['model']}"
        )
    _require_same_function(earlier, config, "update_from")
    users, items = config["USER_ID_FIELD"], config["ITEM_ID_FIELD"]
    state, weights = _read_best(source, "update_from")
    vocabulary = source.read_vocabulary(users, items)
    assert vocabulary is not None  # ``updated_run``
    require_known(state, vocabulary, source.checkpoint)
    own = model.state_dict()
    parts = {  # the first part of each weight, as large as that of the run
        name: own[name][tuple(map(slice, old.shape))]
        for name, old in weights.items()
        if name in own and isinstance(old, Tensor) and old.dim() == own[name].dim()
    }
    if wrong := find_difference(weights, {**own, **parts}):
        raise UsageError(f"update_from: {source.path} does not fit: {wrong}")
    for name, part in parts.items():
        part.copy_(weights[name])
    known = len(vocabulary.tokens[items])
    model.notices.append(
        f"update_from: new items since {source.path.name} was trained: {dataset.item_num - known:,}"
    )
    if config["new_items"] is not None:
        if not model.item_embedding.has_ids:
            raise UsageError(
                "new_items: with item_vectors_use: replace, items have no vectors of their own; "
                "leave it out"
            )
        tokens = read_item_attribute(dataset, config["new_items"])
        with torch.no_grad():
            fill_new(model.item_embedding.weight, known, tokens)


def fill_new(vectors: Tensor, known: int, tokens: Tensor) -> None:
    """Set the vectors of new items to means over the known items that share a token with them.

    Each token of a new item counts the same, with the mean vector of its known items. A new item
    without a known token keeps its vector.

    Args:
        vectors: [items, d] vectors of items, padding first; changed in place.
        known: number of known items, which come first.
        tokens: [items, s] tokens of each item, 0 for none.
    """
    row, place = tokens.nonzero(as_tuple=True)
    token = tokens[row, place].numpy()
    size = int(tokens.max()) + 1
    has = sp.csr_matrix((np.ones(len(row)), (row.numpy(), token)), (len(tokens), size))
    has.data[:] = 1  # not 2 for a token that an item has twice
    count = np.asarray(has[:known].sum(0)).ravel()
    mean = has[:known].T @ vectors[:known].numpy() / count.clip(1)[:, None]
    shares_with_known = has[known:].multiply(count > 0).tocsr()
    shared = np.asarray(shares_with_known.sum(1)).ravel()
    new = torch.from_numpy(shares_with_known @ mean / shared.clip(1)[:, None]).to(vectors)
    has_known_token = torch.from_numpy(shared > 0)
    vectors[known:][has_known_token] = new[has_known_token]
