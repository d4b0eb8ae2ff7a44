"""A space against the configuration it is for: wrong lines are errors before the first trial."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from recbole_pos.config.option import DATA, SCHEDULE
from recbole_pos.config.options import DIVIDES, rule
from recbole_pos.errors import UsageError
from recbole_pos.tune.space import Space
from recbole_pos.values import shown


def check_fixed(space: Space, build: Callable[[dict[str, Any]], Any]) -> Any:
    """The configuration that all trials share; options may need each other (kernel_u a kernel).

    Raises:
        UsageError: naming the line of an option that it is about, where that can be told.
    """
    try:
        return build({})
    except UsageError as error:
        named = (space.lines[name] for name in space.fixed if name in str(error))
        where = next(named, None)
        if where is None:
            raise
        raise UsageError(f"{where}: {_bare(error)}") from error


def check_space(space: Space, build: Callable[[dict[str, Any]], Any]) -> None:
    """Try every parameter at its ends, with what its condition asks for.

    Args:
        space: what is searched; its context has the options of the configuration.
        build: makes a configuration of options beside the fixed ones, or raises UsageError.

    Raises:
        UsageError: naming the line of the file.
    """
    for parameter in space.parameters:
        role = rule(parameter.name).role
        if role == DATA:
            raise UsageError(
                f"{parameter.where}: {parameter.name} cannot be searched: data, split and metrics "
                "are the same for all trials; run one search for each value"
            )
        if role == SCHEDULE:
            raise UsageError(
                f"{parameter.where}: {parameter.name} cannot be searched: the scheduler and early "
                f"stopping decide how long a trial trains; give one value, {parameter.name}: ..."
            )
        for name in parameter.when:
            if name not in space.names and name not in space.context:
                raise UsageError(
                    f"{parameter.where}: {parameter.name}: its condition names {shown(name)}, "
                    "which is neither searched here nor an option of the model"
                )
    for parameter, options in space.combinations():
        try:
            build(options)
        except UsageError as error:
            raise UsageError(f"{parameter.where}: {_bare(error)}") from error
    _check_divisors(space, build)


def _check_divisors(space: Space, build: Callable[[dict[str, Any]], Any]) -> None:
    """Every value of what must divide another option, with every value of that one."""
    searched = {p.name: p for p in space.parameters if p.kind not in ("uniform", "loguniform")}
    for pair in DIVIDES:
        if not set(pair) & set(searched):
            continue
        both = [searched[name] for name in pair if name in searched]
        base = space.making(*both)
        if base is None:  # they never come together
            continue
        for values in itertools.product(*(parameter.all_values() for parameter in both)):
            chosen = dict(zip((p.name for p in both), values, strict=True))
            options = base | {
                p.name: chosen[p.name] for p in both if space.exists(p, base | chosen)
            }
            part, whole = ((space.context | options).get(name) for name in pair)
            if part and whole and whole % part:  # else not worth a configuration
                try:
                    build(options)
                except UsageError as error:
                    raise UsageError(f"{both[0].where}: {_bare(error)}") from error
                break  # a model of which it is not asked


def _bare(error: UsageError) -> str:
    return str(error).removeprefix("configuration: ")
