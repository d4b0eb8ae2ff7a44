"""One measurement per process, so that peak memory and allocator state are each side's own.

``python benchmarks/speed_workers.py SIDE DATA LENGTH [EPOCHS]`` prints one line of json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from data import short_histories, write_atomic
from training import epoch_flops, peak_flops, step_of

import recbole_pos  # noqa: F401  (RecBole needs its fixes to start at all on this numpy)
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.run import prepare
from recbole_pos.model.training import adapter

D, INNER, LAYERS = 64, 256, 2
SAME = {
    "hidden_size": D,
    "inner_size": INNER,
    "n_layers": LAYERS,
    "n_heads": 2,
    "hidden_dropout_prob": 0.2,
    "attn_dropout_prob": 0.0,
}


def options_for(data: str, length: int, folder: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a dataset; generated ones are written to ``folder``."""
    options: dict[str, Any] = {"MAX_ITEM_LIST_LENGTH": length, "show_progress": False}
    if data == "short":
        write_atomic(short_histories(0), Path(folder), "short")
        options["data_path"] = folder
    return ("short" if data == "short" else data), options


def ours(model: str, data: str, length: int, epochs: int) -> dict[str, Any]:
    """Epochs of a plugin model, each with its validation; the first epoch warms up."""
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        name, options = options_for(data, length, folder)
        same = SAME if model == "PosSASRec" else {**SAME, "n_heads": 1, "attn_dropout_prob": 0.2}
        made = prepare(PosConfig(model, name, None, {**options, **same, "epochs": epochs}))
    trainer, started, spent, curve = made.trainer, time.perf_counter(), 0.0, []
    loader = trainer.training_loader(made.loaders["train"])
    speeds, evaluations = [], []
    trainer.eval_collector.data_collect(made.loaders["train"])
    for epoch in range(epochs):
        line = trainer._train_epoch(loader, epoch)
        speeds.append(line["targets_per_second"])
        spent = time.perf_counter() - started
        before = time.perf_counter()
        result = trainer.evaluate(made.loaders["valid"], load_best_model=False)
        evaluations.append(time.perf_counter() - before)
        curve.append((spent, float(result["ndcg@10"])))
    best = max(speeds[1:])
    parts = (4, 2) if model == "PosSASRec" else (1, 1)
    flops = epoch_flops(loader, D, LAYERS, made.dataset.item_num - 1, *parts)
    floor = flops / peak_flops(torch.device("cpu"), torch.float32, 2048)
    return {
        "targets": loader.targets,
        "targets_per_second": best,
        "epoch_seconds": loader.targets / best,
        "floor_seconds": floor,
        "evaluation_seconds": min(evaluations),
        "users": len(made.loaders["valid"]._dataset),
        "curve": curve,
        "peak_rss_mb": peak_rss_mb(),
    }


def naive(data: str, length: int, batches: int) -> dict[str, Any]:
    """The naive reference on the same windows."""
    from naive import NaiveSASRec, train_batches, windows_as_rows

    with tempfile.TemporaryDirectory() as folder:
        name, options = options_for(data, length, folder)
        made = prepare(PosConfig("PosSASRec", name, None, {**options, **SAME}))
    windows = made.loaders["train"]._dataset.training_windows()
    rows = windows_as_rows(made.dataset.log.items, windows, length)
    model = NaiveSASRec(made.dataset.item_num, length)
    train_batches(model, rows, 128, 2)
    started = time.perf_counter()
    targets = train_batches(model, rows, 128, batches)
    speed = targets / (time.perf_counter() - started)
    return {"targets_per_second": speed, "peak_rss_mb": peak_rss_mb()}


def recbole(length: int, anomaly: bool, batches: int | None) -> dict[str, Any]:
    """RecBole's own SASRec: its config, dataset, augmentation, loaders and trainer.

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
    config = Config(
        "SASRec",
        "ml-100k",
        config_dict={
            "MAX_ITEM_LIST_LENGTH": length,
            "train_neg_sample_args": None,
            "metrics": ["NDCG"],
            "valid_metric": "NDCG@10",
            "show_progress": False,
            "checkpoint_dir": os.getcwd(),
        },
    )
    init_seed(config["seed"], True)
    train, valid, _ = data_preparation(config, create_dataset(config))
    model = get_model("SASRec")(config, train._dataset)
    trainer = Trainer(config, model)
    trainer.eval_collector.data_collect(train)
    rows, started = 0, None
    epochs = 2 if batches is None else 1
    for _ in range(epochs):
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
    found: dict[str, Any] = {"targets_per_second": rows / seconds, "peak_rss_mb": peak_rss_mb()}
    if batches is None:
        found["seconds"] = seconds
        result = trainer._valid_epoch(valid)[1]
        found["ndcg@10"] = float(result["ndcg@10"])
    return found


def bert4rec(data: str, length: int, batches: int, recboles: bool) -> dict[str, Any]:
    """BERT4Rec's rows through the plugin, with RecBole's own loss or the plugin's."""
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        name, options = options_for(data, length, folder)
        made = prepare(PosConfig("BERT4Rec", name, None, {**options, **SAME}))
    trainer, model, train = made.trainer, made.model.train(), made.loaders["train"]
    loss = model.calculate_loss if recboles else adapter(made.config, model).loss(packed=False)
    rows, started, step = 0, time.perf_counter(), step_of(trainer, loss)
    for number, batch in zip(range(batches + 1), train):  # noqa: B905
        step(batch)
        if number == 0:  # warms up
            started, rows = time.perf_counter(), -len(batch)
        rows += len(batch)
    return {"targets_per_second": rows / (time.perf_counter() - started)}


def main() -> None:
    """Run the side named on the command line."""
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", "2")))
    side, data, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 4
    if side.startswith("BERT4Rec"):
        found = bert4rec(data, length, count, side.endswith("recbole"))
    elif side == "naive":
        found = naive(data, length, count)
    elif side.startswith("recbole"):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # RecBole writes logs into the working directory
            sys.argv = sys.argv[:1]  # and parses the arguments of who runs it
            found = recbole(length, side == "recbole-anomaly", count or None)
            os.chdir("/")
    else:
        found = ours(side, data, length, count)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
