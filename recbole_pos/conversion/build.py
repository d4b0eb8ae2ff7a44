"""From a source to the tables of a dataset: interactions, and attributes of items and users.

``find_roles`` finds the columns of user, item and time, ``read_interactions`` the rows that are
interactions, and a ``Builder`` makes a field of every other column of the files.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion.cells import (
    Cells,
    convert_cells,
    encode,
    guess_kind,
    read_ids,
    read_numbers,
)
from recbole_pos.conversion.reading import EMPTY_LINE, Source
from recbole_pos.conversion.times import ROW_ORDER, Times, read_times
from recbole_pos.conversion.writing import MAX_LISTED, TABLES, Column, Lines, Report, Table
from recbole_pos.data.location import UNWRITABLE
from recbole_pos.errors import UsageError
from recbole_pos.values import check_choice, listed, shown, suggest

# Usual names by role, without _id at their end: a name of an earlier group wins over later ones.
_NAMES = {
    "user": (
        "user u user_token",
        "customer client visitor member buyer shopper account reviewer person viewer listener "
        "reader",
        "session s",
    ),
    "item": (
        "item i item_token",
        "product asin parent_asin sku movie song track article book isbn business listing video "
        "game goods news recipe",
    ),
    "time": (
        "timestamp time datetime date ts event_time",
        "bought_at purchased_at created_at ordered_at rated_at viewed_at clicked_at played_at "
        "occurred_at order_date purchase_date invoice_date invoicedate unixreviewtime review_time "
        "event_timestamp timestamp_ms unix_time epoch t_dat eventdate",
    ),
}
_ORDER_NOTE = "order of the rows of each user, no time"
_FIELDS = {"user": "user_id", "item": "item_id", "time": "timestamp"}
# Names that RecBole uses or derives from others, and the built-in fields of relations.
_RESERVED = re.compile(r"label|item_length|time|position|.*_list")
_NAMELESS = re.compile(r"\(column \d+\)|__index_level_\d+__|Unnamed: \d+")  # pandas' row numbers
# A token field of at least so many rows with more different values per row is not loaded.
_UNIQUE_ROWS, _UNIQUE_SHARE = 100, 0.9
# Of the contradictions expected by chance, a column of items or users has at most this share.
_CONTRADICTION_SHARE = 0.1
# What the user sets for single columns: option (type, table or rename) -> column -> value.
Overrides = Mapping[str, Mapping[str, str]]


def find_roles(source: Source, args: ConvertArguments) -> dict[str, str]:
    """Find the columns that say who (user) did something with what (item) and when (time).

    A role is one of ``user``, ``item`` and ``time``. Its column is the one that the user names, or
    else (where ``args.user`` and so on is None) the only one with a usual name, as ``customer_id``.

    Returns:
        Role -> name of its column. The time is ``row_order``, which is no column, if the user says
        that there is none.

    Raises:
        UsageError: if a given column is not there, or none or several may have a role.
    """
    roles = {role: str(name) for role in _NAMES if (name := getattr(args, role)) is not None}
    for role, name in roles.items():
        if (role, name) != ("time", ROW_ORDER):
            require_column(name, source.columns, role)
    for role in [role for role in _NAMES if role not in roles]:
        names = _find_by_name(role, [name for name in source.columns if name not in roles.values()])
        if len(names) != 1:
            found = f"{' and '.join(names)[:100]} may both be" if names else "no column is known as"
            option = f"--{role}=COLUMN"
            if role == "time":
                option += f", or --time={ROW_ORDER} if rows are in order"
            examples = listed(
                f"{name[:40]} ({_quote_example(source.table[name])})" for name in source.columns
            )
            raise UsageError(
                f"{found} the {role}: name it with {option}. The columns are {examples}; if these "
                "are no names, name them with --columns=user,item,..."
            )
        roles[role] = names[0]
    return roles


def require_column(name: str, columns: Iterable[str], option: str) -> None:
    """Raise a UsageError if ``name``, given by the user for an ``option``, is no column."""
    if name not in columns:
        raise UsageError(
            f"{option}: found no column {shown(name)}{suggest(name, columns)}; there are "
            f"{listed(columns)}"
        )


def _find_by_name(role: str, names: Iterable[str]) -> list[str]:
    """Return the columns that may have a role (user, item or time) by their names.

    The usual names of a role are in groups, the surest first; only columns of the first group that
    has any are returned. Names are compared in lower case without ``_id``: ``boughtAt`` is
    ``bought_at``. Of ``movie`` and ``movie_id``, which are then the same, it is the id.
    """
    plain_names = {}
    for name in names:
        parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)  # boughtAt and Bought At: bought_at
        plain_names[name] = re.sub(r"\W+", "_", parted).strip("_").lower()
    for group in _NAMES[role]:
        usual = [
            n for n, plain in plain_names.items() if re.sub("_?id$", "", plain) in group.split()
        ]
        if usual:
            return [name for name in usual if plain_names[name].endswith("id")] or usual
    return []


def _quote_example(column: pa.ChunkedArray) -> str:
    """Return the first value of a column for a message."""
    known = column.slice(0, 1000).drop_null()
    return repr(str(known[0].as_py())[:30]) if len(known) else "empty"


@dataclass
class InteractionTable:
    """Interactions in the order in which they are written.

    Attributes:
        rows: [interactions] int64 row of each in the source.
        user, item: [interactions] names of the user and the item of each.
        seconds: [interactions] float64 time of each in seconds since 1970.
        forms: form of times -> number of rows.
        dropped: reason -> rows of the source that cannot be used.
    """

    rows: np.ndarray
    user: Cells
    item: Cells
    seconds: np.ndarray
    forms: Counter[str]
    dropped: dict[str, np.ndarray]


def read_interactions(
    source: Source, roles: Mapping[str, str], args: ConvertArguments
) -> InteractionTable:
    """Read from each row of a table who did something with what and when.

    Rows without a user, an item or a time that can be read are dropped, each for the first reason
    that holds. If the table has no column of times, the number of each row among the rows of its
    user (0, 1, ...) serves as time. ``args.then`` names a column by which interactions of the same
    time are ordered; with None all rows stay in the order of the file.

    Args:
        roles: role (user, item, time) -> name of its column, see :func:`find_roles`.

    Raises:
        UsageError: if no row is left, or a column is wrong.
    """
    table = source.table
    user, item = (_read_names(table, roles[role], args) for role in ("user", "item"))
    if roles["time"] in source.columns:
        time_column = table[roles["time"]]
        times = read_times(time_column, roles["time"], args.date_format, args.timezone)
    else:  # the number of each row among those of its user serves as time
        ranks = pd.Series(user.codes).groupby(user.codes).cumcount().to_numpy(np.float64)
        times = Times(ranks, Counter({_ORDER_NOTE: len(ranks)}))
        time_column = pa.chunked_array([pa.array(ranks)])

    # Why a row cannot be used -> [rows] bool. The code 0 stands for an empty cell.
    has_no_time = time_column.is_null().to_numpy()
    faults = {
        EMPTY_LINE: has_no_time & (user.codes == 0) & (item.codes == 0),
        f"no user ({roles['user']})": user.codes == 0,
        f"no item ({roles['item']})": item.codes == 0,
        f"no time ({roles['time']})": has_no_time,
        f"time cannot be read ({roles['time']})": np.isnan(times.seconds),
        "user with a line break, or called [PAD]": _find_unwritable(user),
        "item with a line break, or called [PAD]": _find_unwritable(item),
    }
    is_kept = np.ones(table.num_rows, dtype=bool)
    dropped = {}
    for reason, is_faulty in faults.items():  # a row is dropped for its first fault
        if (is_kept & is_faulty).any():
            dropped[reason] = np.flatnonzero(is_kept & is_faulty)
            is_kept &= ~is_faulty
    rows = np.flatnonzero(is_kept)
    if not len(rows):
        reasons = ", ".join(f"{reason}: {len(rows):,} rows" for reason, rows in dropped.items())
        raise UsageError(
            f"{source.path}: no row is an interaction ({reasons}); {roles['time']} is written as "
            f"{_quote_example(time_column)}. See --user, --item, --time and --date_format"
        )
    if args.then is not None:
        require_column(args.then, source.columns, "then")
        ties = encode(table[args.then], args.then, args.missing)
        rows = rows[_order_by_time(times.seconds[rows], ties[rows])]
    return InteractionTable(rows, user[rows], item[rows], times.seconds[rows], times.forms, dropped)


def _order_by_time(seconds: np.ndarray, ties: Cells) -> np.ndarray:
    """Sort interactions by time, and those of the same time by a further column.

    Args:
        seconds: [n] times.
        ties: [n] cells of the further column, which are compared as numbers if all of them are
            numbers, else as text; empty cells come first.

    Returns:
        [n] indices of the interactions in the new order.
    """
    texts = ties.values[1:]  # the first value stands for empty cells
    numbers = read_numbers(texts, decimal=".")
    are_numbers = not np.isnan(numbers).any()
    order = np.argsort(numbers) if are_numbers else pc.sort_indices(texts).to_numpy()
    # Each cell is the index of its text; compare cells by the place of their text in the order.
    # For the texts "", "b", "a" the ranks are 0, 2, 1.
    rank_of_text = np.zeros(len(texts) + 1, np.int64)
    rank_of_text[1:][order] = np.arange(1, len(texts) + 1)
    return np.lexsort((rank_of_text[ties.codes], seconds))


def _read_names(table: pa.Table, column: str, args: ConvertArguments) -> Cells:
    """Read a column of the names of users or items; refuse lists, as each row must be about one.

    Returns:
        [rows] the names as :class:`Cells`: a code for each row, 0 where the name is missing.
    """
    # `encode` numbers the different values of the column, so that each row has a code.
    cells = encode(table[column], column, args.missing)
    if cells.kind.endswith("_seq"):
        raise UsageError(
            f"{column}: found lists, expected one name in each row; make a row of each entry by a "
            "library, such as frame.explode(...), and give its frame to Dataset.from_frame"
        )
    return read_ids(cells)


def _find_unwritable(names: Cells) -> np.ndarray:
    """Return [rows] bool, true where a name cannot stand in a file of interactions."""
    matches = pc.match_substring_regex(names.values, UNWRITABLE)
    return matches.to_numpy(zero_copy_only=False)[names.codes]


def check_overrides(
    overrides: Overrides, roles: Mapping[str, str], sources: Iterable[Source]
) -> None:
    """Check what the user sets for single columns: their type, table or new name.

    Args:
        overrides: option (``type``, ``table`` or ``rename``) -> name of a column -> value.
        roles: role (user, item, time) -> name of its column.

    Raises:
        UsageError: if no table has such a column; or if a type or table is set for the column of
            user, item or time, for which both are fixed.
    """
    columns = {name for source in sources for name in source.columns}
    for option, values in overrides.items():
        for column in values:
            require_column(column, columns, option)
            if option != "rename" and column in roles.values():
                raise UsageError(
                    f"{option}: column {shown(column)} is the user, item or time, which are token, "
                    "token and float of the interactions; leave it out"
                )


def make_field_name(column: str, taken: Iterable[str]) -> str:
    """Make a name for the field of a dataset of the name of a column.

    ``Prix (é)`` becomes ``Prix_e``. A name that RecBole uses itself, such as ``label``, or that
    begins with a digit, gets the prefix ``column_``; a name in ``taken`` gets a number: ``name_2``.
    """
    # Split é into e and an accent, and leave the accents out.
    decomposed = unicodedata.normalize("NFKD", column)
    plain = "".join(c for c in decomposed if not unicodedata.combining(c))
    name = re.sub(r"\W+", "_", plain).strip("_") or "column"
    if _RESERVED.fullmatch(name.lower()) or name[0].isdigit():
        name = f"column_{name}"
    candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


class EntityIndex:
    """All items, or all users (entities), numbered in the order in which they first occur.

    Attributes:
        codes: [interactions] number of the entity of each, from 0.
        cells: [entities] names of the entities.
    """

    def __init__(self, cells: Cells) -> None:
        """Number the entities whose names are in ``cells`` [interactions]."""
        encoded = pa.array(cells.codes).dictionary_encode()
        self.codes = encoded.indices.to_numpy()
        self.cells = replace(cells, codes=encoded.dictionary.to_numpy(), kind="token")

    def __len__(self) -> int:
        return len(self.cells.codes)

    def find(self, names: Cells) -> np.ndarray:
        """Return [rows] number of the entity that each cell of ``names`` names, -1 for none."""
        known = self.cells.values.take(pa.array(self.cells.codes))
        numbers = pc.index_in(names.values, known).fill_null(-1).to_numpy()
        return np.where(names.codes > 0, numbers[names.codes], -1)


def find_first_values(
    cells: Cells, entities: np.ndarray, num_entities: int
) -> tuple[Cells, np.ndarray]:
    """Find the first value of a column for each item (user), and the rows with another value.

    For items [0, 0, 1] with the values red, blue, red, the first values are red and red, and the
    second row contradicts.

    Args:
        cells: [rows] cells of a column; empty ones (code 0) are neither first nor contradict.
        entities: [rows] number of the item (user) of each row, from 0.
        num_entities: number of items (users).

    Returns:
        Cells [num_entities], empty where an item has no value, and [rows] bool.
    """
    filled = np.flatnonzero(cells.codes)
    first = np.zeros(num_entities, dtype=cells.codes.dtype)
    # in reverse, since the last assignment to an element stays
    first[entities[filled[::-1]]] = cells.codes[filled[::-1]]
    is_contradicting = (cells.codes > 0) & (cells.codes != first[entities])
    return replace(cells, codes=first), is_contradicting


def choose_table(cells: Cells, entities: Mapping[str, EntityIndex]) -> str:
    """Decide whether a column of the interactions says something of the item, or of the user.

    A column belongs to items (users) if values of one item (user) differ at most a tenth as often
    as by chance. If no item (user) has two values, this cannot be tested, and it does not belong.

    Args:
        cells: [interactions] cells of the column; code 0 is an empty cell.
        entities: ``item`` and ``user`` -> which item (user) each interaction has.

    Returns:
        ``item`` or ``user``, whichever its values contradict less; ``inter`` (interactions) if it
        belongs to neither.
    """
    # One value and empty cells, as of a flag: let the empty ones count as a second value.
    if len(np.unique(cells.codes)) == 2 and cells.codes.min() == 0:
        cells = replace(cells, codes=cells.codes + 1)
    ratios = {}
    for table, index in entities.items():
        first, is_contradicting = find_first_values(cells, index.codes, len(index))
        num_repeated = np.count_nonzero(cells.codes) - np.count_nonzero(first.codes)
        if not num_repeated:  # no item (user) has two values
            continue
        # The chance that two cells taken at random differ, against the share of those that do.
        counts = np.bincount(cells.codes)[1:]
        chance = 1 - float(((counts / counts.sum()) ** 2).sum())
        share = np.count_nonzero(is_contradicting) / num_repeated
        if share <= _CONTRADICTION_SHARE * chance:
            ratios[table] = share / chance if share else 0.0
    return min(ratios, key=lambda table: ratios[table], default="inter")


class Builder:
    """Makes the tables of a dataset (interactions, items, users), and reports every column.

    Attributes:
        roles: role (user, item, time) -> column.
        fields: role -> name of its field.
        entities: role -> all items or users.
        tables: table -> field -> cells (of the time: seconds); see :meth:`finish`.
    """

    def __init__(
        self,
        source: Source,
        interactions: InteractionTable,
        roles: Mapping[str, str],
        overrides: Overrides,
        args: ConvertArguments,
        report: Report,
    ) -> None:
        """Begin the tables with the fields of user, item and time.

        Args:
            source: the table that holds the interactions.
            interactions: user, item and time of each interaction that is kept.
            roles: role (user, item, time) -> name of its column.
            overrides: option (type, table or rename) -> column -> what the user sets for it.
        """
        self.source, self.interactions, self.roles = source, interactions, roles
        self.overrides, self.args, self.report = overrides, args, report
        self.taken: set[str] = set()
        self.fields = {role: self._name_field(roles[role], name) for role, name in _FIELDS.items()}
        self.entities: dict[str, EntityIndex] = {}
        self.tables: dict[str, dict[str, Cells | np.ndarray]] = {name: {} for name in TABLES}
        # `as_kind` keeps the cells and sets their type: names are tokens. The table of items
        # (users) begins with a row for each, which holds its name.
        for role, cells in (("user", interactions.user), ("item", interactions.item)):
            field = self.fields[role]
            self._add(roles[role], source, "inter", cells.as_kind("token"), field)
            self.entities[role] = EntityIndex(cells)
            self.tables[role][field] = self.entities[role].cells
        self.tables["inter"][self.fields["time"]] = interactions.seconds
        time = Column(roles["time"], source.path.name, self.fields["time"], "float", "inter")
        time.different = len(np.unique(interactions.seconds))
        time.notes = [*interactions.forms]
        report.columns.append(time)

    def _name_field(self, column: str, default: str = "") -> str:
        """Return a name for the field of a column, made of that of ``rename``, or of a default."""
        name = self.overrides["rename"].get(column) or default or column
        name = make_field_name(name, self.taken)
        self.taken.add(name)
        return name

    @property
    def has_time(self) -> bool:
        """Whether a column holds times; without one, the order of the rows serves as time."""
        return self.roles["time"] in self.source.columns

    def add_file(self, source: Source, role: str) -> None:
        """Add the columns of a file about items (users) as their attributes.

        Rows of the file about items (users) that have no interaction are left out and reported.

        Args:
            source: the file, a row for each item (user).
            role: ``item`` or ``user``.

        Raises:
            UsageError: if no row is about an item (user) that has an interaction.
        """
        # Find the item (user) of each row: its number, or -1 if it has no interaction.
        key, index = self._find_key(source, role), self.entities[role]
        ids = _read_names(source.table, key, self.args)
        entities = index.find(ids)
        unused = f"{role} without an interaction"
        dropped = {
            f"no {role} ({key})": np.flatnonzero(ids.codes == 0),
            unused: np.flatnonzero((entities < 0) & (ids.codes > 0)),
        }
        self.report.lines[f"{role}s"] = Lines.count(source, dropped, unused)
        rows = np.flatnonzero(entities >= 0)
        if not len(rows):
            examples = [shown(cells.values[-1].as_py()) for cells in (ids, index.cells)]
            raise UsageError(
                f"{source.path}: no {role} has an interaction; {key} has such as {examples[0]}, "
                f"the interactions {examples[1]}"
            )
        for column in source.columns:
            cells = None if column == key else self._read_column(source, column)
            if cells is not None:
                self._add_attribute(column, source, role, cells[rows], entities[rows], rows)

    def _find_key(self, source: Source, role: str) -> str:
        """Find the column of a file that names the item (user) which each row is about.

        It is called as in the interactions, or else by a usual name, or else ``id``.
        """
        named = [name for name in source.columns if name == self.roles[role]]
        called_id = [name for name in source.columns if name.lower() == "id"]  # ID and Id as well
        for names in (named, _find_by_name(role, source.columns), called_id):
            if len(names) == 1:
                return names[0]
        raise UsageError(
            f"{source.path}: no column is called {shown(self.roles[role])} as in the interactions, "
            f"so no one knows which {role} a row is about; rename one of {listed(source.columns)}"
        )

    def add_columns(self) -> None:
        """Make a field of every column of the interactions but user, item and time.

        It goes into the table that the user sets for it, or else into that of items (users) if it
        is the same in nearly all interactions of an item (user), or else stays where it is.
        """
        rows = self.interactions.rows
        for column in self.source.columns:
            has_role = column in self.roles.values()
            cells = None if has_role else self._read_column(self.source, column)
            if cells is None:
                continue
            cells = cells[rows]
            table = self.overrides["table"].get(column) or choose_table(cells, self.entities)
            check_choice(f"table: {column}", table, TABLES)
            if table == "inter":
                self._add(column, self.source, table, cells)
            else:
                entities = self.entities[table].codes
                self._add_attribute(column, self.source, table, cells, entities, rows)

    def _read_column(self, source: Source, column: str) -> Cells | None:
        """Read the cells [rows] of a column as the type that the user sets, or that is guessed.

        Return None, and report the reason, for a column without a name or type: it is left out.
        """
        try:
            if _NAMELESS.fullmatch(column):
                raise UsageError("has no name")
            cells = encode(source.table[column], column, self.args.missing)
            kind = self.overrides["type"].get(column)
            if not kind:
                return guess_kind(cells, column, self.args.decimal)
        except UsageError as error:
            left_out = Column(column, source.path.name, notes=[str(error)], loaded=False)
            self.report.columns.append(left_out)
            return None
        return convert_cells(cells, kind, column, self.args.decimal)

    def _add_attribute(
        self,
        column: str,
        source: Source,
        table: str,
        cells: Cells,
        entities: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Add a column as an attribute of items (users): the first value that each of them has.

        Rows with another value than the first are reported.

        Args:
            cells: [n] the values.
            entities: [n] number of the item (user) that has each value.
            rows: [n] row of the source in which each value is, for the report.
        """
        first, is_contradicting = find_first_values(cells, entities, len(self.entities[table]))
        wrong = rows[is_contradicting]
        if len(wrong):
            places = ", ".join(source.locate_rows(wrong[:MAX_LISTED]))
            note = f"{len(wrong):,} rows differ from the first of the {table}, which was taken"
            first = first.as_kind(first.kind, f"{note}, first {places}")
        self._add(column, source, table, first)

    def _add(
        self, column: str, source: Source, table: str, cells: Cells, field: str | None = None
    ) -> None:
        """Add cells as a field of a table, and report the column.

        A field of no use to a model, such as an empty one, is written, but runs do not load it.

        Args:
            column, source: name of the column, and its file.
            table: ``inter`` (interactions), ``item`` or ``user``.
            cells: [rows of the table] the values.
            field: name of the field; None to make one of that of the column.
        """
        field = field or self._name_field(column)
        self.tables[table][field] = cells
        reported = Column(column, source.path.name, field, cells.kind, table, cells.different)
        reported.missing = int((cells.codes == 0).sum())
        reported.notes = list(cells.notes)
        reason = "" if column in self.roles.values() else _describe_useless(cells)
        if reason:
            reported.loaded = False
            reported.notes.append(f"written, not loaded: {reason}")
        self.report.columns.append(reported)

    def finish(self) -> tuple[dict[str, Table], dict[str, list[str]]]:
        """Return table -> field -> cells to write, and table -> fields that a run loads by default.

        Tables of items or users without attributes are left out.
        """
        not_loaded = {column.field for column in self.report.columns if not column.loaded}
        tables = {n: table for n, table in self.tables.items() if n == "inter" or len(table) > 1}
        loaded = {
            name: [field for field in table if field not in not_loaded]
            for name, table in tables.items()
        }
        return dict(tables), loaded


def _describe_useless(cells: Cells) -> str:
    """Return why a field is of no use to a model, such as a title that no two rows share; or ""."""
    num_rows = int(np.count_nonzero(cells.codes))
    if not num_rows:
        return "it is empty"
    is_unique = cells.different > _UNIQUE_SHARE * num_rows
    if cells.kind == "token" and num_rows >= _UNIQUE_ROWS and is_unique:
        return "nearly every one is another"
    return ""
