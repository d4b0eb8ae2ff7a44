"""A trained model over HTTP, `recbole-pos serve`: one model a process, behind any proxy.

Bodies of requests and answers are classes of pydantic; ``recommend`` and ``find_similar`` answer
them, and ``make_app`` gives them addresses.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, Histogram, generate_latest
from pydantic import BaseModel, Field

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.serve.explain import (
    MAX_REASONS,
    Effects,
    find_reasons,
    leave_one_out,
    require_reasons,
)
from recbole_pos.serve.histories import History, Name
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

    hides_seen = trained.hides_seen(body.exclude_seen)
    row, _, item, score = trained.rank_items(packed, body.k, hides_seen, choice)
    names, scores = trained.items[item - 1].tolist(), score.tolist()
    reasons = None
    if body.because:
        effects = leave_one_out(trained.scorer, packed, row, item, choice, hides_seen)
        reasons = _list_reasons(trained, find_reasons(effects, body.because), len(row))

    answers = []
    # items of all histories follow one another: those of the second from bounds[1] to bounds[2]
    bounds = np.searchsorted(row, np.arange(len(packed) + 1)).tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        error = packed.errors.get(index)
        source = MODEL if packed.lengths[index] else POPULARITY
        answers.append(
            Recommendation(
                id=packed.ids[index],
                items=names[start:end],
                scores=scores[start:end],
                by=None if error else source,
                unknown=packed.unknown[index],
                because=None if reasons is None else reasons[start:end],
                error=error,
            )
        )
    if body.users is not None:  # the model reads a name once, and it gets an answer each time
        answer_by_name = {answer.id: answer for answer in answers}
        answers = [answer_by_name[name] for name in map(str, body.users)]
    return answers


def find_similar(trained: Recommender, body: SimilarBody) -> list[Neighbours]:
    """Return the neighbours of each item and their cosines, in the order of the request.

    Raises:
        UsageError: for unknown items, or a model without vectors.
    """
    names = list(map(str, body.items))
    for name in names:
        trained.require_id(name)
    choice = trained.choose_items(body.allowed, body.excluded)
    row, _, item, cosine = trained.find_nearest(names, body.k, choice)
    bounds = np.searchsorted(row, np.arange(len(names) + 1)).tolist()
    neighbours, cosines = trained.items[item - 1].tolist(), cosine.tolist()
    return [
        Neighbours(id=name, items=neighbours[start:end], cosines=cosines[start:end])
        for name, (start, end) in zip(names, pairwise(bounds), strict=True)
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


def make_app(trained: Recommender, run_dir: str, num_threads: int = 1) -> FastAPI:
    """Return the application whose requests the model of a run answers.

    They are computed one at a time, by ``num_threads`` threads of torch. Meanwhile others wait, and
    /health and /metrics are answered.
    """
    app = FastAPI(title="recbole-pos", version=__version__)
    # set in the scoring thread itself: set elsewhere, its first products would take all cores
    worker = ThreadPoolExecutor(1, "scoring", torch.set_num_threads, (num_threads,))
    facts = {"run_dir": run_dir, **trained.collect_facts(), "version": __version__}

    async def compute(answer: Callable[[Recommender, Any], T], body: Any) -> T:
        """Return the answer to a body, computed in the scoring thread."""
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
        # FastAPI's own answer quotes what it found, and fails where that is NaN, which json lacks
        reasons = [{key: x[key] for key in ("type", "loc", "msg")} for x in error.errors()]
        return JSONResponse({"detail": reasons}, 422)

    return app


def serve(run_dir: str, settings: ServeArguments) -> None:
    """Answer requests until Ctrl-C or SIGTERM, then finish those under way.

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
        histories_only=settings.histories_only or None,
        item_vectors=settings.item_vectors,
    )
    uvicorn.run(
        make_app(trained, run_dir, settings.threads),
        host=settings.host,
        port=settings.port,
        lifespan="off",  # nothing is started or closed with the application
        access_log=False,
        timeout_graceful_shutdown=PATIENCE,
    )
