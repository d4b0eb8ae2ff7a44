"""The plan of a study: the types of its keys, and the training runs that they ask for."""

from __future__ import annotations

import graphlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)

from recbole_pos.study.ranks import COLD, KINDS
from recbole_pos.study.study_source import Source
from recbole_pos.values import is_number, is_whole, shown, suggest

FIRST_SEED = 2020  # RecBole's default
METRICS = ("ndcg@10", "hit@10", "mrr@10")
SEARCHERS = ("optuna", "random", "grid")
_RUN_NAME = re.compile(r"\n|, (trial|seed) \d+")


@dataclass(frozen=True)
class Search:
    """How the configuration of a row is searched, by validation only.

    Attributes:
        trials: number of configurations to try.
        grid: option -> values, of which every combination is tried; None for a space.
        space: option -> how it is sampled, as in a space file; or the name of a space file; None
            for a grid.
        searcher: what chooses from a space: optuna, random or grid.
        seed: seed of the searcher; that of the first run if None.
    """

    trials: int
    grid: dict[str, list[Any]] | None = None
    space: dict[str, Any] | str | None = None
    searcher: str = "optuna"
    seed: int | None = None

    def points(self) -> list[dict[str, Any]]:
        """Return all combinations of a grid, the last option changing first."""
        grid = self.grid or {}
        return [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]

    def __str__(self) -> str:
        if self.grid is None:
            names = self.space if isinstance(self.space, str) else ", ".join(self.space or {})
            return f"{self.trials} trials of {names}"
        return "; ".join(
            f"{name}: {', '.join(map(str, values))}" for name, values in self.grid.items()
        )


