"""The tables of a dataset: where its atomic files are, and what is read of them and checked.

``locate_dataset`` finds a dataset by its name or path. ``read_tables`` takes a configuration and
returns ``Tables``, which ``filters.py`` then filters.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.data.atomic_files import PARQUET, AtomicFile, open_file, read_rows
from recbole_pos.data.splits import TEST, TRAIN, VALID
from recbole_pos.errors import UsageError
from recbole_pos.files import finish_replacement
from recbole_pos.tables.storage import Storage, read_limit
from recbole_pos.values import Options, listed, shown, suggest

# Options that name fields, and the types that such a field may have.
NAMING_FIELDS: dict[str, tuple[str, ...]] = {
    "numerical_features": ("float",),
    "normalize_field": ("float", "float_seq"),
    "val_interval": ("float",),
}


# --- where the atomic files of a dataset are ---


def find_atomic_file(folder: Path, name: str, suffix: str) -> Path:
    """Return the path of a table of a dataset: the parquet file if it exists, else the text file.

    The text file need not exist.

    Args:
        folder: folder of the dataset.
        name: name of the dataset.
        suffix: which table: inter, user, item, or such as train.inter.

    Raises:
        UsageError: if both exist.
    """
    # Both names, such as shop.item and shop.item.parquet (PARQUET is the ending ".parquet").
    text, parquet = (folder / f"{name}.{suffix}{end}" for end in ("", PARQUET))
    if not parquet.exists():
        return text
    if text.exists():
        raise UsageError(f"{text} and {parquet.name} are both there; remove or rename one of them")
    return parquet


def list_interaction_files(folder: Path, name: str, parts: Sequence[str] | None) -> list[Path]:
    """Return the files of a dataset's interactions.

    Args:
        folder: folder of the dataset.
        name: name of the dataset.
        parts: names of the parts of the split that have files of their own, such as [train, test]
            (the option ``benchmark_filename``); None or empty for one file, which need not exist.

    Raises:
        UsageError: if the file of a part does not exist.
    """
    if not parts:
        return [find_atomic_file(folder, name, "inter")]
    files = [find_atomic_file(folder, name, f"{part}.inter") for part in parts]
    for file in files:
        if not file.is_file():
            raise UsageError(
                f"benchmark_filename: a part of dataset {name!r} is read from "
                f"{shown(file.name)} in the folder {folder}, and there is no such file"
            )
    return files


def read_dataset_name(dataset: Any) -> str | None:
    """Return a dataset as users name it: a name, or the path of its folder.

    Args:
        dataset: a name, a path or a :class:`recbole_pos.Dataset`, which stands for its folder as
            a path does (``os.PathLike``); or None, which is returned.

    Raises:
        UsageError: if it is something else, such as a frame.
    """
    if dataset is None or isinstance(dataset, str):
        return dataset
    if isinstance(dataset, os.PathLike):
        return os.fspath(dataset)
    raise UsageError(
        f"dataset: expected a name or a Dataset, found {type(dataset).__name__}; a frame becomes "
        "one by recbole_pos.Dataset.from_frame(frame)"
    )


def locate_dataset(dataset: str, data_path: str | Path) -> tuple[str, str | None]:
    """Divide what a user gives as a dataset into its name and the folder that holds its folder.

    A name such as shop is returned as it is, with None. A path such as logs/shop gives ("shop",
    "logs") if it has the dataset shop, with the file logs/shop/shop.inter.

    If a process was killed while it replaced the folder of this dataset by a new one, the
    replacement is finished first.

    Args:
        dataset: a name, or a path, which starts in ``data_path`` or in the working directory.
        data_path: the folder in which datasets are looked for by name.

    Returns:
        name: name of the dataset; ``dataset`` as it is if the path has no dataset.
        folder: the folder that holds it; None for a name, or if the path has no dataset.
    """
    # The two folders that may be meant.
    candidates = (Path(data_path) / dataset, Path(dataset))
    for path in candidates:
        finish_replacement(path)

    # A text without a separator of folders is a name.
    is_name = Path(dataset).name == dataset and dataset not in ("", ".", "..")
    if is_name:
        return dataset, None

    # Of a path, take the first of these folders that holds a dataset.
    for path in candidates:
        folder = path if path.name else path.resolve()  # the path . has an empty name
        if _holds_dataset(folder):
            return folder.name, str(folder.parent)
    return dataset, None


def _holds_dataset(folder: Path) -> bool:
    """Return whether a folder has files of interactions that are named after it.

    A folder shop has the file shop.inter, or one for each part of a split, such as shop.train.inter
    (``benchmark_filename``).
    """
    name = folder.name
    has_file = find_atomic_file(folder, name, "inter").exists()
    has_parts = any(folder.glob(f"{glob.escape(name)}.*.inter*"))
    return name != "" and (has_file or has_parts)  # the root of the file system has no name


def require_dataset(name: str, folder: Path, parts: Sequence[str] | None) -> None:
    """Raise a UsageError, with advice, if the files of a dataset's interactions do not exist.

    Args:
        name: what :func:`locate_dataset` returned: the name of a dataset, such as shop; or the path
            that the user gave, such as logs/shop, if it has found no dataset there.
        folder: folder of the dataset of this name; not read for a path.
        parts: names of the parts of the split that have files of their own
            (``benchmark_filename``); None for one file.
    """
    is_path = Path(name).name != name
    if is_path:
        raise _explain_missing(name, Path(name))
    # ``list_interaction_files`` raises an error if a part has no file; a single file may be missing
    if not folder.is_dir() or not list_interaction_files(folder, name, parts)[0].exists():
        raise _explain_missing(name, folder)


def _explain_missing(dataset: str, folder: Path) -> UsageError:
    """Return an error for a dataset that does not exist, which names datasets that do.

    Args:
        dataset: what the user gave as the dataset: a name or a path.
        folder: the folder in which the dataset should be.
    """
    # For the folder data/shop, the dataset is shop, and datasets are in data. A user may also have
    # given a folder of several datasets in place of one of them; then these are named.
    name, data_path = folder.name, folder.parent
    found = _list_datasets(Path(dataset)) or _list_datasets(data_path)
    return UsageError(
        f"dataset {shown(dataset)} not found: there is no {folder / name}.inter"
        f"{suggest(name, found)}; -d takes the name or the folder of a dataset, and "
        f"--data_path the folder that holds its folder (found there: {listed(found) or 'none'})."
        " `recbole-pos convert FILE --name NAME` makes a dataset of a csv, json or parquet file"
    )


def _list_datasets(folder: Path) -> list[str]:
    """Return the names of the datasets whose folders lie in ``folder``, sorted."""
    files = folder.glob("*/*.inter*")
    pairs = {(file.parent.name, file.name.removesuffix(PARQUET)) for file in files}
    return sorted(name for name, file_name in pairs if file_name == f"{name}.inter")


# --- reading them ---


@dataclass(frozen=True)
class Tables:
    """The tables of a dataset; names are categories, numbers float64, lists arrays.

    Attributes:
        inter: a row per interaction; its index is the row in the files, from 0.
        user, item: a row per user or item; None if no such table is loaded.
        kinds: field -> token, float, token_seq or float_seq, for the fields of all tables.
        part_by_row: [rows of the files] int8 TRAIN, VALID or TEST, if there is a file for each
            part; else None.
        storage: space for the columns of interactions.
    """

    inter: pd.DataFrame
    user: pd.DataFrame | None = None
    item: pd.DataFrame | None = None
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    part_by_row: np.ndarray | None = None
    storage: Storage = dataclasses.field(default_factory=Storage)

    def by_name(self) -> dict[str, pd.DataFrame]:
        """Return the loaded tables by their names inter, user and item."""
        tables = {"inter": self.inter, "user": self.user, "item": self.item}
        return {name: table for name, table in tables.items() if table is not None}

    def keep(self, name: str, mask: np.ndarray) -> Tables:
        """Return the tables with only those rows of one of them where ``mask`` is true."""
        if mask.all():
            return self
        storage = self.storage if name == "inter" else Storage()
        kept: Any = {name: _take_rows(self.by_name()[name], mask, storage)}
        return replace(self, **kept)


def _take_rows(table: pd.DataFrame, mask: np.ndarray, storage: Storage) -> pd.DataFrame:
    """Return the rows of a table where a mask is true; each keeps its label in the index.

    Categories stay as they are, even those that no row has any more, so codes need no check.

    Args:
        table: columns of categories or of numbers.
        mask: [rows] bool.
        storage: space for the new columns, in memory or on disk.
    """
    columns: dict[str, Any] = {}
    for name, column in table.items():
        if column.dtype == "category":  # a code for each row, and the name of each code
            codes = storage.store(column.cat.codes.to_numpy()[mask])
            columns[name] = pd.Categorical.from_codes(codes, dtype=column.dtype, validate=False)
        else:
            columns[name] = storage.store(column.to_numpy()[mask])
    return pd.DataFrame(columns, index=table.index[mask], copy=False)


def spell_out(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose columns of categories hold the names as text."""
    return table.astype(dict.fromkeys(table.select_dtypes("category"), object))


