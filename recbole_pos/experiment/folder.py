"""The output folder of a run, the facts in its result, and facts about the process."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from recbole_pos import files
from recbole_pos.data.identity import Vocabulary
from recbole_pos.data.item_vectors import KEPT
from recbole_pos.data.protocol import (
    add_sample,
    describe_candidates,
    make_warnings,
    masks_history,
    warn_of_repeats,
)
from recbole_pos.errors import UsageError, make_resume_command
from recbole_pos.experiment.device import describe_device
from recbole_pos.values import Options
from recbole_pos.version import __version__
from recbole_pos.yaml_files import read_yaml

SEARCH = "search.json"  # a file that only the folder of a search has


class RunFolder:
    """The folder of one run, which need not exist: its files, and how they are written.

    Attributes:
        config: all options.
        metrics: a line per epoch.
        checkpoint: weights, and all that is needed to resume.
        result: the result of a finished run.
        ranks: the rank of each test target.
        names: names of users and items by id, and their numbers of interactions.
        vectors: content vectors of items, if the model reads them.
        data: a folder with the dataset, of a model that was saved with its data.
    """

    def __init__(self, path: str | Path) -> None:
        """Set the paths of the files that a run has in its folder; nothing is read or created.

        Args:
            path: the folder, which need not exist.
        """
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.result = self.path / "result.json"
        self.ranks = self.path / "test_ranks.parquet"
        self.names = self.path / "known.parquet"  # of users and items, by id
        self.vectors = self.path / KEPT  # content vectors of items; KEPT is the name of the file
        self.data = self.path / "dataset"  # of a model that was saved with its data

    @classmethod
    def create(cls, path: str | Path | None, dataset: str, model: str) -> RunFolder:
        """Create the folder of a new run.

        Args:
            path: the folder, which may exist; saved/<dataset>/<model>/<time>/ if None or empty.
            dataset: name of the dataset.
            model: name of the model.

        Returns:
            The folder, which exists now and holds no run yet.

        Raises:
            UsageError: if it holds a run already, or cannot be created.
        """
        folder = cls(path or find_unused_path(dataset, model))
        folder.require_unused()
        make_folder(folder.path)
        return folder

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds a run of which an epoch was kept."""
        return self.checkpoint.exists() or self.metrics.exists()

    @property
    def is_kept(self) -> bool:
        """Whether the folder outlives the model in memory: it is not a temporary one.

        Temporary folders have names that begin with ``files.TEMPORARY``.
        """
        return not any(part.startswith(files.TEMPORARY) for part in self.path.parts)

    @property
    def resume_command(self) -> str:
        """The command that resumes the run; it names the modules that its configuration names."""
        # Plugins: modules of custom models or schemes, which the new process must import again.
        plugins = None
        with suppress(UsageError):  # no configuration, or a damaged one
            plugins = self.read_config().get("plugins")
        return make_resume_command(self.path, plugins)

    @property
    def how_to_finish(self) -> str:
        """The command that finishes an unfinished run, as the end of a message."""
        return f"finish it with `{self.resume_command}`"

    def require_unused(self) -> None:
        """Refuse a folder that holds a run already, or a search for options (many runs).

        Raises:
            UsageError: says how to continue what the folder holds: a run by the command ``run``, a
                search by ``tune``.
        """
        if self.holds_run:
            kind, command = "run", self.resume_command
        elif (self.path / SEARCH).exists():  # search.json, which only searches have
            kind, command = "search", make_resume_command(self.path, command="tune")
        else:
            return
        problem = f"{self.path} holds a {kind} already"
        raise UsageError(f"{problem}; continue it with `{command}` or choose another --run_dir")

    def require(self, option: str = "") -> RunFolder:
        """Return this folder if it holds a trained run.

        Args:
            option: the option that names the folder, as the beginning of the message; none if "".

        Raises:
            UsageError: if it holds none, or one that was stopped before the end of its first epoch.
        """
        if not os.path.isfile(self.checkpoint):  # False for a name that is too long, too
            prefix = f"{option}: " if option else ""
            problem = f"{self.path} is not a run folder: it has no {self.checkpoint.name}"
            raise UsageError(f"{prefix}{problem}, as a run has after its first epoch")
        return self

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes that train in it, for a ``with`` block.

        Temporary files that a killed process has left beside the files of the run are removed.
        """
        # The word is for the message to other processes: the folder is being "trained". They cannot
        # lock it until the block has ended.
        with files.lock_folder(self.path, "trained"):
            names_of_vectors = self.vectors.with_suffix(".txt")  # items of the rows of ``vectors``
            written = [self.config, self.metrics, self.checkpoint, self.result]
            written += [self.ranks, self.names, self.vectors, names_of_vectors]
            files.remove_unfinished(written)  # temporary files of these, under other names
            yield

    def write_config(self, plain: dict[str, Any]) -> None:
        """Write the complete configuration; ``--config_files config.yaml`` repeats the run."""
        files.write_text(self.config, yaml.safe_dump(plain, sort_keys=True, allow_unicode=True))

    def read_config(self) -> dict[str, Any]:
        """Read what :meth:`write_config` wrote; ``PosConfig`` checks its options."""
        return read_yaml(self.config)

    def write_metrics(self, history: Iterable[dict[str, Any]]) -> None:
        """Replace metrics.jsonl by the given epochs: a resumed run drops the epochs after them."""
        files.write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in history))

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append the line of one epoch to metrics.jsonl."""
        with files.name_write_errors(self.metrics), open(self.metrics, "a") as file:
            file.write(json.dumps(line) + "\n")  # which is ASCII

    def write_ranks(self, ranks: pd.DataFrame) -> None:
        """Write the ranks of the test targets, a table of ``evaluation.make_rank_table``."""
        with files.atomic_write(self.ranks, text=False) as file:
            ranks.to_parquet(file, index=False)

    def write_vocabulary(self, vocabulary: Vocabulary, config: Options) -> None:
        """Write the names of users and items by id, and how many interactions each of them has.

        Args:
            vocabulary: these names and numbers.
            config: configuration of the run, which says how the fields of users and items are
                called.
        """
        fields = config["USER_ID_FIELD"], config["ITEM_ID_FIELD"]
        with files.atomic_write(self.names, text=False) as file:
            vocabulary.to_table(*fields).to_parquet(file, index=False)

    def read_vocabulary(self, config: Options) -> Vocabulary | None:
        """Read the names of users and items by id that :meth:`write_vocabulary` wrote.

        Args:
            config: configuration of the run, which says how the fields of users and items are
                called.

        Returns:
            The names with their numbers of interactions; None if the folder has no such file, as
            that of a .pth file that RecBole's own functions wrote.
        """
        if not self.names.is_file():
            return None
        fields = config["USER_ID_FIELD"], config["ITEM_ID_FIELD"]
        return Vocabulary.from_table(pd.read_parquet(self.names), *fields)


