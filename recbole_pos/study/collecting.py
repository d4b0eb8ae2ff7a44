"""Collect the results of a study from run folders.

:func:`collect_results` reads the runs of a study's folder, :func:`read_runs` any finished run
folders. They read config.yaml, result.json, metrics.jsonl and the ranks of the test targets.
:func:`make_results` makes :class:`.results.Results` of the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from recbole_pos.config.metrics import is_from_ranks
from recbole_pos.data.protocol import warn_of_repeats
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import REQUEST_TIME_WARNING, RunFolder, read_result
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.configs import (
    name_rows,
    require_same_candidates,
    require_twins,
)
from recbole_pos.study.plan import METRICS, Fit, Plan, list_fits
from recbole_pos.study.rendered_table import format_options
from recbole_pos.study.results import VALIDATION, Results
from recbole_pos.study.statistics import RankTable
from recbole_pos.study.study_folder import KNOWN_FROM, StudyFacts, StudyFolder, read_curve
from recbole_pos.yaml_files import read_yaml

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


def collect_results(plan: Plan, folder: StudyFolder, judged: Sequence[Run] = ()) -> Results:
    """Return the results of a study so far, from the run folders in its folder.

    Args:
        plan: the study, whose runs are looked for.
        folder: folder of the study.
        judged: predictions of other systems, as runs of rows (configurations) of the study.

    Raises:
        UsageError: naming a file that is damaged.
    """
    # A fit is a run that the plan asks for, of one row (configuration) with one seed. It is a trial
    # of the row's search, or else a run whose results the tables show.
    study_facts = folder.read_facts()
    digests = folder.find_current_digests(plan)  # name of a fit -> name of its run's folder
    failures = study_facts.unmade  # name of a fit that failed before it had a folder -> why
    runs, trials = list(judged), []
    for fit in list_fits(plan):
        digest = digests.get(fit.name, "")
        run_folder = folder.run(digest)
        run_facts = folder.read_fit(digest)  # empty if the run has not begun
        identity = {"row": fit.row, "seed": fit.seed}
        if fit.trial is not None:
            # The process of a run, once it has started, writes the configuration first of all.
            if run_facts and run_folder.config.is_file():
                trials.append(_describe_trial(fit, run_folder, run_facts))
        elif run_facts:
            run_facts |= {**identity, "path": f"runs/{digest}"}
            runs.append(_read_run(run_folder, run_facts, plan.metrics[0]))
        elif fit.name in failures:
            runs.append(Run({**identity, "status": FAILED, "reason": failures[fit.name]}))

    # Row -> the options that its search has chosen, as text. The runs of the row were trained with
    # them, and have them among their facts as ``searched``.
    chosen = {}
    for run in runs:
        if run.facts.get("searched"):
            chosen[run.facts["row"]] = format_options(run.facts["searched"])
    searches = _average_trials(pd.DataFrame(trials), len(plan.trial_seeds), chosen)
    return make_results(plan, study_facts, runs, folder.make_command(plan), searches)


def _describe_trial(fit: Fit, run: RunFolder, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the table of trials shows of one run of a trial.

    A search tries several combinations of options, each in a trial, with one or more seeds.

    Args:
        fit: the run of the trial with one seed, as the plan asks for it.
        run: folder of the run.
        facts: results of the run by name, with ``searched``, the options that the trial tries.

    Returns:
        The line: row (the configuration), trial, metric, value (the best one in validation; None if
        it failed) and options.
    """
    metric = str(run.read_config()["valid_metric"]).lower()
    value = (facts.get("best_valid") or {}).get(metric)
    line = {"row": fit.row, "trial": fit.trial, "metric": metric, "value": value}
    return {**line, "options": format_options(facts.get("searched") or {})}


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
    # Lines that differ only in the value are seeds of one trial. pandas leaves out values that are
    # NaN, in ``mean`` as in ``count``, so ``seeds`` is the number of seeds that have a value.
    trials = trials.astype({"value": float})  # None becomes NaN
    by_trial = trials.groupby(["row", "trial", "metric", "options"])["value"]
    searches = by_trial.agg(value="mean", seeds="count").reset_index()
    searches["value"] = searches["value"].where(searches["seeds"] == num_seeds)
    return searches.assign(chosen=searches["options"] == searches["row"].map(chosen))


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
    names = name_rows(configs)  # of each run the name of its row

    # Refuse models that know the time of the interaction that they predict beside models that do
    # not. The same model with and without that knowledge may be compared.
    require_twins(dict(zip(names, configs, strict=True)))

    # The metrics of the tables: first that of early stopping, if it can be computed from ranks;
    # then the default ones (METRICS).
    first_config = configs[0]
    metric = str(first_config.get("valid_metric")).lower()
    metrics = list(dict.fromkeys([metric, *METRICS] if is_from_ranks(metric) else METRICS))

    # The study, as its yaml file would have it.
    rows = {}
    for name, config in zip(names, configs, strict=True):
        rows[name] = {key: config[key] for key in ("model", "item_vectors") if config.get(key)}
    dataset, seeds = first_config["dataset"], sorted({config["seed"] for config in configs})
    title = f"{len(paths)} runs on {dataset}"
    study = {"dataset": dataset, "title": title, "rows": rows, "metrics": metrics, "seeds": seeds}

    # Facts of the first run, since all have the same data. The warning that a model knows the time
    # of the request is left out, since make_results adds it again with the names of the rows.
    result = read_result(RunFolder(paths[0]))
    warnings = [text for text in result.warnings if text != REQUEST_TIME_WARNING]
    facts = StudyFacts(versions=result.versions, warnings=warnings, split=result.split)
    return study, facts, _read_named_runs(paths, names, configs, metrics[0])


