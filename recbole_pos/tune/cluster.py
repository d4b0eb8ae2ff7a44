"""Starting Ray on this machine, or joining a cluster."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_OF_A_FULL_DISK = ("Trial %s: Error stopping trial", "Saving experiment state to storage")


def _no_stacks(record: logging.LogRecord) -> bool:
    """Leaves out stacks that tell a user nothing.

    Of a lost process progress.py tells in a line, of a full disk the error of the search. And a
    checkpoint that is deleted already is none that anybody needs.
    """
    text = str(record.msg)
    error = record.exc_info[1] if record.exc_info else None
    again = "Error handling checkpoint" in text and isinstance(error, FileNotFoundError)
    full = isinstance(error, OSError) and text.startswith(_OF_A_FULL_DISK)
    return not (text.startswith("Trial task failed") or again or full)


def connect(address: str | None) -> bool:
    """Join the cluster at ``address``, or the one this process has joined; else start one.

    Returns:
        Whether this call did it, so that the caller is the one to :func:`stop` it.

    Raises:
        UsageError: if nothing answers at the address.
    """
    # every trial keeps two checkpoints, so the state of the search is written often, by design
    os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")
    # Ctrl-C reaches the command, which says how to go on; Ray's handler ends as if all was well
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    # Ray's tables would come between the lines of progress.py; verbose=0 alone leaves some
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    for name in ("tune_controller", "experiment_state"):
        noisy = logging.getLogger(f"ray.tune.execution.{name}")
        if _no_stacks not in noisy.filters:
            noisy.addFilter(_no_stacks)
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


def fill(room: int) -> None:
    """Let Ray start as many trials at once as have room.

    With a searcher of one's own it lets a single trial wait for a process at a time, so that on a
    hundred machines the first trials would be over before most machines had begun.
    """
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(1, room))


def stop(started: bool) -> None:
    """Leave the cluster, and end it if it is this process's own."""
    if started:
        ray.shutdown()


def describe_cluster(settings: Any) -> str:
    """Machines, what a trial takes, and what lies idle, in one line."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (sum(node.get(key, 0) for node in nodes) for key in ("CPU", "GPU"))
    machines = "1 machine" if len(nodes) == 1 else f"{len(nodes)} machines"
    idle = (
        ", none of them used: see --gpus_per_trial" if gpus and not settings.gpus_per_trial else ""
    )
    takes = f"{settings.cpus_per_trial:g} CPU"
    if settings.gpus_per_trial:
        takes += f" and {settings.gpus_per_trial:g} GPU"
    if settings.nproc > 1:
        takes = f"{settings.nproc} times {takes}"
    return f"{machines} with {cpus:g} CPUs and {gpus:g} GPUs{idle}; a trial takes {takes}"