def find_unused_path(dataset: str, model: str, prefix: str = "") -> Path:
    """Return the path of a new folder: saved/<dataset>/<model>/<prefix><time>.

    Where that exists, -1 or the next free number is appended.

    Args:
        dataset: name of the dataset.
        model: name of the model.
        prefix: beginning of the folder's name, before the time.
    """
    # ``lexists`` is also true of a link whose target is gone, where no folder can be made.
    first = Path("saved", dataset, model, f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}")
    path = first
    number = 0
    while os.path.lexists(path):
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def make_folder(path: Path) -> None:
    """Create a folder, which may exist, and its parents; a UsageError if it cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {path}: {error.strerror}") from error


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on, by name."""
    # ``version`` finds that of an installed package; ``__version__`` is that of this one.
    packages = ("recbole", "torch", "numpy", "pandas", "scipy")
    versions = {"python": platform.python_version(), "recbole_pos": __version__}
    return versions | {package: version(package) for package in packages}


def peak_rss_mb() -> float | None:
    """Return the most memory (resident set size) that this process has used so far, in MB.

    It is None on Windows, where Python cannot ask for it.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return round(peak / unit, 1)


def copy_run(source: RunFolder, target: RunFolder, with_results: bool = False) -> None:
    """Copy a trained run into another folder.

    Args:
        source: folder of the run.
        target: the other folder, created if it does not exist.
        with_results: whether to copy the results of its test, too.
    """
    # Of the small files, those that the run has: for example, few runs have vectors of items, which
    # are a file of numbers with a text of names (.txt) beside it.
    make_folder(target.path)
    small_files = [source.config, source.metrics, source.names]
    small_files += [source.vectors, source.vectors.with_suffix(".txt")]
    small_files += [source.result, source.ranks] if with_results else []
    for file in small_files:
        if file.is_file():
            shutil.copy(file, target.path)

    # The checkpoint comes last: until it is whole, the target does not count as a trained run.
    # ``atomic_write`` gives a file its name only when the block has ended.
    with (
        source.checkpoint.open("rb") as original,
        files.atomic_write(target.checkpoint, text=False) as copied,
    ):
        shutil.copyfileobj(original, copied)


# --- the result of a run ---


REQUEST_TIME_WARNING = (
    "request_time: target: the model knew the time of what it predicts, which makes metrics higher "
    "than those of models that do not"
)


@dataclass(repr=False)
class Result:
    """The result of a run; also the content of ``result.json``.

    Attributes:
        best_valid, test: values by RecBole's metric names (``ndcg@10``), of the best epoch.
        epochs, best_epoch: number of trained epochs, and the best of them, counted from 0.
        seconds: time of ``data``, ``training``, and ``evaluation`` (validation and test).
        candidates: which items were ranked: all, or only those not in the user's past; then a
            target that its user has had before is a miss, and ``split`` counts such targets.
        split: what was held out and left out, see :func:`recbole_pos.data.targets.make_split`.
        device: see :func:`~recbole_pos.experiment.device.describe_device`.
        request_time: ``target`` if states knew the time of what they predict: such metrics are not
            comparable to others.
        warnings: sentences on what in the data makes targets easier to predict.
    """

    model: str
    dataset: str
    run_dir: str
    best_valid: dict[str, float] | None
    test: dict[str, float] | None
    epochs: int
    best_epoch: int | None
    seconds: dict[str, float]
    targets_per_second: float
    parameters: int
    candidates: str
    valid_targets: int
    test_targets: int
    split: dict[str, Any]
    peak_rss_mb: float | None
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    request_time: str = "none"
    warnings: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in (self.test or {}).items())
        training = f"{self.model} on {self.dataset}, {self.epochs} epochs"
        return f"{training}, test: {metrics}; {self.run_dir}"


def read_result(folder: RunFolder) -> Result:
    """Return the result in ``result.json`` of a finished run."""
    return Result(**json.loads(folder.result.read_bytes()))


def is_unfinished(folder: RunFolder) -> bool:
    """Return whether a run was stopped before its end.

    A run writes the names of users and items when it starts (``folder.names``), and its result at
    the end (``folder.result``); one that is resumed removes its former result.

    Args:
        folder: folder of the run.
    """
    # A folder without names holds no run, but a .pth file that RecBole's own functions wrote.
    if not folder.names.is_file():
        return False
    # A search for options keeps its best run in its own folder, where it also has a file
    # search.json (SEARCH). That run counts as finished, even without a result.
    if (folder.path.parent / SEARCH).is_file():
        return False
    return not folder.result.is_file()


def count_parameters(model: Any) -> int:
    """Return the number of a model's trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def list_warnings(split: dict[str, Any], candidates: str, request_time: str) -> list[str]:
    """Return sentences on what makes the metrics of an evaluation too good, or not comparable.

    Args:
        split: summary of the split, as in ``Result.split``: counts by name, such as how many
            interactions are copies of others, or how many targets are repeated.
        candidates: which items are ranked, in words.
        request_time: "target" if the model knows the time of what it predicts; else "none".
    """
    # ``make_warnings`` warns of copied interactions, of leaks and of targets that no training
    # interaction has; ``warn_of_repeats`` of targets that are misses since seen items are excluded.
    warnings = [*make_warnings(split), *warn_of_repeats(split, candidates)]
    if request_time == "target":
        warnings.append(REQUEST_TIME_WARNING)
    return warnings


