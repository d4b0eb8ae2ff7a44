"""``make bench-attrformer``: AttrFormer's epoch and memory against PosSASRec's, and E / (B^2 T^2).

Same size, windows and batches; sides take turns, ROUNDS times over, every turn in a process of its
own (``attrformer.py --side NAME`` is one). Each figure is the best epoch of its side. Amazon Beauty
where ``--data_path`` holds it, else a generated log of the same kind. Writes
``results/speed_attrformer.md``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from data import short_histories, write_atomic
from page import RESULTS, in_a_process, in_turns, least, machine, mark, replace_section, table
from training import step_of

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.run import Experiment, prepare

GOALS = {"seconds": 4.6, "memory": 3.0}  # Table 4: 6.5 s to 1.4 s
TOP_K = (1, 10, 100)
BEHAVIOUR = ("also_bought", "also_viewed", "bought_together")
RELATIONS: list[Any] = [
    "brand",
    "categories",
    *({"field": field, "source": "behaviour"} for field in BEHAVIOUR),
    "time",
    "position",
]
OURS: dict[str, Any] = {"model": "AttrFormer", "relations": RELATIONS, "relation_heads": 4}
SIDES: dict[str, dict[str, Any]] = {
    "PosSASRec": {"model": "PosSASRec"},
    "AttrFormer": OURS,
    "AttrFormer, cross-entropy": {**OURS, "prior_weight": 0.0, "future_weights": [1.0]},
}
SETS = 254  # of categories, as many different ones as Beauty's items have


def generated(folder: str) -> None:
    """Short histories with attributes as sparse as Beauty's."""
    table = short_histories(0)
    write_atomic(table, Path(folder), "generated")
    rng, items = np.random.default_rng(0), np.unique(table["item_id"])

    def names(count: int, longest: int) -> list[str]:
        return [
            " ".join(map(str, rng.integers(0, count, rng.integers(0, longest + 1)))) for _ in items
        ]

    columns = {
        "item_id:token": items,
        "brand:token": rng.integers(0, 2000, len(items)),
        "categories:token_seq": rng.choice(
            [f"all {cell}" for cell in names(230, 4)][:SETS], len(items)
        ),
        **{f"{field}:token_seq": names(len(items), n) for field, n in zip(BEHAVIOUR, (40, 20, 2))},  # noqa: B905
    }
    pd.DataFrame(columns).to_csv(f"{folder}/generated/generated.item", sep="\t", index=False)


def build(side: str, given: argparse.Namespace, dataset: str, folder: str) -> Experiment:
    """One side of the comparison."""
    options = dict(SIDES[side])
    if options["model"] == "AttrFormer":
        options["load_col"] = {
            "inter": ["user_id", "item_id", "timestamp"],
            "item": ["item_id", "brand", "categories", *BEHAVIOUR],
        }
    d = given.hidden_size
    size = {"hidden_size": d, "inner_size": 4 * d, "n_layers": given.n_layers, "n_heads": 8}
    same = {"MAX_ITEM_LIST_LENGTH": 50, "train_batch_size": 128, "show_progress": False}
    config = {**options, **size, **same, "data_path": folder}
    return prepare(PosConfig(options.pop("model"), dataset, None, config))


def turn(side: str, given: argparse.Namespace, dataset: str, folder: str) -> dict[str, float]:
    """One epoch (or ``--batches`` of it) of one side in this process, after a warm-up."""
    started = time.perf_counter()
    made = build(side, given, dataset, folder)
    setup = time.perf_counter() - started
    loader = made.trainer.training_loader(made.loaders["train"])
    made.model.train()
    batches = [loader.gather(b) for b in loader._batches()[: given.batches or None]]
    step = step_of(made.trainer, made.model.window_loss)
    for batch in batches[:5]:
        step(batch)
    started = time.perf_counter()
    for batch in batches:
        step(batch)
    seconds = (time.perf_counter() - started) / len(batches) * len(loader)
    found = {"seconds": seconds, "memory": peak_rss_mb(), "setup": setup}
    if side == "AttrFormer":
        found |= shares(made, batches)
    return found


