"""Bodies of requests and their answers, as json; nothing of HTTP but the status."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, FailFast, Field, ValidationError, WithJsonSchema

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.serve.explain import find_reasons, leave_one_out, require_reasons
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
    """True is not a number, and unknown fields are refused."""

    model: str | None = None  # by name, of a server of several


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

    def by_model(
        self, choose: Callable[[str | int | None], str]
    ) -> dict[str, tuple[list[int], RecommendBody]]:
        """Split by the model that answers each history or user.

        Returns:
            Name of a model, as ``choose`` returns it for an id or None -> numbers of its histories
            or users, and a body with only these.
        """
        field = "users" if self.histories is None else "histories"
        owners: list[Any] = self.histories or list(dict.fromkeys(map(str, self.users or ())))
        parts: dict[str, list[int]] = {}
        for number, one in enumerate(owners):
            key = one.id if isinstance(one, History) else one
            parts.setdefault(self.model or choose(key), []).append(number)
            if key is None:
                one.id = number
        return {
            name: (numbers, self.model_copy(update={field: [owners[n] for n in numbers]}))
            for name, numbers in parts.items()
        }


class SimilarBody(_Body):
    """Items whose neighbours are wanted."""

    items: Annotated[list[Name], FailFast()] = Field(min_length=1)
    k: int = 10
    allowed: _Names = None
    excluded: _Names = None


class ReloadBody(_Body):
    """The folder of a run; the one in use if None. Of a server of several, the model's name."""

    run_dir: str | None = None


Body = TypeVar("Body", bound=_Body)


def parse(kind: type[Body], body: bytes) -> Body:
    """Return the checked body of a request; raise a Refusal if it is not json (400), or a field is
    wrong (422)."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        is_json = first["type"] != "json_invalid"
        message = describe_invalid(error) if is_json else first["msg"]
        raise Refusal(422 if is_json else 400, message) from None


def recommend(trained: Recommender, body: RecommendBody, limits: ServeArguments) -> list[dict]:
    """Return the recommendations of each history or user, in the order of the request: ``id``,
    ``items``, ``scores``, ``by``, ``unknown``; with ``because`` the reasons of each item.

    Raises:
        UsageError: as :meth:`Recommender.recommend` does.
        Refusal: where a limit is exceeded.
    """
    if (body.histories is None) == (body.users is None):
        raise UsageError("give histories or users, one of the two")
    _limit("histories", len(body.histories or ()), limits.max_histories)
    _limit("users", len(body.users or ()), limits.max_histories)
    for number, history in enumerate(body.histories or ()):
        _limit(f"histories[{number}].items", len(history.items), limits.max_items)
    _limit("k", body.k, limits.max_k, 422)
    choice = trained.choose_items(body.allowed, body.excluded, body.boosts)
    given = body.histories
    packed = trained.read_users(body.users) if given is None else trained.read(given)
    packed = trained.add_request_time(packed, body.at)
    require_reasons(trained.scorer, body.because, packed)
    if body.because:
        reach = trained.scorer.reach
        read = packed.lengths if reach is None else np.minimum(packed.lengths, reach)
        _limit("because: interactions to leave out", int(read.sum()), limits.max_left_out)
    row, _, item, score = trained.rank_items(packed, body.k, body.exclude_seen, choice)
    best = _split(trained, len(packed), row, item, score)
    answers: list[dict] = [
        {
            "id": packed.ids[n],
            "items": items,
            "scores": scores,
            "by": MODEL if packed.lengths[n] else POPULARITY,
            "unknown": int(packed.unknown[n]),
        }
        for n, (items, scores) in enumerate(best)
    ]
    if body.because:
        hides_seen = trained.hides_seen(body.exclude_seen)
        effects = leave_one_out(trained.scorer, packed, row, item, choice, hides_seen)
        found = find_reasons(effects, body.because)
        columns = ("pair", "past", "steps_back", "score_change", "rank_change")
        reasons: list[list[dict]] = [[] for _ in row]
        for pair, past, steps, score_change, rank_change in zip(
            *(found[name].tolist() for name in columns), strict=True
        ):
            is_only = math.isnan(score_change)  # interaction of its history; json has no NaN
            reasons[pair].append(
                {
                    "item": trained.items[past - 1],
                    "steps_back": steps,
                    "score_change": None if is_only else score_change,
                    "rank_change": None if is_only else int(rank_change),
                }
            )
        for answer in answers:
            answer["because"] = []
        for owner, some_reasons in zip(row, reasons, strict=True):
            answers[owner]["because"].append(some_reasons)
    return answers


def find_similar(trained: Recommender, body: SimilarBody, limits: ServeArguments) -> list[dict]:
    """Return the neighbours of each item and their cosines, in the order of the request.

    Raises:
        UsageError: for unknown items, or a model without vectors.
        Refusal: where a limit is exceeded.
    """
    names = list(map(str, body.items))
    _limit("items", len(names), limits.max_histories)
    _limit("k", body.k, limits.max_k, 422)
    for name in names:  # not by require_id, whose search for similar names takes seconds
        if name not in trained.ids:
            raise UsageError(f"item {shown(name)} is not known")
    choice = trained.choose_items(body.allowed, body.excluded)
    row, _, item, cosine = trained.find_nearest(names, body.k, choice)
    best = _split(trained, len(names), row, item, cosine.astype(float))
    return [
        {"id": name, "items": items, "cosines": cosines}
        for name, (items, cosines) in zip(names, best, strict=True)
    ]


def _split(
    trained: Recommender, count: int, row: np.ndarray, item: np.ndarray, score: np.ndarray
) -> list[tuple[list[str], list[float]]]:
    """Return names and scores of items for each of ``count`` rows, from arrays [p]."""
    ends = np.searchsorted(row, np.arange(1, max(count, 1)))
    names, scores = np.split(trained.items[item - 1], ends), np.split(score, ends)
    return [(n.tolist(), s.tolist()) for n, s in zip(names, scores, strict=True)][:count]


def to_json(answer: dict[str, Any]) -> bytes:
    """Return an answer as json; raise a ValueError for NaN and infinity, which json lacks."""
    return json.dumps(answer, allow_nan=False).encode()


def _limit(field: str, count: int, most: int, status: int = 413) -> None:
    """Raise a Refusal with the HTTP status if a field of a request exceeds its limit."""
    if count > most:
        raise Refusal(status, f"{field}: at most {most:,} in a request, found {shown(count)}")
