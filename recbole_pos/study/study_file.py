"""Reading a study: types of keys and values, names of rows; errors name file and line."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from recbole_pos.study.bins import COLD, KINDS
from recbole_pos.study.plan import (
    FIRST_SEED,
    Attach,
    Plan,
    Row,
    Search,
    TablePlan,
    Ties,
    require_equal_trials,
)
from recbole_pos.study.study_source import Source, read_source
from recbole_pos.values import is_number, is_whole, shown, suggest

# Options that a trained model may be tested again with.
RETESTED = ("mask_history", "inference_relations", "eval_batch_size")
METRICS = ("ndcg@10", "hit@10", "mrr@10")
_METRIC = re.compile(r"[a-z]+@[1-9]\d*")
_NAME_OF_A_RUN = re.compile(r"\n|, (trial|seed) \d+")
_TIES = re.compile(r"file|drop|random\((\d+)\)")


def _text(value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise ValueError("expected text")
    return "" if value is None else str(value).strip()


def _names(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError("expected a list of names")
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ValueError(f"{twice[0]} is given twice")
    return tuple(names)


def _metric(name: str) -> str:
    if not _METRIC.fullmatch(name.lower()):
        raise ValueError(f"{shown(name)} is not a metric such as ndcg@10")
    return name.lower()


def _row_name(name: str) -> str:
    if _NAME_OF_A_RUN.search(name):
        raise ValueError("expected one line without `, trial 0` or `, seed 0`, which name its runs")
    return name


def _seeds(value: Any) -> tuple[int, ...]:
    if is_whole(value) and 1 <= value <= 1000:
        return tuple(range(FIRST_SEED, FIRST_SEED + value))
    plain = isinstance(value, list) and value and all(is_whole(v) and v >= 0 for v in value)
    if not plain or len(set(value)) < len(value):
        raise ValueError("expected how many, or different whole numbers in a list")
    return tuple(value)


def _bins(value: dict[str, Any]) -> dict[str, Any]:
    for kind, edges in value.items():
        if kind == COLD and not isinstance(edges, bool):
            raise ValueError("cold is true or false")
        if kind not in (*KINDS, COLD):
            raise ValueError(f"unknown kind {shown(kind)}{suggest(str(kind), (*KINDS, COLD))}")
        plain = isinstance(edges, list) and edges and all(map(is_number, edges))
        if kind != COLD and not (plain and list(edges) == sorted(set(edges))):
            raise ValueError(f"{kind}: expected edges between bins, ascending, such as [5, 15]")
    return {kind: edges for kind, edges in value.items() if edges}


def _ties(value: Any) -> Ties:
    found = _TIES.fullmatch(str(value).strip())
    if found is None:
        raise ValueError("expected file, random(SEED) or drop")
    return Ties("random", int(found[1])) if found[1] else Ties(found[0])


def _search(value: Any) -> Search | None:
    """Return a search from a grid, ``option: [values]``, or from ``{trials: 20, space: ...}``.

    Raises:
        ValueError: saying what was expected.
    """
    if value is None or value is False or value == {}:
        return None
    if not isinstance(value, dict):
        raise ValueError("expected options and their values, {hidden_dropout_prob: [0.2, 0.3]}")
    if {"trials", "space"} & set(value):
        trials, space = value.get("trials"), value.get("space")
        drawn = isinstance(space, (str, dict)) and space
        if not is_whole(trials) or trials < 1 or not drawn or len(value) > 2:
            raise ValueError("expected {trials: NUMBER, space: options or a file}")
        return Search(trials, space=space)
    for name, values in value.items():
        if isinstance(values, dict):
            raise ValueError(f"{name} is drawn: write {{trials: 20, space: {{{name}: ..}}}}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name}: expected a list of values")
        if any(v in values[:n] for n, v in enumerate(values)):
            raise ValueError(f"{name}: a value is listed twice")
    return Search(math.prod(map(len, value.values())), grid=value)


def _refuse(value: Any) -> None:
    raise ValueError("it cannot stand here")


Text = Annotated[str, BeforeValidator(_text)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
SomeNames = Annotated[Names, Field(min_length=1)]
Metric = Annotated[str, AfterValidator(_metric)]
Metrics = Annotated[tuple[Metric, ...], Field(min_length=1), BeforeValidator(_names)]
Empty = BeforeValidator(lambda value: {} if value is None else value)  # a key without a value
Nothing = Annotated[None, BeforeValidator(_refuse)]


_Searched = Annotated[Search | None, BeforeValidator(_search)]


class _Layout(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Options(_Layout):
    """Options of the base or of a row: those of a run, and files of them."""

    model_config = ConfigDict(strict=True, extra="allow")
    config_files: Names = ()
    seed: Nothing = None  # the same for all rows
    dataset: Nothing = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of a run, which are all further keys."""
        return dict(self.model_extra or {})


