"""Searchers that suggest configurations by ask and tell: Optuna's TPE, random, or a grid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optuna
from optuna.samplers import RandomSampler, TPESampler
from optuna.study import StudyDirection

from recbole_pos.runs.space import Space

DIRECTIONS = {"max": StudyDirection.MAXIMIZE, "min": StudyDirection.MINIMIZE}
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Searcher:
    """Suggests one configuration after the other, by the results of earlier trials.

    Args:
        space: the space that is searched.
        mode: max or min.
        seed: seed of the random state.

    Attributes:
        count: number of configurations sampled so far.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        self.space, self.seed, self.count = space, seed, 0

    def ask(self, key: int) -> dict[str, Any] | None:
        """Return the options of the next trial, whose number is ``key``; None if none is left."""
        raise NotImplementedError

    def recall(self, key: int, options: dict[str, Any]) -> None:
        """Take over a trial of an earlier call, as if :meth:`ask` had just returned its options.

        A resumed search calls this for all its trials, in the order of their numbers.
        """
        self.ask(key)

    def tell(self, key: int, score: float | None) -> None:
        """Record the best validation value of a trial that has ended; None if it failed."""

    def _sampler_seed(self, number: int) -> int:
        """Return a seed for one trial: one seed for all would repeat samples after a resume."""
        return int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0])


class RandomSearcher(Searcher):
    """Random search: trial n depends on the seed and n only, not on the order in which trials end.

    No combination is sampled twice; a space of few combinations ends when all are sampled.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(space, mode, seed)
        self.points = space.points()
        self.drawn: list[dict[str, Any]] = []

    def ask(self, key: int) -> dict[str, Any] | None:
        """Sample until a combination is new; None once all are sampled."""
        if len(self.drawn) == self.points:
            return None
        while True:
            study = optuna.create_study(sampler=RandomSampler(self._sampler_seed(self.count)))
            self.count += 1
            if (options := self.space.suggest(study.ask())) not in self.drawn:
                self.drawn.append(options)
                return options

    def recall(self, key: int, options: dict[str, Any]) -> None:
        """Sample as the earlier call did, and count its options as sampled."""
        self.ask(key)
        if options not in self.drawn:  # an earlier version sampled them in another way
            self.drawn.append(options)


class GridSearcher(Searcher):
    """Grid search: all combinations, in the order of the space."""

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(space, mode, seed)
        self.grid = space.grid()

    def ask(self, key: int) -> dict[str, Any] | None:
        """Return the next point of the grid; None after the last."""
        self.count += 1
        return self.grid[self.count - 1] if self.count <= len(self.grid) else None


class OptunaSearcher(Searcher):
    """Optuna's TPE (Bergstra et al. 2011).

    Ray's own OptunaSearch only serves flat spaces; here parameters may have conditions, and a
    failed trial does not count as a bad one. A trial in progress counts as a bad one nearby
    (constant liar), so that parallel trials differ.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(space, mode, seed)
        self.study = optuna.create_study(direction=DIRECTIONS[mode])
        self.asked: dict[int, Any] = {}  # key -> Optuna's trial, until it has ended

    def ask(self, key: int) -> dict[str, Any]:
        """Let TPE suggest the options of the next trial."""
        self.study.sampler = TPESampler(seed=self._sampler_seed(self.count), constant_liar=True)
        self.count += 1
        self.asked[key] = self.study.ask()
        return self.space.suggest(self.asked[key])

    def recall(self, key: int, options: dict[str, Any]) -> None:
        """Let the study suggest the options of an earlier call."""
        self.study.enqueue_trial(self.space.suggested(options))
        self.ask(key)

    def tell(self, key: int, score: float | None) -> None:
        """Tell Optuna the score of a trial; a trial without a finite score counts as failed."""
        trial = self.asked.pop(key, None)
        if trial is None:  # reported already
            return
        if score is None or not math.isfinite(score):
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(trial, score)


SEARCHERS: dict[str, type[Searcher]] = {
    "optuna": OptunaSearcher,
    "random": RandomSearcher,
    "grid": GridSearcher,
}
