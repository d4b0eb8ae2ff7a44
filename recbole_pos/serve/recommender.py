"""A trained model in use: what comes next, for its users and after any history."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from recbole_pos.data.identity import Growth, extend_log
from recbole_pos.data.item_vectors import read_new_vectors, to_files
from recbole_pos.data.windows import gather_index, masks_history
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import (
    Catalogue,
    NeedsDataset,
    finds_dataset,
    load,
    load_without_data,
)
from recbole_pos.layers.catalogue import Choice, products
from recbole_pos.model.recbole_models import reads_users
from recbole_pos.serve.explain import BATCH, add_reasons, leave_one_out, require_reasons
from recbole_pos.serve.fitted import FittedModel, find_run_folder, renamed, unpack
from recbole_pos.serve.histories import Field, Histories, read_histories, read_moment
from recbole_pos.serve.scorer import Scorer, find_best_items
from recbole_pos.values import SECONDS, is_number, is_whole, listed, shown, suggest

POOL = 1 << 14  # histories that are sorted by length into batches: little padding
EXPLAINED = 1 << 10  # the same with reasons, of which each is a history
MODEL, POPULARITY = "model", "popularity"
LARGEST = 1e30  # boost: float32 ends soon after, and sums must stay finite
_YEAR = 365.25 * SECONDS["days"]


class Recommender(FittedModel):
    """A trained model with its catalogue; made by :func:`recbole_pos.fit` and :meth:`load`.

    Ids are names, as in the files: a history is a list of item names, oldest first. A history of
    which nothing is known gets the most popular items of training, and ``by`` says so.

    Examples:
        >>> trained = recbole_pos.Recommender.load("mine")
        >>> found = trained.recommend(histories=[["242", "302", "51"]], k=3)
        >>> list(found), len(found)
        (['id', 'rank', 'item', 'score', 'by'], 3)

    Attributes:
        growth: what the data have beyond what the model was trained on.
        changed: fields whose values have changed since then; the model reads those of now.
        items: [items] names of the catalogue.
    """

    def __init__(
        self,
        experiment: Experiment,
        growth: Growth,
        unknown_users: Iterable[str] = (),
        folder: RunFolder | None = None,
        source: Sequence[Any] = (),
    ) -> None:
        super().__init__(experiment, folder, source)
        self.growth, self.changed = growth, experiment.changed
        self.scorer = Scorer(experiment.model, experiment.config)
        dataset = experiment.dataset
        self.items: np.ndarray = dataset.field2id_token[dataset.iid_field][1:]
        self.ids: dict[str, int] = {name: i for i, name in enumerate(self.items, start=1)}
        self.by_user = reads_users(self.config["model"], type(experiment.model))
        counts = torch.from_numpy(dataset.popularity).float()
        self.popularity = counts / max(float(counts.sum()), 1.0)
        self.unknown_users = dict.fromkeys(unknown_users)  # who are in the data all the same
        self._has_warned = False

    @classmethod
    def load(
        cls,
        run_dir: str | Path,
        data_path: str | Path | None = None,
        histories_only: bool | None = None,
        item_vectors: Any = None,
    ) -> Recommender:
        """Load a trained model from the folder of a run, whose data may have grown since.

        Without the dataset it recommends to given histories; users need it, and so do models that
        read more of it than names.

        Args:
            run_dir: the folder.
            data_path: the folder that holds the folder of the dataset; where the run found it if
                None.
            histories_only: whether the users of the data will not be asked for: then the dataset
                is not read if the model does without; else it must be there. Not known if None.
            item_vectors: content vectors of further items, see :meth:`add_items`.

        Warns:
            RunWarning: if the run is unfinished, or the dataset is not where it was.

        Raises:
            UsageError: if it is not the folder of a run, or lacks a dataset that the model needs.
            CheckpointError: if the data the model was trained on are not there any more.
        """
        reads_data = data_path is not None or histories_only is False
        reads_data = reads_data or (not histories_only and finds_dataset(run_dir))
        trained = None
        if not reads_data:
            try:
                trained = cls(load_without_data(run_dir), Growth(), folder=find_run_folder(run_dir))
            except NeedsDataset:
                if not finds_dataset(run_dir):
                    raise
        if trained is None:
            trained = cls._with_data(run_dir, data_path)
        elif not histories_only:
            warnings.warn(str(NeedsDataset("histories of users", trained.config)), RunWarning, 2)
        if item_vectors is not None:
            trained.add_items(item_vectors)
        return trained

    @classmethod
    def _with_data(cls, run_dir: str | Path, data_path: str | Path | None) -> Recommender:
        """Load the model and its dataset, with what the data have beyond the training."""

        def is_by_user(dataset: Any) -> bool:
            return reads_users(dataset.config["model"], dataset.config.model_class)

        def add_later(dataset: Any) -> Any:
            later = dataset.held_out
            return dataset if later is None else extend_log(dataset, later, not is_by_user(dataset))

        experiment = load(run_dir, add_later, grown=True, data_path=data_path)
        later = experiment.dataset.held_out
        if later is None:
            return cls(experiment, Growth(), folder=find_run_folder(run_dir))
        unknown_users = [*(later.users if is_by_user(experiment.dataset) else []), *later.lonely]
        return cls(experiment, later.growth, unknown_users, find_run_folder(run_dir))

    def __reduce__(self) -> tuple[Any, ...]:
        dataset = None if isinstance(self.dataset, Catalogue) else self.dataset
        return unpack, (type(self), self.pack(), dataset, self.growth, [*self.unknown_users])

    def add_items(self, item_vectors: Any) -> str:
        """Add items that were not in the training data to the catalogue, by their content vectors.

        Args:
            item_vectors: as the option of that name, made in the way of those of the run; items
                that the model knows stay as they are.

        Returns:
            A sentence with the number of new items.

        Raises:
            UsageError: if the model does not read content alone, or vectors do not fit.
        """
        model, dataset = self.experiment.model, self.dataset
        if getattr(model, "content_source", None) is None:
            raise UsageError(
                f"item_vectors: {self.config['model']} was trained without the content of items; "
                "train it with item_vectors and item_vectors_use: add, replace or late"
            )
        names, vectors = read_new_vectors(to_files(item_vectors), self.ids, dataset.iid_field)
        model.add_items(vectors)
        self.items = np.append(self.items, names)
        self.ids |= {name: i for i, name in enumerate(names, start=len(self.ids) + 1)}
        self.popularity = torch.nn.functional.pad(self.popularity, (0, len(names)))
        self.scorer = Scorer(model, self.config)
        for cached in ("_all_items", "_unit_vectors"):
            self.__dict__.pop(cached, None)
        try:
            with torch.inference_mode():
                for name in names[:1]:
                    history = {"items": [name], "times": [0.0], "at": 0.0}
                    self.scorer.make_scores(self.read([history]))
        except IndexError as error:
            raise UsageError(
                f"item_vectors: {self.config['model']} reads attributes of items, which new ones "
                "do not have; add them to the data and train again"
            ) from error
        return f"new items by their content: {len(names):,}"

    def recommend(
        self,
        users: Sequence[str] | None = None,
        histories: Iterable[Any] | None = None,
        k: int = 10,
        exclude_seen: bool | None = None,
        allowed: Iterable[str] | None = None,
        excluded: Iterable[str] | None = None,
        boosts: Mapping[str, float] | None = None,
        at: float | str | datetime | None = None,
        because: int = 0,
    ) -> pd.DataFrame:
        """Return the k items most likely to come next, best first; of equal scores, in the order of
        ``items``, whatever k, the items allowed, or who else is asked about.

        Args:
            users: names of users in the data; all with an event if neither these nor histories
                are given.
            histories: of each person a list of items, oldest first, or a mapping with ``items``
                and perhaps ``id``, ``times`` and ``at`` (in the unit of the time field, or ISO
                8601, in UTC without a zone), ``events`` and ``user`` (``event_features`` by field,
                one value an item, and ``user_features``); a Series of lists, by id; a DataFrame or
                an Arrow table with such columns.
            k: items a person; fewer rows where fewer are left to recommend.
            exclude_seen: leave out what a history has; None for what the run was evaluated with.
            allowed: names of the items to choose from, such as those in stock; all if None.
            excluded: names of items to leave out.
            boosts: of items by name what is added to their scores; to halve or double odds, minus
                or plus 0.69 (the scores of models trained by cross-entropy are log-odds).
            at: when they are asked for, for those whose history has no time: a time as in
                ``times``; now if None. For models with ``request_time: target``.
            because: how many of the past interactions that carried an item are named; see
                :meth:`explain`.

        Warns:
            RunWarning: once, if a model that reads the time of the request gets none.

        Returns:
            A row a recommendation: ``id`` (as given, or the name of the user), ``rank`` from 1,
            ``item``, ``score``, and ``by``: model, or popularity where nothing of a history is
            known. With ``because``, numbered from 1, the strongest first: ``because_1``, the item
            of a past interaction, ``score_change_1`` and ``rank_change_1``, what is added to the
            score and to the rank without it; empty where fewer interactions carried the item.

        Raises:
            UsageError: for users without an event, anything that is no history, or ``because`` of
                a model that reads none.
        """
        if users is not None and histories is not None:
            raise UsageError("give users or histories, not both")
        choice = self.choose_items(allowed, excluded, boosts)
        packed = self.read_users(users) if histories is None else self.read(histories)
        packed = self.add_request_time(packed, at)
        parts = self.make_tables(packed, k, exclude_seen, choice, because)
        return pd.concat([table for table, _ in parts], ignore_index=True)

    def read(self, histories: Iterable[Any]) -> Histories:
        """Check histories and look up the ids of their items; see :func:`read_histories`.

        Raises:
            UsageError: if the model does not read histories, or one is malformed.
        """
        if self.by_user:
            raise UsageError(
                f"{self.config['model']} scores the users it was trained with, by their names; it "
                "cannot read a history. Sequential models can"
            )
        scorer = self.scorer
        return read_histories(histories, self.ids, scorer.needs_time, self._unit, self._fields)

    @cached_property
    def _fields(self) -> dict[str, dict[str, Field]]:
        """Fields of interactions and users that histories may have, beside items and times."""

        def find_names(name: str, embed: Any) -> Field:
            if embed.numeric:
                return None
            names = self.dataset.field2id_token[name]
            return {one: i for i, one in enumerate(names)}, bool(embed.is_list)

        return {
            table: {name: find_names(name, embed) for name, embed in embeds.items()}
            for table, embeds in self.scorer.fields.items()
        }

    def add_request_time(
        self, histories: Histories, at: float | str | datetime | None = None
    ) -> Histories:
        """Return histories with a time of the request each, if the model reads it: their own, or
        ``at``, or now, with a warning the first time.

        Raises:
            UsageError: for a time that the model does not read, or before the newest event.
        """
        if not self.scorer.reads_request:
            if at is not None or histories.at is not None:
                raise UsageError(
                    f"at: {self.config['model']} was trained with request_time: none and reads no "
                    "time of a request; leave it out"
                )
            return histories
        if at is not None:
            return histories.with_request_time(read_moment(at, "at", self._unit))
        if histories.at is not None and not np.isnan(histories.at).any():
            return histories.with_request_time(0.0)
        if self._unit is None:
            raise UsageError("at: the time field counts no time, so give at instead of now")
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "at: the model reads the time of the request: now is taken", RunWarning, 3
            )
        return histories.with_request_time(time.time() / self._unit)

    @cached_property
    def _unit(self) -> float | None:
        """Seconds in the unit of the time field; None where its values are no dates of our time,
        but a number that orders interactions."""
        seconds = SECONDS[self.config["timestamp_unit"]]
        if isinstance(self.dataset, Catalogue) or not len(self.dataset.log.times):
            return seconds
        times = self.dataset.log.times
        first, last = (float(x) * seconds / _YEAR for x in (times.min(), times.max()))
        return seconds if 1 < first and last < 2100 - 1970 else None

    def read_users(self, users: Sequence[str | int] | None = None) -> Histories:
        """Return the histories of users in the data, each user once; of all with an event if None.

        Raises:
            UsageError: if a user has no event.
        """
        dataset, log = self.dataset, self.dataset.log
        names = dataset.field2id_token[dataset.uid_field]
        if users is None:
            wanted = [*names[log.lengths > 0], *self.unknown_users]
        else:
            wanted = list(dict.fromkeys([users] if isinstance(users, str) else map(str, users)))
        known = dataset.field2token_id[dataset.uid_field]
        ids = np.array([known.get(user, 0) for user in wanted], dtype=np.int64)
        lengths = log.lengths[ids]
        has_events = dict(zip(wanted, lengths > 0, strict=True))
        absent = [user for user in wanted if not (has_events[user] or user in self.unknown_users)]
        if absent or not wanted:
            raise UsageError(
                f"users: {len(absent)} of {len(wanted)} have no interaction in "
                f"{shown(dataset.dataset_name)}: {listed(absent)}"
            )
        events, rows = torch.from_numpy(gather_index(log.offsets[ids], lengths)), torch.tensor(ids)
        items, times = log.items[events].numpy(), log.times[events].numpy()
        features = dataset.features().map(lambda x: x[events], lambda x: x[rows])
        return Histories(wanted, items, lengths, times, 0 * ids, ids, features=features)

    def choose_items(
        self,
        allowed: Iterable[str | int] | None = None,
        excluded: Iterable[str | int] | None = None,
        boosts: Mapping[str, float] | None = None,
    ) -> Choice:
        """Return the items that may be recommended and their boosts; unknown names are left out.

        Raises:
            UsageError: if no item is left, or a boost is not a finite number.
        """
        if allowed is None and excluded is None and not boosts:
            return self._all_items
        allows = torch.zeros(len(self.ids) + 1, dtype=torch.bool)
        allows[1:] = allowed is None
        for key, names, is_allowed in (("allowed", allowed, True), ("excluded", excluded, False)):
            if names is None:
                continue
            if isinstance(names, (str, bytes, Mapping)) or not isinstance(names, Iterable):
                raise UsageError(f"{key}: expected names of items, found {shown(names)}")
            allows[[self.ids[name] for name in map(str, names) if name in self.ids]] = is_allowed
            if not allows.any():
                why = "none of them is known" if is_allowed else "all items are excluded"
                raise UsageError(f"{key}: no item is left to recommend: {why}")
        items = allows.nonzero()[:, 0]
        if boosts is not None and not isinstance(boosts, Mapping):
            raise UsageError(f"boosts: expected numbers by item, found {shown(boosts)}")
        bonus = torch.zeros(len(allows))
        for name, boost in (boosts or {}).items():
            if not (is_number(boost) and abs(boost) < LARGEST):
                raise UsageError(f"boosts: {shown(name)}: expected a number, found {shown(boost)}")
            bonus[self.ids.get(str(name), 0)] = float(boost)
        return Choice(items, bonus[items] if boosts else None)

    @cached_property
    def _all_items(self) -> Choice:
        return Choice(torch.arange(1, len(self.ids) + 1))

    def make_tables(
        self, asked: Histories, k: int, exclude_seen: bool | None, choice: Choice, because: int = 0
    ) -> Iterator[tuple[pd.DataFrame, int]]:
        """Yield tables as :meth:`recommend` returns them, pool by pool in their order, each
        with how many of its items are in the history already."""
        require_reasons(self.scorer, because, asked)
        hides_seen = self.hides_seen(exclude_seen)
        size = EXPLAINED if because else POOL
        for begin in range(0, max(len(asked), 1), size):
            pool = asked.select(np.arange(begin, min(begin + size, len(asked))))
            row, rank, item, score = self.rank_items(pool, k, exclude_seen, choice)
            table = pd.DataFrame(
                {
                    "id": np.array(pool.ids, dtype=object)[row],
                    "rank": rank,
                    "item": self.items[item - 1],
                    "score": score,
                    "by": np.where(pool.lengths[row] > 0, MODEL, POPULARITY),
                }
            )
            if because:
                effects = leave_one_out(self.scorer, pool, row, item, choice, hides_seen)
                table = add_reasons(table, effects, because, self.items)
            owner, n_items = np.repeat(np.arange(len(pool)), pool.lengths), len(self.items) + 1
            seen = pd.Series(row * n_items + item).isin(owner * n_items + pool.items)
            yield table, int(seen.sum())

    def require_id(self, name: str) -> int:
        """Return the id of an item; a UsageError if it is not known."""
        if name not in self.ids:
            raise UsageError(f"item {shown(name)} is not known{suggest(name, self.ids)}")
        return self.ids[name]

    @torch.inference_mode()
    def rank_items(
        self, histories: Histories, k: int, exclude_seen: bool | None, choice: Choice
    ) -> tuple[np.ndarray, ...]:
        """Return recommendations as arrays [p], history by history and the best first: number of
        the history, rank from 1, id of the item, and score."""
        self.require_k(k)
        hides_seen = self.hides_seen(exclude_seen)
        by_length = histories.lengths.argsort(kind="stable")
        empty, known = np.split(by_length, [int((histories.lengths == 0).sum())])
        found = [tuple(np.empty(0, kind) for kind in ("i8", "i8", "i8", "f4"))]
        if len(empty):  # the same for all of them
            best = find_best_items(lambda ids: self.popularity[ids][None], Choice(choice.items), k)
            found.append(_to_rows(empty, *(np.repeat(x, len(empty), 0) for x in best)))
        for begin in range(0, len(known), BATCH):
            rows = known[begin : begin + BATCH]
            batch = histories.select(rows)
            barred = batch.list_pairs() if hides_seen else None
            best = find_best_items(self.scorer.make_scores(batch), choice, k, barred)
            found.append(_to_rows(rows, *best))
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        return tuple(column[order] for column in columns)

    def hides_seen(self, exclude_seen: bool | None) -> bool:
        """Return whether seen items are excluded: as requested, or else as in evaluation."""
        return masks_history(self.config) if exclude_seen is None else exclude_seen

    @torch.inference_mode()
    def explain(
        self,
        history: Any = None,
        items: Sequence[str] | None = None,
        k: int = 10,
        user: str | None = None,
        exclude_seen: bool | None = None,
        at: float | str | datetime | None = None,
    ) -> pd.DataFrame:
        """Return how score and rank of items change without each of the past interactions.

        Each interaction is left out in turn, with its time; the others and the time of
        the request stay. Items are ranked among the same candidates as before.
        :func:`recbole_pos.inspect.explanation.draw_explanation` draws it.

        Args:
            history: one history, as in :meth:`Recommender.recommend`.
            items: names of the items to explain; the k recommended items if None.
            k: number of recommended items to explain.
            user: name of a user in the data, instead of a history.
            exclude_seen: as in :meth:`Recommender.recommend`.
            at: time of the request, as there.

        Returns:
            A row an item and a past interaction the model reads, items as given or the best first,
            interactions that carried the item most first: ``item``, ``rank``, ``score``, ``past``,
            the item of the interaction, ``steps_back``, 1 for the newest, ``score_change`` and
            ``rank_change``: what is added without it; missing if it is the only one.

        Raises:
            UsageError: if no item of the history is known, the model reads no history, or an item
                cannot be recommended.
        """
        if (history is None) == (user is None):
            raise UsageError("give a history or a user, one of the two")
        packed = self.read([history]) if user is None else self.read_users([user])
        packed = self.add_request_time(packed, at)
        require_reasons(self.scorer, 1, packed)
        if not packed.lengths[0]:
            raise UsageError(
                "history: no item of it is known to the model, so it gets the most popular items"
            )
        choice = self.choose_items()
        if items is None:
            item = self.rank_items(packed, k, exclude_seen, choice)[2]
        else:
            item = np.array([self.require_id(name) for name in map(str, items)], dtype=np.int64)
        if not len(item):
            raise UsageError("items: none to explain")
        if self.hides_seen(exclude_seen) and (seen := np.isin(item, packed.items)).any():
            raise UsageError(
                f"items: {shown(self.items[item[seen][0] - 1])} is in the history, and seen items "
                "are excluded; set exclude_seen to false"
            )
        row, hides_seen = np.zeros(len(item), dtype=np.int64), self.hides_seen(exclude_seen)
        effects = leave_one_out(self.scorer, packed, row, item, choice, hides_seen)
        found = pd.DataFrame(effects).sort_values(
            ["pair", "score_change"], kind="stable", ignore_index=True
        )
        found.insert(0, "item", self.items[item[found["pair"]] - 1])
        found["past"] = self.items[found["past"] - 1]
        found = found.astype({"rank": np.int64, "rank_change": "Int64"})
        columns = ["item", "rank", "score", "past", "steps_back", "score_change", "rank_change"]
        return found[columns]

    @torch.inference_mode()
    def encode(self, histories: Iterable[Any]) -> np.ndarray:
        """Return the vector of each history [b, d]: its product with an item's vector is the score.

        A history without a known item has the vector 0.

        Raises:
            UsageError: if the model has no such vectors, or a history is malformed.
        """
        vectors, packed = self.scorer.require_vectors(), self.add_request_time(self.read(histories))
        states = np.zeros((len(packed), vectors.size(1)), dtype=np.float32)
        known = np.flatnonzero(packed.lengths)
        for begin in range(0, len(known), BATCH):
            rows = known[begin : begin + BATCH]
            states[rows] = self.scorer.encode(packed.select(rows)).cpu().numpy()
        return states

    def item_vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """Return names [items] and vectors [items, d] of the catalogue.

        Raises:
            UsageError: if the model has no vectors of items.
        """
        return self.items, self.scorer.require_vectors()[1:].cpu().numpy()

    def similar(
        self,
        items: str | Sequence[str],
        k: int = 10,
        allowed: Iterable[str] | None = None,
        excluded: Iterable[str] | None = None,
    ) -> pd.DataFrame:
        """Return the items whose vectors have the highest cosine with those of given items.

        Args:
            items: names of items, or one name.
            k: neighbours of each item; fewer where fewer are left.
            allowed: names of the items to choose from; all if None.
            excluded: names of items to leave out.

        Returns:
            A row a neighbour, nearest first: ``item``, ``rank`` from 1, ``similar``, ``cosine``.

        Raises:
            UsageError: for unknown items, or a model without vectors.
        """
        names = list(map(str, np.atleast_1d(items)))
        for name in names:
            self.require_id(name)
        row, rank, item, cosine = self.find_nearest(names, k, self.choose_items(allowed, excluded))
        return pd.DataFrame(
            {
                "item": np.array(names, dtype=object)[row],
                "rank": rank,
                "similar": self.items[item - 1],
                "cosine": cosine,
            }
        )

    def find_nearest(self, names: Sequence[str], k: int, choice: Choice) -> tuple[np.ndarray, ...]:
        """Return the neighbours of :meth:`similar` as arrays: for each the number of the item in
        ``names``, the rank from 1, the id of the neighbour, and the cosine."""
        self.require_k(k)
        vectors = self._unit_vectors
        ids = torch.tensor([self.ids[name] for name in names], dtype=torch.int64)
        barred = torch.arange(len(ids)), ids
        best = find_best_items(lambda x: products(vectors[ids], vectors, x), choice, k, barred)
        return _to_rows(np.arange(len(ids)), *best)

    @cached_property
    def _unit_vectors(self) -> Tensor:
        """Vectors of the items [items + 1, d], scaled to length 1."""
        return torch.nn.functional.normalize(self.scorer.require_vectors(), dim=1).cpu()

    def require_k(self, k: int) -> None:
        """Raise a UsageError unless k is from 1 to the number of items."""
        if not (is_whole(k) and 1 <= k <= len(self.items)):
            raise UsageError(
                f"k: expected 1 to {len(self.items)}, the number of items, found {shown(k)}"
            )

    of_users = renamed("of_users", "read_users")
    choice = renamed("choice", "choose_items")
    parts = renamed("parts", "make_tables")


def _to_rows(owners: np.ndarray, score: np.ndarray, item: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the best items [b, k] of owners [b] as arrays [p]: owner, rank from 1, item and score;
    without those whose score is -inf, where few are left."""
    row, rank = np.nonzero(score > -np.inf)
    return owners[row], rank + 1, item[row, rank], score[row, rank]
