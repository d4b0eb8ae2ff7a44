"""Predictions of other systems in the tables of this package.

:func:`score` is the command and the public function: it takes files or frames with recommended
lists, by themselves or beside runs. :func:`judge_rows` and :func:`add_judged` put the rows
``predictions: FILE`` of a study into its results, where they get the same intervals and corrections
as rows that are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import list_warnings
from recbole_pos.referee.judge import Judgement, judge
from recbole_pos.referee.predictions import open_predictions
from recbole_pos.referee.requests import (
    make_requests,
    read_plan_data,
    read_run_data,
    read_split_data,
)
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE
from recbole_pos.study.configs import require_same_candidates
from recbole_pos.study.plan import Plan, Source
from recbole_pos.study.rendered_table import RenderedTable
from recbole_pos.study.result_tables import make_tables
from recbole_pos.study.results import (
    RUN_FOLDERS,
    Results,
    collect_runs,
    concatenate,
)
from recbole_pos.study.statistics import RankTable, is_from_ranks
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_folder import PackedStudy

_METRICS = ("ndcg", "hit", "mrr")  # metrics by default
_MAIN_CUTOFF = 10  # cutoff of the first metric, if the lists are long enough


Judged = Mapping[tuple[str, int], Judgement]  # (row, seed) -> ranks and faults of its predictions


@dataclass(frozen=True, repr=False)
class Scored:
    """The result of :func:`score`.

    Attributes:
        results: results of which tables and charts are made.
        judgements: one for each file or frame, with its ranks, and counts of its faults.
        tables: the tables; the first is the text of this object.
    """

    results: Results
    judgements: Sequence[Judgement]
    tables: Sequence[RenderedTable]

    @property
    def table(self) -> pd.DataFrame:
        """One line per row (system or run) and metric: mean and standard deviation over seeds."""
        return self.results.comparisons[0].means

    @property
    def pairs(self) -> pd.DataFrame:
        """One line per row (system or run): difference from the reference, interval, p, star."""
        return self.results.comparisons[0].differences

    @property
    def faults(self) -> list[str]:
        """A sentence for every kind of fault in the lists, and how often it occurs."""
        return [text for judgement in self.judgements for text in judgement.list_faults()]

    def show(self, reporter: Reporter) -> None:
        """Print the tables, the warnings, and the faults of the lists that no warning names.

        A fault is something wrong with the lists of a system, such as an item twice in one.

        Args:
            reporter: prints the lines.
        """
        from recbole_pos.study.study_report import (
            print_results,  # here, since it imports matplotlib
        )

        print_results(self.results, self.tables, reporter)
        for text in self.faults:  # a frequent fault is a warning already
            if text not in self.results.warnings:
                reporter.line(text)

    def write(self, folder: str | Path) -> list[Path]:
        """Write the files of a comparison and those for a paper; return their paths."""
        from recbole_pos.study.study_report import (
            write_results,  # here, since it imports matplotlib
        )

        return write_results(self.results, Path(folder), latex=True)

    def __repr__(self) -> str:
        return "\n\n".join([self.tables[0].markdown(), *self.faults])

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables)


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
    judged = {
        (name, seed): judge(open_predictions(source), requests)
        for seed, source in enumerate(sources, 1)
    }

    # Make a study whose rows (configurations) are the system and the runs, if there are any, so
    # that means, differences and tables are made as for any study.
    results = collect_runs([Path(run) for run in runs]) if runs else None
    study = results.plan.source.content if results else {"dataset": dataset.dataset_name}
    rows = study.get("rows", {})
    if name in rows:
        raise UsageError(f"name: {name} is the name of a run, too; give another")
    if unknown := [metric for metric in metrics or () if not is_from_ranks(metric)]:
        raise UsageError(f"metrics: {unknown[0]} does not follow from ranks, as ndcg@10 does")
    length = min(judgement.length for judgement in judged.values())
    study = {
        **study,
        "title": f"{name} on {dataset.dataset_name}, {len(requests):,} {part} requests",
        # No file is named, since the lists have been judged already.
        "rows": {**rows, name: {"predictions": {seed: "" for _, seed in judged}}},
        "metrics": list(metrics or _list_metrics(dataset.config["topk"], length)),
    }
    # With this source the plan counts as made afterwards, so that no run is missing.
    plan = make_plan(Source(RUN_FOLDERS, study))
    if results is None:
        # The facts of a split that tables show are about the test targets. "none": the system is
        # not known to know the time of a request.
        summary = dataset.split.summary
        results = Results(
            plan,
            runs=pd.DataFrame({"row": [], "seed": [], "status": []}),
            split=summary if part == "test" else {},
            warnings=tuple(list_warnings(summary, requests.candidates, "none")),
        )
    results = add_judged(replace(results, plan=plan), judged)
    return Scored(results, list(judged.values()), make_tables(results))


def _list_metrics(cutoffs: Sequence[int], length: int) -> list[str]:
    """Return the metrics that lists are scored with by default.

    Cutoffs above the length of the lists are left out. The metrics at 10 come first, or else those
    at the longest cutoff. If no cutoff is short enough, the length itself is one.

    Args:
        cutoffs: the option ``topk``.
        length: number of items of the shortest list.
    """
    # A longer cutoff would count items that the lists do not have as misses. _MAIN_CUTOFF is 10,
    # and _METRICS are ndcg, hit and mrr.
    known = sorted(cutoff for cutoff in cutoffs if cutoff <= length) or [length]
    main = _MAIN_CUTOFF if _MAIN_CUTOFF in known else known[-1]
    ordered = [main, *(cutoff for cutoff in known if cutoff != main)]
    return [f"{metric}@{cutoff}" for cutoff in ordered for metric in _METRICS]


def judge_rows(plan: Plan, packed: Sequence[PackedStudy] = ()) -> Judged:
    """Find the ranks of the test targets in the files of predictions that rows of a study name.

    A row of a study is a configuration. Most are trained, but one may name files of predictions
    that another system has made, one for each seed.

    Args:
        plan: the study.
        packed: packed studies (``--known``), which have the ranks of files that are not here.

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

    # The requests are the questions of the test split: a user's history, and the target to find in
    # it. They are the same for all rows, so read the data with the options of the first.
    first_row, _ = next(iter(files))
    requests = make_requests(read_plan_data(plan.make_options(first_row)))
    judged = {}
    for (name, seed), file in files.items():
        # A packed study has the ranks of the targets in a file, and not the file itself.
        judgements = [study.read_judgement(name, seed, requests) for study in packed]
        known = [judgement for judgement in judgements if judgement is not None]
        if known and not Path(file).exists():
            judged[name, seed] = known[0]
        else:
            judged[name, seed] = judge(open_predictions(file), requests)
    return judged


