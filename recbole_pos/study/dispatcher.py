"""The runs in training: how they begin, what became of them, and their progress."""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray

from recbole_pos.config.arguments import ClusterArguments
from recbole_pos.config.plugins import pack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.targets import describe_warnings
from recbole_pos.experiment.folder import versions
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import Resources, connect, count_concurrent_runs, stop
from recbole_pos.runs.progress import live_view, show_options
from recbole_pos.runs.shared_data import SharedData
from recbole_pos.runs.worker import MOST_LOSSES, train_run
from recbole_pos.study.configs import digest_data_options
from recbole_pos.study.rendered_table import format_duration
from recbole_pos.study.results import DONE, FAILED, count_ties
from recbole_pos.study.scheduler import Job, Scheduler
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
        self.twins: list[Job] = []  # fits with the same run as one that is in training
        self.seconds: list[float] = []  # of runs that have ended

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
        job, since = self.running.pop(key)
        self.folder.write_fit(job.digest, facts)
        for one in (job, *(twin for twin in self.twins if twin.digest == job.digest)):
            self.scheduler.end(one.fit, facts["status"], facts.get("reason", ""), facts)
        self.twins = [twin for twin in self.twins if twin.digest != job.digest]
        # so that a report is up to date meanwhile, or after a kill
        self.folder.write_facts({**self.folder.facts(), **_collect_outcomes(self.scheduler)})
        text, seconds = f"failed: {facts.get('reason', '')}", time.monotonic() - since
        if facts["status"] == DONE:
            self.seconds.append(seconds)
            metric, best = self.scheduler.metric(job.fit.row), facts.get("best_valid") or {}
            valid = f"  valid {metric} {best[metric]:.4f}" if metric in best else ""
            how = "stopped after " if facts.get("stopped") else ""
            text = f"{how}{facts['epochs']} epochs{valid}  {format_duration(seconds)}"
        searched = show_options(self.scheduler.describe(job.fit).get("searched") or {})
        ended, count = len(self.scheduler.status), len(self.scheduler.fits)
        self.reporter.line(f"[{ended} of {count}] {job.fit.name}: {text}  {searched}".rstrip())

    def lines(self) -> list[str]:
        """Return the lines of the progress: an overview, and one for each active run."""
        status = list(self.scheduler.status.values())
        count, running = len(self.scheduler.fits), list(self.running.values())
        parts = [f"{status.count(DONE)} of {count} runs done", f"{len(running)} running"]
        if failed := status.count(FAILED):
            parts.append(f"{failed} failed")
        if self.seconds and len(status) < count:
            left = statistics.mean(self.seconds) * (count - len(status)) / max(len(running), 1)
            parts.append(f"about {format_duration(left)} left")
        lines = [f"{self.scheduler.plan.title}: {', '.join(parts)}"]
        for job, since in running:
            text = f"  {job.fit.name}: "
            with suppress(OSError):  # it has no epoch yet
                epoch = self.folder.run(job.digest).metrics.read_bytes().count(b"\n")
                text += f"epoch {epoch} of {job.config['epochs']}, "
            lines.append(f"{text}{format_duration(time.monotonic() - since)}")
        return lines

    def train(self, waiting: Job | None) -> None:
        """Train as Ray tasks, from the job ``waiting`` on, until every fit has ended.

        Raises:
            KeyboardInterrupt: with the command that resumes the study.
        """
        keep_state(self.scheduler)
        if waiting is None:
            return
        started = connect(self.args.address)
        try:
            most = self.args.max_concurrent or count_concurrent_runs(self.resources)
            with live_view(self.reporter, self.lines):
                while waiting is not None or self.running:
                    while waiting is not None and len(self.running) < most:
                        if self.note_begin(waiting):
                            self.running[self._start(waiting)] = waiting, time.monotonic()
                        waiting = self.scheduler.next_job()
                    for task in ray.wait(list(self.running), timeout=1.0)[0]:
                        self.end(task, _outcome(task))
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
            stop(started)

    def _start(self, job: Job) -> Any:
        """Return the Ray task that trains a run; one whose process is lost is started again."""
        path = str(self.folder.run(job.digest).path.resolve())
        source = str(self.folder.run(job.begin).path.resolve()) if job.begin else None
        code = self.packed.get(job.config["model"], b"")
        data = self.share(job.config, job.fit.stage != "trial")
        own = {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus}
        task = _train_run.options(max_retries=MOST_LOSSES, **own)
        return task.remote(job.config.plain, path, data, self.resources, code, source)


_train_run: Any = ray.remote(train_run)


def _outcome(task: Any) -> dict[str, Any]:
    """Return the facts of a run from its task; a failed run if its process was lost too often."""
    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:
        text = str(error).strip().splitlines()
        return {"status": FAILED, "reason": f"its process was lost: {text[0] if text else error}"}


def keep_state(scheduler: Scheduler) -> None:
    """Write which runs belong to the study, and the facts of its data, into its folder."""
    scheduler.folder.write_current(scheduler.plan, scheduler.digests)
    scheduler.folder.write_facts(collect_facts(scheduler))


def collect_facts(scheduler: Scheduler) -> dict[str, Any]:
    """Return the facts of a report: versions, data, ties of times, warnings, searches."""
    facts: dict[str, Any] = {"versions": versions()}
    for dataset in list(scheduler.datasets.values())[:1]:
        log, summary = dataset.log, dataset.split.summary
        counts = {"users": dataset.user_num - 1, "items": dataset.item_num - 1, "events": len(log)}
        facts["data"] = {**counts, "checksum": dataset.identity["data"][:16]}
        facts["warnings"] = describe_warnings(summary)
        if "LS" in (summary.get("split") or {}):
            ties = count_ties(log.users.numpy(), log.times.numpy(), log.items.numpy())
            if ties.test or not facts["warnings"]:  # no test item depends on copies of interactions
                facts["ties"] = asdict(ties)
    return {**facts, **_collect_outcomes(scheduler)}


def _collect_outcomes(scheduler: Scheduler) -> dict[str, Any]:
    """Return the choices of searches, also of rows not asked for, and the fits that have no run."""
    earlier = scheduler.folder.facts()
    chosen_by = {row: search.metric for row, search in scheduler.searches.items()}
    return {
        "chosen": {**earlier.get("chosen", {}), **scheduler.chosen()},
        "chosen_by": {**earlier.get("chosen_by", {}), **chosen_by},
        "unmade": scheduler.unmade(),
    }
