"""Reads a study: every key, row and value is checked, and what is wrong is told with its line."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

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
from recbole_pos.study.searches import read_search, read_search_seeds
from recbole_pos.study.source import LIKE, Source, read_source
from recbole_pos.values import is_number, is_whole, shown, suggest

KEYS = (
    *("title", "question", "protocol", "dataset", "base", "rows", "search", "seeds", "reference"),
    *("search_seeds", "metrics", "bins", "paper", "tables", "split", "ties", "unit"),
)
# What a trained model may be tested with that it was not trained with.
RETESTED = ("mask_history", "inference_relations", "eval_batch_size")
UNITS = ("user", "session")  # what a user of the log is called
METRICS = ("ndcg@10", "hit@10", "mrr@10")
_METRIC = re.compile(r"[a-z]+@[1-9]\d*")
_NAME_OF_A_RUN = re.compile(r", (trial|seed) \d+")
_RANDOM = re.compile(r"random\((\d+)\)")
_Path = tuple[Any, ...]


def read_plan(path: str | Path) -> Plan:
    """The plan in a yaml file.

    Raises:
        UsageError: naming file and line of what is wrong with it.
    """
    return make_plan(read_source(path))


def make_plan(source: Source) -> Plan:
    """The plan of what was read.

    Raises:
        UsageError: as :func:`read_plan`.
    """
    given = source.content
    if LIKE in given:  # of a file it is merged already
        raise source.error((LIKE,), f"{LIKE}: goes with the file of a study, not with a mapping")
    source.require_known((), given, (*KEYS, LIKE), "key")
    base, files = _options_and_files(source, ("base",), given.get("base"))
    if "split" in given:
        split = source.mapping(("split",), given["split"], "such as {LS: valid_and_test}")
        if "eval_args" in base:
            problem = f"eval_args is given in the base already, {source.where('base', 'eval_args')}"
            raise source.error(("split",), f"split: {problem}; say it once")
        base["eval_args"] = {"split": split}
    search = read_search(source, ("search",), given.get("search"))
    rows = _rows(source, given.get("rows"), base, search)
    metrics = _metrics(source, ("metrics",), given.get("metrics", list(METRICS)))
    reference = source.one_of(("reference",), given.get("reference", next(iter(rows))), rows)
    seeds = _seeds(source, given.get("seeds", 1))
    dataset = source.text(("dataset",), given.get("dataset"))
    if not dataset:
        raise source.error(("dataset",), "dataset: give the name of the data set")
    title = source.text(("title",), given.get("title")) or f"{len(rows)} rows on {dataset}"
    plan = Plan(
        dataset=dataset,
        title=title,
        question=source.text(("question",), given.get("question")),
        protocol=source.text(("protocol",), given.get("protocol")),
        base=base,
        config_files=files,
        rows=rows,
        seeds=seeds,
        search_seeds=read_search_seeds(source, given.get("search_seeds", 1), seeds, rows),
        reference=reference,
        metrics=metrics,
        bins=_bins(source, given.get("bins")),
        paper=_paper(source, given.get("paper"), rows),
        tables=_tables(source, given.get("tables"), rows, metrics, reference, title),
        ties=_ties(source, given.get("ties", "file")),
        unit=_unit(source, given.get("unit", UNITS[0])),
        source=source,
    )
    plan.order()
    require_equal_trials(plan)
    return plan


def _options_and_files(
    source: Source, path: _Path, value: Any
) -> tuple[dict[str, Any], tuple[str, ...]]:
    options = source.mapping(path, value, "of options, {model: PosSASRec, n_layers: 2}")
    files = options.pop("config_files", [])
    for key in ("seed", "dataset"):
        if key in options:
            problem = f"{key} cannot stand here: it is the same for all rows"
            raise source.error((*path, key), problem)
    return options, source.names((*path, "config_files"), files, "files")


def _rows(
    source: Source, value: Any, base: dict[str, Any], search: Search | None
) -> dict[str, Row]:
    example = "of rows, NoPE: {model: PosSASRec, position: [nope]}"
    given = source.mapping(("rows",), value, example)
    if not given:
        raise source.error(("rows",), "rows: there is none; one is `NAME: {model: PosSASRec}`")
    found = {}
    for name, content in given.items():
        path = ("rows", name)
        if "\n" in str(name) or _NAME_OF_A_RUN.search(str(name)):
            problem = f"rows: {shown(name)} is no name for a row: give it one line, without "
            raise source.error(path, problem + "`, trial 0` or `, seed 0`, which name its runs")
        options, files = _options_and_files(source, path, content)
        own = options.pop("search", True)
        attach = None
        if "attach" in options:
            attach = _attach(source, (*path, "attach"), options.pop("attach"), given)
            for key in ("model", "position"):
                if key in options:
                    problem = (
                        f"row {name}: {key} is that of row {attach.to}, which it is attached to"
                    )
                    raise source.error((*path, key), problem)
        elif "retest" in options:
            attach = Attach(source.one_of((*path, "retest"), options.pop("retest"), given))
            source.require_known(path, options, RETESTED, "option of a trained model's test")
            if not options:
                problem = (
                    f"row {name} is row {attach.to} again: give it one of {', '.join(RETESTED)}"
                )
                raise source.error(path, problem)
        elif "model" not in options and "model" not in base:
            hint = next((f" (is {k!r} the model?)" for k in options if suggest(k, ["model"])), "")
            raise source.error(path, f"row {name} has no model{hint}")
        if attach and files:
            problem = (
                f"row {name} takes the configuration of row {attach.to}; write its options here"
            )
            raise source.error((*path, "config_files"), problem)
        if attach and own is not True:
            problem = f"row {name} takes the configuration of row {attach.to}; leave search out"
            raise source.error((*path, "search"), problem)
        found[name] = Row(
            name,
            options,
            files,
            attach,
            None
            if attach
            else search
            if own is True
            else read_search(source, (*path, "search"), own),
        )
    return found


def _attach(source: Source, path: _Path, value: Any, rows: Collection[str]) -> Attach:
    given = source.mapping(path, value, "{to: ROW, schemes: [kernel]}")
    source.require_known(path, given, ("to", "schemes"), "key")
    for key in ("to", "schemes"):
        if not given.get(key):
            raise source.error(path, f"attach: {key} is missing; write {{to: ROW, schemes: [...]}}")
    to = source.one_of((*path, "to"), given["to"], rows)
    return Attach(to, source.names((*path, "schemes"), given["schemes"], "position schemes"))


def _seeds(source: Source, value: Any) -> tuple[int, ...]:
    if is_whole(value) and 1 <= value <= 1000:
        return tuple(range(FIRST_SEED, FIRST_SEED + value))
    plain = isinstance(value, list) and value and all(is_whole(v) and v >= 0 for v in value)
    if not plain or len(set(value)) < len(value):
        raise source.error(
            ("seeds",),
            f"seeds: expected how many, or different whole numbers in a list; found {shown(value)}",
        )
    return tuple(value)


def _metrics(source: Source, path: _Path, value: Any) -> tuple[str, ...]:
    names = source.names(path, value, "metrics")
    if not names:
        raise source.error(path, f"{path[-1]}: there is none")
    for place, name in enumerate(names):
        if not _METRIC.fullmatch(name.lower()):
            raise source.error(
                (*path, place), f"{path[-1]}: {shown(name)} is no metric such as ndcg@10"
            )
    return tuple(name.lower() for name in names)


def _bins(source: Source, value: Any) -> dict[str, Any]:
    given = source.mapping(("bins",), value, "such as {history: [5, 15], cold: true}")
    source.require_known(("bins",), given, (*KINDS, COLD), "kind of bins")
    for kind, edges in given.items():
        if kind == COLD:
            if not isinstance(edges, bool):
                raise source.error(("bins", kind), f"bins: cold is true or false, not {edges!r}")
            continue
        plain = isinstance(edges, list) and edges and all(map(is_number, edges))
        if not plain or any(a >= b for a, b in zip(edges, edges[1:], strict=False)):
            raise source.error(
                ("bins", kind),
                f"bins: {kind}: expected the edges between bins, ascending, such as [5, 15]; found "
                f"{shown(edges)}",
            )
    return {kind: edges for kind, edges in given.items() if edges}


def _paper(source: Source, value: Any, rows: Collection[str]) -> dict[str, dict[str, float]]:
    given = source.mapping(("paper",), value, "such as {NoPE: {ndcg@10: 0.0316}}")
    found: dict[str, dict[str, float]] = {}
    for row, figures in given.items():
        path = ("paper", row)
        source.one_of(path, row, rows)
        figures = source.mapping(path, figures, "of metrics, {ndcg@10: 0.0316}")
        for metric, figure in figures.items():
            _metrics(source, (*path, metric), [metric])
            if not is_number(figure):
                problem = f"paper: {metric} of row {row}: expected a number, found {shown(figure)}"
                raise source.error((*path, metric), problem)
        found[row] = {metric.lower(): float(figure) for metric, figure in figures.items()}
    return found


def _tables(
    source: Source,
    value: Any,
    rows: Collection[str],
    metrics: tuple[str, ...],
    reference: str,
    title: str,
) -> tuple[TablePlan, ...]:
    if value is None:
        return (TablePlan(title, tuple(rows), metrics, reference),)
    if not isinstance(value, list) or not value:
        raise source.error(
            ("tables",), f"tables: expected a list of {{title: ..., rows: [...]}}, found "
            f"{shown(value)}",
        )  # fmt: skip
    return tuple(
        _table(source, ("tables", place), given, rows, metrics, reference)
        for place, given in enumerate(value)
    )


def _table(
    source: Source,
    path: _Path,
    value: Any,
    rows: Collection[str],
    metrics: tuple[str, ...],
    reference: str,
) -> TablePlan:
    if not isinstance(value, dict):
        raise source.error(path, f"tables: expected {{title: ..., rows: [...]}}, found {value!r}")
    source.require_known(
        path, value, ("title", "rows", "metrics", "reference", "validation"), "key"
    )
    validation = value.get("validation", False)
    if not isinstance(validation, bool):
        problem = f"validation: true for a column of it, or false; found {shown(validation)}"
        raise source.error((*path, "validation"), problem)
    chosen = source.names((*path, "rows"), value.get("rows", list(rows)), "rows")
    for place, row in enumerate(chosen):
        source.one_of((*path, "rows", place), row, rows)
    if not chosen:
        raise source.error((*path, "rows"), "rows: there is none in this table")
    own = value.get("reference", reference if reference in chosen else chosen[0])
    return TablePlan(
        source.text((*path, "title"), value.get("title")) or ", ".join(chosen),
        chosen,
        _metrics(source, (*path, "metrics"), value["metrics"]) if "metrics" in value else metrics,
        source.one_of((*path, "reference"), own, chosen),
        validation,
    )


def _unit(source: Source, value: Any) -> str:
    if value not in UNITS:
        raise source.error(("unit",), f"unit: {shown(value)} is none of {', '.join(UNITS)}")
    return value


def _ties(source: Source, value: Any) -> Ties:
    text = str(value).strip()
    if found := _RANDOM.fullmatch(text):
        return Ties("random", int(found[1]))
    if text not in ("file", "drop"):
        raise source.error(("ties",), f"ties: {shown(value)} is none of file, random(SEED), drop")
    return Ties(text)
