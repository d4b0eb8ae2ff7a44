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
import page
import torch
from training import build, make_step

from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import peak_rss_mb

# Goals of the ratios to PosSASRec; Table 4 of the paper has 6.5 s to 1.4 s an epoch.
GOALS = {"seconds": 4.6, "memory": 3.0}
TOP_K = (1, 10, 100)  # related interactions that each interaction may have, of each relation
BEHAVIOUR = ["also_bought", "also_viewed", "bought_together"]
# dataset -> the relations of all its attributes
RELATIONS = {
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


def build_side(side: str, args: argparse.Namespace) -> Experiment:
    """Return the model of a side, with its data and trainer.

    Args:
        side: name in SIDES.
        args: options of the command line.
    """
    options = {**SIDES[side], "data_path": args.data_path}
    if options["model"] == "AttrFormer":
        # Read the attributes of items that relations compare; the last two need no attribute.
        relations = RELATIONS[args.dataset]
        columns = {
            "inter": ["user_id", "item_id", "timestamp"],
            "item": ["item_id", *relations[:-2]],
        }
        options |= {"relations": relations, "load_col": columns}
    d = args.hidden_size
    options |= {"hidden_size": d, "inner_size": 4 * d, "n_layers": args.n_layers, "n_heads": 8}
    return build(dataset=args.dataset, MAX_ITEM_LIST_LENGTH=50, train_batch_size=128, **options)


def measure(side: str, args: argparse.Namespace) -> dict[str, float]:
    """Return figures of an epoch of a side, measured in this process after a warm-up.

    Args:
        side: name in SIDES.
        args: options of the command line. With ``--batches`` only so many are measured, and the
            time of an epoch is extrapolated.

    Returns:
        ``seconds`` of an epoch, ``memory`` in MB at its peak, ``setup`` in seconds; for AttrFormer
        also the figures of :func:`count_edges`.
    """
    started = time.perf_counter()
    experiment = build_side(side, args)
    setup = time.perf_counter() - started
    loader = experiment.trainer.training_loader(experiment.loaders["train"])
    experiment.model.train()
    batches = [loader.gather(rows) for rows in loader._get_batches()[: args.batches or None]]
    step = make_step(experiment.trainer, experiment.model.window_loss)
    for batch in batches[:5]:
        step(batch)
    seconds = (
        page.time_call(lambda: [step(batch) for batch in batches]) / len(batches) * len(loader)
    )
    figures = {"seconds": seconds, "memory": peak_rss_mb(), "setup": setup}
    return figures | (count_edges(experiment, batches) if side == "AttrFormer" else {})


def count_edges(experiment: Experiment, batches: list[Any]) -> dict[str, float]:
    """Return how many pairs of interactions AttrFormer relates, and how long finding them takes.

    Args:
        experiment: the model with its data.
        batches: training batches.

    Returns:
        For each top-K, ``edges@K``: pairs E in a batch; ``events@K``: E divided by the square of
        the number of interactions; ``slots@K``: E divided by the square of B T, padding included;
        ``lookup@K``: seconds of a batch.
    """
    lookup, rng, figures = experiment.model.lookup, np.random.default_rng(0), {}
    for k in TOP_K:
        lookup.top_k = k
        edges = interactions = slots = seconds = 0.0
        for batch in batches:
            # All interactions may be related to; True: windows of a user that follow each other
            # are one history.
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


def report(best: dict[str, dict[str, float]], args: argparse.Namespace) -> str:
    """Return the page's section: tables of the sides and of pairs by top-K, and the goals.

    Args:
        best: side -> its best figures, from :func:`measure`.
        args: options of the command line.
    """
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
    reached = [page.mark(ours[key] / base[key] <= goal) for key, goal in GOALS.items()]
    side_heads = ("model", "epoch", "ratio", "peak memory", "ratio")
    edge_heads = ("top-K", "E a batch", "E / interactions^2", "E / (B T)^2, padding included")
    parts = (
        f"{args.dataset}, {page.machine()}; d = {args.hidden_size}, {args.n_layers} layers, 8 "
        f"heads, batches of 128 windows of 50; epochs, best of {args.rounds}.",
        page.table((*side_heads, "setting up, relations included"), sides),
        f"Goals: epoch <= 4.6x {reached[0]}, memory <= 3x {reached[1]}.",
        page.table((*edge_heads, "looking up"), edges),
    )
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print, write."""
    options = {"hidden_size": 256, "n_layers": 3, "rounds": 3, "batches": 0}  # 0: whole epochs
    data = {"data_path": str(page.HERE.parent / "dataset"), "dataset": "toyshop"}
    args = page.parse_options(__doc__, **data, **options)
    runs = page.in_turns(SIDES, args.rounds, lambda side: page.run_alone(measure, side, args))
    best = {side: page.least(of_side) for side, of_side in runs.items()}
    page.replace_section(page.RESULTS / "speed_attrformer.md", args.dataset, report(best, args))


if __name__ == "__main__":
    main()
