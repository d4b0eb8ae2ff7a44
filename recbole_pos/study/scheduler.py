"""What is left to train of a study, and in which order: each fit after what it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.study.configs import Datasets, attached, row_config, run_digest
from recbole_pos.study.expand import Fit, fits
from recbole_pos.study.packed import PackedStudy
from recbole_pos.study.plan import Plan
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.study.spaces import RowSearch
from recbole_pos.study.study_folder import KNOWN_FROM, StudyFolder

_UNTRAINED = "not trained"  # why a fit has no run that no one has tried to make
_FROM_OTHERS = ("attach", "retest")  # stages that start from the runs of another row
CONTINUED, NEW, OPEN = "continued", "new", "open"  # what is left of a fit, beside done


@dataclass(frozen=True)
class Job:
    """A fit that can be trained now.

    Attributes:
        fit: fit of the plan.
        config: configuration of its run.
        digest: digest of its run.
        begin: digest of the run that is only tested; None for one that is trained.
    """

    fit: Fit
    config: PosConfig
    digest: str
    begin: str | None = None


class Scheduler:
    """Fits of a plan: waiting, ended or failed.

    Args:
        plan: plan of the study.
        folder: folder of the study.
        rows: names of rows to train; all if empty.
        packed: runs that need no training.
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
        self.fits = [one for one in fits(plan) if one.row in wanted]
        self.waiting = list(self.fits)
        self.trials = {(one.row, one.trial, one.seed): one.name for one in self.fits}
        self.status: dict[str, str] = {}  # name of a fit -> done or failed
        self.reasons: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.configs: dict[str, PosConfig] = {}  # by digest
        self.tried = True  # until no more than what is finished is taken
        self.datasets = Datasets()
        self.searches = {
            name: RowSearch(plan, plan.rows[name], folder)
            for name in wanted
            if plan.rows[name].search
        }

    def ready(self, draw: bool = True) -> Job | None:
        """Return the next fit that can be trained; None if none can until others have ended.

        What was trained by an earlier call is marked on the way, and so is what cannot be trained.

        Args:
            draw: whether searches may draw what no one has drawn before.
        """
        for one in list(self.waiting):
            if any(name not in self.status for name in one.after):
                continue
            self.waiting.remove(one)
            if not draw and not self._is_drawn(one):
                self.end(one, FAILED, _UNTRAINED)
                continue
            try:
                job = self._job(one)
                if job is None:  # failed with what it needs
                    continue
                known = self._find_finished(job, take=True)
            except UsageError as error:
                self.end(one, FAILED, str(error))
                continue
            self._note(job)
            if known.get("status") == DONE:  # what failed may have been mended meanwhile
                self.end(one, DONE, known=known)
                continue
            if reason := self._weightless(one):
                del self.digests[one.name]  # no run of it could show it in the tables
                self.end(one, FAILED, reason)
                continue
            return job
        return None

    def take(self) -> None:
        """Mark what is finished, and what the packed runs have; all else counts as failed."""
        while job := self.ready(draw=False):
            self.end(job.fit, FAILED, _UNTRAINED)
        self.tried = False

    def unmade(self) -> list[tuple[str, str]]:
        """Runs that failed before they had a folder, with their reasons."""
        if not self.tried:
            return []
        return [(name, why) for name, why in self.reasons.items() if name not in self.digests]

    def left(self) -> dict[str, str]:
        """Return what is left of every fit, if nothing else happens; nothing is written.

        Returns:
            Name of a fit -> ``done``, ``continued`` (from its checkpoint), ``new``, or ``open``:
            which run it is depends on a search that has not ended.
        """
        found: dict[str, str] = {}
        for one in self.fits:
            found[one.name] = self._left(one, found)
        return found

    def require_packed(self) -> None:
        """Validate what packed runs would give this study, before anything of them is taken.

        Raises:
            UsageError: naming file and field of what cannot be right.
        """
        trial = Scheduler(self.plan, self.folder, tuple(self.rows), self.packed)
        trial.datasets = self.datasets
        trial.left()

    def _left(self, one: Fit, others: Mapping[str, str]) -> str:
        if any(others[name] != DONE for name in one.after):
            return NEW if one.stage in _FROM_OTHERS else OPEN
        if not self._is_drawn(one):
            return NEW
        try:
            job = self._job(one)
        except UsageError:  # as it will be reported when its turn comes
            return NEW
        if job is None:
            return OPEN
        self._note(job)
        known = self._find_finished(job, take=False)
        if known.get("status") == DONE:
            self.end(one, DONE, known=known)
            return DONE
        if self.folder.is_begun(job.digest):
            return CONTINUED
        return DONE if one.repeats and job.begin else NEW

    def _note(self, job: Job) -> None:
        self.digests[job.fit.name] = job.digest
        self.configs[job.digest] = job.config

    def _find_finished(self, job: Job, take: bool) -> dict[str, Any]:
        """Return the facts of a run in the study's folder, or in a packed study.

        Args:
            take: whether it is brought from there into the folder.
        """
        known = self.folder.fit(job.digest) or {}
        holders = [packed for packed in self.packed if job.digest in packed]
        for packed in holders:
            packed.used.add(job.digest)
        if known.get("status") == DONE or not holders:
            return known
        if not take:
            holders[0].ranks(job.digest, job.config, self.datasets.of(job.config))
        else:
            if job.fit.trial is not None:
                self.searches[job.fit.row].keep()
            dataset = self.datasets.of(job.config)
            holders[0].restore(job.digest, self.folder, job.config, dataset)
        return holders[0].fit(job.digest)

    def _weightless(self, one: Fit) -> str:
        """Why a fit cannot start from the weights of another one; empty if it can, or need not."""
        if one.stage not in _FROM_OTHERS:
            return ""
        source = self.digests[one.after[0]]
        taken_from = (self.folder.fit(source) or {}).get(KNOWN_FROM)
        if not taken_from:
            return ""
        return (
            f"it starts from the weights of {one.after[0]}, and {taken_from} has none; to train "
            f"that again, delete {self.folder.run(source).path} and leave --known out"
        )

    def _is_drawn(self, one: Fit) -> bool:
        """Return whether the options of a fit are known without drawing any."""
        return (
            one.trial is None
            or self.searches[one.row].known(one.trial)
            or self._drawn_elsewhere(one) is not None
        )

    def _drawn_elsewhere(self, one: Fit) -> dict[str, Any] | None:
        """Return what the same search has drawn for a trial in a packed study that has its run,
        too."""
        search = self.searches[one.row]
        if one.trial is None or not search.space or search.known(one.trial):
            return None
        for packed in self.packed:
            drawn = packed.drawn(one.row, search.space, one.trial)
            if drawn is not None:
                search.require_drawable(drawn, f"{packed.path} is damaged: searches.json")
                config = row_config(one.options, search.options(drawn))
                if run_digest(config, self.datasets.of(config).identity, True) in packed:
                    return drawn
        return None

    def end(self, one: Fit, status: str, reason: str = "", known: Any = None) -> None:
        """Note how a fit ended."""
        self.status[one.name] = status
        if reason:
            self.reasons[one.name] = reason
        if one.trial is not None:
            score = _score(known, self.searches[one.row].metric) if status == DONE else None
            self.searches[one.row].tell(one.trial, score)

    def chosen(self) -> dict[str, int | None]:
        """Row -> the trial that its search chose; None while some are left, which may be better."""
        left = {
            one.row
            for one in self.fits
            if one.trial is not None
            if one.name not in self.status or self.reasons.get(one.name) == _UNTRAINED
        }
        return {
            row: None if row in left else search.best() for row, search in self.searches.items()
        }

    def _job(self, one: Fit) -> Job | None:
        failed = [name for name in one.after if self.status[name] == FAILED]
        if one.stage in _FROM_OTHERS:
            return self._attached(one, failed)
        row = self.plan.rows[one.row]
        more: dict[str, Any] = {}
        begin = None
        if row.search:
            search = self.searches[one.row]
            if one.trial is not None:
                more = search.ask(one.trial, self._drawn_elsewhere(one))
            else:
                if any(self.reasons.get(name) == _UNTRAINED for name in one.after):
                    self.end(one, FAILED, _UNTRAINED)  # others may be better
                    return None
                best = search.best()
                if best is None:
                    first = self.reasons.get(one.after[0], "no trial has a validation value")
                    self.end(one, FAILED, f"all trials failed; the first one: {first}")
                    return None
                more = search.asked[best]
                tried = self.trials.get((one.row, best, one.seed))
                trained = tried is not None and self.folder.has_weights(self.digests[tried])
                begin = tried if trained else None
        config = row_config(one.options, more)
        identity = self.datasets.of(config).identity
        digest = run_digest(config, identity, one.stage == "trial")
        return Job(one, config, digest, self.digests[begin] if begin else None)

    def _attached(self, one: Fit, failed: list[str]) -> Job | None:
        """Return a fit that starts from the weights of another one."""
        if failed:
            self.end(one, FAILED, f"{failed[0]} failed: {self.reasons.get(failed[0], '')}")
            return None
        source = self.digests[one.after[0]]
        options = self.configs[source].plain
        schemes = one.options["attach"]
        more = {key: value for key, value in one.options.items() if key != "attach"}
        if schemes:
            before = row_config(options)
            more |= {
                "position": attached(before.plain["position"], schemes),
                "init_from": str(self.folder.run(source).path.resolve()),
                "train_only": list(schemes),
            }
        config = row_config(options, more)
        digest = run_digest(config, self.datasets.of(config).identity, source)
        return Job(one, config, digest, None if schemes else source)

    def searched(self, one: Fit) -> dict[str, Any]:
        """Return the options that a search chose for a fit, which are not its plan's."""
        if one.row not in self.searches:
            return {}
        search = self.searches[one.row]
        trial = one.trial if one.stage == "trial" else search.best()
        return {} if trial is None else search.asked.get(trial, {})

    def pending(self) -> int:
        """Return how many fits have not ended."""
        return sum(one.name not in self.status for one in self.fits)


def _needed(plan: Plan, row: str) -> list[str]:
    """Return a row, and those it is attached to."""
    found = [row]
    while attach := plan.rows[found[-1]].attach:
        found.append(attach.to)
    return found


def _score(known: Mapping[str, Any] | None, metric: str) -> float | None:
    """Return the best validation value of a run."""
    value = ((known or {}).get("best_valid") or {}).get(metric)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
