"""The command that writes a trained model for serving."""

from __future__ import annotations

import argparse
from typing import Any

from recbole_pos.cli.arguments import add_reading


def add_export(commands: Any, debug: argparse.ArgumentParser) -> None:
    """``export``, to the subparsers of the command line."""
    export = commands.add_parser(
        "export",
        parents=[debug],
        help="write a trained model as ONNX or a torch program, for serving",
        description="Write a trained model into a folder from which it is served without RecBole "
        "and this package: programs from a history to its vector and to the best items, names and "
        "vectors of items, and a README with the lines that use them.",
        allow_abbrev=False,
    )
    export.add_argument("trained", metavar="RUN_DIR", help="the folder of a run")
    export.add_argument("--to", metavar="DIR", required=True, help="a new or empty folder")
    export.add_argument("--format", default="onnx", help="onnx or torch_export (onnx)")
    export.add_argument("-k", type=int, default=100, help="items that are recommended (100)")
    export.add_argument(
        "--inference_relations",
        metavar="READS",
        help="of AttrFormer: own or none, in place of what it was trained with",
    )
    add_reading(export)
    export.set_defaults(command=_export)


def _export(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.serve.export import export

    given = args.to, args.format, args.k, args.inference_relations, args.data_path
    print(export(args.trained, *given))
    return 0
