"""Registries of names and the classes they stand for, those that other packages bring included.

To know the names nothing is imported: the plugin's own are places in text, those of other packages
entry points. A class is imported when it is requested.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from recbole_pos.errors import UsageError
from recbole_pos.values import shown
from recbole_pos.yaml_files import ROOT, read_yaml

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
    """Classes by name.

    Args:
        kind: what the classes are, in one word.
        places: ``module:Class`` of each name of the plugin's.
        folder: of ``properties/``, where each of these has its yaml.
        group: of entry points.
        adopt: registers a class that an entry point or a module brings: name, class, module.
        taken: who has a name that no one else may have; None for no one.
    """

    def __init__(
        self,
        kind: str,
        places: dict[str, str],
        folder: str,
        group: str = "",
        adopt: Callable[[str, type, str | None], None] | None = None,
        taken: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self.kind, self.places, self.folder, self.group = kind, places, folder, group
        self._adopt, self._taken = adopt, taken
        self._added: dict[str, Registration] = {}

    def __getitem__(self, name: str) -> type:
        if not self._is_ours(name):
            return self._find(name).cls
        module, _, cls = self.places[name].partition(":")
        return getattr(importlib.import_module(module), cls)

    def __contains__(self, name: object) -> bool:
        return name in self.places or name in self._added or name in self._points

    def __iter__(self) -> Iterator[str]:
        return iter({**self.places, **self._points, **self._added})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def add(self, name: str, added: Registration) -> None:
        """Give a name to a class; to one of the same place again, to replace it.

        Raises:
            UsageError: if another class has the name, or the name is no identifier.
        """
        place = import_path(added.cls)
        if not (isinstance(name, str) and name.isidentifier()):
            raise UsageError(
                f"{self.kind} {place}: found the name {shown(name)}, expected letters, digits and "
                "_, and no digit first"
            )
        if holder := self._holder(name, added.cls):
            raise UsageError(
                f"{self.kind} {shown(name)}: the name is taken by {holder}; give {place} "
                f"another one"
            )
        self._added[name] = added

    def defaults(self, name: str) -> dict[str, Any]:
        """Return those of the options of a class: its yaml, or what it was registered with."""
        if self._is_ours(name):
            return read_yaml(ROOT / self.folder / f"{name}.yaml")
        return copy.deepcopy(self._find(name).defaults)

    def own_options(self, name: str) -> frozenset[str]:
        """Return the names of options that nothing of the plugin's or RecBole's has."""
        return frozenset() if name in self.places else self._find(name).own

    def given(self, cls: type) -> Registration | None:
        """Return what a class, or an earlier one of the same place, was registered as."""
        same = (
            added for added in self._added.values() if import_path(added.cls) == import_path(cls)
        )
        return next(same, None)

    def registered_name(self, cls: type) -> str | None:
        """Return the name of a class, its own rather than another, without importing any."""
        place = import_path(cls)
        names = [name for name, known in self.places.items() if known == place]
        names += [name for name, added in self._added.items() if added.cls is cls]
        names += [name for name, points in self._points.items() if points[0].value == place]
        return cls.__name__ if cls.__name__ in names else next(iter(names), None)

    def source(self, name: str) -> str:
        """Return who brought a class: the package, or the module of one that was registered."""
        if name in self.places:
            return US
        if name in self._points:
            return _package(self._points[name][0])
        return self._added[name].cls.__module__

    def find_module(self, name: str) -> str | None:
        """Return the module whose import makes a name known; None where none need or can."""
        return None if name in self._points or name not in self._added else self._added[name].module

    def made_here(self) -> dict[str, Registration]:
        """Return the registered classes that no import makes known to another process."""
        return {
            name: added
            for name, added in self._added.items()
            if added.module is None and name not in self._points
        }

    def modules(self) -> set[str]:
        """Return the modules of the classes that were registered so far."""
        return {added.cls.__module__ for added in self._added.values()}

    def take(self, module: ModuleType, name: str) -> None:
        """Register the class of that name in a module, if it has one."""
        found = getattr(module, name, None)
        if isinstance(found, type) and self._adopt:
            self._adopt(name, found, module.__name__)

    @functools.cached_property
    def _points(self) -> dict[str, list[EntryPoint]]:
        """What installed packages bring, by name, each place once; none of it is imported."""
        if not self.group:
            return {}
        from importlib.metadata import entry_points

        points: dict[str, dict[str, EntryPoint]] = {}
        with without_working_directory():  # a folder there may pretend to be a package's
            for point in entry_points(group=self.group):
                points.setdefault(point.name, {}).setdefault(point.value, point)
        return {name: list(places.values()) for name, places in points.items()}

    def _is_ours(self, name: str) -> bool:
        """Return whether a name is the plugin's.

        Raises:
            UsageError: if several packages bring it.
        """
        points = self._points.get(name, ())
        holder = self._taken(name) or (US if name in self.places else None)
        holders = [holder] if holder else []
        holders += [f"{_package(point)} ({point.value})" for point in points]
        if points and len(holders) > 1:
            raise UsageError(
                f"{self.kind} {shown(name)} is given more than once: by "
                f"{' and by '.join(holders)}; uninstall all but one of these packages"
            )
        return name in self.places

    def _find(self, name: str) -> Registration:
        if name not in self._added:
            self._load(name, self._points[name][0])
        return self._added[name]

    def _load(self, name: str, point: EntryPoint) -> None:
        """A class is registered, a function is called, and a module registers by its import."""
        where = f"{self.kind} {shown(name)} of the package {_package(point)}, {point.value}"
        try:
            found = point.load()
            if isinstance(found, type) and self._adopt:
                self._adopt(name, found, None)
            elif isinstance(found, ModuleType):
                if name not in self._added:
                    self.take(found, name)
            elif callable(found):
                found()
        except Exception as error:  # whatever code of others does
            message = f"cannot be imported: {type(error).__name__}: {error}"
            message = str(error) if isinstance(error, UsageError) else message
            raise UsageError(f"{where}: {message}") from error
        if name not in self._added:
            raise UsageError(
                f"{where}: registers no {self.kind} of this name; an entry point names the class, "
                f"a module that calls recbole_pos.register_{self.kind}, or a function that does"
            )

    def _holder(self, name: str, cls: type) -> str | None:
        """Who else has a name: no one if it is the same class, or its package brings the name."""
        if holder := self._taken(name):
            return holder
        if name in self.places:
            return f"{US} ({self.places[name]})"
        if name in self._added:
            known = import_path(self._added[name].cls)
            return known if known != import_path(cls) else None
        points = self._points.get(name, ())
        top = cls.__module__.partition(".")[0]
        others = [point for point in points if re.split("[:.]", point.value)[0] != top]
        return f"the package {_package(others[0])} ({others[0].value})" if others else None


@contextmanager
def without_working_directory() -> Iterator[None]:
    """Within, nothing is imported from a place that depends on where the user is: the working
    directory, which ``python -m`` and notebooks search, and relative entries of PYTHONPATH."""
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
    """``module:Class``; a script's is the same in the processes that it spawns."""
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
        earlier = registered(base) if base is not cls else None
        own = earlier.given if earlier else None
        defaults |= found | read_defaults(vars(base).get("defaults"), base)
        defaults |= read_defaults(own, base)
    defaults |= read_defaults(given, cls)
    return defaults, frozenset(set(defaults) - known)


def read_defaults(given: Defaults | None, cls: type) -> dict[str, Any]:
    """Read defaults as given: a dict, or a yaml file, beside the class or where the user is.

    Raises:
        UsageError: if it is neither.
    """
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


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value
