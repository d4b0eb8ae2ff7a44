"""Relations by attributes: the option ``relations``, and the table of each relation it declares.

Entities (items, users or interactions) with the same value of an attribute are one *class*: a
brand, a set of categories, a price within a brand. How two entities are related depends on their
classes only, so a table over classes holds all of a relation, and stays small where the matrix over
entities would not: amazon-beauty has 12,101 items and one category that all of them share. Tables
are built once (scipy.sparse) and looked up in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from recbole_pos.data.attributes import (
    explain_not_loaded,
    map_fields_to_tables,
    read_column,
    require_values,
)
from recbole_pos.data.dataset import Dataset
from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.values import SECONDS, check_choice, is_number, shown

KEYS = ("field", "scope", "within", "scales")  # that an entry of the option may have
TABLES = ("item", "user")  # tables of entities; a field of any other has a value an interaction
POSITION, TIME = "position", "time"  # built-in fields of every dataset
# AttrFormer, appendix A.2: hours and days for the time between two interactions
TIME_SCALES = (float(SECONDS["hours"]), float(SECONDS["days"]))
# Weaker relations count as 0: exp(-difference) is never 0, and float32 sums do not change by them.
WEAKEST = 1e-6
MAX_PAIRS = 50_000_000  # pairs of classes; about a gigabyte while a table is made
PAIRS_AT_ONCE = 1_000_000  # pairs whose rows are multiplied at once


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


def read_relations(entries: Sequence[Any], dataset: Dataset) -> list[Relation]:
    """Read the option ``relations``, which says by which fields interactions are related.

    Args:
        entries: the value of the option: a list, of names of fields or of mappings such as
            {field: price, within: category}.
        dataset: says which fields exist, and of which type.

    Returns:
        One relation for each entry, in this order.

    Raises:
        UsageError: for what is not a relation of a loaded field, or for a field given twice.
    """
    relations: list[Relation] = []
    for entry in entries:
        relation = _read_entry(entry, dataset)
        if any(relation.field == earlier.field for earlier in relations):
            raise UsageError(f"relations: field {shown(relation.field)} is given twice")
        relations.append(relation)
    return relations


def _read_entry(entry: Any, dataset: Dataset) -> Relation:
    """Read one entry of the option ``relations``.

    Args:
        entry: the name of a field, or a mapping with the keys of ``KEYS``, of which only ``field``
            must be there. Without ``scope`` a field of items or users relates the interactions of
            the whole batch, a field of interactions only those of one sequence.
        dataset: says which fields exist, and of which type.

    Returns:
        The relation, in which nothing is left to defaults.

    Raises:
        UsageError: if a key, field, scope, condition or scale is not possible.
    """
    entry = {"field": entry} if isinstance(entry, str) else entry
    has_field = isinstance(entry, Mapping) and isinstance(entry.get("field"), str)
    if not has_field or set(entry) - set(KEYS):
        raise UsageError(
            f"relations: expected entries such as {{field: brand}}, with the keys "
            f"{', '.join(KEYS)}; found {shown(entry)}"
        )

    field = entry["field"]
    location = f"relations: {field}"
    table, kind = _find_source(field, dataset)
    field = dataset.time_field if table == TIME else field

    scope = entry.get("scope", "batch" if table in TABLES else "sequence")
    check_choice(f"{location}: scope", scope, ("sequence", "batch"))
    # ``TABLES`` are item and user; all other numbers are of interactions
    is_of_numbers = table not in TABLES and kind == "numerical"
    if (table == "user" and scope != "batch") or (is_of_numbers and scope != "sequence"):
        raise UsageError(
            f"{location}: scope: fields of users are related across sequences (batch), numbers of "
            f"interactions within one (sequence); found {scope}"
        )

    within = _read_within(entry.get("within"), table, dataset, location)
    scales = _read_scales(entry.get("scales"), kind, table, location)
    return Relation(field, kind, scope, table, within, scales)


def _find_source(field: str, dataset: Dataset) -> tuple[str, str]:
    """Return which table has the values of a field, and whether they are categories or numbers.

    Args:
        field: name of a field, as given in the option ``relations``. A field of the dataset is
            preferred to the built-in ones, time and position.
        dataset: says which fields exist, in which file and of which type.

    Returns:
        The file of the dataset that has it (item, user or inter), or ``TIME`` or ``POSITION``; and
        ``categorical`` for tokens or ``numerical`` for floats.

    Raises:
        UsageError: if there is no such field, if it is an id of users or items or of another type,
            or if it is always empty.
    """
    table = map_fields_to_tables(dataset).get(field)
    if table is None and field in (POSITION, TIME):
        return field, "numerical"
    if table is None:
        raise UsageError(f"relations: {explain_not_loaded(field, dataset, (POSITION, TIME))}")
    if field == dataset.time_field:
        return TIME, "numerical"

    kinds = {"token": "categorical", "token_seq": "categorical", "float": "numerical"}
    field_type = dataset.kinds[field]
    if field in (dataset.uid_field, dataset.iid_field) or field_type not in kinds:
        raise UsageError(
            f"relations: {field}: relations are made of token, token_seq or float fields, and not "
            f"of the ids of users or items; the field has type {field_type}"
        )
    require_values(field, dataset, "relations: ")
    return table, kinds[field_type]


def _read_within(within: Any, table: str, dataset: Dataset, location: str) -> str | None:
    """Read the key ``within``: the field that two sides of a relation must share, too.

    Args:
        within: None, or the name of a token field. With ``{field: price, within: category}`` the
            prices of items are compared only if the items have a category in common.
        table: the file of the relation's own field, item or user, which must have this one, too.
        dataset: says which fields exist, and of which type.
        location: where the user has given it, for the message.

    Returns:
        The name of the field, or None.

    Raises:
        UsageError: if it is no such field.
    """
    if within is None:
        return None
    # ``TABLES`` are item and user, since a condition goes with fields of these only
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
    """Read the key ``scales``: the values of r_norm by which differences of numbers are divided.

    Args:
        scales: a number above 0, a list of such, or None for the default: an hour and a day in
            seconds for times, 1 for other numbers.
        kind: kind of the field; a categorical one has no differences and no scales.
        table: where the field comes from: a file of the dataset, ``TIME`` or ``POSITION``.
        location: where the user has given it, for the message.

    Returns:
        The values, in the order given; none for a categorical field.

    Raises:
        UsageError: if a value is not a number above 0, or the field is categorical.
    """
    if scales is None and kind == "numerical":
        return TIME_SCALES if table == TIME else (1.0,)
    if scales is None:
        return ()
    # one number is a list of one; an empty list, or any scale of a categorical field, is refused
    values = scales if isinstance(scales, (list, tuple)) else [scales]
    if kind == "categorical" or not values or not all(is_number(x) and x > 0 for x in values):
        raise UsageError(
            f"{location}: scales: expected numbers above 0 (r_norm), for a float field; found "
            f"{shown(scales)} for a {kind} one"
        )
    return tuple(float(scale) for scale in values)


@dataclass(frozen=True)
class RelationTable:
    """Classes of entities and how they are related.

    Attributes:
        group: [entities] int64 class of each entity, from 1; 0 where the attribute is missing.
        indptr: [classes + 1] where the related classes of each class begin; class 0 has none.
        classes: [pairs] int64 related classes of a class in order of preference: largest relation
            first, then largest cosine (among equal dot products the smaller set is more like it),
            then by number.
        values: [pairs] float64 the relation, S of equation 1.
    """

    group: np.ndarray
    indptr: np.ndarray
    classes: np.ndarray
    values: np.ndarray

    @classmethod
    def from_matrix(cls, group: np.ndarray, matrix: sp.csr_matrix) -> RelationTable:
        """Make a table from the classes of entities and the matrix of their relations.

        A class is all entities with the same value of a field, such as all items of one brand.

        Args:
            group: [entities] int64 class of each item, user or interaction, 0 for none.
            matrix: [classes, classes] symmetric relations; those below ``WEAKEST`` are left out.
        """
        matrix = matrix.tocoo()
        is_kept = matrix.data >= WEAKEST
        row, col, value = matrix.row[is_kept], matrix.col[is_kept], matrix.data[is_kept]

        # Sort the related classes of each row. Of two with equal dot products the one with the
        # smaller product with itself, the smaller set of tokens, has the larger cosine.
        self_relation = np.zeros(matrix.shape[0])
        self_relation[row[row == col]] = value[row == col]
        order = np.lexsort((col, self_relation[col], -value, row))

        # where the related classes of each row begin, as in scipy's sparse matrices
        indptr = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=matrix.shape[0]))))
        return cls(group, indptr, col[order].astype(np.int64), value[order])

    @cached_property
    def self_relation(self) -> np.ndarray:
        """[entities] float64 the relation of an entity to itself, 0 where it can have none."""
        return self.to_matrix().diagonal()[self.group]

    def to_matrix(self) -> sp.csr_matrix:
        """Return [classes, classes] relations, the columns of each row ascending."""
        n = len(self.indptr) - 1
        matrix = sp.csr_matrix((self.values, self.classes, self.indptr), shape=(n, n))
        return matrix.sorted_indices()


def number_token_sets(column: np.ndarray) -> tuple[np.ndarray, sp.csr_matrix]:
    """Number the different sets of tokens of a column: equal sets are one class of entities.

    An entity is an item, user or interaction. Relations between entities are then computed once
    for each pair of classes. Items with the
    tokens [3, 5], [5, 3], [5] and none are of the classes 2, 2, 1 and 0.

    Args:
        column: [entities] tokens, or [entities, s] lists of tokens; 0 is padding.

    Returns:
        [entities] int64 classes, 0 for no token; and a sparse matrix [classes, tokens] that is 1
        where a class has a token.
    """
    # every set of tokens in one form: sorted, without repetitions
    rows = np.sort(column.reshape(len(column), -1).astype(np.int64), 1)
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = 0
    rows = np.sort(rows, 1)

    # equal rows are a class; an empty row first, so that entities without a token get class 0
    rows = np.pad(rows, ((1, 0), (0, 0)))
    classes, group = np.unique(rows, axis=0, return_inverse=True)

    # the matrix has an entry for each token of a class that is no padding
    class_index, column_index = np.nonzero(classes)
    token = classes[class_index, column_index]
    num_tokens = int(token.max(initial=0)) + 1
    entries = np.ones(len(token)), (class_index, token)
    hot = sp.csr_matrix(entries, shape=(len(classes), num_tokens))
    return group.reshape(-1)[1:], hot


def relate_categorical(hot: sp.csr_matrix, name: str) -> sp.csr_matrix:
    """Return how many tokens each two classes of a field share (AttrFormer, equation 10).

    A class is one set of tokens, such as the categories of an item.

    Args:
        hot: [classes, tokens] sparse, 1 where a class has a token.
        name: field, for the message.

    Returns:
        Sparse matrix [classes, classes].
    """
    # a token that c classes have relates c * c pairs of them; too many pairs are a UsageError
    token_counts = np.bincount(hot.indices).astype(float)
    _require_few_pairs(float(token_counts @ token_counts), name)
    return (hot @ hot.T).tocsr()


def count_shared_tokens(hot: sp.csr_matrix, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Return how many tokens the two classes of each pair share (AttrFormer, equation 10).

    A class is one set of tokens, such as the categories of an item. Pairs are taken
    ``PAIRS_AT_ONCE`` at a time, which bounds the memory.

    Args:
        hot: [classes, tokens] sparse, 1 where a class has a token.
        i, j: [n] int64 first and second class of each pair.

    Returns:
        [n] float64.
    """
    num_shared = np.empty(len(i))
    for start in range(0, len(i), PAIRS_AT_ONCE):
        pairs = slice(start, start + PAIRS_AT_ONCE)
        in_both = hot[i[pairs]].multiply(hot[j[pairs]])  # 1 for each shared token
        num_shared[pairs] = np.asarray(in_both.sum(1)).ravel()
    return num_shared


