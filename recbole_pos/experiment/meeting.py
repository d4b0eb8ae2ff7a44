"""Where the processes of one run meet: a store that one of them keeps, at an address all know.

torch's own start waits for half an hour and then names nobody. Here everyone writes down that it
has come, and after ``timeout`` seconds whoever waits says who is missing, and where it waited. The
store also outlives what is started again after a loss: it has the folder of the run, and the error
that one process has found, so that nobody tries that again.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recbole_pos.errors import CheckpointError, PosError, StorageError, TrainingError, UsageError

_POLL = 0.05  # seconds between two looks; not one long wait in C++, which would not hear Ctrl-C


class PeerLost(TrainingError):
    """Another process of the run is gone, and this one cannot go on without it."""


@dataclass(frozen=True)
class Member:
    """One of the processes of a run.

    Attributes:
        rank, size: which one, of how many.
        local_rank, local_size: of those on this machine.
        ip, port: where they meet.
        attempt: how often all of them were started before.
        kept: whether a launcher keeps the store, rather than process 0.
        gpus: that processes of this machine may use.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    ip: str
    port: int
    attempt: int = 0
    kept: bool = False
    gpus: tuple[str, ...] = ()


def open_store(ip: str, port: int, keep: bool, timeout: float) -> dist.TCPStore:
    """The store at an address.

    Args:
        ip, port: the address.
        keep: whether this process is the one that keeps it.
        timeout: seconds to wait for that one.

    Raises:
        UsageError: if nobody answers there, or the port cannot be had.
    """
    if not keep:
        _wait_for_answer(ip, port, timeout)
    minute = timedelta(minutes=1)  # for what is there, but slow
    try:
        return dist.TCPStore(ip, port, is_master=keep, wait_for_workers=False, timeout=minute)
    except RuntimeError as error:
        raise UsageError(
            f"--port: {'cannot listen' if keep else 'no run'} at {ip}:{port}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _wait_for_answer(ip: str, port: int, timeout: float) -> None:
    until = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((ip, port), timeout=max(timeout, 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise UsageError(
                    f"process 0 is missing: nobody answered at {ip}:{port} within {timeout:g} s "
                    f"({error}). Is it started there, by hand with --group_offset 0, and do --ip "
                    "and --port say where? --join_timeout waits longer"
                ) from error
        time.sleep(_POLL)


class Meeting:
    """What the processes of a run know of each other.

    Args:
        store: that all of them reach.
        address: of it, for messages.
        timeout: seconds to wait for whoever is missing.
        name: of the run, where several use one store.
    """

    def __init__(self, store: dist.Store, address: str, timeout: float, name: str = "run") -> None:
        self.store = dist.PrefixStore(f"recbole_pos/{name}", store)
        self.address, self.timeout = address, timeout

    @classmethod
    def at(cls, ip: str, port: int, keep: bool, timeout: float) -> Meeting:
        """With a store of its own, see :func:`open_store`."""
        return cls(open_store(ip, port, keep, timeout), f"{ip}:{port}", timeout)

    def gather(self, place: str, own: dict[int, str], size: int) -> list[str]:
        """What each of ``size`` processes has to tell, once all have come.

        Args:
            place: name of this occasion; all come to a place once.
            own: what those that this process speaks for have to tell, by rank.
            size: how many there are.

        Raises:
            UsageError: naming those who are missing.
            TrainingError: if the store is gone.
        """
        with self._reached():
            for rank, told in own.items():
                self.store.set(f"{place}/{rank}", told)
            self._wait([f"{place}/{rank}" for rank in range(size)])
            return [self.store.get(f"{place}/{rank}").decode() for rank in range(size)]

    def _wait(self, keys: list[str]) -> None:
        until, size = time.monotonic() + self.timeout, len(keys)
        while not self.store.check(keys):
            if time.monotonic() > until:
                missing = [rank for rank in range(size) if not self.store.check([keys[rank]])]
                one = len(missing) == 1
                raise UsageError(
                    f"process{'' if one else 'es'} {_ranges(missing)} of {size} "
                    f"{'is' if one else 'are'} missing: not come to {self.address} within "
                    f"{self.timeout:g} s. Start what has {'it' if one else 'them'} (by hand with "
                    f"--group_offset {missing[0]}); --join_timeout waits longer"
                )
            time.sleep(_POLL)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise TrainingError(f"the process that kept {self.address} is gone") from error

    def say(self, error: BaseException) -> None:
        """Tell of an error that would come again, so that nothing is started again."""
        text = str(error) if isinstance(error, PosError) else f"{type(error).__name__}: {error}"
        with self._reached():
            self.store.compare_set("said", "", json.dumps([type(error).__name__, text]))

    def said(self) -> PosError | None:
        """The first error that was told, if any."""
        with self._reached():
            if not self.store.check(["said"]):
                return None
            name, text = json.loads(self.store.get("said"))
        known = {kind.__name__: kind for kind in (UsageError, CheckpointError, StorageError)}
        return known.get(name, TrainingError)(text)

    @property
    def folder(self) -> str | None:
        """Where the run writes, as long as it lasts."""
        return self.store.get("folder").decode() if self.store.check(["folder"]) else None

    @folder.setter
    def folder(self, path: str) -> None:
        self.store.set("folder", path)


@contextmanager
def joined(meeting: Meeting, member: Member, on_gpu: bool) -> Iterator[None]:
    """While this process is a member of torch's group, which begins once all have come.

    Raises:
        UsageError: naming those who have not.
        PeerLost: if one of them is gone later.
    """
    # with fewer processes than before, those that are left meet at another place
    place = f"{member.attempt}/{member.size}"
    meeting.gather(place, {member.rank: ""}, member.size)
    meeting.store.set(met(member.attempt), "")
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"{place}/group", meeting.store),
            rank=member.rank,
            world_size=member.size,
        )
        yield
    except RuntimeError as error:
        if isinstance(error, PosError) or not _of_connection(error):
            raise
        raise PeerLost(
            f"process {member.rank} lost another process of the run: {str(error).splitlines()[0]}"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def met(attempt: int) -> str:
    """Key that is there once all processes of an attempt had come."""
    return f"met/{attempt}"


def from_first(member: Member, decide: Any) -> Any:
    """What process 0 decides, in all of them; they raise what it raises.

    Args:
        member: this process, in its group.
        decide: a function without arguments.
    """
    told: list[Any] = [None, None]
    if member.rank == 0:
        try:
            told[0] = decide()
        except PosError as error:
            told[1] = error
    dist.broadcast_object_list(told)
    if told[1] is not None:
        raise told[1]
    return told[0]


def _of_connection(error: RuntimeError) -> bool:
    """Whether torch could not reach another process; of gloo it has no kind of error for that."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _ranges(ranks: list[int]) -> str:
    """``1, 3 to 5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
