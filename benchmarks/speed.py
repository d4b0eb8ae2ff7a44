"""``make bench``: training speed as ratios against peers measured in alternation in the same run.

Each figure is the best of ROUNDS runs of its side, every run in a process of its own, so that peak
memory and allocator are its own. Prints the table and writes ``results/speed.md``.
"""

import math
import os
import sys
import tempfile
import time
from typing import Any

import torch
from data import short_histories, write_atomic
from page import RATIO_HEADS, RESULTS, compare, in_turns, machine, replace_section, run_alone, table
from training import LAYERS, SIZES, D, build, epoch_flops, peak_flops

from recbole_pos.experiment.folder import peak_rss_mb

ROUNDS, EPOCHS = 2, 4
CASES = (("ml-100k", 50), ("ml-100k", 200), ("short", 50))
TARGETS, MEMORY = "{:,.0f} targets/s", "{:,.0f} MB"  # how figures are written
# Side, data, longest window, and epochs; of RecBole's SASRec batches, where 0 is two epochs.
Turn = tuple[str, str, int, int]
# model -> its options; FPARec has one head, and dropout only on attention
MODELS: dict[str, dict[str, Any]] = {
    "PosSASRec": {**SIZES, "n_heads": 2, "attn_dropout_prob": 0.0},
    "FPARec": {**SIZES, "n_heads": 1, "attn_dropout_prob": 0.2},
}
# model -> the projections and the products of pairs in a layer
PRODUCTS = {"PosSASRec": (4, 2), "FPARec": (1, 1)}


# --- the sides, each in a process of its own ---


def measure(side: str, data: str, length: int, count: int) -> dict[str, Any]:
    """Return speed and memory of one side, measured in this process.

    Args:
        side: a model of ours; or RecBole's ``SASRec``, or ``SASRec-anomaly`` as RecBole leaves it
            after importing its models, with anomaly detection on.
        data: ``ml-100k``; or ``short``, which is generated, of our models.
        length: longest window of a history.
        count: number of epochs of our model, or of batches of RecBole's (0 for two epochs).
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # RecBole writes logs into the working directory
        options: dict[str, Any] = {"MAX_ITEM_LIST_LENGTH": length}
        if data == "short":
            write_atomic(short_histories(), folder, data)
            options["data_path"] = folder
        if side in MODELS:
            figures = train_ours(side, data, count, options)
        else:
            figures = train_recbole(count, options, detects_anomalies=side == "SASRec-anomaly")
        os.chdir("/")
    return figures


def train_ours(model: str, data: str, epochs: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train a plugin model for some epochs, each with its validation; the first epoch warms up.

    Args:
        model: name of the model.
        data: name of the dataset.
        epochs: number of epochs.
        options: options of the run.

    Returns:
        ``targets_per_second`` (predicted items) and ``epoch_seconds`` of the fastest epoch;
        ``floor_seconds``, which its matrix products alone would take; ``evaluation_seconds`` of
        ``users``; ``curve``, seconds so far and NDCG@10 after each epoch; ``peak_rss_mb``.
    """
    experiment = build(model, data, epochs=epochs, **MODELS[model], **options)
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
    flops = epoch_flops(loader, D, LAYERS, experiment.dataset.item_num - 1, *PRODUCTS[model])
    return {
        "targets_per_second": best,
        "epoch_seconds": loader.num_targets / best,
        "floor_seconds": flops / peak_flops("cpu", torch.float32, 2048),
        "evaluation_seconds": min(evaluations),
        "users": len(experiment.loaders["valid"]._dataset),
        "curve": curve,
        "peak_rss_mb": peak_rss_mb(),
    }


