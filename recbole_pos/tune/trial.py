"""One trial: a function that Ray runs in a process of its own, on whichever machine has room.

What a trial reports, and ASHA and TPE go by, is its best validation value so far: that of its
newest epoch would punish patience. Its own failure is its last report, not an error of Ray's, which
would repeat it; a lost process is repeated from its last checkpoint.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.exceptions import RayError

from recbole_pos.config.plugins import unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import PosError, StorageError
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.result import parameters
from recbole_pos.tune.data import SharedData
from recbole_pos.tune.searchers import BEST
from recbole_pos.tune.storage import copy_run, fetch_checkpoint
from recbole_pos.tune.team import LOST, gpu_of_ray, team

EARLIER = "earlier"  # key of validation values by epoch, as JSON, in reports of a resumed trial
FAILURE = "failure"  # key of a last report that says why a trial failed
INFRASTRUCTURE = "infrastructure"  # key of the same report: whether the trial is not to blame
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
    return PosConfig(model, dataset, None, {**base, **options}, strict=False)


def run_trial(
    config: dict[str, Any],
    *,
    model: str,
    dataset: str,
    base: dict[str, Any],
    resources: dict[str, float],
    nproc: int,
    packed: bytes,
    data: list[Any],
    place: str,
) -> None:
    """Train, report the validation metric and a checkpoint after every epoch, never test.

    Whatever goes wrong in the trial itself becomes its last report, and the search goes on. A
    process that is lost (its machine died, the system killed it) reports nothing: Ray starts the
    trial again elsewhere, and it continues from its last checkpoint; so it does when another
    process of the trial's team is lost.

    Args:
        config: number and options, from the searcher; of a trial that is resumed ``earlier``, the
            folders with its checkpoints.
        model, dataset, base: of the search.
        resources: ``num_cpus`` and ``num_gpus`` of this process; as many threads as CPUs, so that
            the trials of a machine share its cores.
        nproc: how many processes train the model together.
        packed: models and schemes that only the process of the search has made.
        data: a list with the reference of a :class:`SharedData` in the object store.
        place: path or URI that has those folders.
    """
    on_gpu = resources["num_gpus"] > 0
    torch.set_num_threads(max(1, int(resources["num_cpus"])))
    keep_freed_memory()
    logging.getLogger().setLevel(logging.WARNING)  # RecBole tells every step of its own
    options = {**config["options"], **QUIET, "gpu_id": gpu_of_ray(on_gpu)}
    try:
        with tempfile.TemporaryDirectory(prefix="recbole-pos-trial-") as folder:
            unpack(packed)
            chosen = trial_config(model, dataset, base, options)
            run = RunFolder(folder)
            start = _last_checkpoint(run, place, config.get("earlier", []))
            with team(nproc, resources, chosen.plain, packed, data, start):
                _train(chosen, ray.get(data[0]), run, start)
    except LOST:  # another process of the team: no fault of the trial, Ray takes it up again
        raise
    except Exception as error:
        why = reason(error)
        blameless = isinstance(error, (OSError, RayError)) and not why.startswith(_OUT_OF_MEMORY[0])
        tune.report({BEST: math.nan, FAILURE: why, INFRASTRUCTURE: blameless})
    finally:
        gc.collect()  # the process goes on to the next trial
        if on_gpu:
            torch.cuda.empty_cache()


def _last_checkpoint(folder: RunFolder, place: str, earlier: list[str]) -> Path | None:
    """Where an earlier process of this trial stopped, or an earlier search that is resumed, copied
    to this machine."""
    start = tune.get_checkpoint()
    if start:
        with start.as_directory() as saved:
            copy_run(RunFolder(saved), folder)
    else:
        fetch_checkpoint(place, earlier, folder)
    return folder.checkpoint if folder.checkpoint.is_file() else None


def _train(config: PosConfig, data: SharedData, folder: RunFolder, start: Path | None) -> None:
    experiment = prepare(config, folder, fresh=start is None, dataset=data.dataset(config))
    trainer, loaders = experiment.trainer, experiment.loaders
    folder.write_config(config.plain)
    if start:
        trainer.resume_checkpoint(str(folder.checkpoint), loaders["train"])
    if trainer.finished:  # the process was lost after the last epoch: nothing to train, one to tell
        _report(experiment, folder, resumed=True)
        return
    trainer.fit(
        loaders["train"],
        loaders["valid"],
        verbose=False,
        callback_fn=lambda epoch, score: _report(experiment, folder, resumed=start is not None),
    )


def _report(experiment: Experiment, folder: RunFolder, resumed: bool) -> None:
    """Tell Ray about the newest validated epoch; does not return if the scheduler says stop.

    A resumed trial tells what came earlier again: Ray may keep the checkpoint of a process that is
    lost right after a report, and lose the report.
    """
    trainer, progress = experiment.trainer, experiment.trainer.progress
    *before, line = [line for line in progress.history if line["valid"]]
    metrics = {
        BEST: progress.best_score,
        "valid": line["valid"][trainer.valid_metric],
        "epoch": line["epoch"] + 1,
        "best_epoch": progress.best_epoch,
        "best_valid": progress.best_result,
        "loss": line["loss"],
        "ended": trainer.finished,
        "seconds": round(progress.training_seconds + progress.evaluation_seconds, 3),
        "parameters": parameters(experiment.model),
        "node": ray.get_runtime_context().get_node_id()[:8],
    }
    if resumed:
        earlier = {one["epoch"] + 1: one["valid"][trainer.valid_metric] for one in before}
        metrics[EARLIER] = json.dumps(earlier)
    try:
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder.path))
    except Exception as error:  # Ray's own, of whatever kind the storage has
        raise StorageError(f"cannot keep a checkpoint, see --storage: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Why a trial failed, in one line."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError) or any(s in text.lower() for s in _OUT_OF_MEMORY):
        return f"out of memory: {text}" if text else "out of memory"
    return text if isinstance(error, PosError) else f"{type(error).__name__}: {text}"
