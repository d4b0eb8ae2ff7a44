"""What a search costs and finds: ASHA against none on ml-100k, Ray's overhead, sizes; writes
results/tuning.md. Finished searches and runs in --folder are used again."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from page import RESULTS, replace_section, table

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.run import prepare
from recbole_pos.runs.shared_data import SharedData
from recbole_pos.tuning import search
from recbole_pos.tuning.trials import show_options

BUDGET = {"epochs": 30, "stopping_step": 5, "MAX_ITEM_LIST_LENGTH": 50}
SAMPLES, CONCURRENT = 20, 2
MORE = 10  # trials more, to tell the overhead of a trial from that of a search
ML_20M = {"events": 20_000_263, "users": 138_493, "items": 26_744}
MACHINES, TRIALS_EACH = 100, 8


def searched(folder: Path, scheduler: str) -> dict[str, Any]:
    """One of the two searches; the same configurations in both, by seed."""
    path = folder / scheduler
    if not (path / "tune.json").is_file():
        search(
            "FPARec", "ml-100k", None, None, BUDGET, num_samples=SAMPLES, scheduler=scheduler,
            max_concurrent=CONCURRENT, searcher="random", seed=0, run_dir=path,
        )  # fmt: skip
    found = json.loads((path / "tune.json").read_text())
    rows = [line.split(",") for line in (path / "trials.csv").read_text().splitlines()]
    head = rows[0]
    names = ("epochs", "seconds", "state")
    columns = {name: [row[head.index(name)] for row in rows[1:]] for name in names}
    found["ends"] = list(zip(columns["state"], columns["epochs"], strict=True))
    found["epochs"] = sum(map(int, columns["epochs"]))  # of all trials
    found["trained"] = sum(map(float, columns["seconds"]))
    found["test"] = json.loads((path / "test.json").read_text())["test"]
    return found


def default(folder: Path, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The configuration as it comes."""
    path = folder / name
    if not (path / "result.json").is_file():
        recbole_pos.run("FPARec", "ml-100k", None, options, run_dir=path)
    return json.loads((path / "result.json").read_text())


def overhead(folder: Path) -> dict[str, float]:
    """Seconds per trial beyond its own training, one after another, one epoch each."""
    file = folder / "overhead.json"
    if file.is_file():
        return json.loads(file.read_text())
    walls, trained, cpu = [], [], []
    for samples in (1, 1 + MORE):
        began, busy = time.perf_counter(), time.process_time()
        found = search(
            "FPARec", "ml-100k", None, None, {**BUDGET, "epochs": 1}, num_samples=samples,
            max_concurrent=1, searcher="random", scheduler="none", verbose=False,
            run_dir=folder / f"overhead-{samples}-{os.getpid()}",
        )  # fmt: skip
        walls.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
        trained.append(sum(trial.seconds for trial in found.trials))
    state = max((found.folder / "trials").glob("experiment_state-*.json")).stat().st_size
    measured = {
        "trial": (walls[1] - walls[0] - (trained[1] - trained[0])) / MORE,
        "search": walls[0] - trained[0],
        "cpu": (cpu[1] - cpu[0]) / MORE,
        "state": state / (1 + MORE),
    }
    file.write_text(json.dumps(measured))
    return measured


def sizes(folder: Path, asha: dict[str, Any]) -> dict[str, float]:
    """Bytes of shared data per event and of a checkpoint per parameter, measured on ml-100k."""
    made = prepare(PosConfig("FPARec", "ml-100k"))
    shared = SharedData(made.dataset)
    events, users = len(shared.columns["item_id"]), made.dataset.user_num
    checkpoint = (folder / "asha" / "best" / "checkpoint.pt").stat().st_size
    options = asha["best"]["options"]
    best = prepare(PosConfig("FPARec", "ml-100k", None, {**BUDGET, **options}))
    parameters = sum(p.numel() for p in best.model.parameters())
    per_event = (shared.nbytes - 8 * (users + 1)) / events
    items = best.model.item_embedding.weight.shape
    large = parameters + (ML_20M["items"] + 1 - items[0]) * items[1]
    return {
        "per_event": per_event,
        "shared": shared.nbytes,
        "shared_large": per_event * ML_20M["events"] + 8 * ML_20M["users"],
        "per_parameter": checkpoint / parameters,
        "checkpoint": checkpoint,
        "checkpoint_large": checkpoint / parameters * large,
        "parameters": parameters,
        "parameters_large": large,
    }


