"""Recommender: any history, what may be recommended, vectors; histories as columns; nonsense."""

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
from conftest import SMALL, make_log, write_atomic

import recbole_pos
from recbole_pos.errors import UsageError
from recbole_pos.serve import histories as module
from recbole_pos.serve.histories import Histories, read_histories, read_parts


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
    with pytest.raises(UsageError, match="allowed: no item is left"):
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
    weight = trained.experiment.model.item_embedding.weight.detach()
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
        for k in (1, 3, 12, 29, 39):
            assert trained.recommend(histories=[history], k=k)["item"].tolist() == every[:k]
            allowed = random.Random(k).sample(names, k)
            found = trained.recommend(histories=[history], k=3, allowed=allowed[::-1])
            assert found["item"].tolist() == [name for name in every if name in allowed][:3]
        many = trained.recommend(histories=[history] * 9, k=9)["item"].tolist()
        assert many == every[:9] * 9
    every = check(trained.similar(names[6], k=len(names)), "similar", "cosine")
    assert len(every) == len(names) - 1
    for k in (1, 3, 12, 29, 39):
        assert trained.similar(names[6], k)["similar"].tolist() == every[:k]
        allowed = random.Random(k).sample(names, k)
        found = trained.similar([names[6], names[6]], 3, allowed, excluded=[every[0]])
        left = [name for name in every[1:] if name in allowed][:3]
        assert found["similar"].tolist() == left * 2
        assert found["rank"].tolist() == list(range(1, len(left) + 1)) * 2


def test_times_of_histories(trained: recbole_pos.Recommender) -> None:
    """Events are sorted by them; dates with a zone or in UTC, mixed with numbers, too."""
    mixed = {"items": ["i1", "i2", "i1"], "times": [9.0, 5.0, 1.0]}
    np.testing.assert_array_equal(*trained.encode([BASKET, mixed]))
    times = ["1970-01-02", "1970-01-02T01:00:00Z", "1970-01-02T02:00:00.5+01:00"]
    seconds = [86400, 90000, 90000.5]
    column = pa.array([[int(x * 1e6) for x in seconds]], pa.list_(pa.timestamp("us")))
    table = pa.table({"id": ["a"], "items": [["i1", "i2", "i3"]], "times": column})
    dated = [{"items": ["i1", "i2", "i3"], "times": x} for x in (times, [86400, *times[1:]])]
    for one in (*map(trained.read, ([dated[0]], [dated[1]])), trained.read(table)):
        np.testing.assert_array_equal(one.times, seconds)
    for wrong in ("yesterday", "", "2026-13-01", "5"):
        with pytest.raises(UsageError, match="histories.0..times"):
            trained.read([{"items": ["i1"], "times": [wrong]}])
    trained.__dict__["_unit"] = None  # the time field numbers interactions
    try:
        for histories in (dated[:1], table):
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


NONSENSE: list[Any] = [
    *(None, True, -1.5, float("nan"), 10**5000, "i1", "x" * 10**5, b"i1", object(), [[]]),
    *([], {}, {"items": "i1"}, ["i1", 5, "i2"], {"items": []}, {"item": ["i1"]}, ["i1", None]),
    *({"items": ["i1", "i2"], "times": [1]}, {"items": ["i1"], "times": [float("nan")]}),
    *({"items": ["i1"], "times": [10**400]}, {"items": ["i1"] * 9, "times": [-1e300] * 9}),
    *({"id": [1], "items": ["i1"]}, {1: 2, "items": []}, np.array(["i1"])),
    *({"items": ["i2", "i1"], "times": [9e9, -4]}, {"items": np.array([3]), "times": range(1)}),
]


def test_nonsense(trained: recbole_pos.Recommender) -> None:
    """Each request has an answer with items of the catalogue, or a short error."""
    rng, answered = random.Random(0), 0
    for _ in range(400):
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
    assert answered > 40


IDS = {f"i{n}": n + 1 for n in range(40)}


