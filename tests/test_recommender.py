"""Recommender: any history, what may be recommended, vectors; against loops, and with nonsense."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import SMALL, make_log, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.layers import catalogue
from recbole_pos.layers.catalogue import Choice
from recbole_pos.serve.histories import read_histories
from recbole_pos.serve.recommend import write_recommendations
from recbole_pos.serve.topk import top_items


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_atomic(make_log(), tmp_path_factory.mktemp("data"))
    given = {**SMALL, "data_path": str(folder), "epochs": 1, "position": ["to_rope", "learned"]}
    recbole_pos.run("PosSASRec", "tiny", None, given, run_dir=folder / "run", verbose=False)
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run_dir: Path) -> recbole_pos.Recommender:
    return recbole_pos.Recommender.load(run_dir)


BASKET = {"id": "b", "items": ["i1", "i2", "i1"], "times": [1.0, 5.0, 9.0]}


@pytest.mark.parametrize("chunk", [4, 7, 1000])
def test_top_items_against_a_loop(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(catalogue, "PART", chunk)
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(5, 30, generator=generator)
    items = torch.tensor([1, 2, 5, 6, 7, 11, 12, 13, 20, 21, 29])
    bonus = torch.randn(len(items), generator=generator)
    barred = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([5, 3, 29, 1, 29])
    score, found = top_items(lambda ids: every[:, ids], Choice(items, bonus), 9, barred)
    for row in range(5):
        out = {int(item) for at, item in zip(*barred, strict=True) if at == row}
        left = [
            (float(every[row, item] + extra), int(item))
            for item, extra in zip(items, bonus, strict=True)
            if int(item) not in out
        ]
        expected = sorted(left, reverse=True)[:9]
        real = score[row] > -np.inf
        assert found[row][real].tolist() == [item for _, item in expected]
        np.testing.assert_allclose(score[row][real], [value for value, _ in expected], rtol=1e-6)


def test_a_history_alone_is_as_among_others(trained: recbole_pos.Recommender) -> None:
    rng = random.Random(0)
    many = [
        {"id": n, "items": rng.choices(list(trained.items), k=length), "times": range(length)}
        for n, length in enumerate([3, 1, 40, 12, 0, 2])
    ]
    many = [{**one, "times": list(one["times"])} for one in many]
    together = trained.recommend(histories=many, k=4)
    assert together["id"].drop_duplicates().tolist() == list(range(6))  # the order asked
    for one in many:
        alone = trained.recommend(histories=[one], k=4).reset_index(drop=True)
        same = together[together["id"] == one["id"]].reset_index(drop=True)
        pd.testing.assert_frame_equal(alone, same, rtol=1e-4)
    by = dict(zip(together["id"], together["by"], strict=True))
    assert by == {n: "popularity" if n == 4 else "model" for n in range(6)}


def test_what_may_be_recommended(trained: recbole_pos.Recommender) -> None:
    def items(**given: Any) -> list[str]:
        return trained.recommend(histories=[BASKET], **given)["item"].tolist()

    every = items(k=len(trained.items), exclude_seen=False)
    assert sorted(every) == sorted(trained.items)
    assert set(items(k=len(trained.items), exclude_seen=True)) == set(every) - {"i1", "i2"}
    allowed = ["i3", "i1", "never heard of", "i9", "i4"]
    assert items(k=9, allowed=allowed, exclude_seen=False) == [i for i in every if i in allowed]
    assert items(k=3, excluded=every[:2], exclude_seen=False) == every[2:5]
    assert items(k=1, boosts={every[-1]: 1e6}) == [every[-1]]
    assert items(k=9, allowed=["i1"], exclude_seen=True) == []
    popular = trained.recommend(histories=[[]], k=2, allowed=["i3", "i4"])
    assert set(popular["by"]) == {"popularity"} and set(popular["item"]) == {"i3", "i4"}
    with pytest.raises(UsageError, match="none of those allowed is known"):
        items(allowed=["never heard of"])
    with pytest.raises(UsageError, match="boosts: 'i1': expected a number, found nan"):
        items(boosts={"i1": float("nan")})


def test_scores_are_products_of_vectors(trained: recbole_pos.Recommender) -> None:
    names, vectors = trained.item_vectors()
    state = trained.encode([BASKET, {"items": []}])
    assert not state[1].any()
    found = trained.recommend(histories=[BASKET], k=5, exclude_seen=False)
    scores = dict(zip(names, vectors @ state[0], strict=True))
    np.testing.assert_allclose([scores[i] for i in found["item"]], found["score"], rtol=1e-4)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = dict(zip(names, unit @ unit[list(names).index("i7")], strict=True))
    best = sorted(set(names) - {"i7"}, key=cosine.__getitem__, reverse=True)[:3]
    near = trained.similar("i7", k=3)
    assert near["similar"].tolist() == best and set(near["item"]) == {"i7"}
    with pytest.raises(UsageError, match="item 'i07' is not known .did you mean i7"):
        trained.similar("i07")
    with pytest.raises(UsageError, match="item '5' is not known"):  # a number, not a list
        trained.similar(5)  # type: ignore[arg-type]


def test_equal_scores_have_one_order(run_dir: Path) -> None:
    """That of the catalogue, whatever k, the items allowed, and who else is asked about."""
    trained = recbole_pos.Recommender.load(run_dir)
    names = list(trained.items)
    weight = trained.made.model.item_embedding.weight.detach()
    weight[5:35] = 0  # so that their scores and cosines are 0
    place = {name: number for number, name in enumerate(names)}

    def check(found: pd.DataFrame, item: str, score: str) -> list[str]:
        wanted = sorted(
            zip(-found[score], found[item], strict=True), key=lambda one: (one[0], place[one[1]])
        )
        assert found[item].tolist() == [name for _, name in wanted]
        return found[item].tolist()

    for history in ([], BASKET):  # the most popular ones, and the model's
        every = check(trained.recommend(histories=[history], k=len(names)), "item", "score")
        for k in range(1, len(names)):
            assert trained.recommend(histories=[history], k=k)["item"].tolist() == every[:k]
            allowed = random.Random(k).sample(names, k)
            found = trained.recommend(histories=[history], k=3, allowed=allowed[::-1])
            assert found["item"].tolist() == [name for name in every if name in allowed][:3]
        many = trained.recommend(histories=[history] * 9, k=9)["item"].tolist()
        assert many == every[:9] * 9
    every = check(trained.similar(names[6], k=len(names)), "similar", "cosine")
    assert len(every) == len(names) - 1
    for k in range(1, len(names)):
        assert trained.similar(names[6], k)["similar"].tolist() == every[:k]
        allowed = random.Random(k).sample(names, k)
        found = trained.similar([names[6], names[6]], 3, allowed, excluded=[every[0]])
        left = [name for name in every[1:] if name in allowed][:3]
        assert found["similar"].tolist() == left * 2
        assert found["rank"].tolist() == list(range(1, len(left) + 1)) * 2


def test_events_are_sorted_by_time(trained: recbole_pos.Recommender) -> None:
    mixed = {"items": ["i1", "i2", "i1"], "times": [9.0, 5.0, 1.0]}
    one, two = trained.encode([BASKET, mixed])
    np.testing.assert_array_equal(one, two)


def test_dates_of_histories(trained: recbole_pos.Recommender) -> None:
    """With a zone or in UTC, in the unit of the time field; mixed with numbers, too."""
    times = ["1970-01-02", "1970-01-02T01:00:00Z", "1970-01-02T02:00:00.5+01:00"]
    first, *others = (
        trained.read([{"items": ["i1", "i2", "i3"], "times": some}])
        for some in ([86400, 90000, 90000.5], times, [86400, *times[1:]])
    )
    frame = pd.DataFrame(
        {"items": [["i1", "i2", "i3"]], "times": [list(pd.to_datetime(times[:1]))]}
    )
    with pytest.raises(UsageError, match="histories.0..times"):
        trained.read(frame)  # one time, three items
    columns = {"id": ["a"], "items": [["i1", "i2", "i3"]]}
    moments = [np.array([86400, 90000, 90000.5]) * 1e6]
    kind = pa.list_(pa.timestamp("us"))
    table = pa.table({**columns, "times": pa.array([moments[0].astype(int).tolist()], kind)})
    for one in (*others, trained.read(table)):
        np.testing.assert_array_equal(one.times, first.times)
        np.testing.assert_array_equal(one.items, first.items)
    for wrong in ("yesterday", "", "2026-13-01", "5"):
        with pytest.raises(UsageError, match="histories.0..times"):
            trained.read([{"items": ["i1"], "times": [wrong]}])
    trained.__dict__["_unit"] = None  # the time field numbers interactions
    try:
        for histories in ([{"items": ["i1"], "times": times[:1]}], table):
            with pytest.raises(UsageError, match="times"):
                trained.read(histories)
    finally:
        del trained.__dict__["_unit"]


def test_histories_of_pandas(trained: recbole_pos.Recommender) -> None:
    asked = [{"id": "a", **{k: BASKET[k] for k in ("items", "times")}}, {**BASKET, "id": "b"}]
    want = trained.recommend(histories=asked)
    pd.testing.assert_frame_equal(trained.recommend(histories=pd.DataFrame(asked)), want)
    log = pd.DataFrame({"user": ["b", "a", "b"], "item": ["i1", "i2", "i3"]})
    lists = log.groupby("user")["item"].agg(list)
    with pytest.raises(UsageError, match="the model reads times"):
        trained.read(lists)
    found = read_histories(lists, trained.ids, needs_time=False)
    assert found.ids == ["a", "b"] and found.lengths.tolist() == [1, 2]
    with pytest.raises(UsageError, match="items"):
        trained.read(log)  # a row an interaction


def test_files_that_are_no_histories(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    """One line, exit 2, and no file is left; of none, a table without rows."""
    given, out = tmp_path / "given.jsonl", tmp_path / "out.csv"
    pq.write_table(pa.table({"id": ["a"], "items": [["i1"]]}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    damaged = tmp_path / "damaged.parquet"
    cases = [
        *((given, text.encode()) for text in ('{"id": "\\ud800", "items": []}', "[" * 10**5, "{}")),
        *((given, b"\xff"), (given, b'{"items": [' + b"9" * 5000 + b"]}")),
        *((damaged, whole[:at] + b"\xff\xff" + whole[at + 2 :]) for at in (len(whole) - 9, 0)),
        *((damaged, whole[:100]), (damaged, b"")),
    ]
    for file, content in cases:
        file.write_bytes(content)
        assert main(["recommend", str(run_dir), f"--histories={file}", f"--out={out}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and not out.exists()
    for option in ("histories", "items", "k", "out"):
        assert main(["recommend", str(run_dir), f"--{option}=--"]) == 2
        assert f"--{option}" in capsys.readouterr().err
    for option in ("histories", "items", "exclude", "out"):
        assert main(["recommend", str(run_dir), f"--{option}", "x" * 300]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    given.write_text("")
    for out, read in ((tmp_path / "o.csv", pd.read_csv), (tmp_path / "o.parquet", pd.read_parquet)):
        assert main(["recommend", str(run_dir), f"--histories={given}", f"--out={out}"]) == 0
        assert list(read(out)) == ["id", "rank", "item", "score", "by"] and not len(read(out))
    assert pq.read_schema(out).field("item").type == pa.string()


def test_names_that_are_formulas(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    """No cell of a csv file begins one; numbers stay, and so does everything in parquet."""
    ids = ["=1+1", "+a", "-3", "@x", "\tq", "plain"]
    rows = [{"id": name, "items": ["i1"], "times": [1]} for name in ids]
    (tmp_path / "h.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {
        name: write_recommendations(
            run_dir, k=1, histories=tmp_path / "h.jsonl", out=tmp_path / name
        )
        for name in ("o.csv", "o.parquet")
    }
    cells = pd.read_csv(found["o.csv"], dtype=str)["id"].tolist()
    assert cells == ["'=1+1", "'+a", "-3", "'@x", "'\tq", "plain"]
    assert pd.read_parquet(found["o.parquet"])["id"].tolist() == ids
    assert "spreadsheet" in capsys.readouterr().out


def test_files(run_dir: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "stock.txt").write_text("i1\n\ni2 \ni3\nnever heard of\n")
    lines = [json.dumps(one) for one in (BASKET, {"items": ["x"], "times": [1]})]
    (tmp_path / "baskets.jsonl").write_text("\n".join(lines) + "\n\n")
    for name, read in (("a.parquet", pd.read_parquet), ("a.csv", pd.read_csv)):
        file = write_recommendations(
            run_dir,
            k=2,
            items=tmp_path / "stock.txt",
            histories=tmp_path / "baskets.jsonl",
            out=tmp_path / name,
        )
        found = read(file)
        assert set(found["item"]) <= {"i1", "i2", "i3"} and len(found) == 4
        assert found["id"].astype(str).tolist() == ["b", "b", "1", "1"]
    told = capsys.readouterr().out
    assert "1 items of histories are not known to the model" in told
    assert "1 of 2 get the most popular items" in told
    assert "are in the history already; --exclude_seen leaves these out" in told
    (tmp_path / "baskets.jsonl").write_text('{"items": ["i1"]}\n{"items": [')
    with pytest.raises(UsageError, match=r"histories\[0\]: the model reads times"):
        write_recommendations(run_dir, histories=tmp_path / "baskets.jsonl")


NONSENSE: list[Any] = [
    *(None, True, 3, -1.5, float("nan"), float("inf"), 10**5000, "", "i1", "\x00", "x" * 10**5),
    *([], {}, [[]], [["i1"]], {"items": "i1"}, ["i1", 5, "i2"], ["i1"] * 10_000, {"items": []}),
    *({"item": ["i1"]}, {"items": ["i1"], "times": [float("nan")]}, b"i1", object(), ["i1", None]),
    *({"items": ["i1", "i2"], "times": [1]}, {"items": ["i1"], "times": "1"}),
    *({"items": ["i1"], "times": [10**400]}, {"items": ["i1"] * 9, "times": [-1e300] * 9}),
    *({"id": [1], "items": ["i1"]}, {"id": None, "items": ["i1"]}, {1: 2, "items": []}),
    *(
        {"items": ["i2", "i1"], "times": [9e9, -4]},
        {"items": ["i3"], "times": [0]},
        np.array(["i1"]),
    ),
]


def test_nonsense(trained: recbole_pos.Recommender) -> None:
    """1,000 requests: each has an answer with items that there are, or an error for people."""
    rng, answered = random.Random(0), 0
    for _ in range(1000):
        histories: Any = [rng.choice([*NONSENSE, *[BASKET] * 60]) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.1:
            histories = rng.choice(NONSENSE)
        given = {
            "k": rng.choice([*[5] * 20, 1, 0, -3, 10**9, 2.5, "3", None, True]),
            "allowed": rng.choice([*[None] * 9, ["i1", "i2", 7], [], "i1", [None], 5]),
            "excluded": rng.choice([*[None] * 9, ["i1", object()], {"i1": 1}]),
            "boosts": rng.choice([*[None] * 9, {"i1": 2}, {"i1": "2"}, {5: 1.0}, {}, 3, "i1"]),
            "exclude_seen": rng.choice([None, True, False]),
        }
        try:
            found = trained.recommend(histories=histories, **given)
        except UsageError as error:
            assert len(str(error)) < 400
            continue
        answered += 1
        assert set(found["item"]) <= set(trained.items)
        if given["allowed"]:
            assert set(found["item"]) <= {"i1", "i2"}
    assert answered > 100
