"""From packed histories to scores: the one place where serving calls models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.utils import ModelType
from torch import Tensor

from recbole_pos.data.windows import map_tensors
from recbole_pos.errors import UsageError
from recbole_pos.layers.catalogue import (
    Choice,
    Scores,
    products,
    require_scores,
    score_parts,
    select_best,
)
from recbole_pos.layers.forward import encode_queries
from recbole_pos.model.base import PosRecommender
from recbole_pos.serve.histories import Fields, Histories, TokenIds
from recbole_pos.serve.token_lists import fit_tables, pad_lists
from recbole_pos.values import Options, shown


class Scorer:
    """Scores items by a trained model, as the next after each history.

    Attributes:
        vectors: [items + 1, d] item vectors, whose products with states are the scores; None for
            models that score otherwise.
        reads_request: whether the time of the request is read.
        reach: number of newest interactions that are read; None for all.
        fields: embeddings of the feature fields by table (``events`` or ``user``) and name.
    """

    def __init__(self, model: Any, config: Options, num_items: int) -> None:
        """Read from the model what a history must have, and compute the item vectors once.

        ``num_items`` is the size of the catalogue, padding included.
        """
        self.model, self.config, self.device = model, config, config["device"]
        self.num_items = num_items
        self.reads_request = bool(getattr(model, "reads_request", False))
        reads_all = getattr(model, "linked", False)
        self.reach: int | None = None if reads_all else config["MAX_ITEM_LIST_LENGTH"]
        features = getattr(model, "event_features", None)
        self.fields = {"events": {}, "user": {}} if features is None else features.by_table()
        has_vectors = isinstance(model, PosRecommender) and model.scores_by_products
        self.vectors: Tensor | None = model.item_vectors().detach() if has_vectors else None

    @property
    def needs_time(self) -> bool:
        """Whether histories must have times."""
        return bool(getattr(self.model, "histories_need_time", False))

    def list_fields(self, tokens: Mapping[str, np.ndarray]) -> Fields:
        """Return the fields that histories may have, given the names by id of token fields."""

        def find_tokens(name: str, embed: Any) -> TokenIds | None:
            if embed.numeric:
                return None
            ids = {token: i for i, token in enumerate(tokens[name])}
            return TokenIds(ids, bool(embed.is_list))

        return {
            table: {name: find_tokens(name, embed) for name, embed in embeds.items()}
            for table, embeds in self.fields.items()
        }

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
        try:
            found = self.model.full_sort_predict(self.make_rows(histories))
        except NotImplementedError as error:  # RecBole evaluates such a model by ``predict``
            raise UsageError(
                f"{self.config['model']} has no full_sort_predict, the scores of all items, by "
                "which items are recommended; define it"
            ) from error
        scores = require_scores(found, len(histories), self.num_items, self.model).cpu()
        return lambda items: scores[:, items]

    def encode(self, histories: Histories) -> Tensor:
        """Return the states [b, d] that predict the item after each history, none empty."""
        if self.model.needs_events and histories.users is not None:
            return encode_queries(self.model, self.model.find_histories(histories.users))
        histories = self.drop_unread(histories)
        if len(histories) > 1 and not fit_tables(histories.features):
            halves = np.array_split(np.arange(len(histories)), 2)
            return torch.cat([self.encode(histories.select(rows)) for rows in halves])
        times = histories.times if self.needs_time else None
        at = histories.at if self.reads_request else None
        arrays = (histories.items, histories.lengths, times, at)
        tensors = (None if x is None else torch.from_numpy(x).to(self.device) for x in arrays)
        padded = histories.features.map(pad_lists, pad_lists)
        features = map_tensors(padded, lambda x: x.to(self.device))
        batch = self.model.make_batch(*tensors, features if any(self.fields.values()) else None)
        return encode_queries(self.model, batch)

    def drop_unread(self, histories: Histories, extra: int = 0) -> Histories:
        """Return histories without the interactions that are older than the model reads.

        ``extra`` more are kept, which are read once as many newer ones are left out.
        """
        # such a model reads others by the place of an interaction in its whole history
        if self.reach is None or getattr(self.model, "needs_events", False):
            return histories
        return histories.keep_newest(self.reach + extra)

    def make_rows(self, histories: Histories) -> Interaction:
        """Return histories as rows of RecBole: users and lists padded on the right to [b, L]."""
        config = self.config
        users = np.zeros(len(histories), np.int64) if histories.users is None else histories.users
        columns = {config["USER_ID_FIELD"]: torch.from_numpy(users)}
        if config["MODEL_TYPE"] == ModelType.SEQUENTIAL:
            max_length = config["MAX_ITEM_LIST_LENGTH"]
            histories = histories.keep_newest(max_length)
            lengths = torch.from_numpy(histories.lengths)
            is_filled = torch.arange(max_length) < lengths[:, None]
            lists = {config["ITEM_ID_FIELD"]: torch.from_numpy(histories.items)}
            features = histories.features.map(pad_lists, pad_lists)
            lists |= features.events
            if histories.times is not None:
                lists[config["TIME_FIELD"]] = torch.from_numpy(histories.times)
            for field, values in lists.items():
                padded = values.new_zeros(*is_filled.shape, *values.shape[1:])
                padded[is_filled] = values
                columns[field + config["LIST_SUFFIX"]] = padded
            columns |= features.users
            columns[config["ITEM_LIST_LENGTH_FIELD"]] = lengths
        return Interaction(columns).to(self.device)


def find_best_items(
    scores: Scores, choice: Choice, k: int, barred: tuple[Tensor, Tensor] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and ids [rows, k'] of the best items of every row, best first.

    k' is the smaller of k and the number of items in ``choice``; the score is -inf where fewer are
    left. ``scores`` and ``barred`` are the arguments of :func:`score_parts`.
    """
    best, items = select_best(score_parts(scores, choice, barred), k)
    return best.cpu().numpy(), items.cpu().numpy()


def to_columns(
    names: Sequence[Any], rows: np.ndarray, score: np.ndarray, item: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return row, rank, item and score [p] of the scores above -inf of ``rows`` [b, k].

    Raises:
        UsageError: with the name of the first row that has scores which are not finite.
    """
    is_finite = (score < np.inf).all(1)  # false for NaN, which is before all numbers
    if not is_finite.all():
        name = names[rows[is_finite.argmin()]]
        raise UsageError(
            f"{shown(name)}: the scores of the model are not numbers (NaN or infinite), so nothing "
            "can be ranked; check for extreme numbers in its features and times"
        )
    index, column = np.nonzero(score > -np.inf)
    return rows[index], column + 1, item[index, column], score[index, column]
