"""From a source to the tables of a dataset: interactions, and attributes of items and users.

``find_roles`` finds the columns of user, item and time, ``read_interactions`` the rows that are
interactions, and a ``Builder`` makes a field of every other column of the files.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion.cells import (
    Cells,
    EntityIndex,
    choose_table,
    convert_cells,
    encode,
    explain_useless,
    find_first_values,
    guess_kind,
    read_ids,
)
from recbole_pos.conversion.reading import EMPTY_LINE, Source
from recbole_pos.conversion.times import ROW_ORDER, order_by_time, read_times
from recbole_pos.conversion.writing import MAX_LISTED, TABLES, Column, Lines, Report, Table
from recbole_pos.data.atomic_files import UNWRITABLE
from recbole_pos.errors import UsageError
from recbole_pos.values import check_choice, listed, shown, suggest

# Usual names by role, without _id at their end: a name of an earlier group wins over later ones.
_USUAL_NAMES = {
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
_FIELDS = {"user": "user_id", "item": "item_id", "time": "timestamp"}
# Names that RecBole uses or derives from others, and the built-in fields of relations.
_RESERVED = re.compile(r"label|item_length|time|position|.*_list")
_NAMELESS = re.compile(r"\(column \d+\)|__index_level_\d+__|Unnamed: \d+")  # pandas' row numbers
# What the user sets for single columns: option (type, table or rename) -> column -> value.
Overrides = Mapping[str, Mapping[str, str]]


def find_roles(source: Source, args: ConvertArguments) -> dict[str, str]:
    """Find the columns that say who (user) did something with what (item) and when (time).

    A role is one of ``user``, ``item`` and ``time``. Its column is the one that the user names, or
    else (where ``args.user`` and so on is None) the only one with a usual name, as ``customer_id``.

    Args:
        source: the table that holds the interactions.
        args: arguments of the command ``convert``; ``user``, ``item`` and ``time`` are names of
            columns, or None.

    Returns:
        Role -> name of its column. The time is ``row_order``, which is no column, if the user says
        that there is none.

    Raises:
        UsageError: if a given column is not there, or none or several may have a role.
    """
    # Take the columns that the user names. ``row_order`` as time says that there is no column.
    # ``_USUAL_NAMES`` has each role, with the usual names of its column.
    given = {role: getattr(args, role) for role in _USUAL_NAMES}
    roles = {role: str(name) for role, name in given.items() if name is not None}
    for role, name in roles.items():
        if (role, name) != ("time", ROW_ORDER):
            require_column(name, source.columns, role)

    # Guess the others among the columns that are left.
    for role in [role for role in _USUAL_NAMES if role not in roles]:
        names = _find_by_name(role, [name for name in source.columns if name not in roles.values()])
        if len(names) == 1:
            roles[role] = names[0]
            continue

        # None or several: say which, and list all columns, each with its first value.
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
    return roles


def require_column(name: str, columns: Iterable[str], option: str) -> None:
    """Raise a UsageError if ``name``, given by the user for an ``option``, is no column."""
    if name not in columns:
        raise UsageError(
            f"{option}: found no column {shown(name)}{suggest(name, columns)}; there are "
            f"{listed(columns)}"
        )


def _find_by_name(role: str, names: Sequence[str]) -> list[str]:
    """Return the columns that may have a role (user, item or time) by their names.

    The usual names of a role are in groups, the surest first; only columns of the first group that
    has any are returned. Names are compared in lower case without ``_id``: ``boughtAt`` is
    ``bought_at``. If there are both ``movie`` and ``movie_id``, only ``movie_id`` is returned.

    Args:
        role: ``user``, ``item`` or ``time``.
        names: names of columns.
    """
    # Write each name in lower case with _ between words: boughtAt and Bought At as bought_at.
    plain_names = {}
    for name in names:
        parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
        plain_names[name] = re.sub(r"\W+", "_", parted).strip("_").lower()

    for group in _USUAL_NAMES[role]:
        found = [name for name in names if re.sub("_?id$", "", plain_names[name]) in group.split()]
        if found:
            ids = [name for name in found if plain_names[name].endswith("id")]
            return ids or found
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
        form: form in which times are written, such as ``ISO dates``.
        dropped: reason -> rows of the source that cannot be used.
    """

    rows: np.ndarray
    user: Cells
    item: Cells
    seconds: np.ndarray
    form: str
    dropped: dict[str, np.ndarray]


