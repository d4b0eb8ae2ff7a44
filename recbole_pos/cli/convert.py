"""``recbole-pos convert``: its options and what they call."""

from __future__ import annotations

import argparse
from typing import Any

from recbole_pos.cli.arguments import add_fields, read_fields
from recbole_pos.config.arguments import ConvertArguments


def add_convert(commands: Any, debug: argparse.ArgumentParser) -> None:
    """The command, to the subparsers of the command line."""
    convert = commands.add_parser(
        "convert",
        parents=[debug],
        help="make a dataset of a csv, tsv, json lines or parquet file",
        description="Make atomic files of events, one a line: csv, tsv or json lines (.gz as well),"
        " parquet, or a folder of them. What is guessed is shown before anything is written; what "
        "becomes of every line is told, and kept in convert.json.",
        allow_abbrev=False,
    )
    convert.add_argument("events", metavar="EVENTS", help="file or folder")
    add_fields(convert, ConvertArguments)
    convert.set_defaults(command=_convert)


def _convert(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.conversion.convert import convert

    convert(args.events, settings=read_fields(args, ConvertArguments))
    return 0
