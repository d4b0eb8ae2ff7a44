"""Fields of items, users and interactions as vectors that are added to item vectors.

m is a number of items or interactions, s the length of the longest list of tokens among them, d the
size of vectors. A missing value has the vector zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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


class EventFeatures(nn.Module):
    """Add the fields of interactions and of their users to the items' vectors.

    Attributes:
        events, users: names of the fields of interactions and of users.
        fields: modules that embed them, those of ``events`` first, in the order of the names.
    """

    def __init__(self, events: Mapping[str, nn.Module], users: Mapping[str, nn.Module]) -> None:
        """Keep the modules that make vectors of fields.

        Args:
            events, users: the module of each field of interactions and of users, by its name. It
                makes a vector of a value of the field.
        """
        super().__init__()
        self.events, self.users = list(events), list(users)
        self.fields = nn.ModuleList([*events.values(), *users.values()])

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
        """Add the fields of the interactions and of their users to item vectors.

        Each value of a field, such as the price paid or the user's age, is embedded as a vector by
        the field's module. All vectors of an interaction are added up.

        Args:
            x: [m, d] vector of each interaction's item.
            batch: has the values of the fields. A field without values in the batch counts as
                missing, and adds nothing.

        Returns:
            [m, d].
        """
        tables = self.by_table()
        for name, embed in tables["events"].items():
            if name in batch.features.events:
                x = x + embed(batch.features.events[name])
        for name, embed in tables["user"].items():
            if name in batch.features.users:
                # the vector of a user goes to all interactions of the history
                x = x + embed(batch.features.users[name])[batch.row]
        return x


class ItemFeatures(nn.Module):
    """Add the fields of items to their vectors.

    Args:
        fields: embedding of each field, by its name.
        columns: values of all items, by field.
    """

    def __init__(self, fields: Mapping[str, nn.Module], columns: Mapping[str, Tensor]) -> None:
        """Keep the fields of all items, and the modules that make vectors of their values.

        Args:
            fields: the module of each field, such as a brand, by its name.
            columns: values by field: [items] numbers or tokens, or [items, s] lists of tokens.
        """
        super().__init__()
        self.fields = nn.ModuleList(fields.values())
        for index, name in enumerate(fields):
            # not in checkpoints: they are read from the dataset
            self.register_buffer(f"values_{index}", columns[name], persistent=False)

    def forward(self, vectors: Tensor, items: Tensor | None) -> Tensor:
        """Add the fields of items, such as their brands, to the vectors of the items.

        Each value of a field is embedded as a vector by the field's module. ``values_0``,
        ``values_1``, ... have the values of each field.

        Args:
            vectors: [..., d] vectors of ``items``.
            items: [...] int64 ids, or None for all items in the order of their ids.

        Returns:
            [..., d].
        """
        for index, embed in enumerate(self.fields):
            column = getattr(self, f"values_{index}")  # of all items
            column = column if items is None else column[items.reshape(-1)]
            vectors = vectors + embed(column).view_as(vectors)
        return vectors

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
