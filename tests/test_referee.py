"""Splits that leave the package, predictions that come back, and audits: against plain loops."""

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from conftest import make_log, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.metrics import compute_gains
from recbole_pos.errors import UsageError
from recbole_pos.referee import judge as judging
from recbole_pos.referee import predictions as reading
from recbole_pos.referee.audit import audit, count_facts
from recbole_pos.referee.judge import (
    DUPLICATES,
    MISSING,
    SEEN_ITEMS,
    SHORT,
    UNKNOWN_ITEMS,
    UNKNOWN_REQUESTS,
    judge,
)
from recbole_pos.referee.predictions import open_predictions, write_lists
from recbole_pos.referee.split import DataSplit, Requests, make_requests, split

SPLITS: dict[str, dict[str, Any]] = {
    "leave-one-out": {},
    "by time": {"eval_args": {"split": {"GT": [0.7, 0.85]}}},
    "by time, seen excluded": {"eval_args": {"split": {"GT": [0.7, 0.85]}}, "mask_history": True},
    "sessions": {"eval_args": {"split": {"ST": [0.8, 0.9]}}},
    "ratios": {"eval_args": {"split": {"RS": [6, 2, 2]}}},
}


@pytest.fixture(scope="module", params=SPLITS)
def parts(request: pytest.FixtureRequest, tiny: Path) -> DataSplit:
    return split("tiny", data_path=str(tiny), **SPLITS[request.param])


@pytest.fixture(scope="module")
def requests(tiny: Path) -> Requests:
    """Several requests a user, with seen items excluded."""
    return open_requests(tiny, **SPLITS["by time, seen excluded"])


def open_requests(data_path: Path, part: str = "test", **options: Any) -> Requests:
    return make_requests(split("tiny", data_path=str(data_path), **options).dataset, part)


def sort_by_user(log: pd.DataFrame) -> dict[str, list[tuple[str, float]]]:
    """User -> items and times in order; rows of the same time stay in the order of the file."""
    events: dict[str, list[tuple[str, float]]] = {}
    for row in log.sort_values("timestamp", kind="stable").itertuples():
        events.setdefault(row.user_id, []).append((row.item_id, row.timestamp))
    return events


def test_a_folder_has_all_interactions_and_the_histories(parts: DataSplit, tmp_path: Path) -> None:
    folder = parts.to_folder(tmp_path / "split")
    events = sort_by_user(make_log())
    names = ("train", "valid", "test")
    frames = {name: pd.read_parquet(folder / f"{name}.parquet") for name in names}
    together = pd.concat(frames.values())
    for user, rows in events.items():
        found = together[together["user"] == user]
        assert list(zip(found["item"], found["time"], strict=True)) == rows
    protocol = json.loads((folder / "split.json").read_text())
    for part in ("valid", "test"):
        asked = pd.read_parquet(folder / f"{part}_requests.parquet")
        answers = pd.read_parquet(folder / f"{part}_targets.parquet")
        assert asked["request"].is_unique and asked["request"].equals(answers["request"])
        held_out = set(zip(frames[part]["user"], frames[part]["item"], strict=True))
        numbered = asked["user"] + "#" + (asked.groupby("user").cumcount() + 1).astype(str)
        assert asked["request"].tolist() in (asked["user"].tolist(), numbered.tolist())
        for row, item in zip(asked.itertuples(), answers["item"], strict=True):
            assert (row.user, item) in held_out
            past = events[row.user][: len(row.history)]
            assert list(zip(row.history, row.history_times, strict=True)) == past
            assert events[row.user][len(row.history)] == (item, row.time)
        assert protocol[part]["requests"] == len(asked)
        assert protocol[part]["digest"] == make_requests(parts.dataset, part).digest
    assert "Split" in (folder / "README.md").read_text()
    pd.testing.assert_frame_equal(parts.train, frames["train"])
    pd.testing.assert_frame_equal(parts.get_requests("test"), asked)


def test_the_digest_is_that_of_data_split_and_candidates(tiny: Path, tmp_path: Path) -> None:
    other = make_log()
    other.loc[0, "item_id"] = "i1" if other.loc[0, "item_id"] != "i1" else "i2"
    asked = [open_requests(tiny, **options) for options in SPLITS.values()]
    asked += [open_requests(tiny, "valid"), open_requests(write_atomic(other, tmp_path))]
    assert len({requests.digest for requests in asked}) == len(asked)
    assert open_requests(tiny).digest == asked[0].digest


