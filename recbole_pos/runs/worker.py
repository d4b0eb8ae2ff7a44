"""One training run in a process of Ray, which resumes where a lost process stopped.

A run is trained in its own folder, which all machines reach, so that a later process, of this call
or the next, finds its last checkpoint there.
"""

from __future__ import annotations

import gc
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ray
import torch

from recbole_pos.config.plugins import unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.state import copy_run
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import Resources

# How often a run is resumed whose process or machine was lost. A run that raises an error itself is
# not repeated: it would raise it again.
MOST_LOSSES = 3
DONE, FAILED = "done", "failed"
# Options without a meaning in a process of Ray.
QUIET = {"show_progress": False, "tensorboard": False, "logger": None}
_OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|unable to allocate", re.IGNORECASE
)


def train_run(
    plain: dict[str, Any],
    path: str,
    data: Any,
    resources: Resources,
    packed: bytes = b"",
    begin: str | None = None,
    report: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Train a run and, where there are test events, test it.

    Args:
        plain: options of the configuration.
        path: folder of the run, which resumes from a checkpoint in it.
        data: a :class:`SharedData`.
        resources: resources of this process.
        packed: models and schemes that only the process of the command has made.
        begin: folder of a trained run whose weights are only tested: a chosen trial, which had no
            test events, or a run of another configuration; None to train.
        report: called with the experiment after every validated epoch, once its checkpoint is
            written, and once where no epoch is left.

    Returns:
        ``status``, and the content of ``result.json`` of a finished run; or else the ``reason``,
        and ``lost``, whether it is a fault of the disk or of Ray, and not of the run.
    """
    torch.set_num_threads(max(1, int(resources.cpus)))
    logging.getLogger().setLevel(logging.WARNING)  # without RecBole's reports of every step
    try:
        unpack(packed)
        run = RunFolder(path)
        if not run.path.parent.is_dir():
            raise UsageError(
                f"{socket.gethostname()} does not see {run.path.parent}: give a --run_dir that all "
                "machines reach"
            )
        if begin is not None and not run.checkpoint.is_file():
            copy_run(RunFolder(begin), run)
        config = PosConfig(None, None, None, {**plain, "gpu_id": _gpus(resources)}, strict=False)
        if "gpu_id" in plain:  # the folder keeps the value of the run, not of this machine
            config.plain["gpu_id"] = plain["gpu_id"]
        start = run if run.checkpoint.is_file() else None
        result = train(config, start, run.path, Reporter(False), data.dataset(config), report)
        assert result is not None  # as in the first process of every run
        return {"status": DONE, **asdict(result)}
    except Exception as error:
        cause = reason(error)
        is_system = isinstance(error, (OSError, ray.exceptions.RayError))
        is_lost = is_system and not cause.startswith("out of memory")
        return {"status": FAILED, "lost": is_lost, "reason": cause}
    finally:
        gc.collect()  # the process goes on to the next run
        if resources.gpus:
            torch.cuda.empty_cache()


def _gpus(resources: Resources) -> str:
    """Return the option ``gpu_id``: RecBole writes it into CUDA_VISIBLE_DEVICES, so it must say
    what Ray gave this process, or all runs of a machine would crowd on its first GPU."""
    return ",".join(str(gpu) for gpu in ray.get_gpu_ids()) if resources.gpus else ""


def reason(error: BaseException) -> str:
    """Return the reason of a failure in one line, from the error that a run raised."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return f"out of memory: {text}" if text else "out of memory"
    return text if isinstance(error, PosError) else f"{type(error).__name__}: {text}"