def list_files(config: Options) -> list[Path]:
    """Return the paths of a dataset's tables: interactions, users, items; some may not exist."""
    folder, name = Path(config["data_path"]), config["dataset"]
    others = [find_atomic_file(folder, name, table) for table in ("user", "item")]
    return [*list_interaction_files(folder, name, config["benchmark_filename"]), *others]


def read_tables(config: Options) -> Tables:
    """Read the tables of a dataset, of interactions and, if they exist, of users and items.

    Args:
        config: the configuration, with the dataset's name, its folder and the fields to load.

    Returns:
        The tables as they stand in the files, not filtered yet.

    Raises:
        UsageError: if a file is missing or wrong, or the files and options do not fit together.
    """
    # The interactions, which must be there.
    require_dataset(config["dataset"], Path(config["data_path"]), config["benchmark_filename"])
    *inter_paths, user_path, item_path = list_files(config)
    tables = _read_interactions(inter_paths, config)

    # Users and items, whose files may be absent unless ``load_col`` names their columns.
    entities: dict[str, Any] = {}
    kinds = dict(tables.kinds)
    for table, path in (("user", user_path), ("item", item_path)):
        if path.is_file():
            entities[table], kinds_of_table = _read_entities(path, table, config)
            kinds |= kinds_of_table
        elif (config["load_col"] or {}).get(table):
            raise UsageError(
                f"load_col: {table}: found no file {path}; add it, or leave {table} out of load_col"
            )
    tables = replace(tables, **entities, kinds=kinds)

    # What must be true of all tables and options together. ``NAMING_FIELDS`` has the options that
    # name fields, with the types that such a field may have.
    _require_distinct_columns(tables, config)
    for option, allowed_kinds in NAMING_FIELDS.items():
        _require_loaded(option, allowed_kinds, kinds, config)
    return tables


