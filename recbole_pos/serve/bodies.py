"""Bodies of requests and their answers, as json; the only part of HTTP here is the status."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, FailFast, Field, ValidationError, WithJsonSchema

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.serve.explain import Effects, find_reasons, leave_one_out, require_reasons
from recbole_pos.serve.histories import History, Name, describe_invalid
from recbole_pos.serve.recommender import MODEL, POPULARITY, Recommender
from recbole_pos.values import shown


class Refusal(UsageError):
    """An error of a request, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_Names = Annotated[list[Name] | None, FailFast()]
_LIST = {"type": "array", "items": {"type": ["string", "integer"]}, "description": "oldest first"}
_SCHEMA = WithJsonSchema({"anyOf": [History.model_json_schema(), _LIST]})


class _Body(BaseModel, extra="forbid", strict=True):
    """A body of a request: unknown fields are refused, and so is true in place of a number."""

    model: str | None = None  # name of the model that answers, if the server has several


class RecommendBody(_Body):
    """What to recommend: see ``Recommender.recommend``."""

    histories: Annotated[list[Annotated[History, _SCHEMA]] | None, FailFast()] = None
    users: _Names = None
    k: int = 10
    exclude_seen: bool | None = None
    allowed: _Names = None
    excluded: _Names = None
    boosts: dict[str, float] | None = None
    at: float | str | None = None
    because: int = 0

    def split_by_model(
        self, choose: Callable[[str | int | None], str]
    ) -> dict[str, tuple[list[int], RecommendBody]]:
        """Return positions of the histories or users of each model, and a body with only these.

        ``choose`` returns the model for an id or None. A history without an id gets its position as
        id, in place. A body without any goes to the model for None, which checks the rest of it.
        """
        field = "users" if self.histories is None else "histories"
        people: list[Any] = self.histories or list(map(str, self.users or ()))
        if not people:
            return {self.model or choose(None): ([], self)}
        positions_by_model: dict[str, list[int]] = {}
        for position, person in enumerate(people):
            person_id = person.id if isinstance(person, History) else person
            name = self.model or choose(person_id)
            positions_by_model.setdefault(name, []).append(position)
            if person_id is None:
                person.id = position
        return {
            name: (positions, self.model_copy(update={field: [people[p] for p in positions]}))
            for name, positions in positions_by_model.items()
        }


class SimilarBody(_Body):
    """Items to find the neighbours of: see ``Recommender.similar``."""

    items: Annotated[list[Name], FailFast()] = Field(min_length=1)
    k: int = 10
    allowed: _Names = None
    excluded: _Names = None


class ReloadBody(_Body):
    """The run to load: by default the one in use, of the model named, by default of all."""

    run_dir: str | None = None


Body = TypeVar("Body", bound=_Body)


