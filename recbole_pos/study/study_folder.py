"""The folder of a study, with every run that it has trained; and the folders of packed studies.

A study's folder has ``study.json`` (its plan), ``facts.json`` (:class:`StudyFacts`),
``current.json`` (which runs belong to the present plan) and ``runs/DIGEST/``. These are run
folders, named by a digest (hash of options, data and code), with ``fit.json`` beside the files of
every run: which fit (training run of the plan) it is, and how it ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.config.checks import as_list
from recbole_pos.config.metrics import compute_gains
from recbole_pos.config.posconfig import PLUGINS, PosConfig
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError, make_resume_command
from recbole_pos.experiment.evaluation import make_rank_table
from recbole_pos.experiment.folder import Result, RunFolder, make_folder
from recbole_pos.files import atomic_write, read_capped, write_json
from recbole_pos.referee.judge import Judgement
from recbole_pos.referee.split import Requests
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.configs import digest_requests
from recbole_pos.study.plan import Plan, Source
from recbole_pos.study.study_file import make_plan

KNOWN_FROM = "known_from"  # key of a run's facts: name of the packed study that it was taken from
_MAX_TITLE = 60  # most characters of a title in the path of a folder
_FACTS, _EPOCHS, _RANKS = "facts.json", "epochs.parquet", "ranks.parquet"  # of a packed study
# Facts of a run that others may read: no paths, no names of machines, no times of the split.
_PUBLIC_FACTS = (
    *("row", "seed", "stage", "trial", "commit", "model", "searched"),
    *("digest", "dataset"),
    *("best_valid", "test", "epochs", "best_epoch", "seconds", "targets_per_second", "parameters"),
    *("candidates", "valid_targets", "test_targets", "peak_rss_mb", "versions", "device"),
)
# Facts of another system's predictions: items of a list, rows of the file, and counts of faults.
_JUDGED = ("length", "num_rows", "counts")
# Facts that belong into result.json of a run; the others belong into fit.json.
_RESULT_FACTS = {field.name for field in fields(Result)}


@dataclass
class StudyFacts:
    """The content of ``facts.json``: facts that no run's folder has.

    Attributes:
        versions, data, warnings, split: versions of packages; facts about the data; sentences on
            what in the data inflates metrics; and the split, all as in :class:`.results.Results`.
        unmade: name of a fit (a training run of the plan) that failed before its run had a folder
            -> why.
    """

    versions: dict[str, str] = field(default_factory=dict)
    data: dict[str, int | str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    split: dict[str, Any] = field(default_factory=dict)
    unmade: dict[str, str] = field(default_factory=dict)


def read_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a json file; it is empty if there is no file.

    Args:
        file: path of the file.

    Raises:
        UsageError: if the file is damaged.
    """
    try:
        return dict(json.loads(read_capped(file)))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise UsageError(f"{file} is damaged: {error}; delete it, and it is made again") from error


def read_curve(run: RunFolder, metric: str) -> dict[int, float]:
    """Return epoch (from 0) -> validation value of a metric, for the epochs that were validated."""
    # An epoch is a dict, with its validation values under ``valid`` (metric -> value; None for an
    # epoch without validation).
    epochs = read_epochs(run)
    return {e["epoch"]: e["valid"][metric] for e in epochs if metric in (e["valid"] or {})}


def read_epochs(run: RunFolder) -> list[dict[str, Any]]:
    """Return what a run has recorded of each epoch, as in its ``metrics.jsonl``.

    A last line that is not complete is left out, since the run may be writing it now.
    """
    # Each line is the json of an epoch. Take all up to the last line break; ``rfind`` returns -1 if
    # there is none, and then nothing is taken.
    content = run.metrics.read_bytes() if run.metrics.is_file() else b""
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


