"""The plan of a study: the keys of its yaml file with their types, and the runs that they ask for.

:class:`Plan` is what the file says: the rows (configurations to compare), their options, seeds and
tables. :func:`list_fits` returns the fits, the training runs that follow from it.
"""

from __future__ import annotations

import graphlib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)

from recbole_pos.errors import UsageError
from recbole_pos.study.rendered_table import format_duration
from recbole_pos.values import is_number, is_whole, nearest, shown

FIRST_SEED = 2020  # RecBole's default
# What test targets can be grouped into bins by: the length of the user's history, the age of its
# newest interaction, how often it has the target item and how many percent of these at that time of
# the day, the number of training interactions of the target item, or whether it has any.
KindOfBins = Literal["history", "age", "repeats", "habit", "popularity", "cold"]
COLD = "cold"
METRICS = ("ndcg@10", "hit@10", "mrr@10")  # metrics of a study that names none

PartPath = tuple[Any, ...]  # keys and list indices that lead to a value: ("tables", 0, "rows")
Grid = dict[str, list[Any]]  # option -> values, of which a search tries every combination


@dataclass(frozen=True)
class Source:
    """The content of a study as it was written.

    Attributes:
        name: the file, or another word for where the study is from.
        content: keys and values of the study, before they are checked.
        lines: path of a value (keys and list indices, as in ``("tables", 0, "rows")``) -> the file
            and line where it is written.
    """

    name: str
    content: dict[str, Any]
    lines: dict[PartPath, str] = field(default_factory=dict)

    def error(self, path: PartPath, problem: str) -> UsageError:
        """Return an error whose message begins with the file and line of a value of the study.

        Args:
            path: keys and list indices that lead to the value, such as ``("tables", 0, "rows")``.
                If the line of the value is not known, the line of what contains it is named.
            problem: what is wrong, the rest of the message.
        """
        # Go from the outside in: ("tables",), then ("tables", 0). The last known line is kept; if
        # none is known, the name of the file.
        location = self.name
        for end in range(1, len(path) + 1):
            location = self.lines.get(path[:end], location)
        return UsageError(f"{location}: {problem}")

    def require_choice(self, path: PartPath, name: Any, rows: Collection[str]) -> None:
        """Require that a name is the name of a row (a configuration of the study).

        Args:
            path: keys and list indices of the place in the study's file where the name is written.
            name: the name, as the user has written it.
            rows: names of the rows.

        Raises:
            UsageError: with the file and line, and the most similar name, if there is no such row.
        """
        if not isinstance(name, str) or name not in rows:
            problem = f"there is no configuration {shown(name)}{nearest(str(name), rows)}"
            raise self.error(path, problem)


def list_points(grid: Grid) -> list[dict[str, Any]]:
    """Return the options of all points of a grid; the last option changes first.

    For ``{"n_heads": [1, 2], "dropout": [0.1, 0.2]}`` the first two points are
    ``{"n_heads": 1, "dropout": 0.1}`` and ``{"n_heads": 1, "dropout": 0.2}``.
    """
    return [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]


def _parse_names(value: Any) -> tuple[str, ...]:
    """Return names as a tuple, from a list of different names or from a single name.

    None, a yaml key without a value, gives no names. A ValueError refuses everything else.

    Args:
        value: what the user has written at a key that takes names.
    """
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    # find_repeated returns the names that occur earlier in the list, too.
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not is_list or find_repeated(names):
        raise ValueError("expected a list of different names")
    return tuple(names)


def find_repeated(values: Sequence[Any]) -> list[Any]:
    """Return the values of a list that also occur earlier in it."""
    return [value for index, value in enumerate(values) if value in values[:index]]


