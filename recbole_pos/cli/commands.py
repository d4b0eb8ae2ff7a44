"""What each command takes, and what it calls: imports are made when a command runs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from recbole_pos.cli.arguments import (
    add_fields,
    add_plugins,
    add_reading,
    config_files,
    import_named,
    parse_overrides,
    read_fields,
)
from recbole_pos.cli.convert import add_convert
from recbole_pos.cli.data import add_data
from recbole_pos.cli.evaluate import add_evaluate
from recbole_pos.cli.export import add_export
from recbole_pos.cli.inspect import add_inspect
from recbole_pos.cli.recommend import add_recommend
from recbole_pos.cli.serve import add_serve
from recbole_pos.config.arguments import (
    AttachArguments,
    CompareArguments,
    RunArguments,
    SearchArguments,
)
from recbole_pos.experiment.starters import started_by
from recbole_pos.version import __version__


def add_commands(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Every command, to the subparsers of the command line.

    Args:
        commands: what ``add_subparsers`` gave.
        debug: has the option that all of them share.
    """
    add_convert(commands, debug)
    add_data(commands, debug)
    _add_run(commands, debug)
    _add_tune(commands, debug)
    _add_compare(commands, debug)
    _add_attach(commands, debug)
    _add_update(commands, debug)
    for name, listed, told in (
        ("models", _models, "list what can be run"),
        ("schemes", _schemes, "list position schemes"),
    ):
        parser = commands.add_parser(name, parents=[debug], help=told, allow_abbrev=False)
        add_plugins(parser)
        parser.set_defaults(command=listed)
    plot = commands.add_parser("plot", parents=[debug], help="draw training curves and attention")
    plot.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    add_reading(plot)
    plot.set_defaults(command=_plot)
    add_inspect(commands, debug)
    add_evaluate(commands, debug)
    add_recommend(commands, debug)
    add_export(commands, debug)
    add_serve(commands, debug)


def _add_run(commands: Any, debug: argparse.ArgumentParser) -> None:
    run = commands.add_parser(
        "run",
        parents=[debug],
        help="train and test one model",
        description="Train a model to early stopping and test its best epoch. Every key of the "
        "configuration can be given as --key value or --key=value; values are read as yaml. "
        "`run -m MODEL --help` lists the keys that a model reads.",
        allow_abbrev=False,
        add_help=False,
    )
    run.add_argument("-h", "--help", action="store_true", help="this, and the keys of MODEL")
    _add_what(run, "plugin model or RecBole model, see `recbole-pos models`")
    add_fields(run, RunArguments)
    run.set_defaults(command=_run, parser=run, configured=True)


def _add_what(parser: argparse.ArgumentParser, models: str) -> None:
    """The model, the data and the files of a configuration."""
    parser.add_argument("-m", "--model", help=models)
    parser.add_argument(
        "-d", "--dataset", help="folder with atomic files under data_path, or ml-100k"
    )
    parser.add_argument(
        "--config_files", nargs="+", default=[], metavar="YAML", help="configuration"
    )


def _run(args: argparse.Namespace, options: list[str]) -> int:
    if args.help:
        args.parser.print_help()
        if args.model:
            from recbole_pos.cli.option_list import list_options

            list_options(args.model, parse_overrides(options))
        return 0
    files, overrides = config_files(args.config_files), parse_overrides(options)
    settings = read_fields(args, RunArguments)
    _announce(args, settings)
    from recbole_pos.experiment.run import run

    run(args.model, args.dataset, files, overrides, settings=settings)
    return 0


def _announce(args: argparse.Namespace, settings: RunArguments) -> None:
    """Say what begins, before torch and RecBole are imported, which takes seconds."""
    if settings.as_json or any(rank for _, rank, _ in started_by(os.environ)):
        return
    from recbole_pos.screen import Screen

    what = " on ".join(word for word in (args.model, args.dataset) if word)
    if settings.resume is not None:
        what = f"going on with {settings.resume}"
    screen = Screen(settings.verbose, log=settings.log)
    screen.line(f"recbole-pos {__version__}: {what or 'the model of the files'}")


def _add_tune(commands: Any, debug: argparse.ArgumentParser) -> None:
    tune = commands.add_parser(
        "tune",
        parents=[debug],
        help="search for the best configuration with Ray Tune, by validation",
        description="Search for the best configuration by validation, on this machine or a Ray "
        "cluster, and test it once. Every key of the configuration can be given as --key value or "
        "--key=value and is then the same in all trials.",
        allow_abbrev=False,
    )
    _add_what(tune, "plugin model or RecBole model")
    tune.add_argument(
        "--space", metavar="FILE", help="yaml, .hyper or .test (properties/tune/<model>.yaml)"
    )
    add_fields(tune, SearchArguments)
    tune.set_defaults(command=_tune, configured=True)