def _read_interactions(paths: list[Path], config: Options) -> Tables:
    """Read the files of interactions, one below the other, into one table.

    Args:
        paths: the file; or, with ``benchmark_filename``, those of training, validation (which may
            be left out) and test.
        config: the configuration.

    Returns:
        The tables, of which only ``inter`` is read; with ``part_by_row`` if there are several.

    Raises:
        UsageError: if the files have different columns, or an interaction has no time.
    """
    # All files must have the same columns of the same types.
    files = [open_file(path, config) for path in paths]
    kinds = select_columns(files[0], "inter", config)
    for file in files[1:]:
        own_kinds = select_columns(file, "inter", config)
        if own_kinds != kinds:
            raise UsageError(
                f"{file.path}: loaded are {_list_kinds(own_kinds)}, but of {paths[0].name} "
                f"{_list_kinds(kinds)}; name columns that both have in load_col, and give each "
                "one type"
            )

    # ``read_limit`` gives the option ``memory_limit`` in bytes. Storage keeps columns on disk if so
    # many cells would exceed it. ``read_rows`` returns one table, and the number of rows of each
    # file.
    num_cells = sum(file.num_rows for file in files) * len(kinds)
    storage = Storage(num_cells, read_limit(config["memory_limit"]))
    table, sizes = read_rows(files, kinds, storage)
    time_field = config["TIME_FIELD"]
    num_missing = int((~np.isfinite(table[time_field])).sum())
    if num_missing:
        raise UsageError(
            f"{listed(path.name for path in paths)}: {num_missing} of {len(table)} interactions "
            f"have no finite {shown(time_field)}; without a time they have no place in a sequence"
        )

    # Where the files are the split, the part of each row is that of its file.
    part_by_row = None
    if config["benchmark_filename"]:
        parts = np.array((TRAIN, TEST) if len(files) == 2 else (TRAIN, VALID, TEST), np.int8)
        part_by_row = np.repeat(parts, sizes)
    return Tables(table, kinds=kinds, part_by_row=part_by_row, storage=storage)


def _read_entities(
    path: Path, name: str, config: Options
) -> tuple[pd.DataFrame | None, dict[str, str]]:
    """Read the table of users or of items.

    Args:
        path: its file.
        name: user or item.
        config: the configuration.

    Returns:
        table: one row for each user or item; None if ``load_col`` loads no column of it.
        kinds: loaded field -> its type: token (a name), float, token_seq or float_seq (lists).

    Raises:
        UsageError: if two lines say different things about the same user or item.
    """
    if config["load_col"] is not None and not config["load_col"].get(name):
        return None, {}
    file = open_file(path, config)
    kinds = select_columns(file, name, config)
    table, key = file.read(kinds), key_fields(config)[name]
    _require_consistent(file, table, key)  # refuses rows of one user or item that differ
    return table.drop_duplicates(key), kinds


def key_fields(config: Options) -> dict[str, str]:
    """Return the field with the names of users, and that of items."""
    return {"user": config["USER_ID_FIELD"], "item": config["ITEM_ID_FIELD"]}