def similarity(difference: np.ndarray, scales: Sequence[float]) -> np.ndarray:
    """Return exp(-|z_i - z_j| / r_norm), the mean over all r_norm (equation 10, appendix A.2)."""
    return sum(np.exp(-np.abs(difference) / scale) for scale in scales) / len(scales)


def number_values(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the different values of a float column: entities with equal numbers are of one class.

    An entity is an item, user or interaction, whose number the column has. Relations between
    entities are then computed once for each pair of classes. The numbers 9.5,
    3.0, NaN, 9.5 have the classes 2, 1, 0, 2 and are NaN, 3.0, 9.5 by class.

    Args:
        column: [entities] float64 numbers.

    Returns:
        [entities] int64 classes, 0 where the number is not finite (missing); and the float64
        number of each class [classes], NaN for class 0.
    """
    is_known = np.isfinite(column)
    values, value_index = np.unique(column[is_known], return_inverse=True)
    group = np.zeros(len(column), dtype=np.int64)
    group[is_known] = value_index + 1
    return group, np.concatenate(([np.nan], values))


def relate_numerical(values: np.ndarray, scales: Sequence[float], name: str) -> sp.csr_matrix:
    """Return the relations of all pairs of different numbers: exp(-|z_i - z_j| / r_norm).

    That is equation 10 of AttrFormer (Liu et al., KDD 2025), averaged over the values of r_norm.
    Pairs so far apart that their relation is below ``WEAKEST`` are never formed.

    Args:
        values: [classes] float64 rising numbers z, the first NaN for missing.
        scales: values of r_norm.
        name: field, for the message.

    Returns:
        Symmetric sparse matrix [classes, classes], without relations of class 0.

    Raises:
        UsageError: if there are too many pairs.
    """
    # which of the sorted numbers are within reach of each: a stretch, from ``first`` on, of
    # ``sizes`` numbers
    numbers = values[1:]
    reach = max(scales) * -np.log(WEAKEST)  # the difference at which exp(...) is ``WEAKEST``
    first = np.searchsorted(numbers, numbers - reach, "left")
    sizes = np.searchsorted(numbers, numbers + reach, "right") - first
    _require_few_pairs(float(sizes.sum()), name)

    # the pairs of each number with those within reach; class 0 is that of a missing number
    row = np.repeat(np.arange(len(numbers)), sizes) + 1
    col = gather_index(first, sizes) + 1
    data = similarity(values[row] - values[col], scales)
    return sp.csr_matrix((data, (row, col)), shape=(len(values), len(values)))


def join_classes(groups: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Number joint classes: entities whose classes agree in every classification share one.

    For example, of three entities with the classes 1, 1, 2 by brand and 4, 5, 4 by price, the joint
    classes are 1, 2, 3, made of (1, 4), (1, 5) and (2, 4).

    Args:
        groups: [entities] class of each entity, an array for each classification.

    Returns:
        [entities] joint classes, from 1; and the classes that each joint class is made of
        [joint classes, classifications], all 0 for joint class 0.
    """
    joint, group = np.unique(np.stack(groups, 1), axis=0, return_inverse=True)
    return group.reshape(-1) + 1, np.concatenate((np.zeros_like(joint[:1]), joint))


def spread_matrix(classes: np.ndarray, matrix: sp.csr_matrix, name: str) -> sp.csr_matrix:
    """Return how combinations of attributes are related by one of these attributes.

    Two combinations of a brand and a price, for example, are related by brand as their brands are.
    With the brands 1, 1, 2 of three combinations, row 0 of the result is ``matrix[1, [1, 1, 2]]``.

    Args:
        classes: [combinations] class of each, here its brand; class 0 has no relation.
        matrix: [classes, classes] relations, here of brands.
        name: field, for the message if there are too many pairs.

    Returns:
        Sparse matrix [combinations, combinations].

    Raises:
        UsageError: if there are too many pairs.
    """
    # how many combinations have each class, and how many pairs of combinations are related
    sizes = np.bincount(classes, minlength=matrix.shape[0]).astype(float)
    num_pairs = sizes @ ((matrix > 0) @ sizes)
    _require_few_pairs(float(num_pairs), name)
    return matrix[classes][:, classes]


def _require_few_pairs(pairs: float, name: str) -> None:
    """Raise UsageError if a relation has more than ``MAX_PAIRS`` pairs, for lack of memory.

    Args:
        pairs: how many pairs of classes of a field are related.
        name: name of the field.
    """
    if pairs > MAX_PAIRS:
        raise UsageError(
            f"relations: {name} relates up to {pairs:,.0f} pairs of values, "
            f"more than {MAX_PAIRS:,}; use fields with fewer distinct values (steps), a smaller "
            "scale, or a condition that fewer entities share (within)"
        )


def build_user_table(relations: Sequence[Relation], dataset: Dataset) -> RelationTable | None:
    """Return how strongly users are related: the mean over their attributes, such as age.

    That is R^U (AttrFormer, section 3.1.3). Users that agree in all attributes are one class, so
    the table relates classes, not users. A missing attribute counts as a relation of 0.

    Args:
        relations: the entries of the option ``relations`` that are of users, such as gender, age.
        dataset: dataset with the fields.

    Returns:
        The table, or None without relations of users.
    """
    if not relations:
        return None
    # classes [users] and relations [classes, classes] by each attribute
    by_attribute = [relate_classes(relation, dataset) for relation in relations]
    # the class of each user by all attributes together, and of what classes each one is made
    group, joint = join_classes([classes for classes, _ in by_attribute])

    # two joint classes are related by an attribute as their classes of this attribute are
    name = " and ".join(relation.field for relation in relations)
    total = sp.csr_matrix((len(joint), len(joint)))
    for classes, (_, matrix) in zip(joint.T, by_attribute, strict=True):
        total = total + spread_matrix(classes, matrix, name)
    return RelationTable.from_matrix(group, total / len(relations))


def relate_classes(relation: Relation, dataset: Dataset) -> tuple[np.ndarray, sp.csr_matrix]:
    """Sort entities into classes by the value of a field, and relate the classes (equation 10).

    A class is all items, users or interactions with the same value, such as a brand. Classes of
    tokens are related by how many tokens they share, numbers by exp(-difference). With a condition
    (``within``), such as price within category, entities must share a token of a second field, too.

    Args:
        relation: an entry of the option ``relations``.
        dataset: where the values of its fields are read.

    Returns:
        [entities] int64 class of each item, user or interaction, 0 for none; and the sparse matrix
        [classes, classes] of relations.
    """
    column = read_column(relation.field, relation.table, dataset)
    is_categorical = relation.kind == "categorical"
    if is_categorical:
        group, tokens = number_token_sets(column)
    else:
        group, numbers = number_values(column)

    # without a condition all pairs of classes are related at once
    if relation.within is None:
        if is_categorical:
            return group, relate_categorical(tokens, relation.field)
        return group, relate_numerical(numbers, relation.scales, relation.field)

    # with a condition, a joint class is a combination of a price and categories, for example
    condition = read_column(relation.within, relation.table, dataset)
    condition_group, condition_tokens = number_token_sets(condition)
    group, joint = join_classes([group, condition_group])

    # the pairs of joint classes that share a category, where both have a price
    shares_token = relate_categorical(condition_tokens, relation.within)
    pairs = spread_matrix(joint[:, 1], shares_token, relation.field).tocoo()
    i, j = joint[pairs.row, 0], joint[pairs.col, 0]
    is_known = (i > 0) & (j > 0)
    i, j = i[is_known], j[is_known]

    # how the prices of each pair are related
    if is_categorical:
        strength = count_shared_tokens(tokens, i, j)
    else:
        strength = similarity(numbers[i] - numbers[j], relation.scales)
    places = pairs.row[is_known], pairs.col[is_known]
    return group, sp.csr_matrix((strength, places), shape=pairs.shape)
