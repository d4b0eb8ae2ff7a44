"""One training of a study: a task of Ray's, which goes on where a lost process stopped."""

from __future__ import annotations

import gc
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch

from recbole_pos.config.plugins import unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.train import train
from recbole_pos.screen import Screen
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.tune.storage import Mirror
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
    storage: str | None = None,
) -> dict[str, Any]:
    """Train and, where there are test events, test.

    Args:
        plain: the configuration.
        path: folder of the run; with a checkpoint it goes on from that.
        begin: folder of a run whose weights are tested: the trial that was chosen, which had no
            test events, or a run of another row that is tested with other options.
        packed: models and schemes that only the process of the study has made.
        takes: ``num_cpus`` and ``num_gpus``.
        data: a :class:`SharedData`; Ray puts it in the place of its reference.
        storage: path or URI with runs by the names of their folders, where this machine may not
            reach the folders; None where all do.

    Returns:
        ``status`` and, of a failed run, ``reason``; of others the content of ``result.json``.
    """
    on_gpu = takes["num_gpus"] > 0
    torch.set_num_threads(max(1, int(takes["num_cpus"])))
    keep_freed_memory()
    logging.getLogger().setLevel(logging.WARNING)  # RecBole tells every step of its own
    try:
        unpack(packed)
        with _runs(storage) as run_of:
            folder = run_of(path)
            if begin is not None and not folder.checkpoint.is_file():
                _copy(run_of(begin), folder)
            given = {**plain, "gpu_id": gpu_of_ray(on_gpu)}
            if plain.get("init_from"):
                given["init_from"] = str(run_of(plain["init_from"]).path)
            config = PosConfig(None, None, None, given, strict=False)
            for key in ("gpu_id", "init_from"):
                config.plain[key] = plain.get(key)  # of the run, for its folder
            going_on = folder if folder.checkpoint.is_file() else None
            kept = Mirror(folder, _place(storage, path)).kept() if storage else nullcontext()
            with kept:
                result = train(config, going_on, folder.path, Screen(False), data.dataset(config))
        assert result is not None  # this process is the only one of the run
        return {"status": DONE, **asdict(result)}
    except Exception as error:
        return {"status": FAILED, "reason": reason(error)}
    finally:
        gc.collect()  # the process goes on to the next training
        if on_gpu:
            torch.cuda.empty_cache()


@contextmanager
def _runs(storage: str | None) -> Iterator[Callable[[str], RunFolder]]:
    """From the folder of a run to one that this machine has: itself, or its copy, new or fetched.

    Raises:
        UsageError: within, for a folder that this machine does not have, without a storage.
    """

    def own(path: str) -> RunFolder:
        if not Path(path).is_dir():
            raise UsageError(
                f"{socket.gethostname()} does not see {path}: give a place that all machines "
                "reach, --storage"
            )
        return RunFolder(path)

    if storage is None:
        yield own
        return
    with tempfile.TemporaryDirectory(prefix="recbole-pos-fit-") as near:

        def fetched(path: str) -> RunFolder:
            here, folder = RunFolder(path), RunFolder(Path(near, Path(path).name))
            Mirror(folder, _place(storage, path)).fetch()
            # what was trained before there was a storage, or has nothing to do with the study
            return folder if folder.checkpoint.is_file() or not here.checkpoint.is_file() else here

        yield fetched


def _place(storage: str, path: str) -> str:
    return f"{storage}/{Path(path).name}"


def _copy(source: RunFolder, target: RunFolder) -> None:
    target.path.mkdir(parents=True, exist_ok=True)
    for file in (source.config, source.metrics):
        shutil.copy(file, target.path)
    checkpoint.copy(source.checkpoint, target.checkpoint)
