"""A study whose runs are generated: rows of three seeds and of one, an attached one, a failure."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import yaml
from study_simulation import Case

from recbole_pos.config.metrics import compute_gains
from recbole_pos.study.plan import Source
from recbole_pos.study.results import Results
from recbole_pos.study.statistics import RankTable
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_folder import StudyFacts

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
_FAILED, _ATTACHED = "FPARec", "RoPE + kernel"
_LONELY = "TO-RoPE, time and order together"  # it has one seed


def example(users: int = 1500) -> Results:
    rng = np.random.default_rng(0)
    plan = make_plan(Source("shop.yaml", yaml.safe_load(STUDY)))
    targets = pd.DataFrame({"user": np.arange(users), "item": rng.integers(900, size=users)})
    popularity = rng.negative_binomial(1, 0.01, users)
    targets = targets.assign(history=1 + rng.geometric(0.1, users), popularity=popularity)

    # Ranks: Kernel is truly better than the others, Pop worse; RoPE + kernel is nearly RoPE.
    rows = ["NoPE", "Kernel", "Learned", "RoPE", _LONELY, "Pop"]
    ranks, _ = Case((3,) * len(rows), shift=-0.9, units=users).ranks(rng)
    by_row = dict(zip(rows, ranks, strict=True))
    by_row["Pop"] = by_row["Pop"] * 5 + 4
    by_row[_ATTACHED] = by_row["RoPE"] + (rng.random((3, users)) < 0.1)

    frames, lines, curves = {}, [], []
    reason = "the loss is not a number after 3 epochs; a smaller learning_rate often helps"
    for row, seed in itertools.product(plan.rows, plan.seeds):
        line = {"row": row, "seed": seed, "status": "done", "device": "cpu", "commit": "0a1b2c3"}
        if row == _FAILED:
            lines.append({**line, "status": "failed", "reason": reason})
            continue
        if row == _LONELY and seed != 2020:
            lines.append({**line, "status": "waiting"})
            continue
        rank = by_row[row][seed - 2020]
        frames[row, seed] = targets.assign(rank=rank)
        line |= {name: compute_gains(rank, name).mean() for name in ("ndcg@10", "hit@10")}
        line |= {"itemcoverage@10": rng.normal(0.6, 0.03), "epochs": 20 if row != "Pop" else 1}
        line |= {"seconds": rng.uniform(300, 900), "parameters": 800_000 + 1000 * len(row)}
        if row == "Pop":  # there is nothing to train
            lines.append({**line, "seconds": 0.4, "parameters": 0, "validation": None})
            continue
        lines.append({**line, "validation": line["ndcg@10"] * 1.3})
        for epoch in range(1, 21):
            point = {"row": row, "seed": seed, "epoch": epoch}
            curves.append({**point, "value": line["ndcg@10"] * 1.3 * (1 - np.exp(-epoch / 5))})

    tried = pd.DataFrame({"trial": [0, 1], "value": [0.07, 0.071], "metric": "ndcg@10"})
    tried["options"] = ["hidden_dropout_prob: 0.2", "hidden_dropout_prob: 0.3"]
    searches = [tried.assign(row=row, chosen=tried["trial"] == 1) for row in plan.num_trials]
    return Results(
        plan=plan,
        runs=pd.DataFrame(lines),
        ranks=RankTable.from_runs(frames),
        curves=pd.DataFrame(curves),
        searches=pd.concat(searches),
        command="recbole-pos compare shop.yaml --data_path FOLDER",
        facts=StudyFacts(
            data={"users": users, "items": 900, "events": 18_200, "split": "leave one out by time"},
            versions={"recbole-pos": "0.3.0", "recbole": "1.2.0", "torch": "2.13.0"},
        ),
    )
