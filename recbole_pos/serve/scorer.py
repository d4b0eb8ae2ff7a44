"""From packed histories to scores: the one place where serving calls models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.utils import ModelType
from torch import Tensor

from recbole_pos.data.batch import map_tensors
from recbole_pos.errors import UsageError
from recbole_pos.layers.catalogue import Choice, Scores, products, score_parts, select_best
from recbole_pos.model.base import PosRecommender
from recbole_pos.serve.histories import Histories
from recbole_pos.values import Options


class Scorer:
    """Scores of a trained model for the item after each history.

    Attributes:
        vectors: [items + 1, d] of items, whose products with states are the scores; None for models
            that score otherwise.
        needs_time: whether histories must have times.
        reads_request: whether the time of the request is read.
        reach: how many of the newest interactions are read; None for all.
        fields: embeddings of the fields read under ``events`` and ``user`` of a history, by name.
    """

    def __init__(self, model: Any, config: Options) -> None:
        self.model, self.config, self.device = model, config, config["device"]
        self.needs_time = bool(getattr(model, "needs_time", False))
        self.reads_request = bool(getattr(model, "reads_request", False))
        linked = getattr(model, "linked", False)  # reads further back than a window
        self.reach: int | None = None if linked else config["MAX_ITEM_LIST_LENGTH"]
        embeds = getattr(model, "event_features", None)
        self.fields = {"events": {}, "user": {}} if embeds is None else embeds.by_table()
        has_vectors = isinstance(model, PosRecommender) and model.scores_by_products
        self.vectors: Tensor | None = model.item_vectors().detach() if has_vectors else None

    def require_vectors(self) -> Tensor:
        """Return ``vectors``; raise a UsageError if the model has none."""
        if self.vectors is None:
            raise UsageError(
                f"{self.config['model']} does not score by products of vectors; the models of the "
                "plugin do"
            )
        return self.vectors

    def make_scores(self, histories: Histories) -> Callable[[Tensor], Tensor]:
        """Return a function from item ids [c] to scores [b, c] after b histories, none empty."""
        if self.vectors is not None:
            states, vectors = self.encode(histories), self.vectors
            return lambda items: products(states, vectors, items).cpu()
        every = (
            self.model.full_sort_predict(self.make_rows(histories)).view(len(histories), -1).cpu()
        )
        return lambda items: every[:, items]

    def encode(self, histories: Histories) -> Tensor:
        """Return the states [b, d] that predict the event after each history, none empty."""
        if self.model.needs_events and histories.users is not None:
            return self.model.after_users(histories.users)
        histories = histories if self.reach is None else histories.keep_newest(self.reach)
        parts = [histories.items, histories.lengths, histories.times if self.needs_time else None]
        if self.reads_request:
            parts.append(histories.at)
        options = {}
        if any(self.fields.values()):
            options["features"] = map_tensors(histories.features, self._send)
        return self.model.after(
            *(None if x is None else self._send(torch.from_numpy(x)) for x in parts), **options
        )

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def make_rows(self, histories: Histories) -> Interaction:
        """Return histories as examples of RecBole: lists padded on the right to [b, L]."""
        config, length = self.config, self.config["MAX_ITEM_LIST_LENGTH"]
        users = np.zeros(len(histories), np.int64) if histories.users is None else histories.users
        columns = {config["USER_ID_FIELD"]: torch.from_numpy(users)}
        if config["MODEL_TYPE"] == ModelType.SEQUENTIAL:
            histories = histories.keep_newest(length)
            lengths = torch.from_numpy(histories.lengths)
            is_event = torch.arange(length) < lengths[:, None]
            items, features = torch.from_numpy(histories.items), histories.features
            lists = {config["ITEM_ID_FIELD"]: items, **features.events}
            if histories.times is not None:
                lists[config["TIME_FIELD"]] = torch.from_numpy(histories.times)
            for field, values in lists.items():
                block = values.new_zeros(*is_event.shape, *values.shape[1:])
                block[is_event] = values
                columns[field + config["LIST_SUFFIX"]] = block
            columns |= features.users
            columns[config["ITEM_LIST_LENGTH_FIELD"]] = lengths
        return Interaction(columns).to(self.device)


def find_best_items(
    scores: Scores, choice: Choice, k: int, barred: tuple[Tensor, Tensor] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and ids [rows, k'] of the best items of every row, best first.

    k' is the smaller of k and the number of items in ``choice``; the score is -inf where fewer are
    left. ``scores`` and ``barred`` are as of :func:`score_parts`.
    """
    best, items = select_best(score_parts(scores, choice, barred), k)
    return best.cpu().numpy(), items.cpu().numpy()
