"""Which rows of the tables of a dataset are left out, by the options.

In: the tables as they were read. Out: tables with the same rows as after RecBole's filters, in the
order of the file.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from recbole_pos.data.loading import Tables, key_fields
from recbole_pos.data.splits import filter_sessions
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, listed, shown

_ENTITIES = ("user", "item")
# The intervals in an option such as "[5,inf);(0,2]": low, high, and which of these is included.
Intervals = list[tuple[float, float, Literal["both", "neither", "left", "right"]]]
_INCLUSIVE: dict[str, Any] = {"[]": "both", "()": "neither", "[)": "left", "(]": "right"}


def filter_rows(tables: Tables, config: Options) -> Tables:
    """Leave out rows by what stands in them, such as a missing name or a number out of bounds.

    In this order: rows without a user or item, copies (``rm_copies`` and ``rm_dup_inter``), numbers
    outside of ``val_interval``, and interactions of users or items that are in no table
    (``filter_inter_by_user_or_item``). Users and items with too few or too many interactions stay:
    :func:`filter_by_counts` leaves them out.

    Args:
        tables: the tables as they were read.
        config: configuration, whose options say what is left out.

    Returns:
        New tables; the given ones stay as they are.
    """
    tables = leave_out_nameless(tables, config)
    tables = leave_out_copies(tables, config)

    # A field may be in several tables, by name: inter, user and item. ``keep`` returns the tables
    # with only those rows of one of them where a mask is true.
    for field, text in (config["val_interval"] or {}).items():
        intervals = parse_intervals(text)
        for name, table in tables.by_name().items():
            if field in table:
                tables = tables.keep(name, _is_within(table[field].to_numpy(), intervals))
    if config["filter_inter_by_user_or_item"] is True:
        tables = leave_out_undescribed(tables, config)
    return tables


def leave_out_nameless(tables: Tables, config: Options) -> Tables:
    """Leave out rows that do not name their user or item, and warn of them.

    These are interactions without a user or an item, and rows of the tables of users and items
    without the name of the user or item.

    Args:
        tables: the tables as they were read.
        config: configuration, which names the columns of users and items.

    Returns:
        The tables without these rows.
    """
    # ``key_fields`` gives the columns of names: user -> user_id, item -> item_id.
    for name, key in key_fields(config).items():
        for table_name in (name, "inter"):
            table = tables.by_name().get(table_name)
            if table is None or not table[key].hasnans:
                continue
            is_nameless = table[key].isna().to_numpy()
            logging.getLogger().warning(
                f"{config['dataset']}.{table_name}: {is_nameless.sum():,} rows have no {key} and "
                "are left out; of the rows of data, counted from 1: "
                f"{listed(table.index[is_nameless] + 1)}"
            )
            tables = tables.keep(table_name, ~is_nameless)
    return tables


def leave_out_copies(tables: Tables, config: Options) -> Tables:
    """Leave out interactions that repeat others, if one of two options is set.

    ``rm_copies`` leaves out those with the user, item and time of an earlier row. ``rm_dup_inter``
    (RecBole's) keeps of each pair of user and item the ``first`` interaction or the ``last``, by
    time. RecBole may reorder interactions with equal times; here they keep their order.

    Args:
        tables: the tables, with interactions in the order of the file.
        config: configuration with these options.

    Returns:
        The tables, of which the interactions have fewer rows.
    """
    pair, time_field = [*key_fields(config).values()], config["TIME_FIELD"]
    if config["rm_copies"]:
        tables = tables.keep("inter", ~tables.inter.duplicated([*pair, time_field]).to_numpy())
    kept = config["rm_dup_inter"]  # first or last; None for all
    if kept is not None:
        # Find the repeated pairs in the order of time, and write the answer to the rows in order of
        # the file.
        table = tables.inter
        order = np.argsort(table[time_field].to_numpy(), kind="stable")
        is_kept = np.empty(len(order), dtype=bool)
        is_kept[order] = ~table[pair].iloc[order].duplicated(keep=kept).to_numpy()
        tables = tables.keep("inter", is_kept)
    return tables


def leave_out_undescribed(tables: Tables, config: Options) -> Tables:
    """Leave out interactions whose user or item has no row in its table, if that is loaded."""
    for name, key in key_fields(config).items():
        table = tables.by_name().get(name)
        if table is not None:
            tables = tables.keep("inter", tables.inter[key].isin(table[key]).to_numpy())
    return tables


def filter_by_counts(tables: Tables, config: Options) -> Tables:
    """Leave out users and items by their numbers of interactions, with all their rows.

    Two filters follow each other. The option ``session_filter`` has the least numbers of
    interactions of a session and of an item. (A session is what the other options call a user.) The
    options ``user_inter_num_interval`` and ``item_inter_num_interval`` are intervals in which the
    numbers must be.

    Args:
        tables: the tables after the other filters.
        config: configuration with these options.

    Returns:
        The tables without these users and items.
    """
    minimums = {"session": 1, "item": 1, **(config["session_filter"] or {})}
    if len(minimums) > 2:  # the option has another key
        raise UsageError(f"session_filter: expected session and item, found {', '.join(minimums)}")
    if max(minimums.values()) > 1:
        # ``filter_sessions`` drops the interactions of short sessions, then those of rare items,
        # then those of sessions that have become too short by that.
        before, keys = tables.inter, key_fields(config)
        after = filter_sessions(
            before, keys["user"], keys["item"], minimums["session"], minimums["item"]
        )
        # Users and items that have lost all their interactions leave their own tables, too. (Those
        # that never had any stay.) ``name`` is user or item, ``key`` the column of their names.
        for name, key in keys.items():
            table = tables.by_name().get(name)
            if table is not None:
                had_some = table[key].isin(before[key].unique())
                has_some = table[key].isin(after[key].unique())
                has_lost_all = had_some & ~has_some
                tables = tables.keep(name, ~has_lost_all.to_numpy())
        tables = replace(tables, inter=after)
    # Then by the two options of intervals, as often as it takes until all counts are within them.
    return _keep_counts_within(tables, config)


def _keep_counts_within(tables: Tables, config: Options) -> Tables:
    """Leave out users and items whose number of interactions is in no allowed interval.

    The intervals are the options ``user_inter_num_interval`` and ``item_inter_num_interval``. To
    leave out a user lowers the counts of items, and the other way round, so this repeats until all
    that are left are within the intervals. For example, both options ask for at least 2. User a has
    the items x and y, b has x and y, c has y and z. In the first round item z goes, which one user
    has, then c, who has only y left. The same rows are left as by RecBole.

    Args:
        tables: tables of names as categories, of which those of users and items may be None.
        config: configuration with these options.

    Returns:
        The tables without these users and items; as they are if both options are None.
    """
    allowed = {name: parse_intervals(config[f"{name}_inter_num_interval"]) for name in _ENTITIES}
    if not any(allowed.values()):
        return tables

    # In the interactions, the columns of users and items (the keys are "user" and "item") are
    # categories: each different name has a number, its code, and a cell has the code of its name.
    columns = {name: tables.inter[key].cat for name, key in key_fields(config).items()}
    codes = {name: column.codes.to_numpy() for name, column in columns.items()}

    # What is kept of the interactions; and, by code, which users and items are dropped.
    is_kept = np.ones(len(tables.inter), dtype=bool)
    is_dropped = {name: np.zeros(len(columns[name].categories), bool) for name in _ENTITIES}
    while True:
        # Count the interactions that are left, of users and of items, before any are dropped.
        is_outside = {}
        for name in _ENTITIES:
            counts = np.bincount(codes[name][is_kept], minlength=len(is_dropped[name]))
            is_outside[name] = (counts > 0) & ~_is_within(counts, allowed[name])
        if not any(mask.any() for mask in is_outside.values()):
            break
        # Drop users and items whose count is in no interval, and their interactions.
        for name in _ENTITIES:
            is_dropped[name] |= is_outside[name]
            is_kept &= ~is_outside[name][codes[name]]
    tables = tables.keep("inter", is_kept)

    # The dropped users and items leave their own tables, too, if these are loaded.
    for name, key in key_fields(config).items():
        table, intervals = tables.by_name().get(name), allowed[name]
        if table is not None and intervals is not None:
            dropped = columns[name].categories[is_dropped[name]]
            stays = _find_staying(table[key], tables.inter[key], dropped, intervals)
            tables = tables.keep(name, stays.to_numpy())
    return tables


def _find_staying(
    names: pd.Series, interacting: pd.Series, dropped: pd.Index, intervals: Intervals
) -> pd.Series:
    """Return which rows of the table of users (or items) stay in a filter by interactions, as bool.

    The filter has dropped users with too few or too many interactions. A user in the table may also
    have no interactions, which counts as too few if all intervals begin above 0, as RecBole does.

    Args:
        names: the name in each row of the table.
        interacting: the names in the interactions that are left.
        dropped: the names that were dropped for their numbers of interactions.
        intervals: the allowed numbers, (low, high, inclusive) of each.
    """
    if min(low for low, _, _ in intervals) > 0:  # such as [1,inf)
        return names.isin(interacting.unique())
    return ~names.isin(dropped)


def parse_intervals(text: str | None) -> Intervals | None:
    """Parse intervals of numbers, such as ``[5,inf);(0,2]``.

    Args:
        text: the intervals, separated by semicolons; None for none. The table of options has
            checked this form (its type ``interval``).

    Returns:
        (low, high, inclusive) of each, such as (5.0, inf, "left"), as pandas' ``between`` takes
        them; None for None.
    """
    if text is None:
        return None
    # Split at semicolons; of each interval, take the brackets off and split at the comma. The two
    # brackets say which of the bounds are included: _INCLUSIVE has pandas' word for each pair.
    intervals: Intervals = []
    for part in text.split(";"):
        part = part.strip()
        low, high = map(float, part[1:-1].split(","))
        intervals.append((low, high, _INCLUSIVE[part[0] + part[-1]]))
    return intervals


def _is_within(numbers: np.ndarray, intervals: Intervals | None) -> np.ndarray:
    """Return whether each number lies in one of several intervals.

    Args:
        numbers: [n].
        intervals: (low, high, inclusive) of each, from :func:`parse_intervals`. None for no limits,
            in which all numbers are.

    Returns:
        [n] bool.
    """
    is_within = np.full(len(numbers), intervals is None)
    for low, high, inclusive in intervals or ():
        is_within |= pd.Series(numbers).between(low, high, inclusive).to_numpy()
    return is_within


def require_rows(tables: Tables, config: Options) -> None:
    """Refuse filters that leave a table without rows."""
    if any(table.empty for table in tables.by_name().values()):
        raise UsageError(
            f"filtering {shown(config['dataset'])} left no interaction, or no row of users or "
            "items; see session_filter, user_inter_num_interval, item_inter_num_interval and "
            "val_interval. Names must be written in the same way in all files"
        )
