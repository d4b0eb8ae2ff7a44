"""Recommendations: scores by hand, any history, files, what may be recommended, nonsense."""

import json
import os
import signal
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import CROSS_ENTROPY, SMALL, fork, small

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare, read_dataset
from recbole_pos.experiment.checkpoint import extract_weights, load_weights
from recbole_pos.model.models import MODELS
from recbole_pos.serve.histories import read_histories, read_moment
from recbole_pos.serve.recommend import read_file
from recbole_pos.serve.recommender import Recommender


@pytest.fixture(scope="module")
def runs(trained: Callable[..., Path]) -> dict[str, Path]:
    """A model of each kind: reads order, reads times, RecBole's sequential, RecBole's general."""
    names = ("PosSASRec", "TORoPE", "SASRec", "BPR")
    return {name: trained(name, eval_batch_size=7) for name in names}


@pytest.fixture(scope="module")
def torope(runs: dict[str, Path]) -> Recommender:
    return Recommender.load(runs["TORoPE"])


def interactions(folder: Path) -> dict[str, pd.DataFrame]:
    log = pd.read_csv(folder / "tiny" / "tiny.inter", sep="\t")
    log.columns = [column.split(":")[0] for column in log]
    return dict(list(log.sort_values("timestamp", kind="stable").groupby("user_id")))


def as_history(log: pd.DataFrame) -> dict[str, list]:
    """The interactions of one user as a history that a caller gives."""
    return {"items": list(log["item_id"]), "times": list(log["timestamp"].astype(float))}


# --- users of the data ---


def test_fit_returns_the_best_epoch(tiny: Path, tmp_path: Path) -> None:
    """Also where no test has loaded it."""
    options = {**SMALL, "epochs": 3, "learning_rate": 0.5, "run_dir": tmp_path / "run"}
    options["embedding_scale"] = False
    options |= {"eval_args": {"split": {"LS": "valid_only"}}, "verbose": False}
    trained = recbole_pos.fit("PosSASRec", tiny / "tiny", **options)
    assert trained.result is not None and trained.result.best_epoch < 2
    again = recbole_pos.load(tmp_path / "run")
    pd.testing.assert_frame_equal(trained.recommend(["u7"]), again.recommend(["u7"]))


QUICK = ("PosSASRec", "TORoPE", "KernelAttention", "PosRec", "SessionKNN", "NARM", "BPR", "Pop")
LONG = [name for name in MODELS if name not in (*QUICK, "AttrFormer")]


@pytest.mark.parametrize(
    ("model", "more"),
    [
        *((model, {}) for model in QUICK),
        *(pytest.param(model, {}, marks=pytest.mark.long) for model in LONG),
        ("AttrFormer", {"inference_relations": "training_bank"}),
        ("AttrFormer", {"inference_relations": "own", "cross_sequence": "time_respecting"}),
        ("AttrFormer", {"inference_relations": "own", "chunking": False}),
    ],
    ids=str,
)
def test_what_comes_next_is_asked_as_a_test_target_is(tiny: Path, model: str, more: dict) -> None:
    """Without the test events, what comes next is what they were: the same rows and scores.

    By name and by a given history, many of which are longer than the window.
    """
    config = small(model, data_path=str(tiny), **CROSS_ENTROPY.get(model, {}), **more)
    dataset = read_dataset(config)
    known = prepare(config, dataset=dataset)
    known.trainer._train_epoch(known.trainer.training_loader(known.loaders["train"]), 0)
    known.model.eval()
    before = prepare(config, dataset=dataset.without_test())
    load_weights(before.model, extract_weights(known.model))
    before.model.eval()
    asked = Recommender(before)
    every = torch.arange(dataset.item_num)
    histories = {user: as_history(log[:-1]) for user, log in interactions(tiny).items()}
    num_long = 0  # given histories that are longer than the window
    for rows, *_ in known.loaders["test"]:
        names = dataset.field2id_token["user_id"][rows["user_id"]]
        with torch.inference_mode():
            scores = known.model.full_sort_predict(rows).view(len(rows), -1)
            found = asked.scorer.make_scores(asked.read_users(names))(every)
        torch.testing.assert_close(found, scores)
        if asked.by_user:
            continue
        packed = asked.read([histories[name] for name in names])
        num_long += int((packed.lengths > SMALL["MAX_ITEM_LIST_LENGTH"]).sum())
        with torch.inference_mode():
            found = asked.scorer.make_scores(packed)(every)
        torch.testing.assert_close(found, scores)
    assert asked.by_user or num_long > 9