def select_columns(file: AtomicFile, table: str, config: Options) -> dict[str, str]:
    """Return the columns of a file that are to be loaded.

    Args:
        file: the file.
        table: inter, user or item.
        config: configuration. ``load_col`` names the columns of each table, and loads none of a
            table that it does not name; if it is None, all are loaded.

    Returns:
        Name of each column -> its type: token, float, token_seq or float_seq.

    Raises:
        UsageError: if there are no ids or times among them, or ``load_col`` names a missing column.
    """
    # "*" stands for all columns. Ids and times are checked first, as the message says more.
    load_col = "*" if config["load_col"] is None else config["load_col"].get(table, [])
    selected = set(file.kinds if load_col == "*" else load_col)
    kinds = {name: kind for name, kind in file.kinds.items() if name in selected}
    _require_ids_and_times(file, table, kinds, config)
    for name in sorted(selected - set(file.kinds)):
        raise UsageError(
            f"load_col: {file.path} has no column {shown(name)}{suggest(name, file.kinds)}; it has "
            f"{listed(file.kinds)}"
        )
    return kinds


def _require_ids_and_times(
    file: AtomicFile, table: str, kinds: dict[str, str], config: Options
) -> None:
    """Refuse a file whose columns of ids or times are not loaded, or are of a wrong type.

    Args:
        file: the file; the message lists all of its columns, loaded or not.
        table: which table the file holds: inter, which needs users, items and times; or user or
            item, which needs its ids.
        kinds: loaded column -> its type: token (a name), float, or lists of these.
        config: configuration, whose options USER_ID_FIELD, ITEM_ID_FIELD and TIME_FIELD name the
            columns.
    """
    # Of each of these three fields, the type that it must have, and the tables that must have it.
    roles = {
        "USER_ID_FIELD": ("token", ("inter", "user")),
        "ITEM_ID_FIELD": ("token", ("inter", "item")),
        "TIME_FIELD": ("float", ("inter",)),
    }
    for option, (kind, tables_with_field) in roles.items():
        field = config[option]
        is_loaded = kinds.get(field) == kind
        if table in tables_with_field and not is_loaded:
            raise UsageError(
                f"{option}: expected {field}:{kind} among the loaded columns of {file.path}, which "
                f"has {_list_kinds(file.kinds)}; set {option} or load_col (now "
                f"{shown(config['load_col'])}). If rows have no time, but are in order, "
                "`recbole-pos convert --time row_order` numbers them"
            )


def _list_kinds(kinds: Mapping[str, str]) -> str:
    return listed(f"{name}:{kind}" for name, kind in kinds.items())


def _require_consistent(file: AtomicFile, table: pd.DataFrame, key: str) -> None:
    """Refuse a table in which two rows say different things about the same user or item.

    Args:
        file: the file, for the message.
        table: a row for each user or item, or several.
        key: the column of their names.
    """
    # Take all rows of users or items that have several rows, and drop exact copies of rows. If two
    # rows of an item are left, they differ, such as the brand A in one row and B in the other.
    repeated = table[table[key].duplicated(keep=False) & table[key].notna()].astype(str)
    different = repeated.drop_duplicates()
    contradicting = different[different[key].duplicated()]
    if len(contradicting):
        name = contradicting[key].iloc[0]
        raise UsageError(
            f"{file.path}: {(repeated[key] == name).sum()} lines are about {key} {shown(name)}, "
            "and they differ; keep one (`recbole-pos convert` takes the first value that is not "
            "missing)"
        )


def _require_distinct_columns(tables: Tables, config: Options) -> None:
    """Refuse a field that two tables have, unless it holds the ids of users or items.

    Options and models know a field by its name only, so there must be one of that name.

    Args:
        tables: the loaded tables.
        config: configuration, which names the dataset and its ids.
    """
    table_by_field: dict[str, str] = {}
    for name, table in tables.by_name().items():
        for field in set(table) - {*key_fields(config).values()}:
            if field in table_by_field:
                raise UsageError(
                    f"{field}: is loaded from {config['dataset']}.{table_by_field[field]} and from "
                    f"{config['dataset']}.{name}. Take one of them by load_col, or give the "
                    "columns different names"
                )
            table_by_field[field] = name


def _require_loaded(
    option: str, allowed_kinds: tuple[str, ...], kinds: Mapping[str, str], config: Options
) -> None:
    """Refuse an option that names a field which is not loaded, or is of a wrong type.

    Args:
        option: name of the option; its value is a list of fields, or has them as keys.
        allowed_kinds: types that such a field may have.
        kinds: loaded field -> type: token (a name), float, token_seq or float_seq (lists).
        config: the configuration.
    """
    for field in config[option] or ():
        kind = kinds.get(field)
        if kind not in allowed_kinds:
            problem = f"of type {kind}" if kind else f"not loaded{suggest(field, kinds)}"
            raise UsageError(
                f"{option}: field {shown(field)} is {problem}; expected a field of type "
                f"{' or '.join(allowed_kinds)} that load_col loads; loaded are {_list_kinds(kinds)}"
            )
