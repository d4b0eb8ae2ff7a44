"""Where configurations come from: Optuna's TPE, random draws, or a grid, behind Ray's interface."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
from ray.tune.search import Searcher

from recbole_pos.tune.space import Space

BEST = "best"  # the metric of a search: the best validation score of a trial so far


class NumberedSearcher(Searcher):
    """Gives every trial a number, from 0 on, and ``options``; its state can be saved and restored.

    Args:
        space: what is searched.
        mode: max or min.
        seed: of the draws.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(metric=BEST, mode=mode)
        self.space, self.seed = space, seed
        self.numbers: dict[str, int] = {}

    def suggest(self, trial_id: str) -> Any:
        """Ray's hook: the configuration of a new trial, or ``Searcher.FINISHED``."""
        number = len(self.numbers)
        options = self.options(number, trial_id)
        if options is None:
            return Searcher.FINISHED
        self.numbers[trial_id] = number
        return {"number": number, "options": options}

    def options(self, number: int, trial_id: str) -> dict[str, Any] | None:
        """The options of a trial; None when there are no more."""
        raise NotImplementedError

    def recall(self, trial_id: str, options: dict[str, Any]) -> None:
        """Stand as after a suggestion that was made before, trial after trial."""
        self.options(len(self.numbers), trial_id)
        self.numbers[trial_id] = len(self.numbers)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Ray's hook: a trial ended."""

    def save(self, checkpoint_path: str) -> None:
        """Ray's hook: everything of this object into a file."""
        with open(checkpoint_path, "wb") as file:
            pickle.dump(self.__dict__, file)

    def restore(self, checkpoint_path: str) -> None:
        """Ray's hook: what :meth:`save` wrote. Ray's own state beside it is pickled likewise."""
        with open(checkpoint_path, "rb") as file:
            self.__dict__.update(pickle.load(file))


class RandomSearcher(NumberedSearcher):
    """Trial n depends on seed and n alone: not on machines, or on which trial ends first.

    No combination is drawn twice; where there are few, the draws end when all are drawn.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        super().__init__(space, mode, seed)
        self.points = space.points()
        self.drawn: list[dict[str, Any]] = []
        self.draws = 0

    def options(self, number: int, trial_id: str) -> dict[str, Any] | None:
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

    def options(self, number: int, trial_id: str) -> dict[str, Any] | None:
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
        self.asked: dict[str, Any] = {}

    def options(self, number: int, trial_id: str) -> dict[str, Any]:
        import optuna

        # Of each trial its own: a search that is taken up again would draw its first trials twice.
        (seed,) = np.random.SeedSequence((self.seed, number)).generate_state(1)
        self.study.sampler = optuna.samplers.TPESampler(seed=int(seed), constant_liar=True)
        self.asked[trial_id] = self.study.ask()
        return self.space.suggest(self.asked[trial_id])

    def recall(self, trial_id: str, options: dict[str, Any]) -> None:
        self.study.enqueue_trial(self.space.suggested(options))
        super().recall(trial_id, options)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        import optuna

        trial = self.asked.pop(trial_id, None)
        if trial is None:  # told already, before the search was resumed
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
