"""What ``make bench-quality`` counts: ranks of held-out items, and seconds of training alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TABLE = pd.DataFrame(
    {
        "user_id": [1] * 6 + [2] * 4 + [3] * 5,
        "item_id": [10, 11, 12, 10, 13, 14, 11, 12, 99, 10, 13, 12, 11, 11, 12],
        "timestamp": [*range(6), *range(4), *range(5)],
    }
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quality

    yield quality
    mine = ("data", "peers", "quality", "peer_workers", "peer_workers.common")
    for name in mine:
        sys.modules.pop(name, None)


@pytest.fixture
def job(bench: Any, tmp_path: Path) -> Any:
    events = bench.training_events(TABLE, 3)
    events.to_csv(tmp_path / "events.csv", index=False)
    bench.next_events(TABLE, events).to_csv(tmp_path / "next.csv", index=False)
    files = {"events": tmp_path / "events.csv", "held_out": tmp_path / "next.csv"}
    return bench.Job(**{k: str(v) for k, v in files.items()}, length=3, targets=4, patience=2)


def test_what_is_held_out_comes_next(bench: Any) -> None:
    events = bench.training_events(TABLE, 3)
    assert events.groupby("user_id")["item_id"].agg(list).to_dict() == {
        1: [10, 11, 12, 10],
        2: [11, 12],
        3: [13, 12, 11],
    }
    found = bench.next_events(TABLE, events).set_index("user_id")["item_id"]
    assert found.to_dict() == {1: 13, 2: 99, 3: 11}


@pytest.mark.parametrize("padding", [0, 5])  # the side's number before or after those of the items
def test_ndcg_by_hand(bench: Any, job: Any, padding: int) -> None:
    ids = {item: number + (padding == 0) for number, item in enumerate(range(10, 14))}
    scores = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    scores[:, padding] = 100.0
    seen = []

    def score(histories: torch.Tensor) -> torch.Tensor:
        seen.extend(histories.tolist())
        return scores

    curve = sys.modules["peer_workers.common"].Curve(job, ids, score, padding)
    found = curve.ndcg()
    assert seen == [
        [ids[11], ids[12], ids[10]],
        [padding, ids[11], ids[12]],
        [ids[13], ids[12], ids[11]],
    ]
    want = 0.0
    for row, item in ((0, 13), (2, 11)):  # 99 was never trained
        own = scores[row, ids[item]]
        rank = sum(bool(scores[row, n] > own) for n in range(6) if n != padding)
        want += 1 / math.log2(rank + 2)
    assert found == pytest.approx(want / 3, abs=1e-12)


def test_scores_that_are_no_numbers_end_the_run(bench: Any, job: Any) -> None:
    """They would stand above nothing, and nothing above them."""
    broken = torch.full((3, 6), torch.nan)
    curve = sys.modules["peer_workers.common"].Curve(
        job, {item: item - 9 for item in range(10, 14)}, lambda _: broken, 0
    )
    with pytest.raises(SystemExit, match="epoch 1: scores that are no numbers"):
        curve.ndcg()


def test_the_clock_stands_while_an_epoch_is_looked_at(
    bench: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, now = sys.modules["peer_workers.common"], [0.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    values = iter([0.1, 0.3, 0.2, 0.3, 0.9])

    def looked(_: Any) -> float:
        now[0] += 100.0
        return next(values)

    monkeypatch.setattr(common.Curve, "ndcg", looked)
    curve = common.Curve(job, dict.fromkeys(range(10, 14), 1), lambda _: None, 0)
    while not curve.done:
        now[0] += 1.0
        curve.tick(2)  # half an epoch
    assert curve.points == [(2.0, 0.1), (4.0, 0.3), (6.0, 0.2), (8.0, 0.3)]


def test_the_level_is_one_that_all_reach(bench: Any) -> None:
    fast, slow = bench.Side("PosSASRec"), bench.Side("peer")
    fast.runs = [{"points": [(1.0, 0.1), (2.0, 0.5)]}, {"points": [(1.0, 0.45), (2.0, 0.4)]}]
    slow.runs = [{"points": [(4.0, 0.1), (8.0, 0.2), (12.0, 0.4)]}, {"points": [(6.0, 0.41)]}]
    text = bench.table([fast, slow])
    assert "NDCG@10 of 0.3920" in text
    assert "| peer | 9.0 (6.0 to 12.0) | 6.0 (6.0 to 6.0) | 3, 1 |" in text
    assert "| PosSASRec | 1.5 (1.0 to 2.0) | 1.0 (1.0 to 1.0) | 2, 1 |" in text
