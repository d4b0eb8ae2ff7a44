"""The configurations of a study's runs: made from options, checked, and named by hashes.

:func:`make_row_config` makes one configuration from the options of a plan, :func:`check_plan`
those of all rows (the configurations that a study compares) before the first run.
:func:`digest_run` returns the name of a run's folder: a hash of its options, its data and the code
of custom models. A changed option thus makes a new run, and nothing is trained twice.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recbole_pos.config.options import DATA, find_option
from recbole_pos.config.posconfig import STARTS, PosConfig
from recbole_pos.config.sources import list_positions
from recbole_pos.data.item_vectors import digest_content
from recbole_pos.data.protocol import masks_history
from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.runs.training_runs import QUIET
from recbole_pos.study.plan import Plan, list_fits

# Part of every digest (the hash that names a run's folder). It is raised when a changed default or
# formula of the package gives the same options other results.
REVISION = 1
# Options that decide where a run is trained and how it is reported, and do not change its results.
INDIFFERENT = (
    *("data_path", "gpu_id", "use_gpu", "worker", "show_progress", "init_from"),
    *("logger", "log_wandb", "wandb_project", "plugins", "cache"),
    # what the last three decide is in other options by then
    *("memory_limit", "sce_above", "short_histories", "short_below"),
)
# Options that are listed as options of the data, but do not change what is read from files.
_NOT_READ = (
    *("model", "init_from", "mask_history"),
    *("metrics", "topk", "valid_metric", "metric_decimal_place", "valid_users"),
)
# Stands for code whose text cannot be read, so that its digest is another in every process.
_PROCESS = uuid.uuid4().hex
_INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that are not the user's
# Top-level packages whose code is never hashed, since their version says what it is.
_VERSIONED = {"recbole_pos", "recbole", "torch", *sys.stdlib_module_names}


# --- from options to configurations ---


def make_row_config(options: Mapping[str, Any], *, strict: bool = False) -> PosConfig:
    """Return the complete configuration of a run, given the options that a study names for it.

    A study compares configurations, which are the rows of its tables. What a row does not name has
    the default of the model or of this package.

    Args:
        options: model, dataset, config_files (paths of yaml files) and further options. The
            position schemes under the key ``attach`` are added to those that the other options
            give.
        strict: whether an option that has no effect on the model is an error.

    Raises:
        UsageError: for an option that is wrong.
    """
    given = {**options, **QUIET}  # QUIET is the option that shows no progress
    model, dataset = given.pop("model", None), given.pop("dataset", None)
    files = list(given.pop("config_files", ()))

    # ``attach`` adds schemes to those that the model has anyway, which may stand in a file or be a
    # default. A first configuration shows them: its ``plain`` has all options, before RecBole
    # derives values from them. The name "nope" stands for no scheme, so it is left out.
    # ``scheme_names`` makes a list of the names, and refuses an unknown one.
    if attached := given.pop("attach", None):
        config = PosConfig(model, dataset, files, given, strict=False)
        if "position" not in config.plain:
            raise UsageError(f"attach: {config['model']} takes no position schemes")
        own = [name for name in scheme_names(config.plain["position"]) if name != "nope"]
        given["position"] = [*own, *scheme_names(attached, "attach")]

    config = PosConfig(model, dataset, files, given, strict=strict)

    # All rows of a study must rank the same items. But where ``mask_history`` is not set, RecBole
    # ranks all items for sequential models, and only unseen items for others, as
    # ``masks_history`` tells. Let the others rank all items, too.
    if config["mask_history"] is None and masks_history(config):
        config = PosConfig(model, dataset, files, given | {"mask_history": False}, strict=strict)
    return config


# --- checks of all rows ---


def complete_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the complete options of a row, with the defaults of its model and of the package.

    Args:
        options: model, dataset and options of a row (a configuration of the study).

    Returns:
        Option -> value, as given or by default; ``data_path`` is the folder of the dataset itself.

    Raises:
        UsageError: for an option that is wrong or has no effect on the model, or for one that names
            a trained run to start from.
    """
    config = make_row_config(options, strict=True)
    # ``plain`` has the options as given or by default, before RecBole derives values from them.
    # STARTS are the options ``init_from`` and ``update_from``, which name a trained run. The study
    # sets them itself, to the runs of another row.
    for key in STARTS:
        if config.plain.get(key):
            raise UsageError(
                f"{key}: a study does not start from other runs than its own; to start from those "
                "of another configuration, give `attach: {to: ROW, schemes: [...]}`"
            )
    # RecBole derives the folder of the dataset, such as dataset/ml-100k, from the option data_path.
    return {**config.plain, "data_path": config["data_path"]}


