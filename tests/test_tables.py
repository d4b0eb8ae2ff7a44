"""Tables of a dataset: cells of text and parquet, and what is no table."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import shop
from pandas._libs.parsers import STR_NA_VALUES
from pyarrow import parquet

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.atomic_files import MISSING, ParquetTable, TextTable, open_file
from recbole_pos.data.loading import locate_dataset, select_columns
from recbole_pos.data.recbole_view import RecBoleView
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset

DEFAULTS = {"USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id", "TIME_FIELD": "timestamp"}
DEFAULTS |= {"load_col": None, "seq_separator": " ", "memory_limit": "1GB"}


def load(path: Path, **options: Any) -> pd.DataFrame:
    config = {**DEFAULTS, **options}
    file = open_file(path, config)
    return file.read(select_columns(file, path.suffix[1:], config))


ODD_NUMBERS = ["+5", " 7 ", "inf", "-Infinity", "NAN", "1e400", "1e-400", "1_000"]


def test_what_is_missing_is_what_pandas_takes_for_it() -> None:
    assert set(MISSING) == set(STR_NA_VALUES)


LINES = ["user_id:token\titem_id:token\ttimestamp:float\ttags:token_seq\tsize:float_seq"]
LINES += [f"u{i % 7}\ti{i % 5}\t{1.5e9 + i}\tred blue\t1 2.5" for i in range(60)]
HEAD, FIRST = LINES[:2]

WRONG_LINES = [
    ("u1\ti1\t5\tred", "4, expected 5"),
    ("u1\ti1\t5 o'clock\tred\t1", "timestamp .float."),
    ('u1\t"i"1\t5\tred\t1', "quotation mark"),
    ("u1\ti1\t5\tred\t1 1e39", "size .float_seq."),
    ("u1\ti\0\t5\tred\t1", "a NUL byte"),
]
BLANKS = [("  ", "\n"), ("", "\r\n")]  # lines of blanks only Python reads


@pytest.mark.parametrize(("number", "line", "words"), [(n, *w) for n, w in enumerate(WRONG_LINES)])
def test_the_first_wrong_line_is_named(tmp_path: Path, number: int, line: str, words: str) -> None:
    """By the number that an editor shows, in which blank lines count."""
    blank, end = BLANKS[number % len(BLANKS)]
    lines = [*LINES[:3], blank, blank, *LINES[3:20], blank, *LINES[20:30], line, *LINES[30:], "no"]
    (tmp_path / "x.inter").write_bytes("\n".join(lines).replace("\n", end).encode())
    with pytest.raises(UsageError, match=f"x.inter, line {lines.index(line) + 1}: .*{words}"):
        load(tmp_path / "x.inter")


NO_FILES: dict[str, tuple[str | bytes, str]] = {
    "no header": (FIRST, "line 1: cell 1 .*'u0'"),
    "no data": (HEAD + "\n\n  \n", "no line of data"),
    "no type": (HEAD.replace("item_id:token", "item_id"), "cell 2 .*'item_id'"),
    "empty name": ("\n \n" + HEAD + "\t\n", "line 3: cell 6 .*''"),
    "no item": (f"{HEAD}\n{FIRST}".replace("item_id", "what"), "expected item_id:token among"),
    "utf-16": ("\n".join(LINES).encode("utf-16"), "line 1: .*is no UTF-8 text"),
    "cp1252": ("\n".join([*LINES, FIRST.replace("red", "größer")]).encode("cp1252"), "line 62: "),
}


@pytest.mark.parametrize(("content", "words"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_table_of_interactions(tmp_path: Path, content: str | bytes, words: str) -> None:
    (tmp_path / "x.inter").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UsageError, match=f"x.inter.*{words}|{words}.*x.inter"):
        load(tmp_path / "x.inter")


def test_what_only_python_can_read(tmp_path: Path) -> None:
    """A single column, in which a blank line is no empty cell, and bools."""
    (tmp_path / "x.user").write_text("user_id:token\nu1\n\n  \nNA\nu2")
    assert load(tmp_path / "x.user").user_id.astype(object).fillna("").tolist() == ["u1", "", "u2"]
    (tmp_path / "x.item").write_text("item_id:token\tclick:float\nx\tTrue\ny\tFALSE\nz\t")
    np.testing.assert_array_equal(load(tmp_path / "x.item").click, [1, 0, np.nan])


def test_tabs_in_quotation_marks_and_a_mark_of_byte_order(tmp_path: Path) -> None:
    cells = [[*line.split("\t")[:3], f'"{line[:1]}\t"'] for line in LINES]
    cells[0][3] = "device:token"
    (tmp_path / "x.inter").write_text("\n".join(map("\t".join, cells)), "utf-8-sig")
    table = load(tmp_path / "x.inter")
    assert table.timestamp.tolist() == [1.5e9 + i for i in range(60)]
    assert set(table.device) == {"u\t"} and table.user_id[8] == "u1"


def test_a_quotation_mark_that_is_not_closed_takes_no_rows(tmp_path: Path) -> None:
    """Neither where a later one closes it nor in a column that is not loaded."""
    opened, closed = FIRST.replace("red", '"red'), FIRST.replace("2.5", '2.5"')
    (tmp_path / "x.inter").write_text("\n".join([HEAD, FIRST, opened, *LINES[2:5], closed]))
    for load_col in (None, {"inter": ["user_id", "item_id", "timestamp"]}):
        with pytest.raises(UsageError, match="line 3: a cell starts with a quotation mark"):
            load(tmp_path / "x.inter", load_col=load_col)


def test_numbers_are_exact_and_as_python_reads_them(tmp_path: Path) -> None:
    rng = random.Random(0)
    plain = [repr(rng.uniform(0, 10 ** rng.randrange(-9, 12))) for _ in range(3000)]
    for cells in (plain, plain + ODD_NUMBERS):
        lines = ["user_id:token\titem_id:token\ttimestamp:float", *(f"u\ti\t{c}" for c in cells)]
        (tmp_path / "x.inter").write_text("\n".join(lines))
        expected = [float(cell) for cell in cells]
        np.testing.assert_array_equal(load(tmp_path / "x.inter").timestamp, expected)


def test_an_ordinary_file_is_never_read_line_by_line(tmp_path: Path, monkeypatch) -> None:
    """The large ones are ordinary; Python takes eight times as long."""
    monkeypatch.setattr(TextTable, "_read_slowly", None)
    text = "\n".join(LINES).replace("u3", '"u ""3"""').replace("red", '7"') + "\n\n"
    (tmp_path / "x.inter").write_text(text.replace("\n", "\r\n"))
    table = load(tmp_path / "x.inter")
    assert table.user_id[3] == 'u "3"' and table.tags[0].tolist() == ['7"', "blue"]


