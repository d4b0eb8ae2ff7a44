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
Shapes: n items, k of them at a time, c and d the sizes of content vectors and item vectors.

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

_SHRINK = 1e-3  # share of the mean variance added to all, so that empty directions stay small
_TINY = 1e-12  # against division by zero
_ROWS = 1 << 14  # items that are transformed at a time


class Trained(ItemPart):
    """Zero the id vectors of items without a training interaction (t_i of the table above)."""

    trained: Tensor

    def __init__(self, trained: Tensor) -> None:
        super().__init__()
        self.register_buffer("trained", trained[:, None], persistent=False)

    def forward(self, vectors: Tensor, items: Tensor | None) -> Tensor:
        return vectors * (self.trained if items is None else self.trained[items])

    def extend(self, vectors: np.ndarray) -> None:
        """Add an item without a training interaction for each of ``vectors``."""
        self.trained = nn.functional.pad(self.trained, (0, 0, 0, len(vectors)))


class Content(ItemPart):
    """Add MLP(c_i) of the table above.

    Args:
        statistics: the transformation of ``values`` [n, c], for items added later.
        size: d.
        train: whether the content vectors are trained, too.
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
        """Add items with content vectors [k, c], not yet transformed.

        Raises:
            UsageError: if the size of the vectors is not that of training.
        """
        if vectors.shape[1] != self.inner.in_features:
            raise UsageError(
                f"item_vectors: vectors have {vectors.shape[1]:,} numbers, those that the model "
                f"was trained with {self.inner.in_features:,}; make them in the same way"
            )
        values = self.statistics.transform(vectors.copy())
        extended = torch.cat((self.values.detach(), torch.from_numpy(values).to(self.values)))
        is_parameter = "values" in self._parameters
        self.values = nn.Parameter(extended, False) if is_parameter else extended


@dataclass(frozen=True)
class Statistics:
    """The transformation of content vectors: (c - mean) @ matrix.

    Attributes:
        mean: [c] float64.
        matrix: [c, k], or a number that scales.
    """

    mean: np.ndarray
    matrix: Any

    def transform(self, values: np.ndarray) -> np.ndarray:
        """Transform vectors [n, c], in place if their size stays the same; zeros stay zeros."""
        keeps_size = np.ndim(self.matrix) == 0 or len(set(self.matrix.shape)) == 1
        out = values if keeps_size else np.zeros((len(values), self.matrix.shape[1]), np.float32)
        for begin in range(0, len(values), _ROWS):
            chunk = values[begin : begin + _ROWS].astype(np.float64)
            has_content = chunk.any(1)
            centred = chunk[has_content] - self.mean
            scaled = centred * self.matrix if np.ndim(self.matrix) == 0 else centred @ self.matrix
            out[begin : begin + _ROWS][has_content] = scaled
        return out

    @classmethod
    def from_vectors(
        cls, values: np.ndarray, is_fitted: np.ndarray, whiten: bool, size: int = 0
    ) -> Statistics:
        """Fit the transformation to the content vectors [n, c] that are ``is_fitted`` [n], not 0.

        ``matrix`` is one scale for all components, 1 / standard deviation; with ``whiten`` the ZCA
        matrix [c, c], which leaves variance 1 and no correlation; with ``size`` the first principal
        axes [c, size], whitened (PCA) if both.
        """
        rows = np.flatnonzero(is_fitted & values.any(1))
        c, count, projects = values.shape[1], max(1, len(rows)), bool(whiten or size)
        total, products, squares = np.zeros(c), np.zeros((c, c)), 0.0
        for chunk_rows in np.array_split(rows, max(1, len(rows) // _ROWS)):
            chunk = values[chunk_rows].astype(np.float64)
            total += chunk.sum(0)
            squares += (chunk**2).sum()
            if projects:
                products += chunk.T @ chunk
        mean = total / count
        if not projects:
            variance = (squares / count - (mean**2).sum()) / c
            return cls(mean, 1 / np.sqrt(variance) if variance > _TINY else 1.0)
        variances, axes = np.linalg.eigh(products / count - np.outer(mean, mean))
        variances, axes = variances[::-1].clip(0), axes[:, ::-1]  # the largest first
        scale = 1 / np.sqrt(variances + _SHRINK * variances.mean() + _TINY)
        if not size:
            return cls(mean, (axes * scale) @ axes.T)
        # the sign of an eigenvector is arbitrary: make its largest entry positive
        axes = axes * np.sign(axes[abs(axes).argmax(0), range(c)])
        return cls(mean, (axes * scale if whiten else axes)[:, :size])


def add_content(model: Any, config: Options, dataset: Dataset) -> None:
    """Add the content vectors of ``item_vectors`` to a model's item table, if there are any.

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
        _limit_candidates(model, trained)
    if use == "late":
        _add_content_model(model, config, dataset)
        return
    names = dataset.field2id_token[dataset.iid_field]
    source = source or to_files(_read_preloaded(config, dataset, names))
    values, notices = read_vectors(source, names, dataset.iid_field)
    model.notices += notices
    whiten, d = config["item_vectors_whiten"], config["hidden_size"]
    if use == "init":
        table.start = _make_start(values, trained, whiten, d, config["initializer_range"])
        table.write_start()
        table.weight.requires_grad_(config["item_vectors_train"] is not False)
        return
    model.content_source = source
    statistics = Statistics.from_vectors(values, trained, whiten)
    if use == "replace":
        table.drop_ids()
    train = bool(config["item_vectors_train"])
    table.parts["content"] = Content(statistics, statistics.transform(values), d, train)


