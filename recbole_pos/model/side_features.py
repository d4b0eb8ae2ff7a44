"""From ``item_features``, ``user_features`` and ``event_features`` to what embeds the fields."""

from __future__ import annotations

from torch import nn

from recbole_pos.data.attributes import feature_columns, feature_names
from recbole_pos.data.protocols import Dataset
from recbole_pos.data.splits import TRAIN
from recbole_pos.layers.features import BinnedField, EventFeatures, PeriodicField, TokenField
from recbole_pos.values import Options


def build_event_features(config: Options, dataset: Dataset) -> EventFeatures | None:
    """Return what adds fields of interactions and users to the input; None where none is named."""
    events, users = (
        _fields(config, dataset, option) for option in ("event_features", "user_features")
    )
    if not (events or users):
        return None
    return EventFeatures(events, users, config["hidden_size"], config["feature_fusion"])


def _fields(config: Options, dataset: Dataset, option: str) -> dict[str, nn.Module]:
    """An embedding of each field that an option names.

    Numbers are fitted, those of interactions to the ones of training. Without the dataset what
    they are fitted to is in the weights that are loaded.
    """
    size, std = config["hidden_size"], config["initializer_range"]
    has_data = getattr(type(dataset), "has_log", True)
    columns = feature_columns(dataset, option) if has_data else {}
    fields: dict[str, nn.Module] = {}
    for name in feature_names(config, option):
        column = columns[name].numpy() if has_data else None
        if name in dataset.field2id_token:
            tokens, is_list = (
                len(dataset.field2id_token[name]),
                column is not None and column.ndim > 1,
            )
            fields[name] = TokenField(tokens, size, std, is_list)
            continue
        if column is not None and option == "event_features":
            column = column[dataset.part == TRAIN]
        if config["numeric_embedding"] == "binned":
            fields[name] = BinnedField(column, config["numeric_bins"], size, std)
        else:
            fields[name] = PeriodicField(column, size)
    return fields
