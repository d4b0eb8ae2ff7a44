"""The tables of a dataset: which column becomes which field of which of them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.cells import INNER, Cells, convert_cells, encode, guess, read_whole_ids
from recbole_pos.conversion.events import Events
from recbole_pos.conversion.report import FIRST, Column, Lines, Report
from recbole_pos.conversion.roles import find_by_name, require_column
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.writing import Table
from recbole_pos.errors import UsageError
from recbole_pos.values import check_choice, listed, shown

TABLES = ("inter", "item", "user")
# Names that RecBole uses or derives from others, and the built-in fields of relations.
_RESERVED = re.compile(r"label|item_length|time|position|.*_list")
_NAMELESS = re.compile(r"\(column \d+\)|__index_level_\d+__|Unnamed: \d+")  # pandas' row numbers
_OWN = 0.9  # a token with more different values per row than this relates nothing, nor is loaded
_ENOUGH = 100  # least rows for that rule
_TOKENS = 1 << 30  # most bytes of the array in which RecBole keeps the names of a field
_FEW = 0.1  # largest share of the contradictions expected by chance for a column of items or users
_PROBE = 1 << 20  # interactions that decide where a column goes
# Values that the user gives for single columns, by column, by option: types, tables, names of
# fields, and separators of numbers.
Overrides = Mapping[str, Mapping[str, str]]


def check_overrides(overrides: Overrides, columns: Iterable[str]) -> None:
    """Refuse overrides of columns that no file has, and impossible values."""
    for option, values in overrides.items():
        for column, value in values.items():
            require_column(column, columns, option)
            if option in ("decimal", "thousands") and (len(value) != 1 or value.isalnum()):
                raise UsageError(
                    f"{option}: {column}={shown(value)}: a separator is one character, such as , "
                    "or ."
                )
            if option == "decimal" and value == overrides["thousands"].get(column):
                raise UsageError(f"decimal: {column}: thousands has the same separator")
            if option == "rename" and make_field_name(value, ()) != value:
                raise UsageError(
                    f"rename: {column}={value}: a field is called by letters, digits and _, such "
                    f"as {make_field_name(value, ())}"
                )


def make_field_name(column: str, taken: Iterable[str]) -> str:
    """Return a name for the field of a column, of letters, digits and _.

    A reserved name gets a prefix, and a name in ``taken`` a number.
    """
    decomposed = unicodedata.normalize("NFKD", column)
    plain = "".join(c for c in decomposed if not unicodedata.combining(c))
    name = re.sub(r"\W+", "_", plain).strip("_") or "column"
    if _RESERVED.fullmatch(name.lower()) or name[0].isdigit():
        name = f"column_{name}"
    taken, number, free = set(taken), 2, name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


class EntityIndex:
    """Numbers the items, or the users, in the order in which they first occur.

    Attributes:
        codes: [events] number of the entity of each event, from 0.
        cells: [entities] names of the entities.
    """

    def __init__(self, cells: Cells) -> None:
        numbers = pa.array(cells.codes).dictionary_encode()
        self.codes = numbers.indices.to_numpy()
        self.cells = replace(cells, codes=numbers.dictionary.to_numpy(), kind="token")

    def __len__(self) -> int:
        return len(self.cells.codes)

    def find(self, names: Cells) -> np.ndarray:
        """Return [rows] number of the entity that each cell names, -1 for none."""
        known = self.cells.values.take(pa.array(self.cells.codes))
        places = pc.index_in(names.values, known).fill_null(-1).to_numpy()
        return np.where(names.codes > 0, places[names.codes], -1)


def find_first_values(cells: Cells, entities: np.ndarray, count: int) -> tuple[Cells, np.ndarray]:
    """Return the first value of every item (user), and which rows have a different one.

    Args:
        cells: [rows] of a column; empty ones (code 0) are neither first nor different.
        entities: [rows] number of the item (user) of each row, from 0.
        count: number of items (users).

    Returns:
        Cells [count], empty where an item has no value, and [rows] bool.
    """
    filled = np.flatnonzero(cells.codes)
    codes, owners = cells.codes[filled], entities[filled]
    first = np.zeros(count, dtype=cells.codes.dtype)
    first[owners[::-1]] = codes[::-1]  # reversed, since the last assignment to an element stays
    contradicting = np.zeros(len(cells.codes), dtype=bool)
    contradicting[filled] = codes != first[owners]
    return replace(cells, codes=first), contradicting


def choose_table(cells: Cells, entities: Mapping[str, EntityIndex]) -> str:
    """Return where a column of the interactions belongs: item, user or inter.

    A column belongs to items (users) if values of one item (user) differ at most a tenth as often
    as by chance. If no item (user) has two values, this cannot be tested, and it does not.
    """
    cells = cells[np.arange(min(len(cells.codes), _PROBE))]
    shares = {}
    for table, index in entities.items():
        first, contradicting = find_first_values(cells, index.codes[:_PROBE], len(index))
        repeated = np.count_nonzero(cells.codes) - np.count_nonzero(first.codes)
        if not repeated:
            continue
        counts = np.bincount(cells.codes)[1:]
        chance = 1 - float(((counts / counts.sum()) ** 2).sum())
        share = np.count_nonzero(contradicting) / repeated
        if share <= _FEW * chance:
            shares[table] = share / chance if share else 0.0
    return min(shares, key=lambda table: shares[table], default="inter")


class Builder:
    """Makes the tables of a dataset, and reports every column.

    Attributes:
        fields: names of the fields of user, item and time, by role.
        entities: the items and the users.
        tables: cells (seconds for the time) by field, by table; see :meth:`finish`.
    """

    def __init__(
        self,
        source: Source,
        events: Events,
        roles: Mapping[str, str],
        overrides: Overrides,
        report: Report,
    ) -> None:
        self.source, self.events, self.roles = source, events, roles
        self.overrides, self.report = overrides, report
        defaults = {"user": "user_id", "item": "item_id", "time": "timestamp"}
        self.fields = {r: overrides["rename"].get(roles[r], name) for r, name in defaults.items()}
        self.entities = {"item": EntityIndex(events.item), "user": EntityIndex(events.user)}
        self.tables: dict[str, dict[str, Cells | np.ndarray]] = {"inter": {}}
        for role in ("user", "item"):
            self._add(roles[role], source, "inter", getattr(events, role).as_kind("token"), role)
        self.tables["inter"][self.fields["time"]] = events.seconds
        for role, index in self.entities.items():
            self.tables[role] = {self.fields[role]: index.cells}
        time = Column(roles["time"], source.path.name, self.fields["time"], "float", "inter")
        time.different = len(np.unique(events.seconds))
        time.notes = [*events.forms]
        if self.has_time:
            when = source.columns[roles["time"]]
            examples = when.slice(0, 1000).drop_null().slice(0, 3)
            time.examples = [str(value) for value in examples.to_pylist()]
            time.notes.append("seconds since 1970, UTC")
        report.columns.append(time)

    @property
    def has_time(self) -> bool:
        """Whether a column has the times, which else are the order of the rows."""
        return self.roles["time"] in self.source.columns

    def add_file(self, source: Source, role: str) -> None:
        """Add attributes of items or users (``role``) from a separate file."""
        key, index, notes = self._find_key(source, role), self.entities[role], self.report.notes
        names = read_whole_ids(encode(source.columns[key], key))
        places = index.find(names)
        notes += [f"{source.path.name}, {key}: {note}" for note in names.notes]
        if not (places >= 0).any():
            raise UsageError(
                f"{role}s: no {role} of {source.path} has an interaction: {key} has such as "
                f"{shown(names.values[min(names.different, 1)].as_py())}, {self.roles[role]} of "
                f"the interactions {shown(index.cells.values[int(index.cells.codes[0])].as_py())}; "
                "write both in one way"
            )
        dropped = {
            f"no {role} ({key})": np.flatnonzero(names.codes == 0),
            f"{role} without an interaction": np.flatnonzero((places < 0) & (names.codes > 0)),
        }
        dropped = {reason: rows for reason, rows in dropped.items() if len(rows)}
        self.report.lines[f"{role}s"] = Lines.count(source, dropped)
        rows = np.flatnonzero(places >= 0)
        if without := len(index) - len(np.unique(places[rows])):
            notes.append(
                f"{without:,} of {len(index):,} {role}s with interactions have no row in "
                f"{source.path.name}: their attributes are empty"
            )
        for column in source.columns:
            if column != key and (cells := self._read(source, column)) is not None:
                self._add_attribute(column, source, role, cells[rows], places[rows], rows)

    def _find_key(self, source: Source, role: str) -> str:
        """Find the column that names items or users: as in the interactions, by its name, or id."""
        named = [name for name in source.columns if name == self.roles[role]]
        called_id = [name for name in source.columns if name.lower() == "id"]
        for names in (named, find_by_name(role, source.columns), called_id):
            if len(names) == 1:
                return names[0]
        raise UsageError(
            f"{source.path}: no column is called {shown(self.roles[role])} as in the interactions, "
            "so no "
            f"one knows which {role} a row is about; rename one of {listed(source.columns)}, or "
            f"name them with --{role}_columns if the file has no header"
        )

    def add_columns(self) -> None:
        """Add all other columns of the interactions, each to the table where it belongs."""
        rows = self.events.rows
        for column in self.source.columns:
            if column in self.roles.values() or (cells := self._read(self.source, column)) is None:
                continue
            cells = cells[rows] if len(rows) < self.source.rows else cells
            table = self.overrides["table"].get(column) or choose_table(cells, self.entities)
            check_choice(f"table: {column}", table, TABLES)
            if table == "inter":
                self._add(column, self.source, table, cells)
            else:
                codes = self.entities[table].codes
                self._add_attribute(column, self.source, table, cells, codes, rows)

    def _read(self, source: Source, column: str) -> Cells | None:
        """Return the typed cells of a column; None if it is left out, which the report notes."""
        try:
            if _NAMELESS.fullmatch(column):
                raise UsageError("has no name")
            cells = encode(source.columns[column], column)
        except UsageError as error:
            left_out = Column(column, source.path.name, notes=[str(error)], loaded=False)
            self.report.columns.append(left_out)
            return None
        marks = self.overrides["decimal"].get(column), self.overrides["thousands"].get(column)
        if kind := self.overrides["type"].get(column, "float" if any(marks) else ""):
            return convert_cells(cells, kind, column, source.decimal_comma, *marks)
        return guess(cells, column, source.decimal_comma)

    def _add_attribute(
        self,
        column: str,
        source: Source,
        table: str,
        cells: Cells,
        entities: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Add the first value of each item or user; report rows of the source that contradict it.

        ``cells``, numbers of ``entities`` and ``rows`` of the source are [n].
        """
        first, contradicting = find_first_values(cells, entities, len(self.entities[table]))
        if source is self.source and (empty := int((cells.codes == 0).sum())):
            note = f"{empty:,} of {len(cells.codes):,} interactions have none: those of the {table}"
            first = first.as_kind(cells.kind, note)
        name = self._add(column, source, table, first)
        if lines := int(contradicting.sum()):
            places = source.places(rows[np.flatnonzero(contradicting)[:FIRST]])
            self.report.contradictions[name] = {"table": table, "lines": lines, "first": places}

    def _add(self, column: str, source: Source, table: str, cells: Cells, role: str = "") -> str:
        """Add cells to a table, report the column, and return the name of its field."""
        taken = {name for columns in self.tables.values() for name in columns}
        name = self.fields[role] if role else self.overrides["rename"].get(column)
        if name is not None and name in taken:
            raise UsageError(f"rename: two fields would be called {shown(name)}")
        name = name or make_field_name(column, taken)
        self.tables[table][name] = cells
        counts = cells.different, int((cells.codes == 0).sum())
        examples = [value.replace(INNER, " | ") for value in cells.values[1:4].to_pylist()]
        kept = Column(column, source.path.name, name, cells.kind, table, *counts, examples)
        kept.notes = list(cells.notes)
        if not role and (why := _describe_useless(cells)):
            kept.loaded = False
            kept.notes.append(f"written, not loaded: {why}")
        self.report.columns.append(kept)
        return name

    def finish(self) -> tuple[dict[str, Table], dict[str, list[str]]]:
        """Return the tables to write, and by table the fields that a run should load."""
        # tables of items or users only if they have attributes
        tables: dict[str, Table] = {
            n: t for n, t in self.tables.items() if n == "inter" or len(t) > 1
        }
        unwanted = {column.field for column in self.report.columns if not column.loaded}
        loaded = {n: [f for f in table if f not in unwanted] for n, table in tables.items()}
        return tables, loaded


def _describe_useless(cells: Cells) -> str:
    """Return why a field is of no use to a run; empty if it is of use."""
    rows = int(np.count_nonzero(cells.codes))
    if not rows:
        return "it is empty"
    if cells.kind == "token":
        if 4 * pc.max(pc.utf8_length(cells.values)).as_py() * cells.different > _TOKENS:
            return "its texts are long"
        if rows >= _ENOUGH and cells.different > _OWN * rows:
            return "nearly every one is another"
    return ""
