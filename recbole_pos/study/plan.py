"""The plan of a study: rows of models and options, seeds, searches, and tables of comparisons."""

from __future__ import annotations

import graphlib
from dataclasses import dataclass, field
from typing import Any

from recbole_pos.study.study_source import Source

FIRST_SEED = 2020  # RecBole's default


@dataclass(frozen=True)
class Attach:
    """How the runs of a row are made from the trained models of another row.

    Attributes:
        to: name of the other row.
        schemes: position schemes to add to its models and train; empty for a row that only tests
            the models again, with options of its own.
    """

    to: str
    schemes: tuple[str, ...] = ()

    @property
    def retest(self) -> bool:
        """Whether the models are only tested again."""
        return not self.schemes


@dataclass(frozen=True)
class Search:
    """How the configuration of a row is searched, by validation only.

    Attributes:
        trials: number of configurations to try.
        grid: option -> values, of which every combination is tried; None for a space.
        space: option -> how it is sampled, as in a space file; or the name of a space file; None
            for a grid.
        lines: option -> file and line.
    """

    trials: int
    grid: dict[str, list[Any]] | None = None
    space: dict[str, Any] | str | None = None
    lines: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.grid is None:
            names = self.space if isinstance(self.space, str) else ", ".join(self.space or {})
            return f"{self.trials} trials of {names}"
        return "; ".join(
            f"{name}: {', '.join(map(str, values))}" for name, values in self.grid.items()
        )


@dataclass(frozen=True)
class Row:
    """One line of the comparison.

    Attributes:
        name: name in tables.
        options: model and options, which win over those of the base.
        config_files: config files, which are read after those of the base.
        attach: the row whose models it starts from; None for a row that is trained from scratch.
        search: search of the row or of the study; None where nothing is searched.
        unread: options of the base that only models of other rows read.
    """

    name: str
    options: dict[str, Any]
    config_files: tuple[str, ...] = ()
    attach: Attach | None = None
    search: Search | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ties:
    """The order of interactions of one user at one time.

    Attributes:
        order: ``file``, ``random`` or ``drop`` (users whose test item depends on it are left out).
        seed: seed of a random order.
    """

    order: str = "file"
    seed: int | None = None

    def __str__(self) -> str:
        return self.order if self.seed is None else f"{self.order}({self.seed})"


@dataclass(frozen=True)
class TablePlan:
    """One table of the report.

    Attributes:
        title: title above the table.
        rows: names of its rows.
        metrics: metrics in its columns; differences are of the first.
        reference: row that the others are compared to.
        validation: whether the table has a column of the validation metric, to choose rows by.
    """

    title: str
    rows: tuple[str, ...]
    metrics: tuple[str, ...]
    reference: str
    validation: bool = False


@dataclass(frozen=True)
class Plan:
    """A study, checked as far as possible without its models and data.

    Attributes:
        dataset: name of the dataset.
        title, question, protocol: texts of the report.
        base: options of every row.
        config_files: config files of every row.
        rows: by name, in the order of the tables.
        seeds: seeds of every row.
        search_seeds: number of first seeds over which a search takes the mean of validation.
        reference: row that the others are compared to.
        metrics: metrics in lower case; the first is the main one.
        bins: kind -> edges, or cold -> True.
        paper: row -> metric -> value in the paper.
        tables: tables of the report.
        ties: order of events at one time.
        unit: column of the ranks whose values are independent of each other.
        source: what the plan was read from, for messages.
    """

    dataset: str
    title: str
    rows: dict[str, Row]
    seeds: tuple[int, ...]
    reference: str
    metrics: tuple[str, ...]
    tables: tuple[TablePlan, ...]
    source: Source
    question: str = ""
    protocol: str = ""
    base: dict[str, Any] = field(default_factory=dict)
    config_files: tuple[str, ...] = ()
    bins: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    ties: Ties = Ties()
    unit: str = "user"
    search_seeds: int = 1

    @property
    def tried_with(self) -> tuple[int, ...]:
        """Seeds of every trial of a search."""
        return self.seeds[: self.search_seeds]

    def options(self, row: str) -> dict[str, Any]:
        """Return model, dataset, config files and options of a row, without those of a search.

        An attached row has its own options only, and the schemes to attach under ``attach``.
        """
        planned = self.rows[row]
        if planned.attach:
            return {**planned.options, "attach": list(planned.attach.schemes)}
        files = [*self.config_files, *planned.config_files]
        listed = {"config_files": files} if files else {}
        base = {key: value for key, value in self.base.items() if key not in planned.unread}
        options = {**base, **planned.options, "dataset": self.dataset, **listed}
        if self.ties.order != "file":
            options["eval_args"] = {**(options.get("eval_args") or {}), "ties": str(self.ties)}
        return options

    def order(self) -> list[str]:
        """Return the names of rows, each after the row that it is attached to.

        Raises:
            UsageError: if configurations are attached to each other in a circle.
        """
        needs = {row.name: [row.attach.to] if row.attach else [] for row in self.rows.values()}
        try:
            return list(graphlib.TopologicalSorter(needs).static_order())
        except graphlib.CycleError as error:
            circle = error.args[1]
            raise self.source.error(
                ("rows", circle[0], "attach"),
                f"configurations are attached to each other in a circle: {', '.join(circle)}",
            ) from error

    def root(self, row: str) -> str:
        """Return the row at the start of a chain of attachments, perhaps the row itself."""
        while attach := self.rows[row].attach:
            row = attach.to
        return row

    def coupled(self, row: str, other: str) -> bool:
        """Return whether two rows share the noise of a seed, since one trained model is in both."""
        return self.root(row) == self.root(other)


def require_equal_trials(plan: Plan) -> None:
    """Require the same number of trials for all searched rows, for a fair comparison.

    Raises:
        UsageError: naming two rows, their numbers of trials and the line.
    """
    searched = [(row.name, row.search.trials) for row in plan.rows.values() if row.search]
    for row, trials in searched[1:]:
        first, budget = searched[0]
        if trials != budget:
            raise plan.source.error(
                ("rows", row, "search"),
                f"{row} is searched with {trials} trials and {first} with "
                f"{budget}; give all as many, or those that need none `search: false`",
            )
