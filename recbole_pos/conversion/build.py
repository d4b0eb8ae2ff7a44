"""The tables of a dataset: which column becomes which field of which of them."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.cells import (
    INNER,
    Cells,
    convert_cells,
    encode,
    guess,
    whole_ids,
)
from recbole_pos.conversion.events import Events
from recbole_pos.conversion.report import FIRST, Column, Lines, Report
from recbole_pos.conversion.roles import by_name, require_column
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.writing import Table, flow
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
_PAIRS = 20_000_000  # of values that a relation may have; AttrFormer refuses 50 million
_HOUR, _DAY, _WEEK = 3600, 86400, 604800


@dataclass(frozen=True)
class ColumnOverrides:
    """Options of the user for single columns, by column: fields, and separators of numbers."""

    type: Mapping[str, str] = field(default_factory=dict)
    table: Mapping[str, str] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    decimal: Mapping[str, str] = field(default_factory=dict)
    thousands: Mapping[str, str] = field(default_factory=dict)

    def check(self, sources: list[Source]) -> None:
        """Refuse overrides of missing columns, and impossible values.

        Raises:
            UsageError: for the first one.
        """
        columns = {name: column for source in sources for name, column in source.columns.items()}
        for option, overrides in vars(self).items():
            for name, value in overrides.items():
                require_column(name, columns, option)
                if option in ("decimal", "thousands") and (len(value) != 1 or value.isalnum()):
                    raise UsageError(
                        f"{option}: {name}={shown(value)}: a separator is one character, such as "
                        ", or ."
                    )
                if option == "decimal" and value == self.thousands.get(name):
                    raise UsageError(f"decimal: {name}: thousands has the same separator")
                if option == "rename" and field_name(value, ()) != value:
                    raise UsageError(
                        f"rename: {name}={value}: a field is called by letters, digits and _, such "
                        f"as {field_name(value, ())}"
                    )


def field_name(column: str, taken: Iterable[str]) -> str:
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
        first = np.full(len(cells.values), len(cells.codes))
        first[cells.codes[::-1]] = np.arange(len(cells.codes))[::-1]
        order = np.argsort(first, kind="stable")[: int((first < len(cells.codes)).sum())]
        place = np.zeros(len(cells.values), dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        self.codes, self.cells = place[cells.codes], replace(cells, codes=order, kind="token")

    def __len__(self) -> int:
        return len(self.cells.codes)

    def find(self, names: Cells) -> np.ndarray:
        """Return [rows] number of the entity that each cell names, -1 for none."""
        known = self.cells.values.take(pa.array(self.cells.codes))
        places = pc.index_in(names.values, known).fill_null(-1).to_numpy()
        return np.where(names.codes > 0, places[names.codes], -1)


@dataclass(frozen=True)
class ColumnAssignment:
    """A column of events reduced to one cell for each entity.

    Attributes:
        cells: [entities] the first value that is not missing.
        contradicting: [events] bool, which events have another value.
        repeated: number of events with a value whose entity had a value before.
    """

    cells: Cells
    contradicting: np.ndarray
    repeated: int


def assign(cells: Cells, entities: np.ndarray, number: int) -> ColumnAssignment:
    """Take the first value of every entity.

    Args:
        cells: [events] the column.
        entities: [events] number of the entity of each event, from 0.
        number: number of entities.
    """
    rows = np.flatnonzero(cells.codes)
    codes, places = cells.codes[rows], entities[rows]
    first = np.zeros(number, dtype=cells.codes.dtype)
    first[places[::-1]] = codes[::-1]  # reversed, since the last assignment to a place stays
    contradicting = np.zeros(len(cells.codes), dtype=bool)
    contradicting[rows] = codes != first[places]
    repeated = len(rows) - int(np.count_nonzero(first))
    return ColumnAssignment(replace(cells, codes=first), contradicting, repeated)


def choose_table(cells: Cells, entities: Mapping[str, EntityIndex]) -> str:
    """Return where a column of the interactions belongs: item, user or inter.

    A column belongs to items (users) if values of one item (user) differ at most a tenth as often
    as by chance. If no item (user) has two values, this cannot be tested, and it does not.
    """
    cells = cells.take(np.arange(min(len(cells.codes), _PROBE)))
    shares = {}
    for table, index in entities.items():
        assigned = assign(cells, index.codes[:_PROBE], len(index))
        if not assigned.repeated:
            continue
        counts = np.bincount(cells.codes)[1:]
        chance = 1 - float(((counts / counts.sum()) ** 2).sum())
        share = int(assigned.contradicting.sum()) / assigned.repeated
        if share <= _FEW * chance:
            shares[table] = share / chance if share else 0.0
    return min(shares, key=lambda table: shares[table], default="inter")


class Builder:
    """Makes the tables of a dataset, and reports every column.

    Args:
        source: source of the interactions.
        events: interactions that are kept.
        roles: columns of user, item and time.
        overrides: options of the user for single columns.
        report: report to fill.
    """

    def __init__(
        self,
        source: Source,
        events: Events,
        roles: Mapping[str, str],
        overrides: ColumnOverrides,
        report: Report,
    ) -> None:
        self.source, self.events, self.roles = source, events, roles
        self.overrides, self.report = overrides, report
        defaults = {"user": "user_id", "item": "item_id", "time": "timestamp"}
        self.fields = {r: overrides.rename.get(roles[r], name) for r, name in defaults.items()}
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
        if roles["time"] in source.columns:
            when = source.columns[roles["time"]].slice(0, 1000).drop_null()
            time.examples = [str(value) for value in when.slice(0, 3).to_pylist()]
            time.notes.append("seconds since 1970, UTC")
        report.columns.append(time)

    def add_file(self, source: Source, role: str) -> None:
        """Add attributes of items or users from a separate file.

        Args:
            source: the file as read.
            role: item or user.

        Raises:
            UsageError: if no column names them, or none of them has an interaction.
        """
        key, index, notes = self._find_key(source, role), self.entities[role], self.report.notes
        names = encode(source.columns[key], key)
        whole = whole_ids(names)
        places, as_whole = index.find(names), index.find(whole)
        if (as_whole >= 0).sum() > (places >= 0).sum():
            names, places = whole, as_whole
            notes.append(f"{source.path.name}, {key}: {whole.notes[-1]}")
        if not (places >= 0).any():
            raise UsageError(
                f"{role}s: no {role} of {source.path} has an interaction: {key} has such as "
                f"{shown(names.values[min(names.different, 1)].as_py())}, {self.roles[role]} of "
                f"the interactions {shown(index.cells.values[int(index.cells.codes[0])].as_py())}; "
                "write both in one way"
            )
        dropped = {
            f"no {role} ({key})": np.flatnonzero(names.codes == 0),
            f"{role} without an event": np.flatnonzero((places < 0) & (names.codes > 0)),
        }
        dropped = {reason: rows for reason, rows in dropped.items() if len(rows)}
        self.report.lines[f"{role}s"] = Lines.count(source, dropped)
        rows = np.flatnonzero(places >= 0)
        if without := len(index) - len(np.unique(places[rows])):
            notes.append(
                f"{without:,} of {len(index):,} {role}s with events have no line in "
                f"{source.path.name}: their attributes are empty"
            )
        for column in source.columns:
            if column != key and (cells := self._read(source, column)) is not None:
                self._add_attribute(column, source, role, cells.take(rows), places[rows], rows)

    def _find_key(self, source: Source, role: str) -> str:
        """Find the column of a file of items or users that names them.

        In this order: the column called as in the interactions; the only one with a usual name of
        the role; one called id.

        Raises:
            UsageError: if there is none.
        """
        if self.roles[role] in source.columns:
            return self.roles[role]
        names = by_name(role, source.columns)
        if len(names) != 1:
            names = [name for name in source.columns if name.lower() == "id"]
        if len(names) != 1:
            raise UsageError(
                f"{source.path}: no column is called {shown(self.roles[role])} as in the events, "
                f"so no one knows which {role} a line is about; rename one of "
                f"{listed(source.columns)}"
            )
        return names[0]

    def add_columns(self) -> None:
        """Add all other columns of the interactions, each to the table where it belongs."""
        rows = self.events.rows
        for column in self.source.columns:
            if column in self.roles.values():
                continue
            cells = self._read(self.source, column)
            if cells is None:
                continue
            cells = cells.take(rows) if len(rows) < self.source.rows else cells
            table = self.overrides.table.get(column) or choose_table(cells, self.entities)
            check_choice(f"table: {column}", table, TABLES)
            if table == "inter":
                self._add(column, self.source, table, cells)
            else:
                codes = self.entities[table].codes
                self._add_attribute(column, self.source, table, cells, codes, rows)

    def _read(self, source: Source, column: str) -> Cells | None:
        """Return the typed cells of a column; None if it is left out, which the report notes."""
        note = "has no name" if _NAMELESS.fullmatch(column) else ""
        try:
            cells = None if note else encode(source.columns[column], column)
        except UsageError as error:
            cells, note = None, str(error)
        if cells is None:
            self.report.columns.append(Column(column, source.path.name, notes=[note], loaded=False))
            return None
        marks = self.overrides.decimal.get(column), self.overrides.thousands.get(column)
        if kind := self.overrides.type.get(column, "float" if any(marks) else ""):
            return convert_cells(cells, kind, column, source.decimal_comma, *marks)
        cells = guess(cells, field_name(column, ()), source.decimal_comma)
        return replace(cells, notes=tuple(n.replace("COLUMN", column) for n in cells.notes))

    def _add_attribute(
        self,
        column: str,
        source: Source,
        table: str,
        cells: Cells,
        entities: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Add a column of items or users: the first value of each; report contradicting lines.

        Args:
            column: name of the column.
            source: file of the column.
            table: item or user.
            cells: [n] cells of the column.
            entities: [n] number of the entity of each cell.
            rows: [n] row of the source of each cell.
        """
        assigned = assign(cells, entities, len(self.entities[table]))
        if source is self.source and (empty := int((cells.codes == 0).sum())):
            note = f"{empty:,} of {len(cells.codes):,} interactions have none: those of the {table}"
            assigned = replace(assigned, cells=assigned.cells.as_kind(cells.kind, note))
        name = self._add(column, source, table, assigned.cells)
        if lines := int(assigned.contradicting.sum()):
            first = source.places(rows[np.flatnonzero(assigned.contradicting)[:FIRST]])
            self.report.contradictions[name] = {"table": table, "lines": lines, "first": first}

    def _add(self, column: str, source: Source, table: str, cells: Cells, role: str = "") -> str:
        """Add cells to a table, report the column, and return the name of its field."""
        taken = {name for columns in self.tables.values() for name in columns}
        name = self.fields[role] if role else self.overrides.rename.get(column)
        if name is not None and name in taken:
            raise UsageError(f"rename: two fields would be called {shown(name)}")
        name = name or field_name(column, taken)
        self.tables[table][name] = cells
        self.report.columns.append(Column.describe(column, source, name, table, cells))
        return name

    def finish(self, allow_empty: bool) -> tuple[dict[str, Table], dict[str, list[str]]]:
        """Return the tables to write, and by table the fields that a run should load.

        Raises:
            UsageError: if a column that the overrides name has no value, unless ``allow_empty``.
        """
        for column in self.report.columns:
            cells = self.tables[column.table].get(column.field) if column.table else None
            if not isinstance(cells, Cells):
                continue
            named = [
                option
                for option, columns in vars(self.overrides).items()
                if column.column in columns
            ]
            if named and not allow_empty and not cells.codes.any():
                raise UsageError(
                    f"{named[0]}: {column.column} of {column.file} has no value for any "
                    f"{column.table.replace('inter', 'interaction')}; leave the option out to "
                    "write the column empty, or the column with --drop"
                )
            if column.column not in self.roles.values() and (why := _describe_useless(cells)):
                column.loaded = False
                column.notes.append(f"written, not loaded: {why}")
        # tables of items or users only if they have attributes
        tables: dict[str, Table] = {
            n: t for n, t in self.tables.items() if n == "inter" or len(t) > 1
        }
        unwanted = {column.field for column in self.report.columns if not column.loaded}
        loaded = {n: [f for f in table if f not in unwanted] for n, table in tables.items()}
        return tables, loaded

    def list_relations(self, loaded: Mapping[str, list[str]], has_time: bool) -> list[str]:
        """Return yaml entries of the option ``relations``, for fields that can relate events.

        Args:
            loaded: fields to load, by table.
            has_time: whether the time field is a time, not only an order.
        """
        entries = []
        for table, names in loaded.items():
            for name in names:
                cells = self.tables[table][name]
                if name in self.fields.values() or not isinstance(cells, Cells):
                    continue
                if cells.different < 2 or cells.kind == "float_seq":
                    continue
                if cells.kind == "float":
                    if scale := _find_scale(cells):
                        entries.append(f"{{field: {flow(name)}, scales: [{scale:g}]}}")
                elif _count_pairs(cells) <= _PAIRS:
                    entries.append(f"{{field: {flow(name)}}}")
        if has_time:
            days = not (self.events.seconds % _DAY).any()
            scales = (_DAY, _WEEK) if days else (_HOUR, _DAY)
            entries.append(f"{{field: time, scales: [{scales[0]}, {scales[1]}]}}")
        return [*entries, "{field: position}"]


