"""The code that a class was loaded from: its module, those of its bases, and what they import.

Only the user's own modules count. Versions stand for packages that are installed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from recbole_pos.config.plugins import find_search_folder
from recbole_pos.errors import UsageError

_INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that are not the user's
_VERSIONED = {"recbole_pos", "recbole", "torch", *sys.stdlib_module_names}
# Name of a module -> the import that executed it, and its content when it was first asked for.
_loaded: dict[str, tuple[ModuleSpec | None, bytes]] = {}


def read_code(cls: type) -> list[bytes]:
    """Return the content of the modules of a class: its own, then others by name.

    These are the modules of its bases, and all modules of the user's that any of them imports, also
    those that a function would import later.

    Raises:
        OSError: if the class is of no file.
        UsageError: for a module that was edited after it was imported: processes that import it now
            would train other code than this process knows.
    """
    if cls.__module__ not in sys.modules:
        raise OSError(f"{cls.__module__} is not imported")
    own = {cls.__module__: _read_loaded(cls.__module__)}
    contents = dict(own)
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _VERSIONED:
            continue
        root = _find_root(base.__module__)
        waiting = [base.__module__]
        while waiting:
            name = waiting.pop()
            contents[name] = _read_loaded(name)
            package = getattr(sys.modules.get(name), "__package__", name.rpartition(".")[0])
            for imported in _list_imports(contents[name], package or ""):
                if imported not in contents and _is_users(imported, base.__module__, root):
                    waiting.append(imported)
    others = sorted(contents.keys() - own.keys())
    return [*own.values(), *(contents[name] for name in others)]


def _read_loaded(name: str) -> bytes:
    """Return the content of a module, which must be what it was at the first call after its import.

    Of one that is not imported yet it is that of now.
    """
    file = _find_file(name)
    if file is None:
        raise OSError(f"{name} has no file")
    module = sys.modules.get(name)
    if module is None:
        return file.read_bytes()
    spec, content = _loaded.get(name, (None, b""))
    if name not in _loaded or spec is not module.__spec__:  # imported for the first time, or again
        content = file.read_bytes()
        _loaded[name] = module.__spec__, content
    # a script is sent to other processes as it was loaded; they import all others themselves
    elif name != "__main__" and file.read_bytes() != content:
        raise UsageError(
            f"{name}: {file} was edited after this process had imported it; start Python again, "
            "so that all processes train the same code"
        )
    return content


def _find_file(name: str) -> Path | None:
    """Return the file of a module, imported or not; None if it has none."""
    module: ModuleType | None = sys.modules.get(name)
    file: Any = getattr(module, "__file__", None)
    if module is None:
        # ImportError: its parent is a module and no package, so the name is no module either
        with suppress(ImportError, ValueError, AttributeError):
            file = getattr(importlib.util.find_spec(name), "origin", None)
    return Path(file) if file and Path(file).is_file() else None


def _find_root(name: str) -> Path | None:
    """Return the folder that has the user's top-level package or module; None if installed."""
    folder = find_search_folder(name)
    is_users = folder is not None and not _INSTALLED & set(Path(folder).parts)
    return Path(folder) if folder is not None and is_users else None


def _is_users(name: str, importer: str, root: Path | None) -> bool:
    """Return whether a name is a module of the package of ``importer``, or one beside it."""
    top = name.partition(".")[0]
    if top in _VERSIONED:
        return False
    is_beside = root is not None and any((root / path).exists() for path in (top, f"{top}.py"))
    if top != importer.partition(".")[0] and not is_beside:
        return False
    file = _find_file(name)
    return file is not None and (root is None or not _INSTALLED & set(file.parts))


@functools.lru_cache(maxsize=1000)
def _list_imports(content: bytes, package: str) -> frozenset[str]:
    """Return the names that a module of ``package`` imports, some of which may be no modules."""
    names: set[str] = set()
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):  # an extension in another language
        return frozenset()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if node.level:
                with suppress(ImportError):  # beyond the package
                    base = importlib.util.resolve_name(base, package)
            names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    parents = {name.rpartition(".")[0] for name in names}
    return frozenset(name for name in names | parents if name and not name.startswith("."))
