"""A trial of several processes, which Ray places together: a placement group of equal bundles.

Not by Ray Train, whose trainer inside a trial (``TuneReportCallback``) tells Tune metrics and the
path of a checkpoint, not the checkpoint: Tune could neither take a trial up again from its last
epoch after a loss, nor keep two checkpoints of each, nor hand out that of the best. Its processes
would not be in the trial's placement group but in one of Train's own, so that trials could hold
what the processes of others wait for. What is left for this module is to start the others in the
bundles of the trial, and to tell whether one of them was lost or failed.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
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
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.meeting import Meeting, Member, joined
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.processes import free_port

# Not what a process of the team raised, but that it is gone.
LOST = (LocalRayletDiedError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
# Seconds: their places are theirs, but a busy machine takes its time to start a process there.
PATIENCE = 600


@contextmanager
def team(
    nproc: int,
    resources: dict[str, float],
    options: dict[str, Any],
    packed: bytes,
    data: list[Any],
    start: Path | None,
) -> Iterator[None]:
    """Let this process be the first of ``nproc`` that train one model.

    Args:
        nproc: how many; nothing happens for one.
        resources: ``num_cpus`` and ``num_gpus`` of each.
        options: the complete configuration, plain.
        packed: what others do not know of its model, see ``config/plugins.py``.
        data: a list with the reference of the shared data.
        start: a checkpoint to go on from, or None.

    Raises:
        LOST: if one of the others, or its machine, died.
    """
    if nproc == 1:
        yield
        return
    ip, port = ray.util.get_node_ip_address(), free_port()
    on_gpu = bool(resources["num_gpus"])
    place: Any = ray.util.get_current_placement_group()
    once: dict[str, Any] = {"max_retries": 0, "max_calls": 1, **resources}
    state = start.read_bytes() if start else None
    others = [
        ray.remote(**once)(_member)
        .options(scheduling_strategy=PlacementGroupSchedulingStrategy(place, rank))
        .remote(Member(rank, nproc, 0, 1, ip, port), options, packed, data, state, on_gpu)
        for rank in range(1, nproc)
    ]
    try:
        with _together(Member(0, nproc, 0, 1, ip, port), on_gpu):
            yield
            ray.get(others)
    except Exception:
        _raise_cause(others)
        raise
    finally:  # also when the scheduler stops the trial in the middle
        for other in others:
            ray.cancel(other, force=True)


def _together(member: Member, on_gpu: bool) -> AbstractContextManager[None]:
    meeting = Meeting.at(member.ip, member.port, member.rank == 0, PATIENCE)
    return joined(meeting, member, on_gpu)


def _raise_cause(others: list[Any]) -> None:
    """What another process said, rather than that it no longer answers; a lost one before all."""
    ended, _ = ray.wait(others, num_returns=len(others), timeout=5)
    said = []
    for other in ended:
        try:
            ray.get(other)
        except Exception as error:
            said.append(error)
    for first in sorted(said, key=lambda error: not isinstance(error, LOST)):
        raise first


def _member(
    member: Member,
    options: dict[str, Any],
    packed: bytes,
    data: list[Any],
    state: bytes | None,
    on_gpu: bool,
) -> None:
    """A process of the team other than the first: trains, tells nobody."""
    torch.set_num_threads(max(1, int(ray.get_runtime_context().get_assigned_resources()["CPU"])))
    keep_freed_memory()
    logging.getLogger().setLevel(logging.WARNING)
    with _together(member, on_gpu):
        unpack(packed)
        given = {**options, "gpu_id": gpu_of_ray(on_gpu)}
        config = PosConfig(None, None, None, given, strict=False)
        shared = ray.get(data[0])
        made = prepare(config, fresh=state is None, dataset=shared.dataset(config))
        with tempfile.TemporaryDirectory(prefix="recbole-pos-member-") as name:
            if state is not None:
                file = RunFolder(name).checkpoint
                file.write_bytes(state)
                made.trainer.resume_checkpoint(str(file), made.loaders["train"])
            made.trainer.fit(made.loaders["train"], made.loaders["valid"], verbose=False)


def gpu_of_ray(on_gpu: bool) -> str:
    """The option ``gpu_id``: RecBole writes it into CUDA_VISIBLE_DEVICES, so it must say what Ray
    gave this process, or all trials of a machine would crowd on its first GPU."""
    return ",".join(str(gpu) for gpu in ray.get_gpu_ids()) if on_gpu else ""
