"""The command line: ``recbole-pos run | tune | attach | recommend | models | ...``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recbole_pos import __version__
from recbole_pos.cli.inspect import add_inspect
from recbole_pos.errors import Interrupted, PosError, UsageError

# Options of `tune` alone; no option of any model has one of these names.
TUNE_OPTIONS = (
    *("space", "num_samples", "max_concurrent", "metric", "scheduler", "grace_epochs", "searcher"),
    *("address", "storage", "cpus_per_trial", "gpus_per_trial"),
)
CONFIGURED = ("run", "tune", "attach")  # commands that take --key=value of the configuration
PARALLEL_OPTIONS = ("nproc", "world_size", "ip", "port", "group_offset")  # of `run` alone
EPILOG = """examples:
  recbole-pos run -m FPARec -d ml-100k
  recbole-pos run -m SASRec -d ml-100k --epochs=20 --learning_rate=5e-4
  recbole-pos run --resume saved/ml-100k/FPARec/20260101-120000
  recbole-pos tune -m FPARec -d ml-100k --num_samples 20 --max_concurrent 2
  recbole-pos attach saved/ml-100k/PosSASRec/20260101-120000 kernel
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 1 (failed), 2 (wrong input), 130 (interrupted by
    Ctrl-C), 143 (by SIGTERM)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        argv = ["run", *argv]  # `recbole-pos -m FPARec ...` is a run, as in RecBole's script
    # argparse would take a --key=value with a space in it for a name of a file or scheme
    command = argv[0] if argv else ""
    configured = command in CONFIGURED
    overrides = [word for word in argv if _is_override(word, command)] if configured else []
    args, rest = _parser().parse_known_args([word for word in argv if word not in overrides])
    rest += overrides
    with _heeding_sigterm() as terminated:
        try:
            if rest and not configured:
                raise UsageError(f"no further arguments expected, found {' '.join(rest)}")
            return args.command(args, rest)
        except KeyboardInterrupt as interrupt:
            print(str(interrupt) or "interrupted", file=sys.stderr)
            return 128 + signal.SIGTERM if terminated.is_set() else Interrupted.exit_code
        except PosError as error:
            if args.debug:
                raise
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except Exception as error:
            if args.debug:
                raise
            print(
                f"error: {type(error).__name__}: {error}\n"
                "(run again with --debug for the traceback)",
                file=sys.stderr,
            )
            return 1