def _describe_useless(cells: Cells) -> str:
    """Return why a field is of no use to a run; empty if it is of use."""
    rows = int(np.count_nonzero(cells.codes))
    if not rows:
        return "it is empty"
    if cells.kind == "token":
        longest = int(pc.max(pc.utf8_length(cells.values)).as_py())
        if 4 * longest * cells.different > _TOKENS:
            return "its texts are long"
        if rows >= _ENOUGH and cells.different > _OWN * rows:
            return "nearly every one is another"
    return ""


def _find_scale(cells: Cells) -> float | None:
    """Return a scale (r_norm) of differences between numbers, rounded to one digit.

    It is a tenth of the interquartile range, and at least the median step between two values; None
    with fewer than two values, or too many to relate.
    """
    if cells.different**2 > _PAIRS:
        return None
    numbers = cells.values.slice(1).cast("float64").to_numpy()
    values = np.unique(numbers[np.isfinite(numbers)])
    if len(values) < 2:
        return None
    low, high = np.quantile(numbers[cells.codes[cells.codes > 0] - 1], (0.25, 0.75))
    spread = max((high - low) / 10, float(np.median(np.diff(values))))
    return round(spread, -math.floor(math.log10(spread)))


def _count_pairs(cells: Cells) -> float:
    """Return an upper bound of the pairs of different values with a name in common."""
    if cells.kind == "token":
        return cells.different
    names = pc.split_pattern(cells.values.slice(1), INNER).flatten()
    counts = pc.value_counts(names).field("counts").to_numpy().astype(float)
    return float(counts @ counts)
