"""A study from beginning to end: check everything, train what is missing, write what was found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import ray

from recbole_pos.config.arguments import CompareArguments, arguments, require_shares
from recbole_pos.config.plugins import allow, pack
from recbole_pos.data.location import require_dataset
from recbole_pos.data.targets import warnings_about
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import versions
from recbole_pos.screen import Screen
from recbole_pos.study.asked import (
    complete,
    plan_and_folder,
    require_metrics,
    require_same_study,
    run_folders,
)
from recbole_pos.study.collect import of_runs, results_of, write_results
from recbole_pos.study.configs import data_key, require_twins
from recbole_pos.study.expand import check_plan, with_unread
from recbole_pos.study.fitting import fit
from recbole_pos.study.folder import StudyFolder, commit
from recbole_pos.study.packed import PackedStudy, require_place
from recbole_pos.study.packed import pack as pack_study
from recbole_pos.study.plan import Plan
from recbole_pos.study.preview import preview
from recbole_pos.study.progress import StudyProgress
from recbole_pos.study.results import DONE, FAILED, Results
from recbole_pos.study.terminal import Fitted
from recbole_pos.study.ties import count_ties
from recbole_pos.study.work import Job, Work
from recbole_pos.tune.cluster import connect, stop
from recbole_pos.tune.data import SharedData
from recbole_pos.tune.storage import Mirror


@dataclass(frozen=True)
class Compared:
    """What a comparison found.

    Attributes:
        runs: a line a run: row, seed, status, the test's metrics, seconds, ...
        pairs: a line a row: its difference to the reference, interval, p, star.
        folder: with table.md, table.csv, runs.csv, runs.parquet and report.html.
    """

    runs: pd.DataFrame
    pairs: pd.DataFrame
    folder: Path

    def __iter__(self) -> Iterator[pd.DataFrame]:
        """Yield the two tables: ``runs, pairs = compare(...)``."""
        yield from (self.runs, self.pairs)


def compare(
    what: str | Path | list[Any] | dict[str, Any],
    dataset: str | None = None,
    config_file_list: list[str] | None = None,
    config_dict: dict[str, Any] | None = None,
    *,
    settings: CompareArguments | None = None,
    **given: Any,
) -> Compared | None:
    """Compare models: train what is missing, the same way for all, and say what can be said.

    >>> given = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
    >>> found = recbole_pos.compare(["FPARec", "Pop"], "ml-100k", config_dict=given, seeds=2)
    >>> sorted(found.runs["status"]), list(found.pairs["row"])
    (['done', 'done', 'done', 'done'], ['Pop'])

    Args:
        what: a list of models (names or classes); a study, as the path of its yaml or as a dict; or
            folders: that of a study, or those of runs that exist already.
        dataset: of a list of models; of a study, in the place of the one it names.
        config_file_list, config_dict: configuration of all rows of a list of models, and what wins
            over the base of a study.
        settings: the other arguments together.
        given: or by name, see :class:`~recbole_pos.config.arguments.CompareArguments`: ``seeds``,
            ``vary``, ``reference``, ``rows``, ``run_dir``, ``dry_run``, ``report``,
            ``known``, ``pack``, ``max_concurrent``, ``address``, ``storage``, ``cpus_per_trial``,
            ``gpus_per_trial``, ``verbose``.

    Returns:
        What was found; None for ``dry_run``.

    Raises:
        UsageError: if something given is wrong, before anything is trained; for runs that cannot be
            compared.
        KeyboardInterrupt: if it was interrupted; says how to go on.
    """
    told = arguments(settings or CompareArguments(), given)
    allow((config_dict or {}).get("plugins"))
    require_shares(told.max_concurrent, told.cpus_per_trial, told.gpus_per_trial)
    screen = Screen(told.verbose)
    if runs := run_folders(what):
        for name in ("known", "pack"):
            if getattr(told, name):
                raise UsageError(f"--{name}: goes with models or a study, not with folders of runs")
        return _show(of_runs(runs, told.reference), screen, Path(told.run_dir or "compared"))
    base = {**(config_dict or {})}
    if config_file_list:
        base["config_files"] = list(map(str, config_file_list))
    plan, folder = plan_and_folder(what, dataset, base, told)
    plan = with_unread(plan, complete)
    require_same_study(plan, folder, told.report)
    if told.pack:
        require_place(told.pack)
    files = (told.known,) if isinstance(told.known, (str, Path)) else told.known
    packed = [PackedStudy(path) for path in files]
    if told.report and not packed:
        return _finish(plan, folder, told, screen)
    configs = check_plan(plan, complete)
    require_metrics(plan, configs)
    require_twins(configs)
    for config in configs.values():
        require_dataset(plan.dataset, Path(config["data_path"]), [], config)
    if not told.report:
        folder.use_storage(told.storage, make=not told.dry_run)
    work = Work(plan, folder, told.rows, packed)
    if told.dry_run:
        said, table = preview(work)
        for line in [*said, *map(str, packed)]:
            screen.line(line)
        screen.table(table)
        return None
    if packed:
        work.require_packed()
    # a cluster that does not answer is found out before there is a folder
    joined = told.address is not None and not told.report and connect(told.address)
    try:
        with folder.held():
            folder.write_plan(plan)
            if told.report:
                work.take()
                _keep(work)
            else:
                _train(work, told, screen, {c["model"] for c in configs.values()})
    finally:
        stop(joined)
    return _finish(plan, folder, told, screen, work)


def _finish(
    plan: Plan,
    folder: StudyFolder,
    told: CompareArguments,
    screen: Screen,
    work: Work | None = None,
) -> Compared:
    """Tables, the report, what else there is to say and, if asked for, the study in one file."""
    shown = _show(results_of(plan, folder), screen, folder.path)
    if work is not None:
        for name, reason in work.unmade():
            screen.line(f"{name}: failed: {reason}")
        for one in work.packed:
            screen.line(str(one))
    if told.pack:
        count = pack_study(plan, folder, told.pack)
        screen.line(f"{told.pack}: {count} run{'s' * (count != 1)}")
    return shown


def _keep(work: Work) -> None:
    """Note which runs are the study's, and what is known of its data."""
    work.folder.write_current(work.plan, work.digests)
    work.folder.write_facts(facts_of(work))


