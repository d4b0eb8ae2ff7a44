"""What Prometheus is told."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

PATHS = frozenset(("/recommend", "/similar", "/health", "/metrics", "/reload"))
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """Of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "recbole_pos_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "recbole_pos_request_seconds",
            "From a request to its answer",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.histories = Counter(
            "recbole_pos_histories", "Histories and users recommended to", registry=registry
        )
        self.waiting = Gauge(
            "recbole_pos_waiting", "Requests being computed or waiting for it", registry=registry
        )
        self.reloads = Counter(
            "recbole_pos_reloads", "Reloads of the model", ["outcome"], registry=registry
        )
        for outcome in ("done", "failed"):  # a rate needs the zero before the first
            self.reloads.labels(outcome)


class Measured:
    """An ASGI application whose requests are counted and timed."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI's call."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = 500, time.perf_counter()

        async def told(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, told)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - began)
