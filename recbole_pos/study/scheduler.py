"""Which fits of a study are trained next, each after the fits it depends on.

:meth:`Scheduler.next_job` returns a fit to train with its configuration; the caller trains it and
reports its end by :meth:`Scheduler.end`. Finished runs of the study's folder, or of kept studies,
end without training.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.recbole_view import make_views
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.configs import (
    attach_schemes,
    digest_data_options,
    digest_run,
    make_row_config,
)
from recbole_pos.study.plan import Fit, Plan, list_fits, list_points
from recbole_pos.study.study_folder import KNOWN_FROM, PackedStudy, StudyFolder

_UNTRAINED = "not trained"  # reason of a fit that no call has tried to train


@dataclass(frozen=True)
class Job:
    """A fit that can be trained now, and its run.

    Attributes:
        digest: digest of the run.
        tested_run: digest of a trained run whose weights are only tested; None to train.
    """

    fit: Fit
    config: PosConfig
    digest: str
    tested_run: str | None = None


class Scheduler:
    """Decides which fit of a plan is trained next, and records how fits ended.

    Args:
        rows: names of rows to train, besides the rows they start from; all if empty.
        packed: kept studies, whose runs need no training.

    Attributes:
        status: name of a fit that has ended -> done or failed.
        reasons: name of a fit that has failed -> why.
        digests: name of a fit -> digest of its run.
        configs: digest of a run -> its configuration.
        datasets: digest of data options -> dataset, of those that have been read.
    """

    def __init__(
        self,
        plan: Plan,
        folder: StudyFolder,
        rows: Sequence[str] = (),
        packed: Sequence[PackedStudy] = (),
    ) -> None:
        """List the runs of the rows to train and of all rows that these start from; all wait."""
        self.plan, self.folder, self.packed = plan, folder, packed
        for name in rows:
            plan.source.require_choice(("rows",), name, plan.rows)
        required = {row for name in rows or plan.rows for row in plan.list_ancestors(name)}
        self.rows = [name for name in plan.rows if name in required]
        self.fits = [fit for fit in list_fits(plan) if fit.row in required]
        self.waiting = list(self.fits)
        self.status: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.configs: dict[str, PosConfig] = {}
        self.datasets: dict[str, Any] = {}
        self.trains = True  # False for a report, which tries no fit
        self.searches = {name: RowSearch(plan, name) for name in self.rows if plan.rows[name].grid}

    # --- the next job ---

    def next_job(self, running: Collection[str] = (), restore: bool = True) -> Job | None:
        """Return the next fit that can be trained; None if none can until others have ended.

        Fits that an earlier call has trained, or that cannot be trained, are recorded as ended.

        Args:
            running: digests of runs in training, whose other fits wait for them.
            restore: whether runs of kept studies are copied into the folder.
        """
        for fit in list(self.waiting):
            if any(name not in self.status for name in fit.after):
                continue
            reason = self._explain_failure(fit)
            job = None
            if not reason:
                try:
                    job = self._make_job(fit)
                except UsageError as error:
                    reason = str(error)
            if job is not None and job.digest in running:
                continue

            self.waiting.remove(fit)
            facts = self._find_facts(job, restore) if job is not None else {}
            is_done = facts.get("status") == DONE
            if not is_done:  # a run that failed before is trained again
                reason = reason or self._explain_no_weights(fit)
            if job is None or reason:
                self.end(fit, FAILED, reason)  # without a digest, since it has no run to show
                continue
            self.digests[fit.name] = job.digest
            self.configs[job.digest] = job.config
            if not is_done:
                return job
            self.end(fit, DONE, facts=facts)
        return None

    def _explain_failure(self, fit: Fit) -> str:
        """Return why a fit cannot be trained after those it depends on; empty if it can."""
        failed = [name for name in fit.after if self.status[name] == FAILED]
        if fit.has_parent and failed:
            (parent,) = fit.after
            reason = self.reasons[parent]
            return reason if reason == _UNTRAINED else f"{parent} failed: {reason}"
        if any(self.reasons[name] == _UNTRAINED for name in failed):
            return _UNTRAINED  # the best trial may be among those not trained
        if fit.after and not fit.has_parent and self.searches[fit.row].find_best() is None:
            first_reason = self.reasons.get(fit.after[0], "no trial has a validation value")
            return f"all trials failed; the first one: {first_reason}"
        return ""

    def _explain_no_weights(self, fit: Fit) -> str:
        """Return why a fit cannot start from its parent's weights; empty if it can or need not."""
        if not fit.has_parent:
            return ""
        (parent,) = fit.after
        digest = self.digests[parent]
        known_from = self.folder.read_fit(digest).get(KNOWN_FROM)
        if not known_from:
            return ""
        return (
            f"it starts from the weights of {parent}, and {known_from} has none; to train that "
            f"again, delete {self.folder.run(digest).path} and leave --known out"
        )

    def _find_facts(self, job: Job, restore: bool) -> dict[str, Any]:
        """Return the facts of a run: of the folder if it is finished there, else as kept."""
        facts = self.folder.read_fit(job.digest)
        packed_studies = [packed for packed in self.packed if job.digest in packed.fits]
        for packed in packed_studies:
            packed.used.add(job.digest)
        if facts.get("status") == DONE or not packed_studies:
            return facts
        if restore:
            dataset = self.prepare(job.config)
            packed_studies[0].restore(job.digest, self.folder, job.config, dataset)
        return packed_studies[0].fits[job.digest]

    def _make_job(self, fit: Fit) -> Job:
        """Return the job of a fit, once the fits it depends on have ended."""
        search, tested_run, origin = self.searches.get(fit.row), None, fit.trial is not None
        if fit.has_parent:
            return self._make_child_job(fit)
        if search is None:
            config = make_row_config(fit.options)
        elif fit.trial is not None:
            config = make_row_config(fit.options, search.points[fit.trial])
        else:
            best_trial = search.find_best()
            assert best_trial is not None  # else the fit has failed
            config = make_row_config(fit.options, search.points[best_trial])
            # the trial with the same seed needs only a test
            for trial in self.fits:
                if (trial.row, trial.trial, trial.seed) == (fit.row, best_trial, fit.seed):
                    digest = self.digests.get(trial.name, "")
                    tested_run = digest if self.folder.has_weights(digest) else None
        digest = digest_run(config, self.prepare(config).identity, origin)
        return Job(fit, config, digest, tested_run)

    def _make_child_job(self, fit: Fit) -> Job:
        """Return the job of a fit that starts from the weights of its parent."""
        parent_run = self.digests[fit.after[0]]
        parent_options = self.configs[parent_run].plain
        schemes = fit.options["attach"]
        options = {key: value for key, value in fit.options.items() if key != "attach"}
        if schemes:
            position = make_row_config(parent_options).plain["position"]
            options["position"] = attach_schemes(position, schemes)
            options["init_from"] = str(self.folder.run(parent_run).path.resolve())
            options["train_only"] = list(schemes)
        config = make_row_config(parent_options, options)
        digest = digest_run(config, self.prepare(config).identity, parent_run)
        return Job(fit, config, digest, None if schemes else parent_run)

    def prepare(self, config: PosConfig) -> Any:
        """Return the dataset of a configuration; each is read once."""
        key = digest_data_options(config)
        if key not in self.datasets:
            dataset = read_dataset(config)
            make_views(dataset)  # refuses data without a training target before any run begins
            self.datasets[key] = dataset
        return self.datasets[key]

    # --- how fits ended ---

    def end(self, fit: Fit, status: str, reason: str = "", facts: Any = None) -> None:
        """Record how a fit ended; a trial's search gets the validation value in ``facts``."""
        self.status[fit.name] = status
        if reason:
            self.reasons[fit.name] = reason
        if fit.trial is not None:
            search = self.searches[fit.row]
            best_valid = facts.get("best_valid") if status == DONE else None
            search.tell(fit.trial, (best_valid or {}).get(search.metric))

    def take_finished(self, restore: bool = True) -> None:
        """Record finished runs, also of kept studies; others count as failed."""
        while job := self.next_job(restore=restore):
            self.end(job.fit, FAILED, _UNTRAINED)
        self.trains = False

    def explain_unmade(self) -> dict[str, str]:
        """Return name -> reason of the fits that failed without a run; empty for a report."""
        if not self.trains:
            return {}
        return {name: text for name, text in self.reasons.items() if name not in self.digests}

    def find_metric(self, row: str) -> str:
        """Return the validation metric of a row: that of its search, else the study's first."""
        return self.searches[row].metric if row in self.searches else self.plan.metrics[0]

    def describe(self, fit: Fit) -> dict[str, Any]:
        """Return the facts of a fit that are known before it is trained, by name."""
        facts = {"row": fit.row, "seed": fit.seed, "stage": fit.stage, "trial": fit.trial}
        if search := self.searches.get(fit.row):
            trial = search.find_best() if fit.trial is None else fit.trial
            facts["searched"] = {} if trial is None else search.points[trial]
        return facts


