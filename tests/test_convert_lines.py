"""recbole-pos convert: every line is kept or counted under the reason that dropped it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recbole_pos
from recbole_pos.data.tables import TextTable

CONFIG = {"field_separator": "\t", "seq_separator": " ", "encoding": "utf-8"}

BAD = """customer,product,time
ann,owl,2024-03-02 10:00:00
ann,owl
,owl,2024-03-02 10:00:00

ann,NA,2024-03-02 10:00:00
ann,owl,
ann,owl,soon
"two
lines",owl,2024-03-02 10:00:00
ann,"the ""owl"",
1",2024-03-02 10:00:00,x
[PAD],owl,2024-03-02 10:00:00
ann,kite,2024-03-02T11:00:00+01:00
"""


def test_every_line_is_counted_under_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "orders.csv").write_text(BAD)
    report = recbole_pos.convert(tmp_path / "orders.csv", data_path=tmp_path)
    printed = report.lines["events"]
    assert {reason: (d["lines"], d["first"]) for reason, d in printed.dropped.items()} == {
        "broken line": (
            2,
            [
                "orders.csv:3 (2 cells, the first line has 3)",
                "orders.csv:10 (4 cells, the first line has 3; a quotation mark opens that is not "
                "closed in its line (--no_quotes?))",
            ],
        ),
        "empty line": (1, ["orders.csv:5"]),
        "no user (customer)": (1, ["orders.csv:4"]),
        "no item (product)": (1, ["orders.csv:6"]),
        "no time (time)": (1, ["orders.csv:7"]),
        "time cannot be read (time)": (1, ["orders.csv:8"]),
        "user with a line break, or called [PAD]": (2, ["orders.csv:9", "orders.csv:11"]),
    }
    assert (printed.read, printed.kept) == (11, 2)
    shown = capsys.readouterr().out
    assert "dropped: no user" in shown and "guessed: --user customer, --item product" in shown
    assert shown.splitlines()[-1] == report.command
    assert report.command == f"recbole-pos run -m PosSASRec -d orders --data_path={tmp_path}"


NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(
        st.tuples(NAME, NAME, st.sampled_from(["1700000000", "1700000001.5", "", "?"]), NAME),
        min_size=1,
        max_size=8,
    ),
)
def test_kept_and_dropped_are_read_and_what_is_kept_comes_back(
    tmp_path: Path, rows: list[tuple[str, ...]]
) -> None:
    frame = pd.DataFrame([("u", "i", "1700000000", "x"), *rows], columns=["u", "i", "t", "x"])
    lines = frame.to_json(orient="records", lines=True, force_ascii=False)
    (tmp_path / "log.jsonl").write_text(lines, encoding="utf-8")
    roles = {"user": "u", "item": "i", "time": "t"}
    where = {"name": "shop", "data_path": tmp_path, "overwrite": True, "verbose": False}
    report = recbole_pos.convert(
        tmp_path / "log.jsonl", tables={"x": "inter"}, types=["x=token"], **roles, **where
    )
    printed = report.lines["events"]
    assert printed.read == len(frame)
    assert printed.kept + sum(d["lines"] for d in printed.dropped.values()) == printed.read
    lost = {int(place.split(":")[1]) - 1 for d in printed.dropped.values() for place in d["first"]}
    kept = frame.drop(index=list(lost))
    file = TextTable(tmp_path / "shop" / "shop.inter", CONFIG)
    back = file.read(file.columns)
    assert back["user_id"].tolist() == kept["u"].tolist()
    assert back["item_id"].tolist() == kept["i"].tolist()
    assert back["timestamp"].tolist() == kept["t"].astype(float).tolist()
