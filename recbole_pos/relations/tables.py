"""Relations by attributes: the option ``relations``, and the table of each relation it declares.

Words of this file: an *entity* is an item, a user or an interaction. A *class* is all entities with
the same value of an attribute: of one brand, of one set of categories, of one price. Classes are
numbered from 1; class 0 is for entities without a value.

How two entities are related depends on their classes only. So a table over classes holds all of a
relation, and stays small where a matrix over entities would not. Tables are built once
(scipy.sparse) and looked up in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from recbole_pos.data.dataset import (
    Dataset,
    explain_not_loaded,
    map_fields_to_tables,
    read_column,
)
from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.values import SECONDS, is_number, shown

KEYS = ("field", "within", "scales")  # that an entry of the option may have
POSITION, TIME = "position", "time"  # built-in fields of every dataset
# AttrFormer, appendix A.2: hours and days for the time between two interactions
TIME_SCALES = (float(SECONDS["hours"]), float(SECONDS["days"]))
# Weaker relations count as 0: exp(-difference) is never 0, and float32 sums do not change by them.
WEAKEST = 1e-6
MAX_PAIRS = 50_000_000  # pairs of classes; about a gigabyte while a table is made


@dataclass(frozen=True)
class Relation:
    """One attribute as an explicit relation.

    Attributes:
        field: name of the field; for the built-in time that of the time field.
        kind: categorical or numerical, the two cases of equation 10, by the type of the field.
        origin: where values are found: in the atomic file item, user or inter, or the built-in
            position or time.
        within: of a numerical field, a field of the same file of which both sides must share a
            token; or None.
        scales: values of r_norm in equation 10 (appendix A.2); none for a categorical field.
    """

    field: str
    kind: str
    origin: str
    within: str | None
    scales: tuple[float, ...]

    @property
    def is_of_users(self) -> bool:
        """Whether the field is one of users, such as their age, and not of items or interactions.

        A model reads relations of users in a step of its own, and others in heads of attention.
        """
        return self.origin == "user"


def read_relations(entries: Sequence[Any], dataset: Dataset) -> list[Relation]:
    """Read the option ``relations``, which says by which fields interactions are related.

    Args:
        entries: the value of the option: a list, of names of fields or of mappings such as
            {field: price, within: category}.
        dataset: says which fields exist, and of which type.

    Returns:
        One relation for each entry, in this order.

    Raises:
        UsageError: for what is not a relation of a loaded field.
    """
    return [_read_entry(entry, dataset) for entry in entries]


def _read_entry(entry: Any, dataset: Dataset) -> Relation:
    """Read one entry of the option ``relations``, and fill in what it leaves to defaults.

    Args:
        entry: the name of a field, or a mapping such as {field: price, within: category} with some
            of the keys ``KEYS``, of which only ``field`` must be there.
        dataset: says which fields exist, and of which type.

    Raises:
        UsageError: if a key, field, condition (``within``) or scale is not possible.
    """
    entry = {"field": entry} if isinstance(entry, str) else entry
    has_field = isinstance(entry, Mapping) and isinstance(entry.get("field"), str)
    if not has_field or set(entry) - set(KEYS):
        raise UsageError(
            f"relations: expected entries such as {{field: brand}}, with the keys "
            f"{', '.join(KEYS)}; found {shown(entry)}"
        )
    field = entry["field"]
    location = f"relations: {field}"  # where an error is, for messages
    origin, kind = _find_origin(field, dataset)

    within = entry.get("within")
    if within is not None:
        _check_within(within, origin, kind, dataset, location)

    return Relation(
        field=dataset.time_field if origin == TIME else field,
        kind=kind,
        origin=origin,
        within=within,
        scales=_read_scales(entry.get("scales"), kind, origin, location),
    )


def _find_origin(field: str, dataset: Dataset) -> tuple[str, str]:
    """Find where the values of a field are, and whether they are categories or numbers.

    Args:
        field: name of a field, as given in the option ``relations``. A field of the dataset is
            preferred to the built-in ones, time and position.
        dataset: says which fields exist, in which file and of which type.

    Returns:
        The file of the dataset that has it (item, user or inter), or ``TIME`` or ``POSITION``; and
        ``categorical`` for tokens or ``numerical`` for floats.

    Raises:
        UsageError: if there is no such field, or if it is an id of users or items or of another
            type.
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
    return table, kinds[field_type]