class StudyFolder:
    """The folder of one study.

    Attributes:
        path: the folder.
        runs: folder in it with the folders of the runs.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.runs = self.path / "runs"

    @classmethod
    def from_plan(cls, plan: Plan, path: str | Path | None) -> StudyFolder:
        """Return the folder of a study, which need not exist yet.

        Args:
            plan: the study.
            path: the folder; ``saved/<dataset>/studies/<title>/`` when None.
        """
        if path is None:
            # "FPARec, Pop on ml-100k" becomes fparec-pop-on-ml-100k, cut to _MAX_TITLE (60).
            title = re.sub(r"[^\w.]+", "-", plan.title.lower()).strip("-.")
            path = Path("saved") / plan.dataset / "studies" / (title[:_MAX_TITLE] or "study")
        return cls(path)

    def write_plan(self, plan: Plan) -> None:
        """Write the plan, so that the study can be resumed and reported without its file.

        Args:
            plan: the study. Its ``source`` has the name and the content of the file it was read
                from, of which :meth:`read_plan` makes the plan again.
        """
        self._write("study.json", {"name": plan.source.name, "content": plan.source.content})

    def read_plan(self) -> Plan | None:
        """Return the plan of the study in this folder; None if it has none."""
        study = read_json(self.path / "study.json")
        return make_plan(Source(study["name"], study["content"])) if study else None

    def make_command(self, plan: Plan) -> str:
        """Return the shell command that resumes the study, or repeats its report."""
        # PLUGINS is the option that names modules with custom models. The command names them, too,
        # so that they are imported again.
        plugins = as_list(plan.base.options.get(PLUGINS) or [])
        return make_resume_command(self.path, map(str, plugins), "compare")

    def run(self, digest: str) -> RunFolder:
        """Return the folder of a run, which need not exist yet."""
        return RunFolder(self.runs / digest)

    def write_fit(self, digest: str, facts: dict[str, Any]) -> None:
        """Write into ``fit.json`` what the study knows of a run; other facts in the file stay.

        The file is called so since a fit is a run that the plan of a study asks for.

        Args:
            digest: hash that names the run's folder.
            facts: facts by name, such as the row (configuration), the seed and the status.
        """
        # New facts replace old ones of the same name. The reason of a failure goes when the run is
        # trained again, since it is then running or done.
        merged = {**read_json(self.run(digest).path / "fit.json"), **facts, "digest": digest}
        if merged.get("status") != FAILED:
            merged.pop("reason", None)
        self._write(f"runs/{digest}/fit.json", merged)

    def read_fit(self, digest: str) -> dict[str, Any]:
        """Return all facts of a run, from its ``result.json`` and its ``fit.json``.

        The run itself writes its results into ``result.json``. The study writes what it knows of
        the run into ``fit.json``: row (the configuration), seed, status.

        Args:
            digest: hash that names the run's folder.

        Returns:
            Facts by name; empty if the run has no ``fit.json``, or if the digest is empty.
        """
        run = self.run(digest)
        facts = read_json(run.path / "fit.json") if digest else {}
        return {**read_json(run.result), **facts} if facts else {}

    def find_current_digests(self, plan: Plan) -> dict[str, str]:
        """Return which run belongs to each fit (training run) of a plan.

        A run belongs to a fit only if it was made for the same request: options, search, and
        whatever else the plan asks for. After a change of the plan, runs of earlier requests are
        left out.

        Args:
            plan: the study as it is asked for now.

        Returns:
            Name of a fit -> digest of its run (the hash that names the run's folder).
        """
        # Name of a fit -> its run, and a hash of what was asked for when the run was made.
        current, requests = read_json(self.path / "current.json"), digest_requests(plan)
        known = [name for name in requests if name in current]
        same = [name for name in known if current[name]["asked"] == requests[name]]
        return {name: current[name]["run"] for name in same}

    def write_current(self, plan: Plan, digests: dict[str, str]) -> None:
        """Write into ``current.json`` which run belongs to each fit (training run) of a plan.

        Each fit also gets a hash of what the plan asks of it: options, seed, search. If a later
        plan asks for something else, the hash differs, and the run does not belong to it any more.

        Args:
            plan: the study.
            digests: name of a fit -> digest of its run (the hash that names the run's folder). What
                the file says of other fits stays.
        """
        current = read_json(self.path / "current.json")
        for name, request in digest_requests(plan).items():  # request: the hash of what is asked
            if name in digests:
                current[name] = {"run": digests[name], "asked": request}
        self._write("current.json", current)

    def read_facts(self) -> StudyFacts:
        """Return facts of the study: its data, split and versions, and runs without a folder."""
        return StudyFacts(**read_json(self.path / "facts.json"))

    def write_facts(self, facts: StudyFacts) -> None:
        """Write the facts of the study."""
        self._write("facts.json", asdict(facts))

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Write a json file into the folder, which is made if it does not exist."""
        file = self.path / name
        make_folder(file.parent)
        write_json(file, content)


# --- packed studies ---


class PackedStudy:
    """The results of a study's runs in three files, so that no one has to train the runs again.

    :func:`pack` writes them into a folder. ``facts.json`` has options, metrics and cost of each
    run, ``epochs.parquet`` its validation by epoch, and ``ranks.parquet`` a column with the ranks
    of its test targets, in the order of the dataset. There are no weights and no data: users, items
    and times are read from the dataset again. So the folder may be shared where the data may not,
    and serves only those who have the same data. Predictions that another system has made are kept
    in the same files, by row and seed; so their lists are not needed again.

    Attributes:
        path: the folder.
        fits: digest of a run (the hash that names its folder) -> its facts, as
            :meth:`StudyFolder.read_fit` returns them.
        epochs: one line per epoch: digest, epoch, and a column for each validation metric.
    """

    def __init__(self, path: str | Path) -> None:
        """Read what a folder of ``compare --pack`` has of the runs of a study, but for the ranks.

        Args:
            path: the folder.

        Raises:
            UsageError: if the folder was not written by ``compare --pack``.
        """
        self.path = Path(path)
        if not (self.path / _RANKS).is_file():  # ranks.parquet, which no other folder has
            raise UsageError(f"--known: {path} is not a folder of `compare --pack`: no {_RANKS}")

        # The validation values by epoch, of all runs (epochs.parquet).
        self.epochs = pd.read_parquet(self.path / _EPOCHS)

        # The facts of each run (facts.json), by the hash that names its folder. Only finished runs
        # are packed. KNOWN_FROM is the fact that tells where results of others were taken from.
        self.fits = read_json(self.path / _FACTS)
        for facts in self.fits.values():
            facts |= {"status": DONE, KNOWN_FROM: self.path.name}

    def restore(self, digest: str, folder: StudyFolder, config: PosConfig, dataset: Any) -> None:
        """Write a run into a study's folder, as if it had been trained there, but without weights.

        Its results are in the three files of this packed study (``compare --pack``), which others
        have trained. The study then has no need to train the run.

        Args:
            digest: hash that names the folder of the run.
            folder: folder of the study.
            config: configuration of the run, with the paths of this machine.
            dataset: dataset of the configuration.
        """
        # The same files as a trained run has: configuration, epochs, ranks and results.
        run, facts = folder.run(digest), self.fits[digest]
        make_folder(run.path)
        run.write_config(config.plain)

        # The epochs; metrics that other runs have and this one lacks are NaN. ``pop`` takes the
        # number of the epoch out of each line, so that only metrics are left in ``valid``.
        lines = self.epochs[self.epochs["digest"] == digest].drop(columns="digest")
        epochs = [line.dropna().to_dict() for _, line in lines.iterrows()]
        run.write_metrics({"epoch": int(valid.pop("epoch")), "valid": valid} for valid in epochs)

        # The ranks, whose users and items are read from the dataset. A trial of a search has none,
        # since it is not tested.
        if facts.get("test") is not None:
            column = pd.read_parquet(self.path / _RANKS, columns=[digest])[digest]
            # Runs with fewer test targets have shorter columns, filled up with missing values.
            ranks = column.dropna().to_numpy(np.int64)
            targets = np.flatnonzero(dataset.split.find_targets(TEST))
            run.write_ranks(make_rank_table(dataset, targets, ranks, config["timestamp_unit"]))

        # Some facts belong into the run's result.json (_RESULT_FACTS), the others into fit.json.
        write_json(run.result, {key: facts[key] for key in facts if key in _RESULT_FACTS})
        # This comes last, since it marks the run as done.
        folder.write_fit(digest, {k: facts[k] for k in facts if k not in _RESULT_FACTS})

    def read_judgement(self, row: str, seed: int, requests: Requests) -> Judgement | None:
        """Return how another system's predictions did, as it was kept in this folder.

        A row of a study may be another system, which gave its predictions as lists of items. This
        folder keeps only what was computed from the lists: the rank of each target, and a count of
        each kind of fault (such as an item that is twice in a list).

        Args:
            row, seed: name of the row and seed of the predictions.
            requests: the questions of the present split, each a user's history and the target to
                find. The predictions must have answered the same ones.

        Returns:
            The ranks and counts; None if there are none of this row and seed, or if they are of
            the requests of another split.
        """
        # ``fits`` has the facts of all runs in this folder. The runs of models are named by a hash
        # there, and predictions by their row and seed.
        name = f"{row}, seed {seed}"
        facts = self.fits.get(name)
        if facts is None or facts["split"] != requests.digest:  # digest: hash of the requests
            return None

        # The file of ranks has a column for each run, [targets]. Columns of other runs may be
        # longer, so that this one ends with missing values.
        column = pd.read_parquet(self.path / _RANKS, columns=[name])[name]
        ranks = column.dropna().to_numpy(np.int64)

        # The other fields of a Judgement (_JUDGED): items in a list, rows of the system's file, and
        # counts of faults.
        fields = {key: facts[key] for key in _JUDGED}
        return Judgement(facts["file"], requests, ranks, **fields)


def pack(
    plan: Plan, folder: StudyFolder, path: str | Path, judged: Mapping[tuple[str, int], Judgement]
) -> int:
    """Write the results of a study's finished runs into three files, for others to compare with.

    Others who have the same data give the folder of these files as ``--known``, and need not train
    the runs again. The files have no weights and no data; :class:`PackedStudy` reads them.

    Args:
        plan: the study.
        folder: folder of the study.
        path: folder to write into.
        judged: (row, seed) -> how the predictions of another system did: ranks of the targets, and
            counts of faults. They are written as if they were runs.

    Returns:
        The number of runs in the files, predictions included.

    Raises:
        UsageError: if no run is finished.
    """
    # Of each run its facts, a line for each epoch, and its ranks. Runs are named by a hash of their
    # options and data, and predictions by row and seed.
    facts, epochs, ranks = _gather_runs(plan, folder)
    for (row, seed), judgement in judged.items():
        name = f"{row}, seed {seed}"
        facts[name] = {"row": row, "seed": seed, **_describe_judgement(judgement, plan.metrics)}
        ranks[name] = pd.Series(judgement.ranks).astype("Int32")
    if not facts:
        raise UsageError(f"--pack {path}: {folder.path} has no finished run")

    packed = Path(path)
    make_folder(packed)
    write_json(packed / _FACTS, facts)
    _write_parquet(pd.DataFrame(epochs or {"digest": []}), packed / _EPOCHS)
    # A column of ranks for each run; pandas adds missing values to shorter ones. Ranks hardly
    # repeat, so a dictionary does not help. They get small if their first bytes are compressed
    # together, then their second bytes, and so on.
    encoding = {"use_dictionary": False, "use_byte_stream_split": True}
    _write_parquet(pd.DataFrame(ranks), packed / _RANKS, **encoding)
    return len(facts)


def _gather_runs(
    plan: Plan, folder: StudyFolder
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, pd.Series]]:
    """Return what a packed study keeps of the finished runs of a study.

    Args:
        plan: the study.
        folder: folder of the study.

    Returns:
        Name of a run -> its facts; a line for each epoch of each run, with its validation values;
        and name of a run -> [targets] ranks of the test targets. A run is named by its digest, the
        hash that also names its folder.
    """
    facts: dict[str, Any] = {}
    epochs: list[dict[str, Any]] = []
    ranks: dict[str, pd.Series] = {}
    # A plan may ask twice for the same training, whose run is then one. So each digest is once.
    for digest in sorted(set(folder.find_current_digests(plan).values())):
        run, run_facts = folder.run(digest), folder.read_fit(digest)
        if run_facts.get("status") != DONE:
            continue
        # Only facts that may be shared (_PUBLIC_FACTS): none has data, or paths of this machine.
        facts[digest] = {key: run_facts[key] for key in _PUBLIC_FACTS if key in run_facts}
        for epoch in read_epochs(run):
            epochs.append({"digest": digest, "epoch": epoch["epoch"], **(epoch["valid"] or {})})
        if run.ranks.is_file():  # a trial of a search is not tested
            ranks[digest] = pd.read_parquet(run.ranks, columns=["rank"])["rank"].astype("Int32")
    return facts, epochs, ranks


def _describe_judgement(judgement: Judgement, metrics: Sequence[str]) -> dict[str, Any]:
    """Return what a packed study keeps of another system's predictions, besides their ranks.

    Args:
        judgement: the ranks of the test targets in the system's lists, and the faults of the lists.
        metrics: metrics to compute from the ranks.

    Returns:
        Facts by name: ``split``, a hash of the requests that the lists answer; ``file``, the name
        of the file; ``length``, the items of a list; ``num_rows``, the rows of the file;
        ``counts``, how often each fault occurs; and ``test``, the mean of each metric.
    """
    means = {metric: compute_gains(judgement.ranks, metric).mean() for metric in metrics}
    return {
        "split": judgement.requests.digest,
        "file": Path(judgement.name).name,  # without its folder on this machine
        **{key: getattr(judgement, key) for key in _JUDGED},  # length, num_rows and counts
        "test": {metric: round(float(mean), 6) for metric, mean in means.items()},
    }


def _write_parquet(frame: pd.DataFrame, path: Path, **encoding: Any) -> None:
    """Write a table as a small parquet file.

    Args:
        frame: the table.
        path: the file, which is replaced as a whole.
        encoding: arguments of pyarrow's ``write_table``.
    """
    compression = {"compression": "zstd", "compression_level": 19}
    # The file appears under its name only when it is complete.
    with atomic_write(path, text=False) as file:
        frame.to_parquet(file, index=False, **compression, **encoding)
