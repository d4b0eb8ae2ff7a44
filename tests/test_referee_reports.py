"""The audit, baselines with times, and docs/referee.md."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_log, write_atomic

from recbole_pos.referee.audit import audit, count_facts
from recbole_pos.referee.split import make_requests, split

DOCS = Path(__file__).parent.parent / "docs" / "referee.md"


def test_the_audit_in_loops(tiny: Path, tmp_path: Path) -> None:
    log = make_log()
    log["timestamp"] //= 4  # so that some are equal
    log = pd.concat([log, log.iloc[-40:]], ignore_index=True)  # exact copies
    data_path = write_atomic(log, tmp_path)
    requests = make_requests(
        split("tiny", data_path=str(data_path), eval_args={"split": {"GT": [0.7, 0.8]}}).dataset
    )
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
            counts["copied targets"] += (items[row], times[row]) in list(
                zip(items[:row], times[:row], strict=True)
            )
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
