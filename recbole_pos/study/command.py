"""A study as the command line has it: models, what is varied, seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.study.plan import Plan
from recbole_pos.study.reading import make_plan
from recbole_pos.study.source import Source, parse_list
from recbole_pos.values import shown


def plan_of_models(
    dataset: str,
    models: Sequence[str],
    vary: Sequence[str] = (),
    seeds: int = 1,
    base: dict[str, Any] | None = None,
    **others: Any,
) -> Plan:
    """A row for every model, or for every model and value.

    Args:
        dataset: its name.
        models: names.
        vary: ``option=value,value,...``; values are yaml, ``position=[nope],[rope,kernel]``. Every
            combination of several is a row.
        seeds: how many.
        base: options of all rows, with config_files.
        others: further keys of a study's file: reference, metrics, bins, title.

    Raises:
        UsageError: for a value that cannot be read, or a name that is given twice.
    """
    if not models:
        raise UsageError("-m: name the models that are compared, as in -m FPARec,SASRec")
    varied = [_varied(text) for text in vary]
    names = [name for name, _ in varied]
    if twice := next((name for name in [*names, *models] if [*names, *models].count(name) > 1), ""):
        raise UsageError(f"{twice} is given twice")
    rows = {}
    for model, *values in itertools.product(models, *(values for _, values in varied)):
        options = dict(zip(names, values, strict=True))
        words = [] if len(models) == 1 and options else [model]
        words += [_word(name, value, len(names) > 1) for name, value in options.items()]
        rows[" ".join(words)] = {"model": model, **options}
    content = {"dataset": dataset, "rows": rows, "seeds": seeds, "base": base or {}, **others}
    return make_plan(Source("command line", content))


def _varied(text: str) -> tuple[str, list[Any]]:
    name, equals, written = text.partition("=")
    name = name.strip().removeprefix("--")
    if not equals or not name:
        raise UsageError(f"--vary: expected option=value,value,..., found {shown(text)}")
    values = parse_list(written, f"--vary: {name}")
    if len(values) < 2:
        raise UsageError(
            f"--vary: {name}: expected two values or more, with commas between; found "
            f"{shown(written)}"
        )
    if twice := [value for place, value in enumerate(values) if value in values[:place]]:
        raise UsageError(f"--vary: {name}: {shown(twice[0])} is given twice")
    return name, values


def _word(name: str, value: Any, several: bool) -> str:
    """A value in the name of a row: of schemes and names the value alone says enough."""
    if isinstance(value, list):
        text = "+".join(map(str, value)) or "none"
    else:
        text = str(value)
    plain = isinstance(value, str) or (isinstance(value, list) and value)
    return text if plain and not several else f"{name}={text}"
