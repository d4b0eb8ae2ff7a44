"""Registries of names and the classes that they stand for, registered ones included.

The plugin's own classes are listed as text and imported when they are requested: to know the names,
nothing is imported.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.values import shown
from recbole_pos.yaml_files import ROOT, read_yaml

Defaults = Mapping[str, Any] | str | Path
US = "recbole-pos"
SCRIPTS = ("__main__", "__mp_main__")  # the second is what a spawned process calls the first


@dataclass(frozen=True)
class Registration:
    """A class that was registered, unlike the plugin's own classes.

    Attributes:
        cls: the class.
        given: the defaults it was registered with, or None.
        defaults: defaults of all its options.
        own_options: options that neither the plugin nor RecBole has.
        module: the module whose import registers it again; None if no import does (a notebook).
    """

    cls: type
    given: Defaults | None
    defaults: dict[str, Any]
    own_options: frozenset[str]
    module: str | None


class Registry(Mapping[str, type]):
    """Classes by name: the plugin's, and registered ones.

    Args:
        kind: what the classes are, in one word.
        paths: name -> ``module:Class``, of the plugin's classes.
        folder: folder of ``properties/`` with a yaml file for each of the plugin's classes.
        find_owner: returns the package that reserves a name, or None.

    Attributes:
        added: name -> registration of a registered class.
    """

    def __init__(
        self,
        kind: str,
        paths: dict[str, str],
        folder: str,
        find_owner: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self.kind, self.paths, self.folder, self._find_owner = kind, paths, folder, find_owner
        self.added: dict[str, Registration] = {}

    def __getitem__(self, name: str) -> type:
        if name in self.added:
            return self.added[name].cls
        module, _, class_name = self.paths[name].partition(":")
        return getattr(importlib.import_module(module), class_name)

    def __contains__(self, name: object) -> bool:
        return name in self.paths or name in self.added

    def __iter__(self) -> Iterator[str]:
        return iter({**self.paths, **self.added})

    def __len__(self) -> int:
        return len(self.paths) + len(self.added)

    def add(self, name: str, registration: Registration) -> None:
        """Register a class; refuse a name that is no identifier, or that another path has."""
        path = import_path(registration.cls)
        if not (isinstance(name, str) and name.isidentifier()):
            raise UsageError(
                f"{self.kind} {path}: found the name {shown(name)}, expected letters, digits and "
                "_, and no digit first"
            )
        owner = self._find_owner(name) or (US if name in self.paths else None)
        if name in self.added and import_path(self.added[name].cls) != path:
            owner = import_path(self.added[name].cls)
        if owner:
            raise UsageError(
                f"{self.kind} {shown(name)}: the name is taken by {owner}; give {path} another"
            )
        self.added[name] = registration

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the default of each option of a class."""
        if name in self.added:
            return copy.deepcopy(self.added[name].defaults)
        return read_yaml(ROOT / self.folder / f"{name}.yaml")

    def find_registration(self, cls: type) -> Registration | None:
        """Return the registration of a class of the same ``module:Class``, or None."""
        path = import_path(cls)
        return next((r for r in self.added.values() if import_path(r.cls) == path), None)

    def find_name(self, cls: type) -> str | None:
        """Return a name of a class, if possible its ``__name__``; None if it has none."""
        path = import_path(cls)
        names = [name for name, own_path in self.paths.items() if own_path == path]
        names += [name for name, added in self.added.items() if added.cls is cls]
        return cls.__name__ if cls.__name__ in names else next(iter(names), None)


@contextmanager
def without_working_directory() -> Iterator[None]:
    """Import nothing from the working directory in a ``with`` block.

    ``python -m`` and notebooks search it. Relative entries of PYTHONPATH, which depend on it, are
    excluded, too.
    """
    path_before = list(sys.path)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    relative = [os.path.realpath(entry) for entry in entries if not os.path.isabs(entry)]
    excluded = {os.path.realpath("."), *relative}
    sys.path[:] = [entry for entry in path_before if os.path.realpath(entry) not in excluded]
    try:
        yield
    finally:
        new_entries = [entry for entry in sys.path if entry not in path_before]
        sys.path[:] = [*path_before, *new_entries]


def import_path(cls: type) -> str:
    """Return ``module:Class``; a script's module is ``__main__`` in spawned processes, too."""
    module = SCRIPTS[0] if cls.__module__ in SCRIPTS else cls.__module__
    return f"{module}:{cls.__qualname__}"


def find_importing_module(frame: FrameType) -> str | None:
    """Return the module whose import runs a frame again; None for functions, scripts, notebooks."""
    name = frame.f_globals.get("__name__")
    is_import = frame.f_code.co_name == "<module>" and frame.f_globals.get("__spec__") is not None
    return name if is_import and name not in SCRIPTS else None


def find_home_module(cls: type) -> str | None:
    """Return the module in which another process finds a class by its name, or None."""
    module = sys.modules.get(cls.__module__)
    is_found = cls.__module__ not in SCRIPTS and getattr(module, cls.__name__, None) is cls
    return cls.__module__ if is_found and getattr(module, "__spec__", None) is not None else None


def gather_defaults(
    cls: type,
    registered: Defaults | None,
    read_shipped: Callable[[type], dict[str, Any]],
    find_registration: Callable[[type], Registration | None],
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the defaults of a class, and the options that no yaml of the plugin or RecBole has.

    Those that it is registered with win over its attribute ``defaults``, and this over its bases'.

    Args:
        cls: the class.
        registered: the defaults that it is registered with, or None.
        read_shipped: returns the yaml of a class of the plugin or RecBole; ``{}`` for others.
        find_registration: returns the registration of a class, or None.
    """
    defaults: dict[str, Any] = {}
    shipped_names: set[str] = set()
    for base in reversed(cls.__mro__):
        shipped = read_shipped(base)
        shipped_names |= set(shipped)
        defaults |= shipped | read_defaults(vars(base).get("defaults"), base)
        if base is cls:
            defaults |= read_defaults(registered, cls)
        elif (registration := find_registration(base)) is not None:
            defaults |= read_defaults(registration.given, base)
    return defaults, frozenset(set(defaults) - shipped_names)


def read_defaults(source: Defaults | None, cls: type) -> dict[str, Any]:
    """Return defaults from a mapping, or a yaml file beside the class or in the current folder."""
    if source is None:
        return {}
    if isinstance(source, Mapping) and all(isinstance(key, str) for key in source):
        return copy.deepcopy(dict(source))
    module_file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    folders = [Path(module_file).parent, Path.cwd()] if module_file else [Path.cwd()]
    files = [folder / source for folder in folders if isinstance(source, (str, Path))]
    for file in files:
        if file.is_file():
            return read_yaml(file)
    raise UsageError(
        f"{import_path(cls)}: defaults: expected a dict of options or a yaml file in "
        f"{' or '.join(map(str, folders))}, found {shown(source)}"
    )