class _Attach(_Layout):
    to: str
    schemes: SomeNames


class _Row(_Options):
    attach: _Attach | None = None
    retest: str | None = None
    search: Literal[True] | _Searched = True


class _Table(_Layout):
    title: Text = ""
    rows: SomeNames | None = None
    metrics: Metrics | None = None
    reference: str | None = None
    validation: bool = False


class _Study(_Layout):
    """A study as it is written."""

    title: Text = ""
    question: Text = ""
    protocol: Text = ""
    dataset: Annotated[Text, Field(min_length=1)]
    base: Annotated[_Options, Empty] = _Options()
    rows: Annotated[
        dict[Annotated[str, AfterValidator(_row_name)], Annotated[_Row, Empty]],
        Field(min_length=1),
    ]
    search: _Searched = None
    seeds: Annotated[tuple[int, ...], BeforeValidator(_seeds)] = (FIRST_SEED,)
    search_seeds: Annotated[int, Field(ge=1)] = 1
    reference: str | None = None
    metrics: Metrics = METRICS
    bins: Annotated[dict[str, Any], AfterValidator(_bins), Empty] = {}
    paper: Annotated[dict[str, dict[Metric, float]], Empty] = {}
    tables: Annotated[list[_Table], Field(min_length=1)] | None = None
    split: dict[str, Any] | None = None
    ties: Annotated[Ties, BeforeValidator(_ties)] = Ties()
    unit: Literal["user", "session"] = "user"  # what a user of the dataset is called
    like: Nothing = None  # of a file it is merged already


# Keys of a study that its plan takes unchanged.
_AS_WRITTEN = (
    *("dataset", "question", "protocol", "seeds", "search_seeds"),
    *("metrics", "bins", "paper", "ties", "unit"),
)
_KEYS = {key for layout in (_Study, _Table, _Attach) for key in layout.model_fields}


def read_plan(path: str | Path) -> Plan:
    """Return the plan in a yaml file.

    Raises:
        UsageError: naming file and line of what is wrong with it.
    """
    return make_plan(read_source(path))


def make_plan(source: Source) -> Plan:
    """Return the plan of a study from its source.

    Raises:
        UsageError: as :func:`read_plan`.
    """
    study = _validate(source)
    base = study.base.options
    if study.split is not None:
        if "eval_args" in base:
            where = source.where("base", "eval_args")
            raise source.error(
                ("split",), f"split: eval_args is given in the base already, {where}"
            )
        base["eval_args"] = {"split": study.split}
    rows = {name: _row(source, name, given, study, base) for name, given in study.rows.items()}
    reference = next(iter(rows)) if study.reference is None else study.reference
    source.require_choice(("reference",), reference, rows)
    for row in study.paper:
        source.require_choice(("paper", row), row, rows)
    title = study.title or f"{len(rows)} rows on {study.dataset}"
    tables = study.tables or [_Table(title=title)]
    _require_search_seeds(source, study, rows)
    plan = Plan(
        **{name: getattr(study, name) for name in _AS_WRITTEN},
        title=title,
        base=base,
        config_files=study.base.config_files,
        rows=rows,
        reference=reference,
        tables=tuple(_table(source, n, t, rows, study, reference) for n, t in enumerate(tables)),
        source=source,
    )
    plan.order()
    require_equal_trials(plan)
    return plan


