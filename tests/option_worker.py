"""Trains one epoch under given options, in a process that cannot take the machine down."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 6 * 2**30  # bytes of address space, of which torch alone takes one or two
FILES = 64 * 2**20  # bytes of a file
PROCESSES = 4 * (os.cpu_count() or 1)  # that one case may start: workers of two loaders
SECONDS = 15  # of computing in a case, after which it says where it hangs


class Hangs(BaseException):
    """A case takes too long; no library catches this by accident."""


class _Processes:
    """Counts what a case starts, and lets it start no more than it may."""

    started = 0

    def __call__(self, event: str, args: Any) -> None:
        if event in ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"):
            self.started += 1
            if self.started > PROCESSES:
                raise MemoryError(f"{self.started} processes started")


def work(pipe: Connection, data_path: str, folder: str) -> None:
    """Answer (model, options) with (outcome, text) until None comes."""
    for limit, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, FILES)):
        resource.setrlimit(limit, (value, value))
    os.chdir(folder)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    if "FUZZ_SHOW" not in os.environ:
        os.dup2(silence, 2)
    sys.argv = sys.argv[:1]
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was not spawned
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    processes, trials = _Processes(), _Trials(data_path)
    sys.addaudithook(processes)

    def too_long(*_: Any) -> None:
        raise Hangs

    signal.signal(signal.SIGPROF, too_long)
    pipe.send("ready")
    while (case := pipe.recv()) is not None:
        processes.started = 0
        signal.setitimer(signal.ITIMER_PROF, 3.0 if case[2] in FAULTS else SECONDS)
        try:
            answer = trials.outcome(*case)
        except Hangs:
            answer = "hangs", traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(answer)


class _Trials:
    """Runs cases, reading the data again only where an option is about them."""

    def __init__(self, data_path: str) -> None:
        self.data_path = data_path
        self.datasets: dict[Any, Any] = {}

    def outcome(self, model: str, options: dict[str, Any], changed: str) -> tuple[str, str]:
        from recbole_pos.errors import TrainingError, UsageError

        try:
            loss = self._train(model, {**options, "data_path": self.data_path}, changed)
        except UsageError as error:
            return "UsageError", str(error)
        except TrainingError as error:
            return "TrainingError", str(error)
        except Exception:  # also MemoryError
            return "failed", traceback.format_exc()
        return ("trained", "") if math.isfinite(loss) else ("failed", f"loss {loss}")

    def _train(self, model: str, options: dict[str, Any], changed: str) -> float:
        from recbole_pos.config.option import DATA
        from recbole_pos.config.options import rule
        from recbole_pos.config.posconfig import PosConfig
        from recbole_pos.experiment.build import prepare, read_dataset

        if changed in FAULTS:
            FAULTS[changed]()
        if changed == "data_path":
            options["data_path"] = options.pop("given_path")
        config = PosConfig(model, "shop", None, options)
        dataset = None
        if rule(changed).role != DATA and changed not in ABOUT_DATA:
            kind = config["MODEL_TYPE"], str(config["load_col"])
            if kind not in self.datasets:
                self.datasets[kind] = read_dataset(config)
                self.datasets[kind].build()
            dataset = self.datasets[kind].for_config(config)
        made = prepare(config, dataset=dataset)
        made.trainer.epochs = 1
        made.trainer.fit(made.loaders["train"], made.loaders["valid"], saved=False, verbose=False)
        made.trainer.evaluate(made.loaders["test"])
        return made.trainer.progress.history[0]["loss"]


def _spin() -> None:
    while True:
        pass


def _fork() -> None:
    for _ in range(PROCESSES + 1):
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)


# what the limits are there for
FAULTS = {
    "spin": _spin,
    "fork": _fork,
    "allocate": lambda: bytearray(2 * MEMORY),
    "crash": os.abort,
}
# options of data that a search may not share either
ABOUT_DATA = ("numerical_features", "discretization", "worker")
