"""The plan of a study: rows of models and options, seeds, one search for all, what is compared."""

from __future__ import annotations

import graphlib
from dataclasses import dataclass, field
from typing import Any

from recbole_pos.study.study_source import Source

FIRST_SEED = 2020  # RecBole's default


@dataclass(frozen=True)
class Attach:
    """A row whose runs are made from those of another.

    Attributes:
        to: that row.
        schemes: position schemes that its trained models are given; none of a row that only tests
            them again, with options of its own.
    """

    to: str
    schemes: tuple[str, ...] = ()

    @property
    def retest(self) -> bool:
        """Whether nothing is trained."""
        return not self.schemes


@dataclass(frozen=True)
class Search:
    """How a row's configuration is found, by validation alone.

    Attributes:
        trials: configurations that are tried.
        grid: option -> values, of which every combination is tried; None for a space.
        space: option -> how it is drawn, as in a space file; or the name of one; None for a grid.
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
        name: as tables have it.
        options: model and options, over those of the base.
        config_files: after those of the base.
        attach: whose runs it is made from; None for a row that is trained from nothing.
        search: its own or the study's; None where nothing is searched.
        unread: options of the base that its model does not read, and that others do.
    """

    name: str
    options: dict[str, Any]
    config_files: tuple[str, ...] = ()
    attach: Attach | None = None
    search: Search | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ties:
    """In which order events of one user at one time stand.

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
        title: above it.
        rows: names.
        metrics: its columns; the first is the one that differences are taken in.
        reference: row that the others are compared to.
        validation: whether it has a column of the first metric in validation, to choose rows by.
    """

    title: str
    rows: tuple[str, ...]
    metrics: tuple[str, ...]
    reference: str
    validation: bool = False


@dataclass(frozen=True)
class Plan:
    """A study, checked but for what only models and data can tell.

    Attributes:
        dataset: its name.
        title, question, protocol: in words.
        base: options of every row.
        config_files: config files of every row.
        rows: by name, in the order of the tables.
        seeds: seeds of every row.
        search_seeds: of how many of them, the first ones, a search takes the mean of validation.
        reference: row that differences are taken to.
        metrics: in lower case; the first is the main one.
        bins: kind -> edges, or cold -> True.
        paper: row -> metric -> figure.
        tables: what is shown.
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
        """Model, dataset, config files and options of a row, before a search has chosen any.

        Those of a row that is attached are its own only, with ``attach``: the schemes.
        """
        found = self.rows[row]
        if found.attach:
            return {**found.options, "attach": list(found.attach.schemes)}
        files = [*self.config_files, *found.config_files]
        listed = {"config_files": files} if files else {}
        base = {key: value for key, value in self.base.items() if key not in found.unread}
        options = {**base, **found.options, "dataset": self.dataset, **listed}
        if self.ties.order != "file":
            options["eval_args"] = {**(options.get("eval_args") or {}), "ties": str(self.ties)}
        return options

    def order(self) -> list[str]:
        """Return rows, each after the one that it is attached to.

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
        """Return the row that a chain of attachments begins at."""
        while attach := self.rows[row].attach:
            row = attach.to
        return row

    def coupled(self, row: str, other: str) -> bool:
        """Return whether two rows share the noise of a seed, since one trained model is in both."""
        return self.root(row) == self.root(other)


def require_equal_trials(plan: Plan) -> None:
    """No row may be searched harder than another.

    Raises:
        UsageError: naming two rows, their numbers of trials and the line.
    """
    searched = [(row.name, row.search.trials) for row in plan.rows.values() if row.search]
    for row, mine in searched[1:]:
        first, budget = searched[0]
        if mine != budget:
            raise plan.source.error(
                ("rows", row, "search"),
                f"{row} is searched with {mine} trials and {first} with "
                f"{budget}; give all as many, or those that need none `search: false`",
            )
