"""Where the files of a dataset are, and what to type for what was typed instead of its name."""

from __future__ import annotations

from pathlib import Path

from recbole_pos.errors import UsageError
from recbole_pos.values import suggest

_TABLES = (".csv", ".tsv", ".txt", ".dat", ".json", ".jsonl", ".parquet", ".xlsx", ".gz", ".zip")
_ATOMIC = (".inter", ".item", ".user", ".yaml")


def require_dataset(name: str, folder: Path, suffixes: list[str]) -> None:
    """Refuse a dataset that is not there.

    Args:
        name: of the dataset, as given.
        folder: where it was looked for: data_path / name.
        suffixes: of the files that would be read if they are there.

    Raises:
        UsageError: if name is no name or there is no ``folder/name.inter``, saying what to type; if
            something else than a file has the name of one.
    """
    if Path(name).name != name or not (folder / f"{name}.inter").exists():
        raise UsageError(f"dataset {name!r} not found: {_instead(name, folder)}")
    for suffix in suffixes:
        path = folder / f"{name}.{suffix}"
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "something else"
            raise UsageError(f"{path} is {kind} where a file is expected; remove or rename it")


def _instead(name: str, folder: Path) -> str:
    given = Path(name)
    if given.suffix.lower() in _TABLES:
        return (
            "-d takes the name of a folder with atomic files. Make them of your file first; "
            "docs/data.md has the script for a csv"
        )
    stem = given.stem
    if given.suffix in _ATOMIC and not given.is_dir():
        given, folder = given.parent, folder.parent
    if given.name in ("", ".."):
        given = given.resolve()
    for place in (folder, given):
        if (place / f"{place.name}.inter").is_file():
            return f"type `-d {place.name} --data_path={place.parent}`"
        if others := sorted(file.stem for file in place.glob("*.inter")):
            first = others[0]
            return (
                f"{place} holds {first}.inter, but a dataset lies in a folder of its name. Move "
                f"{first}.* to {place / first}/ and type `-d {first} --data_path={place}`"
            )
        if inside := _datasets(place):
            only = inside[0] if len(inside) == 1 else "NAME"
            meant = stem if stem in inside else only
            there = f"{place} holds the datasets {', '.join(inside[:8])}"
            more = ", ..." if len(inside) > 8 else ""
            return f"{there}{more}; type `-d {meant} --data_path={place}`"
    place = given if len(given.parts) > 1 else folder  # a path was meant as one from here
    near = suggest(given.name, _datasets(place.parent))
    return (
        f"there is no {place / given.name}.inter{near}; set data_path to the folder that holds "
        f"{given.name}/. docs/data.md leads from a csv to a run"
    )


def _datasets(folder: Path) -> list[str]:
    """Names of the datasets in a folder."""
    return sorted(file.stem for file in folder.glob("*/*.inter") if file.stem == file.parent.name)
