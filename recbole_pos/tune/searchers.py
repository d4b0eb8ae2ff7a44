"""Where configurations come from: Optuna's TPE, random draws, or a grid, behind Ray's interface."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from ray.tune.search import Searcher

from recbole_pos.tune.space import Space

BEST = "best"  # the metric of a search: the best validation score of a trial so far


class NumberedSearcher(Searcher):
    """Gives every trial a number, from 0 on, and ``options``.

    Args:
        space: what is searched.
        mode: max or min.
        seed: of the draws.

    Attributes:
        numbers: id of a trial -> its number.
        count: how many trials were asked for.
        waiting: configurations of recalled trials that :meth:`suggest` gives before new ones.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(metric=BEST, mode=mode)
        self.space, self.seed = space, seed
        self.numbers: dict[str, int] = {}
        self.count = 0
        self.waiting: list[dict[str, Any]] = []

    def suggest(self, trial_id: str) -> Any:
        """Ray's hook: the configuration of a new trial, or ``Searcher.FINISHED``."""
        if self.waiting:
            config = self.waiting.pop(0)
        else:
            options = self.options(self.count)
            if options is None:
                return Searcher.FINISHED
            config = {"number": self.count, "options": options}
            self.count += 1
        self.numbers[trial_id] = config["number"]
        return config

    def options(self, number: int) -> dict[str, Any] | None:
        """The options of a trial; None when there are no more."""
        raise NotImplementedError

    def recall(self, trial_id: str, options: dict[str, Any]) -> None:
        """Stand as after a suggestion that was made before, trial after trial."""
        self.options(self.count)
        self.numbers[trial_id] = self.count
        self.count += 1

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Ray's hook: a trial ended."""

    def save(self, checkpoint_path: str) -> None:
        """Ray's hook: nothing, since a search is resumed from its own record."""


class RandomSearcher(NumberedSearcher):
    """Trial n depends on seed and n alone: not on machines, or on which trial ends first.

    No combination is drawn twice; where there are few, the draws end when all are drawn.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(space, mode, seed)
        self.points = space.points()
        self.drawn: list[dict[str, Any]] = []
        self.draws = 0

    def options(self, number: int) -> dict[str, Any] | None:
        if len(self.drawn) == self.points:
            return None
        while True:
            options = self.space.draw(np.random.default_rng((self.seed, self.draws)))
            self.draws += 1
            if options not in self.drawn:
                self.drawn.append(options)
                return options


class GridSearcher(NumberedSearcher):
    """All combinations, in order."""

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(space, mode, seed)
        self.grid = space.grid()

    def options(self, number: int) -> dict[str, Any] | None:
        return self.grid[number] if number < len(self.grid) else None


class OptunaSearcher(NumberedSearcher):
    """Optuna's TPE (Bergstra et al. 2011) through its ask-and-tell interface.

    Ray's own OptunaSearch would do for flat spaces; asking here lets conditions choose what is
    asked next, and tells failed trials apart from bad ones. A trial in progress counts as a bad one
    nearby (constant liar), so that trials side by side do not crowd.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        import optuna

        super().__init__(space, mode, seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = optuna.study.StudyDirection[{"max": "MAXIMIZE", "min": "MINIMIZE"}[mode]]
        self.study = optuna.create_study(direction=direction)
        self.asked: dict[int, Any] = {}  # number -> Optuna's trial, until it has ended

    def options(self, number: int) -> dict[str, Any]:
        import optuna

        # Of each trial its own: a search that is resumed would draw its first trials twice.
        (seed,) = np.random.SeedSequence((self.seed, number)).generate_state(1)
        self.study.sampler = optuna.samplers.TPESampler(seed=int(seed), constant_liar=True)
        self.asked[number] = self.study.ask()
        return self.space.suggest(self.asked[number])

    def recall(self, trial_id: str, options: dict[str, Any]) -> None:
        self.study.enqueue_trial(self.space.suggested(options))
        super().recall(trial_id, options)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        import optuna

        trial = self.asked.pop(self.numbers.get(trial_id, -1), None)
        if trial is None:  # a second word about a trial that has ended
            return
        score = (result or {}).get(BEST)
        if error or score is None or not math.isfinite(score):
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(trial, score)


SEARCHERS: dict[str, type[NumberedSearcher]] = {
    "optuna": OptunaSearcher,
    "random": RandomSearcher,
    "grid": GridSearcher,
}
