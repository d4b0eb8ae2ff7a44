"""``make bench-attrformer``: AttrFormer's epoch and memory against PosSASRec's, and E / (B^2 T^2).

Same size, windows and batches; sides take turns, ROUNDS times over, every turn in a process of its
own. The figures are those of the fastest turn of each side. The data are Amazon Beauty, in the
folder of ARGS="--data_path FOLDER". Writes ``results/speed_attrformer.md``.
"""

import time
from typing import Any

import numpy as np
import page
import torch
from training import build, time_epochs

from recbole_pos.experiment.folder import peak_rss_mb

DATASET, ROUNDS = "amazon-beauty", 2
# Goals of the ratios to PosSASRec; Table 4 of the paper has 6.5 s to 1.4 s an epoch.
EPOCH_GOAL, MEMORY_GOAL = 4.6, 3.0
TOP_K = (1, 10, 100)  # related interactions that each interaction may have, of each relation
FIELDS = ["brand", "categories", "also_bought", "also_viewed", "bought_together"]
ATTRFORMER: dict[str, Any] = {
    "model": "AttrFormer",
    "relation_heads": 4,
    "relations": [*FIELDS, "time", "position"],
    "load_col": {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", *FIELDS]},
}
SIDES: dict[str, dict[str, Any]] = {
    "PosSASRec": {"model": "PosSASRec"},
    "AttrFormer": ATTRFORMER,
    "AttrFormer, cross-entropy": {**ATTRFORMER, "prior_weight": 0.0, "future_weights": [1.0]},
}
SIZES = {"hidden_size": 64, "inner_size": 256, "n_layers": 2, "n_heads": 8}
SIZES |= {"MAX_ITEM_LIST_LENGTH": 50, "train_batch_size": 128}


def measure(side: str, data_path: str) -> tuple[float, float, float]:
    """Return figures of an epoch of a side, measured in this process after one that warms up.

    Args:
        side: name in SIDES.
        data_path: folder that holds the dataset.

    Returns:
        Seconds of an epoch; MB of memory at its peak; seconds of setting up.
    """
    started = time.perf_counter()
    experiment = build(dataset=DATASET, data_path=data_path, **SIZES, **SIDES[side])
    setup = time.perf_counter() - started
    _, seconds = time_epochs(experiment, 2)
    return seconds, peak_rss_mb(), setup


def count_edges(data_path: str) -> str:
    """Return a table of the pairs of interactions that AttrFormer relates in a batch, by top-K.

    It has their number E, its share of all pairs of the B T places of a batch, padding included,
    and how long it takes to find them.

    Args:
        data_path: folder that holds the dataset.
    """
    experiment = build(dataset=DATASET, data_path=data_path, **SIZES, **ATTRFORMER)
    batches = list(experiment.trainer.training_loader(experiment.loaders["train"]))
    lookup, rng, lines = experiment.model.lookup, np.random.default_rng(0), []
    for k in TOP_K:
        lookup.top_k = k
        edges = places = seconds = 0.0
        for batch in batches:
            # All interactions may be related to; True: windows of a user that follow each other
            # are one history.
            packed = batch.log_rows.numpy()
            is_source = np.ones(len(packed), dtype=bool)
            rows = lookup.pack_windows(packed, batch.lengths.numpy(), is_source, True)
            started = time.perf_counter()
            lookup.build_relations(rows, rng, torch.device("cpu"), torch.float32)
            seconds += time.perf_counter() - started

            by_relation, _ = lookup.find(rows, lookup.make_order(rows, rng))
            edges += sum(len(found.value) for found in by_relation)
            places += (len(batch.lengths) * int(batch.lengths.max())) ** 2
        each, milliseconds = edges / len(batches), 1e3 * seconds / len(batches)
        lines.append([f"{k}", f"{each:,.0f}", f"{edges / places:.1e}", f"{milliseconds:.0f} ms"])
    heads = ("top-K", "E a batch", "E / (B T)^2, padding included", "looking up a batch")
    return page.table(heads, lines)


def report(best: dict[str, tuple[float, float, float]]) -> str:
    """Return the table of the sides, and whether the goals are met.

    Args:
        best: side -> its best figures, from :func:`measure`.
    """
    base_seconds, base_mb, _ = best["PosSASRec"]
    rows = []
    for side, (seconds, mb, setup) in best.items():
        time_cells = f"{seconds:.1f} s", f"{seconds / base_seconds:.2f}"
        memory_cells = f"{mb:,.0f} MB", f"{mb / base_mb:.2f}"
        rows.append([side, *time_cells, *memory_cells, f"{setup:.1f} s"])
    heads = ("model", "epoch", "ratio", "peak memory", "ratio", "setting up, relations included")
    seconds, mb, _ = best["AttrFormer"]
    goals = (
        f"Goals: epoch <= {EPOCH_GOAL:g}x {page.mark(seconds / base_seconds <= EPOCH_GOAL)}, "
        f"memory <= {MEMORY_GOAL:g}x {page.mark(mb / base_mb <= MEMORY_GOAL)}."
    )
    return f"{page.table(heads, rows)}\n\n{goals}"


def main() -> None:
    """Measure, print, write."""
    data_path = page.parse_options(__doc__, data_path="dataset").data_path
    runs = page.in_turns(SIDES, ROUNDS, lambda side: page.run_alone(measure, side, data_path))
    best = {side: min(of_side) for side, of_side in runs.items()}
    about = (
        f"{DATASET}, {page.machine()}; d = 64, 2 layers, 8 heads, batches of 128 windows of 50; "
        f"whole epochs, best of {ROUNDS}."
    )
    text = "\n\n".join((about, report(best), page.run_alone(count_edges, data_path)))
    page.replace_section(page.RESULTS / "speed_attrformer.md", DATASET, text)


if __name__ == "__main__":
    main()
