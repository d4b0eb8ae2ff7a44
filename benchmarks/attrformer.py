"""``make bench-attrformer``: AttrFormer's epoch and memory against PosSASRec's, and E / (B^2 T^2).

Same size, windows and batches; sides take turns, ROUNDS times over, every turn in a process of its
own. Each figure is the best epoch of its side. Data are the toyshop, or Amazon Beauty with
ARGS="--dataset amazon-beauty --data_path FOLDER". Writes ``results/speed_attrformer.md``.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from page import (
    HERE,
    RESULTS,
    in_turns,
    least,
    machine,
    mark,
    parse_options,
    replace_section,
    run_alone,
    table,
    time_call,
)
from training import build, make_step

from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import peak_rss_mb

GOALS = {"seconds": 4.6, "memory": 3.0}  # Table 4: 6.5 s to 1.4 s
TOP_K = (1, 10, 100)
BEHAVIOUR = [
    {"field": field, "source": "behaviour"}
    for field in ("also_bought", "also_viewed", "bought_together")
]
# dataset -> the relations of all its attributes
RELATIONS: dict[str, list[Any]] = {
    "amazon-beauty": ["brand", "categories", *BEHAVIOUR, "time", "position"],
    "toyshop": ["brand", "category", "time", "position"],
}
SIDES: dict[str, dict[str, Any]] = {
    "PosSASRec": {"model": "PosSASRec"},
    "AttrFormer": {"model": "AttrFormer", "relation_heads": 4},
    "AttrFormer, cross-entropy": {
        **{"model": "AttrFormer", "relation_heads": 4},
        **{"prior_weight": 0.0, "future_weights": [1.0]},
    },
}


def build_side(side: str, given: argparse.Namespace) -> Experiment:
    """Return the model of a side with its data."""
    options = {**SIDES[side], "data_path": given.data_path}
    if options["model"] == "AttrFormer":
        relations = RELATIONS[given.dataset]
        fields = [x["field"] if isinstance(x, dict) else x for x in relations[:-2]]
        columns = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", *fields]}
        options |= {"relations": relations, "load_col": columns}
    d = given.hidden_size
    options |= {"hidden_size": d, "inner_size": 4 * d, "n_layers": given.n_layers, "n_heads": 8}
    return build(dataset=given.dataset, MAX_ITEM_LIST_LENGTH=50, train_batch_size=128, **options)


def measure(side: str, given: argparse.Namespace) -> dict[str, float]:
    """Return figures of an epoch (or ``--batches`` of it) in this process, after a warm-up."""
    started = time.perf_counter()
    experiment = build_side(side, given)
    setup = time.perf_counter() - started
    loader = experiment.trainer.training_loader(experiment.loaders["train"])
    experiment.model.train()
    batches = [loader.gather(rows) for rows in loader._get_batches()[: given.batches or None]]
    step = make_step(experiment.trainer, experiment.model.window_loss)
    for batch in batches[:5]:
        step(batch)
    seconds = time_call(lambda: [step(batch) for batch in batches]) / len(batches) * len(loader)
    figures = {"seconds": seconds, "memory": peak_rss_mb(), "setup": setup}
    return figures | (count_edges(experiment, batches) if side == "AttrFormer" else {})


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


def report(best: dict[str, dict[str, float]], given: argparse.Namespace) -> str:
    """Return the page's section."""
    base, ours = best["PosSASRec"], best["AttrFormer"]
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
        f"{given.dataset}, {machine()}; d = {given.hidden_size}, {given.n_layers} layers, 8 "
        f"heads, batches of 128 windows of 50; epochs, best of {given.rounds}.",
        table((*side_heads, "setting up, relations included"), sides),
        f"Goals: epoch <= 4.6x {reached[0]}, memory <= 3x {reached[1]}.",
        table((*edge_heads, "looking up"), edges),
    )
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print, write."""
    options = {"hidden_size": 256, "n_layers": 3, "rounds": 3, "batches": 0}  # 0: whole epochs
    data = {"data_path": str(HERE.parent / "dataset"), "dataset": "toyshop"}
    given = parse_options(__doc__, **data, **options)
    runs = in_turns(SIDES, given.rounds, lambda side: run_alone(measure, side, given))
    best = {side: least(of_side) for side, of_side in runs.items()}
    replace_section(RESULTS / "speed_attrformer.md", given.dataset, report(best, given))


if __name__ == "__main__":
    main()
