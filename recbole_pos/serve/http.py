"""A trained model over HTTP: `recbole-pos serve`.

Requests are read on the event loop and computed one after the other in a scoring thread, with
``--threads`` threads of torch; models are loaded in another thread.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.reporter import Reporter
from recbole_pos.serve import bodies
from recbole_pos.serve.bodies import Body, Refusal, parse, to_json
from recbole_pos.serve.holder import ALONE, LoadedModel, ModelHolders
from recbole_pos.version import __version__

PATIENCE = 30  # seconds for a body to arrive, and for requests under way to end
# headers of requests through a proxy or from a browser, whose sender may be another machine
INDIRECT = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin")
LIMITS = "threads max_body max_histories max_items max_k max_left_out max_waiting".split()
PATHS = ("/recommend", "/similar", "/reload", "/health", "/metrics")
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds

_log = logging.getLogger("recbole_pos.serve")


class Metrics:
    """Metrics of one server for Prometheus, in a registry of its own."""

    def __init__(self, models: Iterable[str]) -> None:
        """Register counters, histograms and gauges, with a zero for every model."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def add(kind: Any, name: str, description: str, *labels: str, **options: Any) -> Any:
            name = f"recbole_pos_{name}"
            return kind(name, description, labels, registry=self.registry, **options)

        self.requests = add(Counter, "requests", "Requests answered", "path", "status")
        description = "From a request to its answer"
        self.seconds = add(Histogram, "request_seconds", description, "path", buckets=BUCKETS)
        description = "Histories and users recommended to"
        self.histories = add(Counter, "histories", description, "model")
        description = "From histories of a request to their recommendations, by the model"
        self.scoring = add(Histogram, "scoring_seconds", description, "model", buckets=BUCKETS)
        self.waiting = add(Gauge, "waiting", "Requests being computed or waiting for it")
        self.reloads = add(Counter, "reloads", "Reloads of a model", "model", "outcome")
        for model in models:
            self.histories.labels(model)
            for outcome in ("done", "failed"):  # a rate needs the zero before the first
                self.reloads.labels(model, outcome)

    def wrap(self, app: Any) -> Any:
        """Return an ASGI application that counts and times the requests of another."""

        async def measured_app(scope: Any, receive: Any, send: Any) -> None:
            """Answer a request by ``app``; count it by path and status, and note its seconds."""
            status = 500  # until an answer begins
            began = time.perf_counter()

            async def send_and_note_status(message: Any) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app(scope, receive, send_and_note_status)
            finally:
                path = scope["path"] if scope["path"] in PATHS else "other"
                self.requests.labels(path, status).inc()
                self.seconds.labels(path).observe(time.perf_counter() - began)

        return measured_app


