"""Which training run of a study is next, each after the runs it depends on.

A fit is one training run that the plan of a study asks for. :meth:`Scheduler.next_job` returns a
fit to train, with its configuration; the caller trains it and reports how it ended by
:meth:`Scheduler.end`. Runs that are finished already, in the folder of the study or in a packed
study (``--known``), end without training.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.identity import count_dataset
from recbole_pos.data.recbole_view import make_views
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.configs import digest_data_options, digest_run, make_row_config
from recbole_pos.study.plan import Fit, Plan, list_fits, list_points
from recbole_pos.study.study_folder import PackedStudy, StudyFolder

UNTRAINED = "not trained"  # reason of a fit that has no run, where nothing is trained


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
        # Three mappings from the name of a fit: how it ended (done or failed); why it failed; and
        # the digest of its configuration, which is the name of its run folder.
        self.status: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        # What has been made so far: configurations by digest, and datasets by their options
        self.configs: dict[str, PosConfig] = {}
        self.datasets: dict[str, Any] = {}

    # --- the next job ---

    def next_job(self, running: Collection[str] = ()) -> Job | None:
        """Return the next training run that can start; None if none can until others have ended.

        A fit is one training run of the plan. Its job has its complete configuration, and the
        digest: a hash, which is the name of its folder. Of the fits that wait, in order, each

        - keeps waiting if a fit that it depends on (``fit.after``) has not ended, or if a fit with
          the same digest is in training;
        - is recorded as failed if it cannot be trained;
        - is recorded as done if an earlier call has trained it;
        - is returned otherwise, also if an earlier call has failed to train it.

        Args:
            running: digests of the runs in training.
        """
        for fit in list(self.waiting):
            if any(name not in self.status for name in fit.after):
                continue

            # A wrong option fails only this fit, since the other rows can still be trained. The fit
            # gets no digest, since there will be no folder.
            try:
                job = self._make_job(fit)
            except UsageError as error:
                self.waiting.remove(fit)
                self.end(fit, FAILED, str(error))
                continue
            if job.digest in running:
                continue

            self.waiting.remove(fit)
            self.digests[fit.name] = job.digest
            self.configs[job.digest] = job.config
            facts = self._find_facts(job)  # what an earlier call has left in the folder, if any
            if facts.get("status") != DONE:
                return job
            self.end(fit, DONE, facts=facts)
        return None

    def _explain_failure(self, fit: Fit) -> str:
        """Return why a fit (training run) cannot be trained, if a fit that it depends on failed.

        ``fit.after`` has the names of the fits that it depends on, all of which have ended. They
        are one of three kinds:

        - none: the fit can be trained;
        - one fit, its parent, from whose weights it starts: it cannot be trained if that failed;
        - the trials of a search, of which the best options are taken: it cannot be trained if no
          trial has a validation value from all of its seeds.

        Args:
            fit: a training run of the plan.

        Returns:
            The reason in words; empty if the fit can be trained.
        """
        if not fit.after:
            return ""

        # ``self.reasons``: name of a failed fit -> why. A report trains nothing, and counts a fit
        # without a run as failed for the reason UNTRAINED. This fit then has no run either.
        reasons = [self.reasons[name] for name in fit.after if self.status[name] == FAILED]
        if UNTRAINED in reasons:
            return UNTRAINED

        if fit.has_parent:
            (parent,) = fit.after
            return f"{parent} failed: {reasons[0]}" if reasons else ""

        # ``self.searches``: row (configuration) -> its search, with the values of its trials.
        if self.searches[fit.row].find_best() is not None:
            return ""
        first_trial, *_ = fit.after
        reason = self.reasons.get(first_trial, "no trial has a validation value")
        return f"all trials failed; the first one: {reason}"

    def _find_facts(self, job: Job) -> dict[str, Any]:
        """Return what is known of a run: its status and, if it is finished, its results.

        The study's folder is searched first, then the packed studies (``--known``). A run that is
        found in a packed study is copied into the study's folder.

        Args:
            job: the run; its digest (hash) is the name of its folder.

        Returns:
            The facts of the run by name, as in ``fit.json`` and ``result.json``; empty for a new
            run.
        """
        facts = self.folder.read_fit(job.digest)
        if facts.get("status") == DONE:
            return facts
        for packed in self.packed:
            if job.digest in packed.fits:
                dataset = self.prepare(job.config)
                packed.restore(job.digest, self.folder, job.config, dataset)
                # In the packed study it may belong to another row, without a search.
                self.folder.write_fit(job.digest, self.describe(job.fit))
                return packed.fits[job.digest]
        return facts

    def _find_trial(self, fit: Fit) -> int | None:
        """Return which trial of a search tried the options that a fit (training run) is made with.

        Returns:
            The number of the trial. A fit that is a trial has its own number; any other fit of a
            searched row gets the best trial. None if no trial is the best (yet), and for a row that
            is not searched.
        """
        if fit.trial is not None:
            return fit.trial
        search = self.searches.get(fit.row)
        return search.find_best() if search else None

    def _make_job(self, fit: Fit) -> Job:
        """Return the job of a fit (a training run of the plan): what is trained, and its folder.

        Args:
            fit: the training run. All fits that it depends on have ended. It is a trial of a search
                (``fit.trial`` is its number), a final fit of a row (a configuration), or one that
                starts from the weights of another fit, its parent.

        Returns:
            The fit with its complete configuration and the digest (hash) that names its run folder.
            If nothing has to be trained, also the digest of the run whose weights are tested.

        Raises:
            UsageError: if the fit cannot be trained, since those that it depends on have failed, or
                since its options are wrong.
        """
        if reason := self._explain_failure(fit):
            raise UsageError(reason)
        if fit.has_parent:
            return self._make_child_job(fit)

        # In a row that is searched, a trial adds its own point (the values of the searched options
        # that it tries), and a final fit adds that of the best trial.
        is_trial = fit.trial is not None
        options, added_trial = dict(fit.options), self._find_trial(fit)
        if added_trial is not None:
            options |= self.searches[fit.row].points[added_trial]

        # The best trial may have been trained with the seed of this final fit. Then its weights
        # only need to be tested, unless they have been deleted.
        tested_run = None
        if added_trial is not None and not is_trial:
            tested_run = self._find_weights(fit.row, added_trial, fit.seed)

        # The configuration. Some defaults depend on the numbers of users, items and interactions.
        config = make_row_config(options)
        dataset = self.prepare(config)
        config.adapt(count_dataset(dataset))

        # A trial is not tested, so its digest differs from that of a final fit with equal options.
        digest = digest_run(config, dataset.identity, is_trial)
        return Job(fit, config, digest, tested_run)

    def _find_weights(self, row: str, trial: int, seed: int) -> str | None:
        """Find the weights that a trial of a search was trained to with one of the seeds.

        Args:
            row: name of the row (configuration) that is searched.
            trial: number of the trial.
            seed: the seed.

        Returns:
            The digest (hash) that names the folder of the run; None if the trial has not been
            trained with this seed, or its weights are gone.
        """
        for fit in self.fits:
            is_asked = (fit.row, fit.trial, fit.seed) == (row, trial, seed)
            if is_asked and self.status[fit.name] == DONE:
                # A run that was taken from a packed study has results but no weights.
                digest = self.digests[fit.name]
                return digest if self.folder.run(digest).checkpoint.is_file() else None
        return None

    def _make_child_job(self, fit: Fit) -> Job:
        """Return the job of a training run that starts from the weights of another, its parent.

        If its row (a configuration of the study) attaches position schemes, they are added to the
        model of the parent, and only their parameters are trained. Otherwise nothing is trained:
        the parent's weights are tested again, with the options of the fit.

        Args:
            fit: a training run of the plan. ``fit.after`` has one name, that of its parent, which
                has been trained.
        """
        (parent,) = fit.after
        parent_run = self.digests[parent]  # the hash that names the folder of the parent
        # the options of the parent; where the fit has the same option, the fit's value is taken
        options = {**self.configs[parent_run].plain, **fit.options}
        schemes = list(self.plan.rows[fit.row].schemes)
        if schemes:
            options["init_from"] = str(self.folder.run(parent_run).path.resolve())
            options["train_only"] = schemes
        config = make_row_config(options)
        digest = digest_run(config, self.prepare(config).identity, parent_run)
        return Job(fit, config, digest, tested_run=None if schemes else parent_run)

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
            # Note its validation value. A trial has a fit, and so a value, for each of its seeds;
            # the value of a failed one is None, with which the trial is not chosen.
            search = self.searches[fit.row]
            best_valid = facts.get("best_valid") if status == DONE else None  # metric -> value
            search.values[fit.trial].append((best_valid or {}).get(search.metric))

    def record_finished(self) -> None:
        """Record how far a study has come, without training anything.

        A fit is a training run that the plan of the study asks for. Each fit with a finished run is
        recorded as done, and each other one as failed, for the reason "not trained" (UNTRAINED).

        ``next_job`` looks through the fits. It records those with a finished run itself, and
        returns the first one that has to be trained. Here that one is recorded as failed instead,
        and ``next_job`` is called again, until it returns None.
        """
        while job := self.next_job():
            self.end(job.fit, FAILED, UNTRAINED)

    def find_unmade(self) -> dict[str, str]:
        """Return why fits (training runs of the plan) failed that have no folder.

        Their options are wrong, for example. Fits that only have not been trained are left out.

        Returns:
            Name of a fit, such as ``SASRec, seed 2020`` -> the reason in words.
        """
        # ``self.reasons`` has all failed fits. A fit gets a digest (hash), the name of its folder,
        # when its training starts, so those without one have no folder.
        return {
            name: reason
            for name, reason in self.reasons.items()
            if name not in self.digests and reason != UNTRAINED
        }

    def find_metric(self, row: str) -> str:
        """Return the validation metric of a row: of its search, else the study's first metric."""
        return self.searches[row].metric if row in self.searches else self.plan.metrics[0]

    def describe(self, fit: Fit) -> dict[str, Any]:
        """Return what is known of a fit (a training run of the plan) before it is trained.

        Args:
            fit: the training run.

        Returns:
            Its row (the configuration), seed, stage and trial (a number, or None). If the row is
            searched, also ``searched``: the options that the search has found for this fit.
        """
        facts = {"row": fit.row, "seed": fit.seed, "stage": fit.stage, "trial": fit.trial}
        if fit.row in self.searches:
            # A trial has options of its own. Another fit takes those of the best trial, which is
            # None while the trials have not ended.
            trial = self._find_trial(fit)
            facts["searched"] = {} if trial is None else self.searches[fit.row].points[trial]
        return facts


