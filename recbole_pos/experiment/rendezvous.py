"""Where the processes of one run meet: a store of torch, at an address that all of them know.

The store outlives processes that are started again after a loss: it keeps the folder of the run and
the first error of a process. ``init_process_group`` alone would wait for half an hour for missing
processes, and not name them.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from recbole_pos.errors import CheckpointError, PosError, StorageError, TrainingError, UsageError
from recbole_pos.experiment.environment import Rank

_POLL = 0.05  # seconds between two checks; one long wait in C++ would not react to Ctrl-C


class Rendezvous:
    """The store through which the processes of a run meet; ``timeout`` is in seconds."""

    def __init__(self, ip: str, port: int, keeps_store: bool, timeout: float) -> None:
        """Open the store, or wait for it and connect; raise UsageError if that fails."""
        self.address = f"{ip}:{port}"
        self.timeout = timeout
        if not keeps_store:
            self._wait_for_store(ip, port)
        try:
            self.root = dist.TCPStore(
                ip,
                port,
                is_master=keeps_store,
                wait_for_workers=False,
                timeout=timedelta(minutes=1),  # for a store that answers, but slowly
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"--port: no run can meet at {self.address}: {reason}") from error
        self.begin(0)

    def _wait_for_store(self, ip: str, port: int) -> None:
        """Wait until the store answers; torch's own wait would print a traceback of C++."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                socket.create_connection((ip, port), timeout=max(self.timeout, 0.1)).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"process 0 is missing: nothing answers at {self.address} after "
                        f"{self.timeout:g} s ({error}); start it there (by hand with "
                        "--group_offset 0), or correct --ip and --port; --join_timeout waits longer"
                    ) from error
            time.sleep(_POLL)

    def begin(self, run_number: int) -> None:
        """Begin a run: its number is part of the keys, so keys of earlier runs are not read."""
        self.store = dist.PrefixStore(f"recbole_pos/run{run_number}", self.root)

    @contextmanager
    def joined(self, rank: Rank) -> Iterator[None]:
        """Join torch's process group for a ``with`` block, which begins once all processes joined.

        An error in the block is stored for :meth:`read_error`, unless another process was lost.
        Processes with GPUs communicate by NCCL, others by gloo.

        Raises:
            UsageError: if processes did not join in time; names them.
            TrainingError: if another process was lost.
        """
        # the size is in the prefix, as a later attempt may have fewer processes
        store = dist.PrefixStore(f"{rank.attempt}/{rank.size}", self.store)
        try:
            self._wait_for_all(store, rank)
            backend = "nccl" if rank.gpu else "gloo"
            dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size)
            yield
        except Exception as error:
            if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
                reason = str(error).splitlines()[0]
                raise TrainingError(
                    f"process {rank.rank} lost another process: {reason}"
                ) from error
            text = str(error) if isinstance(error, PosError) else f"{type(error).__name__}: {error}"
            self.store.compare_set("error", "", json.dumps([type(error).__name__, text]))
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _wait_for_all(self, store: dist.Store, rank: Rank) -> None:
        """Wait until all processes have come; a UsageError names the missing ones."""
        store.set(f"came/{rank.rank}", "")
        deadline = time.monotonic() + self.timeout
        while missing := [i for i in range(rank.size) if not store.check([f"came/{i}"])]:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"of {rank.size} processes, {', '.join(map(str, missing))} did not come to "
                    f"{self.address} within {self.timeout:g} s; start what has them (by hand with "
                    f"--group_offset {missing[0]}); --join_timeout waits longer"
                )
            time.sleep(_POLL)

    def read_error(self) -> PosError | None:
        """Return the first error of a process, if any; a TrainingError if the store is gone."""
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
