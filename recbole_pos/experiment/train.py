"""One experiment in this process: train, test, write."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.known import Known
from recbole_pos.data.targets import describe
from recbole_pos.distributed import this_share
from recbole_pos.errors import Interrupted, StorageError
from recbole_pos.experiment.build import Experiment, known_of, prepare, read_dataset
from recbole_pos.experiment.diagnosis import advice
from recbole_pos.experiment.evaluation import ranks_of_test
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.result import Result, headline, make_result, start_facts
from recbole_pos.screen import Screen


def train(
    config: PosConfig,
    folder: RunFolder | None,
    run_dir: str | Path | None,
    screen: Screen,
    dataset: Any = None,
    report: Callable[[Experiment], None] | None = None,
) -> Result | None:
    """One experiment in this process.

    Args:
        config: of the run.
        folder: of an interrupted run, which goes on; None for a new one.
        run_dir: where a new one writes.
        screen: where it is reported.
        dataset: prepared before, for this configuration; read from files when None.
        report: is given the experiment after every validated epoch, whose checkpoint is kept, and
            once if no epoch is left.
    """
    first = this_share().rank == 0
    keep_freed_memory()
    with ExitStack() as locks:
        if folder is not None and first:  # before the checkpoint is read
            locks.enter_context(folder.held())
        with screen.task(f"reading {config['dataset']}", shown=config["show_progress"]):
            if folder is not None and dataset is None:
                dataset = dataset_of(folder, config)
            fresh = folder is None or folder.only_begun
            experiment = prepare(config, fresh=fresh, dataset=dataset)
        trainer, loaders = experiment.trainer, experiment.loaders
        trainer.screen = screen
        resumed = None if folder is None or fresh else str(folder.checkpoint)
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
            elif folder.only_begun:
                screen.line(f"{folder.path} has no finished epoch: from the beginning")
            return _to_result(experiment, folder, screen, report)
        except KeyboardInterrupt:
            if not folder.checkpoint.is_file():
                raise  # nothing to continue
            raise Interrupted(str(folder.path)) from None
        except StorageError as error:
            raise StorageError(f"{error}; {_what_is_left(folder)}") from error


def _to_result(
    experiment: Experiment,
    folder: RunFolder,
    screen: Screen,
    report: Callable[[Experiment], None] | None,
) -> Result:
    """Train, test, write."""
    config, trainer, loaders = experiment.config, experiment.trainer, experiment.loaders
    folder.write_config(config.plain)  # on resume too: epochs may have changed
    dataset = experiment.dataset
    known = Known.of(dataset)
    folder.write_known(known, dataset.uid_field, dataset.iid_field)
    trainer.known = known.digest
    screen.line(headline(experiment, folder))
    screen.event("start", start_facts(experiment, folder))
    if split := describe(experiment.dataset.split.summary):
        screen.line(split)
    if advised := advice(config, experiment.dataset):
        screen.line(advised)
    if not loaders["valid"] or not config["eval_step"]:
        end = "the last one is tested" if loaders["test"] else "the last one is kept"
        screen.line(f"no validation: every epoch is trained and {end}")
    if not loaders["test"]:
        screen.line("no test targets in this split: nothing will be tested")
    shown = config["show_progress"]
    if report and trainer.finished:
        report(experiment)
    after = (lambda *_: report(experiment)) if report else None
    trainer.fit(loaders["train"], loaders["valid"], show_progress=shown, callback_fn=after)
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
    for text in result.warnings:
        screen.line(f"warning: {text}")
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


def dataset_of(folder: RunFolder, config: PosConfig, alone: bool = False) -> Any:
    """The data of a run that exists, names with the ids that they have there."""
    return read_dataset(config, known_of(folder, config), alone)
