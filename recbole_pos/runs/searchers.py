"""Searchers that suggest configurations by ask and tell: Optuna's TPE, random, or a grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import optuna
from optuna.samplers import RandomSampler, TPESampler

from recbole_pos.errors import UsageError
from recbole_pos.runs.space import Space

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Searcher:
    """A sequence of configurations, random or a grid, which no results of trials change."""

    def __init__(self, sequence: Iterator[dict[str, Any]]) -> None:
        self.sequence = sequence
        self.sampled: list[dict[str, Any]] = []

    def ask(self, trial_number: int) -> dict[str, Any]:
        """Return the options of a trial; raise a UsageError if there are not so many."""
        while len(self.sampled) <= trial_number:
            options = next(self.sequence, None)
            if options is None:
                raise UsageError(f"search: the space has {len(self.sampled)} combinations")
            self.sampled.append(options)
        return self.sampled[trial_number]

    def recall(self, trial_number: int, options: dict[str, Any]) -> None:
        """Take over a trial of an earlier call, as if :meth:`ask` had returned its options.

        A resumed search calls this for all its trials, in the order of their numbers.
        """

    def tell(self, trial_number: int, score: float | None) -> None:
        """Record the best validation value of a trial that has ended; None if it failed."""


class OptunaSearcher(Searcher):
    """Optuna's TPE (Bergstra et al. 2011).

    Ray's own OptunaSearch cannot resume from a record, and gives failed trials a bad score. Here
    trials in progress count with a bad score (constant liar), so that parallel trials differ.
    ``mode`` is max or min.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        self.space, self.seed = space, seed
        self.study = optuna.create_study(direction="maximize" if mode == "max" else "minimize")
        self.active: dict[int, Any] = {}  # number of a trial -> Optuna's trial, until it has ended

    def ask(self, trial_number: int) -> dict[str, Any]:
        """Let TPE suggest the options of the next trial."""
        num_trials = len(self.study.get_trials(deepcopy=False))  # ``trials`` copies each of them
        seed = _derive_seed(self.seed, num_trials)
        self.study.sampler = TPESampler(seed=seed, constant_liar=True)
        self.active[trial_number] = self.study.ask()
        return self.space.suggest(self.active[trial_number])

    def recall(self, trial_number: int, options: dict[str, Any]) -> None:
        """Let the study suggest the options of an earlier call."""
        self.study.enqueue_trial(self.space.encode(options))
        self.ask(trial_number)

    def tell(self, trial_number: int, score: float | None) -> None:
        """Tell Optuna the score of a trial; one without a score, or with NaN, counts as failed."""
        trial = self.active.pop(trial_number, None)
        if trial is None:  # reported already
            return
        if score is None:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(trial, score)


def make_searcher(name: str, space: Space, mode: str, seed: int) -> Searcher:
    """Return a new searcher: optuna, random or grid; the rest is as of :class:`OptunaSearcher`."""
    if name == "optuna":
        return OptunaSearcher(space, mode, seed)
    points = iter(space.list_points()) if name == "grid" else sample_space(space, seed)
    return Searcher(points)


def sample_space(space: Space, seed: int) -> Iterator[dict[str, Any]]:
    """Yield random options (name -> value), none twice, until all points of a space are sampled.

    A space that is infinite or too large to count has no end.

    Sample n depends on the seed and n only, not on the order in which trials end.
    """
    num_points = space.count_points()
    sampled: list[dict[str, Any]] = []
    for draw in itertools.count():
        if len(sampled) == num_points:
            return
        study = optuna.create_study(sampler=RandomSampler(_derive_seed(seed, draw)))
        options = space.suggest(study.ask())
        if options not in sampled:
            sampled.append(options)
            yield options


def _derive_seed(seed: int, draw: int) -> int:
    """Return the seed of one draw, so that a resumed search does not repeat samples."""
    return int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])
