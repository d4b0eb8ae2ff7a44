"""A study whose runs are generated: rows of three seeds and of one, an attached one, a failure."""

from __future__ import annotations

import numpy as np
import pandas as pd
import yaml

from recbole_pos.study.plan import Plan, Source
from recbole_pos.study.results import Results
from recbole_pos.study.statistics import RankTable, compute_gains
from recbole_pos.study.study_file import make_plan

STUDY = """
title: Position schemes on a generated shop
question: >-
  Does a model that knows distances in time recommend better than one that knows only the order?
dataset: shop
base: {n_layers: 2}
rows:
  Pop: {model: Pop, search: false}
  NoPE: {model: PosSASRec, position: [nope]}
  Learned: {model: PosSASRec, position: [learned]}
  RoPE: {model: PosSASRec, position: [rope]}
  Kernel: {model: KernelAttention}
  TO-RoPE, time and order together: {model: TORoPE}
  RoPE + kernel: {attach: {to: RoPE, schemes: [kernel]}}
  FPARec: {model: FPARec}
search: {hidden_dropout_prob: [0.2, 0.3]}
seeds: 3
reference: NoPE
metrics: [ndcg@10, hit@10, itemcoverage@10]
bins: {history: [5, 15], popularity: [10, 100], cold: true}
paper: {NoPE: {ndcg@10: 0.0316}, Kernel: {ndcg@10: 0.0394, hit@10: 0.0683}}
"""
# log-rank less NoPE's, seeds, seconds, weights
_ROWS = {
    "Pop": (1.6, 3, 0.4, 0),
    "NoPE": (0.0, 3, 410, 812_000),
    "Learned": (-0.05, 3, 430, 815_200),
    "RoPE": (-0.2, 3, 520, 812_000),
    "Kernel": (-0.9, 3, 760, 813_400),
    "TO-RoPE, time and order together": (-0.3, 1, 1900, 890_000),
    "RoPE + kernel": (-0.21, 3, 90, 813_400),
}


def example_plan() -> Plan:
    return make_plan(Source("shop.yaml", yaml.safe_load(STUDY)))


def example(users: int = 1500, seed: int = 0) -> Results:
    rng = np.random.default_rng(seed)
    popularity = rng.negative_binomial(1, 0.01, users)
    history = 1 + rng.geometric(0.1, users)
    hard = rng.normal(6.2, 1.6, users) - 0.004 * np.minimum(popularity, 200) - 0.02 * history
    targets = pd.DataFrame({"user": np.arange(users), "item": rng.integers(900, size=users)})
    targets = targets.assign(history=history, popularity=popularity)
    frames, lines, curves = {}, [], []
    plan = example_plan()
    logs: dict[tuple[str, int], np.ndarray] = {}
    for row, (shift, seeds, seconds, weights) in _ROWS.items():
        own = rng.normal(shift, 0.6, users)
        for one in plan.seeds:
            line = {"row": row, "seed": one, "status": "done", "device": "cpu", "commit": "0a1b2c3"}
            if one - 2020 >= seeds:
                lines.append({**line, "status": "waiting"})
                continue
            log = hard + own + rng.normal(rng.normal(0, 0.08), 0.7, users) * (row != "Pop")
            if row == "RoPE + kernel":
                log = logs["RoPE", one] + rng.normal(-0.01, 0.05, users)
            logs[row, one] = log
            rank = np.floor(np.exp(np.maximum(log, 0.0))) - 1
            frames[row, one] = targets.assign(rank=rank)
            line |= {name: compute_gains(rank, name).mean() for name in ("ndcg@10", "hit@10")}
            best, epochs = line["ndcg@10"] * 1.3, int(rng.integers(14, 26)) if weights else 1
            for epoch, noise in enumerate(rng.normal(0, 0.001, epochs), 1):
                point = {"row": row, "seed": one, "epoch": epoch}
                if weights:
                    curves.append({**point, "value": best * (1 - np.exp(-epoch / 5)) + noise})
            line |= {"itemcoverage@10": rng.normal(0.6, 0.03), "epochs": epochs}
            line |= {"seconds": seconds * rng.uniform(0.8, 1.2), "parameters": weights}
            lines.append({**line, "validation": best if weights else None})
    reason = "the loss is not a number after 3 epochs; a smaller learning_rate often helps"
    failed = {"row": "FPARec", "status": "failed", "reason": reason}
    lines += [{**failed, "seed": one} for one in plan.seeds]
    searched = [row for row in _ROWS if row not in ("Pop", "RoPE + kernel")]
    tried = pd.DataFrame({"trial": [0, 1], "value": [0.07, 0.071], "metric": "ndcg@10"})
    tried["options"] = ["hidden_dropout_prob: 0.2", "hidden_dropout_prob: 0.3"]
    searches = pd.concat([tried.assign(row=row, chosen=tried["trial"] == 1) for row in searched])
    return Results(
        plan=plan,
        runs=pd.DataFrame(lines),
        ranks=RankTable.from_runs(frames),
        curves=pd.DataFrame(curves),
        searches=searches,
        data={"users": users, "items": 900, "events": 18_200, "split": "leave one out by time"},
        versions={"recbole-pos": "0.3.0", "recbole": "1.2.0", "torch": "2.13.0"},
        command="recbole-pos compare shop.yaml --data_path FOLDER",
    )