def _parse_seeds(value: Any) -> tuple[int, ...]:
    """Return the seeds that the key ``seeds`` of a study gives, as a list or as their number.

    A number n, such as 3, means the first n seeds from RecBole's default on: 2020, 2021, 2022.

    Args:
        value: a number, or a list of seeds.

    Raises:
        ValueError: for anything but a number from 1 to 1000, or a list of different seeds.
    """
    if is_whole(value) and 1 <= value <= 1000:  # a number of seeds
        return tuple(range(FIRST_SEED, FIRST_SEED + value))
    if isinstance(value, list) and value and all(map(is_whole, value)) and not find_repeated(value):
        return tuple(value)
    raise ValueError("expected how many, or different whole numbers in a list")


def _check_bins(bins: dict[KindOfBins, Any]) -> dict[KindOfBins, Any]:
    """Check the key ``bins`` of a study, which groups the test targets.

    Args:
        bins: a kind such as ``history`` -> ascending edges between the bins, such as ``[5, 15]``;
            or ``cold`` -> whether cold items (never seen in training) are a bin.

    Returns:
        The same bins, without those that are switched off by ``cold: false``.

    Raises:
        ValueError: for edges that are not ascending numbers, or so close that two bins would have
            the same name.
    """
    for kind, edges in bins.items():
        if kind == COLD:
            is_valid = isinstance(edges, bool)
        else:
            is_list = isinstance(edges, list) and len(edges) > 0 and all(map(is_number, edges))
            is_ascending = is_list and edges == sorted(set(edges))
            is_valid = is_ascending and not find_repeated(name_bins(kind, edges))
        if not is_valid:
            raise ValueError(
                f"{kind}: expected edges between bins, ascending and with different names, such "
                "as [5, 15]; of cold items true or false"
            )
    return {kind: edges for kind, edges in bins.items() if edges}


def _parse_grid(value: Any) -> Grid | Literal[True] | None:
    """Check the key ``search`` of a study or of one of its rows (configurations).

    A study may give one grid for all rows, which a row can replace (a grid), take (true) or leave
    (false).

    Args:
        value: a grid (option -> list of different values, of which all combinations are tried), or
            true or false.

    Returns:
        The grid; True, with which a row takes the grid of the study; or None for no search.

    Raises:
        ValueError: for anything else.
    """
    if value is None or isinstance(value, bool) or value == {}:  # False and {} become None
        return value or None
    is_grid = isinstance(value, dict) and all(
        isinstance(values, list) and values and not find_repeated(values)
        for values in value.values()
    )
    if not is_grid:
        raise ValueError(
            "expected options with a list of different values, {hidden_dropout_prob: [0.2, 0.3]} "
            "(`recbole-pos tune` samples from ranges)"
        )
    return value


def _refuse(value: Any) -> None:
    """Raise an error, for a key that a study's file cannot set."""
    raise ValueError("it cannot stand here")


Text = Annotated[str, StringConstraints(strip_whitespace=True)]
Names = Annotated[tuple[str, ...], BeforeValidator(_parse_names)]
Metric = Annotated[str, StringConstraints(pattern=r"^[A-Za-z]\w*(@[1-9]\d*)?$", to_lower=True)]
Metrics = Annotated[tuple[Metric, ...], BeforeValidator(_parse_names)]
Empty = BeforeValidator(lambda value: {} if value is None else value)  # a key without a value
Refused = BeforeValidator(_refuse)  # not a key of a study, but set by the code
Searched = Annotated[Grid | Literal[True] | None, BeforeValidator(_parse_grid)]
# Seed -> file with the lists of another system. A single file is taken for the first seed. Seeds
# may be text, since a study that was stored as json has them so.
Seed = Annotated[int, Field(strict=False)]
OneFile = BeforeValidator(lambda value: {FIRST_SEED: value} if isinstance(value, str) else value)
Predictions = Annotated[dict[Seed, str], OneFile]


