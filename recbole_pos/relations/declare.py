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
# sources that a field of each table may have, the default first; all other fields: behaviour
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
    if isinstance(entry, Mapping):
        _refuse_unknown_keys(entry)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("field"), str):
        raise UsageError(
            f"relations: expected entries such as {{field: brand}}, found {shown(entry)}"
        )
    field = entry["field"]
    location = f"relations: {field}"
    table = _find_table(field, dataset)
    field = dataset.time_field if table == TIME else field
    kind, reason = _find_kind(field, table, dataset, location)
    sources = SOURCES.get(table, ("behaviour",))
    default_scope = "batch" if table in SOURCES else "sequence"
    options = {"kind": kind, "source": sources[0], "scope": default_scope}
    for key, allowed in CHOICES.items():
        options[key] = entry.get(key, options[key])
        check_choice(f"{location}: {key}", options[key], allowed)
    if options["kind"] != kind:
        raise UsageError(f"{location}: the field is {kind}{reason}, not {options['kind']}")
    _check_source_and_scope(options, sources, table, location)
    within = _read_within(entry.get("within"), table, dataset, location)
    scales = _read_scales(entry.get("scales"), kind, reason, table, location)
    return Relation(field=field, table=table, within=within, scales=scales, **options)


def _refuse_unknown_keys(entry: Mapping[Any, Any]) -> None:
    """Refuse an entry with a key that is not in ``KEYS``."""
    for key in entry:
        if key not in KEYS:
            label = entry.get("field", dict(entry))
            raise UsageError(
                f"relations: {label}: unknown key {shown(key)}{nearest(str(key), KEYS)}"
            )


def _check_source_and_scope(
    options: Mapping[str, str], sources: tuple[str, ...], table: str, location: str
) -> None:
    """Refuse a source that is not among the ``sources`` of a table, or a scope it cannot have."""
    if options["source"] not in sources:
        raise UsageError(
            f"{location}: a field of the {table} table is of source {' or '.join(sources)}, "
            f"not {options['source']}"
        )
    is_of_interactions = table not in SOURCES
    if is_of_interactions and options["kind"] == "numerical" and options["scope"] == "batch":
        raise UsageError(
            f"{location}: numbers of interactions relate interactions of one user (scope: sequence)"
        )
    if table == "user" and options["scope"] == "sequence":
        raise UsageError(f"{location}: users are related across sequences (scope: batch)")


def _find_table(field: str, dataset: Dataset) -> str:
    """Return the table of a field; a loaded field time or position precedes the built-in one."""
    if (table := map_fields_to_tables(dataset).get(field)) is not None:
        return TIME if field == dataset.time_field else table
    if field in (POSITION, TIME):
        return field
    raise UsageError(f"relations: {explain_not_loaded(field, dataset, (POSITION, TIME))}")


def _find_kind(field: str, table: str, dataset: Dataset, location: str) -> tuple[str, str]:
    """Return the kind of a field, and its reason as the end of a message, empty if built in."""
    if table in (POSITION, TIME):
        return "numerical", ""
    ftype = dataset.field2type[field].value
    if field in (dataset.uid_field, dataset.iid_field):
        raise UsageError(f"{location}: the id of users or items is no attribute")
    if ftype == "float_seq":
        raise UsageError(
            f"{location}: has type float_seq; relations are made of token, token_seq or float "
            "fields"
        )
    require_values(field, dataset, "relations: ")
    kind, other_type = ("numerical", "token") if ftype == "float" else ("categorical", "float")
    file = f"{dataset.dataset_name}.{table}"
    advice = f"the first line of {file} would be {field}:{other_type} otherwise"
    return kind, f" by its type {ftype} ({advice})"


def _read_within(within: Any, table: str, dataset: Dataset, location: str) -> str | None:
    """Read the key ``within``, None or the name of a token field of the same ``table``."""
    if within is None:
        return None
    prefix = f"{location}: within: "
    if table not in SOURCES:
        raise UsageError(f"{prefix}only a field of the item or user table can have one")
    if not isinstance(within, str):
        raise UsageError(f"{prefix}expected the name of a field, found {shown(within)}")
    if (within_table := map_fields_to_tables(dataset).get(within)) is None:
        raise UsageError(f"{prefix}{explain_not_loaded(within, dataset)}")
    if within_table != table or dataset.field2type[within].value not in ("token", "token_seq"):
        raise UsageError(
            f"{prefix}{shown(within)} must be a token or token_seq field of the {table} table"
        )
    require_values(within, dataset, prefix)
    return within


def _read_scales(
    scales: Any, kind: str, reason: str, table: str, location: str
) -> tuple[float, ...]:
    """Read the key ``scales`` of a field of ``kind``; None gives the default of its table."""
    if kind == "categorical":
        if scales is not None:
            raise UsageError(
                f"{location}: scales are for numerical fields, and this one is categorical{reason}"
            )
        return ()
    if scales is None:
        return TIME_SCALES if table == TIME else (1.0,)
    values = scales if isinstance(scales, (list, tuple)) else [scales]
    if not values or not all(is_number(scale) and scale > 0 for scale in values):
        raise UsageError(
            f"{location}: scales: expected numbers above 0 (r_norm), found {shown(scales)}"
        )
    return tuple(float(scale) for scale in values)