def make_lists(requests: Requests, rng: np.random.Generator) -> pd.DataFrame:
    """Lists with ties, unknown, repeated and seen items; some are short, some missing."""
    rows = []
    for number, name in enumerate(requests.names):
        if number % 7 == 3:
            continue
        for _ in range(4 if number % 5 == 2 else 12):
            item = f"i{rng.integers(0, 44)}"  # i40 and later are unknown
            rows.append((name, item, float(rng.integers(0, 6))))
    rows += [("nobody", "i1", 1.0), ("nobody", "i2", 0.0)]
    frame = pd.DataFrame(rows, columns=["user_id", "item_id", "score"])
    return frame.sample(frac=1, random_state=0, ignore_index=True)


def find_ranks(frame: pd.DataFrame, requests: Requests) -> tuple[list[float], Counter[str]]:
    """The rank of each target and the faults of the lists, in plain loops."""
    ids = {name: index for index, name in enumerate(requests.item_names)}
    lists: dict[str, list[tuple[float, int, str]]] = {}
    for row in frame.itertuples():
        entry = -row.score, ids.get(row.item_id, 10**6), row.item_id
        lists.setdefault(row.user_id, []).append(entry)
    log, names = requests.dataset.log, requests.item_names
    longest = max(len(lists.get(name, [])) for name in requests.names)
    faults: Counter[str] = Counter()
    faults[UNKNOWN_REQUESTS] = len(frame) - sum(len(lists.get(name, [])) for name in requests.names)
    ranks = []
    for name, row in zip(requests.names, requests.target_rows.tolist(), strict=True):
        user = log.users[row]
        seen = {names[log.items[r]] for r in range(row) if log.users[r] == user}
        target, rank, earlier = names[log.items[row]], math.inf, set()
        mine = sorted(lists.get(name, []))
        faults[MISSING] += not mine
        faults[SHORT] += 0 < len(mine) < longest
        for place, (_, _, item) in enumerate(mine):
            if item not in ids:
                faults[UNKNOWN_ITEMS] += 1
            elif item in earlier:
                faults[DUPLICATES] += 1
            elif requests.excludes_seen and item in seen:
                faults[SEEN_ITEMS] += 1
            elif item == target:
                rank = place
            earlier.add(item)
        ranks.append(rank)
    return ranks, +faults  # without those that do not occur


