"""Build the embeddings of ``item_features``, ``user_features`` and ``event_features``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.data.attributes import read_feature_names, read_features
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


def has_log(dataset: Dataset) -> bool:
    """Return whether a dataset has interactions; a dataset read from a run for serving has none."""
    return getattr(type(dataset), "has_log", True)


def build_item_features(config: Options, dataset: Dataset) -> ItemFeatures | None:
    """Build the part that adds ``item_features`` to item vectors; None without such fields."""
    columns = read_features(dataset, "item_features")
    fields = _build_embeddings(config, dataset, columns)
    size, fusion = config["hidden_size"], config["feature_fusion"]
    return ItemFeatures(fields, columns, size, fusion) if fields else None


def build_event_features(config: Options, dataset: Dataset) -> EventFeatures | None:
    """Build the module that adds ``event_features`` and ``user_features`` to the input.

    Numbers of interactions are standardised by those of training; without interactions, as when a
    run is loaded for serving, by the loaded weights. None without such fields.
    """
    embeddings = []
    for option in ("event_features", "user_features"):
        columns: Mapping[str, Tensor | None] = dict.fromkeys(read_feature_names(config, option))
        if columns and has_log(dataset):
            columns = read_features(dataset, option)
            if option == "event_features":
                trained = torch.from_numpy(dataset.part == TRAIN)
                columns = {name: column[trained] for name, column in columns.items()}
        embeddings.append(_build_embeddings(config, dataset, columns))
    size, fusion = config["hidden_size"], config["feature_fusion"]
    return EventFeatures(embeddings[0], embeddings[1], size, fusion) if any(embeddings) else None


def _build_embeddings(
    config: Options, dataset: Dataset, columns: Mapping[str, Tensor | None]
) -> dict[str, nn.Module]:
    """Return an embedding of each field; those of numbers are fitted to its column, if known."""
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
