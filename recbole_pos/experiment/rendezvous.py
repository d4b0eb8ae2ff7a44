"""Where the processes of one run meet: a store of torch's, at an address all know.

torch's own start waits for half an hour and then names no one. The store outlives what is started
again after a loss: it has the folder of the run, and the error that one process has found.
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
    """What the processes of a run know of each other.

    Args:
        ip, port: where a process keeps the store.
        keeps: whether this one does.
        timeout: seconds to wait for who is missing.

    Raises:
        UsageError: if no one answers there, or the port cannot be had.
    """

    def __init__(self, ip: str, port: int, keeps: bool, timeout: float) -> None:
        self.address, self.timeout = f"{ip}:{port}", timeout
        if not keeps:
            self._wait_for_answer(ip, port)
        minute = timedelta(minutes=1)  # for what is there, but slow
        try:
            self.root = dist.TCPStore(
                ip, port, is_master=keeps, wait_for_workers=False, timeout=minute
            )
        except RuntimeError as error:
            raise UsageError(
                f"--port: {'cannot listen' if keeps else 'no run'} at {self.address}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.begin("run")

    def _wait_for_answer(self, ip: str, port: int) -> None:
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
        """Leave the messages of an earlier run of the same processes."""
        self.store = dist.PrefixStore(f"recbole_pos/{name}", self.root)

    @contextmanager
    def joined(self, rank: Rank, on_gpu: bool) -> Iterator[None]:
        """While this process is in torch's group, which begins once all have come.

        What goes wrong is reported to the others, unless another process is lost.

        Raises:
            UsageError: naming those who have not come.
            PeerLost: if one of them is gone later.
        """
        # with fewer processes than before, those that are left meet at another place
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
        """Come to a place, for some of the processes, and wait for the others.

        Raises:
            UsageError: naming those who have not come.
        """
        for rank in ranks:
            self.store.set(f"{place}/{rank}", "")
        until, keys = time.monotonic() + self.timeout, [f"{place}/{rank}" for rank in range(size)]
        while not self.store.check(keys):
            if time.monotonic() > until:
                missing = [rank for rank in range(size) if not self.store.check([keys[rank]])]
                raise UsageError(
                    f"of {size} processes, {_ranges(missing)} did not come to {self.address} "
                    f"within {self.timeout:g} s. Start what has them (by hand with "
                    f"--group_offset {missing[0]}); --join_timeout waits longer"
                )
            time.sleep(_POLL)

    def has_met(self, attempt: int) -> bool:
        """Return whether all processes of an attempt had come."""
        return self.store.check([f"met/{attempt}"])

    def error(self) -> PosError | None:
        """Return the first error that a process reported, if any: it would come again."""
        try:
            if not self.store.check(["error"]):
                return None
            name, text = json.loads(self.store.get("error"))
        except dist.DistError as error:
            raise TrainingError(f"the process that kept {self.address} is gone") from error
        known = {kind.__name__: kind for kind in (UsageError, CheckpointError, StorageError)}
        return known.get(name, TrainingError)(text)

    @property
    def folder(self) -> str | None:
        """Where the run writes, as long as it lasts."""
        return self.store.get("folder").decode() if self.store.check(["folder"]) else None

    @folder.setter
    def folder(self, path: str) -> None:
        self.store.set("folder", path)


def from_first(rank: Rank, decide: Callable[[], Any]) -> Any:
    """Return what process 0 decides, in all of them; they raise what it raises.

    Args:
        rank: this process, in its group.
        decide: a function without arguments.
    """
    decided: list[Any] = [None, None]
    if rank.rank == 0:
        try:
            decided[0] = decide()
        except PosError as error:
            decided[1] = error
    dist.broadcast_object_list(decided)
    if decided[1] is not None:
        raise decided[1]
    return decided[0]


def _is_of_connection(error: Exception) -> bool:
    """Return whether torch could not reach another process; of gloo it has no kind of error for
    that."""
    return isinstance(error, (dist.DistError, PeerLost)) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


def _ranges(ranks: list[int]) -> str:
    """``1, 3 to 5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
