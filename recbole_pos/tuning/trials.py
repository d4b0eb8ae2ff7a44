"""The trials of a search: their table, their picture, and how Ray Tune runs them.

:class:`TrialTable` is the record ``trials.csv``, from which a search resumes. :class:`TrialSearch`
samples the trials and records their ends; :func:`run_trial` trains one in a process of Ray's.

A trial reports its best validation value so far, by which ASHA decides: by the value of the newest
epoch, it would stop trials that wait for patience. A failed trial reports its reason and raises no
error, since Ray would repeat it; a trial whose process is lost is repeated, and resumes its run.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import ray
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from ray import tune
from ray.tune.search.optuna import OptunaSearch

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder, count_parameters
from recbole_pos.files import write_text
from recbole_pos.inspect.pictures import (
    BLUE,
    GRAY,
    PINK,
    VERMILION,
    new_figure,
    set_whole_ticks,
    write,
)
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE
from recbole_pos.runs.resources import Resources
from recbole_pos.runs.worker import MOST_LOSSES, train_run
from recbole_pos.study.rendered_table import format_duration, format_options
from recbole_pos.tuning.search_plan import Search
from recbole_pos.tuning.space import Parameter, Space
from recbole_pos.values import escape_formula

optuna.logging.set_verbosity(optuna.logging.WARNING)
BEST = "best"  # key of a report, the metric of a search: the best validation score so far
# States of a trial. A trial with one of the first two has a result; others are trained on resume.
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
LOST, UNFINISHED = "lost", "unfinished"
# state of a trial -> marker at the end of its curve, and colour of both
_ENDS = {FINISHED: ("o", BLUE), STOPPED: ("|", GRAY), FAILED: ("x", PINK)}


@dataclass
class Trial:
    """One trial of a search: a sampled configuration, and the result of its run.

    Attributes:
        state: finished, stopped (by the scheduler), failed, lost (its process, a machine or the
            disk failed), or unfinished.
        score: best validation value.
        best_epoch: the epoch of the best value; epochs count from 0, as in RecBole.
        epochs: number of trained epochs.
        seconds: seconds of training and validation.
        parameters: number of parameters of the model.
        reason: why it failed or was lost, or empty.
        curve: epoch -> validation value; empty until the search has ended.
    """

    number: int
    options: dict[str, Any]
    state: str = UNFINISHED
    score: float | None = None
    best_epoch: int | None = None
    epochs: int = 0
    seconds: float = 0.0
    parameters: int | None = None
    reason: str = ""
    curve: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def has_result(self) -> bool:
        """Whether the trial has ended with a validation value."""
        return self.state in (FINISHED, STOPPED) and self.score is not None


class TrialTable:
    """The trials of a search by number, and the file in which they stand.

    Args:
        file: ``trials.csv``, which need not exist yet.
        space: space of the search, whose options have a column each.
        metric: name of the validation metric.
        mode: max or min, whichever is better.
    """

    def __init__(self, file: Path, space: Space, metric: str, mode: str) -> None:
        """Read the trials of earlier calls; a UsageError names the row that is damaged."""
        self.file, self.space, self.mode = file, space, mode
        first = ["trial", "state", f"valid {metric}", "best_epoch", "epochs", "seconds"]
        self.columns = [*first, "parameters", *space.names, "reason"]
        self.trials: list[Trial] = self._read() if file.is_file() else []

    def find_best(self) -> Trial | None:
        """Return the trial with the best validation value, the first of equals; None without."""
        scored = [trial for trial in self.trials if trial.has_result]
        sign = 1 if self.mode == "max" else -1
        return max(scored, key=lambda trial: sign * (trial.score or 0), default=None)

    def start(self, number: int, options: dict[str, Any]) -> Trial:
        """Return the trial of that number, as one that begins or resumes, and write the table."""
        trial = Trial(number, options)
        self.trials[number : number + 1] = [trial]
        self.write()
        return trial

    def write(self) -> None:
        """Write the table: a row for each trial; an option that it does not have is empty."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(self.columns)
        for trial in self.trials:
            cells = [trial.number, trial.state, trial.score, trial.best_epoch, trial.epochs]
            cells += [trial.seconds, trial.parameters]
            cells += [str(trial.options.get(name, "")) for name in self.space.names]
            table.writerow(map(escape_formula, [*cells, trial.reason]))
        write_text(self.file, text.getvalue())

    def _read(self) -> list[Trial]:
        """Return the trials of the file; a UsageError names a row that is damaged."""
        with self.file.open(newline="", encoding="utf-8") as opened:
            _, *rows = list(csv.reader(opened)) or [[]]
        trials = []
        for number, row in enumerate(rows):
            try:
                trials.append(self._parse_row(row))
            except (ValueError, IndexError) as error:
                raise UsageError(
                    f"{self.file}: the row of trial {number} is damaged: {error}; restore the file"
                ) from error
        return trials

    def _parse_row(self, row: list[str]) -> Trial:
        """Return the trial of a row; a ValueError or IndexError if it is damaged."""
        number, state, score, best_epoch, epochs, seconds, parameters, *option_cells, reason = row
        cells = dict(zip(self.space.names, option_cells, strict=True))
        options: dict[str, Any] = {}
        for parameter in self.space.parameters:
            if self.space.exists(parameter, options):
                options[parameter.name] = _parse_option(parameter, cells[parameter.name])
        return Trial(
            int(number),
            options,
            state,
            score=float(score) if score else None,
            best_epoch=int(best_epoch) if best_epoch else None,
            epochs=int(epochs),
            seconds=float(seconds),
            parameters=int(parameters) if parameters else None,
            reason=reason,
        )


