"""The fits of a study that are left to train, each after the fits it depends on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.runs.searchers import Searcher, make_searcher
from recbole_pos.runs.space import Space, check_space, find_space_file, parse_space, read_space
from recbole_pos.study.configs import (
    attach_schemes,
    digest,
    digest_data_options,
    row_config,
    run_digest,
)
from recbole_pos.study.packed import PackedStudy
from recbole_pos.study.plan import Fit, Plan, Search, list_fits
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.study.study_folder import KNOWN_FROM, StudyFolder

_UNTRAINED = "not trained"  # reason of a fit that no call has tried to train
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
        rows: names of rows to train, with those they are made of; all if empty.
        packed: packed studies, whose runs need no training.

    Attributes:
        status: name of a fit that has ended -> done or failed.
        digests: name of a fit -> digest of its run.
    """

    def __init__(
        self,
        plan: Plan,
        folder: StudyFolder,
        rows: Sequence[str] = (),
        packed: Sequence[PackedStudy] = (),
    ) -> None:
        self.plan, self.folder, self.packed = plan, folder, packed
        for name in rows:
            plan.source.require_choice(("rows",), name, plan.rows)
        wanted = {row for name in rows or plan.rows for row in plan.ancestors(name)}
        self.rows = [name for name in plan.rows if name in wanted]
        self.fits = [fit for fit in list_fits(plan) if fit.row in wanted]
        self.waiting = list(self.fits)
        self.trials = {(fit.row, fit.trial, fit.seed): fit.name for fit in self.fits}
        self.status: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.configs: dict[str, PosConfig] = {}  # by digest
        self.noted = folder.noted()
        self.tried = True  # whether this call trains, and does not only report
        self.datasets: dict[str, Any] = {}  # by the options that decide them
        self.searches = {
            name: RowSearch(plan, name) for name in self.rows if plan.rows[name].search
        }

    def next_job(self, sample: bool = True, restore: bool = True) -> Job | None:
        """Return the next fit that can be trained; None if none can until others have ended.

        Fits that an earlier call has trained, or that cannot be trained, are recorded as ended.

        Args:
            sample: whether searches may sample new trials.
            restore: whether runs of packed studies are copied into the folder, or only validated.

        Raises:
            UsageError: for a damaged run in the folder or a packed study.
        """
        for fit in list(self.waiting):
            if any(name not in self.status for name in fit.after):
                continue
            self.waiting.remove(fit)
            if not sample and not self._is_sampled(fit):
                self.end(fit, FAILED, _UNTRAINED)
                continue
            try:
                job = self._make_job(fit)
            except UsageError as error:
                self.end(fit, FAILED, str(error))
                continue
            if job is None:  # a fit that it depends on failed
                continue
            facts = self._find_finished(job, restore)
            self.digests[fit.name], self.configs[job.digest] = job.digest, job.config
            if facts.get("status") == DONE:  # a run that failed is tried again
                self.end(fit, DONE, facts=facts)
            elif reason := self._explain_no_weights(fit):
                del self.digests[fit.name]  # it has no run for the tables to show
                self.end(fit, FAILED, reason)
            else:
                return job
        return None

    def take_finished(self) -> None:
        """Record finished runs, also of packed studies, for a report; others count as failed."""
        while job := self.next_job(sample=False):
            self.end(job.fit, FAILED, _UNTRAINED)
        self.tried = False

    def unmade(self) -> dict[str, str]:
        """Return names and reasons of fits that failed before their run had a folder."""
        reasons = self.reasons.items() if self.tried else ()
        return {name: reason for name, reason in reasons if name not in self.digests}

    def preview(self) -> dict[str, str]:
        """Return the state of every fit for a preview, which ends this scheduler.

        Returns:
            Name of a fit -> ``done``, ``continued`` (from its checkpoint), ``new``, or ``open``
            (its run depends on a search that has not ended).

        Raises:
            UsageError: for a damaged run of a packed study; nothing has been written.
        """
        states = {}
        while job := self.next_job(sample=False, restore=False):
            began = self.folder.is_begun(job.digest)
            tested_only = job.fit.repeats and job.begin
            states[job.fit.name] = CONTINUED if began else DONE if tested_only else NEW
        for fit in self.fits:
            is_new = fit.has_parent or fit.trial is not None or not fit.after
            done = self.status.get(fit.name) == DONE
            states.setdefault(fit.name, DONE if done else NEW if is_new else OPEN)
        return states

    def _find_finished(self, job: Job, restore: bool) -> dict[str, Any]:
        """Return the facts of a run in the study's folder, or in a packed study, from which it is
        copied into the folder if ``restore``; empty if none has it."""
        facts = self.folder.fit(job.digest)
        holders = [packed for packed in self.packed if job.digest in packed.fits]
        for packed in holders:
            packed.used.add(job.digest)
        if facts.get("status") == DONE or not holders:
            return facts
        dataset = self.prepare(job.config)
        if restore:
            holders[0].restore(job.digest, self.folder, job.config, dataset)
        else:
            holders[0].ranks(job.digest, job.config, dataset)
        return holders[0].fits[job.digest]

    def _explain_no_weights(self, fit: Fit) -> str:
        """Return why a fit cannot start from weights of another; empty if it can or need not."""
        if not fit.has_parent:
            return ""
        source = self.digests[fit.after[0]]
        taken_from = self.folder.fit(source).get(KNOWN_FROM)
        if not taken_from:
            return ""
        return (
            f"it starts from the weights of {fit.after[0]}, and {taken_from} has none; to train "
            f"that again, delete {self.folder.run(source).path} and leave --known out"
        )

    def _is_sampled(self, fit: Fit) -> bool:
        """Return whether the options of a fit are known without sampling any."""
        return fit.trial is None or self._recall(fit) is not None

    def _recall(self, fit: Fit) -> dict[str, Any] | None:
        """Return the options that were sampled for a trial, in this folder or a packed study, if
        the run that was made with them is that of the trial; else None."""
        search = self.searches[fit.row]
        if search.searcher is None or fit.trial in search.asked:
            return {}  # nothing is left to sample
        noted = self.noted.get(fit.name, {}).get("run", "")
        runs = [(noted, self.folder.fit(noted))]
        for packed in self.packed:
            for name, facts in packed.fits.items():
                if all(facts.get(key) == getattr(fit, key) for key in ("row", "trial", "seed")):
                    runs.append((name, facts))
        for name, facts in runs:
            drawn = search.select_sampled(facts.get("searched") or {})
            same = facts.get("space", search.space) == search.space  # runs of 0.2 do not have it
            if drawn is not None and same:
                config = row_config(fit.options, {**search.fixed, **drawn})
                if self._digest(config, True) == name:
                    return drawn
        return None

    def prepare(self, config: PosConfig) -> Any:
        """Return the dataset of a configuration, after ``build``; each is read once."""
        key = digest_data_options(config)
        if key not in self.datasets:
            self.datasets[key] = read_dataset(config)
            self.datasets[key].build()
        return self.datasets[key]

    def _digest(self, config: PosConfig, *others: Any) -> str:
        """Return the digest of a run."""
        return run_digest(config, self.prepare(config).identity, *others)

    def end(self, fit: Fit, status: str, reason: str = "", facts: Any = None) -> None:
        """Record how a fit ended, and why it failed; tell its search the score in its facts."""
        self.status[fit.name] = status
        if reason:
            self.reasons[fit.name] = reason
        if fit.trial is not None:
            search = self.searches[fit.row]
            score = _find_score(facts, search.metric) if status == DONE else None
            search.tell(fit.trial, score)

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

    def _make_job(self, fit: Fit) -> Job | None:
        """Return a fit with its run, after the fits it depends on have ended; None, with the fit
        recorded as failed, if those leave nothing to train."""
        if fit.has_parent:
            return self._make_job_of_parent(fit)
        searched: dict[str, Any] = {}
        begin = None
        if search := self.searches.get(fit.row):
            if fit.trial is not None:
                searched = search.ask(fit.trial, self._recall(fit))
            else:
                best = search.best()
                if any(self.reasons.get(name) == _UNTRAINED for name in fit.after):
                    self.end(fit, FAILED, _UNTRAINED)  # others may be better
                    return None
                if best is None:
                    first = self.reasons.get(fit.after[0], "no trial has a validation value")
                    self.end(fit, FAILED, f"all trials failed; the first one: {first}")
                    return None
                searched = search.asked[best]
                trial = self.digests.get(self.trials.get((fit.row, best, fit.seed), ""), "")
                begin = trial if self.folder.has_weights(trial) else None
        config = row_config(fit.options, searched)
        return Job(fit, config, self._digest(config, fit.stage == "trial"), begin)

    def _make_job_of_parent(self, fit: Fit) -> Job | None:
        """Return the job of a fit that starts from weights of another; None if that failed."""
        (before,) = fit.after
        if self.status[before] == FAILED:
            self.end(fit, FAILED, f"{before} failed: {self.reasons.get(before, '')}")
            return None
        source = self.digests[before]
        options = self.configs[source].plain
        schemes = fit.options["attach"]
        changes = {key: value for key, value in fit.options.items() if key != "attach"}
        if schemes:
            changes |= {
                "position": attach_schemes(row_config(options).plain["position"], schemes),
                "init_from": str(self.folder.run(source).path.resolve()),
                "train_only": list(schemes),
            }
        config = row_config(options, changes)
        return Job(fit, config, self._digest(config, source), None if schemes else source)

    def metric(self, row: str) -> str:
        """Return the validation metric by which the runs of a row are shown."""
        return self.searches[row].metric if row in self.searches else self.plan.metrics[0]

    def describe(self, fit: Fit) -> dict[str, Any]:
        """Return the facts of a fit that are known before it is trained."""
        facts = {"row": fit.row, "seed": fit.seed, "stage": fit.stage, "trial": fit.trial}
        if search := self.searches.get(fit.row):
            trial = search.best() if fit.trial is None else fit.trial
            searched = {} if trial is None else search.asked.get(trial, {})
            facts |= {"searched": searched, "space": search.space}
        return facts


