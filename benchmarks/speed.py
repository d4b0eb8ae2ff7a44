"""``make bench``: training speed as ratios against peers measured in alternation in the same run.

Each figure is the best of ROUNDS runs of its side, every run in a process of its own, sides taking
turns. Prints the table and writes ``results/speed.md``.
"""

from __future__ import annotations

import math
from typing import Any

from page import RESULTS, Report, in_a_process, in_turns, machine, replace_section

ROUNDS = 2
CASES = [("ml-100k", 50, 12, 1.9), ("ml-100k", 200, 6, 3.0), ("short", 50, 4, 10.0)]
TARGETS, ROWS, MEMORY = "{:,.0f} targets/s", "{:,.0f} rows/s", "{:,.0f} MB"
Turn = tuple[str, str, int, int]  # side, data, length, epochs or batches


def best_of(*turns: Turn, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """The fastest run of each side."""
    runs = in_turns(turns, rounds, lambda turn: in_a_process("speed_workers.py", *turn))
    return [max(found, key=lambda run: run["targets_per_second"]) for found in runs.values()]


def against_recbole(report: Report) -> None:
    """PosSASRec and RecBole's SASRec on ml-100k, L = 50, both covering all targets."""
    turns = (("recbole-anomaly", "ml-100k", 50, 0), ("recbole-plain", "ml-100k", 50, 10))
    stock, plain = best_of(*turns, rounds=1)
    (mine,) = best_of(("PosSASRec", "ml-100k", 50, 12))
    speed, key = mine["targets_per_second"], "targets_per_second"
    what = "PosSASRec / RecBole's SASRec as shipped (anomaly detection on), ml-100k, L=50"
    report.add(what, speed, stock[key], TARGETS, at_least=80)
    what = "the same with anomaly detection off (10 batches)"
    report.add(what, speed, plain[key], TARGETS)
    score = stock["ndcg@10"]
    reached = next((at for at, value in mine["curve"] if value >= score), math.inf)
    what = f"training seconds to validation NDCG@10 {score:.4f} (RecBole's after 2 epochs)"
    report.add(what, reached, stock["seconds"], "{:.1f} s", at_most=1 / 20)
    report.add("peak memory", mine["peak_rss_mb"], stock["peak_rss_mb"], MEMORY, at_most=1 / 4)
    what = f"full-ranking evaluation of {mine['users']} users, to a second"
    report.add(what, mine["evaluation_seconds"], 1.0, at_most=1)


def against_naive(report: Report) -> None:
    """PosSASRec against the naive reference, FPARec against PosSASRec, all against the floor."""
    for data, length, batches, goal in CASES:
        mine, naive, fpa = best_of(
            ("PosSASRec", data, length, 4),
            ("naive", data, length, batches),
            ("FPARec", data, length, 4),
        )
        where, key, epoch = f"{data}, L={length}", "targets_per_second", "epoch_seconds"
        report.add(f"PosSASRec / naive, {where}", mine[key], naive[key], TARGETS, at_least=goal)
        what, most = f"FPARec epoch / PosSASRec epoch, {where}", 0.9 if length == 200 else None
        report.add(what, fpa[epoch], mine[epoch], at_most=most)
        for name, run in (("PosSASRec", mine), ("FPARec", fpa)):
            what = f"{name} epoch / matrix-multiply floor, {where}"
            report.add(what, run[epoch], run["floor_seconds"], at_most=2)


def bert4rec(report: Report) -> None:
    """RecBole's BERT4Rec with its loss for masked events alone and with RecBole's own."""
    turns = (("BERT4Rec", "short", 50, 4), ("BERT4Rec-recbole", "short", 50, 2))
    mine, stock = (run["targets_per_second"] for run in best_of(*turns))
    what = "RecBole's BERT4Rec through the plugin / with its own loss, short, L=50"
    report.add(what, mine, stock, ROWS)


def main() -> None:
    """Measure, print, write."""
    report = Report()
    against_naive(report)
    against_recbole(report)
    bert4rec(report)
    replace_section(RESULTS / "speed.md", "speed", f"{machine()}, best of {ROUNDS}.\n\n{report}")


if __name__ == "__main__":
    main()