@pytest.mark.parametrize("excludes_seen", [False, True])
def test_ranks_faults_and_metrics_in_loops(
    tiny: Path, excludes_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = open_requests(tiny, **SPLITS["by time"], mask_history=excludes_seen)
    frame = make_lists(requests, np.random.default_rng(3))
    want, faults = find_ranks(frame, requests)
    judgement = judge(open_predictions(frame), requests)
    assert judgement.counts == faults
    assert judgement.length == 12 and judgement.num_rows == len(frame)
    ranks = [rank if rank < len(requests.item_names) else math.inf for rank in judgement.ranks]
    assert ranks == want
    for k in (1, 5, 10):
        best = [rank for rank in want if rank < k]
        by_loop = {
            "hit": len(best),
            "ndcg": sum(1 / math.log2(rank + 2) for rank in best),
            "mrr": sum(1 / (rank + 1) for rank in best),
        }
        for metric, total in by_loop.items():
            gains = compute_gains(judgement.ranks, f"{metric}@{k}")
            assert gains.mean() == pytest.approx(total / len(want), abs=1e-12)
    # the same in blocks of few rows and of few requests
    monkeypatch.setattr(reading, "_BLOCK_ROWS", 50)
    monkeypatch.setattr(judging, "_BLOCK_ROWS", 100)
    in_blocks = judge(open_predictions(frame), requests)
    assert (in_blocks.ranks == judgement.ranks).all() and in_blocks.counts == judgement.counts


def test_only_frequent_faults_are_warnings(requests: Requests) -> None:
    frame = pd.DataFrame({"request": requests.names, "item": "i1", "rank": 1})
    half = judge(open_predictions(frame[: len(frame) // 2]), requests)
    assert any("requests without a list; they are misses" in text for text in half.warnings)
    rare = judge(open_predictions(frame.assign(item=["i99", *frame["item"][1:]])), requests)
    assert any("1 of" in text and "unknown items" in text for text in rare.list_faults())
    assert not any("unknown items" in text for text in rare.warnings)


def test_every_format_says_the_same(requests: Requests, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    length, names = 6, requests.names
    items = np.stack([rng.permutation(40)[:length] for _ in names])
    long = pd.DataFrame(
        {
            "user_id": np.repeat(names, length),
            "item_id": [f"i{i}" for i in items.reshape(-1)],
            "score": np.tile(np.linspace(2, -3, length), len(names)),
            "rank": np.tile(np.arange(1, length + 1), len(names)),
        }
    )
    shuffled = long.sample(frac=1, random_state=0)
    by_score = shuffled.drop(columns="rank")
    lists = pd.DataFrame({"request": names, "items": [[f"i{i}" for i in row] for row in items]})
    run = {name: {f"i{i}": -n for n, i in enumerate(row)} for name, row in zip(names, items)}  # noqa: B905
    sources: dict[str, Any] = {
        "RePlay": by_score.rename(columns={"user_id": "query_id", "score": "rating"}),
        "order of rows": long[["user_id", "item_id"]],
        "polars": pl.from_pandas(shuffled),
        "arrow": pl.from_pandas(lists).to_arrow(),
        "categories": shuffled.astype({"user_id": "category", "item_id": "category"}),
        "frame of ranx": by_score.set_axis(["q_id", "doc_id", "score"], axis=1),
        "ranx": run,
    }
    for name in ("long.parquet", "long.csv", "long.tsv", "run.json", "run.trec"):
        sources[name] = tmp_path / name
    shuffled.to_parquet(tmp_path / "long.parquet")
    by_score.to_csv(tmp_path / "long.csv", index=False)
    shuffled.to_csv(tmp_path / "long.tsv", index=False, sep="\t")
    (tmp_path / "run.json").write_text(json.dumps(run))
    lines = [f"{r.user_id} Q0 {r.item_id} 0 {r.score} tag\n" for r in shuffled.itertuples()]
    (tmp_path / "run.trec").write_text("".join(lines))
    want = judge(open_predictions(long), requests)
    assert (want.ranks < length).any()
    for name, source in sources.items():
        found = judge(open_predictions(source), requests)
        assert (found.ranks == want.ranks).all() and found.counts == want.counts, name


@pytest.mark.parametrize("model", ["PosSASRec", "Pop"])
def test_own_lists_give_the_own_table(trained: Any, tiny: Path, tmp_path: Path, model: str) -> None:
    """To the last digit, in every format that is written; with all items of a small catalogue."""
    run = trained(model, mask_history=True, **SPLITS["by time"])
    kept = pd.read_parquet(run / "test_ranks.parquet")
    requests = open_requests(tiny, **SPLITS["by time"], mask_history=True)
    for suffix in ("parquet", "csv", "run", "json"):
        file = write_lists(run, tmp_path / f"lists.{suffix}", k=30)
        judgement = judge(open_predictions(file), requests)
        table = requests.make_rank_table(judgement.ranks)
        columns = [column for column in kept if column != "rank"]
        pd.testing.assert_frame_equal(table[columns], kept[columns])
        for metric in ("ndcg@10", "hit@5", "mrr@20"):
            mine, theirs = (compute_gains(t["rank"].to_numpy(), metric) for t in (table, kept))
            assert (mine == theirs).all()
    assert pd.read_csv(write_lists(run, tmp_path / "all.csv"))["rank"].max() == 40
    with pytest.raises(UsageError, match="100 is more than the 40 items"):
        write_lists(run, tmp_path / "more.csv", k=100)
    with pytest.raises(UsageError, match="expected a name that ends in .parquet"):
        write_lists(run, tmp_path / "lists.txt")


BAD: dict[str, tuple[Any, str]] = {
    "no user": (lambda f: f.rename(columns={"user_id": "who"}), "found the columns who, item_id"),
    "matrix": (lambda f: np.zeros((3, 40)), r"ndarray of shape \(3, 40\)"),
    "NaN": (lambda f: f.assign(score=[0.5, np.nan, *f["score"][2:]]), "score: row 2 is NaN"),
    "float ids": (lambda f: f.assign(item_id=1.0), "decimals such as 1.0"),
    "other names": (lambda f: f.assign(user_id="x"), "no request: it has names such as 'x'"),
    "nothing": (lambda f: f[:0], "it has no row"),
    "other split": (lambda f: f.assign(split="0123"), "made for another split"),
    "a dict that is no ranx run": (lambda f: {"a": 3.0}, "expected a run as ranx writes it"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_predictions_are_named_in_one_line(name: str, requests: Requests) -> None:
    change, message = BAD[name]
    frame = pd.DataFrame({"user_id": requests.names, "item_id": "i1", "score": 1.0})
    with pytest.raises(UsageError, match=message) as raised:
        judge(open_predictions(change(frame)), requests)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_bad_files_are_named(requests: Requests, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file of predictions"):
        open_predictions(tmp_path / "none.csv")
    for name, content in (("a.parquet", b"PAR1"), ("c.csv", b"user_id,item_id\n1")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"{name} cannot be read"):
            judge(open_predictions(tmp_path / name), requests)
    # a file within an exported folder belongs to the split of that folder
    folder = split("tiny", data_path=str(tiny)).to_folder(tmp_path / "split")
    frame = pd.DataFrame({"request": requests.names, "item": "i1"})
    frame.to_parquet(folder / "mine.parquet")
    with pytest.raises(UsageError, match="made for another split"):
        judge(open_predictions(folder / "mine.parquet"), requests)


def test_a_dataset_of_a_frame_is_split() -> None:
    data = recbole_pos.Dataset.from_frame(make_log())
    parts = data.split(eval_args={"split": {"LS": "test_only"}})
    assert len(parts.train) + len(parts.test) == len(make_log()) and not len(parts.valid)
    with pytest.raises(UsageError, match="has no valid targets"):
        parts.get_requests("valid")


def test_the_commands(trained: Any, tiny: Path, tmp_path: Path, capsys: Any, refused: Any) -> None:
    """Split, the lists of a run, and these scored beside it."""
    run = trained("PosSASRec", mask_history=True, **SPLITS["by time"])
    words = ["--data_path", str(tiny), "--eval_args.split={GT: [0.7, 0.85]}", "--mask_history=True"]
    folder, lists = tmp_path / "split", tmp_path / "split" / "mine.csv"
    assert main(["split", "tiny", "--to", str(folder), *words]) == 0
    assert main(["lists", str(run), "--out", str(lists), "-k", "10"]) == 0
    capsys.readouterr()
    assert main(["score", str(lists), "-d", "tiny", "--metrics", "ndcg@5", *words]) == 0
    alone = capsys.readouterr().out
    out = ["--out", str(tmp_path / "out")]
    assert main(["score", str(lists), str(lists), "--runs", str(run), "--name", "Mine", *out]) == 0
    assert "Mine" in (tmp_path / "out" / "table.md").read_text()
    beside = capsys.readouterr().out
    mean = json.loads((run / "result.json").read_text())["test"]["ndcg@5"]
    assert f"{mean:.4f}" in alone and f"{mean:.4f}" in beside and "Mine" in beside
    refused(["score", lists, "-d", "tiny", "--metrics", "ndcg@20", *words], "ndcg@20", "10 items")
    refused(["score", lists, "-d", "tiny", "--data_path", tiny], "made for another split")
    refused(["score", lists], "dataset: none given")
    refused(["score", lists, "-d", "tiny", "--metrics", "gauc", *words], "gauc does not follow")
    refused(["score", lists, "--runs", run, "--name", "PosSASRec"], "give another")


def test_predictions_in_a_study(
    trained: Any, tiny: Path, tmp_path: Path, trains_here: None
) -> None:
    """With the intervals of rows that are trained, and their own seeds."""
    file = write_lists(trained("PosSASRec", **SPLITS["by time"]), tmp_path / "a.parquet", k=10)
    study: dict[str, Any] = {
        "dataset": "tiny",
        "base": {**SPLITS["by time"], "data_path": str(tiny)},
        "rows": {
            "Pop": {"model": "Pop"},
            "A": {"predictions": str(file)},
            "B": {"predictions": {7: str(file), 8: str(file)}},
        },
        "seeds": 2,
    }
    compared = recbole_pos.compare(study, run_dir=tmp_path / "study", verbose=False)
    means = compared.table[compared.table["metric"] == "ndcg@10"].set_index("row")["mean"]
    kept = pd.read_parquet(trained("PosSASRec", **SPLITS["by time"]) / "test_ranks.parquet")
    want = compute_gains(kept["rank"].to_numpy(), "ndcg@10").mean()
    assert means["A"] == means["B"] == pytest.approx(want, abs=1e-12)
    assert list(compared.pairs["row"]) == ["A", "B"] and compared.pairs["low"].notna().all()
    assert compared.runs.groupby("row").size().to_dict() == {"Pop": 2, "A": 1, "B": 2}
    assert "not finished" not in (tmp_path / "study" / "report.html").read_text()

    def refuse(message: str, known: Any = (), **changes: Any) -> None:
        how = {"run_dir": tmp_path / "other", "known": known, "verbose": False}
        with pytest.raises(UsageError, match=message):
            recbole_pos.compare({**study, **changes}, **how)

    # Kept ranks stand in for files that are gone, where the split is the same.
    kept_ranks = tmp_path / "kept"
    recbole_pos.compare(study, run_dir=tmp_path / "study", pack=kept_ranks, verbose=False)
    moved = file.rename(tmp_path / "moved.parquet")
    kept_alone = {"known": (kept_ranks,), "report": True, "verbose": False}
    again = recbole_pos.compare(study, run_dir=tmp_path / "again", **kept_alone)
    pd.testing.assert_frame_equal(again.table, compared.table)
    pd.testing.assert_frame_equal(again.pairs, compared.pairs)
    other_split = {**study["base"], "mask_history": True}
    refuse("not a file", base=other_split, known=(kept_ranks,))
    moved.rename(file)

    refuse("a.parquet has 10 items a request", metrics=["ndcg@20"])
    refuse("not a file", rows={**study["rows"], "A": {"predictions": "none.csv"}})
    pop = {"model": "Pop", "mask_history": True}
    refuse("mask_history: Pop ranks", rows={**study["rows"], "Pop": pop})


# --- the audit, baselines with times, and docs/referee.md ---


DOCS = Path(__file__).parent.parent / "docs" / "referee.md"


def test_the_audit_in_loops(tiny: Path, tmp_path: Path) -> None:
    log = make_log()
    log["timestamp"] //= 4  # so that some are equal
    log = pd.concat([log, log.iloc[-40:]], ignore_index=True)  # exact copies
    data_path = write_atomic(log, tmp_path)
    requests = open_requests(data_path, eval_args={"split": {"GT": [0.7, 0.8]}})
    facts = count_facts(requests)
    ordered = log.sort_values("timestamp", kind="stable")
    events = {user: rows for user, rows in ordered.groupby("user_id")}
    first, second = np.quantile(log["timestamp"], [0.7, 0.8])
    train = log[log["timestamp"] <= first]
    counts: Counter[str] = Counter()
    for rows in events.values():
        items, times = rows["item_id"].tolist(), rows["timestamp"].tolist()
        for row in range(1, len(items)):
            if times[row] <= second:
                continue
            counts["targets"] += 1
            counts["targets of cold users"] += rows["user_id"].iloc[0] not in set(train["user_id"])
            counts["targets of cold items"] += items[row] not in set(train["item_id"])
            counts["repeated targets"] += items[row] in items[:row]
            counts["targets that repeat the item before"] += items[row] == items[row - 1]
            at_once = {i for i, t in zip(items, times, strict=True) if t == times[row]}
            counts["targets at a tie"] += len(at_once) > 1
            earlier = zip(items[:row], times[:row], strict=True)
            counts["copied targets"] += (items[row], times[row]) in earlier
    assert counts.pop("targets") == len(requests)
    assert {**dict.fromkeys(facts, 0), **counts} == facts

    found = audit("tiny", data_path=str(data_path))
    page = str(found)
    for fact in ("copied targets", "targets at a tie", "repeated targets"):
        assert f"| {fact} |" in page and f"**{fact}**" in page
    assert found.counts["targets with later training interactions"]["by time"] == 0
    assert [len(levels) for levels in found.levels["Pop"].values()] == [4, 1] and " to " in page
    assert audit(log, eval_args={"split": {"LS": "test_only"}}).num_interactions == len(log)


def ranked_scores(experiment: Any) -> Any:
    """History, its times' rows and scores [items] of every test target."""
    for rows, *_ in experiment.loaders["test"]:
        scores = experiment.model.full_sort_predict(rows)
        for row in range(len(rows)):
            length = int(rows["item_length"][row])
            yield rows["item_id_list"][row, :length].tolist(), scores[row].detach().numpy()


def collect_training(experiment: Any) -> dict[int, list[tuple[int, float]]]:
    """User -> items and times of the training interactions, in order."""
    dataset, events = experiment.dataset, defaultdict(list)
    for user, item, time, part in zip(
        dataset.log.users.tolist(),
        dataset.log.items.tolist(),
        dataset.log.times.tolist(),
        dataset.part.tolist(),
        strict=True,
    ):
        if part == 0:
            events[user].append((item, time))
    return events


def test_popularity_of_the_newest_days_in_loops(experiment: Any) -> None:
    days = 60 / 86_400  # the times of the log are within 200 seconds
    made = experiment("RecentPop", window_days=days)
    events = [event for rows in collect_training(made).values() for event in rows]
    newest = max(time for _, time in events)
    recent = Counter(item for item, time in events if newest - time <= 60)
    overall = Counter(item for item, _ in events)
    _, scores = next(ranked_scores(made))
    assert 0 < sum(recent.values()) < len(events)
    assert [int(score) for score in scores] == [recent[item] for item in range(len(scores))]
    ranking = sorted(range(1, len(scores)), key=lambda item: -scores[item])
    keys = [(-recent[item], -overall[item]) for item in ranking]
    assert keys == sorted(keys)


def test_tale_in_loops(experiment: Any) -> None:
    options = {"tau_train": 50 / 86_400, "tau_inf": 2.0, "time_floor": 0.3, "reg_weight": 5.0}
    made = experiment("TALE", MAX_ITEM_LIST_LENGTH=6, **options)
    size, training = made.dataset.item_num, collect_training(made)
    sources, targets = [], []
    for rows in training.values():
        for row in range(1, len(rows)):
            source, target = np.zeros(size), np.zeros(size)
            for item, time in rows[max(row - 6, 0) : row]:
                source[item] += max(math.exp(-(rows[row][1] - time) / 50), 0.3)
            target[rows[row][0]] = 1
            sources.append(source)
            targets.append(target)
    s, t = np.stack(sources), np.stack(targets)
    weights = np.linalg.solve(s.T @ s + 5 * np.eye(size), s.T @ t)
    for history, scores in ranked_scores(made):
        query = np.zeros(size)
        for position, item in enumerate(reversed(history)):
            query[item] = max(query[item], math.exp(-position / 2))
        np.testing.assert_allclose(scores, query @ weights, rtol=1e-4, atol=1e-6)


def test_examples_of_the_page(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames that other toolkits take, and files of parts that give the same targets."""
    monkeypatch.chdir(tmp_path)
    parts = split("tiny", data_path=str(tiny))
    parts.to_folder("shop-split")
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    rectools, replay, recbole = ({} for _ in range(3))
    for code, names in zip(blocks, (rectools, replay, recbole), strict=True):
        exec(code, names)
    interactions, log = rectools["interactions"], replay["log"]
    assert list(interactions) == ["user_id", "item_id", "weight", "datetime"]
    assert {"query_id", "item_id", "timestamp", "rating"} <= set(log)
    assert len(interactions) == len(log) == len(parts.train)
    assert interactions["datetime"].dt.year.between(2017, 2018).all()
    given = split("parts", data_path=str(tmp_path), benchmark_filename=["train", "valid", "test"])
    for part in ("valid", "test"):
        pd.testing.assert_frame_equal(given.get_targets(part), parts.get_targets(part))
    assert len(DOCS.read_text().split()) <= 800
