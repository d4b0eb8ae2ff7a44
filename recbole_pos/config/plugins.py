"""Make models, position schemes and metrics that are not the plugin's known to a process.

The option ``plugins`` names modules whose import registers them; a run writes it into its
config.yaml. What a script or notebook defines is sent to the processes that it starts, see
:func:`pack`. Modules are code, and files come from strangers: what a file names must be installed
or imported already, and the working directory is searched only for names that were allowed
(:func:`allow_plugins`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from typing import Any

from recbole_pos.config.metrics import CUSTOM, add_metric
from recbole_pos.errors import UsageError
from recbole_pos.model.models import MODELS, ensure_registered
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.registry import without_working_directory
from recbole_pos.values import short, shown

_allowed: set[str] = set()  # modules that may be imported from the working directory


def allow_plugins(plugins: Any) -> None:
    """Let these modules be imported from the working directory from now on.

    It is called for modules that the user's own command or code names. Those that only a file names
    are not allowed, since the file may be a stranger's, and importing a module runs its code.

    Args:
        plugins: one name of a module or several, as in the option ``plugins``. A value of another
            kind is ignored here; :func:`import_plugins` refuses it.
    """
    names = [plugins] if isinstance(plugins, str) else plugins or ()
    if isinstance(names, (list, tuple)):
        _allowed.update(name for name in names if isinstance(name, str))


def import_named(plugins: Any) -> list[str]:
    """Import the modules that the user names on the command line with ``--plugins``.

    Importing a module runs its code. Modules that the user names are trusted, and may be installed
    or be in the working directory. Those that only a config file names must be installed: the file
    and the working directory may both come from a stranger.

    Args:
        plugins: one name of a module or several; None for none.

    Returns:
        The names as a list.

    Raises:
        UsageError: if this is no name of a module, or a module cannot be imported.
    """
    allow_plugins(plugins)  # lets them be imported from the working directory, too
    return import_plugins(plugins, "--plugins")


def import_plugins(plugins: Any, location: str) -> list[str]:
    """Import the modules that the option ``plugins`` names; they register custom models and such.

    Args:
        plugins: one name of a module or several; None for none.
        location: file or argument that gave the option, with which messages begin.

    Returns:
        The names as a list.

    Raises:
        UsageError: if a module cannot be imported.
    """
    names = [plugins] if isinstance(plugins, str) else list(plugins or ())
    for name in names:
        try:
            _import(name)
        except Exception as error:  # code of others may raise anything
            # The module ``a.b`` does not exist if Python misses ``a.b`` or its package ``a``. If
            # Python misses another module, or for another error, it exists and its code fails.
            problem = f"{type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError):
                misses_package = name.startswith(f"{error.name}.")
                if error.name == name or misses_package:
                    problem = _explain_missing(name)
            raise UsageError(f"{location}: plugins: {shown(name)}: {problem}") from error
    return names


def _import(name: str) -> None:
    """Import a module, from the working directory only if the user has named it.

    Importing runs code, and the working directory may be a stranger's folder. It is searched only
    for the modules in ``_allowed``, which the user's own command or code names.

    Args:
        name: name of the module, such as ``models`` or ``package.models``.
    """
    if name not in _allowed:
        # The working directory may be on Python's path already: take it off meanwhile.
        with without_working_directory():
            importlib.import_module(name)
        return

    # Add the working directory to Python's path if only it has the module (or its package).
    package, *_ = name.split(".")
    folder = os.getcwd()
    importlib.invalidate_caches()  # the file may be newer than what Python remembers of folders
    is_on_path = importlib.util.find_spec(package) is not None
    if not is_on_path and PathFinder.find_spec(package, [folder]) is not None:
        sys.path.append(folder)  # it stays, since processes that this one starts inherit it
    importlib.import_module(name)


def _explain_missing(name: str) -> str:
    """Return the end of a message about a module that does not exist: what the user can do.

    The working directory has been searched if the user's own command or code names the module,
    which is then in ``_allowed``. It has not been if only a file names it.

    Args:
        name: name of the module.
    """
    if name in _allowed:
        return (
            f"there is no such module, neither installed nor in {os.getcwd()}; start in the folder "
            "that has it, and name it as `import` does, without .py"
        )
    return (
        "it is not installed, and the working directory is not searched for what only a file "
        f"names. If you trust its code, add --plugins {short(name)}; in Python, import it first"
    )


def register_class(name: str, modules: Iterable[str]) -> None:
    """Register the class of a model that a module of the option ``plugins`` has, by its name.

    So a module needs no call of ``register_model``, only a class of the model's name.

    Args:
        name: name of the model, and of its class. Nothing happens if it is registered already, or
            if no module has a class of this name.
        modules: names of modules, which are imported already.
    """
    for module in modules:
        model = getattr(sys.modules.get(module), name, None)  # None if it has nothing of the name
        # MODELS.added has the registered models; ``ensure_registered`` adds a class to it.
        if name not in MODELS.added and isinstance(model, type):
            ensure_registered(model)


def find_search_folder(module: str) -> str | None:
    """Return the folder that must be on ``sys.path`` for a module to be found.

    Other processes are given it, so that they find the module where this process did. For
    ``package.module`` it is the folder that contains ``package``. It is None if the module has not
    been imported, or has no file.
    """
    top = sys.modules.get(module.partition(".")[0])
    folders = list(getattr(top, "__path__", []))  # of a package; a module has only __file__
    place = folders[0] if folders else getattr(top, "__file__", None)
    return os.path.dirname(os.path.abspath(place)) if place else None


def find_modules(model: str, schemes: Iterable[str], metrics: Any = ()) -> list[str]:
    """Return the modules that another process must import to know a model, its schemes and metrics.

    What a module of the user's has registered is unknown to a new process until the process imports
    that module. Models, schemes and metrics of this package or RecBole are known everywhere. What a
    notebook has registered is not found by importing anything, and so adds no module.

    Args:
        model: name of the model.
        schemes: names of its position schemes (ways to tell a model where in time events are).
        metrics: one name of a metric or several; None for none.

    Returns:
        Names of modules, each once.
    """
    metric_names = [metrics] if isinstance(metrics, str) else metrics or ()
    # The registrations of users, by name; None for what is built in. The attribute ``module`` of
    # a registration is the module that made it, and None if a notebook did.
    registrations: list[Any] = [
        MODELS.added.get(model),
        *(SCHEMES.added.get(name) for name in schemes),
        *(CUSTOM.get(str(name).lower()) for name in metric_names),
    ]
    modules = [entry.module for entry in registrations if entry is not None]
    return list(dict.fromkeys(module for module in modules if module is not None))


def pack(model: str) -> bytes:
    """Return, as bytes, the custom models, schemes and metrics that child processes have to know.

    Users register them by Python code, which a child process has not run. There are two ways:

    - A class or function of a script or notebook, which no other process can import, is sent with
      its code (by cloudpickle).
    - Of a module that has registered something, only the name is sent, with the folder in which the
      module was found. The child imports the module, and so registers the same.

    Names of modules that the user has allowed to be in the working directory
    (:func:`allow_plugins`) are sent, too.

    Args:
        model: name of the model that the other processes will train.

    Returns:
        Bytes for :func:`unpack`; empty if there is nothing to send.

    Raises:
        UsageError: if a class or function cannot be pickled.
    """
    # What users have registered, name -> registration: of models only the one to train is needed,
    # but all position schemes (SCHEMES) and metrics (CUSTOM).
    models = {model: MODELS.added[model]} if model in MODELS.added else {}
    tables: list[dict[str, Any]] = [models, SCHEMES.added, CUSTOM]

    # Modules to send by name: name -> folder to add to ``sys.path``, None for none.
    folders: dict[str, str | None] = dict.fromkeys(_allowed)
    for table in tables:
        for registration in table.values():
            if registration.module is not None:
                folders[registration.module] = find_search_folder(registration.module)

    # What no module has registered is sent with its code, again as three tables.
    by_code = [
        {name: registration for name, registration in table.items() if registration.module is None}
        for table in tables
    ]
    if not folders and not any(by_code):
        return b""
    import cloudpickle

    try:
        return cloudpickle.dumps((folders, *by_code))
    except Exception as error:  # pickling code of others may raise anything
        names = ", ".join(name for table in by_code for name in table)
        raise UsageError(
            f"{names} cannot be sent to other processes: {error}; put it into a module of its own "
            "and import it from there"
        ) from error


def unpack(packed: bytes) -> None:
    """Register in this process what the process that started it has packed.

    Args:
        packed: bytes of :func:`pack`, from that process. They are unpickled, and so must be
            trusted.
    """
    if not packed:
        return
    folders, models, schemes, metrics = pickle.loads(packed)
    _allowed.update(folders)  # the names of modules, which may be imported here, too

    # Make modules findable here that the other process found in a folder of its own path.
    for module, folder in folders.items():
        if folder is not None and importlib.util.find_spec(module.partition(".")[0]) is None:
            sys.path.append(folder)

    # Register the models, schemes and metrics that were sent with their code.
    for name, entry in models.items():
        MODELS.add(name, entry)
    for name, entry in schemes.items():
        SCHEMES.add(name, entry)
    for name, metric in metrics.items():
        add_metric(name, metric)
