"""`data`: public logs, and datasets of their raw files."""

from __future__ import annotations

import argparse
from typing import Any


def add_data(commands: Any, debug: argparse.ArgumentParser) -> None:
    """The command, to the subparsers of the command line."""
    data = commands.add_parser(
        "data",
        parents=[debug],
        help="public logs: where they come from, and their raw files as datasets",
        description="List the public logs of the papers (data), tell of one (data NAME), or make a "
        "dataset of its raw files (data build NAME FILE ...) and check its counts.",
        allow_abbrev=False,
    )
    data.add_argument(
        "words", nargs="*", metavar="NAME | build NAME FILE", help="nothing: list them"
    )
    data.add_argument("--data_path", default="dataset/", help="folder of datasets (dataset/)")
    data.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")
    data.set_defaults(command=_data)


def _data(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.errors import UsageError
    from recbole_pos.public.described import public_log

    words = args.words
    if not words:
        _list(args.data_path)
    elif words[0] != "build" and len(words) == 1:
        _tell(words[0])
    elif words[0] == "build" and len(words) > 2:
        from recbole_pos.public.build import build

        build(words[1], words[2:], args.data_path, args.overwrite)
    elif words[0] == "build" and len(words) == 2:
        log = public_log(words[1])
        raise UsageError(f"data build {log.name}: name the raw files, {' '.join(log.files)}")
    else:
        raise UsageError(f"data: expected NAME, or build NAME FILE ..., found {' '.join(words)}")
    return 0


def _list(data_path: str) -> None:
    from pathlib import Path

    from recbole_pos.cli.listing import show
    from recbole_pos.public.described import public_logs

    rows = []
    for name, log in public_logs().items():
        here = "yes" if (Path(data_path) / name / f"{name}.inter").is_file() else "no"
        counts = [f"{log.counts[what]:,}" if what in log.counts else "?" for what in _COUNTED]
        rows.append((name, *counts, here, f"{log.title} ({', '.join(log.papers)}). {log.source}"))
    show(("name", *_COUNTED, "here", "what it is (papers), and where"), rows)


_COUNTED = ("users", "items", "events")


def _tell(name: str) -> None:
    from recbole_pos.public.described import public_log

    log = public_log(name)
    counts = ", ".join(f"{count:,} {what}" for what, count in log.counts.items()) or "not known"
    for line in (
        f"{log.title}: {counts}",
        f"source:  {log.source}",
        f"licence: {log.licence}",
        *([f"note:    {log.note}"] if log.note else []),
        f"papers:  {', '.join(log.papers)}",
        f"files:   {', '.join(log.files)}",
        *(f"md5:     {md5}  {file}" for file, md5 in log.md5.items()),
        f"build:   recbole-pos data build {log.name} {' '.join(log.files)}",
        f"yaml:    {log.yaml}",
    ):
        print(line)
