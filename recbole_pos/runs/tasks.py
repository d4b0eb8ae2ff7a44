"""Numbered tasks, such as parts of recommendations, on a Ray cluster.

In: a function, and the numbers it is called with. Out: what it returns for each, which must be
small: Ray only launches the tasks, and what they make goes into files that all machines reach.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import ray

from recbole_pos.errors import PosError
from recbole_pos.runs.cluster import Resources, connect, count_concurrent_runs, stop
from recbole_pos.runs.worker import MOST_LOSSES

MOST_SUBMITTED = 1000  # tasks that Ray knows at a time; a cluster that grows needs some to wait


def run_tasks(
    function: Callable[[Any, int], Any], job: Any, numbers: list[int], address: str
) -> Iterator[Any]:
    """Call ``function(job, number)`` for each number as a Ray task of one CPU.

    A task whose process or machine is lost starts again, up to :data:`MOST_LOSSES` times. When the
    generator ends or is closed, running tasks are cancelled, and the cluster is left.

    Args:
        function: a function of this package, which the other machines import.
        job: its first argument, the same for all tasks.
        numbers: its second argument in each of the tasks.
        address: ``auto`` or HOST:PORT of the cluster.

    Yields:
        What the calls return, as they end, in any order.

    Raises:
        UsageError: if no cluster answers, or it has no CPU.
        PosError: if a task was lost too often.
    """
    is_started = connect(address)
    running: list[Any] = []
    try:
        count_concurrent_runs(Resources(cpus=1))  # raises the UsageError of a cluster without CPUs
        task = ray.remote(function).options(num_cpus=1, max_retries=MOST_LOSSES)

        # Keep Ray supplied with tasks, and yield each result as it comes.
        waiting = deque(numbers)
        while waiting or running:
            while waiting and len(running) < MOST_SUBMITTED:
                running.append(task.remote(job, waiting.popleft()))
            (ended,), running = ray.wait(running)
            yield ray.get(ended)
    except ray.exceptions.RayError as error:
        first_line = str(error).strip().partition("\n")[0]
        raise PosError(
            f"a task of the cluster was lost: {first_line}; the same command resumes"
        ) from error
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        stop(is_started)
