"""`serve`: a trained model over HTTP."""

from __future__ import annotations

import argparse
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
