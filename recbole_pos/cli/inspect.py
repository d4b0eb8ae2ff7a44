"""``recbole-pos inspect``: its options and what they call."""

from __future__ import annotations

import argparse
from typing import Any

from recbole_pos.cli.arguments import add_reading


def add_inspect(commands: Any, debug: argparse.ArgumentParser) -> None:
    inspect = commands.add_parser("inspect", help="look into a trained model, or at encodings")
    what = inspect.add_subparsers(required=True, metavar="WHAT")
    attention = what.add_parser(
        "attention",
        parents=[debug],
        help="how far attention looks back, over how many events, and learned periods of time",
        description="Attention distance and entropy of every layer and head, averaged over "
        "histories of held-out targets, one per user; and the periods of schemes that turn by "
        "time. Writes attention.json and pictures into the run folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_trained(attention)
    attention.add_argument("--users", type=int, default=200, help="how many to draw at most")
    attention.add_argument("--min_events", type=int, default=20, help="shortest history to include")
    attention.add_argument("--seed", type=int, default=0, help="of the draw")
    attention.set_defaults(command=_inspect_attention)
    relations = what.add_parser(
        "relations",
        parents=[debug],
        help="what each attribute of an AttrFormer reads, and how much it adds",
        description="How many relations events have by each attribute, how many of them lead to "
        "other users, what they add to a state beside self-attention (of users: how far they move "
        "it), the weights W^R and the gates of users, in training batches. Writes relations.json "
        "and relations.png into the run folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_trained(relations)
    relations.add_argument("--batches", type=int, default=8, help="training batches to look at")
    relations.set_defaults(command=_inspect_relations)
    encoding = what.add_parser(
        "encoding",
        parents=[debug],
        help="pictures of encodings of positions, and what they tell from the start and the end",
        description="Heat maps of encodings for sessions of some lengths, and of their dot "
        "products in one session and between two. Writes encoding_SCHEME.png.",
        allow_abbrev=False,
    )
    encoding.add_argument(
        "schemes",
        nargs="*",
        metavar="SCHEME",
        help="which (all of the trained model; without one spe and dpe, as in the PosRec paper)",
    )
    encoding.add_argument(
        "--length", nargs="+", type=int, default=[10, 20], help="of the sessions (10 20)"
    )
    encoding.add_argument(
        "--checkpoint", metavar="RUN_DIR", help="the folder of a run, or a checkpoint in it"
    )
    encoding.add_argument("--hidden_size", type=int, help="d, where there is no model (100)")
    encoding.add_argument("--out", metavar="DIR", help="where to write (the run, or here)")
    add_reading(encoding)
    encoding.set_defaults(command=_inspect_encoding)


def _add_trained(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        required=True,
        default=argparse.SUPPRESS,
        metavar="RUN_DIR",
        help="the folder of a run, or a checkpoint in it",
    )
    add_reading(parser)


def _inspect_attention(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.inspect.report import inspect_attention, show
    from recbole_pos.screen import wide_console

    report = inspect_attention(
        args.checkpoint, args.users, args.min_events, args.seed, args.data_path
    )
    show(report, wide_console())
    return 0


def _inspect_relations(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.inspect.relations import inspect_relations, show
    from recbole_pos.screen import wide_console

    show(inspect_relations(args.checkpoint, args.batches, args.data_path), wide_console())
    return 0


def _inspect_encoding(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.inspect.encoding import inspect_encoding, show
    from recbole_pos.screen import wide_console

    reports = inspect_encoding(
        args.schemes, args.length, args.checkpoint, args.hidden_size, args.out, args.data_path
    )
    show(reports, max(args.length), wide_console())
    return 0
