"""recbole-pos convert: numbers as people write them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from recbole_pos.cli.main import main


def convert(folder: Path, cells: list[str], *options: str, separator: str = ",") -> Any:
    """What became of a column ``amount``; an exit code if nothing did."""
    with (folder / "log.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["user", "item", "time", "amount"])
        for n, cell in enumerate(cells * 3):
            writer.writerow([f"u{n}", "i", 1_700_000_000 + n, cell])
    command = ["convert", str(folder / "log.csv"), "--name=shop", f"--data_path={folder}"]
    if code := main([*command, "--overwrite", *options]):
        return code
    columns = json.loads((folder / "shop" / "convert.json").read_text())["columns"]
    column = next(one for one in columns if one["column"] == "amount")
    lines = (folder / "shop" / "shop.inter").read_text().splitlines()
    place = lines[0].split("\t").index(f"amount:{column['kind']}")
    return column["kind"], [line.split("\t")[place] for line in lines[1 : len(cells) + 1]], column


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["1,234.50", "12", "-7.25"], ["1234.5", "12", "-7.25"]),
        (["1.234,50", "12", "-7,25"], ["1234.5", "12", "-7.25"]),
        (["1 234,50", "1\u00a0000,00", "2\u202f000,00"], ["1234.5", "1000", "2000"]),
        (["1'234.50", "12"], ["1234.5", "12"]),
        (["1,234,567", "1,234"], ["1234567", "1234"]),
        (["12,99", "5", "0,123"], ["12.99", "5", "0.123"]),
        (["1,234", "0.5"], ["1234", "0.5"]),
    ],
)
def test_separators_that_can_be_told_are_read_and_shown(
    tmp_path: Path, cells: list[str], numbers: list[str]
) -> None:
    for options in ([], ["--type", "amount=float"]):
        kind, found, column = convert(tmp_path, cells, "--table=amount=inter", *options)
        assert (kind, found) == ("float", numbers)
        assert column["notes"]


@pytest.mark.parametrize(
    ("cells", "options", "first"),
    [
        (["1,234", "2,345"], "--thousands amount=,", "1234"),
        (["1,234", "2,345"], "--decimal amount=,", "1.234"),
        (["1,234", "2,345"], "--decimal amount=.", "1234"),
        (["1.234", "2.345"], "--thousands amount=.", "1234"),
        (["101 205", "330 120"], "--thousands amount=' '", "101205"),
        (["1_234·5", "7"], "--thousands amount=_ --decimal amount=·", "1234.5"),
    ],
)
def test_what_may_be_two_numbers_is_said(
    tmp_path: Path, cells: list[str], options: str, first: str
) -> None:
    kind, found, column = convert(tmp_path, cells, "--table=amount=inter")
    assert kind == ("float" if cells[0] == "1.234" else "token")
    if kind == "token":
        assert found == cells
        assert convert(tmp_path, cells, "--type", "amount=float") == 2
    assert column["notes"] or "_" in cells[0]
    if " " in cells[0]:  # or two names, unless something has a decimal
        assert "--thousands" in str(column["notes"])
        assert convert(tmp_path, [*cells, "1 000.5"], "--table=amount=inter")[0] == "float"
    words = [word.replace("' '", " ") for word in options.replace("=' '", "='_'").split()]
    words = [word.replace("'_'", " ") for word in words]
    kind, found, _ = convert(tmp_path, cells, "--table=amount=inter", *words)
    assert (kind, found[0]) == ("float", first)


def test_a_comma_between_semicolons_is_that_of_decimals(tmp_path: Path) -> None:
    for options in ([], ["--type", "amount=float"]):
        kind, found, column = convert(
            tmp_path, ["1,234", "2,345"], "--table=amount=inter", *options, separator=";"
        )
        assert (kind, found) == ("float", ["1.234", "2.345"])
        assert column["notes"]


def test_nearly_numbers_are_noted(tmp_path: Path) -> None:
    for cells, is_noted in (([*map(str, range(30)), "n/x"], True), (["1,5", "2", "x"], False)):
        kind, _, column = convert(tmp_path, cells, "--table=amount=inter")
        assert (kind, bool(column["notes"])) == ("token", is_noted)


@pytest.mark.parametrize(
    "options",
    [
        ["--decimal", "amount=ab"],
        ["--decimal", "amount=,", "--thousands", "amount=,"],
        ["--thousands", "amuont=,"],
        ["--decimal=amount=,", "--type=amount=float", "--thousands=amount=7"],
    ],
)
def test_separators_that_are_none(tmp_path: Path, options: list[str]) -> None:
    assert convert(tmp_path, ["1,5", "2"], *options) == 2
