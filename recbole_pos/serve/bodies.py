"""Bodies of requests and their answers, as json; nothing of HTTP but the status."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError, WithJsonSchema

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.serve.explain import reasons, require_reasons
from recbole_pos.serve.recommender import MODEL, POPULARITY, Recommender
from recbole_pos.values import shown


class Refusal(UsageError):
    """An error of a request, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _to_texts(names: list[str | int] | None) -> list[str] | None:
    return None if names is None else [str(name) for name in names]


_Name = str | Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Names = list[_Name] | None
_MOMENT = {"type": ["number", "string"], "description": "a number, or ISO 8601"}
_NAMES = {"type": "array", "items": {"type": ["string", "integer"]}, "description": "oldest first"}
_HISTORY = {
    "type": "object",
    "required": ["items"],
    "properties": {
        "id": {"type": ["string", "integer"], "description": "comes back; the number by default"},
        "items": _NAMES,
        "times": {"type": "array", "items": _MOMENT, "description": "sorted by, if any"},
        "at": _MOMENT,
        "events": {"type": "object", "description": "by field, a list with a value for each item"},
        "user": {"type": "object", "description": "by field, a value"},
    },
}
# read_histories checks them: one rule for Python, files and this
History = Annotated[Any, WithJsonSchema({"anyOf": [_HISTORY, _NAMES]})]


class _Body(BaseModel, extra="forbid", strict=True):
    """True is not a number, and unknown fields are refused."""


class RecommendBody(_Body):
    """What to recommend: see ``Recommender.recommend``."""

    histories: list[History] | None = None
    users: _Names = None
    k: int = 10
    exclude_seen: bool | None = None
    allowed: _Names = None
    excluded: _Names = None
    boosts: dict[str, float] | None = None
    at: float | str | None = None
    because: int = 0
    model: str | None = None  # by name, of a server of several; by default by the id

    def by_model(self, choose: Callable[[Any], str]) -> dict[str, RecommendBody]:
        """Split by the model that answers each history or user.

        Args:
            choose: returns the name of the model for an id; the id of a history without one is
                None.

        Returns:
            Name of a model -> a body with its histories or users, in their order. Histories without
            an id get their number as id.
        """
        if self.histories is None:
            ids: Sequence[Any] = self.users or ()
        else:
            ids = [
                history.get("id") if isinstance(history, dict) else None
                for history in self.histories
            ]
        names = [self.model or choose(key if isinstance(key, _KEYS) else None) for key in ids]
        parts: dict[str, RecommendBody] = {}
        for name in dict.fromkeys(names):
            mine = [number for number, model in enumerate(names) if model == name]
            if self.histories is None:
                part = {"users": [ids[number] for number in mine]}
            else:
                part = {"histories": [_numbered(self.histories[n], ids[n], n) for n in mine]}
            parts[name] = self.model_copy(update=part)
        return parts


_KEYS = (str, int, float, bool)  # what an id may be, or is refused for later


def _numbered(history: Any, key: Any, number: int) -> Any:
    """Return a history with an id: its own ``key``, or its number."""
    if key is not None:
        return history
    if isinstance(history, dict):
        return {**history, "id": number}
    return {"id": number, "items": history}


class SimilarBody(_Body):
    """Items whose neighbours are wanted."""

    items: list[_Name] = Field(min_length=1)
    k: int = 10
    allowed: _Names = None
    excluded: _Names = None
    model: str | None = None


class ReloadBody(_Body):
    """The folder of a run; the one in use if None. Of a server of several, the model's name."""

    run_dir: str | None = None
    model: str | None = None


Body = TypeVar("Body", bound=_Body)


