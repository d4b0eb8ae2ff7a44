"""Where the processes of one run meet: a store of torch's, at an address all know.

torch's own start waits for half an hour, and then does not say which processes are missing. The
store outlives processes that are started again after a loss: it keeps the folder of the run, and
the first error of a process.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recbole_pos.errors import CheckpointError, PosError, StorageError, TrainingError, UsageError
from recbole_pos.experiment.environment import Rank

_POLL = 0.05  # seconds between two looks; not one long wait in C++, which would not hear Ctrl-C


class PeerLost(TrainingError):
    """Another process of the run is gone, and this one cannot go on without it."""


class Rendezvous:
    """The store through which the processes of a run meet.

    Args:
        ip, port: address of the store.
        keeps_store: whether this process keeps the store.
        timeout: seconds to wait for missing processes.

    Raises:
        UsageError: if no process answers at the address, or the port is in use.
    """

    def __init__(self, ip: str, port: int, keeps_store: bool, timeout: float) -> None:
        self.address, self.timeout = f"{ip}:{port}", timeout
        if not keeps_store:
            self._wait_for_answer(ip, port)
        minute = timedelta(minutes=1)  # for a store that answers, but slowly
        try:
            self.root = dist.TCPStore(
                ip, port, is_master=keeps_store, wait_for_workers=False, timeout=minute
            )
        except RuntimeError as error:
            raise UsageError(
                f"--port: {'cannot listen' if keeps_store else 'no run'} at {self.address}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.begin("run")

    def _wait_for_answer(self, ip: str, port: int) -> None:
        """Wait until a process listens at the address; a UsageError after ``timeout`` seconds."""
        until = time.monotonic() + self.timeout
        while True:
            try:
                socket.create_connection((ip, port), timeout=max(self.timeout, 0.1)).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise UsageError(
                        f"process 0 is missing: no one answered at {self.address} within "
                        f"{self.timeout:g} s ({error}). Is it started there, by hand with "
                        "--group_offset 0, and are --ip and --port right? --join_timeout waits "
                        "longer"
                    ) from error
            time.sleep(_POLL)

    def begin(self, name: str) -> None:
        """Begin a run under a new name, so that keys of earlier runs in the store are not read."""
        self.store = dist.PrefixStore(f"recbole_pos/{name}", self.root)

    @contextmanager
    def joined(self, rank: Rank, on_gpu: bool) -> Iterator[None]:
        """Be in torch's process group in a ``with`` block, which begins once all have come.

        An error in the block is reported to the other processes, unless one of them was lost.

        Args:
            rank: this process.
            on_gpu: whether the processes communicate by NCCL, and not by gloo.

        Raises:
            UsageError: naming the processes that have not come.
            PeerLost: if one of them is lost later.
        """
        # the size is in the name: a later attempt may have fewer processes
        place = f"{rank.attempt}/{rank.size}"
        try:
            self.meet(place, [rank.rank], rank.size)
            self.store.set(f"met/{rank.attempt}", "")
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=dist.PrefixStore(f"{place}/group", self.store),
                rank=rank.rank,
                world_size=rank.size,
            )
            yield
        except Exception as error:
            if _is_of_connection(error):
                raise PeerLost(
                    f"process {rank.rank} lost another process of the run: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            text = str(error) if isinstance(error, PosError) else f"{type(error).__name__}: {error}"
            self.store.compare_set("error", "", json.dumps([type(error).__name__, text]))
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def meet(self, place: str, ranks: Iterable[int], size: int) -> None:
        """Report that processes have come to a place, and wait for the others.

        Args:
            place: name of the place in the store.
            ranks: processes for which this one reports.
            size: number of processes that must come.

        Raises:
            UsageError: naming the processes that have not come.
        """
        for rank in ranks:
            self.store.set(f"{place}/{rank}", "")
        until, keys = time.monotonic() + self.timeout, [f"{place}/{rank}" for rank in range(size)]
        while not self.store.check(keys):
            if time.monotonic() > until:
                missing = [rank for rank in range(size) if not self.store.check([keys[rank]])]
                names = _describe_ranks(missing)
                raise UsageError(
                    f"of {size} processes, {names} did not come to {self.address} "
                    f"within {self.timeout:g} s. Start what has them (by hand with "
                    f"--group_offset {missing[0]}); --join_timeout waits longer"
                )
            time.sleep(_POLL)

    def has_met(self, attempt: int) -> bool:
        """Return whether all processes of an attempt had come."""
        return self.store.check([f"met/{attempt}"])

    def error(self) -> PosError | None:
        """Return the first error that a process reported, if any; a restart would repeat it.

        Raises:
            TrainingError: if the process that kept the store is gone.
        """
        try:
            if not self.store.check(["error"]):
                return None
            name, text = json.loads(self.store.get("error"))
        except dist.DistError as error:
            raise TrainingError(f"the process that kept {self.address} is gone") from error
        classes = {cls.__name__: cls for cls in (UsageError, CheckpointError, StorageError)}
        return classes.get(name, TrainingError)(text)

    @property
    def folder(self) -> str | None:
        """The folder of the run; None until process 0 has chosen it."""
        return self.store.get("folder").decode() if self.store.check(["folder"]) else None

    @folder.setter
    def folder(self, path: str) -> None:
        self.store.set("folder", path)


def from_first(rank: Rank, decide: Callable[[], Any]) -> Any:
    """Call a function in process 0, and return its value, or raise its error, in all processes.

    Args:
        rank: this process, in its group.
        decide: a function without arguments.
    """
    outcome: list[Any] = [None, None]  # value, error
    if rank.rank == 0:
        try:
            outcome[0] = decide()
        except PosError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _is_of_connection(error: Exception) -> bool:
    """Return whether torch could not reach another process; with gloo only the text says so."""
    return isinstance(error, (dist.DistError, PeerLost)) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


def _describe_ranks(ranks: list[int]) -> str:
    """Return sorted ranks as text: ``1, 3 to 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
