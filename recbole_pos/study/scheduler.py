"""Which fits of a study are trained next, each after the fits it depends on."""

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
    digest_run,
    make_row_config,
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
        reasons: name of a fit that has failed -> why.
        digests: name of a fit -> digest of its run.
        configs: digest of a run -> its configuration.
        earlier: name of a fit -> its run in an earlier call, as in ``current.json``.
        datasets: digest of data options -> dataset.
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
        needed = {row for name in rows or plan.rows for row in plan.list_ancestors(name)}
        self.rows = [name for name in plan.rows if name in needed]
        self.fits = [fit for fit in list_fits(plan) if fit.row in needed]
        self.waiting = list(self.fits)
        self.status: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.configs: dict[str, PosConfig] = {}
        self.earlier = folder.read_current()
        self.only_reports = False
        self.datasets: dict[str, Any] = {}
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
            if fit.trial is not None and not sample and not self._is_sampled(fit):
                self.end(fit, FAILED, _UNTRAINED)
                continue
            if reason := self._explain_failure(fit):
                self.end(fit, FAILED, reason)
                continue
            try:
                job = self._make_job(fit)
            except UsageError as error:
                self.end(fit, FAILED, str(error))
                continue
            facts = self._find_finished(job, restore)
            if facts.get("status") != DONE and (reason := self._explain_no_weights(fit)):
                self.end(fit, FAILED, reason)  # it has no run for the tables to show
                continue
            self.digests[fit.name], self.configs[job.digest] = job.digest, job.config
            if facts.get("status") != DONE:  # a run that failed is tried again
                return job
            self.end(fit, DONE, facts=facts)
        return None

    def take_finished(self) -> None:
        """Record finished runs, also of packed studies, for a report; others count as failed."""
        while job := self.next_job(sample=False):
            self.end(job.fit, FAILED, _UNTRAINED)
        self.only_reports = True

    def explain_unmade(self) -> dict[str, str]:
        """Return names and reasons of fits that failed before their run had a folder."""
        if self.only_reports:
            return {}
        return {name: why for name, why in self.reasons.items() if name not in self.digests}

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
            if self.folder.has_checkpoint(job.digest):
                states[job.fit.name] = CONTINUED
            else:
                is_trained = job.fit.repeats and job.begin
                states[job.fit.name] = DONE if is_trained else NEW
        for fit in self.fits:
            is_open = fit.stage == "final" and fit.after
            state = DONE if self.status.get(fit.name) == DONE else OPEN if is_open else NEW
            states.setdefault(fit.name, state)
        return states

    def _find_finished(self, job: Job, restore: bool) -> dict[str, Any]:
        """Return the facts of a finished run in the folder or a packed study; empty if in none."""
        facts = self.folder.read_fit(job.digest)
        packed_studies = [packed for packed in self.packed if job.digest in packed.fits]
        for packed in packed_studies:
            packed.used.add(job.digest)
        if facts.get("status") == DONE or not packed_studies:
            return facts
        packed, dataset = packed_studies[0], self.prepare(job.config)
        if restore:
            packed.restore(job.digest, self.folder, job.config, dataset)
        else:
            packed.read_ranks(job.digest, job.config, dataset)
        return packed.fits[job.digest]

    def _explain_failure(self, fit: Fit) -> str:
        """Return why the fits that a fit depends on leave it nothing to train; empty if they do."""
        if fit.has_parent:
            (parent,) = fit.after
            is_failed = self.status[parent] == FAILED
            return f"{parent} failed: {self.reasons.get(parent, '')}" if is_failed else ""
        if not fit.after:
            return ""
        if any(self.reasons.get(name) == _UNTRAINED for name in fit.after):
            return _UNTRAINED  # other trials may be better
        if self.searches[fit.row].find_best() is None:
            first = self.reasons.get(fit.after[0], "no trial has a validation value")
            return f"all trials failed; the first one: {first}"
        return ""

    def _explain_no_weights(self, fit: Fit) -> str:
        """Return why a fit cannot start from weights of another; empty if it can or need not."""
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

    def _is_sampled(self, fit: Fit) -> bool:
        """Return whether the options of a trial are known without sampling any."""
        search = self.searches[fit.row]
        return search.is_grid or fit.trial in search.asked or self._recall(fit) is not None

    def _recall(self, fit: Fit) -> dict[str, Any] | None:
        """Return the options that an earlier run of a trial was sampled with; None without one."""
        search = self.searches[fit.row]
        if search.is_grid or fit.trial in search.asked:
            return None
        digest = self.earlier.get(fit.name, {}).get("run", "")
        runs = [(digest, self.folder.read_fit(digest))]
        for packed in self.packed:
            for digest, facts in packed.fits.items():
                if all(facts.get(key) == getattr(fit, key) for key in ("row", "trial", "seed")):
                    runs.append((digest, facts))
        for digest, facts in runs:
            sampled = search.select_sampled(facts.get("searched") or {})
            is_same = facts.get("space", search.space) == search.space  # runs of 0.2 lack it
            if sampled is not None and is_same:
                config = make_row_config(fit.options, {**search.fixed, **sampled})
                if self._digest(config, True) == digest:
                    return sampled
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
        return digest_run(config, self.prepare(config).identity, *others)

    def end(self, fit: Fit, status: str, reason: str = "", facts: Any = None) -> None:
        """Record how a fit ended, and why it failed; tell its search the score in its facts."""
        self.status[fit.name] = status
        if reason:
            self.reasons[fit.name] = reason
        if fit.trial is not None:
            search = self.searches[fit.row]
            score = _find_score(facts, search.metric) if status == DONE else None
            search.tell(fit.trial, score)

    def find_chosen(self) -> dict[str, int | None]:
        """Return the chosen trial of each searched row; None while trials are left."""
        unfinished = {
            fit.row
            for fit in self.fits
            if fit.trial is not None
            if fit.name not in self.status or self.reasons.get(fit.name) == _UNTRAINED
        }
        return {
            row: None if row in unfinished else search.find_best()
            for row, search in self.searches.items()
        }

    def _make_job(self, fit: Fit) -> Job:
        """Return a fit with its run, after the fits it depends on have ended."""
        if fit.has_parent:
            return self._make_job_of_parent(fit)
        if fit.row not in self.searches:
            config = make_row_config(fit.options)
            return Job(fit, config, self._digest(config, False))
        search, trained_run = self.searches[fit.row], None
        if fit.trial is not None:
            options = search.ask(fit.trial, self._recall(fit))
        else:
            best = search.find_best()
            assert best is not None  # else the fit has failed
            options = search.asked[best]
            for trial in self.fits:
                if (trial.row, trial.trial, trial.seed) == (fit.row, best, fit.seed):
                    trained_run = self.digests.get(trial.name)
        config = make_row_config(fit.options, options)
        begin = trained_run if trained_run and self.folder.has_weights(trained_run) else None
        return Job(fit, config, self._digest(config, fit.stage == "trial"), begin)

    def _make_job_of_parent(self, fit: Fit) -> Job:
        """Return the job of a fit that starts from weights of another."""
        parent = self.digests[fit.after[0]]
        parent_options = self.configs[parent].plain
        schemes = fit.options["attach"]
        options = {key: value for key, value in fit.options.items() if key != "attach"}
        if schemes:
            position = make_row_config(parent_options).plain["position"]
            options["position"] = attach_schemes(position, schemes)
            options["init_from"] = str(self.folder.run(parent).path.resolve())
            options["train_only"] = list(schemes)
        config = make_row_config(parent_options, options)
        return Job(fit, config, self._digest(config, parent), None if schemes else parent)

    def metric(self, row: str) -> str:
        """Return the validation metric by which the runs of a row are shown."""
        return self.searches[row].metric if row in self.searches else self.plan.metrics[0]

    def describe(self, fit: Fit) -> dict[str, Any]:
        """Return the facts of a fit that are known before it is trained."""
        facts = {"row": fit.row, "seed": fit.seed, "stage": fit.stage, "trial": fit.trial}
        if search := self.searches.get(fit.row):
            trial = search.find_best() if fit.trial is None else fit.trial
            searched = {} if trial is None else search.asked.get(trial, {})
            facts |= {"searched": searched, "space": search.space}
        return facts