def _check_within(within: Any, origin: str, kind: str, dataset: Dataset, location: str) -> None:
    """Check the second field of an entry such as {field: price, within: category}.

    The entry relates two items by their prices, but only if they have a category in common. So the
    first field must hold numbers, and the second one tokens (names). Both must be fields of items,
    or both of users.

    Args:
        within: the name of the second field, as given.
        origin: what the first field is of: item, user or inter (interactions), or ``POSITION`` or
            ``TIME``, which every interaction has.
        kind: whether the first field is ``numerical`` or ``categorical``.
        dataset: says which fields exist, and of which type.
        location: the entry, with which messages begin.

    Raises:
        UsageError: if the dataset has no such field, or the two do not fit together.
    """
    within_origin = map_fields_to_tables(dataset).get(within)  # item, user or inter
    if within_origin is None:
        raise UsageError(f"{location}: within: {explain_not_loaded(within, dataset)}")

    within_type = dataset.kinds[within]
    has_numbers, has_tokens = kind == "numerical", within_type in ("token", "token_seq")
    is_same_table = within_origin == origin and origin in ("item", "user")
    if not (has_numbers and has_tokens and is_same_table):
        raise UsageError(
            f"{location}: within: needs a float field, and a token or token_seq field of the same "
            f"table, item or user; the relation is of a {kind} field of {origin}, and "
            f"{shown(within)} is a {within_type} field of {within_origin}"
        )


def _read_scales(scales: Any, kind: str, origin: str, location: str) -> tuple[float, ...]:
    """Read the key ``scales`` of an entry such as {field: age, scales: [1, 5]}.

    Two numbers, such as the ages of two users, are related by exp(-difference / scale): the larger
    the scale, the more slowly the relation falls as the difference grows. With several scales, the
    relation is the mean. The paper calls a scale r_norm (AttrFormer, Liu et al., KDD 2025, equation
    10).

    Args:
        scales: the value of the key: a number above 0, a list of such, or None if it is not given.
        kind: ``numerical`` for a field of numbers; ``categorical`` for one of tokens, which have no
            differences and no scales.
        origin: where the values of the field are, a file of the dataset (item, user or inter) or a
            built-in field: ``POSITION`` or ``TIME``, the times of interactions in seconds.
        location: where the entry is, for example "relations: age"; error messages begin with it.

    Returns:
        The scales, in the order given. The default is an hour and a day for times
        (``TIME_SCALES``), 1 for other numbers, and none for a categorical field.

    Raises:
        UsageError: if a value is not a number above 0, or the field is categorical.
    """
    if scales is None:
        defaults = TIME_SCALES if origin == TIME else (1.0,)
        return defaults if kind == "numerical" else ()

    values = scales if isinstance(scales, (list, tuple)) else [scales]
    are_positive = len(values) > 0 and all(is_number(x) and x > 0 for x in values)
    if kind == "categorical" or not are_positive:
        raise UsageError(
            f"{location}: scales: expected numbers above 0 (r_norm), for a float field; found "
            f"{shown(scales)} for a {kind} one"
        )
    return tuple(float(scale) for scale in values)