def make_result(
    experiment: Any, folder: RunFolder, test: dict[str, float] | None, test_seconds: float
) -> Result:
    """Return the result of a trained run.

    Args:
        experiment: the trained model with its data and trainer.
        folder: folder of the run.
        test: metrics of the test by name; None if the split has no test targets.
        test_seconds: time that the test took.

    Returns:
        The content of ``result.json``: metrics, times, counts, and what the run was computed with.
    """
    # ``progress`` is what the trainer has counted: epochs, times, targets and the best metrics.
    config, progress = experiment.config, experiment.trainer.progress
    # The counts of the split, with the number of users that the validation is on, if not on all.
    split = add_sample(experiment.dataset.split.summary, config)
    training_seconds = max(progress.training_seconds, 1e-9)  # not 0, as it is a divisor
    num_targets = {
        phase: 0 if loader is None else loader.num_targets
        for phase, loader in experiment.loaders.items()
    }
    # In words: which items were ranked for a target.
    candidates = describe_candidates(masks_history(config))
    return Result(
        model=config["model"],
        dataset=config["dataset"],
        run_dir=str(folder.path),
        best_valid=progress.best_result,
        test=test,
        epochs=progress.next_epoch,
        best_epoch=progress.best_epoch,
        seconds={
            "data": round(experiment.data_seconds, 3),
            "training": round(progress.training_seconds, 3),
            "evaluation": round(progress.evaluation_seconds + test_seconds, 3),
        },
        targets_per_second=round(progress.trained_targets / training_seconds, 1),
        parameters=count_parameters(experiment.model),
        candidates=candidates,
        valid_targets=num_targets["valid"],
        test_targets=num_targets["test"],
        split=split,
        warnings=list_warnings(split, candidates, config["request_time"]),
        peak_rss_mb=peak_rss_mb(),
        seed=config["seed"],
        versions=find_versions(),
        device=describe_device(config),
        request_time=config["request_time"],
    )