class Service:
    """The work behind the routes of a server; ``folders`` are folders of runs by model name."""

    def __init__(
        self, folders: Mapping[str, str | Path], settings: ServeArguments, reporter: Reporter
    ) -> None:
        """Make the holders of the models, the metrics, and the one thread that scores."""
        self.settings, self.reporter = settings, reporter
        self.holders = ModelHolders(folders, settings)
        self.metrics = Metrics(folders)
        self.worker = ThreadPoolExecutor(1, "scoring", torch.set_num_threads, (settings.threads,))
        self.waiting = 0
        self.metrics.waiting.set_function(lambda: self.waiting)

    async def recommend(self, request: Request) -> Response:
        """Answer POST /recommend; with several models, by the model that each id belongs to."""
        return await self._compute(request, bodies.RecommendBody, self._recommend)

    async def similar(self, request: Request) -> Response:
        """Answer POST /similar."""
        return await self._compute(request, bodies.SimilarBody, self._find_similar)

    def _recommend(
        self, loaded: dict[str, LoadedModel], body: bodies.RecommendBody
    ) -> dict[str, Any]:
        """Return the answer of the only model, or of each model to its share of the ids."""

        def recommend_by(name: str, body_of_model: bodies.RecommendBody) -> list[dict[str, Any]]:
            with self.metrics.scoring.labels(name).time():
                answers = bodies.recommend(loaded[name].recommender, body_of_model, self.settings)
            self.metrics.histories.labels(name).inc(len(answers))
            return answers

        bodies.require_limits(body, self.settings)
        if len(loaded) == 1:
            ((name, model),) = loaded.items()
            return {"run_dir": model.run_dir, "recommendations": recommend_by(name, body)}
        answers: dict[int, dict] = {}  # by position in the request
        for name, (positions, body_of_model) in body.split_by_model(self.holders.choose).items():
            try:
                answers_of_model = recommend_by(name, body_of_model)
            except UsageError as error:
                status = getattr(error, "status", 422)
                text = _renumber(str(error), positions)
                raise Refusal(status, f"model {name}: {text}") from None
            for position, answer in zip(positions, answers_of_model, strict=True):
                answers[position] = {**answer, "model": name}
        folders = {name: model.run_dir for name, model in loaded.items()}
        recommendations = [answers[position] for position in sorted(answers)]
        return {"models": folders, "recommendations": recommendations}

    def _find_similar(
        self, loaded: dict[str, LoadedModel], body: bodies.SimilarBody
    ) -> dict[str, Any]:
        """Return the answer of the model that a body names, or of the first."""
        model = loaded[self.holders.first if body.model is None else body.model]
        answers = bodies.find_similar(model.recommender, body, self.settings)
        return {"run_dir": model.run_dir, "similar": answers}

    def _parse(self, kind: type[Body], content: bytes) -> Body:
        """Return the validated body of a request; refuse one that names a model not served."""
        body = parse(kind, content)
        if body.model is not None:
            self.holders.require(body.model)
        return body

    async def _compute(
        self,
        request: Request,
        kind: type[Body],
        answer: Callable[[dict[str, LoadedModel], Body], dict[str, Any]],
    ) -> Response:
        """Answer a request by ``answer``, which the scoring thread calls with models and body."""
        content = await _read_body(request, self.settings.max_body)
        current = {name: holder.current for name, holder in self.holders.by_name.items()}
        loaded = {name: model for name, model in current.items() if model is not None}
        if len(loaded) < len(current):
            raise Refusal(503, "the model is being loaded")
        if self.waiting >= self.settings.max_waiting:
            raise Refusal(503, f"{self.waiting} requests are waiting already")
        self.waiting += 1
        try:
            future = self.worker.submit(lambda: to_json(answer(loaded, self._parse(kind, content))))
            return _json(200, await asyncio.wrap_future(future))
        finally:
            self.waiting -= 1

    async def health(self) -> Response:
        """Answer GET /health: facts of the models; 503 until all of them are loaded."""
        holders = self.holders.by_name
        facts_by_model: dict[str, Any] = {
            name: {"run_dir": holder.run_dir} if holder.current is None else holder.current.facts
            for name, holder in holders.items()
        }
        is_ready = all(holder.current is not None for holder in holders.values())
        facts = facts_by_model.get(ALONE, {"models": facts_by_model})
        content = {"status": "ready" if is_ready else "loading", **facts, "version": __version__}
        return _json(200 if is_ready else 503, to_json(content))

    async def measured(self) -> Response:
        """Answer GET /metrics in the text format of Prometheus."""
        text = generate_latest(self.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def reload(self, request: Request) -> Response:
        """Answer POST /reload: load one model again or all of them, then answer as /health."""
        if not (self.settings.allow_reload or _is_local(request)):
            raise Refusal(
                403, "/reload is answered to this machine alone; --allow_reload lets others, too"
            )
        content = await _read_body(request, self.settings.max_body)
        body = self._parse(bodies.ReloadBody, content or b"{}")
        names = list(self.holders.by_name) if body.model is None else [body.model]
        if body.run_dir is not None and len(names) > 1:
            raise Refusal(422, f"model: give the one that changes, of {', '.join(names)}")
        for name in names:
            await asyncio.to_thread(self.reload_model, name, body.run_dir)
        return await self.health()

    def reload_model(self, name: str, run_dir: str | None = None) -> None:
        """Replace a model by the model of a run; raise a Refusal if it cannot be loaded."""
        try:
            self.load(name, run_dir)
        except Refusal:  # another load is under way, so this one did not begin
            raise
        except Exception as error:
            self.metrics.reloads.labels(name, "failed").inc()
            if isinstance(error, PosError):
                status = 422
                reason = str(error)[:500]  # it may quote a long path
            else:
                _log.exception("reload")
                status = 500
                reason = f"{type(error).__name__}: {error}"
            model = "the model" if name == ALONE else f"model {name}"
            text = f"{model} is not reloaded and stays as it was: {reason}"
            raise Refusal(status, text) from error
        self.metrics.reloads.labels(name, "done").inc()

    def reload_all(self) -> None:
        """Reload all models; print the reason where that fails."""
        for name in self.holders.by_name:
            try:
                self.reload_model(name)
            except Refusal as error:
                self._print(str(error))

    def load(self, name: str, run_dir: str | None = None) -> None:
        """Load a model, by default from the same run, and print that it is ready."""
        loaded = self.holders.by_name[name].load(run_dir)
        self._print(f"{loaded.facts['model']} of {loaded.run_dir} is ready")

    def _print(self, message: str) -> None:
        with suppress(PosError):  # the terminal may be closed
            self.reporter.line(message)


def make_app(service: Service) -> FastAPI:
    """Return the application: the routes of a service, and its errors as json."""
    app = FastAPI(
        title="recbole-pos",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages fetch their scripts from elsewhere
        redoc_url=None,
    )
    routes: tuple[tuple[str, Callable, Any], ...] = (
        ("/recommend", service.recommend, bodies.RecommendBody),
        ("/similar", service.similar, bodies.SimilarBody),
        ("/reload", service.reload, bodies.ReloadBody),
    )
    for path, answer, body in routes:
        content = {"application/json": {"schema": body.model_json_schema()}}
        extra = {"requestBody": {"content": content}}
        app.post(path, response_model=None, openapi_extra=extra)(answer)
    app.get("/health", response_model=None)(service.health)
    app.get("/metrics", response_model=None)(service.measured)
    app.add_exception_handler(PosError, _answer_refusal)
    app.add_exception_handler(HTTPException, _answer_no_route)
    # a client that has disconnected does not read its answer
    app.add_exception_handler(ClientDisconnect, lambda request, error: _json(400, b""))
    app.add_exception_handler(Exception, _answer_failure)  # its traceback goes to the log
    return app


def serve(folders: Mapping[str, str | Path], settings: ServeArguments) -> None:
    """Answer requests until Ctrl-C or SIGTERM, then finish those under way; SIGHUP reloads models.

    Args:
        folders: folders of runs by name of the model, see :class:`ModelHolders`.
        settings: address and limits.

    Raises:
        UsageError: if the address cannot be listened on, or there is no such run.
        CheckpointError: if its model cannot be loaded.
    """
    _require_limits(settings)
    for folder in folders.values():
        RunFolder(folder).require()
    reporter = Reporter()
    service = Service(folders, settings, reporter)
    server = _make_server(service)
    errors: list[BaseException] = []

    def load_models() -> None:
        try:
            for name in folders:
                service.load(name)
        except BaseException as error:
            errors.append(error)
            server.should_exit = True

    with _open_socket(settings.host, settings.port) as listening:
        host, port = listening.getsockname()[:2]
        address = f"[{host}]" if listening.family == socket.AF_INET6 else host
        reporter.line(f"http://{address}:{port} (loading {', '.join(map(str, folders.values()))})")
        if not ipaddress.ip_address(host).is_loopback:
            reporter.line("there is no authentication: all who reach this address are answered")
        gc.freeze()  # keep libraries out of collections, which stall requests at each reload
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, lambda *_: Thread(target=service.reload_all).start())
        Thread(target=load_models).start()
        with suppress(KeyboardInterrupt):  # raised again by uvicorn, once everything is done
            server.run(sockets=[listening])
        service.worker.shutdown()
    if errors:
        raise errors[0]


