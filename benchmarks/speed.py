"""``make bench``: training speed as ratios against peers measured in alternation in the same run.

Each figure is the best of ROUNDS runs of its side, every run in a process of its own, so that peak
memory and allocator are its own. Prints the table and writes ``results/speed.md``.
"""

import itertools
import math
import os
import sys
import tempfile
from functools import partial
from typing import Any

import torch
from data import short_histories, write_atomic
from page import RESULTS, in_turns, machine, mark, replace_section, run_alone, table, time_call
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
        ``users``; ``curve``, seconds of training so far and NDCG@10 after each epoch;
        ``peak_rss_mb``.
    """
    experiment = build(model, data, epochs=epochs, **MODELS[model], **options)
    trainer, valid = experiment.trainer, experiment.loaders["valid"]
    trainer.fit(experiment.loaders["train"], valid, verbose=False, saved=False)
    history = trainer.progress.history
    seconds = itertools.accumulate(line["seconds"] for line in history)
    scores = [line["valid"]["ndcg@10"] for line in history]
    best = max(line["targets_per_second"] for line in history[1:])
    items = experiment.dataset.item_num - 1
    flops = epoch_flops(trainer.loader, D, LAYERS, items, *PRODUCTS[model])
    evaluate = partial(trainer.evaluate, valid, load_best_model=False)
    return {
        "targets_per_second": best,
        "epoch_seconds": trainer.loader.num_targets / best,
        "floor_seconds": flops / peak_flops("cpu", torch.float32, 2048),
        "evaluation_seconds": min(time_call(evaluate) for _ in range(epochs)),
        "users": valid.num_targets,
        "curve": list(zip(seconds, scores, strict=True)),
        "peak_rss_mb": peak_rss_mb(),
    }


def train_recbole(batches: int, options: dict[str, Any], detects_anomalies: bool) -> dict[str, Any]:
    """Train RecBole's SASRec on ml-100k: its config, dataset, augmentation, loaders and trainer.

    Args:
        batches: time this many batches; 0 for two whole epochs. One more warms up before.
        options: options of the run.
        detects_anomalies: whether autograd's anomaly detection is on.

    Returns:
        ``targets_per_second``, ``seconds`` and ``peak_rss_mb`` of the training, and the validation
        ``ndcg@10`` after it.
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
    trainer._train_epoch(itertools.islice(train, 1), 0)
    # What is given to RecBole's trainer as an epoch: some batches of one, or two whole epochs.
    two_epochs = itertools.chain(train, train)
    given = itertools.islice(two_epochs, batches or None)
    seconds = time_call(partial(trainer._train_epoch, given, 0))
    rows = batches * config["train_batch_size"] or 2 * len(train._dataset)  # each has a target
    return {
        "targets_per_second": rows / seconds,
        "seconds": seconds,
        "peak_rss_mb": peak_rss_mb(),
        "ndcg@10": float(trainer._valid_epoch(valid)[1]["ndcg@10"]),
    }


# --- the comparison ---

HEADS = ("what", "ours", "peer", "ratio", "goal", "met")


def compare(
    what: str,
    ours: float,
    peer: float,
    form: str = "{:.2f} s",
    at_least: float | None = None,
    at_most: float | None = None,
) -> list[str]:
    """Return a row of a table with HEADS: our figure, a peer's, their ratio and its goal.

    Args:
        what: what is compared.
        ours: our figure.
        peer: the peer's figure, by which ours is divided.
        form: how figures are written, for ``str.format``.
        at_least: goal, the smallest ratio that will do.
        at_most: goal, the largest ratio that will do.
    """
    ratio, goal, is_met = ours / peer, "none", True
    if at_least is not None:
        goal, is_met = f">= {at_least:g}", ratio >= at_least
    if at_most is not None:
        goal, is_met = f"<= {at_most:g}", ratio <= at_most
    return [what, form.format(ours), form.format(peer), f"{ratio:.3g}", goal, mark(is_met)]


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
    text = f"{machine()}, best of {ROUNDS}.\n\n{table(HEADS, rows)}"
    replace_section(RESULTS / "speed.md", "speed", text)


if __name__ == "__main__":
    main()
