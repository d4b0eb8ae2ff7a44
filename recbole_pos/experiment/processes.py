"""Data-parallel training: several processes, each with a part of every batch, one model.

RecBole's ``--nproc`` and ``--world_size``, on CPUs (gloo) as well as on GPUs (NCCL). Each process
has all the data and makes the same batches; of a batch it takes every n-th row, and gradients are
summed with each process's share as weight. So a step is the step that one process would make, up to
rounding and dropout. RecBole's DistributedSampler would instead repeat rows until their number
divides evenly, and train on those twice.

The processes of a machine are started, watched and, when one is lost, started again by torch's
elastic agent. Ours is the place where the agents of several machines meet: torch's needs another
service or, without one, equal numbers everywhere, and does not say who is missing.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from recbole_pos.config.arguments import RunArguments
from recbole_pos.config.options import cores
from recbole_pos.errors import TrainingError, UsageError
from recbole_pos.experiment.device import ANY_GPU
from recbole_pos.experiment.environment import PORT, member_here
from recbole_pos.experiment.meeting import Meeting, Member, PeerLost, joined, met
from recbole_pos.values import shown

MOST = 8  # processes of one run that any machine may try
_POLL = 0.1  # seconds between two looks at the processes


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
            port = free_port() if world_size == nproc else PORT
        if not (str(port).isdigit() and 1 <= int(port) <= 65535):
            raise UsageError(f"--port: expected a number from 1 to 65535, found {shown(port)}")
        return cls(nproc, world_size, ip, int(port), offset)


def free_port() -> int:
    """A port of this machine that nobody uses."""
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


def gpu_here(gpu_id: Any, member: Member) -> str:
    """The GPU of a process that another program has started; empty for none.

    Those that ``gpu_id`` names are shared out; by default those that are visible, of which a
    scheduler may show each process its own.
    """
    asked = str(gpu_id).strip() if str(gpu_id).strip() != ANY_GPU else ",".join(member.gpus)
    own = gpus_of(asked, 1 if len(member.gpus) == 1 else member.local_size)
    return own[member.local_rank % len(own)] if own else ""


def use(gpu: str, nproc: int) -> None:
    """Let this process see its GPU alone or, without one, compute with its share of the cores."""
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // nproc))


def launch(
    plan: Plan,
    target: Callable[..., None],
    arguments: Sequence[Any],
    gpus: list[str],
    max_restarts: int,
    timeout: float,
) -> None:
    """Run ``target(meeting, member, *arguments, gpu=...)`` in every process of this machine.

    When one is lost, all are started again, and ``target`` is to go on from where they were.

    Args:
        plan: who trains.
        target: a function of a module.
        arguments: of it, which can be pickled.
        gpus: one for each process; none for CPUs.
        max_restarts: how often.
        timeout: seconds to wait for the launchers of other machines.

    Raises:
        UsageError, TrainingError: what the first process to fail said, or that one was lost too
            often.
        KeyboardInterrupt: at Ctrl-C, when all have ended.
    """
    rendezvous = Rendezvous(plan, timeout, max_restarts)
    spec = WorkerSpec(
        role="recbole_pos",
        local_world_size=plan.nproc,
        rdzv_handler=rendezvous,
        entrypoint=_member,
        args=(target, tuple(arguments), gpus, timeout),
        max_restarts=max_restarts,
        monitor_interval=_POLL,
    )
    with _quietly(), _signals_restored():
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull))
        result = agent.run()
    if result.is_failed():
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        said = rendezvous.meeting.said() if rendezvous.meeting else None
        raise said or _too_often(codes, max_restarts)


def _too_often(codes: dict[int, int], max_restarts: int) -> TrainingError:
    lost = ", ".join(f"{rank} with code {code}" for rank, code in sorted(codes.items()))
    again = f" after {max_restarts} restarts" if max_restarts else ""
    return TrainingError(f"a process of the group ended{again}: {lost}; memory may have run out")


class Rendezvous(RendezvousHandler):
    """Where the agents of all machines meet, at the start and after every loss.

    Args:
        plan: of this machine; that with process 0 keeps the store.
        timeout: seconds to wait for the others.
        max_restarts: told of in the line about a loss.
    """

    def __init__(self, plan: Plan, timeout: float, max_restarts: int) -> None:
        self.plan, self.timeout, self.max_restarts = plan, timeout, max_restarts
        self.attempt = -1
        self.meeting: Meeting | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """torch's question: all agents, in the order of their processes.

        Raises:
            UsageError: naming the processes whose agent is missing.
            PosError: what a process said before it ended: that would come again.
        """
        plan, self.attempt = self.plan, self.attempt + 1
        if self.meeting is None:
            self.meeting = Meeting.at(plan.ip, plan.port, plan.offset == 0, self.timeout)
        else:
            self._require_loss()
        own = {rank: str(plan.offset) for rank in range(plan.offset, plan.offset + plan.nproc)}
        agents = f"agents/{self.attempt}"
        offsets = sorted({int(o) for o in self.meeting.gather(agents, own, plan.world_size)})
        return RendezvousInfo(
            dist.PrefixStore(agents, self.meeting.store),
            offsets.index(plan.offset),
            len(offsets),
            RendezvousStoreInfo(plan.ip, plan.port),
        )

    def _require_loss(self) -> None:
        """Go on only where a process was lost that had begun: what fails otherwise fails again."""
        assert self.meeting is not None
        if said := self.meeting.said():
            raise said
        if not self.meeting.store.check([met(self.attempt - 1)]):
            raise TrainingError(
                "a process of the group ended before all had met. In a script, what calls "
                'recbole_pos.run must stand under `if __name__ == "__main__":`; else memory may '
                "have run out"
            )
        logging.getLogger(__name__).warning(
            "a process was lost; all go on from the last checkpoint (restart %d of %d)",
            self.attempt,
            self.max_restarts,
        )

    # Members never change: who was lost is started again by its own agent.

    @property
    def use_agent_store(self) -> bool:
        """The processes use the store of the agents."""
        return True

    def get_backend(self) -> str:
        return "recbole_pos"

    def get_run_id(self) -> str:
        return "run"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


@contextmanager
def _signals_restored() -> Iterator[None]:
    """torch's agent takes over signals; here they do what they did before, once all have ended."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    main = threading.current_thread() is threading.main_thread()
    kept = {n: signal.getsignal(getattr(signal, n)) for n in names if hasattr(signal, n)}
    stopped = None
    try:
        yield
    except SignalException as stop:
        stopped = stop.sigval
    finally:
        for name, handler in kept.items() if main else ():
            signal.signal(getattr(signal, name), handler)
    if stopped is not None:
        signal.raise_signal(stopped)
        raise KeyboardInterrupt  # of a signal that is otherwise ignored


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's own account of what ends, and how: it is told in a line, or not at all."""
    names = ("torch.distributed.elastic", "torch.multiprocessing")
    loggers = [logging.getLogger(n) for n in list(logging.root.manager.loggerDict)
               if n.startswith(names)]  # fmt: skip
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a process of a group
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _member(target: Any, arguments: Sequence[Any], gpus: list[str], timeout: float) -> None:
    """One process: joins, runs, says what went wrong; it does not outlive its parent."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    member = member_here(os.environ, RunArguments())
    if member is None:  # a group of one, whose others are on other machines, has two at least
        raise AssertionError("the agent has told this process nothing")
    meeting = None
    gpu = gpus[member.local_rank] if gpus else ""
    use(gpu, member.local_size)
    try:
        meeting = Meeting.at(member.ip, member.port, False, timeout)
        with joined(meeting, member, bool(gpus)):
            target(meeting, member, *arguments, gpu=gpu)
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        if meeting is not None and not isinstance(error, PeerLost):
            with suppress(TrainingError):  # who keeps the store is gone, too
                meeting.say(error)
        os._exit(1)  # at once: others may hold on to the group
