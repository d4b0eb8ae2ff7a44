"""The results of a study so far, read from run folders: the only input of its tables and report.

:func:`collect_results` reads the runs of a study's folder, :func:`read_runs` any finished run
folders. They read config.yaml, result.json, metrics.jsonl and the ranks of the test targets, and
return :class:`Results`. :func:`compare_rows` computes the numbers of one table from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from recbole_pos.config.metrics import is_from_ranks
from recbole_pos.data.candidates import warn_of_repeats
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import REQUEST_TIME_WARNING, RunFolder, read_result
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.configs import (
    name_rows,
    require_same_candidates,
    require_same_data,
    require_twins,
)
from recbole_pos.study.plan import COLD, METRICS, Plan, TablePlan, list_fits, name_bins
from recbole_pos.study.statistics import DIFFERENCES, ONE_BIN, RankTable, compute_differences
from recbole_pos.study.study_folder import KNOWN_FROM, StudyFacts, StudyFolder, read_curve
from recbole_pos.yaml_files import read_yaml

RUN_FOLDERS = "run folders"  # name of the source of a plan that was made of finished runs
VALIDATION = "validation"  # column of the first metric in validation, at the best epoch
# Suffix of a metric that is computed over cold targets only, items without training interactions.
COLD_TARGETS = ", cold targets"
# Columns of a table of means.
_MEANS = ["row", "metric", "mean", "deviation", "seeds", "targets", "units"]
_VERSIONED = ("torch", "recbole", "recbole_pos")  # packages whose versions a table must not mix


class Run(NamedTuple):
    """A run of a study, as far as it has come.

    Attributes:
        facts: what is known of it by name: row (the configuration), seed, status, and the content
            of its ``result.json``, if it is finished.
        ranks: one line per test target with its rank; None if the run has saved no ranks.
        curve: epoch (from 0) -> validation value of the study's first metric.
        warnings: sentences on what inflates or spoils its metrics.
    """

    facts: dict[str, Any]
    ranks: pd.DataFrame | None = None
    curve: Mapping[int, float] = {}
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Results:
    """Runs of a study, finished or not. A row of the study is a configuration that it compares.

    Attributes:
        plan: the study.
        runs: one line per run: row, seed, status (``done``, ``failed``, or any other word while it
            is trained), and where known reason (of a failure), a column for each metric of the
            test, validation (the first metric, at the best epoch), seconds (of training),
            parameters (their number), epochs, candidates, device, commit, digest and path.
        ranks: ranks of the test targets in the finished runs; None if no run has saved them.
        curves: one line per epoch: row, seed, epoch, value (the first metric in validation).
        searches: one line per trial: row, trial, options (text), value (in validation), metric
            (of the value), chosen (bool).
        command: command that repeats the study.
        facts: its data, split, versions of packages, and warnings.
    """

    plan: Plan
    runs: pd.DataFrame
    ranks: RankTable | None = None
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    searches: pd.DataFrame = field(default_factory=pd.DataFrame)
    command: str = ""
    facts: StudyFacts = field(default_factory=StudyFacts)

    @property
    def done(self) -> pd.DataFrame:
        """The finished runs."""
        return self.runs[self.runs["status"] == DONE]

    @property
    def is_planned(self) -> bool:
        """Whether a plan asked for the runs, and each row for all seeds.

        Otherwise the plan was made afterwards, of finished runs; its source is then RUN_FOLDERS.
        """
        return self.plan.source.name != RUN_FOLDERS

    def is_ranked(self, row: str) -> bool:
        """Return whether a row can be compared by target: all its finished runs have ranks."""
        num_done = int((self.done["row"] == row).sum())
        return self.ranks is not None and 0 < num_done == len(self.ranks.list_seeds(row))

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The numbers of every table of the plan."""
        return [compare_rows(self, table) for table in self.plan.tables]


# --- the numbers of a table ---


