"""What requests say and what they are answered, as json; nothing of HTTP but the status."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError, WithJsonSchema

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.serve.recommender import MODEL, POPULARITY, Recommender
from recbole_pos.values import shown


class Refusal(UsageError):
    """Of a request, with the status of HTTP that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Name = str | Annotated[int, Field(ge=-(2**63), lt=2**63)]
_NAMES = {"type": "array", "items": {"type": ["string", "integer"]}}
_HISTORY = {
    "type": "object",
    "required": ["items"],
    "properties": {
        "id": {"type": ["string", "integer"], "description": "comes back; the number by default"},
        "items": {**_NAMES, "description": "oldest first"},
        "times": {
            "type": "array",
            "items": {"type": ["number", "string"]},
            "description": "sorted by, if any; numbers, or ISO 8601",
        },
    },
}
# read_histories checks them: one rule for Python, files and this
History = Annotated[Any, WithJsonSchema({"anyOf": [_HISTORY, _NAMES]})]


class _Body(BaseModel, extra="forbid", strict=True):
    """True is no number, and a field that is not known is an error."""


class RecommendBody(_Body):
    """What to recommend: see ``Recommender.recommend``."""

    histories: list[History] | None = None
    users: list[Name] | None = None
    k: int = 10
    exclude_seen: bool | None = None
    allowed: list[Name] | None = None
    excluded: list[Name] | None = None
    boosts: dict[str, float] | None = None


class SimilarBody(_Body):
    """Of which items to find neighbours."""

    items: list[Name] = Field(min_length=1)
    k: int = 10
    allowed: list[Name] | None = None
    excluded: list[Name] | None = None


class ReloadBody(_Body):
    """The folder of a run; the one in use if None."""

    run_dir: str | None = None


Body = TypeVar("Body", bound=_Body)


def parse(kind: type[Body], body: bytes) -> Body:
    """A body, checked.

    Raises:
        Refusal: if it is no json (400), or says something else (422).
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


def recommended(trained: Recommender, asked: RecommendBody, limits: ServeArguments) -> list[dict]:
    """A dict a history (or user), in the order asked.

    Raises:
        UsageError: as :meth:`Recommender.recommend` does.
        Refusal: where a limit is passed.
    """
    if (asked.histories is None) == (asked.users is None):
        raise UsageError("give histories or users, one of the two")
    _limit("histories", len(asked.histories or ()), limits.max_histories)
    _limit("users", len(asked.users or ()), limits.max_histories)
    _limit_k(asked.k, limits)
    for number, one in enumerate(asked.histories or ()):
        items = one.get("items") if isinstance(one, dict) else one
        if isinstance(items, list):
            _limit(f"histories[{number}].items", len(items), limits.max_items)
    choice = trained.choice(_names(asked.allowed), _names(asked.excluded), asked.boosts)
    users = _names(asked.users)
    some = trained.read(asked.histories or ()) if users is None else trained.of_users(users)
    items, scores, ends = [], [], []
    for row, _, item, score, _ in trained.ranked(some, asked.k, asked.exclude_seen, choice):
        ends.append(row)
        items += trained.items[item - 1].tolist()
        scores += score.tolist()
    rows = np.concatenate(ends) if ends else np.empty(0, np.int64)
    cut = np.searchsorted(rows, np.arange(len(some) + 1)).tolist()
    return [
        {
            "id": some.ids[n],
            "items": items[cut[n] : cut[n + 1]],
            "scores": scores[cut[n] : cut[n + 1]],
            "by": MODEL if some.lengths[n] else POPULARITY,
            "unknown": int(some.unknown[n]),
        }
        for n in range(len(some))
    ]


def similar(trained: Recommender, asked: SimilarBody, limits: ServeArguments) -> list[dict]:
    """A dict an item, in the order asked: its neighbours and their cosines.

    Raises:
        UsageError: for unknown items, or a model without vectors.
        Refusal: where a limit is passed.
    """
    names = [str(item) for item in asked.items]
    _limit("items", len(names), limits.max_histories)
    _limit_k(asked.k, limits)
    for name in names:  # here, since the search for names that are near takes seconds
        if name not in trained.ids:
            raise UsageError(f"item {shown(name)} is not known")
    choice = trained.choice(_names(asked.allowed), _names(asked.excluded))
    row, _, item, cosine = trained.nearest(names, asked.k, choice)
    cut = np.searchsorted(row, np.arange(len(names) + 1))
    near, cosines = trained.items[item - 1], cosine.astype(float)
    return [
        {
            "id": name,
            "items": near[cut[n] : cut[n + 1]].tolist(),
            "cosines": cosines[cut[n] : cut[n + 1]].tolist(),
        }
        for n, name in enumerate(names)
    ]


def dumped(answer: dict[str, Any]) -> bytes:
    """As json, which knows neither NaN nor infinity."""
    return json.dumps(answer, allow_nan=False).encode()


def _names(given: list[str | int] | None) -> list[str] | None:
    return None if given is None else [str(one) for one in given]


def _limit(what: str, found: int, most: int) -> None:
    if found > most:
        raise Refusal(413, f"{what}: at most {most:,} in a request, found {found:,}")


def _limit_k(k: int, limits: ServeArguments) -> None:
    if k > limits.max_k:
        raise UsageError(f"k: at most {limits.max_k:,}, found {shown(k)}")
