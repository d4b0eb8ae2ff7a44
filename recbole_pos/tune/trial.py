"""One trial: a function that Ray runs in a process of its own, on whichever machine has room."""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune

from recbole_pos.config import PosConfig
from recbole_pos.errors import PosError
from recbole_pos.memory import keep_freed_memory
from recbole_pos.quick_start import Experiment, prepare
from recbole_pos.report import RunFolder
from recbole_pos.tune.data import SharedData
from recbole_pos.tune.searchers import BEST

FAILURE = "failure"  # key of a last report that says why a trial failed
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "unable to allocate",
)
# What a trial is not asked about, or cannot do where it runs.
QUIET = {"show_progress": False, "tensorboard": False}


def trial_config(model: str, dataset: str, base: dict[str, Any], options: dict[str, Any]) -> Any:
    """The configuration of a trial."""
    return PosConfig(model, dataset, None, {**base, **options})


def run_trial(
    config: dict[str, Any],
    *,
    model: str,
    dataset: str,
    base: dict[str, Any],
    threads: int,
    on_gpu: bool,
    data: SharedData,
) -> None:
    """Train, report the validation metric and a checkpoint after every epoch, never test.

    Whatever goes wrong in the trial itself becomes its last report, and the search goes on. A
    process that is lost (its machine died, the system killed it) reports nothing: Ray starts the
    trial again elsewhere, and it continues from its last checkpoint.

    Args:
        config: number and options, from the searcher.
        model, dataset, base: of the search.
        threads: for torch, so that the trials of a machine share its cores.
        on_gpu: whether Ray gave this process a GPU.
        data: from the object store.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    logging.getLogger().setLevel(logging.WARNING)  # RecBole tells every step of its own
    # RecBole writes gpu_id into CUDA_VISIBLE_DEVICES: it must say what Ray gave, or all trials of a
    # machine would crowd on its first GPU
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if on_gpu else ""
    options = {**config["options"], **QUIET, "gpu_id": gpu}
    try:
        with tempfile.TemporaryDirectory(prefix="recbole-pos-trial-") as folder:
            chosen = trial_config(model, dataset, base, options)
            _train(chosen, data.dataset(chosen), RunFolder(folder))
    except Exception as error:
        tune.report({BEST: math.nan, FAILURE: reason(error), "number": config["number"]})
    finally:
        gc.collect()  # the process goes on to the next trial
        if on_gpu:
            torch.cuda.empty_cache()


def _train(config: PosConfig, dataset: Any, folder: RunFolder) -> None:
    start = tune.get_checkpoint()
    if start:
        with start.as_directory() as saved:
            for file in Path(saved).iterdir():
                shutil.copy(file, folder.path)
    experiment = prepare(config, folder, fresh=start is None, dataset=dataset)
    trainer, loaders = experiment.trainer, experiment.loaders
    folder.write_config(config.plain)
    if start:
        trainer.resume_checkpoint(str(folder.checkpoint), loaders["train"])
    if trainer.finished:  # the process was lost after the last epoch: nothing to train, one to tell
        _report(experiment, folder)
        return
    trainer.fit(
        loaders["train"],
        loaders["valid"],
        verbose=False,
        callback_fn=lambda epoch, score: _report(experiment, folder),
    )


def _report(experiment: Experiment, folder: RunFolder) -> None:
    """Tell Ray about the newest validated epoch; does not return if the scheduler says stop."""
    trainer, progress = experiment.trainer, experiment.trainer.progress
    line = next(line for line in reversed(progress.history) if line["valid"])
    metrics = {
        BEST: progress.best_score,
        "valid": line["valid"][trainer.valid_metric],
        "epoch": line["epoch"] + 1,
        "best_epoch": progress.best_epoch,
        "best_valid": progress.best_result,
        "loss": line["loss"],
        "ended": trainer.finished,
        "seconds": round(progress.training_seconds + progress.evaluation_seconds, 3),
        "parameters": sum(p.numel() for p in experiment.model.parameters()),
        "node": ray.get_runtime_context().get_node_id()[:8],
    }
    tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder.path))


def reason(error: BaseException) -> str:
    """Why a trial failed, in one line."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError) or any(s in text.lower() for s in _OUT_OF_MEMORY):
        return f"out of memory: {text}" if text else "out of memory"
    return text if isinstance(error, PosError) else f"{type(error).__name__}: {text}"
