"""Start Ray on this machine, or join a cluster; and count the runs that it can train at a time.

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
from dataclasses import dataclass
from typing import Any

import ray

from recbole_pos.errors import UsageError
from recbole_pos.experiment.device import count_cores
from recbole_pos.values import shown


@dataclass(frozen=True)
class Resources:
    """The resources of a training run.

    Attributes:
        cpus: number of CPUs, which is also the number of threads.
        gpus: number of GPUs; with a fraction, several runs share one.
    """

    cpus: float = 1
    gpus: float = 0


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

    # Ray's processes would search the working directory for modules first, which may be a
    # stranger's folder. This flag prevents it, unless the user has the directory on the path.
    job = ray.job_config.JobConfig()
    job._client_job = os.getcwd() not in map(os.path.realpath, sys.path)

    # Settings of a new Ray on this machine, or the address of a cluster.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"include_dashboard": False, "num_cpus": count_cores()}
        # Ray's workers have a niceness of 15 by default: beside other work on the machine they
        # would get next to no time.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Without this token, Ray writes one into the home folder, which may not be writable.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    else:
        _require_answer(address)

    # Connect. Ray has no class of its own for a start that takes too long.
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", configure_logging=True, job_config=job, **options)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if address is None:
            raise UsageError(
                f"Ray cannot start on this machine: {reason}; if it is busy, try again; if /tmp "
                "cannot be written, set RAY_TMPDIR to a folder with a short path"
            ) from error
        raise UsageError(
            f"--address: what answers at {shown(address)} is no Ray cluster, or wants another "
            "token: copy ~/.ray/auth_token of the machine that ran `ray start --head` to this one, "
            f"or set RAY_AUTH_TOKEN to what it holds, and set RAY_AUTH_MODE=token ({reason})"
        ) from error

    # Ray's handler of SIGTERM exits at once, without a message; put ours back. Only the main thread
    # may do so.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, sigterm)
    return True


def _require_answer(address: str) -> None:
    """Require that something listens at an address, since Ray itself would try for minutes.

    Args:
        address: ``HOST:PORT``. For ``auto``, Ray looks for a head node on this machine, so nothing
            is checked, unless the environment variable RAY_ADDRESS names one.

    Raises:
        UsageError: if nothing answers within ten seconds, or if the address has another form.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        return

    # A port that is no number is a ValueError, one that is too large an OverflowError.
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"--address: no Ray cluster answers at {shown(address)} ({error}); expected HOST:PORT "
            "of `ray start --head --port=PORT`, or auto; without --address this machine is used"
        ) from error


def stop(has_connected: bool) -> None:
    """Leave the cluster if :func:`connect` returned True; a cluster that it started ends."""
    if has_connected:
        ray.shutdown()


def count_concurrent_runs(resources: Resources) -> int:
    """Return how many runs the machines of the cluster can train at the same time.

    Args:
        resources: CPUs and GPUs of a run.

    Raises:
        UsageError: if no machine has them. Ray would wait for one that has.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    required = {"CPU": resources.cpus, "GPU": resources.gpus}

    # On each machine the scarcest resource limits the number of runs.
    rounding = 1e-9  # 0.3 GPUs hold three runs of 0.1, although 0.3 / 0.1 < 3
    num_runs = sum(
        min(int(node.get(key, 0) / amount + rounding) for key, amount in required.items() if amount)
        for node in nodes
    )
    if not num_runs:
        machines = "; ".join(f"{n.get('CPU', 0):g} CPUs, {n.get('GPU', 0):g} GPUs" for n in nodes)
        raise UsageError(
            f"--cpus_per_trial, --gpus_per_trial: no machine has {resources.cpus:g} CPUs and "
            f"{resources.gpus:g} GPUs for a run; found {shown(machines)}"
        )
    return num_runs
