"""Processes of this machine that share numbered tasks, such as parts of recommendations.

In: a function, and the numbers it is called with. Out: what it returns for each. The command hands
out one number at a time over a pipe, so a process that is killed loses one task, which another
process then does. Processes end when the command does, even if that is killed.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from recbole_pos.errors import PosError

MOST_LOSSES = 3  # processes of a command that may be killed before it gives up


def run_workers(
    function: Callable[[Any, int], Any], job: Any, numbers: list[int], num_workers: int
) -> Iterator[Any]:
    """Call ``function(job, number)`` for each number in several processes.

    Args:
        function: what to call; a function of a module, so that other processes can import it.
        job: its first argument, which is sent to each process once.
        numbers: its second argument, one for each task.
        num_workers: number of processes.

    Yields:
        What the calls return, as they end, in any order.

    Raises:
        PosError: if more than :data:`MOST_LOSSES` processes were killed.
    """
    # Tasks that no process has begun. A Worker is a process with a pipe to this command.
    waiting = deque(numbers)
    num_lost = 0
    workers = [Worker(function, job) for _ in range(min(num_workers, len(numbers)))]
    try:
        for worker in workers:  # there are no more of them than tasks
            worker.begin(waiting.popleft())

        # Whenever a process has ended its task, or was killed, it gets the next one.
        while busy := [worker for worker in workers if worker.number is not None]:
            # ``receive`` gives what the task has returned, or tells that the process is gone.
            for worker in wait_for_any(busy):
                is_done, result = worker.receive()
                if is_done:
                    yield result
                else:  # the process was killed, and another one does its task
                    num_lost += 1
                    if num_lost > MOST_LOSSES:
                        raise PosError(
                            f"{num_lost} processes were killed, perhaps for their memory; use "
                            "fewer --workers. What is written stays, and the same command resumes"
                        )
                    assert worker.number is not None  # else it would not be busy
                    waiting.appendleft(worker.number)
                    worker.restart()
                worker.begin(waiting.popleft() if waiting else None)
    finally:
        for worker in workers:
            worker.stop()


def wait_for_any(workers: list[Worker]) -> list[Worker]:
    """Wait until a task ends or a process is killed; return the processes of which one is true."""
    # multiprocessing's ``wait`` returns the pipes that have content, or have ended.
    by_connection: dict[Any, Worker] = {worker.connection: worker for worker in workers}
    return [by_connection[connection] for connection in wait(list(by_connection))]


class Worker:
    """One process that does one task at a time, and can be started again.

    Attributes:
        number: number of the task that it is doing; None if it has none.
        connection: the command's end of the pipe.
    """

    def __init__(self, function: Callable[[Any, int], Any], job: Any) -> None:
        """Start the process, which waits for the number of its first task."""
        self.function, self.job = function, job  # to start the process again
        self.number: int | None = None
        self.connection: Connection
        self.restart()

    def restart(self) -> None:
        """Start a process that waits for tasks, in the place of a lost one if there was one."""
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self.connection, other_end = context.Pipe()
        arguments = (other_end, self.function, self.job)
        # daemon: the process is ended with the command
        self.process = context.Process(target=_serve_tasks, args=arguments, daemon=True)
        self.process.start()
        other_end.close()  # so that the pipe ends when the process does

    def begin(self, number: int | None) -> None:
        """Let the process do the task of the given number; with None, let it rest."""
        self.number = number
        if number is not None:
            with suppress(OSError):  # it is gone, which reading from the pipe will tell
                self.connection.send(number)

    def receive(self) -> tuple[bool, Any]:
        """Wait until the task of the process is done, or the process is gone.

        Returns:
            True and what the call returned; False and None if the process was killed, so that the
            pipe has ended without a result.
        """
        try:
            return True, self.connection.recv()
        except (EOFError, OSError):
            return False, None

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self.connection.close()
        self.process.terminate()
        self.process.join()


def _serve_tasks(connection: Connection, function: Callable[[Any, int], Any], job: Any) -> None:
    """Call ``function(job, number)`` for each number that comes, until the pipe ends.

    This is what the process of a :class:`Worker` runs. Ctrl-C of a terminal reaches all processes
    at once; the command alone handles it, and ends this process.

    Args:
        connection: the end of the pipe from which numbers come, and to which results are sent.
        function: what to call.
        job: its first argument.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # the command is gone
        while True:
            connection.send(function(job, connection.recv()))