def _train(work: Work, told: CompareArguments, screen: Screen, models: set[str]) -> None:
    """Everything that is left to train."""
    folder = work.folder
    waiting = work.ready()
    _keep(work)
    if waiting is None:
        return
    started = connect(told.address)
    takes = {"num_cpus": told.cpus_per_trial, "num_gpus": told.gpus_per_trial}
    packed = {model: pack(model) for model in models}
    shared: dict[tuple[str, bool], Any] = {}
    made_by = commit()
    running: dict[Any, tuple[Job, float]] = {}
    twins: list[Job] = []  # of runs that are being trained for another fit
    progress = StudyProgress(screen, work.plan, work)

    def begin(job: Job) -> None:
        test = job.fit.stage != "trial"
        key = data_key(job.config), test
        if key not in shared:
            shared[key] = ray.put(SharedData(work.datasets.of(job.config), test))
        path = folder.run(job.digest).path.resolve()
        facts = {"row": job.fit.row, "seed": job.fit.seed, "stage": job.fit.stage}
        facts |= {"trial": job.fit.trial, "commit": made_by, "model": job.config["model"]}
        facts |= {"searched": work.searched(job.fit)}
        folder.write_fit(job.digest, {"status": "running", **facts})
        folder.write_current(work.plan, work.digests)
        source = str(folder.run(job.begin).path.resolve()) if job.begin else None
        task = fit.options(**takes)
        arguments_ = (job.config.plain, str(path), source, packed.get(job.config["model"], b""))
        begun = task.remote(*arguments_, takes, shared[key], folder.storage)
        running[begun] = job, time.monotonic()

    try:
        most = told.max_concurrent or _room(takes)
        with progress.shown(running):
            while waiting is not None or running:
                while waiting is not None and len(running) < most:
                    same = any(job.digest == waiting.digest for job, _ in running.values())
                    if same:
                        twins.append(waiting)
                    else:
                        begin(waiting)
                    waiting = work.ready()
                ended, _ = ray.wait(list(running), timeout=1.0)
                for task in ended:
                    job, since = running.pop(task)
                    found = _outcome(task, folder.mirror(job.digest))
                    folder.write_fit(job.digest, found)
                    for one in (job, *(twin for twin in twins if twin.digest == job.digest)):
                        work.end(one.fit, found["status"], found.get("reason", ""), found)
                    twins = [twin for twin in twins if twin.digest != job.digest]
                    # for a report meanwhile, or after a kill
                    folder.write_facts({**folder.facts(), **_found_so_far(work)})
                    progress.ended(job, found, time.monotonic() - since)
                if ended and waiting is None:
                    waiting = work.ready()
    except KeyboardInterrupt:
        for task in running:
            ray.cancel(task, force=True)
        raise KeyboardInterrupt(
            f"interrupted; finished runs and the last checkpoints of others are kept in "
            f"{folder.path}; continue with `recbole-pos compare {folder.path}`"
        ) from None
    finally:
        _keep(work)
        stop(started)


