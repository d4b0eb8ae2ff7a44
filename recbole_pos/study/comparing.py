"""A study from beginning to end: check everything, train what is missing, write the results.

:func:`compare` is the command ``recbole-pos compare`` and the public function of that name. It
takes models, the file or folder of a study, or the folders of finished runs. It returns a
:class:`Compared` and writes tables and a report into the folder of the study.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from recbole_pos.config.arguments import CompareArguments, list_changed, split_keywords
from recbole_pos.config.checks import as_list, list_metrics
from recbole_pos.config.metrics import is_from_ranks
from recbole_pos.config.plugins import allow_plugins
from recbole_pos.conversion.convert import find_folder_beside
from recbole_pos.data.item_vectors import open_vectors
from recbole_pos.data.loading import locate_dataset, read_dataset_name, require_dataset
from recbole_pos.data.protocol import describe_candidates
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import make_folder
from recbole_pos.files import lock_folder
from recbole_pos.model.models import register_model
from recbole_pos.reporter import Reporter
from recbole_pos.runs.training_runs import can_run_here, start_server
from recbole_pos.study.collecting import collect_results, make_results, read_runs
from recbole_pos.study.configs import (
    check_plan,
    exclude_unread,
    require_same_candidates,
    require_twins,
)
from recbole_pos.study.dispatcher import ActiveRuns, write_state
from recbole_pos.study.plan import Plan, Source
from recbole_pos.study.power import make_power_table
from recbole_pos.study.results import RUN_FOLDERS, Results
from recbole_pos.study.scheduler import Scheduler
from recbole_pos.study.scoring import judge_rows, list_judged_runs
from recbole_pos.study.study_file import change_plan, make_plan, plan_models, read_plan
from recbole_pos.study.study_folder import PackedStudy, StudyFolder, pack
from recbole_pos.study.study_report import Report
from recbole_pos.values import listed


@dataclass(frozen=True, repr=False)
class Compared(Report):
    """The result of a comparison.

    Attributes:
        folder: folder with table.md, table.csv, runs.csv and report.html.
        source: the dataset that ``compare`` was called with. It is held because its temporary files
            are deleted together with this object.
    """

    folder: Path
    source: Any = None

    @property
    def runs(self) -> pd.DataFrame:
        """One line per training run, see :class:`~recbole_pos.study.results.Results`."""
        return self.results.runs


def compare(
    what: str | Path | list[Any] | dict[str, Any],
    dataset: str | os.PathLike[str] | None = None,
    config_file_list: list[str] | None = None,
    config_dict: dict[str, Any] | None = None,
    *,
    settings: CompareArguments | None = None,
    **keywords: Any,
) -> Compared:
    """Compare models: train what is missing, the same way for all, and report.

    Examples:
        >>> options = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
        >>> models = ["FPARec", "Pop"]
        >>> compared = recbole_pos.compare(models, "ml-100k", config_dict=options, seeds=2)
        >>> sorted(compared.runs["status"]), list(compared.pairs["row"])
        (['done', 'done', 'done', 'done'], ['Pop'])

    A study is a list of configurations, called rows, that are trained with the same data, split
    and seeds, and whose metrics stand in one table or several.

    Args:
        what: a list of models (names or classes); a study, as the path of its yaml or as a dict; or
            folders: that of a study, or those of runs that exist already.
        dataset: of a list of models; of a study, in the place of the one it names. A name, or a
            :class:`recbole_pos.Dataset`.
        config_file_list: configuration of all rows of a list of models, over the base of a study.
        config_dict: options over these files.
        settings: the other arguments together.
        keywords: options, as in ``config_dict``; or the other arguments by name, see
            :class:`~recbole_pos.config.arguments.CompareArguments`: ``seeds``, ``vary``,
            ``reference``, ``rows``, ``run_dir``, ``report``, ``latex``, ``plan``, ``difference``,
            ``known``, ``pack``, ``max_concurrent``, ``address``, ``cpus_per_trial``,
            ``gpus_per_trial``, ``verbose``.

    Raises:
        UsageError: if something given is wrong, before anything is trained; for runs that cannot be
            compared.
        KeyboardInterrupt: if it was interrupted; says how to resume.
    """
    args, options = split_keywords(settings or CompareArguments(), keywords)
    base = {**(config_dict or {}), **options}
    if config_file_list:
        base["config_files"] = [str(file) for file in config_file_list]
    allow_plugins(base.get("plugins"))
    reporter = Reporter(args.verbose)
    name = read_dataset_name(dataset)

    # Finished runs are compared as they are: options would have no effect on them.
    if runs := _find_run_folders(what):
        given = {*list_changed(args), *base, *(["dataset"] if name else [])}
        if unread := sorted(given - {"reference", "run_dir", "plugins", "latex", "verbose"}):
            raise UsageError(
                f"compare: {', '.join(unread)}: not read for folders of runs, which are compared "
                "as they are; leave it out"
            )
        results = _collect_runs(runs, args.reference)
        return _write_and_print(results, reporter, Path(args.run_dir or "compared"), args.latex)

    # Models or a study: make the plan (rows, seeds and tables), and choose the folder of the study.
    # A dataset in temporary files has the folder beside them, so that both are deleted together.
    if args.run_dir is None:
        args = replace(args, run_dir=find_folder_beside(dataset, "compare"))
    plan, folder = _make_plan_and_folder(what, name, base, args)
    exclude_unread(plan)  # a row is made without the common options that its model does not read

    # Train the runs that are missing. Packed studies (--known) have the results of runs that others
    # have trained, which are copied instead. A report trains nothing, and only copies those.
    if args.plan:  # the number of seeds is planned from runs that exist
        args = replace(args, report=True)
    packed = [PackedStudy(path) for path in as_list(args.known)]
    judged = judge_rows(plan, packed)  # ranks of the targets in predictions of other systems
    if packed or not args.report:
        if not args.report and can_run_here(args.address, args.gpus_per_trial, uses_gpu=True):
            start_server()  # it imports torch while this process reads the data
        models = _check_configurations(plan)
        _train_missing(Scheduler(plan, folder, args.rows, packed), args, models, reporter)

    # Write and print the results of all runs that are finished.
    results = collect_results(plan, folder, list_judged_runs(plan, judged))
    if args.report and results.done.empty:
        raise UsageError(f"--report: {folder.path} has no finished run of what is asked")
    if args.plan:
        reporter.line(make_power_table(results, args.difference))
        return Compared(results, folder.path, dataset)
    compared = _write_and_print(results, reporter, folder.path, args.latex)
    if args.pack:
        num_runs = pack(plan, folder, args.pack, judged)
        reporter.line(f"{args.pack}: {num_runs} run{'s' * (num_runs != 1)}")
    return replace(compared, source=dataset)


def _collect_runs(paths: Sequence[Path], reference: str | None) -> Results:
    """Return the results of finished runs in any folders, to be compared as a study.

    Args:
        paths: folders of the runs.
        reference: name of the row (configuration) that others are compared to; the first if None.

    Raises:
        UsageError: naming a run that is not finished, or two that cannot be compared.
    """
    # ``study`` has the keys that a study's yaml file would have: dataset, rows, metrics and so on.
    study, facts, runs = read_runs(paths)
    command = ["recbole-pos", "compare", *map(str, paths)]
    if reference:
        study["reference"] = reference
        command += ["--reference", reference]

    # A plan is made from such keys and the name of their file. In its place, RUN_FOLDERS says that
    # the study was made from finished runs, so that no table says that runs of it are missing.
    plan = make_plan(Source(RUN_FOLDERS, study))
    return make_results(plan, facts, runs, shlex.join(command))


def _find_run_folders(argument: Any) -> list[Path]:
    """Return the run folders that ``compare`` is asked to compare, if it is asked for runs.

    A folder of a run is recognised by its ``config.yaml``.

    Args:
        argument: what the user gave to ``compare``: a list of models, a study (a path or a dict),
            or one or more folders.

    Returns:
        The folders if all given items are run folders; an empty list if none is, since the
        argument then is a list of models or a study.

    Raises:
        UsageError: if only some of the items are run folders, or if there is only one.
    """
    items = argument if isinstance(argument, (list, tuple)) else [argument]
    paths = [Path(item) for item in items if isinstance(item, (str, Path))]
    runs = [path for path in paths if os.path.isfile(path / "config.yaml")]

    # Either every item is a run, and there are two to compare, or no item is one.
    if runs and len(runs) < max(len(items), 2):
        raise UsageError(
            "compare: expected the folders of two runs or more, each with a config.yaml, or one "
            f"study; found {listed(items)}"
        )
    return runs


def _make_plan_and_folder(
    models_or_study: Any, dataset: str | None, base: dict[str, Any], args: CompareArguments
) -> tuple[Plan, StudyFolder]:
    """Return the plan of a study (its configurations, seeds and tables) and its folder.

    Nothing is written: the folder of a new study does not exist yet.

    Args:
        models_or_study: a list of models, each of which becomes a configuration of a new study; or
            a study, as for :func:`_read_study`.
        dataset: name or path of the dataset. It is required for a list of models, and replaces the
            dataset of a study.
        base: options of all configurations. They win over the options in the base of a study.
        args: the other arguments of ``compare``; seeds and reference win over those of a study.

    Raises:
        UsageError: if a list of models has no dataset, if ``vary`` is given for a study, or if a
            folder is not that of a study.
    """
    # Keys of the study that the call changes.
    given = {"seeds": args.seeds, "reference": args.reference}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}

    # A dataset may be given as a path; then its parent folder becomes the option data_path.
    if dataset:
        dataset, data_path = locate_dataset(dataset, base.get("data_path") or "dataset/")
        if data_path is not None:
            base = {**base, "data_path": data_path}

    # A list of models: make a study of them.
    if isinstance(models_or_study, (list, tuple)):
        if not dataset:
            raise UsageError("no dataset (-d) given")
        # A model may be given as the user's class, which is registered under its own name.
        models = [m if isinstance(m, str) else register_model(m).__name__ for m in models_or_study]
        plan = plan_models(dataset, models, args.vary, base=base, **changes)
        return plan, StudyFolder.from_plan(plan, args.run_dir)

    # A study: read it, and apply what the call changes.
    if args.vary:
        raise UsageError(
            "--vary: goes with models (-m); the configurations of a study are in its file"
        )
    plan, folder = _read_study(models_or_study)
    if dataset and dataset != plan.dataset:
        changes["dataset"] = dataset
    if base or changes:
        plan = change_plan(plan, changes, base)
    return plan, folder or StudyFolder.from_plan(plan, args.run_dir)


def _read_study(study: dict[str, Any] | str | Path) -> tuple[Plan, StudyFolder | None]:
    """Return the plan of a study, and its folder if the study was given by it.

    Args:
        study: the study as a dict, as the path of its yaml file, or as the folder in which an
            earlier call has stored its plan.

    Raises:
        UsageError: if a folder has no plan, or the study is wrong.
    """
    if isinstance(study, dict):
        return make_plan(Source("study", study)), None  # "study" names the dict in messages
    if not Path(study).is_dir():
        return read_plan(study), None
    folder = StudyFolder(study)
    plan = folder.read_plan()
    if plan is None:
        raise UsageError(
            f"{study} is not the folder of a study: no study.json; to compare runs, name each "
            f"one's folder ({study}/*)"
        )
    return plan, folder


def _check_configurations(plan: Plan) -> set[str]:
    """Check all configurations of a study and their data before anything is trained.

    The checks, in this order: options and models; metrics; whether all models know the time of the
    request, or none does; whether the configurations of one table rank the same items; and whether
    the files of the dataset and of the item vectors exist.

    Args:
        plan: the study, with its tables and the rows (configurations) in them.

    Returns:
        Names of the models, without repetition.

    Raises:
        UsageError: for the first check that fails.
    """
    configs = check_plan(plan)  # name of a configuration -> its complete options
    _require_metrics(plan, configs)
    # A model that knows the time of the request is only compared with others if it has a twin, the
    # same configuration without that knowledge.
    require_twins(configs)

    # Metrics are comparable only if the configurations of a table rank the same items. Those with
    # predictions of another system have no options, and are checked when the files are read.
    candidates = {}  # name of a configuration -> which items it ranks, in words
    for row, config in configs.items():
        # mask_history: whether items of the user's past are left out; None (not set) means no.
        candidates[row] = describe_candidates(bool(config["mask_history"]))
    require_same_candidates(plan, candidates)

    # The files must exist.
    for config in configs.values():
        split_files = config["benchmark_filename"]  # RecBole's name of a split made beforehand
        require_dataset(plan.dataset, Path(config["data_path"]), split_files)
        if config["item_vectors"]:
            open_vectors(config["item_vectors"])
    return {config["model"] for config in configs.values()}


def _require_metrics(plan: Plan, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Require that every metric that the tables show is known of every configuration.

    Metrics such as ``ndcg@10`` are computed later from the ranks of the test targets, which each
    run saves. All others have to be among the ``metrics`` that each run computes itself.

    Args:
        plan: the study, with the metrics of its tables.
        configs: name of a configuration -> its complete options.

    Raises:
        UsageError: naming the metric and a configuration that does not compute it.
    """
    metrics = [*plan.metrics, *(metric for table in plan.tables for metric in table.metrics)]
    required = [metric for metric in metrics if not is_from_ranks(metric)]
    # A table may show the study's first metric in validation as well. Runs save no ranks of
    # validation targets, so they have to compute this one in any case.
    if any(table.validation for table in plan.tables):
        required.append(plan.metrics[0])

    for row, config in configs.items():
        # list_metrics returns what the runs compute, in RecBole's spelling: NDCG@10.
        computed = [name.lower() for name in list_metrics(config)]
        for metric in required:
            if metric not in computed:
                raise plan.source.error(
                    ("metrics",),
                    f"metrics: {metric} is not computed for {row}, but {', '.join(computed)}; give "
                    "it in the base, as in metrics: [NDCG, ItemCoverage], topk: [10, 20]",
                )


