"""One training run in processes of Ray, which resumes where a lost process stopped.

A run is trained in its own folder, so that a later process, of this call or the next, finds its
last checkpoint there: in the folder itself where all machines reach it, else in its copy on a
storage. Several processes of a run have a bundle each of one placement group. (Those of Ray Train
would have a group of their own, so that runs could hold what the processes of others wait for.)
"""

from __future__ import annotations

import gc
import logging
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray import exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from recbole_pos.config.plugins import unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.environment import Rank
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.launch import free_port
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.rendezvous import Rendezvous
from recbole_pos.experiment.state import copy_run
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import Resources
from recbole_pos.runs.storage import Mirror

# How often a run is resumed whose process or machine was lost. A run that raises an error itself is
# not repeated: it would raise it again.
MOST_LOSSES = 3
DONE, FAILED, LOST = "done", "failed", "lost"  # lost: the infrastructure failed, not the run
# Options without a meaning in a process of Ray.
QUIET = {"show_progress": False, "tensorboard": False, "logger": None}
# Errors that mean that a process is gone, and not that it raised something.
LOST_PROCESS = (
    exceptions.LocalRayletDiedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.WorkerCrashedError,
)
# Seconds for other processes to join: they have their resources, but a busy machine starts slowly.
_PATIENCE = 600
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
        data: a :class:`SharedData`, or a list with the reference of one.
        resources: resources of each process of the run.
        packed: models and schemes that only the process of the command has made.
        begin: folder of a trained run whose weights are only tested: a chosen trial, which had no
            test events, or a run of another configuration; None to train.
        report: called with the experiment after every validated epoch, once its checkpoint is
            kept, and once where no epoch is left.

    Returns:
        ``status``, and the content of ``result.json`` of a finished run, or else the ``reason``.

    Raises:
        LOST_PROCESS: if another process of the run, or its machine, died: not an error of the run.
    """
    _set_up(resources)
    keep_freed_memory()
    try:
        unpack(packed)
        with tempfile.TemporaryDirectory(prefix="recbole-pos-run-") as near:

            def folder_at(path: str) -> RunFolder:
                return find_folder(path, resources.storage, Path(near))

            run, mirror = folder_at(path), None
            if resources.storage:
                mirror = Mirror(run, f"{resources.storage}/{Path(path).name}")
            if begin is not None and not run.checkpoint.is_file():
                copy_run(folder_at(begin), run)
            options = {**plain, "gpu_id": _gpus(resources)}
            if plain.get("init_from"):
                options["init_from"] = str(folder_at(plain["init_from"]).path)
            config = PosConfig(None, None, None, options, strict=False)
            for key in ("gpu_id", "init_from"):
                if key in plain:  # its folder keeps the values of the run, not of this machine
                    config.plain[key] = plain[key]
            start = run if run.checkpoint.is_file() else None

            def follow(experiment: Any) -> None:
                """Copy the checkpoint to the storage before the epoch is reported."""
                if mirror is not None:
                    mirror.keep()
                report(experiment)  # type: ignore[misc]

            with (
                mirror.kept() if mirror else nullcontext(),
                _other_processes(resources, options, packed, data, start),
            ):
                shared: Any = ray.get(data[0]) if isinstance(data, list) else data
                result = train(
                    config,
                    start,
                    run.path,
                    Reporter(False),
                    shared.dataset(config),
                    follow if report else None,
                )
        assert result is not None  # this process is the first of the run
        return {"status": DONE, **asdict(result)}
    except LOST_PROCESS:  # Ray starts the run again
        raise
    except Exception as error:
        cause = reason(error)
        is_system = isinstance(error, (OSError, exceptions.RayError))
        blameless = is_system and not cause.startswith("out of memory")
        return {"status": LOST if blameless else FAILED, "reason": cause}
    finally:
        gc.collect()  # the process goes on to the next run
        if resources.gpus:
            torch.cuda.empty_cache()


def _set_up(resources: Resources) -> None:
    """Use the CPUs that Ray gave this process, and leave out RecBole's reports of every step."""
    torch.set_num_threads(max(1, int(resources.cpus)))
    logging.getLogger().setLevel(logging.WARNING)