def as_parquet(table: pd.DataFrame, has_lists: bool) -> pa.Table:
    """A table of texts as one whose columns have the types of their kinds."""
    columns = {}
    for called in table:
        kind = called.partition(":")[2]
        cells = [None if cell == "" else cell for cell in table[called]]
        if kind == "token_seq" and has_lists:
            columns[called] = pa.array([[] if c is None else c.split() for c in cells])
        elif kind == "token" and has_lists:
            columns[called] = pa.array(pd.Categorical(cells))  # codes by the alphabet
        else:
            columns[called] = pa.array(cells, pa.float64() if kind == "float" else pa.string())
    return pa.table(columns)


def read_shop(folder: Path, **options: Any) -> Any:
    given = shop.shop_options(folder, **options)
    dataset = read_dataset(PosConfig("AttrFormer", "shop", None, given))
    names = {field: list(names) for field, names in dataset.field2id_token.items()}
    return dataset.identity, names, dataset.kinds, RecBoleView(dataset).field2seqlen


@pytest.mark.parametrize("has_lists", [True, False])
def test_parquet_is_as_text(tmp_path: Path, has_lists: bool) -> None:
    expected = read_shop(shop.write(tmp_path / "text", shop.tables()))
    folder, types = tmp_path / "parquet", {}
    (folder / "shop").mkdir(parents=True)
    for suffix, table in shop.tables().items():
        made = as_parquet(table, has_lists)
        if not has_lists:  # plain names, and types in yaml
            types |= dict(called.split(":") for called in made.column_names)
            made = made.rename_columns([called.split(":")[0] for called in made.column_names])
        parquet.write_table(made, folder / "shop" / f"shop.{suffix}.parquet", row_group_size=50)
    assert read_shop(folder, column_types=types or None) == expected
    assert locate_dataset(str(folder / "shop"), "dataset/") == ("shop", str(folder))
    shop.write(folder, {"item": shop.tables()["item"]})
    with pytest.raises(UsageError, match=r"shop.item and shop.item.parquet are both there; remove"):
        read_shop(folder)


def column(tmp_path: Path, cells: Any, called: str) -> pd.Series:
    file = tmp_path / "x.inter.parquet"
    parquet.write_table(pa.table({called: cells}), file)
    table = ParquetTable(file, {**DEFAULTS, "column_types": None})
    return table.read(table.kinds).iloc[:, 0]


def test_cells_of_parquet(tmp_path: Path) -> None:
    big = 2**60 + 1  # no float
    assert list(column(tmp_path, pa.array([big, 7, big]), "id:token")) == [str(big), "7", str(big)]
    tokens = column(tmp_path, pa.array(["a", "NA", None, "", "a"]), "id:token")
    assert tokens.isna().tolist() == [False, True, True, True, False]
    numbers = column(tmp_path, pa.array([True, None, False]), "n:float")
    np.testing.assert_array_equal(numbers, [1.0, np.nan, 0.0])
    lists = column(tmp_path, pa.array([[1.5, None], None, []]), "n:float_seq")
    assert [cell.tolist() for cell in lists] == [[1.5], [], []]
    fixed = pa.FixedSizeListArray.from_arrays(pa.array([1.5, 2, 3, 4]), 2)
    lists = column(tmp_path, fixed, "n:float_seq")
    assert [cell.tolist() for cell in lists] == [[1.5, 2], [3, 4]]
    for called in ("id:token", "n:float"):
        assert column(tmp_path, pa.nulls(3), called).isna().all()


@pytest.mark.parametrize(
    ("cells", "called", "words"),
    [
        (pa.array([1.5]), "id:token", r"id \(token\) holds double"),
        (pa.array([0], pa.timestamp("s")), "time:float", r"time \(float\) holds timestamp"),
        (pa.array([["1"], ["b"]]), "v:float_seq", r"row 2: v \(float_seq\)"),
        (pa.array([[1.0], [np.inf]]), "v:float_seq", "row 2: v "),
        (pa.array([], pa.string()), "id:token", "no line of data"),
        (pa.array(["a"]), "id:text", "column 'id:text' has no type"),
    ],
    ids=str,
)
def test_wrong_cells_of_parquet(tmp_path: Path, cells: Any, called: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"x.inter.parquet.*{words}"):
        column(tmp_path, cells, called)


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    """A file that is cut off at any place."""
    column(tmp_path, [f"{n:050}" for n in range(99)], "id:token")
    file = tmp_path / "x.inter.parquet"
    whole = file.read_bytes()
    for size in range(0, len(whole), 200):
        file.write_bytes(whole[:size])
        with pytest.raises(UsageError, match="x.inter.parquet.*cannot be read as parquet"):
            ParquetTable(file, {**DEFAULTS, "column_types": None})
