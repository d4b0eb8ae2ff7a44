"""A trained model over HTTP, `recbole-pos serve`: one model a process, behind any proxy.

Bodies of requests and answers are classes of pydantic; ``recommend`` and ``find_similar`` answer
them, and ``make_app`` gives them addresses.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import numpy as np
import pandas as pd
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, Histogram, generate_latest
from pydantic import BaseModel, Field

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.serve.explain import MAX_REASONS, find_reasons, leave_one_out, require_reasons
from recbole_pos.serve.histories import Histories, History, Moment, Name
from recbole_pos.serve.item_index import use_index
from recbole_pos.serve.recommender import MODEL, POPULARITY, Recommender
from recbole_pos.version import __version__

PATIENCE = 30  # seconds that requests under way have to end
SECONDS = Histogram("recbole_pos_seconds", "From the body of a request to its answer", ["answer"])

T = TypeVar("T")
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
    at: Moment | None = None
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
    """The items for one history or user, best first, with reasons for each if asked."""

    id: str | int
    items: list[str]
    scores: list[float]
    by: str
    unknown: int
    because: list[list[Reason]] | None = None


class Neighbours(BaseModel):
    """The items most like one item, nearest first."""

    id: str
    items: list[str]
    cosines: list[float]


def recommend(trained: Recommender, body: RecommendBody) -> list[Recommendation]:
    """Return the recommendations for each history or user of a request, in its order.

    Args:
        trained: the model.
        body: the request.

    Returns:
        One answer for each history or user.

    Raises:
        UsageError: if the request has both histories and users, or neither, or if something else
            is wrong with it, as in :meth:`Recommender.recommend`.
    """
    # Read the histories into arrays. ``choice`` has the items that may be recommended.
    if (body.histories is None) == (body.users is None):
        raise UsageError("give histories or users, one of the two")
    choice = trained.choose_items(body.allowed, body.excluded, body.boosts)
    if body.histories is None:
        histories = trained.read_users(body.users)
    else:
        histories = trained.read(body.histories)
    histories = trained.add_request_time(histories, body.at)
    require_reasons(trained.scorer, body.because, histories)

    # Recommend the k best items. For each of p recommendations, ``row`` has the index of its
    # history, and ``item`` the id of its item.
    hides_seen = trained.hides_seen(body.exclude_seen)
    row, _rank, item, score = trained.rank_items(histories, body.k, hides_seen, choice)

    # Reasons are past interactions without which the score of an item falls. So each is left out
    # in turn, and the ``because`` interactions with the largest effects are kept.
    reasons = None
    if body.because:
        effects = leave_one_out(trained.scorer, histories, row, item, choice, hides_seen)
        strongest = find_reasons(effects, limit=body.because)
        reasons = _list_reasons(strongest, num_items=len(row), item_names=trained.items)

    item_names = trained.items[item - 1]  # the first name is of the item with the id 1
    answers = _make_answers(histories, row, item_names.tolist(), score.tolist(), reasons)

    # read_users takes each name once, but a name that stands twice in the request gets two answers.
    if body.users is not None:
        answer_by_name = {answer.id: answer for answer in answers}
        answers = [answer_by_name[name] for name in map(str, body.users)]
    return answers


def _make_answers(
    histories: Histories,
    row: np.ndarray,
    items: list[str],
    scores: list[float],
    reasons: list[list[Reason]] | None,
) -> list[Recommendation]:
    """Divide p recommendations among the histories that they are for, as one answer for each.

    Args:
        histories: the histories.
        row: [p] index of the history of each recommendation, ascending.
        items: [p] names of the recommended items.
        scores: [p] their scores.
        reasons: [p] the reasons for each; None if none were asked for.
    """
    # For rows [0, 0, 2] of three histories the bounds are [0, 2, 2, 3]: the recommendations 0 and 1
    # are for the first history, none is for the second, and the recommendation 2 for the third.
    answers = []
    bounds = np.searchsorted(row, np.arange(len(histories) + 1)).tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        answers.append(
            Recommendation(
                id=histories.ids[index],
                items=items[start:end],
                scores=scores[start:end],
                by=MODEL if histories.lengths[index] else POPULARITY,
                unknown=histories.unknown[index],
                because=None if reasons is None else reasons[start:end],
            )
        )
    return answers


def find_similar(trained: Recommender, body: SimilarBody) -> list[Neighbours]:
    """Return the items most like each item of a request, and their cosines, in its order.

    Args:
        trained: the model.
        body: the request.

    Raises:
        UsageError: for unknown items, or a model without vectors.
    """
    # The table has a row for each neighbour: the item, the neighbour, and their cosine. An item
    # that stands twice in the request is in the table only once.
    names = list(map(str, body.items))
    answers = {name: Neighbours(id=name, items=[], cosines=[]) for name in names}
    table = trained.similar(list(answers), body.k, body.allowed, body.excluded)
    for name, neighbour, cosine in table[["item", "similar", "cosine"]].itertuples(index=False):
        answers[name].items.append(neighbour)
        answers[name].cosines.append(cosine)
    return [answers[name] for name in names]


def _list_reasons(
    table: pd.DataFrame, num_items: int, item_names: np.ndarray
) -> list[list[Reason]]:
    """Return the reasons for each recommended item as the answer has them, strongest first.

    A reason is a past interaction without which the score of the item falls.

    Args:
        table: what :func:`find_reasons` returns: a row for each reason. ``pair`` is the number of
            the recommended item, from 0 to ``num_items`` - 1, ``past`` the id of the item of the
            past interaction, and ``score_change`` and ``rank_change`` say what changes without it.
        num_items: number of recommended items of all histories.
        item_names: names of the items with the ids 1, 2, ...

    Returns:
        A list for each recommended item, empty where no interaction is a reason.
    """
    # If a history has one interaction only, there is no score without it: its changes are NaN. They
    # become None, since json has null but no NaN.
    table = table.astype(object).where(table.notna(), None)
    table["item"] = item_names[table["past"].astype(int) - 1]  # the first name is of the id 1
    reasons: list[list[Reason]] = [[] for _ in range(num_items)]
    for row in table.to_dict("records"):
        # A Reason takes from the row those columns that it has as fields.
        reasons[row["pair"]].append(Reason.model_validate(row))
    return reasons


def make_app(trained: Recommender, run_dir: str, num_threads: int) -> FastAPI:
    """Return the web application that answers requests by a trained model.

    Requests to the model are computed one at a time in a thread of their own. Others wait for it,
    but /health and /metrics are answered meanwhile.

    Args:
        trained: the model.
        run_dir: folder of its run, which /health names.
        num_threads: number of threads in which torch computes an answer.
    """
    # `compute` hands a request to the model; the functions below it answer one address each.
    app = FastAPI(title="recbole-pos", version=__version__)
    # The scoring thread sets torch's number of threads itself when it starts. Set elsewhere, the
    # number would not hold for its first products, which would take all cores.
    worker = ThreadPoolExecutor(1, "scoring", torch.set_num_threads, (num_threads,))
    facts = {"run_dir": run_dir, **trained.collect_facts(), "version": __version__}

    async def compute(answer: Callable[[Recommender, Any], T], body: Any) -> T:
        """Return ``answer(trained, body)``, computed in the scoring thread and timed.

        Meanwhile the event loop is free for other requests.
        """
        # SECONDS counts the seconds of requests by the name of the function, for /metrics.
        with SECONDS.labels(answer.__name__).time():
            return await asyncio.get_running_loop().run_in_executor(worker, answer, trained, body)

    @app.post("/recommend")
    async def post_recommend(body: RecommendBody) -> dict[str, list[Recommendation]]:
        """Recommend items to users of the data, or after histories."""
        return {"recommendations": await compute(recommend, body)}

    @app.post("/similar")
    async def post_similar(body: SimilarBody) -> dict[str, list[Neighbours]]:
        """Find the items most like given items."""
        return {"similar": await compute(find_similar, body)}

    @app.get("/health")
    async def get_health() -> dict[str, Any]:
        """Say which model answers; the server listens only when it is loaded."""
        return {"status": "ready", **facts}

    @app.get("/metrics")
    async def get_metrics() -> Response:
        """Return counts and seconds of requests, and memory and CPU time, for Prometheus."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(UsageError)
    async def refuse(request: Request, error: UsageError) -> Response:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        # FastAPI's own answer quotes the wrong value, and fails if that is NaN, which json lacks.
        reasons = [{key: x[key] for key in ("type", "loc", "msg")} for x in error.errors()]
        return JSONResponse({"detail": reasons}, 422)

    return app


def serve(run_dir: str, settings: ServeArguments) -> None:
    """Answer requests over HTTP until Ctrl-C or SIGTERM, then finish those under way.

    Args:
        run_dir: folder of the run whose model answers.
        settings: address, threads and data.

    Raises:
        UsageError: if there is no such run, or a dataset that is needed is missing.
        CheckpointError: if its model cannot be loaded.
    """
    trained = Recommender.load(
        run_dir,
        data_path=settings.data_path,
        histories_only=settings.histories_only,
        item_vectors=settings.item_vectors,
    )
    if settings.index is not None:
        print(use_index(trained, settings, settings.data_path), file=sys.stderr)
    uvicorn.run(
        make_app(trained, run_dir, settings.threads),
        host=settings.host,
        port=settings.port,
        lifespan="off",  # nothing is started or closed with the application
        access_log=False,
        timeout_graceful_shutdown=PATIENCE,  # seconds for requests under way
    )
