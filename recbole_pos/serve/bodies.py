"""Bodies of requests and of their answers, and how a model answers them; HTTP is in ``http.py``."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field

from recbole_pos.errors import UsageError
from recbole_pos.serve.explain import (
    MAX_REASONS,
    Effects,
    find_reasons,
    leave_one_out,
    require_reasons,
)
from recbole_pos.serve.histories import Histories, History, Name
from recbole_pos.serve.recommender import MODEL, POPULARITY, Recommender
from recbole_pos.values import shown

MAX_ROWS = 256  # histories, users, or items with neighbours, of a request
Count = Annotated[int, Field(ge=1, le=1000)]  # of items in each list of an answer


class _Body(BaseModel, extra="forbid", strict=True):
    """A body of a request: unknown fields are refused, and so is true in place of a number."""


class RecommendBody(_Body):
    """Whom to recommend to, either histories or users: see ``Recommender.recommend``."""

    histories: list[History] | None = Field(
        None, max_length=MAX_ROWS, description="objects, or lists of items, oldest first"
    )
    users: list[Name] | None = Field(None, max_length=MAX_ROWS, description="names in the data")
    k: Count = 10
    exclude_seen: bool | None = None
    allowed: list[Name] | None = None
    excluded: list[Name] | None = None
    boosts: dict[str, float] | None = None
    at: float | str | None = None
    because: int = Field(0, ge=0, le=MAX_REASONS)


class SimilarBody(_Body):
    """Items to find the neighbours of: see ``Recommender.similar``."""

    items: list[Name] = Field(min_length=1, max_length=MAX_ROWS)
    k: Count = 10
    allowed: list[Name] | None = None
    excluded: list[Name] | None = None


class Reason(BaseModel):
    """A past interaction that carried an item; changes are None if its history has no other."""

    item: str
    steps_back: int
    score_change: float | None
    rank_change: int | None


class Recommendation(BaseModel):
    """The items for one history or user, best first, with reasons for each if asked.

    A history with an ``error`` has no items, and ``by`` is None.
    """

    id: str | int
    items: list[str]
    scores: list[float]
    by: str | None
    unknown: int
    because: list[list[Reason]] | None = None
    error: str | None = None


class Neighbours(BaseModel):
    """The items most like one item, nearest first."""

    id: str
    items: list[str]
    cosines: list[float]


def recommend(trained: Recommender, body: RecommendBody) -> list[Recommendation]:
    """Return the recommendations for each history or user, in the order of the request.

    Raises:
        UsageError: as :meth:`Recommender.recommend` does.
    """
    if (body.histories is None) == (body.users is None):
        raise UsageError("give histories or users, one of the two")
    choice = trained.choose_items(body.allowed, body.excluded, body.boosts)
    if body.histories is None:
        packed = trained.read_users(body.users)
    else:
        packed = trained.read(body.histories)
    packed = trained.add_request_time(packed, body.at)
    require_reasons(trained.scorer, body.because, packed)

    row, _, item, score = trained.rank_items(packed, body.k, body.exclude_seen, choice)
    reasons: list[list[list[Reason]]] | None = None  # by history and item
    if body.because:
        hides_seen = trained.hides_seen(body.exclude_seen)
        effects = leave_one_out(trained.scorer, packed, row, item, choice, hides_seen)
        reasons = [[] for _ in range(len(packed))]
        reasons_by_item = _list_reasons(trained, find_reasons(effects, body.because), len(row))
        for index, reasons_of_item in zip(row, reasons_by_item, strict=True):
            reasons[index].append(reasons_of_item)

    items_and_scores = _split_by_row(trained, len(packed), row, item, score)
    answers = [
        Recommendation(
            id=packed.ids[index],
            items=items,
            scores=scores,
            by=_find_source(packed, index),
            unknown=packed.unknown[index],
            because=None if reasons is None else reasons[index],
            error=packed.errors.get(index),
        )
        for index, (items, scores) in enumerate(items_and_scores)
    ]
    if body.users is not None:  # the model reads a name once, and it gets an answer each time
        answer_by_name = {answer.id: answer for answer in answers}
        answers = [answer_by_name[name] for name in map(str, body.users)]
    return answers


def _find_source(histories: Histories, index: int) -> str | None:
    """Return what ranks the items for a history; None if it has an error."""
    if index in histories.errors:
        return None
    return MODEL if histories.lengths[index] else POPULARITY


def find_similar(trained: Recommender, body: SimilarBody) -> list[Neighbours]:
    """Return the neighbours of each item and their cosines, in the order of the request.

    Raises:
        UsageError: for unknown items, or a model without vectors.
    """
    names = list(map(str, body.items))
    for name in names:  # not by require_id, whose search for similar names takes seconds
        if name not in trained.ids:
            raise UsageError(f"item {shown(name)} is not known")
    choice = trained.choose_items(body.allowed, body.excluded)
    row, _, item, cosine = trained.find_nearest(names, body.k, choice)
    neighbours = _split_by_row(trained, len(names), row, item, cosine)
    return [
        Neighbours(id=name, items=items, cosines=cosines)
        for name, (items, cosines) in zip(names, neighbours, strict=True)
    ]


def _list_reasons(trained: Recommender, reasons: Effects, num_items: int) -> list[list[Reason]]:
    """Return the reasons of each of ``num_items`` recommended items, strongest first."""
    reasons_by_item: list[list[Reason]] = [[] for _ in range(num_items)]
    names = ("pair", "past", "steps_back", "score_change", "rank_change")
    columns = (reasons[name].tolist() for name in names)
    for pair, past, steps_back, score_change, rank_change in zip(*columns, strict=True):
        is_only = math.isnan(score_change)  # no other interaction is left; json has no NaN
        reason = Reason(
            item=trained.items[past - 1],
            steps_back=steps_back,
            score_change=None if is_only else score_change,
            rank_change=None if is_only else rank_change,
        )
        reasons_by_item[pair].append(reason)
    return reasons_by_item


def _split_by_row(
    trained: Recommender, num_rows: int, row: np.ndarray, item: np.ndarray, score: np.ndarray
) -> list[tuple[list[str], list[float]]]:
    """Return item names and scores of each of ``num_rows`` rows, from columns [p] sorted by row."""
    if num_rows == 0:
        return []
    starts = np.searchsorted(row, np.arange(1, num_rows))  # of all rows but the first
    names, scores = np.split(trained.items[item - 1], starts), np.split(score, starts)
    return [(items.tolist(), values.tolist()) for items, values in zip(names, scores, strict=True)]
