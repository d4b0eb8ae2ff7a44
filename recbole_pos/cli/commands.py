"""The commands of ``recbole-pos``: their arguments, and the functions that run them.

Each function is registered by :meth:`Command.register`; its docstring is the help of the command.
It gets the parsed arguments and, if it takes options of the configuration, those as well. It
imports what it needs when it runs, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from recbole_pos.config import arguments
from recbole_pos.config.arguments import Command, option, read_settings
from recbole_pos.errors import PosError, UsageError

# Arguments that several commands share.
_PLUGINS = option("--plugins [MODULE]", "modules with models or schemes, as of run")
_DATA_PATH = option("--data_path DIR", "folder of datasets (where the run found its own)")
_DATA_PATH_AND_PLUGINS = (_DATA_PATH, _PLUGINS)
_RUN_DIR = option("RUN_DIR", "the folder of a run")
# The run to start from, where --run_dir is the folder of the new run.
_TRAINED_RUN = option("RUN_DIR", "the folder of a run", dest="trained")
_CONFIG_FILES = option("--config_files YAML...", "configuration", default=[])
_PART = option("--part PART", "test or valid (test)", default="test")
_MODEL = option("-m --model MODEL", "plugin model or RecBole model, see `recbole-pos models`")
_DATASET_AND_FILES = (
    option("-d --dataset DATASET", "folder with atomic files under data_path, or ml-100k"),
    _CONFIG_FILES,
)
_EXCLUDE = option("--exclude FILE", "names to leave out, one a line")
_AT_TIME = option(
    "--at TIME",
    "of the request, for models trained with request_time: target; ISO 8601 or a number (now)",
)


@Command.register("convert", option("EVENTS", "file or folder"), arguments.ConvertArguments)
def _convert(args: argparse.Namespace) -> None:
    """Make a dataset of a csv, tsv, json lines or parquet file.

    One row is one interaction. A text file may be compressed (.gz); in place of a file there may be
    a folder of files of one kind. What is guessed is shown before anything is written; what becomes
    of every row is reported, and kept in convert.json.
    """
    from recbole_pos.conversion.convert import convert

    # The options of the command are the fields of ConvertArguments; read_settings returns the
    # values that the user gave, and the defaults of the others, as an object of this class.
    settings = read_settings(args, arguments.ConvertArguments)
    convert(args.events, settings=settings)


@Command.register(
    "data",
    option("NAME", "nothing: list them", dest="words", nargs="*", metavar="NAME | build NAME FILE"),
    option("--data_path DIR", "folder of datasets (dataset/)", default="dataset/"),
    option("--overwrite", "replace a dataset that is there"),
)
def _data(args: argparse.Namespace) -> None:
    """List public datasets, say where they come from, and build them.

    List the public datasets (data), describe one (data NAME), or build a dataset of its raw
    files (data build NAME FILE ...) and check its counts.
    """
    from recbole_pos.cli.listing import list_datasets, print_dataset

    # ``words`` are those after `data`: none, a name, or "build", a name and files.
    match args.words:
        case []:
            list_datasets(args.data_path)
        case ["build", name, *files]:
            from recbole_pos.public.build_dataset import build

            build(name, files, args.data_path, args.overwrite)
        case [name] if name != "build":
            print_dataset(name)
        case words:
            raise UsageError(
                f"data: expected NAME, or build NAME FILE ..., found {' '.join(words)}"
            )


@Command.register(
    "run",
    option("-h --help", "this, and the keys of MODEL"),
    _MODEL,
    *_DATASET_AND_FILES,
    arguments.RunArguments,
    takes_options=True,
    add_help=False,
)
def _run(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Train a model to early stopping and test its best epoch.

    Every key of the configuration can be given as --key value or --key=value; values are read as
    yaml. `run -m MODEL --help` lists the keys that a model reads.
    """
    # ``run --help`` prints the arguments of the command and, if a model is named, its options.
    if args.help:
        args.parser.print_help()
        if args.model:
            from recbole_pos.cli.listing import list_options

            list_options(args.model, overrides)
        return

    from recbole_pos.experiment.run import run

    # ``overrides`` has the options that are given as --key value, by key.
    settings = read_settings(args, arguments.RunArguments)
    run(args.model, args.dataset, args.config_files, overrides, settings=settings)


