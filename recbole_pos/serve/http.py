"""A trained model over HTTP: `recbole-pos serve`.

Requests are read on the event loop and computed one after the other in a thread of their own, with
as many threads of torch as are asked for; a model is loaded in another.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.screen import Screen
from recbole_pos.serve import bodies
from recbole_pos.serve.bodies import Refusal, dumped, parse
from recbole_pos.serve.live import Live, Loaded
from recbole_pos.serve.measured import Measured, Metrics
from recbole_pos.version import __version__

PATIENCE = 30  # seconds for a body to arrive, and for requests under way to end
# what a request has that came through a proxy or from a browser: its sender is not this machine
INDIRECT = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin")

_log = logging.getLogger("recbole_pos.serve")


class Service:
    """What the routes do.

    Args:
        run_dir: the folder of the run whose model is loaded first.
        settings: limits.
        screen: where loading is told about.
    """

    def __init__(self, run_dir: str | Path, settings: ServeArguments, screen: Screen) -> None:
        self.settings, self.screen = settings, screen
        self.live, self.metrics = Live(run_dir, settings.data_path), Metrics()
        threads = partial(torch.set_num_threads, settings.threads)
        self.worker = ThreadPoolExecutor(1, "scoring", initializer=threads)
        self.waiting = 0

    async def recommend(self, request: Request) -> Response:
        """POST /recommend."""

        def compute(loaded: Loaded, body: bytes) -> bytes:
            asked = parse(bodies.RecommendBody, body)
            found = bodies.recommended(loaded.recommender, asked, self.settings)
            self.metrics.histories.inc(len(found))
            return dumped({"run_dir": loaded.run_dir, "recommendations": found})

        return await self._computed(request, compute)

    async def similar(self, request: Request) -> Response:
        """POST /similar."""

        def compute(loaded: Loaded, body: bytes) -> bytes:
            asked = parse(bodies.SimilarBody, body)
            found = bodies.similar(loaded.recommender, asked, self.settings)
            return dumped({"run_dir": loaded.run_dir, "similar": found})

        return await self._computed(request, compute)

    async def _computed(
        self, request: Request, compute: Callable[[Loaded, bytes], bytes]
    ) -> Response:
        body = await _body(request, self.settings.max_body)
        loaded = self.live.now
        if loaded is None:
            raise Refusal(503, "the model is being loaded")
        if self.waiting >= self.settings.max_waiting:
            raise Refusal(503, f"{self.waiting} requests are waiting already")
        self.waiting += 1
        self.metrics.waiting.set(self.waiting)
        try:
            loop = asyncio.get_running_loop()
            return _json(200, await loop.run_in_executor(self.worker, compute, loaded, body))
        finally:
            self.waiting -= 1
            self.metrics.waiting.set(self.waiting)

    async def health(self) -> Response:
        """GET /health."""
        if (loaded := self.live.now) is None:
            return _json(503, dumped({"status": "loading", "run_dir": self.live.run_dir}))
        about = {"status": "ready", **loaded.described(), "version": __version__}
        return _json(200, dumped(about))

    async def measured(self) -> Response:
        """GET /metrics."""
        found = generate_latest(self.metrics.registry)
        return Response(found, media_type=CONTENT_TYPE_LATEST)

    async def reload(self, request: Request) -> Response:
        """POST /reload."""
        if not (self.settings.allow_reload or _from_here(request)):
            raise Refusal(
                403, "/reload is answered to this machine alone; --allow_reload lets others, too"
            )
        asked = parse(bodies.ReloadBody, await _body(request, self.settings.max_body) or b"{}")
        await self.renew(asked.run_dir)
        return await self.health()

    async def renew(self, run_dir: str | None = None) -> None:
        """Load a model beside the one in use, and swap.

        Raises:
            Refusal: if it cannot be; the one in use stays.
        """
        try:
            loaded = await asyncio.to_thread(self.live.load, run_dir)
        except Exception as error:
            self.metrics.reloads.labels("failed").inc()
            if isinstance(error, PosError):
                status, why = getattr(error, "status", 422), str(error)[:500]  # names are long
            else:
                _log.exception("reload")
                status, why = 500, f"{type(error).__name__}: {error}"
            raise Refusal(status, f"not reloaded, nothing has changed: {why}") from error
        self.metrics.reloads.labels("done").inc()
        self._tell(loaded)

    async def first(self) -> None:
        """Load the first model."""
        self._tell(await asyncio.to_thread(self.live.load))

    async def on_signal(self) -> None:
        """Reload, and tell whoever looks at the screen where that fails."""
        with suppress(Exception):  # the screen may be gone
            try:
                await self.renew()
            except Refusal as error:
                self.screen.line(str(error))

    def _tell(self, loaded: Loaded) -> None:
        with suppress(PosError):  # the screen may be gone
            name = loaded.recommender.config["model"]
            self.screen.line(f"{name} of {loaded.run_dir} is ready")


def make_app(service: Service, failed: Callable[[BaseException], None]) -> FastAPI:
    """The application; it loads the model when it starts.

    Args:
        service: what the routes do.
        failed: told if the first model cannot be loaded.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop, tasks = asyncio.get_running_loop(), set()

        def start(work: Any, done: Callable[[asyncio.Task], Any]) -> None:
            tasks.add(task := loop.create_task(work))  # else nothing would hold it
            task.add_done_callback(tasks.discard)
            task.add_done_callback(done)

        def ended(task: asyncio.Task) -> None:
            if not task.cancelled() and (error := task.exception()):
                failed(error)

        start(service.first(), ended)
        if hasattr(signal, "SIGHUP"):
            again = partial(start, done=lambda task: None)
            loop.add_signal_handler(signal.SIGHUP, lambda: again(service.on_signal()))
        yield
        service.worker.shutdown()

    app = FastAPI(
        title="recbole-pos",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # pages that fetch their scripts from elsewhere
        redoc_url=None,
    )
    app.add_middleware(Measured, metrics=service.metrics)
    for path, does, body in (
        ("/recommend", service.recommend, bodies.RecommendBody),
        ("/similar", service.similar, bodies.SimilarBody),
        ("/reload", service.reload, bodies.ReloadBody),
    ):
        content = {"application/json": {"schema": body.model_json_schema()}}
        app.add_api_route(
            path,
            does,
            methods=["POST"],
            response_model=None,
            openapi_extra={"requestBody": {"content": content}},
        )
    app.add_api_route("/health", service.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", service.measured, methods=["GET"], response_model=None)
    app.add_exception_handler(PosError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _broken)  # its traceback goes to the log
    return app


def serve(run_dir: str | Path, settings: ServeArguments | None = None) -> None:
    """Answer requests until Ctrl-C or SIGTERM; those under way are finished.

    Args:
        run_dir: the folder of a run.
        settings: address and limits.

    Raises:
        UsageError: if the address cannot be listened on, or there is no such run.
        CheckpointError: if its model cannot be loaded.
    """
    settings = settings or ServeArguments()
    _check(settings)
    RunFolder(run_dir).require()
    screen, errors = Screen(), []
    with _listening(settings.host, settings.port) as listening:
        host, port = listening.getsockname()[:2]
        at = f"[{host}]" if listening.family == socket.AF_INET6 else host
        screen.line(f"http://{at}:{port} (loading {run_dir})")
        if not ipaddress.ip_address(host).is_loopback:
            screen.line("whoever reaches this address is answered: there is no authentication")

        def failed(error: BaseException) -> None:
            errors.append(error)
            server.should_exit = True

        config = uvicorn.Config(
            make_app(Service(run_dir, settings, screen), failed),
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # who asks is who is connected: /reload goes by it
            server_header=False,
            timeout_graceful_shutdown=PATIENCE,
        )
        server = uvicorn.Server(config)
        gc.freeze()  # libraries: else each reload searches them for garbage, and all requests wait
        with suppress(KeyboardInterrupt):  # raised again by uvicorn, once everything is done
            server.run(sockets=[listening])
    if errors:
        raise errors[0]


def _check(settings: ServeArguments) -> None:
    for name in ("threads", "max_body", "max_histories", "max_items", "max_k", "max_waiting"):
        if getattr(settings, name) < 1:
            raise UsageError(f"--{name} must be at least 1, found {getattr(settings, name)}")
    if not 0 <= settings.port < 2**16:
        raise UsageError(f"--port must be from 0 to 65535, found {settings.port}")


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sends at once (TCP_NODELAY) where the protocol is named; else the second part of
        # each answer waits 40 ms for the client to acknowledge the first
        listening = socket.socket(family, kind, socket.IPPROTO_TCP)
        try:
            if os.name == "posix":  # elsewhere it would share a port that is taken
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(512)
        except OSError:
            listening.close()
            raise
        return listening
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {host}, port {port}: {error}") from error


async def _body(request: Request, most: int) -> bytes:
    """The body, which must be json and not too long."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            415, f"expected the header Content-Type: application/json, found {kind[:80] or 'none'}"
        )
    try:
        return await asyncio.wait_for(_received(request, most), PATIENCE)
    except asyncio.TimeoutError:
        raise Refusal(408, f"the body did not arrive within {PATIENCE} seconds") from None


async def _received(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise Refusal(413, f"the body is longer than {most:,} bytes (--max_body)")
        parts.append(part)
    return b"".join(parts)


def _from_here(request: Request) -> bool:
    """Whether a process of this machine asks, and not for somebody else."""
    if request.client is None or any(name in request.headers for name in INDIRECT):
        return False
    return ipaddress.ip_address(request.client.host).is_loopback


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _refused(request: Request, error: Exception) -> Response:
    status = getattr(error, "status", 422)
    later = {"Retry-After": "1"} if status == 503 else None
    return _json(status, dumped({"error": str(error)}), later)


def _no_route(request: Request, error: Any) -> Response:
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _json(error.status_code, dumped({"error": text}), error.headers)


def _gone(request: Request, error: Exception) -> Response:
    return _json(400, b"")  # nobody reads it


def _broken(request: Request, error: Exception) -> Response:
    return _json(500, dumped({"error": "something is wrong in the server; its log has more"}))