class RowSearch:
    """The trials of a row, chosen by validation only: none of them has test interactions.

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
        is_grid: whether the trials are the points of a grid.
        searcher: where the options of trials come from.
        fixed: options that a space sets for all trials.
        searched: the space; without parameters for a grid.
        space: digest of a space and its sampler; empty for a grid.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        search = plan.rows[name].search
        assert isinstance(search, Search)
        config = make_row_config(plan.make_first_options(name))
        self.seeds = len(plan.trial_seeds)
        self.metric = str(config["valid_metric"]).lower()
        self.mode = "max" if config["valid_metric_bigger"] else "min"
        self.asked: dict[int, dict[str, Any]] = {}
        self.values: dict[int, list[float | None]] = {}
        self.fixed: dict[str, Any] = {}
        self.searched, self.space = Space([]), ""
        self.searcher = Searcher(iter(search.list_points()))
        self.is_grid = not search.space
        if search.space:
            if isinstance(search.space, str):
                self.searched = read_space(find_space_file(search.space, ""))
            else:
                self.searched = parse_space(search.space, plan.locate_searched(name))
            self._sample_space(plan, name, search, config)
        for option in search.grid or self.searched.names:
            _require_not_given(plan, name, option)

    def _sample_space(self, plan: Plan, name: str, search: Search, config: PosConfig) -> None:
        """Set up the sampling of a row's space, whose fixed options yield to those of the row."""
        space, seed = self.searched, plan.seeds[0] if search.seed is None else search.seed
        given = config.external_config_dict
        self.fixed = {key: value for key, value in space.fixed.items() if key not in given}
        options = {**plan.make_options(name), "seed": plan.seeds[0]}
        check_space(space, lambda sampled: make_row_config(options, {**self.fixed, **sampled}))
        self.searcher = make_searcher(search.searcher, space, self.mode, seed)
        parameters = [[p.name, p.kind, p.values, p.when] for p in space.parameters]
        others = [] if search.searcher == "optuna" else [search.searcher]
        content = {"space": parameters, "given": space.context}
        self.space = digest(content, seed, self.mode, *others)

    def select_sampled(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the options of a run that the space samples.

        None if the space cannot have sampled them: one is missing or outside its range.
        """
        sampled: dict[str, Any] = {}
        for parameter in self.searched.parameters:
            if self.searched.exists(parameter, sampled):  # some depend on the values of others
                if parameter.name not in options or not parameter.has(options[parameter.name]):
                    return None
                sampled[parameter.name] = options[parameter.name]
        return sampled

    def ask(self, trial: int, sampled: dict[str, Any] | None) -> dict[str, Any]:
        """Return the options of a trial; ``sampled`` are those that it had before, if any."""
        if trial not in self.asked:  # else the trial has another seed already
            if sampled is None:
                sampled = self.searcher.ask(trial)
            else:
                self.searcher.recall(trial, sampled)
            self.asked[trial] = {**self.fixed, **sampled}
        return self.asked[trial]

    def tell(self, trial: int, value: float | None) -> None:
        """Record the best validation value of a trial with one of its seeds; None if it failed."""
        values = self.values.setdefault(trial, [])
        values.append(value)
        if len(values) == self.seeds:
            self.searcher.tell(trial, average_seeds(values, self.seeds))

    def find_best(self) -> int | None:
        """Return the trial with the best mean over its seeds, the first of equals, or None."""
        scores = {}
        for trial, values in sorted(self.values.items()):
            mean = average_seeds(values, self.seeds)
            if mean is not None:
                scores[trial] = mean
        best = max if self.mode == "max" else min
        return best(scores, key=scores.__getitem__, default=None)


def _require_not_given(plan: Plan, row: str, option: str) -> None:
    """Raise a UsageError for an option that a search tries and that its row or the base sets."""
    for path, layer in ((("base",), plan.base), (("rows", row), plan.rows[row])):
        if option in layer.options:
            raise plan.source.error(
                (*path, option),
                f"{row}: {option} is given here, and its search tries it as well; take it out of "
                "one (`search: false` for a configuration that is not searched)",
            )


def average_seeds(values: Sequence[float | None], seeds: int) -> float | None:
    """Return the mean validation value of a trial over its seeds; None unless each has a value."""
    scores = [value for value in values if value is not None]
    return math.fsum(scores) / seeds if len(scores) == seeds else None


def _find_score(facts: Mapping[str, Any] | None, metric: str) -> float | None:
    """Return the best validation value of a run from its facts; None if it has no finite one."""
    value = ((facts or {}).get("best_valid") or {}).get(metric)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
