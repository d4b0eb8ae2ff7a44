"""The training of one experiment in this process: train, test, write the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.identity import Vocabulary, count_dataset
from recbole_pos.data.item_vectors import keep_vectors
from recbole_pos.data.protocol import describe_split
from recbole_pos.distributed import current_shard
from recbole_pos.errors import Interrupted, StorageError
from recbole_pos.experiment.build import Experiment, prepare, read_dataset
from recbole_pos.experiment.callbacks import Callback, call, make_loggers
from recbole_pos.experiment.device import describe_device
from recbole_pos.experiment.evaluation import collect_test_ranks
from recbole_pos.experiment.folder import Result, RunFolder, count_parameters, make_result
from recbole_pos.files import write_json
from recbole_pos.reporter import Reporter
from recbole_pos.tables.storage import keep_freed_memory


def train(
    config: PosConfig,
    folder: RunFolder | None,
    run_dir: str | Path | None,
    reporter: Reporter,
    dataset: Any = None,
    report: Callable[[Experiment], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result | None:
    """Train and test one experiment in this process, and write its folder.

    Args:
        config: configuration of the run.
        folder: folder of an interrupted run to resume; None for a new run.
        run_dir: folder of a new run; None for one that is named by the time.
        reporter: prints, and logs as json, how far the run is.
        dataset: a dataset of this configuration; read from files if None.
        report: called with the experiment after every validated epoch, once its checkpoint is
            written, and once if no epoch is left to train.
        callbacks: callbacks of the training.

    Returns:
        The result in the first process of a run; None in the others.

    Raises:
        Interrupted: at Ctrl-C; says how to resume.
        StorageError: if a file cannot be written; says what was kept.
    """
    # A shard is the share of one process, whose rank is its number; a single process has rank 0.
    is_first = current_shard().rank == 0
    keep_freed_memory()  # which each step would get from the system again
    with ExitStack() as locks:
        # A run to resume is locked before its checkpoint is read.
        if folder is not None and is_first:
            locks.enter_context(folder.locked())

        # Make data, model and trainer.
        with reporter.task(f"reading {config['dataset']}", shown=config["show_progress"]):
            if folder is not None and dataset is None:
                dataset = read_dataset(config, folder)
            experiment = prepare(config, fresh=folder is None, dataset=dataset)
        trainer, loaders = experiment.trainer, experiment.loaders
        trainer.reporter = reporter
        checkpoint = None if folder is None else str(folder.checkpoint)

        # All processes train and test together, but only the first one writes files.
        if not is_first:
            if checkpoint:
                trainer.resume_checkpoint(checkpoint, loaders["train"])
            trainer.fit(loaders["train"], loaders["valid"])
            trainer.evaluate(loaders["test"])
            return None

        # The folder of a new run is created only now, so that wrong options leave none behind.
        if folder is None:
            folder = RunFolder.create(run_dir, config["dataset"], config["model"])
            locks.enter_context(folder.locked())
            folder.require_unused()  # another run may have begun here before the lock
        trainer.run, trainer.saved_model_file = folder, str(folder.checkpoint)
        trainer.callbacks = [*make_loggers(config), *callbacks]

        # Train and test. Callbacks learn of the end also if it is an error.
        with _explained_stops(folder):
            if checkpoint:
                trainer.resume_checkpoint(checkpoint, loaders["train"])
            call(trainer.callbacks, "on_start", experiment)
            result = None
            try:
                result = _train_and_test(experiment, folder, reporter, report)
            finally:
                call(trainer.callbacks, "on_end", experiment, result)
        return result


@contextmanager
def _explained_stops(folder: RunFolder) -> Iterator[None]:
    """Say how to resume in the errors of Ctrl-C and of a full disk, in a ``with`` block.

    Args:
        folder: folder of the run. As long as it has no checkpoint there is nothing to resume.
    """
    # The checkpoint of the last epoch is whole in both cases: it is replaced only by a whole one.
    try:
        yield
    except KeyboardInterrupt:
        if not folder.checkpoint.is_file():
            raise
        raise Interrupted(f"interrupted; continue with `{folder.resume_command}`") from None
    except StorageError as error:
        advice = "no epoch was kept; make room and start again"
        if folder.checkpoint.is_file():
            whole = f"the last checkpoint in {folder.path} is whole"
            advice = f"{whole}: make room and continue with `{folder.resume_command}`"
        raise StorageError(f"{error}; {advice}") from error


def _train_and_test(
    experiment: Experiment,
    folder: RunFolder,
    reporter: Reporter,
    report: Callable[[Experiment], None] | None,
) -> Result:
    """Train and test an experiment, and write and report what comes out.

    The trainer's ``fit`` trains all epochs, validates and writes checkpoints; its ``evaluate`` then
    tests with the weights of the best epoch.

    Args:
        experiment: the model with its data and trainer.
        folder: folder of the run, in which all files are written.
        reporter: prints, and logs as json.
        report: called with the experiment after every validated epoch; None for no call.

    Returns:
        The result of the run.
    """
    config, trainer, loaders = experiment.config, experiment.trainer, experiment.loaders
    _write_start(experiment, folder)
    _report_start(experiment, folder, reporter)

    # A resumed run may have no epoch left; its caller is told of the last one all the same.
    show_progress = config["show_progress"]
    if report and trainer.is_finished:
        report(experiment)
    trainer.fit(
        loaders["train"],
        loaders["valid"],
        show_progress=show_progress,
        callback_fn=(lambda *_: report(experiment)) if report else None,
    )

    # Test the best epoch.
    started = time.perf_counter()
    test = trainer.evaluate(loaders["test"], show_progress=show_progress)
    if loaders["test"]:
        folder.write_ranks(collect_test_ranks(trainer.eval_collector))

    # Write and show the result. A temporary folder is not shown, since it is removed later.
    result = make_result(experiment, folder, test, time.perf_counter() - started)
    write_json(folder.result, asdict(result))
    title = f"{result.model} on {result.dataset}, best epoch {result.best_epoch}"
    reporter.show_results(title, {"valid": result.best_valid, "test": result.test})
    for text in result.warnings:
        reporter.warning(text)
    if folder.is_kept:
        reporter.line(f"{folder.path}/result.json")
    return result


def _write_start(experiment: Experiment, folder: RunFolder) -> None:
    """Write the files that a run has before its first epoch.

    These are its configuration, the names of users and items by id (the vocabulary) and, if the
    model reads them, content vectors of items. A resumed run writes them again.

    Args:
        experiment: the model with its data.
        folder: folder of the run.
    """
    # config.yaml has the path of the user's file of content vectors, as option ``item_vectors``.
    # When a run is resumed, the option has been replaced by the path of a copy in the run folder.
    # So the user's path is read from the existing config.yaml, before that is written again.
    dataset, plain = experiment.dataset, experiment.config.plain
    if folder.checkpoint.is_file():  # the run is resumed
        plain["item_vectors"] = folder.read_config().get("item_vectors")
        # the result of the epochs so far is out of date; a new one is written after the test
        folder.result.unlink(missing_ok=True)
    folder.write_config(plain)
    folder.write_vocabulary(Vocabulary.from_dataset(dataset), experiment.config)

    # The content vectors, of a model that reads them.
    source = getattr(experiment.model, "content_source", None)
    if source is not None:
        names = dataset.field2id_token[dataset.iid_field]
        keep_vectors(source, names, folder.path)


def _report_start(experiment: Experiment, folder: RunFolder, reporter: Reporter) -> None:
    """Report model, data and device, then how the model is validated and tested.

    Args:
        experiment: the model with its data.
        folder: folder of the run; its path is shown unless it is a temporary one.
        reporter: prints the lines.
    """
    # ``count_dataset`` gives users, items and events; ``describe_device`` name, threads, precision.
    config, dataset, loaders = experiment.config, experiment.dataset, experiment.loaders
    counts, device = count_dataset(dataset), describe_device(config)
    num_parameters = count_parameters(experiment.model)

    # The line of the model, such as "FPARec on ml-100k: 943 users, 1,682 items, ...".
    threads = f"{device['threads']} thread{'s' if device['threads'] > 1 else ''}"
    sizes = (
        f"{counts['users']:,} users, {counts['items']:,} items, {counts['events']:,} interactions"
    )
    parts = [f"{config['model']} on {config['dataset']}: {sizes}", f"{num_parameters:,} parameters"]
    parts.append(f"{device['name']} with {threads} in {device['precision']}")
    parts.extend(config.reasons)  # which defaults the size of the data has changed
    if folder.is_kept:
        parts.append(str(folder.path))
    reporter.line(", ".join(parts))

    # What is held out, and what it means for the training if there is no validation or no test.
    reporter.line(describe_split(dataset.split.summary))
    if not loaders["valid"] or not config["eval_step"]:
        reporter.line("no validation: every epoch is trained, and the last one is kept")
    if not loaders["test"]:
        reporter.line("no test targets in this split: nothing will be tested")
