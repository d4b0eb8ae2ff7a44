"""From the tables of a dataset to numbers: ids, filled cells, the sorted log, and its split.

``read_dataset`` takes a configuration and returns a ``Dataset``, from the cache if it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from recbole_pos.data.atomic_files import LARGEST
from recbole_pos.data.cache import find_cache, load_cache, save_cache
from recbole_pos.data.dataset import Columns, Dataset, NameIds
from recbole_pos.data.filters import filter_by_counts, filter_rows, require_rows
from recbole_pos.data.identity import Vocabulary, divide_interactions, keep_known_rows
from recbole_pos.data.interactions import CHUNK_INTERACTIONS, sort_interactions, wrap_read_only
from recbole_pos.data.loading import Tables, key_fields, list_files, read_tables
from recbole_pos.data.targets import find_selected, make_split, read_tie_seed
from recbole_pos.tables.storage import Storage
from recbole_pos.values import Options

_LIST_TYPES = {"token_seq": np.int64, "float_seq": np.float32}


def read_dataset(
    config: Options, known: Vocabulary | None = None, holds_out_later: bool = False
) -> Dataset:
    """Read a dataset from its files, give ids to its names, sort it and split it.

    The result is kept in a cache (a file in the user's cache folder), from which it is loaded the
    next time, until a file or an option of the data changes.

    Args:
        config: configuration of the dataset.
        known: names of users and items of an earlier run, which keep their ids; None for a new run.
            With them the cache is not used.
        holds_out_later: whether the dataset is only the data of that run, and all data that have
            come since are kept apart in its ``held_out``.

    Returns:
        The finished dataset, as numbers.
    """
    # ``find_cache`` returns None for a dataset that must have no cache, such as a small one, and
    # ``load_cache`` returns None if the dataset is not in its cache yet.
    cache = find_cache(config, list_files(config)) if known is None else None
    cached = load_cache(cache, config) if cache else None
    if cached is not None:
        return cached
    dataset = _prepare(config, known, holds_out_later)
    if cache:
        save_cache(cache, dataset)
    return dataset


def _prepare(config: Options, known: Vocabulary | None, holds_out_later: bool) -> Dataset:
    """Read the tables, leave out rows, number the names, sort the interactions, and split them.

    Args:
        config: configuration of the dataset.
        known: names of users and items of an earlier run, which keep their ids; None for a new run.
        holds_out_later: whether the dataset is only the data of that run, and all data that have
            come since are kept apart in its ``held_out``.

    Returns:
        The finished dataset: numbers, sorted by user and time, with a part for each interaction.
    """
    # Read and filter. The data of an earlier run are found by their names, not by counts again:
    # with later interactions, users and items that the run left out might pass the filters.
    tables = filter_rows(read_tables(config), config)
    user_field, item_field = config["USER_ID_FIELD"], config["ITEM_ID_FIELD"]
    time_field = config["TIME_FIELD"]
    held_out = None
    if known is not None and holds_out_later:
        inter, held_out = divide_interactions(
            tables.inter, known, user_field, item_field, time_field
        )
        user, item = (
            None if table is None else keep_known_rows(table, key, known)
            for table, key in ((tables.user, user_field), (tables.item, item_field))
        )
        tables = replace(tables, inter=inter, user=user, item=item)
    else:
        tables = filter_by_counts(tables, config)
    require_rows(tables, config)

    # Replace names by ids, and take along the part of each row if there is a file for each part.
    storage, given_part = tables.storage, tables.part_by_row
    if given_part is not None:
        given_part = given_part[tables.inter.index]
    names, columns, missing = convert_to_numbers(tables, config, known)
    kinds = dict(tables.kinds)
    del tables  # so that memory holds each column of interactions once while they are sorted

    # Sort by user and time; masks of missing values and given parts follow in the same order.
    log, order = sort_interactions(
        columns["inter"],
        len(names[user_field]),
        user_field,
        item_field,
        time_field,
        storage=storage,
        given_part=given_part,
        tie_seed=read_tie_seed(config["eval_args"]["ties"]),
    )
    if given_part is not None:
        given_part = given_part[order]
    missing |= {field: mask[order] for field, mask in missing.items() if field in log.fields}
    del order

    # Split, which may leave interactions out (``is_left``: those that stay).
    is_selected = find_selected(config["target_events"], log, missing, names, requires_all=True)
    item_num = len(names[item_field])
    split, is_left = make_split(log, config, item_num, given_part, is_selected)
    missing |= {field: mask[is_left] for field, mask in missing.items() if field in log.fields}
    part, is_target = storage.store(split.part), storage.store(split.is_target)
    return Dataset(
        config=config,
        kinds=kinds,
        field2id_token=names,
        field2token_id={field: NameIds(column) for field, column in names.items()},
        user_feat=columns.get("user"),
        item_feat=columns.get("item"),
        missing=missing,
        user_counts=log.lengths,
        split=replace(split, part=part, is_target=is_target),
        held_out=held_out,
    )


# --- names become ids, and cells columns of numbers ---


def convert_to_numbers(
    tables: Tables, config: Options, known: Vocabulary | None
) -> tuple[dict[str, np.ndarray], dict[str, Columns], dict[str, np.ndarray]]:
    """Convert the cells of all tables to numbers: names to ids, lists to padded arrays.

    Missing numbers are filled in and numbers are scaled as RecBole does it.

    Args:
        tables: the tables as read, of names, numbers and lists.
        config: configuration, which says what is scaled.
        known: names of an earlier run, which keep their ids; None for a new run.

    Returns:
        names: field of tokens -> [ids] names by id, padding first.
        columns: name of a table -> its columns by field: of interactions in the order of the file,
            of users and items by id.
        missing: field of type float -> which of its cells had no number, if there are any.
    """
    # ``ids``: (table, field of tokens) -> the ids in the cells of this column, by row of the file.
    names, ids = _number_all_names(tables, known)
    keys = key_fields(config)  # the fields of names: user -> user_id, item -> item_id
    columns: dict[str, Columns] = {}
    missing: dict[str, np.ndarray] = {}
    for table_name, table in tables.by_name().items():
        # Interactions stay in the order of the file (``rows`` is None). A table of users or items
        # is put in the order of ids: rows[i] is the row of id i in the file, or -1 if it has none.
        # For example, there are 4 ids, 0 to 3, and the file has id 3 in row 0 and id 1 in row 1.
        # Then ``rows`` is [-1, 1, -1, 0], and the column of ids becomes [0, 1, 2, 3].
        rows, converted = None, {}
        if table_name in keys:
            key = keys[table_name]
            rows = np.full(len(names[key]), -1)
            rows[ids[table_name, key]] = np.arange(len(table))
            converted[key] = torch.arange(len(rows))

        # Convert the other columns, of which ``_take_cells`` takes these rows. Where there is no
        # row, a token is 0, which stands for none, and a number is missing (NaN).
        for field in table.columns:
            if field in converted:
                continue
            kind = tables.kinds[field]
            has_tokens = kind.startswith("token")
            cells: Any = ids[table_name, field] if has_tokens else table[field].to_numpy()
            if kind == "token":
                converted[field] = torch.from_numpy(_take_cells(cells, rows, none=0))
            elif kind == "float":
                numbers = _take_cells(cells, rows, none=np.nan)
                converted[field], is_missing = _convert_numbers(numbers, field, config)
                if is_missing.any():
                    missing[field] = is_missing
            else:  # lists of ids or of numbers
                converted[field] = _convert_lists(cells, rows, field, kind, config)
        columns[table_name] = converted
    return names, columns, missing


def _take_cells(cells: np.ndarray, rows: np.ndarray | None, none: float) -> np.ndarray:
    """Return the cells of given rows.

    Args:
        cells: [n] cells of a column.
        rows: [m] rows to take, -1 for a row that does not exist; None for all cells as they are.
        none: what a row that does not exist gets.
    """
    if rows is None:
        return cells
    return np.where(rows >= 0, cells[rows], none)


def _convert_numbers(values: np.ndarray, field: str, config: Options) -> tuple[Tensor, np.ndarray]:
    """Convert the numbers of a field to a tensor; fill in missing ones, and scale as options say.

    As by RecBole, a missing number becomes the mean of the others. A number is missing too if it is
    infinite or, except for times, too large for float32, in which models compute.

    Args:
        values: [n] float64, NaN where a number is missing.
        field: name of the field.
        config: configuration, which says what is scaled.

    Returns:
        column: [n] float64 of times; [n] float32 of other fields.
        is_missing: [n] bool.
    """
    is_valid = np.isfinite(values)
    if field == config["TIME_FIELD"]:  # times stay float64, and all are there
        return wrap_read_only(values), ~is_valid  # a tensor that shares the array
    is_valid &= np.abs(values) <= LARGEST
    if not is_valid.all():
        num_valid = np.count_nonzero(is_valid)
        mean = np.where(is_valid, values, 0).sum() / num_valid if num_valid else np.nan
        values = np.where(is_valid, values, mean)

    if _is_scaled(field, config):
        values = _scale(values)
    return torch.from_numpy(values.astype(np.float32)), ~is_valid


def _convert_lists(
    cells: Sequence[np.ndarray], rows: np.ndarray | None, field: str, kind: str, config: Options
) -> Tensor:
    """Convert the lists of a field to a tensor, padded at the end with 0 to the longest list.

    Args:
        cells: a list (array) for each row of the table.
        rows: [n] rows to take, -1 for an empty list; None for all rows.
        field: name of the field.
        kind: token_seq, whose lists are ids, or float_seq.
        config: configuration, which says what is scaled.

    Returns:
        [n, longest] int64 of token_seq, float32 of float_seq.
    """
    # The lists in the order of the result, then all their values in one array, to be scaled.
    lists = list(cells)
    if rows is not None:
        empty = np.empty(0)
        lists = [empty if row < 0 else lists[row] for row in rows.tolist()]
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.concatenate(lists)
    if kind == "float_seq" and _is_scaled(field, config):
        flat = _scale(flat)

    # Fill the first lengths[i] cells of each row i with the concatenated lists. ``_LIST_TYPES``
    # has the type of the result: int64 or float32.
    padded = np.zeros((len(lists), lengths.max(initial=0)), _LIST_TYPES[kind])
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat
    return torch.from_numpy(padded)


def _is_scaled(field: str, config: Options) -> bool:
    """Return whether ``normalize_field`` or ``normalize_all`` scales a field of numbers."""
    return bool(config["normalize_all"]) or field in (config["normalize_field"] or ())


def _scale(numbers: np.ndarray) -> np.ndarray:
    """Return (x - min) / (max - min) of each number x, or ones if all are the same."""
    low, high = numbers.min(initial=np.inf), numbers.max(initial=-np.inf)  # there may be none
    return (numbers - low) / (high - low) if low < high else np.ones_like(numbers)


def _number_all_names(
    tables: Tables, known: Vocabulary | None
) -> tuple[dict[str, np.ndarray], dict[tuple[str, str], Any]]:
    """Give ids to the names in all fields of the types token (a name) and token_seq (a list).

    Every field has ids of its own. A field that several tables have, such as that of items, has the
    same ids in all of them.

    Args:
        tables: the tables, with names as categories or lists of names.
        known: names of an earlier run, which keep their ids; None for a new run.

    Returns:
        names: field -> [ids] its names by id, padding first.
        ids: (table, field) -> ids of its cells, [rows] int64, or for a field of lists an array for
            each row.
    """
    names: dict[str, np.ndarray] = {}
    ids: dict[tuple[str, str], Any] = {}
    for field in (field for field, kind in tables.kinds.items() if kind.startswith("token")):
        # Names of an earlier run get the ids that they had: the first one is padding, with id 0.
        id_by_name: dict[str, int] = {}
        if known is not None and field in known.tokens:
            known_names = known.tokens[field].tolist()[1:]
            id_by_name = {name: number for number, name in enumerate(known_names, 1)}

        # Number the names: 1 for the first that appears, 2 for the next. These functions return the
        # ids of a column, and add new names to ``id_by_name``.
        for table_name, table in tables.by_name().items():
            if field not in table:
                continue
            if tables.kinds[field] == "token_seq":
                column_ids: Any = _number_lists(table[field], id_by_name)
            else:
                column_ids = _number_names(table[field], id_by_name, tables.storage)
            ids[table_name, field] = column_ids
        # ``id_by_name`` now has all names of the field, in the order of their ids.
        names[field] = np.array(["[PAD]", *id_by_name])
    return names, ids


def _number_lists(column: pd.Series, id_by_name: dict[str, int]) -> list[np.ndarray]:
    """Return the ids of the names in a column of lists, and give ids to names that are new.

    For example, if b has the id 1 already, the lists [b] and [a, b] give [1] and [2, 1].

    Args:
        column: [rows] an array of names in each row.
        id_by_name: the names so far, to which new ones are added in the order of appearance.

    Returns:
        An array of int64 for each row.
    """
    if column.empty:
        return []
    # Number the names of all lists, put end to end, and divide the ids again where each list ends:
    # the example is [b, a, b], then [1, 2, 1].
    all_names = pd.Series(np.concatenate(column.to_list()), dtype=object)
    all_ids = _number_names(all_names, id_by_name, Storage())
    return np.split(all_ids, np.cumsum(column.map(len))[:-1])


def _number_names(column: pd.Series, id_by_name: dict[str, int], storage: Storage) -> np.ndarray:
    """Return the ids of the names in one column, and give ids to names that are new.

    For example, if b has the id 1 already, the column [b, a, none, a] gives [1, 2, 0, 2].

    Args:
        column: [rows] names, as categories or objects, NaN where there is none.
        id_by_name: the names so far, to which new ones are added in the order of appearance.
        storage: space for the result.

    Returns:
        [rows] int64, 0 where there is no name.
    """
    # ``names`` are the different names of the column, and ``codes`` has for each cell the index of
    # its name there, -1 where there is none.
    if column.dtype == "category":
        codes, names = column.cat.codes.to_numpy(), column.cat.categories.to_numpy()
    else:
        codes, unique_names = pd.factorize(column)
        names = np.asarray(unique_names, dtype=object)

    # The id of each code, given in the order in which the names appear in the column: that which
    # the name has, or else the next number (``setdefault``).
    appeared = pd.unique(codes)
    appeared = appeared[appeared >= 0]
    id_by_code = np.zeros(len(names) + 1, dtype=np.int64)  # the last place stays 0: for code -1
    id_by_code[appeared] = [
        id_by_name.setdefault(name, len(id_by_name) + 1) for name in names[appeared]
    ]

    # Replace codes by ids, in chunks of rows, since numpy needs 8 more bytes for each code. The
    # array is in memory or on disk.
    column_ids: np.ndarray = storage.empty(len(codes), np.int64)
    for start in range(0, len(codes), CHUNK_INTERACTIONS):
        chunk = slice(start, start + CHUNK_INTERACTIONS)
        column_ids[chunk] = id_by_code[codes[chunk]]
    return column_ids
