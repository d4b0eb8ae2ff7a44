"""Tables of names and the classes they stand for, which are imported when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping


class Table(Mapping[str, type]):
    """Classes by name. To know the names, nothing is imported.

    Args:
        kind: what the classes are, in one word.
        places: ``module:Class`` of each name.
    """

    def __init__(self, kind: str, places: dict[str, str]) -> None:
        self.kind, self.places = kind, places
        self._classes: dict[str, type] = {}

    def __getitem__(self, name: str) -> type:
        if name not in self._classes:
            module, _, cls = self.places[name].partition(":")
            self._classes[name] = getattr(importlib.import_module(module), cls)
        return self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
