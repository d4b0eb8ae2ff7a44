"""One training of a study: a task of Ray's, which goes on where a lost process stopped."""

from __future__ import annotations

import gc
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch

from recbole_pos.config.plugins import unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.run import train
from recbole_pos.screen import Screen
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.tune.team import gpu_of_ray
from recbole_pos.tune.trial import reason

MOST_LOSSES = 3  # how often a training is taken up again whose process or machine was lost


@ray.remote(max_retries=MOST_LOSSES)
def fit(
    plain: dict[str, Any],
    path: str,
    begin: str | None,
    packed: bytes,
    takes: dict[str, float],
    data: Any,
) -> dict[str, Any]:
    """Train and, where there are test events, test.

    Args:
        plain: the configuration.
        path: folder of the run, which all machines reach; with a checkpoint it goes on from that.
        begin: folder of a run of the same configuration that is to be tested, and was trained
            without test events.
        packed: models and schemes that only the process of the study has made.
        takes: ``num_cpus`` and ``num_gpus``.
        data: a :class:`SharedData`; Ray puts it in the place of its reference.

    Returns:
        ``status`` and, of a failed run, ``reason``; of others the content of ``result.json``.
    """
    on_gpu = takes["num_gpus"] > 0
    torch.set_num_threads(max(1, int(takes["num_cpus"])))
    keep_freed_memory()
    logging.getLogger().setLevel(logging.WARNING)  # RecBole tells every step of its own
    try:
        unpack(packed)
        folder = RunFolder(path)
        if begin is not None and not folder.checkpoint.is_file():
            _copy(RunFolder(begin), folder)
        gpu = gpu_of_ray(on_gpu)
        config = PosConfig(None, None, None, {**plain, "gpu_id": gpu})
        config.plain["gpu_id"] = plain["gpu_id"]  # of the run, for its folder
        going_on = folder.checkpoint.is_file()
        result = train(
            config, folder if going_on else None, path, Screen(False), data.dataset(config)
        )
        assert result is not None  # this process is the only one of the run
        return {"status": DONE, **asdict(result)}
    except Exception as error:
        return {"status": FAILED, "reason": reason(error)}
    finally:
        gc.collect()  # the process goes on to the next training
        if on_gpu:
            torch.cuda.empty_cache()


def _copy(source: RunFolder, target: RunFolder) -> None:
    target.path.mkdir(parents=True, exist_ok=True)
    for file in (source.config, source.metrics):
        shutil.copy(file, target.path)
    unfinished = target.checkpoint.with_suffix(".copy")
    shutil.copy(source.checkpoint, unfinished)
    Path(unfinished).replace(target.checkpoint)
