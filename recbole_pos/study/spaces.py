"""The search of one row: which configurations are tried, and which is best in validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from recbole_pos.study.expand import digest, grid
from recbole_pos.study.folder import StudyFolder
from recbole_pos.study.plan import Plan, Row
from recbole_pos.tune.files import read_space, space_file, space_of
from recbole_pos.tune.searchers import BEST, OptunaSearcher


def mean_of_seeds(values: Sequence[float | None], seeds: int) -> float | None:
    """What a trial is chosen by; None unless it has a value with each of its seeds."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / seeds if len(known) == seeds else None


class RowSearch:
    """Trials of a row, by validation alone: none of them has test events.

    A grid is tried point by point; of a space Optuna draws (TPE), and what was drawn is kept in the
    study's folder, so that a search goes on as it began.

    Args:
        plan: of the study.
        row: of the plan, with a search.
        folder: of the study.

    Attributes:
        asked: trial -> options that the search gives it.
        scores: trial -> its mean in validation, where all of its seeds are through.
        told: trial -> validation with each seed so far.
        times: seeds of a trial.
        kept: trial -> what was drawn for it, of a space.
        space: digest of what is drawn from, and how; empty for a grid.
    """

    def __init__(self, plan: Plan, row: Row, folder: StudyFolder) -> None:
        self.row, self.folder = row, folder
        self.metric = str(plan.base.get("valid_metric", plan.metrics[0])).lower()
        self.mode = "max" if plan.base.get("valid_metric_bigger", True) else "min"
        self.asked: dict[int, dict[str, Any]] = {}
        self.scores: dict[int, float] = {}
        self.told: dict[int, list[float | None]] = {}
        self.times = len(plan.tried_with)
        search = row.search
        assert search is not None
        self.points = grid(search.grid) if search.grid is not None else []
        self.searcher: OptunaSearcher | None = None
        self.space, self.fixed = "", dict[str, Any]()
        self.kept: dict[int, dict[str, Any]] = {}
        if search.grid is None:
            space = (
                read_space(space_file(search.space, ""))
                if isinstance(search.space, str)
                else space_of(search.space or {}, search.lines)
            )
            self.searcher = OptunaSearcher(space, self.mode, plan.seeds[0])
            self.fixed = space.fixed
            drawn_from = [[one.name, one.kind, one.values, one.when] for one in space.parameters]
            self.space = digest({"space": drawn_from, "seed": plan.seeds[0], "mode": self.mode})
            self.kept = folder.drawn(row.name, self.space)

    def ask(self, trial: int, drawn: dict[str, Any] | None = None) -> dict[str, Any]:
        """The options of a trial.

        Args:
            trial: its number.
            drawn: what the same search has drawn for it elsewhere.
        """
        if trial in self.asked:  # with a further seed
            return self.asked[trial]
        if self.searcher is None:
            self.asked[trial] = self.points[trial]
            return self.asked[trial]
        known = self.kept.get(trial, drawn)
        if known is None:
            known = self.searcher.suggest(str(trial))["options"]
            self.kept[trial] = known
            self.keep()
        else:
            self.searcher.recall(str(trial), known)
            self.kept[trial] = known
        self.asked[trial] = self.options(known)
        return self.asked[trial]

    def keep(self) -> None:
        """Write down what was drawn, of a space."""
        if self.searcher is not None:
            self.folder.write_drawn(self.row.name, self.space, self.kept)

    def options(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """What was drawn, with what the space fixes."""
        return {**self.fixed, **drawn}

    def known(self, trial: int) -> bool:
        """Whether the options of a trial are known before it is asked for."""
        return self.searcher is None or trial in self.kept

    def tell(self, trial: int, score: float | None) -> None:
        """The best validation value of a trial with one of its seeds; None if that failed.

        A trial has the mean over its seeds, none where one failed.
        """
        told = self.told.setdefault(trial, [])
        told.append(score)
        if len(told) < self.times:
            return
        score = mean_of_seeds(told, self.times)
        if score is not None:
            self.scores[trial] = score
        if self.searcher is not None:
            result = None if score is None else {BEST: score}
            self.searcher.on_trial_complete(str(trial), result, error=score is None)

    def best(self) -> int | None:
        """The trial with the best validation value, the first of equal ones; None without any."""
        if not self.scores:
            return None
        sign = 1 if self.mode == "max" else -1
        return max(sorted(self.scores), key=lambda trial: sign * self.scores[trial])
