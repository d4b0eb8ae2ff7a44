"""One experiment in several processes, started here or by others; the first writes and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recbole_pos.config.plugins import pack, unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import Interrupted, UsageError
from recbole_pos.experiment import processes
from recbole_pos.experiment.environment import meeting_here
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.meeting import Meeting, Member, from_first, joined
from recbole_pos.experiment.result import Result, read_result
from recbole_pos.experiment.train import train
from recbole_pos.screen import Screen


def run_in_parallel(
    plan: processes.Plan,
    config: PosConfig,
    run_dir: str | Path | None,
    resume: str | Path | None,
    told: dict[str, Any],
    patience: tuple[int, float],
) -> Result | None:
    """Start the processes of this machine; the first of all of them writes and prints."""
    gpus = processes.gpus_of(config.plain["gpu_id"], plan.nproc) if config["use_gpu"] else []
    packed = pack(config["model"])
    if resume is None and plan.offset == 0:
        run_dir = RunFolder.create(run_dir, config["dataset"], config["model"]).path
    given = run_dir if resume is None else resume
    path = Path(given) if given is not None and (plan.offset == 0 or resume) else None
    try:
        processes.launch(
            plan, _member, (packed, config.plain, path, resume is not None, told), gpus, *patience
        )
    except KeyboardInterrupt:
        if path and RunFolder(path).checkpoint.is_file():
            raise Interrupted(str(path)) from None
        raise  # nothing to continue, or not on this machine
    except UsageError:
        if resume is None:
            _remove_if_empty(path)
        raise
    if plan.offset or path is None:
        return None
    return read_result(RunFolder(path))


def _member(meeting: Meeting, member: Member, packed: bytes, *given: Any, gpu: str) -> None:
    """What each process of a group that was launched here runs."""
    unpack(packed)
    _train_in_group(meeting, member, gpu, *given)


def run_as_member(
    member: Member,
    config: PosConfig,
    run_dir: str | Path | None,
    resume: str | Path | None,
    told: dict[str, Any],
    timeout: float,
) -> Result | None:
    """Be one of the processes that another program has started."""
    gpu = processes.gpu_here(config.plain["gpu_id"], member) if config["use_gpu"] else ""
    processes.use(gpu, member.local_size)
    where = run_dir if resume is None else resume
    path = None if where is None else Path(where)
    meeting = meeting_here(member, timeout)
    with joined(meeting, member, bool(gpu)):
        given = config.plain, path, resume is not None, told
        return _train_in_group(meeting, member, gpu, *given)


def _train_in_group(
    meeting: Meeting,
    member: Member,
    gpu: str,
    plain: dict[str, Any],
    path: Path | None,
    resumed: bool,
    told: dict[str, Any],
) -> Result | None:
    """Train with the others, from the last checkpoint where all were started again."""
    config = PosConfig(None, None, None, {**plain, "gpu_id": gpu}, strict=False)
    config.plain["gpu_id"] = plain["gpu_id"]  # of the run, for its folder

    def begin() -> tuple[Path, bool]:
        begun = meeting.folder  # by an earlier attempt
        if begun is None:
            begun = str(RunFolder.create(path, config["dataset"], config["model"]).path)
            meeting.folder = begun
        return Path(begun), RunFolder(begun).checkpoint.is_file()

    if not resumed:
        path, resumed = from_first(member, begin)
    folder = RunFolder(path) if resumed and path else None
    try:
        return train(config, folder, path, Screen(**told) if member.rank == 0 else Screen(False))
    except UsageError:
        if member.rank == 0 and not resumed:
            _remove_if_empty(path)
        raise


def _remove_if_empty(path: Path | None) -> None:
    """Wrong options leave no folder behind."""
    if path and path.is_dir() and not any(path.iterdir()):
        path.rmdir()
