"""From the options of a row to its checked configuration; which rows a table can compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from recbole_pos.config.posconfig import STARTS, PosConfig
from recbole_pos.data.targets import masks_history
from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.position.schemes import scheme_names
from recbole_pos.runs.worker import QUIET
from recbole_pos.study.digests import INDIFFERENT, digest
from recbole_pos.study.plan import Plan

Check = Callable[[dict[str, Any]], dict[str, Any]]


def make_row_config(
    options: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, strict: bool = False
) -> PosConfig:
    """Return the configuration of a row.

    Args:
        options: model, dataset, config_files and options, as a plan has them. The schemes under
            ``attach`` are added to the position schemes of the other options.
        overrides: options that win over ``options``.
        strict: whether an option without an effect is an error.

    Raises:
        UsageError: for an option that is wrong.
    """
    merged = {**options, **(overrides or {})}
    model, dataset = merged.pop("model", None), merged.pop("dataset", None)
    files = list(merged.pop("config_files", ()))
    if schemes := merged.pop("attach", None):
        config = PosConfig(model, dataset, files, merged, strict=False)
        if "position" not in config.plain:
            raise UsageError(f"attach: {config['model']} takes no position schemes")
        merged["position"] = attach_schemes(config.plain["position"], schemes)
    config = PosConfig(model, dataset, files, {**merged, **QUIET}, strict=strict)
    if config["mask_history"] is None and masks_history(config):
        # A general model, for which RecBole would exclude seen items; a table has one set of
        # candidates, by default that of the sequential models.
        merged["mask_history"] = False
        config = PosConfig(model, dataset, files, {**merged, **QUIET}, strict=strict)
    return config


def complete_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the complete options of a row, with the defaults of its model and of the package.

    Raises:
        UsageError: for an option that is wrong, or that a study sets itself.
    """
    config = make_row_config(options, strict=True)
    for key in STARTS:
        if config.plain.get(key):
            raise UsageError(
                f"{key}: a configuration begins with fresh weights or another's: "
                "`attach: {to: ROW, schemes: [...]}`"
            )
    return {**config.plain, "data_path": config["data_path"]}


def attach_schemes(position: Any, schemes: Iterable[str]) -> list[str]:
    """Return the schemes of a model's option ``position``, with further schemes attached."""
    model_schemes = [name for name in scheme_names(position) if name != "nope"]
    return [*model_schemes, *scheme_names(list(schemes), "attach")]


def note_unread(plan: Plan, check: Check) -> None:
    """Set ``unread`` of every row; :func:`check_plan` refuses an option that no row reads."""
    for name in plan.sort_rows():
        row = plan.rows[name]
        while key := _find_unread(plan, name, check):
            row.unread = (*row.unread, key)
    unread_by_all = set.intersection(
        *(set(row.unread) for row in plan.rows.values() if not row.parent)
    )
    for row in plan.rows.values():
        row.unread = tuple(key for key in row.unread if key not in unread_by_all)


def _find_unread(plan: Plan, name: str, check: Check) -> str:
    """Return the first option of the base that a row does not read; empty if it reads all."""
    try:
        check(plan.make_first_options(name))
    except UnknownKey as error:
        if error.key in plan.base.options and error.key not in plan.rows[name].options:
            return error.key
    except UsageError:
        pass  # check_plan raises it again, with file and line
    return ""


def check_plan(plan: Plan, check: Check) -> dict[str, dict[str, Any]]:
    """Check every row, and every value of a grid, against the models; nothing is trained.

    Args:
        check: completes the options of a row, or raises UsageError.

    Returns:
        Row -> its complete options, with the first values of a grid.
    """
    configs = {}
    for name in plan.sort_rows():
        options = plan.make_first_options(name)
        grid = plan.rows[name].grid or {}
        try:
            configs[name] = check(options)
            for option, values in grid.items():
                for value in values[1:]:
                    check({**options, option: value})
        except UsageError as error:
            problem = str(error).removeprefix("configuration: ")
            raise plan.source.error(("rows", name), f"configuration {name}: {problem}") from error
    return configs


def require_twins(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Require that all models of a table know the time of the request, or none does.

    A model that knows it may also have a twin that differs in nothing else, since the table then
    measures the effect of that knowledge. ``configs`` are name -> complete options.

    Raises:
        UsageError: naming a model that knows the time and has no twin.
    """
    twins: dict[str, dict[str, str]] = {}  # digest of the shared options -> request_time -> name
    ignored = {*INDIFFERENT, "seed", "request_time"}
    for name, config in configs.items():
        shared = digest({key: value for key, value in config.items() if key not in ignored})
        twins.setdefault(shared, {})[config.get("request_time", "none")] = name
    without_twin = [names["target"] for names in twins.values() if set(names) == {"target"}]
    if without_twin and any("none" in names for names in twins.values()):
        raise UsageError(
            f"request_time: {without_twin[0]} knows the time of what it predicts and others do "
            "not, so their metrics are not comparable; compare it with one that differs in "
            "request_time only, or give all the same"
        )


def require_same_candidates(candidates: Mapping[str, str]) -> None:
    """Require that the models of one table rank the same items.

    Among fewer candidates every model has higher metrics, so a difference would say nothing about
    the models. ``candidates`` are name of a row -> which items it ranks, in words.

    Raises:
        UsageError: naming two rows that differ.
    """
    first_row, first_candidates = next(iter(candidates.items()))
    for row, row_candidates in candidates.items():
        if row_candidates != first_candidates:
            raise UsageError(
                f"mask_history: {first_row} ranks {first_candidates} and {row} ranks "
                f"{row_candidates}, so their metrics are not comparable; give all the same "
                "mask_history, or put them into different tables of a study (`tables:`)"
            )
