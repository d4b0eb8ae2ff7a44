"""The search of one row: the configurations it tries, and the best of them in validation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.runs.searchers import OptunaSearcher
from recbole_pos.runs.space import Space, fit_space, parse_space, read_space, space_file
from recbole_pos.study.configs import row_config
from recbole_pos.study.expand import digest, first_options, grid
from recbole_pos.study.plan import Plan, Row, Search
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.values import short, shown


def mean_of_seeds(values: Sequence[float | None], seeds: int) -> float | None:
    """Return the mean validation value of a trial over its seeds; None unless each has a value."""
    scores = [value for value in values if value is not None]
    return math.fsum(scores) / seeds if len(scores) == seeds else None


def _require_not_given(plan: Plan, row: Row, names: Iterable[str]) -> None:
    """Raise a UsageError for an option that is given and searched: one would have no effect."""
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
    """The trials of a row, chosen by validation only: none of them has test events.

    A grid is tried point by point. A space is sampled by Optuna (TPE), and the samples are kept in
    the study's folder, so that a search resumes with the same trials.

    Args:
        plan: plan of the study.
        row: row of the plan, with a search.
        folder: folder of the study.

    Raises:
        UsageError: for options that the row's model does not take, or that are given and searched.

    Attributes:
        metric: validation metric that chooses, which is that of early stopping.
        asked: trial -> options that the search gives it.
        scores: trial -> its mean validation value, once all of its seeds have ended.
        by_seed: trial -> validation value with each seed so far.
        times: number of seeds of a trial.
        kept: trial -> options that were sampled from a space.
        space: digest of the space and the sampler; empty for a grid.
    """

    def __init__(self, plan: Plan, row: Row, folder: StudyFolder) -> None:
        """Read the grid, or the space with its earlier samples, and check them."""
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
        drawn_from = [
            [parameter.name, parameter.kind, parameter.values, parameter.when]
            for parameter in space.parameters
        ]
        about = {"space": drawn_from, "seed": plan.seeds[0], "mode": self.mode}
        self.space = digest({**about, **({"given": space.context} if space.context else {})})
        self.kept = folder.drawn(row.name, self.space)
        for drawn in self.kept.values():
            self.require_drawable(drawn, f"{folder.searches} is damaged")

    def require_drawable(self, drawn: dict[str, Any], name: str) -> None:
        """Require that options could have been sampled from the space.

        Args:
            drawn: the options.
            name: file of the options, for messages.

        Raises:
            UsageError: naming the row and the options.
        """
        assert self.searcher is not None
        space = self.searcher.space
        existing = {
            parameter.name: parameter
            for parameter in space.parameters
            if space.exists(parameter, drawn)
        }
        if drawn.keys() != existing.keys() or not all(
            existing[key].has(drawn[key]) for key in drawn
        ):
            raise UsageError(
                f"{name}: {short(self.row.name)}: {shown(drawn)} cannot be sampled from its space"
            )

    def _space(self, plan: Plan, search: Search, config: PosConfig) -> Space:
        """Return the space of a search, checked; options of the row win over its fixed options."""
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
            trial: number of the trial.
            drawn: options that the same search has sampled for it elsewhere, if any.
        """
        if trial in self.asked:  # the trial has another seed already
            return self.asked[trial]
        if self.searcher is None:
            self.asked[trial] = self.points[trial]
            return self.asked[trial]
        sampled = self.kept.get(trial, drawn)
        if sampled is None:
            sampled = self.searcher.ask(trial)
            self.kept[trial] = sampled
            self.keep()
        else:
            self.searcher.recall(trial, sampled)
            self.kept[trial] = sampled
        self.asked[trial] = self.options(sampled)
        return self.asked[trial]

    def keep(self) -> None:
        """Write the samples from a space to the study's folder."""
        if self.searcher is not None:
            self.folder.write_drawn(self.row.name, self.space, self.kept)

    def options(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Return sampled options with the fixed options of the space."""
        return {**self.fixed, **drawn}

    def known(self, trial: int) -> bool:
        """Return whether the options of a trial are known before it is sampled."""
        return self.searcher is None or trial in self.kept

    def tell(self, trial: int, score: float | None) -> None:
        """Record the best validation value of a trial with one of its seeds; None if it failed.

        The score of a trial is the mean over its seeds; it has none if one of them failed.
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
        """Return the trial with the best validation value, the first of equals, or None."""
        if not self.scores:
            return None
        sign = 1 if self.mode == "max" else -1
        return max(sorted(self.scores), key=lambda trial: sign * self.scores[trial])