def sample_histories(seed: int, count: int = 50) -> list[dict[str, Any]]:
    """Return histories with unknown items, ties in time, and nothing."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(count):
        n = int(rng.integers(0, 20)) if number else 0
        items = [f"i{i}" for i in rng.integers(0, 50, n)]
        rows.append({"id": f"p{number}", "items": items, "times": rng.integers(0, 6, n).tolist()})
    return rows


def same(one: Histories, other: Histories) -> None:
    assert one.ids == other.ids
    for name in ("items", "lengths", "times", "unknown"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_columns_are_read_as_rows() -> None:
    """Arrays that do not begin at 0, of any type of text or number; what is not regular, too."""
    rows = sample_histories(1)
    without = [{k: v for k, v in row.items() if k != "times"} for row in rows]
    same(
        read_histories(pa.Table.from_pylist(without), IDS, False),
        read_histories(without, IDS, False),
    )
    table, want = pa.Table.from_pylist(rows).slice(3, 20), read_histories(rows[3:23], IDS, True)
    coded = pa.list_(pa.dictionary(pa.int32(), pa.string()))
    for kind in (pa.large_list(pa.large_string()), coded):
        same(
            read_histories(table.set_column(1, "items", table["items"].cast(kind)), IDS, True), want
        )
    number, ids = {"id": 7, "items": [3, 1, 99]}, {"1": 1, "3": 2}
    same(
        read_histories(pa.Table.from_pylist([number]), ids, False),
        read_histories([number], ids, False),
    )
    some = [{"id": "a", "items": ["i2", "i1"], "times": [5, 1]}, {"id": "b", "items": ["i3", "i1"]}]
    for given in (some, pa.Table.from_pylist(some)):  # sorted where there are times
        assert read_histories(given, IDS, False).items.tolist() == [2, 3, 4, 2]


@pytest.mark.parametrize(
    "columns",
    [
        {"id": [1.5], "items": [["i1"]]},
        {"id": ["a", "b"], "items": [["i1"], None]},
        {"id": ["a", "b"], "items": [["i1"], ["i1", None]]},
        {"id": ["a"], "items": ["i1"]},
        {"id": ["a"], "items": [[1.5]]},
        {"id": ["a", "b"], "items": [["i1"], ["i2"]], "times": [[1], [1, 2]]},
        {"id": ["a", "b"], "items": [[], ["i2"]], "times": [[], [np.nan]]},
        {"id": ["a"], "items": [["i2"]], "times": [["x"]]},
        {"id": ["a"], "items": [["i2"]], "times": [[1]], "at": [np.inf]},
        {"id": ["a"], "items": [["i1"]]},
        {"user": ["a"], "items": [["i1"]]},
    ],
    ids=str,
)
def test_columns_that_are_no_histories(columns: dict[str, list]) -> None:
    with pytest.raises(UsageError) as caught:
        read_histories(pa.table(columns), IDS, needs_time=True)
    assert str(caught.value).startswith("histories")


def test_parts_of_files(tmp_path: Path, monkeypatch: Any) -> None:
    """A folder of parquet in the order of names, of several row groups; json lines."""
    monkeypatch.setattr(module, "PART", 9)
    rows, folder, lines = [sample_histories(n) for n in range(2)], tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    for number, some in enumerate(rows):
        table = pa.Table.from_pylist(some)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=23)
    lines.write_text("\n".join(map(json.dumps, rows[0] + rows[1])))
    for file in (folder, lines):
        parts = list(read_parts(file))
        assert max(map(len, parts)) <= 9
        found = [read_histories(part, IDS, True) for part in parts]
        want = read_histories(rows[0] + rows[1], IDS, True)
        assert [name for part in found for name in part.ids] == want.ids
        for name in ("items", "lengths", "times", "unknown"):
            joined = np.concatenate([getattr(part, name) for part in found])
            np.testing.assert_array_equal(joined, getattr(want, name))
