"""From ``item_features``, ``user_features`` and ``event_features`` to what embeds the fields."""

from __future__ import annotations

from collections.abc import Mapping

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
    if not columns:
        return None
    fields = _embed_fields(config, dataset, "item_features", columns)
    return ItemFeatures(fields, columns, config["hidden_size"], config["feature_fusion"])


def build_event_features(config: Options, dataset: Dataset) -> EventFeatures | None:
    """Return what adds fields of interactions and users to the input; None where none is named.

    Without the dataset, numbers are scaled by what is in the weights that are loaded.
    """
    has_data = getattr(type(dataset), "has_log", True)
    tables = []
    for option in ("event_features", "user_features"):
        names = feature_names(config, option)
        columns = feature_columns(dataset, option) if has_data else dict.fromkeys(names)
        tables.append(_embed_fields(config, dataset, option, columns))
    events, users = tables
    if not (events or users):
        return None
    return EventFeatures(events, users, config["hidden_size"], config["feature_fusion"])


def _embed_fields(
    config: Options, dataset: Dataset, option: str, columns: Mapping[str, Tensor | None]
) -> dict[str, nn.Module]:
    """An embedding of each column; of numbers of interactions, fitted to those of training."""
    size, std = config["hidden_size"], config["initializer_range"]
    fields: dict[str, nn.Module] = {}
    for name, column in columns.items():
        if name in dataset.field2id_token:
            is_list = column is not None and column.dim() > 1
            fields[name] = TokenField(len(dataset.field2id_token[name]), size, std, is_list)
            continue
        numbers = None if column is None else column.double().numpy()
        if numbers is not None and option == "event_features":
            numbers = numbers[dataset.part == TRAIN]
        if config["numeric_embedding"] == "binned":
            fields[name] = BinnedField(numbers, config["numeric_bins"], size, std)
        else:
            fields[name] = PeriodicField(numbers, size)
    return fields
