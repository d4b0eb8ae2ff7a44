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

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion.cells import Cells, convert_cells, encode, guess_kind, read_ids
from recbole_pos.conversion.interaction_table import (
    InteractionTable,
    find_by_name,
    require_column,
)
from recbole_pos.conversion.reading import Source
from recbole_pos.conversion.report import MAX_LISTED, Column, Lines, Report
from recbole_pos.conversion.writing import TABLES, Table
from recbole_pos.errors import UsageError
from recbole_pos.values import check_choice, listed, shown

# Names that RecBole uses or derives from others, and the built-in fields of relations.
_RESERVED = re.compile(r"label|item_length|time|position|.*_list")
_NAMELESS = re.compile(r"\(column \d+\)|__index_level_\d+__|Unnamed: \d+")  # pandas' row numbers
# A token field of at least so many rows with more different values per row is not loaded.
_UNIQUE_ROWS, _UNIQUE_SHARE = 100, 0.9
# Of the contradictions expected by chance, a column of items or users has at most this share.
_CONTRADICTION_SHARE = 0.1
# What the user sets for single columns: option (type, table or rename) -> column -> value.
Overrides = Mapping[str, Mapping[str, str]]


def check_overrides(
    overrides: Overrides, roles: Mapping[str, str], sources: Iterable[Source]
) -> None:
    """Refuse overrides of columns that no file has, or of users, items and times, and bad names."""
    columns = {name for source in sources for name in source.columns}
    for option, values in overrides.items():
        for column, value in values.items():
            require_column(column, columns, option)
            if option == "rename" and make_field_name(value, ()) != value:
                raise UsageError(
                    f"rename: {column}={value}: a field is called by letters, digits and _, such "
                    f"as {make_field_name(value, ())}"
                )
            if option != "rename" and column in roles.values():
                raise UsageError(
                    f"{option}: column {shown(column)} is the user, item or time, which are token, "
                    "token and float of the interactions; leave it out"
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
    first = np.zeros(num_entities, dtype=cells.codes.dtype)
    # in reverse, since the last assignment to an element stays
    first[entities[filled[::-1]]] = cells.codes[filled[::-1]]
    is_contradicting = (cells.codes > 0) & (cells.codes != first[entities])
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
        args: ConvertArguments,
        report: Report,
    ) -> None:
        self.source, self.interactions, self.roles = source, interactions, roles
        self.overrides, self.args, self.report = overrides, args, report
        self.taken: set[str] = set()
        defaults = {"user": "user_id", "item": "item_id", "time": "timestamp"}
        self.fields = {role: self._name(roles[role], name) for role, name in defaults.items()}
        ids = {"user": interactions.user, "item": interactions.item}
        self.entities = {role: EntityIndex(cells) for role, cells in ids.items()}
        self.tables: dict[str, dict[str, Cells | np.ndarray]] = {
            "inter": {},
            "item": {},
            "user": {},
        }
        for role, cells in ids.items():
            self._add(roles[role], source, "inter", cells.as_kind("token"), self.fields[role])
            self.tables[role][self.fields[role]] = self.entities[role].cells
        self.tables["inter"][self.fields["time"]] = interactions.seconds
        time = Column(roles["time"], source.path.name, self.fields["time"], "float", "inter")
        time.different = len(np.unique(interactions.seconds))
        time.notes = [*interactions.forms]
        report.columns.append(time)

    def _name(self, column: str, default: str | None = None) -> str:
        """Return a name for the field of a column: that of ``rename``, ``default``, or its own."""
        name = self.overrides["rename"].get(column, default)
        if name in self.taken:
            raise UsageError(f"rename: two fields would be called {shown(name)}")
        name = name or make_field_name(column, self.taken)
        self.taken.add(name)
        return name

    @property
    def has_time(self) -> bool:
        """Whether a column holds times; without one, the order of the rows serves as time."""
        return self.roles["time"] in self.source.columns

    def add_file(self, source: Source, role: str) -> None:
        """Add attributes of items or users (``role``) from a file; refuse one of other items."""
        key, index = self._find_key(source, role), self.entities[role]
        ids = read_ids(encode(source.table[key], key, self.args.missing))
        entities = index.find(ids)
        self.report.notes += [f"{source.path.name}, {key}: {note}" for note in ids.notes]
        unused = f"{role} without an interaction"
        dropped = {
            f"no {role} ({key})": np.flatnonzero(ids.codes == 0),
            unused: np.flatnonzero((entities < 0) & (ids.codes > 0)),
        }
        self.report.lines[f"{role}s"] = Lines.count(source, dropped, unused)
        rows = np.flatnonzero(entities >= 0)
        num_without_row = len(index) - len(np.unique(entities[rows]))
        if not len(rows):
            examples = [shown(cells.values[-1].as_py()) for cells in (ids, index.cells)]
            raise UsageError(
                f"{source.path}: no {role} has an interaction; {key} has such as {examples[0]}, "
                f"the interactions {examples[1]}"
            )
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
            f"so no one knows which {role} a row is about; rename one of {listed(source.columns)}"
        )

    def add_columns(self) -> None:
        """Add all other columns of the interactions, each to the table where it belongs."""
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
        """Return the typed cells of a column; None if it is left out, which is reported."""
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
        """Add the first value of each item (user); report rows that contradict it.

        ``cells``, numbers of the items in ``entities``, and ``rows`` of the source are [n] each.
        """
        first, is_contradicting = find_first_values(cells, entities, len(self.entities[table]))
        name = self._add(column, source, table, first)
        wrong = rows[is_contradicting]
        if len(wrong):
            places = source.locate_rows(wrong[:MAX_LISTED])
            entry = {"table": table, "lines": len(wrong), "first": places}
            self.report.contradictions[name] = entry

    def _add(
        self, column: str, source: Source, table: str, cells: Cells, field: str | None = None
    ) -> str:
        """Add cells to a table, report the column, and return the name of its field."""
        name = field or self._name(column)
        self.tables[table][name] = cells
        reported = Column(column, source.path.name, name, cells.kind, table, cells.different)
        reported.missing = int((cells.codes == 0).sum())
        reported.notes = list(cells.notes)
        if not field and (reason := _describe_useless(cells)):
            reported.loaded = False
            reported.notes.append(f"written, not loaded: {reason}")
        self.report.columns.append(reported)
        return name

    def finish(self) -> tuple[dict[str, Table], dict[str, list[str]]]:
        """Return table -> field -> cells to write, and table -> fields that a run should load.

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
    """Return why a field is of no use to a run; empty if it is of use."""
    num_rows = int(np.count_nonzero(cells.codes))
    if not num_rows:
        return "it is empty"
    is_unique = cells.different > _UNIQUE_SHARE * num_rows
    if cells.kind == "token" and num_rows >= _UNIQUE_ROWS and is_unique:
        return "nearly every one is another"
    return ""