def _make_server(service: Service) -> uvicorn.Server:
    """Return the uvicorn server of a service."""
    config = uvicorn.Config(
        service.metrics.wrap(make_app(service)),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # /reload trusts the address that is connected
        server_header=False,
        timeout_graceful_shutdown=PATIENCE,
    )
    return uvicorn.Server(config)


def _require_limits(settings: ServeArguments) -> None:
    """Raise a UsageError if a limit is below 1, or the port out of range."""
    for name in LIMITS:
        limit = getattr(settings, name)
        if limit < 1:
            raise UsageError(f"--{name} must be at least 1, found {limit}")
    if not 0 <= settings.port < 2**16:
        raise UsageError(f"--port must be from 0 to 65535, found {settings.port}")


def _open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; raise a UsageError if it cannot."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        is_dual = host == "::" and family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server(
            (host, port), family=family, backlog=512, dualstack_ipv6=is_dual
        )
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {host}, port {port}: {error}") from error
    # connections inherit this option, without which the second part of each answer waits 40 ms for
    # the client to acknowledge the first
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _renumber(message: str, positions: Sequence[int]) -> str:
    """Return a message about ``histories[i]`` of a share with its position in the request."""
    match = re.match(r"histories\[(\d+)]", message)
    return f"histories[{positions[int(match[1])]}]{message[match.end() :]}" if match else message


async def _read_body(request: Request, limit: int) -> bytes:
    """Return the body of a json request; refuse another type, over ``limit`` bytes, a late one."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            415, f"expected the header Content-Type: application/json, found {kind[:80] or 'none'}"
        )

    async def receive() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise Refusal(413, f"the body is longer than {limit:,} bytes (--max_body)")
        return bytes(body)

    try:
        return await asyncio.wait_for(receive(), PATIENCE)
    except asyncio.TimeoutError:
        raise Refusal(408, f"the body did not arrive within {PATIENCE} seconds") from None


def _is_local(request: Request) -> bool:
    """Return whether a process of this machine sent a request, and not as a proxy of another."""
    if request.client is None or any(name in request.headers for name in INDIRECT):
        return False
    address = ipaddress.ip_address(request.client.host)
    # a socket of IPv6 that takes IPv4, too, has ::ffff:127.0.0.1; Python < 3.13 calls that remote
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _answer_refusal(request: Request, error: Exception) -> Response:
    status = getattr(error, "status", 422)
    headers = {"Retry-After": "1"} if status == 503 else None
    return _json(status, to_json({"error": str(error)}), headers)


def _answer_no_route(request: Request, error: Any) -> Response:
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _json(error.status_code, to_json({"error": text}), error.headers)


def _answer_failure(request: Request, error: Exception) -> Response:
    return _json(500, to_json({"error": "something is wrong in the server; its log has more"}))