@dataclass(frozen=True)
class RelationTable:
    """Classes of entities and how they are related.

    Attributes:
        class_of: [entities] int64 class of each entity, from 1; 0 where the attribute is missing.
        indptr: [classes + 1] index in ``related`` where the related classes of each class begin, as
            in scipy's sparse matrices; class 0 has none.
        related: [pairs] int64 related classes of each class, the most similar first.
        values: [pairs] float64 the relation, S of equation 1.
        self_relation: [classes] float64 relation of each class to itself, 0 for class 0.
    """

    class_of: np.ndarray
    indptr: np.ndarray
    related: np.ndarray
    values: np.ndarray
    self_relation: np.ndarray

    def classify(self, entities: np.ndarray) -> np.ndarray:
        """Return the class [m] int64 of each entity, 0 for one without a value.

        Entities [m] are items, users or interactions, by number. Those from outside the dataset
        have higher numbers than those in it, and class 0.
        """
        return take_or_fill(self.class_of, entities, 0)

    @classmethod
    def from_matrix(cls, class_of: np.ndarray, matrix: sp.csr_matrix) -> RelationTable:
        """Build a table that lists for each class its related classes, the strongest first.

        A class is all entities (items, users or interactions) with the same value of a field, such
        as the same categories. Let class 1 be {a}, class 2 {a, b} and class 3 {b}, related by how
        many categories they share. The table lists 1, 2 for class 1; 2, 1, 3 for class 2; and 3, 2
        for class 3. Of equal relations, such as 1 to {a} and 1 to {a, b}, the class with the
        smaller relation to itself goes first: {a} with 1, before {a, b} with 2.

        Args:
            class_of: [entities] int64 class of each entity, 0 for none; the table keeps it.
            matrix: [classes, classes] symmetric relations; those below ``WEAKEST`` are left out.
        """
        self_relation = matrix.diagonal()
        matrix = matrix.tocoo()  # three arrays: row, column and value of each entry
        is_kept = matrix.data >= WEAKEST
        row, col, value = matrix.row[is_kept], matrix.col[is_kept], matrix.data[is_kept]

        # Sort the entries by row, then the largest value first, then the column whose class has the
        # smaller relation to itself, then by column. ``lexsort`` takes its keys in reverse.
        order = np.lexsort((col, self_relation[col], -value, row))
        row, col, value = row[order], col[order], value[order]

        # row i has the entries indptr[i] to indptr[i + 1] - 1: in the example [0, 0, 2, 5, 7]
        indptr = np.searchsorted(row, np.arange(matrix.shape[0] + 1))
        return cls(class_of, indptr, col.astype(np.int64), value, self_relation)


def take_or_fill(values: np.ndarray, index: np.ndarray, fill_value: float) -> np.ndarray:
    """Return the values at some indices, and ``fill_value`` where an index is past the last value.

    That happens for histories from outside the dataset, whose users and interactions are numbered
    on from those of the log. Values 5, 6 at the indices 1, 0, 2 and a fill of 0 give 6, 5, 0.

    Args:
        values: [n] values.
        index: [m] int64 indices, which may be n or more.
        fill_value: what stands for a value that does not exist.

    Returns:
        [m] in the type of ``values``.
    """
    result = np.full(len(index), fill_value, dtype=values.dtype)
    is_known = index < len(values)
    result[is_known] = values[index[is_known]]
    return result


