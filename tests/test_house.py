"""The plan of the package, read from its imports: those within functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import recbole_pos

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "recbole_pos"
# Rooms from the ground up: what stands in one may import from those before it, and from its own.
FLOORS = [
    *("layers", "position", "data", "relations", "model", "config", "conversion"),
    "experiment",
    *("runs", "inspect", "serve", "public", "study", "tuning", "cli"),
]


def _name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    _name(file): file for file in sorted(PACKAGE.rglob("*.py")) if "_properties" not in str(file)
}


def _imports(text: str) -> Iterator[str]:
    """Every name of a module, or of something in one, that a file imports anywhere."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(name: str) -> str:
    """The module of the package that an imported name is, or is in; the first part of others."""
    while name not in FILES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in FILES else name.partition(".")[0]


GRAPH = {
    name: {_module(found) for found in _imports(file.read_text())} - {name}
    for name, file in FILES.items()
}


def _room(name: str) -> str:
    parts = name.split(".")
    inside = len(parts) > 2 or (PACKAGE / parts[-1]).is_dir()
    return parts[1] if inside and len(parts) > 1 else ""


def _reached(name: str) -> set[str]:
    """Everything that is imported by what a module imports, itself not."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = GRAPH.get(waiting.pop(), set()) - found - {"recbole_pos"}
        found |= new
        waiting += new
    return found


def test_no_circle() -> None:
    inside = {name: GRAPH[name] & set(FILES) - {"recbole_pos"} for name in FILES}
    del inside["recbole_pos"]  # which imports what users ask for, when they ask
    try:
        TopologicalSorter(inside).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("room", ["layers", "position"])
def test_what_models_are_made_of_knows_nothing_of_recbole(room: str) -> None:
    found = {name: _reached(name) for name in FILES if _room(name) == room}
    assert found and not {name for name, all_ in found.items() if "recbole" in all_}


def test_data_know_no_model() -> None:
    found = {name: _reached(name) for name in FILES if _room(name) == "data"}
    assert not {(n, m) for n, all_ in found.items() for m in all_ if _room(m) == "model"}


def test_ray_stays_in_its_rooms() -> None:
    found = {name for name, all_ in GRAPH.items() if "ray" in all_}
    assert {_room(name) for name in found} <= {"runs", "tuning", "study"}


def test_no_arrow_runs_upwards() -> None:
    upward = {
        (name, other)
        for name, all_ in GRAPH.items()
        for other in all_ & set(FILES)
        if _room(name) in FLOORS and _room(other) in FLOORS
        if FLOORS.index(_room(other)) > FLOORS.index(_room(name))
    }
    assert not upward
    assert {_room(name) for name in FILES} <= {"", *FLOORS}


def test_the_ground_floor_imports_no_room() -> None:
    """What stands beside the rooms is for all of them; ``plug`` alone, which is RecBole's door,
    and the package itself hand out what is in them."""
    doors = ("recbole_pos", "recbole_pos.plug")
    found = {
        (name, other)
        for name, all_ in GRAPH.items()
        for other in all_ & set(FILES)
        if _room(name) == "" and name not in doors and _room(other)
    }
    assert not found


def test_nobody_imports_the_package_itself() -> None:
    """Which imports everything: what others want of it stands below, such as its version."""
    assert not {name for name, all_ in GRAPH.items() if "recbole_pos" in all_}


def test_one_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {recbole_pos.__version__}\n" in text


def test_few_modules_in_the_hallway() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 12


# Names that occur twice still; none may join them.
TWICE = set(
    "attention build catalogue events history plot reading relations report source tables".split()
)


def test_a_file_name_occurs_once() -> None:
    names = [file.stem for file in FILES.values() if file.stem != "__init__"]
    assert {name for name in names if names.count(name) > 1} <= TWICE


def test_small_files() -> None:
    long = {
        name: n for name, file in FILES.items() if (n := len(file.read_text().splitlines())) > 600
    }
    assert not long


def test_what_breaks_a_rule_is_seen() -> None:
    """The reader of imports finds those within functions, and tells modules from names."""
    text = "def f():\n    from recbole_pos.data.events import EventLog\n    import ray.tune\n"
    assert [_module(name) for name in _imports(text)] == ["recbole_pos.data.events", "ray"]
    assert _module("recbole_pos.data") == "recbole_pos.data"
    assert _room("recbole_pos.data.events") == _room("recbole_pos.data") == "data"
    assert _room("recbole_pos.files") == ""
