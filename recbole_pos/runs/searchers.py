"""How Optuna samples: for Ray Tune in ``tune``, and the spaces of a study in ``compare``."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection

optuna.logging.set_verbosity(optuna.logging.WARNING)


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
