"""``make bench-sessions``: PosRec against RecBole's SRGNN, training and graph construction alone.

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
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from data import make_log, write_atomic
from page import in_turns
from training import step_of

import recbole_pos  # noqa: F401  (RecBole needs its fixes to start at all on this numpy)
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.run import Experiment, prepare
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.graph import Anchors, SessionGraph, neighbourhoods

BATCH, D, L, ROUNDS = 100, 100, 50, 3


def generated_sessions(seed: int, sessions: int = 30_000, items: int = 43_000) -> pd.DataFrame:
    """Sessions of 2 to 50 events, 4.8 on average; one event in eight is a step back."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(1 + rng.geometric(1 / 3.8, sessions), L)
    popularity = np.arange(1, items + 1, dtype=float) ** -0.6
    events = int(lengths.sum())
    item = rng.permutation(items)[rng.choice(items, events, p=popularity / popularity.sum())]
    rank = np.arange(events) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    back = (rng.random(events) < 1 / 8) & (rank >= 2)
    item[back] = item[np.flatnonzero(back) - 2]
    return make_log(lengths, item + 1)


def experiment(model: str, data: str, folder: str, user: str, **options: Any) -> Experiment:
    """A model with its data; a tenth of the time is held out, since some of it must be."""
    given = {
        "data_path": folder,
        "USER_ID_FIELD": user,
        "load_col": {"inter": [user, "item_id", "timestamp"]},
        "MAX_ITEM_LIST_LENGTH": L,
        "train_batch_size": BATCH,
        "eval_args": {"split": {"GT": [0.9]}},
        "show_progress": False,
    }
    return prepare(PosConfig(model, data, None, {**given, **options}))


def turn(
    batches: Iterable[Any], many: int, step: Callable[[Any], Any]
) -> Callable[[], tuple[int, float]]:
    """Runs some batches; prefixes and seconds."""
    stream = iter(batches)

    def run() -> tuple[int, float]:
        prefixes, started = 0, time.perf_counter()
        for batch in islice(stream, many):
            step(batch)
            prefixes += len(batch)
        return prefixes, time.perf_counter() - started

    return run


def ours(made: Experiment) -> tuple[Iterable[Any], Callable[[Any], Any]]:
    """Batches of PosRec, and a step as the trainer makes it."""
    loader = made.trainer.training_loader(made.loaders["train"])
    return loader, step_of(made.trainer, made.model.train().window_loss)


def rival(made: Experiment, anomaly: bool) -> tuple[Iterable[Any], Callable[[Any], Any]]:
    """The same of RecBole's SRGNN, its step as in RecBole's ``Trainer._train_epoch``."""
    model = made.model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        with torch.autograd.set_detect_anomaly(anomaly, check_nan=True):
            optimizer.zero_grad()
            loss = model.calculate_loss(batch)
            loss.item()
            loss.backward()
            optimizer.step()

    return made.loaders["train"], step


def rates(sides: dict[str, Callable[[], tuple[int, float]]]) -> dict[str, float]:
    """The best prefixes per second of each side, in turns, after one to warm up."""
    runs = in_turns(sides, ROUNDS + 1, lambda name: sides[name]())
    return {name: max(n / seconds for n, seconds in found[1:]) for name, found in runs.items()}


def graph_rates(peer: Experiment) -> dict[str, float]:
    """Graphs of the same random prefixes, each side in the batches that its training makes.

    RecBole's are random; the plugin's loader puts prefixes of like length together. ``alike`` makes
    what SRGNN does: nodes, the node of each event, normalised edges in and out; ``mixed`` the same
    in RecBole's batches. ``anchored`` has PosRec's anchors and their distances besides. The sum
    over batches of the best of ROUNDS, since a batch takes less than a slice of a busy CPU.
    """
    rows = peer.loaders["train"]._dataset.inter_feat
    drawn = np.random.default_rng(0).permutation(len(rows))[: 20 * BATCH]
    chosen = torch.from_numpy(drawn)
    by_length = chosen[rows["item_length"][chosen].argsort(stable=True)]
    mixed, bucketed = ([rows[part] for part in x.split(BATCH)] for x in (chosen, by_length))

    def graph(batch: Any) -> SessionGraph:
        items = batch["item_id_list"]
        context = SequenceContext.from_lengths(batch["item_length"], L)
        return SessionGraph.build(items[items > 0], context)

    def alike(batch: Any) -> None:
        neighbourhoods(graph(batch), None, "distance", 0.0, mean=True)

    def anchored(batch: Any) -> None:
        made = graph(batch)
        neighbourhoods(made, Anchors.build(made), "distance", 0.0, mean=False)

    sides = {
        "alike": (alike, bucketed),
        "mixed": (alike, mixed),
        "anchored": (anchored, bucketed),
        "SRGNN": (lambda batch: peer.model._get_slice(batch["item_id_list"]), mixed),
    }
    best = {name: np.full(len(mixed), np.inf) for name in sides}
    for _ in range(2 * ROUNDS):
        for name, (build, batches) in sides.items():
            for number, batch in enumerate(batches):
                started = time.perf_counter()
                build(batch)
                seconds = time.perf_counter() - started
                best[name][number] = min(best[name][number], seconds)
    return {name: len(chosen) / seconds.sum() for name, seconds in best.items()}


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
            write_atomic(generated_sessions(0), folder, "sessions")
            where = ("sessions", folder, "user_id")
        mine = experiment("PosRec", *where, hidden_size=D, inner_size=D)
        peer = experiment("SRGNN", *where, embedding_size=D, step=1)
    print(
        f"{where[0]}: {len(mine.dataset.log):,} interactions, {mine.dataset.item_num - 1:,} items, "
        f"{len(peer.loaders['train']._dataset):,} prefixes; {torch.get_num_threads()} threads, "
        f"load {os.getloadavg()[0]:.1f} before the first turn"
    )
    found = graph_rates(peer)
    show("graphs as SRGNN's", found["alike"], found["SRGNN"], 20)
    show("the same in random batches", found["mixed"], found["SRGNN"])
    show("graphs with anchors and distances", found["anchored"], found["SRGNN"])
    sides = {"PosRec": ours(mine), "SRGNN": rival(peer, False), "shipped": rival(peer, True)}
    found = rates({name: turn(one, given.batches, step) for name, (one, step) in sides.items()})
    show("training", found["PosRec"], found["SRGNN"], 2)
    show("training, RecBole as shipped (anomaly detection)", found["PosRec"], found["shipped"], 2)
    print(f"peak memory {peak_rss_mb():,.0f} MB, load now {os.getloadavg()[0]:.1f}")


def show(what: str, ours: float, rival: float, goal: float | None = None) -> None:
    """One line: both rates and their ratio."""
    print(
        f"{what}: ours {ours:,.0f}, SRGNN {rival:,.0f} prefixes/s, ratio {ours / rival:.1f}"
        + (f" (goal {goal:g})" if goal else "")
    )


if __name__ == "__main__":
    main()
