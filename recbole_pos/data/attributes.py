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
    """Explain in a message why a field is not loaded, and which option loads it.

    An option may leave it out; or a file of the dataset has it and ``load_col`` does not name it;
    or no file has it, so that a similar name is suggested.

    Args:
        field: the field.
        dataset: the dataset.
        alternatives: names besides those of the dataset that may have been meant.

    Returns:
        The explanation, to be put into the message of an error.
    """
    config = dataset.config
    loaded = [*map_fields_to_tables(dataset), *alternatives]
    problem = f"field {shown(field)} is not loaded (loaded are {listed(loaded)})"
    id_fields = {"item": [dataset.iid_field], "user": [dataset.uid_field], "inter": []}
    for table, ids in id_fields.items():
        # An option of this table leaves the field out: mapping of table -> fields not to load.
        for key in ("unload_col", "unused_col"):
            if field in ((config[key] or {}).get(table) or ()):
                return f"{problem}; {key} leaves it out: take it from {key}: {table}"
        file = find_atomic_file(Path(dataset.dataset_path), dataset.dataset_name, table)
        if file.is_file() and field in open_file(file, config).kinds:
            # Advise a load_col with what it names now and the field, or at least the ids.
            names = (config["load_col"] or {}).get(table) or ids
            names = ", ".join([*names, field]) if isinstance(names, list) else field
            return f"{problem}; {file.name} has it: add it to load_col, as in {table}: [{names}]"
    hint = suggest(field, loaded)
    return f"{problem}, and no atomic file of {shown(dataset.dataset_name)} has it{hint}"


def is_strict(config: Options) -> bool:
    """Return whether options without effect are refused; not when an existing run is loaded."""
    return bool(getattr(config, "strict", True))


def require_values(field: str, dataset: Dataset, prefix: str = "") -> None:
    """Refuse a loaded field in which all cells are missing, since a model learns nothing from it.

    It is accepted where the configuration is that of an existing run, which is only loaded
    (``is_strict`` is false then).

    Args:
        field: the field.
        dataset: the dataset.
        prefix: beginning of the message, such as ``item_features: ``.
    """
    table = map_fields_to_tables(dataset)[field]
    mask, column = dataset.missing.get(field), _get_column(field, table, dataset)
    if mask is not None:
        is_empty = bool(mask.all())
    else:  # a field of numbers without a missing one; or tokens, where 0 stands for none
        is_empty = not column.is_floating_point() and bool(column.eq(0).all())
    if is_empty and is_strict(dataset.config):
        raise UsageError(
            f"{prefix}field {shown(field)} has no value in {dataset.dataset_name}.{table}; fill it "
            "in or leave it out"
        )


def check_selected(dataset: Dataset, fields: Sequence[str]) -> None:
    """Refuse fields in ``selected_features`` that RecBole's models cannot embed.

    These are fields that are no attributes of items, and numbers that ``numerical_features`` does
    not name: RecBole would count them in the width of a layer, but not embed them.

    Args:
        dataset: the dataset.
        fields: the value of the option ``selected_features``.
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
    """Return the values of a field, with NaN again where a number was missing.

    The dataset keeps missing numbers as the mean, and a mask of them in ``dataset.missing``.

    Args:
        field: the field.
        table: the table it is of: inter, user or item.
        dataset: the dataset.

    Returns:
        [n], or [n, s] of lists: by id for users and items, by row of the log for interactions.
        Tokens are int64 with 0 where one is missing, numbers float64 with NaN where one is missing.
    """
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
    """Read the fields that a model embeds beside the vectors of items, and check that it can.

    Args:
        dataset: the dataset.
        option: the option that names them: item_features, user_features or event_features, for
            fields of items, users or interactions.

    Returns:
        Name of a field -> its column: [n] or [n, s] int64 tokens, 0 where one is missing; or [n]
        float32 numbers, NaN where one is missing.

    Raises:
        UsageError: if a field cannot be embedded.
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
    """Refuse a field of numbers that is scaled twice: by an option of RecBole and by a model.

    Args:
        config: configuration with ``normalize_field`` (names of fields) and ``normalize_all``.
        option: the option that names the field, whose numbers the model standardizes.
        field: the field.
    """
    for key in ("normalize_field", "normalize_all"):
        value = config[key]
        if value is True or field in (value or ()):
            advice = "set it to False" if value is True else f"take {field} out of it"
            raise UsageError(f"{key}: {shown(field)} is standardized by {option}; {advice}")


def _require_field(dataset: Dataset, option: str, field: str, table: str) -> None:
    """Refuse a field that a model could not embed as an attribute of the rows of a table.

    That is a field that is not loaded, is an id or the time, is of another table, holds vectors
    (float_seq; accepted for an existing run, which is only loaded), or has no value.

    Args:
        dataset: the dataset.
        option: the option that names the field, for the message.
        field: the field.
        table: the table that it must be of: inter, user or item.
    """
    # Each check has its own message, which says what to do; ``fields`` maps fields to tables.
    label = f"{option}: {shown(field)}"
    fields = map_fields_to_tables(dataset)
    if field not in fields:
        raise UsageError(f"{option}: {explain_not_loaded(field, dataset)}")
    if field in (dataset.uid_field, dataset.iid_field, dataset.time_field):
        raise UsageError(f"{label} is no attribute: ids and times are read anyhow; leave it out")
    # Of another table: advise the option for that one, if there is such an option.
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
    """Return the tokens of each item in a field, such as its genres.

    Args:
        dataset: the dataset.
        field: a field of items, of type token or token_seq.

    Returns:
        [items, s] int64 ids of tokens by id of the item, 0 for none; s is 1 for a token field.

    Raises:
        UsageError: if the field is not loaded, of another type or table, or without any value.
    """
    fields = map_fields_to_tables(dataset)
    if field not in fields:
        raise UsageError(explain_not_loaded(field, dataset))
    if fields[field] != "item" or dataset.kinds[field] not in ("token", "token_seq"):
        raise UsageError(
            f"field {shown(field)} must be a token or token_seq field of the item table"
        )
    require_values(field, dataset)
    # One token for each item, [items], becomes [items, 1].
    column = _get_column(field, "item", dataset)
    return column.reshape(len(column), -1)