class _Layout(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Options(_Layout):
    """Options of a run, given for all rows or for one; ``config_files`` are read before them.

    Unlike other layouts, it allows any key, since models have options of their own. Keys that are
    ``Refused`` raise an error, since a study gives them for all rows together.
    """

    model_config = ConfigDict(extra="allow")
    config_files: Names = ()
    seed: Annotated[None, Refused] = None  # the same for all rows
    dataset: Annotated[None, Refused] = None

    @property
    def options(self) -> dict[str, Any]:
        """Option -> value, of all keys but the fields of the layout."""
        return self.model_extra or {}


class Attach(_Layout):
    """Position schemes that are added to the trained models of the row ``to``, and trained."""

    to: str
    schemes: Annotated[Names, Field(min_length=1)]


class Row(Options):
    """One configuration that the study compares: a model, and options that win over the base's.

    Attributes:
        attach: position schemes to add to the trained models of another row.
        retest: name of a row whose trained models are only tested again, with the options here.
        predictions: seed -> file with the lists of another system; empty for a row that is trained.
        search: grid of the row (option -> values to try). True stands for the grid of the study,
            until the plan is complete. None means that nothing is searched.
        unread: options of the base that the model of this row does not read. It is set by the code;
            ``Refused`` means that a file cannot set it.
    """

    attach: Attach | None = None
    retest: str | None = None
    predictions: Predictions = {}
    search: Searched = True
    unread: Annotated[tuple[str, ...], Refused] = ()

    @property
    def grid(self) -> Grid | None:
        """The grid of its search in a complete plan; None if nothing is searched."""
        return self.search if isinstance(self.search, dict) else None

    @property
    def parent(self) -> str | None:
        """Name of the row whose trained models this row starts from; None if from scratch."""
        return self.attach.to if self.attach else self.retest

    @property
    def schemes(self) -> tuple[str, ...]:
        """Schemes to attach to the models of its parent; empty if nothing is attached."""
        return self.attach.schemes if self.attach else ()


class TablePlan(_Layout):
    """A table of the report, with differences in its first metric.

    A key that is left empty gets the value of the study.

    Attributes:
        title: title above the table.
        rows: names of the rows (configurations) in it.
        metrics: metrics in it, a column each; differences are computed for the first.
        reference: row that the others are compared to.
        validation: whether the table has a column of the validation metric, to choose rows by.
    """

    title: Text = ""
    rows: Names = ()
    metrics: Metrics = ()
    reference: Text = ""
    validation: bool = False


class Plan(_Layout):
    """A study, checked as far as possible without its models and data.

    The types of its keys check what a file has at a key, and convert it: ``Empty`` makes a key
    without a value an empty mapping, and ``Refused`` refuses a key that only the code sets.

    Attributes:
        title, question, protocol: texts of the report.
        dataset: name of the dataset.
        base: options of all rows.
        rows: name -> row, a configuration that the study compares.
        search: grid (option -> values to try) of all rows that have none of their own.
        seeds: seeds that every row is trained with.
        search_seeds: number of seeds that every trial of a search is trained with, from the first.
        reference: row that the others are compared to.
        metrics: metrics such as ``ndcg@10``; the first one is compared.
        bins: how test targets are grouped: kind -> edges between the bins.
        paper: row -> metric -> value in the paper.
        tables: tables of the report.
        unit: word for what the dataset has as users; targets of one unit are not independent.
        source: what the plan was read from, for messages.
    """

    title: Text = ""
    question: Text = ""
    protocol: Text = ""
    dataset: Annotated[Text, Field(min_length=1)]
    base: Annotated[Options, Empty] = Options()
    rows: Annotated[dict[str, Annotated[Row, Empty]], Field(min_length=1)]
    search: Searched = None
    seeds: Annotated[tuple[int, ...], BeforeValidator(_parse_seeds)] = (FIRST_SEED,)
    search_seeds: Annotated[int, Field(ge=1)] = 1
    reference: Text = ""
    metrics: Annotated[Metrics, Field(min_length=1)] = METRICS
    bins: Annotated[dict[KindOfBins, Any], AfterValidator(_check_bins), Empty] = {}
    paper: Annotated[dict[str, dict[Metric, float]], Empty] = {}
    tables: Annotated[list[TablePlan], BeforeValidator(lambda v: [] if v is None else v)] = []
    unit: Literal["user", "session"] = "user"
    source: Annotated[Any, Refused] = Source("", {})

    @property
    def trial_seeds(self) -> tuple[int, ...]:
        """Seeds of every trial of a search."""
        return self.seeds[: self.search_seeds]

    @property
    def num_trials(self) -> dict[str, int]:
        """Name of each searched row -> number of its trials, one for each point of its grid."""
        return {name: len(list_points(row.grid)) for name, row in self.rows.items() if row.grid}

    def make_options(self, name: str) -> dict[str, Any]:
        """Return the options that a study gives for a row (a configuration).

        Args:
            name: name of the row.

        Returns:
            One of two, in both without the seed and the options that a search tries:

            - Of a row that is trained from scratch: model, dataset, config_files and further
              options. Those of the row win over those of the base.
            - Of a row that starts from the trained models of another row, its parent: only its own
              options, and under ``attach`` the position schemes that it adds to these models, if
              any. It has those of its parent as well (:meth:`make_first_options` adds them).
        """
        row = self.rows[name]
        if row.parent:
            schemes = {"attach": list(row.schemes)} if row.attach else {}
            return {**row.options, **schemes}

        # The base has options for all rows; this row's model does not read those in ``unread``.
        base = {key: value for key, value in self.base.options.items() if key not in row.unread}
        options = {**base, **row.options, "dataset": self.dataset}
        if files := [*self.base.config_files, *row.config_files]:
            options["config_files"] = files
        return options

    def make_first_options(self, name: str) -> dict[str, Any]:
        """Return the complete options of a row's first run: the first seed and grid point.

        A grid has a list of values for each searched option, and a point is one combination.

        Args:
            name: name of the row (a configuration). If it starts from the models of another row,
                its own options win over those of that row.
        """
        row, options = self.rows[name], self.make_options(name)
        if row.parent:  # the row whose models it starts from
            return {**self.make_first_options(row.parent), **options}
        point = list_points(row.grid or {})[0]  # {} if nothing is searched
        return {**options, **point, "seed": self.seeds[0]}

    def sort_rows(self) -> list[str]:
        """Return the names of the trained rows (configurations), in the order of their training.

        A row that starts from the models of another row comes after that one.

        Rows with predictions of another system are not trained. Rows that start from each other in
        a circle raise graphlib's ``CycleError``.
        """
        # The sorter takes for each name those that come before it.
        trained = {name: row for name, row in self.rows.items() if not row.predictions}
        parents = {name: [row.parent] if row.parent else [] for name, row in trained.items()}
        return list(graphlib.TopologicalSorter(parents).static_order())

    def count_runs(self, name: str) -> int:
        """Return how many runs a row has in the end: one for each seed, or file of predictions."""
        return len(self.rows[name].predictions or self.seeds)

    def list_ancestors(self, name: str) -> list[str]:
        """Return a row, the row whose models it starts from, and so on, up to a first row.

        Args:
            name: name of the row (configuration), the first of the names that are returned.
        """
        parent = self.rows[name].parent
        return [name, *(self.list_ancestors(parent) if parent else [])]

    def are_coupled(self, row: str, other: str) -> bool:
        """Return whether two rows (configurations) come from the same trained models.

        One may start from the trained models of the other, or both from those of a third row. If a
        seed gave a good model, both have it, so their results are not independent.

        Args:
            row, other: names of the two rows.
        """
        # list_ancestors begins with the row itself. It ends with the row that was trained from
        # scratch, whose models all rows before it in the list start from.
        return self.list_ancestors(row)[-1] == self.list_ancestors(other)[-1]


@dataclass(frozen=True)
class Fit:
    """One run that a plan asks for: a training, or a test of a model that another fit has trained.

    Attributes:
        row: name of the row (the configuration).
        seed: seed of the training.
        stage: ``trial`` (of a search), ``final``, ``attach`` (position schemes are added to a
            trained model) or ``retest`` (a trained model is tested with other options).
        trial: number of the trial, from 0; None in the other stages.
        options: model, dataset, options and config_files that the plan gives. They lack what a
            search chooses for a final fit.
        name: name of the fit, such as ``SASRec, seed 2020``.
        after: names of fits that must have ended: all trials of the row, or the fit whose weights
            it starts from.
    """

    row: str
    seed: int
    stage: str
    trial: int | None
    options: Mapping[str, Any]
    name: str
    after: tuple[str, ...] = ()

    @property
    def has_parent(self) -> bool:
        """Whether it starts from the weights of a fit of another row."""
        return self.stage in ("attach", "retest")


def list_fits(plan: Plan) -> list[Fit]:
    """Return all fits (training runs) of a plan, each after the fits it depends on.

    A row (a configuration) has a final fit for each seed. A searched row also has trials, which are
    fits that try options, and its final fits take the options of the best trial. The fits of a row
    that starts from another row's models come after the fits of that row.

    The trials of all searches come first. Then come the final fits: the first seed of all rows, the
    second seed of all rows, and so on, so that an interrupted study has equal seeds for all rows.

    Args:
        plan: the study.
    """
    row_names = plan.sort_rows()  # each after the row whose models it starts from
    trials = {name: _list_trials(plan, name) for name in row_names}
    fits = list(itertools.chain.from_iterable(trials.values()))
    for seed, name in itertools.product(plan.seeds, row_names):
        # ``after`` names the fits that this fit waits for: the trials of its row, if any; or
        # the fit of the same seed whose weights it starts from, to add position schemes to that
        # model (attach), or only to test that model with other options (retest).
        row = plan.rows[name]
        stage, after = "final", tuple(trial.name for trial in trials[name])
        if row.parent:
            stage = "attach" if row.attach else "retest"
            after = (f"{row.parent}, seed {seed}",)

        options = {**plan.make_options(name), "seed": seed}
        fit_name = f"{name}, seed {seed}"
        fits.append(Fit(name, seed, stage, trial=None, options=options, name=fit_name, after=after))
    return fits


def _list_trials(plan: Plan, row_name: str) -> list[Fit]:
    """Return the trials of a row's search: a training run for each grid point and each seed.

    Args:
        plan: the study.
        row_name: name of the row (a configuration of the study).

    Returns:
        The trials by number, each with all its seeds; an empty list if the row is not searched.
    """
    grid = plan.rows[row_name].grid  # option -> values to try; a point is one combination
    fits = []
    for trial, point in enumerate(list_points(grid) if grid else []):
        for seed in plan.trial_seeds:
            # The row's own options, those of the point, and the seed.
            options = {**plan.make_options(row_name), **point, "seed": seed}
            suffix = f", seed {seed}" if seed != plan.seeds[0] else ""  # usually there is one seed
            name = f"{row_name}, trial {trial}{suffix}"
            fits.append(Fit(row_name, seed, "trial", trial, options, name))
    return fits


def name_bins(kind: str, edges: Sequence[float]) -> list[str]:
    """Return names of the bins (groups of test targets) between ascending edges.

    Edges [5, 15] of the kind ``history`` give ``history up to 5``, ``history 6 to 15`` and
    ``history over 15``. A bin has the values above one edge and up to the next.

    Args:
        kind: a kind with edges. Edges of an ``age`` are seconds, shown as durations.
        edges: at least one edge, ascending.

    Returns:
        One name more than there are edges.
    """
    if kind == "age":  # [3600, 7200] give "up to 1 h", "1 h to 2 h" and "over 2 h"
        texts = [format_duration(edge) for edge in edges]
        between = [f"{low} to {high}" for low, high in itertools.pairwise(texts)]
    else:
        texts = [f"{edge:,g}" for edge in edges]
        between = []
        for low, high in itertools.pairwise(edges):
            # Lengths and counts are whole: the lowest that is above 5 is 6. It may be the only one
            # in the bin, as between the edges 5 and 6.
            lowest = math.floor(low) + 1
            between.append(f"{lowest:,g} to {high:,g}" if lowest < high else f"{high:,g}")
    return [f"{kind} {text}" for text in (f"up to {texts[0]}", *between, f"over {texts[-1]}")]
