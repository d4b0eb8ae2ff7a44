"""The cost of a search, and its results: ASHA against none on ml-100k, Ray's overhead, sizes.

Writes results/tuning.md. Finished searches and runs in --folder are used again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pandas as pd
from page import RESULTS, replace_section, table
from training import build

import recbole_pos
from recbole_pos.runs.progress import format_options
from recbole_pos.runs.shared_data import SharedData
from recbole_pos.tuning import tune

WHAT = ("FPARec", "ml-100k", None, None)
BUDGET = {"epochs": 30, "stopping_step": 5, "MAX_ITEM_LIST_LENGTH": 50}
MORE = 10  # further trials, whose overhead is that of a trial and not of a search
ML_20M = {"events": 20_000_263, "users": 138_493, "items": 26_744}
TRIALS = 800  # side by side: 100 machines with 8 each


def read(file: Path) -> dict[str, Any]:
    """Return the content of a file of json."""
    return json.loads(file.read_text())


def run_search(path: Path, scheduler: str) -> list[str]:
    """Return the row of one of the two searches; by seed they have the same configurations."""
    if not (path / "tune.json").is_file():
        options = {"num_samples": 20, "max_concurrent": 2, "searcher": "random", "seed": 0}
        tune(*WHAT, BUDGET, scheduler=scheduler, run_dir=path, **options)
    result, trials = read(path / "tune.json"), pd.read_csv(path / "trials.csv")
    test, best = read(path / "test.json")["test"]["ndcg@10"], result["best"]
    print(f"{scheduler}: best trial {best['trial']}: {format_options(best['options'])}")
    return [
        *(scheduler, f"{result['seconds']:,.0f} s", f"{trials['seconds'].sum():,.0f} s"),
        f"{trials['epochs'].sum()}",
        *(f"{result['states'][state]}" for state in ("finished", "stopped")),
        *(f"{best['valid']:.4f}", f"{test:.4f}"),
    ]


def run_default(path: Path, name: str, options: dict[str, Any]) -> list[str]:
    """Return the row of the default configuration."""
    if not (path / "result.json").is_file():
        recbole_pos.run(*WHAT[:2], None, options, run_dir=path)
    result = read(path / "result.json")
    seconds, epochs = f"{result['seconds']['training']:,.0f} s", f"{result['epochs']}"
    scores = [f"{result[key]['ndcg@10']:.4f}" for key in ("best_valid", "test")]
    return [f"default configuration, {name}", "", seconds, epochs, "", "", *scores]


def measure_overhead(folder: Path) -> dict[str, float]:
    """Return seconds per trial beyond its own training, one after another, one epoch each."""
    file = folder / "overhead.json"
    if file.is_file():
        return read(file)
    wall, cpu, training = [], [], []
    for samples in (1, 1 + MORE):
        began, cpu_began = time.perf_counter(), time.process_time()
        options = {"num_samples": samples, "max_concurrent": 1, "verbose": False}
        run_dir = folder / f"overhead-{samples}-{os.getpid()}"
        options |= {"searcher": "random", "scheduler": "none", "run_dir": run_dir}
        result = tune(*WHAT, {**BUDGET, "epochs": 1}, **options)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
        training.append(sum(trial.seconds for trial in result.trials))
    state = max((result.folder / "trials").glob("experiment_state-*.json")).stat().st_size
    overhead = {
        "trial": (wall[1] - wall[0] - (training[1] - training[0])) / MORE,
        "search": wall[0] - training[0],
        "cpu": (cpu[1] - cpu[0]) / MORE,
        "state": state / (1 + MORE),
    }
    file.write_text(json.dumps(overhead))
    return overhead


def show_overhead(ray: dict[str, float]) -> str:
    """Return the table of Ray's overhead."""
    search = "a search, beyond its trials: Ray's start, the first process, the test, pictures"
    trial = "a trial, beyond its training and validation (processes are used again)"
    rows = [
        [search, f"{ray['search']:.1f} s"],
        [trial, f"{ray['trial']:.2f} s"],
        ["the driver's CPU for a trial of one epoch", f"{ray['cpu']:.3f} s"],
        ["state of the search, a trial", f"{ray['state'] / 1e3:.1f} kB"],
    ]
    return table(("", ""), rows)


def show_sizes(best: Path, ray: dict[str, float]) -> str:
    """Return the table of bytes of shared data and of checkpoints, also of a large dataset."""
    experiment = build(*WHAT[:2])
    shared = SharedData(experiment.dataset)
    split = shared.template.split
    arrays = (*shared.columns.values(), split.log.offsets, split.part, split.is_target)
    shared_bytes = sum(array.nbytes for array in arrays)
    user_bytes = 8 * experiment.dataset.user_num
    per_event = (shared_bytes - user_bytes) / len(shared.columns["item_id"])
    large_data = per_event * ML_20M["events"] + 8 * ML_20M["users"]
    model = recbole_pos.load(best).model
    parameters = sum(p.numel() for p in model.parameters())
    items, d = model.item_embedding.weight.shape
    large = parameters + (ML_20M["items"] + 1 - items) * d
    checkpoint = (best / "checkpoint.pt").stat().st_size
    each = checkpoint / parameters
    rows = [
        ["data shared by the trials of a machine",
         f"{shared_bytes / 1e6:.1f} MB ({per_event:.0f} bytes an interaction)",
         f"{large_data / 1e6:,.0f} MB"],
        ["parameters", f"{parameters:,}", f"{large:,}"],
        ["a checkpoint", f"{checkpoint / 1e6:.2f} MB ({each:.1f} bytes a parameter)",
         f"{each * large / 1e6:.0f} MB"],
        [f"checkpoints of {TRIALS} trials side by side, two of each", "",
         f"{2 * TRIALS * each * large / 1e9:.0f} GB"],
        ["written to storage if an epoch takes 5 minutes", "",
         f"{TRIALS * each * large / 300 / 1e6:.0f} MB/s"],
        ["reports to the driver then", "", f"{TRIALS / 300:.1f} a second"],
        ["state of a search of 1,000 trials", "", f"{1000 * ray['state'] / 1e6:.0f} MB"],
    ]  # fmt: skip
    return table(("", "measured on ml-100k", "computed for ml-20m"), rows)


def main() -> None:
    """Measure what is not measured yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("saved/tuning"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = [run_search(folder / scheduler, scheduler) for scheduler in ("asha", "none")]
    rows.append(run_default(folder / "default-short", "same budget", BUDGET))
    rows.append(run_default(folder / "default", "to the end", {}))
    heads = ("", "wall time", "training and validation, summed", "epochs", "finished", "stopped")
    ray = measure_overhead(folder)
    shutil.copy(folder / "asha" / "curves.png", RESULTS / "tuning-curves.png")
    for name, text in (
        ("search", table((*heads, "valid NDCG@10", "test NDCG@10, once"), rows)),
        ("ray", show_overhead(ray)),
        ("sizes", show_sizes(folder / "asha" / "best", ray)),
    ):
        replace_section(RESULTS / "tuning.md", name, text)


if __name__ == "__main__":
    main()
