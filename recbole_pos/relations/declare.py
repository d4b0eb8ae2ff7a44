"""The option ``relations``, read and checked against the fields that are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recbole_pos.data.attributes import explain_not_loaded, map_fields_to_tables, require_values
from recbole_pos.data.protocols import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.values import SECONDS, check_choice, is_number, nearest, shown

CHOICES = {
    "kind": ("categorical", "numerical"),
    "source": ("item", "behaviour", "user"),
    "scope": ("sequence", "batch"),
}
KEYS = ("field", *CHOICES, "within", "scales")
# sources that a field of each table may have, the default first
SOURCES = {"item": ("item", "behaviour"), "user": ("user",)}
POSITION, TIME = "position", "time"  # built-in fields of every dataset
# AttrFormer, appendix A.2: hours and days for the time between two interactions
TIME_SCALES = (float(SECONDS["hours"]), float(SECONDS["days"]))


@dataclass(frozen=True)
class Relation:
    """One attribute as an explicit relation.

    Attributes:
        field: name of the field; for the built-in time the name of the time field.
        kind: categorical or numerical, the two cases of equation 10.
        source: the paper's category: item, behaviour or user. Relations of users go into
            position-to-position aggregation, the others into relation-augmented heads.
        scope: sequence (interactions of one user) or batch.
        table: the atomic file that has the field (item, user, inter), or position or time.
        within: field of the same table that both sides must share, or None.
        scales: values of r_norm in equation 10, whose relations are averaged (appendix A.2).
    """

    field: str
    kind: str
    source: str
    scope: str
    table: str
    within: str | None
    scales: tuple[float, ...]


def read_relations(entries: Any, dataset: Dataset) -> list[Relation]:
    """Read the option ``relations``, mappings or names of fields, against the loaded fields.

    Raises:
        UsageError: for anything that is not a relation, with entry, field and advice.
    """
    if not isinstance(entries, (list, tuple)):
        raise UsageError(
            f"relations: expected a list such as [{{field: brand}}], found {shown(entries)}"
        )
    relations: list[Relation] = []
    for entry in entries:
        relation = _read_entry(entry, dataset)
        if any(relation.field == other.field for other in relations):
            raise UsageError(f"relations: field {shown(relation.field)} is given twice")
        relations.append(relation)
    return relations


def _read_entry(entry: Any, dataset: Dataset) -> Relation:
    """Read one entry of ``relations``, with defaults for what it leaves out."""
    entry = {"field": entry} if isinstance(entry, str) else entry
    for key in entry if isinstance(entry, Mapping) else ():
        if key not in KEYS:
            where = entry.get("field", dict(entry))
            raise UsageError(
                f"relations: {where}: unknown key {shown(key)}{nearest(str(key), KEYS)}"
            )
    if not isinstance(entry, Mapping) or not isinstance(entry.get("field"), str):
        raise UsageError(
            f"relations: expected entries such as {{field: brand}}, found {shown(entry)}"
        )
    field = entry["field"]
    where, table = f"relations: {field}", _find_table(field, dataset)
    field = dataset.time_field if table == TIME else field
    kind, by_type = _find_kind(field, table, dataset, where)
    sources = SOURCES.get(table, ("behaviour",))
    is_of_events = table not in SOURCES
    choice = {"kind": kind, "source": sources[0], "scope": "sequence" if is_of_events else "batch"}
    for key, choices in CHOICES.items():
        choice[key] = entry.get(key, choice[key])
        check_choice(f"{where}: {key}", choice[key], choices)
    if choice["kind"] != kind:
        raise UsageError(f"{where}: the field is {kind}{by_type}, not {choice['kind']}")
    if choice["source"] not in sources:
        raise UsageError(
            f"{where}: a field of the {table} table is of source {' or '.join(sources)}, "
            f"not {choice['source']}"
        )
    if is_of_events and kind == "numerical" and choice["scope"] == "batch":
        raise UsageError(
            f"{where}: numbers of interactions relate interactions of one user (scope: sequence)"
        )
    if table == "user" and choice["scope"] == "sequence":
        raise UsageError(f"{where}: users are related across sequences (scope: batch)")
    within = _read_within(entry.get("within"), table, dataset, where)
    scales = _read_scales(entry.get("scales"), kind, by_type, table, where)
    return Relation(field=field, table=table, within=within, scales=scales, **choice)


def _find_table(field: str, dataset: Dataset) -> str:
    """Return the table of a field; a loaded field time or position precedes the built-in one."""
    if (table := map_fields_to_tables(dataset).get(field)) is not None:
        return TIME if field == dataset.time_field else table
    if field in (POSITION, TIME):
        return field
    raise UsageError(f"relations: {explain_not_loaded(field, dataset, (POSITION, TIME))}")


def _find_kind(field: str, table: str, dataset: Dataset, where: str) -> tuple[str, str]:
    """Return the kind of a field, and for messages why: its type, and how to change it."""
    if table in (POSITION, TIME):
        return "numerical", ""
    ftype = dataset.field2type[field].value
    if field in (dataset.uid_field, dataset.iid_field):
        raise UsageError(f"{where}: the id of users or items is no attribute")
    if ftype == "float_seq":
        raise UsageError(
            f"{where}: has type float_seq; relations are made of token, token_seq or float fields"
        )
    require_values(field, dataset, "relations: ")
    kind, other = ("numerical", "token") if ftype == "float" else ("categorical", "float")
    first = f"the first line of {dataset.dataset_name}.{table} would be {field}:{other} otherwise"
    return kind, f" by its type {ftype} ({first})"


def _read_within(within: Any, table: str, dataset: Dataset, where: str) -> str | None:
    """Return the key ``within``, checked: a token field of the same ``table``, or None."""
    if within is None:
        return None
    where = f"{where}: within: "
    if table not in SOURCES:
        raise UsageError(f"{where}only a field of the item or user table can have one")
    if not isinstance(within, str):
        raise UsageError(f"{where}expected the name of a field, found {shown(within)}")
    if (within_table := map_fields_to_tables(dataset).get(within)) is None:
        raise UsageError(f"{where}{explain_not_loaded(within, dataset)}")
    if within_table != table or dataset.field2type[within].value not in ("token", "token_seq"):
        raise UsageError(
            f"{where}{shown(within)} must be a token or token_seq field of the {table} table"
        )
    require_values(within, dataset, where)
    return within


def _read_scales(scales: Any, kind: str, by_type: str, table: str, where: str) -> tuple[float, ...]:
    """Read the key ``scales`` of a field of ``kind``; None gives the default of its table."""
    if scales is None:
        return () if kind == "categorical" else TIME_SCALES if table == TIME else (1.0,)
    if kind == "categorical":
        raise UsageError(
            f"{where}: scales are for numerical fields, and this one is categorical{by_type}"
        )
    values = scales if isinstance(scales, (list, tuple)) else [scales]
    if not values or not all(is_number(v) and v > 0 for v in values):
        raise UsageError(
            f"{where}: scales: expected numbers above 0 (r_norm), found {shown(scales)}"
        )
    return tuple(float(v) for v in values)