def _read_named_runs(
    paths: Sequence[Path], names: Sequence[str], configs: Sequence[Mapping[str, Any]], metric: str
) -> list[Run]:
    """Return finished runs with their results, ranks, learning curves, and the names of their rows.

    Args:
        paths, names, configs: of each run its folder, the name of its row (configuration of the
            study), and its options.
        metric: metric of the learning curves.

    Raises:
        UsageError: naming a second run of one row and seed, for which there is no place in tables.
    """
    runs: dict[tuple[str, int], Run] = {}
    for path, name, config in zip(paths, names, configs, strict=True):
        seed, folder = config["seed"], RunFolder(path)
        if (name, seed) in runs:
            raise UsageError(f"compare: {path} is a second run of {name} with one seed")
        identity = {"row": name, "seed": seed, "status": DONE, "path": str(path)}
        runs[name, seed] = _read_run(folder, {**asdict(read_result(folder)), **identity}, metric)
    return list(runs.values())


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
    row_order = list(plan.rows)
    runs = sorted(runs, key=lambda run: (row_order.index(run.facts["row"]), run.facts["seed"]))
    ranks = {}  # (row, seed) -> ranks of the test targets
    curves = []  # one line per epoch
    candidates = {}  # row -> which items its finished runs have ranked, such as "all items"
    for run in runs:  # an unfinished one may have no ranks and no candidates yet
        row, seed = run.facts["row"], run.facts["seed"]
        if run.facts.get("candidates"):
            candidates[row] = run.facts["candidates"]
        if run.ranks is not None:
            ranks[row, seed] = run.ranks
        for epoch, value in run.curve.items():
            curves.append({"row": row, "seed": seed, "epoch": epoch, "value": value})
    require_same_candidates(plan, candidates)

    # Two frames with a line for each run: its facts, and its version of each package.
    lines = [_describe_run(run.facts, plan.metrics[0]) for run in runs]
    frame = pd.DataFrame(lines or {"row": [], "seed": [], "status": []})
    versions = pd.DataFrame([run.facts.get("versions") or {} for run in runs])

    # Package -> its version, or "2.1, 2.2" if runs had different ones. If no run says any, those in
    # the facts are taken.
    run_versions = {name: ", ".join(versions[name].dropna().unique()) for name in versions}
    warnings = _collect_warnings(facts, runs, frame, versions)
    return Results(
        plan=plan,
        runs=frame,
        ranks=RankTable.from_runs(ranks) if ranks else None,
        curves=pd.DataFrame(curves),
        searches=pd.DataFrame() if searches is None else searches,
        command=command,
        facts=replace(facts, warnings=warnings, versions=run_versions or facts.versions),
    )


def _collect_warnings(
    facts: StudyFacts, runs: Sequence[Run], frame: pd.DataFrame, versions: pd.DataFrame
) -> list[str]:
    """Return all warnings about a study, each once.

    They are on its data, on different versions of a package, on runs with better conditions than
    others (such as a model that knows the time of the target), and on single runs.

    Args:
        facts: facts about the data, with the warnings on them.
        runs: the runs, with the warnings on each.
        frame: one line per run, with its row (configuration) and its conditions.
        versions: one line per run, a column for each package.
    """
    warnings = [*facts.warnings, *_warn_of_versions(frame, versions)]
    if runs:
        warnings += _warn_of_better_conditions(frame, facts.split)
    warnings += [text for run in runs for text in run.warnings]
    return list(dict.fromkeys(warnings))  # each once, in this order


def _describe_run(facts: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the line of a run in the table of runs, see :class:`Results`.

    It is, for example, ``{"row": "SASRec", "seed": 2020, "status": "done", "reason": "", "ndcg@10":
    0.1, "validation": 0.2, "seconds": 61.5, "epochs": 20, "parameters": 90240, ...}``.

    Args:
        facts: facts of the run by name, as in its ``result.json``, with its row (the
            configuration), seed, status and path. An unfinished or old run lacks some.
        metric: the study's first metric, whose validation value is in the line.
    """
    # A retest has trained nothing: its facts of training are those of the run that it tests again.
    training = {} if facts.get("stage") == "retest" else facts
    # KNOWN_FROM is the name of the packed study that the run was taken from.
    texts = ("candidates", "commit", "digest", KNOWN_FROM, "path")
    return {
        **{key: facts.get(key, "") for key in ("row", "seed", "status", "reason")},
        **(facts.get("test") or {}),  # a column for each test metric
        VALIDATION: (training.get("best_valid") or {}).get(metric),
        "seconds": (training.get("seconds") or {}).get("training"),
        "epochs": training.get("epochs"),
        "parameters": facts.get("parameters"),
        "device": _describe_device(facts.get("device") or {}),
        "request_time": facts.get("request_time", "none"),
        **{key: facts.get(key, "") for key in texts},
    }


def _describe_device(device: Mapping[str, Any]) -> str:
    """Return a device as text, such as ``cpu (AMD EPYC, AVX512), 1 thread, float32``."""
    if not device:  # an old run, or one that is not finished
        return ""
    processor = f" ({device['processor']})" if device.get("processor") else ""
    threads = f"{device['threads']} thread{'s' * (device['threads'] != 1)}"
    return f"{device['name']}{processor}, {threads}, {device['precision']}"


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
            # Both frames have a line for each run, so that the rows can be grouped by version.
            rows = runs["row"].groupby(versions[package]).unique()  # version -> rows with it
            parts = [f"{version} ({', '.join(names)})" for version, names in rows.items()]
            warnings.append(
                f"runs were made with different versions of {package}: {', '.join(parts)}; "
                "differences between them may come from that"
            )
    return warnings
