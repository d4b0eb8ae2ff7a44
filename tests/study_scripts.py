"""The scripts of studies/, which are no modules of a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

STUDIES = Path(__file__).parent.parent / "studies"


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``studies/NAME.py``, under the name by which others there import it."""
    path = STUDIES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module