def _train_missing(
    scheduler: Scheduler, args: CompareArguments, models: set[str], reporter: Reporter
) -> None:
    """Train all runs of the study that have no finished run yet, in the folder of the study.

    With ``--report`` nothing is trained; finished runs of packed studies (``--known``) are only
    copied into the folder of the study.

    Args:
        scheduler: decides which run is next.
        args: arguments of ``compare``: the address of a Ray cluster, resources, ``report``.
        models: names of the models that are trained.
        reporter: prints progress.
    """
    folder = scheduler.folder
    with ExitStack() as stack:  # unlocks the folder and leaves the cluster in the end
        # Connect before the folder is made, so that a cluster that does not answer leaves no folder
        # behind. ``stop`` is called in the end.
        if args.address is not None and not args.report:
            from recbole_pos.runs.cluster import connect, stop  # imports Ray, for a second

            stack.callback(stop, connect(args.address))
        make_folder(folder.path)
        # The lock refuses a second call that would train into the same folder.
        stack.enter_context(lock_folder(folder.path, "compared"))
        folder.write_plan(scheduler.plan)  # with it the study can be resumed without its file
        if args.report:
            scheduler.record_finished()  # copies finished runs of packed studies
            write_state(scheduler)
        else:
            ActiveRuns(scheduler, args, reporter, models).train()


def _write_and_print(results: Results, reporter: Reporter, folder: Path, latex: bool) -> Compared:
    """Write the files of a comparison, print its tables and the paths of the files, and return it.

    Args:
        results: results of the runs.
        reporter: prints the lines.
        folder: folder that table.md, table.csv, runs.csv and report.html are written into.
        latex: whether files for a paper are written as well.
    """
    compared = Compared(results, folder)
    files = compared.write(folder, latex)
    compared.show(reporter)
    for file in files:
        reporter.line(str(file))
    return compared
