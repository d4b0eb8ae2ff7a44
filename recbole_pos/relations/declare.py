"""The option ``relations``, read and checked against the fields that are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recbole_pos.data.attributes import explain_not_loaded, map_fields_to_tables, require_values
from recbole_pos.data.dataset import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.values import SECONDS, check_choice, is_number, shown

KEYS = ("field", "scope", "within", "scales")
TABLES = ("item", "user")  # tables of entities; a field of any other has a value an interaction
POSITION, TIME = "position", "time"  # built-in fields of every dataset
# AttrFormer, appendix A.2: hours and days for the time between two interactions
TIME_SCALES = (float(SECONDS["hours"]), float(SECONDS["days"]))


@dataclass(frozen=True)
class Relation:
    """One attribute as an explicit relation.

    Attributes:
        field: name of the field; for the built-in time the name of the time field.
        kind: categorical or numerical, the two cases of equation 10, by the type of the field.
        scope: sequence (interactions of one user) or batch.
        table: the atomic file that has the field (item, user, inter), or position or time.
        within: field of the same table that both sides must share, or None.
        scales: values of r_norm in equation 10, whose relations are averaged (appendix A.2).
    """

    field: str
    kind: str
    scope: str
    table: str
    within: str | None
    scales: tuple[float, ...]

    @property
    def is_of_users(self) -> bool:
        """Whether it goes into position-to-position aggregation, not into relation-augmented heads.

        In the paper's words its source is user, not item or behaviour.
        """
        return self.table == "user"


def read_relations(entries: Any, dataset: Dataset) -> list[Relation]:
    """Read the option ``relations``, a list of mappings or names of fields.

    Raises:
        UsageError: for what is not a relation of a loaded field, or for a field given twice.
    """
    if not isinstance(entries, (list, tuple)):
        raise UsageError(
            f"relations: expected a list such as [{{field: brand}}], found {shown(entries)}"
        )
    relations: list[Relation] = []
    for entry in entries:
        relation = _read_entry(entry, dataset)
        if any(relation.field == earlier.field for earlier in relations):
            raise UsageError(f"relations: field {shown(relation.field)} is given twice")
        relations.append(relation)
    return relations


def _read_entry(entry: Any, dataset: Dataset) -> Relation:
    """Read an entry of ``relations``, with defaults for missing keys; raise UsageError if wrong."""
    entry = {"field": entry} if isinstance(entry, str) else entry
    unknown = [key for key in entry if key not in KEYS] if isinstance(entry, Mapping) else []
    if unknown or not isinstance(entry, Mapping) or not isinstance(entry.get("field"), str):
        raise UsageError(
            f"relations: expected entries such as {{field: brand}}, with the keys "
            f"{', '.join(KEYS)}; found {shown(entry)}"
        )
    field = entry["field"]
    location = f"relations: {field}"
    table = _find_table(field, dataset)
    field = dataset.time_field if table == TIME else field
    kind = _find_kind(field, table, dataset, location)
    scope = entry.get("scope", "batch" if table in TABLES else "sequence")
    check_choice(f"{location}: scope", scope, ("sequence", "batch"))
    is_of_numbers = table not in TABLES and kind == "numerical"
    if (table == "user" and scope != "batch") or (is_of_numbers and scope != "sequence"):
        raise UsageError(
            f"{location}: scope: fields of users are related across sequences (batch), numbers of "
            f"interactions within one (sequence); found {scope}"
        )
    within = _read_within(entry.get("within"), table, dataset, location)
    scales = _read_scales(entry.get("scales"), kind, table, location)
    return Relation(field, kind, scope, table, within, scales)


def _find_table(field: str, dataset: Dataset) -> str:
    """Return the table of a field; a loaded field time or position precedes the built-in one."""
    if (table := map_fields_to_tables(dataset).get(field)) is not None:
        return TIME if field == dataset.time_field else table
    if field in (POSITION, TIME):
        return field
    raise UsageError(f"relations: {explain_not_loaded(field, dataset, (POSITION, TIME))}")


def _find_kind(field: str, table: str, dataset: Dataset, location: str) -> str:
    """Return the kind of a field, categorical or numerical, by its type."""
    if table in (POSITION, TIME):
        return "numerical"
    kinds = {"token": "categorical", "token_seq": "categorical", "float": "numerical"}
    field_type = dataset.kinds[field]
    if field in (dataset.uid_field, dataset.iid_field) or field_type not in kinds:
        raise UsageError(
            f"{location}: relations are made of token, token_seq or float fields, and not of the "
            f"ids of users or items; the field has type {field_type}"
        )
    require_values(field, dataset, "relations: ")
    return kinds[field_type]


def _read_within(within: Any, table: str, dataset: Dataset, location: str) -> str | None:
    """Read the key ``within``, None or the name of a token field of the same ``table``."""
    if within is None:
        return None
    prefix = f"{location}: within: "
    within_table = map_fields_to_tables(dataset).get(within)
    if within_table is None:
        raise UsageError(f"{prefix}{explain_not_loaded(within, dataset)}")
    is_categorical = dataset.kinds[within] in ("token", "token_seq")
    if table not in TABLES or within_table != table or not is_categorical:
        raise UsageError(
            f"{prefix}expected a token or token_seq field of the same table, item or user; "
            f"{shown(within)} is a {dataset.kinds[within]} field of {within_table}, and "
            f"the relation is of {table}"
        )
    require_values(within, dataset, prefix)
    return within


def _read_scales(scales: Any, kind: str, table: str, location: str) -> tuple[float, ...]:
    """Read the key ``scales`` of a field of ``kind``; None gives the default of its table."""
    if scales is None and kind == "numerical":
        return TIME_SCALES if table == TIME else (1.0,)
    if scales is None:
        return ()
    values = scales if isinstance(scales, (list, tuple)) else [scales]
    if kind == "categorical" or not values or not all(is_number(x) and x > 0 for x in values):
        raise UsageError(
            f"{location}: scales: expected numbers above 0 (r_norm), for a float field; found "
            f"{shown(scales)} for a {kind} one"
        )
    return tuple(float(scale) for scale in values)