def _parse_option(parameter: Parameter, cell: str) -> Any:
    """Return the value of an option from its cell; an IndexError if it is no choice of it."""
    if parameter.kind == "choice":
        return [value for value in parameter.values if escape_formula(str(value)) == cell][0]
    value = float(cell)
    return value if parameter.codes is None else parameter.decode(round(parameter.encode(value)))


def draw_curves(
    trials: list[Trial], best: Trial, metric: str, mode: str, title: str, file: Path
) -> Path:
    """Draw validation by epoch, a line for each trial; its last marker shows how it ended.

    Not Optuna's own picture, which has a legend of all trials and cuts off long names.

    Args:
        trials, best: trials of a search, and the best of them.
        metric, mode: name of the validation metric; max or min.
        title: model and dataset, with which the title begins.
        file: the picture, which is returned.
    """
    figure = new_figure(8, 5)
    panel = figure.subplots()
    labels: set[str] = set()  # the legend has each state once
    for trial in sorted(trials, key=lambda trial: trial is best):  # the best is drawn on top
        if not trial.curve:
            continue
        epochs, values = list(trial.curve), list(trial.curve.values())
        marker, color = _ENDS[trial.state]
        label, width, alpha = trial.state, 0.9, 0.6
        if trial is best:
            color, width, alpha = VERMILION, 2.2, 1.0
            label = f"trial {trial.number}, the best: {trial.score:.4f} in epoch {trial.best_epoch}"
            if trial.best_epoch in trial.curve:
                best_value = trial.curve[trial.best_epoch]
                panel.plot(trial.best_epoch, best_value, "*", color=color, markersize=14)
        panel.plot(epochs, values, color=color, linewidth=width, alpha=alpha)
        label_once = None if label in labels else label
        panel.plot(epochs[-1], values[-1], marker, color=color, markersize=7, label=label_once)
        labels.add(label)

    panel.set(xlabel="epoch", ylabel=f"validation {metric}")
    set_whole_ticks(panel.xaxis)
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    better = f"{'higher' if mode == 'max' else 'lower'} is better"
    return write(figure, file, f"{title}: {len(trials)} trials", better)


# --- training ---