def exclude_unread(plan: Plan) -> None:
    """Leave out, for each row of a study, the options of the base that its model does not read.

    The base of a study has the options of all rows (the configurations it compares). A model such
    as Pop reads only some of them. The names of the others are stored in ``row.unread``, and the
    row is then made without them. An option that no row reads is likely a misspelling. It stays in
    all rows, so that :func:`check_plan` refuses it.

    Args:
        plan: the study, whose rows are changed.
    """
    # The rows that take options of the base. Not among them are rows with predictions of another
    # system, which ``sort_rows`` leaves out, and rows that start from the trained models of another
    # row (their parent), which have the parent's options.
    names = [name for name in plan.sort_rows() if not plan.rows[name].parent]
    if not names:
        raise UsageError("rows: none is trained; `recbole-pos score` compares files of predictions")

    unread = {name: _list_unread_options(plan, name) for name in names}
    unread_by_all = set.intersection(*map(set, unread.values()))  # likely misspellings
    for name in names:
        plan.rows[name].unread += tuple(key for key in unread[name] if key not in unread_by_all)


def _list_unread_options(plan: Plan, name: str) -> list[str]:
    """Return the options of the study's base that the model of a row does not read.

    Args:
        plan: the study; its base has the options of all rows.
        name: name of the row, a configuration of the study that has no parent.

    Returns:
        Names of these options. If the row has another mistake, which :func:`check_plan` reports
        later, some may be missing.
    """
    options = plan.make_first_options(name)
    # An option that the row gives itself is a mistake of the row if its model does not read it.
    only_in_base = plan.base.options.keys() - plan.rows[name].options.keys()

    # The error for an unread option names only the first one. So leave that out, and try again.
    unread: list[str] = []
    while True:
        try:
            complete_options(options)
            return unread
        except UnknownKey as error:  # the model does not read the option ``error.key``
            if error.key not in only_in_base or error.key not in options:
                return unread
            unread.append(error.key)
            del options[error.key]
        except UsageError:
            return unread


def check_plan(plan: Plan) -> dict[str, dict[str, Any]]:
    """Check every row of a study, and every value that a search tries; nothing is trained.

    A row is a configuration that the study compares; its grid (option -> values to try) is
    searched. Each value of the grid is checked together with the first values of the other options.

    Args:
        plan: the study.

    Returns:
        Name of a row -> its complete options, with the first value of each searched option.

    Raises:
        UsageError: for a wrong option, with the file and line of the row.
    """
    configs = {}
    for name in plan.sort_rows():
        options = plan.make_first_options(name)  # of the first seed and the first searched values
        grid = plan.rows[name].grid or {}
        try:
            configs[name] = complete_options(options)
            for option, values in grid.items():
                for value in values[1:]:  # the first values have just been checked
                    complete_options({**options, option: value})
        except UsageError as error:
            problem = str(error).removeprefix("configuration: ")
            # ``source.error`` makes a UsageError that begins with the file and line of the row.
            raise plan.source.error(("rows", name), f"configuration {name}: {problem}") from error
    return configs


