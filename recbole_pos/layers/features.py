"""Fields of items, users and interactions as vectors that are joined with item vectors.

m is a number of items or interactions, s the length of the longest list of tokens among them, d the
size of vectors. A missing value has the vector zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, embedding_bag

from recbole_pos.layers.sequence_batch import SequenceBatch

FREQUENCIES = 16  # k of ``PeriodicField``


class TokenField(nn.Module):
    """A vector for each token; a list has the mean of its tokens' vectors.

    A token is one of a field's distinct values, numbered from 1.

    Args:
        num_tokens: number of tokens, padding included.
        size: d.
        std: standard deviation of fresh vectors.
        is_list: whether values are lists; a loaded checkpoint overwrites it.
    """

    numeric = False
    is_list: Tensor

    def __init__(self, num_tokens: int, size: int, std: float, is_list: bool = False) -> None:
        """Create the table of vectors; token 0, which stands for no value, has the vector zero."""
        super().__init__()
        self.register_buffer("is_list", torch.tensor(is_list))
        self.table = nn.Parameter(torch.randn(num_tokens, size) * std)
        with torch.no_grad():
            self.table[0] = 0

    def forward(self, values: Tensor) -> Tensor:
        """Return the vectors of tokens, or the mean vectors of lists of tokens.

        Args:
            values: [m] int64 tokens, or [m, s] lists padded with 0. Token 0 has the vector zero and
                does not count in a mean.

        Returns:
            [m, d].
        """
        if values.dim() == 1:
            return embedding(values, self.table, padding_idx=0)
        if not torch.compiler.is_compiling():
            return embedding_bag(values, self.table, mode="mean", padding_idx=0)
        # the same written out, as a graph of symbolic sizes cannot have embedding_bag
        total = embedding(values, self.table, padding_idx=0).sum(1)
        return total / (values > 0).sum(1, keepdim=True).clamp(min=1)


class PeriodicField(nn.Module):
    """Embeds a number as W [sin(2 pi c_l z), cos(2 pi c_l z)] / sqrt(k) + b.

    z is the number, less the mean and divided by the deviation of ``numbers``. c_1 to c_k are
    learned frequencies, with k = ``FREQUENCIES``, and W and b those of a linear layer.

    Reference:
        Yury Gorishniy, Ivan Rubachev, Artem Babenko. "On Embeddings for Numerical Features in
        Tabular Deep Learning." NeurIPS 2022, section 3.2.

    Args:
        numbers: [n] finite numbers of the training part; empty if a checkpoint gives their mean and
            deviation.
        size: d.
    """

    numeric = True
    scale: Tensor

    def __init__(self, numbers: np.ndarray, size: int) -> None:
        """Create the parameters c, W and b that embed a number as a vector.

        A number is standardised to z = (number - mean) / deviation. Its vector [d] is

            W [sin(2 pi c_1 z), ..., sin(2 pi c_k z), cos(2 pi c_1 z), ...] / sqrt(k) + b

        with k = ``FREQUENCIES`` learned frequencies c. There is a sine and a cosine for each, so W
        has 2k columns.

        Args:
            numbers: [n] finite numbers, of which mean and deviation are taken. Without any these
                are 0 and 1 until a checkpoint overwrites them.
            size: d, the size of a vector.
        """
        super().__init__()
        scale = [0.0, 1.0]  # mean and deviation
        if len(numbers):
            scale = [numbers.mean(), numbers.std() or 1.0]  # 1.0: all numbers are equal
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.get_default_dtype()))
        self.frequency = nn.Parameter(torch.randn(FREQUENCIES))  # c [k]
        self.linear = nn.Linear(2 * FREQUENCIES, size)  # W [d, 2k] and b [d]

    def forward(self, values: Tensor) -> Tensor:
        """Embed numbers, such as prices, as vectors, by sines and cosines of learned frequencies.

        A number is standardised to z = (number - mean) / deviation. With k learned frequencies c
        (``frequency``) and a linear layer W, b its vector is

            W [sin(2 pi c_1 z), ..., sin(2 pi c_k z), cos(2 pi c_1 z), ...] / sqrt(k) + b

        Args:
            values: [m] numbers, NaN where missing.

        Returns:
            [m, d], zero for a missing number.
        """
        is_missing = values.isnan()
        mean, deviation = self.scale.unbind()
        z = (values.masked_fill(is_missing, 0).to(mean) - mean) / deviation
        angle = 2 * math.pi * z[:, None] * self.frequency
        waves = torch.cat((angle.sin(), angle.cos()), 1) / math.sqrt(FREQUENCIES)
        vectors: Tensor = self.linear(waves)
        return vectors.masked_fill(is_missing[:, None], 0)


class FeatureFusion(nn.Module):
    """Join vectors F_1 to F_k of fields with a vector x.

    ``sum`` is x + F_1 + ... + F_k, ``concat_mlp`` x + W_2 gelu(W_1 [x, F_1, ..., F_k] + b_1) + b_2.
    """

    def __init__(self, num_fields: int, size: int, fusion: str) -> None:
        """Create the network that joins the vectors, unless they are only added up.

        Args:
            num_fields: k, number of vectors that are joined with x.
            size: d, size of all vectors.
            fusion: ``concat_mlp`` for a network of two layers, ``sum`` for none.
        """
        super().__init__()
        layers = (nn.Linear((num_fields + 1) * size, size), nn.GELU(), nn.Linear(size, size))
        self.mlp = nn.Sequential(*layers) if fusion == "concat_mlp" else None

    def forward(self, x: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """Join vectors of fields with item vectors: by a sum, or by a network, as options say.

        Args:
            x: [m, d] item vectors.
            vectors: k vectors [m, d], one for each field.

        Returns:
            [m, d]: x plus the k vectors; or, if there is a network (``mlp``), x plus its output for
            x and the k vectors side by side.
        """
        if self.mlp is not None:
            return x + self.mlp(torch.cat((x, *vectors), -1))
        return sum(vectors, x)


class EventFeatures(nn.Module):
    """Join the fields of interactions and of their users with the items' vectors.

    Attributes:
        events, users: names of the fields of interactions and of users.
        fields: modules that embed them, those of ``events`` first, in the order of the names.
        fusion: what joins the vectors of an interaction.
    """

    def __init__(
        self,
        events: Mapping[str, nn.Module],
        users: Mapping[str, nn.Module],
        size: int,
        fusion: str,
    ) -> None:
        """Keep the modules that make vectors of fields, and create what joins the vectors.

        Args:
            events, users: the module of each field of interactions and of users, by its name. It
                makes a vector of a value of the field.
            size: d, size of all vectors.
            fusion: how they are joined: ``sum`` adds them up, ``concat_mlp`` sends them through a
                network of two layers.
        """
        super().__init__()
        self.events, self.users = list(events), list(users)
        self.fields = nn.ModuleList([*events.values(), *users.values()])
        self.fusion = FeatureFusion(len(self.fields), size, fusion)

    def by_table(self) -> dict[str, dict[str, Any]]:
        """Return the modules that embed fields, those of interactions and those of users apart.

        ``events`` and ``users`` have the names of these fields, and ``fields`` the modules of all,
        in the order of the names.

        Returns:
            {"events": {name: module, ...}, "user": {name: module, ...}}.
        """
        by_name = dict(zip([*self.events, *self.users], self.fields, strict=True))
        return {
            "events": {name: by_name[name] for name in self.events},
            "user": {name: by_name[name] for name in self.users},
        }

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Join item vectors with the fields of the interactions and of their users.

        Each value of a field, such as the price paid or the user's age, is embedded as a vector by
        the field's module. ``fusion`` joins all vectors of an interaction.

        Args:
            x: [m, d] vector of each interaction's item.
            batch: has the values of the fields. A field without values in the batch counts as
                missing, with the vector zero.

        Returns:
            [m, d].
        """
        zeros = torch.zeros_like(x)
        vectors = []
        tables = self.by_table()
        for name, embed in tables["events"].items():
            values = batch.features.events.get(name)
            vectors.append(zeros if values is None else embed(values))
        for name, embed in tables["user"].items():
            values = batch.features.users.get(name)
            # the vector of a user goes to all interactions of the history
            vectors.append(zeros if values is None else embed(values)[batch.row])
        return self.fusion(x, vectors)


