"""Which training run of a study is next, each after the runs it depends on.

A fit is one training run that the plan of a study asks for. :meth:`Scheduler.next_job` returns a
fit to train, with its configuration; the caller trains it and reports how it ended by
:meth:`Scheduler.end`. Runs that are finished already, in the folder of the study or in a packed
study (``--known``), end without training.
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
from recbole_pos.study.study_folder import PackedStudy, StudyFolder

_UNTRAINED = "not trained"  # reason of a fit that no call has tried to train


@dataclass(frozen=True)
class Job:
    """A fit (a training run of the plan) that can be trained now.

    Attributes:
        fit: the training run of the plan.
        config: its configuration.
        digest: hash of options, data and code, which is the name of the run's folder.
        tested_run: digest of a trained run. If given, its weights are tested and nothing is
            trained.
    """

    fit: Fit
    config: PosConfig
    digest: str
    tested_run: str | None = None


class Scheduler:
    """Decides which fit (training run of a plan) is trained next, and records how fits ended.

    Attributes:
        plan: the study: its rows (configurations to compare), seeds and tables.
        folder: folder of the study.
        packed: packed studies (``--known``), whose runs need no training.
        rows: names of the rows that are trained.
        fits: all fits of these rows, each after those it depends on.
        waiting: fits that have not ended and are not in training.
        status: name of a fit that has ended -> ``done`` or ``failed``.
        reasons: name of a fit that has failed -> why.
        digests: name of a fit -> digest of its run (the hash that names the run's folder).
        configs: digest of a run -> its configuration.
        datasets: hash of the data options -> dataset, of those that have been read.
        trains: whether fits are trained; False for a report, which only reads finished runs.
        searches: name of a searched row -> its trials.
    """

    def __init__(
        self,
        plan: Plan,
        folder: StudyFolder,
        rows: Sequence[str] = (),
        packed: Sequence[PackedStudy] = (),
    ) -> None:
        """List the training runs (fits) that a study needs. Nothing is read or trained yet.

        A row is a configuration of the study, which is trained once for each seed. A row may start
        from the trained weights of another row, whose runs are then needed as well.

        Args:
            plan: the study.
            folder: folder of the study.
            rows: names of the rows to train; all if empty.
            packed: packed studies (``--known``): results of runs that others have trained, so that
                they need no training here.

        Raises:
            UsageError: for the name of a row that the plan does not have.
        """
        self.plan, self.folder, self.packed = plan, folder, packed
        for name in rows:  # the error of require_choice names the line of ``rows`` in the file
            plan.source.require_choice(("rows",), name, plan.rows)

        # The ancestors of a row are itself, the row whose weights it starts from, and so on.
        needed_rows: set[str] = set()
        for name in rows or plan.rows:
            needed_rows.update(plan.list_ancestors(name))
        self.rows = [name for name in plan.rows if name in needed_rows]
        self.fits = [fit for fit in list_fits(plan) if fit.row in needed_rows]
        # A search has a trial for each combination of the options that a row tries.
        self.searches = {name: RowSearch(plan, name) for name in self.rows if plan.rows[name].grid}

        # At first all fits wait, and nothing is known about them.
        self.waiting = list(self.fits)
        # Name of a fit -> how it ended (done or failed), why it failed, and its run's folder
        self.status: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        # What has been made so far: configurations by digest, and datasets by their options
        self.configs: dict[str, PosConfig] = {}
        self.datasets: dict[str, Any] = {}
        self.trains = True  # False for a report

    # --- the next job ---

    def next_job(self, running: Collection[str] = (), restore: bool = True) -> Job | None:
        """Return the next training run that can start; None if none can until others have ended.

        A fit is one training run of the plan. It can start when all fits that it depends on
        (``fit.after``) have ended: the trials of its search, or the fit whose weights it starts
        from. Its job is the fit with its complete configuration and its digest.

        Until one is found that has to be trained, fits are recorded as ended: as done if an earlier
        call has trained them, as failed if they cannot be trained.

        Args:
            running: digests (hashes that name run folders) of the runs in training. Two fits can
                have the same run; the second then waits until the run has ended.
            restore: whether finished runs of packed studies (``--known``) are copied into the
                study's folder.
        """
        for fit in list(self.waiting):
            if any(name not in self.status for name in fit.after):
                continue  # a fit that it depends on has not ended

            # Make its configuration, unless it cannot be trained because of the fits it depends on;
            # _explain_failure returns an empty reason if it can. A wrong option fails only this
            # fit, since the other rows can still be trained.
            job, reason = None, self._explain_failure(fit)
            if not reason:
                try:
                    job = self._make_job(fit)
                except UsageError as error:
                    reason = str(error)
            if job is None:
                self.waiting.remove(fit)
                self.end(fit, FAILED, reason)  # no digest is noted, since there is no run to show
                continue
            if job.digest in running:
                continue  # it has the same run as a fit in training, so wait for that one

            self.waiting.remove(fit)
            self.digests[fit.name] = job.digest
            self.configs[job.digest] = job.config
            # Return a fit without a finished run, also if an earlier call has failed to train it.
            # Record one with a finished run as done.
            facts = self._find_facts(job, restore)
            if facts.get("status") != DONE:
                return job
            self.end(fit, DONE, facts=facts)
        return None

    def _explain_failure(self, fit: Fit) -> str:
        """Return why a fit cannot be trained, because of the fits that it depends on.

        A fit with a parent depends on the run whose weights it starts from. The final fit of a row
        (a configuration) that is searched depends on all trials, the combinations of options that
        the search tries. A report (``--report``) trains nothing, and records missing runs as failed
        for the reason ``_UNTRAINED``.

        Args:
            fit: a training run of the plan. All fits that it depends on (``fit.after``) have ended.

        Returns:
            The reason in words; empty if the fit can be trained.
        """
        failed = [name for name in fit.after if self.status[name] == FAILED]

        # It starts from the weights of a run that failed, or that was not even tried.
        if fit.has_parent and failed:
            (parent,) = fit.after
            reason = self.reasons[parent]
            return reason if reason == _UNTRAINED else f"{parent} failed: {reason}"

        # A trial has not been trained, so that the best trial is not known.
        if any(self.reasons[name] == _UNTRAINED for name in failed):
            return _UNTRAINED

        # It needs the best trial of a search, and no trial has a validation value. If only some
        # trials failed, the best of the others is taken.
        if fit.after and not fit.has_parent and self.searches[fit.row].find_best() is None:
            first_reason = self.reasons.get(fit.after[0], "no trial has a validation value")
            return f"all trials failed; the first one: {first_reason}"
        return ""

    def _find_facts(self, job: Job, restore: bool) -> dict[str, Any]:
        """Return what is known of a run: its status and, if it is finished, its results.

        The study's folder is searched first, then the packed studies (``--known``).

        Args:
            job: the run; its digest (hash) is the name of its folder.
            restore: whether a run found in a packed study is copied into the study's folder.

        Returns:
            The facts of the run by name, as in ``fit.json`` and ``result.json``; empty for a new
            run.
        """
        facts = self.folder.read_fit(job.digest)
        # Packed studies that have the run, results of runs that others have trained.
        packed_studies = [packed for packed in self.packed if job.digest in packed.fits]
        for packed in packed_studies:
            packed.used.add(job.digest)  # to report at the end how many of its runs were of use
        if facts.get("status") == DONE or not packed_studies:
            return facts
        if restore:  # the first packed study that has the run is as good as any other
            dataset = self.prepare(job.config)
            packed_studies[0].restore(job.digest, self.folder, job.config, dataset)
        return packed_studies[0].fits[job.digest]

    def _make_job(self, fit: Fit) -> Job:
        """Return a fit (a training run of the plan) with its configuration and the name of its run.

        A fit of a searched row (a configuration) is a trial, with one combination of the searched
        options, or a final fit, with those of the best trial. If the best trial has been trained
        with the seed of the final fit, its weights only need to be tested.

        Args:
            fit: the training run. All fits that it depends on have ended, and have not failed.

        Returns:
            The fit with its complete configuration and the digest (hash) that names its run folder.
            If nothing has to be trained, also the digest of the run whose weights are tested.
        """
        if fit.has_parent:
            return self._make_child_job(fit)
        search, is_trial = self.searches.get(fit.row), fit.trial is not None
        tested_run: str | None = None

        # Without a search, with the options of a trial, or with those of the best trial.
        if search is None:
            config = make_row_config(fit.options)
        elif fit.trial is not None:
            config = make_row_config(fit.options, search.points[fit.trial])
        else:
            best_trial = search.find_best()
            assert best_trial is not None  # else _explain_failure has a reason
            config = make_row_config(fit.options, search.points[best_trial])
            # Look for the fit of the best trial with this seed. Its weights may have been deleted.
            for other in self.fits:
                if (other.row, other.trial, other.seed) == (fit.row, best_trial, fit.seed):
                    digest = self.digests.get(other.name, "")
                    tested_run = digest if self.folder.has_weights(digest) else None

        # A trial is not tested, so its digest differs from that of a final fit with equal options.
        # For very many items adapt_loss replaces the loss CE by SCE, before the digest is made.
        dataset = self.prepare(config)
        config.adapt_loss(dataset.item_num - 1)  # without the item of padding
        digest = digest_run(config, dataset.identity, is_trial)
        return Job(fit, config, digest, tested_run)

    def _make_child_job(self, fit: Fit) -> Job:
        """Return the job of a fit that starts from the weights of its parent, a run of another row.

        If the fit attaches position schemes, they are added to the model of the parent, and only
        their parameters are trained. Otherwise the fit is a retest: the parent's weights are tested
        again with other options.

        Args:
            fit: a training run of the plan, whose parent has been trained.
        """
        (parent,) = fit.after
        parent_run = self.digests[parent]  # the hash that names its folder
        parent_options = self.configs[parent_run].plain
        schemes = fit.options["attach"]  # empty for a retest
        options = {key: value for key, value in fit.options.items() if key != "attach"}
        if schemes:
            # Start from the parent's weights, and train nothing but the new schemes.
            position = make_row_config(parent_options).plain["position"]
            options["position"] = attach_schemes(position, schemes)
            options["init_from"] = str(self.folder.run(parent_run).path.resolve())
            options["train_only"] = list(schemes)
        config = make_row_config(parent_options, options)  # the fit's own options win
        digest = digest_run(config, self.prepare(config).identity, parent_run)
        # With schemes there is something to train; a retest only tests the parent's weights.
        return Job(fit, config, digest, None if schemes else parent_run)

    def prepare(self, config: PosConfig) -> Any:
        """Return the dataset of a configuration, with its split; each dataset is read only once.

        Args:
            config: configuration of a run. Those with equal data options get the same dataset.
        """
        key = digest_data_options(config)  # hash of the options that decide what is read
        if key not in self.datasets:
            dataset = read_dataset(config)
            make_views(dataset)  # refuses data without a training target before any run begins
            self.datasets[key] = dataset
        return self.datasets[key]

    # --- how fits ended ---

    def end(self, fit: Fit, status: str, reason: str = "", facts: Any = None) -> None:
        """Record how a fit (a training run of the plan) ended.

        Args:
            fit: the training run.
            status: ``done`` or ``failed``.
            reason: why it failed; empty if it is done.
            facts: results of a finished run by name, as in ``result.json``. If the fit is a trial
                of a search, its best validation value is noted there.
        """
        self.status[fit.name] = status
        if reason:
            self.reasons[fit.name] = reason
        if fit.trial is not None:
            search = self.searches[fit.row]
            # Metric -> value at the best epoch. A failed trial gives None, and is not chosen.
            best_valid = facts.get("best_valid") if status == DONE else None
            search.values.setdefault(fit.trial, []).append((best_valid or {}).get(search.metric))

    def record_finished(self, restore: bool = True) -> None:
        """Record all finished runs without training any; the other fits count as failed.

        A fit is a run that the plan asks for. ``next_job`` records finished fits itself. It returns
        the next unfinished fit, which is recorded here as untrained.

        Args:
            restore: whether finished runs of packed studies (``--known``) are copied into the
                study's folder.
        """
        while job := self.next_job(restore=restore):
            self.end(job.fit, FAILED, _UNTRAINED)
        self.trains = False

    def explain_failures_without_run(self) -> dict[str, str]:
        """Return the fits (runs of the plan) that failed before they had a folder, with reasons.

        Returns:
            Name of a fit -> reason. Empty for a report, which trains nothing, so that fits without
            a finished run have not really failed.
        """
        if not self.trains:
            return {}
        # Only fits with a folder have a digest, the hash that names it.
        return {name: text for name, text in self.reasons.items() if name not in self.digests}

    def find_metric(self, row: str) -> str:
        """Return the validation metric of a row: of its search, else the study's first metric."""
        return self.searches[row].metric if row in self.searches else self.plan.metrics[0]

    def describe(self, fit: Fit) -> dict[str, Any]:
        """Return what is known of a fit (a training run of the plan) before it is trained.

        Args:
            fit: the training run.

        Returns:
            Its row (the configuration), seed, stage and trial. For a searched row also
            ``searched``: the options that the search tries (a point of its grid), of the trial or,
            for a final fit, of the best trial.
        """
        facts = {"row": fit.row, "seed": fit.seed, "stage": fit.stage, "trial": fit.trial}
        if search := self.searches.get(fit.row):
            trial = search.find_best() if fit.trial is None else fit.trial
            # Empty while the trials have not ended, so that none is the best yet.
            facts["searched"] = {} if trial is None else search.points[trial]
        return facts


class RowSearch:
    """The trials of a searched row (a configuration of a study), one for each point of its grid.

    Trials have no test interactions. They are compared by their best validation value.

    Attributes:
        num_seeds: number of seeds that every trial is trained with.
        metric: validation metric of early stopping, by which trials are compared.
        mode: ``max`` or ``min``, whichever is better.
        points: options of each trial, one point of the grid each.
        values: number of a trial -> its best validation value for each seed that has ended, None
            for a seed that failed.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        """Read the metric of the row's model, and the options of the trials from the row's grid.

        A row is a configuration of the study. Its grid has a list of values for each searched
        option; a point is one combination of them.

        Args:
            plan: the study.
            name: name of the row.

        Raises:
            UsageError: if an option is searched and also given, in the base of the study or in the
                row; or for an option that the row's model does not take.
        """
        grid = plan.rows[name].grid
        assert grid is not None
        # An option that is searched must not be given as well, in the base or in the row. The keys
        # of ``given`` are paths in the study's file, by which the error names the line.
        given = {("base",): plan.base.options, ("rows", name): plan.rows[name].options}
        for path, options in given.items():
            for option in grid.keys() & options.keys():
                raise plan.source.error(
                    (*path, option),
                    f"{name}: {option} is given here, and its search tries it as well; take it out "
                    "of one (`search: false` for a configuration that is not searched)",
                )

        # The configuration of the first trial, whose metric is taken for all. RecBole's
        # valid_metric_bigger tells whether higher values are better.
        config = make_row_config(plan.make_first_options(name))
        self.num_seeds = len(plan.trial_seeds)
        self.metric = str(config["valid_metric"]).lower()
        self.mode = "max" if config["valid_metric_bigger"] else "min"
        self.points = list_points(grid)
        # Number of a trial -> its best validation value for each seed that has ended.
        self.values: dict[int, list[float | None]] = {}

    def find_best(self) -> int | None:
        """Return the number of the best trial, by the mean of its validation values over all seeds.

        Trials with a failed or missing seed do not count. Of equal trials the first is returned,
        and None if no trial counts.
        """
        means = {}
        for trial, values in sorted(self.values.items()):
            mean = average_seeds(values, self.num_seeds)  # None unless every seed has a value
            if mean is not None:
                means[trial] = mean
        select_best = max if self.mode == "max" else min
        return select_best(means, key=means.__getitem__, default=None)


def average_seeds(values: Sequence[float | None], num_seeds: int) -> float | None:
    """Return the mean validation value of a trial over its seeds; None unless each has a value."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / num_seeds if len(known) == num_seeds else None