def name_rows(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each run: its model, and the options in which that model's runs differ.

    Two SASRec runs with one and two heads are named ``SASRec (n_heads: 1)`` and ``SASRec (n_heads:
    2)``. Runs that differ only in the seed, or in options without an effect, get the same name.

    Args:
        configs: options of each run, with its model.
    """
    # Options of each run that may be part of its name: all but the seed and those that do not
    # change results (INDIFFERENT).
    named = []
    for config in configs:
        options = {key: value for key, value in config.items() if key not in (*INDIFFERENT, "seed")}
        # The options STARTS, such as init_from, are the folder of a run from whose weights training
        # starts. The folder differs from seed to seed, so a name has "a run" in its place.
        for key in STARTS:
            options[key] = "a run" if config.get(key) else None
        named.append(options)

    # Name the options of each run that have another value, or none, in a run of the same model.
    names = []
    for options in named:
        same_model = [other for other in named if other["model"] == options["model"]]
        differing = [
            f"{key}: {value}"
            for key, value in options.items()
            if any(other.get(key) != value for other in same_model)
        ]
        names.append(options["model"] + (f" ({', '.join(differing)})" if differing else ""))
    return names


def require_twins(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Require that all models of a comparison know the time of the request, or none does.

    A model with the option ``request_time: target`` knows when the interaction happens that it has
    to predict, which other models do not. Both kinds may still be in one comparison if each such
    model has a twin, a configuration that differs in nothing but ``request_time``: the comparison
    then measures the effect of that knowledge.

    Args:
        configs: name of a configuration -> its complete options.

    Raises:
        UsageError: naming a model that knows the time and has no twin.
    """
    # Twins are equal in all options but the seed, the request time and those that do not change
    # results (INDIFFERENT). So group the configurations by a hash of the other options.
    twins: dict[str, dict[str, str]] = {}  # hash -> {value of request_time: name}
    ignored = {*INDIFFERENT, "seed", "request_time"}
    for name, config in configs.items():
        shared = digest({key: value for key, value in config.items() if key not in ignored})
        twins.setdefault(shared, {})[config.get("request_time", "none")] = name

    # A group with only the value "target" is a configuration that knows the time and has no twin.
    # That is an error only if some other configuration does not know the time ("none").
    without_twin = [names["target"] for names in twins.values() if set(names) == {"target"}]
    if without_twin and any("none" in names for names in twins.values()):
        raise UsageError(
            f"request_time: {without_twin[0]} knows the time of what it predicts and others do "
            "not, so their metrics are not comparable; compare it with one that differs in "
            "request_time only, or give all the same"
        )


def require_same_candidates(plan: Plan, candidates: Mapping[str, str]) -> None:
    """Require that the models of each table of a study rank the same items (their candidates).

    A model that ranks fewer candidates has higher metrics, so a difference between models with
    different candidates would say nothing about the models.

    Args:
        plan: the study, with the rows (configurations) of its tables.
        candidates: name of a row -> which items it ranks, in words, for example ``all items`` or
            ``items not in the user's past``. Rows that are not in it are not compared.

    Raises:
        UsageError: naming two rows of a table that rank different items.
    """
    for table in plan.tables:
        rows = [row for row in table.rows if row in candidates]
        # Compare each row with the next one: if none of these pairs differs, all rows are alike.
        for row, other in itertools.pairwise(rows):
            if candidates[row] != candidates[other]:
                raise UsageError(
                    f"mask_history: {row} ranks {candidates[row]} and {other} ranks "
                    f"{candidates[other]}, so their metrics are not comparable; give all the same "
                    "mask_history, or put them into different tables of a study (`tables:`)"
                )


# --- digests, which name runs ---


def digest(*values: Any) -> str:
    """Return a hash of plain values (those that json has): 16 hex digits.

    Equal values have the same hash in every process. The order of the keys of a mapping does not
    matter; values that json does not know are hashed as their text.
    """
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_run(config: PosConfig, identity: Mapping[str, Any], *origin: bool | str) -> str:
    """Return the digest of a run: a hash of what decides its results, and the name of its folder.

    A study finds a finished run again by this name, and trains it again if the digest is another.
    Options that have their default value are left out of the hash, so that a new option of the
    package changes no digest. A developer who changes a default raises ``REVISION`` instead.

    Args:
        config: configuration of the run.
        identity: hashes of the data and the split that the run reads.
        origin: what else tells runs with equal options apart. Of a run that starts from trained
            weights: a digest of these. Of others: whether the run is a trial of a search, since
            trials are not tested.

    Returns:
        16 hex digits.
    """
    # ``plain`` has all options, given or by default. INDIFFERENT are options without an effect on
    # results, such as paths and what is printed.
    effective = {key: value for key, value in config.plain.items() if key not in INDIFFERENT}
    defaults = config.internal_config_dict  # RecBole's name: option -> default of the model
    options = {key: value for key, value in effective.items() if value != defaults.get(key)}
    if options.get("item_vectors"):  # hash what is in the file, not its path
        options["item_vectors"] = digest_content(options["item_vectors"])

    # digest_code hashes the code of custom models and schemes.
    return digest(options, identity, REVISION, digest_code(config), *origin)


def digest_data_options(config: PosConfig) -> str:
    """Return a hash of the options that decide which data are read and how.

    Configurations with equal hashes read the same data, so that one dataset in memory serves them
    all. The type of the model is included, since RecBole reads data for some types differently.

    Args:
        config: configuration of a run.
    """
    # The package notes for every option what it decides: its role, which is DATA for options of
    # the data. ``plain`` has the options as given or by default. _NOT_READ has the exceptions,
    # options of the data such as the metrics that do not change what is read from files.
    names = [key for key in config.plain if find_option(key).role == DATA and key not in _NOT_READ]
    return digest({key: config.plain[key] for key in names}, str(config["MODEL_TYPE"]))


def digest_requests(plan: Plan) -> dict[str, str]:
    """Return, for each training run of a plan, a hash of everything that the plan asks of it.

    The study's folder keeps this hash with each run. When a change of the plan changes the hash,
    the run no longer belongs to the study. The hash covers the dataset, the seed, the base (options
    of all rows) without ``data_path``, and the options and the search of the run's own row (its
    configuration).

    Returns:
        Name of a run (such as ``SASRec, seed 2020``) -> hash of 16 hex digits.
    """
    # What is asked of a row is the same for all its runs: dataset, options, and search.
    requests = {row: _collect_request(plan, row) for row in plan.rows}
    return {fit.name: digest(requests[fit.row], fit.seed) for fit in list_fits(plan)}


def _collect_request(plan: Plan, name: str) -> dict[str, Any]:
    """Return everything that a plan asks of a row (a configuration), to be hashed.

    Args:
        plan: the study.
        name: name of the row.

    Returns:
        The request by key: ``dataset``, ``base`` (options of all rows), ``row`` (its own options)
        and ``config_files``. If the row starts from the trained models of another row, its parent,
        also ``to``, the request of the parent, and ``schemes``, the position schemes that are added
        to these models. If options are searched, also ``search``, the values to try and the seeds.
    """
    row = plan.rows[name]
    request: dict[str, Any] = {
        "dataset": plan.dataset,
        "base": {key: value for key, value in plan.base.options.items() if key != "data_path"},
        "row": row.options,
        "config_files": [*plan.base.config_files, *row.config_files],
    }
    if row.parent:
        request |= {"to": _collect_request(plan, row.parent), "schemes": row.schemes}
    if row.grid:
        request["search"] = [row.grid, plan.trial_seeds]
    return request


# --- code of custom models and schemes ---


def digest_code(config: PosConfig) -> list[str]:
    """Return hashes of the code of a custom model and of custom position schemes.

    They are part of the name of a run's folder, so that edited code makes a new run. Classes of
    this package and of RecBole are left out. Code without a file, such as that of a notebook, gets
    another hash in each process, and each time its class is executed.

    Args:
        config: configuration of a run, with its model and position schemes.

    Returns:
        One hash (16 hex digits) for each file of code.
    """
    # list_positions returns the names of schemes in the option ``position``, and SCHEMES has the
    # class of each scheme by its name. Hash the class of the model and those of its schemes, if the
    # user has written them.
    names = list_positions(config.plain.get("position"), model=None)
    schemes = [SCHEMES[name] for name in names if name in SCHEMES]
    digests = []
    for cls in (config.model_class, *schemes):
        if cls.__module__.partition(".")[0] in ("recbole_pos", "recbole"):
            continue  # not custom
        # For code without a file, hash random text of this process and the address of the class.
        contents = _read_code(cls) or [f"{_PROCESS}{id(cls)}".encode()]
        digests += [hashlib.sha256(content).hexdigest()[:16] for content in contents]
    return digests


def _read_code(cls: type) -> list[bytes]:
    """Return the content of the user's files of code that a class depends on.

    These are the modules of the class, of its base classes, and of everything that they import,
    also within functions. Installed packages are left out, since their versions stand for them.

    Returns:
        Bytes of each file, in the order of the names of the modules; an empty list if the class has
        no file.
    """
    if _find_file(cls.__module__) is None:
        return []

    # Follow imports from module to module until no new file is found.
    contents: dict[str, bytes] = {}  # name of a module -> bytes of its file
    waiting = [base.__module__ for base in cls.__mro__]
    while waiting:
        name = waiting.pop()
        file = _find_file(name)
        if file is not None and name not in contents:
            contents[name] = file.read_bytes()
            # Relative imports start at a package: this module if it is one, else the one around it.
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            waiting += _list_imports(contents[name], package)
    return [contents[name] for name in sorted(contents)]


def _find_file(name: str) -> Path | None:
    """Return the file of a module that the user has written, so that its code can be hashed.

    Args:
        name: full name of the module, such as ``models.mine``. The name of a class or a function
            may be given, too, since an import does not show which is which.

    Returns:
        Path of the file; None for a module of an installed package, of Python or of this package,
        for one without a file, and for a name that is not that of a module.
    """
    if name.partition(".")[0] in _VERSIONED:  # this package, RecBole, torch or Python
        return None

    # Where the file may be. A module that is not imported yet is searched where Python does it, as
    # models/mine/__init__.py and models/mine.py.
    module = sys.modules.get(name)
    if module is not None:
        file_name = getattr(module, "__file__", None)
        candidates = [Path(file_name)] if file_name else []
    else:
        path = Path(*name.split("."))
        files = path / "__init__.py", path.with_suffix(".py")
        candidates = [Path(folder, file) for folder in sys.path for file in files]

    file = next((file for file in candidates if file.is_file()), None)
    # Installed packages are below a folder site-packages or dist-packages (_INSTALLED).
    return None if file is None or _INSTALLED & set(file.parts) else file


def _list_imports(content: bytes, package: str) -> set[str]:
    """Return the names of everything that a module imports, also within its functions.

    For ``from shop.models import GRU`` these are ``shop``, ``shop.models`` and ``shop.models.GRU``.
    The import executes the packages shop and shop.models, and the text does not show whether GRU is
    a module or a class.

    Args:
        content: bytes of the module's file. A file that is not Python, such as a compiled
            extension, has no names.
        package: name of the package of the module, to which its relative imports refer.
    """
    names: set[str] = set()
    with suppress(SyntaxError, ValueError):  # an extension in another language
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:  # a relative import: `from . import x` has level 1
                    base = importlib.util.resolve_name("." * node.level + base, package)
                names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    # Add the packages around each name: for shop.models.GRU, shop and shop.models.
    for name in list(names):
        while name := name.rpartition(".")[0]:
            names.add(name)
    return names - {""}  # "" is the base of `from . import x` outside of a package