def run_trial(
    config: dict[str, Any], *, resources: Resources, packed: bytes, data: list[Any]
) -> None:
    """Train a trial and report its validation metric after every epoch; it is never tested.

    Args:
        config: ``number`` of the trial, ``plain``, the options of its run, ``path``, its folder,
            and ``problem``, why its options do not go together, or empty.
        resources, packed: as of :func:`train_run`.
        data: a list with Ray's reference of the shared data: Ray would load a bare reference.
    """

    def report(experiment: Any) -> None:
        """Report the newest validated epoch; does not return if the scheduler stops the trial."""
        trainer, progress = experiment.trainer, experiment.trainer.progress
        newest = next(epoch for epoch in reversed(progress.history) if epoch["valid"])
        tune.report(
            {
                BEST: progress.best_score,
                "valid": newest["valid"][trainer.valid_metric],
                "loss": newest["loss"],
                "epoch": newest["epoch"] + 1,
                "best_epoch": progress.best_epoch,
                "seconds": progress.training_seconds + progress.evaluation_seconds,
                "parameters": count_parameters(experiment.model),
                "state": FINISHED if trainer.is_finished else STOPPED,  # if it is the last report
            }
        )

    plain, problem = config["plain"], config["problem"]
    failed = {BEST: math.nan, "epoch": 0}
    if problem:
        tune.report({**failed, "state": FAILED, "reason": problem})
        return
    shared = ray.get(data[0])
    facts = train_run(plain, config["path"], shared, resources, packed, report=report)
    if facts["status"] != DONE:
        state = LOST if facts["lost"] else FAILED
        tune.report({**failed, "state": state, "reason": facts["reason"]})
        return
    metric = str(plain["valid_metric"]).lower()
    tune.report(
        {
            BEST: (facts["best_valid"] or {}).get(metric, math.nan),
            "epoch": facts["epochs"],
            "best_epoch": facts["best_epoch"],
            "seconds": facts["seconds"]["training"] + facts["seconds"]["evaluation"],
            "parameters": facts["parameters"],
            "state": FINISHED,
        }
    )


def find_run(folder: Path, number: int) -> RunFolder:
    """Return the run folder of a trial in the folder of a search."""
    return RunFolder(folder / "runs" / f"{number:05d}")


class ResumableSampler(BaseSampler):
    """TPE (Bergstra et al. 2011) or random sampling, with random numbers of its own for each trial.

    They depend only on the seed and the number of the trial, so that a resumed search samples
    what it would have sampled without the stop. Trials in progress count with a bad score (constant
    liar), so that parallel trials differ.

    Args:
        seed: seed of the search.
        is_random: whether options are sampled at random; by TPE if False.
    """

    def __init__(self, seed: int, is_random: bool = False) -> None:
        self.seed, self.is_random = seed, is_random
        self.sampler: BaseSampler = RandomSampler(seed)

    def before_trial(self, study: optuna.Study, trial: Any) -> None:
        """Start the random numbers of a trial."""
        seed = int(np.random.SeedSequence((self.seed, trial.number)).generate_state(1)[0])
        if self.is_random:
            self.sampler = RandomSampler(seed)
        else:
            self.sampler = TPESampler(seed=seed, constant_liar=True)

    def infer_relative_search_space(self, study: optuna.Study, trial: Any) -> dict[str, Any]:
        """Return the options that the sampler samples together."""
        return self.sampler.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: Any, search_space: Any) -> dict[str, Any]:
        """Return values of the options that are sampled together."""
        return self.sampler.sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: Any, *parameter: Any) -> Any:
        """Return the value of one option, given by its name and distribution."""
        return self.sampler.sample_independent(study, trial, *parameter)


def create_study(mode: str, sampler: BaseSampler, **storage: Any) -> optuna.Study:
    """Return a new study whose values are better if higher (``mode`` max) or lower (min)."""
    direction = StudyDirection.MAXIMIZE if mode == "max" else StudyDirection.MINIMIZE
    return optuna.create_study(direction=direction, sampler=sampler, **storage)


