"""One training run in a Ray process, which resumes where a lost process stopped.

A run is trained in its own folder, so that a later process, of this call or the next, finds its
last checkpoint there: in the folder itself where all machines reach it, else in its copy on a
storage.
"""

from __future__ import annotations

import gc
import logging
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from recbole_pos.config.plugins import unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.state import copy_run
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import Resources
from recbole_pos.runs.storage import Mirror
from recbole_pos.runs.team import LOST as LOST_PROCESS
from recbole_pos.runs.team import gpu_of_ray, team

# How often a run is resumed whose process or machine was lost. A run that raises an error itself is
# not repeated: it would raise it again.
MOST_LOSSES = 3
DONE, FAILED, LOST = "done", "failed", "lost"  # lost: the infrastructure failed, not the run
# Options without a meaning in a process of Ray.
QUIET = {"show_progress": False, "tensorboard": False, "logger": None}
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "unable to allocate",
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
        data: a :class:`SharedData`, or a list with the reference of one.
        resources: resources of this process.
        packed: models and schemes that only the process of the command has made.
        begin: folder of a trained run whose weights are only tested: a chosen trial, which had no
            test events, or a run of another configuration; None to train.
        report: called with the experiment after every validated epoch, once its checkpoint is
            kept, and once where no epoch is left.

    Returns:
        ``status``, and the content of ``result.json`` of a finished run, or else the ``reason``.

    Raises:
        LOST_PROCESS: if another process of the run's team, or its machine, died.
    """
    torch.set_num_threads(max(1, int(resources.cpus)))
    keep_freed_memory()
    logging.getLogger().setLevel(logging.WARNING)  # RecBole reports every step of its own
    try:
        unpack(packed)
        with _folders(resources.storage) as folder_at:
            run = folder_at(path)
            if begin is not None and not run.checkpoint.is_file():
                copy_run(folder_at(begin), run)
            options = {**plain, "gpu_id": gpu_of_ray(resources.gpus > 0)}
            if plain.get("init_from"):
                options["init_from"] = str(folder_at(plain["init_from"]).path)
            config = PosConfig(None, None, None, options, strict=False)
            for key in ("gpu_id", "init_from"):
                if key in plain:  # its folder keeps the values of the run, not of this machine
                    config.plain[key] = plain[key]
            start = run if run.checkpoint.is_file() else None
            shared: Any = ray.get(data[0]) if isinstance(data, list) else data
            mirror = (
                Mirror(run, _mirror_path(resources.storage, path)) if resources.storage else None
            )

            def follow(experiment: Any) -> None:
                """Copy the checkpoint to the storage before the epoch is reported."""
                if mirror is not None:
                    mirror.keep()
                report(experiment)  # type: ignore[misc]

            with (
                mirror.kept() if mirror else nullcontext(),
                team(resources, options, packed, data, start),
            ):
                dataset = shared.dataset(config)
                result = train(
                    config, start, run.path, Reporter(False), dataset, follow if report else None
                )
        assert result is not None  # this process is the first of the run
        return {"status": DONE, **asdict(result)}
    except LOST_PROCESS:  # not an error of the run: Ray starts it again
        raise
    except Exception as error:
        cause = reason(error)
        blameless = isinstance(error, (OSError, RayError)) and not cause.startswith(
            _OUT_OF_MEMORY[0]
        )
        return {"status": LOST if blameless else FAILED, "reason": cause}
    finally:
        gc.collect()  # the process goes on to the next run
        if resources.gpus:
            torch.cuda.empty_cache()


@contextmanager
def _folders(storage: str | None) -> Iterator[Callable[[str], RunFolder]]:
    """Yield a function from the path of a run to a folder that this machine reaches.

    Without a storage it is the folder itself, else a temporary folder with the files of the copy.

    Raises:
        UsageError: by that function, for a path that this machine does not reach.
    """

    def own(path: str) -> RunFolder:
        if not Path(path).parent.is_dir():
            raise UsageError(
                f"{socket.gethostname()} does not see {Path(path).parent}: give a place that all "
                "machines reach, --storage"
            )
        return RunFolder(path)

    if storage is None:
        yield own
        return
    with tempfile.TemporaryDirectory(prefix="recbole-pos-run-") as near:

        def fetched(path: str) -> RunFolder:
            here, folder = RunFolder(path), RunFolder(Path(near, Path(path).name))
            Mirror(folder, _mirror_path(storage, path)).fetch()
            # a run without a copy: trained before there was a storage, or outside of the study
            return folder if folder.checkpoint.is_file() or not here.checkpoint.is_file() else here

        yield fetched


def _mirror_path(storage: str, path: str) -> str:
    """Return the place of a run's copy on a storage."""
    return f"{storage}/{Path(path).name}"


def reason(error: BaseException) -> str:
    """Return the reason of a failure in one line, from the error that a run raised."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError) or any(s in text.lower() for s in _OUT_OF_MEMORY):
        return f"out of memory: {text}" if text else "out of memory"
    return text if isinstance(error, PosError) else f"{type(error).__name__}: {text}"
