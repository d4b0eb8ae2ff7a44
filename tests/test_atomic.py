"""The reader of atomic files: the same tables as RecBole's through pandas, and stricter."""

from __future__ import annotations

import csv
import io
import random
from pathlib import Path

import numpy as np
import pytest
from atomic_reader import Reader, compare
from pandas._libs.parsers import STR_NA_VALUES
from recbole.utils import FeatureSource

from recbole_pos.config.posconfig import WHEEL_DATASETS
from recbole_pos.data import tables
from recbole_pos.data.tables import KINDS, MISSING, TextTable
from recbole_pos.errors import UsageError

ROOT = Path(__file__).parent.parent
WORDS = [
    "a",
    "7",
    "1.0",
    " x ",
    'in "the" mid',
    '7"',
    "true",
    "é€😀",
    "a,b",
    "#",
    "\\",
    "'",
    "0x1f",
]
NUMBERS = ["0", "-1.5", "1e-7", ".5", "5.", "0.1", "1704120945.123456", "123456789012345678901"]
ODD_NUMBERS = ["+5", " 7 ", "inf", "-Infinity", "NAN", "1e400", "1e-400", "1_000", "True", "FALSE"]


def generate(rng: random.Random) -> tuple[str, dict]:
    """A file that is right, with everything in it that may be, and the options to read it."""
    separator = rng.choice("\t\t,;| ")
    kinds = ["token", "token", "float"] + [rng.choice(KINDS) for _ in range(rng.randrange(5))]
    names = ["user_id", "item_id", "timestamp"] + [f"f{i}" for i in range(len(kinds) - 3)]

    def cell(kind: str) -> str:
        if rng.random() < 0.15:
            return rng.choice(MISSING)
        many = rng.randrange(4)
        if kind == "token":
            return rng.choice([*WORDS, f"u{rng.randrange(99)}", separator, '"', '""', '"x"'])
        if kind == "token_seq":
            return " ".join(rng.choice(WORDS) for _ in range(many))
        numbers = NUMBERS + [repr(rng.uniform(-1e3, 1e3)), str(rng.randrange(10**10))]
        if rng.random() < 0.02 and kind == "float":
            return rng.choice(ODD_NUMBERS[:-2])
        return " ".join(rng.choice(numbers) for _ in range(1 if kind == "float" else many))

    text = io.StringIO()
    quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    write = csv.writer(text, delimiter=separator, lineterminator="\n", quoting=quoting)
    for _ in range(rng.randrange(1, 30)):
        write.writerow([cell(kind) for kind in kinds])
        if rng.random() < 0.05:
            text.write(rng.choice(["\n", "\n\n", " \n" if separator != " " else "\n"]))
    header = separator.join(f"{n}:{k}" for n, k in zip(names, kinds, strict=True))
    whole = f"{header}\n{text.getvalue()}".replace("\n", rng.choice(["\n", "\r\n"]))
    chosen = rng.choice(
        [None, None, {"inter": [*names[:3], *rng.sample(names[3:], len(names[3:]) // 2)]}]
    )
    lengths = {name: 2 for name in names[3:]} if rng.random() < 0.3 else None
    return whole, {"field_separator": separator, "load_col": chosen, "seq_len": lengths}


@pytest.mark.parametrize("block", [1 << 22, 40])
def test_generated_files_read_as_through_pandas(
    tmp_path: Path, monkeypatch, block: int, pytestconfig
) -> None:
    monkeypatch.setattr(tables, "_BLOCK", block)
    file = tmp_path / "x.inter"
    for seed in range(2000 if pytestconfig.getoption("fuzz") else 60):
        text, options = generate(random.Random(seed))
        file.write_bytes(text.encode())
        try:
            compare(file, **options)
        except Exception:
            print(seed, repr(text), options)
            raise


def test_files_that_ship_read_as_through_pandas() -> None:
    for source in (FeatureSource.INTERACTION, FeatureSource.ITEM, FeatureSource.USER):
        compare(WHEEL_DATASETS / "ml-100k" / f"ml-100k.{source.value}", source)
        compare(ROOT / "dataset" / "toyshop" / f"toyshop.{source.value}", source)


def test_what_is_missing_is_what_pandas_takes_for_it() -> None:
    assert set(MISSING) == set(STR_NA_VALUES)


LINES = ["user_id:token\titem_id:token\ttimestamp:float\ttags:token_seq\tsize:float_seq"]
LINES += [f"u{i % 7}\ti{i % 5}\t{1.5e9 + i}\tred blue\t1 2.5" for i in range(60)]
BLANK = (3, 4, 20, 41)  # before these lines of the file stand blank ones, which count
PLACE = 33


def damaged(line: str, place: int = PLACE) -> tuple[str, int]:
    """The text with a line of data replaced, and the number that an editor shows for it."""
    lines = list(LINES)
    lines[place] = line
    for blank in BLANK:
        lines.insert(blank, "  ")
    text = "\n".join(lines) + "\n"
    return text, text[: text.index(line)].count("\n") + 1


WRONG_LINES = [
    ("u1\ti1\t5\tred\t1\t", "6, expected 5"),
    ("u1\ti1\t5\tred", "4, expected 5"),
    ("u1,i1,5,red,1", "1, expected 5"),
    ('"u1\ti1\t5\tred\t1', "quotation mark"),
    ('u1\t"i"1\t5\tred\t1', "quotation mark"),
    ("u1\ti1\t5 o'clock\tred\t1", 'timestamp .float. is "5 o\'clock"'),
    ("u1\ti1\t \tred\t1", "timestamp .float. is ' '"),
    ("u1\ti1\t5\tred\t1 2 x", "size .float_seq. is '1 2 x'"),
    ("u1\ti1\tnan(5)\tred\t1", "'nan.5.'"),
    ("u1\ti1\t5\tred\t1 inf", "size .float_seq. is '1 inf'"),
    ("u1\ti1\t5\tred\t1e39", "size .float_seq. is '1e39'"),
    ("u1\ti\0\t5\tred\t1", "a NUL byte"),
]
FORMS = [(1 << 22, "\n", "inter"), (64, "\r\n", "item"), (64, "\r", "extra")]


@pytest.mark.parametrize(
    ("line", "message", "form"),
    [(*wrong, FORMS[n % 3]) for n, wrong in enumerate(WRONG_LINES)],
    ids=lambda x: None,
)
def test_the_line_that_is_wrong(
    tmp_path: Path, monkeypatch, line: str, message: str, form: tuple
) -> None:
    """The first of several."""
    block, end, suffix = form
    monkeypatch.setattr(tables, "_BLOCK", block)
    text, number = damaged(line)
    file = tmp_path / f"x.{suffix}"
    file.write_bytes(f"{text}short\n".replace("\n", end).encode())
    sources = {source.value: source for source in FeatureSource}
    with pytest.raises(UsageError, match=f"{file}, line {number}: .*{message}"):
        Reader()._load_feat(str(file), sources.get(suffix, suffix))


NO_FILES: list[tuple[str | bytes, str]] = [
    ("", "is empty"),
    ("\n \n\r\n", "is empty"),
    (LINES[1], "line 1: cell 1 .*'u0'"),
    (LINES[0], "no line of data"),
    (LINES[0] + "\n\n  \n", "no line of data"),
    ("\ufeff" + LINES[0] + "\tuser_id:float\n" + LINES[1] + "\t1", "two columns .*'user_id'"),
    (LINES[0].replace("item_id:token", "item_id"), "cell 2 .*'item_id'"),
    (LINES[0].replace("item_id:token", "item_id:text"), "cell 2 .*'item_id:text'"),
    (LINES[0].replace("item_id:token", "item:id:token"), "cell 2 .*'item:id:token'"),
    ("\n \n" + LINES[0] + "\t\n", "line 3: cell 6 .*''"),
    (LINES[0].replace("\t", ","), "cell 1 .*'user_id:token,item_id"),
    ("\n".join(LINES[:2]).replace("item_id", "what"), "'item_id' .*not loaded.*what:token"),
    ("\n".join(LINES[:2]).replace("item_id:token", "item_id:float"), "has type float"),
    (b"\x89PNG\r\n\x1a\n" + bytes(100), "is no utf-8 text"),
    ("\n".join(LINES).encode("utf-16"), "line 1: .*is no utf-8 text"),
    ("\n".join([*LINES, LINES[1].replace("red", "größer")]).encode("cp1252"), "line 62: .*utf-8"),
]


@pytest.mark.parametrize(
    ("content", "message", "source"),
    [
        (*case, (FeatureSource.INTERACTION, FeatureSource.ITEM)[n % 2])
        for n, case in enumerate(NO_FILES)
    ],
    ids=lambda x: None,
)
def test_a_file_that_is_none(tmp_path: Path, content: str | bytes, message: str, source) -> None:
    file = tmp_path / f"x.{source.value}"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message) as refusal:
        Reader()._load_feat(str(file), source)
    assert str(file) in str(refusal.value)


def test_a_time_must_be_a_number_and_attributes_need_their_key(tmp_path: Path) -> None:
    inter, item = tmp_path / "x.inter", tmp_path / "x.item"
    inter.write_text("\n".join(LINES[:2]).replace("timestamp:float", "timestamp:token"))
    with pytest.raises(UsageError, match="TIME_FIELD.* has type token"):
        Reader()._load_feat(str(inter), FeatureSource.INTERACTION)
    item.write_text("brand:token\tname:token\nx\ty\n")
    with pytest.raises(UsageError, match="ITEM_ID_FIELD.* was not loaded .*brand:token"):
        Reader()._load_feat(str(item), FeatureSource.ITEM)


@pytest.mark.parametrize(
    ("encoding", "mark"),
    [
        ("utf-8", "\ufeff"),
        ("utf-8-sig", ""),
        ("utf-16", ""),
        ("utf-16-le", "\ufeff"),
        ("cp1252", ""),
    ],
)
def test_encodings(tmp_path: Path, monkeypatch, encoding: str, mark: str) -> None:
    monkeypatch.setattr(tables, "_BLOCK", 7)
    text = "\n".join([LINES[0], *(line.replace("i", "é", 1) for line in LINES[1:])])
    file = tmp_path / "x.inter"
    file.write_bytes((mark + text).replace("\n", "\r\n").encode(encoding))
    table = Reader(encoding=encoding)._load_feat(str(file), FeatureSource.INTERACTION)
    assert list(table) == ["user_id", "item_id", "timestamp", "tags", "size"]
    assert table.item_id.tolist() == [f"é{i % 5}" for i in range(60)]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("field_separator", wrong) for wrong in ("::", "", "\n", '"')),
        ("seq_separator", ""),
        *(("encoding", wrong) for wrong in ("utf-9", "base64", "undefined", "ascii\0")),
    ],
)
def test_options_of_the_format(tmp_path: Path, option: str, value: str) -> None:
    (tmp_path / "x.inter").write_text("\n".join(LINES))
    with pytest.raises(UsageError, match=option):
        Reader(**{option: value})._load_feat(str(tmp_path / "x.inter"), FeatureSource.INTERACTION)