def shares(made: Experiment, batches: list[Any]) -> dict[str, float]:
    """E over the squared number of events, and of slots (B T, padding included), by top-K."""
    lookup, rng, found = made.model.lookup, np.random.default_rng(0), {}
    for k in TOP_K:
        lookup.top_k = k
        edges = events = slots = seconds = 0.0
        for batch in batches:
            packed = batch.log_rows.numpy()
            source = np.ones(len(packed), dtype=bool)
            rows = lookup.windows(packed, batch.lengths.numpy(), source, True)
            started = time.perf_counter()
            made_ = lookup.relations(rows, rng, torch.device("cpu"), torch.float32)
            seconds += time.perf_counter() - started
            edges += made_.edges
            events += len(packed) ** 2
            slots += (len(batch.lengths) * int(batch.lengths.max())) ** 2
        found |= {f"events@{k}": edges / events, f"slots@{k}": edges / slots}
        found |= {f"edges@{k}": edges / len(batches), f"lookup@{k}": seconds / len(batches)}
    return found


def measure(given: argparse.Namespace, dataset: str, folder: str) -> dict[str, dict[str, float]]:
    """The best of each side."""
    words = {**vars(given), "dataset": dataset, "data_path": folder}
    flags = [f"--{name}={value}" for name, value in words.items() if name != "side"]
    runs = in_turns(
        SIDES, given.rounds, lambda side: in_a_process("attrformer.py", f"--side={side}", *flags)
    )
    return {side: least(found) for side, found in runs.items()}


def report(best: dict[str, dict[str, float]], given: argparse.Namespace, dataset: str) -> str:
    """The page's section."""
    base, ours = best["PosSASRec"], best["AttrFormer"]
    part = (
        f"{given.batches} batches of an epoch, scaled to all" if given.batches else "whole epochs"
    )
    sides = []
    for side, found in best.items():
        ratio, memory = (found[key] / base[key] for key in ("seconds", "memory"))
        figures = f"{found['seconds']:.1f} s", f"{ratio:.2f}", f"{found['memory']:,.0f} MB"
        sides.append([side, *figures, f"{memory:.2f}", f"{found['setup']:.1f} s"])
    edges = []
    for k in TOP_K:
        figures = f"{ours[f'edges@{k}']:,.0f}", f"{ours[f'events@{k}']:.1e}"
        took = f"{1e3 * ours[f'lookup@{k}']:.0f} ms"
        edges.append([f"{k}", *figures, f"{ours[f'slots@{k}']:.1e}", took])
    reached = [mark(ours[key] / base[key] <= goal) for key, goal in GOALS.items()]
    parts = (
        f"{dataset}, {machine(given.threads)}; d = {given.hidden_size}, {given.n_layers} layers, 8 "
        f"heads, batches of 128 windows of 50; {part}, best of {given.rounds}.",
        table(
            ("model", "epoch", "ratio", "peak memory", "ratio", "setting up, relations included"),
            sides,
        ),
        f"Goals: epoch <= 4.6x {reached[0]}, memory <= 3x {reached[1]}.",
        table(
            (
                "top-K",
                "E a batch",
                "E / interactions^2",
                "E / (B T)^2, padding included",
                "looking up",
            ),
            edges,
        ),
    )
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print, write; or one turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_path", help="folder that holds the dataset's folder")
    parser.add_argument("--dataset", default="amazon-beauty")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--n_layers", type=int, default=3)
    parser.add_argument("--batches", type=int, default=0, help="0: whole epochs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    if given.side:
        print(json.dumps(turn(given.side, given, given.dataset, given.data_path)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.data_path is None:
            generated(folder)
        dataset = given.dataset if given.data_path else "generated"
        best = measure(given, dataset, given.data_path or folder)
    replace_section(RESULTS / "speed_attrformer.md", dataset, report(best, given, dataset))


if __name__ == "__main__":
    main()
