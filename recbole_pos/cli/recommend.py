"""`recommend` and `similar`: what a trained model is asked for."""

from __future__ import annotations

import argparse
from typing import Any

from recbole_pos.cli.arguments import add_reading


def add_recommend(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Both commands, to the subparsers of the command line."""
    recommend = commands.add_parser(
        "recommend",
        parents=[debug],
        help="what a trained model recommends, to users or to any history, as a file",
        description="The items with the highest scores after everything a user has done, held-out "
        "and later events included, best first; or after histories that are given.",
        allow_abbrev=False,
    )
    recommend.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    recommend.add_argument("-k", type=int, default=10, help="items a user (10)")
    who = recommend.add_mutually_exclusive_group()
    who.add_argument("--users", nargs="+", metavar="USER", help="names of users (all)")
    who.add_argument(
        "--histories",
        metavar="FILE",
        help='json lines {"id": ..., "items": [...], "times": [...], "at": ...}, or parquet (a '
        "file or folder with such columns), instead of users",
    )
    recommend.add_argument(
        "--exclude_seen",
        "--mask_history",
        action=argparse.BooleanOptionalAction,
        help="leave out items of a user's past (as the run was evaluated)",
    )
    recommend.add_argument("--items", metavar="FILE", help="names to choose from, one a line (all)")
    recommend.add_argument("--exclude", metavar="FILE", help="names to leave out, one a line")
    recommend.add_argument(
        "--at",
        metavar="TIME",
        help="time of the request, for models with request_time: target: now, ISO 8601, or a "
        "number in the unit of the time field (now)",
    )
    recommend.add_argument(
        "--out",
        metavar="FILE",
        help="csv, or parquet if it ends so (RUN_DIR/recommendations.csv); with --address a folder",
    )
    recommend.add_argument(
        "--address", help="score on a running Ray cluster: auto, or HOST:PORT (this machine alone)"
    )
    recommend.add_argument(
        "--processes", type=int, metavar="N", help="with --address, at most (all CPUs)"
    )
    add_reading(recommend)
    recommend.set_defaults(command=_recommend)
    similar = commands.add_parser(
        "similar", parents=[debug], help="the items most like an item, by a trained model"
    )
    similar.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    similar.add_argument("items", nargs="+", metavar="ITEM", help="names of items")
    similar.add_argument("-k", type=int, default=10, help="neighbours an item (10)")
    add_reading(similar)
    similar.add_argument(
        "--items", dest="allowed", metavar="FILE", help="names to choose from, one a line (all)"
    )
    similar.add_argument("--exclude", metavar="FILE", help="names to leave out, one a line")
    similar.set_defaults(command=_similar)


def _recommend(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.errors import UsageError

    options = ["run_dir", "users", "k", "exclude_seen", "items", "exclude", "histories", "out"]
    options += ["data_path", "at"]
    given = {name: getattr(args, name) for name in options}
    if args.address is None:
        if args.processes is not None:
            raise UsageError("--processes: goes with --address; threads are OMP_NUM_THREADS")
        from recbole_pos.serve.recommend import write_recommendations

        write_recommendations(**given)
        return 0
    if args.out is None:
        raise UsageError("--address: give --out, a folder that all machines reach")
    if args.processes is not None and args.processes < 1:
        raise UsageError(f"--processes: expected 1 or more, found {args.processes}")
    from recbole_pos.serve.on_ray import recommend_on_ray

    recommend_on_ray(**given, address=args.address, processes=args.processes)
    return 0


def _similar(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.screen import Screen
    from recbole_pos.serve.recommend import read_names, tell_unknown
    from recbole_pos.serve.recommender import Recommender

    files = {"items": args.allowed, "exclude": args.exclude}
    names = {option: None if file is None else read_names(file) for option, file in files.items()}
    trained = Recommender.load(args.run_dir, args.data_path, histories_only=True)
    tell_unknown(trained, Screen(), **names)
    found = trained.similar(args.items, args.k, names["items"], names["exclude"])
    print(found.to_string(index=False))
    return 0
