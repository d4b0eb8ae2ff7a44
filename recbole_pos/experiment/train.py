"""One experiment in this process: train, test, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.item_vectors import keep_vectors
from recbole_pos.data.known import Known
from recbole_pos.data.targets import describe
from recbole_pos.distributed import current_shard
from recbole_pos.errors import Interrupted, StorageError
from recbole_pos.experiment.build import Experiment, load_vocabulary, prepare, read_dataset
from recbole_pos.experiment.callbacks import Callback, call
from recbole_pos.experiment.diagnosis import advice
from recbole_pos.experiment.evaluation import ranks_of_test
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.loggers import make_loggers
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.result import Result, headline, make_result, start_facts
from recbole_pos.reporter import Reporter


def train(
    config: PosConfig,
    folder: RunFolder | None,
    run_dir: str | Path | None,
    reporter: Reporter,
    dataset: Any = None,
    report: Callable[[Experiment], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result | None:
    """Return one experiment in this process.

    Args:
        config: configuration of the run.
        folder: folder of an interrupted run, which goes on; None for a new one.
        run_dir: where a new one writes.
        reporter: where it is reported.
        dataset: prepared before, for this configuration; read from files when None.
        report: is given the experiment after every validated epoch, whose checkpoint is kept, and
            once if no epoch is left.
        callbacks: follow the training.
    """
    first = current_shard().rank == 0
    keep_freed_memory()
    with ExitStack() as locks:
        if folder is not None and first:  # before the checkpoint is read
            locks.enter_context(folder.held())
        with reporter.task(f"reading {config['dataset']}", shown=config["show_progress"]):
            if folder is not None and dataset is None:
                dataset = load_dataset(folder, config)
            fresh = folder is None or folder.only_begun
            experiment = prepare(config, fresh=fresh, dataset=dataset)
        trainer, loaders = experiment.trainer, experiment.loaders
        trainer.reporter = reporter
        trainer.callbacks = [*make_loggers(config), *callbacks] if first else []
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
                reporter.line(f"{folder.path} has no finished epoch: from the beginning")
            return _to_result(experiment, folder, reporter, report)
        except KeyboardInterrupt:
            if not folder.checkpoint.is_file():
                raise  # nothing to continue
            raise Interrupted(str(folder.path)) from None
        except StorageError as error:
            raise StorageError(f"{error}; {_what_is_left(folder)}") from error


def _to_result(
    experiment: Experiment,
    folder: RunFolder,
    reporter: Reporter,
    report: Callable[[Experiment], None] | None,
) -> Result:
    """Train, test, write; and call who follows."""
    followers, result = experiment.trainer.callbacks, None
    call(followers, lambda one: one.on_start(experiment))
    try:
        result = _train_and_test(experiment, folder, reporter, report)
    finally:
        call(followers, lambda one: one.on_end(experiment, result))
    return result


def _train_and_test(
    experiment: Experiment,
    folder: RunFolder,
    reporter: Reporter,
    report: Callable[[Experiment], None] | None,
) -> Result:
    config, trainer, loaders = experiment.config, experiment.trainer, experiment.loaders
    folder.write_config(config.plain)  # on resume too: epochs may have changed
    dataset = experiment.dataset
    known = Known.from_dataset(dataset)
    trainer.known = known.digest
    folder.write_vocabulary(known, dataset.uid_field, dataset.iid_field)
    if (source := getattr(experiment.model, "content_source", None)) is not None:
        names = dataset.field2id_token[dataset.iid_field]
        keep_vectors(source, names, dataset.iid_field, folder.path)
    reporter.line(headline(experiment, folder))
    reporter.event("start", start_facts(experiment, folder))
    if split := describe(experiment.dataset.split.summary):
        reporter.line(split)
    if advised := advice(config, experiment.dataset):
        reporter.line(advised)
    if not loaders["valid"] or not config["eval_step"]:
        end = "the last one is tested" if loaders["test"] else "the last one is kept"
        reporter.line(f"no validation: every epoch is trained and {end}")
    if not loaders["test"]:
        reporter.line("no test targets in this split: nothing will be tested")
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
    reporter.results(title, {"valid": result.best_valid, "test": result.test})
    for text in result.warnings:
        reporter.warning(text)
    if folder.is_kept:
        reporter.line(f"{folder.path}/result.json")
    reporter.event("result", asdict(result))
    return result


def _what_is_left(folder: RunFolder) -> str:
    """Of a run that could not go on writing."""
    if not folder.checkpoint.is_file():
        return "no epoch was kept; make room and start again"
    return (
        f"the last checkpoint in {folder.path} is whole: make room and continue with "
        f"`recbole-pos run --resume {folder.path}`"
    )


def load_dataset(folder: RunFolder, config: PosConfig, alone: bool = False) -> Any:
    """Return the data of a run that exists, names with the ids that they have there."""
    return read_dataset(config, load_vocabulary(folder, config), alone)