@pytest.mark.parametrize("model", ["PosSASRec", "BPR"])
def test_seen_items_are_excluded(tiny: Path, runs: dict[str, Path], model: str) -> None:
    """All of them, the newest too; where nothing else is left there are fewer rows."""
    found = recbole_pos.recommend(runs[model], k=40, mask_history=True)
    for user, events in interactions(tiny).items():
        left = set(found.loc[found["user_id"] == user, "item_id"])
        assert left == {f"i{n}" for n in range(40)} - set(events["item_id"])
    default = recbole_pos.recommend(runs[model], k=40)  # as the run was evaluated
    assert len(default) == (len(found) if model == "BPR" else 40 * len(interactions(tiny)))


def test_chosen_users(runs: dict[str, Path]) -> None:
    every = recbole_pos.recommend(runs["BPR"], k=3).set_index("user_id")
    found = recbole_pos.recommend(runs["BPR"], ["u9", "u2", "u9", "u30"], k=3).set_index("user_id")
    pd.testing.assert_frame_equal(found, every.loc[["u9", "u2", "u30"]])
    for users in (["no one", "u1", "x"], [1.5], {"u1": 1}):
        with pytest.raises(UsageError, match="^users: "):
            recbole_pos.recommend(runs["BPR"], users)
    for k in (0, "3"):
        with pytest.raises(UsageError, match=f"k: .*found {k!r}"):
            recbole_pos.recommend(runs["BPR"], k=k)


def test_the_command_writes_the_table(runs: dict[str, Path], tmp_path: Path, capsys, refused):
    """Into the folder of the run, or into --out, which a refused command does not create."""
    run_dir = runs["PosSASRec"]
    assert main(["recommend", str(run_dir), "-k", "2"]) == 0
    file = run_dir / "recommendations.csv"
    assert str(file) in capsys.readouterr().out
    wanted = recbole_pos.recommend(run_dir, k=2)
    pd.testing.assert_frame_equal(pd.read_csv(file), wanted, check_dtype=False, rtol=1e-5)
    out = tmp_path / "some where.csv"
    assert main(["recommend", str(run_dir), "--users", "u3", "--mask_history", f"--out={out}"]) == 0
    assert len(pd.read_csv(out)) == 10
    for words, named in (
        (["-k", "0"], "k: "),
        (["--topk=5"], "--topk"),
        (["--out", tmp_path / "none" / "a.csv"], "none"),
        (["--out", tmp_path / "a.jsonl"], "expected a name that ends in .csv or .parquet"),
        (["--items", __file__], "no item is left to recommend"),
    ):
        refused(["recommend", run_dir, *words], named)
    refused(["recommend", tmp_path], "run folder")
    assert list(tmp_path.iterdir()) == [out]


def test_a_command_ends_in_silence_when_nobody_reads_it(runs: dict[str, Path]) -> None:
    """As after `| head`."""
    unread, stdout = os.pipe()
    os.close(unread)
    ended = fork(lambda: main(["similar", str(runs["PosSASRec"]), "i1"]), stdout)
    os.close(stdout)
    assert ended.returncode == 128 + signal.SIGPIPE and not ended.stderr


# --- histories ---

BASKET = {"id": "b", "items": ["i1", "i2", "i1"], "times": [1.0, 5.0, 9.0]}


def test_what_may_be_recommended(torope: Recommender) -> None:
    def items(**given: Any) -> list[str]:
        given = {"exclude_seen": False, **given}
        return torope.recommend(histories=[BASKET], **given)["item"].tolist()

    every = items(k=len(torope.items))
    assert sorted(every) == sorted(torope.items)
    allowed = ["i3", "i1", "never heard of", "i9", "i4"]
    assert items(k=9, allowed=allowed) == [i for i in every if i in allowed]
    assert items(k=3, excluded=every[:2]) == every[2:5]
    assert items(k=10**6) == every and len(torope.similar("i1", k=10**6)) == len(every) - 1
    assert items(k=1, boosts={every[-1]: 1e6}) == [every[-1]]
    assert items(k=9, allowed=["i1"], exclude_seen=True) == []
    popular = torope.recommend(histories=[[]], k=2, allowed=["i3", "i4"])
    assert set(popular["by"]) == {"popularity"} and set(popular["item"]) == {"i3", "i4"}
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"allowed": ["never heard of"]}, "allowed.*: no item is left"),
        ({"excluded": torope.items}, "excluded.*: no item is left"),
        ({"boosts": {"i1": float("nan")}}, "boosts: 'i1'"),
    )
    for given, named in wrong:
        with pytest.raises(UsageError, match=named):
            items(**given)


