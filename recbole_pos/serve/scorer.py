"""From packed histories to ranked items: the one place where serving calls models.

:class:`Histories` are arrays, and :func:`take_histories` takes those of users from the dataset.
:class:`Scorer` scores items after them, and ``find_best_items`` ranks these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.utils import ModelType
from torch import Tensor

from recbole_pos.data.dataset import Dataset, read_history_features
from recbole_pos.data.windows import gather_index, map_tensors
from recbole_pos.errors import UsageError
from recbole_pos.layers.forward import encode_queries
from recbole_pos.layers.hooks import require_scores
from recbole_pos.layers.large_products import (
    Choice,
    Scores,
    products,
    score_parts,
    select_best,
)
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.model.base import PosRecommender
from recbole_pos.values import Options, is_whole, shown


class TokenIds(NamedTuple):
    """Ids of the names of a categorical (token) field; ``is_list`` if its values are lists."""

    ids: Mapping[str, int]
    is_list: bool


# Feature fields that histories may have: events or user -> name of the field -> ids of its names;
# None for a field of numbers.
Fields = Mapping[str, Mapping[str, TokenIds | None]]
NO_FIELDS: Fields = {"events": {}, "user": {}}


@dataclass(frozen=True)
class Histories:
    """The histories of b users as arrays, with m interactions of known items in all.

    The interactions of all histories stand one after the other: lengths [2, 0, 1] say that the
    first two of three interactions belong to the first history, and the last to the third.

    Attributes:
        ids: [b] names of the histories; by default numbers from 0.
        items: [m] int64 item ids, history by history, oldest first.
        lengths: [b] int64 number of known items of each history; may be 0.
        times: [m] float64 in the unit of the time field, or None.
        unknown: [b] int64 number of unknown items of each history.
        users: [b] int64 user ids, where the histories are those of users in the dataset.
        at: [b] float64 times at which recommendations are asked for, NaN if missing; None if all.
        features: features of the interactions and users.
        allowed: [b] ids of the only items that each history may get, None for one that may get any;
            None in place of the list if all may.
        excluded: [b] ids of items that each history may not get; None if there are none at all.
    """

    ids: list[Any]
    items: np.ndarray
    lengths: np.ndarray
    times: np.ndarray | None
    unknown: np.ndarray
    users: np.ndarray | None = None
    at: np.ndarray | None = None
    features: Features = field(default_factory=Features)
    allowed: list[Tensor | None] | None = None
    excluded: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def pack(
        cls,
        ids: list[Any],
        items: np.ndarray,
        lengths: np.ndarray,
        times: np.ndarray | None,
        at: np.ndarray | None,
        features: Features,
    ) -> Histories:
        """Return b histories sorted by time, without the interactions of unknown items.

        Interactions at the same time keep their order, as all do without times.

        Args:
            ids: [b] names of the histories.
            items: [m] item ids of all histories, one history after the other; 0 is an unknown item.
            lengths: [b] number of items of each history.
            times: [m] times of the interactions, NaN where one is missing; None if there are none.
            at: [b] times of the requests, NaN where one is missing; None if all are.
            features: features of the interactions [m, ...] and of the users [b, ...].
        """
        # The order of the interactions, as their indices: by history (``row`` [m] is the number of
        # the history of each), then by time.
        row = np.repeat(np.arange(len(ids)), lengths)
        order = np.arange(len(items)) if times is None else np.lexsort((times, row))

        # Keep those of known items. Of the others only the number in each history is kept.
        is_known = items > 0
        order = order[is_known[order]]
        num_known = np.bincount(row[is_known], minlength=len(ids))
        num_unknown = lengths - num_known

        # First all interactions as they are given, then only those in ``order``.
        unsorted = cls(ids, items, lengths, times, num_unknown, at=at, features=features)
        return unsorted._take_interactions(order, num_known)

    @property
    def newest(self) -> np.ndarray:
        """Time of the newest interaction of each history [b]; -inf where there is none."""
        newest = np.full(len(self), -np.inf)
        if self.times is not None:
            not_empty = np.flatnonzero(self.lengths)
            ends = np.cumsum(self.lengths)  # where the interactions of each history end
            newest[not_empty] = self.times[ends[not_empty] - 1]
        return newest

    def with_request_time(self, default: float | np.ndarray) -> Histories:
        """Return the histories, each with the time at which recommendations to it are asked for.

        Args:
            default: time of the requests that have none; one for all, or [b].

        Raises:
            UsageError: if a request is before the newest interaction of its history.
        """
        # ``at`` has the times that histories give themselves, NaN where one gives none.
        at = np.full(len(self), np.nan) if self.at is None else self.at
        at, newest = np.where(np.isnan(at), default, at), self.newest
        if (at < newest).any():
            row = int((at < newest).argmax())  # the first one
            raise UsageError(
                f"at: the history {shown(self.ids[row])} asks at {at[row]:.15g}, before its newest "
                f"interaction at {newest[row]:.15g}; give a later time"
            )
        return replace(self, at=at)

    def select(self, rows: np.ndarray) -> Histories:
        """Return some of the histories, with all that belongs to them.

        Args:
            rows: [r] index of each history to return, in this order; one may repeat.
        """
        # Interactions of the selected histories, as indices into ``items``. For histories with
        # lengths [2, 3], the starts are [0, 2], and rows [1, 0] take the places [2, 3, 4, 0, 1].
        starts = np.cumsum(self.lengths) - self.lengths
        lengths = self.lengths[rows]
        selected = self._take_interactions(gather_index(starts[rows], lengths), lengths)

        # What each history has once: values of its user's features, its time, its lists, ...
        row_index = torch.from_numpy(rows)
        users = {name: values[row_index] for name, values in self.features.users.items()}
        return replace(
            selected,
            ids=[self.ids[row] for row in rows],
            unknown=self.unknown[rows],
            users=None if self.users is None else self.users[rows],
            at=None if self.at is None else self.at[rows],
            features=Features(selected.features.events, users),
            allowed=None if self.allowed is None else [self.allowed[row] for row in rows],
            excluded=None if self.excluded is None else [self.excluded[row] for row in rows],
        )

    def list_barred(self, hides_seen: bool) -> tuple[Tensor, Tensor]:
        """List the items that may not be recommended, as p pairs of a history and an item.

        These are the items that a history excludes and, if seen items are hidden, its own.

        Args:
            hides_seen: whether the items of a history are not recommended to it again.

        Returns:
            Index of the history [p] and id of the item [p], both int64.
        """
        rows = items = torch.empty(0, dtype=torch.int64)
        if hides_seen:
            rows = torch.from_numpy(np.repeat(np.arange(len(self)), self.lengths))
            items = torch.from_numpy(self.items)
        if self.excluded is not None:  # the lists [7, 8] and [9] are of the histories 0, 0 and 1
            lengths = torch.tensor([len(ids) for ids in self.excluded])
            rows = torch.cat((rows, torch.arange(len(self)).repeat_interleave(lengths)))
            items = torch.cat((items, *self.excluded))
        return rows, items

    def restrict(self, scores: Scores) -> Scores:
        """Return a scoring function that gives -inf to items that a history may not choose from.

        If the second of two histories may only get the item 3, the scores of the items [2, 3]
        change from [[5, 6], [7, 8]] to [[5, 6], [-inf, 8]].

        Args:
            scores: function from c item ids to the scores [b, c] of these items after b histories.
        """
        if self.allowed is None:
            return scores
        allowed_lists = self.allowed

        def score_allowed(items: Tensor) -> Tensor:
            found = scores(items)
            for row, allowed in enumerate(allowed_lists):
                if allowed is not None:
                    found[row, ~torch.isin(items, allowed)] = -torch.inf
            return found

        return score_allowed

    def keep_newest(self, limit: int) -> Histories:
        """Return the histories cut to their ``limit`` newest interactions."""
        index = np.flatnonzero(self._count_steps_back() <= limit)
        return self._take_interactions(index, np.minimum(self.lengths, limit))

    def leave_out(self, steps_back: np.ndarray) -> Histories:
        """Return the histories, each without one of its interactions; the others keep their times.

        Args:
            steps_back: [b] which interaction to leave out of each history: 1 is the newest, 2 the
                one before it; 0 leaves out none.
        """
        # Of all interactions [m]: their places from the end of the history, from 1, and that of the
        # one to leave out. For a history of three and ``steps_back`` 1 they are [3, 2, 1] and
        # [1, 1, 1]. With a ``steps_back`` of 0 no place is equal.
        place = self._count_steps_back()
        left_out_place = np.repeat(steps_back, self.lengths)
        kept = np.flatnonzero(place != left_out_place)
        new_lengths = self.lengths - (steps_back > 0)  # one less where one is left out
        return self._take_interactions(kept, new_lengths)

    def _count_steps_back(self) -> np.ndarray:
        """Return the position [m] of each interaction from the end of its history, from 1."""
        return np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(self.items))

    def _take_interactions(self, index: np.ndarray, lengths: np.ndarray) -> Histories:
        """Return the histories with only some of their interactions.

        What each interaction has (item, time, features) is taken by ``index``; what each history
        has once, such as the features of its user, stays.

        Args:
            index: places of the interactions to keep, among those of all histories; ascending
                within a history.
            lengths: [b] how many of them belong to each history.
        """
        times = None if self.times is None else self.times[index]
        tensor_index = torch.from_numpy(index)
        events = {name: values[tensor_index] for name, values in self.features.events.items()}
        features = Features(events, self.features.users)
        items = self.items[index]
        return replace(self, items=items, lengths=lengths, times=times, features=features)


def take_histories(dataset: Dataset, names: list[str]) -> Histories:
    """Return the histories that users have in a dataset.

    Args:
        dataset: its ``log`` has the interactions of all users, user by user, oldest first.
        names: [b] names of users.

    Returns:
        The b histories, with the features that models read. Their ``ids`` are the names, and
        ``users`` the ids of the users. A user who is not in the dataset has the id 0 and an empty
        history.
    """
    id_by_name = dataset.field2token_id[dataset.uid_field]
    ids = np.array([id_by_name.get(name, 0) for name in names], dtype=np.int64)

    # In the log, the interactions of user u are the lengths[u] rows from offsets[u] on. The numbers
    # of these rows [m], one user after the other: for offsets [4, 9] and lengths [2, 1] [4, 5, 9].
    log = dataset.log
    lengths = log.lengths[ids]
    index = torch.from_numpy(gather_index(log.offsets[ids], lengths))
    items, times = log.items[index].numpy(), log.times[index].numpy()

    # ``map`` applies its first function to each feature of interactions, to take it by row, and its
    # second to each one of users, to take it by id.
    user_index = torch.from_numpy(ids)
    all_features = read_history_features(dataset)
    features = all_features.map(lambda column: column[index], lambda column: column[user_index])

    # Histories also count items that the model does not know; the log has none of these.
    unknown = np.zeros_like(ids)
    return Histories(names, items, lengths, times, unknown, users=ids, features=features)


class Scorer:
    """Scores items by a trained model, as the next after each history.

    Attributes:
        vectors: [items + 1, d] item vectors; their products with the vectors of histories are the
            scores. None for models that score otherwise.
        reads_request: whether the time of the request is read.
        reach: number of newest interactions that are read; None for all.
        fields: embeddings of the feature fields by table (``events`` or ``user``) and name.
        index: the ItemIndex that finds the best items approximately; None to score all of them.
    """

    def __init__(self, model: Any, config: Options, num_items: int) -> None:
        """Find out what the model reads of a history, and compute the item vectors once.

        Args:
            model: the trained model, the plugin's or RecBole's.
            config: the options of its run.
            num_items: number of items of the catalogue, the padding item 0 included.
        """
        self.model, self.config, self.device = model, config, config["device"]
        self.num_items = num_items
        self.index: Any = None  # an ItemIndex, if the best items are found approximately

        # What the model reads of a history; RecBole's models lack the attributes that are read
        # here. First, the time at which recommendations are asked for.
        self.reads_request = bool(getattr(model, "reads_request", False))

        # The number of newest interactions that it reads, or all of them (None), as AttrFormer
        # does if it was trained with chunks of histories that read the chunks before (``linked``).
        reads_all = getattr(model, "linked", False)
        self.reach: int | None = None if reads_all else config["MAX_ITEM_LIST_LENGTH"]

        # Features: {"events": {field: module that embeds it}, "user": {...}}.
        features = getattr(model, "event_features", None)
        self.fields = {"events": {}, "user": {}} if features is None else features.by_table()

        # Item vectors, if the scores are products of these with vectors of histories.
        has_vectors = isinstance(model, PosRecommender) and model.scores_by_products
        self.vectors: Tensor | None = model.item_vectors().detach() if has_vectors else None

    @property
    def needs_time(self) -> bool:
        """Whether histories must have times; a model's answer depends on its current settings."""
        return bool(getattr(self.model, "histories_need_time", False))

    def list_fields(self, tokens: Mapping[str, np.ndarray]) -> Fields:
        """Return the feature fields that histories may have, with the ids of their names.

        Args:
            tokens: categorical (token) field -> its names, in the order of their ids from 0.

        Returns:
            ``events`` or ``user`` -> field -> ids of its names; None for a field of numbers.
        """
        # ``self.fields``: table -> field -> the layer by which the model embeds the field.
        fields: dict[str, dict[str, TokenIds | None]] = {}
        for table, embeds in self.fields.items():
            fields[table] = dict.fromkeys(embeds)  # None: numbers
            for name, embed in embeds.items():
                if not embed.numeric:
                    ids = {token: i for i, token in enumerate(tokens[name])}
                    fields[table][name] = TokenIds(ids, bool(embed.is_list))
        return fields

    def require_vectors(self) -> Tensor:
        """Return the item vectors [items + 1, d]; products with vectors of histories are scores.

        Raises:
            UsageError: if the model scores otherwise.
        """
        if self.vectors is None:
            raise UsageError(
                f"{self.config['model']} does not score by products of vectors; the models of the "
                "plugin do"
            )
        return self.vectors

    def make_scores(self, histories: Histories) -> Callable[[Tensor], Tensor]:
        """Return a function that scores items as the next one after each of b histories.

        Args:
            histories: the histories, none of which may be empty.

        Returns:
            Function from c item ids to float scores [b, c] on the CPU, -inf for items that a
            history may not choose from. Models that score by products of vectors compute only
            these; others have scored all items already.
        """
        # ``vectors`` are those of the items; None if the model scores otherwise. Then RecBole's
        # ``full_sort_predict`` scores all items, and ``require_scores`` returns the result as [b,
        # items], or refuses one that has other sizes.
        if self.vectors is not None:
            states, vectors = self.encode(histories), self.vectors
            # of these ids only
            return histories.restrict(lambda items: products(states, vectors, items).cpu())
        found = self.model.full_sort_predict(self.make_rows(histories))  # of all items, by id
        scores = require_scores(found, len(histories), self.num_items, self.model).cpu()
        return histories.restrict(lambda items: scores[:, items])

    def encode(self, histories: Histories) -> Tensor:
        """Return the vector of each history whose products with item vectors are the scores.

        Args:
            histories: b histories, none of which may be empty.

        Returns:
            [b, d] float32 on the device of the model.
        """
        # A model that compares users (``needs_events``) reads the histories of users of its dataset
        # from there, by their ids.
        model, device = self.model, self.device
        if model.needs_events and histories.users is not None:
            return encode_queries(model, model.find_histories(histories.users))

        # Other models read the given arrays, without interactions that are older than they read.
        histories = self.drop_unread(histories)
        items = torch.from_numpy(histories.items).to(device)
        lengths = torch.from_numpy(histories.lengths).to(device)

        # Histories may have more than the model reads: times of interactions, times of requests
        # (``at``), and features. What it does not read is None.
        times = at = features = None
        if self.needs_time and histories.times is not None:
            times = torch.from_numpy(histories.times).to(device)
        if self.reads_request and histories.at is not None:
            at = torch.from_numpy(histories.at).to(device)
        if self.fields["events"] or self.fields["user"]:  # features of interactions or of users
            features = map_tensors(histories.features, lambda values: values.to(device))
        return encode_queries(model, model.make_batch(items, lengths, times, at, features))

    def drop_unread(self, histories: Histories, extra: int = 0) -> Histories:
        """Return histories without the interactions that are older than the model reads.

        Args:
            histories: the histories.
            extra: number of older interactions to keep nevertheless, for a caller who will leave
                out as many newer ones.
        """
        # A model that needs events (the log of all users) relates an interaction to those of others
        # by its place in its whole history, so nothing may be cut.
        if self.reach is None or getattr(self.model, "needs_events", False):
            return histories
        return histories.keep_newest(self.reach + extra)

    def make_rows(self, histories: Histories) -> Interaction:
        """Return histories in the form that RecBole's models read, on the device of the model.

        Args:
            histories: b histories.

        Returns:
            RecBole's table of columns by name. It has the user ids [b] and, for a sequential model,
            the lengths of the histories [b], the features of users [b], and for each interaction
            its item, time and features. Those are lists of the configured length L, [b, L], oldest
            first, with 0 behind the shorter ones; of longer histories they have the newest L.
        """
        config = self.config
        users = np.zeros(len(histories), np.int64) if histories.users is None else histories.users
        columns = {config["USER_ID_FIELD"]: torch.from_numpy(users)}  # id 0: no known user
        if config["MODEL_TYPE"] != ModelType.SEQUENTIAL:
            return Interaction(columns).to(self.device)

        # Values [m] of the interactions of all histories, one history after the other.
        max_length = config["MAX_ITEM_LIST_LENGTH"]
        histories = histories.keep_newest(max_length)
        lengths = torch.from_numpy(histories.lengths)
        flat = {config["ITEM_ID_FIELD"]: torch.from_numpy(histories.items)}
        flat |= histories.features.events
        if histories.times is not None:
            flat[config["TIME_FIELD"]] = torch.from_numpy(histories.times)

        # Write them into tables of zeros, row by row: with the lengths [2, 1] and L = 3, the values
        # [7, 8, 9] go to the true cells of [[True, True, False], [True, False, False]].
        is_filled = torch.arange(max_length) < lengths[:, None]
        for name, values in flat.items():
            table = values.new_zeros(*is_filled.shape, *values.shape[1:])
            table[is_filled] = values
            columns[name + config["LIST_SUFFIX"]] = table
        columns |= histories.features.users
        columns[config["ITEM_LIST_LENGTH_FIELD"]] = lengths
        return Interaction(columns).to(self.device)