def number_token_sets(column: np.ndarray) -> tuple[np.ndarray, sp.csr_matrix]:
    """Number the different sets of tokens of a column: entities with equal sets are one class.

    For example, four items have the tokens [3, 5], [5, 3, 5], [5] and none. Their classes are
    2, 2, 1 and 0: class 1 is the set {5}, and class 2 is {3, 5}.

    Args:
        column: [entities] tokens, or [entities, s] lists of at most s tokens; 0 stands for none.

    Returns:
        [entities] int64 class of each entity, 0 for no token; and a sparse matrix [classes, tokens]
        that is 1 where a set has a token.
    """
    # Write each list as a row with its tokens once, ascending, after zeros: 5, 3, 5 is sorted to
    # 3, 5, 5; the repeated 5 becomes 0; sorted again, that is 0, 3, 5.
    rows = np.sort(column.reshape(len(column), -1).astype(np.int64))
    is_repeated = rows[:, 1:] == rows[:, :-1]
    rows[:, 1:][is_repeated] = 0
    rows = np.sort(rows)

    # The different rows are the sets, numbered in ascending order: 0, 0, 0; 0, 0, 5; 0, 3, 5. A row
    # of zeros is added first, so that class 0 has no token even if every entity has one.
    rows = np.pad(rows, ((1, 0), (0, 0)))
    sets, class_of_rows = np.unique(rows, axis=0, return_inverse=True)
    class_of_entities = class_of_rows.reshape(-1)[1:]  # without the added row

    # the matrix has an entry 1 for each token of each set
    set_index, place = np.nonzero(sets)
    token = sets[set_index, place]
    shape = len(sets), int(sets.max()) + 1
    is_in_set = sp.csr_matrix((np.ones(len(token)), (set_index, token)), shape=shape)
    return class_of_entities, is_in_set


def relate_categorical(hot: sp.csr_matrix, name: str) -> sp.csr_matrix:
    """Return how many tokens each two sets of tokens share (AttrFormer, equation 10).

    For example, of the sets {book}, {book, art} and {art}, called classes, the first and the second
    share one token, the second and itself two, the first and the third none.

    Args:
        hot: [classes, tokens] sparse, 1 where a class has a token.
        name: name of the field, for the message.

    Returns:
        Sparse matrix [classes, classes].
    """
    # a token that c classes have relates c * c pairs of them; too many pairs are a UsageError
    token_counts = np.bincount(hot.indices).astype(float)
    _require_few_pairs(float(token_counts @ token_counts), name)
    return (hot @ hot.T).tocsr()


def similarity(difference: np.ndarray, scales: Sequence[float]) -> np.ndarray:
    """Return exp(-abs(difference) / scale), the mean over scales (AttrFormer, equation 10)."""
    return sum(np.exp(-np.abs(difference) / scale) for scale in scales) / len(scales)


