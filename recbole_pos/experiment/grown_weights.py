"""Weights of a model for data that have grown.

Names keep the ids that they had, new ones come after them, so a weight of the old model is the
first part of one of the new model, whatever it is a weight of: an item, an attribute, a user.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from recbole_pos.data.attributes import item_attribute
from recbole_pos.data.protocols import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.result import unfinished
from recbole_pos.experiment.warm_start import require_same_function
from recbole_pos.values import Options


def updated_run(path: str | Path) -> RunFolder:
    """The folder of ``update_from``.

    Raises:
        UsageError: if it holds no run, an unfinished one, or one that does not say what it knew.
    """
    folder = RunFolder(path).require("update_from")
    if not folder.known.is_file():
        raise UsageError(
            f"update_from: {folder.path} has no {folder.known.name}: it was made by an earlier "
            "version, and which item a weight is of cannot be told; train anew"
        )
    if unfinished(folder):
        raise UsageError(f"update_from: {folder.path} is unfinished; {folder.how_to_finish} first")
    return folder


def update_weights(model: Any, config: Options, dataset: Dataset) -> None:
    """Give a fresh model the weights of ``update_from``, and new items those of ``new_items``.

    Args:
        model: built for the grown data.
        config: of the run.
        dataset: the grown data, in which names have the ids that they had.

    Raises:
        UsageError: if the weights do not fit, or ``new_items`` names no attribute.
    """
    source = updated_run(config["update_from"])
    theirs = source.read_config()
    if theirs.get("model") != config["model"]:
        raise UsageError(
            f"update_from: {source.path} is of {theirs.get('model')}, this run of {config['model']}"
        )
    require_same_function(theirs, config, source.path, "update_from")
    state = checkpoint.load(source.checkpoint, ("best_weights",))
    if state["best_weights"] is None:
        raise UsageError(f"update_from: {source.path} has no trained epoch yet")
    weights, own = state["best_weights"]["state_dict"], model.state_dict()
    for name in sorted(set(weights) ^ set(own)):
        raise UsageError(f"update_from: {source.path} is of another architecture: {name}")
    for name, old in weights.items():
        new = own[name]
        smaller = old.dim() == new.dim() and all(map(operator.le, old.shape, new.shape))
        if not smaller or old.dtype != new.dtype or not old.isfinite().all():
            raise UsageError(
                f"update_from: {source.path} does not fit: {name} is {list(old.shape)} there, "
                f"{list(new.shape)} of finite numbers here"
            )
        new[tuple(slice(size) for size in old.shape)] = old
    known = len(weights["item_embedding.weight"])
    model.notices.append(
        f"update_from: new items since {source.path} was trained: {dataset.item_num - known:,}"
    )
    if config["new_items"] is not None:
        embedding: nn.Embedding = model.item_embedding
        tokens = item_attribute(dataset, config["new_items"])
        with torch.no_grad():
            fill_new(embedding.weight, known, tokens)


def fill_new(vectors: Tensor, known: int, tokens: Tensor) -> None:
    """Rows of new items become means over the known items that share a token with them.

    Every token counts the same: the mean of the mean vectors of its items. A new item none of whose
    tokens is known stays as it is.

    Args:
        vectors: [items, d] of all items, padding first; changed in place.
        known: how many of them are known.
        tokens: [items, s] tokens of each, 0 for none.
    """
    row, place = tokens.nonzero(as_tuple=True)
    token = tokens[row, place].numpy()
    size = int(tokens.max()) + 1
    has = sp.csr_matrix((np.ones(len(row)), (row.numpy(), token)), (len(tokens), size))
    has.data[:] = 1  # a token that an item has twice
    count = np.asarray(has[:known].sum(0)).ravel()
    mean = has[:known].T @ vectors[:known].numpy() / count.clip(1)[:, None]
    of_known = has[known:].multiply(count > 0).tocsr()
    shared = np.asarray(of_known.sum(1)).ravel()
    new = torch.from_numpy(of_known @ mean / shared.clip(1)[:, None]).to(vectors)
    found = torch.from_numpy(shared > 0)
    vectors[known:][found] = new[found]
