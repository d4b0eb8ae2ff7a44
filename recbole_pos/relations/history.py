"""Relations within histories outside the dataset, as traceable modules for export.

They compute what ``lookup.py`` does for a single history, for relations of items, their order and
their times. Rows are padded on the right to [b, t], and matrices of relations are dense: an
interaction reads the k strongest older interactions of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.padded import PaddedContext
from recbole_pos.layers.relations import BatchRelations
from recbole_pos.relations.declare import POSITION, TIME, Relation
from recbole_pos.relations.lookup import RelationLookup, TableRelation
from recbole_pos.relations.tables import WEAKEST, RelationTable

FAR = 1 << 52  # above any order of sources, and exact in float64


@dataclass(frozen=True)
class BlockProduct:
    """The product of dense relations ``weight`` [b, M, t, t] with states, row by row.

    It has the interface of ``SparseProduct``.
    """

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [M * b * t, d] with states x [b * t, d]."""
        b, num_relations, t, _ = self.weight.shape
        product = self.weight.to(x.dtype) @ x.view(b, 1, t, x.size(-1))
        return product.transpose(0, 1).reshape(num_relations * b * t, x.size(-1))


class TableLookup(nn.Module):
    """Look up relations of items and their order of preference in a table, by bisection.

    ``codes`` are reader class * number of classes + source class, ascending; ``values`` and
    ``preference`` are in that order.
    """

    group: Tensor
    codes: Tensor
    values: Tensor
    preference: Tensor

    def __init__(self, table: RelationTable) -> None:
        """Sort the entries of the table by (reader class, source class) as one number."""
        super().__init__()
        sizes = np.diff(table.indptr)
        self.num_classes = len(sizes)
        reader = np.repeat(np.arange(self.num_classes), sizes)
        codes = reader * self.num_classes + table.classes
        preference = np.arange(len(codes)) - table.indptr[reader]
        by_code = np.argsort(codes)
        buffers = {
            "group": table.group,
            # with a code above all others, so that the table is never empty
            "codes": np.append(codes[by_code], self.num_classes**2),
            "values": np.append(table.values[by_code], 0.0),
            "preference": np.append(preference[by_code], 0),
        }
        for name, array in buffers.items():
            self.register_buffer(name, torch.from_numpy(array), persistent=False)

    def forward(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the relations of all pairs of items [b, t] of a row, reader by source.

        Returns:
            [b, t, t] float64 relations, 0 for none; and [b, t, t] int64 place of the source's class
            in the reader's order of preference, from 0.
        """
        group = self.group[items]
        code = group[:, :, None] * self.num_classes + group[:, None]
        index = torch.zeros_like(code)  # the last code that is not above, found bit by bit
        last = self.codes.size(0) - 1
        for bit in reversed(range(last.bit_length())):
            higher = index + (1 << bit)
            is_reached = self.codes[higher.clamp(max=last)] <= code
            index = torch.where((higher <= last) & is_reached, higher, index)
        value = torch.where(self.codes[index] == code, self.values[index], 0.0)
        return value, self.preference[index]


class HistoryRelations(nn.Module):
    """Compute the normalised relations of interactions to older interactions of their row.

    ``declared`` are the relations that ``lookup`` is made of, in the same order.

    Raises:
        UsageError: for relations of fields of interactions, or of users if some have no attribute.
    """

    def __init__(self, lookup: RelationLookup, declared: Sequence[Relation]) -> None:
        """Build a lookup for every relation of a table; times need none."""
        super().__init__()
        heads = [relation for relation in declared if relation.source != "user"]
        if fields := [relation.field for relation in heads if relation.table == "inter"]:
            raise UsageError(
                f"AttrFormer cannot be exported with relations of {', '.join(fields)}: a field of "
                "interactions, of which an exported model gets items and times only"
            )
        self.heads = heads
        self.k = lookup.top_k
        tables = {
            str(index): TableLookup(relation.table)
            for index, relation in enumerate(lookup.heads)
            if isinstance(relation, TableRelation)
        }
        self.tables = nn.ModuleDict(tables)
        self.self_relation = _compute_self_relation(lookup)

    @property
    def needs_time(self) -> bool:
        """Whether a relation is one of times."""
        return any(relation.table == TIME for relation in self.heads)

    def forward(self, ctx: PaddedContext) -> BatchRelations:
        """Return the normalised relations of a batch of padded rows."""
        weights = [self._normalise(*self._relate(index, ctx)) for index in range(len(self.heads))]
        heads = BlockProduct(torch.stack(weights, 1)) if weights else None
        return BatchRelations(heads, None if self.self_relation is None else self._aggregate)

    def _aggregate(self, x: Tensor) -> Tensor:
        """Return states times Norm(R^U), which is the relation of a history's user to itself."""
        assert self.self_relation is not None
        return x * self.self_relation

    def _relate(self, index: int, ctx: PaddedContext) -> tuple[Tensor, Tensor]:
        """Return relations [b, t, t] float64 and the order [b, t, t] int64 of sources to read."""
        b, t = ctx.batch_size, ctx.width
        relation = self.heads[index]
        position = torch.arange(t, device=ctx.lengths.device)
        back = (position[:, None] - position).expand(b, t, t)
        if str(index) in self.tables:
            assert ctx.items is not None
            value, preference = self.tables[str(index)](ctx.items.view(b, t))
            return value, preference * ctx.max_length + back  # of one class the nearest first
        if relation.table == POSITION:
            difference = back.double()
        else:
            times = ctx.elapsed.view(b, t)
            difference = times[:, :, None] - times[:, None]
        terms = [torch.exp(-difference.abs() / scale) for scale in relation.scales]
        value = sum(terms[1:], terms[0]) / len(terms)
        # positions and times rise, so the nearest k are the strongest
        return value.masked_fill((value < WEAKEST) | (back > self.k), 0), back

    def _normalise(self, value: Tensor, order: Tensor) -> Tensor:
        """Return [b, t, t] D^-1/2 R D^-1/2 of the k first relations to older interactions."""
        position = torch.arange(value.size(-1), device=value.device)
        is_older = position[:, None] > position
        order = order.masked_fill(~is_older | (value == 0), FAR)
        # topk fails on a history of fewer than k interactions
        padded = F.pad(order, (0, self.k), value=FAR)
        kth = -(-padded).topk(self.k, -1).values[..., -1:]  # the k-th lowest order
        value = value.masked_fill((order > kth) | (order == FAR), 0)
        degree = value.sum(-1).clamp(min=1)
        return value / (degree[:, :, None] * degree[:, None]).sqrt()


def _compute_self_relation(lookup: RelationLookup) -> float | None:
    """Return the normalised relation of all users to themselves; None without such relations."""
    if lookup.user_table is None:
        return None
    has_history = np.diff(lookup.offsets) > 0
    values = lookup.user_table.self_relation[has_history]
    values = np.where(values == 0, lookup.default_self_relation, values)
    normalised = np.unique(values / np.maximum(values, 1))  # by a degree of at least 1
    if len(normalised) > 1:
        raise UsageError(
            "AttrFormer cannot be exported with relations of users where some have no attribute: "
            "an exported model does not know whose history it reads"
        )
    return float(normalised[0])
