"""Starting Ray on this machine, or joining a cluster."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from recbole_pos.errors import UsageError
from recbole_pos.values import shown


@dataclass(frozen=True)
class Resources:
    """What each process of a run takes, and where runs are kept.

    Attributes:
        cpus: of each process, which has as many threads; gpus: of each, perhaps a fraction.
        nproc: processes that train one run together.
        storage: path or URI with runs by the names of their folders, where machines may not reach
            the folders; None where all do.
    """

    cpus: float = 1
    gpus: float = 0
    nproc: int = 1
    storage: str | None = None

    @property
    def for_ray(self) -> dict[str, float]:
        """Of one process, as Ray's tasks name them."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


def connect(address: str | None) -> bool:
    """Join the cluster at ``address``, or the one this process has joined; else start one.

    Returns:
        Whether this call did it, so that the caller is the one to :func:`stop` it.

    Raises:
        UsageError: if nothing answers at the address.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    if address is not None:
        _require_answer(address)
    _bring_token(address is None)
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            ray.init("local", include_dashboard=False, **quiet)
        else:
            ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"--address: what answers at {shown(address)} is no Ray cluster, or wants another "
            "token: copy ~/.ray/auth_token of the machine that ran `ray start --head` to this one, "
            "or set RAY_AUTH_TOKEN to what it holds; without --address this machine is used alone "
            f"({(str(error).splitlines() or [type(error).__name__])[0][:200]})"
        ) from error
    except OSError as error:
        raise UsageError(f"Ray cannot start on this machine: {error}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, sigterm)  # Ray's ends at once, and says nothing
    return True


def _bring_token(own: bool) -> None:
    """Let Ray use the token that this user has: to join a cluster it would not look for it.

    Clusters ask for one where it exists, and by default since Ray 2.60. For one of its own Ray
    writes it into the home folder, where a later `ray start` finds it and asks for it; here a
    cluster that lives as long as this process has one that dies with it.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    kept = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    there = "RAY_AUTH_TOKEN" in os.environ
    with suppress(OSError):  # a home folder that is none
        there = there or kept.is_file()
    if own and not there:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if own or there:
        os.environ["RAY_AUTH_MODE"] = "token"
        with suppress(AttributeError):  # Ray has read its environment when imported
            ray._raylet.Config.initialize("")  # type: ignore[attr-defined]


def _require_answer(address: str) -> None:
    """Ray itself tries for minutes before it gives up."""
    where = address
    if address == "auto":  # where `ray start` left the address
        file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        where = os.environ.get("RAY_ADDRESS") or (file.read_text() if file.is_file() else "")
    host, colon, port = where.strip().rpartition(":")
    if not (colon and port.isdigit()) or "://" in where:
        return  # Ray knows what it means, or says at once that it does not
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise UsageError(
            f"--address: no Ray cluster answers at {shown(where.strip())} ({error}); start one "
            "with `ray start --head`, or leave --address out to run on this machine"
        ) from error


def stop(started: bool) -> None:
    """Leave the cluster, and end it if it is this process's own."""
    if started:
        ray.shutdown()


def _nodes() -> list[dict[str, float]]:
    """Return what each machine has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def room_for(resources: Resources) -> int:
    """Return how many runs the machines of the cluster can train side by side.

    Raises:
        UsageError: if none of them can ever train one; Ray would wait for a machine that can.
    """
    nodes, takes = _nodes(), {"CPU": resources.cpus, "GPU": resources.gpus}
    for key, wanted in takes.items():
        most = max((node.get(key, 0) for node in nodes), default=0)
        if wanted > most:
            raise UsageError(
                f"--{key.lower()}s_per_trial: {wanted:g} is more than the {most:g} {key}s of "
                "any machine in the cluster"
            )
    processes = sum(
        min(int(node.get(key, 0) / wanted + 1e-9) for key, wanted in takes.items() if wanted)
        for node in nodes
    )
    if processes < resources.nproc:
        raise UsageError(
            f"--nproc: a trial of {resources.nproc} processes does not fit: there is room for "
            f"{processes}"
        )
    return processes // resources.nproc


def describe_cluster(resources: Resources) -> str:
    """Return machines, what a run takes, and what lies idle, in one line."""
    nodes = _nodes()
    cpus, gpus = (sum(node.get(key, 0) for node in nodes) for key in ("CPU", "GPU"))
    machines = "1 machine" if len(nodes) == 1 else f"{len(nodes)} machines"
    idle = ", none of them used: see --gpus_per_trial" if gpus and not resources.gpus else ""
    takes = f"{resources.cpus:g} CPU"
    if resources.gpus:
        takes += f" and {resources.gpus:g} GPU"
    if resources.nproc > 1:
        takes = f"{resources.nproc} times {takes}"
    return f"{machines} with {cpus:g} CPUs and {gpus:g} GPUs{idle}; a trial takes {takes}"
