"""From ``item_features``, ``user_features`` and ``event_features`` to what embeds the fields."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.data.attributes import feature_columns, feature_names
from recbole_pos.data.protocols import Dataset
from recbole_pos.data.splits import TRAIN
from recbole_pos.layers.features import (
    BinnedField,
    EventFeatures,
    ItemFeatures,
    PeriodicField,
    TokenField,
)
from recbole_pos.values import Options


def build_item_features(config: Options, dataset: Dataset) -> ItemFeatures | None:
    """Return what adds fields of items to their vectors; None where none is named."""
    columns = feature_columns(dataset, "item_features")
    fields = _embed(config, dataset, columns)
    size, fusion = config["hidden_size"], config["feature_fusion"]
    return ItemFeatures(fields, columns, size, fusion) if fields else None


def build_event_features(config: Options, dataset: Dataset) -> EventFeatures | None:
    """Return what adds fields of interactions and users to the input; None where none is named.

    Numbers of interactions are scaled by those of training; without the dataset, by what is in the
    weights that are loaded.
    """
    both = []
    for option in ("event_features", "user_features"):
        columns: Mapping[str, Tensor | None] = dict.fromkeys(feature_names(config, option))
        if columns and getattr(type(dataset), "has_log", True):
            columns = feature_columns(dataset, option)
            if option == "event_features":
                trained = torch.from_numpy(dataset.part == TRAIN)
                columns = {name: column[trained] for name, column in columns.items()}
        both.append(_embed(config, dataset, columns))
    size, fusion = config["hidden_size"], config["feature_fusion"]
    return EventFeatures(both[0], both[1], size, fusion) if any(both) else None


def _embed(
    config: Options, dataset: Dataset, columns: Mapping[str, Tensor | None]
) -> dict[str, nn.Module]:
    """Return an embedding of each column, numbers fitted to it."""
    size, std = config["hidden_size"], config["initializer_range"]
    fields: dict[str, nn.Module] = {}
    for name, column in columns.items():
        if name in dataset.field2id_token:
            is_list = column is not None and column.dim() > 1
            fields[name] = TokenField(len(dataset.field2id_token[name]), size, std, is_list)
            continue
        numbers = np.empty(0) if column is None else column.double().numpy()
        numbers = numbers[np.isfinite(numbers)]
        if config["numeric_embedding"] == "binned":
            fields[name] = BinnedField(numbers, config["numeric_bins"], size, std)
        else:
            fields[name] = PeriodicField(numbers, size)
    return fields
