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
from torch import Tensor, nn

from recbole_pos.device import cores
from recbole_pos.errors import CheckpointError, PosError, StorageError, TrainingError, UsageError

MOST = 8  # processes of one run that any machine may try
PORT = 5678  # where several machines meet, as in RecBole


@dataclass
class Share:
    """The part of every batch that is this process's.

    ``own`` and ``whole`` count the targets of the current batch, here and in all processes. A batch
    with fewer rows than processes lends its first row to those left without, as ``own = 0``.
    """

    rank: int = 0
    size: int = 1
    own: int = 1
    whole: int = 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    def of(self, rows: Any, counts: Any = None) -> Any:
        """This process's rows of a batch, ``counts`` being their numbers of targets (1 if None)."""
        if self.alone:
            return rows
        mine = rows[self.rank :: self.size]
        self.whole = len(rows) if counts is None else int(counts.sum())
        self.own = len(mine) if counts is None else int(counts[self.rank :: self.size].sum())
        return mine if len(mine) else rows[:1]

    @property
    def weight(self) -> float:
        """Of this process's mean loss in the mean of the whole batch."""
        return self.own / self.whole


def this_share() -> Share:
    """What is this process's part; everything unless a group was joined."""
    joined = dist.is_available() and dist.is_initialized()
    return Share(dist.get_rank(), dist.get_world_size()) if joined else Share()


def divide(loader: Any, share: Share) -> None:
    """Make one of RecBole's loaders collate this process's part of its batches."""
    if share.alone or getattr(loader, "divided", False):
        return
    if loader.num_workers:
        raise UsageError("worker: with nproc batches are made in each process; expected 0")
    collate = loader.collate_fn
    loader.collate_fn = lambda index: collate(share.of(index))
    loader.divided = True


def sum_gradients(model: nn.Module) -> None:
    """Replace every gradient by the sum over all processes, in one message."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:  # not used in this process's part of the batch
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([p.grad.reshape(-1) for p in trained])
    dist.all_reduce(flat)
    for parameter, total in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad.copy_(total.view_as(parameter))


def total(value: float, device: torch.device) -> float:
    """Sum of a number over all processes."""
    found = torch.tensor([value], dtype=torch.float64).to(device)
    dist.all_reduce(found)
    return float(found)


def gather_rows(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all processes, one after another; a process without rows has none of them."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    names = dict.fromkeys(name for part in everyone for name in part)
    return {name: torch.cat([part[name] for part in everyone if name in part]) for name in names}


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
            if process.is_alive():  # Ctrl-C reaches all of them by itself, SIGTERM only this one
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
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
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
