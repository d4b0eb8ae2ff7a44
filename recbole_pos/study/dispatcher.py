"""The runs in training: how they begin, what became of them, and their progress."""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from typing import Any

import ray

from recbole_pos.config.arguments import ClusterArguments
from recbole_pos.config.plugins import pack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.targets import make_warnings
from recbole_pos.experiment.folder import find_versions
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import Resources, connect, count_concurrent_runs, stop
from recbole_pos.runs.progress import live_view, show_options
from recbole_pos.runs.shared_data import SharedData
from recbole_pos.runs.worker import MOST_LOSSES, train_run
from recbole_pos.study.configs import digest_data_options
from recbole_pos.study.rendered_table import format_duration
from recbole_pos.study.results import DONE, FAILED, count_ties
from recbole_pos.study.scheduler import Job, Scheduler
from recbole_pos.study.study_folder import StudyFacts
from recbole_pos.version import find_commit


class ActiveRuns:
    """The runs in training, by what trains them: a Ray task, or a trial of Ray Tune.

    Args:
        scheduler: the fits.
        args: arguments of the command, with resources and limits.
        reporter: where progress is shown.
        models: names of the models, whose custom code other processes need.

    Attributes:
        running: key of an active run -> its job and start time.
    """

    def __init__(
        self, scheduler: Scheduler, args: ClusterArguments, reporter: Reporter, models: set[str]
    ) -> None:
        self.scheduler, self.folder, self.args = scheduler, scheduler.folder, args
        self.reporter, self.packed = reporter, {model: pack(model) for model in models}
        self.resources = Resources(args.cpus_per_trial, args.gpus_per_trial)
        self.shared: dict[tuple[str, bool], Any] = {}
        self.commit = find_commit()
        self.running: dict[Any, tuple[Job, float]] = {}
        self.twins: list[Job] = []  # jobs with the same run as one that is in training
        self.durations: list[float] = []  # seconds of runs that are done

    def share(self, config: PosConfig, test: bool) -> Any:
        """Return Ray's reference of the data of a configuration, which all its runs share.

        Args:
            config: configuration of a run.
            test: whether the run is tested; trials have no test events.
        """
        key = digest_data_options(config), test
        if key not in self.shared:
            self.shared[key] = ray.put(SharedData(self.scheduler.prepare(config), test))
        return self.shared[key]

    def note_begin(self, job: Job) -> bool:
        """Write the facts of a run that begins; return False if another fit has it in training,
        with which this fit then ends, too."""
        if any(job.digest == other.digest for other, _ in self.running.values()):
            self.twins.append(job)
            return False
        facts = {"status": "running", "commit": self.commit, "model": job.config["model"]}
        self.folder.write_fit(job.digest, {**facts, **self.scheduler.describe(job.fit)})
        self.folder.write_current(self.scheduler.plan, self.scheduler.digests)
        return True

    def end(self, key: Any, facts: dict[str, Any]) -> None:
        """Record a run that has ended with its facts, and print a line about it."""
        job, start = self.running.pop(key)
        self.folder.write_fit(job.digest, facts)
        status, reason = facts["status"], facts.get("reason", "")
        self.scheduler.end(job.fit, status, reason, facts)
        for twin in [twin for twin in self.twins if twin.digest == job.digest]:
            self.scheduler.end(twin.fit, status, reason, facts)
            self.twins.remove(twin)
        # so that a report is up to date meanwhile, or after a kill
        _write_outcomes(self.scheduler, self.folder.facts())
        text = f"failed: {reason}"
        if status == DONE:
            seconds = time.monotonic() - start
            self.durations.append(seconds)
            text = self._describe_done(job, facts, seconds)
        options = show_options(self.scheduler.describe(job.fit).get("searched") or {})
        ended, count = len(self.scheduler.status), len(self.scheduler.fits)
        self.reporter.line(f"[{ended} of {count}] {job.fit.name}: {text}  {options}".rstrip())

    def _describe_done(self, job: Job, facts: dict[str, Any], seconds: float) -> str:
        """Return ``12 epochs  valid ndcg@10 0.1234  41 s``."""
        metric, best_valid = self.scheduler.metric(job.fit.row), facts.get("best_valid") or {}
        valid = f"  valid {metric} {best_valid[metric]:.4f}" if metric in best_valid else ""
        epochs = f"{'stopped after ' if facts.get('stopped') else ''}{facts['epochs']} epochs"
        return f"{epochs}{valid}  {format_duration(seconds)}"

    def lines(self) -> list[str]:
        """Return the lines of the progress: an overview, and one for each active run."""
        status, running = list(self.scheduler.status.values()), list(self.running.values())
        count = len(self.scheduler.fits)
        states = [f"{status.count(DONE)} of {count} runs done", f"{len(running)} running"]
        if failed := status.count(FAILED):
            states.append(f"{failed} failed")
        if self.durations and len(status) < count:
            waves = (count - len(status)) / max(len(running), 1)
            states.append(f"about {format_duration(statistics.mean(self.durations) * waves)} left")
        lines = [f"{self.scheduler.plan.title}: {', '.join(states)}"]
        for job, start in running:
            epoch = ""
            with suppress(OSError):  # it has no epoch yet
                epochs = self.folder.run(job.digest).metrics.read_bytes().count(b"\n")
                epoch = f"epoch {epochs} of {job.config['epochs']}, "
            duration = format_duration(time.monotonic() - start)
            lines.append(f"  {job.fit.name}: {epoch}{duration}")
        return lines

    def train(self, waiting: Job | None) -> None:
        """Train as Ray tasks, from the job ``waiting`` on, until every fit has ended.

        Raises:
            KeyboardInterrupt: with the command that resumes the study.
        """
        keep_state(self.scheduler)
        if waiting is None:
            return
        is_started = connect(self.args.address)
        try:
            limit = self.args.max_concurrent or count_concurrent_runs(self.resources)
            with live_view(self.reporter, self.lines):
                while waiting is not None or self.running:
                    while waiting is not None and len(self.running) < limit:
                        if self.note_begin(waiting):
                            self.running[self._start(waiting)] = waiting, time.monotonic()
                        waiting = self.scheduler.next_job()
                    for task in ray.wait(list(self.running), timeout=1.0)[0]:
                        self.end(task, _get_facts(task))
                    waiting = waiting or self.scheduler.next_job()
        except KeyboardInterrupt:
            for task in self.running:
                ray.cancel(task, force=True)
            folder = self.folder.path
            raise KeyboardInterrupt(
                "interrupted; finished runs and the last checkpoints of others are kept in "
                f"{folder}; continue with `recbole-pos compare {folder}`"
            ) from None
        finally:
            keep_state(self.scheduler)
            stop(is_started)

    def _start(self, job: Job) -> Any:
        """Return the Ray task that trains a run; one whose process is lost is started again."""
        run = str(self.folder.run(job.digest).path.resolve())
        begin = str(self.folder.run(job.begin).path.resolve()) if job.begin else None
        code = self.packed.get(job.config["model"], b"")
        data = self.share(job.config, job.fit.stage != "trial")
        task = _train_run.options(
            max_retries=MOST_LOSSES, num_cpus=self.resources.cpus, num_gpus=self.resources.gpus
        )
        return task.remote(job.config.plain, run, data, self.resources, code, begin)


