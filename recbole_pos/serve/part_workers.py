"""Processes of this machine that share numbered tasks, such as parts of recommendations.

In: a function, and the numbers it is called with. Out: what it returns for each. If a process is
killed, its task is done again. The processes end when the command does, even if that is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from recbole_pos.errors import PosError

MOST_LOSSES = 3  # times that a process may be killed before the command gives up


def run_workers(
    function: Callable[[Any, int], Any], job: Any, numbers: list[int], num_workers: int
) -> Iterator[Any]:
    """Call ``function(job, number)`` for each number in several processes.

    Args:
        function: what to call; a function of a module, so that other processes can import it.
        job: its first argument, which is sent to the processes.
        numbers: its second argument, one for each task.
        num_workers: number of processes.

    Yields:
        What the calls return, as they end, in any order.

    Raises:
        PosError: if a process was killed more than :data:`MOST_LOSSES` times.
    """
    # A pool of processes breaks when one of them is killed: each task that has not ended has the
    # error BrokenProcessPool. Then a new pool does what is left.
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    left = set(numbers)
    for _ in range(MOST_LOSSES + 1):
        pool = ProcessPoolExecutor(num_workers, context, initializer=_end_with_parent)
        try:
            tasks = {pool.submit(function, job, number): number for number in sorted(left)}
            for task in as_completed(tasks):
                if not isinstance(task.exception(), BrokenProcessPool):
                    left.remove(tasks[task])
                    yield task.result()
        finally:  # also if the caller stops early: tasks that have begun end, and no other begins
            pool.shutdown(cancel_futures=True)
        if not left:
            return
    raise PosError(
        f"processes were killed {MOST_LOSSES + 1} times, perhaps for their memory; use fewer "
        "--workers. What is written stays, and the same command resumes"
    )


def _end_with_parent() -> None:
    """Start a thread that ends this process of a pool as soon as the command has ended.

    A command that is killed cannot end its processes itself.
    """

    def end() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
