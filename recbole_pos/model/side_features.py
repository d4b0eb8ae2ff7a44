"""Build the embeddings of ``item_features``, ``user_features`` and ``event_features``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset, read_feature_names, read_features
from recbole_pos.data.splits import TRAIN
from recbole_pos.layers.features import EventFeatures, ItemFeatures, PeriodicField, TokenField
from recbole_pos.values import Options


def has_log(dataset: Dataset) -> bool:
    """Return whether a dataset has interactions, which one read from a run for serving has not.

    The class of such a dataset has the attribute ``has_log``, which is False.
    """
    return getattr(type(dataset), "has_log", True)


def build_item_features(config: Options, dataset: Dataset) -> ItemFeatures | None:
    """Build the module that adds fields of items, such as a brand, to their vectors.

    Args:
        config: options; ``item_features`` names the fields.
        dataset: training part of a dataset, which has the values for all items.

    Returns:
        The module; None if no field is named.
    """
    columns = read_features(dataset, "item_features")
    embeddings = _build_embeddings(config, dataset, columns)
    return ItemFeatures(embeddings, columns) if embeddings else None


def build_event_features(config: Options, dataset: Dataset) -> EventFeatures | None:
    """Build the module that adds fields of interactions and of users to the input of a model.

    Numbers of interactions are standardised by those of training. If a run is loaded for serving,
    without interactions, mean and deviation come with its weights.

    Args:
        config: options; ``event_features`` and ``user_features`` name the fields.
        dataset: training part of a dataset.

    Returns:
        The module, or None without such fields.
    """
    # the values of each field, by its name; of interactions those in training only
    of_events: Mapping[str, Tensor | None]
    of_users: Mapping[str, Tensor | None]
    if has_log(dataset):
        columns = read_features(dataset, "event_features")
        is_trained = torch.from_numpy(dataset.part == TRAIN)
        of_events = {name: column[is_trained] for name, column in columns.items()}
        of_users = read_features(dataset, "user_features")
    else:  # names without values
        of_events = dict.fromkeys(read_feature_names(config, "event_features"))
        of_users = dict.fromkeys(read_feature_names(config, "user_features"))

    # a module for each field, by its name
    events = _build_embeddings(config, dataset, of_events)
    users = _build_embeddings(config, dataset, of_users)
    return EventFeatures(events, users) if events or users else None


def _build_embeddings(
    config: Options, dataset: Dataset, columns: Mapping[str, Tensor | None]
) -> dict[str, nn.Module]:
    """Build the module that embeds the values of each field as vectors.

    Tokens, such as brands, get a learned vector each; numbers are embedded by sines and cosines.

    Args:
        config: options of the model.
        dataset: has the tokens of fields.
        columns: values [n] or [n, s] of each field, by which numbers are standardised; None if they
            are not known, as when a run is loaded.

    Returns:
        Module by name of the field.
    """
    size, std = config["hidden_size"], config["initializer_range"]
    embeddings: dict[str, nn.Module] = {}
    for name, column in columns.items():
        # a field of tokens; any other has numbers
        if name in dataset.field2id_token:
            is_list = column is not None and column.dim() > 1
            embeddings[name] = TokenField(len(dataset.field2id_token[name]), size, std, is_list)
            continue

        numbers = np.empty(0) if column is None else column.double().numpy()
        embeddings[name] = PeriodicField(numbers[np.isfinite(numbers)], size)
    return embeddings
