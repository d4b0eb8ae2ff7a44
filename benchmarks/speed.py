"""``make bench``: training speed as ratios against peers measured in alternation in the same run.

Each figure is the best of ROUNDS runs of its side, every run in a process of its own, so that peak
memory and allocator are its own. Prints the table and writes ``results/speed.md``.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from data import short_histories, write_atomic
from naive import NaiveSASRec, train_batches, windows_as_rows
from page import RESULTS, Report, in_turns, machine, replace_section, run_alone
from training import build, epoch_flops, make_step, peak_flops

from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.model.training import make_adapter

ROUNDS = 2
CASES = [("ml-100k", 50, 12, 1.9), ("ml-100k", 200, 6, 3.0), ("short", 50, 4, 10.0)]
TARGETS, ROWS, MEMORY = "{:,.0f} targets/s", "{:,.0f} rows/s", "{:,.0f} MB"
Turn = tuple[str, str, int, int]  # side, data, length, epochs or batches
D, INNER, LAYERS = 64, 256, 2
SIZES = {
    "hidden_size": D,
    "inner_size": INNER,
    "n_layers": LAYERS,
    "n_heads": 2,
    "hidden_dropout_prob": 0.2,
    "attn_dropout_prob": 0.0,
}


# --- the sides, each in a process of its own ---


def measure(side: str, data: str, length: int, count: int) -> dict[str, Any]:
    """Return speed and memory of ``count`` epochs or batches of a side."""
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", "2")))
    if side.startswith("BERT4Rec"):
        return train_bert4rec(data, length, count, side.endswith("recbole"))
    if side == "naive":
        return train_naive(data, length, count)
    if side.startswith("recbole"):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # RecBole writes logs into the working directory
            figures = train_recbole(length, side == "recbole-anomaly", count or None)
            os.chdir("/")
        return figures
    return train_ours(side, data, length, count)


def build_side(model: str, data: str, length: int, **options: Any) -> Experiment:
    """Return a model with its data; generated data are written to a temporary folder."""
    given = {"MAX_ITEM_LIST_LENGTH": length, **SIZES, **options}
    with tempfile.TemporaryDirectory() as folder:
        if data == "short":
            write_atomic(short_histories(), Path(folder), data)
            given["data_path"] = folder
        return build(model, data, **given)


def train_ours(model: str, data: str, length: int, epochs: int) -> dict[str, Any]:
    """Train epochs of a plugin model, each with its validation; the first epoch warms up."""
    keep_freed_memory()
    options = {} if model == "PosSASRec" else {"n_heads": 1, "attn_dropout_prob": 0.2}
    experiment = build_side(model, data, length, epochs=epochs, **options)
    trainer, started, curve = experiment.trainer, time.perf_counter(), []
    loader = trainer.training_loader(experiment.loaders["train"])
    speeds, evaluations = [], []
    trainer.eval_collector.data_collect(experiment.loaders["train"])
    for epoch in range(epochs):
        line = trainer._train_epoch(loader, epoch)
        speeds.append(line["targets_per_second"])
        trained = time.perf_counter()
        result = trainer.evaluate(experiment.loaders["valid"], load_best_model=False)
        evaluations.append(time.perf_counter() - trained)
        curve.append((trained - started, float(result["ndcg@10"])))
    best = max(speeds[1:])
    products = (4, 2) if model == "PosSASRec" else (1, 1)
    flops = epoch_flops(loader, D, LAYERS, experiment.dataset.item_num - 1, *products)
    return {
        "targets": loader.num_targets,
        "targets_per_second": best,
        "epoch_seconds": loader.num_targets / best,
        "floor_seconds": flops / peak_flops(torch.device("cpu"), torch.float32, 2048),
        "evaluation_seconds": min(evaluations),
        "users": len(experiment.loaders["valid"]._dataset),
        "curve": curve,
        "peak_rss_mb": peak_rss_mb(),
    }


def train_naive(data: str, length: int, batches: int) -> dict[str, Any]:
    """Train the naive reference on the same windows."""
    experiment = build_side("PosSASRec", data, length)
    windows = experiment.loaders["train"]._dataset.make_training_windows()
    rows = windows_as_rows(experiment.dataset.log.items, windows, length)
    model = NaiveSASRec(experiment.dataset.item_num, length)
    train_batches(model, rows, 128, 2)
    started = time.perf_counter()
    targets = train_batches(model, rows, 128, batches)
    speed = targets / (time.perf_counter() - started)
    return {"targets_per_second": speed, "peak_rss_mb": peak_rss_mb()}


def train_recbole(length: int, anomaly: bool, batches: int | None) -> dict[str, Any]:
    """Train RecBole's own SASRec: its config, dataset, augmentation, loaders and trainer.

    Args:
        length: MAX_ITEM_LIST_LENGTH.
        anomaly: autograd anomaly detection on, as RecBole leaves it after importing its models.
        batches: time this many batches; None for two whole epochs and a validation.
    """
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.trainer import Trainer
    from recbole.utils import get_model, init_seed

    torch.autograd.set_detect_anomaly(anomaly)
    options = {
        "MAX_ITEM_LIST_LENGTH": length,
        "train_neg_sample_args": None,
        "metrics": ["NDCG"],
        "valid_metric": "NDCG@10",
        "show_progress": False,
        "checkpoint_dir": os.getcwd(),
    }
    config = Config("SASRec", "ml-100k", config_dict=options)
    init_seed(config["seed"], True)
    train, valid, _ = data_preparation(config, create_dataset(config))
    model = get_model("SASRec")(config, train._dataset)
    trainer = Trainer(config, model)
    trainer.eval_collector.data_collect(train)
    rows, started = 0, None
    for _ in range(2 if batches is None else 1):
        model.train()
        for number, batch in enumerate(train):
            if started is None and number == 1:  # the first batch warms up
                started, rows = time.perf_counter(), 0
            trainer.optimizer.zero_grad()
            loss = model.calculate_loss(batch)
            trainer._check_nan(loss)
            loss.backward()
            trainer.optimizer.step()
            rows += len(batch)
            if number == batches:
                break
    seconds = time.perf_counter() - started
    figures = {"targets_per_second": rows / seconds, "peak_rss_mb": peak_rss_mb()}
    if batches is None:
        ndcg = float(trainer._valid_epoch(valid)[1]["ndcg@10"])
        figures |= {"seconds": seconds, "ndcg@10": ndcg}
    return figures


def train_bert4rec(data: str, length: int, batches: int, own_loss: bool) -> dict[str, Any]:
    """Train BERT4Rec through the plugin, with RecBole's own loss or the plugin's."""
    keep_freed_memory()
    experiment = build_side("BERT4Rec", data, length)
    trainer, model = experiment.trainer, experiment.model.train()
    if own_loss:
        loss = model.calculate_loss
    else:
        loss = make_adapter(experiment.config, model).choose_loss(packed=False)
    rows, started, step = 0, time.perf_counter(), make_step(trainer, loss)
    for number, batch in zip(range(batches + 1), experiment.loaders["train"]):  # noqa: B905
        step(batch)
        if number == 0:  # warms up
            started = time.perf_counter()
        else:
            rows += len(batch)
    return {"targets_per_second": rows / (time.perf_counter() - started)}


# --- the comparison ---


def best_of(*turns: Turn, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return the fastest run of each side."""
    runs = in_turns(turns, rounds, lambda turn: run_alone(measure, *turn))
    return [max(of_side, key=lambda run: run["targets_per_second"]) for of_side in runs.values()]


