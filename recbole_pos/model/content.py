"""Content vectors in a model: ``item_vectors`` and how they are used.

With e_i the vector of an item's id, c_i its content vector less the mean and scaled (or whitened),
t_i 1 for an item that has an interaction in training and 0 for any other, and
MLP(c) = W_2 gelu(W_1 c + b_1) + b_2, the vector of an item, at the input and in scores, is

======= ============================================================================
use     x_i
======= ============================================================================
init    e_i, which starts as c_i (of another size: its d first principal components)
add     t_i e_i + MLP(c_i)
replace MLP(c_i)
late    t_i e_i in one model and MLP(c_i) in a second one; a score is <h, x> of the
        first plus w times that of the second
======= ============================================================================

Mean, scale, whitening and components are of the items with a training interaction, and a loss
chooses among these only (but with init). So nothing of an item depends on which others have none.

Reference:
    Lingzi Zhang et al. "Are ID Embeddings Necessary? Whitening Pre-trained Text Embeddings for
    Effective Sequential Recommendation." ICDE 2024. (ZCA whitening)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.data.item_vectors import read_vectors, to_files
from recbole_pos.data.protocols import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.layers.item_table import ItemPart
from recbole_pos.values import Options, shown

_SHRINK = 1e-3  # of the mean variance, added to all: directions without any are not blown up
_ROWS = 1 << 14  # items that are transformed at a time


class Trained(ItemPart):
    """Items without a training interaction have no vector of their own: it would be noise.

    Args:
        trained: [n] bool, which items have one.
    """

    trained: Tensor

    def __init__(self, trained: Tensor) -> None:
        super().__init__()
        self.register_buffer("trained", trained[:, None], persistent=False)

    def forward(self, vectors: Tensor, items: Tensor | None) -> Tensor:
        return vectors * (self.trained if items is None else self.trained[items])

    def extend(self, vectors: np.ndarray) -> None:
        """Add items without a training interaction, one a vector."""
        self.trained = nn.functional.pad(self.trained, (0, 0, 0, len(vectors)))


class Content(ItemPart):
    """Add an MLP of the content vector.

    Args:
        statistics: that the vectors were transformed by.
        values: [n, c] transformed vectors.
        size: d.
        train: whether the vectors are trained, too.
    """

    values: Tensor

    def __init__(self, statistics: Statistics, values: np.ndarray, size: int, train: bool) -> None:
        super().__init__()
        self.statistics = statistics
        content = torch.from_numpy(values).to(torch.get_default_dtype())
        if train:
            self.values = nn.Parameter(content)
        else:
            self.register_buffer("values", content, persistent=False)
        self.inner, self.outer = nn.Linear(values.shape[1], size), nn.Linear(size, size)

    def forward(self, vectors: Tensor, items: Tensor | None) -> Tensor:
        content = self.values if items is None else nn.functional.embedding(items, self.values)
        return vectors + self.outer(nn.functional.gelu(self.inner(content)))

    def extend(self, vectors: np.ndarray) -> None:
        """Add items with vectors [k, c] as in a file.

        Raises:
            UsageError: if their size is another.
        """
        if vectors.shape[1] != self.inner.in_features:
            raise UsageError(
                f"item_vectors: vectors have {vectors.shape[1]:,} numbers, those that the model "
                f"was trained with {self.inner.in_features:,}; make them in the same way"
            )
        values = self.statistics.transform(vectors.copy())
        both = torch.cat((self.values.detach(), torch.from_numpy(values).to(self.values)))
        self.values = nn.Parameter(both, False) if "values" in self._parameters else both


@dataclass(frozen=True)
class Statistics:
    """How content vectors are transformed: (c - mean) @ matrix.

    Attributes:
        mean: [c].
        matrix: [c, k], or a number.
    """

    mean: np.ndarray
    matrix: Any

    def transform(self, values: np.ndarray) -> np.ndarray:
        """Transform [n, c] in place, or of another size into a new array; zeros stay zeros."""
        square = np.ndim(self.matrix) == 0 or len(set(self.matrix.shape)) == 1
        out = values if square else np.zeros((len(values), self.matrix.shape[1]), np.float32)
        for begin in range(0, len(values), _ROWS):
            part = values[begin : begin + _ROWS].astype(np.float64)
            given = part.any(1)
            moved = part[given] - self.mean
            moved = moved * self.matrix if np.ndim(self.matrix) == 0 else moved @ self.matrix
            out[begin : begin + _ROWS][given] = moved
        return out

    @classmethod
    def of(cls, values: np.ndarray, chosen: np.ndarray, whiten: bool, size: int = 0) -> Statistics:
        """Those of some vectors.

        Args:
            values: [n, c].
            chosen: [n] bool, which count; those that are zeros do not.
            whiten: whether components get variance 1 and no correlation (ZCA).
            size: principal components to keep; 0 for all numbers as they are.
        """
        rows = np.flatnonzero(chosen)
        rows = rows[values[rows].any(1)]
        c = values.shape[1]
        total, products, squares = np.zeros(c), np.zeros((c, c)), 0.0
        for part in np.array_split(rows, max(1, len(rows) // _ROWS)):
            block = values[part].astype(np.float64)
            total += block.sum(0)
            squares += (block**2).sum()
            if whiten or size:
                products += block.T @ block
        count = max(1, len(rows))
        mean = total / count
        if not (whiten or size):
            variance = (squares / count - (mean**2).sum()) / c
            return cls(mean, 1 / np.sqrt(variance) if variance > 1e-12 else 1.0)
        variances, axes = np.linalg.eigh(products / count - np.outer(mean, mean))
        variances, axes = variances[::-1].clip(0), axes[:, ::-1]  # the largest first
        scale = 1 / np.sqrt(variances + _SHRINK * variances.mean() + 1e-12)
        if not size:
            return cls(mean, (axes * scale) @ axes.T)
        axes = axes * np.sign(axes[abs(axes).argmax(0), range(c)])  # eigenvectors have no sign
        return cls(mean, (axes * scale if whiten else axes)[:, :size])


def add_content(model: Any, config: Options, dataset: Dataset) -> None:
    """Give a model's item table what ``item_vectors`` says, if anything.

    Raises:
        UsageError: if the vectors cannot be read, or fit no item.
    """
    source, use = config["item_vectors"], config["item_vectors_use"]
    if not (source or config["preload_weight"]):
        return
    table, trained = model.item_embedding, dataset.popularity > 0
    if use in ("add", "late"):
        table.parts["trained"] = Trained(torch.from_numpy(trained))
    if use != "init" and not trained[1:].all():
        model.candidates = torch.from_numpy(np.append(0, np.flatnonzero(trained)))
        places = torch.zeros(len(trained), dtype=torch.int64)
        places[model.candidates] = torch.arange(len(model.candidates))
        model.register_buffer("places", places, persistent=False)
    if use == "late":
        model.content_model = type(model)(_with(config, item_vectors_use="replace"), dataset)
        model.notices += [x for x in model.content_model.notices if x.startswith("item_vectors")]
        model.content_source = model.content_model.content_source
        weight = config["item_vectors_weight"]
        if weight is None:
            model.content_weight = nn.Parameter(torch.ones(()))
        else:
            model.content_weight = float(weight)
        return
    names = dataset.field2id_token[dataset.iid_field]
    source = source or to_files(_preloaded(config, dataset, names))
    found = read_vectors(source, names, dataset.iid_field)
    values = found.values
    model.notices += found.notices
    whiten, d = config["item_vectors_whiten"], config["hidden_size"]
    if use == "init":
        table.start = _start(values, trained, whiten, d, config["initializer_range"])
        table.begin()
        table.weight.requires_grad_(config["item_vectors_train"] is not False)
        return
    model.content_source = source
    statistics = Statistics.of(values, trained, whiten)
    if use == "replace":
        table.drop_ids()
    train = bool(config["item_vectors_train"])
    table.parts["content"] = Content(statistics, statistics.transform(values), d, train)


def _start(
    values: np.ndarray, trained: np.ndarray, whiten: bool, d: int, deviation: float
) -> tuple[Tensor, Tensor]:
    """Ids and vectors [k, min(c, d)] that the table starts with: c of size d as it is, others by
    principal components with the standard deviation of fresh vectors."""
    given = values.any(1)
    if values.shape[1] != d or whiten:
        size = 0 if values.shape[1] == d else min(values.shape[1], d)
        values = Statistics.of(values, trained, whiten, size).transform(values)
        values *= deviation / max(float(values[given & trained].std()), 1e-12)
    rows = torch.from_numpy(values[given]).to(torch.get_default_dtype())
    return torch.from_numpy(np.flatnonzero(given)), rows


def _preloaded(config: Options, dataset: Any, names: np.ndarray) -> tuple[Any, Any]:
    """Names [k] and vectors [k, c] of items that RecBole reads by ``preload_weight``."""
    of_items = {dataset.iid_field, *(config["alias_of_item_id"] or ())}
    fields = [field for field in config["preload_weight"] if field in of_items]
    if len(fields) != 1:
        raise UsageError(
            "preload_weight: expected one field of items and one of their vectors, such as "
            f"{{{dataset.iid_field}: vector}}, found {shown(config['preload_weight'])}"
        )
    values = np.asarray(dataset.get_preload_weight(fields[0]))
    values = values.reshape(len(values), -1)[: len(names)]
    given = values.any(1)
    return names[: len(values)][given], values[given]


def _with(config: Any, **options: Any) -> Any:
    """A configuration with some options changed."""
    if isinstance(config, dict):
        return {**config, **options}
    other = copy.copy(config)
    other.final_config_dict = {**config.final_config_dict, **options}
    return other