def _gpus(resources: Resources) -> str:
    """Return the option ``gpu_id``: RecBole writes it into CUDA_VISIBLE_DEVICES, so it must say
    what Ray gave this process, or all runs of a machine would crowd on its first GPU."""
    return ",".join(str(gpu) for gpu in ray.get_gpu_ids()) if resources.gpus else ""


def find_folder(path: str, storage: str | None, near: Path) -> RunFolder:
    """Return a folder of a run that this machine reaches: itself, or ``near`` with its copy.

    Raises:
        UsageError: if there is no storage, and this machine does not reach the path.
    """
    here = RunFolder(path)
    if storage is None:
        if not here.path.parent.is_dir():
            raise UsageError(
                f"{socket.gethostname()} does not see {here.path.parent}: give a place that all "
                "machines reach, --storage"
            )
        return here
    folder = RunFolder(near / here.path.name)
    Mirror(folder, f"{storage}/{here.path.name}").fetch()
    # a run without a copy: trained before there was a storage, or outside of the study
    return folder if folder.checkpoint.is_file() or not here.checkpoint.is_file() else here


@contextmanager
def _other_processes(
    resources: Resources,
    options: dict[str, Any],
    packed: bytes,
    data: Any,
    start: RunFolder | None,
) -> Iterator[None]:
    """Start the other processes of a run, of which this is the first; for a ``with`` block.

    ``start`` is the run with the checkpoint to resume from. What the others raise is raised here,
    a LOST_PROCESS before anything else.
    """
    if resources.nproc == 1:
        yield
        return
    first = Rank(0, resources.nproc, 0, 1, ray.util.get_node_ip_address(), free_port())
    state = start.checkpoint.read_bytes() if start else None
    group: Any = ray.util.get_current_placement_group()
    remote: Any = ray.remote(max_retries=0, max_calls=1, **resources.for_ray)  # type: ignore[call-overload]
    others = [
        remote(_train_along)
        .options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank))
        .remote(replace(first, rank=rank), resources, options, packed, data, state)
        for rank in range(1, resources.nproc)
    ]
    try:
        with _joined(first, resources):
            yield
            ray.get(others)
    except Exception:  # perhaps because of an error of another one
        ended, _ = ray.wait(others, num_returns=len(others), timeout=5)
        causes = [cause for other in ended if (cause := _error_of(other))]
        for cause in sorted(causes, key=lambda cause: not isinstance(cause, LOST_PROCESS)):
            raise cause from None
        raise
    finally:  # also if the scheduler stops the run
        for other in others:
            ray.cancel(other, force=True)


def _joined(rank: Rank, resources: Resources) -> AbstractContextManager[None]:
    """Return a context in which this process has joined the others."""
    rendezvous = Rendezvous(rank.ip, rank.port, rank.rank == 0, _PATIENCE)
    return rendezvous.joined(rank, resources.gpus > 0)


def _error_of(task: Any) -> Exception | None:
    """Return what an ended task raised."""
    try:
        ray.get(task)
    except Exception as error:
        return error
    return None


def _train_along(
    rank: Rank,
    resources: Resources,
    options: dict[str, Any],
    packed: bytes,
    data: list[Any],
    state: bytes | None,
) -> None:
    """Train in a process other than the first, whose output files are temporary.

    ``state`` has the bytes of the checkpoint to resume from; the rest is as of ``train_run``.
    """
    _set_up(resources)
    with (
        _joined(rank, resources),
        tempfile.TemporaryDirectory(prefix="recbole-pos-") as name,
    ):
        unpack(packed)
        own_options = {**options, "gpu_id": _gpus(resources)}
        config, run = PosConfig(None, None, None, own_options, strict=False), RunFolder(name)
        if state is not None:
            run.checkpoint.write_bytes(state)
        dataset = ray.get(data[0]).dataset(config)
        train(config, None if state is None else run, None, Reporter(False), dataset)


def reason(error: BaseException) -> str:
    """Return the reason of a failure in one line, from the error that a run raised."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return f"out of memory: {text}" if text else "out of memory"
    return text if isinstance(error, PosError) else f"{type(error).__name__}: {text}"