def read_interactions(
    source: Source, roles: Mapping[str, str], args: ConvertArguments
) -> InteractionTable:
    """Read from each row of a table who did something with what and when.

    Rows without a user, an item or a time that can be read are dropped, each for the first reason
    that holds. If the table has no column of times, the number of each row among the rows of its
    user (0, 1, ...) serves as time. Rows stay in the order of the file, unless ``args.then`` names
    a column: they are then sorted by time, and those of the same time by this column.

    Args:
        source: the table that holds the interactions.
        roles: role (user, item, time) -> name of its column.
        args: arguments of the command ``convert``: words for a missing value, and the form of
            times.

    Raises:
        UsageError: if no row is left, or a column is wrong.
    """
    # Names are ``Cells``: ``user.codes`` has for each row a number that stands for the name.
    table = source.table
    user = _read_names(table, roles["user"], args)
    item = _read_names(table, roles["item"], args)
    if roles["time"] in source.columns:
        times = table[roles["time"]]
        seconds, form = read_times(times, roles["time"], args.date_format, args.timezone)
    else:  # the number of each row among those of its user serves as time
        seconds = pd.Series(user.codes).groupby(user.codes).cumcount().to_numpy(np.float64)
        form = "order of the rows of each user, no time"
        times = pa.chunked_array([pa.array(seconds)])

    # ``faults``: reason, such as "no user" -> [rows] bool, whether it holds for each row
    faults = _find_faults(roles, user, item, times.is_null().to_numpy(), seconds)
    rows, dropped = _drop_faulty_rows(table.num_rows, faults)
    if not len(rows):
        reasons = ", ".join(f"{reason}: {len(lost):,} rows" for reason, lost in dropped.items())
        raise UsageError(
            f"{source.path}: no row is an interaction ({reasons}); {roles['time']} is written as "
            f"{_quote_example(times)}. See --user, --item, --time and --date_format"
        )
    if args.then is not None:
        require_column(args.then, source.columns, "then")
        rows = rows[order_by_time(seconds[rows], table[args.then].take(rows))]
    return InteractionTable(rows, user[rows], item[rows], seconds[rows], form, dropped)


def _find_faults(
    roles: Mapping[str, str], user: Cells, item: Cells, has_no_time: np.ndarray, seconds: np.ndarray
) -> dict[str, np.ndarray]:
    """Find the rows of a table that cannot be used as interactions, and why.

    Args:
        roles: role (user, item, time) -> name of its column.
        user, item: [rows] names; code 0 is an empty cell.
        has_no_time: [rows] bool, whether the cell of the time is empty.
        seconds: [rows] times, NaN where none could be read.

    Returns:
        Reason -> [rows] bool, whether it holds. If several hold for a row, the first one counts.
    """
    has_no_user, has_no_item = user.codes == 0, item.codes == 0
    faults = {
        EMPTY_LINE: has_no_user & has_no_item & has_no_time,
        f"no user ({roles['user']})": has_no_user,
        f"no item ({roles['item']})": has_no_item,
        f"no time ({roles['time']})": has_no_time,
        f"time cannot be read ({roles['time']})": np.isnan(seconds),
    }
    for role, names in (("user", user), ("item", item)):
        # Names that cannot stand in a file (the pattern UNWRITABLE): a line is a row there, and
        # [PAD] is RecBole's padding. Each different name, of ``names.values``, is tested once. The
        # code of a row is the place of its name among these.
        matches = pc.match_substring_regex(names.values, UNWRITABLE)
        is_unwritable = matches.to_numpy(zero_copy_only=False)[names.codes]
        faults[f"{role} with a line break, or called [PAD]"] = is_unwritable
    return faults