@contextmanager
def _heeding_sigterm() -> Iterator[threading.Event]:
    """Within, SIGTERM, which containers send, ends everything as Ctrl-C does; set once it came."""
    terminated = threading.Event()

    def end(number: int, frame: Any) -> None:
        terminated.set()
        ctrl_c = signal.getsignal(signal.SIGINT)
        # a shell lets what it starts in the background ignore Ctrl-C, but not this
        (ctrl_c if callable(ctrl_c) else signal.default_int_handler)(signal.SIGINT, frame)

    if threading.current_thread() is not threading.main_thread():  # nobody else may
        yield terminated
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_override(word: str, command: str) -> bool:
    key, equals, _ = word.removeprefix("--").partition("=")
    own = ("model", "dataset", "config_files", "run_dir", "resume", "debug", "log")
    own += TUNE_OPTIONS + PARALLEL_OPTIONS
    if command == "tune":  # elsewhere `seed` is that of training
        own += ("seed",)
    return word.startswith("--") and bool(equals) and key not in own


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recbole-pos",
        description="Position-aware sequential recommendation for RecBole.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"recbole-pos {__version__}")
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show tracebacks")
    telling = _telling()
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        parents=[debug, telling],
        help="train and test one model",
        description="Train a model to early stopping and test its best epoch. Every key of the "
        "configuration can be given as --key=value; values are read as yaml.",
        allow_abbrev=False,
    )
    run.add_argument(
        "-m", "--model", help="plugin model or RecBole model, see `recbole-pos models`"
    )
    run.add_argument("-d", "--dataset", help="folder with atomic files under data_path, or ml-100k")
    run.add_argument("--config_files", nargs="+", default=[], metavar="YAML", help="configuration")
    run.add_argument("--run_dir", help="output folder (saved/<dataset>/<model>/<time>)")
    run.add_argument("--resume", metavar="RUN_DIR", help="continue an interrupted run")
    run.add_argument("--nproc", type=int, default=1, metavar="N", help="processes here (1)")
    run.add_argument(
        "--world_size", type=int, default=-1, metavar="N", help="processes on all machines together"
    )
    run.add_argument("--ip", default="localhost", help="address of the machine that runs process 0")
    run.add_argument("--port", type=int, help="where they meet (a free one; 5678 between machines)")
    run.add_argument(
        "--group_offset", type=int, default=0, metavar="N", help="number of the first process here"
    )
    run.set_defaults(command=_run)
    _add_tune(commands, debug)
    attach = commands.add_parser(
        "attach",
        parents=[debug, telling],
        help="add position schemes to a trained model and fine-tune only them",
        description="Start from the best weights of a run, add position schemes, and train their "
        "parameters alone. Options are those of the run; --key=value changes them.",
        allow_abbrev=False,
    )
    attach.add_argument("trained", metavar="RUN_DIR", help="the folder of a finished run")
    attach.add_argument("schemes", nargs="+", metavar="SCHEME", help="such as kernel")
    attach.add_argument("--run_dir", help="output folder (saved/<dataset>/<model>/<time>)")
    attach.set_defaults(command=_attach)
    models = commands.add_parser("models", parents=[debug], help="list what can be run")
    models.set_defaults(command=_models)
    schemes = commands.add_parser("schemes", parents=[debug], help="list position schemes")
    schemes.set_defaults(command=_schemes)
    plot = commands.add_parser("plot", parents=[debug], help="draw training curves and attention")
    plot.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    plot.set_defaults(command=_plot)
    add_inspect(commands, debug)
    _add_recommend(commands, debug)
    return parser


def _telling() -> argparse.ArgumentParser:
    """What is told while a model trains."""
    parser = argparse.ArgumentParser(add_help=False)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quiet", action="store_true", help="print nothing")
    which.add_argument(
        "--json",
        action="store_true",
        help="print json objects, one a line: start, epoch (each), result",
    )
    parser.add_argument("--log", metavar="FILE", help="add what is printed to this file too")
    return parser


def _told(args: argparse.Namespace) -> dict[str, Any]:
    return {"verbose": not args.quiet, "as_json": args.json, "log": args.log}


def _add_tune(commands: Any, debug: argparse.ArgumentParser) -> None:
    tune = commands.add_parser(
        "tune",
        parents=[debug],
        help="search for the best configuration with Ray Tune, by validation",
        description="Search for the best configuration by validation, on this machine or a Ray "
        "cluster, and test it once. Every key of the configuration can be given as --key=value and "
        "is then the same in all trials.",
        allow_abbrev=False,
    )
    tune.add_argument("-m", "--model", help="plugin model or RecBole model")
    tune.add_argument("-d", "--dataset", help="folder with atomic files, or ml-100k")
    tune.add_argument("--config_files", nargs="+", default=[], metavar="YAML", help="configuration")
    tune.add_argument(
        "--space", metavar="FILE", help="yaml, .hyper or .test (properties/tune/<model>.yaml)"
    )
    tune.add_argument("--num_samples", type=int, metavar="N", help="trials (60; all of a grid)")
    tune.add_argument(
        "--max_concurrent", type=int, metavar="N", help="trials side by side (as many as fit)"
    )
    tune.add_argument("--metric", help="validation metric to go by (valid_metric), such as ndcg@10")
    tune.add_argument("--scheduler", default="asha", help="asha (stops weak trials early) or none")
    tune.add_argument(
        "--grace_epochs",
        type=int,
        default=5,
        metavar="N",
        help="epochs of each trial before asha may stop it (5)",
    )
    tune.add_argument("--searcher", default="optuna", help="optuna (TPE), random or grid")
    tune.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the search (0); that of training is `seed` in a configuration file",
    )
    tune.add_argument("--run_dir", help="output folder (saved/<dataset>/<model>/tune-<time>)")
    tune.add_argument("--resume", metavar="DIR", help="continue an interrupted search")
    tune.add_argument("--address", help="Ray cluster: auto or HOST:PORT (one of its own)")
    tune.add_argument("--storage", metavar="PATH", help="path or URI that all machines reach")
    tune.add_argument("--cpus_per_trial", type=float, default=1, metavar="N", help="cores (1)")
    tune.add_argument(
        "--gpus_per_trial", type=float, default=0, metavar="N", help="0.5 shares a GPU (0)"
    )
    tune.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="processes that train one trial (1)"
    )
    tune.set_defaults(command=_tune)


