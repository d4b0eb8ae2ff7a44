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
from recbole_pos.experiment.catalogue import Catalogue, NeedsDataset
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import finds_dataset, load, load_without_data
from recbole_pos.files import TemporaryFolder
from recbole_pos.layers.catalogue import Choice, products
from recbole_pos.model.recbole_models import reads_users
from recbole_pos.serve.explain import (
    BATCH,
    ExplainingModel,
    add_reasons,
    reason_columns,
    reasons,
    require_reasons,
)
from recbole_pos.serve.fitted import folder_of
from recbole_pos.serve.histories import Field, Histories, read_histories, read_moment
from recbole_pos.serve.scorer import Scorer, top_items
from recbole_pos.values import SECONDS, is_number, is_whole, shown, suggest

POOL = 64  # batches whose histories are sorted by length: little padding
MODEL, POPULARITY = "model", "popularity"
LARGEST = 1e30  # boost: float32 ends soon after, and sums must stay finite
_YEAR = 365.25 * SECONDS["days"]
COLUMNS = ("rank", "item", "score", "by")


class Recommender(ExplainingModel):
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
        strangers: Iterable[str] = (),
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
        self.events = dataset.events if isinstance(dataset, Catalogue) else len(dataset.log)
        self.popularity = counts / max(float(counts.sum()), 1.0)
        self.strangers = dict.fromkeys(strangers)  # in the data, and unknown to the model
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
        trained = cls._loaded(run_dir, data_path, histories_only)
        if item_vectors is not None:
            trained.add_items(item_vectors)
        return trained

    @classmethod
    def _loaded(
        cls, run_dir: str | Path, data_path: str | Path | None, histories_only: bool | None
    ) -> Recommender:
        """Load the model, without its dataset where that is possible; see :meth:`load`."""
        if data_path is not None or histories_only is False:
            return cls._with_data(run_dir, data_path)
        has_dataset = finds_dataset(run_dir)
        if has_dataset and not histories_only:
            return cls._with_data(run_dir, None)
        try:
            trained = cls(load_without_data(run_dir), Growth(), folder=folder_of(run_dir))
        except NeedsDataset:
            if not has_dataset:
                raise
            return cls._with_data(run_dir, None)
        if not histories_only:
            warnings.warn(str(NeedsDataset("histories of users", trained.config)), RunWarning, 3)
        return trained

    @classmethod
    def _with_data(cls, run_dir: str | Path, data_path: str | Path | None) -> Recommender:
        """Load the model and its dataset, with what the data have beyond the training."""
        growth, strangers = Growth(), []

        def with_later(dataset: Any) -> Any:
            nonlocal growth, strangers
            later = dataset.held_out
            if later is None:
                return dataset
            growth = later.growth
            has_new_users = not reads_users(dataset.config["model"], dataset.config.model_class)
            strangers = [*([] if has_new_users else later.users), *later.lonely]
            return extend_log(dataset, later, has_new_users)

        experiment = load(run_dir, with_later, grown=True, data_path=data_path)
        return cls(experiment, growth, strangers, folder_of(run_dir))

    def __reduce__(self) -> tuple[Any, ...]:
        dataset = None if isinstance(self.dataset, Catalogue) else self.dataset
        return _unpack, (type(self), self.pack(), dataset, self.growth, [*self.strangers])

    def add_items(self, item_vectors: Any) -> str:
        """Add items that were not in the training data to the catalogue, by their content vectors.

        Args:
            item_vectors: as the option of that name, made in the way of those of the run; items
                that the model knows stay as they are.

        Returns:
            A sentence with the number of new items.

        Raises:
            UsageError: if the model reads no content or other attributes, or vectors do not fit.
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
        for cached in ("_every", "_directions"):
            self.__dict__.pop(cached, None)
        self._require_readable(names)
        return f"new items by their content: {len(names):,}"

    @torch.inference_mode()
    def _require_readable(self, item_names: np.ndarray) -> None:
        """Raise a UsageError if the model cannot encode a history of new items, tried with one."""
        if not len(item_names):
            return
        try:
            self.scorer.states(self.read([{"items": [item_names[0]], "times": [0.0], "at": 0.0}]))
        except IndexError as error:
            raise UsageError(
                f"item_vectors: {self.config['model']} reads attributes of items, which new ones "
                "do not have; add them to the data and train again"
            ) from error

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
                and perhaps ``id``, ``times`` and ``at`` (in the unit of the time field, or as ISO
                8601 has them, UTC where no zone is given), ``events`` and ``user`` (for models with
                ``event_features`` and ``user_features``: by field a list with one value an item,
                and a value); a Series of lists, by id, or a DataFrame with such columns.
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
        choice = self.choice(allowed, excluded, boosts)
        asked = self.of_users(users) if histories is None else self.read(histories)
        asked = self.requested(asked, at)
        parts = [table for table, _ in self.parts(asked, k, exclude_seen, choice, because)]
        if not parts:
            return pd.DataFrame(columns=["id", *COLUMNS, *reason_columns(because)])
        return pd.concat(parts, ignore_index=True)

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
        needs_time = self.scorer.needs_time
        return read_histories(histories, self.ids, needs_time, self._unit, self._fields)

    @cached_property
    def _fields(self) -> dict[str, dict[str, Field]]:
        """Fields of interactions and users that histories may have, beside items and times."""
        names = self.dataset.field2id_token

        def describe(name: str, embed: Any) -> Field:
            ids: dict[str, int] = (
                {} if embed.numeric else {one: i for i, one in enumerate(names[name])}
            )
            return None if embed.numeric else (ids, bool(embed.is_list))

        return {
            table: {name: describe(name, embed) for name, embed in fields.items()}
            for table, fields in self.scorer.fields.items()
        }

    def requested(self, asked: Histories, at: float | str | datetime | None = None) -> Histories:
        """Return histories with a time of the request each, if the model reads it.

        Args:
            asked: the histories.
            at: time of the requests that have none; now if None.

        Warns:
            RunWarning: once, if the present time is taken.

        Raises:
            UsageError: for a time that the model does not read, or before the newest event.
        """
        if not self.scorer.reads_request:
            if at is not None or asked.at is not None:
                raise UsageError(
                    f"at: {self.config['model']} was trained with request_time: none and reads no "
                    "time of a request; leave it out"
                )
            return asked
        if at is not None:
            return asked.asked_at(read_moment(at, "at", self._unit))
        if asked.at is not None and not np.isnan(asked.at).any():
            return asked.asked_at(0.0)
        if self._unit is None:
            raise UsageError(
                "at: the time field counts no time, so now has no value in it; give at"
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "at: the model reads the time of the request: now is taken", RunWarning, 3
            )
        return asked.asked_at(time.time() / self._unit)

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

    def of_users(self, users: Sequence[str] | None = None) -> Histories:
        """Return the histories of users in the data, each user once; of all with an event if None.

        Raises:
            UsageError: if a user has no event.
        """
        dataset, log = self.dataset, self.dataset.log
        names = dataset.field2id_token[dataset.uid_field]
        if users is None:
            wanted = [*names[log.lengths > 0], *self.strangers]
        else:
            wanted = list(dict.fromkeys([users] if isinstance(users, str) else map(str, users)))
        known = dataset.field2token_id[dataset.uid_field]
        ids = np.array([known.get(user, 0) for user in wanted], dtype=np.int64)
        lengths = log.lengths[ids]
        absent = [
            user
            for user, n in zip(wanted, lengths, strict=True)
            if not n and user not in self.strangers
        ]
        if absent or not wanted:
            named = ", ".join(map(shown, absent[:5])) + (", ..." if len(absent) > 5 else "")
            raise UsageError(
                f"users: {len(absent)} of {len(wanted)} have no event in "
                f"{shown(dataset.dataset_name)}{': ' if absent else ''}{named}"
            )
        events = torch.from_numpy(gather_index(log.offsets[ids], lengths))
        items, times = log.items[events].numpy(), log.times[events].numpy()
        rows, unknown = torch.from_numpy(ids), np.zeros_like(ids)
        features = dataset.features().map(lambda x: x[events], lambda x: x[rows])
        return Histories(wanted, items, lengths, times, unknown, ids, features=features)

    def choice(
        self,
        allowed: Iterable[str] | None = None,
        excluded: Iterable[str] | None = None,
        boosts: Mapping[str, float] | None = None,
    ) -> Choice:
        """Return the items that may be recommended and their boosts; unknown names are left out.

        Raises:
            UsageError: if no item is left, or a boost is not a finite number.
        """
        if allowed is None and excluded is None and not boosts:
            return self._every
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
    def _every(self) -> Choice:
        return Choice(torch.arange(1, len(self.ids) + 1))

    def parts(
        self,
        asked: Histories,
        k: int,
        exclude_seen: bool | None,
        choice: Choice,
        because: int = 0,
    ) -> Iterator[tuple[pd.DataFrame, int]]:
        """Yield tables as :meth:`recommend` returns them, pool by pool in the order of ``asked``,
        each with how many of its items are in the history already."""
        names = np.array(asked.ids, dtype=object)
        require_reasons(self.scorer, because, asked)
        for row, rank, item, score, by in self.ranked(asked, k, exclude_seen, choice):
            table = pd.DataFrame(
                {
                    "id": names[row],
                    "rank": rank,
                    "item": self.items[item - 1],
                    "score": score,
                    "by": np.where(by, MODEL, POPULARITY),
                }
            )
            if because:
                hide = self.hides_seen(exclude_seen)
                found = reasons(self.scorer, asked, row, item, because, choice, hide)
                table = add_reasons(table, found, self.items)
            yield table, 0 if exclude_seen else asked.having(row, item)

    def require_id(self, name: str) -> int:
        """Return the id of an item; a UsageError if it is not known."""
        if name not in self.ids:
            raise UsageError(f"item {shown(name)} is not known{suggest(name, self.ids)}")
        return self.ids[name]

    @torch.inference_mode()
    def ranked(
        self, asked: Histories, k: int, exclude_seen: bool | None, choice: Choice
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the recommendations of :meth:`parts` as arrays [p]: number of the history, rank
        from 1, id of the item, score, and whether the score is the model's."""
        self.require_k(k)
        hide = self.hides_seen(exclude_seen)
        for begin in range(0, len(asked), BATCH * POOL):
            pool = np.arange(begin, min(begin + BATCH * POOL, len(asked)))
            pool = pool[np.argsort(asked.lengths[pool], kind="stable")]
            found = [
                self._batch(asked.some(rows), rows, k, hide, choice)
                for rows in np.split(pool, np.arange(BATCH, len(pool), BATCH))
            ]
            row, rank, item, score, by = (np.concatenate(column) for column in zip(*found))  # noqa: B905
            order = np.lexsort((rank, row))
            yield row[order], rank[order], item[order], score[order], by[order]

    def hides_seen(self, exclude_seen: bool | None) -> bool:
        """Return whether seen items are excluded: as requested, or else as in evaluation."""
        return masks_history(self.config) if exclude_seen is None else exclude_seen

    def _batch(
        self, asked: Histories, rows: np.ndarray, k: int, exclude_seen: bool, choice: Choice
    ) -> tuple[np.ndarray, ...]:
        """Return the recommendations of a batch; the most popular items for empty histories."""
        found = []
        for by_model in (True, False):
            members = np.flatnonzero((asked.lengths > 0) == by_model)
            if not len(members):
                continue
            group = asked.some(members)
            barred = None
            if exclude_seen:
                of_row = torch.repeat_interleave(torch.from_numpy(group.lengths))
                barred = of_row, torch.from_numpy(group.items)
            if by_model:
                score, item = top_items(self.scorer.scores(group), choice, k, barred)
            else:  # the same for all of them
                score, item = top_items(
                    lambda ids: self.popularity[ids][None], Choice(choice.items), k
                )
                score, item = (np.repeat(x, len(group), 0) for x in (score, item))
            row, rank = np.nonzero(score > -np.inf)  # all but a few items may be left out
            by = np.full(len(row), by_model)
            found.append((rows[members][row], rank + 1, item[row, rank], score[row, rank], by))
        return tuple(map(np.concatenate, zip(*found)))  # noqa: B905

    @torch.inference_mode()
    def encode(self, histories: Iterable[Any]) -> np.ndarray:
        """Return the vector of each history [b, d]: its product with an item's vector is the score.

        A history without a known item has the vector 0.

        Raises:
            UsageError: if the model has no such vectors, or a history is malformed.
        """
        vectors, asked = self.scorer.require_vectors(), self.requested(self.read(histories))
        states = np.zeros((len(asked), vectors.size(1)), dtype=np.float32)
        known = np.flatnonzero(asked.lengths)
        for rows in np.split(known, np.arange(BATCH, len(known), BATCH)):
            if len(rows):
                states[rows] = self.scorer.states(asked.some(rows)).cpu().numpy()
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
        is_single = isinstance(items, str) or not isinstance(items, Iterable)
        names = [str(item) for item in ([items] if is_single else items)]
        for name in names:
            self.require_id(name)
        row, rank, item, cosine = self.nearest(names, k, self.choice(allowed, excluded))
        return pd.DataFrame(
            {
                "item": np.array(names, dtype=object)[row],
                "rank": rank,
                "similar": self.items[item - 1],
                "cosine": cosine,
            }
        )

    def nearest(self, names: Sequence[str], k: int, choice: Choice) -> tuple[np.ndarray, ...]:
        """Return the neighbours of :meth:`similar` as arrays: for each the number of the item in
        ``names``, the rank from 1, the id of the neighbour, and the cosine."""
        self.require_k(k)
        vectors = self._directions
        ids = torch.tensor([self.ids[name] for name in names], dtype=torch.int64)
        cosine, item = top_items(
            lambda some: products(vectors[ids], vectors, some),
            choice,
            k,
            (torch.arange(len(ids)), ids),
        )
        row, rank = np.nonzero(cosine > -np.inf)
        return row, rank + 1, item[row, rank], cosine[row, rank]

    @cached_property
    def _directions(self) -> Tensor:
        """Vectors of the items [items + 1, d], scaled to length 1."""
        return torch.nn.functional.normalize(self.scorer.require_vectors(), dim=1).cpu()

    def require_k(self, k: int) -> int:
        """Return k; raise a UsageError unless it is from 1 to the number of items."""
        if not (is_whole(k) and 1 <= k <= len(self.items)):
            raise UsageError(
                f"k: expected 1 to {len(self.items)}, the number of items, found {shown(k)}"
            )
        return k


def _unpack(
    kind: type[Recommender],
    files: dict[str, bytes],
    dataset: Any,
    growth: Growth,
    strangers: list[str],
) -> Recommender:
    """Restore a pickled model: write its run into a temporary folder and load it from there."""
    home = TemporaryFolder()
    for name, content in files.items():
        (home.path / name).write_bytes(content)
    if dataset is None:
        experiment = load_without_data(home.path)
    else:
        experiment = load(home.path, dataset=dataset, grown=True)
    return kind(experiment, growth, strangers, RunFolder(home.path), [home])
