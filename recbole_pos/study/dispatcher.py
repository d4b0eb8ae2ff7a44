"""The training runs of a study: started, recorded when they end, and shown meanwhile.

:class:`ActiveRuns` takes jobs (runs to train) from a scheduler and trains them. :func:`write_state`
writes what the study's folder says of the runs, so that a report can be made while they are
trained, or after the command was killed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from recbole_pos.config.arguments import ClusterArguments
from recbole_pos.config.plugins import pack
from recbole_pos.data.identity import count_dataset
from recbole_pos.data.protocol import add_sample, make_warnings
from recbole_pos.experiment.folder import find_versions
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE, FAILED
from recbole_pos.runs.training_runs import (
    LocalRuns,
    Resources,
    SharedData,
    can_run_here,
    choose_resources,
    count_runs,
)
from recbole_pos.study.configs import digest_data_options
from recbole_pos.study.rendered_table import format_duration, format_options
from recbole_pos.study.scheduler import Job, Scheduler
from recbole_pos.study.study_folder import StudyFacts, read_epochs
from recbole_pos.version import find_commit

_CHECKSUM_DIGITS = 16  # hex digits of the checksum of the data that a report shows


class ActiveRuns:
    """The training runs of a study that are in progress, as processes here or as tasks of Ray.

    Attributes:
        scheduler: decides which run is next, and records how runs ended.
        folder: folder of the study.
        args: arguments of the command: the address of a cluster, and the resources of a run.
        reporter: prints a line for each run that ends, and the progress.
        code: name of a model -> its code as bytes, if it is a class of the user's script or
            notebook, which other processes cannot import; empty for other models.
        commit: commit of this package, which runs are marked with.
        processes: starts runs: ``LocalRuns`` on this machine, or ``RayRuns`` of a cluster.
        resources: CPUs and GPUs of a run.
        running: process or Ray task of a run in progress -> its job and its start time.
        durations: durations in seconds of the runs that this call has finished.
        shared: (hash of the data options, whether test interactions are in it) -> the dataset, in
            the form in which processes get it.
    """

    def __init__(
        self, scheduler: Scheduler, args: ClusterArguments, reporter: Reporter, models: set[str]
    ) -> None:
        """Collect what the training runs of a study need. None is started before :meth:`train`.

        Args:
            scheduler: decides which run is next, and records how runs ended.
            args: arguments of the command: the address of a cluster, and the resources of a run.
            reporter: prints a line for each run that ends, and the progress.
            models: names of the models that are trained.
        """
        self.scheduler, self.folder = scheduler, scheduler.folder
        self.args, self.reporter = args, reporter

        # What every run gets: the code of its model, as bytes, if the model is a class of the
        # user's script, which the process of the run cannot import (else no bytes); and the commit
        # of this package, which is written into its results.
        self.code = {model: pack(model) for model in models}
        self.commit = find_commit()

        # ``train`` replaces these two: a LocalRuns or RayRuns, which starts processes on this
        # machine or in a cluster; and the numbers of CPUs and GPUs that each run gets.
        self.processes: Any = None
        self.resources = Resources()

        # Process of a run in progress -> its job (run to train) and its start time, in seconds.
        self.running: dict[Any, tuple[Job, float]] = {}
        # Seconds that each finished run took, from which the time left is estimated.
        self.durations: list[float] = []

        # Datasets in the form in which processes get them, each made only once. The key is a hash
        # of the options of the data, and whether test interactions are in it.
        self.shared: dict[tuple[str, bool], Any] = {}

    def train(self) -> None:
        """Train all unfinished runs of the study, as many at a time as the machines allow.

        The scheduler says which run is next. A run that starts from the weights of another run, or
        needs the result of a search, comes after the runs that it needs.

        Raises:
            KeyboardInterrupt: if it was interrupted; the message has the command that resumes.
        """
        first_job = self.scheduler.next_job()  # also records the runs that are finished already
        write_state(self.scheduler)
        if first_job is None:
            return

        # Start processes of this machine or join a cluster, and find out how many runs fit on it.
        # Without a cluster or GPU, processes of this machine are enough, and start sooner than Ray.
        args, uses_gpu = self.args, bool(first_job.config["use_gpu"])
        if can_run_here(args.address, args.gpus_per_trial, uses_gpu):
            self.processes = LocalRuns()
        else:
            from recbole_pos.runs.cluster import RayRuns  # imports Ray, which takes a second

            self.processes = RayRuns(args.address)
        try:
            cpus, gpus = args.cpus_per_trial, args.gpus_per_trial
            machines = self.processes.list_machines()
            self.resources = choose_resources(machines, cpus, gpus, uses_gpu)
            max_running = args.max_concurrent or count_runs(machines, self.resources)
            self.reporter.line(f"{self.scheduler.plan.title}: {self.resources}")

            # ``live`` shows the lines of describe_progress again and again, until the block ends.
            with self.reporter.live(self.describe_progress):
                self._train_from(first_job, max_running)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "interrupted; finished runs and the last checkpoints of others are kept in "
                f"{self.folder.path}; continue with "
                f"`{self.folder.make_command(self.scheduler.plan)}`"
            ) from None
        finally:
            # Whatever happened, no process stays behind, and the folder says what has ended.
            self.processes.cancel(self.running)
            write_state(self.scheduler)
            self.processes.stop()

    def _train_from(self, job: Job | None, max_running: int) -> None:
        """Train a run and all that come after it; return when all of them have ended.

        Args:
            job: the first run.
            max_running: most runs in training at a time.
        """
        while job is not None or self.running:
            # Start runs until the machines are full, or until all others need a run in training.
            while job is not None and len(self.running) < max_running:
                self.start(job)
                job = self._next_job()

            # Wait for up to a second, and record the runs that have ended.
            for task, facts in self.processes.wait(self.running):
                self.end(task, facts)

            # A job that is left had no room before, and is started now. If none is left, a run that
            # needed those that have ended may be next.
            if job is None:
                job = self._next_job()

    def _next_job(self) -> Job | None:
        """Return the next run to train; None if none can be trained until another has ended."""
        running = {job.digest for job, _ in self.running.values()}  # names of folders
        return self.scheduler.next_job(running)

    def start(self, job: Job) -> None:
        """Start the training of a run in another process, and remember it as running.

        The process is one of this machine, or a task of Ray, which starts again if it is lost.

        Args:
            job: the run: its configuration, its fit (which run of the plan it is) and its digest
                (the hash that names its folder).
        """
        # Note in the study's folder that the run is in progress (in its ``fit.json``), and which
        # runs belong to the study (in ``current.json``).
        model = job.config["model"]
        facts = {"status": "running", "commit": self.commit, "model": model}
        self.folder.write_fit(job.digest, {**facts, **self.scheduler.describe(job.fit)})
        self.folder.write_current(self.scheduler.plan, self.scheduler.digests)

        # Runs of the same data share them. Trials of a search must not see test interactions, so
        # they share another copy without those.
        includes_test = job.fit.stage != "trial"
        data_key = digest_data_options(job.config), includes_test
        if data_key not in self.shared:
            dataset = self.scheduler.prepare(job.config)  # read once for all runs of the same data
            self.shared[data_key] = self.processes.share(SharedData(dataset, includes_test))

        # Start ``train_run`` with these arguments in a process of its own. ``code`` has the code of
        # models that are classes of the user's script, which other processes cannot import. A job
        # with a ``tested_run`` trains nothing: it tests the weights of that trained run.
        task = self.processes.start(
            plain=job.config.plain,
            path=str(self.folder.run(job.digest).path.resolve()),
            data=self.shared[data_key],
            resources=self.resources,
            packed=self.code.get(model, b""),
            tested_run=job.tested_run and str(self.folder.run(job.tested_run).path.resolve()),
        )
        self.running[task] = job, time.monotonic()

    def end(self, task: Any, facts: dict[str, Any]) -> None:
        """Record that a run has ended, and print a line about it.

        The job of a run has its fit (which run of the plan it is: its row, the configuration, and
        seed) and its digest (the hash that names its folder).

        Args:
            task: what :meth:`start` started for the run: its process, or its Ray task.
            facts: what :func:`train_run` returned: ``status`` (done or failed), the ``reason`` of a
                failure, and the content of ``result.json`` of a finished run.
        """
        job, start = self.running.pop(task)
        status, reason = facts["status"], facts.get("reason", "")

        # Note how it ended, in the run's ``fit.json`` and in the scheduler. The run itself has
        # written its result into its folder.
        self.folder.write_fit(job.digest, {"status": status, "reason": reason})
        self.scheduler.end(job.fit, status, reason, facts)

        # Describe the outcome: epochs, best validation value and time, or the reason of a failure.
        text = f"failed: {reason}"
        if status == DONE:
            seconds = time.monotonic() - start
            self.durations.append(seconds)
            metric = self.scheduler.find_metric(job.fit.row)
            best_valid = facts.get("best_valid") or {}
            valid = f"  valid {metric} {best_valid[metric]:.4f}" if metric in best_valid else ""
            text = f"{facts['epochs']} epochs{valid}  {format_duration(seconds)}"

        # Print it with the number of ended runs, and with the options that a search has tried.
        options = format_options(self.scheduler.describe(job.fit).get("searched") or {})
        progress = f"{len(self.scheduler.status)} of {len(self.scheduler.fits)}"
        self.reporter.line(f"[{progress}] {job.fit.name}: {text}  {options}".rstrip())

    def describe_progress(self) -> list[str]:
        """Return the lines of the progress display: an overview, and one line for each active run.

        The display calls this from another thread, while :meth:`train` waits for runs to end.

        The overview says how many runs are done, running and failed, and estimates the time left,
        for example ``17 of 51 runs done, 1 running, about 8 h left``.
        """
        # Copies, since the thread of :meth:`train` changes both.
        statuses = list(self.scheduler.status.values())  # of runs that have ended
        running = list(self.running.values())

        # The overview. A fit is one run of the plan.
        num_fits, num_failed = len(self.scheduler.fits), statuses.count(FAILED)
        states = [f"{statuses.count(DONE)} of {num_fits} runs done", f"{len(running)} running"]
        if num_failed:
            states.append(f"{num_failed} failed")
        if self.durations and running:
            num_left = num_fits - len(statuses)
            seconds_left = self._estimate_seconds_left(num_left, len(running))
            states.append(f"about {format_duration(seconds_left)} left")

        # A line for each active run, with its epoch. The digest of its job names its folder.
        lines = [f"{self.scheduler.plan.title}: {', '.join(states)}"]
        for job, start in running:
            run, duration = self.folder.run(job.digest), format_duration(time.monotonic() - start)
            state = f"epoch {len(read_epochs(run))} of {job.config['epochs']}"
            # The process of a run writes its config.yaml first of all: without the file, Ray has
            # not started the process yet.
            if not run.config.is_file():
                state = "waits for its process"
            lines.append(f"  {job.fit.name}: {state}, {duration}")
        return lines

    def _estimate_seconds_left(self, num_left: int, num_running: int) -> float:
        """Return an estimate of the seconds until all runs of the study have ended.

        It assumes that every run takes as long as the finished runs of this call took on average,
        and that as many runs are trained at a time as now.

        Args:
            num_left: number of runs that have not ended.
            num_running: number of those that are in progress, at least one.
        """
        return statistics.mean(self.durations) * num_left / num_running


def write_state(scheduler: Scheduler) -> None:
    """Write what a study's folder says of its runs and data: ``current.json`` and ``facts.json``.

    A plan asks for training runs, which are called fits: one for each configuration and seed, and
    one for each trial of a search. ``current.json`` has for each fit the name of the folder where
    it was trained. ``facts.json`` has the versions of packages, a description of the dataset, if
    one has been read, and the fits that failed before they had a folder, with the reasons.

    Args:
        scheduler: knows the plan, the folder of each fit, and the datasets that were read.
    """
    # ``digests``: name of a fit -> name of its folder, which is a hash.
    scheduler.folder.write_current(scheduler.plan, scheduler.digests)

    facts = StudyFacts(versions=find_versions(), unmade=scheduler.find_unmade())
    datasets = list(scheduler.datasets.values())
    if datasets:
        # All configurations have the same interactions and split, so the first stands for all.
        dataset, *_ = datasets
        summary = dataset.split.summary  # counts of interactions and targets
        checksum = dataset.identity["data"][:_CHECKSUM_DIGITS]  # the first 16 digits of a hash
        facts.data = {**count_dataset(dataset), "checksum": checksum}
        facts.warnings = make_warnings(summary)  # of copied interactions, for example
        facts.split = add_sample(summary, dataset.config)  # with the size of a sample of users
    scheduler.folder.write_facts(facts)