def _add_recommend(commands: Any, debug: argparse.ArgumentParser) -> None:
    recommend = commands.add_parser(
        "recommend",
        parents=[debug],
        help="what a trained model recommends to every user, as a csv file",
        description="The items with the highest scores after everything a user has done, held-out "
        "events included, best first.",
        allow_abbrev=False,
    )
    recommend.add_argument("trained", metavar="RUN_DIR", help="the folder of a run")
    recommend.add_argument("-k", type=int, default=10, help="items a user (10)")
    recommend.add_argument("--users", nargs="+", metavar="USER", help="names of users (all)")
    recommend.add_argument(
        "--mask_history",
        action=argparse.BooleanOptionalAction,
        help="leave out items of a user's past (as the run was evaluated)",
    )
    recommend.add_argument("--out", metavar="FILE", help="(RUN_DIR/recommendations.csv)")
    recommend.set_defaults(command=_recommend)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.experiment.run import run

    run(
        args.model,
        args.dataset,
        _files(args.config_files),
        parse_overrides(rest),
        run_dir=args.run_dir,
        resume=args.resume,
        **_told(args),
        **{name: getattr(args, name) for name in PARALLEL_OPTIONS},
    )
    return 0


def _tune(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.tune import search

    names = ("num_samples", "max_concurrent", "metric", "scheduler", "grace_epochs", "searcher",
             "seed", "run_dir", "storage", "resume", "address", "cpus_per_trial",
             "gpus_per_trial", "nproc")  # fmt: skip
    search(
        args.model,
        args.dataset,
        args.space,
        _files(args.config_files),
        parse_overrides(rest),
        **{name: getattr(args, name) for name in names},
    )
    return 0


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """``--key=value`` arguments as a dict, values read as yaml.

    Raises:
        UsageError: for anything of another form, or a key given twice with different values.
    """
    from recbole_pos.yaml_files import parse_scalar

    found: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not (argument.startswith("--") and equals and key):
            raise UsageError(f"cannot read {argument!r}: options are given as --key=value")
        value = parse_scalar(text, f"--{key}")
        if key in found and found[key] != value:
            raise UsageError(f"--{key} is given twice, with {found[key]!r} and {value!r}")
        found[key] = value
    return found


def _models(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.cli.listing import list_models

    list_models()
    return 0


def _attach(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.experiment.attach import attach

    attach(args.trained, args.schemes, parse_overrides(rest), run_dir=args.run_dir, **_told(args))
    return 0


def _recommend(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.serve.recommend import write_recommendations

    write_recommendations(args.trained, args.users, args.k, args.mask_history, args.out)
    return 0


def _schemes(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.cli.listing import list_schemes

    list_schemes()
    return 0


def _plot(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.inspect.plot import plot_run

    for file in plot_run(args.run_dir):
        print(file)
    return 0


def _files(given: list[str]) -> list[str]:
    """Files one by one, or several in one argument as RecBole has them; a name may have spaces."""
    parts = ([group] if os.path.exists(group) else group.split() for group in given)
    return [file for part in parts for file in part]


if __name__ == "__main__":
    sys.exit(main())
