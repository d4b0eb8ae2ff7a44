"""The configurations of a study's runs: made from options, checked, and named by digests.

:func:`make_row_config` makes one configuration, :func:`check_plan` those of all rows before the
first run. :func:`digest_run` names the folder of a run by its options, its data and the code of
custom models, so that a changed option makes a new run, and nothing is trained twice.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from recbole_pos.config.options import DATA, find_option
from recbole_pos.config.posconfig import STARTS, PosConfig
from recbole_pos.config.sources import list_positions
from recbole_pos.data.item_vectors import digest_content
from recbole_pos.data.targets import masks_history
from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.runs.worker import QUIET
from recbole_pos.study.plan import Plan, list_fits

REVISION = 1  # raised if a changed default or formula gives the same digest other numbers
# Options that decide where and how a run is reported, and do not change its results.
INDIFFERENT = (
    *("data_path", "gpu_id", "use_gpu", "worker", "show_progress", "tensorboard", "init_from"),
    *("logger", "log_wandb", "wandb_project", "plugins", "data_on_device", "cache"),
    "memory_limit",
)
# Options with the role of data that do not change what is read.
_NOT_READ = (
    *("model", "init_from", "mask_history"),
    *("metrics", "topk", "valid_metric", "metric_decimal_place", "valid_users"),
)
_PROCESS = uuid.uuid4().hex  # in the digest of code whose text cannot be read
_INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that are not the user's
_VERSIONED = {"recbole_pos", "recbole", "torch", *sys.stdlib_module_names}


# --- from options to configurations ---


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

    merged |= QUIET
    config = PosConfig(model, dataset, files, merged, strict=strict)
    if config["mask_history"] is None and masks_history(config):
        # A general model, for which RecBole would exclude seen items; a table has one set of
        # candidates, by default that of the sequential models.
        merged["mask_history"] = False
        config = PosConfig(model, dataset, files, merged, strict=strict)
    return config


def attach_schemes(position: Any, schemes: Iterable[str]) -> list[str]:
    """Return the schemes of a model's option ``position``, with further schemes attached."""
    model_schemes = [name for name in scheme_names(position) if name != "nope"]
    return [*model_schemes, *scheme_names(list(schemes), "attach")]


# --- checks of all rows ---


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


def note_unread(plan: Plan) -> None:
    """Note in each row which options of the base its model does not read (``unread``).

    The row is then made without them. An option that no row reads stays in all rows, so that
    :func:`check_plan` refuses it.
    """
    trained_rows = [plan.rows[name] for name in plan.sort_rows()]
    if not trained_rows:
        raise UsageError("rows: none is trained; `recbole-pos score` compares files of predictions")
    for name in plan.sort_rows():
        row = plan.rows[name]
        while key := _find_unread(plan, name):
            row.unread = (*row.unread, key)
    unread_by_all = set.intersection(*(set(row.unread) for row in trained_rows if not row.parent))
    for row in trained_rows:
        row.unread = tuple(key for key in row.unread if key not in unread_by_all)


def _find_unread(plan: Plan, name: str) -> str:
    """Return an option of the base that the model of a row does not read; empty if it reads all."""
    try:
        complete_options(plan.make_first_options(name))
    except UnknownKey as error:
        if error.key in plan.base.options and error.key not in plan.rows[name].options:
            return error.key
    except UsageError:
        pass  # check_plan raises it again, with file and line
    return ""


def check_plan(plan: Plan) -> dict[str, dict[str, Any]]:
    """Check every row, and every value of a grid, against the models; nothing is trained.

    Returns:
        Row -> its complete options, with the first values of a grid.
    """
    configs = {}
    for name in plan.sort_rows():
        options = plan.make_first_options(name)
        grid = plan.rows[name].grid or {}
        try:
            configs[name] = complete_options(options)
            for option, values in grid.items():
                for value in values[1:]:
                    complete_options({**options, option: value})
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


# --- digests, which name runs ---


def digest(*values: Any) -> str:
    """Return a digest of plain values: 16 hex digits. The order of keys does not matter."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_run(config: PosConfig, identity: Mapping[str, Any], *origin: bool | str) -> str:
    """Return the digest of a run, which is the name of its folder.

    Options at the default of their model are left out, so that an option that the package gains or
    loses changes no digest. A changed default raises ``REVISION``.

    Args:
        identity: identity of its data and split.
        origin: whether it is a trial; or the digest of the run that it starts from.
    """
    defaults = config.internal_config_dict
    options = {
        key: value
        for key, value in config.plain.items()
        if key not in INDIFFERENT and value != defaults.get(key)
    }
    if options.get("item_vectors"):
        options["item_vectors"] = digest_content(options["item_vectors"])
    return digest(options, identity, REVISION, digest_code(config), *origin)


def digest_data_options(config: PosConfig) -> str:
    """Return a digest of the data options, equal for configurations that read the same data."""
    options = {
        key: value
        for key, value in config.plain.items()
        if find_option(key).role == DATA and key not in _NOT_READ
    }
    return digest(options, str(config["MODEL_TYPE"]))


def digest_requests(plan: Plan) -> dict[str, str]:
    """Return name of a fit -> digest of what a plan asks of it.

    A run that was made for another digest no longer belongs to the fit. The digest covers the
    search, which decides later runs, and all options of the base but ``data_path``.
    """
    requests = {row: _collect_request(plan, row) for row in plan.rows}
    return {fit.name: digest(requests[fit.row], fit.seed) for fit in list_fits(plan)}


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
    if row.grid:
        request["search"] = [row.grid, plan.trial_seeds]
    return request


# --- code of custom models and schemes ---


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
        contents = _read_code(cls) or [f"{_PROCESS}{id(cls)}".encode()]
        digests += [hashlib.sha256(content).hexdigest()[:16] for content in contents]
    return digests


def _read_code(cls: type) -> list[bytes]:
    """Return the content of the user's modules that a class is made of; none if it has no file.

    They are the modules of the class and its bases and all that these import, also within
    functions. Versions stand for packages that are installed.
    """
    if _find_file(cls.__module__) is None:
        return []
    contents: dict[str, bytes] = {}
    waiting = [base.__module__ for base in cls.__mro__]
    while waiting:
        name = waiting.pop()
        file = _find_file(name)
        if file is not None and name not in contents:
            contents[name] = file.read_bytes()
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            waiting += _list_imports(contents[name], package)
    return [contents[name] for name in sorted(contents)]


def _find_file(name: str) -> Path | None:
    """Return the file of a module of the user's; None if it is installed, or has no file."""
    top = name.partition(".")[0]
    if top in _VERSIONED:
        return None
    # the top-level package first: looking for a module in it imports the package
    for searched in (top, name):
        places = [getattr(sys.modules.get(searched), "__file__", None)]
        if places == [None]:
            with suppress(ImportError, ValueError):  # the name is not of a module
                spec = importlib.util.find_spec(searched)
                if spec is not None:
                    places = [spec.origin, *(spec.submodule_search_locations or ())]
        if any(_INSTALLED & set(Path(place).parts) for place in places if place):
            return None
    file = places[0]
    return Path(file) if file and Path(file).is_file() else None


def _list_imports(content: bytes, package: str) -> set[str]:
    """Return the names that a module of ``package`` imports, some of which may be no modules."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError):  # an extension in another language
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    parents = {name.rpartition(".")[0] for name in names}
    return {name for name in names | parents if name}