def test_a_history_may_have_lists_of_its_own(torope: Recommender) -> None:
    """Beside those of the request, for the most popular items too, with reasons and in any form."""
    every = torope.recommend(histories=[BASKET], k=40, exclude_seen=False)["item"].tolist()
    histories = [
        {**BASKET, "id": "all", "allowed": None, "excluded": None},
        {**BASKET, "id": "some", "allowed": ["i9", "new", "i3", "i4"], "excluded": ["i4"]},
        {**BASKET, "id": "rest", "excluded": [*every[:2], "new"]},
        {"id": "popular", "items": [], "times": [], "allowed": ["i4"]},
        {**BASKET, "id": "none", "allowed": ["new"]},
    ]
    expected = {
        "all": [item for item in every if item != "i5"],
        "some": [item for item in every if item in ("i9", "i3")],
        "rest": [item for item in every[2:] if item != "i5"],
        "popular": ["i4"],
    }
    for given in (histories, pa.Table.from_pylist(histories), pd.DataFrame(histories)):
        found = torope.recommend(histories=given, k=40, exclude_seen=False, excluded=["i5"])
        assert found.groupby("id")["item"].agg(list).to_dict() == expected
    alone = {"allowed": ["i9", "i3"], "because": 2}
    pd.testing.assert_frame_equal(
        torope.recommend(histories=histories[1:2], because=2),
        torope.recommend(histories=[{**BASKET, "id": "some"}], **alone),
    )


def test_scores_are_products_of_vectors(torope: Recommender) -> None:
    names, vectors = torope.item_vectors()
    state = torope.encode([BASKET, {"items": []}])
    assert not state[1].any()
    found = torope.recommend(histories=[BASKET], k=5, exclude_seen=False)
    scores = dict(zip(names, vectors @ state[0], strict=True))
    np.testing.assert_allclose([scores[i] for i in found["item"]], found["score"], rtol=1e-4)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = dict(zip(names, unit @ unit[list(names).index("i7")], strict=True))
    best = sorted(set(names) - {"i7"}, key=cosine.__getitem__, reverse=True)[:3]
    near = torope.similar("i7", k=3)
    assert near["similar"].tolist() == best and set(near["item"]) == {"i7"}
    with pytest.raises(UsageError, match="item 'i07' is not known"):
        torope.similar("i07")


def test_times_of_histories(torope: Recommender) -> None:
    """Events are sorted by them; dates with a zone or in UTC, mixed with numbers, too."""
    mixed = {"items": ["i1", "i2", "i1"], "times": [9.0, 5.0, 1.0]}
    np.testing.assert_array_equal(*torope.encode([BASKET, mixed]))
    dates, seconds = ["1970-01-02T01:00:00Z", "1970-01-02T02:00:00.5+01:00"], [90000, 90000.5]
    column = pa.array([[int(x * 1e6) for x in seconds]], pa.list_(pa.timestamp("us")))
    table = pa.table({"id": ["a"], "items": [["i1", "i2"]], "times": column})
    dated = [{"items": ["i1", "i2"], "times": x} for x in (dates, [90000, dates[1]])]
    for given in (dated[:1], dated[1:], table):
        np.testing.assert_array_equal(torope.read(given).times, seconds)
    day, midnight = date(2015, 1, 1), "2015-01-01T00:00:00Z"
    for same in (day, np.datetime64(day, "ns")):  # beside a number, too
        found = [torope.read([{"items": ["i1", "i2"], "times": [1, x]}]) for x in (same, midnight)]
        assert found[0].times.tolist() == found[1].times.tolist()
        assert read_moment(same, 1.0) == read_moment(midnight, 1.0)
    for wrong in ("yesterday", "2026-13-01", "5", pd.NaT):
        with pytest.raises(UsageError, match="histories.0..times"):
            torope.read([{"items": ["i1"], "times": [wrong]}])
    with pytest.raises(UsageError, match="times"):  # the time field numbers interactions
        read_histories(dated[:1], IDS, True, unit=None)


