"""``make bench-sessions``: PosRec against RecBole's SRGNN, training and graph construction.

Both train on the same prefixes in batches of 100 with d = 100 in one process, taking turns; each
figure is the best of ROUNDS. SRGNN is RecBole's model and optimiser in RecBole's training step; its
histories are gathered by the plugin's loader. Without ``--data_path`` sessions are generated, with
lengths and catalogue like diginetica's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from data import make_log, sample_items, write_atomic
from page import in_turns, time_call
from training import build, make_step

from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.graph import Anchors, SessionGraph, weigh_neighbours

BATCH, D, L, ROUNDS = 100, 100, 50, 3


def generate_sessions() -> pd.DataFrame:
    """Return sessions of 2 to 50 interactions, 4.8 on average; one in eight is a step back."""
    rng, items = np.random.default_rng(0), 43_000
    lengths = np.minimum(1 + rng.geometric(1 / 3.8, 30_000), L)
    events = int(lengths.sum())
    item = rng.permutation(items)[sample_items(rng, items, events, 0.6)]
    rank = np.arange(events) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    back = (rng.random(events) < 1 / 8) & (rank >= 2)
    item[back] = item[np.flatnonzero(back) - 2]
    return make_log(lengths, item + 1)


def build_side(model: str, data: str, folder: str, user: str, **options: Any) -> Experiment:
    """Return a model with its data; a tenth of the time is held out, since some of it must be."""
    return build(
        model,
        data,
        data_path=folder,
        USER_ID_FIELD=user,
        load_col={"inter": [user, "item_id", "timestamp"]},
        MAX_ITEM_LIST_LENGTH=L,
        train_batch_size=BATCH,
        eval_args={"split": {"GT": [0.9]}},
        **options,
    )


def srgnn_step(peer: Experiment, anomaly: bool) -> Callable[[Any], Any]:
    """Return a step of RecBole's SRGNN, as in RecBole's ``Trainer._train_epoch``."""
    model = peer.model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        with torch.autograd.set_detect_anomaly(anomaly, check_nan=True):
            optimizer.zero_grad()
            loss = model.calculate_loss(batch)
            loss.item()
            loss.backward()
            optimizer.step()

    return step


def training_rates(ours: Experiment, peer: Experiment, num_batches: int) -> dict[str, float]:
    """Return the best prefixes per second of each side, in turns, after one to warm up."""
    loader = ours.trainer.training_loader(ours.loaders["train"])
    step, rows = make_step(ours.trainer, ours.model.train().window_loss), peer.loaders["train"]
    sides = {
        "PosRec": (iter(loader), step),
        "SRGNN": (iter(rows), srgnn_step(peer, False)),
        "shipped": (iter(rows), srgnn_step(peer, True)),
    }

    def turn(name: str) -> float:
        stream, step = sides[name]
        prefixes, started = 0, time.perf_counter()
        for batch in islice(stream, num_batches):
            step(batch)
            prefixes += len(batch)
        return prefixes / (time.perf_counter() - started)

    runs = in_turns(sides, ROUNDS + 1, turn)
    return {name: max(rates[1:]) for name, rates in runs.items()}


def graph_rates(peer: Experiment) -> dict[str, float]:
    """Return graphs per second of the same random prefixes, in the batches of each side's training.

    RecBole's are random; the plugin's loader puts prefixes of like length together. ``alike`` makes
    what SRGNN does: nodes, the node of each interaction, normalised edges in and out; ``mixed`` the
    same in RecBole's batches. ``anchored`` also has PosRec's anchors and their distances. The sum
    over batches of the best of ROUNDS, since a batch takes less than a slice of a busy CPU.
    """
    rows = peer.loaders["train"]._dataset.inter_feat
    order = np.random.default_rng(0).permutation(len(rows))[: 20 * BATCH]
    indices = torch.from_numpy(order)
    by_length = indices[rows["item_length"][indices].argsort(stable=True)]
    mixed, bucketed = ([rows[part] for part in x.split(BATCH)] for x in (indices, by_length))

    def build_graph(batch: Any) -> SessionGraph:
        items = batch["item_id_list"]
        context = SequenceContext.from_lengths(batch["item_length"], L)
        return SessionGraph.build(items[items > 0], context)

    def alike(batch: Any) -> None:
        weigh_neighbours(build_graph(batch), None, "distance", 0.0, mean=True)

    def anchored(batch: Any) -> None:
        graph = build_graph(batch)
        weigh_neighbours(graph, Anchors.build(graph), "distance", 0.0, mean=False)

    sides = {
        "alike": (alike, bucketed),
        "mixed": (alike, mixed),
        "anchored": (anchored, bucketed),
        "SRGNN": (lambda batch: peer.model._get_slice(batch["item_id_list"]), mixed),
    }

    def turn(name: str) -> list[float]:
        function, batches = sides[name]
        return [time_call(partial(function, batch)) for batch in batches]

    runs = in_turns(sides, 2 * ROUNDS, turn)
    return {name: len(indices) / np.min(of_side, 0).sum() for name, of_side in runs.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_path", type=Path, help="folder of diginetica/")
    parser.add_argument("--dataset", default="diginetica")
    parser.add_argument("--batches", type=int, default=30, help="batches of a turn")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", "2")))
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        where = (given.dataset, str(given.data_path), "session_id")
        if given.data_path is None:
            write_atomic(generate_sessions(), folder, "sessions")
            where = ("sessions", folder, "user_id")
        ours = build_side("PosRec", *where, hidden_size=D, inner_size=D)
        peer = build_side("SRGNN", *where, embedding_size=D, step=1)
    print(
        f"{where[0]}: {len(ours.dataset.log):,} interactions, {ours.dataset.item_num - 1:,} items, "
        f"{len(peer.loaders['train']._dataset):,} prefixes; {torch.get_num_threads()} threads, "
        f"load {os.getloadavg()[0]:.1f} before the first turn"
    )
    rates = graph_rates(peer)
    show("graphs as SRGNN's", rates["alike"], rates["SRGNN"], 20)
    show("the same in random batches", rates["mixed"], rates["SRGNN"])
    show("graphs with anchors and distances", rates["anchored"], rates["SRGNN"])
    rates = training_rates(ours, peer, given.batches)
    show("training", rates["PosRec"], rates["SRGNN"], 2)
    show("training, RecBole as shipped (anomaly detection)", rates["PosRec"], rates["shipped"], 2)
    print(f"peak memory {peak_rss_mb():,.0f} MB, load now {os.getloadavg()[0]:.1f}")


def show(what: str, ours: float, peer: float, goal: float | None = None) -> None:
    """Print both rates and their ratio."""
    print(
        f"{what}: ours {ours:,.0f}, SRGNN {peer:,.0f} prefixes/s, ratio {ours / peer:.1f}"
        + (f" (goal {goal:g})" if goal else "")
    )


if __name__ == "__main__":
    main()