def train_recbole(batches: int, options: dict[str, Any], detects_anomalies: bool) -> dict[str, Any]:
    """Train RecBole's SASRec on ml-100k: its config, dataset, augmentation, loaders and trainer.

    Args:
        batches: time this many batches; 0 for two whole epochs and a validation.
        options: options of the run.
        detects_anomalies: whether autograd's anomaly detection is on.

    Returns:
        ``targets_per_second`` and ``peak_rss_mb``; with whole epochs also ``seconds`` and
        ``ndcg@10``.
    """
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.trainer import Trainer
    from recbole.utils import get_model, init_seed

    options |= {"train_neg_sample_args": None, "metrics": ["NDCG"], "valid_metric": "NDCG@10"}
    options |= {"show_progress": False, "checkpoint_dir": os.getcwd()}
    config = Config("SASRec", "ml-100k", config_dict=options)
    init_seed(config["seed"], True)
    train, valid, _ = data_preparation(config, create_dataset(config))
    trainer = Trainer(config, get_model("SASRec")(config, train._dataset))
    trainer.eval_collector.data_collect(train)

    torch.autograd.set_detect_anomaly(detects_anomalies)
    # What RecBole's trainer does in an epoch, so that it can be stopped after some batches.
    rows, started = 0, None
    for _ in range(1 if batches else 2):
        trainer.model.train()
        for number, batch in enumerate(train):
            if started is None and number == 1:  # the first batch warms up
                started, rows = time.perf_counter(), 0
            trainer.optimizer.zero_grad()
            loss = trainer.model.calculate_loss(batch)
            trainer._check_nan(loss)
            loss.backward()
            trainer.optimizer.step()
            rows += len(batch)
            if number == (batches or math.inf):
                break

    seconds = time.perf_counter() - started
    figures = {"targets_per_second": rows / seconds, "peak_rss_mb": peak_rss_mb()}
    if not batches:
        ndcg = float(trainer._valid_epoch(valid)[1]["ndcg@10"])
        figures |= {"seconds": seconds, "ndcg@10": ndcg}
    return figures


# --- the comparison ---


def best_of(*turns: Turn, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return the fastest run of each side.

    Args:
        turns: the arguments of :func:`measure` for each side.
        rounds: how many times each side is measured.
    """
    runs = in_turns(turns, rounds, lambda turn: run_alone(measure, *turn))
    return [max(of_side, key=lambda run: run["targets_per_second"]) for of_side in runs.values()]


def against_recbole() -> list[list[str]]:
    """Return rows that compare PosSASRec with RecBole's SASRec on ml-100k, L = 50.

    Both train all targets.
    """
    turns = (("SASRec-anomaly", "ml-100k", 50, 0), ("SASRec", "ml-100k", 50, 10))
    stock, plain = best_of(*turns, rounds=1)
    (ours,) = best_of(("PosSASRec", "ml-100k", 50, 12))
    speed, peak, score = "targets_per_second", "peak_rss_mb", stock["ndcg@10"]
    reached = next((seconds for seconds, value in ours["curve"] if value >= score), math.inf)

    first = "PosSASRec / RecBole's SASRec as shipped (anomaly detection on), ml-100k, L=50"
    second = "the same with anomaly detection off (10 batches)"
    third = f"training seconds to validation NDCG@10 {score:.4f} (RecBole's after 2 epochs)"
    last = f"full-ranking evaluation of {ours['users']} users, to a second"
    return [
        compare(first, ours[speed], stock[speed], TARGETS, at_least=80),
        compare(second, ours[speed], plain[speed], TARGETS),
        compare(third, reached, stock["seconds"], "{:.1f} s", at_most=1 / 20),
        compare("peak memory", ours[peak], stock[peak], MEMORY, at_most=1 / 4),
        compare(last, ours["evaluation_seconds"], 1.0, at_most=1),
    ]


def against_floor(data: str, length: int) -> list[list[str]]:
    """Return rows that compare epochs of FPARec, of PosSASRec and of their matrix products alone.

    Args:
        data: name of the dataset.
        length: longest window of a history.
    """
    runs = best_of(*((model, data, length, EPOCHS) for model in PRODUCTS))
    sasrec, fparec = (run["epoch_seconds"] for run in runs)
    where, most = f"{data}, L={length}", 0.9 if length == 200 else None  # the goal
    rows = [compare(f"FPARec epoch / PosSASRec epoch, {where}", fparec, sasrec, at_most=most)]
    for model, run in zip(PRODUCTS, runs, strict=True):
        what = f"{model} epoch / matrix-multiply floor, {where}"
        rows.append(compare(what, run["epoch_seconds"], run["floor_seconds"], at_most=2))
    return rows


def main() -> None:
    """Measure, print, write."""
    sys.argv = sys.argv[:1]  # RecBole's configuration reads it
    rows = [row for case in CASES for row in against_floor(*case)] + against_recbole()
    text = f"{machine()}, best of {ROUNDS}.\n\n{table(RATIO_HEADS, rows)}"
    replace_section(RESULTS / "speed.md", "speed", text)


if __name__ == "__main__":
    main()