def test_blank_lines_of_a_single_column(tmp_path: Path) -> None:
    """There an empty cell and a blank line are the same: neither is a line of data."""
    (tmp_path / "x.user").write_text("user_id:token\nu1\n\n  \nNA\nu2")
    found = compare(tmp_path / "x.user", FeatureSource.USER).user_id.tolist()
    assert found[::2] == ["u1", "u2"] and np.isnan(found[1])


def test_a_separator_that_arrow_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "x.inter").write_text("\n".join(LINES).replace("\t", "§"), encoding="utf-8")
    compare(tmp_path / "x.inter", field_separator="§")


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.inter").mkdir()
    with pytest.raises(UsageError, match="x.inter cannot be read"):
        Reader()._load_feat(str(tmp_path / "x.inter"), FeatureSource.INTERACTION)


def test_text_that_no_file_can_hold(tmp_path: Path) -> None:
    """Half of a pair of surrogates, which utf-7 can spell."""
    (tmp_path / "x.inter").write_text("\n".join(LINES).replace("u3", "+2AA-"))
    with pytest.raises(UsageError, match="line 5: .*no utf-7 text"):
        Reader(encoding="utf-7")._load_feat(str(tmp_path / "x.inter"), FeatureSource.INTERACTION)


@pytest.mark.parametrize("quote", ["", '"'])
def test_long_lines_and_cells(tmp_path: Path, monkeypatch, quote: str) -> None:
    """Longer than a block of the file, and than the cells that csv reads by default."""
    monkeypatch.setattr(tables, "_BLOCK", 1 << 16)
    text = quote + "x" * (1 << 18) + quote
    lines = [LINES[0], LINES[1].replace("u0", text), LINES[2]]
    (tmp_path / "x.inter").write_text("\n".join(lines))
    table = Reader()._load_feat(str(tmp_path / "x.inter"), FeatureSource.INTERACTION)
    assert [len(user) for user in table.user_id] == [1 << 18, 2]
    odd = LINES[1].replace("1500000000.0", "1_0").replace("u0", text)  # which Arrow does not read
    (tmp_path / "x.inter").write_text("\n".join([*lines, odd]))
    table = Reader()._load_feat(str(tmp_path / "x.inter"), FeatureSource.INTERACTION)
    assert table.timestamp[2] == 10 and len(table.user_id[2]) == 1 << 18
    (tmp_path / "x.inter").write_text("\n".join([*lines, '"' + text + LINES[2]]))
    with pytest.raises(UsageError, match="line 4: a cell starts with a quotation mark"):
        Reader()._load_feat(str(tmp_path / "x.inter"), FeatureSource.INTERACTION)


