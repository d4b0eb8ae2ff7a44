"""The commands: what each takes, and what it calls. Imports are made when a command runs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from recbole_pos.cli.parser import (
    Argument,
    Parser,
    config_files,
    option,
    read_settings,
)
from recbole_pos.config.arguments import (
    AttachArguments,
    CompareArguments,
    ConvertArguments,
    RunArguments,
    SearchArguments,
    ServeArguments,
)
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.environment import ended_by_signals, find_launcher
from recbole_pos.version import __version__

EPILOG = """examples:
  recbole-pos run -m FPARec -d ml-100k
  recbole-pos run -m SASRec -d ml-100k --epochs 20 --learning_rate 5e-4
  recbole-pos run -m FPARec --help
  recbole-pos run --resume saved/ml-100k/FPARec/20260101-120000
  recbole-pos tune -m FPARec -d ml-100k --num_samples 20 --max_concurrent 2
  recbole-pos attach saved/ml-100k/PosSASRec/20260101-120000 kernel
"""
_ADDERS: list[Callable[[Any], None]] = []  # of the commands, each to given subparsers
# Arguments that several commands share.
_PLUGINS = option("--plugins", metavar="[MODULE]", help="modules with models or schemes, as of run")
_READING = (
    option("--data_path", metavar="DIR", help="folder of datasets (where the run found its own)"),
    _PLUGINS,
)
_RUN_DIR = option("run_dir", metavar="RUN_DIR", help="the folder of a run")
_DATASET = (
    option("-d", "--dataset", help="folder with atomic files under data_path, or ml-100k"),
    option("--config_files", nargs="+", default=[], metavar="YAML", help="configuration"),
)
_CHECKPOINT = option(
    "--checkpoint",
    required=True,
    default=argparse.SUPPRESS,
    metavar="RUN_DIR",
    help="the folder of a run, or a checkpoint in it",
)
_ENVIRONMENT = (
    "What is not given here is read from the environment: RECBOLE_POS_RUN_DIR, RECBOLE_POS_PORT, "
    "... (the names of the options)."
)
_DEFAULTS = argparse.ArgumentDefaultsHelpFormatter


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and that of each command."""
    parser = Parser(
        prog="recbole-pos",
        description="Position-aware sequential recommendation for RecBole.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"recbole-pos {__version__}")
    commands: Any = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _ADDERS:
        add(commands)
    return parser, commands.choices


def _command(
    name: str,
    text: str,
    *arguments: Argument | type,
    configured: bool = False,
    environment: bool = False,
    **settings: Any,
) -> Callable[[Callable], Callable]:
    """Make a function the command of a name.

    Args:
        name: name of the command; of one within a group, with that before it.
        text: what it does, in the list of commands.
        arguments: what adds its arguments; of a settings class, all its fields.
        configured: whether it takes options of the configuration, the function's second argument.
        environment: whether what is not given is read from the environment.
        settings: settings of its parser.
    """
    group, _, name = name.rpartition(" ")

    def decorate(function: Callable) -> Callable:
        def add(commands: Any) -> None:
            place = commands.choices[group].get_default("commands") if group else commands
            parser = place.add_parser(name, help=text, **settings)
            parser.add_argument("--debug", action="store_true", help="show tracebacks")
            for one in arguments:
                parser.add_fields(one) if is_dataclass(one) else one(parser)
            parser.set_defaults(command=function, parser=parser, configured=configured)
            parser.environment = environment

        _ADDERS.append(add)
        return function

    return decorate


@_command(
    "convert",
    "make a dataset of a csv, tsv, json lines or parquet file",
    option("events", metavar="EVENTS", help="file or folder"),
    ConvertArguments,
    description="Make atomic files of interactions, one a row: csv, tsv or json lines (also .gz),"
    " parquet, or a folder of them. What is guessed is shown before anything is written; what "
    "becomes of every row is reported, and kept in convert.json.",
)
def _convert(args: argparse.Namespace) -> None:
    from recbole_pos.conversion.convert import convert

    convert(args.events, settings=read_settings(args, ConvertArguments))


@_command(
    "data",
    "public datasets: where they come from, and how to build them",
    option("words", nargs="*", metavar="NAME | build NAME FILE", help="nothing: list them"),
    option("--data_path", default="dataset/", help="folder of datasets (dataset/)"),
    option("--overwrite", action="store_true", help="replace a dataset that is there"),
    description="List the public datasets (data), describe one (data NAME), or build a "
    "dataset of its raw files (data build NAME FILE ...) and check its counts.",
)
def _data(args: argparse.Namespace) -> None:
    from recbole_pos.cli.listing import describe_log, list_logs
    from recbole_pos.public.described import public_log

    match args.words:
        case []:
            list_logs(args.data_path)
        case ["build", name]:
            log = public_log(name)
            raise UsageError(f"data build {log.name}: name the raw files, {' '.join(log.files)}")
        case ["build", name, *files] if files:
            from recbole_pos.public.build_dataset import build

            build(name, files, args.data_path, args.overwrite)
        case [name] if name != "build":
            describe_log(name)
        case words:
            raise UsageError(
                f"data: expected NAME, or build NAME FILE ..., found {' '.join(words)}"
            )


@_command(
    "run",
    "train and test one model",
    option("-h", "--help", action="store_true", help="this, and the keys of MODEL"),
    option("-m", "--model", help="plugin model or RecBole model, see `recbole-pos models`"),
    *_DATASET,
    RunArguments,
    configured=True,
    add_help=False,
    description="Train a model to early stopping and test its best epoch. Every key of the "
    "configuration can be given as --key value or --key=value; values are read as yaml. "
    "`run -m MODEL --help` lists the keys that a model reads.",
)
def _run(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    if args.help:
        args.parser.print_help()
        if args.model:
            from recbole_pos.cli.listing import list_options

            list_options(args.model, overrides)
        return
    files, settings = config_files(args.config_files), read_settings(args, RunArguments)
    _announce(args, settings)
    from recbole_pos.experiment.run import run

    run(args.model, args.dataset, files, overrides, settings=settings)


def _announce(args: argparse.Namespace, settings: RunArguments) -> None:
    """Print what begins, before torch and RecBole are imported, which takes seconds."""
    launched = find_launcher(os.environ)
    if settings.as_json or (launched and launched[1] > 0):
        return
    from recbole_pos.reporter import Reporter

    what = " on ".join(word for word in (args.model, args.dataset) if word)
    if settings.resume is not None:
        what = f"resumes {settings.resume}"
    reporter = Reporter(settings.verbose, log=settings.log)
    reporter.line(f"recbole-pos {__version__}: {what or 'the model of the files'}")


@_command(
    "tune",
    "search for the best configuration with Ray Tune, by validation",
    option("-m", "--model", help="plugin model or RecBole model"),
    *_DATASET,
    option("--space", metavar="FILE", help="yaml, .hyper or .test (properties/tune/<model>.yaml)"),
    SearchArguments,
    configured=True,
    description="Search for the best configuration by validation, on this machine or a Ray "
    "cluster, and test it once. Every key of the configuration can be given as --key value or "
    "--key=value and is then the same in all trials.",
)
def _tune(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from recbole_pos.tuning import search

    if args.resume is not None:  # whose folder has all other options
        from recbole_pos.config.plugins import import_named

        import_named(overrides.pop("plugins", None))
    settings = read_settings(args, SearchArguments)
    files = config_files(args.config_files)
    search(args.model, args.dataset, args.space, files, overrides, settings=settings)


@_command(
    "compare",
    "train several models the same way and report how they differ",
    option("what", nargs="*", metavar="STUDY", help="a study's yaml or folder, or folders of runs"),
    option("-m", "--model", help="models, with commas between them"),
    *_DATASET,
    CompareArguments,
    configured=True,
    description="Compare models (-m A,B,C), the configurations of a study's file, or finished "
    "runs. What is missing is trained, with every seed; then come tables, differences with "
    "intervals and a report. The same command again resumes. Options (--key value) hold for all "
    "configurations.",
)
def _compare(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from recbole_pos.study.comparing import compare

    if bool(args.what) == bool(args.model):
        raise UsageError(
            "compare: give either models, with commas and no spaces between them, as in "
            "-m FPARec,SASRec -d ml-100k, or a study's file or folder, or folders of runs"
        )
    models = [name.strip() for name in (args.model or "").split(",") if name.strip()]
    what = models or (args.what[0] if len(args.what) == 1 else args.what)
    files, settings = config_files(args.config_files), read_settings(args, CompareArguments)
    found = compare(what, args.dataset, files, overrides, settings=settings)
    if found is not None and not settings.report:
        failed = int((found.runs["status"] == "failed").sum())
        if failed:  # so that a script stops; the tables have the reasons
            raise PosError(
                f"{failed} of {len(found.runs)} runs failed; the same command trains them again"
            )


@_command(
    "attach",
    "add position schemes to a trained model and fine-tune only them",
    option("trained", metavar="RUN_DIR", help="the folder of a finished run"),
    option("schemes", nargs="+", metavar="SCHEME", help="such as kernel"),
    AttachArguments,
    configured=True,
    description="Start from the best weights of a run, add position schemes, and train their "
    "parameters alone. Options are those of the run; --key value changes them.",
)
def _attach(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from recbole_pos.experiment.fine_tune import attach

    settings = read_settings(args, AttachArguments)
    attach(args.trained, args.schemes, overrides, settings=settings)


@_command(
    "update",
    "train a model some more on data that have grown",
    option("trained", metavar="RUN_DIR", help="the folder of a run"),
    option(
        "--new_items",
        metavar="FIELD",
        help="new items start with the mean vector of those that share FIELD, an attribute",
    ),
    AttachArguments,
    configured=True,
    description="Some more epochs from the weights of a run, on its data as they are now, as a "
    "new run: new users, events and items included. Options are those of the run (epochs: 5); "
    "--key value changes them.",
)
def _update(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from recbole_pos.experiment.fine_tune import update

    settings = read_settings(args, AttachArguments)
    update(args.trained, overrides, new_items=args.new_items, settings=settings)


@_command("models", "list what can be run", _PLUGINS)
def _models(args: argparse.Namespace) -> None:
    from recbole_pos.cli.listing import list_models

    list_models()


@_command("schemes", "list position schemes", _PLUGINS)
def _schemes(args: argparse.Namespace) -> None:
    from recbole_pos.cli.listing import list_schemes

    list_schemes()


@_command("plot", "draw training curves and attention", _RUN_DIR, *_READING)
def _plot(args: argparse.Namespace) -> None:
    from recbole_pos.inspect.run_pictures import plot_run

    for file in plot_run(args.run_dir, args.data_path):
        print(file)


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="look into a trained model, or at encodings")
    inspect.set_defaults(commands=inspect.add_subparsers(required=True, metavar="WHAT"))


_ADDERS.append(_add_inspect)


@_command(
    "inspect attention",
    "how far attention looks back, over how many events, and learned periods of time",
    _CHECKPOINT,
    *_READING,
    option("--users", type=int, default=200, help="how many to draw at most"),
    option("--min_events", type=int, default=20, help="shortest history to include"),
    option("--seed", type=int, default=0, help="of the draw"),
    formatter_class=_DEFAULTS,
    description="Attention distance and entropy of every layer and head, averaged over "
    "histories of held-out targets, one per user; and the periods of schemes that turn by "
    "time. Writes attention.json and pictures into the run folder.",
)
def _inspect_attention(args: argparse.Namespace) -> None:
    from recbole_pos.inspect.attention_report import inspect_attention, show
    from recbole_pos.reporter import wide_console

    given = args.checkpoint, args.users, args.min_events, args.seed, args.data_path
    show(inspect_attention(*given), wide_console())


@_command(
    "inspect relations",
    "what each attribute of an AttrFormer reads, and how much it adds",
    _CHECKPOINT,
    *_READING,
    option("--batches", type=int, default=8, help="training batches to look at"),
    formatter_class=_DEFAULTS,
    description="How many relations events have by each attribute, how many of them lead to "
    "other users, what they add to a state beside self-attention (of users: how far they move "
    "it), the weights W^R and the gates of users, in training batches. Writes relations.json "
    "and relations.png into the run folder.",
)
def _inspect_relations(args: argparse.Namespace) -> None:
    from recbole_pos.inspect.relation_use import inspect_relations, show
    from recbole_pos.reporter import wide_console

    show(inspect_relations(args.checkpoint, args.batches, args.data_path), wide_console())


@_command(
    "inspect encoding",
    "pictures of encodings of positions, and what they tell from the start and the end",
    option(
        "schemes",
        nargs="*",
        metavar="SCHEME",
        help="which (all of the trained model; without one spe and dpe, as in the PosRec paper)",
    ),
    option("--length", nargs="+", type=int, default=[10, 20], help="of the sessions (10 20)"),
    option("--checkpoint", metavar="RUN_DIR", help="the folder of a run, or a checkpoint in it"),
    option("--hidden_size", type=int, help="d, where no model exists (100)"),
    option("--out", metavar="DIR", help="where to write (the run, or here)"),
    *_READING,
    description="Heat maps of encodings for sessions of some lengths, and of their dot "
    "products in one session and between two. Writes encoding_SCHEME.png.",
)
def _inspect_encoding(args: argparse.Namespace) -> None:
    from recbole_pos.inspect.encoding import inspect_encoding, show
    from recbole_pos.reporter import wide_console

    given = args.schemes, args.length, args.checkpoint, args.hidden_size, args.out, args.data_path
    show(inspect_encoding(*given), max(args.length), wide_console())


@_command(
    "inspect because",
    "which past interactions carried what is recommended to a user",
    option("--checkpoint", required=True, metavar="RUN_DIR", help="the folder of a run"),
    option("--user", group="who", metavar="USER", help="name of a user of the data"),
    option("--history", group="who", nargs="+", metavar="ITEM", help="items, oldest first"),
    option("--items", nargs="+", metavar="ITEM", help="items to explain (the k recommended)"),
    option("-k", type=int, default=10, help="items that are recommended (10)"),
    option("--at", metavar="TIME", help="time of the request, as of recommend"),
    option("--out", metavar="FILE", help="picture to write (RUN_DIR/because.png)"),
    *_READING,
    description="Leave each past interaction out in turn, and draw by how much the score and "
    "the rank of each item fall. Prints the three that carried an item most.",
)
def _inspect_because(args: argparse.Namespace) -> None:
    from recbole_pos.inspect.explanation import draw_explanation
    from recbole_pos.inspect.trained import describe_run
    from recbole_pos.serve.recommend import read_at
    from recbole_pos.serve.recommender import Recommender

    trained = Recommender.load(args.checkpoint, args.data_path, args.user is None)
    found = trained.explain(args.history, args.items, args.k, args.user, at=read_at(args.at))
    print(found.groupby("item", sort=False).head(3).to_string(index=False))
    title = f"{describe_run(trained.experiment)}: why {args.user or 'one'} gets these items"
    print(draw_explanation(found, args.out or f"{args.checkpoint}/because.png", title))


@_command(
    "evaluate",
    "metrics of a trained run, also other ones than it was tested with",
    _RUN_DIR,
    option("--metrics", nargs="+", metavar="METRIC", help="such as NDCG Hit MRR (as of the run)"),
    option("--topk", nargs="+", metavar="K", help="cutoffs (those of the run)"),
    option("--part", default="test", metavar="PART", help="test or valid (test)"),
    option("--mask_history", metavar="BOOL", help="leave out seen items (as in the run)"),
    option("--json", action="store_true", help="print one json object"),
    *_READING,
    description="From the ranks that the run has kept where they suffice, otherwise by its "
    "best weights, which needs the dataset. MAP and MRR of one target are the same number.",
)
def _evaluate(args: argparse.Namespace) -> None:
    from recbole_pos.experiment.evaluate import evaluate
    from recbole_pos.reporter import Reporter
    from recbole_pos.yaml_files import parse_scalar

    def values(words: list[str] | None, name: str) -> list[Any] | None:
        """Read values given as words, with commas, or as a list of yaml."""
        text = " ".join(words or ()).replace(",", " ").strip("[] ")
        return None if words is None else [parse_scalar(word, name) for word in text.split()]

    mask = None if args.mask_history is None else parse_scalar(args.mask_history, "--mask_history")
    given = values(args.metrics, "--metrics"), values(args.topk, "--topk"), args.part, mask
    scores = evaluate(args.run_dir, *given, args.data_path)
    if args.json:
        print(json.dumps(scores))
    else:
        Reporter().results(f"{args.run_dir}, best epoch", {args.part: scores})


@_command(
    "recommend",
    "what a trained model recommends, to users or to any history, as a file",
    _RUN_DIR,
    option("-k", type=int, default=10, help="items a user (10)"),
    option("--users", group="who", nargs="+", metavar="USER", help="names of users (all)"),
    option(
        "--histories",
        group="who",
        metavar="FILE",
        help='json lines {"id": ..., "items": [...], "times": [...], "at": ...}, or parquet (a '
        "file or folder with such columns), instead of users",
    ),
    option(
        "--exclude_seen",
        "--mask_history",
        action=argparse.BooleanOptionalAction,
        help="leave out items of a user's past (as the run was evaluated)",
    ),
    option("--items", metavar="FILE", help="names to choose from, one a line (all)"),
    option("--exclude", metavar="FILE", help="names to leave out, one a line"),
    option(
        "--at",
        metavar="TIME",
        help="time of the request, for models with request_time: target: now, ISO 8601, or a "
        "number in the unit of the time field (now)",
    ),
    option("--because", type=int, default=0, help="past interactions that carried an item (0)"),
    option(
        "--out",
        metavar="FILE",
        help="csv, or parquet if it ends so (RUN_DIR/recommendations.csv)",
    ),
    option(
        "--item_vectors",
        metavar="FILE",
        help="content vectors of items that were not there in training, which are recommended too "
        "(models trained with item_vectors)",
    ),
    *_READING,
    environment=True,
    description="The items with the highest scores after everything a user has done, held-out "
    "and later events included, best first; or after histories that are given.",
    epilog=_ENVIRONMENT,
)
def _recommend(args: argparse.Namespace) -> None:
    from recbole_pos.serve.recommend import BulkRequest, write_recommendations

    names = "run_dir users k exclude_seen items exclude histories data_path at item_vectors because"
    request = BulkRequest(**{name: getattr(args, name) for name in names.split()})
    write_recommendations(request, args.out)


@_command(
    "similar",
    "the items most like an item, by a trained model",
    _RUN_DIR,
    option("items", nargs="+", metavar="ITEM", help="names of items"),
    option("-k", type=int, default=10, help="neighbours an item (10)"),
    *_READING,
    option("--items", dest="allowed", metavar="FILE", help="names to choose from, one a line"),
    option("--exclude", metavar="FILE", help="names to leave out, one a line"),
)
def _similar(args: argparse.Namespace) -> None:
    from recbole_pos.reporter import Reporter
    from recbole_pos.serve.recommend import read_names, report_unknown
    from recbole_pos.serve.recommender import Recommender

    files = {"items": args.allowed, "exclude": args.exclude}
    names = {name: None if file is None else read_names(file) for name, file in files.items()}
    trained = Recommender.load(args.run_dir, args.data_path, histories_only=True)
    report_unknown(trained, Reporter(), **names)
    neighbours = trained.similar(args.items, args.k, names["items"], names["exclude"])
    print(neighbours.to_string(index=False))


@_command(
    "export",
    "write a trained model as ONNX or a torch program, for serving",
    option("trained", metavar="RUN_DIR", help="the folder of a run"),
    option("--to", metavar="DIR", required=True, help="a new or empty folder"),
    option("--format", default="onnx", help="onnx or torch_export (onnx)"),
    option("-k", type=int, default=100, help="items that are recommended (100)"),
    option(
        "--inference_relations",
        metavar="READS",
        help="of AttrFormer: own or none, in place of what it was trained with",
    ),
    *_READING,
    description="Write a trained model into a folder from which it is served without RecBole "
    "and this package: programs from a history to its vector and to the best items, names and "
    "vectors of items, and a README with the lines that use them.",
)
def _export(args: argparse.Namespace) -> None:
    from recbole_pos.serve.export import export

    given = args.to, args.format, args.k, args.inference_relations, args.data_path
    print(export(args.trained, *given))


@_command(
    "serve",
    "answer over HTTP what a trained model recommends",
    option(
        "run_dir",
        nargs="+",
        metavar="RUN_DIR",
        help="the folder of a run; of several models NAME=RUN_DIR each",
    ),
    ServeArguments,
    _PLUGINS,
    environment=True,
    description="POST /recommend, /similar and /reload; GET /health and /metrics. There is no "
    "authentication and no TLS. SIGHUP reloads the model.",
    epilog=_ENVIRONMENT,
)
def _serve(args: argparse.Namespace) -> None:
    with ended_by_signals():
        try:
            from recbole_pos.serve.holder import parse_models
            from recbole_pos.serve.http import serve
        except ModuleNotFoundError as error:
            if error.name not in ("fastapi", "uvicorn", "prometheus_client"):
                raise
            raise UsageError(
                f"serve: {error.name} is not installed; pip install 'recbole-pos[serve]'"
            ) from None
        serve(parse_models(args.run_dir), read_settings(args, ServeArguments))