def _limit_candidates(model: Any, trained: np.ndarray) -> None:
    """Let training choose among padding and the items with a training interaction ([n] bool)."""
    model.candidates = torch.from_numpy(np.append(0, np.flatnonzero(trained)))
    rows = torch.zeros(len(trained), dtype=torch.int64)
    rows[model.candidates] = torch.arange(len(model.candidates))
    model.register_buffer("candidate_rows", rows, persistent=False)


def _add_content_model(model: Any, config: Options, dataset: Dataset) -> None:
    """Add the second model of ``item_vectors_use: late``, and its weight in scores."""
    model.content_model = type(model)(_replace_options(config, item_vectors_use="replace"), dataset)
    notices = model.content_model.notices
    model.notices += [notice for notice in notices if notice.startswith("item_vectors")]
    model.content_source = model.content_model.content_source
    weight = config["item_vectors_weight"]
    model.content_weight = nn.Parameter(torch.ones(())) if weight is None else float(weight)


def _make_start(
    values: np.ndarray, trained: np.ndarray, whiten: bool, d: int, deviation: float
) -> tuple[Tensor, Tensor]:
    """Return the ids [k] and vectors [k, min(c, d)] that the item table starts with."""
    has_content = values.any(1)
    if values.shape[1] != d or whiten:  # principal components, as large as fresh vectors
        size = 0 if values.shape[1] == d else min(values.shape[1], d)
        values = Statistics.from_vectors(values, trained, whiten, size).transform(values)
        values *= deviation / max(float(values[has_content & trained].std()), _TINY)
    rows = torch.from_numpy(values[has_content]).to(torch.get_default_dtype())
    return torch.from_numpy(np.flatnonzero(has_content)), rows


def _read_preloaded(config: Options, dataset: Any, names: np.ndarray) -> tuple[Any, Any]:
    """Return the names [k] and vectors [k, c] of items that RecBole reads by ``preload_weight``."""
    item_fields = {dataset.iid_field, *(config["alias_of_item_id"] or ())}
    fields = [field for field in config["preload_weight"] if field in item_fields]
    if len(fields) != 1:
        raise UsageError(
            "preload_weight: expected one field of items and one of their vectors, such as "
            f"{{{dataset.iid_field}: vector}}, found {shown(config['preload_weight'])}"
        )
    values = np.asarray(dataset.get_preload_weight(fields[0]))
    values = values.reshape(len(values), -1)[: len(names)]
    has_content = values.any(1)
    return names[: len(values)][has_content], values[has_content]


def _replace_options(config: Any, **options: Any) -> Any:
    """Return a copy of a configuration with some options replaced."""
    if isinstance(config, dict):
        return {**config, **options}
    changed = copy.copy(config)
    changed.final_config_dict = {**config.final_config_dict, **options}
    return changed
