"""Fields of the atomic files besides ids and times; what does not fit a model is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.atomic_files import open_file
from recbole_pos.data.dataset import Dataset
from recbole_pos.data.location import SIDE_FEATURES, find_atomic_file
from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.values import Options, listed, shown, suggest


def map_fields_to_tables(dataset: Dataset) -> dict[str, str]:
    """Return loaded field -> its table, inter, user or item."""
    return {field: name for name, table in dataset.tables.items() for field in table}


def explain_not_loaded(field: str, dataset: Dataset, alternatives: tuple[str, ...] = ()) -> str:
    """Return why a field is not loaded, and the option that loads it, for an error message.

    ``alternatives`` are fields that are not of the dataset, but may have been meant.
    """
    config = dataset.config
    loaded = [*map_fields_to_tables(dataset), *alternatives]
    problem = f"field {shown(field)} is not loaded (loaded are {listed(loaded)})"
    id_fields = {"item": [dataset.iid_field], "user": [dataset.uid_field], "inter": []}
    for table, ids in id_fields.items():
        for key in ("unload_col", "unused_col"):
            if field in ((config[key] or {}).get(table) or ()):
                return f"{problem}; {key} leaves it out: take it from {key}: {table}"
        file = find_atomic_file(Path(dataset.dataset_path), dataset.dataset_name, table)
        if file.is_file() and field in open_file(file, config).kinds:
            names = (config["load_col"] or {}).get(table) or ids
            names = ", ".join([*names, field]) if isinstance(names, list) else field
            return f"{problem}; {file.name} has it: add it to load_col, as in {table}: [{names}]"
    hint = suggest(field, loaded)
    return f"{problem}, and no atomic file of {shown(dataset.dataset_name)} has it{hint}"


def is_strict(config: Options) -> bool:
    """Return whether options without effect are refused; not when an existing run is loaded."""
    return bool(getattr(config, "strict", True))


def require_values(field: str, dataset: Dataset, prefix: str = "") -> None:
    """Refuse a loaded field without any value, unless the configuration is not strict.

    ``prefix`` begins the message, such as ``item_features: ``.
    """
    table = map_fields_to_tables(dataset)[field]
    mask, column = dataset.missing.get(field), _get_column(field, table, dataset)
    if mask is not None:
        is_empty = bool(mask.all())
    else:  # no number is missing, and of tokens 0 stands for none
        is_empty = not column.is_floating_point() and bool(column.eq(0).all())
    if is_empty and is_strict(dataset.config):
        raise UsageError(
            f"{prefix}field {shown(field)} has no value in {dataset.dataset_name}.{table}; fill it "
            "in or leave it out"
        )


def check_selected(dataset: Dataset, fields: Sequence[str]) -> None:
    """Require that RecBole's models can embed the fields of ``selected_features``.

    RecBole counts every field in the width of a layer, but embeds numbers only where
    ``numerical_features`` names them.
    """
    if not fields:
        raise UsageError("selected_features: expected at least one field of items")
    for field in fields:
        _require_field(dataset, "selected_features", field, "item")
        kind = dataset.kinds[field]
        if kind.startswith("float") and field not in dataset.config["numerical_features"]:
            raise UsageError(
                f"selected_features: {shown(field)} holds numbers, which RecBole embeds only if "
                f"numerical_features names them; add numerical_features: [{field}], or leave it out"
            )


def read_column(field: str, table: str, dataset: Dataset) -> np.ndarray:
    """Return a field of a table, [n] or [n, s] by id (interactions: by row); NaN where missing."""
    column: np.ndarray = _get_column(field, table, dataset).numpy()
    if column.dtype.kind != "f":
        return column
    column = column.astype(np.float64)
    is_missing = dataset.missing.get(field)
    if is_missing is not None:
        column[is_missing] = np.nan
    return column


def _get_column(field: str, table: str, dataset: Dataset) -> Tensor:
    return dataset.tables[table][field]


def read_feature_names(config: Options, option: str) -> list[str]:
    """Return the fields in one of ``SIDE_FEATURES``."""
    names = config[option] or []
    return [names] if isinstance(names, str) else list(names)


def read_features(dataset: Dataset, option: str) -> dict[str, Tensor]:
    """Return the columns of the fields in one of ``SIDE_FEATURES``, by name.

    They are [n] or [n, s] int64 tokens (0 is padding), or [n] float32 numbers with NaN where one is
    missing, of n users, items or interactions.
    """
    columns = {}
    for field in read_feature_names(dataset.config, option):
        _require_field(dataset, option, field, SIDE_FEATURES[option])
        column = torch.from_numpy(read_column(field, SIDE_FEATURES[option], dataset))
        if column.is_floating_point():
            _require_unscaled(dataset.config, option, field)
            column = column.float()
        columns[field] = column
    return columns


def read_history_features(dataset: Dataset) -> Features:
    """Return the columns that ``event_features`` and ``user_features`` name."""
    return Features(
        read_features(dataset, "event_features"), read_features(dataset, "user_features")
    )


def _require_unscaled(config: Options, option: str, field: str) -> None:
    """Refuse to normalize a field of numbers that ``option`` standardizes."""
    for key in ("normalize_field", "normalize_all"):
        value = config[key]
        if value is True or field in (value or ()):
            advice = "set it to False" if value is True else f"take {field} out of it"
            raise UsageError(f"{key}: {shown(field)} is standardized by {option}; {advice}")


def _require_field(dataset: Dataset, option: str, field: str, table: str) -> None:
    """Require that ``field``, named by ``option``, is an attribute of ``table`` to be embedded."""
    label = f"{option}: {shown(field)}"
    fields = map_fields_to_tables(dataset)
    if field not in fields:
        raise UsageError(f"{option}: {explain_not_loaded(field, dataset)}")
    if field in (dataset.uid_field, dataset.iid_field, dataset.time_field):
        raise UsageError(f"{label} is no attribute: ids and times are read anyhow; leave it out")
    if (actual := fields[field]) != table:
        option_by_table = {table: name for name, table in SIDE_FEATURES.items()}
        advice = f"; name it in {option_by_table[actual]}" if option in SIDE_FEATURES else ""
        name = dataset.dataset_name
        raise UsageError(f"{label} is a field of {name}.{actual}, expected one of .{table}{advice}")
    if dataset.kinds[field] == "float_seq" and is_strict(dataset.config):
        raise UsageError(
            f"{label} holds vectors; give each number a column of type float, or leave it out"
        )
    require_values(field, dataset, f"{option}: ")


def read_item_attribute(dataset: Dataset, field: str) -> Tensor:
    """Return [items, s] int64 tokens of a token or token_seq field of items, 0 for none."""
    fields = map_fields_to_tables(dataset)
    if field not in fields:
        raise UsageError(explain_not_loaded(field, dataset))
    if fields[field] != "item" or dataset.kinds[field] not in ("token", "token_seq"):
        raise UsageError(
            f"field {shown(field)} must be a token or token_seq field of the item table"
        )
    require_values(field, dataset)
    column = _get_column(field, "item", dataset)
    return column.reshape(len(column), -1)
