"""How processes come to know models and schemes that are not the plugin's.

What an installed package brings is found by its entry points. What a module registers is known once
that module is imported, so the option ``plugins`` names modules to import before any other name is
looked up; a run writes them into its config.yaml. What only this process has, because a script or a
notebook made it, is sent to the processes that it starts.

Modules are code, and files come from strangers: what a file names (the config.yaml of a run, a
study, a search) must be installed, or imported already. The working directory is searched only for
modules that the user's own command or code names, see :func:`allow`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.model.models import ADDED
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.registry import import_path, without_working_directory
from recbole_pos.values import near, short, shown

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_allowed: set[str] = set()


def allow(given: Any) -> None:
    """Let modules be imported from the working directory: the user's command or code names them.

    Args:
        given: the value of the option ``plugins`` there, which is checked when it is imported.
    """
    names = [given] if isinstance(given, str) else given or ()
    if isinstance(names, (list, tuple)):
        _allowed.update(name for name in names if isinstance(name, str))


def import_named(given: Any) -> list[str]:
    """Import the modules of ``--plugins``, which may be those of the working directory.

    Raises:
        UsageError: as of :func:`import_plugins`.
    """
    allow(given)
    return import_plugins(given, "--plugins")


def import_plugins(given: Any, where: str, known: Callable[[], bool] = lambda: False) -> list[str]:
    """Import the modules that the option ``plugins`` names.

    Args:
        given: the value of the option: a module, several, or None.
        where: it stands, for messages.
        known: whether everything that is needed is known already, so that a module may be missing.

    Returns:
        Their names.

    Raises:
        UsageError: if one is not there, or fails.
    """
    names = [given] if isinstance(given, str) else given or []
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) and not name.endswith(".py")
        for name in names
    ):
        module = given[:-3] if isinstance(given, str) and given.endswith(".py") else ""
        hint = f"; write --plugins {module}" if _NAME.fullmatch(module) else ""
        raise UsageError(
            f"{where}: plugins: found {shown(given)}, expected modules such as [my_models], as "
            f"`import` names them{hint}"
        )
    for name in names:
        try:
            _import(name)
        except Exception as error:  # whatever code of others does
            missing = isinstance(error, ModuleNotFoundError) and error.name is not None
            if not (missing and f"{name}.".startswith(f"{error.name}.")):  # type: ignore[attr-defined]
                message = f"cannot be imported: {type(error).__name__}: {error}"
                message = str(error) if isinstance(error, UsageError) else message
                raise UsageError(f"{where}: plugins: {short(name)}: {message}") from error
            if not known():
                raise UsageError(f"{where}: plugins: {_explain_missing(name)}") from error
    return list(names)


def _import(name: str) -> None:
    """Import a module; of the working directory, too, if the user names it."""
    if name not in _allowed:
        with without_working_directory():
            importlib.import_module(name)
        return
    here, top = os.getcwd(), name.partition(".")[0]
    importlib.invalidate_caches()
    if importlib.util.find_spec(top) is None and PathFinder.find_spec(top, [here]):
        sys.path.append(here)  # it stays: processes that this one starts look there too
    importlib.import_module(name)


def _explain_missing(name: str) -> str:
    register = "recbole_pos.register_model or register_scheme what it brings, under the same name"
    if name in _allowed:
        return (
            f"there is no module {shown(name)}, neither installed nor in {os.getcwd()}; start in "
            f"the folder that has it. In Python, {register}"
        )
    return (
        f"module {shown(name)} is not installed, and a file that names it does not make the "
        "working directory be searched. If you trust its code, add --plugins "
        f"{short(name)}; in Python, import it first, or {register}"
    )


def require_spelling(given: Iterable[Any], where: str) -> None:
    """Refuse a key that is ``plugins`` but for a slip: what it names is missing then.

    Raises:
        UsageError: naming it.
    """
    for key in given:
        if key != "plugins" and near(str(key), ["plugins"]):
            raise UsageError(f"{where}: unknown key {shown(key)} (did you mean plugins?)")


def take_model(name: str, modules: Iterable[str]) -> None:
    """Register the class of that name in one of the modules, which need not do so themselves."""
    for module in modules:
        if name not in ADDED and module in sys.modules:
            ADDED.take(sys.modules[module], name)


def find_modules(model: str, schemes: Iterable[str]) -> list[str]:
    """Return the modules without which another process would not know a model and schemes."""
    modules = [ADDED.find_module(model), *(SCHEMES.find_module(name) for name in schemes)]
    return list(dict.fromkeys(module for module in modules if module))


def pack(model: str) -> bytes:
    """Pack what only this process knows of a model and of any schemes, for processes that it
    starts: of modules, the names that the user allows.

    Classes of a script or a notebook go as they are (cloudpickle), since nothing can import them.

    Raises:
        UsageError: if one of them cannot be sent.
    """
    models = {name: added for name, added in ADDED.made_here().items() if name == model}
    made = {"model": models, "scheme": SCHEMES.made_here()}
    if not any(made.values()):
        return pickle.dumps((_allowed, {})) if _allowed else b""
    import cloudpickle

    for kind, classes in made.items():
        for name, added in classes.items():
            try:
                cloudpickle.dumps(added)
            except Exception as error:  # whatever its module holds
                raise UsageError(
                    f"{kind} {shown(name)} ({import_path(added.cls)}) cannot be sent to other "
                    f"processes: {error}; put it into a module of its own and import it from there"
                ) from error
    return cloudpickle.dumps((_allowed, made))


def unpack(packed: bytes) -> None:
    """Know what another process has packed."""
    if packed:
        names, made = pickle.loads(packed)
        _allowed.update(names)
        for kind, classes in made.items():
            for name, added in classes.items():
                (ADDED if kind == "model" else SCHEMES).add(name, added)
