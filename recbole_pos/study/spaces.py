"""The search of one row: which configurations are tried, and which is best in validation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.runs.searchers import OptunaSearcher
from recbole_pos.runs.space import Space
from recbole_pos.runs.space_files import (
    fit_space,
    parse_space,
    read_space,
    space_file,
)
from recbole_pos.study.configs import row_config
from recbole_pos.study.expand import digest, first_options, grid
from recbole_pos.study.plan import Plan, Row, Search
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.values import short, shown


def mean_of_seeds(values: Sequence[float | None], seeds: int) -> float | None:
    """Return what a trial is chosen by; None unless it has a value with each of its seeds."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / seeds if len(known) == seeds else None


def _require_not_given(plan: Plan, row: Row, names: Iterable[str]) -> None:
    """An option is given or tried, not both: one of them would count for nothing."""
    places: dict[str, tuple[str, ...]] = {key: ("base", key) for key in plan.base}
    places |= {key: ("rows", row.name, key) for key in row.options}
    for name in names:
        if name in places:
            raise plan.source.error(
                places[name],
                f"{row.name}: {name} is given here, and its search tries it as well; take it "
                "out of one of the two (`search: false` for a configuration that is not searched)",
            )


class RowSearch:
    """Trials of a row, by validation alone: none of them has test events.

    A grid is tried point by point; of a space Optuna draws (TPE), and what was drawn is kept in the
    study's folder, so that a search goes on as it began.

    Args:
        plan: plan of the study.
        row: row of the plan, with a search.
        folder: folder of the study.

    Raises:
        UsageError: for what the row's model cannot have, or what is given and tried.

    Attributes:
        metric: that chooses: the one that early stopping of the row goes by.
        asked: trial -> options that the search gives it.
        scores: trial -> its mean in validation, where all of its seeds are through.
        by_seed: trial -> validation with each seed so far.
        times: seeds of a trial.
        kept: trial -> what was drawn for it, of a space.
        space: digest of what is drawn from, and how; empty for a grid.
    """

    def __init__(self, plan: Plan, row: Row, folder: StudyFolder) -> None:
        self.row, self.folder = row, folder
        config = row_config({**first_options(plan, row), "seed": plan.seeds[0]})
        self.metric = str(config["valid_metric"]).lower()
        self.mode = "max" if config["valid_metric_bigger"] else "min"
        self.asked: dict[int, dict[str, Any]] = {}
        self.scores: dict[int, float] = {}
        self.by_seed: dict[int, list[float | None]] = {}
        self.times = len(plan.tried_with)
        search = row.search
        assert search is not None
        self.points = grid(search.grid) if search.grid is not None else []
        self.searcher: OptunaSearcher | None = None
        self.space, self.fixed = "", dict[str, Any]()
        self.kept: dict[int, dict[str, Any]] = {}
        if search.grid is not None:
            _require_not_given(plan, row, search.grid)
            return
        space = self._space(plan, search, config)
        _require_not_given(plan, row, space.names)
        self.searcher = OptunaSearcher(space, self.mode, plan.seeds[0])
        drawn_from = [[one.name, one.kind, one.values, one.when] for one in space.parameters]
        about = {"space": drawn_from, "seed": plan.seeds[0], "mode": self.mode}
        self.space = digest({**about, **({"given": space.context} if space.context else {})})
        self.kept = folder.drawn(row.name, self.space)
        for drawn in self.kept.values():
            self.require_drawable(drawn, f"{folder.searches} is damaged")

    def require_drawable(self, drawn: dict[str, Any], name: str) -> None:
        """Require that options could have been drawn from the space.

        Args:
            drawn: the options.
            name: name of the file that they were read from, for messages.

        Raises:
            UsageError: naming the row and what was found.
        """
        assert self.searcher is not None
        space = self.searcher.space
        there = {one.name: one for one in space.parameters if space.exists(one, drawn)}
        if drawn.keys() != there.keys() or not all(there[key].has(drawn[key]) for key in drawn):
            raise UsageError(
                f"{name}: {short(self.row.name)}: {shown(drawn)} cannot be sampled from its space"
            )

    def _space(self, plan: Plan, search: Search, config: PosConfig) -> Space:
        """Return what is drawn from, checked; its fixed options give way to those of the row."""
        space = (
            read_space(space_file(search.space, ""))
            if isinstance(search.space, str)
            else parse_space(search.space or {}, search.lines)
        )
        given = config.external_config_dict
        self.fixed = {key: value for key, value in space.fixed.items() if key not in given}
        options = {**plan.options(self.row.name), "seed": plan.seeds[0]}

        def build(drawn: dict[str, Any]) -> PosConfig:
            return row_config(options, self.options(drawn))

        fit_space(space, build)
        return space

    def ask(self, trial: int, drawn: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the options of a trial.

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
            known = self.searcher.ask(trial)
            self.kept[trial] = known
            self.keep()
        else:
            self.searcher.recall(trial, known)
            self.kept[trial] = known
        self.asked[trial] = self.options(known)
        return self.asked[trial]

    def keep(self) -> None:
        """Write down what was drawn, of a space."""
        if self.searcher is not None:
            self.folder.write_drawn(self.row.name, self.space, self.kept)

    def options(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Return what was drawn, with what the space fixes."""
        return {**self.fixed, **drawn}

    def known(self, trial: int) -> bool:
        """Return whether the options of a trial are known before it is sampled."""
        return self.searcher is None or trial in self.kept

    def tell(self, trial: int, score: float | None) -> None:
        """The best validation value of a trial with one of its seeds; None if that failed.

        A trial has the mean over its seeds, none where one failed.
        """
        by_seed = self.by_seed.setdefault(trial, [])
        by_seed.append(score)
        if len(by_seed) < self.times:
            return
        score = mean_of_seeds(by_seed, self.times)
        if score is not None:
            self.scores[trial] = score
        if self.searcher is not None:
            self.searcher.tell(trial, score)

    def best(self) -> int | None:
        """The trial with the best validation value, the first of equal ones; None without any."""
        if not self.scores:
            return None
        sign = 1 if self.mode == "max" else -1
        return max(sorted(self.scores), key=lambda trial: sign * self.scores[trial])
