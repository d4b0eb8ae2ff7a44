"""`evaluate`: metrics of a trained run, without training."""

from __future__ import annotations

import argparse
from typing import Any

from recbole_pos.cli.arguments import add_reading


def add_evaluate(commands: Any, debug: argparse.ArgumentParser) -> None:
    """The command, to the subparsers of the command line."""
    evaluate = commands.add_parser(
        "evaluate",
        parents=[debug],
        help="metrics of a trained run, also other ones than it was tested with",
        description="From the ranks that the run has kept where they suffice, otherwise by its "
        "best weights, which needs the dataset. MAP and MRR of one target are the same number.",
        allow_abbrev=False,
    )
    evaluate.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    evaluate.add_argument(
        "--metrics", nargs="+", metavar="METRIC", help="such as NDCG Hit MRR (those of the run)"
    )
    evaluate.add_argument("--topk", nargs="+", metavar="K", help="cutoffs (those of the run)")
    evaluate.add_argument("--part", default="test", metavar="PART", help="test or valid (test)")
    evaluate.add_argument(
        "--mask_history", metavar="BOOL", help="leave out items of a user's past (as in the run)"
    )
    evaluate.add_argument("--json", action="store_true", help="print one json object")
    add_reading(evaluate)
    evaluate.set_defaults(command=_evaluate)


def _evaluate(args: argparse.Namespace, rest: list[str]) -> int:
    import json

    from recbole_pos.experiment.evaluate import evaluate
    from recbole_pos.screen import Screen
    from recbole_pos.yaml_files import parse_scalar

    mask = None if args.mask_history is None else parse_scalar(args.mask_history, "--mask_history")
    found = evaluate(
        args.run_dir,
        _values(args.metrics, "--metrics"),
        _values(args.topk, "--topk"),
        args.part,
        mask,
        args.data_path,
    )
    if args.json:
        print(json.dumps(found))
    else:
        Screen().results(f"{args.run_dir}, best epoch", {args.part: found})
    return 0


def _values(words: list[str] | None, option: str) -> list[Any] | None:
    """Values of an option as words, with commas, or as a list of yaml."""
    from recbole_pos.yaml_files import parse_scalar

    if words is None:
        return None
    text = " ".join(words).replace(",", " ").strip("[] ")
    return [parse_scalar(word, option) for word in text.split()]