@dataclass(frozen=True)
class Comparison:
    """The numbers of one table of the study, whose rows are configurations.

    Attributes:
        table: the table of the plan.
        means: one line per row and metric (and validation, if the table has it): row, metric, mean,
            deviation, seeds; and targets and units, if they are computed from ranks.
        differences: differences in the first metric, as ``statistics.compute_differences`` returns
            them; empty if no row can be compared.
        bins: kind (such as ``history``) -> means and differences of the first metric, in each bin
            of test targets.
    """

    table: TablePlan
    means: pd.DataFrame
    differences: pd.DataFrame
    bins: dict[str, tuple[pd.DataFrame, pd.DataFrame]]


def compare_rows(results: Results, table: TablePlan) -> Comparison:
    """Compute the numbers of one table: means of its metrics, differences, and both by bin.

    The rows of a table are configurations, and bins are groups of test targets. Differences and
    bins need the ranks of the test targets. They are empty if the runs of the reference have not
    saved ranks, or if the first metric is not computed from ranks.

    Args:
        results: results of the study.
        table: a table of its plan.
    """
    main, ranks = table.metrics[0], results.ranks
    ranked = [row for row in table.rows if results.is_ranked(row)]  # rows whose runs have ranks

    # Means of all metrics; a table may also show the validation metric, and cold targets.
    metrics = [*table.metrics, *([VALIDATION] if table.validation else [])]
    frames = [_average_metric(results, table, metric) for metric in metrics]
    means = concatenate([*frames, _average_cold_targets(results, table, ranked)])
    if ranks is None or table.reference not in ranked or not is_from_ranks(main):
        return Comparison(table, means, pd.DataFrame(columns=DIFFERENCES), {})

    # Differences of the first metric, over all targets and in each bin.
    others = [row for row in ranked if row != table.reference]
    are_coupled = results.plan.are_coupled  # whether two rows start from the same trained models
    differences = compute_differences(ranks, main, table.reference, others, are_coupled=are_coupled)
    bins = {}
    for kind, masks in assign_bins(ranks.targets, results.plan.bins).items():
        # ``masks``: name of a bin -> [targets] whether a target is in it
        bin_means = compute_means(ranks, main, masks)
        bin_means = bin_means[bin_means["row"].isin(ranked)].reset_index(drop=True)
        bin_differences = compute_differences(
            ranks, main, table.reference, others, masks, are_coupled
        )
        bins[kind] = bin_means, bin_differences
    return Comparison(table, means, differences, bins)


