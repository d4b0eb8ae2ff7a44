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
    """A fixed sequence of configurations, whatever the results of trials: random, or a grid.

    Args:
        sequence: the options of each trial.
    """

    def __init__(self, sequence: Iterator[dict[str, Any]]) -> None:
        self.sequence, self.sampled = sequence, list[dict[str, Any]]()

    def ask(self, key: int) -> dict[str, Any]:
        """Return the options of the trial whose number is ``key``."""
        while len(self.sampled) <= key:
            options = next(self.sequence, None)
            if options is None:
                raise UsageError(f"search: the space has {len(self.sampled)} combinations")
            self.sampled.append(options)
        return self.sampled[key]

    def recall(self, key: int, options: dict[str, Any]) -> None:
        """Take over a trial of an earlier call, as if :meth:`ask` had returned its options.

        A resumed search calls this for all its trials, in the order of their numbers.
        """

    def tell(self, key: int, score: float | None) -> None:
        """Record the best validation value of a trial that has ended; None if it failed."""


class OptunaSearcher(Searcher):
    """Optuna's TPE (Bergstra et al. 2011).

    Ray's own OptunaSearch cannot resume from a record, and gives failed trials a bad score. Here
    trials in progress have one (constant liar), so that parallel trials differ.

    Args:
        space: the space that is searched.
        mode: max or min.
        seed: seed of the random state.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        self.space, self.seed = space, seed
        self.study = optuna.create_study(direction="maximize" if mode == "max" else "minimize")
        self.asked: dict[int, Any] = {}  # key -> Optuna's trial, until it has ended

    def ask(self, key: int) -> dict[str, Any]:
        """Let TPE suggest the options of the next trial."""
        seed = _sampler_seed(self.seed, len(self.study.trials))
        self.study.sampler = TPESampler(seed=seed, constant_liar=True)
        self.asked[key] = self.study.ask()
        return self.space.suggest(self.asked[key])

    def recall(self, key: int, options: dict[str, Any]) -> None:
        """Let the study suggest the options of an earlier call."""
        self.study.enqueue_trial(self.space.encode(options))
        self.ask(key)

    def tell(self, key: int, score: float | None) -> None:
        """Tell Optuna the score of a trial; one without a score, or with NaN, counts as failed."""
        trial = self.asked.pop(key, None)
        if trial is None:  # reported already
            return
        if score is None:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(trial, score)


def make_searcher(name: str, space: Space, mode: str, seed: int) -> Searcher:
    """Return a new searcher: optuna, random or grid.

    Args:
        name: name of the searcher.
        space, mode, seed: as of :class:`OptunaSearcher`.
    """
    if name == "optuna":
        return OptunaSearcher(space, mode, seed)
    return Searcher(iter(space.grid()) if name == "grid" else sample_space(space, seed))


def sample_space(space: Space, seed: int) -> Iterator[dict[str, Any]]:
    """Yield random combinations, none of them twice, until all are sampled.

    Sample n depends on the seed and n only, not on the order in which trials end.
    """
    count, sampled = space.count_points(), list[dict[str, Any]]()
    for number in itertools.count():
        if len(sampled) == count:
            return
        study = optuna.create_study(sampler=RandomSampler(_sampler_seed(seed, number)))
        if (options := space.suggest(study.ask())) not in sampled:
            sampled.append(options)
            yield options


def _sampler_seed(seed: int, number: int) -> int:
    """Return a seed for one sample: one seed for all would repeat samples after a resume."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