class ItemFeatures(nn.Module):
    """Join the fields of items with their vectors.

    Args:
        fields: embedding of each field, by its name.
        columns: values of all items, by field.
        size: d.
        fusion: see :class:`FeatureFusion`.
    """

    def __init__(
        self, fields: Mapping[str, nn.Module], columns: Mapping[str, Tensor], size: int, fusion: str
    ) -> None:
        """Keep the fields of all items, and the modules that make vectors of their values.

        Args:
            fields: the module of each field, such as a brand, by its name.
            columns: values by field: [items] numbers or tokens, or [items, s] lists of tokens.
            size: d, size of all vectors.
            fusion: how they are joined with item vectors: ``sum`` adds them up, ``concat_mlp``
                sends them through a network of two layers.
        """
        super().__init__()
        self.fields = nn.ModuleList(fields.values())
        self.fusion = FeatureFusion(len(fields), size, fusion)
        for index, name in enumerate(fields):
            # not in checkpoints: they are read from the dataset
            self.register_buffer(f"values_{index}", columns[name], persistent=False)

    def forward(self, vectors: Tensor, items: Tensor | None) -> Tensor:
        """Join item vectors with the fields of the items, such as their brands.

        Each value of a field is embedded as a vector by the field's module. ``fusion`` joins all
        vectors of an item. ``values_0``, ``values_1``, ... have the values of each field.

        Args:
            vectors: [..., d] vectors of ``items``.
            items: [...] int64 ids, or None for all items in the order of their ids.

        Returns:
            [..., d].
        """
        embedded = []
        for index, embed in enumerate(self.fields):
            column = getattr(self, f"values_{index}")  # of all items
            column = column if items is None else column[items.reshape(-1)]
            embedded.append(embed(column).view_as(vectors))
        return self.fusion(vectors, embedded)

    def extend(self, vectors: Any) -> None:
        """Add new items, whose fields, such as a genre or a price, are all missing.

        A missing number is NaN, a missing token 0.

        Args:
            vectors: [k, c] content vectors of k new items. All parts of an item table are extended
                by these; fields are not made of them, so only their number is read here.
        """
        for index in range(len(self.fields)):
            # values of a field for all items, [items] or [items, s]: the buffers values_0, ...
            column = getattr(self, f"values_{index}")
            missing = math.nan if column.is_floating_point() else 0
            new_values = column.new_full((len(vectors), *column.shape[1:]), missing)
            setattr(self, f"values_{index}", torch.cat((column, new_values)))
