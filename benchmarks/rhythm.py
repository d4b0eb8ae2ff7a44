"""``make rhythm``: two generated logs whose answer is in the clock and not in the order.

``weekly``: a user's week has 28 slots of six hours, each with an item of its own. The user shows up
in a slot with probability 0.7 and takes its item, so the next item is most likely what was taken
one week before the coming slot: 6 days and 18 hours ago, an unknown number of events back.

``bursts``: a session lasts four hours, each of 12 slots of five minutes. Every session draws an
item for each slot anew; the user shows up with probability 0.7 and takes its item, so after the
first hour the next item is most likely what was taken one hour before the coming slot, in this
session: 55 minutes ago. Days to weeks pass between sessions.

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
from study import ROOT, Study, paired, replace_section, result, score

HOUR, DAY = 3600, 86400
START = 1_600_000_000
SLOTS, SHOWS_UP = 28, 0.7
PROTOCOL: dict[str, Any] = {
    "MAX_ITEM_LIST_LENGTH": 50,
    "hidden_size": 128,
    "n_heads": 4,
    "n_layers": 2,
    "inner_size": 256,
    "hidden_dropout_prob": 0.1,
    "train_batch_size": 32,
    "learning_rate": 2e-3,
    "epochs": 40,
    "eval_args": {"split": {"LS": "test_only"}},
    "metrics": ["NDCG", "Hit"],
    "topk": [1, 10],
    "valid_metric": "NDCG@10",
    "show_progress": False,
    "model": "TORoPE",
}
# Periods of the time planes, in hours, as one who knows the log would set them: from two slots, the
# shortest that tells slots apart, to two weeks or a whole session
CLOCKS = {"weekly": (12.0, 336.0), "bursts": (1 / 6, 4.0)}
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
    "split head, 0.9 by time": {"position": ["to_rope"], "fusion": "split_head", "time_ratio": 0.9},
    "split dim, 0.9 by time": {"position": ["to_rope"], "fusion": "split_dim", "time_ratio": 0.9},
}


def weekly(seed: int, users: int = 1000, items: int = 400, weeks: int = 4) -> pd.DataFrame:
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


def bursts(seed: int, users: int = 1000, items: int = 400, sessions: int = 3) -> pd.DataFrame:
    """Users with sessions whose hours repeat; about 100 events each."""
    rng = np.random.default_rng(seed)
    slots, hours = 12, 4
    habit = rng.integers(1, items + 1, (users, sessions, slots))
    gaps = rng.uniform(1, 20, (users, sessions)) * DAY
    begin = START + np.cumsum(gaps, axis=1).astype(np.int64)
    present = rng.random((users, sessions, hours * slots)) < SHOWS_UP
    user, session, when = np.nonzero(present)
    time = begin[user, session] + when * 300 + rng.integers(0, 50, len(when))
    item = habit[user, session, when % slots]
    return pd.DataFrame({"user_id": user + 1, "item_id": item, "timestamp": time})


def table(studies: dict[str, Study], seeds: list[int]) -> str:
    """Test metrics of the finished runs, beside both corners."""
    columns = ["log", "model", "seeds", "NDCG@10", "HR@1", "NDCG@10 / index RoPE"]
    columns += ["NDCG@10 - time RoPE, 0.0001"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for log, study in studies.items():
        done = {model: study.finished(model, seeds) for model in MODELS}
        for model, runs in done.items():
            if not runs or not (done["index RoPE"] and done["time RoPE"]):
                continue
            ratio = _mean(runs) / _mean(done["index RoPE"])
            cells = [f"{len(runs)}", score(runs, "ndcg@10"), score(runs, "hit@1"), f"{ratio:.2f}"]
            cells += [paired(runs, done["time RoPE"])]
            lines.append(f"| {log} | {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(runs: dict[int, Path]) -> float:
    return statistics.mean(result(run)["test"]["ndcg@10"] for run in runs.values())


def main() -> None:
    """Generate, run what is missing, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "saved" / "results-rhythm")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--logs", nargs="+", choices=list(CLOCKS), help="these alone")
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="these models alone")
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
        for name, study in studies.items():
            if given.logs and name not in given.logs:
                continue
            low, high = CLOCKS[name]
            clock = {"time_unit": "hours", "time_min_period": low, "time_max_period": high}
            jobs = [
                (model, options if model == "index RoPE" else {**options, **clock}, seed)
                for seed in seeds
                for model, options in MODELS.items()
                if not given.only or model in given.only
            ]
            study.all(study.run, jobs)
    replace_section(ROOT / "results" / "to_rope.md", "rhythm", table(studies, seeds))


if __name__ == "__main__":
    main()
