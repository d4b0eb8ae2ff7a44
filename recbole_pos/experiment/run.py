"""Calls on runs: ``run``, ``attach`` and ``update`` train one, ``load`` and ``evaluate`` use it."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import RunArguments, split_keywords
from recbole_pos.config.checks import as_list
from recbole_pos.config.metrics import has_cutoff
from recbole_pos.config.plugins import allow_plugins
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.identity import Vocabulary
from recbole_pos.data.loading import read_dataset_name
from recbole_pos.data.protocol import describe_candidates, masks_history
from recbole_pos.errors import CheckpointError, RunWarning, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import (
    Experiment,
    build_model,
    prepare,
    read_dataset,
    require_updatable,
)
from recbole_pos.experiment.callbacks import Callback
from recbole_pos.experiment.checkpoint import load_best
from recbole_pos.experiment.device import check_device
from recbole_pos.experiment.folder import (
    Result,
    RunFolder,
    is_unfinished,
    list_warnings,
    read_result,
)
from recbole_pos.experiment.launch import is_launched, list_gpus, run_as_rank, run_in_parallel
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter
from recbole_pos.values import Options, check_choice


def run(
    model: str | type | None = None,
    dataset: str | os.PathLike[str] | None = None,
    config_file_list: list[str] | None = None,
    config_dict: dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    settings: RunArguments | None = None,
    **keywords: Any,
) -> Result | None:
    """Train a model to early stopping, test its best epoch, and write the run folder.

    Examples:
        >>> result = recbole_pos.run("FPARec", "ml-100k", config_dict={"epochs": 1}, run_dir="mine")
        >>> 0 < result.test["ndcg@10"] < 1
        True

    Args:
        model: a model of the plugin or of RecBole (``recbole-pos models`` lists them), or a custom
            class, see :func:`recbole_pos.register_model`.
        dataset: name of a folder with atomic files under ``data_path``, or ml-100k; or a
            :class:`recbole_pos.Dataset`.
        config_file_list: yaml files with options; later files win over earlier ones.
        config_dict: options, which win over files.
        run_dir: folder of the run; saved/<dataset>/<model>/<time>/ if None.
        callbacks: callbacks of the training, see :class:`recbole_pos.Callback`.
        settings: how the run is carried out, as one
            :class:`~recbole_pos.config.arguments.RunArguments`.
        keywords: fields of ``settings`` by name, which win over it; every other one is an option,
            as in ``config_dict``, over which it wins. The fields are

            - ``resume``: folder of an interrupted run, with which only ``epochs``, ``data_path``
              and ``plugins`` may be given as options;
            - ``verbose``: whether progress and results are printed;
            - ``nproc``: processes that train together, each with a part of every batch; those that
              torchrun has started are one run.

    Returns:
        The result; None in the processes that torchrun has started, but the first.

    Raises:
        UsageError: if an argument, an option or a file is wrong.
        TrainingError: if the loss is no longer a number.
        StorageError: if a file cannot be written.
        CheckpointError: if the run to resume has no usable checkpoint.
        Interrupted: a KeyboardInterrupt that names the folder to resume.
    """
    # Divide the keywords into arguments of the run and options. A Dataset made of a frame owns the
    # temporary folder of its files, which lasts as long as the variable ``dataset``.
    args, options = split_keywords(settings or RunArguments(), keywords)
    config_dict = {**(config_dict or {}), **options}
    # ``read_dataset_name`` gives the path of a Dataset. ``allow_plugins`` lets modules that the
    # call names be imported from the working directory.
    name = read_dataset_name(dataset)
    allow_plugins(config_dict.get("plugins"))
    # With this, torch counts GPUs without initialising CUDA: each process still chooses its own.
    if is_launched():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

    # The configuration: of a new run, or of the interrupted one to resume.
    run_dir = run_dir or args.run_dir
    folder = None if args.resume is None else RunFolder(args.resume)
    if folder is None:
        config = PosConfig(model, name, config_file_list, config_dict)
        check_device(config)
    else:
        fixed = config_dict.keys() - {"epochs", "data_path", "plugins"}
        if model or dataset or config_file_list or run_dir or fixed:
            raise UsageError(
                "--resume: all but --epochs, --data_path and --plugins is read from the run folder"
            )
        config = load_config(folder.require(), config_dict)
        _require_dataset(config)

    # Train: as one of the processes that torchrun has started, in new processes, or in this one.
    if callbacks and (is_launched() or args.nproc > 1):
        raise UsageError("callbacks: processes that train together take none; leave them out")
    if is_launched():
        gpus = list_gpus(config, int(os.environ["LOCAL_WORLD_SIZE"]))
        return run_as_rank(args, config.plain, run_dir, gpus)
    if args.nproc > 1:
        return run_in_parallel(args, config, run_dir)
    reporter = Reporter(args.verbose)
    return train(config, folder, run_dir, reporter, callbacks=callbacks)


class NeedsDataset(UsageError):
    """The error of a call that needs the dataset, whose files were not found."""

    def __init__(self, missing: str, config: Options) -> None:
        """Make the message, which says where the dataset was looked for.

        Args:
            missing: what is needed from the dataset, such as "interactions": the message begins
                with it.
            config: configuration of the run.
        """
        name = config["dataset"]
        data_path = Path(config["data_path"]).parent  # RecBole has appended the dataset's name
        super().__init__(
            f"{missing} must be read from the dataset {name!r}, which was not found in {data_path};"
            f" give --data_path (in Python data_path=), the folder that holds {name}/"
        )


class Catalogue:
    """Names of users and items by id, and how often items occur in training.

    It is read from a run folder and replaces the dataset where a model answers given histories. Any
    other attribute of a dataset raises :class:`NeedsDataset`.
    """

    has_log = False  # no interactions that a model could check

    def __init__(self, config: Options, vocabulary: Vocabulary) -> None:
        """Set those attributes of a dataset that follow from names and counts.

        Args:
            config: configuration of the run.
            vocabulary: names of users and items by id, and their numbers of interactions.
        """
        # Most names of attributes are those of RecBole's datasets.
        self.config = config
        self.dataset_name = config["dataset"]
        self.uid_field, self.iid_field = config["USER_ID_FIELD"], config["ITEM_ID_FIELD"]
        self.field2id_token = vocabulary.tokens  # field -> names of its users or items, by id
        self.user_num, self.item_num = self.num(self.uid_field), self.num(self.iid_field)
        self.events = int(vocabulary.user_counts.sum())  # number of interactions
        self.counts_time = vocabulary.has_dates  # whether times are dates, not running numbers
        self.popularity = vocabulary.popularity  # [items] int64, of training interactions

    def num(self, field: str) -> int:
        """Return the number of ids of a field, padding included."""
        if field not in self.field2id_token:
            raise NeedsDataset(f"{self.config['model']}: the field {field!r}", self.config)
        return len(self.field2id_token[field])

    def __getattr__(self, name: str) -> Any:
        # Python calls this for an attribute that is not set, which only a dataset has.
        if name.startswith("__"):  # Python looks up special methods in any object
            raise AttributeError(name)
        missing = f"{self.config['model']}: {name.lstrip('_')}, of interactions or attributes,"
        raise NeedsDataset(missing, self.config)


def load(
    path: str | Path,
    view: Callable[[Any], Any] | None = None,
    grown: bool = False,
    data_path: str | Path | None = None,
    options: dict[str, Any] | None = None,
    dataset: Any = None,
) -> Experiment:
    """Load a trained model and its data: with its best weights, in evaluation mode.

    Args:
        path: the run folder, or the .pth file that RecBole's own functions wrote for a model of the
            plugin. A RunWarning says that the run was stopped before its end.
        view: takes the built dataset and returns the one of the experiment; the same if None.
        grown: whether the data may have grown since the run. If so, interactions that have come
            since are kept apart in ``held_out`` of the dataset, and attributes of users and items
            may have other values.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.
        options: options of evaluation, which win over the options of the run.
        dataset: dataset of the run; read from its files if None.

    Returns:
        The experiment, with which the model can be evaluated and asked for recommendations.

    Raises:
        NeedsDataset: if the dataset is missing.
        CheckpointError: if the data that the model was trained on have changed.
    """
    # The configuration of the run.
    options = dict(options or {})
    if data_path is not None:
        options["data_path"] = str(data_path)
    file, folder, config = _open_trained(path, options)
    if dataset is not None:
        dataset = dataset.for_config(config)  # the same data, with the options of evaluation
    else:
        _require_dataset(config)
    warn_of_unfinished(folder)

    # ``prepare`` below reads a dataset that is None. But it takes no view, and does not know which
    # ids users and items have in the run. These may differ from those in the files if the files
    # have grown, or the run was an update: ``read_dataset`` takes them from the run folder.
    if dataset is None and (view is not None or grown or config["update_from"]):
        dataset = read_dataset(config, folder, hold_out_later=grown)
        if view is not None:
            dataset = view(dataset)

    # The model, with weights that are checked to be of these data: ``prepare`` builds it with
    # random weights, and ``load_best`` puts the best in, and returns the fields that have changed.
    experiment = prepare(config, fresh=False, dataset=dataset)
    identity = experiment.dataset.identity
    experiment.changed = load_best(experiment.model, file, identity, allows_changed_fields=grown)
    experiment.model.eval()
    experiment.trainer.loaded_from = file  # evaluations load the best weights from there again
    return experiment


def load_without_data(path: str | Path) -> Experiment:
    """Load a trained model from its run folder alone, to answer histories that are given to it.

    In place of the dataset it has the names of users and items (a :class:`Catalogue`). The returned
    experiment has no loaders and no trainer.

    Args:
        path: the run folder.

    Returns:
        The experiment, with the model in evaluation mode.

    Raises:
        NeedsDataset: if the folder has no names, or the model reads more than names, such as fields
            of items; ``Catalogue`` raises it then.
    """
    file, folder, config = _open_trained(path, {})
    vocabulary = folder.read_vocabulary(config)
    if vocabulary is None:
        raise NeedsDataset(f"{folder.path} has no {folder.names.name}: names of items", config)
    # The model reads the catalogue in place of the dataset and of its training part.
    catalogue: Any = Catalogue(config, vocabulary)
    model = build_model(config, catalogue, catalogue)
    load_best(model, file)
    model.eval()
    warn_of_unfinished(folder)
    return Experiment(config, catalogue, loaders={}, model=model, trainer=None, data_seconds=0.0)


def finds_dataset(path: str | Path) -> bool:
    """Return whether the dataset of a run is still where the run found it.

    It may also lie in the folder of the run, if the model was saved with its data.

    Args:
        path: the run folder, or a .pth file that RecBole's own functions wrote.
    """
    _, _, config = _open_trained(path, {})
    return _has_dataset(config)


def _has_dataset(config: PosConfig) -> bool:
    """Return whether there are files of interactions for a configuration.

    The dataset ml-100k has them in one file, ``ml-100k.inter``, or in one for each part of the
    split, such as ``ml-100k.train.inter``; a file of parquet ends in ``.inter.parquet``.
    """
    # RecBole has appended the dataset's name to ``data_path``, which is the folder of the files.
    folder, name = Path(config["data_path"]), glob.escape(config["dataset"])
    return any(folder.glob(f"{name}.inter*")) or any(folder.glob(f"{name}.*.inter*"))


def _require_dataset(config: PosConfig) -> None:
    """Raise a NeedsDataset if there are no files of interactions for a configuration."""
    if not _has_dataset(config):
        raise NeedsDataset("interactions", config)


def warn_of_unfinished(folder: RunFolder) -> None:
    """Warn of a model whose training or test was stopped before its end.

    The warning points at the line that has called the caller of this function, usually the user's.

    Args:
        folder: folder of the run.
    """
    if is_unfinished(folder):
        message = f"{folder.path} is unfinished: {folder.how_to_finish}"
        warnings.warn(message, RunWarning, stacklevel=3)  # 1 is this line, 2 its caller's


def _open_trained(path: str | Path, options: dict[str, Any]) -> tuple[Path, RunFolder, PosConfig]:
    """Find the files of a trained model and load its configuration.

    Args:
        path: the run folder; or a .pth file that RecBole's own functions wrote.
        options: options that win over those of the run. Without ``data_path`` among them, data that
            were saved with the model are used where the original ones are missing.

    Returns:
        file: the checkpoint.
        folder: the folder of the run, or of the .pth file.
        config: the configuration.
    """
    if os.path.isfile(path):  # written by RecBole's own functions
        file = Path(path)
        trained = checkpoint.load(file)["config"]
        config = PosConfig(config_dict={**trained, **options}, strict=False)
        return file, RunFolder(file.parent), config
    folder = RunFolder(path).require()
    config = load_config(folder, options)
    # A model that was saved with its data has them in the folder of the run.
    if folder.data.is_dir() and "data_path" not in options and not _has_dataset(config):
        config = load_config(folder, {**options, "data_path": str(folder.data)})
    return folder.checkpoint, folder, config


def load_config(folder: RunFolder, config_dict: dict[str, Any] | None = None) -> PosConfig:
    """Load the configuration of an existing run, from config.yaml in its folder.

    The option ``item_vectors``, a file with content vectors of items, is replaced. The user's file
    is not needed any more: the run has a copy in its folder, or needs no vectors since they are
    part of its weights.

    Args:
        folder: folder of the run.
        config_dict: other options, which win over those of the run.

    Returns:
        The configuration.
    """
    plain = folder.read_config()  # option -> value
    options = dict(config_dict or {})
    if plain.get("item_vectors"):
        if plain.get("item_vectors_use") == "init":  # the weights of items began as these vectors
            options["item_vectors"] = None
        else:
            options["item_vectors"] = str(folder.vectors)  # the copy
    return PosConfig(config_file_list=[str(folder.config)], config_dict=options, strict=False)


# --- metrics of a trained model ---


def evaluate(
    run_dir: str | Path,
    metrics: str | Sequence[str] | None = None,
    topk: int | Sequence[int] | None = None,
    part: str = "test",
    mask_history: bool | None = None,
    data_path: str | Path | None = None,
    dataset: Any = None,
) -> dict[str, float]:
    """Compute metrics of a trained run with its best weights, those of its test or others.

    Examples:
        >>> metrics = recbole_pos.evaluate("mine", metrics=["Hit", "MRR"], topk=[1, 5])
        >>> list(metrics)
        ['hit@1', 'hit@5', 'mrr@1', 'mrr@5']

    Args:
        run_dir: the folder of a run.
        metrics: names such as NDCG; those of the run if None.
        topk: cutoffs; those of the run if None.
        part: test or valid.
        mask_history: whether items of a user's past are left out; as in the run if None.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.
        dataset: dataset of the run; read from its files if None.

    Returns:
        Values by name, such as ``ndcg@10``.

    Raises:
        UsageError: if a metric is unknown, a cutoff is wrong, the part has no targets, or the
            dataset is missing.
        CheckpointError: if the data that the model was trained on have changed; later interactions
            are left out.
    """
    # ``require`` refuses a folder without a trained run.
    check_choice("part", part, ("test", "valid"))
    folder = RunFolder(run_dir).require()

    # The options of the run, with the metrics that are asked for.
    trained = load_config(folder)
    names = trained["metrics"] if metrics is None else as_list(metrics)
    cutoffs = trained["topk"] if topk is None else as_list(topk)
    options: dict[str, Any] = {"metrics": names, "topk": cutoffs}
    if names and cutoffs:  # the configuration refuses an empty list
        # RecBole requires that ``valid_metric`` is one of the metrics, such as ndcg@10.
        first = str(names[0])
        options["valid_metric"] = f"{first}@{cutoffs[0]}" if has_cutoff(first) else first
    if mask_history is not None:
        options["mask_history"] = mask_history

    # Evaluate the best weights.
    source: dict[str, Any] = {"data_path": data_path, "dataset": dataset}
    try:
        experiment = load(folder.path, options=options, **source)
    except CheckpointError as error:
        # The data have changed. If they have only grown, ``grown`` leaves the later interactions
        # out. ``changed`` then lists the attributes of users and items with other values than in
        # the run; if there are any, metrics would be others, and the error stands.
        experiment = load(folder.path, options=options, **source, grown=True)
        if experiment.changed:
            raise error from None
    values = experiment.trainer.evaluate(experiment.loaders[part])
    if values is None:  # the split has no such part
        raise UsageError(f"part: this split of {folder.path} has no {part} targets")
    return values


def describe_evaluation(
    run_dir: str | Path, part: str, mask_history: bool | None = None
) -> dict[str, Any]:
    """Describe an evaluation of a run for a report: what is predicted, and which items are ranked.

    Args:
        run_dir: the folder of a run.
        part: the part whose targets are predicted: test or valid.
        mask_history: whether items of a user's past are left out; as in the run if None.

    Returns:
        ``part`` and ``candidates`` (which items are ranked, in words). Of a finished run also
        ``split``; ``targets``, their number; ``repeated_targets``, how many of these their user has
        had before; and ``warnings``.
    """
    folder = RunFolder(run_dir)
    config = load_config(folder)
    excludes_seen = masks_history(config) if mask_history is None else mask_history
    candidates = describe_candidates(excludes_seen)
    description: dict[str, Any] = {"part": part, "candidates": candidates}
    # Counts and warnings are in the result, which an unfinished run does not have.
    if not folder.result.is_file():
        return description
    result = read_result(folder)
    split = result.split

    # The run has counted the repeated targets of all users. If it validates only a sample of the
    # users (``valid_users``), that count is not of the targets of validation, and is left out.
    is_sample = part == "valid" and "valid_users" in split
    if not is_sample:
        description["repeated_targets"] = split["repeated_targets"].get(part)
    num_targets = {"valid": result.valid_targets, "test": result.test_targets}
    description["split"] = split["split"]
    description["targets"] = num_targets[part]
    description["warnings"] = list_warnings(split, candidates, result.request_time)
    return description


# --- training a trained model further ---


def attach(
    trained: str | Path,
    schemes: str | Iterable[str],
    config_dict: dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    **keywords: Any,
) -> Result | None:
    """Add position schemes to a trained model and fine-tune only their parameters.

    Examples:
        >>> short = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
        >>> first = recbole_pos.run("PosSASRec", "ml-100k", config_dict=short, run_dir="first")
        >>> tuned = recbole_pos.attach("first", "kernel", {"epochs": 1}, run_dir="tuned")
        >>> tuned.parameters < first.parameters  # only the kernel's are trained
        True

    A kernel starts as the identity and a bias at zero, so training starts from the trained model
    itself; schemes that have no such start (``learned``, ``rope``) change it at once.

    Args:
        trained: run folder of a plugin model.
        schemes: names to add, such as ``kernel``.
        config_dict: options that differ from the trained run's (``learning_rate``, ...).
        run_dir: folder of the new run.
        keywords: other arguments of :func:`recbole_pos.run`, such as ``verbose``, and options.

    Returns:
        The result of the new run, as of :func:`recbole_pos.run`.

    Raises:
        UsageError: if the folder holds no run, or the schemes cannot be added to its model.
    """
    source = RunFolder(trained).require()
    warn_of_unfinished(source)
    config = source.read_config()
    if "position" not in config:
        raise UsageError(f"{source.path}: {config['model']} takes no position schemes")

    # ``decided`` are options that only this function may set.
    added = as_list(schemes)
    present = [name for name in as_list(config["position"]) if name != "nope"]  # nope: no scheme
    decided = {
        "position": [*present, *added],
        "train_only": added,
        "init_from": str(source.path.resolve()),
        # The trained run has a value of it if it was made by ``update``. In the new run this would
        # ask for another update.
        "update_from": None,
    }
    return _run_from(source, config_dict or {}, decided, run_dir, keywords)


def update(
    trained: str | Path,
    config_dict: dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    **keywords: Any,
) -> Result | None:
    """Train a model for further epochs on its data as they are now, as a new run.

    An interrupted update is resumed like any run: ``recbole_pos.run(resume=...)``.

    Examples:
        >>> first = recbole_pos.run("FPARec", "ml-100k", config_dict={"epochs": 1}, run_dir="old")
        >>> later = recbole_pos.update("old", {"epochs": 2}, run_dir="new")
        >>> later.epochs
        2

    Args:
        trained: run folder of a plugin model.
        config_dict: options of training that differ from those of the run (default ``epochs: 5``);
            the best epoch by validation is kept.
        run_dir: folder of the new run.
        keywords: other arguments of :func:`recbole_pos.run`, such as ``verbose``, and options.

    Returns:
        The result of the new run, as of :func:`recbole_pos.run`.

    Raises:
        UsageError: if the folder holds no run that can be updated, or ``run_dir`` another run.
    """
    source = require_updatable(trained)
    options = {"epochs": 5, **(config_dict or {})}
    # ``decided`` are options that only this function may set. ``init_from`` and ``train_only`` have
    # values if the trained run was made by ``attach``. The new run does without them: its weights
    # come from ``update_from`` only, and it trains all of them.
    decided = {"init_from": None, "train_only": None, "update_from": str(source.path.resolve())}
    return _run_from(source, options, decided, run_dir, keywords)


def _run_from(
    source: RunFolder,
    options: dict[str, Any],
    decided: dict[str, Any],
    run_dir: str | Path | None,
    keywords: dict[str, Any],
) -> Result | None:
    """Train a new run with the options of another one, except those that are given here.

    It is the common end of ``attach`` and ``update``, which train a model further.

    Args:
        source: folder of the other run.
        options: options that the user gives as a mapping, ``config_dict``.
        decided: options that ``attach`` or ``update`` itself sets, such as the weights to start
            from.
        run_dir: folder of the new run; None for one that is named by the time.
        keywords: what the user gives by name: arguments of :func:`run`, and more options.

    Returns:
        The result of the new run.

    Raises:
        UsageError: if the user gives an option that is decided.
    """
    for name in decided:
        if options.get(name) is not None or name in keywords:
            raise UsageError(f"{name}: attach and update decide it; leave it out")
    files = [str(source.config)]
    return run(None, None, files, {**options, **decided}, run_dir, **keywords)