class RowSearch:
    """The trials of a row, which have no test interactions and are compared by validation.

    Attributes:
        num_seeds: number of seeds of every trial.
        metric: validation metric of early stopping, by which trials are compared.
        mode: max or min, whichever is better.
        points: options of each trial.
        values: trial -> best validation value of each seed that has ended, None if it failed.

    Raises:
        UsageError: for options that the row's model does not take, or that are given and searched.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        """Read the metric and the grid from which the options of trials are taken."""
        grid = plan.rows[name].grid
        assert grid is not None
        for path, layer in ((("base",), plan.base), (("rows", name), plan.rows[name])):
            for option in grid.keys() & layer.options.keys():
                raise plan.source.error(
                    (*path, option),
                    f"{name}: {option} is given here, and its search tries it as well; take it out "
                    "of one (`search: false` for a configuration that is not searched)",
                )
        config = make_row_config(plan.make_first_options(name))
        self.num_seeds = len(plan.trial_seeds)
        self.metric = str(config["valid_metric"]).lower()
        self.mode = "max" if config["valid_metric_bigger"] else "min"
        self.points = list_points(grid)
        self.values: dict[int, list[float | None]] = {}

    def tell(self, trial: int, value: float | None) -> None:
        """Record the best validation value of a trial with one of its seeds; None if it failed."""
        self.values.setdefault(trial, []).append(value)

    def find_best(self) -> int | None:
        """Return the trial with the best mean of all its seeds, the first of equals; or None."""
        means = {}
        for trial, values in sorted(self.values.items()):
            mean = average_seeds(values, self.num_seeds)
            if mean is not None:
                means[trial] = mean
        select_best = max if self.mode == "max" else min
        return select_best(means, key=means.__getitem__, default=None)


def average_seeds(values: Sequence[float | None], num_seeds: int) -> float | None:
    """Return the mean validation value of a trial over its seeds; None unless each has a value."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / num_seeds if len(known) == num_seeds else None