def main() -> None:
    """Measure what is not measured yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("saved/tuning"))
    parser.add_argument("--note", default="", help="a line about the machine")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    asha, none = searched(args.folder, "asha"), searched(args.folder, "none")
    plain = default(args.folder, "default", {})
    short = default(args.folder, "default-short", BUDGET)
    ray, bytes_ = overhead(args.folder), sizes(args.folder, asha)
    shutil.copy(args.folder / "asha" / "curves.png", RESULTS / "tuning-curves.png")
    for name, text in (
        ("search", found_by(asha, none, plain, short, args.note)),
        ("ray", costs(ray)),
        ("sizes", large(bytes_, ray)),
    ):
        replace_section(RESULTS / "tuning.md", name, text)


def _missed(asha: dict[str, Any], none: dict[str, Any]) -> str:
    """What stopping early cost, if anything."""
    best = none["best"]["trial"]
    state, epochs = asha["ends"][best]
    if state != "stopped":
        return "It kept the best trial."
    score = none["best"]["valid"] - asha["best"]["valid"]
    return (
        f"It stopped trial {best}, the best without it, at epoch {epochs}: what learns slowly at "
        f"first is lost ({score:.4f} validation NDCG@10 here); `--grace_epochs` is the remedy."
    )


def _against_default(asha: Any, none: Any, plain: Any, short: Any) -> str:
    """What the search gained on test data."""
    found = [one["test"]["ndcg@10"] for one in (asha, none)]
    whole, same = (one["test"]["ndcg@10"] for one in (plain, short))
    return (
        f"Found by search {found[0]:.4f} and {found[1]:.4f}, the default configuration {same:.4f} "
        f"in the same {BUDGET['epochs']} epochs and {whole:.4f} trained to its end, "
        f"{'no' if max(found) - whole < 0.003 else 'a'} gain beyond the noise named below."
    )


def found_by(asha: Any, none: Any, plain: Any, short: Any, note: str) -> str:
    """What both searches and the default configuration came to."""

    def row(name: str, found: dict[str, Any]) -> list[str]:
        if "states" not in found:  # one run
            seconds, valid = found["seconds"]["training"], found["best_valid"]["ndcg@10"]
            cells = ["", f"{seconds:,.0f} s", f"{found['epochs']}", "", ""]
        else:
            valid, ends = found["best"]["valid"], found["states"]
            cells = [f"{found['seconds']:,.0f} s", f"{found['trained']:,.0f} s"]
            cells += [f"{n}" for n in (found["epochs"], ends["finished"], ends["stopped"])]
        return [name, *cells, f"{valid:.4f}", f"{found['test']['ndcg@10']:.4f}"]

    heads = ("", "wall time", "training and validation, summed", "epochs", "finished", "stopped")
    sides = {"ASHA": asha, "none": none, "default configuration, same budget": short}
    sides["default configuration, to the end"] = plain
    best = [
        f"- best {which}: trial {one['best']['trial']}: {show_options(one['best']['options'])}"
        for which, one in (("with ASHA", asha), ("without", none))
    ]
    return "\n\n".join(
        (
            note,
            table(
                (*heads, "valid NDCG@10", "test NDCG@10, once"),
                (row(name, found) for name, found in sides.items()),
            ),
            f"ASHA took {none['seconds'] / asha['seconds']:.1f} times less time and "
            f"{none['epochs'] / asha['epochs']:.1f} times fewer epochs. {_missed(asha, none)}",
            _against_default(asha, none, plain, short),
            "\n".join(best),
        )
    )


def costs(ray: dict[str, float]) -> str:
    """What Ray takes."""
    search = "a search, beyond its trials: Ray's start, the first process, the test, pictures"
    trial = "a trial, beyond its training and validation (processes are used again)"
    rows = [
        [search, f"{ray['search']:.1f} s"],
        [trial, f"{ray['trial']:.2f} s"],
        ["the driver's CPU for a trial of one epoch", f"{ray['cpu']:.3f} s"],
        ["state of the search, a trial", f"{ray['state'] / 1e3:.1f} kB"],
    ]
    return table(("", ""), rows)


def large(size: dict[str, float], ray: dict[str, float]) -> str:
    """Measured sizes, and those of a large log."""
    trials, checkpoint = MACHINES * TRIALS_EACH, size["checkpoint_large"]
    shared = f"{size['shared'] / 1e6:.1f} MB ({size['per_event']:.0f} bytes an event)"
    one = f"{size['checkpoint'] / 1e6:.2f} MB ({size['per_parameter']:.1f} bytes a parameter)"
    rows = [
        ["data shared by the trials of a machine", shared, f"{size['shared_large'] / 1e6:,.0f} MB"],
        ["parameters", f"{size['parameters']:,}", f"{size['parameters_large']:,}"],
        ["a checkpoint", one, f"{checkpoint / 1e6:.0f} MB"],
        *(
            [what, "", text]
            for what, text in {
                f"checkpoints of {trials} trials side by side, two of each": (
                    f"{2 * trials * checkpoint / 1e9:.0f} GB"
                ),
                "written to storage if an epoch takes 5 minutes": (
                    f"{trials * checkpoint / 300 / 1e6:.0f} MB/s"
                ),
                "reports to the driver then": f"{trials / 300:.1f} a second",
                "state of a search of 1,000 trials": f"{1000 * ray['state'] / 1e6:.0f} MB",
            }.items()
        ),
    ]
    return table(("", "measured on ml-100k", "computed for ml-20m"), rows)


if __name__ == "__main__":
    main()
