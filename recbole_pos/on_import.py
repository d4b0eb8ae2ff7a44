"""What is to be done when a module of RecBole is imported, so that nothing imports it before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], Callable[[], None] | None]


class _Watching(Loader):
    """A loader that runs actions: what they return, if anything, after the module has run."""

    def __init__(self, loader: Loader, actions: list[Action]) -> None:
        self.loader, self.actions = loader, actions

    def __getattr__(self, name: str) -> Any:  # whatever else a loader can do
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        afterwards = [action(module) for action in self.actions]
        self.loader.exec_module(module)
        for finish in afterwards:
            if finish is not None:
                finish()


class _Finder(MetaPathFinder):
    """Finds the modules that are watched, where they are found without it."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}
        self.searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.actions or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Watching(spec.loader, self.actions[name])
        return spec


_FINDER = _Finder()


def when_imported(name: str, action: Action) -> None:
    """Run an action around the first import of a module; at once if it was imported before.

    Args:
        name: of the module.
        action: called with the module, empty, before it runs; what it returns is called afterwards.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if name in sys.modules:
        if (finish := action(sys.modules[name])) is not None:
            finish()
        return
    _FINDER.actions.setdefault(name, []).append(action)


def after(change: Callable[[ModuleType], None]) -> Action:
    """An action that changes a module after it has run."""
    return lambda module: lambda: change(module)