def find_best_items(
    scores: Scores, choice: Choice, k: int, barred: tuple[Tensor, Tensor] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k items with the highest scores for each of b histories, best first.

    Args:
        scores: function from c item ids to the scores [b, c] of these items.
        choice: the items that may be recommended: their ids ``items`` [n] and, unless it is None,
            ``bonus`` [n], which is added to their scores.
        k: number of items for each history; n if that is less.
        barred: index of the history [p] and item id [p] of pairs that are not recommended.

    Returns:
        Scores and item ids, both [b, k]; the score is -inf where no further item is left.
    """
    # ``score_parts`` yields ids and scores of some thousands of items at a time, so that the scores
    # of all need not be in memory. ``select_best`` keeps the k best of the parts so far.
    best, items = select_best(score_parts(scores, choice, barred), k)
    return best.cpu().numpy(), items.cpu().numpy()


def to_columns(
    names: Sequence[Any], rows: np.ndarray, score: np.ndarray, item: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return rankings [b, k] as columns with an entry for each of p recommendations.

    Args:
        names: names of all histories, for the message.
        rows: [b] index in ``names`` of each ranking.
        score: [b, k] scores, best first; -inf where there is no recommendation.
        item: [b, k] item ids.

    Returns:
        Index in ``names``, rank from 1, item id and score, each [p], ranking after ranking. With
        rows [7, 9] and scores [[5, 4], [6, -inf]] the indices are [7, 7, 9], the ranks [1, 2, 1].

    Raises:
        UsageError: with the name of the first history that has a score of NaN or infinity.
    """
    is_finite = (score < np.inf).all(1)  # [b]; false for NaN, too; -inf may stand
    if not is_finite.all():
        name = names[rows[is_finite.argmin()]]
        raise UsageError(
            f"{shown(name)}: the scores of the model are not numbers (NaN or infinite), so nothing "
            "can be ranked; check for extreme numbers in its features and times"
        )
    ranking, column = np.nonzero(score > -np.inf)
    return rows[ranking], column + 1, item[ranking, column], score[ranking, column]


def require_k(k: int) -> int:
    """Return k as an int; raise a UsageError unless it is a whole number, at least 1."""
    if not (is_whole(k) and k >= 1):
        raise UsageError(f"k: expected a whole number, at least 1, found {shown(k)}")
    return int(k)