def _parse_names(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else () if value is None else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError("expected a list of names")
    if repeated := find_repeated(names):
        raise ValueError(f"{repeated[0]} is given twice")
    return tuple(names)


def find_repeated(values: Sequence[Any]) -> list[Any]:
    """Return the values of a list that have stood in it before."""
    return [value for index, value in enumerate(values) if value in values[:index]]


def _check_row_name(name: str) -> str:
    if _RUN_NAME.search(name):
        raise ValueError("expected one line without `, trial 0` or `, seed 0`, which name its runs")
    return name


def _parse_seeds(value: Any) -> tuple[int, ...]:
    if is_whole(value) and 1 <= value <= 1000:
        return tuple(range(FIRST_SEED, FIRST_SEED + value))
    is_list = isinstance(value, list) and value and all(is_whole(v) and v >= 0 for v in value)
    if not is_list or find_repeated(value):
        raise ValueError("expected how many, or different whole numbers in a list")
    return tuple(value)


def _check_bins(bins: dict[str, Any]) -> dict[str, Any]:
    for kind, edges in bins.items():
        if kind == COLD:
            if not isinstance(edges, bool):
                raise ValueError("cold is true or false")
            continue
        if kind not in KINDS:
            raise ValueError(f"unknown kind {shown(kind)}{suggest(str(kind), (*KINDS, COLD))}")
        has_edges = isinstance(edges, list) and edges and all(map(is_number, edges))
        if not has_edges or edges != sorted(set(edges)):
            raise ValueError(f"{kind}: expected edges between bins, ascending, such as [5, 15]")
    return {kind: edges for kind, edges in bins.items() if edges}


def _parse_search(value: Any) -> Search | Literal[True] | None:
    """Return a search from a grid, ``option: [values]``, or from ``{trials: 20, space: ...}``."""
    if value is None or isinstance(value, bool) or value == {}:
        return value or None
    if not isinstance(value, dict):
        raise ValueError("expected options and their values, {hidden_dropout_prob: [0.2, 0.3]}")
    if "trials" in value or "space" in value:
        trials, space, seed = (value.get(key) for key in ("trials", "space", "seed"))
        searcher = value.get("searcher", "optuna")
        is_known = searcher in SEARCHERS and set(value) <= {"trials", "space", "searcher", "seed"}
        is_space = isinstance(space, (str, dict)) and space
        is_seed = seed is None or (is_whole(seed) and seed >= 0)
        if not is_whole(trials) or trials < 1 or not (is_known and is_space and is_seed):
            raise ValueError("expected {trials: NUMBER, space: options or a file}")
        return Search(trials, None, space, searcher, seed)
    for name, values in value.items():
        if isinstance(values, dict):
            raise ValueError(f"{name} is sampled: write {{trials: 20, space: {{{name}: ..}}}}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name}: expected a list of values")
        if find_repeated(values):
            raise ValueError(f"{name}: a value is listed twice")
    return Search(math.prod(map(len, value.values())), grid=value)


def _refuse(value: Any) -> None:
    raise ValueError("it cannot stand here")


Text = Annotated[str, StringConstraints(strip_whitespace=True)]
Names = Annotated[tuple[str, ...], BeforeValidator(_parse_names)]
Metric = Annotated[str, StringConstraints(pattern=r"^[A-Za-z]+@[1-9]\d*$", to_lower=True)]
Metrics = Annotated[tuple[Metric, ...], BeforeValidator(_parse_names)]
Empty = BeforeValidator(lambda value: {} if value is None else value)  # a key without a value
Refused = BeforeValidator(_refuse)  # not a key of a study, but set by the code
Searched = Annotated[Search | Literal[True] | None, BeforeValidator(_parse_search)]


class _Layout(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Options(_Layout):
    """Options of all rows or of one: those of a run, and files of them, which are read before."""

    model_config = ConfigDict(extra="allow")
    config_files: Names = ()
    seed: Annotated[None, Refused] = None  # the same for all rows
    dataset: Annotated[None, Refused] = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of a run, which are all further keys."""
        assert self.model_extra is not None  # since they are allowed
        return self.model_extra


class Attach(_Layout):
    """Position schemes that are added to the trained models of the row ``to``, and trained."""

    to: str
    schemes: Annotated[Names, Field(min_length=1)]


class Row(Options):
    """A line of the comparison: model and options, which win over those of the base.

    Attributes:
        attach: schemes to add to the trained models of another row.
        retest: name of a row whose trained models are only tested again, with own options.
        search: search of the row; that of the study if True, none if None.
        unread: options of the base that only models of other rows read.
    """

    attach: Attach | None = None
    retest: str | None = None
    search: Searched = True
    unread: Annotated[tuple[str, ...], Refused] = ()

    @property
    def parent(self) -> str | None:
        """Name of the row whose trained models it starts from; None if it is trained."""
        return self.attach.to if self.attach else self.retest

    @property
    def schemes(self) -> tuple[str, ...]:
        """Schemes to attach to the models of its parent; none where they are tested again."""
        return self.attach.schemes if self.attach else ()


class TablePlan(_Layout):
    """A table of the report: differences are in its first metric; empty is as in the study.

    Attributes:
        validation: whether the table has a column of the validation metric, to choose rows by.
    """

    title: Text = ""
    rows: Names = ()
    metrics: Metrics = ()
    reference: Text = ""
    validation: bool = False


class Plan(_Layout):
    """A study, checked as far as possible without its models and data.

    Attributes:
        search_seeds: number of first seeds over which a search takes the mean of validation.
        ties: order of the interactions of one user at one time: ``file``, ``random(SEED)`` or
            ``drop`` (users whose test item depends on it are left out).
        paper: row -> metric -> value in the paper.
        unit: what a user of the dataset is called, whose targets are not independent.
        source: what the plan was read from, for messages.
    """

    title: Text = ""
    question: Text = ""
    protocol: Text = ""
    dataset: Annotated[Text, Field(min_length=1)]
    base: Annotated[Options, Empty] = Options()
    rows: Annotated[
        dict[Annotated[str, AfterValidator(_check_row_name)], Annotated[Row, Empty]],
        Field(min_length=1),
    ]
    search: Searched = None
    seeds: Annotated[tuple[int, ...], BeforeValidator(_parse_seeds)] = (FIRST_SEED,)
    search_seeds: Annotated[int, Field(ge=1)] = 1
    reference: Text = ""
    metrics: Annotated[Metrics, Field(min_length=1)] = METRICS
    bins: Annotated[dict[str, Any], AfterValidator(_check_bins), Empty] = {}
    paper: Annotated[dict[str, dict[Metric, float]], Empty] = {}
    tables: Annotated[list[TablePlan], BeforeValidator(lambda v: [] if v is None else v)] = []
    split: dict[str, Any] | None = None
    ties: Annotated[str, Field(pattern=r"^(file|drop|random\(\d+\))$")] = "file"
    unit: Literal["user", "session"] = "user"
    like: Annotated[None, Refused] = None  # of a file it is merged already
    source: Annotated[Any, Refused] = Source("", {})

    @property
    def trial_seeds(self) -> tuple[int, ...]:
        """Seeds of every trial of a search."""
        return self.seeds[: self.search_seeds]

    def options(self, name: str) -> dict[str, Any]:
        """Return model, dataset, config files and options of a row, without those of a search.

        A row with a parent has its own options only, and the schemes to attach under ``attach``.
        """
        row = self.rows[name]
        if row.parent:
            return {**row.options, "attach": list(row.schemes)}
        files = [*self.base.config_files, *row.config_files]
        base = {key: value for key, value in self.base.options.items() if key not in row.unread}
        options = {**base, **row.options, "dataset": self.dataset}
        options |= {"config_files": files} if files else {}
        if self.ties != "file":
            options["eval_args"] = {**(options.get("eval_args") or {}), "ties": self.ties}
        return options

    def first_options(self, name: str) -> dict[str, Any]:
        """Return the options of a row with the first values of its grid, over its parent's."""
        row, options = self.rows[name], self.options(name)
        if row.parent:
            return {**self.first_options(row.parent), **options}
        point = row.search.points()[0] if isinstance(row.search, Search) else {}
        return {**options, **point, "seed": self.seeds[0]}

    def search_lines(self, name: str) -> dict[str, str]:
        """Return option -> file and line, of the options that the search of a row tries."""
        search = self.rows[name].search
        if not isinstance(search, Search):
            return {}
        path = ("search",) if search is self.search else ("rows", name, "search")
        if isinstance(search.space, str):  # its file has lines of its own
            return {}
        if search.space:
            path = (*path, "space")
        options = search.grid or search.space or {}
        return {option: self.source.where(*path, option) for option in options}

    def order(self) -> list[str]:
        """Return the names of rows, each after its parent.

        Raises:
            UsageError: if configurations are made of each other in a circle.
        """
        parents = {name: [row.parent] if row.parent else [] for name, row in self.rows.items()}
        try:
            return list(graphlib.TopologicalSorter(parents).static_order())
        except graphlib.CycleError as error:
            circle = error.args[1]
            raise self.source.error(
                ("rows", circle[0]),
                f"configurations are made of each other in a circle: {', '.join(circle)}",
            ) from error

    def ancestors(self, name: str) -> list[str]:
        """Return a row, its parent, the parent of that, and so on."""
        parent = self.rows[name].parent
        return [name, *(self.ancestors(parent) if parent else [])]

    def coupled(self, row: str, other: str) -> bool:
        """Return whether two rows share the noise of a seed, since one trained model is in both."""
        return self.ancestors(row)[-1] == self.ancestors(other)[-1]


@dataclass(frozen=True)
class Fit:
    """One training, or one test of what another fit has trained.

    Attributes:
        row: name of its row.
        seed: seed of the training.
        stage: ``trial`` (of a search), ``final``, ``attach`` or ``retest``.
        trial: number of the trial, from 0; None for others.
        options: model, dataset, options and config_files, as far as the plan has them: without the
            samples of a trial, and without the choice of a search for a final fit.
        after: names of fits that must have ended: all trials of the row, or the fit of its parent.
        repeats: whether a trial has trained the same run: the configuration that a search has
            chosen, with a seed of the trials.
        name: name of the fit within the study.
    """

    row: str
    seed: int
    stage: str
    trial: int | None
    options: Mapping[str, Any]
    name: str
    after: tuple[str, ...] = ()
    repeats: bool = False

    @property
    def has_parent(self) -> bool:
        """Whether it starts from the weights of another row."""
        return self.stage in ("attach", "retest")


def list_fits(plan: Plan) -> list[Fit]:
    """Return all fits of a plan, each after the fits it depends on.

    All rows have their first seed before any has its second, so that an interrupted study has all
    rows with the same seeds.
    """
    trials = {row: _list_trials(plan, row) for row in plan.order()}
    finals = [
        _make_final_fit(plan, row, seed, trials[row]) for seed in plan.seeds for row in trials
    ]
    return [*itertools.chain.from_iterable(trials.values()), *finals]


def _list_trials(plan: Plan, row: str) -> list[Fit]:
    """Return the trials of a row with every seed of a trial; none if it is not searched."""
    search = plan.rows[row].search
    if not isinstance(search, Search):
        return []
    points = search.points() if search.grid else [{}] * search.trials
    fits = []
    for trial, point in enumerate(points):
        for seed in plan.trial_seeds:
            options = {**plan.options(row), **point, "seed": seed}
            suffix = f", seed {seed}" if seed != plan.seeds[0] else ""
            fits.append(Fit(row, seed, "trial", trial, options, f"{row}, trial {trial}{suffix}"))
    return fits


def _make_final_fit(plan: Plan, row: str, seed: int, trials: list[Fit]) -> Fit:
    """Return the fit that is tested of a row and a seed, after the trials of the row."""
    parent, after, stage = plan.rows[row].parent, tuple(fit.name for fit in trials), "final"
    if parent:
        after, stage = (f"{parent}, seed {seed}",), "attach" if plan.rows[row].attach else "retest"
    repeats = bool(trials) and seed in plan.trial_seeds
    options = {**plan.options(row), "seed": seed}
    return Fit(row, seed, stage, None, options, f"{row}, seed {seed}", after, repeats)
