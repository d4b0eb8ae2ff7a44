"""The tables of a dataset: which column becomes which field of which of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.attributes import settle, table_of
from recbole_pos.conversion.cells import Cells, encode, guess, typed, whole_ids
from recbole_pos.conversion.events import Events, in_order
from recbole_pos.conversion.naming import field_name
from recbole_pos.conversion.report import FIRST, Column, Lines, Report
from recbole_pos.conversion.roles import by_name, require_column
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.writing import Table
from recbole_pos.errors import UsageError
from recbole_pos.values import check_choice, listed, shown

TABLES = ("inter", "item", "user")
_NAMELESS = re.compile(r"\(column \d+\)|__index_level_\d+__|Unnamed: \d+")
_FLAGS = {"types": "type", "tables": "table"}
_OWN = 0.9  # of the rows have a value of their own: such a token tells nothing of others
_ENOUGH = 100  # rows before that is said
_TOKENS = 1 << 30  # bytes of the array in which RecBole keeps the names of a field


@dataclass(frozen=True)
class Wishes:
    """What somebody says of columns, by their names.

    Attributes:
        types: of fields.
        tables: inter, item or user.
        rename: names of fields.
        decimal, thousands: separators of numbers.
    """

    types: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    decimal: Mapping[str, str] = field(default_factory=dict)
    thousands: Mapping[str, str] = field(default_factory=dict)


class Things:
    """The items, or the users, in the order in which they first occur.

    Attributes:
        of: [events] which, from 0.
        cells: [things] their names.
    """

    def __init__(self, cells: Cells) -> None:
        codes = in_order(cells)
        place = np.zeros(len(cells.values), dtype=np.int32)
        place[codes] = np.arange(len(codes), dtype=np.int32)
        self.of = place[cells.codes]
        self.cells = replace(cells, codes=codes)

    def __len__(self) -> int:
        return len(self.cells.codes)

    def find(self, names: Cells) -> np.ndarray:
        """[rows] which thing each cell is, -1 for none."""
        known = self.cells.values.take(pa.array(self.cells.codes))
        places = pc.index_in(names.values, known).fill_null(-1).to_numpy()
        return np.where(names.codes > 0, places[names.codes], -1)


class Builder:
    """Makes the tables, and tells of every column.

    Args:
        source: of the events.
        events: those that are kept.
        roles: columns of user, item and time.
        wishes: what somebody says of columns.
        report: that it is told to.
    """

    def __init__(
        self,
        source: Source,
        events: Events,
        roles: Mapping[str, str],
        wishes: Wishes,
        report: Report,
    ) -> None:
        self.source, self.events, self.roles = source, events, roles
        self.wishes, self.report = wishes, report
        defaults = {"user": "user_id", "item": "item_id", "time": "timestamp"}
        self.fields = {
            role: wishes.rename.get(roles[role], name) for role, name in defaults.items()
        }
        self.things = {"item": Things(events.item), "user": Things(events.user)}
        inter: dict[str, Cells | np.ndarray] = {
            self.fields["user"]: replace(events.user, kind="token"),
            self.fields["item"]: replace(events.item, kind="token"),
            self.fields["time"]: events.seconds,
        }
        self.tables: dict[str, dict[str, Cells | np.ndarray]] = {"inter": inter}
        for role, things in self.things.items():
            self.tables[role] = {self.fields[role]: replace(things.cells, kind="token")}
        for role in ("user", "item"):
            cells = inter[self.fields[role]]
            assert isinstance(cells, Cells)
            self._tell(Column.of(roles[role], source, self.fields[role], "inter", cells))
        told = Column(roles["time"], source.path.name, self.fields["time"], "float", "inter")
        told.different = len(np.unique(events.seconds))
        told.notes = [*events.times.forms]
        if roles["time"] in source.columns:
            when = source.columns[roles["time"]].slice(0, 1000).drop_null()
            told.examples = [str(value) for value in when.slice(0, 3).to_pylist()]
            told.notes.append("seconds since 1970, UTC")
        self._tell(told)

    def _tell(self, column: Column) -> None:
        self.report.columns.append(column)

    def add_file(self, source: Source, role: str) -> None:
        """Attributes of items or users from a file of their own.

        Raises:
            UsageError: if no column names them.
        """
        key = self._key(source, role)
        names = encode(source.columns[key], key)
        whole = whole_ids(names)
        places, as_whole = self.things[role].find(names), self.things[role].find(whole)
        if (as_whole >= 0).sum() > (places >= 0).sum():
            names, places = whole, as_whole
            self.report.notes.append(f"{source.path.name}, {key}: {whole.notes[-1]}")
        if not (places >= 0).any():
            theirs = self.things[role].cells
            raise UsageError(
                f"{role}s: no {role} of {source.path} has an interaction: {key} has such as "
                f"{shown(names.values[min(names.different, 1)].as_py())}, {self.roles[role]} of "
                f"the interactions {shown(theirs.values[int(theirs.codes[0])].as_py())}; write "
                "both in one way"
            )
        dropped = {
            f"no {role} ({key})": np.flatnonzero(names.codes == 0),
            f"{role} without an event": np.flatnonzero((places < 0) & (names.codes > 0)),
        }
        dropped = {reason: rows for reason, rows in dropped.items() if len(rows)}
        self.report.lines[f"{role}s"] = Lines.of(source, dropped)
        rows = np.flatnonzero(places >= 0)
        if without := len(self.things[role]) - len(np.unique(places[rows])):
            self.report.notes.append(
                f"{without:,} of {len(self.things[role]):,} {role}s with events have no line in "
                f"{source.path.name}: their attributes are empty"
            )
        for column in source.columns:
            if column != key and (cells := self._read(source, column)) is not None:
                self._settle(column, source, role, cells.take(rows), places[rows], rows)

    def _key(self, source: Source, role: str) -> str:
        if self.roles[role] in source.columns:
            return self.roles[role]
        found = by_name(role, list(source.columns))
        if len(found) != 1:
            found = [name for name in source.columns if name.lower() == "id"]
        if len(found) != 1:
            raise UsageError(
                f"{source.path}: no column is called {shown(self.roles[role])} as in the "
                f"events, so "
                f"nobody knows which {role} a line is about; rename one of "
                f"{listed(source.columns)}"
            )
        return found[0]

    def add_columns(self) -> None:
        """All other columns of the events, each where it belongs."""
        events, item, user = self.events, self.things["item"], self.things["user"]
        for column in self.source.columns:
            if column in self.roles.values():
                continue
            cells = self._read(self.source, column)
            if cells is None:
                continue
            cells = cells.take(events.rows) if len(events.rows) < self.source.rows else cells
            table = self.wishes.tables.get(column)
            if table is None:
                table = table_of(cells, item.of, len(item), user.of, len(user))
            check_choice(f"table: {column}", table, TABLES)
            if table == "inter":
                name = self._name(column)
                self.tables["inter"][name] = cells
                self._tell(Column.of(column, self.source, name, "inter", cells))
            else:
                of = self.things[table].of
                self._settle(column, self.source, table, cells, of, events.rows)

    def _read(self, source: Source, column: str) -> Cells | None:
        """The cells of a column and their type; None if it is left out, which is told."""
        if _NAMELESS.fullmatch(column):  # pandas' numbers of rows
            note = "has no name"
            self._tell(Column(column, source.path.name, notes=[note], loaded=False))
            return None
        try:
            cells = encode(source.columns[column], column)
        except UsageError as error:
            self._tell(Column(column, source.path.name, notes=[str(error)], loaded=False))
            return None
        marks = self.wishes.decimal.get(column), self.wishes.thousands.get(column)
        if kind := self.wishes.types.get(column, "float" if any(marks) else ""):
            return typed(cells, kind, column, source.decimal_comma, *marks)
        guessed = guess(cells, field_name(column, ()), source.decimal_comma)
        notes = tuple(note.replace("COLUMN", column) for note in guessed.notes)
        return replace(guessed, notes=notes)

    def _settle(
        self,
        column: str,
        source: Source,
        table: str,
        cells: Cells,
        of: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """A column of items or users: the first value of each, and what contradicts it."""
        settled = settle(cells, of, len(self.things[table]))
        name = self._name(column)
        if lines := int(settled.contradicting.sum()):
            first = source.places(rows[np.flatnonzero(settled.contradicting)[:FIRST]])
            self.report.contradictions[name] = {"table": table, "lines": lines, "first": first}
        used = settled.cells
        self.tables[table][name] = used
        self._tell(Column.of(column, source, name, table, used))

    def _name(self, column: str) -> str:
        taken = {name for table in self.tables.values() for name in table}
        wish = self.wishes.rename.get(column)
        if wish is not None and wish in taken:
            raise UsageError(f"rename: two fields would be called {shown(wish)}")
        return wish if wish is not None else field_name(column, taken)

    def require_values(self) -> None:
        """Refuse a column that is named in the wishes and has no value."""
        for column in self.report.columns:
            cells = self.tables[column.table].get(column.field) if column.table else None
            if isinstance(cells, Cells) and not cells.codes.any():
                wishes = vars(self.wishes).items()
                for option in (name for name, columns in wishes if column.column in columns):
                    raise UsageError(
                        f"{_FLAGS.get(option, option)}: {column.column} of {column.file} has no "
                        f"value for any {column.table.replace('inter', 'interaction')}; leave "
                        "the option out to write the column empty, or the column with --drop"
                    )

    def finished(self) -> dict[str, Table]:
        """The tables to write; those of items or users only if they have attributes."""
        for column in self.report.columns:
            cells = self.tables[column.table].get(column.field) if column.table else None
            if isinstance(cells, Cells) and column.column not in self.roles.values():
                why = _useless(cells)
                column.loaded = not why
                column.notes += [f"written, not loaded: {why}"] if why else []
        return {n: table for n, table in self.tables.items() if n == "inter" or len(table) > 1}

    def loaded(self) -> dict[str, list[str]]:
        """Fields by table, those that a run should load."""
        unwanted = {column.field for column in self.report.columns if not column.loaded}
        return {
            name: [field for field in table if field not in unwanted]
            for name, table in self.tables.items()
            if name == "inter" or len(table) > 1
        }


def _useless(cells: Cells) -> str:
    """Why a run has nothing of a field, if it has not."""
    told = int(np.count_nonzero(cells.codes))
    if not told:
        return "it is empty"
    if cells.kind == "token":
        longest = int(pc.max(pc.utf8_length(cells.values)).as_py())
        if 4 * longest * cells.different > _TOKENS:
            return "its texts are long"
        if told >= _ENOUGH and cells.different > _OWN * told:
            return "nearly every one is another"
    return ""


def require_wishes(wishes: Wishes, sources: list[Source]) -> None:
    """Refuse wishes about columns that there are not."""
    columns = {name: column for source in sources for name, column in source.columns.items()}
    for option, named in (
        ("type", wishes.types),
        ("table", wishes.tables),
        ("rename", wishes.rename),
        ("decimal", wishes.decimal),
        ("thousands", wishes.thousands),
    ):
        for name, wish in named.items():
            require_column(name, columns, option)
            if option in ("decimal", "thousands") and (len(wish) != 1 or wish.isalnum()):
                raise UsageError(
                    f"{option}: {name}={shown(wish)}: a separator is one character, such as , or ."
                )
    for name in wishes.decimal:
        if wishes.decimal[name] == wishes.thousands.get(name):
            raise UsageError(f"decimal: {name}: thousands has the same separator")
    for name, wish in wishes.rename.items():
        if field_name(wish, ()) != wish:
            raise UsageError(
                f"rename: {name}={wish}: a field is called by letters, digits and _, such as "
                f"{field_name(wish, ())}"
            )
