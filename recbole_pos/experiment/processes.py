"""Data-parallel training: several processes, each with a part of every batch, one model.

RecBole's ``--nproc`` and ``--world_size``, on CPUs (gloo) as well as on GPUs (NCCL). Each process
has all the data and makes the same batches; of a batch it takes every n-th row, and gradients are
summed with each process's share as weight. So a step is the step that one process would make, up to
rounding and dropout. RecBole's DistributedSampler would instead repeat rows until their number
divides evenly, and train on those twice.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from recbole_pos.config.options import cores
from recbole_pos.errors import CheckpointError, PosError, StorageError, TrainingError, UsageError

MOST = 8  # processes of one run that any machine may try
PORT = 5678  # where several machines meet, as in RecBole


@dataclass(frozen=True)
class Plan:
    """Who trains: ``nproc`` processes here, of ``world_size``, the first one being ``offset``."""

    nproc: int
    world_size: int
    ip: str
    port: int
    offset: int

    @classmethod
    def of(cls, nproc: int, world_size: int, ip: str, port: Any, offset: int) -> Plan:
        """RecBole's arguments, checked.

        Raises:
            UsageError: if they do not fit together.
        """
        world_size = nproc if world_size in (-1, None) else world_size
        for name, value, low in (("nproc", nproc, 1), ("world_size", world_size, nproc)):
            if not isinstance(value, int) or value < low:
                raise UsageError(
                    f"--{name}: expected a whole number of at least {low}, found {value}"
                )
        most = max(MOST, 2 * cores())
        if nproc > most:
            raise UsageError(
                f"--nproc: {nproc:,} processes on {cores()} cores, each with all the data; at most "
                f"{most}"
            )
        if not 0 <= offset <= world_size - nproc:
            raise UsageError(
                f"--group_offset: processes of this machine are {offset} to {offset + nproc - 1}, "
                f"but --world_size is {world_size}"
            )
        if port is None:
            port = _free_port() if world_size == nproc else PORT
        if not (str(port).isdigit() and 1 <= int(port) <= 65535):
            raise UsageError(f"--port: expected a number from 1 to 65535, found {port!r}")
        return cls(nproc, world_size, ip, int(port), offset)

    def join(self, local_rank: int, on_gpu: bool) -> None:
        """Make this process a member; returns when all are there."""
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://{self.ip}:{self.port}",
            rank=self.offset + local_rank,
            world_size=self.world_size,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def gpus_of(gpu_id: Any, nproc: int) -> list[str]:
    """A GPU for every process here; empty where there are none to use.

    Raises:
        UsageError: if there are some, but too few.
    """
    ids = [part.strip() for part in str(gpu_id).split(",") if part.strip()]
    if not ids or not torch.cuda.is_available():
        return []
    if len(ids) < nproc:
        raise UsageError(
            f"gpu_id: names {len(ids)} GPUs for {nproc} processes; for example "
            f"--gpu_id='{','.join(map(str, range(nproc)))}', or --gpu_id= for CPUs"
        )
    return ids[:nproc]


def launch(plan: Plan, target: Callable[..., None], arguments: Sequence[Any], gpus: list) -> None:
    """Run ``target(*arguments)`` in every process of this machine.

    Raises:
        UsageError, TrainingError: what the first process to fail said.
    """
    context = multiprocessing.get_context("spawn")
    errors = context.SimpleQueue()
    processes = [
        context.Process(target=_member, args=(plan, rank, target, arguments, gpus, errors))
        for rank in range(plan.nproc)
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(timeout=0.1)
            if any(process.exitcode for process in processes):
                break  # the others would wait for it
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise _first(errors, codes)
    except KeyboardInterrupt:
        for process in processes:
            # Ctrl-C reaches all of them by itself, SIGTERM only this one
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGINT)
        patience = time.monotonic() + 10
        for process in processes:
            process.join(timeout=max(0, patience - time.monotonic()))
        raise
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _first(errors: Any, codes: list[int | None]) -> PosError:
    name, text = errors.get() if not errors.empty() else ("", "")
    if not text:
        lost = [f"{rank} with code {code}" for rank, code in enumerate(codes) if code]
        text = f"a process of the group ended: {', '.join(lost)}; memory may have run out"
    known = {kind.__name__: kind for kind in (UsageError, CheckpointError, StorageError)}
    return known.get(name, TrainingError)(text)


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a process of a group
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _member(
    plan: Plan, rank: int, target: Any, arguments: Sequence[Any], gpus: list, errors: Any
) -> None:
    """One process: joins, runs, says what went wrong; it does not outlive its parent."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
    elif "OMP_NUM_THREADS" not in os.environ:  # the processes of a machine share its cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.nproc))
    try:
        plan.join(rank, bool(gpus))
        target(*arguments, gpu=gpus[rank] if gpus else "")
        dist.destroy_process_group()
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        text = str(error) if isinstance(error, PosError) else f"{type(error).__name__}: {error}"
        errors.put((type(error).__name__, text))
        os._exit(1)  # at once: others may hold on to the group