def _validate(source: Source) -> _Study:
    """Return the content of a study with checked types; an error names the line."""
    try:
        return _Study.model_validate(source.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = first["loc"]
        path = tuple(str(part) for part in path) if path[-1] == "[key]" else path
        name = ": ".join(str(part) for part in path if part != "[key]")
        if first["type"] == "extra_forbidden":
            problem = f"unknown key {shown(path[-1])}{suggest(str(path[-1]), _KEYS)}"
        elif first["type"] == "missing":
            problem = f"{name}: it is missing"
        else:
            message = first["msg"].removeprefix("Value error, ")
            problem = f"{name}: {message}; found {shown(first['input'])}"
        raise source.error(path, problem) from error


def _row(source: Source, name: str, given: _Row, study: _Study, base: dict[str, Any]) -> Row:
    """Return a row of the plan from its keys.

    Args:
        source: the study, for lines in messages.
        name: name of the row.
        given: its keys.
        study: the study, for names of rows and the search of all.
        base: options of all rows.

    Raises:
        UsageError: for a row without a model, or keys that exclude each other.
    """
    path: tuple[str, ...] = ("rows", name)
    options, attach, search = given.options, None, given.search
    refused: tuple[str, ...] = ()  # keys that a row of another's models must not have
    if given.attach is not None:
        to = source.require_choice((*path, "attach"), given.attach.to, study.rows)
        attach, refused = Attach(to, given.attach.schemes), ("model", "position", "retest")
    elif given.retest is not None:
        attach = Attach(source.require_choice((*path, "retest"), given.retest, study.rows))
        refused = tuple(key for key in options if key not in RETESTED)
        if not options:
            problem = f"{name} is {attach.to} again: give it one of {', '.join(RETESTED)}"
            raise source.error(path, problem)
    elif "model" not in options and "model" not in base:
        hint = next((f" (is {k!r} the model?)" for k in options if suggest(k, ["model"])), "")
        raise source.error(path, f"configuration {name} has no model{hint}")
    if attach:
        given_here = {*options, *given.model_fields_set}
        for key in (*refused, "config_files", "search"):
            if key in given_here:
                problem = f"{name}: {key}: it is made of the models of {attach.to}"
                raise source.error((*path, key), f"{problem}; leave it out")
        search = None
    elif search is True:
        search, path = study.search, ()
    if search:
        lines = search.grid or search.space
        names = lines if isinstance(lines, dict) else ()
        inner = ("search",) if search.grid else ("search", "space")
        search = replace(search, lines={k: source.where(*path, *inner, k) for k in names})
    return Row(name, options, given.config_files, attach, search)


def _table(
    source: Source, place: int, given: _Table, rows: dict[str, Row], study: _Study, reference: str
) -> TablePlan:
    """Return the plan of the table at a place of the list; its keys win over those of the study."""
    path = ("tables", place)
    chosen = tuple(rows) if given.rows is None else given.rows
    for row in chosen:
        source.require_choice((*path, "rows"), row, rows)
    own = given.reference or (reference if reference in chosen else chosen[0])
    source.require_choice((*path, "reference"), own, chosen)
    title = given.title or ", ".join(chosen)
    return TablePlan(title, chosen, given.metrics or study.metrics, own, given.validation)


def _require_search_seeds(source: Source, study: _Study, rows: dict[str, Row]) -> None:
    """Raise a UsageError for more seeds of a search than seeds, or several without a search."""
    search_seeds = study.search_seeds
    if search_seeds > len(study.seeds) or (
        search_seeds > 1 and not any(row.search for row in rows.values())
    ):
        problem = f"a search, and at most its {len(study.seeds)} seeds"
        raise source.error(
            ("search_seeds",), f"search_seeds: expected {problem}; found {search_seeds}"
        )