WRONG: list[tuple[Any, str]] = [
    ("SKU-001", r"; found 'SKU-001'$"),
    ({"item": ["i1"]}, r": 'item' is not .*did you mean items\?"),
    ({"id": 3}, r"\.items: Field required"),
    (["i1", 1.5], r"\.items\[1\]: Input should be a valid"),
    ([True], r"\.items\[0\]: Input should be a valid"),
    ({"items": ["i1", "i2"], "times": [1]}, r"\.times"),
    ({"items": ["i1"], "times": [float("nan")]}, r"\.times"),
    ({"items": ["i1"], "times": 3}, r"\.times: Input should be a valid list; found 3$"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=str)
def test_a_wrong_history_is_a_short_error(torope: Recommender, wrong: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^histories\[1\].*{message}") as caught:
        torope.recommend(histories=[BASKET, wrong])
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


# --- files and columns ---


def test_files_of_histories_and_names(runs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    """Json lines and parquet, to csv and parquet; no cell of a csv file begins a formula."""
    ids = ["=1+1", "+a", "-3", "@x", "\tq", "plain", "6"]
    rows = [{"id": name, "items": ["i1", "i2"], "times": [1, 5]} for name in ids[:-1]]
    rows.append({"id": "6", "items": ["x"], "times": [1]})
    (tmp_path / "h.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "h.parquet")
    (tmp_path / "stock.txt").write_bytes(b"\xef\xbb\xbfi1\r\n\r\ni3\nnever\n")
    for given in ("h.jsonl", "h.parquet"):
        for name in ("o.csv", "o.parquet"):
            command = ["recommend", str(runs["TORoPE"]), "-k2", f"--items={tmp_path / 'stock.txt'}"]
            files = [f"--histories={tmp_path / given}", f"--out={tmp_path / name}"]
            assert main([*command, *files]) == 0
        table, cells = pd.read_parquet(tmp_path / "o.parquet"), pd.read_csv(tmp_path / "o.csv")
        assert set(table["item"]) == {"i1", "i3"}
        assert table["id"].tolist() == [name for name in ids for _ in range(2)]
        quoted = ["'=1+1", "'+a", "-3", "'@x", "'\tq", "plain", "6"]
        assert cells["id"].astype(str).tolist()[::2] == quoted
        out = capsys.readouterr().out
        assert "1 items of histories are not known to the model" in out
        assert "1 of 7 get the most popular items" in out


def test_files_that_are_no_histories(runs: dict[str, Path], tmp_path: Path, refused) -> None:
    """One line, exit 2, and no file is left; of none, a table without rows."""
    given, out = tmp_path / "given.jsonl", tmp_path / "out.csv"
    damaged, run_dir = tmp_path / "damaged.parquet", str(runs["TORoPE"])
    pq.write_table(pa.table({"id": ["a"], "items": [["i1"]]}), damaged)
    whole = damaged.read_bytes()
    texts = (b"{}", b'{"items": ["i1"]}', b'{"items": ')
    cases = [*((given, text) for text in texts), (damaged, whole), (damaged, whole[:100])]
    for file, content in cases:
        file.write_bytes(content)
        refused(["recommend", run_dir, f"--histories={file}", f"--out={out}"])
        assert not out.exists()
    given.write_text("")
    for out, read in ((tmp_path / "o.csv", pd.read_csv), (tmp_path / "o.parquet", pd.read_parquet)):
        assert main(["recommend", run_dir, f"--histories={given}", f"--out={out}"]) == 0
        assert list(read(out)) == ["id", "rank", "item", "score", "by"] and not len(read(out))
    assert pq.read_schema(out).field("item").type == pa.string()


IDS = {f"i{n}": n + 1 for n in range(40)}
READER: Any = SimpleNamespace(read=lambda histories: read_histories(histories, IDS, True))


def test_every_form_is_read_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames; tables of any type of text, that do not begin at 0; files, in parts."""
    polars = pytest.importorskip("polars")
    monkeypatch.setattr("recbole_pos.serve.recommend.PART", 9)
    rng, rows = np.random.default_rng(1), []
    for number, n in enumerate([0, *rng.integers(0, 20, 49)]):  # with unknown items and ties
        items, times = rng.integers(0, 50, n), rng.integers(0, 6, n)
        rows.append({"id": f"p{number}", "items": [f"i{i}" for i in items], "times": list(times)})
    table = pa.Table.from_pylist(rows)
    coded = table["items"].cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))
    (tmp_path / "folder").mkdir()
    pq.write_table(table[:20], tmp_path / "folder" / "1.parquet", row_group_size=13)
    pq.write_table(table[20:], tmp_path / "folder" / "2.parquet")
    lines = [json.dumps({**row, "times": list(map(int, row["times"]))}) for row in rows]
    (tmp_path / "lines").write_text("\n".join(lines))
    want = read_histories(rows, IDS, True)
    frame = pd.DataFrame(rows)
    for parts in (
        [frame],
        [frame.set_index("id").rename_axis("user")],  # as groupby(...).agg leaves it
        [polars.DataFrame(table.to_pylist())],
        [[{**row, "times": pd.Series(row["times"], dtype=float)} for row in rows]],
        [pa.concat_tables([table[:3], table]).combine_chunks()[3:]],
        [table.set_column(1, "items", table["items"].cast(pa.large_list(pa.large_string())))],
        [table.set_column(1, "items", coded)],
        read_file(READER, str(tmp_path / "folder")),
        read_file(READER, str(tmp_path / "lines")),
    ):
        found = [READER.read(x) if isinstance(parts, list) else x for x in parts]
        assert len(found) == 1 or max(map(len, found)) <= 9
        assert [name for part in found for name in part.ids] == want.ids
        for name in ("items", "lengths", "times", "unknown"):
            joined = np.concatenate([getattr(part, name) for part in found])
            np.testing.assert_array_equal(joined, getattr(want, name))


def test_histories_without_ids_are_numbered(tmp_path: Path, monkeypatch) -> None:
    """In every form alike, and through all parts of a file."""
    monkeypatch.setattr("recbole_pos.serve.recommend.PART", 2)
    table = pa.table({"items": [["i1"], ["i2", "i1"], ["i3"]], "times": [[1], [5, 2], [3]]})
    for given in (table, table.to_batches()[0], table.to_pandas()):
        found = READER.read(given)
        assert found.ids == [0, 1, 2] and found.times.tolist() == [1, 2, 5, 3]
    named = table.append_column("id", pa.array(["a", None, "c"]))
    assert READER.read(named).ids == ["a", 1, "c"]
    pq.write_table(table, tmp_path / "h.parquet")
    parts = read_file(READER, str(tmp_path / "h.parquet"))
    assert [part.ids for part in parts] == [[0, 1], [2]]


def test_histories_without_times() -> None:
    """Names may be numbers; of several, those with times are sorted by them."""
    number, ids = {"id": 7, "items": [3, 1, 99]}, {"1": 1, "3": 2}
    some = [{"id": "a", "items": ["i2", "i1"], "times": [5, 1]}, {"id": "b", "items": ["i3", "i1"]}]
    for read in (list, pa.Table.from_pylist, pd.DataFrame):
        assert read_histories(read([number]), ids, False).items.tolist() == [2, 1]
        # a frame has NaN for none
        assert read_histories(read(some), IDS, False).items.tolist() == [2, 3, 4, 2]
        asked = read_histories(read([{**number, "at": 9.0}, number]), ids, False).at
        np.testing.assert_array_equal(asked, [9.0, np.nan])
    for histories in ([{**number, "at": np.nan}], pa.table({"items": [[3]], "at": [np.nan]})):
        with pytest.raises(UsageError, match=r"\[0\].at: expected a finite number.*found nan"):
            read_histories(histories, ids, False)
    log = pd.DataFrame({"user": ["b", "a", "b"], "item": ["i1", "i2", "i3"]})
    lists = log.groupby("user")["item"].agg(list)
    found = read_histories(lists, IDS, False)
    assert found.ids == ["a", "b"] and found.lengths.tolist() == [1, 2]
    pair = {"id": ["a"], "items": [["i1", "i2"]]}
    for given, named in (
        (lists, "the model reads times"),
        (log, "items"),  # a row an interaction
        (pa.table({**pair, "times": [[1]]}), r"^histories\[0\]"),
        (pa.table({**pair, "time": [[1, 2]]}), "found id, items, time .did you mean times"),
    ):
        with pytest.raises(UsageError, match=named):
            read_histories(given, IDS, True)