@Command.register(
    "tune",
    _MODEL,
    *_DATASET_AND_FILES,
    option("--space FILE", "yaml (properties/tune/<model>.yaml)"),
    arguments.SearchArguments,
    takes_options=True,
)
def _tune(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Search for the best configuration with Ray Tune, by validation, and test it once.

    On this machine or a Ray cluster. Every key of the configuration can be given as --key value or
    --key=value and is then the same in all trials.
    """
    from recbole_pos.tuning import tune

    # ``overrides`` has the options that are given as --key value, by key. A resumed search has its
    # options in its folder and refuses any given here, except for modules with custom models.
    if args.resume is not None:
        from recbole_pos.config.plugins import import_named

        plugins = overrides.pop("plugins", None)
        import_named(plugins)
    settings = read_settings(args, arguments.SearchArguments)  # how to search
    tune(args.model, args.dataset, args.space, args.config_files, overrides, settings=settings)


@Command.register(
    "compare",
    option("STUDY...", "a study's yaml or folder, or folders of runs", dest="paths", nargs="*"),
    option("-m --model MODEL", "models, with commas between them"),
    *_DATASET_AND_FILES,
    arguments.CompareArguments,
    takes_options=True,
)
def _compare(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Train several models the same way and report how they differ.

    Compare models (-m A,B,C), the configurations of a study's file, or finished runs. What is
    missing is trained, with every seed; then come tables, differences with intervals and a
    report. The same command again resumes. Options (--key value) hold for all configurations.
    """
    from recbole_pos.study.comparing import compare

    if bool(args.paths) == bool(args.model):
        raise UsageError(
            "compare: give either models, with commas and no spaces between them, as in "
            "-m FPARec,SASRec -d ml-100k, or a study's file or folder, or folders of runs"
        )

    # `-m A,B` names models; otherwise the paths are a study (one path) or run folders (several).
    what: Any = [name.strip() for name in (args.model or "").split(",") if name.strip()]
    if args.paths:
        what = args.paths[0] if len(args.paths) == 1 else [Path(path) for path in args.paths]
    settings = read_settings(args, arguments.CompareArguments)
    comparison = compare(what, args.dataset, args.config_files, overrides, settings=settings)
    if settings.report or settings.plan:  # nothing was trained
        return

    # Failed runs are an error, so that a script stops; the tables have the reasons.
    is_failed = comparison.runs["status"] == "failed"
    if is_failed.any():
        raise PosError(
            f"{is_failed.sum()} of {len(is_failed)} runs failed; the same command trains them again"
        )


@Command.register(
    "attach",
    _TRAINED_RUN,
    option("SCHEME...", "such as kernel", dest="schemes"),
    arguments.AttachArguments,
    takes_options=True,
)
def _attach(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Add position schemes to a trained model and fine-tune only them.

    Start from the best weights of a run, add position schemes, and train their parameters
    alone. Options are those of the run; --key value changes them.
    """
    from recbole_pos.experiment.run import attach

    # ``overrides`` has the options that are given as --key value, by key.
    settings = read_settings(args, arguments.AttachArguments)
    attach(args.trained, args.schemes, overrides, **vars(settings))


@Command.register(
    "update",
    _TRAINED_RUN,
    arguments.AttachArguments,
    takes_options=True,
)
def _update(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Train a model some more on data that have grown.

    A new run starts from the weights of another, on its data as they are now: new users,
    interactions and items included. It trains 5 epochs, or --epochs N, with the options of the
    other run; --key value changes them.
    """
    from recbole_pos.experiment.run import update

    # ``settings`` say where the new run is written and what is printed; ``overrides`` has the
    # options that are given as --key value, by key.
    settings = read_settings(args, arguments.AttachArguments)
    update(args.trained, overrides, **vars(settings))


@Command.register("models", _PLUGINS)
def _models(args: argparse.Namespace) -> None:
    """List what can be run."""
    # Prints a table of all models; --plugins has been imported before, by the caller.
    from recbole_pos.cli.listing import list_models

    list_models()


@Command.register("schemes", _PLUGINS)
def _schemes(args: argparse.Namespace) -> None:
    """List position schemes."""
    from recbole_pos.cli.listing import list_schemes

    list_schemes()


@Command.register("inspect attention", _RUN_DIR, *_DATA_PATH_AND_PLUGINS)
def _inspect_attention(args: argparse.Namespace) -> None:
    """Draw the attention weights of every layer and head.

    Weights are averaged over the histories of held-out targets. Writes attention.png into the run
    folder.
    """
    from recbole_pos.experiment.pictures import inspect_attention

    print(inspect_attention(args.run_dir, args.data_path))


@Command.register(
    "inspect because",
    _RUN_DIR,
    option("--user USER", "name of a user of the data", group="who"),
    option("--history ITEM...", "items, oldest first", group="who"),
    option("--items ITEM...", "items to explain (the k recommended)"),
    option("-k N", "items that are recommended (10)", default=10),
    _AT_TIME,
    option("--out FILE", "picture to write (RUN_DIR/because.png)"),
    *_DATA_PATH_AND_PLUGINS,
)
def _inspect_because(args: argparse.Namespace) -> None:
    """Show which past interactions carried what is recommended to a user.

    Leave each past interaction out in turn, and draw by how much the score and the rank of each
    item fall. Prints the up to three that raised an item most. Names are those of the data; for
    titles, replace them in the table of Recommender.explain and call draw_explanation in Python.
    """
    from recbole_pos.experiment.pictures import describe_run, draw_explanation
    from recbole_pos.reporter import Reporter
    from recbole_pos.serve.recommend import read_at, report_unknown
    from recbole_pos.serve.recommender import Recommender

    # Either --history or --user is given. With a history the users of the dataset are not read.
    has_history = args.history is not None
    recommender = Recommender.load(args.run_dir, args.data_path, histories_only=has_history)
    report_unknown(recommender, Reporter(), history=args.history)  # prints names of unknown items

    # a table with a row for each recommended item and past interaction
    effects = recommender.explain(args.history, args.items, args.k, args.user, at=read_at(args.at))
    title = f"{describe_run(recommender.experiment)}: why {args.user or 'one'} gets these items"
    picture = draw_explanation(effects, args.out or f"{args.run_dir}/because.png", title)

    # An interaction has raised an item whose score falls without it. The strongest come first.
    raised = effects[effects["score_change"] < 0].groupby("item", sort=False).head(3)
    if len(raised):
        print(raised.to_string(index=False))
    print(picture)


@Command.register(
    "evaluate",
    _RUN_DIR,
    option("--metrics METRIC...", "such as NDCG Hit MRR (as of the run)"),
    option("--topk K...", "cutoffs (those of the run)", type=int),
    _PART,
    option("--mask_history BOOL", "leave out seen items (as in the run)"),
    *_DATA_PATH_AND_PLUGINS,
)
def _evaluate(args: argparse.Namespace) -> None:
    """Compute metrics of a trained run, also other ones than it was tested with.

    They are computed with its best weights, on the dataset of the run. MAP and MRR of one target
    are the same number.
    """
    from recbole_pos.experiment.run import describe_evaluation, evaluate
    from recbole_pos.reporter import Reporter
    from recbole_pos.yaml_files import parse_scalar

    # Values are read as yaml. Without an option, None takes what the run was tested with.
    mask = None if args.mask_history is None else parse_scalar(args.mask_history)
    scores = evaluate(args.run_dir, args.metrics, args.topk, args.part, mask, args.data_path)

    # Print the metrics with how they were computed: split, targets, and which items were ranked.
    facts, reporter = describe_evaluation(args.run_dir, args.part, mask), Reporter()
    protocol = f"ranked among {facts['candidates']}"
    if "targets" in facts:  # the run is finished
        protocol = f"{facts['split']}, {facts['targets']:,} targets, {protocol}"
    if "repeated_targets" in facts:
        protocol += f", {facts['repeated_targets']:,} of them repeated"
    reporter.show_results(f"{args.run_dir}: {protocol}", {args.part: scores})
    for text in facts.get("warnings", ()):
        reporter.warning(text)


@Command.register(
    "split",
    option("SHOP", "folder with atomic files under data_path, or ml-100k", dest="dataset"),
    option("--to FOLDER", "folder to write, or to replace", required=True),
    _CONFIG_FILES,
    takes_options=True,
)
def _split(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Write the parts of a split for other toolkits.

    Parquet files of training, validation and test; requests without their targets, and the targets;
    a README with the protocol. Options of the data (--eval_args, --mask_history) are those of run.
    """
    from recbole_pos.referee.split import split

    # ``overrides`` has the options that are given as --key value, by key.
    print(split(args.dataset, args.config_files, **overrides).to_folder(args.to))


@Command.register(
    "score",
    option("FILE...", "lists of another system; several are seeds of it", dest="files"),
    option("-d --dataset DATASET", "folder with atomic files (that of the first run)"),
    _CONFIG_FILES,
    option("--runs RUN_DIR...", "runs to compare with; the first is the reference", default=[]),
    option("--name NAME", "of the system, in the tables (predictions)", default="predictions"),
    option("--metrics METRIC...", "such as ndcg@10 (as many as the lists are long)"),
    _PART,
    option("--out FOLDER", "also write table.md, table.csv, runs.csv and report.html"),
    _PLUGINS,
    takes_options=True,
)
def _score(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Score the lists of any system on the targets of a split.

    Parquet, csv, TREC runs and ranx json: user, item and score or rank; or a list for each user.
    Everything wrong with the lists is counted. With --runs there are differences with intervals.
    """
    from recbole_pos.reporter import Reporter
    from recbole_pos.study.scoring import score

    # ``overrides`` has the options of the data that are given as --key value, by key.
    settings = {"runs": args.runs, "name": args.name, "metrics": args.metrics, "part": args.part}
    scored = score(args.files, args.dataset, args.config_files, **settings, **overrides)
    scored.show(Reporter())  # prints the metrics, faults of the lists and the comparison with runs
    if args.out:
        scored.write(args.out)


@Command.register(
    "audit",
    option("SHOP", "a dataset, or a file of interactions", dest="data"),
    _CONFIG_FILES,
    takes_options=True,
)
def _audit(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Report what in a dataset decides how well any model seems to do.

    It counts copies, ties, cold and repeated targets and leakage in time, and scores two baselines
    that learn nothing, under leave-one-out and a split by time, or under --eval_args.
    """
    from recbole_pos.referee.audit import audit

    # ``overrides`` has the options that are given as --key value, by key.
    print(audit(args.data, args.config_files, **overrides))


@Command.register(
    "lists",
    _RUN_DIR,
    option("--out FILE", ".parquet, .csv, .run or .trec (TREC), .json (ranx)", required=True),
    option("-k N", "items of a list (100, or all items if there are fewer)"),
    _PART,
    *_DATA_PATH_AND_PLUGINS,
)
def _lists(args: argparse.Namespace) -> None:
    """Write what a run recommends at the targets that it is tested on.

    The lists that its metrics are made of, for ranx, trec_eval and `recbole-pos score`.
    """
    from recbole_pos.referee.predictions import write_lists

    print(write_lists(args.run_dir, args.out, args.k, args.part, args.data_path))


@Command.register(
    "recommend",
    _RUN_DIR,
    option("-k N", "items a user (10)", default=10),
    option("--users USER...", "names of users, or all (all)", group="who"),
    option("--histories FILE", "json lines or parquet, instead of users", group="who"),
    option(
        "--exclude_seen --mask_history",
        "leave out items of a user's past (as the run was evaluated)",
        action=argparse.BooleanOptionalAction,
    ),
    option("--items FILE", "names to choose from, one a line (all)"),
    _EXCLUDE,
    _AT_TIME,
    option("--because N", "past interactions that carried an item (0)", default=0),
    option("--out FILE", "a .csv or .parquet file (RUN_DIR/recommendations.csv)"),
    option("--item_vectors FILE", "content vectors of new items, which are recommended too"),
    arguments.IndexArguments,
    arguments.PartArguments,
    *_DATA_PATH_AND_PLUGINS,
)
def _recommend(args: argparse.Namespace) -> None:
    """Write what a trained model recommends, to users or to any history, into a file.

    For each user these are the items with the highest scores after all interactions of the user,
    held-out and later ones included, best first. With --histories it answers given histories
    instead: a file of json lines {"id": ..., "items": [...], "times": [...], "at": ...}, or parquet
    (a file or folder) with such columns.
    """
    from recbole_pos.serve.parts import recommend_to_files
    from recbole_pos.serve.recommend import ListOptions

    # what to recommend, and how to write it: into one file or many, by how many processes
    options = read_settings(args, ListOptions)
    settings = read_settings(args, arguments.PartArguments)
    recommend_to_files(settings, options, args.out, args.users)


@Command.register(
    "similar",
    _RUN_DIR,
    option("ITEM...", "names of items", dest="items"),
    option("-k N", "neighbours an item (10)", default=10),
    option("--items FILE", "names to choose from, one a line (all)", dest="allowed"),
    _EXCLUDE,
    *_DATA_PATH_AND_PLUGINS,
)
def _similar(args: argparse.Namespace) -> None:
    """List the items most like an item, by a trained model."""
    from recbole_pos.reporter import Reporter
    from recbole_pos.serve.recommend import read_names, report_unknown
    from recbole_pos.serve.recommender import Recommender

    # The files of --items and --exclude: names to choose neighbours from, and to leave out.
    allowed, excluded = read_names(args.allowed), read_names(args.exclude)

    # Neighbours are found by the vectors of items. ``histories_only`` says that the histories of
    # the dataset's users are not needed, so that it is read only if the model itself needs it.
    recommender = Recommender.load(args.run_dir, args.data_path, histories_only=True)

    # Say which of these names are unknown, and list the neighbours of the items ITEM (args.items).
    report_unknown(recommender, Reporter(), items=allowed, exclude=excluded)
    neighbours = recommender.similar(args.items, args.k, allowed, excluded)
    print(neighbours.to_string(index=False))


@Command.register(
    "export",
    _RUN_DIR,
    option("--to DIR", "a new or empty folder", required=True),
    option("--format FORMAT", "onnx or torch_export (onnx)", default="onnx"),
    option("-k N", "items that are recommended (100)", default=100),
    *_DATA_PATH_AND_PLUGINS,
)
def _export(args: argparse.Namespace) -> None:
    """Write a trained model as ONNX or a torch program, for serving.

    The folder is served without RecBole and this package: programs from a history to its vector
    and to the best items, names and vectors of items, and a README with the lines that use them.
    """
    from recbole_pos.serve.export import export

    print(export(args.run_dir, args.to, args.format, args.k, args.data_path))


@Command.register("serve", _RUN_DIR, arguments.ServeArguments, _PLUGINS)
def _serve(args: argparse.Namespace) -> None:
    """Answer over HTTP what a trained model recommends.

    POST /recommend and /similar; GET /health, /metrics and /docs. There is no authentication and no
    TLS, which a proxy has.
    """
    try:
        from recbole_pos.serve.http import serve
    except ModuleNotFoundError as error:
        # fastapi, uvicorn or prometheus_client, which only `pip install recbole-pos[serve]` brings
        raise UsageError(
            f"serve: {error.name} is not installed; pip install 'recbole-pos[serve]'"
        ) from None
    # The settings: address, threads, data, new items and the index.
    serve(args.run_dir, read_settings(args, arguments.ServeArguments))
