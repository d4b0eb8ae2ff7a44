"""``make bench-attrformer``: AttrFormer's epoch and memory against PosSASRec's, and E / (B^2 T^2).

Same size, windows and batches; sides take turns, ROUNDS times over, every turn in a process of its
own. Each figure is the best epoch of its side. Amazon Beauty where ``--data_path`` holds it, else
generated data of the same kind. Writes ``results/speed_attrformer.md``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from data import short_histories, write_atomic
from page import RESULTS, in_turns, least, machine, mark, replace_section, run_alone, table
from training import build, make_step

from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.memory import keep_freed_memory

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


def generate(folder: str) -> None:
    """Write short histories with attributes as sparse as Beauty's."""
    table = short_histories()
    write_atomic(table, Path(folder), "generated")
    rng, items = np.random.default_rng(0), np.unique(table["item_id"])

    def draw_cells(count: int, longest: int) -> list[str]:
        lengths = (rng.integers(0, longest + 1) for _ in items)
        return [" ".join(map(str, rng.integers(0, count, length))) for length in lengths]

    brands = rng.integers(0, 2000, len(items))
    categories = [f"all {cell}" for cell in draw_cells(230, 4)][:SETS]
    columns = {
        "item_id:token": items,
        "brand:token": brands,
        "categories:token_seq": rng.choice(categories, len(items)),
    }
    for field, longest in zip(BEHAVIOUR, (40, 20, 2), strict=True):
        columns[f"{field}:token_seq"] = draw_cells(len(items), longest)
    pd.DataFrame(columns).to_csv(f"{folder}/generated/generated.item", sep="\t", index=False)


def build_side(side: str, given: argparse.Namespace, dataset: str, folder: str) -> Experiment:
    """Return the model of a side with its data."""
    options = {**SIDES[side], "data_path": folder}
    if options["model"] == "AttrFormer":
        columns = ["item_id", "brand", "categories", *BEHAVIOUR]
        options["load_col"] = {"inter": ["user_id", "item_id", "timestamp"], "item": columns}
    d = given.hidden_size
    options |= {"hidden_size": d, "inner_size": 4 * d, "n_layers": given.n_layers, "n_heads": 8}
    options |= {"MAX_ITEM_LIST_LENGTH": 50, "train_batch_size": 128}
    return build(dataset=dataset, **options)


def measure(side: str, given: argparse.Namespace, dataset: str, folder: str) -> dict[str, float]:
    """Return figures of an epoch (or ``--batches`` of it) in this process, after a warm-up."""
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    started = time.perf_counter()
    experiment = build_side(side, given, dataset, folder)
    setup = time.perf_counter() - started
    loader = experiment.trainer.training_loader(experiment.loaders["train"])
    experiment.model.train()
    batches = [loader.gather(rows) for rows in loader._get_batches()[: given.batches or None]]
    step = make_step(experiment.trainer, experiment.model.window_loss)
    for batch in batches[:5]:
        step(batch)
    started = time.perf_counter()
    for batch in batches:
        step(batch)
    seconds = (time.perf_counter() - started) / len(batches) * len(loader)
    figures = {"seconds": seconds, "memory": peak_rss_mb(), "setup": setup}
    if side == "AttrFormer":
        figures |= count_edges(experiment, batches)
    return figures


def count_edges(experiment: Experiment, batches: list[Any]) -> dict[str, float]:
    """Return E and its share of squared interactions, and of slots (B T, padded), by top-K."""
    lookup, rng, figures = experiment.model.lookup, np.random.default_rng(0), {}
    for k in TOP_K:
        lookup.top_k = k
        edges = interactions = slots = seconds = 0.0
        for batch in batches:
            packed = batch.log_rows.numpy()
            is_source = np.ones(len(packed), dtype=bool)
            rows = lookup.pack_windows(packed, batch.lengths.numpy(), is_source, True)
            started = time.perf_counter()
            relations = lookup.build_relations(rows, rng, torch.device("cpu"), torch.float32)
            seconds += time.perf_counter() - started
            edges += relations.edges
            interactions += len(packed) ** 2
            slots += (len(batch.lengths) * int(batch.lengths.max())) ** 2
        figures |= {f"events@{k}": edges / interactions, f"slots@{k}": edges / slots}
        figures |= {f"edges@{k}": edges / len(batches), f"lookup@{k}": seconds / len(batches)}
    return figures


def report(best: dict[str, dict[str, float]], given: argparse.Namespace, dataset: str) -> str:
    """Return the page's section."""
    base, ours = best["PosSASRec"], best["AttrFormer"]
    timed = f"{given.batches} batches of an epoch, scaled to all" if given.batches else ""
    sides = []
    for side, figures in best.items():
        ratio, memory = (figures[key] / base[key] for key in ("seconds", "memory"))
        cells = f"{figures['seconds']:.1f} s", f"{ratio:.2f}", f"{figures['memory']:,.0f} MB"
        sides.append([side, *cells, f"{memory:.2f}", f"{figures['setup']:.1f} s"])
    edges = []
    for k in TOP_K:
        cells = f"{ours[f'edges@{k}']:,.0f}", f"{ours[f'events@{k}']:.1e}"
        lookup = f"{1e3 * ours[f'lookup@{k}']:.0f} ms"
        edges.append([f"{k}", *cells, f"{ours[f'slots@{k}']:.1e}", lookup])
    reached = [mark(ours[key] / base[key] <= goal) for key, goal in GOALS.items()]
    side_heads = ("model", "epoch", "ratio", "peak memory", "ratio")
    edge_heads = ("top-K", "E a batch", "E / interactions^2", "E / (B T)^2, padding included")
    parts = (
        f"{dataset}, {machine(given.threads)}; d = {given.hidden_size}, {given.n_layers} layers, 8 "
        f"heads, batches of 128 windows of 50; {timed or 'whole epochs'}, best of {given.rounds}.",
        table((*side_heads, "setting up, relations included"), sides),
        f"Goals: epoch <= 4.6x {reached[0]}, memory <= 3x {reached[1]}.",
        table((*edge_heads, "looking up"), edges),
    )
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_path", help="folder that holds the dataset's folder")
    parser.add_argument("--dataset", default="amazon-beauty")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--n_layers", type=int, default=3)
    parser.add_argument("--batches", type=int, default=0, help="0: whole epochs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    dataset = given.dataset if given.data_path else "generated"
    with tempfile.TemporaryDirectory() as folder:
        if given.data_path is None:
            generate(folder)
        where = given, dataset, given.data_path or folder
        runs = in_turns(SIDES, given.rounds, lambda side: run_alone(measure, side, *where))
    best = {side: least(of_side) for side, of_side in runs.items()}
    replace_section(RESULTS / "speed_attrformer.md", dataset, report(best, given, dataset))


if __name__ == "__main__":
    main()
