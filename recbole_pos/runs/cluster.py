"""Start Ray on this machine, or join a cluster; and run training runs and other tasks on it.

:func:`connect` tells its caller whether it has to :func:`stop` Ray again.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray

from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.device import count_cores
from recbole_pos.runs import FAILED
from recbole_pos.runs.training_runs import MOST_LOSSES, Resources, train_run
from recbole_pos.values import short, shown


def connect(address: str | None) -> bool:
    """Join a cluster of Ray, or start Ray on this machine.

    Args:
        address: ``HOST:PORT`` of the head node of a cluster, or ``auto``; None starts Ray here.

    Returns:
        True if this call joined or started Ray, so that the caller has to :func:`stop` it. False if
        this process is connected already; nothing is done then.

    Raises:
        UsageError: if nothing answers at the address, or if Ray cannot start.
    """
    if ray.is_initialized():
        return False

    if address is not None:
        _require_answer(address)
    former_handler = signal.getsignal(signal.SIGTERM)
    try:
        _initialize_ray(address)
    except Exception as error:  # of many classes; Ray has none of its own for a failed start
        reason = short(str(error).partition("\n")[0] or type(error).__name__)
        if address is None:
            raise UsageError(
                f"Ray cannot start on this machine: {reason}; if it is busy, try again; if /tmp "
                "cannot be written, set RAY_TMPDIR to a folder with a short path"
            ) from error
        raise UsageError(
            f"--address: what answers at {shown(address)} is no Ray cluster, or wants another "
            "token: copy ~/.ray/auth_token of the machine that ran `ray start --head` to this "
            f"one, and set RAY_AUTH_MODE=token ({reason})"
        ) from error

    # Ray has put in a handler of the signal SIGTERM that exits without a message, so the former one
    # is put back. Python allows this in the main thread only.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, former_handler)
    return True


def _initialize_ray(address: str | None) -> None:
    """Call ``ray.init`` with the settings of this package.

    Args:
        address: ``HOST:PORT`` of a cluster, or ``auto``; None starts Ray on this machine.
    """
    # Ray gives the processes that it starts a niceness of 15, a low priority, with which they would
    # hardly run beside other work. And it writes a token into the home folder, which may not be
    # writable, unless the environment has one.
    settings: dict[str, Any] = {}  # of a new Ray; a cluster has its own
    if address is None:
        settings = {"num_cpus": count_cores(), "include_dashboard": False}
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

    # Ray puts the working directory of this command on ``sys.path`` of its processes, and so would
    # run modules of a stranger's folder. It does not do so for jobs that this flag marks as sent by
    # a client from elsewhere. If the user has the directory on the path, it stays there.
    job = ray.job_config.JobConfig()
    job._client_job = os.getcwd() not in map(os.path.realpath, sys.path)
    ray.init(
        address or "local",
        configure_logging=True,
        logging_level=logging.ERROR,
        log_to_driver=False,
        job_config=job,
        **settings,
    )


def _require_answer(address: str) -> None:
    """Require that something listens at an address, since Ray itself would try for minutes.

    Args:
        address: ``HOST:PORT``. For ``auto``, Ray looks for a head node itself, so nothing is
            checked.

    Raises:
        UsageError: if nothing answers within ten seconds, or if the address has another form.
    """
    if address == "auto":
        return

    # A port that is no number makes a ValueError.
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--address: no Ray cluster answers at {shown(address)} ({error}); expected HOST:PORT "
            "of `ray start --head --port=PORT`, or auto; without --address this machine is used"
        ) from error


def stop(has_connected: bool) -> None:
    """Leave the cluster if :func:`connect` returned True; a cluster that it started ends."""
    if has_connected:
        ray.shutdown()


def list_machines() -> list[dict[str, float]]:
    """Return the resources of each machine of the cluster, such as ``{"CPU": 8, "GPU": 2}``."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def start_run(resources: Resources, **arguments: Any) -> Any:
    """Start ``train_run(resources=resources, **arguments)`` as a task of Ray, in the cluster.

    If the process or machine of the task is lost, Ray starts it again, up to :data:`MOST_LOSSES`
    times, and :func:`train_run` goes on from the last checkpoint in the folder of the run.

    Args:
        resources: CPUs and GPUs that Ray gives to the task, and that the run uses.
        arguments: the other arguments of :func:`train_run`.

    Returns:
        Ray's reference to the result of the task.
    """
    task: Any = ray.remote(train_run).options(
        max_retries=MOST_LOSSES, num_cpus=resources.cpus, num_gpus=resources.gpus
    )
    return task.remote(resources=resources, **arguments)


class RayRuns:
    """Runs as tasks of a Ray cluster; ``training_runs.LocalRuns`` has the same methods.

    A run whose process or machine is lost starts again, up to :data:`MOST_LOSSES` times.

    Attributes:
        is_started: whether this object joined or started Ray, and has to stop it.
    """

    list_machines = staticmethod(list_machines)
    share = staticmethod(ray.put)  # stores data once a machine, and returns a reference to them
    start = staticmethod(start_run)

    def __init__(self, address: str | None) -> None:
        """Join the cluster at an address, or start one on this machine.

        Args:
            address: ``auto`` or HOST:PORT of the cluster; None to start one here.
        """
        # False if this process was in a cluster already, which ``stop`` then must not leave.
        self.is_started = connect(address)

    def wait(self, runs: Iterable[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Wait up to a second for a run to end, and yield it with the facts that it returned.

        Callers call this in a loop, and do other things between. If Ray has lost the process of a
        run more often than it starts it again, the facts say that the run has failed, and why.

        Args:
            runs: Ray's references to running tasks, as :func:`start_run` returned them.

        Yields:
            The reference, and the dict that ``train_run`` returned, such as ``{"status": "done"}``.
        """
        # ray.wait returns the references that have ended, and the others.
        for run in ray.wait(list(runs), timeout=1.0)[0]:
            try:
                yield run, ray.get(run)
            except ray.exceptions.RayError as error:
                first_line = str(error).strip().partition("\n")[0]
                yield run, {"status": FAILED, "reason": f"its process was lost: {first_line}"}

    def cancel(self, runs: Iterable[Any]) -> None:
        """End the tasks of runs."""
        for run in runs:
            ray.cancel(run, force=True)

    def stop(self) -> None:
        """Leave the cluster; one that was started here ends."""
        stop(self.is_started)


def run_tasks(
    function: Callable[..., Any], arguments: tuple[Any, ...], numbers: list[int], address: str
) -> Iterator[Any]:
    """Call ``function(*arguments, number)`` for each number as a Ray task of one CPU.

    A task whose process or machine is lost starts again, up to :data:`MOST_LOSSES` times. Tasks
    that still run when the generator ends or is closed end with it, since it leaves the cluster.

    Args:
        function: a function of this package, which the other machines import.
        arguments: its first arguments, the same for all tasks.
        numbers: its last argument in each of the tasks.
        address: ``auto`` or HOST:PORT of the cluster.

    Yields:
        What the calls return, in the order of ``numbers``.

    Raises:
        UsageError: if no cluster answers.
        PosError: if a task was lost too often.
        Exception: what a call raises.
    """
    is_started = connect(address)
    try:
        task: Any = ray.remote(function).options(num_cpus=1, max_retries=MOST_LOSSES)
        for reference in [task.remote(*arguments, number) for number in numbers]:
            yield ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # its own message is a traceback
        raise error.cause from error
    except ray.exceptions.RayError as error:
        first_line = str(error).strip().partition("\n")[0]
        raise PosError(
            f"a task of the cluster was lost: {first_line}; the same command resumes"
        ) from error
    finally:
        stop(is_started)
