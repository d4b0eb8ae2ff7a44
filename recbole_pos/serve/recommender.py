"""A trained model in use: recommendations to its users and after any history.

:class:`Recommender` takes histories of items by name, or names of users, and returns tables of
items by name: recommended ones, explained ones, or those like others. ``histories.py`` reads what
it is given, ``scorer.py`` asks the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from recbole_pos.data.identity import Growth, extend_log
from recbole_pos.data.item_vectors import read_new_vectors, to_file
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import NeedsDataset, finds_dataset, load, load_without_data
from recbole_pos.layers.large_products import Choice
from recbole_pos.model.models import reads_users
from recbole_pos.serve.explain import (
    BATCH,
    add_reasons,
    leave_one_out,
    make_effects_table,
    require_reasons,
)
from recbole_pos.serve.fitted import FittedModel, find_run_folder
from recbole_pos.serve.histories import Fields, Histories, read_histories
from recbole_pos.serve.scorer import (
    Scorer,
    find_best_items,
    require_k,
    take_histories,
    to_columns,
)
from recbole_pos.values import listed, read_names, shown

POOL = 1 << 14  # histories that are sorted by length into batches: little padding
EXPLAINED_POOL = 1 << 10  # the same with reasons, each of which scores one more history
MODEL, POPULARITY = "model", "popularity"  # what the items of a history are ranked by


class Recommender(FittedModel):
    """A trained model with its catalogue; made by :func:`recbole_pos.fit` and :meth:`load`.

    A history is a list of item names as in the files, oldest first. A history without a known item
    gets the most popular items of training, and ``by`` says so.

    Examples:
        >>> trained = recbole_pos.Recommender.load("mine")
        >>> table = trained.recommend(histories=[["242", "302", "51"]], k=3)
        >>> list(table), len(table)
        (['id', 'rank', 'item', 'score', 'by'], 3)

    Attributes:
        growth: numbers of interactions, users and items that the dataset has gained since training.
        changed: names of the fields of users and items whose values have changed since training;
            the model reads the new ones.
        items: [items] names of the catalogue.
        ids: id of each item by name, from 1 in the order of ``items``.
        scorer: scores items after histories by the model.
        by_user: whether the model scores only users of its training by ids, and no histories.
        popularity: [items + 1] share of the training interactions that each item has, by id.
        unknown_users: dict whose keys are the names of users of the dataset who get the most
            popular items, since the model knows neither the user nor an item of the user's history.
    """

    def __init__(
        self, experiment: Experiment, folder: RunFolder | None = None, resources: Sequence[Any] = ()
    ) -> None:
        """Take the parts of a trained model, and index its items by name.

        Args:
            experiment: the trained model with its configuration and dataset.
            folder: folder of the run, if there is one.
            resources: objects that must live as long as this one, such as temporary folders.
        """
        super().__init__(experiment, folder, resources)
        dataset = experiment.dataset

        # Items: names, ids by name (id 0 is padding), what scores them, and their shares of the
        # training interactions.
        self.items: np.ndarray = dataset.field2id_token[dataset.iid_field][1:]
        self.ids: dict[str, int] = {name: i for i, name in enumerate(self.items, start=1)}
        self.scorer = Scorer(experiment.model, experiment.config, dataset.item_num)
        counts = torch.from_numpy(dataset.popularity).float()
        self.popularity = counts / max(float(counts.sum()), 1.0)

        # Some models, such as BPR, have a vector for each user of the training, by the user's id.
        # They read no histories, so that they can recommend to these users only.
        self.by_user = reads_users(self.config["model"], type(experiment.model))

        # How the dataset differs from that of the training.
        self.changed = experiment.changed  # names of fields of users and items with other values
        self.growth = Growth()  # numbers of new interactions, users and items: 0
        self.unknown_users: dict[str, None] = {}  # users of whom the model knows nothing: none

    @classmethod
    def load(
        cls,
        run_dir: str | Path,
        data_path: str | Path | None = None,
        histories_only: bool = False,
        item_vectors: Any = None,
    ) -> Recommender:
        """Load a trained model from its folder, to recommend, or to be evaluated and explained.

        Its dataset may have grown since the training. Without the dataset it recommends only to
        given histories, and only if the model needs no more of the dataset than names of items.

        Examples:
            >>> trained = recbole_pos.load("mine")
            >>> trained.dataset.user_num, len(trained.dataset.log)
            (944, 100000)

        Args:
            run_dir: the folder of a run, of :meth:`save`, or the .pth file of a plugin's model that
                RecBole's own functions have trained.
            data_path: the folder that holds the folder of the dataset; by default the run's.
            histories_only: True reads the dataset only if the model needs it; by default it is read
                if it is there.
            item_vectors: content vectors of further items, see :meth:`add_items`.

        Returns:
            The model with its dataset, if that was read, on the device of its configuration.

        Warns:
            RunWarning: if the run is unfinished, or the dataset is not where it was.

        Raises:
            UsageError: if it is not the folder of a run, or a dataset that is needed is missing.
            CheckpointError: if the dataset no longer has the data that the model was trained on.
        """
        # Read the dataset if it is there or asked for, unless only histories will be given. Else
        # load the model alone, and read the dataset only if the model needs it.
        if not histories_only and (data_path is not None or finds_dataset(run_dir)):
            trained = cls._load_with_data(run_dir, data_path)
        else:
            try:
                trained = cls(load_without_data(run_dir), folder=find_run_folder(run_dir))
            except NeedsDataset:  # the model reads more of the dataset than names of items
                trained = cls._load_with_data(run_dir, data_path)
            else:
                if not histories_only:
                    missing = NeedsDataset("histories of users", trained.config)
                    warnings.warn(str(missing), RunWarning, stacklevel=2)
        if item_vectors is not None:
            trained.add_items(item_vectors)
        return trained

    @classmethod
    def _load_with_data(cls, run_dir: str | Path, data_path: str | Path | None) -> Recommender:
        """Load a trained model with its dataset, which may have grown since the training.

        Later interactions of known items are appended to the histories of their users. New users
        with a known item get a history in this way. New users with unknown items only have no
        history, and get the most popular items. So do all new users if the model scores users by
        their ids, since it does not know theirs.

        Args:
            run_dir: the folder of the run.
            data_path: the folder that holds the folder of the dataset; None for the run's.

        Returns:
            The model. Its ``growth`` counts what the files have gained, and ``unknown_users`` are
            the new users who get the most popular items.
        """
        # With ``grown``, `load` accepts a dataset that has grown, and keeps what is new apart, as
        # ``held_out``. Then ``view`` appends the later interactions to the histories.
        experiment = load(run_dir, view=_append_later, grown=True, data_path=data_path)
        trained = cls(experiment, folder=find_run_folder(run_dir))
        held_out = experiment.dataset.held_out
        if held_out is None:  # nothing was added
            return trained
        trained.growth = held_out.growth

        # The new users of whom the model knows nothing; ``held_out.users`` have a known item.
        unknown_users = list(held_out.users_of_unknown_items)
        if trained.by_user:
            unknown_users = [*held_out.users, *unknown_users]
        trained.unknown_users = dict.fromkeys(unknown_users)
        return trained

    def add_items(self, item_vectors: Any) -> str:
        """Add items that were not in the training data, by vectors of their content, as of a text.

        Args:
            item_vectors: vectors in any form that the option of that name takes, made in the same
                way as the run's; items that the model knows stay as they are.

        Returns:
            A sentence with the number of new items.

        Raises:
            UsageError: if the model reads no content or more than content, or vectors do not fit;
                the model stays as it was.
        """
        model = self.experiment.model
        if getattr(model, "content_source", None) is None:  # the files of content vectors of a run
            raise UsageError(
                f"item_vectors: {self.config['model']} was trained without the content of items; "
                "train it with item_vectors and item_vectors_use: add or replace"
            )

        # New items get the ids behind the known ones. All that depends on the number of items is
        # made again: among it cached properties, which are computed again when they are read.
        names, vectors = read_new_vectors(to_file(item_vectors), self.ids)
        model.add_items(vectors)  # refuses vectors that do not fit before it changes anything
        self.items = np.append(self.items, names)
        self.ids = {name: i for i, name in enumerate(self.items, start=1)}
        self.popularity = torch.nn.functional.pad(self.popularity, (0, len(names)))  # zeros
        self.scorer = Scorer(model, self.config, len(self.ids) + 1)
        self.num_added += len(names)
        for cached in ("_all_items", "_unit_vectors"):
            self.__dict__.pop(cached, None)
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
        at: float | str | date | datetime | None = None,
        because: int = 0,
    ) -> pd.DataFrame:
        """Return the k items with the highest scores, best first; ties in the order of ``items``.

        Args:
            users: names of users; by default (and without histories) all with an interaction.
            histories: for each person a list of items, oldest first, or a mapping. It has ``items``
                and may have ``id``; ``times`` of the items; ``at``, the time of the request;
                ``allowed`` and ``excluded`` items of this person only; and the features that the
                model was trained with: ``events``, by field a list with a value for each item, and
                ``user``, by field one value. A time is a number in the unit of the time field, a
                date, or text in ISO 8601, in UTC if it names no zone. A DataFrame or an Arrow table
                with such columns will do, too, and so will a Series of lists, by id.
            k: items per person; fewer if fewer are left to recommend.
            exclude_seen: whether items of the history are excluded; by default as in evaluation.
            allowed: names of the items to choose from, such as those in stock; by default all.
            excluded: names of items to leave out.
            boosts: numbers to add to the scores of items by name; -0.69 halves and 0.69 doubles
                odds (the scores of models trained by cross-entropy are log-odds). Popularity, in
                place of such a score, gets no boost.
            at: time at which the recommendations are asked for, if the model reads it (it was
                trained with ``request_time: target``) and a history has none of its own. By default
                it is now, or the newest time of the history if that is later.
            because: number of reasons to name for each item: past interactions without which its
                score falls; see :meth:`explain`.

        Warns:
            RunWarning: if a model that reads the time of the request gets none.

        Returns:
            A row per recommendation: ``id`` (as given, or the name of the user), ``rank`` from 1,
            ``item``, ``score``, and ``by``: model, or popularity for a history without a known
            item. With ``because``, for each reason, the strongest first: ``because_1``, the item of
            a past interaction, and ``steps_back_1``, ``score_change_1`` and ``rank_change_1`` as
            in :meth:`explain`. They are empty where an item has fewer reasons.

        Raises:
            UsageError: for users without an interaction, a malformed history, a request before the
                newest interaction of its history, scores that are not numbers, or ``because`` with
                a model that reads no history.
        """
        if users is not None and histories is not None:
            raise UsageError("give users or histories, not both")

        # Read the histories into arrays, each with the time of its request. ``make_tables`` yields
        # the table of recommendations in parts, some histories at a time.
        choice = self.choose_items(allowed, excluded, boosts)
        packed = self.read_users(users) if histories is None else self.read(histories)
        packed = self.add_request_time(packed, at)
        tables = self.make_tables(packed, k, exclude_seen, choice, because)
        return pd.concat(tables, ignore_index=True)

    def read(self, histories: Iterable[Any]) -> Histories:
        """Read histories, in any of the forms of :meth:`recommend`, into arrays with ids of items.

        Raises:
            UsageError: if the model does not read histories, or one is malformed.
        """
        if self.by_user:
            raise UsageError(
                f"{self.config['model']} scores the users it was trained with, by their names; it "
                "cannot read a history. Sequential models can"
            )
        needs_time = self.scorer.needs_time
        packed = read_histories(histories, self.ids, needs_time, self._unit, self._fields)
        self._refuse_late_times(packed)
        return packed

    @cached_property
    def _fields(self) -> Fields:
        """Feature fields that histories may have: events or user -> field -> ids of its names."""
        return self.scorer.list_fields(self.dataset.field2id_token)

    def list_users(self) -> list[str]:
        """Return the names of all users with an interaction, those with unknown items only last."""
        names = self.dataset.field2id_token[self.dataset.uid_field]
        return [*names[self.dataset.log.lengths > 0], *self.unknown_users]

    def read_users(self, users: Sequence[str | int] | None = None) -> Histories:
        """Return the histories of users in the dataset.

        Args:
            users: names of users, of whom each is taken once; by default all users with an
                interaction, whether the model knows an item of it or not.

        Returns:
            Histories with the names of the users as ``ids``; without interactions where the model
            knows no item of a user.

        Raises:
            UsageError: if a user has no interaction.
        """
        given = self.list_users() if users is None else read_names(users, "users")
        names = list(dict.fromkeys(given))  # each once
        histories = take_histories(self.dataset, names)

        # A user without any interaction in the dataset is an error, one without known items
        # (``unknown_users``) is not.
        empty = [names[row] for row in np.flatnonzero(histories.lengths == 0)]
        absent = [name for name in empty if name not in self.unknown_users]
        if absent:
            raise UsageError(
                f"users: {len(absent)} of {len(names)} have no interaction in "
                f"{shown(self.dataset.dataset_name)}: {listed(absent)}"
            )
        return histories

    def make_tables(
        self, packed: Histories, k: int, exclude_seen: bool | None, choice: Choice, because: int = 0
    ) -> Iterator[pd.DataFrame]:
        """Yield the table of recommendations that :meth:`recommend` returns, in several parts.

        Args:
            packed: the histories to recommend to.
            k: number of items for each history.
            exclude_seen: whether items of a history are not recommended to it; None decides as in
                evaluation.
            choice: ids of the items that may be recommended, and boosts added to their scores.
            because: number of past interactions to name as reasons for each item.

        Yields:
            Tables with the columns ``id``, ``rank``, ``item``, ``score``, ``by`` (model or
            popularity) and those of the reasons. Without histories it is one table without rows.
        """
        require_reasons(self.scorer, because, packed)
        hides_seen = self.hides_seen(exclude_seen)

        # Take some thousand histories at a time (a pool), which make one table; fewer with reasons.
        pool_size = EXPLAINED_POOL if because else POOL
        for start in range(0, max(len(packed), 1), pool_size):  # once if there are no histories
            end = min(start + pool_size, len(packed))
            pool = packed.select(np.arange(start, end))

            # For each recommendation: index of the history in the pool, rank, item id, and score.
            history, rank, item, score = self.rank_items(pool, k, hides_seen, choice)
            # The most popular items are for histories without known items, whose length is 0.
            is_by_model = pool.lengths[history] > 0
            table = pd.DataFrame(
                {
                    "id": np.array(pool.ids, dtype=object)[history],
                    "rank": rank,
                    "item": self.items[item - 1],  # the first name is of the id 1
                    "score": score,
                    "by": np.where(is_by_model, MODEL, POPULARITY),
                }
            )
            if because:  # how score and rank change without each past interaction, as reasons
                effects = leave_one_out(self.scorer, pool, history, item, choice, hides_seen)
                table = add_reasons(table, effects, because, self.items)
            yield table

    @torch.inference_mode()
    def rank_items(
        self, histories: Histories, k: int, hides_seen: bool, choice: Choice
    ) -> tuple[np.ndarray, ...]:
        """Return the k items with the highest scores for each history.

        Histories without a known item get the most popular items.

        Args:
            histories: the histories.
            k: number of items for each.
            hides_seen: whether items of a history are not recommended to it.
            choice: ids of the items that may be recommended, and boosts added to their scores.

        Returns:
            Columns with an entry for each of p recommendations, in the order of the histories and
            best first: index of the history, rank from 1, item id, score.
        """
        k = require_k(k)

        # Divide the histories into empty ones and others. The others are sorted by length, since
        # batches of histories of about the same length need little padding.
        empty = np.flatnonzero(histories.lengths == 0)
        not_empty = np.flatnonzero(histories.lengths)
        not_empty = not_empty[histories.lengths[not_empty].argsort(kind="stable")]

        # A ranking has four columns: index of the history, rank, item and score. The first one is
        # empty, so that there is something to concatenate if nothing is recommended.
        rankings = [tuple(np.empty(0, dtype) for dtype in ("i8", "i8", "i8", "f4"))]
        for rows in _divide(empty):  # BATCH at a time
            score, item = self._rank_by_popularity(histories.select(rows), k, choice)
            rankings.append(to_columns(histories.ids, rows, score, item))
        for rows in _divide(not_empty):
            score, item = self._rank_by_model(histories.select(rows), k, hides_seen, choice)
            rankings.append(to_columns(histories.ids, rows, score, item))

        # Put the entries back into the order of the histories.
        row, rank, item, score = map(np.concatenate, zip(*rankings, strict=True))
        order = np.lexsort((rank, row))
        return row[order], rank[order], item[order], score[order]

    def _rank_by_popularity(
        self, histories: Histories, k: int, choice: Choice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank the items by popularity, for histories of which no item is known to the model.

        Args:
            histories: b histories, each without interactions.
            k: number of items for each; all that may be recommended if there are fewer.
            choice: ids of the items that may be recommended. Its boosts are ignored here, since
                they are made for scores of the model.

        Returns:
            Popularity (share of the training interactions, -inf where no item is left) and item
            ids, both [b, k].
        """
        # the popularity of each item, once for each history: [b, c] for c ids
        scores = histories.restrict(lambda ids: self.popularity[ids].repeat(len(histories), 1))
        barred = histories.list_barred(hides_seen=False)  # only what histories exclude
        return find_best_items(scores, Choice(choice.items), k, barred)

    def _rank_by_model(
        self, histories: Histories, k: int, hides_seen: bool, choice: Choice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank the items for each of b histories by the scores of the model.

        Args:
            histories: b histories, each with an item that the model knows.
            k: number of items for each; all that may be recommended if there are fewer.
            hides_seen: whether items of a history are not recommended to it.
            choice: ids of the items that may be recommended, and boosts added to their scores.

        Returns:
            Scores (-inf where no item is left) and item ids, both [b, k].
        """
        barred = histories.list_barred(hides_seen)  # pairs of a history and a hidden item

        # An approximate index finds the items of the highest scores without scoring all. Boosts and
        # a few other requests are beyond it (`can_rank` is false): they are ranked exactly.
        index = self.scorer.index  # None if the user asked for no index
        if index is not None and index.can_rank(histories, k, choice):
            return index.find_best(self.scorer.encode(histories), k, choice, barred)

        return find_best_items(self.scorer.make_scores(histories), choice, k, barred)

    @torch.inference_mode()
    def explain(
        self,
        history: Any = None,
        items: Sequence[str] | None = None,
        k: int = 10,
        user: str | None = None,
        exclude_seen: bool | None = None,
        at: float | str | date | datetime | None = None,
    ) -> pd.DataFrame:
        """Tell which past interactions carry recommended items: how each changes score and rank.

        Each interaction of the history is left out in turn, and the items are scored again among
        the same candidates. The other interactions and the time of the request stay.
        :func:`recbole_pos.experiment.pictures.draw_explanation` draws the result.

        Args:
            history: one history, as in :meth:`recommend`.
            items: names of the items to explain; by default the k recommended items.
            k: number of recommended items to explain.
            user: name of a user in the dataset, instead of a history.
            exclude_seen: as in :meth:`recommend`, and so is ``at``.

        Returns:
            A row for each item and each past interaction that the model reads: ``item``, ``rank``,
            ``score``; ``past``, the item of the interaction; ``steps_back``, 1 for the newest;
            ``score_change`` and ``rank_change``, values without it minus those with it (missing if
            it is the only one). For each item, the interactions come first without which its score
            falls most.

        Raises:
            UsageError: if no item of the history is known, the model reads no history, or an item
                cannot be recommended.
        """
        # Read the history into arrays, for a batch of this one history.
        if (history is None) == (user is None):
            raise UsageError("give a history or a user, one of the two")
        batch = self.read([history]) if user is None else self.read_users([user])
        batch = self.add_request_time(batch, at)
        require_reasons(self.scorer, 1, batch)
        if not batch.lengths[0]:
            raise UsageError(
                "history: no item of it is known to the model, so it gets the most popular items"
            )

        # Find the ids of the items to explain: the given items, or the recommended ones.
        choice, hides_seen = self.choose_items(), self.hides_seen(exclude_seen)  # all items
        if items is None:
            _row, _rank, item_ids, _score = self.rank_items(batch, k, hides_seen, choice)
        else:
            names = dict.fromkeys(read_names(items, "items"))  # each name once, in this order
            item_ids = np.array([self.require_id(name) for name in names], dtype=np.int64)
        seen_ids = item_ids[np.isin(item_ids, batch.items)]
        if hides_seen and len(seen_ids):
            raise UsageError(
                f"items: {shown(self.items[seen_ids[0] - 1])} is in the history, and seen items "
                "are excluded; set exclude_seen to false"
            )

        # Score the items without each interaction in turn: how scores and ranks change.
        history_index = np.zeros_like(item_ids)  # every item is for the only history
        effects = leave_one_out(self.scorer, batch, history_index, item_ids, choice, hides_seen)
        return make_effects_table(effects, item_ids, self.items)

    @torch.inference_mode()
    def encode(self, histories: Iterable[Any]) -> np.ndarray:
        """Return the vector of each history, whose products with item vectors are the scores.

        Args:
            histories: b histories in the forms that :meth:`recommend` takes.

        Returns:
            [b, d] float32; zeros for a history without a known item.

        Raises:
            UsageError: if the model has no such vectors, or a history is malformed.
        """
        d = self.scorer.require_vectors().size(1)  # [items + 1, d]
        packed = self.add_request_time(self.read(histories))
        states = np.zeros((len(packed), d), dtype=np.float32)
        for rows in _divide(np.flatnonzero(packed.lengths)):  # BATCH histories at a time
            states[rows] = self.scorer.encode(packed.select(rows)).cpu().numpy()
        return states


def _append_later(dataset: Any) -> Any:
    """Return a dataset with the interactions that have come since the training appended to it.

    They are in ``held_out``, which is None if there are none. Those of users who are new since then
    are appended only if the model reads histories: other models know only the training's users.
    """
    if dataset.held_out is None:
        return dataset
    reads_histories = not reads_users(dataset.config["model"], dataset.config.model_class)
    return extend_log(dataset, dataset.held_out, has_new_users=reads_histories)


def _divide(rows: np.ndarray) -> list[np.ndarray]:
    """Divide indices of histories into batches, in their order; none are empty."""
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