def _tune(args: argparse.Namespace, options: list[str]) -> int:
    from recbole_pos.tune import search

    overrides = parse_overrides(options)
    if args.resume is not None:  # whose folder has all other options
        import_named(overrides.pop("plugins", None))
    search(
        args.model,
        args.dataset,
        args.space,
        config_files(args.config_files),
        overrides,
        settings=read_fields(args, SearchArguments),
    )
    return 0


def _add_compare(commands: Any, debug: argparse.ArgumentParser) -> None:
    compare = commands.add_parser(
        "compare",
        parents=[debug],
        help="train several models the same way and say how they differ",
        description="Compare models (-m A,B,C), the rows of a study's file, or runs that exist. "
        "What is missing is trained, with every seed; then tables, differences with intervals, and "
        "a report. The same command again goes on where it was stopped. Keys of the configuration "
        "(--key value) are the same for all rows.",
        allow_abbrev=False,
    )
    compare.add_argument(
        "what", nargs="*", metavar="STUDY", help="a study's yaml or folder, or folders of runs"
    )
    _add_what(compare, "models, with commas between them")
    add_fields(compare, CompareArguments)
    compare.set_defaults(command=_compare, configured=True)


def _compare(args: argparse.Namespace, options: list[str]) -> int:
    from recbole_pos.errors import UsageError
    from recbole_pos.study.comparing import compare

    if bool(args.what) == bool(args.model):
        raise UsageError(
            "compare: give either models, with commas and no spaces between them, as in "
            "-m FPARec,SASRec -d ml-100k, or a study's file or folder, or folders of runs"
        )
    models = [name.strip() for name in (args.model or "").split(",") if name.strip()]
    what = models or (args.what[0] if len(args.what) == 1 else args.what)
    files, given = config_files(args.config_files), parse_overrides(options)
    compare(what, args.dataset, files, given, settings=read_fields(args, CompareArguments))
    return 0


def _add_attach(commands: Any, debug: argparse.ArgumentParser) -> None:
    attach = commands.add_parser(
        "attach",
        parents=[debug],
        help="add position schemes to a trained model and fine-tune only them",
        description="Start from the best weights of a run, add position schemes, and train their "
        "parameters alone. Options are those of the run; --key value changes them.",
        allow_abbrev=False,
    )
    attach.add_argument("trained", metavar="RUN_DIR", help="the folder of a finished run")
    attach.add_argument("schemes", nargs="+", metavar="SCHEME", help="such as kernel")
    add_fields(attach, AttachArguments)
    attach.set_defaults(command=_attach, configured=True)


def _attach(args: argparse.Namespace, options: list[str]) -> int:
    from recbole_pos.experiment.attach import attach

    settings = read_fields(args, AttachArguments)
    attach(args.trained, args.schemes, parse_overrides(options), settings=settings)
    return 0


def _add_update(commands: Any, debug: argparse.ArgumentParser) -> None:
    update = commands.add_parser(
        "update",
        parents=[debug],
        help="train a model some more on data that have grown",
        description="Some more epochs from the weights of a run, on its data as they are now, as a "
        "new run: new users, events and items included. Options are those of the run (epochs: 5); "
        "--key value changes them.",
        allow_abbrev=False,
    )
    update.add_argument("trained", metavar="RUN_DIR", help="the folder of a run")
    update.add_argument(
        "--new_items",
        metavar="FIELD",
        help="new items start with the mean vector of those that share FIELD, an attribute",
    )
    add_fields(update, AttachArguments)
    update.set_defaults(command=_update, configured=True)


def _update(args: argparse.Namespace, options: list[str]) -> int:
    from recbole_pos.experiment.update import update

    settings = read_fields(args, AttachArguments)
    update(args.trained, parse_overrides(options), new_items=args.new_items, settings=settings)
    return 0


def _models(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.cli.listing import list_models

    list_models()
    return 0


def _schemes(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.cli.listing import list_schemes

    list_schemes()
    return 0


def _plot(args: argparse.Namespace, rest: list[str]) -> int:
    from recbole_pos.inspect.plot import plot_run

    for file in plot_run(args.run_dir, args.data_path):
        print(file)
    return 0
