"""Fields of the atomic files besides ids and times; what does not fit a model is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.dataset import Dataset
from recbole_pos.data.location import SIDE_FEATURES
from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.values import Options, listed, shown, suggest


def map_fields_to_tables(dataset: Dataset) -> dict[str, str]:
    """Return loaded field -> its table, inter, user or item."""
    return {field: name for name, table in dataset.tables.items() for field in table}


def explain_not_loaded(field: str, dataset: Dataset, alternatives: tuple[str, ...] = ()) -> str:
    """Return the text of a message: that a field is not loaded, and which fields are.

    Args:
        field: the field.
        dataset: the dataset.
        alternatives: names besides those of the dataset that may have been meant.
    """
    loaded = [*map_fields_to_tables(dataset), *alternatives]
    return (
        f"field {shown(field)} is not loaded{suggest(field, loaded)}; loaded are {listed(loaded)}; "
        "load_col names the columns to load"
    )


def check_selected(dataset: Dataset, fields: Sequence[str]) -> None:
    """Refuse fields in ``selected_features`` that RecBole's models cannot embed.

    Some of RecBole's models embed the attributes of items that this option names. A field must be
    in the table of items. If it holds numbers, the option ``numerical_features`` must name it, too:
    otherwise RecBole makes a layer wide enough for its embedding, but never computes the embedding.

    Args:
        dataset: the dataset.
        fields: the value of the option ``selected_features``.
    """
    for field in fields:
        # Raise an error if the field is not loaded, or not an attribute in the table of items.
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
    column: np.ndarray = dataset.tables[table][field].numpy()
    if column.dtype.kind != "f":
        return column
    column = column.astype(np.float64)
    if field in dataset.missing:
        column[dataset.missing[field]] = np.nan
    return column


def read_feature_names(config: Options, option: str) -> list[str]:
    """Return the fields that one of the options in ``SIDE_FEATURES`` names: one or a list."""
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
    columns: dict[str, Tensor] = {}
    config, table = dataset.config, SIDE_FEATURES[option]  # of item_features: item
    for field in read_feature_names(config, option):
        _require_field(dataset, option, field, table)  # refuses a field that cannot be embedded
        columns[field] = torch.from_numpy(read_column(field, table, dataset))
        if not columns[field].is_floating_point():  # ids of tokens, which are not scaled
            continue
        columns[field] = columns[field].float()
        # The model standardizes numbers, which RecBole's options may have scaled already.
        if config["normalize_all"] or field in (config["normalize_field"] or ()):
            raise UsageError(
                f"{option} standardizes {shown(field)}: take it out of normalize_field, and set "
                "normalize_all to False"
            )
    return columns


def read_history_features(dataset: Dataset) -> Features:
    """Return the columns that ``event_features`` and ``user_features`` name."""
    return Features(
        read_features(dataset, "event_features"), read_features(dataset, "user_features")
    )


def _require_field(dataset: Dataset, option: str, field: str, table: str) -> None:
    """Raise an error if a model could not embed a field as an attribute of the rows of a table.

    Refused is a field that is not loaded, is an id or the time, is of another table, or holds
    vectors (type float_seq).

    Args:
        dataset: the dataset.
        option: the option that names the field, for the message.
        field: the field.
        table: the table that it must be of: inter, user or item.
    """
    table_by_field = map_fields_to_tables(dataset)
    if field not in table_by_field:
        raise UsageError(f"{option}: {explain_not_loaded(field, dataset)}")

    problem, actual = None, table_by_field[field]
    if field in (dataset.uid_field, dataset.iid_field, dataset.time_field):
        problem = "is an id or the time, which are read anyhow; leave it out"
    elif actual != table:
        # Advise the option for the table that the field is in: ``SIDE_FEATURES`` maps such options
        # to their tables, as item_features to item.
        option_by_table = {read: name for name, read in SIDE_FEATURES.items()}
        problem = f"is a field of {dataset.dataset_name}.{actual}; see {option_by_table[actual]}"
    elif dataset.kinds[field] == "float_seq":
        problem = "holds vectors; give each number a column of type float, or leave it out"
    if problem is not None:
        raise UsageError(f"{option}: expected attributes in .{table}, but {shown(field)} {problem}")


def read_item_attribute(dataset: Dataset, field: str) -> Tensor:
    """Return the tokens of each item in a field, such as its genres.

    Args:
        dataset: the dataset.
        field: a field of items, of type token or token_seq.

    Returns:
        [items, s] int64 ids of tokens by id of the item, 0 for none; s is 1 for a token field.

    Raises:
        UsageError: if the field is not loaded, or of another type or table.
    """
    _require_field(dataset, "an attribute of items", field, "item")
    if not dataset.kinds[field].startswith("token"):
        raise UsageError(f"{shown(field)}: expected a field of items of type token or token_seq")

    # One token for each item, [items], becomes [items, 1].
    column = dataset.tables["item"][field]
    return column.reshape(len(column), -1)