def _drop_faulty_rows(
    num_rows: int, faults: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the rows without a fault, and the others by reason.

    Args:
        num_rows: number of all rows.
        faults: reason -> [rows] bool, whether each row has this fault.

    Returns:
        Numbers of the rows without a fault.
        Reason -> numbers of the rows whose first fault it is, only for reasons that occur.
    """
    dropped = {}
    is_kept = np.ones(num_rows, dtype=bool)
    for reason, has_fault in faults.items():
        rows = np.flatnonzero(is_kept & has_fault)
        if len(rows):
            dropped[reason] = rows
            is_kept[rows] = False
    return np.flatnonzero(is_kept), dropped


def _read_names(table: pa.Table, column: str, args: ConvertArguments) -> Cells:
    """Read a column of the names of users or items; refuse lists, as each row must be about one.

    Args:
        table: the rows of a file.
        column: name of the column.
        args: arguments of the command ``convert``, with further words for a missing value.

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


class Builder:
    """Makes the tables of a dataset (interactions, items, users), and reports every column.

    A column of a file becomes a field of one of these tables. The constructor makes the fields of
    user, item and time, :meth:`add_file` and :meth:`add_columns` the others, and :meth:`finish`
    returns the tables.

    Attributes:
        source: the table that holds the interactions.
        interactions: user, item and time of each interaction that is kept.
        roles: role (user, item, time) -> name of its column.
        overrides: option (type, table or rename) -> column -> what the user sets for it.
        args: arguments of the command ``convert``.
        report: has an entry for each column.
        tables: table (inter, item, user) -> field -> its cells; of the time, seconds.
        fields: role -> name of its field.
        entities: ``item`` and ``user`` -> all items or users, numbered from 0.
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
        """Begin the tables of a dataset with the fields of user, item and time.

        Args:
            source: the file of interactions.
            interactions: what was read of it: user, item and time of each interaction.
            roles: role (user, item, time) -> name of its column in the file.
            overrides: option (type, table or rename) -> column -> what the user sets for it.
            args: arguments of the command ``convert``.
            report: gets an entry for each column.
        """
        self.source, self.interactions, self.roles = source, interactions, roles
        self.overrides, self.args, self.report = overrides, args, report
        self.tables: dict[str, dict[str, Cells | np.ndarray]] = {name: {} for name in TABLES}
        self.fields: dict[str, str] = {}
        self.entities: dict[str, EntityIndex] = {}

        self._add_names("user", interactions.user.as_kind("token"))
        self._add_names("item", interactions.item.as_kind("token"))
        self._add_time()

    def _add_names(self, role: str, names: Cells) -> None:
        """Add the names of users (or items) to the interactions, and begin the table of users.

        In the dataset to be made the names are a field, such as ``user_id``. The table of
        interactions has it, with the user of each interaction. The table of users has it, too, with
        each user once; attributes of users are added to that table later.

        Args:
            role: ``user`` or ``item``.
            names: [interactions] name of the user (item) of each.
        """
        # Make the names a field of the interactions. It is called as usual, such as ``user_id``
        # (``_FIELDS``), unless the user renames the column of the file (``self.roles[role]``).
        column, usual_name = self.roles[role], _FIELDS[role]
        field = self._add_field(column, self.source, "inter", names, default=usual_name)
        self.fields[role] = field

        # EntityIndex finds the different users; its ``cells`` are their names, each once.
        users = EntityIndex(names)
        self.entities[role] = users
        self.tables[role][field] = users.cells

    def _add_time(self) -> None:
        """Add the field of the time to the table of interactions, and report its column.

        Other fields are held as codes of their different values, the time as seconds since 1970.
        """
        column, interactions = self.roles["time"], self.interactions
        field = self.fields["time"] = self._name_field(column, default=_FIELDS["time"])
        self.tables["inter"][field] = interactions.seconds
        entry = Column(column, self.source.path.name, field, kind="float", table="inter")
        entry.different = len(np.unique(interactions.seconds))
        entry.notes = [interactions.form]
        self.report.columns.append(entry)

    def _name_field(self, column: str, default: str = "") -> str:
        """Make a name for the field of a column, which no other field of the dataset has.

        It is made of the name that the user gives by ``rename``, or else of a default, or else of
        the name of the column. ``Prix (é)`` becomes ``Prix_e``. A name that RecBole uses itself,
        such as ``label``, or that begins with a digit, gets the prefix ``column_``. A name that
        another field has gets a number: ``name_2``.

        Args:
            column: name of the column.
            default: name for a field with a role (user, item or time); empty for others.
        """
        name = self.overrides["rename"].get(column) or default or column
        # Split é into e and an accent, and leave the accents out.
        decomposed = unicodedata.normalize("NFKD", name)
        plain = "".join(char for char in decomposed if not unicodedata.combining(char))
        base = re.sub(r"\W+", "_", plain).strip("_") or "column"
        if _RESERVED.fullmatch(base.lower()) or base[0].isdigit():
            base = f"column_{base}"

        # The first of base, base_2, base_3, ... that no field has.
        taken = {field for table in self.tables.values() for field in table}
        numbered = (f"{base}_{number}" for number in itertools.count(2))
        return next(name for name in itertools.chain([base], numbered) if name not in taken)

    @property
    def has_time(self) -> bool:
        """Whether a column holds times; without one, the order of the rows serves as time."""
        return self.roles["time"] in self.source.columns

    def add_file(self, source: Source, role: str) -> None:
        """Add the columns of a file that describes items, a row for each item, as their attributes.

        The same for users. Rows about an item that has no interaction are left out and reported.

        Args:
            source: the file.
            role: ``item`` or ``user``.

        Raises:
            UsageError: if no row is about an item (user) that has an interaction.
        """
        # Each row names its item in the column ``key``. ``items`` are all items of the
        # interactions; ``number`` [rows] is the number of the row's item there, -1 for none.
        key, items = self._find_key(source, role), self.entities[role]
        names = _read_names(source.table, key, self.args)
        number = items.find(names)
        has_interaction = number >= 0
        rows = np.flatnonzero(has_interaction)
        if not len(rows):
            raise UsageError(
                f"{source.path}: no {role} has an interaction; {key} has such as {names.example}, "
                f"the interactions {items.cells.example}"
            )

        # Report the rows that are left out. Those without a name count as lost; those of items
        # without an interaction are right, but not needed.
        has_name = names.codes > 0  # code 0 stands for an empty cell
        not_needed = f"{role} without an interaction"
        dropped = {
            f"no {role} ({key})": np.flatnonzero(~has_name),
            not_needed: np.flatnonzero(has_name & ~has_interaction),
        }
        self.report.lines[f"{role}s"] = Lines.count(source, dropped, unused=not_needed)

        for column in source.columns:
            cells = None if column == key else self._read_column(source, column)
            if cells is not None:  # not left out
                self._add_attribute(column, source, role, cells[rows], number[rows], rows)

    def _find_key(self, source: Source, role: str) -> str:
        """Find the column of a file that names the item (user) which each row is about.

        It is called as in the interactions (``self.roles[role]``), or else by a usual name, or else
        ``id``.

        Args:
            source: the file.
            role: ``item`` or ``user``.

        Raises:
            UsageError: if there is no such column, or several.
        """
        called_id = [name for name in source.columns if name.lower() == "id"]  # ID and Id as well
        if self.roles[role] in source.columns:
            return self.roles[role]
        for names in (_find_by_name(role, source.columns), called_id):
            if len(names) == 1:
                return names[0]
        raise UsageError(
            f"{source.path}: no column is called {shown(self.roles[role])} as in the interactions, "
            f"so no one knows which {role} a row is about; rename one of {listed(source.columns)}"
        )

    def add_columns(self) -> None:
        """Make a field of every column of the interactions but user, item and time.

        The field goes into the table that the user sets for it. Otherwise it goes into the table of
        items (users) if it is the same in nearly all interactions of an item (user), and else into
        that of interactions.
        """
        rows = self.interactions.rows  # those of the file that are kept
        for column in self.source.columns:
            has_role = column in self.roles.values()
            cells = None if has_role else self._read_column(self.source, column)
            if cells is None:  # left out
                continue
            cells = cells[rows]
            table = self.overrides["table"].get(column) or choose_table(cells, self.entities)
            check_choice(f"table: {column}", table, TABLES)
            if table == "inter":
                self._add_field(column, self.source, table, cells)
            else:  # ``codes``: the number of the item (user) of each interaction
                entities = self.entities[table].codes
                self._add_attribute(column, self.source, table, cells, entities, rows)

    def _read_column(self, source: Source, column: str) -> Cells | None:
        """Read the cells [rows] of a column as the type that the user sets, or that is guessed.

        A column that has no name, or that no field can hold, is left out: the reason is reported,
        and None returned. A type that the user sets is an error if it does not fit the column.
        """
        if _NAMELESS.fullmatch(column):  # such as "Unnamed: 0", pandas' name of row numbers
            self._report_left_out(source, column, "has no name")
            return None
        kind = self.overrides["type"].get(column)  # set by the user; None to guess it
        try:
            cells = encode(source.table[column], column, self.args.missing)
            if not kind:
                return guess_kind(cells, column, self.args.decimal)
        except UsageError as error:
            self._report_left_out(source, column, str(error))
            return None
        return convert_cells(cells, kind, column, self.args.decimal)

    def _report_left_out(self, source: Source, column: str, reason: str) -> None:
        """Add a column that does not become a field to the report, with the reason."""
        entry = Column(column, source.path.name, notes=[reason], loaded=False)
        self.report.columns.append(entry)

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
            column, source: name of the column, and its file.
            table: ``item`` or ``user``.
            cells: [n] the values, as codes of the different ones; 0 is an empty cell.
            entities: [n] number of the item (user) that has each value.
            rows: [n] row of the source in which each value is, for the report.
        """
        # ``first`` has one cell for each item (user); ``is_contradicting`` [n] is true for a value
        # other than the first of its item (user).
        first, is_contradicting = find_first_values(cells, entities, len(self.entities[table]))
        wrong = rows[is_contradicting]
        if len(wrong):
            places = ", ".join(source.locate_rows(wrong[:MAX_LISTED]))
            note = f"{len(wrong):,} rows differ from the first of the {table}, which was taken"
            first = replace(first, notes=(*first.notes, f"{note}, first {places}"))
        self._add_field(column, source, table, first)

    def _add_field(
        self, column: str, source: Source, table: str, cells: Cells, default: str = ""
    ) -> str:
        """Add a column of a user's file to the new dataset, as a field, and describe it.

        Args:
            column, source: name of the column, and its file.
            table: table that gets the field: ``inter`` (interactions), ``item`` or ``user``.
            cells: the values. ``codes`` has a number for each row of the table: 0 if it is missing.
            default: name of the field if the column holds users or items; empty for others.

        Returns:
            Name of the field.
        """
        # The report gets the column, its file, field, type and table, and how many different values
        # and how many missing ones it has.
        field = self._name_field(column, default)
        self.tables[table][field] = cells
        missing = int(np.count_nonzero(cells.codes == 0))
        entry = Column(column, source.path.name, field, cells.kind, table, cells.different, missing)
        entry.notes = list(cells.notes)
        self.report.columns.append(entry)

        # Users, items and times (the columns with a role) are loaded in any case. Another field is
        # not if ``explain_useless`` returns a reason, such as that it is empty.
        reason = explain_useless(cells)
        if reason and column not in self.roles.values():
            entry.loaded = False
            entry.notes.append(f"written, not loaded: {reason}")
        return field

    def finish(self) -> tuple[dict[str, Table], dict[str, list[str]]]:
        """Return the tables to write, and which of their fields a run loads by default.

        A run does not load fields of no use to a model, which are those that ``self.report`` has as
        not ``loaded``, such as empty ones.

        Returns:
            Table (inter, item, user) -> field -> its cells. A table of items or users with only one
            field, their names, is left out.
            Table -> names of the fields to load.
        """
        not_loaded = {column.field for column in self.report.columns if not column.loaded}
        tables: dict[str, Table] = {}
        loaded = {}
        for name, fields in self.tables.items():
            if name == "inter" or len(fields) > 1:  # there are attributes besides the names
                tables[name] = fields
                loaded[name] = [field for field in fields if field not in not_loaded]
        return tables, loaded
