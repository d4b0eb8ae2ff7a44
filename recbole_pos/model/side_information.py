"""Side information in a model: fields of items, users and interactions, and content vectors.

Fields (``item_features``, ``user_features``, ``event_features``) are embedded, and added to the
vectors of items and interactions.

Content vectors of items (``item_vectors``) are used in one of three ways. With e_i the vector of an
item's id, c_i its content vector less the mean and scaled (or whitened), t_i 1 for an item that has
an interaction in training and 0 for any other, and MLP(c) = W_2 gelu(W_1 c + b_1) + b_2, the vector
of an item, at the input and in scores, is

======= ============================================================================
use     x_i
======= ============================================================================
init    e_i, which starts as c_i (of another size: its d first principal components)
add     t_i e_i + MLP(c_i)
replace MLP(c_i)
======= ============================================================================

Mean, scale, whitening and components are of the items with a training interaction, and a loss
chooses among these only (but with init). So nothing of an item depends on which others have none.
Shapes: n items, k of them at a time, c and d the sizes of content vectors and item vectors.

Reference:
    Lingzi Zhang et al. "Are ID Embeddings Necessary? Whitening Pre-trained Text Embeddings for
    Effective Sequential Recommendation." ICDE 2024. (ZCA whitening)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset, read_feature_names, read_features
from recbole_pos.data.item_vectors import read_vectors
from recbole_pos.data.splits import TRAIN
from recbole_pos.errors import UsageError
from recbole_pos.layers.features import EventFeatures, ItemFeatures, PeriodicField, TokenField
from recbole_pos.values import Options

_SHRINK = 1e-3  # share of the mean variance added to all, so that empty directions stay small
_TINY = 1e-12  # against division by zero
_ROWS = 1 << 14  # items that are transformed at a time


class Content(nn.Module):
    """Make x_i of the table above, with ``add`` or ``replace``, of the vectors e_i of items."""

    values: Tensor
    is_trained: Tensor | None

    def __init__(
        self, statistics: Statistics, values: np.ndarray, size: int, is_trained: Tensor | None
    ) -> None:
        """Keep the content vectors of items, and create a network that makes item vectors of them.

        A content vector describes an item, by its text for example. The network has two linear
        layers: outer(gelu(inner(content))). Its output may be added to a trained vector of the
        item, or take the place of that.

        Args:
            statistics: the mean and matrix by which ``values`` were scaled or whitened; those of
                items that are added later are transformed by the same.
            values: [items, c] content vectors of all items, which are transformed already.
            size: d, the size of item vectors.
            is_trained: [items, 1] bool, whether an item occurs in training. If it does, the output
                is added to its trained vector. None if no item has such a vector.
        """
        super().__init__()
        self.statistics = statistics
        content = torch.from_numpy(values).to(torch.get_default_dtype())
        self.register_buffer("values", content, persistent=False)
        self.register_buffer("is_trained", is_trained, persistent=False)
        self.inner, self.outer = nn.Linear(values.shape[1], size), nn.Linear(size, size)

    def forward(self, vectors: Tensor, items: Tensor | None) -> Tensor:
        """Return the vectors of items, which a network makes of their content vectors c.

            e + outer(gelu(inner(c)))    for an item that occurs in training (``is_trained``)
            outer(gelu(inner(c)))        for other items, and for all if ``is_trained`` is None

        Args:
            vectors: [..., d] trained vectors e of ``items``; not read if ``is_trained`` is None.
            items: [...] int64 ids, or None for all items in the order of their ids.

        Returns:
            [..., d].
        """
        content = self.values if items is None else nn.functional.embedding(items, self.values)
        made_of_content = self.outer(nn.functional.gelu(self.inner(content)))
        if self.is_trained is None:
            return made_of_content
        is_trained = self.is_trained if items is None else self.is_trained[items]
        return vectors * is_trained + made_of_content

    def extend(self, vectors: np.ndarray) -> None:
        """Add items behind the others by their content vectors.

        Args:
            vectors: [k, c] content vectors, not transformed yet.

        Raises:
            UsageError: if the size of the vectors is not that of training.
        """
        size = self.values.size(1)
        if vectors.shape[1] != size:
            raise UsageError(
                f"item_vectors: vectors have {vectors.shape[1]:,} numbers, those that the model "
                f"was trained with {size:,}; make them in the same way"
            )
        # ``values`` [items, c] become [items + k, c]; the new ones are transformed as the others
        values = self.statistics.transform(vectors.copy())
        self.values = torch.cat((self.values, torch.from_numpy(values).to(self.values)))
        # ``is_trained`` [items, 1] becomes [items + k, 1]: new items do not occur in training
        if self.is_trained is not None:
            are_new_trained = self.is_trained.new_zeros(len(vectors), 1)  # False
            self.is_trained = torch.cat((self.is_trained, are_new_trained))


@dataclass(frozen=True)
class Statistics:
    """The transformation of content vectors: (c - mean) @ matrix.

    Attributes:
        mean: [c] float64.
        matrix: [c, k], or a number that scales all components.
    """

    mean: np.ndarray
    matrix: Any

    def transform(self, values: np.ndarray) -> np.ndarray:
        """Scale or whiten content vectors of items.

        They become (values - mean) * matrix if ``matrix`` is a number, which scales them, and else
        (values - mean) @ matrix. A row of zeros, an item without content, stays zero.

        Args:
            values: [n, c] float32 content vectors. To save memory, the result overwrites them if
                its rows have the same size.

        Returns:
            [n, c] float32, or [n, k] for a matrix [c, k].
        """
        is_scale = np.ndim(self.matrix) == 0
        size = values.shape[1] if is_scale else self.matrix.shape[1]
        out = values if size == values.shape[1] else np.zeros((len(values), size), np.float32)
        # ``_ROWS`` rows at a time, so that few are in memory as float64
        for start in range(0, len(values), _ROWS):
            chunk = values[start : start + _ROWS].astype(np.float64)
            has_content = chunk.any(1)
            centred = chunk[has_content] - self.mean
            scaled = centred * self.matrix if is_scale else centred @ self.matrix
            out[start : start + _ROWS][has_content] = scaled
        return out

    @classmethod
    def from_vectors(
        cls, values: np.ndarray, is_fitted: np.ndarray, whiten: bool, size: int | None = None
    ) -> Statistics:
        """Measure the mean of content vectors, and the matrix that scales or whitens them.

        ``matrix`` has one of four forms:

        - by default a number, 1 / standard deviation of all components;
        - with ``whiten`` the ZCA matrix [c, c], which leaves variance 1 and no correlation;
        - with ``size`` the first principal axes, the columns of a matrix [c, size];
        - with both these axes, each divided by its standard deviation.

        Args:
            values: [n, c] content vectors of all items.
            is_fitted: [n] bool, the items to measure; rows of zeros are left out.
            whiten: whether components are scaled and turned to be uncorrelated.
            size: number of principal components to keep; None for no such reduction.

        Returns:
            Mean and matrix, which :meth:`transform` applies.
        """
        rows = np.flatnonzero(is_fitted & values.any(1))  # of the items to measure
        mean = _average(values, rows, lambda chunk: chunk.sum(0))  # [c]
        if not whiten and size is None:
            return cls(mean, _measure_scale(values, rows, mean))

        # principal axes, the columns of ``axes``, and the variance along each
        mean_product = _average(values, rows, lambda chunk: chunk.T @ chunk)  # [c, c]
        variances, axes = np.linalg.eigh(mean_product - np.outer(mean, mean))
        variances, axes = variances[::-1].clip(0), axes[:, ::-1]  # the largest first
        # ``_SHRINK`` of the mean variance is added, so that directions without any are not blown
        # up, and ``_TINY`` so that nothing is divided by 0
        scale = 1 / np.sqrt(variances + _SHRINK * variances.mean() + _TINY)

        if size is None:  # whiten alone
            zca_matrix = (axes * scale) @ axes.T
            return cls(mean, zca_matrix)
        axes = _orient(axes)
        columns = axes * scale if whiten else axes
        return cls(mean, columns[:, :size])


def _measure_scale(values: np.ndarray, rows: np.ndarray, mean: np.ndarray) -> float:
    """Return the factor that gives the numbers of centred vectors a mean variance of 1.

    Args:
        values: [n, c] vectors.
        rows: indices of the vectors to measure.
        mean: [c] their mean.

    Returns:
        1 / standard deviation; 1 if all vectors are the same.
    """
    # The variance of a component is the mean of its squares less the square of its mean. Both are
    # summed over the c components, and the difference is divided by c.
    mean_square = _average(values, rows, lambda chunk: (chunk**2).sum())
    variance = (mean_square - (mean**2).sum()) / values.shape[1]
    return 1 / np.sqrt(variance) if variance > _TINY else 1.0


def _orient(axes: np.ndarray) -> np.ndarray:
    """Turn axes so that the entry with the largest absolute value of each is positive.

    A principal axis may point in either of two directions, and libraries of linear algebra differ
    in which they return. After this the result does not depend on the library.

    Args:
        axes: [c, c] axes in its columns. The column (0.6, -0.8) becomes (-0.6, 0.8).

    Returns:
        [c, c].
    """
    largest_rows = abs(axes).argmax(0)  # [c] row of the largest entry in each column
    largest_entries = axes[largest_rows, range(len(axes))]  # [c]
    return axes * np.sign(largest_entries)


def _average(values: np.ndarray, rows: np.ndarray, add_up: Callable[[np.ndarray], Any]) -> Any:
    """Return an average over some rows of an array, such as the mean of the rows.

    The rows are taken in parts of about ``_ROWS``, so that few are in memory as float64.

    Args:
        values: [n, c] array.
        rows: indices of the rows.
        add_up: function of a part, [rows of the part, c] float64, that returns the sum over its
            rows of what is averaged: of the rows themselves, or of their squares.
    """
    parts = np.array_split(rows, max(1, len(rows) // _ROWS))
    return sum(add_up(values[part].astype(np.float64)) for part in parts) / max(1, len(rows))


def add_content(model: Any, config: Options, dataset: Dataset) -> None:
    """Use content vectors of items in a model, if the option ``item_vectors`` gives any.

    Content vectors are made outside of the model, of texts or images of items. The model has a
    table with a row for each item, ``item_embedding``, and MLP is a network of two layers. The
    option ``item_vectors_use`` says what the vector of an item is:

    - ``init``: its row, which starts as the content;
    - ``add``: its row plus MLP(content), without the row for items that do not occur in training;
    - ``replace``: MLP(content).

    Args:
        model: a model with an ``item_embedding``, which is changed.
        config: options of the model.
        dataset: training part of a dataset.

    Raises:
        UsageError: if the vectors cannot be read, or fit no item.
    """
    # There are no files if a saved run with ``init`` is loaded: its weights include the content.
    if not config["item_vectors"]:
        return
    use = config["item_vectors_use"]
    if use == "init":
        _start_from_content(model, config, dataset)
    else:
        _add_network(model, config, dataset, keeps_table=use == "add")


def _add_network(model: Any, config: Options, dataset: Dataset, keeps_table: bool) -> None:
    """Add a trained network to a model, which makes item vectors of content vectors.

    Content vectors describe items, by their texts for example. ``item_embedding`` of the model is a
    table of trained vectors, one for each item. Modules in its ``parts`` may add something to these
    vectors, or replace them; the network becomes one of them.

    Args:
        model: a model with an ``item_embedding``, which is changed.
        config: options of the model.
        dataset: training part of a dataset.
        keeps_table: whether an item's vector is the one of the table plus the output of the
            network. Else it is the output alone, and the table is emptied.
    """
    # Content is scaled, or whitened (its numbers are made uncorrelated), by the mean and variance
    # of the items that occur in training.
    is_trained = dataset.popularity > 0  # [n] bool, whether an item occurs in training
    content = _read_content(model, config, dataset)
    statistics = Statistics.from_vectors(content, is_trained, config["item_vectors_whiten"])
    content = statistics.transform(content)

    # [n, 1] whether an item's vector is made of the one of the table, too
    table = model.item_embedding
    uses_table = torch.from_numpy(is_trained[:, None]) if keeps_table else None
    table.parts["content"] = Content(statistics, content, config["hidden_size"], uses_table)
    if not keeps_table:  # vectors without a number, [n, 0], take no memory
        empty = table.weight.new_empty(len(table.weight), 0)
        table.weight = nn.Parameter(empty, requires_grad=False)

    _limit_candidates(model, is_trained)  # the loss chooses among items that occur in training
    model.content_source = config["item_vectors"]  # files that a saved run needs again


def _limit_candidates(model: Any, is_trained: np.ndarray) -> None:
    """Leave the items that do not occur in training out of the loss of a model.

    They would be wrong answers in every training step, though content vectors can score them. The
    loss chooses among the other items and padding (id 0). For example, let the items 2 and 5 occur
    in training, and 1, 3 and 4 not. Then the model's ``candidates`` are the ids [0, 2, 5], and
    ``candidate_rows`` [0, 0, 1, 1, 1, 2] says that item 5 is row 2 of these; the rows of items that
    do not occur are never read.

    Args:
        model: its ``candidates`` and ``candidate_rows`` are set, unless all items occur.
        is_trained: [n] bool, whether an item occurs in training.
    """
    if is_trained[1:].all():
        return
    is_candidate = torch.from_numpy(np.append(True, is_trained[1:]))  # padding, too
    model.candidates = is_candidate.nonzero()[:, 0]
    # the row of a candidate is the number of candidates before it
    model.register_buffer("candidate_rows", is_candidate.cumsum(0) - 1, persistent=False)


def _start_from_content(model: Any, config: Options, dataset: Dataset) -> None:
    """Write content vectors into a model's table of item vectors, to be trained from there.

    Content vectors describe items, by their texts for example. Items without content keep their
    random vectors (``item_vectors_use: init``).

    Args:
        model: a model with an ``item_embedding``, the table of item vectors, which is changed.
        config: options of the model.
        dataset: training part of a dataset.
    """
    content = _read_content(model, config, dataset)  # [n, c], zeros where an item has no content
    ids = np.flatnonzero(content.any(1))  # items with content
    # Content of the size of item vectors is taken as it is, unless it is to be whitened. Other
    # content is fitted by that of items which occur in training (``popularity`` above 0).
    if config["item_vectors_whiten"] or content.shape[1] != config["hidden_size"]:
        content = _fit_to_table(content, dataset.popularity > 0, config)

    # Models that initialise all of their weights after this would overwrite the content. So the
    # table keeps ids and vectors as ``start``, and such models call ``write_start`` again.
    vectors = torch.from_numpy(content[ids]).to(torch.get_default_dtype())
    model.item_embedding.start = torch.from_numpy(ids), vectors
    model.item_embedding.write_start()


def _fit_to_table(content: np.ndarray, is_trained: np.ndarray, config: Options) -> np.ndarray:
    """Return content vectors in the size and the scale of fresh item vectors.

    A table of item vectors starts with random numbers, ``hidden_size`` for each item, whose
    standard deviation is ``initializer_range``. Content takes their place after these steps:

    1. Content vectors of another size are replaced by their first principal components,
       ``hidden_size`` of them, or as many as there are.
    2. With ``item_vectors_whiten`` components are uncorrelated, and all have the same variance.
    3. All numbers are multiplied by one factor, which gives them the standard deviation.

    Args:
        content: [n, c] content vectors of all items, zeros for an item without content. They may be
            overwritten.
        is_trained: [n] bool, whether an item occurs in training. Components, variances and
            deviation are measured on such items.
        config: options of the model.

    Returns:
        [n, k] with k at most ``hidden_size``.
    """
    has_content = content.any(1)
    content_size, item_size = content.shape[1], config["hidden_size"]

    # steps 1 and 2; without step 1 the number of components is None, for all
    num_components = None if content_size == item_size else min(content_size, item_size)
    whiten = config["item_vectors_whiten"]
    statistics = Statistics.from_vectors(content, is_trained, whiten, num_components)
    fitted = statistics.transform(content)

    # Step 3. No item that occurs in training may have content, or all may have the same, with the
    # deviation 0. Then the deviation is measured on all items with content.
    measured = fitted[has_content & is_trained]
    if not measured.size or measured.var() < _TINY:
        measured = fitted[has_content]
    fitted *= config["initializer_range"] / max(float(measured.std()), _TINY)
    return fitted


def _read_content(model: Any, config: Options, dataset: Dataset) -> np.ndarray:
    """Read the files with content vectors of items, such as embeddings of their texts.

    Args:
        model: gets warnings about the files, to be shown before training (``notices``).
        config: options; ``item_vectors`` names the files.
        dataset: says which id each item has.

    Returns:
        [n, c] a vector for each id, zeros for an item without one.
    """
    item_tokens = dataset.field2id_token[dataset.iid_field]
    values, notices = read_vectors(config["item_vectors"], item_tokens)
    model.notices += notices
    return values


def build_item_features(config: Options, dataset: Dataset) -> ItemFeatures | None:
    """Build the module that adds fields of items, such as a brand, to their vectors.

    Args:
        config: options; ``item_features`` names the fields.
        dataset: training part of a dataset, which has the values for all items.

    Returns:
        The module; None if no field is named.
    """
    columns = read_features(dataset, "item_features")
    embeddings = _build_embeddings(config, dataset, columns)
    return ItemFeatures(embeddings, columns) if embeddings else None


def build_event_features(config: Options, dataset: Dataset) -> EventFeatures | None:
    """Build the module that adds fields of interactions and of users to the input of a model.

    Numbers of interactions are standardised by those of training. If a run is loaded for serving,
    without interactions, mean and deviation come with its weights.

    Args:
        config: options; ``event_features`` and ``user_features`` name the fields.
        dataset: training part of a dataset.

    Returns:
        The module, or None without such fields.
    """
    # the values of each field, by its name; of interactions those in training only
    of_events: Mapping[str, Tensor | None]
    of_users: Mapping[str, Tensor | None]
    if dataset.has_log:
        columns = read_features(dataset, "event_features")
        is_trained = torch.from_numpy(dataset.part == TRAIN)
        of_events = {name: column[is_trained] for name, column in columns.items()}
        of_users = read_features(dataset, "user_features")
    else:  # names without values
        of_events = dict.fromkeys(read_feature_names(config, "event_features"))
        of_users = dict.fromkeys(read_feature_names(config, "user_features"))

    # a module for each field, by its name
    events = _build_embeddings(config, dataset, of_events)
    users = _build_embeddings(config, dataset, of_users)
    return EventFeatures(events, users) if events or users else None


def _build_embeddings(
    config: Options, dataset: Dataset, columns: Mapping[str, Tensor | None]
) -> dict[str, nn.Module]:
    """Build the module that embeds the values of each field as vectors.

    Tokens, such as brands, get a learned vector each; numbers are embedded by sines and cosines.

    Args:
        config: options of the model.
        dataset: has the tokens of fields.
        columns: values [n] or [n, s] of each field, by which numbers are standardised; None if they
            are not known, as when a run is loaded.

    Returns:
        Module by name of the field.
    """
    size, std = config["hidden_size"], config["initializer_range"]
    embeddings: dict[str, nn.Module] = {}
    for name, column in columns.items():
        # a field of tokens; any other has numbers
        if name in dataset.field2id_token:
            is_list = column is not None and column.dim() > 1
            embeddings[name] = TokenField(len(dataset.field2id_token[name]), size, std, is_list)
            continue

        numbers = np.empty(0) if column is None else column.double().numpy()
        embeddings[name] = PeriodicField(numbers[np.isfinite(numbers)], size)
    return embeddings