class RowSearch:
    """The trials of a searched row (a configuration of a study), one for each point of its grid.

    The grid has a list of values for each searched option; a point is one combination of them.
    Trials have no test interactions. They are compared by their best validation value.

    Attributes:
        num_seeds: number of seeds that every trial is trained with.
        metric: validation metric of early stopping, by which trials are compared.
        select: the function ``max`` or ``min``, whichever value of the metric is better.
        points: options of each trial, one point of the grid each.
        values: number of a trial -> its best validation value for each seed that has ended, None
            for a seed that failed.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        """List the trials of the row's search. None of them has a result yet.

        Args:
            plan: the study.
            name: name of the row (a configuration) that has a grid: option -> values to try.

        Raises:
            UsageError: for an option that the row's model does not take.
        """
        # The metric by which trials are compared, such as "ndcg@10". All trials have the same one,
        # so it is read from the options of the first. ``valid_metric_bigger`` is RecBole's option
        # that says whether a higher value is better.
        config = make_row_config(plan.make_first_options(name))
        self.metric = str(config["valid_metric"]).lower()
        self.select = max if config["valid_metric_bigger"] else min

        # Options of trial i: points[i], one combination of the values in the grid. Each trial is
        # trained with so many seeds.
        self.points = list_points(plan.rows[name].grid or {})
        self.num_seeds = len(plan.trial_seeds)

        # Number of a trial -> its best validation values, one for each seed that has ended (None if
        # its training failed). ``Scheduler.end`` fills it.
        self.values: dict[int, list[float | None]] = defaultdict(list)

    def find_best(self) -> int | None:
        """Return the number of the best trial, by the mean of its validation values over all seeds.

        Trials with a failed or missing seed do not count. Of equal trials the first is returned,
        and None if no trial counts.
        """
        means = {}
        for trial, values in sorted(self.values.items()):
            known = [value for value in values if value is not None]
            if len(known) == self.num_seeds:
                means[trial] = statistics.fmean(known)
        # ``select`` is the function max if a higher value of the metric is better, and else min.
        return self.select(means, key=lambda trial: means[trial], default=None)
