"""``make results``: test metrics of the models on ml-100k with their default settings.

Runs are kept in ``saved/results-ml-100k/``; finished ones are reused and interrupted ones resumed,
so the command can be stopped and called again. Writes ``results/ml-100k.md`` and the picture of
what FPARec learned, ``results/fparec-attention.png``.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "saved" / "results-ml-100k"
METRICS = ["hit@5", "hit@10", "hit@20", "ndcg@5", "ndcg@10", "ndcg@20", "mrr@10"]
# name in the table, model, seeds, options
ROWS: list[tuple[str, str, list[int], list[str]]] = [
    ("FPARec", "FPARec", [2020, 2021, 2022], []),
    ("PARec", "PARec", [2020, 2021, 2022], []),
    ("PosSASRec", "PosSASRec", [2020, 2021, 2022], []),
    ("SASRec (RecBole)", "SASRec", [2020], []),
    ("SASRec (RecBole), all positions", "SASRec", [2020], ["--augmentation=all_positions"]),
    ("Pop (RecBole), all items ranked", "Pop", [2020], ["--mask_history=false"]),
    ("Pop (RecBole), past items left out", "Pop", [2020], ["--mask_history=true"]),
]


def run(name: str, model: str, seed: int, options: list[str]) -> dict[str, Any]:
    """The result of one run, from its folder if it is finished."""
    folder = RUNS / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}-{seed}"
    if not (folder / "result.json").exists():
        start = (
            ["--resume", folder]
            if (folder / "checkpoint.pt").exists()
            else ["-m", model, "-d", "ml-100k", f"--seed={seed}", "--run_dir", folder, *options]
        )
        subprocess.run([sys.executable, ROOT / "run_recbole_pos.py", *map(str, start)], check=True)
    result = json.loads((folder / "result.json").read_text())
    # the median epoch, so that a run that was stopped or disturbed is not charged for the pause
    epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result["epoch_seconds"] = statistics.median(epoch["seconds"] for epoch in epochs)
    return result


def draw(folder: Path, picture: Path) -> None:
    """The learned attention of a run."""
    command = [sys.executable, ROOT / "run_recbole_pos.py", "plot", folder]
    subprocess.run(command, check=True)
    shutil.copy(folder / "attention.png", picture)


def cell(values: list[float]) -> str:
    """Mean, with the standard deviation where there are several seeds."""
    mean = f"{statistics.mean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


def main() -> None:
    """Run what is missing and write the table."""
    header = ["model", "seeds", *METRICS, "epochs", "an epoch", "training"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for name, model, seeds, options in ROWS:
        results = [run(name, model, seed, options) for seed in seeds]
        middle = {
            key: statistics.median(value(r) for r in results)
            for key, value in {
                "epochs": lambda r: r["epochs"],
                "epoch": lambda r: r["epoch_seconds"],
                "seconds": lambda r: r["epochs"] * r["epoch_seconds"],
            }.items()
        }
        cells = [cell([r["test"][metric] for r in results]) for metric in METRICS]
        cells += [f"{middle['epochs']:.0f}", f"{middle['epoch']:.1f} s"]
        cells.append(f"{middle['seconds']:,.0f} s")
        lines.append(f"| {name} | {len(seeds)} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    print(table)
    draw(RUNS / "FPARec-2020", ROOT / "results" / "fparec-attention.png")
    (ROOT / "results" / "ml-100k.md").write_text(
        f"""# ml-100k

Written by `make results`: every model with its default settings, none tuned. Leave-one-out by
exact time: the last event of each of the 943 users is the test target, the one before it the
validation target; the whole catalogue of 1,682 items is ranked by RecBole's evaluator. Best epoch
by validation NDCG@10, early stopping after 10 epochs without gain. Mean and standard deviation over
seeds; epochs and seconds are medians over seeds, on 2 CPU cores; training is the number of epochs
times the median epoch of a run.

{table}

*all positions* is RecBole's SASRec with `augmentation: all_positions`, one pass over a window for
all its targets, where RecBole makes a row of each target.

RecBole ranks all items for sequential models and leaves past items out for general ones. Nobody
rates a film twice here, so leaving them out helps; Pop is shown both ways (`mask_history`). It
counts every training event, where RecBole's own class counts an item once a batch.
"""
    )


if __name__ == "__main__":
    main()
