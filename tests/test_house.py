"""The plan of the package, read from its imports: those within functions too."""

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import recbole_pos

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "recbole_pos"
# Rooms from the ground up: what stands in one may import from those before it, and from its own.
FLOORS = [
    *("layers", "position", "tables", "data", "relations", "model", "config", "conversion"),
    "experiment",
    *("runs", "serve", "public", "referee", "study", "tuning", "cli"),
]
# Names that occur twice still; none may join them.
TWICE = set("attention build events history plot reading relations report source tables".split())


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
# Each import within the package; the package itself imports what users ask for, when they ask.
INSIDE = {name: GRAPH[name] & FILES.keys() for name in FILES if name != "recbole_pos"}
ARROWS = {(name, other) for name, others in INSIDE.items() for other in others}


def _room(name: str) -> str:
    """The folder of a module; empty of one that stands beside the rooms."""
    parts = name.split(".")
    return parts[1] if len(parts) > 2 or (PACKAGE / parts[-1]).is_dir() else ""


def _reached(room: str) -> set[str]:
    """Everything that is imported by a room, or by what it imports."""
    found: set[str] = set()
    waiting = [name for name in FILES if _room(name) == room]
    while waiting:
        new = GRAPH.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    assert found
    return found


def test_no_circle() -> None:
    TopologicalSorter(INSIDE).prepare()


def test_what_lower_rooms_do_not_know() -> None:
    """Layers and positions RecBole, data a model, conversion torch; Ray is known to few."""
    assert "recbole" not in _reached("layers") | _reached("position")
    assert not {"recbole", "torch"} & _reached("conversion")  # they take seconds to import
    assert "model" not in {_room(name) for name in _reached("data")}
    with_ray = {_room(name) for name, others in GRAPH.items() if "ray" in others}
    assert with_ray <= {"runs", "tuning", "study"}


def test_no_arrow_runs_upwards() -> None:
    """Nor from what stands beside the rooms into one, but from RecBole's door and ``python -m``."""
    assert {_room(name) for name in INSIDE} <= {"", *FLOORS}
    floors = {"": -1, **{room: number for number, room in enumerate(FLOORS)}}
    upward = {(a, b) for a, b in ARROWS if floors[_room(b)] > floors[_room(a)]}
    doors = ("recbole_pos.plug", "recbole_pos.__main__")
    assert not {(a, b) for a, b in upward if a not in doors}


def test_no_module_imports_the_package_itself() -> None:
    """Which imports everything: what others want of it stands below, such as its version."""
    assert not {name for name, others in GRAPH.items() if "recbole_pos" in others}
    assert f"\nversion: {recbole_pos.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_few_small_modules_with_names_of_their_own() -> None:
    assert len(list(PACKAGE.glob("[!_]*.py"))) <= 11  # beside __init__ and __main__
    names = Counter(file.stem for file in FILES.values() if file.stem != "__init__")
    assert {name for name, number in names.items() if number > 1} <= TWICE
    lengths = {name: len(file.read_text().splitlines()) for name, file in FILES.items()}
    assert not {name: length for name, length in lengths.items() if length > 600}