def parse(kind: type[Body], content: bytes) -> Body:
    """Return the body of a request, validated as of ``kind``.

    Raises:
        Refusal: 400 if it is not json, 422 if a field is wrong.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise Refusal(400, first["msg"]) from None
        raise Refusal(422, describe_invalid(error, keys=kind.model_fields)) from None


def recommend(trained: Recommender, body: RecommendBody, limits: ServeArguments) -> list[dict]:
    """Return the recommendations for each history or user, in the order of the request.

    Their keys are ``id``, ``items``, ``scores``, ``by``, ``unknown`` and, if asked, ``because``.

    Raises:
        UsageError: as :meth:`Recommender.recommend` does.
        Refusal: if too many interactions would be left out.
    """
    choice = trained.choose_items(body.allowed, body.excluded, body.boosts)
    if body.histories is None:
        packed = trained.read_users(body.users)
    else:
        packed = trained.read(body.histories)
    packed = trained.add_request_time(packed, body.at)
    require_reasons(trained.scorer, body.because, packed)
    if body.because:
        reach = trained.scorer.reach
        num_read = packed.lengths if reach is None else np.minimum(packed.lengths, reach)
        _require_at_most(
            "because: interactions to leave out", int(num_read.sum()), limits.max_left_out
        )
    row, _, item, score = trained.rank_items(packed, body.k, body.exclude_seen, choice)
    items_and_scores = _split_by_row(trained, len(packed), row, item, score)
    answers: list[dict] = [
        {
            "id": packed.ids[index],
            "items": items,
            "scores": scores,
            "by": MODEL if packed.lengths[index] else POPULARITY,
            "unknown": int(packed.unknown[index]),
        }
        for index, (items, scores) in enumerate(items_and_scores)
    ]
    if body.because:
        hides_seen = trained.hides_seen(body.exclude_seen)
        effects = leave_one_out(trained.scorer, packed, row, item, choice, hides_seen)
        reasons_by_item = _list_reasons(trained, find_reasons(effects, body.because), len(row))
        for answer in answers:
            answer["because"] = []
        for index, reasons in zip(row, reasons_by_item, strict=True):
            answers[index]["because"].append(reasons)
    if body.histories is None and body.users is not None:  # a name twice gets two answers
        answer_by_name = {answer["id"]: answer for answer in answers}
        answers = [answer_by_name[name] for name in map(str, body.users)]
    return answers


def require_limits(body: RecommendBody, limits: ServeArguments) -> None:
    """Raise an error unless a body has either histories or users, within the limits."""
    if (body.histories is None) == (body.users is None):
        raise UsageError("give histories or users, one of the two")
    _require_at_most("histories", len(body.histories or ()), limits.max_histories)
    _require_at_most("users", len(body.users or ()), limits.max_histories)
    for i, history in enumerate(body.histories or ()):
        _require_at_most(f"histories[{i}].items", len(history.items), limits.max_items)
    _require_at_most("k", body.k, limits.max_k, 422)


def _list_reasons(trained: Recommender, reasons: Effects, num_items: int) -> list[list[dict]]:
    """Return the reasons of each of ``num_items`` recommended items, strongest first."""
    reasons_by_item: list[list[dict]] = [[] for _ in range(num_items)]
    names = ("pair", "past", "steps_back", "score_change", "rank_change")
    columns = (reasons[name].tolist() for name in names)
    for pair, past, steps_back, score_change, rank_change in zip(*columns, strict=True):
        is_only = math.isnan(score_change)  # no other interaction is left; json has no NaN
        reasons_by_item[pair].append(
            {
                "item": trained.items[past - 1],
                "steps_back": steps_back,
                "score_change": None if is_only else score_change,
                "rank_change": None if is_only else int(rank_change),
            }
        )
    return reasons_by_item


def find_similar(trained: Recommender, body: SimilarBody, limits: ServeArguments) -> list[dict]:
    """Return the neighbours of each item and their cosines, in the order of the request.

    Raises:
        UsageError: for unknown items, or a model without vectors.
        Refusal: if a limit is exceeded.
    """
    names = list(map(str, body.items))
    _require_at_most("items", len(names), limits.max_histories)
    _require_at_most("k", body.k, limits.max_k, 422)
    for name in names:  # not by require_id, whose search for similar names takes seconds
        if name not in trained.ids:
            raise UsageError(f"item {shown(name)} is not known")
    choice = trained.choose_items(body.allowed, body.excluded)
    row, _, item, cosine = trained.find_nearest(names, body.k, choice)
    neighbours = _split_by_row(trained, len(names), row, item, cosine.astype(float))
    return [
        {"id": name, "items": items, "cosines": cosines}
        for name, (items, cosines) in zip(names, neighbours, strict=True)
    ]


def _split_by_row(
    trained: Recommender, num_rows: int, row: np.ndarray, item: np.ndarray, score: np.ndarray
) -> list[tuple[list[str], list[float]]]:
    """Return item names and scores of each of ``num_rows`` rows, from columns [p] sorted by row."""
    if num_rows == 0:
        return []
    starts = np.searchsorted(row, np.arange(1, num_rows))  # of all rows but the first
    names, scores = np.split(trained.items[item - 1], starts), np.split(score, starts)
    return [(items.tolist(), values.tolist()) for items, values in zip(names, scores, strict=True)]


def to_json(answer: dict[str, Any]) -> bytes:
    """Return an answer as json; raise a ValueError for NaN and infinity, which json lacks."""
    return json.dumps(answer, allow_nan=False).encode()


def _require_at_most(field: str, number: int, limit: int, status: int = 413) -> None:
    """Raise a Refusal with the HTTP status if the number of a field exceeds its limit."""
    if number > limit:
        raise Refusal(status, f"{field}: at most {limit:,} in a request, found {shown(number)}")