class TrialSearch(OptunaSearch):
    """Ray's OptunaSearch, which begins with the recorded trials and records further ones.

    OptunaSearch takes results of earlier trials only without conditions, so its study is made and
    filled here.

    Args:
        search: the search.
        table: the record; its trials without a result are the first to be trained.
        folder: folder of the search.
        reporter: prints a line for each trial that ends.

    Attributes:
        active: Ray's id of a trial in training -> the trial.
    """

    def __init__(self, search: Search, table: TrialTable, folder: Path, reporter: Reporter) -> None:
        """Fill the study: with results, with trials to resume, and with the points of a grid."""
        self.search, self.table, self.folder, self.reporter = search, table, folder, reporter
        self.active: dict[str, Trial] = {}
        facts, space = search.facts, search.space
        sampler = ResumableSampler(facts.seed, is_random=facts.searcher != "optuna")
        shared: dict[str, Any] = {"storage": optuna.storages.InMemoryStorage(), "study_name": "s"}

        study = create_study(search.mode, sampler, **shared)
        for trial in table.trials:
            values = space.encode(trial.options)
            if trial.has_result:
                distributions: dict[str, Any] = {
                    p.name: p.distribution for p in space.parameters if p.name in values
                }
                study.add_trial(
                    optuna.trial.create_trial(
                        value=trial.score, params=values, distributions=distributions
                    )
                )
            else:
                study.enqueue_trial(values)
        points = space.list_points() if facts.searcher == "grid" else []
        for point in points[len(table.trials) : facts.num_samples]:
            study.enqueue_trial(space.encode(point))
        super().__init__(self._sample, metric=BEST, mode=search.mode, sampler=sampler, **shared)

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a search resumes from its table, not from Ray's pickle of this object."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a search resumes from its table."""

    def _sample(self, trial: Any) -> dict[str, Any]:
        """Return number and options of an Optuna trial."""
        return {"number": trial.number, "options": self.search.space.suggest(trial)}

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Record the next trial, and return its configuration for :func:`run_trial`."""
        sampled = super().suggest(trial_id)
        assert sampled is not None  # as always
        trial = self.active[trial_id] = self.table.start(sampled["number"], sampled["options"])
        plain, problem = {}, ""
        try:
            plain = self.search.make_config(trial.options).plain
        except UsageError as error:
            problem = str(error)
        path = str(find_run(self.folder, trial.number).path.resolve())
        return {"number": trial.number, "plain": plain, "path": path, "problem": problem}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Note the number of epochs for the progress; Optuna only needs the last result."""
        self.active[trial_id].epochs = result["epoch"]

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record the last report of a trial; Optuna takes one without a score for failed."""
        trial = self.active.pop(trial_id)
        if result is None:
            reason = f"its process was lost {MOST_LOSSES + 1} times, perhaps for lack of memory"
            result = {BEST: math.nan, "epoch": 0, "state": LOST, "reason": reason}
        trial.state, trial.reason = result["state"], result.get("reason", "")
        trial.score = None if math.isnan(result[BEST]) else result[BEST]
        trial.best_epoch, trial.epochs = result.get("best_epoch"), result["epoch"]
        trial.seconds = round(result.get("seconds", 0.0), 3)
        trial.parameters = result.get("parameters")
        self.table.write()
        self.reporter.line(self._describe(trial))
        if trial.score is None:
            super().on_trial_complete(trial_id, None, error=True)
        else:
            super().on_trial_complete(trial_id, result)

    def _describe(self, trial: Trial) -> str:
        """Return ``[3 of 20] FPARec, trial 2: 9 epochs  valid ndcg@10 0.123  41 s  n_heads 1``."""
        text = f"{trial.state}: {trial.reason}"
        if trial.score is not None:
            prefix = "stopped after " if trial.state == STOPPED else ""
            text = f"{prefix}{trial.epochs} epochs  valid {self.search.metric} {trial.score:.4f}  "
            text += format_duration(trial.seconds)
        name = f"{self.search.config['model']}, trial {trial.number}"
        return f"[{self._count()}] {name}: {text}  {format_options(trial.options)}"

    def _count(self) -> str:
        """Return ``3 of 20``, the number of trials that have ended."""
        num_ended = sum(trial.state != UNFINISHED for trial in self.table.trials)
        return f"{num_ended} of {self.search.facts.num_samples}"

    def describe_progress(self) -> list[str]:
        """Return the lines of the progress: an overview, and one for each active trial."""
        epochs = self.search.config["epochs"]
        active = list(self.active.values())  # a copy, since another thread calls this
        overview = f"{self.search.title}: {self._count()} trials ended, {len(active)} running"
        return [overview, *(f"  trial {t.number}: epoch {t.epochs} of {epochs}" for t in active)]


def quiet_tune() -> None:
    """Silence Ray Tune and leave Ctrl-C to the command; to be called before Ray starts.

    Ray logs stacks of lost processes and full disks, which the search reports itself.
    """
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # verbose=0 alone leaves some tables
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    for name in ("tune_controller", "experiment_state"):
        logging.getLogger(f"ray.tune.execution.{name}").setLevel(logging.CRITICAL)
