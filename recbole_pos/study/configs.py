"""From the options of a row to its configuration, its data, and the digest of its run."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from recbole_pos.config.options import DATA, find_option
from recbole_pos.config.posconfig import STARTS, PosConfig
from recbole_pos.config.sources import list_positions
from recbole_pos.data.item_vectors import digest_content
from recbole_pos.data.location import SIDE_FEATURES
from recbole_pos.data.windows import masks_history
from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.runs.worker import QUIET
from recbole_pos.study.loaded_code import read_code
from recbole_pos.study.plan import Plan, Search, list_fits
from recbole_pos.values import shown

NUMERICS = 1  # raised when the same options would give other numbers
# Options that decide where and how a run is reported, and do not change its results.
INDIFFERENT = (
    *("data_path", "gpu_id", "use_gpu", "worker", "show_progress", "tensorboard", "init_from"),
    *("logger", "log_wandb", "wandb_project", "plugins", "data_on_device", "cache"),
    "memory_limit",
)
# Options that digests of earlier versions lack, with the values that do what those versions did.
_SINCE_1 = {
    **dict.fromkeys(("update_from", "new_items", "column_types", "train_batch_events")),
    "benchmark_filename": None,
    **{"precision": "auto", "compile": False},
    **{"rm_copies": False, "request_time": "none"},
    **dict.fromkeys((*SIDE_FEATURES, "target_events")),
    **{"feature_fusion": "sum", "numeric_embedding": "periodic", "numeric_bins": 32},
    **dict.fromkeys(("item_vectors", "item_vectors_train")),
    **{"item_vectors_use": "add", "item_vectors_whiten": False},
    **{"target_window": 1, "shuffle_block": None, "lr_scheduler": "none"},
    **{"warmup_steps": 0, "ema_decay": 0.0, "data_part": "none"},
}
# Options of RecBole that are no options of a run, and that digests of 0.2 have.
_OF_RECBOLE = (
    *("relation_kg_num_interval", "entity_kg_num_interval", "kg_reverse_r"),
    *("ENTITY_ID_FIELD", "RELATION_ID_FIELD", "HEAD_ENTITY_ID_FIELD", "TAIL_ENTITY_ID_FIELD"),
    *("alias_of_relation_id", "alias_of_entity_id", "valid_metric_bigger"),
    *("preload_weight", "additional_feat_suffix"),
)
# Option that changes results only where targets are repeated; the identity of such data has it.
_IN_IDENTITY = "repeated_targets"
_PROCESS = uuid.uuid4().hex  # in the digest of code whose text cannot be read
# Options with the role of data that do not change what is read.
_NOT_READ = (
    "model",
    "init_from",
    "mask_history",
    *("metrics", "topk", "valid_metric"),
    "metric_decimal_place",
)
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
        search = plan.rows[name].search
        grid = search.grid or {} if isinstance(search, Search) else {}
        try:
            configs[name] = check(options)
            for option, values in grid.items():
                for value in values[1:]:
                    check({**options, option: value})
        except UsageError as error:
            problem = str(error).removeprefix("configuration: ")
            location = _locate_option(plan, name, problem)
            raise UsageError(f"{location}: configuration {name}: {problem}") from error
    return configs


def _locate_option(plan: Plan, name: str, problem: str) -> str:
    """Return file and line of the option of a row that ``problem`` names, else of the row."""
    lines = plan.locate_searched(name)
    lines |= {key: plan.source.locate("base", key) for key in plan.base.options}
    lines |= {key: plan.source.locate("rows", name, key) for key in plan.rows[name].options}
    lines.pop("model", None)  # "model" in a message is often no option
    for key, location in lines.items():
        if key in problem:
            return location
    return plan.source.locate("rows", name)


def digest(options: Mapping[str, Any], *values: Any) -> str:
    """Return a digest of options and further values: 16 hex digits.

    The order of keys does not matter. 1 equals 1.0, and a tuple equals a list, but True is not 1.

    Raises:
        UsageError: naming the option of a value that is not plain.
    """
    plain_options = {name: _to_canonical(value, str(name)) for name, value in options.items()}
    plain_values = [_to_canonical(value, "digest") for value in values]
    content = [plain_options, plain_values]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _to_canonical(value: Any, name: str) -> Any:
    """Return a value of json types, the same for equal values; ``name`` is for messages."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return int(value) if value.is_integer() else value
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {str(key): _to_canonical(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_canonical(item, name) for item in value]
    raise UsageError(f"{name}: {shown(value)} is not a plain value, so it cannot identify a run")


def digest_requests(plan: Plan) -> dict[str, str]:
    """Return name of a fit -> digest of what a plan asks of it.

    A run that was made for another digest no longer belongs to the fit. The digest covers the
    search, which decides later runs, and all options of the base but ``data_path``.
    """
    requests = {row: _collect_request(plan, row) for row in plan.rows}
    by_seed = {(row, seed): digest(requests[row], seed) for row in requests for seed in plan.seeds}
    return {fit.name: by_seed[fit.row, fit.seed] for fit in list_fits(plan)}


def _collect_request(plan: Plan, name: str) -> dict[str, Any]:
    """Return what a plan asks of a row: options, files, search, and the same of its parent."""
    row = plan.rows[name]
    request: dict[str, Any] = {
        "dataset": plan.dataset,
        "base": {key: value for key, value in plan.base.options.items() if key != "data_path"},
        "row": row.options,
        "config_files": [*plan.base.config_files, *row.config_files],
        "ties": plan.ties,
    }
    if row.parent:
        request |= {"to": _collect_request(plan, row.parent), "schemes": row.schemes}
    if isinstance(row.search, Search):
        searched = row.search.space if row.search.grid is None else row.search.grid
        request["search"] = [searched, row.search.trials, plan.trial_seeds]
    return request


def digest_run(config: PosConfig, identity: Mapping[str, Any], *origin: bool | str) -> str:
    """Return the digest of a run, which is the name of its folder.

    Args:
        identity: identity of its data and split.
        origin: whether it is a trial; or the digest of the run that it starts from.
    """
    options = {key: config[key] for key in _OF_RECBOLE}
    for key, value in config.plain.items():
        does_as_before = key in _SINCE_1 and value == _SINCE_1[key]
        if key not in (*INDIFFERENT, _IN_IDENTITY) and not does_as_before:
            options[key] = value
    if options.get("item_vectors"):
        options["item_vectors"] = digest_content(options["item_vectors"])
    revisions = _list_revisions(config)
    return digest(options, dict(identity), NUMERICS, digest_code(config), *origin, *revisions)


def _list_revisions(config: PosConfig) -> list[str]:
    """Return what has changed since ``NUMERICS`` in the numbers of these options only."""
    samplers = config.plain.get("loss_type"), config.plain.get("negative_sampler")
    is_corrected = config.plain.get("logq_correction") != "none"
    return ["q counts training targets"] if "in_batch" in samplers and is_corrected else []


def digest_code(config: PosConfig) -> list[str]:
    """Return digests of the code of a custom model and schemes, so that edits make new runs.

    Code without a file, such as that of a notebook, gets another digest in each process, and for
    each execution of its class.
    """
    names = list_positions(config.plain.get("position"), None)
    schemes = [SCHEMES[name] for name in names if name in SCHEMES]
    digests = []
    for cls in (config.model_class, *schemes):
        if cls.__module__.partition(".")[0] in ("recbole_pos", "recbole"):
            continue
        try:
            contents = read_code(cls)
        except OSError:
            contents = [f"{_PROCESS}{id(cls)}".encode()]
        digests += [hashlib.sha256(content).hexdigest()[:16] for content in contents]
    return digests


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


def digest_data_options(config: PosConfig) -> str:
    """Return a digest of the data options, equal for configurations that read the same data."""
    options = {
        key: value
        for key, value in config.plain.items()
        if find_option(key).role == DATA and key not in _NOT_READ
    }
    return digest(options, str(config["MODEL_TYPE"]))
