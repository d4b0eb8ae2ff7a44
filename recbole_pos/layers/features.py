"""Fields of items, users and interactions as vectors that join those of items.

m is a number of items or interactions, s the length of the longest list of tokens among them, d the
size of vectors. A value that is missing has the vector zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.item_table import ItemPart

FREQUENCIES = 16  # of a periodic embedding


@dataclass(frozen=True)
class Features:
    """Values of fields in a batch of m interactions in b sequences, by name of the field.

    Tokens are int64, 0 for none, lists of them [., s] with 0 behind; numbers are float, NaN for
    none.

    Attributes:
        events: [m] or [m, s], of interactions.
        users: [b] or [b, s], of the user of each sequence.
    """

    events: dict[str, Tensor] = field(default_factory=dict)
    users: dict[str, Tensor] = field(default_factory=dict)

    def map(
        self, events: Callable[[Tensor], Tensor], users: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Features:
        """Return them with every column of interactions, and of users, changed by a function."""
        return Features(
            {name: events(column) for name, column in self.events.items()},
            {name: users(column) for name, column in self.users.items()},
        )


class TokenField(nn.Module):
    """A vector for each token; of a list the mean.

    Args:
        tokens: how many there are, padding included.
        size: d.
        std: of fresh vectors.
        is_list: whether values are lists.
    """

    numeric = False
    is_list: Tensor

    def __init__(self, tokens: int, size: int, std: float, is_list: bool = False) -> None:
        super().__init__()
        self.register_buffer("is_list", torch.tensor(is_list))  # who loads a model asks for it
        self.table = nn.Parameter(torch.randn(tokens, size) * std)
        with torch.no_grad():
            self.table[0] = 0

    def forward(self, values: Tensor) -> Tensor:
        """[m, d] of tokens [m] or [m, s]."""
        if values.dim() == 1:
            return nn.functional.embedding(values, self.table, padding_idx=0)
        return embedding_bag(values, self.table, mode="mean", padding_idx=0)


class PeriodicField(nn.Module):
    """A number as W [sin(2 pi c_l z), cos(2 pi c_l z)] / sqrt(k), with k learned frequencies c_l.

    z is the number standardized by those that it was fitted to.

    Reference:
        Yury Gorishniy, Ivan Rubachev, Artem Babenko. "On Embeddings for Numerical Features in
        Tabular Deep Learning." NeurIPS 2022, section 3.2 (Periodic, L).

    Args:
        fitted: [n] numbers, NaN for none; None where mean and deviation are loaded afterwards.
        size: d.
    """

    numeric = True
    mean: Tensor
    deviation: Tensor

    def __init__(self, fitted: np.ndarray | None, size: int) -> None:
        super().__init__()
        known = np.zeros(0) if fitted is None else fitted[np.isfinite(fitted)]
        mean, deviation = (known.mean(), known.std() or 1.0) if len(known) else (0.0, 1.0)
        for name, value in (("mean", mean), ("deviation", deviation)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.get_default_dtype()))
        self.frequency = nn.Parameter(torch.randn(FREQUENCIES))
        self.linear = nn.Linear(2 * FREQUENCIES, size)

    def forward(self, values: Tensor) -> Tensor:
        """[m, d] of numbers [m]."""
        missing = values.isnan()
        z = (values.masked_fill(missing, 0).to(self.mean) - self.mean) / self.deviation
        angle = 2 * math.pi * z[:, None] * self.frequency
        waves = torch.cat((angle.sin(), angle.cos()), 1) / math.sqrt(FREQUENCIES)
        vectors: Tensor = self.linear(waves)
        return vectors.masked_fill(missing[:, None], 0)


class BinnedField(TokenField):
    """A vector for each quantile of a number.

    Args:
        fitted: as of :class:`PeriodicField`.
        bins: number of quantiles.
        size, std: as of :class:`TokenField`.
    """

    numeric = True
    edges: Tensor

    def __init__(self, fitted: np.ndarray | None, bins: int, size: int, std: float) -> None:
        super().__init__(bins + 1, size, std)
        known = np.zeros(0) if fitted is None else fitted[np.isfinite(fitted)]
        known = known if len(known) else np.zeros(1)
        edges = torch.from_numpy(np.quantile(known, np.arange(1, bins) / bins))
        self.register_buffer("edges", edges.to(torch.get_default_dtype()))

    def forward(self, values: Tensor) -> Tensor:
        """[m, d] of numbers [m]; one that equals an edge is above it."""
        place = torch.bucketize(values.to(self.edges), self.edges, right=True) + 1
        return super().forward(place.masked_fill(values.isnan(), 0))


class FeatureFusion(nn.Module):
    """Vectors of fields F_1 to F_k added to a vector x: x + sum_f F_f, or with an MLP.

    ``concat_mlp`` is x + W_2 gelu(W_1 [x, F_1, ..., F_k] + b_1) + b_2.

    Args:
        fields: k.
        size: d.
        fusion: ``sum`` or ``concat_mlp``.
    """

    def __init__(self, fields: int, size: int, fusion: str) -> None:
        super().__init__()
        layers = (nn.Linear((fields + 1) * size, size), nn.GELU(), nn.Linear(size, size))
        self.mlp = nn.Sequential(*layers) if fusion == "concat_mlp" else None

    def forward(self, x: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """[m, d] of x [m, d] and k vectors [m, d] in order."""
        if self.mlp is not None:
            return x + self.mlp(torch.cat((x, *vectors), -1))
        return sum(vectors, x)


class EventFeatures(nn.Module):
    """Fields of interactions and their users in the vectors of a history's items.

    Args:
        events: embedding of each field of interactions, by its name.
        users: the same of users.
        size: d.
        fusion: see :class:`FeatureFusion`.
    """

    def __init__(
        self, events: dict[str, nn.Module], users: dict[str, nn.Module], size: int, fusion: str
    ) -> None:
        super().__init__()
        self.events, self.users = list(events), list(users)
        self.fields = nn.ModuleList([*events.values(), *users.values()])
        self.fusion = FeatureFusion(len(self.fields), size, fusion)

    def by_table(self) -> dict[str, dict[str, Any]]:
        """Return embeddings by name, as a history has them: under ``events`` and ``user``."""
        fields = iter(self.fields)
        names = {"events": self.events, "user": self.users}
        return {of: {name: next(fields) for name in some} for of, some in names.items()}

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """[m, d] of items [m, d], with the fields that ``ctx`` has; others count as missing."""
        known = Features() if ctx.features is None else ctx.features
        values = [known.events.get(name) for name in self.events]
        values += [known.users.get(name) for name in self.users]
        vectors = []
        for place, (value, embed) in enumerate(zip(values, self.fields, strict=True)):
            vector = torch.zeros_like(x) if value is None else embed(value)
            of_users = value is not None and place >= len(self.events)
            vectors.append(vector[ctx.row] if of_users else vector)
        return self.fusion(x, vectors)


class ItemFeatures(ItemPart):
    """Fields of items in their vectors.

    Args:
        fields: embedding of each, by its name.
        columns: of each, the values of all items.
        size: d.
        fusion: see :class:`FeatureFusion`.
    """

    def __init__(
        self, fields: dict[str, nn.Module], columns: dict[str, Tensor], size: int, fusion: str
    ) -> None:
        super().__init__()
        self.fields = nn.ModuleList(fields.values())
        self.fusion = FeatureFusion(len(fields), size, fusion)
        for place, name in enumerate(fields):
            self.register_buffer(f"values_{place}", columns[name], persistent=False)

    def forward(self, vectors: Tensor, items: Tensor | None) -> Tensor:
        added = []
        for place, embed in enumerate(self.fields):
            values = getattr(self, f"values_{place}")
            values = values if items is None else values[items.reshape(-1)]
            added.append(embed(values).view_as(vectors))
        return self.fusion(vectors, added)
