"""Where configurations come from: Optuna's TPE, random draws, or a grid, by ask and tell."""

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
    """Gives one configuration after the other, by the results of earlier ones.

    Args:
        space: what is searched.
        mode: max or min.
        seed: seed of the draws.

    Attributes:
        count: how many configurations were asked for.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        self.space, self.seed, self.count = space, seed, 0

    def ask(self, key: int) -> dict[str, Any] | None:
        """Return the options of the next trial, known as ``key`` from now on; None for no more."""
        raise NotImplementedError

    def recall(self, key: int, options: dict[str, Any]) -> None:
        """Stand as after an :meth:`ask` that was answered before, trial after trial."""
        self.ask(key)

    def tell(self, key: int, score: float | None) -> None:
        """Note the best validation value of a trial that has ended; None of one that failed."""

    def _sampler_seed(self, number: int) -> int:
        """A seed for each trial: a search that is resumed would draw its first ones twice."""
        return int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0])


class RandomSearcher(Searcher):
    """Trial n depends on seed and n only: not on machines, or on which trial ends first.

    No combination is drawn twice; where there are few, the draws end when all are drawn.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(space, mode, seed)
        self.points = space.points()
        self.drawn: list[dict[str, Any]] = []

    def ask(self, key: int) -> dict[str, Any] | None:
        if len(self.drawn) == self.points:
            return None
        while True:
            study = optuna.create_study(sampler=RandomSampler(self._sampler_seed(self.count)))
            self.count += 1
            if (options := self.space.suggest(study.ask())) not in self.drawn:
                self.drawn.append(options)
                return options

    def recall(self, key: int, options: dict[str, Any]) -> None:
        self.ask(key)
        if options not in self.drawn:  # of a version that drew otherwise
            self.drawn.append(options)


class GridSearcher(Searcher):
    """All combinations, in order."""

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(space, mode, seed)
        self.grid = space.grid()

    def ask(self, key: int) -> dict[str, Any] | None:
        self.count += 1
        return self.grid[self.count - 1] if self.count <= len(self.grid) else None


class OptunaSearcher(Searcher):
    """Optuna's TPE (Bergstra et al. 2011).

    Ray's own OptunaSearch would do for flat spaces; here conditions choose what is asked next, and
    failed trials are told apart from bad ones. A trial in progress counts as a bad one nearby
    (constant liar), so that trials side by side do not crowd.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(space, mode, seed)
        self.study = optuna.create_study(direction=DIRECTIONS[mode])
        self.asked: dict[int, Any] = {}  # key -> Optuna's trial, until it has ended

    def ask(self, key: int) -> dict[str, Any]:
        self.study.sampler = TPESampler(seed=self._sampler_seed(self.count), constant_liar=True)
        self.count += 1
        self.asked[key] = self.study.ask()
        return self.space.suggest(self.asked[key])

    def recall(self, key: int, options: dict[str, Any]) -> None:
        self.study.enqueue_trial(self.space.suggested(options))
        self.ask(key)

    def tell(self, key: int, score: float | None) -> None:
        trial = self.asked.pop(key, None)
        if trial is None:  # a second word about a trial that has ended
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
