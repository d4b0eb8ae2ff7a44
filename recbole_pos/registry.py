"""Registries of names and the classes they stand for, those that a user registers included.

To know the names nothing is imported: the plugin's own are places in text. A class is imported when
it is requested.
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
    """A class that is not the plugin's own.

    Attributes:
        cls: the class.
        given: the defaults it was registered with; None for those of the class.
        defaults: defaults of all its options.
        own: those of its options that it shares with nothing of the plugin's or RecBole's.
        module: the module whose import registers it again; None if none does, as of a notebook.
    """

    cls: type
    given: Defaults | None
    defaults: dict[str, Any]
    own: frozenset[str]
    module: str | None


class Registry(Mapping[str, type]):
    """Classes by name: the plugin's, and those that were registered since.

    Args:
        kind: what the classes are, in one word.
        places: ``module:Class`` of each name of the plugin's.
        folder: of ``properties/``, where each of these has its yaml.
        taken: returns who has a name that no one else may have; None for no one.
    """

    def __init__(
        self,
        kind: str,
        places: dict[str, str],
        folder: str,
        taken: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self.kind, self.places, self.folder, self._taken = kind, places, folder, taken
        self.added: dict[str, Registration] = {}

    def __getitem__(self, name: str) -> type:
        if name in self.added:
            return self.added[name].cls
        module, _, cls = self.places[name].partition(":")
        return getattr(importlib.import_module(module), cls)

    def __contains__(self, name: object) -> bool:
        return name in self.places or name in self.added

    def __iter__(self) -> Iterator[str]:
        return iter({**self.places, **self.added})

    def __len__(self) -> int:
        return len(self.places) + len(self.added)

    def add(self, name: str, added: Registration) -> None:
        """Give a name, which no other class has, to a class; to one of the same place again."""
        place = import_path(added.cls)
        if not (isinstance(name, str) and name.isidentifier()):
            raise UsageError(
                f"{self.kind} {place}: found the name {shown(name)}, expected letters, digits and "
                "_, and no digit first"
            )
        holder = self._taken(name) or (US if name in self.places else None)
        if name in self.added and import_path(self.added[name].cls) != place:
            holder = import_path(self.added[name].cls)
        if holder:
            raise UsageError(
                f"{self.kind} {shown(name)}: the name is taken by {holder}; give {place} another"
            )
        self.added[name] = added

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the defaults of a class: those of its yaml, or that it was registered with."""
        if name in self.added:
            return copy.deepcopy(self.added[name].defaults)
        return read_yaml(ROOT / self.folder / f"{name}.yaml")

    def own_options(self, name: str) -> frozenset[str]:
        """Return the names of options that nothing of the plugin's or RecBole's has."""
        return self.added[name].own if name in self.added else frozenset()

    def given(self, cls: type) -> Registration | None:
        """Return what a class, or an earlier one of the same place, was registered as."""
        place = import_path(cls)
        return next((one for one in self.added.values() if import_path(one.cls) == place), None)

    def registered_name(self, cls: type) -> str | None:
        """Return the name of a class, its own rather than another, without importing any."""
        place = import_path(cls)
        names = [name for name, known in self.places.items() if known == place]
        names += [name for name, added in self.added.items() if added.cls is cls]
        return cls.__name__ if cls.__name__ in names else next(iter(names), None)

    def source(self, name: str) -> str:
        """Return who brought a class: this package, or the module of one that was registered."""
        return self.added[name].cls.__module__ if name in self.added else US

    def find_module(self, name: str) -> str | None:
        """Return the module whose import makes a name known; None where none need or can."""
        return self.added[name].module if name in self.added else None

    def made_here(self) -> dict[str, Registration]:
        """Return the registered classes that no import makes known to another process."""
        return {name: added for name, added in self.added.items() if added.module is None}

    def modules(self) -> set[str]:
        """Return the modules of the classes that were registered so far."""
        return {added.cls.__module__ for added in self.added.values()}


@contextmanager
def without_working_directory() -> Iterator[None]:
    """Import nothing from a place that depends on where the user is, in a ``with`` block.

    These are the working directory, which ``python -m`` and notebooks search, and relative entries
    of PYTHONPATH.
    """
    before = list(sys.path)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    relative = [os.path.realpath(entry) for entry in given if not os.path.isabs(entry)]
    left_out = {os.path.realpath("."), *relative}
    sys.path[:] = [entry for entry in before if os.path.realpath(entry) not in left_out]
    try:
        yield
    finally:
        added = [entry for entry in sys.path if entry not in before]
        sys.path[:] = [*before, *added]


def import_path(cls: type) -> str:
    """Return ``module:Class``; a script's is the same in the processes that it spawns."""
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
    found = cls.__module__ not in SCRIPTS and getattr(module, cls.__name__, None) is cls
    return cls.__module__ if found and getattr(module, "__spec__", None) is not None else None


def gather_defaults(
    cls: type,
    given: Defaults | None,
    shipped: Callable[[type], dict[str, Any]],
    registered: Callable[[type], Registration | None],
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return defaults of a class: of the classes that it extends, then its own, then those given.

    Args:
        cls: the class; what it, or one that it extends, has as ``defaults`` counts.
        given: to :func:`recbole_pos.register_model` or :func:`recbole_pos.register_scheme`.
        shipped: the yaml of a class that comes with the plugin or RecBole; ``{}`` for others.
        registered: what a class was registered as.

    Returns:
        The defaults, and the names of those that are in no such yaml.
    """
    defaults: dict[str, Any] = {}
    known: set[str] = set()
    for base in reversed(cls.__mro__):
        found = shipped(base)
        known |= set(found)
        earlier = registered(base)
        defaults |= found | read_defaults(vars(base).get("defaults"), base)
        if base is cls:
            defaults |= read_defaults(given, cls)
        elif earlier is not None:
            defaults |= read_defaults(earlier.given, base)
    return defaults, frozenset(set(defaults) - known)


def read_defaults(given: Defaults | None, cls: type) -> dict[str, Any]:
    """Read defaults as given: a dict, or a yaml file, beside the class or where the user is."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return copy.deepcopy(dict(given))
    if isinstance(given, (str, Path)):
        module = getattr(sys.modules.get(cls.__module__), "__file__", None)
        folders = [Path(module).parent] if module else []
        folders.append(Path.cwd())
        file = next((f / given for f in folders if (f / given).is_file()), None)
        if file is None:
            raise UsageError(
                f"{import_path(cls)}: defaults: no file {given} in {' or '.join(map(str, folders))}"
            )
        return read_yaml(file)
    raise UsageError(
        f"{import_path(cls)}: defaults: expected a dict of options or the path of a yaml file, "
        f"found {shown(given)}"
    )