def parse(kind: type[Body], body: bytes) -> Body:
    """Return the body of a request, checked.

    Raises:
        Refusal: if it is not json (400), or a field is wrong (422).
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        raise Refusal(400, first["msg"])
    field, *key = first["loc"][:2] or ["the body"]
    where = f"{field}[{shown(key[0])}]" if key else field
    raise Refusal(422, f"{where}: {first['msg']}, found {shown(first['input'])}")


def recommend(trained: Recommender, asked: RecommendBody, limits: ServeArguments) -> list[dict]:
    """Return the recommendations of each history or user, in the order of the request.

    Returns:
        For each ``id``, ``items``, ``scores``, ``by`` and ``unknown``; with ``because`` the past
        interactions that carried each item.

    Raises:
        UsageError: as :meth:`Recommender.recommend` does.
        Refusal: where a limit is exceeded.
    """
    if (asked.histories is None) == (asked.users is None):
        raise UsageError("give histories or users, one of the two")
    _limit("histories", len(asked.histories or ()), limits.max_histories)
    _limit("users", len(asked.users or ()), limits.max_histories)
    for number, one in enumerate(asked.histories or ()):
        items = one.get("items") if isinstance(one, dict) else one
        if isinstance(items, list):
            _limit(f"histories[{number}].items", len(items), limits.max_items)
    _limit("k", asked.k, limits.max_k, 422)
    choice = trained.choice(_to_texts(asked.allowed), _to_texts(asked.excluded), asked.boosts)
    users = _to_texts(asked.users)
    some = trained.read(asked.histories or ()) if users is None else trained.of_users(users)
    some = trained.requested(some, asked.at)
    require_reasons(trained.scorer, asked.because, some)
    if asked.because:
        reach = (
            some.lengths.max(initial=0) if trained.scorer.reach is None else trained.scorer.reach
        )
        _limit(
            "because: interactions to leave out",
            int(np.minimum(some.lengths, reach).sum()),
            limits.max_left_out,
        )
    parts = list(trained.ranked(some, asked.k, asked.exclude_seen, choice))
    answers: list[dict] = [
        {
            "id": some.ids[n],
            "items": items,
            "scores": scores,
            "by": MODEL if some.lengths[n] else POPULARITY,
            "unknown": int(some.unknown[n]),
        }
        for n, (items, scores) in enumerate(_split(trained, len(some), parts))
    ]
    if asked.because and parts:
        row, _, item = (np.concatenate(column) for column in list(zip(*parts, strict=True))[:3])
        hide = trained.hides_seen(asked.exclude_seen)
        found = reasons(trained.scorer, some, row, item, asked.because, choice, hide)
        for answer in answers:
            answer["because"] = []
        for n, columns in zip(row, zip(*found, strict=True), strict=True):
            answers[n]["because"].append(_reasons(trained, *columns))
    return answers


def _reasons(trained: Recommender, past: np.ndarray, *columns: np.ndarray) -> list[dict]:
    """Return the past interactions that carried an item; json has null for NaN."""
    names = [trained.items[i - 1] for i in past if i > 0]
    keys = ("steps_back", "score_change", "rank_change")
    return [
        {"item": name, **{k: None if x != x else x for k, x in zip(keys, values, strict=True)}}
        for name, *values in zip(names, *(column.tolist() for column in columns), strict=False)
    ]


def find_similar(trained: Recommender, asked: SimilarBody, limits: ServeArguments) -> list[dict]:
    """Return the neighbours of each item and their cosines, in the order of the request.

    Raises:
        UsageError: for unknown items, or a model without vectors.
        Refusal: where a limit is exceeded.
    """
    names = [str(item) for item in asked.items]
    _limit("items", len(names), limits.max_histories)
    _limit("k", asked.k, limits.max_k, 422)
    for name in names:  # not by require_id, whose search for similar names takes seconds
        if name not in trained.ids:
            raise UsageError(f"item {shown(name)} is not known")
    choice = trained.choice(_to_texts(asked.allowed), _to_texts(asked.excluded))
    row, rank, item, cosine = trained.nearest(names, asked.k, choice)
    parts = [(row, rank, item, cosine.astype(float))]
    return [
        {"id": name, "items": items, "cosines": cosines}
        for name, (items, cosines) in zip(names, _split(trained, len(names), parts), strict=True)
    ]


def _split(
    trained: Recommender, count: int, parts: Sequence[tuple[np.ndarray, ...]]
) -> list[tuple[list[str], list[float]]]:
    """Return names and scores of items for each of ``count`` rows.

    Args:
        trained: the model, for the names.
        count: number of rows.
        parts: tuples of arrays: row, rank, item id, score, and perhaps more.
    """
    if not parts:
        return [([], [])] * count
    row, _, item, score = (np.concatenate(column) for column in list(zip(*parts))[:4])  # noqa: B905
    ends = np.searchsorted(row, np.arange(1, count))
    names = np.split(trained.items[item - 1], ends)
    return [(n.tolist(), s.tolist()) for n, s in zip(names, np.split(score, ends), strict=True)]


def to_json(answer: dict[str, Any]) -> bytes:
    """Return an answer as json; raise a ValueError for NaN and infinity, which json lacks."""
    return json.dumps(answer, allow_nan=False).encode()


def _limit(field: str, count: int, most: int, status: int = 413) -> None:
    """Raise a Refusal with the HTTP status if a field of a request exceeds its limit."""
    if count > most:
        raise Refusal(status, f"{field}: at most {most:,} in a request, found {shown(count)}")
