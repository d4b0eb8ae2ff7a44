"""``make results-to-rope``: the TO-RoPE paper's comparison (Table 4) and ratio study (Table 5).

Every row is the same backbone with the same settings, and none is tuned: rows differ in
``position`` alone. Leave-one-out, full ranking. Runs are kept and reused, interrupted ones resumed.
Writes the part of ``results/to_rope.md`` between the marks of the dataset; ``--table`` does only
that.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from study import ROOT, Study, paired, replace_section, score

PAGE = ROOT / "results" / "to_rope.md"
SEEDS = [2020, 2021, 2022]
PROTOCOL: dict[str, Any] = {
    "model": "TORoPE",
    "MAX_ITEM_LIST_LENGTH": 50,
    "hidden_size": 64,
    "inner_size": 256,
    "n_heads": 4,
    "n_layers": 2,
    "hidden_dropout_prob": 0.2,
    "learning_rate": 1e-3,
    "train_batch_size": 128,
    "epochs": 100,
    "stopping_step": 10,
    "metrics": ["Hit", "NDCG"],
    "topk": [10, 50, 200],
    "valid_metric": "NDCG@10",
    "show_progress": False,
}
# the clock of each log: seconds in one, dates in the other
CLOCKS: dict[str, dict[str, Any]] = {
    "ml-100k": {"time_unit": "hours", "time_min_period": 0.02, "time_max_period": 9000.0},
    "amazon-beauty": {"time_unit": "days", "time_min_period": 2.0, "time_max_period": 3000.0},
}
ROWS: dict[str, dict[str, Any]] = {
    "index APE": {"position": ["learned"]},
    "index APE + time APE": {"position": ["learned", "time_learned"]},
    "relative bias (HSTU)": {"position": ["hstu"]},
    "index RoPE": {"position": ["rope"]},
    "time RoPE": {"position": ["time_rope"]},
    "index RoPE + time APE": {"position": ["rope", "time_learned"]},
    "early fusion": {"position": ["to_rope"], "fusion": "early"},
    "split head": {"position": ["to_rope"], "fusion": "split_head"},
    "split dim": {"position": ["to_rope"], "fusion": "split_dim"},
}
# shares of 4 heads and of 8 planes; 0.5 is among the rows above, 0.1 of the heads is one, as 0.3 is
RATIOS: dict[str, dict[str, Any]] = {
    f"{form} {ratio}": {
        "position": ["to_rope"],
        "fusion": form.replace(" ", "_"),
        "time_ratio": ratio,
    }
    for form, ratios in (("split head", (0.3, 0.9)), ("split dim", (0.1, 0.3, 0.9)))
    for ratio in ratios
}
SHARES = {
    "split head 0.3": "1 of 4 heads (0.1 too)",
    "split head": "2 of 4 heads",
    "split head 0.9": "3 of 4 heads",
    "split dim 0.1": "1 of 8 planes",
    "split dim 0.3": "2 of 8 planes",
    "split dim": "4 of 8 planes",
    "split dim 0.9": "7 of 8 planes",
}
# the paper's Table 4 on ML-20M: HR@10 / NDCG@10
PAPER = {
    "index APE": "0.3318 / 0.2007",
    "index APE + time APE": "0.3335 / 0.2023",
    "relative bias (HSTU)": "0.3341 / 0.2023",
    "index RoPE": "0.3347 / 0.2026",
    "time RoPE": "0.3341 / 0.2027",
    "index RoPE + time APE": "0.3353 / 0.2031",
    "early fusion": "0.3362 / 0.2037",
    "split head": "0.3388 / 0.2048",
    "split dim": "0.3406 / 0.2059",
}


def tables(study: Study) -> str:
    """What the finished runs say."""
    metrics = [f"{name}@{k}" for name in ("hit", "ndcg") for k in (10, 50, 200)]
    heads = [m.upper().replace("HIT", "HR") for m in metrics]
    columns = ["model", "seeds", *heads, "NDCG@10 - index RoPE, 0.0001", "paper, ML-20M"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    done = {name: study.finished(name, SEEDS) for name in [*ROWS, *RATIOS]}
    for name in ROWS:
        if runs := done[name]:
            cells = [f"{len(runs)}", *(score(runs, metric) for metric in metrics)]
            cells += [paired(runs, done["index RoPE"]), PAPER[name]]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    if any(done[name] for name in RATIOS):
        columns = ["turned by time", "seeds", "HR@10", "NDCG@10", "HR@50", "NDCG@50"]
        lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for name, share in SHARES.items():
            if runs := done[name]:
                cells = [score(runs, m) for m in ("hit@10", "ndcg@10", "hit@50", "ndcg@50")]
                form = " ".join(name.split()[:2])
                lines.append(f"| {form}, {share} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="ml-100k", choices=sorted(CLOCKS))
    parser.add_argument("--data_path", help="folder that holds the dataset's folder")
    parser.add_argument("--runs", type=Path, default=ROOT / "saved" / "results-to-rope")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of Table 4")
    parser.add_argument("--ratio_seeds", type=int, default=len(SEEDS), help="of Table 5")
    parser.add_argument("--table", action="store_true", help="only write what is finished")
    given = parser.parse_args()
    clock = CLOCKS[given.dataset]
    protocol = dict(PROTOCOL)
    if given.data_path:
        protocol["data_path"] = given.data_path
    folder = given.runs / given.dataset
    study = Study(given.dataset, folder, protocol, given.processes, given.threads)
    plan = [(ROWS, given.seeds), (RATIOS, given.ratio_seeds)] if not given.table else []
    for rows, seeds in plan:
        for seed in SEEDS[:seeds]:
            # options of schemes that a row does not have would be refused
            jobs = [(n, {**o, **(clock if _turns(o) else {})}, seed) for n, o in rows.items()]
            study.all(study.run, jobs)
    replace_section(PAGE, given.dataset, tables(study))


def _turns(options: dict[str, Any]) -> bool:
    return bool({"time_rope", "to_rope"} & set(options["position"]))


if __name__ == "__main__":
    main()
