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
    """A registered class, which is not the plugin's own.

    Attributes:
        cls: the class.
        given: the defaults it was registered with; None for those of the class.
        defaults: defaults of all its options.
        own_options: options that neither the plugin nor RecBole has.
        module: the module whose import registers it again; None if none does (a notebook).
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
        folder: folder of ``properties/`` with a yaml file for each of these.
        find_owner: returns who reserves a name, or None.
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

    def add(self, name: str, added: Registration) -> None:
        """Register a class; a class of the same ``module:Class`` replaces an earlier one.

        Raises:
            UsageError: if the name is not an identifier, or another class has it.
        """
        path = import_path(added.cls)
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
        self.added[name] = added

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the default of each option of a class."""
        if name in self.added:
            return copy.deepcopy(self.added[name].defaults)
        return read_yaml(ROOT / self.folder / f"{name}.yaml")

    def find_registration(self, cls: type) -> Registration | None:
        """Return the registration of a class, or of an earlier one of the same path."""
        path = import_path(cls)
        return next((r for r in self.added.values() if import_path(r.cls) == path), None)

    def registered_name(self, cls: type) -> str | None:
        """Return a name of a class, its own rather than another, without importing any."""
        path = import_path(cls)
        names = [name for name, known in self.paths.items() if known == path]
        names += [name for name, added in self.added.items() if added.cls is cls]
        return cls.__name__ if cls.__name__ in names else next(iter(names), None)


@contextmanager
def without_working_directory() -> Iterator[None]:
    """Import nothing from a folder that depends on where the user is, in a ``with`` block.

    These are the working directory, which ``python -m`` and notebooks search, and relative entries
    of PYTHONPATH.
    """
    before = list(sys.path)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    relative = [os.path.realpath(entry) for entry in entries if not os.path.isabs(entry)]
    excluded = {os.path.realpath("."), *relative}
    sys.path[:] = [entry for entry in before if os.path.realpath(entry) not in excluded]
    try:
        yield
    finally:
        added = [entry for entry in sys.path if entry not in before]
        sys.path[:] = [*before, *added]


def import_path(cls: type) -> str:
    """Return ``module:Class``; that of a script is the same in the processes that it spawns."""
    module = SCRIPTS[0] if cls.__module__ in SCRIPTS else cls.__module__
    return f"{module}:{cls.__qualname__}"


def find_importing_module(frame: FrameType) -> str | None:
    """Return the module whose import runs a line again; None in functions, scripts, notebooks."""
    name = frame.f_globals.get("__name__")
    at_import = frame.f_code.co_name == "<module>" and frame.f_globals.get("__spec__") is not None
    return name if at_import and name not in SCRIPTS else None


def find_home_module(cls: type) -> str | None:
    """Return the module in which another process finds a class by its name, or None."""
    module = sys.modules.get(cls.__module__)
    is_found = cls.__module__ not in SCRIPTS and getattr(module, cls.__name__, None) is cls
    return cls.__module__ if is_found and getattr(module, "__spec__", None) is not None else None


def gather_defaults(
    cls: type,
    given: Defaults | None,
    read_shipped: Callable[[type], dict[str, Any]],
    find_registration: Callable[[type], Registration | None],
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the defaults of a class: of the classes that it extends, then its own, then ``given``.

    Args:
        cls: the class; its attribute ``defaults``, and those of the classes it extends, count.
        given: to :func:`recbole_pos.register_model` or :func:`recbole_pos.register_scheme`.
        read_shipped: returns the yaml of a class of the plugin's or RecBole's; ``{}`` for others.
        find_registration: returns how a class was registered.

    Returns:
        The defaults, and the names of those that are in no such yaml.
    """
    defaults: dict[str, Any] = {}
    shipped_names: set[str] = set()
    for base in reversed(cls.__mro__):
        shipped = read_shipped(base)
        shipped_names |= set(shipped)
        defaults |= shipped | read_defaults(vars(base).get("defaults"), base)
        registration = find_registration(base)
        if base is cls:
            defaults |= read_defaults(given, cls)
        elif registration is not None:
            defaults |= read_defaults(registration.given, base)
    return defaults, frozenset(set(defaults) - shipped_names)


def read_defaults(given: Defaults | None, cls: type) -> dict[str, Any]:
    """Read defaults as given: a dict, or a yaml file, beside the class or where the user is."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return copy.deepcopy(dict(given))
    if not isinstance(given, (str, Path)):
        raise UsageError(
            f"{import_path(cls)}: defaults: expected a dict of options or the path of a yaml file, "
            f"found {shown(given)}"
        )
    module_file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    folders = [*([Path(module_file).parent] if module_file else []), Path.cwd()]
    for folder in folders:
        if (folder / given).is_file():
            return read_yaml(folder / given)
    raise UsageError(
        f"{import_path(cls)}: defaults: no file {given} in {' or '.join(map(str, folders))}"
    )
