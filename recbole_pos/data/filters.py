"""Which rows of the tables of a dataset are left out, by the options.

In: the tables as they were read. Out: tables with the same rows as after RecBole's filters, in the
order of the file.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from pandas.api.types import union_categoricals

from recbole_pos.data.loading import Tables, key_fields
from recbole_pos.data.splits import filter_sessions
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, listed, shown

# The intervals in an option such as "[5,inf);(0,2]": left bracket, low, high, right bracket.
Intervals = list[tuple[str, float, float, str]]


def filter_rows(tables: Tables, config: Options) -> Tables:
    """Leave out rows, by all options except those that count the interactions of a user or item.

    In this order: rows without a user or item, copies (``rm_copies`` and ``rm_dup_inter``), numbers
    outside of ``val_interval``, and interactions of users or items that are in no table
    (``filter_inter_by_user_or_item``).

    Args:
        tables: the tables as they were read.
        config: configuration, whose options say what is left out.

    Returns:
        New tables; the given ones stay as they are.
    """
    tables = leave_out_nameless(tables, config)
    tables = leave_out_copies(tables, config)
    for field, text in (config["val_interval"] or {}).items():
        intervals = parse_intervals(text)
        for name, table in tables.by_name().items():
            if field in table:
                tables = tables.keep(name, _is_within(table[field].to_numpy(), intervals))
    if config["filter_inter_by_user_or_item"] is True:
        tables = leave_out_undescribed(tables, config)
    return tables


def leave_out_nameless(tables: Tables, config: Options) -> Tables:
    """Leave out rows without a name, with a warning.

    These are interactions without a user or an item, and lines of the tables of users and items
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
    """Leave out interactions that repeat others, by two options.

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

    First by ``session_filter`` (least numbers for a session and for an item, in one pass), then by
    the intervals ``user_inter_num_interval`` and ``item_inter_num_interval``. Ids are given to
    names after this, so that users and items that are left out get none.

    Args:
        tables: the tables after the other filters.
        config: configuration with these options.

    Returns:
        The tables without these users and items.
    """
    # Least numbers of interactions; 1 leaves nothing out.
    minimums = {"session": 1, "item": 1, **(config["session_filter"] or {})}
    if len(minimums) > 2:  # the option has another key
        raise UsageError(f"session_filter: expected session and item, found {', '.join(minimums)}")
    if max(minimums.values()) > 1:
        before, keys = tables.inter, key_fields(config)
        # ``filter_sessions`` returns the interactions that are left. A session is a user here.
        left = filter_sessions(
            before, keys["user"], keys["item"], minimums["session"], minimums["item"]
        )
        # Users and items that had interactions and now have none leave their tables, too.
        for name, key in keys.items():
            table = tables.by_name().get(name)
            if table is not None:
                dropped = set(before[key].unique()) - set(left[key].unique())
                tables = tables.keep(name, ~table[key].isin(dropped).to_numpy())
        tables = replace(tables, inter=left)
    # Then by the two options of intervals, as often as it takes until all counts are within them.
    return _keep_counts_within(tables, config)


def _keep_counts_within(tables: Tables, config: Options) -> Tables:
    """Leave out users and items whose number of interactions is in no allowed interval.

    The intervals are the options ``user_inter_num_interval`` and ``item_inter_num_interval``. To
    leave out a user lowers the counts of items, and the other way round, so this repeats until all
    that are left are within the intervals. The same rows are left as by RecBole.

    Args:
        tables: tables of names as categories, of which those of users and items may be None.
        config: configuration with these options.

    Returns:
        The tables without these users and items; as they are if both options are None.
    """
    options = ("user_inter_num_interval", "item_inter_num_interval")
    allowed = [parse_intervals(config[option]) for option in options]
    if allowed == [None, None]:
        return tables

    # Number the names of users, and those of items. Each list has two entries, users and items:
    # the number (code) of the name in each interaction; in each row of their table, if there is
    # one; and for each code whether the name has a row in that table that is not left out yet.
    inter_codes, table_codes, has_row = [], [], []
    for name, key in key_fields(config).items():
        columns = [tables.inter[key]]
        if name in tables.by_name():
            columns.append(tables.by_name()[name][key])
        names = union_categoricals(columns)
        in_interactions, in_table = np.split(names.codes, [len(tables.inter)])
        inter_codes.append(in_interactions)
        table_codes.append(in_table)
        has_row.append(np.isin(np.arange(len(names.categories)), in_table))

    # Each round takes away the interactions of users and items whose count is wrong, among those
    # that are left (``inter_codes``), until no count is wrong.
    is_kept = np.ones(len(tables.inter), dtype=bool)
    while True:
        num_wrong = 0
        is_dropped = np.zeros(len(inter_codes[0]), dtype=bool)
        for codes, is_listed, intervals in zip(inter_codes, has_row, allowed, strict=True):
            counts = np.bincount(codes, minlength=len(is_listed))
            is_wrong = (counts > 0) & ~_is_within(counts, intervals)
            # A user or item with a row in its table but no interaction (its count is 0) is left
            # out, as in RecBole, if 0 is below the first interval.
            if intervals:
                _, lowest, _, _ = intervals[0]
                is_wrong |= is_listed & (counts < lowest)
            is_listed &= ~is_wrong  # in place, so ``has_row`` changes
            is_dropped |= is_wrong[codes]
            num_wrong += is_wrong.sum()
        if num_wrong == 0:
            break
        is_kept[is_kept] = ~is_dropped
        inter_codes = [codes[~is_dropped] for codes in inter_codes]

    tables = tables.keep("inter", is_kept)
    for name, is_listed, in_table in zip(("user", "item"), has_row, table_codes, strict=True):
        if len(in_table):
            tables = tables.keep(name, is_listed[in_table])
    return tables


def parse_intervals(text: str | None) -> Intervals | None:
    """Parse intervals of numbers, such as ``[5,inf);(0,2]``.

    Args:
        text: the intervals, separated by semicolons; None for none. The table of options has
            checked this form (its type ``interval``).

    Returns:
        (left bracket, low, high, right bracket) of each, such as ("[", 5.0, inf, ")"); None for
        None.
    """
    if text is None:
        return None
    # Split at semicolons; of each interval, take the brackets off and split at the comma.
    intervals = []
    for part in text.split(";"):
        part = part.strip()
        low, high = map(float, part[1:-1].split(","))
        intervals.append((part[0], low, high, part[-1]))
    return intervals


def _is_within(numbers: np.ndarray, intervals: Intervals | None) -> np.ndarray:
    """Return whether each number lies in one of several intervals.

    Args:
        numbers: [n].
        intervals: (left bracket, low, high, right bracket) of each; a round bracket excludes its
            bound. None for no limits, in which all numbers are.

    Returns:
        [n] bool.
    """
    is_within = np.full(len(numbers), not intervals)  # all True without limits, else False at first
    for left, low, high, right in intervals or ():
        is_above = numbers >= low if left == "[" else numbers > low
        is_within |= is_above & (numbers <= high if right == "]" else numbers < high)
    return is_within


def require_rows(tables: Tables, config: Options) -> None:
    """Refuse filters that leave a table without rows."""
    if any(table.empty for table in tables.by_name().values()):
        raise UsageError(
            f"filtering {shown(config['dataset'])} left no interaction, or no row of users or "
            "items; see session_filter, user_inter_num_interval, item_inter_num_interval and "
            "val_interval. Names must be written in the same way in all files"
        )