def test_numbers_are_exact_and_as_python_reads_them(tmp_path: Path) -> None:
    rng = random.Random(0)
    plain = [repr(rng.uniform(0, 10 ** rng.randrange(-9, 12))) for _ in range(3000)]
    for cells in (plain, plain + ODD_NUMBERS[:-2]):
        text = "user_id:token\titem_id:token\ttimestamp:float\n"
        text += "".join(f"u\ti\t{cell}\n" for cell in cells)
        (tmp_path / "x.inter").write_text(text)
        found = Reader()._load_feat(str(tmp_path / "x.inter"), FeatureSource.INTERACTION)
        np.testing.assert_array_equal(found.timestamp, [float(cell) for cell in cells])


def test_a_column_that_was_bool(tmp_path: Path) -> None:
    lines = ["a:token\tclick:float", "x\tTrue", "y\tFALSE", "z\t"]
    (tmp_path / "x.extra").write_text("\n".join(lines))
    np.testing.assert_array_equal(compare(tmp_path / "x.extra", "extra").click, [1, 0, np.nan])


def test_an_ordinary_file_is_never_read_line_by_line(tmp_path: Path, monkeypatch) -> None:
    """The large ones are ordinary; Python takes eight times as long."""
    monkeypatch.setattr(tables, "_BLOCK", 100)
    monkeypatch.setattr(TextTable, "_read_slowly", None)
    text = "\n".join(LINES).replace("u3", '"u ""3"""').replace("red", '7"') + "\n\n"
    (tmp_path / "x.inter").write_text(text.replace("\n", "\r\n"))
    table = Reader()._load_feat(str(tmp_path / "x.inter"), FeatureSource.INTERACTION)
    assert table.user_id[3] == 'u "3"' and table.tags[0].tolist() == ['7"', "blue"]


def test_tokens_that_would_fill_the_memory(tmp_path: Path, monkeypatch) -> None:
    """RecBole keeps the names of a column in an array as wide as the longest."""
    monkeypatch.setattr(tables, "_TOKENS_LIMIT", 4 * 7 * 1000)
    for length, wrong in ((1000, False), (1001, True)):
        text = "\n".join(LINES).replace("u3", "x" * length)
        (tmp_path / "x.inter").write_text(text)
        try:
            Reader()._load_feat(str(tmp_path / "x.inter"), FeatureSource.INTERACTION)
            assert not wrong
        except UsageError as error:
            assert wrong and "user_id has 7 different tokens of up to 1,001 char" in str(error)