class RowSearch:
    """The trials of a row, chosen by validation only: none of them has test events.

    A grid is tried point by point, a space is sampled by Optuna (TPE).

    Args:
        plan: plan of the study.
        name: name of a row with a search.

    Raises:
        UsageError: for options that the row's model does not take, or that are given and searched.

    Attributes:
        metric: validation metric that chooses, which is that of early stopping.
        mode: max or min.
        asked: trial -> options that the search gives it.
        values: trial -> validation value with each seed that has ended, None if it failed.
        fixed: options that a space sets for all trials.
        searched: the space; without parameters for a grid.
        space: digest of a space and its sampler; empty for a grid.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        self.seeds = len(plan.trial_seeds)
        options = {**plan.options(name), "seed": plan.seeds[0]}
        config = row_config(plan.first_options(name))
        self.metric = str(config["valid_metric"]).lower()
        self.mode = "max" if config["valid_metric_bigger"] else "min"
        self.asked: dict[int, dict[str, Any]] = {}
        self.values: dict[int, list[float | None]] = {}
        self.fixed: dict[str, Any] = {}
        self.searched = Space([])
        self.searcher: Searcher | None = None
        self.space = ""
        search = plan.rows[name].search
        assert isinstance(search, Search)
        self.points = search.points() if search.grid else []
        names = list(search.grid or ())
        if search.space:
            space = (
                read_space(find_space_file(search.space, ""))
                if isinstance(search.space, str)
                else parse_space(search.space, plan.search_lines(name))
            )
            given = config.external_config_dict  # wins over what the space fixes
            self.fixed = {key: value for key, value in space.fixed.items() if key not in given}
            check_space(space, lambda drawn: row_config(options, {**self.fixed, **drawn}))
            seed = plan.seeds[0] if search.seed is None else search.seed
            self.searched, self.searcher = (
                space,
                make_searcher(search.searcher, space, self.mode, seed),
            )
            parameters = [[p.name, p.kind, p.values, p.when] for p in space.parameters]
            how = [] if search.searcher == "optuna" else [search.searcher]
            self.space = digest(
                {"space": parameters, "given": space.context}, seed, self.mode, *how
            )
            names = space.names
        for option in names:
            for path, given_to in ((("base",), plan.base), (("rows", name), plan.rows[name])):
                if option in given_to.options:
                    raise plan.source.error(
                        (*path, option),
                        f"{name}: {option} is given here, and its search tries it as well; take it "
                        "out of one (`search: false` for a configuration that is not searched)",
                    )

    def select_sampled(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the part of a run's options that the space samples.

        None if the space cannot have sampled them: one is missing or outside its range.
        """
        sampled: dict[str, Any] = {}
        for parameter in self.searched.parameters:
            if self.searched.exists(parameter, sampled):  # some depend on the values of others
                if parameter.name not in options or not parameter.has(options[parameter.name]):
                    return None
                sampled[parameter.name] = options[parameter.name]
        return sampled

    def ask(self, trial: int, drawn: dict[str, Any] | None) -> dict[str, Any]:
        """Return the options of a trial; ``drawn`` were sampled for it before, if given."""
        if trial not in self.asked:  # else the trial has another seed already
            if self.searcher is None:
                self.asked[trial] = self.points[trial]
            elif drawn is None:
                self.asked[trial] = {**self.fixed, **self.searcher.ask(trial)}
            else:
                self.searcher.recall(trial, drawn)
                self.asked[trial] = {**self.fixed, **drawn}
        return self.asked[trial]

    def tell(self, trial: int, value: float | None) -> None:
        """Record the best validation value of a trial with one of its seeds; None if it failed."""
        values = self.values.setdefault(trial, [])
        values.append(value)
        if self.searcher is not None and len(values) == self.seeds:
            self.searcher.tell(trial, average_seeds(values, self.seeds))

    def best(self) -> int | None:
        """Return the trial with the best mean over its seeds, the first of equals, or None."""
        means = {trial: average_seeds(v, self.seeds) for trial, v in sorted(self.values.items())}
        scores = {trial: mean for trial, mean in means.items() if mean is not None}
        best = max if self.mode == "max" else min
        return best(scores, key=scores.__getitem__, default=None)


def average_seeds(values: Sequence[float | None], seeds: int) -> float | None:
    """Return the mean validation value of a trial over its seeds; None unless each has a value."""
    scores = [value for value in values if value is not None]
    return math.fsum(scores) / seeds if len(scores) == seeds else None


def _find_score(facts: Mapping[str, Any] | None, metric: str) -> float | None:
    """Return the best validation value of a run from its facts; None if it has no finite one."""
    value = ((facts or {}).get("best_valid") or {}).get(metric)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