def against_recbole(report: Report) -> None:
    """Compare PosSASRec and RecBole's SASRec on ml-100k, L = 50, both covering all targets."""
    turns = (("recbole-anomaly", "ml-100k", 50, 0), ("recbole-plain", "ml-100k", 50, 10))
    stock, plain = best_of(*turns, rounds=1)
    (ours,) = best_of(("PosSASRec", "ml-100k", 50, 12))
    speed, key = ours["targets_per_second"], "targets_per_second"
    what = "PosSASRec / RecBole's SASRec as shipped (anomaly detection on), ml-100k, L=50"
    report.add(what, speed, stock[key], TARGETS, at_least=80)
    what = "the same with anomaly detection off (10 batches)"
    report.add(what, speed, plain[key], TARGETS)
    score = stock["ndcg@10"]
    reached = next((seconds for seconds, value in ours["curve"] if value >= score), math.inf)
    what = f"training seconds to validation NDCG@10 {score:.4f} (RecBole's after 2 epochs)"
    report.add(what, reached, stock["seconds"], "{:.1f} s", at_most=1 / 20)
    report.add("peak memory", ours["peak_rss_mb"], stock["peak_rss_mb"], MEMORY, at_most=1 / 4)
    what = f"full-ranking evaluation of {ours['users']} users, to a second"
    report.add(what, ours["evaluation_seconds"], 1.0, at_most=1)


def against_naive(report: Report) -> None:
    """Compare PosSASRec with the naive reference, FPARec with PosSASRec, all with the floor."""
    for data, length, batches, goal in CASES:
        ours, naive, fparec = best_of(
            ("PosSASRec", data, length, 4),
            ("naive", data, length, batches),
            ("FPARec", data, length, 4),
        )
        where, key, epoch = f"{data}, L={length}", "targets_per_second", "epoch_seconds"
        report.add(f"PosSASRec / naive, {where}", ours[key], naive[key], TARGETS, at_least=goal)
        what, most = f"FPARec epoch / PosSASRec epoch, {where}", 0.9 if length == 200 else None
        report.add(what, fparec[epoch], ours[epoch], at_most=most)
        for name, run in (("PosSASRec", ours), ("FPARec", fparec)):
            what = f"{name} epoch / matrix-multiply floor, {where}"
            report.add(what, run[epoch], run["floor_seconds"], at_most=2)


def bert4rec(report: Report) -> None:
    """Compare RecBole's BERT4Rec with a loss of masked interactions only and with its own."""
    turns = (("BERT4Rec", "short", 50, 4), ("BERT4Rec-recbole", "short", 50, 2))
    ours, stock = (run["targets_per_second"] for run in best_of(*turns))
    what = "RecBole's BERT4Rec through the plugin / with its own loss, short, L=50"
    report.add(what, ours, stock, ROWS)


def main() -> None:
    """Measure, print, write."""
    sys.argv = sys.argv[:1]  # RecBole's configuration reads it
    report = Report()
    against_naive(report)
    against_recbole(report)
    bert4rec(report)
    replace_section(RESULTS / "speed.md", "speed", f"{machine()}, best of {ROUNDS}.\n\n{report}")


if __name__ == "__main__":
    main()
