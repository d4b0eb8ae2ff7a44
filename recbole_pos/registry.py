"""Names of models and position schemes, and the classes that they stand for.

A :class:`Registry` has the plugin's own classes, each with a yaml file in ``properties/`` that says
where it is (to know the names, nothing is imported), and classes that users register. The functions
below find a class's defaults, and the module that another process must import to have it.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.values import shown
from recbole_pos.yaml_files import list_property_files, read_properties

Defaults = Mapping[str, Any]  # of options
US = "recbole-pos"  # as messages call this package
SCRIPTS = ("__main__", "__mp_main__")  # the second is what a spawned process calls the first


@dataclass(frozen=True)
class Registration:
    """A class that a user has registered, in contrast to the plugin's own classes.

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
    """Classes by name: the plugin's own, and those that users register.

    A class of the plugin's own has a yaml file, whose name is that of the class here, and which
    says where the class is and which options it has. The class is imported when it is requested.

    Attributes:
        kind: what the classes are, in one word, for messages.
        folder: folder of ``properties/`` with the yaml files of the plugin's classes.
        shipped: names of the plugin's classes.
        added: name -> registration of a class that a user has registered.
        reserved: names of RecBole's own classes, which users cannot give to theirs.
    """

    def __init__(self, kind: str, folder: str, reserved: Collection[str] = ()) -> None:
        """Start with the plugin's classes alone; users add theirs by :meth:`add`.

        Args:
            kind: what the classes are, in one word, for messages.
            folder: folder of ``properties/`` with a yaml file for each of the plugin's classes.
            reserved: names that RecBole has given to classes of its own.
        """
        self.kind, self.folder, self.reserved = kind, folder, reserved
        self.shipped = list_property_files(folder)
        self.added: dict[str, Registration] = {}

    def __getitem__(self, name: str) -> type:
        if name in self.added:
            return self.added[name].cls
        module, _, class_name = self.find_path(name).partition(":")
        return getattr(importlib.import_module(module), class_name)

    def __contains__(self, name: object) -> bool:
        return name in self.shipped or name in self.added

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.shipped, *self.added]))

    def __len__(self) -> int:
        return len(self.shipped) + len(self.added)

    def find_path(self, name: str) -> str:
        """Return where a class of this package is defined, as ``module:Class``.

        Args:
            name: the name under which the class is registered, such as ``rope``.

        Raises:
            KeyError: if this package has no class of the name.
        """
        if name not in self.shipped:
            raise KeyError(name)
        return read_properties(self.folder, name).about["class"]

    def find_shipped_name(self, cls: type) -> str | None:
        """Return the name here of one of the plugin's own classes; None for any other class."""
        path = import_path(cls)  # as ``module:Class``
        return next((name for name in self.shipped if self.find_path(name) == path), None)

    def find_name(self, cls: type) -> str | None:
        """Return a name under which a class can be looked up here; None if there is none.

        A class may have several names. Its ``__name__`` is preferred, then the plugin's name for
        it, then the name under which a user has registered it first.
        """
        # a user's class must be the very object: one that was defined again is not the registered
        names = [name for name, added in self.added.items() if added.cls is cls]
        shipped_name = self.find_shipped_name(cls)
        if shipped_name is not None:
            names.insert(0, shipped_name)
        if cls.__name__ in names:
            return cls.__name__
        return names[0] if names else None

    def find_registration(self, cls: type) -> Registration | None:
        """Return what is kept of a class that a user has registered; None if it is not registered.

        Classes are compared by module and name, so that one which a notebook has defined again is
        found under its former registration.
        """
        path = import_path(cls)
        return next((x for x in self.added.values() if import_path(x.cls) == path), None)

    def add(self, name: str, registration: Registration) -> None:
        """Register a user's class under a name.

        Registering the same class again replaces its registration, as when a notebook's cell is run
        twice. Classes are compared by ``import_path``, text such as ``module:Class``, since the
        second run of a cell makes a new class object.

        Args:
            name: name of the class from now on, as options use it.
            registration: the class with the defaults of its options.

        Raises:
            UsageError: if the name is no identifier, or if the plugin, RecBole or another class has
                it.
        """
        path = import_path(registration.cls)
        if not (isinstance(name, str) and name.isidentifier()):
            raise UsageError(
                f"{self.kind} {path}: found the name {shown(name)}, expected letters, digits and "
                "_, and no digit first"
            )

        # Who has the name already, if anybody: this package (US is its name), RecBole, or another
        # class of the user's.
        owner = None
        if name in self.shipped:
            owner = US
        elif name in self.reserved:
            owner = "RecBole"
        elif name in self.added and import_path(self.added[name].cls) != path:
            owner = import_path(self.added[name].cls)
        if owner is not None:
            raise UsageError(
                f"{self.kind} {shown(name)}: the name is taken by {owner}; give {path} another"
            )

        self.added[name] = registration

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the default of each option of the class that has this name."""
        is_added = name in self.added
        defaults = (self.added[name] if is_added else read_properties(self.folder, name)).defaults
        return copy.deepcopy(defaults)

    def gather_defaults(
        self,
        cls: type,
        given: Defaults | None,
        read_others: Callable[[type], dict[str, Any]] = lambda base: {},
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Return the defaults of all options of a class that a user registers, inherited ones too.

        For example, a user's class extends PosSASRec, has the attribute ``defaults = {"gamma": 1}``
        and is registered with ``{"hidden_size": 32}``. The result are the defaults of PosSASRec,
        but 32 for ``hidden_size``, and 1 for ``gamma``, an option of the class's own.

        The class and each class that it extends may have defaults in three places, of which a
        later one wins: a yaml file, if it is a class of this package or of RecBole; its attribute
        ``defaults``; and what a user has registered it with. Those of a class win over those of
        the classes that it extends.

        Args:
            cls: the class, a model or position scheme, which is being registered.
            given: the defaults that it is registered with, or None.
            read_others: returns the defaults in the yaml file of a class that is not in this
                registry, such as one of RecBole's; ``{}`` for a class without such a file.

        Returns:
            The default of each option, and the class's own options, which are in no yaml file.

        Raises:
            UsageError: if defaults are no dict of options.
        """
        defaults: dict[str, Any] = {}
        yaml_options: set[str] = set()
        for base in reversed(cls.__mro__):  # from ``object`` to the class itself, so that it wins
            # 1. Its yaml file. ``name`` is that of a class of this package; None for any other.
            name = self.find_shipped_name(base)
            in_yaml = read_others(base) if name is None else self.defaults(name)
            yaml_options |= set(in_yaml)

            # 2. Its own attribute ``defaults``, not an inherited one.
            attribute = vars(base).get("defaults")

            # 3. What a user registers the class with, or has registered a class that it extends.
            registration = self.find_registration(base)
            registered = None if registration is None else registration.given
            if base is cls:
                registered = given

            for source in (in_yaml, attribute, registered):  # a later one wins
                if source is not None and not isinstance(source, Mapping):
                    raise UsageError(
                        f"{import_path(base)}: defaults: expected a dict of options, found "
                        f"{shown(source)}"
                    )
                defaults.update(copy.deepcopy(dict(source or {})))
        return defaults, frozenset(set(defaults) - yaml_options)


