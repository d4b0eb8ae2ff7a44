"""Digests, which name the runs of a study: of options, data and the code of custom models."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from recbole_pos.config.options import DATA, find_option
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.config.sources import list_positions
from recbole_pos.data.item_vectors import digest_content
from recbole_pos.position.schemes import SCHEMES
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
    *("metrics", "topk", "valid_metric", "metric_decimal_place"),
)
_PROCESS = uuid.uuid4().hex  # in the digest of code whose text cannot be read
_INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that are not the user's
_VERSIONED = {"recbole_pos", "recbole", "torch", *sys.stdlib_module_names}


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
