"""Predictions of other systems in the tables of this package.

:func:`score` is the command and the public function: it takes files or frames with recommended
lists, by themselves or beside runs. :func:`judge_rows` and :func:`list_judged_runs` make runs of
the rows ``predictions: FILE`` of a study. In its results they get the same intervals and
corrections as rows that are trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recbole_pos.config.metrics import is_from_ranks
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import list_warnings
from recbole_pos.referee.judge import Judgement, judge
from recbole_pos.referee.predictions import open_predictions
from recbole_pos.referee.split import (
    Requests,
    make_requests,
    read_run_data,
    read_split_data,
)
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE
from recbole_pos.study.collecting import Run, make_results, read_runs
from recbole_pos.study.plan import Plan, Source
from recbole_pos.study.results import RUN_FOLDERS
from recbole_pos.study.study_file import METRIC_NAMES, make_plan
from recbole_pos.study.study_folder import PackedStudy, StudyFacts
from recbole_pos.study.study_report import Report

_MAIN_CUTOFF = 10  # cutoff of the first metric, if the lists are long enough


Judged = Mapping[tuple[str, int], Judgement]  # (row, seed) -> ranks and faults of its predictions


@dataclass(frozen=True, repr=False)
class Scored(Report):
    """The result of :func:`score`.

    Attributes:
        judgements: one for each file or frame, with its ranks, and counts of its faults. A fault is
            something wrong with the lists of a system, such as an item twice in one.
    """

    judgements: Sequence[Judgement]

    @property
    def faults(self) -> list[str]:
        """A sentence for every kind of fault in the lists, and how often it occurs."""
        return [text for judgement in self.judgements for text in judgement.list_faults()]

    def show(self, reporter: Reporter) -> None:
        """Print the tables, the warnings, and the faults of the lists."""
        super().show(reporter)
        for text in self.faults:
            if text not in self.results.facts.warnings:  # a frequent fault is a warning already
                reporter.line(text)

    def __repr__(self) -> str:
        return "\n\n".join([super().__repr__(), *self.faults])


def score(
    predictions: Any,
    data: Any = None,
    config_files: Sequence[str | Path] = (),
    *,
    runs: Sequence[str | Path] = (),
    name: str = "predictions",
    metrics: Sequence[str] | None = None,
    part: str = "test",
    **options: Any,
) -> Scored:
    """Score the lists of any system on the targets of a split, also beside runs of this package.

    Examples:
        >>> import pandas
        >>> users = [str(user) for user in range(1, 944)]
        >>> frame = pandas.DataFrame({"user_id": users, "item_id": "50", "score": 1.0})
        >>> scored = recbole_pos.score(frame, "ml-100k")
        >>> list(scored.table["metric"]), len(scored.faults)
        (['ndcg@1', 'hit@1', 'mrr@1'], 0)

    Args:
        predictions: a file or a frame; or a list of them, which are seeds of one system. Formats
            are those of :mod:`recbole_pos.referee.predictions`.
        data: a dataset, its name or its folder; the dataset of the first run if None.
        config_files: yaml files of options, later ones winning.
        runs: folders of runs to compare with; the first is the reference.
        name: name of the system in the tables.
        metrics: such as ``ndcg@10``, the first of which is compared; up to the length of the lists
            if None.
        part: test or valid.
        options: options of the data, such as ``eval_args`` and ``mask_history``.

    Raises:
        UsageError: if predictions cannot be read, or were made for another split.
    """
    # Read the split. A request is a user and time for which a system gives a list of items, and
    # the target is the item that came next. To judge the lists is to find each target's rank.
    if data is None and runs:
        dataset = read_run_data(runs[0], options.get("data_path"))
    else:
        dataset = read_split_data(data, config_files, options)
    requests = make_requests(dataset, part)
    sources = predictions if isinstance(predictions, (list, tuple)) else [predictions]
    judged = {}
    for seed, source in enumerate(sources, 1):
        judged[name, seed] = judge(open_predictions(source), requests)  # the ranks, and faults

    # Make a study whose rows (configurations) are the system and the runs, if there are any, so
    # that means, differences and tables are made as for any study.
    if runs:
        study, facts, found = read_runs([Path(run) for run in runs])
    else:
        # The facts of a split that tables show are about the test targets. "none": the system is
        # not known to know the time of a request.
        summary = dataset.split.summary
        warnings = list_warnings(summary, requests.candidates, "none")
        study, found = {"dataset": dataset.dataset_name, "rows": {}}, []
        facts = StudyFacts(split=summary if part == "test" else {}, warnings=warnings)
    if name in study["rows"]:
        raise UsageError(f"name: {name} is the name of a run, too; give another")
    if unknown := [metric for metric in metrics or () if not is_from_ranks(metric)]:
        raise UsageError(f"metrics: {unknown[0]} does not follow from ranks, as ndcg@10 does")
    length = min(judgement.length for judgement in judged.values())
    study |= {
        "title": f"{name} on {dataset.dataset_name}, {len(requests):,} {part} requests",
        # No file is named, since the lists have been judged already.
        "rows": {**study["rows"], name: {"predictions": {seed: "" for _, seed in judged}}},
        "metrics": list(metrics or _list_metrics(dataset.config["topk"], length)),
    }
    # RUN_FOLDERS in place of a file's name says that the study was made from finished runs, so that
    # no table says that runs of it are missing.
    plan = make_plan(Source(RUN_FOLDERS, study))
    results = make_results(plan, facts, [*found, *list_judged_runs(plan, judged)])
    return Scored(results, list(judged.values()))


def _list_metrics(cutoffs: Sequence[int], length: int) -> list[str]:
    """Return the metrics that lists are scored with by default.

    Cutoffs above the length of the lists are left out. The metrics at 10 come first, or else those
    at the longest cutoff. If no cutoff is short enough, the length itself is one.

    Args:
        cutoffs: the option ``topk``.
        length: number of items of the shortest list.
    """
    # A longer cutoff would count items that the lists do not have as misses. _MAIN_CUTOFF is 10,
    # and METRIC_NAMES are ndcg, hit and mrr.
    known = sorted(cutoff for cutoff in cutoffs if cutoff <= length) or [length]
    main = _MAIN_CUTOFF if _MAIN_CUTOFF in known else known[-1]
    known.sort(key=lambda cutoff: cutoff != main)  # the main one first; the others keep their order
    return [f"{metric}@{cutoff}" for cutoff in known for metric in METRIC_NAMES]


def judge_rows(plan: Plan, packed: Sequence[PackedStudy]) -> Judged:
    """Find the ranks of the test targets in the predictions of other systems in a study.

    A row of a study is a configuration. Most are trained, but one may name files of predictions
    that another system has made, one for each seed.

    Args:
        plan: the study.
        packed: packed studies (``--known``). They have the ranks of targets in files that are not
            on this machine.

    Returns:
        (row, seed) -> judgement: the ranks of the targets in a file, and what is wrong with it. It
        is empty if all rows are trained.
    """
    files = {
        (name, seed): file
        for name, row in plan.rows.items()
        for seed, file in row.predictions.items()
    }
    if not files:
        return {}

    # The requests are the same for all rows, so take those of the first.
    first_row, _ = next(iter(files))
    requests = _read_requests(plan, first_row)
    judged = {}
    for (name, seed), file in files.items():
        # The judgement in the first packed study that has one. A file on this machine counts more.
        judgements = [study.read_judgement(name, seed, requests) for study in packed]
        known = [judgement for judgement in judgements if judgement is not None]
        if known and not Path(file).exists():
            judged[name, seed] = known[0]
        else:
            judged[name, seed] = judge(open_predictions(file), requests)
    return judged


def _read_requests(plan: Plan, row: str) -> Requests:
    """Return the requests of a study's test split: histories of users, and the targets to find.

    Args:
        plan: the study.
        row: name of a row (a configuration), whose options say how the data are read and split.
    """
    options = plan.make_options(row)
    options.pop("model", None)
    data, config_files = options.pop("dataset"), options.pop("config_files", ())
    # Some of the other options may be those of a model. ``strict`` would refuse them.
    return make_requests(read_split_data(data, config_files, options, strict=False))


def list_judged_runs(plan: Plan, judged: Judged) -> list[Run]:
    """Return the results of other systems in the form of finished runs, to compare them with runs.

    Each system has given a list of items for every request, which is a user's history. The lists
    have been judged already: for each request it is known at which rank of the list its target is,
    the item that came next.

    Args:
        plan: the study, in which each of these systems is a row.
        judged: row and seed -> judgement: the ranks, the requests, and warnings about the lists.

    Raises:
        UsageError: if the lists are shorter than the cutoff of a metric, as 5 items for ndcg@10.
    """
    _require_lengths(plan, judged)
    runs = []
    for (row, seed), judgement in judged.items():
        facts = {"row": row, "seed": seed, "status": DONE, "path": judgement.name}
        # What may be in a list, in words, such as "all items".
        facts["candidates"] = judgement.requests.candidates
        # A table with the columns user, item, rank and some more, and a line for each request.
        ranks = judgement.requests.make_rank_table(judgement.ranks)
        runs.append(Run(facts, ranks, warnings=judgement.warnings))
    return runs


def _require_lengths(plan: Plan, judged: Judged) -> None:
    """Require that the lists are as long as the metrics of the tables need.

    Args:
        plan: the study.
        judged: (row, seed) -> judgement of the lists of predictions, with their length. A row is a
            configuration.

    Raises:
        UsageError: naming the metric and the file with shorter lists.
    """
    for (row, _), judgement in judged.items():
        tables = [table for table in plan.tables if row in table.rows]
        for metric in itertools.chain.from_iterable(table.metrics for table in tables):
            if int(metric.partition("@")[2]) > judgement.length:  # the cutoff of ndcg@10 is 10
                raise UsageError(
                    f"metrics: {metric}: {judgement.name} has {judgement.length} items a "
                    f"request; give longer lists, or metrics up to @{judgement.length}"
                )
