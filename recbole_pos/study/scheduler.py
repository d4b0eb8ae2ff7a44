"""The fits of a study that are left to train, each after the fits it depends on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.study.configs import Datasets, attached, row_config, run_digest
from recbole_pos.study.expand import Fit, list_fits
from recbole_pos.study.packed import PackedStudy
from recbole_pos.study.plan import Plan
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.study.spaces import RowSearch
from recbole_pos.study.study_folder import KNOWN_FROM, StudyFolder

_UNTRAINED = "not trained"  # reason of a fit that no call has tried to train
_FROM_OTHERS = ("attach", "retest")  # stages that start from the runs of another row
CONTINUED, NEW, OPEN = "continued", "new", "open"  # states of a fit, beside done


@dataclass(frozen=True)
class Job:
    """A fit that can be trained now, and its run.

    Attributes:
        fit: fit of the plan.
        config: configuration of the run.
        digest: digest of the run.
        begin: digest of a trained run whose weights are only tested; None to train.
    """

    fit: Fit
    config: PosConfig
    digest: str
    begin: str | None = None


class Scheduler:
    """Decides which fit of a plan is trained next, and records how fits ended.

    Args:
        plan: plan of the study.
        folder: folder of the study.
        rows: names of rows to train, with those they are attached to; all if empty.
        packed: packed studies, whose runs need no training.
    """

    def __init__(
        self,
        plan: Plan,
        folder: StudyFolder,
        rows: tuple[str, ...] = (),
        packed: Sequence[PackedStudy] = (),
    ) -> None:
        self.plan, self.folder, self.packed = plan, folder, packed
        for row in rows:
            plan.source.require_choice(("rows",), row, plan.rows)
        wanted = {row for name in rows or plan.rows for row in _needed(plan, name)}
        self.rows = [row for row in plan.rows if row in wanted]
        self.fits = [fit for fit in list_fits(plan) if fit.row in wanted]
        self.waiting = list(self.fits)
        self.trials = {(fit.row, fit.trial, fit.seed): fit.name for fit in self.fits}
        self.status: dict[str, str] = {}  # name of a fit -> done or failed
        self.reasons: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.configs: dict[str, PosConfig] = {}  # by digest
        self.tried = True  # whether this call trains, and does not only report
        self.datasets = Datasets()
        self.searches = {
            name: RowSearch(plan, plan.rows[name], folder)
            for name in wanted
            if plan.rows[name].search
        }

    def ready(self, draw: bool = True) -> Job | None:
        """Return the next fit that can be trained; None if none can until others have ended.

        Fits that an earlier call has trained, or that cannot be trained, are recorded as ended.

        Args:
            draw: whether searches may sample new trials.
        """
        for fit in list(self.waiting):
            if any(name not in self.status for name in fit.after):
                continue
            self.waiting.remove(fit)
            if not draw and not self._is_drawn(fit):
                self.end(fit, FAILED, _UNTRAINED)
                continue
            try:
                job = self._job(fit)
                if job is None:  # a fit that it depends on failed
                    continue
                facts = self._find_finished(job, take=True)
            except UsageError as error:
                self.end(fit, FAILED, str(error))
                continue
            self._note(job)
            if facts.get("status") == DONE:  # a run that failed is tried again
                self.end(fit, DONE, facts=facts)
                continue
            if reason := self._explain_no_weights(fit):
                del self.digests[fit.name]  # it has no run for the tables to show
                self.end(fit, FAILED, reason)
                continue
            return job
        return None

    def take(self) -> None:
        """Record finished runs, also of packed studies, for a report; others count as failed."""
        while job := self.ready(draw=False):
            self.end(job.fit, FAILED, _UNTRAINED)
        self.tried = False

    def unmade(self) -> list[tuple[str, str]]:
        """Return names and reasons of fits that failed before their run had a folder."""
        if not self.tried:
            return []
        return [(name, why) for name, why in self.reasons.items() if name not in self.digests]

    def left(self) -> dict[str, str]:
        """Return the state of every fit for a preview; nothing is written.

        Returns:
            Name of a fit -> ``done``, ``continued`` (from its checkpoint), ``new``, or ``open``
            (its run depends on a search that has not ended).
        """
        states: dict[str, str] = {}
        for fit in self.fits:
            states[fit.name] = self._left(fit, states)
        return states

    def require_packed(self) -> None:
        """Validate the runs of packed studies that this study would take, before it takes any.

        Raises:
            UsageError: naming file and field of what is wrong.
        """
        # a copy looks at every run and raises what is wrong, while this one stays as it is
        rehearsal = Scheduler(self.plan, self.folder, tuple(self.rows), self.packed)
        rehearsal.datasets = self.datasets
        rehearsal.left()

    def _left(self, fit: Fit, others: Mapping[str, str]) -> str:
        """Return the state of a fit, as of :meth:`left`, from the states of the fits before it."""
        if any(others[name] != DONE for name in fit.after):
            return NEW if fit.stage in _FROM_OTHERS else OPEN
        if not self._is_drawn(fit):
            return NEW
        try:
            job = self._job(fit)
        except UsageError:  # reported when it is its turn
            return NEW
        if job is None:
            return OPEN
        self._note(job)
        facts = self._find_finished(job, take=False)
        if facts.get("status") == DONE:
            self.end(fit, DONE, facts=facts)
            return DONE
        if self.folder.is_begun(job.digest):
            return CONTINUED
        return DONE if fit.repeats and job.begin else NEW

    def _note(self, job: Job) -> None:
        """Remember the run of a fit."""
        self.digests[job.fit.name] = job.digest
        self.configs[job.digest] = job.config

    def _find_finished(self, job: Job, take: bool) -> dict[str, Any]:
        """Return the facts of a run in the study's folder or a packed study; empty if none has it.

        Args:
            job: job of the run.
            take: whether a run of a packed study is copied into the folder, or only validated.
        """
        facts = self.folder.fit(job.digest) or {}
        holders = [packed for packed in self.packed if job.digest in packed]
        for packed in holders:
            packed.used.add(job.digest)
        if facts.get("status") == DONE or not holders:
            return facts
        if not take:
            holders[0].ranks(job.digest, job.config, self.datasets.prepare(job.config))
        else:
            if job.fit.trial is not None:
                self.searches[job.fit.row].keep()
            dataset = self.datasets.prepare(job.config)
            holders[0].restore(job.digest, self.folder, job.config, dataset)
        return holders[0].fit(job.digest)

    def _explain_no_weights(self, fit: Fit) -> str:
        """Return why a fit cannot start from weights of another; empty if it can or need not."""
        if fit.stage not in _FROM_OTHERS:
            return ""
        source = self.digests[fit.after[0]]
        taken_from = (self.folder.fit(source) or {}).get(KNOWN_FROM)
        if not taken_from:
            return ""
        return (
            f"it starts from the weights of {fit.after[0]}, and {taken_from} has none; to train "
            f"that again, delete {self.folder.run(source).path} and leave --known out"
        )

    def _is_drawn(self, fit: Fit) -> bool:
        """Return whether the options of a fit are known without sampling any."""
        return (
            fit.trial is None
            or self.searches[fit.row].known(fit.trial)
            or self._drawn_elsewhere(fit) is not None
        )

    def _drawn_elsewhere(self, fit: Fit) -> dict[str, Any] | None:
        """Return the options of a trial in a packed study with the same search and the trial's run;
        None if no packed study has both."""
        search = self.searches[fit.row]
        if fit.trial is None or not search.space or search.known(fit.trial):
            return None
        for packed in self.packed:
            drawn = packed.drawn(fit.row, search.space, fit.trial)
            if drawn is not None:
                search.require_drawable(drawn, f"{packed.path} is damaged: searches.json")
                config = row_config(fit.options, search.options(drawn))
                if run_digest(config, self.datasets.prepare(config).identity, True) in packed:
                    return drawn
        return None

    def end(self, fit: Fit, status: str, reason: str = "", facts: Any = None) -> None:
        """Record how a fit ended, and tell its search the score (None if it failed).

        Args:
            fit: the fit.
            status: ``done`` or ``failed``.
            reason: why it failed.
            known: facts of its run, with the validation of its best epoch.
        """
        self.status[fit.name] = status
        if reason:
            self.reasons[fit.name] = reason
        if fit.trial is not None:
            score = _score(facts, self.searches[fit.row].metric) if status == DONE else None
            self.searches[fit.row].tell(fit.trial, score)

    def chosen(self) -> dict[str, int | None]:
        """Return the chosen trial of each searched row; None while trials are left."""
        unfinished = {
            fit.row
            for fit in self.fits
            if fit.trial is not None
            if fit.name not in self.status or self.reasons.get(fit.name) == _UNTRAINED
        }
        return {
            row: None if row in unfinished else search.best()
            for row, search in self.searches.items()
        }

    def _job(self, fit: Fit) -> Job | None:
        """Return a fit with its run, after the fits it depends on have ended.

        Returns:
            The job; None, with the fit recorded as failed, if those fits leave nothing to train.

        Raises:
            UsageError: for a wrong configuration.
        """
        failed = [name for name in fit.after if self.status[name] == FAILED]
        if fit.stage in _FROM_OTHERS:
            return self._attached(fit, failed)
        row = self.plan.rows[fit.row]
        searched: dict[str, Any] = {}
        begin = None
        if row.search:
            search = self.searches[fit.row]
            if fit.trial is not None:
                searched = search.ask(fit.trial, self._drawn_elsewhere(fit))
            else:
                if any(self.reasons.get(name) == _UNTRAINED for name in fit.after):
                    self.end(fit, FAILED, _UNTRAINED)  # others may be better
                    return None
                best = search.best()
                if best is None:
                    first = self.reasons.get(fit.after[0], "no trial has a validation value")
                    self.end(fit, FAILED, f"all trials failed; the first one: {first}")
                    return None
                searched = search.asked[best]
                chosen_trial = self.trials.get((fit.row, best, fit.seed))
                has_weights = chosen_trial is not None and self.folder.has_weights(
                    self.digests[chosen_trial]
                )
                begin = chosen_trial if has_weights else None
        config = row_config(fit.options, searched)
        identity = self.datasets.prepare(config).identity
        digest = run_digest(config, identity, fit.stage == "trial")
        return Job(fit, config, digest, self.digests[begin] if begin else None)

    def _attached(self, fit: Fit, failed: list[str]) -> Job | None:
        """Return the job of a fit that starts from weights of another; None if that failed."""
        if failed:
            self.end(fit, FAILED, f"{failed[0]} failed: {self.reasons.get(failed[0], '')}")
            return None
        source = self.digests[fit.after[0]]
        options = self.configs[source].plain
        schemes = fit.options["attach"]
        changes = {key: value for key, value in fit.options.items() if key != "attach"}
        if schemes:
            before = row_config(options)
            changes |= {
                "position": attached(before.plain["position"], schemes),
                "init_from": str(self.folder.run(source).path.resolve()),
                "train_only": list(schemes),
            }
        config = row_config(options, changes)
        digest = run_digest(config, self.datasets.prepare(config).identity, source)
        return Job(fit, config, digest, None if schemes else source)

    def searched(self, fit: Fit) -> dict[str, Any]:
        """Return the options of a fit that its search chose; empty without a search."""
        if fit.row not in self.searches:
            return {}
        search = self.searches[fit.row]
        trial = fit.trial if fit.stage == "trial" else search.best()
        return {} if trial is None else search.asked.get(trial, {})

    def pending(self) -> int:
        """Return the number of fits that have not ended."""
        return sum(fit.name not in self.status for fit in self.fits)


def _needed(plan: Plan, row: str) -> list[str]:
    """Return the names of a row and of the rows it is attached to, directly or not."""
    names = [row]
    while attach := plan.rows[names[-1]].attach:
        names.append(attach.to)
    return names


def _score(facts: Mapping[str, Any] | None, metric: str) -> float | None:
    """Return the best validation value of a run from its facts; None if it has no finite one."""
    value = ((facts or {}).get("best_valid") or {}).get(metric)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
