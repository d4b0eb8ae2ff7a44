"""Fields of the atomic files besides ids and times, and what to do about those that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.kinds import SIDE_FEATURES
from recbole_pos.data.location import atomic_file
from recbole_pos.data.protocols import Dataset, Fields
from recbole_pos.data.tables import open_table
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, listed, shown, suggest

TABLES = ("item", "user", "inter")  # the suffixes of atomic files


def loaded_fields(dataset: Fields) -> list[str]:
    """Return names of the columns of all tables of a dataset, after ``build``; each once."""
    tables = (dataset.log.fields, dataset.user_feat, dataset.item_feat)
    return list(dict.fromkeys(field for feat in tables if feat is not None for field in feat))


def find_table(field: str, dataset: Fields) -> str:
    """Return which table a loaded field stands in: item, user or inter."""
    for table in TABLES[:2]:
        feat = getattr(dataset, f"{table}_feat")
        if feat is not None and field in list(feat.columns):
            return table
    return "inter"


def not_loaded(field: str, dataset: Fields, others: tuple[str, ...] = ()) -> str:
    """Return why a field is not loaded, and the option that loads it, for an error message.

    Args:
        field: name that the user gave.
        dataset: the dataset after ``build``.
        others: names that would also be valid, besides the loaded fields.
    """
    known = [*loaded_fields(dataset), *others]
    text = f"field {shown(field)} is not loaded (loaded are {listed(known)})"
    for table in TABLES:
        for key in ("unload_col", "unused_col"):
            if field in ((dataset.config[key] or {}).get(table) or ()):
                return f"{text}; {key} leaves it out: take it from {key}: {table}"
        file = atomic_file(Path(dataset.dataset_path), dataset.dataset_name, table)
        if not file.is_file():
            continue
        if field in open_table(file, dataset.config).columns:
            own_id = {"item": dataset.iid_field, "user": dataset.uid_field}.get(table)
            now = (dataset.config["load_col"] or {}).get(table) or ([own_id] if own_id else [])
            names = ", ".join([*now, field]) if isinstance(now, list) else field
            return f"{text}; {file.name} has it: add it to load_col, as in {table}: [{names}]"
    near = suggest(field, known)
    return f"{text}, and no atomic file of {shown(dataset.dataset_name)} has it{near}"


def is_strict(config: Options) -> bool:
    """Return whether options without effect are refused; not when an existing run is loaded."""
    return bool(getattr(config, "strict", True))


def require_values(field: str, dataset: Dataset, where: str = "") -> None:
    """Refuse a loaded field without any value.

    Args:
        field: name of the field.
        dataset: the dataset after ``build``.
        where: start of the message, the option as ``option: ``.

    Raises:
        UsageError: if all values are missing, unless the configuration is not strict.
    """
    if not is_strict(dataset.config):
        return
    table, missing = find_table(field, dataset), dataset.missing.get(field)
    feat = getattr(dataset, f"{table}_feat") if table != "inter" else dataset.log.fields
    if bool((feat[field] != 0).any()) if missing is None else not missing.all():
        return
    raise UsageError(
        f"{where}field {shown(field)} has no value in {dataset.dataset_name}.{table}; fill it in "
        "or leave it out"
    )


def check_selected(dataset: Dataset, fields: Sequence[str]) -> None:
    """Require that RecBole's models can embed the fields of ``selected_features``.

    RecBole counts every field in the width of a layer, but embeds numbers only where
    ``numerical_features`` names them.

    Raises:
        UsageError: if there is no field, or one cannot be embedded.
    """
    if not fields:
        raise UsageError("selected_features: expected at least one field of items")
    for field in fields:
        _require_field(dataset, "selected_features", field, "item")
        ftype = dataset.field2type[field].value
        if ftype.startswith("float") and field not in dataset.config["numerical_features"]:
            raise UsageError(
                f"selected_features: {shown(field)} holds numbers, which RecBole embeds only if "
                f"numerical_features names them; add numerical_features: [{field}], or leave it out"
            )


def read_column(field: str, table: str, dataset: Dataset) -> np.ndarray:
    """Return a field of entities by id, or of events by place in the log; NaN where missing."""
    feat = dataset.log.fields if table == "inter" else getattr(dataset, f"{table}_feat")
    column: np.ndarray = feat[field].numpy()
    if column.dtype.kind != "f":
        return column
    column = column.astype(np.float64)
    missing = dataset.missing.get(field)
    if missing is not None:
        column[missing] = np.nan
    return column


def feature_names(config: Options, option: str) -> list[str]:
    """Return the fields in one of ``SIDE_FEATURES``."""
    names = config[option] or []
    return [names] if isinstance(names, str) else list(names)


def feature_columns(dataset: Dataset, option: str) -> dict[str, Tensor]:
    """Return the columns of the fields in one of ``SIDE_FEATURES``, by name.

    Returns:
        [entities] or [entities, s] int64 tokens (0 is padding), or [entities] float32 numbers with
        NaN where one is missing.

    Raises:
        UsageError: for a field that is not loaded, is of another table, or cannot be embedded.
    """
    columns, config = {}, dataset.config
    for field in feature_names(config, option):
        _require_field(dataset, option, field, SIDE_FEATURES[option])
        column = torch.from_numpy(read_column(field, SIDE_FEATURES[option], dataset))
        columns[field] = column
        if column.is_floating_point():
            columns[field] = column.float()
            for key in ("normalize_field", "discretization", "normalize_all"):
                if config[key] is True or field in (config[key] or ()):
                    how = "set it to False" if config[key] is True else f"take {field} out of it"
                    raise UsageError(f"{key}: {shown(field)} is standardized by {option}; {how}")
    return columns


def _require_field(dataset: Dataset, option: str, field: str, table: str) -> None:
    """Require that ``field``, named by ``option``, is a loaded attribute of ``table`` with values.

    Raises:
        UsageError: if it is not, or its values are vectors, which cannot be embedded.
    """
    where = f"{option}: {shown(field)}"
    if field not in loaded_fields(dataset):
        raise UsageError(f"{option}: {not_loaded(field, dataset)}")
    if field in (dataset.uid_field, dataset.iid_field, dataset.time_field):
        raise UsageError(f"{where} is no attribute: ids and times are read anyhow; leave it out")
    if (found := find_table(field, dataset)) != table:
        other = next((name for name, of in SIDE_FEATURES.items() if of == found), "")
        advice = f"; name it in {other}" if option in SIDE_FEATURES else ""
        name = dataset.dataset_name
        raise UsageError(f"{where} is a field of {name}.{found}, expected one of .{table}{advice}")
    if dataset.field2type[field].value == "float_seq" and is_strict(dataset.config):
        raise UsageError(
            f"{where} holds vectors; give each number a column of type float, or leave it out"
        )
    require_values(field, dataset, f"{option}: ")


def item_attribute(dataset: Dataset, field: str) -> Tensor:
    """Return [items, s] int64 tokens of a token or token_seq field of items, 0 for none.

    Raises:
        UsageError: if the field is not loaded, is of another table or type, or has no value.
    """
    if field not in loaded_fields(dataset):
        raise UsageError(not_loaded(field, dataset))
    ftype = dataset.field2type[field].value
    if find_table(field, dataset) != "item" or ftype not in ("token", "token_seq"):
        raise UsageError(
            f"field {shown(field)} must be a token or token_seq field of the item table"
        )
    require_values(field, dataset)
    assert dataset.item_feat is not None  # it has the field
    column = dataset.item_feat[field]
    return column.reshape(len(column), -1)
