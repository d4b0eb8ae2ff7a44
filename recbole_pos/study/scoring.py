"""Predictions of other systems in the tables of this package.

:func:`score` is the command and the public function: files or frames, by themselves or beside runs.
:func:`judge_rows` and :func:`add_judged` put the rows ``predictions: FILE`` of a study into its
results, where they get the same intervals and corrections as rows that are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.experiment.result import list_warnings
from recbole_pos.referee.judge import Judgement, judge
from recbole_pos.referee.predictions import open_predictions
from recbole_pos.referee.requests import (
    Requests,
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
    select_protocol,
)
from recbole_pos.study.statistics import RankTable
from recbole_pos.study.study_file import make_plan

_METRICS = ("ndcg", "hit", "mrr")
_MAIN_CUTOFF = 10


@dataclass(frozen=True)
class Judged:
    """Predictions that have been judged.

    Attributes:
        requests: the requests that they answer; None if there are no predictions.
        judgements: row and seed -> where the targets stand in its lists.
    """

    requests: Requests | None
    judgements: Mapping[tuple[str, int], Judgement]


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
        """A line for each row and metric: mean and deviation over seeds."""
        return self.results.comparisons[0].means

    @property
    def pairs(self) -> pd.DataFrame:
        """A line for each row: difference from the reference, interval, p, star."""
        return self.results.comparisons[0].differences

    @property
    def faults(self) -> list[str]:
        """A sentence for every kind of fault in the lists, and how often it occurs."""
        return [text for judgement in self.judgements for text in judgement.list_faults()]

    def show(self, reporter: Reporter) -> None:
        """Print the tables, the warnings, and the faults that are too few for a warning."""
        for table in self.tables:
            reporter.line(table)
            reporter.line("")
        warnings = self.results.warnings
        for text in warnings:
            reporter.warning(text)
        for text in self.faults:
            if text not in warnings:
                reporter.line(text)

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
        predictions: a file, a frame or the dict of a ranx run; or a list of them, which are seeds
            of one system. Formats are those of :mod:`recbole_pos.referee.predictions`.
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
    if data is None and runs:
        dataset = read_run_data(runs[0], options.get("data_path"))
    else:
        dataset = read_split_data(data, config_files, options)
    requests = make_requests(dataset, part)
    sources = predictions if isinstance(predictions, (list, tuple)) else [predictions]
    judgements = {
        (name, seed): _judge_source(source, requests) for seed, source in enumerate(sources, 1)
    }

    results = _make_results(requests, runs, name, len(sources))
    length = min(judgement.length for judgement in judgements.values())
    metrics = metrics or _list_metrics(dataset.config["topk"], length)
    content = {**results.plan.source.content, "metrics": list(metrics)}
    plan = make_plan(Source(RUN_FOLDERS, content))
    results = add_judged(replace(results, plan=plan), Judged(requests, judgements))
    return Scored(results, list(judgements.values()), make_tables(results))


def _judge_source(source: Any, requests: Requests) -> Judgement:
    """Judge a file or frame, whose columns may have the names of fields of the dataset, too."""
    dataset = requests.dataset
    predictions = open_predictions(source, [dataset.uid_field], [dataset.iid_field])
    return judge(predictions, requests)


def _list_metrics(cutoffs: Sequence[int], length: int) -> list[str]:
    """Return the metrics up to a length of lists, those at 10 first, or at the longest cutoff."""
    known = sorted(cutoff for cutoff in cutoffs if cutoff <= length) or [length]
    main = _MAIN_CUTOFF if _MAIN_CUTOFF in known else known[-1]
    ordered = [main, *(cutoff for cutoff in known if cutoff != main)]
    return [f"{metric}@{cutoff}" for cutoff in ordered for metric in _METRICS]


def _make_results(
    requests: Requests, runs: Sequence[str | Path], name: str, num_seeds: int
) -> Results:
    """Return the results of runs, perhaps of none, with a plan that has a row for predictions."""
    row = {name: {"predictions": {seed: "" for seed in range(1, num_seeds + 1)}}}
    if runs:
        results = collect_runs([Path(run) for run in runs])
        content = results.plan.source.content
        if name in content["rows"]:
            raise UsageError(f"name: {name} is the name of a run, too; give another")
        rows = {**content["rows"], **row}
        title = f"{name} and runs on {content['dataset']}"
        content = {**content, "rows": rows, "title": title}
        return replace(results, plan=make_plan(Source(RUN_FOLDERS, content)))

    dataset = requests.dataset
    summary = dataset.split.summary if requests.part == "test" else {}
    title = f"{name} on {dataset.dataset_name}, {len(requests):,} {requests.part} requests"
    content = {"dataset": str(dataset.dataset_name), "title": title, "rows": row}
    return Results(
        plan=make_plan(Source(RUN_FOLDERS, content)),
        runs=pd.DataFrame({"row": [], "seed": [], "status": []}),
        split=select_protocol(summary),
        warnings=tuple(list_warnings(summary, requests.candidates, "none") if summary else ()),
    )


def judge_rows(plan: Plan) -> Judged:
    """Judge the files of all rows of a study that have predictions."""
    files = {
        (name, seed): file
        for name, row in plan.rows.items()
        for seed, file in row.prediction_files.items()
    }
    if not files:
        return Judged(None, {})
    first_row, _ = next(iter(files))
    requests = make_requests(read_plan_data(plan.make_options(first_row)))
    return Judged(requests, {run: _judge_source(file, requests) for run, file in files.items()})


def add_judged(results: Results, judged: Judged) -> Results:
    """Return results with the runs, ranks and warnings of predictions.

    Raises:
        UsageError: if the lists are too short for a metric of the study, or other rows have other
            targets or rank other items.
    """
    if judged.requests is None:
        return results
    _require_lengths(results.plan, judged.judgements)
    candidates = dict(zip(results.done["row"], results.done.get("candidates", ()), strict=False))
    candidates |= {row: judged.requests.candidates for row, _ in judged.judgements}
    for table in results.plan.tables:
        require_same_candidates({row: candidates[row] for row in table.rows if row in candidates})

    frames = {} if results.ranks is None else dict(_list_ranks(results.ranks))
    lines, warnings = [], list(results.warnings)
    for (row, seed), judgement in judged.judgements.items():
        frames[row, seed] = judged.requests.make_rank_table(judgement.ranks)
        lines.append(
            {
                **{"row": row, "seed": seed, "status": DONE, "reason": "", "path": judgement.name},
                "candidates": judged.requests.candidates,
                **{"request_time": "none", "device": "", "commit": "", "digest": ""},
            }
        )
        warnings += judgement.warnings
    return replace(
        results,
        runs=concatenate([results.runs, pd.DataFrame(lines)]),
        ranks=RankTable.from_runs(frames),
        warnings=tuple(warnings),
    )


def _list_ranks(ranks: RankTable) -> Iterator[tuple[tuple[str, int], pd.DataFrame]]:
    """Yield row and seed of each run, and the table of its ranks."""
    for run, run_ranks in zip(ranks.runs.itertuples(), ranks.rank, strict=True):
        yield (str(run.row), int(run.seed)), ranks.targets.assign(rank=run_ranks)


def _require_lengths(plan: Plan, judgements: Mapping[tuple[str, int], Judgement]) -> None:
    """Refuse lists that are shorter than a metric of a table of their row."""
    for (row, _), judgement in judgements.items():
        for table in plan.tables:
            for metric in table.metrics if row in table.rows else ():
                if int(metric.partition("@")[2]) > judgement.length:
                    raise UsageError(
                        f"metrics: {metric}: {judgement.name} has {judgement.length} items a "
                        f"request; give longer lists, or metrics up to @{judgement.length}"
                    )