@contextmanager
def without_working_directory() -> Iterator[None]:
    """Let nothing be imported from the working directory during a ``with`` block.

    ``python -m`` and notebooks put the working directory on ``sys.path``, and relative entries of
    PYTHONPATH are looked up in it: a stranger's folder could bring modules. Both are taken off the
    path. Entries that the block itself adds stay.
    """
    # Take the working directory off the path, however it is written there, and the folders that
    # PYTHONPATH names relative to it.
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
    """Return text such as ``package.module:Class``, which is the same in all processes.

    A user's script is called ``__main__`` in the process that it starts, and ``__mp_main__`` in
    processes that this one spawns; the text has ``__main__`` in both.
    """
    module = "__main__" if cls.__module__ in SCRIPTS else cls.__module__  # SCRIPTS has both names
    return f"{module}:{cls.__qualname__}"


def find_importing_module(frame: FrameType) -> str | None:
    """Return the module whose import calls a function such as ``register_model`` again, or None.

    If a module calls the function at its top level, outside of functions, another process can
    repeat the call by importing the module. A call in a function, or in a script or notebook, which
    are not imported, cannot be repeated so: then the result is None.

    Args:
        frame: Python's frame of the code that has called the function.
    """
    name = frame.f_globals.get("__name__")
    is_top_level = frame.f_code.co_name == "<module>"  # as Python calls code outside of functions
    # Python gives an imported module a ``__spec__``. A notebook has none, and a script is called
    # ``__main__``, or ``__mp_main__`` in a process that it has spawned (SCRIPTS has both names).
    is_imported = frame.f_globals.get("__spec__") is not None and name not in SCRIPTS
    return name if is_top_level and is_imported else None


def find_home_module(cls: type) -> str | None:
    """Return the module from which another process can import a class by its ``__name__``.

    It is None for a class that no process can import: one of a script or a notebook, or one that
    was made within a function.
    """
    module = sys.modules.get(cls.__module__)
    has_class = getattr(module, cls.__name__, None) is cls
    # Python sets ``__spec__`` of modules that it has imported; scripts are called ``__main__``.
    is_imported = getattr(module, "__spec__", None) is not None and cls.__module__ not in SCRIPTS
    return cls.__module__ if has_class and is_imported else None