def assign_bins(targets: pd.DataFrame, bins: Mapping[Any, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Assign test targets to the bins of a study.

    With the edges [5, 15] of ``history``, histories of lengths [3, 5, 6, 20] are in the bins
    ``history up to 5`` (the first two), ``history 6 to 15`` and ``history over 15``.

    Args:
        targets: one line per target, as in a :class:`RankTable`.
        bins: ``history``, ``age`` or ``popularity`` -> ascending edges; a bin has the values above
            one edge and up to the next. Or ``cold`` -> True; cold items have a popularity of 0.

    Returns:
        Kind -> name of the bin -> [targets] bool, whether a target is in it.
    """
    masks: dict[str, dict[str, np.ndarray]] = {}
    for kind, edges in bins.items():
        values = targets["popularity" if kind == COLD else kind].to_numpy()
        if kind == COLD:
            masks[kind] = {"cold items": values == 0, "other items": values != 0}
        else:
            bin_index = np.searchsorted(edges, values)  # a value equal to an edge is below it
            masks[kind] = {name: bin_index == i for i, name in enumerate(name_bins(kind, edges))}
    return masks


def compute_means(
    table: RankTable, metric: str, bins: Mapping[str, np.ndarray | slice] = ONE_BIN
) -> pd.DataFrame:
    """Return the mean of a metric of each row (a configuration), over its seeds and all targets.

    Args:
        table, metric: ranks of the targets in all runs, and a name such as ``ndcg@10``.
        bins: name of a bin -> [targets] whether a target is in it; by default one bin of all.

    Returns:
        One line per row and bin: row, metric, bin, mean (over seeds and targets; nan in an empty
        bin), deviation (between seeds; nan for a single seed), seeds, targets, units (users).
    """
    lines = []
    for bin_name, mask in bins.items():
        totals, num_targets = table.sum_gains(metric, mask)
        units, targets = len(num_targets), int(num_targets.sum())
        for row, row_totals in totals.items():  # [seeds, units] sums of the targets' gains
            by_seed = pd.Series(row_totals.sum(1) / targets if units else np.nan)
            line = {"row": row, "metric": metric, "bin": bin_name, "mean": by_seed.mean()}
            line |= {"deviation": by_seed.std(), "seeds": len(row_totals)}
            lines.append({**line, "targets": targets, "units": units})
    return pd.DataFrame(lines)


def _average_metric(results: Results, table: TablePlan, metric: str) -> pd.DataFrame:
    """Return the mean of a metric over the seeds, one line for each row (configuration) of a table.

    If all runs of a row have saved ranks, the mean is computed from them. Otherwise, or if the
    metric does not follow from ranks, it is the mean of what the runs have reported.

    Args:
        results: results of the study.
        table: the table, whose rows are averaged.
        metric: such as ``ndcg@10``.

    Returns:
        Columns row, metric, mean, deviation, seeds, targets, units (users). The last two are empty
        for reported values, and rows without values are left out.
    """
    # _MEANS are the columns that are returned; this empty frame is all if no row has a value.
    frames = [pd.DataFrame(columns=_MEANS)]

    # Rows whose runs have ranks.
    ranked = [row for row in table.rows if is_from_ranks(metric) and results.is_ranked(row)]
    if results.ranks is not None and ranked:
        means = compute_means(results.ranks, metric).set_index("row")
        frames.append(means.loc[ranked].reset_index())

    # The other rows, if their runs have reported the metric.
    if metric in results.runs.columns:
        reported = results.done[results.done["row"].isin(set(table.rows) - set(ranked))]
        by_row = reported.dropna(subset=[metric]).groupby("row", sort=False)[metric]
        frames.append(by_row.agg(mean="mean", deviation="std", seeds="size").reset_index())
    return concatenate(frames).assign(metric=metric).reindex(columns=_MEANS)


def _average_cold_targets(
    results: Results, table: TablePlan, ranked: Sequence[str]
) -> pd.DataFrame:
    """Return the mean recall of cold targets, which are items without training interactions.

    Only models that read content (vectors or features of items) can find such items. The recall is
    computed from the ranks of the test targets, so it needs rows whose runs have saved them.

    Args:
        results: results of the study; the popularity of a test target is its number of training
            interactions, 0 for a cold one.
        table: the table of its plan; the cutoff of the recall is that of its first metric.
        ranked: names of its rows (configurations) whose runs have ranks.

    Returns:
        One line for each row in ``ranked``, in this order, with the columns of
        :func:`_average_metric`; the metric is called, for example, ``recall@10, cold targets``.
        Empty if no row of the table reads content, if no target is cold, or if the first metric of
        the table is not one that ranks give.
    """
    main, ranks = table.metrics[0], results.ranks
    options = [results.plan.make_options(row) for row in table.rows]
    reads_content = any(row.get("item_vectors") or row.get("item_features") for row in options)
    if ranks is None or not reads_content or not is_from_ranks(main):
        return pd.DataFrame(columns=_MEANS)

    _, _, cutoff = main.partition("@")
    metric = f"recall@{cutoff}"
    # compute_means takes bins of targets, and returns a line for each row of the study and bin.
    # Here cold targets are the only bin. Its line is left out if no target is in it.
    is_cold = ranks.targets["popularity"].to_numpy() == 0  # [targets]
    means = compute_means(ranks, metric, {"cold": is_cold}).set_index("row").loc[list(ranked)]
    means = means[means["targets"] > 0].reset_index()
    # COLD_TARGETS is the text ", cold targets"; reindex puts the columns into the order _MEANS.
    return means.assign(metric=metric + COLD_TARGETS).reindex(columns=_MEANS)


def concatenate(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return frames one below the other, as one frame with a new index.

    Empty frames are left out if others are not, since their columns have no types.
    """
    filled = [frame for frame in frames if not frame.empty]
    return pd.concat(filled or frames, ignore_index=True)


# --- reading the runs ---


def collect_results(plan: Plan, folder: StudyFolder, judged: Sequence[Run] = ()) -> Results:
    """Return the results of a study so far, from the run folders in its folder.

    Args:
        plan: the study, whose runs are looked for.
        folder: folder of the study.
        judged: predictions of other systems, as runs of rows (configurations) of the study.

    Raises:
        UsageError: naming a file that is damaged.
    """
    facts = folder.read_facts()
    digests = folder.find_current_digests(plan)  # name of a fit -> hash that names its run's folder
    runs = list(judged)
    trials = []  # one line per finished or failed trial and seed
    chosen: dict[str, str] = {}  # row -> text of the options that its search has chosen

    # A fit is a run that the plan asks for, of one row (configuration) with one seed.
    for fit in list_fits(plan):
        digest = digests.get(fit.name, "")
        run_folder, run_facts = folder.run(digest), folder.read_fit(digest)
        searched = format_pairs(run_facts.get("searched") or {})
        identity = {"row": fit.row, "seed": fit.seed}

        if fit.trial is not None:  # a trial of the row's search
            if run_facts and run_folder.config.is_file():  # else its process has not begun
                metric = str(run_folder.read_config()["valid_metric"]).lower()
                value = (run_facts.get("best_valid") or {}).get(metric)
                line = {"row": fit.row, "trial": fit.trial, "metric": metric, "value": value}
                trials.append({**line, "options": searched})
        elif run_facts:  # it has a folder
            chosen[fit.row] = searched
            identity["path"] = f"runs/{digest}"
            runs.append(_read_run(run_folder, {**run_facts, **identity}, plan.metrics[0]))
        elif fit.name in facts.unmade:  # it failed before it had a folder, for this reason
            failure = {"status": FAILED, "reason": facts.unmade[fit.name]}
            runs.append(Run({**identity, **failure}))

    searches = _average_trials(pd.DataFrame(trials), len(plan.trial_seeds), chosen)
    return make_results(plan, facts, runs, folder.make_command(plan), searches)


def _average_trials(
    trials: pd.DataFrame, num_seeds: int, chosen: Mapping[str, str]
) -> pd.DataFrame:
    """Return the table of all trials of the searches of a study, averaged over their seeds.

    Args:
        trials: one line per trial and seed: row (a configuration), trial (its number), metric,
            value (the best one in validation; None if the seed failed), options (text).
        num_seeds: number of seeds of a trial.
        chosen: row -> text of the options that its search has chosen.

    Returns:
        One line per trial with the same columns, and chosen (bool). The value is NaN until all
        seeds have one.
    """
    if trials.empty:
        return trials
    trials = trials.astype({"value": float})  # None becomes NaN
    by_trial = trials.groupby(["row", "trial", "metric", "options"])["value"]
    searches = by_trial.agg(value="mean", seeds="count").reset_index()
    searches["value"] = searches["value"].where(searches["seeds"] == num_seeds)
    return searches.assign(chosen=searches["options"] == searches["row"].map(chosen))


def format_pairs(options: Mapping[str, Any]) -> str:
    """Return options in one line, as ``learning_rate: 0.001, n_heads: 2``."""
    return ", ".join(f"{name}: {value}" for name, value in options.items())


def read_runs(paths: Sequence[Path]) -> tuple[dict[str, Any], StudyFacts, list[Run]]:
    """Read finished runs in any folders, and describe them as a study.

    Runs that differ in nothing but the seed become one row (configuration) of the study.

    Args:
        paths: folders of the runs, which must have the same data and split.

    Returns:
        The content of the study, as in its yaml file; facts about its data; and the runs.

    Raises:
        UsageError: naming a run that is not finished, or two that cannot be compared.
    """
    configs = [_read_finished_config(path) for path in paths]
    results = [read_result(RunFolder(path)) for path in paths]
    names = name_rows(configs)  # one for each run; runs that differ in the seed only share it
    first_config, first_result = configs[0], results[0]

    # Metrics can be compared only if all runs have the same data and split, if all rank the same
    # items (``candidates`` says which, in words), and if either all models know the time of the
    # request or none does.
    require_same_data(paths, configs)
    candidates = [result.candidates for result in results]
    require_same_candidates(dict(zip(map(str, paths), candidates, strict=True)))
    require_twins(dict(zip(names, configs, strict=True)))

    # The metrics of the tables: first that of early stopping, if it can be computed from ranks;
    # then the default ones (METRICS).
    metric = str(first_config.get("valid_metric")).lower()
    metrics = list(dict.fromkeys([metric, *METRICS] if is_from_ranks(metric) else METRICS))

    # The runs, each with its row and seed. Two runs of one row and seed are refused, since ranks
    # are kept by row and seed.
    runs: dict[tuple[str, int], Run] = {}
    rows: dict[str, dict[str, Any]] = {}
    for path, config, name, result in zip(paths, configs, names, results, strict=True):
        seed = config["seed"]
        if (name, seed) in runs:
            raise UsageError(f"compare: {path} is a second run of {name} with one seed")
        identity = {"row": name, "seed": seed, "status": DONE, "path": str(path)}
        runs[name, seed] = _read_run(RunFolder(path), {**asdict(result), **identity}, metrics[0])
        rows[name] = {key: config[key] for key in ("model", "item_vectors") if config.get(key)}

    dataset, seeds = first_config["dataset"], sorted({config["seed"] for config in configs})
    title = f"{len(paths)} runs on {dataset}"
    study = {"dataset": dataset, "title": title, "rows": rows, "metrics": metrics, "seeds": seeds}
    # Facts of the first run, since all have the same data. The warning that a model knows the time
    # of the request is left out, since make_results adds it again with the names of the rows.
    facts = StudyFacts(
        versions=first_result.versions,
        warnings=[text for text in first_result.warnings if text != REQUEST_TIME_WARNING],
        split=first_result.split,
    )
    return study, facts, list(runs.values())


def _read_run(folder: RunFolder, facts: dict[str, Any], metric: str) -> Run:
    """Return a run with its ranks and its learning curve, which are read from its folder.

    Args:
        folder: folder of the run.
        facts: what is known of the run by name.
        metric: metric of the curve.
    """
    has_ranks = facts["status"] == DONE and folder.ranks.is_file()
    # A retest only tests a model of another run. Its epochs are a copy, so leave them out.
    curve = {} if facts.get("stage") == "retest" else read_curve(folder, metric)
    return Run(facts, pd.read_parquet(folder.ranks) if has_ranks else None, curve)


def _read_finished_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a finished run.

    Args:
        path: folder of the run.

    Raises:
        UsageError: if the folder is not that of a run, or has no results or ranks yet.
    """
    run = RunFolder(path).require()
    for file in (run.result, run.ranks):  # both are written at the end of a run
        if not file.is_file():
            raise UsageError(
                f"compare: {path} has no {file.name}; `{run.resume_command}` finishes "
                "the run and writes it"
            )
    return read_yaml(run.config)


def make_results(
    plan: Plan,
    facts: StudyFacts,
    runs: Sequence[Run],
    command: str = "",
    searches: pd.DataFrame | None = None,
) -> Results:
    """Return the results of a study from its runs, sorted by row (configuration) and seed.

    Args:
        plan: the study; its rows give the order.
        facts: facts about its data, split and versions.
        runs: the runs, in any order.
        command: command that repeats the study.
        searches: one line per trial of its searches; None without a search.

    Raises:
        UsageError: if the runs have ranks of different test targets, or if the runs of one table
            have ranked different items.
    """
    metric, row_order = plan.metrics[0], list(plan.rows)
    runs = sorted(runs, key=lambda run: (row_order.index(run.facts["row"]), run.facts["seed"]))
    ranks = {}  # (row, seed) -> ranks of the test targets
    curves = []  # one line per epoch
    for run in runs:
        row, seed = run.facts["row"], run.facts["seed"]
        if run.ranks is not None:
            ranks[row, seed] = run.ranks
        for epoch, value in run.curve.items():
            curves.append({"row": row, "seed": seed, "epoch": epoch, "value": value})

    # Rows of one table must have ranked the same items, which ``candidates`` says in words.
    candidates = {run.facts["row"]: str(run.facts.get("candidates", "")) for run in runs}
    for plan_table in plan.tables:
        known = {row: candidates[row] for row in plan_table.rows if candidates.get(row)}
        require_same_candidates(known)

    # The table of runs, and one with the version of each package in each run.
    empty: dict[str, Any] = {"row": [], "seed": [], "status": []}
    table = pd.DataFrame([_describe_run(run.facts, metric) for run in runs] or empty)
    versions = pd.DataFrame([run.facts.get("versions") or {} for run in runs])
    warnings = [*facts.warnings, *_warn_of_versions(table, versions)]
    if runs:
        warnings += _warn_of_better_conditions(table, facts.split)
    warnings += [text for run in runs for text in run.warnings]
    known_versions = {name: ", ".join(versions[name].dropna().unique()) for name in versions}
    return Results(
        plan=plan,
        runs=table,
        ranks=RankTable.from_runs(ranks) if ranks else None,
        curves=pd.DataFrame(curves),
        searches=pd.DataFrame() if searches is None else searches,
        command=command,
        facts=replace(
            facts,
            warnings=list(dict.fromkeys(warnings)),  # each once
            versions=known_versions or facts.versions,
        ),
    )


def _describe_run(facts: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the line of a run in the table of runs, see :class:`Results`.

    Args:
        facts: facts of the run by name, as in its ``result.json``, with its row (the
            configuration), seed, status and path. An unfinished or old run lacks some.
        metric: the study's first metric, whose validation value is in the line.
    """
    device_text = ""
    if device := facts.get("device"):  # "cpu (AMD EPYC, AVX512), 1 thread, float32"
        processor = f" ({device['processor']})" if device.get("processor") else ""
        threads = f"{device['threads']} thread{'s' * (device['threads'] != 1)}"
        device_text = f"{device['name']}{processor}, {threads}, {device['precision']}"

    costs = {
        VALIDATION: (facts.get("best_valid") or {}).get(metric),
        "seconds": (facts.get("seconds") or {}).get("training"),
        "epochs": facts.get("epochs"),
    }
    if facts.get("stage") == "retest":  # another run has trained the model
        costs = dict.fromkeys(costs)
    # KNOWN_FROM is the name of the packed study that the run was taken from.
    texts = ("candidates", "commit", "digest", KNOWN_FROM, "path")
    return {
        **{key: facts.get(key, "") for key in ("row", "seed", "status", "reason")},
        **(facts.get("test") or {}),
        **costs,
        **{"parameters": facts.get("parameters"), "device": device_text},
        "request_time": facts.get("request_time", "none"),
        **{key: facts.get(key, "") for key in texts},
    }


def _warn_of_better_conditions(runs: pd.DataFrame, split: dict[str, Any]) -> list[str]:
    """Return warnings about two conditions that make metrics of some runs better than others'.

    Some models know the time of the interaction that they predict. And some runs do not rank items
    that the user has had before, so that they cannot find such targets.

    Args:
        runs: one line per run; ``request_time`` is ``target`` if its model knows that time, and
            ``candidates`` says which items it ranks.
        split: facts of the split by name, with the numbers of repeated targets; empty if unknown.
    """
    warnings = []
    rows = list(runs.loc[runs["request_time"] == "target", "row"].unique())
    if rows:
        warnings.append(f"{', '.join(rows)}: {REQUEST_TIME_WARNING}")
    if split:
        for candidates in sorted(set(runs["candidates"]) - {""}):
            # A warning if these leave out seen items, and over 1% of the targets are such items.
            warnings += warn_of_repeats(split, candidates)
    return warnings


def _warn_of_versions(runs: pd.DataFrame, versions: pd.DataFrame) -> list[str]:
    """Return warnings about packages of which the runs of a study were made by several versions.

    Args:
        runs: one line per run, with its row (configuration).
        versions: the version of each package (a column) in the same runs; NaN if unknown.
    """
    warnings = []
    for package in _VERSIONED:  # torch, RecBole and this package
        if package in versions and versions[package].nunique() > 1:
            rows = runs["row"].groupby(versions[package]).unique()  # version -> rows with it
            parts = [f"{version} ({', '.join(names)})" for version, names in rows.items()]
            warnings.append(
                f"runs were made with different versions of {package}: {', '.join(parts)}; "
                "differences between them may come from that"
            )
    return warnings
