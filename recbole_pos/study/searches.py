"""Reads the search of a study or of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recbole_pos.study.plan import Row, Search, grid_points
from recbole_pos.study.source import Source
from recbole_pos.values import is_whole, shown


def read_search(source: Source, path: tuple[Any, ...], value: Any) -> Search | None:
    """A grid, ``option: [values]``, or ``{trials: 20, space: {...} or file}``; None for none.

    Raises:
        UsageError: naming file and line of what is wrong with it.
    """
    if value is None or value is False:
        return None
    example = "of options and their values, {hidden_dropout_prob: [0.2, 0.3]}"
    given = source.mapping(path, value, example)
    if "space" not in given and "trials" not in given:
        return _grid(source, path, given)
    source.require_known(path, given, ("space", "trials"), "key")
    trials, space = given.get("trials"), given.get("space")
    if not is_whole(trials) or trials < 1:
        raise source.error(
            (*path, "trials"),
            f"trials: a space needs a number of trials, the same for every row; found "
            f"{shown(trials)}",
        )
    if not isinstance(space, (str, dict)) or not space:
        problem = f"space: expected options and how they are drawn, or a file; found {shown(space)}"
        raise source.error((*path, "space"), problem)
    options = space if isinstance(space, dict) else {}
    lines = {name: source.where(*path, "space", name) for name in options}
    return Search(trials, space=space, lines=lines)


def _grid(source: Source, path: tuple[Any, ...], given: dict[str, Any]) -> Search | None:
    for name, values in given.items():
        where = (*path, name)
        if isinstance(values, dict):
            raise source.error(
                where,
                f"search: {name} is drawn, not listed: write {{trials: 20, space: {{{name}: ..}}}}",
            )
        if not isinstance(values, list) or not values:
            raise source.error(
                where, f"search: {name}: expected a list of values, found {shown(values)}"
            )
        twice = next((v for n, v in enumerate(values) if v in values[:n]), None)
        if twice is not None:
            raise source.error(where, f"search: {name}: {shown(twice)} is listed twice")
    lines = {name: source.where(*path, name) for name in given}
    return Search(grid_points(given), grid=given, lines=lines) if given else None


def read_search_seeds(
    source: Source, value: Any, seeds: Sequence[int], rows: dict[str, Row]
) -> int:
    """Of how many seeds a search takes the mean.

    Raises:
        UsageError: as :func:`read_search`.
    """
    if not is_whole(value) or not 1 <= value <= len(seeds):
        raise source.error(
            ("search_seeds",),
            f"search_seeds: expected of how many of {len(seeds)} seeds a search takes the mean, "
            f"from 1 to {len(seeds)}; found {shown(value)}",
        )
    if value > 1 and not any(row.search for row in rows.values()):
        raise source.error(("search_seeds",), "search_seeds: no row has a search")
    return value
