"""A run of several processes, which Ray places together: a placement group of equal bundles.

Not by Ray Train, whose processes would be in a placement group of their own, so that runs could
hold what the processes of others wait for. What is left for this module is to start the others in
the bundles of the run, and to tell whether one of them was lost or failed.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ray
import torch
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from recbole_pos.config.plugins import unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.environment import Rank
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.launch import free_port
from recbole_pos.experiment.rendezvous import Rendezvous
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter

# Errors that mean that a process is gone, and not that it raised something.
LOST = (LocalRayletDiedError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
# Seconds for the others to join: their resources are reserved, but a busy machine starts slowly.
PATIENCE = 600


@contextmanager
def team(
    resources: Any, options: dict[str, Any], packed: bytes, data: Any, start: RunFolder | None
) -> Iterator[None]:
    """Train one model with several processes, of which this is the first; for a ``with`` block.

    Args:
        resources: resources of a run; nothing happens for a run of one process.
        options: the configuration as plain values.
        packed: custom model and schemes for the other processes, see ``config/plugins.py``.
        data: a list with the reference of the shared data.
        start: the run with the checkpoint to resume from, or None.

    Raises:
        LOST: if one of the others, or its machine, died.
    """
    nproc, on_gpu = resources.nproc, resources.gpus > 0
    if nproc == 1:
        yield
        return
    ip, port = ray.util.get_node_ip_address(), free_port()
    group: Any = ray.util.get_current_placement_group()
    task_options: dict[str, Any] = {"max_retries": 0, "max_calls": 1, **resources.for_ray}
    state = start.checkpoint.read_bytes() if start else None
    others = [
        ray.remote(**task_options)(_member)
        .options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank))
        .remote(Rank(rank, nproc, 0, 1, ip, port), options, packed, data, state, on_gpu)
        for rank in range(1, nproc)
    ]
    try:
        with _together(Rank(0, nproc, 0, 1, ip, port), on_gpu):
            yield
            ray.get(others)
    except Exception:
        _raise_cause(others)
        raise
    finally:  # also if the scheduler stops the run
        for other in others:
            ray.cancel(other, force=True)


def _together(member: Rank, on_gpu: bool) -> AbstractContextManager[None]:
    """Return a context in which this process has joined the others, with its rank."""
    rendezvous = Rendezvous(member.ip, member.port, member.rank == 0, PATIENCE)
    return rendezvous.joined(member, on_gpu)


def _raise_cause(others: list[Any]) -> None:
    """Raise the error of another process, the cause of this one's; that of a lost one first."""
    ended, _ = ray.wait(others, num_returns=len(others), timeout=5)
    errors = []
    for other in ended:
        try:
            ray.get(other)
        except Exception as error:
            errors.append(error)
    for first in sorted(errors, key=lambda error: not isinstance(error, LOST)):
        raise first


def _member(
    member: Rank,
    options: dict[str, Any],
    packed: bytes,
    data: list[Any],
    state: bytes | None,
    on_gpu: bool,
) -> None:
    """Train in a process other than the first, whose output files are temporary.

    Args:
        member: rank of this process.
        options, packed, data, on_gpu: as of :func:`team`; whether processes have GPUs.
        state: bytes of the checkpoint to resume from, or None.
    """
    torch.set_num_threads(max(1, int(ray.get_runtime_context().get_assigned_resources()["CPU"])))
    logging.getLogger().setLevel(logging.WARNING)
    with _together(member, on_gpu), tempfile.TemporaryDirectory(prefix="recbole-pos-") as name:
        unpack(packed)
        own_options = {**options, "gpu_id": gpu_of_ray(on_gpu)}
        config = PosConfig(None, None, None, own_options, strict=False)
        run = RunFolder(name)
        if state is not None:
            run.checkpoint.write_bytes(state)
        dataset = ray.get(data[0]).dataset(config)
        train(config, None if state is None else run, None, Reporter(False), dataset)


def gpu_of_ray(on_gpu: bool) -> str:
    """Return the option ``gpu_id``: RecBole writes it into CUDA_VISIBLE_DEVICES, so it must say
    what Ray gave this process, or all runs of a machine would crowd on its first GPU."""
    return ",".join(str(gpu) for gpu in ray.get_gpu_ids()) if on_gpu else ""