def add_judged(results: Results, judged: Judged) -> Results:
    """Return results to which predictions of other systems are added, as if they were runs.

    Args:
        results: results of the runs of a study; there may be none.
        judged: (row, seed) -> judgement of its predictions: ranks, candidates and warnings.

    Raises:
        UsageError: if the lists are too short for a metric of the study, or if the rows of a table
            differ in their targets or in the items that they rank.
    """
    if not judged:
        return results
    _require_lengths(results.plan, judged)

    # A line per target with its rank, for each run and for each file of predictions. The ranks of
    # ``results.ranks`` are [runs, targets], those of a judgement in the order of its requests.
    frames: dict[tuple[str, int], pd.DataFrame] = {}
    if results.ranks is not None:
        runs = results.ranks.runs.itertuples()
        for run, ranks in zip(runs, results.ranks.rank, strict=True):
            frames[str(run.row), int(run.seed)] = results.ranks.targets.assign(rank=ranks)
    lines, warnings = [], list(results.warnings)
    for (row, seed), judgement in judged.items():
        frames[row, seed] = judgement.requests.make_rank_table(judgement.ranks)
        line = {"row": row, "seed": seed, "status": DONE, "path": judgement.name}
        # Candidates are the items that were ranked, in words. Other columns of runs stay empty.
        line |= {"candidates": judgement.requests.candidates, "request_time": "none"}
        lines.append({**line, **dict.fromkeys(("reason", "device", "commit", "digest"), "")})
        warnings += judgement.warnings

    # Rows of one table must rank the same items.
    table_of_runs = concatenate([results.runs, pd.DataFrame(lines)])
    ranked = table_of_runs[table_of_runs["status"] == DONE]
    candidates = dict(zip(ranked["row"], ranked["candidates"], strict=True))
    for table in results.plan.tables:
        require_same_candidates({row: candidates[row] for row in table.rows if row in candidates})
    rank_table = RankTable.from_runs(frames)  # refuses runs with different targets
    return replace(results, runs=table_of_runs, ranks=rank_table, warnings=tuple(warnings))


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
        for table in plan.tables:
            if row not in table.rows:
                continue
            for metric in table.metrics:
                if int(metric.partition("@")[2]) > judgement.length:  # the cutoff of ndcg@10 is 10
                    raise UsageError(
                        f"metrics: {metric}: {judgement.name} has {judgement.length} items a "
                        f"request; give longer lists, or metrics up to @{judgement.length}"
                    )
