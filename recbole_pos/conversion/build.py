"""The tables of a dataset: which column becomes which field of which of them."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.cells import INNER, Cells, convert_cells, encode, guess_kind, read_ids
from recbole_pos.conversion.interaction_table import InteractionTable
from recbole_pos.conversion.report import MAX_LISTED, Column, Lines, Report
from recbole_pos.conversion.roles import find_by_name, require_column
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.writing import Table
from recbole_pos.errors import UsageError
from recbole_pos.values import check_choice, listed, shown

TABLES = ("inter", "item", "user")
# Names that RecBole uses or derives from others, and the built-in fields of relations.
_RESERVED = re.compile(r"label|item_length|time|position|.*_list")
_NAMELESS = re.compile(r"\(column \d+\)|__index_level_\d+__|Unnamed: \d+")  # pandas' row numbers
# A token field of at least so many rows with more different values per row is not loaded.
_UNIQUE_ROWS, _UNIQUE_SHARE = 100, 0.9
_MAX_TOKEN_BYTES = 1 << 30  # of the array in which RecBole keeps the names of a field
# Of the contradictions expected by chance, a column of items or users has at most this share.
_CONTRADICTION_SHARE = 0.1
# What the user sets for single columns (type, table, name of the field, separators of numbers):
# option -> column -> value.
Overrides = Mapping[str, Mapping[str, str]]


def check_overrides(overrides: Overrides, columns: Iterable[str]) -> None:
    """Refuse overrides of columns that no file has, and impossible values, by a UsageError."""
    for option, values in overrides.items():
        for column, value in values.items():
            require_column(column, columns, option)
            is_separator = option in ("decimal", "thousands")
            if is_separator and (len(value) != 1 or value.isalnum()):
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


def check_roles(overrides: Overrides, roles: Mapping[str, str], columns: Iterable[str]) -> None:
    """Refuse, by a UsageError, what cannot be set for the columns of users, items and times.

    ``columns`` are those of files of items and users, which may have columns of these names.
    """
    for option, (role, column) in itertools.product(overrides, roles.items()):
        if option != "rename" and column in overrides[option] and column not in columns:
            raise UsageError(
                f"{option}: column {shown(column)} is the {role}; the interactions always have "
                "users and items as token and times as float; leave it out"
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
    candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    taken = set(taken)
    return next(candidate for candidate in candidates if candidate not in taken)


class EntityIndex:
    """Numbers the items, or the users, in the order in which they first occur.

    Attributes:
        codes: [interactions] number of the entity of each, from 0.
        cells: [entities] names of the entities.
    """

    def __init__(self, cells: Cells) -> None:
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
    """Return the first value of each item (user), and which rows contradict it.

    Args:
        cells: [rows] cells of a column; empty ones (code 0) are neither first nor contradict.
        entities: [rows] number of the item (user) of each row, from 0.
        num_entities: number of items (users).

    Returns:
        Cells [num_entities], empty where an item has no value, and [rows] bool.
    """
    filled = np.flatnonzero(cells.codes)
    codes = cells.codes[filled]
    owners = entities[filled]
    first = np.zeros(num_entities, dtype=cells.codes.dtype)
    first[owners[::-1]] = codes[::-1]  # reversed, since the last assignment to an element stays
    is_contradicting = np.zeros(len(cells.codes), dtype=bool)
    is_contradicting[filled] = codes != first[owners]
    return replace(cells, codes=first), is_contradicting


def choose_table(cells: Cells, entities: Mapping[str, EntityIndex]) -> str:
    """Return the table (item, user or inter) to which a column of the interactions belongs.

    A column belongs to items (users) if values of one item (user) differ at most a tenth as often
    as by chance. If no item (user) has two values, this cannot be tested, and it does not belong.
    Where all values are the same, as of a flag, an empty cell counts as another value.
    """
    if len(np.unique(cells.codes)) == 2 and cells.codes.min() == 0:
        cells = replace(cells, codes=cells.codes + 1)
    ratios = {}
    for table, index in entities.items():
        first, is_contradicting = find_first_values(cells, index.codes, len(index))
        num_repeated = np.count_nonzero(cells.codes) - np.count_nonzero(first.codes)
        if not num_repeated:
            continue
        counts = np.bincount(cells.codes)[1:]
        chance = 1 - float(((counts / counts.sum()) ** 2).sum())
        share = np.count_nonzero(is_contradicting) / num_repeated
        if share <= _CONTRADICTION_SHARE * chance:
            ratios[table] = share / chance if share else 0.0
    return min(ratios, key=lambda table: ratios[table], default="inter")


class Builder:
    """Makes the tables of a dataset, and reports every column.

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
        report: Report,
    ) -> None:
        self.source, self.interactions, self.roles = source, interactions, roles
        self.overrides, self.report = overrides, report
        defaults = {"user": "user_id", "item": "item_id", "time": "timestamp"}
        self.fields = {r: overrides["rename"].get(roles[r], name) for r, name in defaults.items()}
        for first, second in itertools.combinations(self.fields.values(), 2):
            if first == second:
                raise UsageError(f"rename: two fields would be called {shown(first)}")
        ids = {"item": interactions.item, "user": interactions.user}
        self.entities = {role: EntityIndex(cells) for role, cells in ids.items()}
        self.tables: dict[str, dict[str, Cells | np.ndarray]] = {"inter": {}}
        for role in ("user", "item"):
            self._add(roles[role], source, "inter", ids[role].as_kind("token"), role)
        self.tables["inter"][self.fields["time"]] = interactions.seconds
        for role, index in self.entities.items():
            self.tables[role] = {self.fields[role]: index.cells}
        self._report_time()

    def _report_time(self) -> None:
        """Report the column of times."""
        name = self.roles["time"]
        column = Column(name, self.source.path.name, self.fields["time"], "float", "inter")
        column.different = len(np.unique(self.interactions.seconds))
        column.notes = [*self.interactions.forms]
        if self.has_time:
            examples = self.source.columns[name].slice(0, 1000).drop_null().slice(0, 3)
            column.examples = list(map(str, examples.to_pylist()))
            column.notes.append("seconds since 1970, UTC")
        self.report.columns.append(column)

    @property
    def has_time(self) -> bool:
        """Whether a column holds times; without one, the order of the rows serves as time."""
        return self.roles["time"] in self.source.columns

    def add_file(self, source: Source, role: str) -> None:
        """Add attributes of items or users (``role``) from a file; refuse one of other items."""
        key = self._find_key(source, role)
        index = self.entities[role]
        ids = read_ids(encode(source.columns[key], key))
        entities = index.find(ids)
        self.report.notes += [f"{source.path.name}, {key}: {note}" for note in ids.notes]
        rows = np.flatnonzero(entities >= 0)
        if not len(rows):
            known = index.cells
            raise UsageError(
                f"{role}s: no {role} of {source.path} has an interaction: {key} has such as "
                f"{shown(ids.values[min(ids.different, 1)].as_py())}, {self.roles[role]} of "
                f"the interactions {shown(known.values[int(known.codes[0])].as_py())}; write both "
                "in one way"
            )
        lost = {f"no {role} ({key})": np.flatnonzero(ids.codes == 0)}
        is_unused = (entities < 0) & (ids.codes > 0)
        left_out = {f"{role} without an interaction": np.flatnonzero(is_unused)}
        self.report.lines[f"{role}s"] = Lines.count(source, lost, left_out)
        num_without_row = len(index) - len(np.unique(entities[rows]))
        if num_without_row:
            self.report.notes.append(
                f"{num_without_row:,} of {len(index):,} {role}s with interactions have no row in "
                f"{source.path.name}: their attributes are empty"
            )
        for column in source.columns:
            cells = None if column == key else self._read_column(source, column)
            if cells is not None:
                self._add_attribute(column, source, role, cells[rows], entities[rows], rows)

    def _find_key(self, source: Source, role: str) -> str:
        """Return the column of ids: called as in the interactions, by a usual name, or ``id``."""
        named = [name for name in source.columns if name == self.roles[role]]
        called_id = [name for name in source.columns if name.lower() == "id"]
        for names in (named, find_by_name(role, source.columns), called_id):
            if len(names) == 1:
                return names[0]
        raise UsageError(
            f"{source.path}: no column is called {shown(self.roles[role])} as in the interactions, "
            f"so no one knows which {role} a row is about; rename one of "
            f"{listed(source.columns)}, or name them with --{role}_columns if the file has no "
            "header"
        )

    def add_columns(self) -> None:
        """Add all other columns of the interactions, each to the table where it belongs."""
        rows = self.interactions.rows
        for column in self.source.columns:
            has_role = column in self.roles.values()
            cells = None if has_role else self._read_column(self.source, column)
            if cells is None:
                continue
            if len(rows) < self.source.num_rows:
                cells = cells[rows]
            table = self.overrides["table"].get(column) or choose_table(cells, self.entities)
            check_choice(f"table: {column}", table, TABLES)
            if table == "inter":
                self._add(column, self.source, table, cells)
            else:
                codes = self.entities[table].codes
                self._add_attribute(column, self.source, table, cells, codes, rows)

    def _read_column(self, source: Source, column: str) -> Cells | None:
        """Return the typed cells of a column; None if it is left out, which is reported."""
        try:
            if _NAMELESS.fullmatch(column):
                raise UsageError("has no name")
            cells = encode(source.columns[column], column)
            separators = [self.overrides[option].get(column) for option in ("decimal", "thousands")]
            kind = self.overrides["type"].get(column, "float" if any(separators) else "")
            if not kind:
                return guess_kind(cells, column, source.decimal_comma)
        except UsageError as error:
            left_out = Column(column, source.path.name, notes=[str(error)], loaded=False)
            self.report.columns.append(left_out)
            return None
        return convert_cells(cells, kind, column, source.decimal_comma, *separators)

    def _add_attribute(
        self,
        column: str,
        source: Source,
        table: str,
        cells: Cells,
        entities: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Add the first value of each item (user); report rows that contradict it.

        ``cells``, numbers of the items in ``entities``, and ``rows`` of the source are [n] each.
        """
        first, is_contradicting = find_first_values(cells, entities, len(self.entities[table]))
        num_empty = int((cells.codes == 0).sum())
        if num_empty and source is self.source:
            total = f"{num_empty:,} of {len(cells.codes):,}"
            note = f"{total} interactions have none: those of the {table}"
            first = first.as_kind(cells.kind, note)
        name = self._add(column, source, table, first)
        wrong = rows[is_contradicting]
        if len(wrong):
            places = source.locate_rows(wrong[:MAX_LISTED])
            entry = {"table": table, "lines": len(wrong), "first": places}
            self.report.contradictions[name] = entry

    def _add(self, column: str, source: Source, table: str, cells: Cells, role: str = "") -> str:
        """Add cells to a table, report the column, and return the name of its field."""
        taken = {name for columns in self.tables.values() for name in columns}
        name = self.fields[role] if role else self.overrides["rename"].get(column)
        if name is not None and name in taken:
            raise UsageError(f"rename: two fields would be called {shown(name)}")
        name = name or make_field_name(column, taken)
        self.tables[table][name] = cells
        reported = Column(column, source.path.name, name, cells.kind, table, cells.different)
        reported.missing = int((cells.codes == 0).sum())
        reported.examples = [v.replace(INNER, " | ") for v in cells.values[1:4].to_pylist()]
        reported.notes = list(cells.notes)
        if not role and (reason := _describe_useless(cells)):
            reported.loaded = False
            reported.notes.append(f"written, not loaded: {reason}")
        self.report.columns.append(reported)
        return name

    def finish(self) -> tuple[dict[str, Table], dict[str, list[str]]]:
        """Return table -> field -> cells to write, and table -> fields that a run should load."""
        not_loaded = {column.field for column in self.report.columns if not column.loaded}
        tables: dict[str, Table] = {}
        loaded = {}
        for name, table in self.tables.items():
            if name == "inter" or len(table) > 1:  # items or users have attributes
                tables[name] = table
                loaded[name] = [field for field in table if field not in not_loaded]
        return tables, loaded


def _describe_useless(cells: Cells) -> str:
    """Return why a field is of no use to a run; empty if it is of use."""
    num_rows = int(np.count_nonzero(cells.codes))
    if not num_rows:
        return "it is empty"
    if cells.kind == "token":
        longest = pc.max(pc.utf8_length(cells.values)).as_py()
        if 4 * longest * cells.different > _MAX_TOKEN_BYTES:
            return "its texts are long"
        if num_rows >= _UNIQUE_ROWS and cells.different > _UNIQUE_SHARE * num_rows:
            return "nearly every one is another"
    return ""