def number_values(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the different values of a float column: entities with equal numbers are one class.

    The numbers 9.5, 3.0, NaN, 9.5, for example, have the classes 2, 1, 0, 2, and the numbers of the
    classes 0, 1, 2 are NaN, 3.0, 9.5.

    Args:
        column: [entities] float64 numbers.

    Returns:
        [entities] int64 classes, 0 where the number is not finite (missing); and the float64
        number of each class [classes], NaN for class 0.
    """
    # ``factorize`` numbers the values from 0, in ascending order, and gives NaN the number -1
    number, values = pd.factorize(np.where(np.isfinite(column), column, np.nan), sort=True)
    return number + 1, np.append(np.nan, values)


def relate_numerical(values: np.ndarray, scales: Sequence[float], name: str) -> sp.csr_matrix:
    """Relate every two numbers z that are near enough to each other: by exp(-|z_i - z_j| / scale).

    That is equation 10 of AttrFormer (Liu et al., KDD 2025), averaged over the scales. Pairs of
    numbers that are so far apart that it is below ``WEAKEST`` have no entry.

    Args:
        values: [classes] float64 the different numbers of a field, rising, after NaN for class 0,
            which has no number. A class is, for example, all items of one price.
        scales: one or more scales, which the paper calls r_norm.
        name: name of the field, for the message.

    Returns:
        Symmetric sparse matrix [classes, classes], without relations of class 0.

    Raises:
        UsageError: if there are too many pairs.
    """
    # Class i is near enough to the classes ``first[i]`` to ``end[i] - 1``, neighbours of it, since
    # numbers rise. For the values NaN, 3, 4, 9 and a reach of 2, classes 1, 2 and 3 have the
    # ``first`` 1, 1, 3 and the ``end`` 3, 3, 4.
    numbers = values[1:]
    reach = max(scales) * -np.log(WEAKEST)  # the difference at which exp(...) is ``WEAKEST``
    first = 1 + np.searchsorted(numbers, numbers - reach, "left")
    end = 1 + np.searchsorted(numbers, numbers + reach, "right")
    num_near = end - first
    _require_few_pairs(float(num_near.sum()), name)

    # all pairs of classes that are near enough: i is 1, 1, 2, 2, 3 and j is 1, 2, 1, 2, 3
    i = np.repeat(np.arange(1, len(values)), num_near)
    j = gather_index(first, num_near)  # ``num_near`` consecutive classes from each ``first`` on
    relation = similarity(values[i] - values[j], scales)  # the mean of exp(...) over scales
    return sp.csr_matrix((relation, (i, j)), shape=(len(values), len(values)))


def join_classes(by_attribute: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Number the combinations of classes: entities that agree in all attributes share one.

    For example, three entities have the classes 1, 1, 2 by brand and 4, 5, 4 by price. Then they
    are of the combinations 1, 2, 3, which are (1, 4), (1, 5) and (2, 4).

    Args:
        by_attribute: the class [entities] of each entity, an array for each attribute.

    Returns:
        [entities] int64 combination of each entity, from 1; and [combinations + 1, attributes] the
        classes that each combination is made of, with a first row of zeros for combination 0.
    """
    rows, index = np.unique(np.stack(by_attribute, 1), axis=0, return_inverse=True)
    return index.reshape(-1) + 1, np.concatenate((np.zeros_like(rows[:1]), rows))


def relate_members(classes: np.ndarray, matrix: sp.csr_matrix, name: str) -> sp.csr_matrix:
    """Relate n things as their classes are: entry i, j is ``matrix[classes[i], classes[j]]``.

    For example, ``matrix`` relates brands, and three products have the brands 1, 1, 2. The first
    product is related to the three with ``matrix[1, 1]``, ``matrix[1, 1]`` and ``matrix[1, 2]``.

    Args:
        classes: [n] int64 class of each thing; class 0 has no relation.
        matrix: [classes, classes] sparse relations of classes, not negative.
        name: name of the field, for the message.

    Returns:
        Sparse matrix [n, n].

    Raises:
        UsageError: if more than ``MAX_PAIRS`` pairs of things are related, for lack of memory.
    """
    # Count the pairs before they are made. Related classes with 3 and 5 things make 3 * 5 pairs, so
    # the number is the sum of size_i * size_j over all related classes i and j.
    sizes = np.bincount(classes, minlength=matrix.shape[0]).astype(float)
    is_related = matrix > 0
    num_pairs = sizes @ is_related @ sizes
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

    That is R^U (AttrFormer, Liu et al., KDD 2025, section 3.1.3). For example, of the users (f,
    30), (f, 31), (m, 30) the first two are related by gender with 1 and by age with exp(-1) = 0.37,
    so 0.68 on average; the first and the third with 0 and 1, so 0.5. A missing attribute counts 0.
    Users that agree in all attributes, a *combination*, have the same relations to others, so the
    table relates combinations.

    Args:
        relations: the entries of the option ``relations`` that are of users, such as gender, age.
        dataset: dataset with the fields.

    Returns:
        The table, or None without relations of users.
    """
    if not relations:
        return None
    # For each attribute the class of every user [users], 1, 1, 2 by gender in the example; and how
    # strongly every two of these classes are related, a sparse matrix [classes, classes].
    class_of_users, matrices = zip(*(relate_classes(x, dataset) for x in relations), strict=True)
    # The combination of every user [users]; and the classes that each combination is made of
    # [combinations, attributes], in the example (1, 1), (1, 2) and (2, 1).
    combination_of, combinations = join_classes(class_of_users)

    # The sum over attributes. ``relate_members`` returns a matrix [combinations, combinations]: its
    # entry i, j is the entry of ``matrix`` for the two classes of the combinations i and j.
    name = " and ".join(relation.field for relation in relations)
    total = sp.csr_matrix((len(combinations), len(combinations)))
    for classes, matrix in zip(combinations.T, matrices, strict=True):
        total = total + relate_members(classes, matrix, name)
    return RelationTable.from_matrix(combination_of, total / len(relations))


def relate_classes(relation: Relation, dataset: Dataset) -> tuple[np.ndarray, sp.csr_matrix]:
    """Divide items, users or interactions into classes of equal values, and relate the classes.

    Items of the prices 5, 7, 5, for example, are of the classes 1, 2, 1. How strongly two classes
    are related is equation 10 of AttrFormer (Liu et al., KDD 2025): for numbers such as prices
    exp(-difference / scale), for sets of tokens such as categories how many tokens they share.

    Args:
        relation: an entry of the option ``relations``: the ``field`` whose values are compared,
            their ``kind`` (numerical, or categorical for tokens), and the file that has them
            (``origin``). If it names a second field (``within``), only items or users that share a
            token of that are related.
        dataset: where the values are read.

    Returns:
        [entities] int64 class of each item, user or interaction, 0 for a missing value; and the
        sparse matrix [classes, classes] of relations. More than ``MAX_PAIRS`` are a UsageError.
    """
    column = read_column(relation.field, relation.origin, dataset)
    if relation.kind == "categorical":
        class_of, sets = number_token_sets(column)
        return class_of, relate_categorical(sets, relation.field)
    if relation.within is not None:
        condition = read_column(relation.within, relation.origin, dataset)
        return _relate_within(column, condition, relation)
    class_of, numbers = number_values(column)
    return class_of, relate_numerical(numbers, relation.scales, relation.field)


def _relate_within(
    column: np.ndarray, condition: np.ndarray, relation: Relation
) -> tuple[np.ndarray, sp.csr_matrix]:
    """Relate items or users by a number, but only those that share a token of a second field.

    With {field: price, within: category}, for example, two items are related by their prices if
    they have a category in common. Items of the same price and the same set of categories have the
    same relations to others, and are a class. For example, three items are

        price         5     7     5
        categories    {b}   {b}   {b, c}
        class         1     3     2

    Args:
        column: [entities] float64 numbers, such as prices.
        condition: [entities] tokens of the second field, or [entities, s] lists of tokens.
        relation: an entry of the option ``relations``, for its scales and the name of its field.

    Returns:
        [entities] int64 class of each item or user; and the sparse matrix [classes, classes] of
        relations.
    """
    # Names below are those of the example. The different prices, 5 and 7, get the numbers 1 and 2,
    # and so do the different sets, {b} and {b, c}; the number 0 is for none. So the items have the
    # price numbers 1, 2, 1 and the set numbers 1, 1, 2.
    price_number, prices = number_values(column)
    set_number, sets = number_token_sets(condition)

    # The different pairs of these numbers are the classes 1, 2, 3: (1, 1), (1, 2) and (2, 1). So
    # the classes have the prices 5, 5, 7 and the sets number 1, 2, 1.
    class_of_items, pairs = join_classes([price_number, set_number])
    price_of_classes, set_of_classes = prices[pairs[:, 0]], pairs[:, 1]

    # How many categories every two sets share, and from that how many every two classes share: a
    # sparse matrix [classes, classes], with entries only for classes i, j that share one or more.
    shared_by_sets = relate_categorical(sets, relation.field)
    shared = relate_members(set_of_classes, shared_by_sets, relation.field)
    i, j = shared.nonzero()

    # these classes are related by their prices; without a price, which is NaN, the relation is 0
    strength = similarity(price_of_classes[i] - price_of_classes[j], relation.scales)
    strength = np.nan_to_num(strength)
    return class_of_items, sp.csr_matrix((strength, (i, j)), shape=shared.shape)