def facts_of(work: Work) -> dict[str, Any]:
    """What reports say of the data, of the order of equal times, of versions and searches."""
    facts: dict[str, Any] = {"versions": versions()}
    if work.datasets.kept:
        dataset = next(iter(work.datasets.kept.values()))
        log = dataset.log
        facts["data"] = {
            "users": dataset.user_num - 1,
            "items": dataset.item_num - 1,
            "events": len(log),
            "checksum": dataset.identity["data"][:16],
        }
        facts["warnings"] = warnings_about(dataset.split.summary)
        if "LS" in (dataset.split.summary.get("split") or {}):
            columns = (log.users.numpy(), log.times.numpy(), log.items.numpy())
            ties = count_ties(*columns)
            if ties.test or not facts["warnings"]:  # of copies, none is in a place that matters
                facts["ties"] = asdict(ties)
    return {**facts, **_found_so_far(work)}


def _found_so_far(work: Work) -> dict[str, Any]:
    """What searches chose, those of other rows as they did, and which fits cannot be trained."""
    chosen = work.folder.facts().get("chosen") or {}
    by = {row: search.metric for row, search in work.searches.items()}
    by = {**(work.folder.facts().get("chosen_by") or {}), **by}
    return {"chosen": {**chosen, **work.chosen()}, "chosen_by": by, "unmade": dict(work.unmade())}


def _outcome(task: Any, mirror: Mirror | None) -> dict[str, Any]:
    """What a task returned; a failed run where its process was lost again and again."""
    try:
        found = ray.get(task)
        if mirror is not None and found["status"] == DONE:
            mirror.fetch()
        return found
    except OSError as error:
        return {"status": FAILED, "reason": f"its run cannot be read from the storage: {error}"}
    except ray.exceptions.RayError as error:
        text = str(error).strip().splitlines()
        return {"status": FAILED, "reason": f"its process was lost: {text[0] if text else error}"}


def _room(takes: dict[str, float]) -> int:
    """How many trainings the machines can do side by side.

    Raises:
        UsageError: if none of them can ever do one.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    wanted = {"CPU": takes["num_cpus"], "GPU": takes["num_gpus"]}
    room = sum(
        min(int(node.get(key, 0) / share + 1e-9) for key, share in wanted.items() if share)
        for node in nodes
    )
    if not room:
        raise UsageError(
            f"--cpus_per_trial, --gpus_per_trial: no machine of the cluster has "
            f"{wanted['CPU']:g} CPUs and {wanted['GPU']:g} GPUs"
        )
    return room


def _show(results: Results, screen: Screen, folder: Path) -> Compared:
    """Write tables and report, and print the tables."""
    written = write_results(results, folder)
    for shown in written.tables:
        screen.table(Fitted(shown))
        screen.line("")
    for text in results.warnings:
        screen.line(f"warning: {text}")
    for file in written.files:
        screen.line(str(file))
    return Compared(results.runs, written.pairs, folder)
