"""One experiment in process: ``run`` trains and tests, ``load`` brings a finished run back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import RunArguments, arguments
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.config.posconfig import PosConfig, fitted
from recbole_pos.data.known import Known
from recbole_pos.data.targets import describe
from recbole_pos.distributed import this_share
from recbole_pos.errors import Interrupted, StorageError, UsageError
from recbole_pos.experiment import checkpoint, processes
from recbole_pos.experiment.build import Experiment, prepare, read_dataset
from recbole_pos.experiment.device import require_device
from recbole_pos.experiment.environment import meeting_here, member_here
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.meeting import Meeting, Member, from_first, joined
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.ranks import ranks_of_test
from recbole_pos.experiment.result import Result, headline, make_result, start_facts
from recbole_pos.experiment.state import config_in, load_best
from recbole_pos.screen import Screen
from recbole_pos.yaml_files import read_yaml


def run(
    model: str | type | None = None,
    dataset: str | None = None,
    config_file_list: list[str] | None = None,
    config_dict: dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    *,
    settings: RunArguments | None = None,
    **given: Any,
) -> Result | None:
    """Train a model to early stopping, test its best epoch, and write the run folder.

    >>> result = recbole_pos.run("FPARec", "ml-100k", config_dict={"epochs": 1}, run_dir="mine")
    >>> 0 < result.test["ndcg@10"] < 1
    True

    Args:
        model: a plugin model or one of RecBole's (``recbole-pos models`` lists them), or a class of
            one's own, see :func:`recbole_pos.register_model`.
        dataset: name of a folder with atomic files under ``data_path``, or ml-100k.
        config_file_list: yaml files, later ones winning.
        config_dict: values that win over files.
        run_dir: where to write; saved/<dataset>/<model>/<time>/ when None.
        settings: the other arguments together.
        given: or by name, see :class:`~recbole_pos.config.arguments.RunArguments`: ``resume``, the
            folder of an interrupted run, with which only ``epochs`` in ``config_dict`` may be
            given; ``verbose``, ``as_json``, ``log``: what is told; ``nproc``, ``world_size``,
            ``ip``, ``port``, ``group_offset``: processes that train together, each with a part of
            every batch, as RecBole has them; ``max_restarts``, ``join_timeout``: when one of them
            is lost, or missing. Processes that torchrun, mpirun or srun have started are one run.

    Returns:
        What was found; None on a machine that does not run process 0, and in the other processes
        that torchrun, mpirun or srun have started.

    Raises:
        UsageError: if something given is wrong.
        TrainingError: if the loss is no longer a number.
        StorageError: if something cannot be written.
        CheckpointError: if the run to resume has no usable checkpoint.
        Interrupted: a KeyboardInterrupt that names the folder to resume.
    """
    told = arguments(settings or RunArguments(), given)
    member = member_here(os.environ, told)
    if member is not None:  # torch then asks for GPUs without beginning to use one
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    run_dir, resume = run_dir or told.run_dir, told.resume
    if resume is not None:
        if model or dataset or config_file_list or run_dir or set(config_dict or {}) - {"epochs"}:
            raise UsageError(
                "--resume takes everything from its run folder; only --epochs may change"
            )
        folder = RunFolder(resume).require()
        config = _config_of(folder, config_dict)
    else:
        config = PosConfig(model, dataset, config_file_list, config_dict)
        require_device(config)
        folder = None
    screen: dict[str, Any] = {"enabled": told.verbose, "as_json": told.as_json, "log": told.log}
    if member is not None:
        return _run_as_member(member, config, run_dir, resume, screen, told.join_timeout)
    plan = processes.Plan.of(told.nproc, told.world_size, told.ip, told.port, told.group_offset)
    if plan.world_size > 1:
        patience = told.max_restarts, told.join_timeout
        return _run_in_parallel(plan, config, run_dir, resume, screen, patience)
    return train(config, folder, run_dir, Screen(**screen))


def _run_in_parallel(
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
            plan, _member, (config.plain, path, resume is not None, told, packed), gpus, *patience
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
    return Result(**json.loads(RunFolder(path).result.read_text(encoding="utf-8")))


def _member(
    meeting: Meeting,
    member: Member,
    plain: dict[str, Any],
    path: Path | None,
    resumed: bool,
    told: dict[str, Any],
    packed: bytes,
    gpu: str,
) -> None:
    """What each process of a group that was launched here runs."""
    unpack(packed)
    _train_in_group(meeting, member, plain, path, resumed, told, gpu)


def _run_as_member(
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
    given = run_dir if resume is None else resume
    path = None if given is None else Path(given)
    meeting = meeting_here(member, timeout)
    with joined(meeting, member, bool(gpu)):
        plain = config.plain
        return _train_in_group(meeting, member, plain, path, resume is not None, told, gpu)


def _train_in_group(
    meeting: Meeting,
    member: Member,
    plain: dict[str, Any],
    path: Path | None,
    resumed: bool,
    told: dict[str, Any],
    gpu: str,
) -> Result | None:
    """Train with the others, from the last checkpoint where all were started again."""
    config = PosConfig(None, None, None, {**plain, "gpu_id": gpu})
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


def train(
    config: PosConfig,
    folder: RunFolder | None,
    run_dir: str | Path | None,
    screen: Screen,
    dataset: Any = None,
) -> Result | None:
    """One experiment in this process.

    Args:
        config: of the run.
        folder: of an interrupted run, which goes on; None for a new one.
        run_dir: where a new one writes.
        screen: where it is told about.
        dataset: prepared before, for this configuration; read from files when None.
    """
    first = this_share().rank == 0
    keep_freed_memory()
    with ExitStack() as locks:
        if folder is not None and first:  # before the checkpoint is read
            locks.enter_context(folder.held())
        with screen.task(f"reading {config['dataset']}", shown=config["show_progress"]):
            if folder is not None and dataset is None:
                dataset = _dataset_of(folder, config)
            experiment = prepare(config, fresh=folder is None, dataset=dataset)
        trainer, loaders = experiment.trainer, experiment.loaders
        trainer.screen = screen
        resumed = None if folder is None else str(folder.checkpoint)
        if not first:
            if resumed:
                trainer.resume_checkpoint(resumed, loaders["train"])
            trainer.fit(loaders["train"], loaders["valid"])
            trainer.evaluate(loaders["test"])
            return None
        if folder is None:  # wrong options have left no folder behind
            folder = RunFolder.create(run_dir, config["dataset"], config["model"])
            locks.enter_context(folder.held())
            folder.require_unused()  # another process may have been faster
        trainer.use_folder(folder)
        try:
            if resumed:
                trainer.resume_checkpoint(resumed, loaders["train"])
            return _to_result(experiment, folder, screen)
        except KeyboardInterrupt:
            if not folder.checkpoint.is_file():
                raise  # nothing to continue
            raise Interrupted(str(folder.path)) from None
        except StorageError as error:
            raise StorageError(f"{error}; {_what_is_left(folder)}") from error


def _to_result(experiment: Experiment, folder: RunFolder, screen: Screen) -> Result:
    """Train, test, write."""
    config, trainer, loaders = experiment.config, experiment.trainer, experiment.loaders
    folder.write_config(config.plain)  # on resume too: epochs may have changed
    folder.write_known(Known.of(experiment.dataset), experiment.dataset.uid_field)
    screen.line(headline(experiment, folder))
    screen.event("start", start_facts(experiment, folder))
    if split := describe(experiment.dataset.split.summary):
        screen.line(split)
    if not loaders["valid"] or not config["eval_step"]:
        end = "the last one is tested" if loaders["test"] else "the last one is kept"
        screen.line(f"no validation: every epoch is trained and {end}")
    if not loaders["test"]:
        screen.line("no test targets in this split: nothing will be tested")
    shown = config["show_progress"]
    trainer.fit(loaders["train"], loaders["valid"], show_progress=shown)
    started = time.perf_counter()
    test = trainer.evaluate(loaders["test"], show_progress=shown)
    if loaders["test"]:
        part, unit = loaders["test"]._dataset, config["timestamp_unit"]
        if (ranks := ranks_of_test(trainer.eval_collector, part, unit)) is not None:
            folder.write_ranks(ranks)
    result = make_result(experiment, folder, test, time.perf_counter() - started)
    folder.write_result(asdict(result))
    title = f"{result.model} on {result.dataset}, best epoch {result.best_epoch}"
    screen.results(title, {"valid": result.best_valid, "test": result.test})
    screen.line(f"{folder.path}/result.json")
    screen.event("result", asdict(result))
    return result


def _what_is_left(folder: RunFolder) -> str:
    """Of a run that could not go on writing."""
    if not folder.checkpoint.is_file():
        return "no epoch was kept; make room and start again"
    return (
        f"the last checkpoint in {folder.path} is whole: make room and continue with "
        f"`recbole-pos run --resume {folder.path}`"
    )


def load(
    path: str | Path, view: Callable[[Any], Any] | None = None, grown: bool = False
) -> Experiment:
    """A trained model with its data; best weights, evaluation mode.

    >>> trained = recbole_pos.load("mine")
    >>> trained.dataset.user_num, len(trained.dataset.log)
    (944, 100000)

    Args:
        path: the run folder, or the .pth file of a plugin's model that RecBole's own functions
            have trained.
        view: from the dataset, after its ``build``, to the one of the experiment; itself if None.
        grown: whether the data may have more than the run knew. That is put aside, see
            ``PosSequentialDataset.with_later``; and attributes may have other values.

    Raises:
        CheckpointError: if what the model was trained on is not there any more.
    """
    if Path(path).is_file():
        file, folder = Path(path), RunFolder(Path(path).parent)
        config = config_in(checkpoint.load(file, ("config",)), file)
    else:
        folder = RunFolder(path).require()
        file, config = folder.checkpoint, _config_of(folder)
    dataset = None
    if view is not None or grown or config["update_from"]:
        dataset = _dataset_of(folder, config, alone=grown)
        dataset.build()
        dataset = dataset if view is None else view(dataset)
    experiment = prepare(config, fresh=False, dataset=dataset)
    identity = experiment.dataset.identity
    experiment.changed = load_best(experiment.model, file, identity, grown)
    experiment.model.eval()
    return experiment


def _dataset_of(folder: RunFolder, config: PosConfig, alone: bool = False) -> Any:
    """The data of a run that exists, names with the ids that they have there."""
    return read_dataset(config, folder.read_known(config["USER_ID_FIELD"]), alone)


def _config_of(folder: RunFolder, config_dict: dict[str, Any] | None = None) -> PosConfig:
    """The configuration of a run that exists, which may come from a machine with more cores."""
    kept = read_yaml(folder.config)
    if missing := {"model", "dataset"} - set(kept):
        raise UsageError(
            f"{folder.config} is damaged: it names no {' and no '.join(sorted(missing))}"
        )
    return PosConfig(None, None, [str(folder.config)], {**fitted(kept), **(config_dict or {})})
