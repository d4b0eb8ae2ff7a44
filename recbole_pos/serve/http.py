"""A trained model over HTTP, `recbole-pos serve`: one model a process, behind any proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, Histogram, generate_latest

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.serve import bodies
from recbole_pos.serve.bodies import Neighbours, Recommendation, RecommendBody, SimilarBody
from recbole_pos.serve.recommender import Recommender
from recbole_pos.version import __version__

PATIENCE = 30  # seconds that requests under way have to end
SECONDS = Histogram("recbole_pos_seconds", "From the body of a request to its answer", ["answer"])

T = TypeVar("T")


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
    async def recommend(body: RecommendBody) -> dict[str, list[Recommendation]]:
        """Recommend items to users of the data, or after histories."""
        return {"recommendations": await compute(bodies.recommend, body)}

    @app.post("/similar")
    async def similar(body: SimilarBody) -> dict[str, list[Neighbours]]:
        """Find the items most like given items."""
        return {"similar": await compute(bodies.find_similar, body)}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Say which model answers; the server listens only when it is loaded."""
        return {"status": "ready", **facts}

    @app.get("/metrics")
    async def metrics() -> Response:
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
