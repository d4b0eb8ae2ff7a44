"""A study from beginning to end: check everything, train what is missing, write what was found."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import ray
from matplotlib.figure import Figure

from recbole_pos.config.arguments import CompareArguments, require_shares, split_keywords
from recbole_pos.config.plugins import allow, pack
from recbole_pos.conversion.frames import beside
from recbole_pos.data.location import dataset_name, require_dataset
from recbole_pos.data.targets import describe_warnings
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import versions
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import Resources, connect, room_for, stop
from recbole_pos.runs.progress import live_view
from recbole_pos.runs.shared_data import SharedData
from recbole_pos.runs.storage import Mirror
from recbole_pos.runs.worker import MOST_LOSSES, train_run
from recbole_pos.study.asked import (
    complete,
    plan_and_folder,
    require_metrics,
    require_same_study,
    run_folders,
)
from recbole_pos.study.charts import draw_results
from recbole_pos.study.collect import collect_results, collect_runs, write_results
from recbole_pos.study.configs import data_key, require_twins
from recbole_pos.study.expand import check_plan, with_unread
from recbole_pos.study.packed import PackedStudy, require_place
from recbole_pos.study.packed import pack as pack_study
from recbole_pos.study.plan import Plan
from recbole_pos.study.preview import preview
from recbole_pos.study.rendered_table import RenderedTable, span
from recbole_pos.study.result_tables import tidy
from recbole_pos.study.results import DONE, FAILED, Results
from recbole_pos.study.scheduler import Job, Scheduler
from recbole_pos.study.study_folder import StudyFolder, commit
from recbole_pos.study.ties import count_ties


@dataclass(frozen=True, repr=False)
class Compared:
    """The result of a comparison.

    Attributes:
        runs: a line for each run: row, seed, status, metrics of the test, seconds, ...
        pairs: a line for each row: difference from the reference, interval, p, star.
        folder: folder with table.md, table.csv, runs.csv, runs.parquet and report.html.
        table: a line for each row and metric: mean and deviation over seeds; for the first metric,
            where ranks are kept, also the difference from the reference with interval, p and star.
        tables: tables of the report; the first is the text of this object.
        results: results that charts are drawn from.
        source: the dataset, whose temporary files are deleted with this object.
    """

    runs: pd.DataFrame
    pairs: pd.DataFrame
    folder: Path
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    tables: Sequence[RenderedTable] = ()
    results: Results | None = None
    source: Any = None

    def plot(self, kind: str = "differences") -> Figure:
        """Draw the first table of the comparison.

        Args:
            kind: ``differences`` to the reference, with 95% intervals; ``seconds`` or
                ``parameters``, against which the first metric is drawn; ``curves`` of validation.

        Raises:
            UsageError: for another kind, or if the results lack its values.
        """
        return draw_results(self.results, kind)

    def __repr__(self) -> str:
        return "\n\n".join(table.markdown() for table in self.tables[:1])

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables)

    def __iter__(self) -> Iterator[pd.DataFrame]:
        """Yield the two tables: ``runs, pairs = compare(...)``."""
        yield from (self.runs, self.pairs)


def compare(
    what: str | Path | list[Any] | dict[str, Any],
    dataset: str | os.PathLike[str] | None = None,
    config_file_list: list[str] | None = None,
    config_dict: dict[str, Any] | None = None,
    *,
    settings: CompareArguments | None = None,
    **given: Any,
) -> Compared | None:
    """Compare models: train what is missing, the same way for all, and report.

    Examples:
        >>> given = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
        >>> found = recbole_pos.compare(["FPARec", "Pop"], "ml-100k", config_dict=given, seeds=2)
        >>> sorted(found.runs["status"]), list(found.pairs["row"])
        (['done', 'done', 'done', 'done'], ['Pop'])

    Args:
        what: a list of models (names or classes); a study, as the path of its yaml or as a dict; or
            folders: that of a study, or those of runs that exist already.
        dataset: of a list of models; of a study, in the place of the one it names. A name, or a
            :class:`recbole_pos.Dataset`.
        config_file_list: configuration of all rows of a list of models, over the base of a study.
        config_dict: options over these files.
        settings: the other arguments together.
        given: options, as in ``config_dict``; or the other arguments by name, see
            :class:`~recbole_pos.config.arguments.CompareArguments`: ``seeds``, ``vary``,
            ``reference``, ``rows``, ``run_dir``, ``dry_run``, ``report``,
            ``known``, ``pack``, ``max_concurrent``, ``address``, ``storage``, ``cpus_per_trial``,
            ``gpus_per_trial``, ``verbose``.

    Returns:
        What was found; None for ``dry_run``.

    Raises:
        UsageError: if something given is wrong, before anything is trained; for runs that cannot be
            compared.
        KeyboardInterrupt: if it was interrupted; says how to go on.
    """
    args, options = split_keywords(settings or CompareArguments(), given)
    base = {**(config_dict or {}), **options}
    data, dataset = dataset, dataset_name(dataset)
    if args.run_dir is None:
        args = replace(args, run_dir=beside(data, "compare"))
    allow(base.get("plugins"))
    require_shares(args.max_concurrent, args.cpus_per_trial, args.gpus_per_trial)
    reporter = Reporter(args.verbose)
    if runs := run_folders(what):
        for name in ("known", "pack"):
            if getattr(args, name):
                raise UsageError(f"--{name}: goes with models or a study, not with folders of runs")
        return _show(collect_runs(runs, args.reference), reporter, Path(args.run_dir or "compared"))
    if config_file_list:
        base["config_files"] = list(map(str, config_file_list))
    plan, folder = plan_and_folder(what, dataset, base, args)
    plan = with_unread(plan, complete)
    require_same_study(plan, folder, args.report)
    if args.pack:
        require_place(args.pack)
    files = (args.known,) if isinstance(args.known, (str, Path)) else args.known
    packed = [PackedStudy(path) for path in files]
    if args.report and not packed:
        return _finish(plan, folder, args, reporter)
    configs = check_plan(plan, complete)
    require_metrics(plan, configs)
    require_twins(configs)
    for config in configs.values():
        require_dataset(plan.dataset, Path(config["data_path"]), [], config)
    if not args.report:
        folder.use_storage(args.storage, make=not args.dry_run)
    scheduler = Scheduler(plan, folder, args.rows, packed)
    if args.dry_run:
        sentences, table = preview(scheduler)
        for line in [*sentences, *map(str, packed)]:
            reporter.line(line)
        reporter.table(table)
        return None
    if packed:
        scheduler.require_packed()
    # a cluster that does not answer is found out before there is a folder
    joined = args.address is not None and not args.report and connect(args.address)
    try:
        with folder.held():
            folder.write_plan(plan)
            if args.report:
                scheduler.take()
                _keep(scheduler)
            else:
                _train(scheduler, args, reporter, {c["model"] for c in configs.values()})
    finally:
        stop(joined)
    return replace(_finish(plan, folder, args, reporter, scheduler), source=data)


def _finish(
    plan: Plan,
    folder: StudyFolder,
    args: CompareArguments,
    reporter: Reporter,
    scheduler: Scheduler | None = None,
) -> Compared:
    """Write tables, the report and, if requested, the packed study; return the comparison."""
    shown = _show(collect_results(plan, folder), reporter, folder.path)
    if scheduler is not None:
        for name, reason in scheduler.unmade():
            reporter.line(f"{name}: failed: {reason}")
        for study in scheduler.packed:
            reporter.line(str(study))
    if args.pack:
        count = pack_study(plan, folder, args.pack)
        reporter.line(f"{args.pack}: {count} run{'s' * (count != 1)}")
    return shown


def _keep(scheduler: Scheduler) -> None:
    """Write which runs belong to the study, and the facts of its data, into its folder."""
    scheduler.folder.write_current(scheduler.plan, scheduler.digests)
    scheduler.folder.write_facts(collect_facts(scheduler))


def _train(
    scheduler: Scheduler, args: CompareArguments, reporter: Reporter, models: set[str]
) -> None:
    """Train all fits that are left.

    Args:
        scheduler: the fits.
        args: arguments of the comparison, with resources and limits.
        reporter: where progress is shown.
        models: names of the models, whose custom code other processes need.

    Raises:
        KeyboardInterrupt: with the command that resumes the study.
    """
    folder = scheduler.folder
    waiting = scheduler.ready()
    _keep(scheduler)
    if waiting is None:
        return
    started = connect(args.address)
    resources = Resources(args.cpus_per_trial, args.gpus_per_trial, storage=folder.storage)
    remote: Any = ray.remote(max_retries=MOST_LOSSES, **resources.for_ray)  # type: ignore[call-overload]
    packed = {model: pack(model) for model in models}
    shared: dict[tuple[str, bool], Any] = {}
    made_by = commit()
    running: dict[Any, tuple[Job, float]] = {}
    twins: list[Job] = []  # fits with the same run as one that is in training
    progress = StudyProgress(reporter, scheduler, running)

    def begin(job: Job) -> None:
        """Write the facts of a run, and start its training in a Ray task."""
        test = job.fit.stage != "trial"
        key = data_key(job.config), test
        if key not in shared:
            shared[key] = ray.put(SharedData(scheduler.datasets.prepare(job.config), test))
        facts = {"row": job.fit.row, "seed": job.fit.seed, "stage": job.fit.stage}
        facts |= {"trial": job.fit.trial, "commit": made_by, "model": job.config["model"]}
        facts |= {"searched": scheduler.searched(job.fit)}
        folder.write_fit(job.digest, {"status": "running", **facts})
        folder.write_current(scheduler.plan, scheduler.digests)
        path, source = (
            str(folder.run(digest).path.resolve()) if digest else None
            for digest in (job.digest, job.begin)
        )
        modules = packed.get(job.config["model"], b"")
        given = (job.config.plain, path, shared[key], resources, modules, source)
        running[remote(train_run).remote(*given)] = job, time.monotonic()

    try:
        most = args.max_concurrent or room_for(resources)
        with live_view(reporter, progress.lines):
            while waiting is not None or running:
                while waiting is not None and len(running) < most:
                    if any(job.digest == waiting.digest for job, _ in running.values()):
                        twins.append(waiting)
                    else:
                        begin(waiting)
                    waiting = scheduler.ready()
                ended, _ = ray.wait(list(running), timeout=1.0)
                for task in ended:
                    job, since = running.pop(task)
                    found = _outcome(task, folder.mirror(job.digest))
                    folder.write_fit(job.digest, found)
                    for one in (job, *(twin for twin in twins if twin.digest == job.digest)):
                        scheduler.end(one.fit, found["status"], found.get("reason", ""), found)
                    twins = [twin for twin in twins if twin.digest != job.digest]
                    # so that a report is up to date meanwhile, or after a kill
                    folder.write_facts({**folder.facts(), **_collect_outcomes(scheduler)})
                    progress.end(job, found, time.monotonic() - since)
                if ended and waiting is None:
                    waiting = scheduler.ready()
    except KeyboardInterrupt:
        for task in running:
            ray.cancel(task, force=True)
        raise KeyboardInterrupt(
            f"interrupted; finished runs and the last checkpoints of others are kept in "
            f"{folder.path}; continue with `recbole-pos compare {folder.path}`"
        ) from None
    finally:
        _keep(scheduler)
        stop(started)


class StudyProgress:
    """The progress of a study: a line for each run that ends, and an overview of active runs.

    Args:
        reporter: where lines are printed.
        scheduler: the fits and their states.
        running: active task -> its job and start time; changes during the training.
    """

    def __init__(
        self, reporter: Reporter, scheduler: Scheduler, running: Mapping[Any, tuple[Job, float]]
    ) -> None:
        self.reporter, self.scheduler, self.running = reporter, scheduler, running
        self.seconds: list[float] = []

    def end(self, job: Job, found: Mapping[str, Any], seconds: float) -> None:
        """Print a line about a run that has ended."""
        if found["status"] == DONE:
            self.seconds.append(seconds)
            metric, best = self.scheduler.plan.metrics[0], found.get("best_valid") or {}
            valid = f"  valid {metric} {best[metric]:.4f}" if metric in best else ""
            text = f"{found['epochs']} epochs{valid}  {span(seconds)}"
        else:
            text = f"failed: {found.get('reason', '')}"
        count = len(self.scheduler.fits)
        self.reporter.line(
            f"[{count - self.scheduler.pending()} of {count}] {job.fit.name}: {text}"
        )

    def lines(self) -> list[str]:
        """Return the lines of the progress: an overview, and one for each active run."""
        count, left = len(self.scheduler.fits), self.scheduler.pending()
        running = list(self.running.values())
        failed = sum(status == FAILED for status in self.scheduler.status.values())
        parts = [f"{count - left - failed} of {count} runs done", f"{len(running)} running"]
        parts += [f"{failed} failed"] if failed else []
        if self.seconds and left:
            each = statistics.mean(self.seconds)
            parts.append(f"about {span(each * left / max(len(running), 1))} left")
        lines = [f"{self.scheduler.plan.title}: {', '.join(parts)}"]
        for job, since in running:
            parts = [span(time.monotonic() - since)]
            if not self.scheduler.folder.storage:  # else its files may be on another machine
                with (
                    suppress(OSError),
                    open(self.scheduler.folder.run(job.digest).metrics, "rb") as file,
                ):
                    parts.insert(0, f"epoch {sum(1 for _ in file)} of {job.config['epochs']}")
            lines.append(f"  {job.fit.name}: {', '.join(parts)}")
        return lines


def collect_facts(scheduler: Scheduler) -> dict[str, Any]:
    """Return the facts of a report: versions, data, ties of times, warnings, searches."""
    facts: dict[str, Any] = {"versions": versions()}
    if scheduler.datasets.kept:
        dataset = next(iter(scheduler.datasets.kept.values()))
        log = dataset.log
        facts["data"] = {
            "users": dataset.user_num - 1,
            "items": dataset.item_num - 1,
            "events": len(log),
            "checksum": dataset.identity["data"][:16],
        }
        facts["warnings"] = describe_warnings(dataset.split.summary)
        if "LS" in (dataset.split.summary.get("split") or {}):
            columns = (log.users.numpy(), log.times.numpy(), log.items.numpy())
            ties = count_ties(*columns)
            if ties.test or not facts["warnings"]:  # no test item depends on copies of interactions
                facts["ties"] = asdict(ties)
    return {**facts, **_collect_outcomes(scheduler)}


def _collect_outcomes(scheduler: Scheduler) -> dict[str, Any]:
    """Return the choices of searches, also of rows not asked for, and the fits that have no run."""
    chosen = scheduler.folder.facts().get("chosen") or {}
    chosen_by = {row: search.metric for row, search in scheduler.searches.items()}
    chosen_by = {**(scheduler.folder.facts().get("chosen_by") or {}), **chosen_by}
    return {
        "chosen": {**chosen, **scheduler.chosen()},
        "chosen_by": chosen_by,
        "unmade": dict(scheduler.unmade()),
    }


def _outcome(task: Any, mirror: Mirror | None) -> dict[str, Any]:
    """Return the facts of a run from its task; a failed run if its process was lost too often.

    Args:
        task: the Ray task.
        mirror: copy of the run on a storage, from which files are fetched; None without one.
    """
    try:
        facts = ray.get(task)
        if mirror is not None and facts["status"] == DONE:
            mirror.fetch()
        return {**facts, "status": DONE if facts["status"] == DONE else FAILED}
    except OSError as error:
        return {"status": FAILED, "reason": f"its run cannot be read from the storage: {error}"}
    except ray.exceptions.RayError as error:
        text = str(error).strip().splitlines()
        return {"status": FAILED, "reason": f"its process was lost: {text[0] if text else error}"}


def _show(results: Results, reporter: Reporter, folder: Path) -> Compared:
    """Write tables and report, and print the tables."""
    written = write_results(results, folder)
    for shown in written.tables:
        reporter.table(shown)
        reporter.line("")
    for text in results.warnings:
        reporter.warning(text)
    for file in written.files:
        reporter.line(str(file))
    table = tidy(written.comparisons)
    table = table[table["bin"] == "all targets"].drop(columns="bin").reset_index(drop=True)
    return Compared(results.runs, written.pairs, folder, table, written.tables, results)