_train_run: Any = ray.remote(train_run)


def _get_facts(task: Any) -> dict[str, Any]:
    """Return the facts of a run from its task; a failed run if its process was lost too often."""
    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:
        first_line = str(error).strip().partition("\n")[0]
        return {"status": FAILED, "reason": f"its process was lost: {first_line}"}


def keep_state(scheduler: Scheduler) -> None:
    """Write which runs belong to the study, and the facts of its data, into its folder."""
    scheduler.folder.write_current(scheduler.plan, scheduler.digests)
    facts = StudyFacts(versions=find_versions())
    for dataset in list(scheduler.datasets.values())[:1]:
        _add_data(facts, dataset)
    _write_outcomes(scheduler, facts)


def _add_data(facts: StudyFacts, dataset: Any) -> None:
    """Add the size of a dataset, its warnings, and how many test items depend on ties of times."""
    log, summary = dataset.log, dataset.split.summary
    counts = {"users": dataset.user_num - 1, "items": dataset.item_num - 1, "events": len(log)}
    facts.data = {**counts, "checksum": dataset.identity["data"][:16]}
    facts.warnings = make_warnings(summary)
    if "LS" in (summary.get("split") or {}):
        ties = count_ties(log.users.numpy(), log.times.numpy(), log.items.numpy())
        if ties.test or not facts.warnings:  # no test item depends on copies of interactions
            facts.ties = ties


def _write_outcomes(scheduler: Scheduler, facts: StudyFacts) -> None:
    """Write the facts of a study with the choices of searches and the fits without a run."""
    earlier = scheduler.folder.facts()
    metrics = {row: search.metric for row, search in scheduler.searches.items()}
    facts.chosen = {**earlier.chosen, **scheduler.chosen()}  # also of rows not asked for
    facts.chosen_by = {**earlier.chosen_by, **metrics}
    facts.unmade = scheduler.unmade()
    scheduler.folder.write_facts(facts)
