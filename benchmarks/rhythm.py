"""``make rhythm``: two generated logs whose answer is in the clock and not in the order.

``weekly``: a user's week has 28 slots of six hours, each with an item of its own. The user shows up
in a slot with probability 0.7 and takes its item, so the next item is most likely what was taken
one week before the coming slot: 6 days and 18 hours ago, an unknown number of events back.

``bursts``: a session opens with an item, goes on with 2 to 20 arbitrary ones at arbitrary times,
and an hour after it was opened the user looks at one more arbitrary item, then returns to the
opener. Days to weeks pass between sessions. The last event of a user is such a return: the opener
is the event one hour old, 3 to 21 events back.

Every model is the same backbone with the same settings, trained for the same number of epochs with
nothing selected; the held-out target is the last event of every user. Writes the part of
``results/to_rope.md`` between the marks of ``rhythm``.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from data import write_atomic
from study import ROOT, Study, replace_section, result

HOUR, DAY = 3600, 86400
START = 1_600_000_000
SLOTS, SHOWS_UP = 28, 0.7
PROTOCOL: dict[str, Any] = {
    "MAX_ITEM_LIST_LENGTH": 50,
    "hidden_size": 64,
    "n_heads": 2,
    "n_layers": 2,
    "hidden_dropout_prob": 0.1,
    "train_batch_size": 64,
    "learning_rate": 3e-3,
    "epochs": 60,
    "eval_args": {"split": {"LS": "test_only"}},
    "metrics": ["NDCG", "Hit"],
    "topk": [1, 10],
    "valid_metric": "NDCG@10",
    "show_progress": False,
    "model": "TORoPE",
}
CLOCK = {"time_unit": "hours", "time_min_period": 0.5, "time_max_period": 2000.0}
MODELS: dict[str, dict[str, Any]] = {
    "index RoPE": {"position": ["rope"]},
    "time RoPE": {"position": ["time_rope"]},
    "early fusion": {"position": ["to_rope"], "fusion": "early"},
    "early fusion, learned gates": {
        "position": ["to_rope"],
        "fusion": "early",
        "gate": "sigmoid",
        "gate_scope": "plane",
    },
    "split head": {"position": ["to_rope"], "fusion": "split_head"},
    "split dim": {"position": ["to_rope"], "fusion": "split_dim"},
}


def weekly(seed: int, users: int = 1500, items: int = 400, weeks: int = 4) -> pd.DataFrame:
    """Users with a habit per slot of the week; about 78 events each."""
    rng = np.random.default_rng(seed)
    habit = rng.integers(1, items + 1, (users, SLOTS))
    phase = rng.integers(0, SLOTS, users)  # weeks start at different slots, and lengths differ
    slot = np.arange(weeks * SLOTS)
    present = rng.random((users, len(slot))) < SHOWS_UP
    user, when = np.nonzero(present)
    time = START + when * 6 * HOUR + rng.integers(0, HOUR, len(when))
    item = habit[user, (when + phase[user]) % SLOTS]
    return pd.DataFrame({"user_id": user + 1, "item_id": item, "timestamp": time})


def bursts(seed: int, users: int = 2000, items: int = 400, sessions: int = 5) -> pd.DataFrame:
    """Users with sessions that return to their opener after an hour; about 70 events each."""
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(1, users + 1):
        now = START + int(rng.integers(0, 30 * DAY))
        for _ in range(sessions):
            middle = int(rng.integers(2, 21))
            opener, *others = (int(i) for i in rng.integers(1, items + 1, middle + 2))
            times = np.sort(rng.integers(1, HOUR - 60, middle))
            rows.append((user, opener, now))
            rows += [(user, i, now + int(t)) for i, t in zip(others, times, strict=False)]
            rows.append((user, others[-1], now + HOUR + int(rng.integers(-60, 60))))
            rows.append((user, opener, now + HOUR + int(rng.integers(61, 300))))
            now += int(rng.uniform(1, 20) * DAY)
    return pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])


def table(studies: dict[str, Study], seeds: list[int]) -> str:
    """Mean test metrics of the finished runs, and the ratio to index RoPE."""
    lines = ["| log | model | seeds | NDCG@10 | HR@1 | NDCG@10 / index RoPE |"]
    lines.append("|---|---|---|---|---|---|")
    for name, study in studies.items():
        means: dict[str, float] = {}
        for model in MODELS:
            found = [result(run) for run in study.finished(model, seeds).values()]
            if not found:
                continue
            ndcg = [f["test"]["ndcg@10"] for f in found]
            means[model] = statistics.mean(ndcg)
            spread = f" ± {statistics.stdev(ndcg):.3f}" if len(ndcg) > 1 else ""
            hit = statistics.mean(f["test"]["hit@1"] for f in found)
            ratio = means[model] / means["index RoPE"] if "index RoPE" in means else float("nan")
            lines.append(
                f"| {name} | {model} | {len(found)} | {means[model]:.3f}{spread} | {hit:.3f} "
                f"| {ratio:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Generate, run what is missing, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "saved" / "results-rhythm")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only write what is finished")
    given = parser.parse_args()
    seeds = list(range(2020, 2020 + given.seeds))
    studies = {}
    for name, generate in (("weekly", weekly), ("bursts", bursts)):
        data = given.runs / "data"
        if not (data / name).exists():
            write_atomic(generate(0), data, name)
        protocol = {**PROTOCOL, "data_path": str(data)}
        studies[name] = Study(name, given.runs / name, protocol, given.processes, given.threads)
    if not given.table:
        for study in studies.values():
            jobs = [
                (model, options if model == "index RoPE" else {**options, **CLOCK}, seed)
                for seed in seeds
                for model, options in MODELS.items()
            ]
            study.all(study.run, jobs)
    replace_section(ROOT / "results" / "to_rope.md", "rhythm", table(studies, seeds))


if __name__ == "__main__":
    main()
