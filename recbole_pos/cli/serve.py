"""`serve`: a trained model over HTTP."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recbole_pos.cli.arguments import add_fields, add_plugins, read_fields
from recbole_pos.config.arguments import ServeArguments


def add_serve(commands: Any, debug: argparse.ArgumentParser) -> None:
    """The command, to the subparsers of the command line."""
    serve = commands.add_parser(
        "serve",
        parents=[debug],
        help="answer over HTTP what a trained model recommends",
        description="POST /recommend, /similar and /reload; GET /health and /metrics. There is no "
        "authentication and no TLS. SIGHUP reloads the model.",
        allow_abbrev=False,
    )
    serve.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    add_fields(serve, ServeArguments)
    add_plugins(serve)
    serve.set_defaults(command=_serve)


def _serve(args: argparse.Namespace, rest: list[str]) -> int:
    with _ended_by_signals():
        try:
            from recbole_pos.serve.http import serve
        except ModuleNotFoundError as error:
            if error.name not in ("fastapi", "uvicorn", "prometheus_client"):
                raise
            from recbole_pos.errors import UsageError

            raise UsageError(
                f"serve: {error.name} is not installed; pip install 'recbole-pos[serve]'"
            ) from None
        serve(args.run_dir, read_fields(args, ServeArguments))
    return 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within, SIGINT and SIGTERM end the process with 0, at once: there is nothing to finish.

    While requests are answered, uvicorn has handlers of its own, and raises the signal again when
    it is done. An exception instead could come in the middle of an import, which may swallow it.
    """
    if threading.current_thread() is not threading.main_thread():  # nobody else may
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: os._exit(0)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
